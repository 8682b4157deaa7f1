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
from matplotlib.ticker import LogLocator, NullFormatter

from qlass import files
from qlass.files import read_meta
from reporting.figures import STYLE, looks
from reporting.pooling import inputs_of
from reporting.results import Group

TASKS = (100, 1_000, 10_000)
TRAINED = 3  # passes of an update


def training_tokens(group: Group) -> float:
    """What was spent on the agent after cloning, and on QNet and its trees where Q is asked for (NaN: unknown)."""
    total, files = 0.0, {result.where[0] for result in group.results.values()}  # a file a seed
    for results in files:
        used, counted = read_meta(results).get("arguments", {}), set()
        total += sum(spent(name, used, Path(results), counted) for name in inputs_of(group.condition))
    return total / max(1, len(files))


def spent(kind: str, arguments: dict, output: Path, counted: set[Path]) -> float:
    """What the agent, QNet or file that `output` was made from cost and, each once, all that it was made from."""
    path = input_of(arguments, kind, output)
    if path is None or path in counted:
        return 0.0
    counted.add(path)
    made = read_meta(path)
    if not made:  # from elsewhere: an agent and demonstrations are what all begin with
        return 0.0 if kind in ("sft", "expert") else math.nan
    used, tokens = made.get("arguments", {}), made.get("tokens", 0)
    if tokens is None:  # of trees that were resumed
        own = math.nan
    elif kind == "sft" and "last" in made:  # of a learner: its last line
        own = made["passes"] * made["last"]["tokens"] + made["last"].get("played", 0)
    elif kind == "sft":  # cloned: at first, or again from what self_train kept
        expert = input_of(used, "expert", path)
        own = TRAINED * tokens if expert and "kept" in read_meta(expert) else 0
    else:  # demonstrations that were not sampled have no tokens, nor have labels
        own = TRAINED * tokens if kind == "qnet" else tokens
    return own + sum(spent(name, used, path, counted) for name in ("sft", "expert", "trees", "labels", "qnet"))


def input_of(arguments: dict, name: str, output: Path) -> Path | None:
    """Where an input of `output` lies now, as it was recorded where it is gone."""
    return (files.input_of(output, name) or Path(arguments[name])) if arguments.get(name) else None


def agent_of(label: str) -> tuple[str, bool]:
    """The agent that a label names, and whether QNet is of another one's trees."""
    agent, _, net = (label or "cloned").partition(", ")
    return (agent, net == "old QNet") if net in ("old QNet", "own QNet") else (label or "cloned", False)


def frontier(groups: Sequence[Group]) -> Figure | None:
    """Mean reward against the tokens of training and of playing 100, 1,000 and 10,000 tasks, the best joined by steps.

    A line an agent, from greedy over QLASS with more and more candidates, and a dotted one over best-of-N by QNet;
    hollow where QNet is of the cloned agent's trees, not of its own. Small: an agent of a label "NAME, more words",
    such as one stopped at another budget. A bar is a reward's interval. None where no agent was trained after cloning.
    """
    cost = {id(group): training_tokens(group) for group in groups}
    groups = [group for group in groups if not math.isnan(cost[id(group)])]
    starts = {agent_of(g.condition.label)[0]: g for g in groups if g.condition.method == "greedy"}
    lines: dict[tuple[str, bool, str], list[Group]] = {}
    for group in groups:
        made, (agent, old) = group.condition, agent_of(group.condition.label)
        searched = made.method == "qlass" and (made.N or 1) == 1
        if agent in starts and (searched or (made.method == "best_of_n" and made.select == "q")):
            lines.setdefault((agent, old, "-" if searched else ":"), [starts[agent]]).append(group)
    if not lines or not any(cost[id(g)] for g in starts.values()):
        return None
    for agent in starts.keys() - {agent for agent, *_ in lines}:  # alone
        lines[agent, False, "-"] = [starts[agent]]
    names = {agent: agent.partition(", ")[0] for agent, *_ in lines}
    styles = looks(names.values())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        for axes, tasks in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
            points = []
            for (agent, old, style), some in lines.items():
                look = styles[names[agent]] | {"linewidth": 0.8, "linestyle": style}
                look |= {"markersize": 3} if agent != names[agent] else {"label": agent}
                xy = [(cost[id(g)] + tasks * g.mean("total"), g.reward.mean) for g in some]
                axes.plot(*zip(*xy, strict=True), markerfacecolor="white" if old else None, **look)
                low, high = zip(*((g.reward.low, g.reward.high) for g in some), strict=True)
                axes.vlines([x for x, _ in xy], low, high, look["color"], alpha=0.4, linewidth=1)
                points += xy
            axes.step(*zip(*pareto(points), strict=True), where="post", color="black", alpha=0.15, linewidth=4)
            axes.set_xscale("log")
            left, right = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right < 300 * left else (1,)))  # or they overlap
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{tasks:,} tasks", loc="left", fontsize=10)
            axes.set_xlabel("million tokens in all")
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
