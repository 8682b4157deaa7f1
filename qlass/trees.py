"""Trees: how they are read and counted; Section 5.2's targets of a QNet beside Eq. (7).

The lines of a tree stand together, the root first, parents before children. A tree is the list of
its nodes. No torch here, so that bellman.py starts at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.records import Node, read


def read_trees(path: Path, kind: Any = Node) -> Iterator[list[dict]]:
    """The trees of a file, each as its list of nodes. kind: `records.Label` of q_labels.jsonl."""
    for task, lines in itertools.groupby(read(path, kind), itemgetter("task_id")):
        tree: list[dict] = list(lines)
        if len(tree) != tree[0].get("nodes"):
            raise UserError(f"{path}: the tree of task {task} is cut, or twice")
        yield tree


def children_of(tree: list[dict]) -> list[list[int]]:
    """The places, in the tree's list, of the children of each node."""
    position = {node["node_id"]: i for i, node in enumerate(tree)}
    children: list[list[int]] = [[] for _ in tree]
    for i, node in enumerate(tree[1:], 1):
        children[position[node["parent_id"]]].append(i)
    return children


def tree_metrics(records: list[dict]) -> dict[str, Any]:
    """For the metadata: counts, and the mean reward of the agent's leaves."""
    roots = [node for node in records if node["parent_id"] is None]
    rewards = []
    for node in records:
        if node["source"] == "policy" and (node["done"] or "cut" in node):
            rewards.append(node.get("cut", node["reward"]))
    return {
        "trees": len(roots),
        "nodes": len(records),
        "leaves": len(rewards),
        "mean_reward": sum(rewards) / max(1, len(rewards)),
    }


# ------------------------------------------------- process rewards of Section 5.2 (Fig. 4)


def average_rewards(tree: list[dict], gamma: float) -> list[float]:
    """The mean of the final rewards below a node (Math-Shepherd's soft estimate)."""
    children = children_of(tree)
    total = [node.get("cut", node["reward"]) for node in tree]
    leaves = []
    for node, below in zip(tree, children, strict=True):
        leaves.append(int("cut" in node or not below))
    for i in reversed(range(len(tree))):  # from the leaves to the root
        for child in children[i]:
            leaves[i] += leaves[child]
        total[i] += sum(total[child] for child in children[i])
    return [rewards / n for rewards, n in zip(total, leaves, strict=True)]


def branch_rewards(tree: list[dict], gamma: float) -> list[float]:
    """The final reward of the branch that made the node; 0 if the demonstration stops early."""
    final: dict[int, float] = {}
    goes_on = {(node["parent_id"], node["branch"]) for node in tree}
    for node in tree:
        here = node["node_id"], node["branch"]
        if node["done"] or ("cut" in node and here not in goes_on):
            final[node["branch"]] = node.get("cut", node["reward"])
    rewards = []
    for node in tree[1:]:
        rewards.append(final.get(node["branch"], 0.0))
    lowest = min(rewards, default=0.0)  # the root's, which no branch made
    return [lowest, *rewards]
