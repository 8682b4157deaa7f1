"""The report's figures: score against tokens (Fig. 3), process rewards (Fig. 4), calibration. Drawn by matplotlib.

Colours are Okabe and Ito's, told apart by colour-blind readers and on a light and a dark ground; text and axes take the
page's own colour in the HTML (`currentColor`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stats import bootstrap

if TYPE_CHECKING:
    from report_results import Group, Method

INK = "#2b2d31"  # stands for the page's text colour
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
MARKERS = "osD^vP"
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


def family(method: Method) -> str:
    """The line that a method is a point of: QLASS with one trajectory over M, everything else over N."""
    if method.method == "qlass" and (method.N or 1) > 1:
        return f"{method.name}, M={method.M or 1}, over N"
    if method.method in ("best_of_n", "qlass"):
        return method.name + (", over M" if method.method == "qlass" else ", over N")
    return method.name


def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against tokens a task, by total cost and by the paper's count."""
    lines = defaultdict(list)
    for group in groups:
        if group.mean("total") > 0:
            lines[family(group.method)].append(group)
    if not lines:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        counts = ("total", "all tokens per task"), ("generated", "generated tokens per task (the paper's count)")
        for axes, (cost, label) in zip((left, right), counts, strict=True):
            for i, (name, line) in enumerate(lines.items()):
                draw_line(axes, name, sorted(line, key=lambda g: g.mean(cost)), cost, i)
            axes.set_xscale("log")
            axes.set_xlabel(label)
            axes.grid(alpha=0.25)
        left.set_ylabel("mean reward, 95 % interval")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure


def draw_line(axes: Axes, name: str, line: Sequence[Group], cost: str, i: int) -> None:
    x = [group.mean(cost) for group in line]
    y = np.array([group.reward.mean for group in line])
    bounds = np.array([(group.reward.low, group.reward.high) for group in line]).T
    errors = np.nan_to_num(np.abs(bounds - y))
    colour, oracle = COLOURS[i % len(COLOURS)], line[0].method.oracle
    axes.errorbar(
        x, y, errors, label=name, color=colour, marker=MARKERS[i % len(MARKERS)], capsize=2, elinewidth=1,
        linestyle="--" if oracle else "-", markerfacecolor="none" if oracle else colour,
    )  # fmt: skip
    for group, a, b in zip(line, x, y, strict=True):
        if group.method.budget:
            axes.annotate(group.method.budget, (a, b), (5, 4), textcoords="offset points", fontsize=8, color=colour)


def targets(groups: Sequence[Group]) -> Figure | None:
    """Fig. 4: the same search or self-training under QNets that learnt different process rewards; None without them."""
    bars = [g for g in groups if g.method.target or g.method.method in ("greedy", "rft")]
    if len({g.method.target for g in bars} - {None}) < 2:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 1 + 0.42 * len(bars)), layout="constrained")
        axes = figure.subplots()
        colours = {"q": COLOURS[0], "avg": COLOURS[4], "reward": COLOURS[3], None: "#8c8c8c"}
        for row, group in enumerate(bars):
            mean, low, high = group.reward.mean, group.reward.low, group.reward.high
            errors = np.nan_to_num([[mean - low], [high - mean]])
            colour = colours[group.method.target]
            axes.barh(row, mean, xerr=errors, color=colour, ecolor=INK, capsize=2, height=0.7)
            axes.text(0.01, row, f"{mean:.3f}", va="center", color="black", fontsize=9)
        axes.set_yticks(range(len(bars)), [f"{g.method.name} {g.method.budget}" for g in bars])
        axes.invert_yaxis()
        axes.set_xlabel("mean reward, 95 % interval")
        return figure


def calibration(groups: Sequence[Group], bins: int = 10) -> Figure | None:
    """QNet's value of the actions taken against the final reward of their episodes, in bins of equal counts.

    The interval of a bin is drawn over tasks, since the steps of an episode share its reward.
    """
    results = [result for g in groups if g.method.method == "qlass" for result in g.results.values()]
    steps = sorted((q, result.reward, result.task) for result in results for q in result.q)
    if len(steps) < 2 * bins:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5, 4.6), layout="constrained")
        axes = figure.subplots()
        for part in np.array_split(np.arange(len(steps)), bins):
            tasks = defaultdict(list)
            for i in part:
                tasks[steps[i][2]].append(steps[i][1])
            y = bootstrap([sum(rewards) / len(rewards) for rewards in tasks.values()])
            x = float(np.mean([steps[i][0] for i in part]))
            errors = np.nan_to_num([[y.mean - y.low], [y.high - y.mean]])
            axes.errorbar(x, y.mean, errors, color=COLOURS[0], marker="o", capsize=2)
        axes.axline((0, 0), slope=1, color=INK, alpha=0.4, linestyle=":")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel("q that QNet predicts for the action taken (QLASS)")
        axes.set_ylabel("final reward of the episode, 95 % interval")
        axes.grid(alpha=0.25)
        return figure
