"""The report's figures, by matplotlib: score against tokens (Fig. 3), process rewards (Fig. 4), calibration.

Colours are Okabe and Ito's, which colour-blind readers can distinguish on light and dark. In the HTML, text and axes
take the page's own colour (`currentColor`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from reporting.results import Condition, Group
from reporting.stats import bootstrap

INK = "#2b2d31"  # stands for the page's text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
ORACLE = "#cc79a7"  # step scorers that look at the true reward
TARGETS = {"q": "#0072b2", "avg": "#e69f00", "reward": "#cc79a7", None: GREY}
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
MARKERS = "osD^vPX"
STYLE = {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    "axes.axisbelow": True,
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


def log_axis(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    subs = (1, 2, 3, 5) if right < 10 * left else (1, 2, 5) if right < 300 * left else (1,)  # or numbers overlap
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against all tokens a task and, beside it, against environment steps.

    QLASS is a line over M, best-of-N one over N. Of what has a label, lines alone are drawn; the tables have the rest.
    """
    lines = defaultdict(list)
    for group in groups:
        condition = group.condition
        name = condition.name + {"qlass": ", over M", "best_of_n": ", over N"}.get(condition.method, "")
        if condition.method == "qlass" and (condition.N or 1) > 1:
            name = f"{condition.name}, M={condition.M or 1}, over N"
        if group.mean("total") > 0 and condition.method not in ("random", "expert"):
            lines[name].append(group)
    plain = {name: line for name, line in lines.items() if not line[0].condition.label}
    curves = {name: line for name, line in lines.items() if len(line) > 1 and not line[0].condition.oracle}
    lines = plain | curves or lines
    if not lines:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 3.8 + 0.1 * len(lines)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, cost in zip(panels, ("total", "env_steps"), strict=True):
            for i, (name, line) in enumerate(lines.items()):
                draw_line(axes, name, sorted(line, key=lambda g: g.mean(cost)), cost, MARKERS[i % len(MARKERS)])
            log_axis(axes, {"total": "tokens a task", "env_steps": "environment steps a task"}[cost])
        panels[0].set_ylabel("mean reward, 95 % interval")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure


def draw_line(axes: Axes, name: str, line: Sequence[Group], cost: str, marker: str) -> None:
    x, y = [group.mean(cost) for group in line], [group.reward.mean for group in line]
    errors = np.array([errors_of(group) for group in line]).T
    condition = line[0].condition
    look = {"linestyle": "--", "markerfacecolor": "none"} if condition.oracle else {}
    look |= {"color": COLOURS.get(condition.method, ORACLE), "marker": marker, "capsize": 2, "elinewidth": 1}
    axes.errorbar(x, y, errors, label=name, **look)
    for group, a, b in zip(line, x, y, strict=True):
        offset = {"xytext": (6, -11), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(group.condition.budget, (a, b), color=look["color"], **offset)


def errors_of(group: Group) -> tuple[float, float]:
    """How far the interval reaches below and above the mean; 0 where there is none."""
    reward = group.reward
    below, above = np.nan_to_num([reward.mean - reward.low, reward.high - reward.mean])
    return max(below, 0.0), max(above, 0.0)


def targets(groups: Sequence[Group]) -> Figure | None:
    """Fig. 4: QNets that learnt different process rewards, searched with at the same M and N, and self-trained with;
    beside them SFT greedy and what was self-trained without a QNet. None where no label names another target."""
    greedy = [g for g in groups if g.condition.method == "greedy"]
    guided = [g for g in groups if g.condition.method == "qlass" and g.condition.target]
    budgets = {g.condition.budget for g in guided if g.condition.label}
    panels = {
        "search guided by QNet": [g for g in guided if g.condition.budget in budgets],
        "greedy after self-training": [g for g in greedy if g.condition.label.startswith("self-trained")],
    }
    panels = {title: sorted(half, key=lambda g: bar_order(g.condition)) for title, half in panels.items() if half}
    if not panels:
        return None
    panels = {title: [g for g in greedy if not g.condition.label] + half for title, half in panels.items()}
    heights = [len(half) + 1 for half in panels.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 0.6 + 0.42 * sum(heights)), layout="constrained")
        subplots = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, half) in zip(subplots, panels.items(), strict=True):
            for row, group in enumerate(half):
                mean, (below, above) = group.reward.mean, errors_of(group)
                look = {"color": TARGETS[group.condition.target], "ecolor": INK, "capsize": 2, "height": 0.7}
                axes.barh(row, mean, xerr=[[below], [above]], **look)
                place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
                axes.annotate(f"{mean:.3f}", (mean + above, row), **place)
            axes.set_yticks(range(len(half)), [bar_name(g.condition) for g in half])
            axes.invert_yaxis()
            axes.set_title(title, loc="left", fontsize=10)
        subplots[-1].set_xlabel("mean reward, 95 % interval")
        return figure


def bar_order(condition: Condition) -> tuple[str, int]:
    order = [None, *TARGETS].index(condition.target)
    return condition.otherwise if condition.target else "", order


def bar_name(condition: Condition) -> str:
    """What was learnt, at which M and N; the title of the bars says the rest."""
    names = {"q": "Q-value", "avg": "averaged reward", "reward": "plain reward"}
    name = names.get(condition.target or "") or condition.otherwise or condition.name
    return ", ".join(filter(None, (name, condition.otherwise if condition.target else "", condition.budget)))


def calibration(groups: Sequence[Group], bins: int = 10) -> Figure | None:
    """QNet's value of the actions taken against the final reward of their episodes, in bins of equal counts.

    One series for each process reward that a label names, else for each label (a QNet of its own). The interval of a
    bin is drawn over tasks, since the steps of an episode share its reward.
    """
    guided = [g for g in groups if g.condition.method == "qlass" and not g.condition.oracle]  # not picked by the reward
    series = defaultdict(list)
    for group in [g for g in guided if g.condition.target] or guided:
        series[group.condition.label or "QLASS"].append(scored_steps(group))
    steps = {name: pd.concat(frames).sort_values(["q", "reward", "task"]) for name, frames in series.items()}
    steps = {name: frame for name, frame in steps.items() if len(frame) >= 2 * bins}
    if not steps:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5, 4.6), layout="constrained")
        axes = figure.subplots()
        for i, (name, frame) in enumerate(steps.items()):
            parts = [frame.iloc[part] for part in np.array_split(np.arange(len(frame)), bins)]
            rewards = [bootstrap(part.groupby("task", dropna=False)["reward"].mean()) for part in parts]
            y = np.array([estimate.mean for estimate in rewards])
            errors = np.nan_to_num([[e.mean - e.low for e in rewards], [e.high - e.mean for e in rewards]])
            look = {"color": list(TARGETS.values())[i % len(TARGETS)], "marker": MARKERS[i % len(MARKERS)]}
            axes.errorbar([part["q"].mean() for part in parts], y, errors, label=name, capsize=2, **look)
        axes.axline((0, 0), slope=1, color=INK, alpha=0.4, linestyle=":")
        axes.set_xlabel("q that QNet predicts for the action taken")
        axes.set_ylabel("final reward of the episode, 95 % interval")
        axes.grid(alpha=0.25)
        if len(steps) > 1:
            axes.legend()
        return figure


def scored_steps(group: Group) -> pd.DataFrame:
    """A row for each action taken that QNet scored: its q, and the task and final reward of its episode."""
    steps = group.episodes[["task", "reward", "q"]].explode("q").dropna()
    return steps.astype({"q": float})
