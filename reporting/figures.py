"""The report's figures, by matplotlib.

Colours are Okabe and Ito's, which colour-blind readers can distinguish on light and dark. In the HTML, text and axes
take the page's own colour (`currentColor`).
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from qlass.files import has_meta, read_meta
from reporting.results import Group, ancestors, inputs_of
from reporting.stats import Estimate

INK = "#2b2d31"  # stands for the page's text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
ORACLE, OTHER = "#cc79a7", "#009e73"  # methods that look at the true reward; those that search differently
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
MARKERS = "osD^vPX"
COSTS = {"total": "tokens a task", "env_steps": "environment steps a task"}
TASKS = (100, 1_000, 10_000)  # played by an agent, of the frontier
UPDATE = 3  # passes of an update: a backward pass costs two
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
    svg = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
        figure.savefig(svg, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = svg.getvalue()
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


def spread(estimates: Sequence[Estimate]) -> np.ndarray:
    """(2, n): how far the intervals reach below and above the means; 0 where there is none."""
    return np.nan_to_num([[e.mean - e.low for e in estimates], [e.high - e.mean for e in estimates]]).clip(min=0)


def curve(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], **look: Any) -> None:
    means = [estimate.mean for estimate in estimates]
    axes.errorbar(x, means, spread(estimates), capsize=2, elinewidth=0.7, **look)


@mpl.rc_context(STYLE)
def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against all tokens a task and, beside it, against environment steps.

    QLASS is a line over M, best-of-N one over N. Of what has a label, lines alone are drawn; the tables have the rest.
    """
    lines = defaultdict(list)
    for group in groups:
        if group.mean("total") > 0 and group.condition.method not in ("random", "expert"):
            over = {"qlass": ", over M", "best_of_n": ", over N"}.get(group.condition.method, "")
            lines[group.condition.name + over].append(group)
    plain = {name: line for name, line in lines.items() if not line[0].condition.label}
    labelled = {name: line for name, line in lines.items() if len(line) > 1 and not line[0].condition.oracle}
    shown = plain | labelled or lines
    if not shown:
        return None
    figure = Figure(figsize=(9.5, 3.8 + 0.1 * len(shown)), layout="constrained")
    for axes, (cost, label) in zip(figure.subplots(1, 2, sharey=True), COSTS.items(), strict=True):
        for (name, line), marker in zip(shown.items(), itertools.cycle(MARKERS), strict=False):
            line.sort(key=lambda group: group.mean(cost))
            condition, x = line[0].condition, [group.mean(cost) for group in line]
            look: dict[str, Any] = {"color": COLOURS.get(condition.method, ORACLE if condition.oracle else OTHER)}
            hollow = {"linestyle": "--", "markerfacecolor": "none"} if condition.oracle else {}
            curve(axes, x, [group.reward for group in line], label=name, marker=marker, **look, **hollow)
            for group in line:
                place = {"xytext": (6, -11), "textcoords": "offset points", "fontsize": 8}
                axes.annotate(group.condition.budget, (group.mean(cost), group.reward.mean), **place, **look)
        log_axis(axes, label)
    figure.axes[0].set_ylabel("mean reward, 95 % interval")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@mpl.rc_context(STYLE)
def labels(groups: Sequence[Group]) -> Figure | None:
    """Fig. 4 and ablations: SFT greedy, and QLASS at the budget that most labels have, a bar a label."""
    budgets = Counter(g.condition.budget for g in groups if g.condition.method == "qlass" and g.condition.label)
    budget = max(budgets, key=lambda budget: (budgets[budget], budget), default="")
    shown = {("greedy", ""), ("qlass", budget)}
    bars = [group for group in groups if (group.condition.method, group.condition.budget) in shown]
    if not any(group.condition.label for group in bars):
        return None
    rewards = [group.reward for group in bars]
    figure = Figure(figsize=(7.5, 0.7 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    seeds = [group.episodes["seed"].nunique() for group in bars]
    fewer = [f" ({n} of {max(seeds)} seeds)" * (n < max(seeds)) for n in seeds]
    names = [f"{group.condition}{note}" for group, note in zip(bars, fewer, strict=True)]
    colours = [COLOURS[group.condition.method] for group in bars]
    means = [reward.mean for reward in rewards]
    drawn = axes.barh(names, means, xerr=spread(rewards), color=colours, ecolor=INK, capsize=2)
    axes.bar_label(drawn, fmt="{:.3f}", padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("mean reward, 95 % interval")
    return figure


@mpl.rc_context(STYLE)
def frontier(groups: Sequence[Group]) -> Figure | None:
    """Train or search: mean reward against the tokens of training and of playing 100, 1,000 and 10,000 tasks.

    A line an agent, from greedy over QLASS with more and more candidates, and a dotted one over best-of-N by QNet;
    hollow where QNet is of the cloned agent's trees ("old QNet" in the label). Cloning is not counted: all agents begin
    with it. None where no agent was trained after it.
    """
    cost = {id(group): training_tokens(group) for group in groups}
    groups = [group for group in groups if not math.isnan(cost[id(group)])]
    starts = {group.condition.label: group for group in groups if group.condition.method == "greedy"}
    lines: dict[tuple[str, str, str], list[Group]] = {(label, label, "-"): [start] for label, start in starts.items()}
    for group in groups:
        condition = group.condition
        agent = condition.label.removesuffix("old QNet").removesuffix("own QNet").rstrip(", ")
        searched = condition.method == "qlass" and (condition.N or 1) == 1
        if agent in starts and (searched or (condition.method == "best_of_n" and condition.select == "q")):
            key = agent, condition.label, "-" if searched else ":"
            lines.setdefault(key, [starts[agent]]).append(group)
    if not any(len(line) > 1 for line in lines.values()) or not any(cost[id(g)] for g in starts.values()):
        return None
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axes, tasks in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
        for (agent, label, style), line in lines.items():
            i = list(starts).index(agent)
            x = [(cost[id(group)] + tasks * group.mean("total")) / 1e6 for group in line]
            look = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)], "linestyle": style}
            look |= {"markerfacecolor": "white"} if label.endswith("old QNet") else {}
            name = (agent or "cloned") if (label, style) == (agent, "-") else None
            curve(axes, x, [group.reward for group in line], label=name, linewidth=0.8, **look)
        axes.set_title(f"{tasks:,} tasks", loc="left", fontsize=10)
        log_axis(axes, "million tokens in all")
    figure.axes[0].set_ylabel("mean reward")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def training_tokens(group: Group) -> float:
    """What was spent on the agent after cloning, and on QNet and its trees where Q is asked for (NaN: unknown)."""
    files = group.episodes["file"].unique()  # a file a seed
    origins = [ancestors(file, inputs_of(group.condition)) for file in files]
    return sum(spent(of.split()[1], path) for paths in origins for path, of in paths.items()) / len(files)


def spent(kind: str, path: Path) -> float:
    """What an agent, a QNet or a file cost, without what it was made from."""
    meta = read_meta(path)
    if not has_meta(path):  # from elsewhere: an agent and demonstrations are what all begin with
        return 0.0 if kind in ("sft", "expert") else math.nan
    if kind == "sft" and "last" in meta:  # of a learner: its last line
        return meta["passes"] * meta["last"]["tokens"] + meta["last"].get("played", 0)
    tokens = meta.get("tokens", 0)
    if tokens is None:  # of trees that were resumed
        return math.nan
    if kind == "sft":  # cloned: at first, or again from what self_train kept
        expert = next(iter(ancestors(path, ["expert"])), Path("-"))
        return UPDATE * tokens if "kept" in read_meta(expert) else 0.0
    return UPDATE * tokens if kind == "qnet" else tokens
