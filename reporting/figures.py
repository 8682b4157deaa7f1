"""The report's figures, in Okabe and Ito's colours: colour-blind readers can distinguish them on light and dark."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reporting.results import Group, lineage
from reporting.stats import Estimate, paired_difference

INK = "#2b2d31"  # in the HTML the page's own text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
ORACLE, OTHER = "#cc79a7", "#009e73"  # methods that look at the true reward; those that search differently
MARKERS, CORNERS = "osD^vPX", ((11, 8), (-11, 8), (11, -8), (-11, 8))  # of curves, and where their points are marked
COSTS = {"total": "tokens a task", "env_steps": "environment steps a task"}
STYLE = {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{"axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.25},
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


def spread(estimates: Sequence[Estimate], least: float = 0.0) -> np.ndarray:
    """(2, n): how far the intervals reach below and above the means, within [least, 1]; 0 where there is none."""
    mean, low, high = np.array([(e.mean, e.low, e.high) for e in estimates]).T
    return np.nan_to_num([mean - low.clip(least), high.clip(max=1.0) - mean]).clip(min=0)


def curve(axes: Axes, x: Sequence, estimates: Sequence[Estimate], marks: Sequence = (), **look: Any) -> None:
    """Means with their intervals, hollow, so that none hides another. Each curve has its marks in another corner."""
    means = [estimate.mean for estimate in estimates]
    place = {"xytext": CORNERS[len(axes.containers) % 4], "textcoords": "offset points"}
    look = {"markerfacecolor": "none", "markeredgewidth": 1.4, "capsize": 2, "elinewidth": 0.7} | look
    axes.errorbar(x, means, spread(estimates), **look)
    for mark, *point in zip(marks, x, means, strict=False):
        axes.annotate(mark, point, **place, ha="center", va="center", fontsize=8, color=look["color"])


@mpl.rc_context(STYLE)
def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against all tokens a task and, beside it, against environment steps.

    QLASS is a line over M, best-of-N one over N. Of what has a label, lines alone are drawn; the tables have the rest.
    """
    lines = defaultdict(list)
    for group in groups:
        if group.mean("total") > 0 and group.condition.method not in ("random", "expert"):
            lines[group.condition.name].append(group)
    plain = {name: line for name, line in lines.items() if not line[0].condition.label}
    labelled = {name: line for name, line in lines.items() if len(line) > 1 and not line[0].condition.oracle}
    shown = plain | labelled or lines
    if not shown:
        return None
    files = {path for group in groups for path in group.episodes["file"]}  # an agent that chooses writes no tokens
    nominal = any(lineage(path, ["sft"]).get("--candidates of sft") == "valid" for path in files)
    figure = Figure(figsize=(9.5, 3.8 + 0.1 * len(shown)), layout="constrained")
    for axes, (cost, label) in zip(figure.subplots(1, 2, sharey=True), COSTS.items(), strict=True):
        for (name, line), marker in zip(shown.items(), MARKERS * len(shown), strict=False):
            line.sort(key=lambda group: group.mean(cost))
            condition, x = line[0].condition, [group.mean(cost) for group in line]
            look = {"color": COLOURS.get(condition.method, ORACLE if condition.oracle else OTHER), "marker": marker}
            look |= {"label": name, "linestyle": "--" if condition.oracle else "-"}
            # In the other panel a group has the same height: no mark tells it there.
            marks = [group.condition.budget for group in line if cost == "total"]
            curve(axes, x, [group.reward for group in line], marks, **look)
        axes.set_xlabel(label + ", nominal" * (nominal and cost == "total"))
        axes.set_xlim(left=0)
    figure.axes[0].set_ylabel("mean reward, 95 % interval")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@mpl.rc_context(STYLE)
def labels(groups: Sequence[Group]) -> Figure | None:
    """Fig. 4 and ablations: SFT greedy, and QLASS at the budget that most labels have, a bar a label. Beside the means
    stand paired differences: they may be clear where the means' intervals overlap."""
    budgets = Counter(g.condition.budget for g in groups if g.condition.method == "qlass" and g.condition.label)
    budget = max(budgets, key=lambda budget: (budgets[budget], budget), default="")
    shown = {("greedy", ""), ("qlass", budget)}
    bars = [group for group in groups if (group.condition.method, group.condition.budget) in shown]
    if not any(group.condition.label for group in bars):
        return None
    seeds = [group.episodes["seed"].nunique() for group in bars]
    fewer = [f" ({n} of {max(seeds)} seeds)" * (n < max(seeds)) for n in seeds]
    names = [f"{group.condition}{note}" for group, note in zip(bars, fewer, strict=True)]
    colours = [COLOURS[group.condition.method] for group in bars]
    base = max(bars, key=lambda group: (group.condition.method == "qlass", not group.condition.label))
    gains = [paired_difference(group.values("reward"), base.values("reward"), group.blocks) for group in bars]
    panels = {"mean reward, 95 % interval": [group.reward for group in bars], f"minus {base.condition}, paired": gains}
    figure = Figure(figsize=(9.5, 0.7 + 0.4 * len(bars)), layout="constrained")
    sides = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes, (title, estimates), least in zip(sides, panels.items(), (0.0, -1.0), strict=True):
        means = [estimate.mean for estimate in estimates]
        drawn = axes.barh(names, means, xerr=spread(estimates, least), color=colours, ecolor=INK, capsize=2)
        axes.bar_label(drawn, fmt="{:.3f}", padding=4, fontsize=9)
        axes.set_xlabel(title)
    axes.invert_yaxis()
    axes.margins(x=0.4)  # numbers stand left of bars below 0
    return figure
