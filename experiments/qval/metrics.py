"""Agreement of scores with labels: rank statistics per state and overall, with ties, failures and noise.

Scores and labels are a Series each, one value a candidate, NaN where there is no score. The index says of what: block
(of tasks that vary together), state, action, and whether the behaviour policy has taken it.

Search compares the actions of one state, so what counts is Spearman's correlation per state: the mean of the blocks'
means. It is undefined where labels are all equal: such states are counted, not scored. A constant score gets 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from reporting.stats import bootstrap

STATE = ["block", "state"]


def index(points: Sequence[Any]) -> pd.MultiIndex:
    """A row for each candidate of each state (points.Point)."""
    rows = []
    for state, point in enumerate(points):
        block = point.block or point.task_id
        rows += [(block, state, action, action == point.taken) for action in range(len(point.candidates))]
    return pd.MultiIndex.from_tuples(rows, names=[*STATE, "action", "taken"])


def series(values: Sequence[Sequence[float | None]], index: pd.MultiIndex) -> pd.Series:
    """A series of the values of each state's candidates."""
    return pd.Series([value for actions in values for value in actions], index, dtype=float)


def per_state(scores: pd.Series, labels: pd.Series) -> pd.Series:
    """Spearman's of each state whose labels differ among the candidates with a score."""
    ranks = pd.DataFrame({"score": scores, "label": labels}).dropna().groupby(STATE).rank()
    ranks -= ranks.groupby(STATE).transform("mean")
    squares = (ranks**2).groupby(STATE).sum()
    products = (ranks.score * ranks.label).groupby(STATE).sum()
    rho = products / np.sqrt(squares.score * squares.label)
    return rho.fillna(0.0)[squares.label > 0]


def mean_rho(scores: pd.Series, labels: pd.Series) -> float:
    return float(per_state(scores, labels).groupby("block").mean().mean())


def difference(scores: pd.Series, rival: pd.Series, labels: pd.Series) -> pd.Series:
    """For each block, the lead of a score's per-state rho over its rival's, on the candidates that both have scored."""
    shared = scores.notna() & rival.notna()
    gains = per_state(scores[shared], labels[shared]) - per_state(rival[shared], labels[shared])
    return gains.groupby("block").mean().dropna()


def differ(values: pd.Series) -> pd.Series:
    """True for each state whose values differ."""
    return values.groupby(STATE).nunique() > 1


def choices(scores: pd.Series, labels: pd.Series) -> pd.DataFrame:
    """Of the highest score in each state whose labels differ, equal ones in expectation: whether its label is the best,
    what it is worth beyond a random action, and what the best one is worth beyond a random one."""
    states = labels.groupby(STATE)
    best, mean = states.transform("max"), states.transform("mean")
    values = pd.DataFrame({"right": labels >= best - 1e-12, "gain": labels - mean, "possible": best - mean})
    scores = scores.fillna(-np.inf)
    top = scores == scores.groupby(STATE).transform("max")
    return values[top].groupby(STATE).mean()[differ(labels)]


def alignment(scores: pd.Series, labels: pd.Series) -> dict[str, float]:
    """One score against one set of labels."""
    rho, choice = per_state(scores, labels), choices(scores, labels)
    estimate = bootstrap(rho.groupby("block").mean())
    taken = scores.index.get_level_values("taken")
    return {
        "rho": estimate.mean,  # Spearman per state
        "low": estimate.low,
        "high": estimate.high,
        "states": len(rho),  # with a rho
        "failures last": mean_rho(scores.fillna(-np.inf), labels),
        "coverage": float(scores.notna().mean()),  # share of candidates with a score
        "top-1": float(choice.right.mean()),
        "gain": float(choice.gain.mean() / choice.possible.mean()),  # over that of the highest label
        "global": correlation(scores, labels),  # Spearman over all (s, a)
        "actor": correlation(scores[taken], labels[taken]),  # over the actions taken: QVAL's published figure
    }


def correlation(a: pd.Series, b: pd.Series) -> float:
    """Spearman's, of what both have; NaN where one of them is constant."""
    ranks = pd.DataFrame({"a": a, "b": b}).dropna().rank()  # ranks first: corr leaves out infinite values
    return float(ranks.corr().iloc[0, 1])


def permutation_ceiling(labels: pd.Series) -> float:
    """The best per-state rho of scores that tie no two candidates, where labels do tie some."""
    return mean_rho(labels.groupby(STATE).rank(method="first"), labels)


def label_ceiling(returns: pd.DataFrame) -> float:
    """What a scorer that knows the truth would reach against labels that are means of noisy returns, (candidates, K).

    The halves of a label's returns agree with r per state; the full label's reliability is then 2 r / (1 + r)
    (Spearman-Brown), and its correlation with the truth the root of that, .03 to .08 high with four candidates.
    NaN where nothing tells the noise: fewer than eight returns make ranks too coarse; labels may all be equal.
    """
    if returns.shape[1] < 8 or not differ(returns.mean(axis=1).round(9)).any():
        return np.nan
    even, odd = (returns.iloc[:, start::2].mean(axis=1) for start in (0, 1))
    r = np.mean([mean_rho(even, odd), mean_rho(odd, even)])
    r = np.maximum(0.0, r)  # which keeps NaN
    return float(np.sqrt(2 * r / (1 + r)))
