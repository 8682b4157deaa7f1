"""The report's figures, in Okabe and Ito's colours: colour-blind readers can distinguish them on light and dark."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from reporting.lineage import lineage
from reporting.results import Group
from reporting.stats import Estimate, paired_difference

INK = "#2b2d31"  # in the HTML the page's own text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
ORACLE, OTHER = "#cc79a7", "#009e73"  # methods that look at the true reward; those that search differently
MARKERS = "osD^vPX"  # of curves
ANGLES = (45, 135, 315, 225, 90, 270, 0, 180)  # in degrees, where a point's mark may stand beside it
DISTANCES = (13, 18, 24, 31)  # of it from its point, in points of type
COSTS = {"total": "tokens a task", "env_steps": "environment steps a task, equal ones side by side"}
STYLE = {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{"axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.25},
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a label's $ too
}
PNG = {"dpi": 150, "bbox_inches": "tight", "facecolor": "white"}


# {figure: {environment: (SVG for a wide screen, SVG for a narrow one)}}
Pictures: TypeAlias = dict[str, dict[str, tuple[str, str]]]


def draw(groups: Sequence[Group], out: Path, plots: Sequence[Callable]) -> Pictures:
    """Each figure that has something to show, as SVG; the wide one also as PNG beside the page."""
    pictures: Pictures = {plot.__name__: {} for plot in plots}
    for plot in plots:
        for env in dict.fromkeys(group.condition.env for group in groups):
            shown = [group for group in groups if group.condition.env == env]
            wide, narrow = plot(shown), plot(shown, narrow=True)
            part = re.sub(r"[^\w-]+", "_", env)  # of a file's name, whatever a result file calls its environment
            if wide:
                wide.savefig(out.with_name(f"{out.stem}_{plot.__name__}_{part}.png"), **PNG)
                pictures[plot.__name__][env] = svg(wide, "wide"), svg(narrow, "narrow")
    return pictures


def svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element for an HTML page; its ids are of its own by the salt."""
    file = io.StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'\s(?:xmlns(?::\w+)?|width|height)="[^"]*"', "", text, count=4).replace(INK, "currentColor")


def spread(estimates: Sequence[Estimate], least: float = 0.0) -> np.ndarray:
    """(2, n): how far the intervals reach below and above the means, within [least, 1]; 0 where there is none."""
    mean, low, high = np.array([(e.mean, e.low, e.high) for e in estimates]).T
    return np.nan_to_num([mean - low.clip(least), high.clip(max=1.0) - mean]).clip(min=0)


def curve(axes: Axes, x: Sequence, estimates: Sequence[Estimate], marks: Sequence = (), **look: Any) -> None:
    """Means with their intervals, hollow, so that none hides another. `place_marks` moves the marks apart."""
    means = [estimate.mean for estimate in estimates]
    look = {"markerfacecolor": "none", "markeredgewidth": 1.4, "capsize": 2, "elinewidth": 0.7} | look
    axes.errorbar(x, means, spread(estimates), **look)
    for mark, *point in zip(marks, x, means, strict=False):
        if mark:
            annotate(axes, mark, point, look["color"])


def annotate(axes: Axes, text: str, point: Sequence[float], colour: str, ha: str = "center") -> None:
    beside = {"xytext": (0, DISTANCES[0]), "textcoords": "offset points", "ha": ha, "va": "center"}
    mark = axes.annotate(text, point, **beside, fontsize=8, color=colour)
    mark.set_in_layout(False)  # it is moved when the layout is known


OFFSETS = [
    (distance * np.cos(np.radians(angle)), distance * np.sin(np.radians(angle)))
    for distance in DISTANCES
    for angle in ANGLES
]


def place_marks(figure: Figure) -> None:
    """Put each point's mark where it is not taken for another point's, and covers least: no other mark, then no point
    and interval, then no line."""
    figure.draw_without_rendering()  # now the layout is known
    for axes in figure.axes:
        placed: list[Bbox] = []
        obstacles = [placed, *solid_and_thin(axes)]
        marks = [text for text in axes.texts if isinstance(text, Annotation)]
        for mark in marks:
            twins = [other for other in marks if other is not mark and other.get_color() == mark.get_color()]
            costs = [covered(mark, offset, twins, obstacles) for offset in OFFSETS]
            mark.xyann = OFFSETS[costs.index(min(costs))]  # of equals the nearest
            placed.append(mark.get_window_extent())


def covered(
    mark: Annotation, offset: Sequence[float], twins: Sequence[Annotation], obstacles: Sequence[list[Bbox]]
) -> list[int]:
    """How many boxes of each kind a mark at this offset would cover; first, whether it would leave the axes, and of how
    many points of its curve it would be nearer to than to its own."""
    mark.xyann = offset
    box, axes = mark.get_window_extent().padded(1), mark.axes
    frame, (own, *others) = axes.bbox, axes.transData.transform([mark.xy, *(twin.xy for twin in twins)])
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    centre = (box.min + box.max) / 2
    nearer = sum(np.hypot(*(other - centre)) < 1.3 * np.hypot(*(own - centre)) for other in others)
    return [not inside, nearer, *(box.count_overlaps(boxes) for boxes in obstacles)]


def solid_and_thin(axes: Axes) -> tuple[list[Bbox], list[Bbox]]:
    """What a mark should not cover, in pixels: points and their intervals, and less so the lines between points."""
    solid, thin = [], []
    for line, _, intervals in (container.lines for container in axes.containers):
        points = axes.transData.transform(np.column_stack(line.get_data()).astype(float))
        solid += [square(point, 5) for point in points]
        for bars in intervals:
            solid += [Bbox(axes.transData.transform(segment)).padded(1) for segment in bars.get_segments()]
        if line.get_linestyle() != "None":
            for start, end in pairwise(points):
                thin += [square(start + (end - start) * part, 1) for part in np.linspace(0, 1, 24)]
    return solid, thin


def square(point: Sequence[float], half: float) -> Bbox:
    return Bbox([[point[0] - half, point[1] - half], [point[0] + half, point[1] + half]])


def within(values: Iterable[float], core: Iterable[float]) -> tuple[float, float]:
    """The ends of an axis: those of all values or, if the others would take more than half of it, of the core alone."""
    everything, core = [v for v in values if np.isfinite(v)], [v for v in core if np.isfinite(v)]
    low, high = min(everything), max(everything)
    if core and high - low > 2 * (max(core) - min(core)) > 0:
        low, high = min(core), max(core)
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


@mpl.rc_context(STYLE)
def tokens(groups: Sequence[Group], narrow: bool = False) -> Figure | None:
    """Fig. 3: mean reward with its interval against all tokens a task and, beside it, against environment steps.

    QLASS is a line over M, best-of-N one over N. Of what has a label, lines alone are drawn; the tables have the rest.
    The axes are those of the agent and its searches if the rest would squeeze them: what is then outside, as a chat
    agent of far lower reward may be, is named at the edge.
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
    drawn = [group for line in shown.values() for group in line]
    core = [group for group in drawn if group.condition.method in COLOURS]
    files = {path for group in groups for path in group.episodes["file"]}  # an agent that chooses writes no tokens
    nominal = any(lineage(path, ["sft"]).get("--candidates of sft") == "valid" for path in files)
    size, shape = ((4.6, 6.6 + 0.22 * len(shown)), (2, 1)) if narrow else ((9.5, 3.8 + 0.1 * len(shown)), (1, 2))
    figure = Figure(figsize=size, layout="constrained")
    for axes, (cost, label) in zip(figure.subplots(*shape, sharey=True), COSTS.items(), strict=True):
        left, right = within(*([0.0, *(g.mean(cost) for g in some)] for some in (drawn, core)))
        axes.set(xlim=(min(left, 0), right), ylim=within(reach(drawn), reach(core)))
        beside = 0.006 * right * (cost == "env_steps")  # most methods take as many steps
        for place, (name, line) in enumerate(shown.items()):
            line.sort(key=lambda group: group.mean(cost))
            condition, marker = line[0].condition, MARKERS[place % len(MARKERS)]
            x = [group.mean(cost) + beside * (place - len(shown) / 2) for group in line]
            look = {"color": COLOURS.get(condition.method, ORACLE if condition.oracle else OTHER), "marker": marker}
            look |= {"label": fill(name, 48), "linestyle": "--" if condition.oracle else "-"}
            # In the other panel a group has the same height: no mark tells it there.
            marks = [group.condition.budget for group in line if cost == "total"]
            curve(axes, x, [group.reward for group in line], marks, **look)
            for group, at in zip(line, x, strict=True):
                name_outside(axes, at, group.reward.mean, str(group.condition), look["color"])
        axes.set_xlabel(label + ", nominal" * (nominal and cost == "total"))
    for axes in figure.axes[: len(figure.axes) if narrow else 1]:
        axes.set_ylabel("mean reward, 95 % interval")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=1 if narrow else 2, fontsize=9)
    place_marks(figure)
    return figure


def reach(groups: Sequence[Group]) -> list[float]:
    """The ends of the rewards' intervals; of one task alone the reward."""
    ends = [(group.reward.low, group.reward.high, group.reward.mean) for group in groups]
    return [end for three in ends for end in three if np.isfinite(end)]


def name_outside(axes: Axes, x: float, y: float, name: str, colour: str) -> None:
    """A triangle at the edge for a point outside the axes, with its name and its numbers."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    edge = min(max(x, left), right), min(max(y, bottom), top)
    if edge == (x, y):
        return
    beyond = bool(x > right)
    marker = ">" if beyond else "v" if y < bottom else "^"
    axes.plot(*edge, marker, color=colour, clip_on=False)
    text = f"{name}: {y:.3f} at {x:,.0f}" if beyond else f"{name}: {y:.3f}"
    annotate(axes, fill(text, 24), edge, colour, "right" if beyond else "center")


@mpl.rc_context(STYLE)
def labels(groups: Sequence[Group], narrow: bool = False) -> Figure | None:
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
    height = 0.7 + 0.4 * len(bars)
    figure = Figure(figsize=(4.6, 2 * height) if narrow else (9.5, height), layout="constrained")
    shape = {"nrows": 2, "sharey": True} if narrow else {"ncols": 2, "sharey": True, "width_ratios": (3, 2)}
    sides = figure.subplots(**shape)
    for axes, (title, estimates), least in zip(sides, panels.items(), (0.0, -1.0), strict=True):
        means = [estimate.mean for estimate in estimates]
        drawn = axes.barh(names, means, xerr=spread(estimates, least), color=colours, ecolor=INK, capsize=2)
        axes.bar_label(drawn, fmt="{:.3f}", padding=4, fontsize=9)
        axes.set_xlabel(title)
        if narrow:
            axes.set_yticks(range(len(names)), [fill(name, 20) for name in names], fontsize=8)
    figure.axes[0].invert_yaxis()
    figure.axes[0].margins(x=0.15)
    axes.margins(x=0.4)  # numbers stand left of bars below 0
    return figure
