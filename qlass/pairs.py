"""What a QNet learns from: the pairs of (s, a) of labelled trees, and whether it ranks siblings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.batching import Score
from qlass.chat import Chat
from qlass.leaks import begins_of
from qlass.messages import State
from qlass.trees import read_trees

HELD_OUT = 10  # the trees of every tenth task are not trained on


@dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float


Pairs = list[Pair]  # of one tree, depth first; or of one state


def states_of(tree: list[dict]) -> dict[int, State]:
    """The state of each node by node_id: the root's messages, then actions and their answers."""
    root = tree[0]
    states = {root["node_id"]: State.load(root["messages"], root.get("task") or "")}
    for node in tree[1:]:
        parent = states[node["parent_id"]]
        states[node["node_id"]] = parent.then(node["action"], node["observation"])
    return states


def task_of(tree: list[dict]) -> tuple[str, str]:
    """The id and the first observation of a tree's task."""
    root = tree[0]
    return root["task_id"], State.load(root["messages"]).observation


def pairs_of(tree: list[dict]) -> Pairs:
    """All (s, a, q) of a labelled tree, depth first: a node's action in its parent's state."""
    states = states_of(tree)
    return [Pair(states[node["parent_id"]], node["action"], node["q"]) for node in tree[1:]]


def families(pairs: Pairs) -> list[Pairs]:
    """The pairs of a tree by state: siblings together, in the order of the first of them."""
    siblings: dict[State, Pairs] = {}
    for pair in pairs:
        siblings.setdefault(pair.state, []).append(pair)
    return list(siblings.values())


def hold_out(trees: list[Pairs], tasks: Sequence[str]) -> tuple[list[Pairs], list[Pairs]]:
    """Trees to train on, and those of every tenth task, from the first on, to validate.

    tasks: of each tree. The trees of a task alone are both.
    """
    held_out = set(list(dict.fromkeys(tasks))[::HELD_OUT])
    learned = [tree for tree, task in zip(trees, tasks, strict=True) if task not in held_out]
    validation = [tree for tree, task in zip(trees, tasks, strict=True) if task in held_out]
    return learned or trees, validation


def read_pairs(
    labels: Path, chat: Chat, limit: int | None = None
) -> tuple[list[Pairs], dict[str, Any]]:
    """The pairs that the model can read, of each of the first `limit` labelled trees; figures for
    the metadata."""
    tasks, trees, left_out = [], [], 0
    labelled = read_trees(labels, ["q", "messages"])
    for tree in itertools.islice(labelled, limit):
        try:
            pairs = pairs_of(tree)
        except UserError as error:
            name = f"the tree of task {tree[0]['task_id']}"
            raise UserError(f"{labels}: {name}: {error}") from None
        tasks.append(task_of(tree))
        trees.append([pair for pair in pairs if chat.fits(pair.state, pair.action)])
        left_out += len(pairs) - len(trees[-1])
    if left_out:
        why = "beyond the model's context (--truncate oldest cuts them)"
        print(f"{left_out} pairs are left out: {why}")
    figures = {"trees": len(trees), "pairs_left_out": left_out, "begins": begins_of(tasks)}
    return trees, figures | {"tasks": [task_id for task_id, _ in tasks]}


def ranking(
    score: Callable[[list[Score]], list[list[float]]], trees: list[Pairs]
) -> dict[str, Any]:
    """On these trees, of Q: the mean square error (Eq. 8), the part of it within states, and
    `sibling_accuracy`. score: what answers Score requests."""
    pairs = list(itertools.chain(*trees))
    values = score([Score(pair.state, (pair.action,)) for pair in pairs])
    scores = {
        (pair.state, pair.action): value for pair, (value,) in zip(pairs, values, strict=True)
    }
    square = within = 0.0
    for family in itertools.chain(*map(families, trees)):
        errors = [scores[pair.state, pair.action] - pair.q for pair in family]
        mean = sum(errors) / len(errors)
        square += sum(error**2 for error in errors)
        within += sum((error - mean) ** 2 for error in errors)
    n = max(1, len(pairs))
    errors_of_q = {"mse": square / n, "within_mse": within / n}
    return errors_of_q | sibling_accuracy(trees, scores)


GAP = 0.05  # siblings whose q differ by less are no pair to rank


def sibling_accuracy(trees: list[Pairs], scores: dict) -> dict[str, Any]:
    """Of the sibling pairs whose q differ by more than GAP, the share whose scores agree.

    Chance is .5.
    """
    right = []
    for family in itertools.chain(*map(families, trees)):
        for a, b in itertools.combinations(family, 2):
            if abs(a.q - b.q) <= GAP:
                continue
            difference = scores[a.state, a.action] - scores[b.state, b.action]
            if difference == 0:  # an even guess
                right.append(0.5)
            else:
                right.append(float((difference > 0) == (a.q > b.q)))
    accuracy = sum(right) / len(right) if right else None
    return {"sibling_accuracy": accuracy, "sibling_pairs": len(right)}
