"""Stage 3: Q-values on the trees (Eq. 7, Algorithm 3).

    reads   RUN/trees.jsonl
    writes  RUN/q_labels.jsonl: the same lines with `q_raw` (Eq. 7) and `q` (min-max in the tree)

    python bellman.py --trees trees.jsonl --gamma 0.9 --out q_labels.jsonl

A node stands for the pair (s, a) of its parent's state and its own action: its value is Q(s, a).
The root has no action: its value counts in the min-max, but no pair is made of it. If all values
of a tree are equal, q is 0.
"""

import dataclasses
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import ClassVar

from qlass.inputs import find_or_make
from qlass.outputs import begin, costs, publish
from qlass.settings import Fraction, Run, place, read_settings, run_stage
from qlass.trees import children_of, read_trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    stage: ClassVar = "bellman"
    output: ClassVar = "q_labels.jsonl"

    trees: Path | None = place(None)  # RUN/trees.jsonl, made if missing
    out: Path | None = place(None)  # RUN/q_labels.jsonl
    gamma: Fraction  # of Eq. (7)


# Computes a value for each node of a tree, given its nodes, parents before children, and gamma.
Values = Callable[[list[dict], float], list[float]]


def q_values(tree: list[dict], gamma: float) -> list[float]:
    """Eq. (7): Q(s, a) = r + gamma max_a' Q(s', a'). A leaf keeps its reward."""
    children = children_of(tree)
    q = [node["reward"] for node in tree]
    for i in reversed(range(len(tree))):  # Algorithm 3: from the leaves to the root
        if children[i]:
            q[i] += gamma * max(q[child] for child in children[i])
    return q


def min_max(values: list[float]) -> list[float]:
    """The last lines of Algorithm 3: to [0, 1] within the tree; all 0 if all are equal."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 0.0 for v in values]


def label(tree: list[dict], raw: list[float]) -> list[dict]:
    """The same nodes with `q_raw`, their values, and `q`, the min-max of these in the tree."""
    values = zip(tree, raw, min_max(raw), strict=True)
    return [node | {"q_raw": value, "q": scaled} for node, value, scaled in values]


def write_labels(config: Config, values: Values = q_values) -> None:
    """Label all trees. values: `q_values`, or another one of experiments.targets."""
    began = time.monotonic()
    path = find_or_make(config.trees, "build_trees", "trees.jsonl", config)
    out = config.path
    labelled = [label(tree, values(tree, config.gamma)) for tree in read_trees(path)]
    # experiments.targets makes `q` by other rules; the recipe names the rule.
    meta = begin(out, config, {"target": "q"} | config.recipe(), {"trees": path})
    publish(out, chain(*labelled), meta | {"trees": len(labelled)} | costs(began))
    flat = sum(not any(node["q"] for node in tree) for tree in labelled)
    print(f"{out}: {len(labelled)} trees, {flat} of them with all values equal (q = 0)")


def main(argv: list[str] | None = None) -> None:
    write_labels(read_settings(Config, __doc__, argv))


if __name__ == "__main__":
    run_stage(main)
