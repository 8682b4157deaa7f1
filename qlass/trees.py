"""Trees: how they are written, read and counted.

The lines of a tree stand together, the root first, parents before children. A tree is the list of
its nodes, and a node's number is its place in it. No torch here, so that bellman.py starts at once.
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.environment import TextEnv
from qlass.records import Node, read


def tree_records(env: TextEnv, task_id: str, root: Any, rewards: Sequence[float]) -> list[dict]:
    """A tree of `build_trees.Node` as lines of trees.jsonl (docs/files.md). rewards: of the agent's
    rollouts in it."""
    nodes = list(root.subtree())
    number: dict[Any, int] = {node: i for i, node in enumerate(nodes)}
    records: list[dict] = []
    for i, node in enumerate(nodes):
        stopped = node.reward_at_limit is not None
        record = {
            "task_id": task_id,
            "node_id": i,
            "parent_id": number.get(node.parent),
            "depth": node.depth,
            "action": node.action,
            "observation": node.state.observation,
            "reward": node.reward,
            "done": node.done,
            "source": node.source,
            "branch": node.branch,
            "expert": node.demonstrated,
        }
        if stopped and node.children:  # only the demonstration is longer
            record["cut"] = node.reward_at_limit
        elif stopped:
            record |= {"reward": node.reward_at_limit, "done": True}
        records.append(record)
    records[0] |= {
        "observation": root.state.observation.removeprefix(env.instruction),
        "env": env.name,
        "task": root.state.task,
        "messages": root.state.dump(),
        "nodes": len(nodes),
        "rollouts": list(rewards),
    }
    return records


def read_trees(path: Path, kind: Any = Node) -> Iterator[list[dict]]:
    """The trees of a file, each as its list of nodes. kind: `records.Label` of q_labels.jsonl."""
    tasks: set[str] = set()
    for task, lines in itertools.groupby(read(path, kind), itemgetter("task_id")):
        tree: list[dict] = list(lines)
        nodes = tree[0].get("nodes")
        if task in tasks or len(tree) != nodes:
            raise UserError(f"{path}: task {task}: its lines are not one tree of {nodes} nodes")
        tasks.add(task)
        for i, node in enumerate(tree):
            parents: Any = range(i) if i else [None]
            if node["node_id"] != i or node["parent_id"] not in parents:
                raise UserError(
                    f"{path}: task {task}: node {i} is not in its place, or has no parent before it"
                )
        yield tree
    if not tasks:
        raise UserError(f"{path}: holds no tree")


def children_of(tree: list[dict]) -> list[list[int]]:
    """The children of each node."""
    children: list[list[int]] = [[] for _ in tree]
    for node in tree[1:]:
        children[node["parent_id"]].append(node["node_id"])
    return children


def tree_metrics(records: list[dict]) -> dict:
    """Counts for the metadata: trees, nodes and rollouts; and the mean reward of the rollouts."""
    roots = [node for node in records if node["parent_id"] is None]
    rewards = [reward for root in roots for reward in root["rollouts"]]
    return {
        "trees": len(roots),
        "nodes": len(records),
        "rollouts": len(rewards),
        "mean_reward": sum(rewards) / max(1, len(rewards)),
    }
