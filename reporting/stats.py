"""Intervals over seeds and tasks, and paired differences, on scipy.stats.

A seed is a training. With several seeds an interval covers other trainings and other tasks (`crossed`); with one seed
it is about this model alone, and tasks are resampled. Of rewards it also reaches to what few tasks leave open
(`of_rewards`). Tasks of one block, such as goals for one product, vary together: blocks are sampled (`of_blocks`).
Values are a pandas Series indexed by (task, seed); blocks are {task: block}.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` tasks with its 95 % interval (NaN of fewer than two tasks) and the two-sided p of its being 0."""

    mean: float
    low: float
    high: float
    n: int
    p: float = math.nan

    @property
    def covers_zero(self) -> bool:
        return not (self.low > 0 or self.high < 0) or self.p >= 0.05  # NaN: nothing is known, so nothing differs

    def __format__(self, sign: str) -> str:
        """ "0.500 [0.402, 0.598]", of a difference with sign "+"."""
        spread = "" if math.isnan(self.low) else f" [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"
        return f"{self.mean:{sign}.3f}{spread}"


def bootstrap(values: Iterable[float], resamples: int = 10_000) -> Estimate:
    """Percentile bootstrap of the mean of (n,) values, whatever their order (Efron & Tibshirani 1993, ch. 13)."""
    sample = np.sort(np.asarray(list(values), dtype=float))
    n = len(sample)
    if n < 2:
        return Estimate(float(sample.mean()) if n else math.nan, math.nan, math.nan, n)
    drawn = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, 2_000_000 // n),  # bounds memory
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = map(float, drawn.confidence_interval)
    means = drawn.bootstrap_distribution.round(12)  # without rounding errors, which would hide a mean of 0
    tail = min((means <= 0).sum(), (means >= 0).sum())
    p = max(2 * (int(tail) + 1) / (resamples + 1), 2.0 ** (1 - n))  # no less than if all go one way: the sign test
    return Estimate(float(sample.mean()), low, high, n, min(1.0, p))


def interval(values: pd.Series, blocks: Mapping[Hashable, Hashable] | None = None, rewards: bool = False) -> Estimate:
    """The mean over the tasks that all seeds have, with its interval. rewards: the values are such, in [0, 1].

    One seed, or fewer than two such tasks: tasks alone are resampled, each with the mean of its seeds.
    """
    if values.empty:
        return bootstrap([])
    table = values.unstack()  # (tasks, seeds)
    table = table.dropna() if len(table.dropna()) > 1 else table
    if table.isna().any(axis=None):
        table = table.mean(axis=1).to_frame()
    rows = of_blocks(table, blocks or {})
    if (rows == rows[:1]).all():  # as with a rule, which no training changes
        rows = rows[:1]
    estimate = crossed(rows) if min(rows.shape) > 1 else bootstrap(rows.mean(axis=0))
    estimate = of_rewards(estimate, rows.mean(axis=0)) if rewards and estimate.n > 1 else estimate
    return replace(estimate, n=len(table))


def of_rewards(estimate: Estimate, sample: np.ndarray) -> Estimate:
    """An estimate from (n,) rewards of tasks or blocks, whose interval is no narrower than few of them allow.

    Of n successes Wilson's interval begins at 1 - u with u = z^2 / (n + z^2): a share u of all tasks, none of which was
    seen, may be failures. So here a share u may earn 0, or 1: the interval reaches at least to the means with those.
    """
    n, mean, z = len(sample), estimate.mean, stats.norm.ppf(0.975)
    u = z**2 / (n + z**2)
    low, high = min(estimate.low, (1 - u) * mean), max(estimate.high, (1 - u) * mean + u)
    return replace(estimate, low=max(0.0, float(low)), high=min(1.0, float(high)))  # t goes beyond what can be earned


def of_blocks(table: pd.DataFrame, blocks: Mapping[Hashable, Hashable]) -> np.ndarray:
    """(tasks, seeds) to (seeds, blocks) values with the same mean: how far a block takes a seed's mean from it.

    The mean of tasks is a ratio, of a block's sum to its size; this is its linear part (Cochran 1977, ch. 6).
    """
    mean = table.to_numpy().mean()
    sums = (table - mean).groupby(lambda task: blocks.get(task, task), dropna=False).sum()
    return mean + sums.to_numpy().T * len(sums) / len(table)


def crossed(values: np.ndarray) -> Estimate:
    """The mean of (seeds, tasks) values with a t interval, where both are samples: value = mean + seed + task + rest.

    Of an analysis of variance's mean squares, (seeds + tasks - rest) / (S T) estimates the mean's variance; parts below
    0 are left out. Degrees of freedom by Satterthwaite (1946), but at most seeds - 1: without this limit, simulated
    differences of 0 had p < .0033 in up to .027 of the cases, with it in none.
    """
    n_seeds, n_tasks = values.shape
    mean, of_seeds, of_tasks = float(values.mean()), values.mean(1), values.mean(0)
    rest = values - of_seeds[:, None] - of_tasks + mean
    freedom = np.array([n_seeds - 1, n_tasks - 1, (n_seeds - 1) * (n_tasks - 1)])
    deviations = n_tasks * (of_seeds - mean) ** 2, n_seeds * (of_tasks - mean) ** 2, rest**2
    squares = np.array([d.sum() for d in deviations]) / freedom
    of_seed, of_task = squares[:2] > squares[2]
    parts = squares * [of_seed, of_task, 1.0 - of_seed - of_task] / values.size
    variance = max(parts.sum(), 0.0)
    if variance < 1e-24:  # but for rounding all are equal
        return Estimate(mean, mean, mean, n_tasks, 1.0 if abs(mean) < 1e-9 else 2.0 ** (1 - n_tasks))
    satterthwaite = variance**2 / (parts**2 / freedom).sum()
    t = stats.t(min(n_seeds - 1, max(1.0, satterthwaite)), scale=math.sqrt(variance))
    half = float(t.ppf(0.975))
    return Estimate(mean, mean - half, mean + half, n_tasks, float(2 * t.sf(abs(mean))))


def paired(a: pd.Series, b: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The values of both where both have one, of the same task and seed.

    Where they share no seed, the first of each are a pair, then the second: any pairs of independent trainings do.
    """
    if a.index.intersection(b.index).empty:
        a, b = numbered(a), numbered(b)
    return a.align(b, join="inner")


def paired_difference(a: pd.Series, b: pd.Series, blocks: Mapping[Hashable, Hashable] | None = None) -> Estimate:
    """a minus b over their pairs, with an `interval`."""
    a, b = paired(a, b)
    return interval(a - b, blocks)


def numbered(values: pd.Series) -> pd.Series:
    """The same values with seeds 0, 1, ... in the order of theirs."""
    table = values.unstack()
    return table.set_axis(range(table.shape[1]), axis=1).stack().dropna()
