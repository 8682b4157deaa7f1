"""The pairs of (s, a) of labelled trees, from which a QNet learns, and how it ranks siblings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qlass import UserError
from qlass.batching import Score
from qlass.messages import State
from qlass.records import Label, as_user_error
from qlass.trees import read_trees

HELD_OUT = 10  # every tenth tree is not trained on
GAP = 0.05  # siblings whose q differ by less are no pair to rank


@dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float


@dataclass(frozen=True, eq=False)
class Pack:
    """Pairs of a tree that the backbone reads together: whole families, or single pairs where none
    are compared."""

    families: list[list[Pair]]
    tokens: int  # that the backbone reads of it, without padding

    def __len__(self) -> int:
        """Count its pairs."""
        return sum(map(len, self.families))


def states_of(tree: list[dict]) -> list[State]:
    """The state of each node: the root's messages, then actions and their answers."""
    root = tree[0]
    opening = len(root["messages"]) - 1
    states = [State.from_messages(root["messages"], root.get("task", ""), opening)]
    for node in tree[1:]:
        states.append(states[node["parent_id"]].extended(node["action"], node["observation"]))
    return states


def pairs_of(tree: list[dict]) -> list[Pair]:
    """The (s, a, q) of a labelled tree, in its order: a node's action in its parent's state."""
    states = states_of(tree)
    return [Pair(states[node["parent_id"]], node["action"], node["q"]) for node in tree[1:]]


def read_pairs(labels: Path) -> tuple[list[str], list[list[Pair]]]:
    """The tasks and the pairs of the labelled trees in a file."""
    trees = list(read_trees(labels, Label))
    with as_user_error(f"{labels}: a root without", errors=KeyError):
        pairs = list(map(pairs_of, trees))
    if not any(pairs):
        raise UserError(f"{labels}: no pair of (s, a) to train on")
    return [tree[0]["task_id"] for tree in trees], pairs


def families(pairs: list[Pair]) -> list[list[Pair]]:
    """The pairs of a tree by state: siblings together, in the order of the first of them."""
    siblings: dict[State, list[Pair]] = {}
    for pair in pairs:
        siblings.setdefault(pair.state, []).append(pair)
    return list(siblings.values())


def hold_out_trees(trees: list[list[Pair]]) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Trees to train on, and every tenth, from the first on, to validate; if no other tree has a
    pair, all are to train on."""
    training_set = [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    return training_set if any(training_set) else trees, trees[::HELD_OUT]


def ranking(score: Callable[[list[Score]], list[list[float]]], trees: list[list[Pair]]) -> dict:
    """Compare QNet's values with the q of these trees.

    mse                 their mean square error (Eq. 8)
    within_mse          the part of it within states, which alone can change the siblings' order
    sibling_accuracy    of the siblings whose q differ by more than GAP, the share of pairs that
                        QNet ranks alike; chance is .5

    score: answers Score requests.
    """
    together = [family for tree in trees for family in families(tree)]
    requests = [Score(f[0].state, tuple(pair.action for pair in f)) for f in together]
    values = list(map(np.array, score(requests)))
    targets = [np.array([pair.q for pair in family]) for family in together]
    errors = [v - q for v, q in zip(values, targets, strict=True)]
    square = sum(float((e**2).sum()) for e in errors)
    within = sum(float(((e - e.mean()) ** 2).sum()) for e in errors)
    right = [x for pair in zip(targets, values, strict=True) for x in agreement(*pair)]
    n = max(1, sum(map(len, errors)))
    return {
        "mse": square / n,
        "within_mse": within / n,
        "sibling_accuracy": float(sum(right) / len(right)) if right else None,
        "sibling_pairs": len(right),
    }


def agreement(q: np.ndarray, values: np.ndarray) -> list[float]:
    """Compare the order of k siblings' values (k,) with that of their q (k,).

    Returns a number for each pair of siblings to rank: 1 if the values have q's order, 0 if the
    opposite one, .5 if they are equal.
    """
    i, j = np.triu_indices(len(q), 1)
    to_rank = abs(q[i] - q[j]) > GAP
    alike = np.sign(q[i] - q[j]) * np.sign(values[i] - values[j])
    return list((alike[to_rank] + 1) / 2)
