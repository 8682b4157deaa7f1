"""How well scores agree with labels: rank statistics per state and overall; ties, failures and noise are accounted for.

Search compares the actions of one state, so the figure that counts for it is the Spearman correlation per state: the
mean of the tasks' means, with an interval over tasks. It is undefined where a state has one candidate or labels that
are all equal: such states are counted, not scored. A constant score has no order and gets 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from qlass.stats import Estimate, bootstrap, by_task, kendall, ranks, spearman

Values = Sequence[Sequence[float | None]]  # of each state's candidates
PerState = dict[tuple[Hashable, Hashable], float]  # {(task, state): figure}


def rho(scores: Sequence[float], labels: Sequence[float]) -> float:
    """Spearman's of one state; 0 for scores that are all equal."""
    return float(np.nan_to_num(spearman(scores, labels)))


def ordered(labels: Sequence[float]) -> bool:
    return len(set(labels)) > 1


def per_state(tasks: Sequence[Hashable], scores: Values, labels: Values, failed_last: bool = False) -> PerState:
    """Spearman's of each state whose labels differ. Candidates without a score are left out, or ranked last."""
    found: PerState = {}
    for i, (task, some, of) in enumerate(zip(tasks, scores, labels, strict=True)):
        if failed_last:
            if ordered(of):
                found[task, i] = rho([-np.inf if s is None else s for s in some], of)
        else:
            kept = [(s, value) for s, value in zip(some, of, strict=True) if s is not None]
            if len(kept) > 1 and ordered([value for _, value in kept]):
                found[task, i] = rho(*zip(*kept, strict=True))
    return found


def choice(scores: Sequence[float | None], labels: Sequence[float]) -> tuple[float, float, float]:
    """Of the action with the highest score, equal ones taken at random, in expectation: whether its label is the
    highest; what it is worth beyond a random action; what the best one is worth beyond a random one."""
    known = [-np.inf if s is None else s for s in scores]
    top = [i for i, s in enumerate(known) if s == max(known)]
    best, mean = max(labels), float(np.mean(labels))
    right = float(np.mean([labels[i] >= best - 1e-12 for i in top]))
    return right, float(np.mean([labels[i] for i in top])) - mean, best - mean


@dataclasses.dataclass(frozen=True)
class Alignment:
    """One scorer against one set of labels."""

    rho: Estimate  # per state
    states: int  # with a rho
    tied: int  # without: one candidate, or equal labels
    failed_last: float
    coverage: float  # share of candidates with a score
    top_1: float
    gain: float  # of the highest score, over that of the highest label
    centred: float  # global Spearman of scores and labels without their state's mean
    overall: float  # global Spearman over all (s, a)
    tau: float
    actor: float  # global Spearman over the actions taken: QVAL's published figure
    actor_tau: float


def alignment(tasks: Sequence[Hashable], taken: Sequence[int], scores: Values, labels: Values) -> Alignment:
    found = per_state(tasks, scores, labels)
    decided = [choice(s, of) for s, of in zip(scores, labels, strict=True) if ordered(of)]
    right, won, possible = (sum(column) for column in zip(*decided, strict=True)) if decided else (np.nan,) * 3
    flat, centred, actor = [], [], []
    for some, of, action in zip(scores, labels, taken, strict=True):
        kept = [(s, value) for s, value in zip(some, of, strict=True) if s is not None]
        flat += kept
        if kept:
            mean = np.mean(kept, axis=0)
            centred += [(round(s - mean[0], 12), round(value - mean[1], 12)) for s, value in kept]
        if some[action] is not None:
            actor.append((some[action], of[action]))
    last = per_state(tasks, scores, labels, failed_last=True)
    return Alignment(
        rho=bootstrap(by_task(found).values()),
        states=len(found),
        tied=sum(not ordered(of) for of in labels),
        failed_last=mean_of(last),
        coverage=len(flat) / max(1, sum(map(len, labels))),
        top_1=right / len(decided) if decided else np.nan,
        gain=won / possible if possible else np.nan,
        centred=correlation(spearman, centred),
        overall=correlation(spearman, flat),
        tau=correlation(kendall, flat[:: 1 + len(flat) // 5000]),
        actor=correlation(spearman, actor),
        actor_tau=correlation(kendall, actor),
    )


def mean_of(found: PerState) -> float:
    means = by_task(found).values()
    return float(np.mean(list(means))) if means else np.nan


def correlation(of: object, pairs: list[tuple[float, float]]) -> float:
    return of(*zip(*pairs, strict=True)) if len(pairs) > 1 else np.nan  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------- ceilings


def permutation_ceiling(tasks: Sequence[Hashable], labels: Values) -> float:
    """The best per-state rho of scores that tie no two candidates, where labels do tie some."""
    best: PerState = {}
    for i, (task, of) in enumerate(zip(tasks, labels, strict=True)):
        if ordered(of):
            best[task, i] = rho(np.argsort(np.argsort(of, kind="stable")), of)
    return mean_of(best)


def label_ceiling(tasks: Sequence[Hashable], returns: Sequence[Sequence[Sequence[float]]], how: str) -> float:
    """What a scorer that knows the truth would reach against labels that are means of noisy returns.

    The halves of a label's returns agree with r per state; the whole label's reliability is then 2 r / (1 + r)
    (Spearman-Brown), and its correlation with the truth the root of that, .03 to .08 high with four candidates.
    NaN where that does not hold or nothing tells the noise: the maximum is no sum of halves; fewer than eight returns
    make ranks too coarse; labels may be all equal within each state.
    """
    few = any(len(some) < 8 for state in returns for some in state)
    if how != "mean" or few or not any(ordered([np.mean(some) for some in state]) for state in returns):
        return np.nan
    halves = [[[float(np.mean(some[half::2])) for some in state] for state in returns] for half in (0, 1)]
    both = [mean_of(per_state(tasks, *halves)), mean_of(per_state(tasks, *halves[::-1]))]
    r = np.maximum(0.0, np.mean(both))  # which keeps NaN
    return float(np.sqrt(2 * r / (1 + r)))


# ---------------------------------------------------------------------------------------------------------- comparisons


def sign_flip(differences: Sequence[float], draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of a mean of 0: the share of random signs under which the mean is at least as far from it."""
    d = np.sort(np.asarray(differences, dtype=float))
    if not len(d) or not d.any():
        return 1.0
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(draws, len(d)))
    return float((1 + np.sum(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)) / (1 + draws))


def as_ranks(scores: Sequence[float | None]) -> list[float | None]:
    """1 for the highest; equal scores share their mean rank, as far as there is a score."""
    known = [s for s in scores if s is not None]
    places = iter((ranks([-s for s in known]) + 1).tolist() if known else [])
    return [None if s is None else next(places) for s in scores]
