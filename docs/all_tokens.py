"""What Eq. (11) asks of QNet at the token that search reads, from the labels alone: nothing is trained.

    python docs/all_tokens.py runs/webshop

The tokens of a pair (s, a) begin all pairs below it. So with the loss on all tokens a perfect net says, at the last
token of a, the mean q of (s, a) and of all pairs below, each weighted with 1 / its number of tokens. Printed for each
process reward: how much of its variance is between siblings, and how many siblings such a net would rank right, by its
own labels and by those of Q.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bellman import TARGETS, label
from qlass.chat import Chat, Rendering
from qlass.jsonl import read_trees
from qlass.models import load_chat
from qlass.packing import Pair, pack_pairs, pairs_of
from train_qnet import sibling_accuracy


def perfect_values(chat: Chat, pairs: list[Pair]) -> list[float]:
    """Of a tree's pairs in turn: what minimises the loss on all tokens at the last token of the action."""
    (pack,) = pack_pairs(chat, pairs, "all", sys.maxsize)
    ends = pack.ends[:, 0]
    return (pack.weighted_q[ends] / pack.weight[ends]).tolist()


def between_siblings(trees: list[list[Pair]]) -> float:
    """The share of the variance of q that a net can't explain without a look at the action."""
    families: dict = defaultdict(list)
    for t, pairs in enumerate(trees):
        for pair in pairs:
            families[t, pair.state].append(pair.q)
    values = np.concatenate(list(families.values()))
    return sum(np.var(family) * len(family) for family in families.values()) / (np.var(values) * len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder with sft/ and trees.jsonl")
    parser.add_argument("--gamma", type=float, default=0.98, help="default: %(default)s")
    args = parser.parse_args()
    chat = load_chat(args.run / "sft", Rendering.load(args.run / "sft"))
    trees = list(read_trees(args.run / "trees.jsonl", ["branch", "done"]))
    by_q = [pairs_of(label(tree, "q", args.gamma)) for tree in trees]
    print("| process reward | between siblings | a perfect net, of its own siblings | of Q's |\n|---|---|---|---|")
    for target in TARGETS:
        labelled = [pairs_of(label(tree, target, args.gamma)) for tree in trees]
        said = {}
        for pairs in labelled:
            said |= zip(((p.state, p.action) for p in pairs), perfect_values(chat, pairs), strict=True)
        ranked = (sibling_accuracy(some, said) for some in (labelled, by_q))
        cells = (f"{r['sibling_accuracy']:.3f} of {r['sibling_pairs']}" for r in ranked)
        print(f"| {target} | {between_siblings(labelled):.3f}", *cells, sep=" | ", end=" |\n", flush=True)


if __name__ == "__main__":
    main()
