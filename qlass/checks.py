"""Does a value order sibling actions as q does?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from qlass.chat import State

if TYPE_CHECKING:
    from qlass.qnet import Pair


def sibling_accuracy(trees: list[list[Pair]], scores: dict[tuple[State, str], float], gap: float = 0.05) -> dict:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores stand in the same order.

    Chance is .5. `own_...`: of pairs without a node of the expert's, since search compares draws of the agent.
    `spearman` is the rank correlation of all pairs, which a net that only knows V(s) can reach too.
    """
    from scipy.stats import spearmanr

    pairs = [pair for tree in trees for pair in tree]
    columns = [pair.q for pair in pairs], [scores[pair.state, pair.action] for pair in pairs]
    varied = all(len(set(column)) > 1 for column in columns)  # a constant has no ranks
    figures: dict[str, Any] = {"spearman": float(spearmanr(*columns).statistic) if varied else None}
    for name, own in (("sibling", False), ("own_sibling", True)):
        right = []
        for tree in trees:
            siblings: dict[State, list[Pair]] = {}
            for p in tree:
                if p.own or not own:
                    siblings.setdefault(p.state, []).append(p)
            for a, b in itertools.chain(*(itertools.combinations(family, 2) for family in siblings.values())):
                if abs(a.q - b.q) > gap:
                    difference = scores[a.state, a.action] - scores[b.state, b.action]
                    right.append(0.5 if difference == 0 else float((difference > 0) == (a.q > b.q)))
        figures |= {f"{name}_accuracy": sum(right) / len(right) if right else None, f"{name}_pairs": len(right)}
    return figures


def print_ranking(trees: str, figures: dict) -> None:
    """`sibling_accuracy` in words, with the policy's beside it."""
    for kind, of in (("sibling", ""), ("own_sibling", " without the expert's nodes")):
        if figures[f"{kind}_pairs"]:
            right = f"ranked right{of} {figures[f'{kind}_accuracy']:.3f} of {figures[f'{kind}_pairs']}"
            policy = f"policy's log-probability {figures[f'policy_{kind}_accuracy']:.3f}"
            print(f"  {trees} trees: sibling pairs {right} (chance .5, {policy})")
