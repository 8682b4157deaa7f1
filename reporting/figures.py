"""The report's figures, in Okabe and Ito's colours: colour-blind readers can distinguish them on light and dark."""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from qlass.files import atomic, read_jsonl
from qlass.messages import parse_action
from qlass.records import as_user_error
from reporting.results import Group
from reporting.stats import Estimate

INK = "#2b2d31"  # in the HTML the page's own text colour
GREY = "#8c8c8c"
COLOURS = {"qlass": "#0072b2", "best_of_n": "#d55e00", "likeliest": "#e69f00", "greedy": GREY, "sample": GREY}
TAKEN, REST = "#2f6fd6", "#c8d7f0"  # the bar of the candidate that was taken, and of the others
ORACLE, OTHER = "#cc79a7", "#009e73"  # methods that look at the true reward; those that search differently
MARKERS = "osD^vph>"  # of curves
STYLE = {
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same ids each time
    "text.parse_math": False,  # a label's $ too
}
WIDTH = 6.2  # of a figure in inches: its letters are legible on a screen of 500 pixels

FORBIDDEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")  # by XML, in UTF-8


def content(figure: Figure, kind: str) -> bytes:
    """A picture's file. An SVG has a mark in the place of what XML forbids, such as a text's control characters."""
    file, svg = io.BytesIO(), kind == "svg"
    with mpl.rc_context(STYLE):
        metadata = {"Date": None} if svg else {}  # the same bytes each time
        figure.savefig(file, format=kind, bbox_inches="tight", metadata=metadata)
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}".encode(), file.getvalue()) if svg else file.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a picture whose format is that of the path's suffix."""
    with atomic(path) as draft, as_user_error(path):
        draft.write_bytes(content(figure, path.suffix[1:]))


def curve(axes: Axes, x: Sequence, estimates: Sequence[Estimate], **look: Any) -> None:
    """Means with their intervals, hollow, so that none hides another."""
    look = {"markerfacecolor": "none", "markeredgewidth": 1.4, "capsize": 2, "elinewidth": 0.7} | look
    mean, low, high = np.array([(e.mean, e.low, e.high) for e in estimates]).T
    ends = np.nan_to_num([mean - low.clip(0), high.clip(max=1) - mean]).clip(0)  # of one task there is no interval
    axes.errorbar(x, mean, ends, **look)


def log_axis(axes: Axes) -> None:
    """Costs as ratios: so one method that costs fifty times as much doesn't squeeze the others together."""
    axes.set_xlabel("tokens a task")
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right < 100 * left else (1,)))  # or numbers overlap
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


@mpl.rc_context(STYLE)
def tokens(groups: Sequence[Group]) -> Figure | None:
    """Fig. 3: mean reward with its interval against all tokens a task; None if no row has any.

    QLASS is a line over M, best-of-N one over N.
    """
    lines = defaultdict(list)
    for group in groups:
        if group.mean("total") > 0 and group.condition.method not in ("random", "expert"):
            lines[group.condition.name].append(group)
    if not lines:
        return None
    figure = Figure(figsize=(WIDTH, 3.2 + 0.17 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for place, (name, line) in enumerate(lines.items()):
        line.sort(key=lambda group: group.mean("total"))
        condition = line[0].condition
        colour = COLOURS.get(condition.method, ORACLE if condition.oracle else OTHER)
        look = {"color": colour, "marker": MARKERS[place % len(MARKERS)], "linestyle": "-:"[condition.oracle]}
        label = ", ".join([name, *(group.condition.budget for group in line)]).rstrip(", ")
        costs, rewards = [group.mean("total") for group in line], [group.reward for group in line]
        curve(axes, costs, rewards, label=fill(label, 80), **look)
    log_axis(axes)
    axes.set_ylabel("mean reward, 95 % interval")
    figure.legend(loc="outside lower center")
    return figure


@mpl.rc_context(STYLE)
def losses(runs: Iterable[Path]) -> Figure | None:
    """The loss of each update of agents and QNets, and its mean over each epoch; None without a log."""
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    panels = zip(("sft", "qnet"), figure.subplots(1, 2), strict=True)
    for (name, axes), run in product(panels, runs):
        axes.set(title=name, xlabel="update", ylabel="loss", yscale="log")
        log = run / f"{name}.log.jsonl"
        lines = pd.DataFrame(read_jsonl(log) if log.exists() else [], columns=["step", "loss", "epoch"])
        epochs = lines["epoch"].notna()
        axes.plot("step", "loss", data=lines[~epochs], color=GREY, linewidth=0.5)
        axes.plot("step", "loss", "o", data=lines[epochs], color=COLOURS["qlass"], markersize=3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    return figure if any(line.get_xdata().size for axes in figure.axes for line in axes.lines) else None


@mpl.rc_context(STYLE)
def episode(line: dict, words: Callable[[str], str] = parse_action) -> Figure:
    """A line of results: of each step that had a choice the actions by their Q, the one taken dark."""
    labels = {}  # by their height
    figure = Figure(figsize=(WIDTH, 1), layout="constrained")
    axes = figure.subplots()
    for number, step in enumerate(line["steps"], 1):
        scored = [candidate for candidate in step["candidates"] if candidate["q"] is not None]
        ranked = sorted(scored, key=lambda candidate: -candidate["q"])
        for place, candidate in enumerate(ranked if len(ranked) > 1 else []):
            height, q = len(labels) + number / 2, candidate["q"]
            axes.barh(height, q, color=TAKEN if candidate["action"] == step["action"] else REST)
            axes.text(max(q, 0) + 0.02, height, f"{q:.2f}", va="center")
            labels[height] = f"step {number}: " * (place == 0) + words(candidate["action"])
    axes.set_yticks([*labels], labels.values())
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set_xlabel("Q")
    figure.set_figheight(0.2 * max(labels, default=0) + 1)
    task, n_steps = line.get("task", line["task_id"]), len(line["steps"])
    figure.suptitle(fill(f"{task}: reward {line['reward']:.2g} after {n_steps} steps", 90), fontsize=9)
    return figure
