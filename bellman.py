"""Stage 3: Q-values on the trees (Eq. 7, Algorithm 3).

    python bellman.py --trees trees.jsonl --gamma 0.9 --target q --out q_labels.jsonl

    reads   RUN/trees.jsonl
    writes  RUN/q_labels.jsonl: the same lines with `q_raw` (Eq. 7) and `q` (min-max in the tree)

A node stands for the pair (s, a) of its parent's state and its own action: its value is Q(s, a).
The root has no action: its value counts in the min-max, but no pair is made of it. If all values
of a tree are equal, q is 0.
"""

from __future__ import annotations

# qlass comes first: it says in one line which packages are missing.
from qlass import UserError  # isort: skip

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from qlass.config import Run, Share, free, read, run_stage
from qlass.runs import find_or_make, outdated, write_at_once
from qlass.trees import children_of, read_trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    stage: ClassVar[str] = "bellman"

    trees: Path | None = free(None)  # RUN/trees.jsonl, made if missing
    out: Path | None = free(None)  # RUN/q_labels.jsonl
    gamma: Share = 0.9  # of Eq. (7), for --target q
    target: Literal["q", "avg", "reward"] = "q"  # Eq. (7), or Section 5.2's others
    device: str | None = free(None)  # of the stages that make missing trees
    precision: str | None = free(None)  # of these stages


# A tree is the list of its nodes, parents before children.


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


def label(tree: list[dict], target: str, gamma: float) -> list[dict]:
    """The same nodes with `q_raw`, the target of this name, and `q`, its min-max in the tree."""
    if target == "q":
        raw = q_values(tree, gamma)
    else:
        from qlass.optional.targets import TARGETS

        raw = TARGETS[target](tree, gamma)
    values = zip(tree, raw, min_max(raw), strict=True)
    return [node | {"q_raw": value, "q": scaled} for node, value, scaled in values]


# --------------------------------------------------------------------------------------------- main


def metrics(labelled: list[list[dict]]) -> dict[str, Any]:
    """For the metadata."""
    tasks = [tree[0]["task_id"] for tree in labelled]
    nodes = sum(map(len, labelled))
    flat = sum(not any(node["q"] for node in tree) for tree in labelled)
    return {"tasks": tasks, "trees": len(tasks), "nodes": nodes, "flat_trees": flat}


def write_labels(config: Config) -> None:
    """The stage: q_labels.jsonl of trees.jsonl."""
    path = find_or_make(config.trees, "build_trees", "trees.jsonl", config)
    out = config.out or config.run / "q_labels.jsonl"
    required = ["done", "branch"] if config.target == "reward" else []
    trees = read_trees(path, required)
    labelled = [label(tree, config.target, config.gamma) for tree in trees]
    if not labelled:
        raise UserError(f"{path}: holds no trees; build_trees.py writes them")
    counts = metrics(labelled)
    if out in dict(outdated(out)):
        print(f"{path} has changed since {out} was made: it is made again")
    of_this_run = path.resolve() == out.resolve().with_name("trees.jsonl")
    may_change = ["trees"] if of_this_run else []  # the run may get more of them
    write_at_once(out, config, chain(*labelled), {"trees": path}, may_change, **counts)
    flat = f"{counts['flat_trees']} of them with all values equal (q = 0)"
    print(f"{out}: {counts['nodes']} nodes of {counts['trees']} trees, {flat}")


def main(argv: list[str] | None = None) -> None:
    write_labels(read(Config, __doc__, argv))


if __name__ == "__main__":
    run_stage(main)
