"""Train or search? What an agent's reward costs in all: what was trained, and what is spent on each task played.

Both in tokens of a forward pass; an update counts as three, since a backward pass costs two. Cloning is left out: all
agents begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from qlass.metadata import read_meta
from reporting.figures import MARKERS, SERIES, STYLE

if TYPE_CHECKING:
    from reporting.results import Group

TASKS = (100, 1_000, 10_000)
LEARNED = 6  # a rollout, the old agent, the reference, and an update
TRAINED = 3  # an update alone


def record(path: str | Path | None) -> dict:
    """The metadata of an output, {} where there is none."""
    return read_meta(path) if path else {}


def training_tokens(group: Group) -> float:
    """What was spent on the agent after cloning, and on QNet and its trees where the method asks for Q."""
    total, files = 0.0, {result.where[0] for result in group.results.values()}  # a file a seed
    for results in files:
        asked = record(results).get("arguments", {})
        agent = record(asked.get("sft"))
        total += LEARNED * agent.get("last", {}).get("tokens", 0)
        if group.condition.method == "qlass" or group.condition.select == "q":
            qnet = record(asked.get("qnet"))
            labels = record(qnet.get("arguments", {}).get("labels"))
            trees = record(labels.get("arguments", {}).get("trees"))
            total += TRAINED * qnet.get("tokens", 0) + (trees.get("tokens") or 0)
    return total / max(1, len(files))


def frontier(groups: Sequence[Group]) -> Figure | None:
    """Mean reward against the tokens of training and of playing 100, 1,000 and 10,000 tasks; the best joined.

    None where no agent was trained after cloning.
    """
    plain = [g for g in groups if g.condition.method in ("greedy", "sample", "qlass") and not g.condition.oracle]
    cost = {id(g): training_tokens(g) for g in plain}
    learned = [g for g in plain if cost[id(g)] and g.condition.method != "qlass"]
    if not learned:
        return None
    labels = list(dict.fromkeys(g.condition.label for g in plain))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        for axes, tasks in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
            points = [(cost[id(g)] + tasks * g.mean("total"), g.reward.mean, g) for g in plain]
            for x, y, g in points:
                i = labels.index(g.condition.label)
                look = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)]}
                name = g.condition.label or "cloned"
                axes.plot([x], [y], label=name if g.condition.method == "greedy" else None, linestyle="", **look)
                said = g.condition.budget or g.condition.method
                axes.annotate(said, (x, y), (4, 4), textcoords="offset points", fontsize=7, color=look["color"])
            best = pareto([(x, y) for x, y, _ in points])
            axes.step(*zip(*best, strict=True), where="post", color=SERIES[0], alpha=0.3)
            axes.set_xscale("log")
            axes.set_title(f"{tasks:,} tasks", loc="left", fontsize=10)
            axes.set_xlabel("tokens in all")
            axes.grid(alpha=0.25)
        figure.axes[0].set_ylabel("mean reward")
        handles = dict(zip(*figure.axes[0].get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        return figure


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points with more reward than any cheaper one."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best
