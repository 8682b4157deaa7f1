"""The report's figures, by matplotlib.

Colours are Okabe and Ito's, which colour-blind readers can distinguish on light and dark. In the HTML, text and axes
take the page's own colour (`currentColor`).
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from reporting.results import Group
from reporting.stats import Estimate

INK = "#2b2d31"  # stands for the page's text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
ORACLE, OTHER = "#cc79a7", "#009e73"  # methods that look at the true reward; those that search differently
MARKERS = "osD^vPX"
COSTS = {"total": "tokens a task", "env_steps": "environment steps a task"}
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


def draw(groups: Sequence[Group], out: Path, plots: Sequence[Callable]) -> dict[str, dict[str, str]]:
    """{figure: {environment: SVG}} of each figure that has something to show, and as PNG beside the page."""
    pictures: dict[str, dict[str, str]] = {plot.__name__: {} for plot in plots}
    for plot in plots:
        for env in dict.fromkeys(group.condition.env for group in groups):
            figure = plot([group for group in groups if group.condition.env == env])
            part = re.sub(r"[^\w-]+", "_", env)  # of a file's name, whatever a result file calls its environment
            if figure:
                path = out.with_name(f"{out.stem}_{plot.__name__}_{part}.png")
                pictures[plot.__name__][env] = save(figure, path)
    return pictures


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
