"""Trees: how they are read and counted.

The lines of a tree stand together, the root first, parents before children. A tree is the list of
its nodes. No torch here, so that bellman.py starts at once.
"""

import itertools
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.records import Node, read


def read_trees(path: Path, kind: Any = Node) -> Iterator[list[dict]]:
    """The trees of a file, each as its list of nodes. kind: `records.Label` of q_labels.jsonl."""
    tasks: set[str] = set()
    for task, lines in itertools.groupby(read(path, kind), itemgetter("task_id")):
        tree: list[dict] = list(lines)
        nodes = tree[0].get("nodes")
        if task in tasks or len(tree) != nodes:
            raise UserError(f"{path}: task {task}: its lines are not one tree of {nodes} nodes")
        tasks.add(task)
        before: set[int | None] = {None}  # the parents that a node may have
        for node in tree:
            number = node["node_id"]
            if node["parent_id"] not in before or number in before:
                raise UserError(f"{path}: task {task}: node {number} has no parent before it")
            before.discard(None)
            before.add(number)
        yield tree
    if not tasks:
        raise UserError(f"{path}: holds no tree")


def children_of(tree: list[dict]) -> list[list[int]]:
    """The places, in the tree's list, of the children of each node."""
    position = {node["node_id"]: i for i, node in enumerate(tree)}
    children: list[list[int]] = [[] for _ in tree]
    for i, node in enumerate(tree[1:], 1):
        children[position[node["parent_id"]]].append(i)
    return children


def tree_metrics(records: list[dict]) -> dict[str, Any]:
    """For the metadata: how many trees and nodes, the agent's rollouts and their mean reward."""
    roots = [node for node in records if node["parent_id"] is None]
    rewards = [reward for root in roots for reward in root.get("rollouts", [])]
    return {
        "trees": len(roots),
        "nodes": len(records),
        "rollouts": len(rewards),
        "mean_reward": sum(rewards) / max(1, len(rewards)),
    }
