"""A figure of the report: is it better to train the agent further, or to search with it as it is?"""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from qlass.outputs import meta_of
from reporting.figures import MARKERS, STYLE, curve, place_marks
from reporting.lineage import ancestors
from reporting.results import Group, models_of

TASKS = (100, 1_000, 10_000)  # that an agent plays
UPDATE = 3  # passes of an update: a backward pass costs two
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


@mpl.rc_context(STYLE)
def frontier(groups: Sequence[Group], narrow: bool = False) -> Figure | None:
    """Train or search: mean reward against the tokens of training and of playing 100, 1,000 and 10,000 tasks.

    A line an agent, from greedy over QLASS with more and more candidates, and a dotted one over best-of-N by QNet;
    hollow where QNet is of the cloned agent's trees ("old QNet" in the label). Cloning, with which all begin, is not
    counted. None where no agent was trained after it.
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
    figure = Figure(figsize=(4.6, 9) if narrow else (11, 4.4), layout="constrained")
    panels = figure.subplots(*((len(TASKS), 1) if narrow else (1, len(TASKS))), sharey=True)
    for axes, tasks in zip(panels, TASKS, strict=True):
        for (agent, label, style), line in lines.items():
            i = list(starts).index(agent)
            x = [(cost[id(group)] + tasks * group.mean("total")) / 1e6 for group in line]
            look = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)], "linestyle": style}
            look |= {} if label.endswith("old QNet") else {"markerfacecolor": look["color"]}
            name = (agent or "cloned") if (label, style) == (agent, "-") else None
            marks = [group.condition.budget for group in line]
            curve(axes, x, [group.reward for group in line], marks, label=name, linewidth=0.8, **look)
        axes.set_title(f"{tasks:,} tasks", loc="left", fontsize=10)
        log_axis(axes, "million tokens in all")
    figure.axes[0].set_ylabel("mean reward")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2 if narrow else 4)
    place_marks(figure)
    return figure


def log_axis(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    subs = (1, 2, 3, 5) if right < 10 * left else (1, 2, 5) if right < 300 * left else (1,)  # or numbers overlap
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def training_tokens(group: Group) -> float:
    """What was spent on the agent after cloning, and on QNet and its trees where Q is asked for (NaN: unknown)."""
    files = group.episodes["file"].unique()  # a file a seed
    origins = [ancestors(file, models_of(group.condition)) for file in files]
    return sum(spent(of.split()[1], path) for paths in origins for path, of in paths.items()) / len(files)


def spent(kind: str, path: Path) -> float:
    """What an agent, a QNet or a file cost, without what it was made from."""
    meta = meta_of(path)
    if not any(meta.values()):  # from elsewhere: an agent and demonstrations are what all begin with
        return 0.0 if kind in ("sft", "expert") else math.nan
    if kind == "sft" and "last" in meta:  # of a learner: its last line
        return meta["passes"] * meta["last"]["tokens"] + meta["last"].get("played", 0)
    tokens = meta.get("tokens", 0)
    if tokens is None:  # of trees that were resumed
        return math.nan
    if kind == "sft":  # cloned: at first, or again from what self_train kept
        expert = next(iter(ancestors(path, ["expert"])), Path("-"))
        return UPDATE * tokens if "kept" in meta_of(expert) else 0.0
    return UPDATE * tokens if kind == "qnet" else tokens
