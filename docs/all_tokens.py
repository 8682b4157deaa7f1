"""What Eq. (11) asks of QNet at the token that search reads, from the labels alone: nothing is trained.

    python docs/all_tokens.py runs/webshop

The tokens of a pair (s, a) begin all pairs below it. So with the loss on all tokens a perfect net says, at the last
token of a, the mean q of (s, a) and of all pairs below, each weighted with 1 / its number of tokens. Printed for each
process reward: how much of what a net can explain needs a look at the action, with the loss on the last token and on
all; and how many siblings the perfect net would rank right, by its own labels and by those of Q.
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
from qlass.checks import sibling_accuracy
from qlass.fast.packing import PackedPairs, pack_pairs
from qlass.files import read_trees
from qlass.models import load_chat
from qlass.qnet import Pair, pairs_of


def packed(chat: Chat, pairs: list[Pair]) -> PackedPairs:
    """A tree's pairs with the loss on all tokens."""
    (pack,) = pack_pairs(chat, pairs, "all", sys.maxsize)
    return pack


def perfect_values(pack: PackedPairs) -> np.ndarray:
    """What minimises the loss at each token, (tokens,)."""
    return pack.weighted_q / pack.weight


def needs_the_action(packs: list[PackedPairs]) -> float:
    """Of what the values of tokens explain of the labels, the share that a net would miss which reads no action.

    It would say at an action's tokens what the last token before them has.
    """
    weight, weighted_q = (sum(getattr(p, of).sum(dtype=float) for p in packs) for of in ("weight", "weighted_q"))
    missed, explained = 0.0, -(weighted_q**2) / weight
    for pack in packs:
        values, before = perfect_values(pack).astype(float), {}
        for end, n in pack.ends.tolist():
            above = pack.tree.above(end)
            before |= dict.fromkeys(above[:n], above[n])
        explained += (pack.weight * values**2).sum()
        missed += sum(pack.weight[token] * (values[token] - values[last]) ** 2 for token, last in before.items())
    return missed / explained


def between_siblings(trees: list[list[Pair]]) -> float:
    """The same with the loss on the last token: the share of the variance of q that is between siblings."""
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
    print(
        "| process reward | needs the action: last token | all tokens | a perfect net, of its own siblings | of Q's |"
    )
    print("|---|---|---|---|---|")
    for target in TARGETS:
        labelled = [pairs_of(label(tree, target, args.gamma)) for tree in trees]
        packs, said = [packed(chat, pairs) for pairs in labelled], {}
        for pack in packs:
            values = perfect_values(pack)[pack.ends[:, 0]].tolist()
            said |= zip(((p.state, p.action) for p in pack.members), values, strict=True)
        ranked = (sibling_accuracy(some, said) for some in (labelled, by_q))
        cells = [f"{r['sibling_accuracy']:.3f} of {r['sibling_pairs']}" for r in ranked]
        print(
            f"| {target} | {between_siblings(labelled):.3f} | {needs_the_action(packs):.3f} | {' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
