"""trees.jsonl: how a tree is written, counted and read.

A line is a node. The lines of a tree stand together, the root first, parents before children.
No torch here, so that bellman.py starts at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import records_of
from qlass.messages import broken

SAVED = ("depth", "action", "observation", "reward", "done", "source", "branch", "expert")


def tree_records(env: Any, task_id: str, root: Any) -> list[dict]:
    """A tree as lines of trees.jsonl. root: a `build_trees.Node`; its line has the prompt and the
    number of nodes."""
    nodes = list(root.subtree())
    number: dict[Any, int] = {node: i for i, node in enumerate(nodes)}
    records = []
    for i, node in enumerate(nodes):
        record = {"task_id": task_id, "node_id": i, "parent_id": number.get(node.parent)}
        records.append(record | {name: getattr(node, name) for name in SAVED})
        if node.cut is not None:
            records[-1]["cut"] = node.cut
    records[0] |= {"env": env.name, "task": root.state.task}
    records[0] |= {"messages": root.state.dump(), "nodes": len(nodes)}
    return records


def tree_metrics(records: list[dict]) -> dict[str, Any]:
    """For the metadata: counts, and the mean reward of the agent's leaves."""
    rewards = []
    for node in records:
        is_leaf = node.get("done") or "cut" in node
        if is_leaf and node.get("source") == "policy":
            rewards.append(node.get("cut", node["reward"]))
    return {
        "trees": len({node["task_id"] for node in records}),
        "nodes": len(records),
        "leaves": len(rewards),
        "mean_leaf_reward": sum(rewards) / max(1, len(rewards)),
        "refused_tasks": len([node for node in records if "refused" in node]),
    }


NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")
KINDS: dict[str, Any] = {  # of a node's fields, as far as a reader depends on them
    "node_id": int | str,
    "parent_id": int | str | None,
    "action": str,
    "observation": str,
    "reward": int | float,
    "cut": int | float,
    "q": int | float,
    "q_raw": int | float,
    "messages": list,
}


def refuse_node(node: dict, where: str) -> None:
    """UserError for a node that no stage could have written."""
    is_root = node["parent_id"] is None
    for name, kind in KINDS.items():
        if name not in node or (name == "action" and is_root):  # no action leads to a root
            continue
        value = node[name]
        if not isinstance(value, kind) or (kind is str and broken(value)):
            raise UserError(f"{where}: {name} can't be {value!r:.40}")
    for turn in node.get("messages", []):
        if not isinstance(turn, dict):
            raise UserError(f"{where}: messages are no list of objects with role and content")
    if is_root and node.get("messages") and node["messages"][-1].get("role") != "user":
        raise UserError(f"{where}: messages end with the agent's turn, where it is to act")


def read_trees(path: str | Path, required: Iterable[str] = ()) -> Iterator[list[dict]]:
    """The trees of a file, each as its list of nodes, the root first.

    required: fields of a node besides NODE; "messages" of the root alone.
    """
    records = records_of(Path(path))
    for task, lines in itertools.groupby(records, lambda record: record[1].get("task_id")):
        tree: list[dict] = []
        names = {None}
        for where, node in lines:
            fields = {*NODE, *required} - ({"messages"} if tree else set())
            if missing := sorted(fields - node.keys()):
                raise UserError(f"{where}: no {missing[0]}; is this a file of trees?")
            refuse_node(node, where)
            if node["parent_id"] not in names or node["node_id"] in names:
                raise UserError(f"{where}: node {node['node_id']} is before its parent, or twice")
            names.discard(None)  # the root's parent
            names.add(node["node_id"])
            tree.append(node)
        if len(tree) != tree[0].get("nodes", len(tree)):
            way_out = "its stage makes it again with --overwrite"
            raise UserError(f"{path}: the tree of task {task} is cut, or twice: {way_out}")
        yield tree


def children_of(tree: list[dict]) -> list[list[int]]:
    """The places, in the tree's list, of the children of each node."""
    position = {node["node_id"]: i for i, node in enumerate(tree)}
    children: list[list[int]] = [[] for _ in tree]
    for i, node in enumerate(tree[1:], 1):
        children[position[node["parent_id"]]].append(i)
    return children
