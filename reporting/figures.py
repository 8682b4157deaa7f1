"""The report's figures: score against tokens (Fig. 3), process rewards (Fig. 4), calibration, learning. By matplotlib.

Colours are Okabe and Ito's, which colour-blind readers can distinguish on light and dark. In the HTML, text and axes
take the page's own colour (`currentColor`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from qlass.stats import bootstrap
from reporting.results import Condition, Group

INK = "#2b2d31"  # stands for the page's text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00"}
COLOURS |= {"greedy": GREY, "sample": GREY}
ORACLE = "#cc79a7"  # step scorers that look at the true reward
TARGETS = {"q": "#0072b2", "avg": "#e69f00", "reward": "#cc79a7", None: GREY}
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
MARKERS = "osD^vPX"
AGENTS = ("cloned", "eto", "eto-siblings", "grpo", "tree_grpo", "rft")  # keep their looks from figure to figure
STYLE = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qlass",  # the same figure, the same bytes
}


def save(figure: Figure, path: Path) -> str:
    """Write the figure to `path` as PNG; return it as an SVG element for an HTML page."""
    svg = path.with_suffix(".svg")
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
        figure.savefig(svg, bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = svg.read_text(encoding="utf-8")
    svg.unlink()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'\s(?:xmlns(?::\w+)?|width|height)="[^"]*"', "", text, count=4).replace(INK, "currentColor")


def family(condition: Condition) -> str:
    """The line that a method is a point of: QLASS with one trajectory over M, everything else over N."""
    if condition.method == "qlass" and (condition.N or 1) > 1:
        return f"{condition.name}, M={condition.M or 1}, over N"
    if condition.method in ("best_of_n", "qlass"):
        return condition.name + (", over M" if condition.method == "qlass" else ", over N")
    return condition.name


def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against tokens a task, by total cost and by the paper's count."""
    lines = defaultdict(list)
    for group in groups:
        if group.mean("total") > 0 and group.condition.method not in ("random", "expert"):
            lines[family(group.condition)].append(group)
    # A label that no line has is a variant of one method: it is in the tables.
    drawn = {""} | {line[0].condition.label for line in lines.values() if len(line) > 1}
    lines = {name: line for name, line in lines.items() if line[0].condition.label in drawn} or lines
    if not lines:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        counts = ("total", "all tokens per task"), ("generated", "generated tokens per task (the paper's count)")
        for axes, (cost, label) in zip((left, right), counts, strict=True):
            for i, (name, line) in enumerate(lines.items()):
                draw_line(axes, name, sorted(line, key=lambda g: g.mean(cost)), cost, MARKERS[i % len(MARKERS)])
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel(label)
            axes.grid(alpha=0.25)
        left.set_ylabel("mean reward, 95 % interval")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure


def draw_line(axes: Axes, name: str, line: Sequence[Group], cost: str, marker: str) -> None:
    x = [group.mean(cost) for group in line]
    y = np.array([group.reward.mean for group in line])
    bounds = np.array([(group.reward.low, group.reward.high) for group in line]).T
    condition = line[0].condition
    colour = COLOURS.get(condition.method, ORACLE)
    look = {"linestyle": "--", "markerfacecolor": "none"} if condition.oracle else {}
    errors = np.nan_to_num(np.abs(bounds - y))
    axes.errorbar(x, y, errors, label=name, color=colour, marker=marker, capsize=2, elinewidth=1, **look)
    for group, a, b in zip(line, x, y, strict=True):
        if said := group.condition.budget:
            axes.annotate(said, (a, b), (6, -11), textcoords="offset points", fontsize=8, color=colour)


def targets(groups: Sequence[Group]) -> Figure | None:
    """Fig. 4: QNets that learnt different process rewards, searched with at the same M and N, and self-trained with;
    beside them SFT greedy and what was self-trained without a QNet. None where no label names another target."""
    greedy = [g for g in groups if g.condition.method == "greedy"]
    guided = [g for g in groups if g.condition.target and g.condition.method != "greedy"]
    other = {budget(g.condition) for g in guided if g.condition.label}
    halves = {
        "search guided by QNet": [g for g in guided if budget(g.condition) in other],
        "greedy after self-training": [g for g in greedy if g.condition.self_trained],
    }
    greedy = [g for g in greedy if not g.condition.label]
    order = [None, *TARGETS].index

    def place(group: Group) -> tuple:
        target = group.condition.target
        return group.condition.otherwise if target else "", order(target)

    halves = {title: greedy + sorted(half, key=place) for title, half in halves.items() if half}
    if not halves:
        return None
    heights = [len(half) + 1 for half in halves.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 0.6 + 0.42 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(halves), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, half) in zip(panels, halves.items(), strict=True):
            for row, group in enumerate(half):
                mean, look = group.reward.mean, {"color": TARGETS[group.condition.target], "ecolor": INK}
                low, high = np.nan_to_num([group.reward.low, group.reward.high], nan=mean)
                axes.barh(row, mean, xerr=[[mean - low], [high - mean]], capsize=2, height=0.7, **look)
                axes.annotate(f"{mean:.3f}", (high, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
            axes.set_yticks(range(len(half)), [bar_name(g.condition) for g in half])
            axes.invert_yaxis()
            axes.set_title(title, loc="left", fontsize=10)
        panels[-1].set_xlabel("mean reward, 95 % interval")
        return figure


def bar_name(condition: Condition) -> str:
    """What was learnt, at which M and N; the title of the bars says the rest."""
    names = {"q": "Q-value", "avg": "averaged reward", "reward": "plain reward"}
    name = names.get(condition.target or "") or condition.otherwise or condition.name
    return ", ".join(filter(None, (name, condition.otherwise if condition.target else "", condition.budget)))


def budget(condition: Condition) -> tuple:
    return condition.method, condition.M, condition.N, condition.select


def calibration(groups: Sequence[Group], bins: int = 10) -> Figure | None:
    """QNet's value of the actions taken against the final reward of their episodes, in bins of equal counts.

    One series for each process reward that a label names, else for each label (a QNet of its own). The interval of a
    bin is drawn over tasks, since the steps of an episode share its reward.
    """
    guided = [g for g in groups if g.condition.method == "qlass" and not g.condition.oracle]  # not picked by the reward
    series = defaultdict(list)
    for group in [group for group in guided if group.condition.target] or guided:
        steps = [(q, result.reward, result.task) for result in group.results.values() for q in result.q]
        series[group.condition.label].extend(steps)
    series = {label: sorted(steps) for label, steps in series.items() if len(steps) >= 2 * bins}
    if not series:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5, 4.6), layout="constrained")
        axes = figure.subplots()
        for i, (label, steps) in enumerate(series.items()):
            points = [bin_point([steps[k] for k in part]) for part in np.array_split(np.arange(len(steps)), bins)]
            x, y, low, high = np.array(points).T
            errors = np.nan_to_num([y - low, high - y])
            look = {"color": list(TARGETS.values())[i % len(TARGETS)], "marker": MARKERS[i % len(MARKERS)]}
            axes.errorbar(x, y, errors, label=label or "QLASS", capsize=2, **look)
        axes.axline((0, 0), slope=1, color=INK, alpha=0.4, linestyle=":")
        axes.set_xlabel("q that QNet predicts for the action taken")
        axes.set_ylabel("final reward of the episode, 95 % interval")
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend()
        return figure


def learning(curves: dict[str, list[list[dict]]]) -> Figure | None:
    """Validation reward against what training has spent: of each learner its runs' lines of updates.jsonl."""
    if not curves:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, cost in zip(panels, ("tokens", "env_steps"), strict=True):
            for name, runs in curves.items():
                look = looks(curves)[name] | {"linewidth": 1, "markersize": 4}
                for k, run in enumerate(runs):
                    tested, look["label"] = [line for line in run if line["val"] is not None], None if k else name
                    axes.plot([x[cost] for x in tested], [x["val"] for x in tested], **look)
            axes.set_xlabel({"tokens": "training tokens, each unique one once", "env_steps": "environment steps"}[cost])
            axes.xaxis.set_major_locator(MaxNLocator(5))  # more six-digit numbers overlap
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("validation reward, greedy")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


def looks(agents: Iterable[str]) -> dict[str, dict]:
    """A colour and a marker for each agent; those that are not known by name take what is free."""
    names = list(dict.fromkeys(agents))
    free = [i for i, agent in enumerate(AGENTS) if agent not in names] + [*range(len(AGENTS), len(AGENTS) + len(names))]
    places = {name: AGENTS.index(name) if name in AGENTS else free.pop(0) for name in names}
    return {a: {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)]} for a, i in places.items()}


def bin_point(steps: Sequence[tuple[float, float, str]]) -> tuple[float, float, float, float]:
    """Mean q, mean reward and the reward's interval of (q, reward, task) steps."""
    tasks = defaultdict(list)
    for _, reward, task in steps:
        tasks[task].append(reward)
    y = bootstrap([sum(rewards) / len(rewards) for rewards in tasks.values()])
    return float(np.mean([q for q, _, _ in steps])), y.mean, y.low, y.high
