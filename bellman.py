"""Stage 3: Q-values on the trees (Eq. 7, Alg. 3). Standard library and filelock.

    reads   RUN/trees.jsonl
    writes  RUN/q_labels.jsonl: the same lines with `q_raw` (Eq. 7) and `q` (min-max normalised within the tree)

    python bellman.py --trees trees.jsonl --gamma 0.9 --target q --out q_labels.jsonl

A node stands for the pair (s, a) of its parent's state and its own action, so its value is Q(s, a). Other process
rewards for comparison (Sec. 5.2): `avg`, the mean of the final rewards below a node (Math-Shepherd's soft estimate),
and `reward`, the final reward of the branch that made the node (the root has the lowest). All three are normalised
alike, the root included; a tree whose values are all equal ranks nothing and gets q = 0.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from qlass import UserError
from qlass.cli import at_least, find_or_make, parse, parser, run_stage
from qlass.files import locked, read_jsonl, read_meta, read_trees, write_jsonl, write_meta

PAPER = {"gamma": 0.9, "target": "q"}  # Eq. (7)

# A tree is its list of nodes, parents before children; `children[i]` are the positions of node i's children.


def children_of(tree: list[dict]) -> list[list[int]]:
    position = {node["node_id"]: i for i, node in enumerate(tree)}
    children: list[list[int]] = [[] for _ in tree]
    for i, node in enumerate(tree[1:], 1):
        children[position[node["parent_id"]]].append(i)
    return children


def q_values(tree: list[dict], gamma: float) -> list[float]:
    """Eq. (7): Q(s, a) = r + gamma max_a' Q(s', a'); a leaf keeps its reward. One value a node."""
    q = [node["reward"] for node in tree]
    for i, children in reversed(list(enumerate(children_of(tree)))):  # Alg. 3: from the leaves to the root
        if children:
            q[i] += gamma * max(q[child] for child in children)
    return q


def average_rewards(tree: list[dict]) -> list[float]:
    """The mean of the final rewards of all branches through a node."""
    total, leaves = [node["reward"] for node in tree], [0] * len(tree)
    for i, children in reversed(list(enumerate(children_of(tree)))):
        leaves[i] = sum(leaves[child] for child in children) or 1
        total[i] += sum(total[child] for child in children)
    return [t / n for t, n in zip(total, leaves, strict=True)]


def branch_rewards(tree: list[dict]) -> list[float]:
    """The final reward of the branch that made the node; a branch without a new node has no entry."""
    final = {node["branch"]: node["reward"] for node in tree if node["done"]}
    rewards = [final.get(node["branch"], 0.0) for node in tree[1:]]
    return [min(rewards, default=0.0), *rewards]  # no branch made the root, so it must not set the scale


def min_max(values: list[float]) -> list[float]:
    """Alg. 3, last lines: to [0, 1] within the tree; all 0 where all are equal."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 0.0 for v in values]


TARGETS = {
    "q": q_values,
    "avg": lambda tree, gamma: average_rewards(tree),
    "reward": lambda tree, gamma: branch_rewards(tree),
}
NEEDS = {"reward": ["branch", "done"]}  # fields of a node that not every tree has


def label(tree: list[dict], target: str, gamma: float) -> list[dict]:
    raw = TARGETS[target](tree, gamma)
    return [node | {"q_raw": r, "q": q} for node, r, q in zip(tree, raw, min_max(raw), strict=True)]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__)
    add = flags.add_argument
    add("--trees", type=Path, help="default: RUN/trees.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/q_labels.jsonl")
    add("--gamma", type=at_least(0, float, most=1), default=PAPER["gamma"], help="of Eq. (7) (default: %(default)s)")
    add("--target", choices=TARGETS, default=PAPER["target"], help="process reward (default: %(default)s)")
    for flag in ("--device", "--precision"):  # of the stage that makes missing trees
        add(flag, help=argparse.SUPPRESS)
    return parse(flags, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    started = time.time()
    args.trees = find_or_make(args.trees, args.run / "trees.jsonl", "build_trees", args)
    del args.precision  # the agent's, on which no label depends
    args.out = args.out or args.run / "q_labels.jsonl"
    first = next(read_jsonl(args.out), None) if args.out.exists() else None
    if first is not None and "q_raw" not in first:
        raise UserError(f"{args.out}: not labels that bellman.py made; name another --out")
    figures: Counter[str] = Counter()
    tasks: list[str] = []

    def labels() -> Iterator[dict]:
        for tree in read_trees(args.trees, NEEDS.get(args.target, [])):  # one tree in memory at a time
            nodes = label(tree, args.target, args.gamma)
            tasks.append(tree[0]["task_id"])
            figures.update(trees=1, nodes=len(nodes), flat_trees=len({node["q_raw"] for node in nodes}) == 1)
            yield from nodes
        if not figures:
            raise UserError(f"{args.trees}: holds no trees; build_trees.py writes them")

    begun = read_meta(args.out)["arguments"]
    for name in PAPER:  # more trees only add labels; another gamma or target would change those there
        now = vars(args)[name]
        if begun.get(name, now) != now and not args.overwrite:
            raise UserError(f"{args.out} has --{name} {begun[name]}, not {now}: --overwrite, or another --out")
    with locked(args.out):
        write_jsonl(args.out, labels())
        write_meta(args.out, vars(args), [args.trees], tasks=tasks, **figures, seconds=time.time() - started)
    counts = f"{figures['nodes']} nodes of {figures['trees']} trees, {figures['flat_trees']} of them"
    print(f"{args.out}: {counts} with all values equal (q = 0)")


if __name__ == "__main__":
    run_stage(main)
