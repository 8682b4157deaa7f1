"""Can scores rank the actions of one state? That is all that search asks of a QNet."""

from __future__ import annotations

import itertools
import math
from typing import Any

from qlass.chat import State
from qlass.packing import Pair
from qlass.policy import Policy
from qlass.stats import spearman


def sibling_accuracy(trees: list[list[Pair]], scores: dict[tuple[State, str], float], gap: float = 0.05) -> dict:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores stand in the same order.

    Chance is .5. `sibling_gap`: how far apart the scores put such pairs, of what q does; near 0 a net ignores the
    action. `own_...`: of pairs without a node of the demonstrator's, since search compares draws of the agent.
    `spearman` is the global rank correlation, which a net that only knows V(s) can reach too.
    """
    flat = [(p.q, scores[p.state, p.action]) for tree in trees for p in tree]
    rank = float(spearman(*zip(*flat, strict=True))) if len(flat) > 2 else math.nan  # also where all are equal
    figures: dict[str, Any] = {"spearman": rank if math.isfinite(rank) else None}
    for of, some in (("sibling", trees), ("own_sibling", [[p for p in tree if p.own] for tree in trees])):
        right, total, apart, labelled = 0.0, 0, 0.0, 0.0
        for tree in some:
            siblings: dict[State, list[Pair]] = {}
            for p in tree:
                siblings.setdefault(p.state, []).append(p)
            for a, b in itertools.chain(*(itertools.combinations(family, 2) for family in siblings.values())):
                if abs(a.q - b.q) > gap:
                    x, y = scores[a.state, a.action], scores[b.state, b.action]
                    right += 0.5 if x == y else float((x > y) == (a.q > b.q))
                    total, apart, labelled = total + 1, apart + abs(x - y), labelled + abs(a.q - b.q)
        share = (right / total, apart / labelled) if total else (None, None)
        figures |= {f"{of}_accuracy": share[0], f"{of}_pairs": total, f"{of}_gap": share[1]}
    return figures


def policy_scores(policy: Policy, trees: list[list[Pair]]) -> dict[tuple[State, str], float]:
    """log pi(a | s): the baseline that a QNet has to beat."""
    pairs = list(dict.fromkeys((p.state, p.action) for tree in trees for p in tree))
    return dict(zip(pairs, policy.logprobs(pairs), strict=True))


def print_ranking(trees: str, figures: dict) -> None:
    """`sibling_accuracy` in words, with the policy's beside it."""
    f = figures
    if f["sibling_pairs"]:
        print(f"  {trees} trees: sibling pairs ranked right {f['sibling_accuracy']:.3f} of {f['sibling_pairs']} "
              f"(chance .5, policy's log-probability {f['policy_sibling_accuracy']:.3f}), "
              f"{f['sibling_gap']:.2f} times as far apart as their q, "
              f"Spearman {'undefined' if f['spearman'] is None else round(f['spearman'], 3)}")  # fmt: skip
    if 0 < f["own_sibling_pairs"] < f["sibling_pairs"]:
        print(f"    without the demonstrator's nodes {f['own_sibling_accuracy']:.3f} of {f['own_sibling_pairs']} "
              f"({f['policy_own_sibling_accuracy']:.3f})")  # fmt: skip
