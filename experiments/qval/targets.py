"""Other values of the same trees, for nets that train_qnet.py trains as it does QNet.

python -m experiments.qval.targets --env frozenlake --target td
python train_qnet.py --env frozenlake --labels runs/frozenlake/q_labels-td.jsonl --out runs/frozenlake/qnet-td

td   r + gamma times the mean of the children: where TD(0) settles on the tree's transitions, each as frequent as
     its siblings. Bellman's maximum is the difference to Eq. (7)
mc   the discounted reward of the branch that made the node: the sample that a Monte-Carlo value net regresses on
"""

from __future__ import annotations

import argparse
from pathlib import Path

import envs
from bellman import branch_rewards, children_of, min_max
from qlass.jsonl import dumps, read_trees, replacing
from qlass.metadata import write_meta
from qlass.stage import needed, parse, parser, run_stage


def td(tree: list[dict], gamma: float) -> list[float]:
    q = [node["reward"] for node in tree]
    for i, children in reversed(list(enumerate(children_of(tree)))):
        if children:
            q[i] += gamma * sum(q[child] for child in children) / len(children)
    return q


def mc(tree: list[dict], gamma: float) -> list[float]:
    end = {node["branch"]: node["depth"] for node in tree if node["done"]}
    pairs = zip(tree, branch_rewards(tree), strict=True)
    return [gamma ** max(0, end.get(n["branch"], n["depth"]) - n["depth"]) * reward for n, reward in pairs]


TARGETS = {"td": td, "mc": mc}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    envs.add_arguments(made, argv)
    made.add_argument("--trees", type=Path, help="default: RUN/trees.jsonl, made if missing")
    made.add_argument("--out", type=Path, help="default: RUN/q_labels-TARGET.jsonl")
    made.add_argument("--gamma", type=float, default=0.9, help="discount (default: %(default)s)")
    made.add_argument("--target", choices=TARGETS, default="td", help="default: %(default)s")
    return parse(made, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.trees = needed(args.trees, args.run / "trees.jsonl", "build_trees", args)
    args.out = args.out or args.run / f"q_labels-{args.target}.jsonl"
    with replacing(args.out) as out:
        for tree in read_trees(args.trees):
            raw = TARGETS[args.target](tree, args.gamma)
            lines = zip(tree, raw, min_max(raw), strict=True)
            out.writelines(dumps(node | {"q_raw": r, "q": q}) for node, r, q in lines)
    write_meta(args.out, args, [args.trees])


if __name__ == "__main__":
    run_stage(main)
