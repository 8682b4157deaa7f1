"""Train or search? What an agent's reward costs in all: what was trained, and what is spent on each task played.

Both in tokens of a forward pass; an update counts as three, since a backward pass costs two. Cloning is left out: all
agents begin with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from qlass.files import input_of, read_meta
from reporting.figures import MARKERS, SERIES, STYLE, log_axis
from reporting.results import Group, inputs_of

TASKS = (100, 1_000, 10_000)
UPDATE = 3  # passes of an update


def training_tokens(group: Group) -> float:
    """What was spent on the agent after cloning, and on QNet and its trees where Q is asked for (NaN: unknown)."""
    costs = []
    for results in group.episodes["file"].unique():  # a file a seed
        counted: set[Path] = set()
        costs.append(sum(spent(name, results, counted) for name in inputs_of(group.condition)))
    return sum(costs) / len(costs)


def spent(kind: str, output: Path, counted: set[Path]) -> float:
    """What the agent, QNet or file that `output` was made from cost and, each once, all that it was made from."""
    named = read_meta(output).get("arguments", {}).get(kind)
    path = input_of(output, kind) or (Path(named) if named else None)
    if path is None or path in counted:
        return 0.0
    counted.add(path)
    meta = read_meta(path)
    if not meta:  # from elsewhere: an agent and demonstrations are what all begin with
        return 0.0 if kind in ("sft", "expert") else math.nan
    tokens = meta.get("tokens", 0)
    if tokens is None:  # of trees that were resumed
        tokens = math.nan
    if kind == "sft" and "last" in meta:  # of a learner: its last line
        tokens = meta["passes"] * meta["last"]["tokens"] + meta["last"].get("played", 0)
    elif kind == "sft":  # cloned: at first, or again from what self_train kept
        expert = input_of(path, "expert") or Path(meta.get("arguments", {}).get("expert") or "-")
        tokens = UPDATE * tokens if "kept" in read_meta(expert) else 0
    elif kind == "qnet":
        tokens *= UPDATE
    return tokens + sum(spent(name, path, counted) for name in ("sft", "expert", "trees", "labels", "qnet"))


def frontier(groups: Sequence[Group]) -> Figure | None:
    """Mean reward against the tokens of training and of playing 100, 1,000 and 10,000 tasks.

    A line an agent, from greedy over QLASS with more and more candidates, and a dotted one over best-of-N by QNet;
    hollow where QNet is of the cloned agent's trees ("old QNet" in the label). A bar is a reward's interval. None
    where no agent was trained after cloning.
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
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        for axes, tasks in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
            for (agent, label, style), line in lines.items():
                i = list(starts).index(agent)
                x = [(cost[id(group)] + tasks * group.mean("total")) / 1e6 for group in line]
                look = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)], "linestyle": style}
                look |= {"markerfacecolor": "white"} if label.endswith("old QNet") else {}
                name = (agent or "cloned") if (label, style) == (agent, "-") else None
                axes.plot(x, [group.reward.mean for group in line], label=name, linewidth=0.8, **look)
                low, high = zip(*((group.reward.low, group.reward.high) for group in line), strict=True)
                axes.vlines(x, low, high, look["color"], alpha=0.4, linewidth=1)
            axes.set_title(f"{tasks:,} tasks", loc="left", fontsize=10)
            log_axis(axes, "million tokens in all")
        figure.axes[0].set_ylabel("mean reward")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure
