"""Statistics of the report: bootstrap over tasks, paired differences, rank correlations. Plain functions on numpy.

Tasks are resampled, and where a method ran all of them with several seeds, seeds too: a seed is a training. So with
several seeds an interval says how much a number would move with other trainings and other tasks of the same kind, and
with one seed it is about this model alone. Every draw is seeded and the values are sorted before it: the same results
give the same interval, whatever the order of their lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

BLOCK = 2_000_000  # indices sampled at a time: bounds the memory, and with it the draws do not depend on the machine


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` tasks with its 95 % interval; the interval is NaN where there are fewer than two tasks.

    p: two-sided, of a mean of 0: twice the share of the resampled means on its other side.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float = float("nan")

    @classmethod
    def of(cls, mean: float, resampled: np.ndarray, n: int, level: float = 0.95) -> Estimate:
        low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
        tail = min(np.sum(resampled <= 0), np.sum(resampled >= 0))
        return cls(float(mean), float(low), float(high), n, float(min(1, 2 * (tail + 1) / (len(resampled) + 1))))

    @property
    def covers_zero(self) -> bool:
        return not (self.low > 0 or self.high < 0)  # NaN: nothing is known, so nothing differs

    def __format__(self, sign: str) -> str:
        """ "0.500 [0.402, 0.598]", of a difference with sign "+"."""
        spread = "" if np.isnan(self.low) else f" [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"
        return f"{self.mean:{sign}.3f}{spread}"


def bootstrap(values: Iterable[float], resamples: int = 10_000, level: float = 0.95, seed: int = 0) -> Estimate:
    """Percentile bootstrap of the mean of `values` (n,), one value a task (Efron & Tibshirani 1993, ch. 13)."""
    sample = np.sort(np.asarray(list(values), dtype=float))
    n = len(sample)
    if n < 2:
        return Estimate(float(sample.mean()) if n else np.nan, np.nan, np.nan, n)
    rng = np.random.default_rng(seed)
    means, step = np.empty(resamples), max(1, BLOCK // n)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        means[start:stop] = sample[rng.integers(n, size=(stop - start, n))].mean(axis=1)
    return Estimate.of(sample.mean(), means, n, level)


def interval(values: Mapping[tuple[Hashable, Hashable], float], resamples: int = 10_000, seed: int = 0) -> Estimate:
    """The mean of {(task, seed): value}, averaged over seeds within a task, with a two-level interval.

    Seeds and tasks are resampled independently of each other, for all seeds play the same tasks: with counts w_s and
    w_t of a resample, the mean is sum_st w_s w_t value_st / (S T). One seed, or tasks that not all seeds have: tasks
    alone are resampled.
    """
    tasks, seeds = ({key[i]: None for key in sorted(values, key=repr)} for i in (0, 1))
    if len(seeds) < 2 or len(tasks) < 2 or len(values) != len(tasks) * len(seeds):
        return bootstrap(by_task(values).values(), resamples, seed=seed)
    matrix = np.array([[values[task, s] for task in tasks] for s in seeds])
    matrix = matrix[:, np.lexsort(matrix)]  # whatever the names of the tasks
    n_seeds, n_tasks = matrix.shape
    rng = np.random.default_rng(seed)
    w_seed = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), resamples)
    w_task = rng.multinomial(n_tasks, np.full(n_tasks, 1 / n_tasks), resamples)
    return Estimate.of(matrix.mean(), ((w_seed @ matrix) * w_task).sum(1) / matrix.size, n_tasks)


def by_task(values: Mapping[tuple[Hashable, Hashable], float]) -> dict[Hashable, float]:
    """{(task, seed): value} to {task: mean over its seeds}."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for (task, _seed), value in values.items():
        groups[task].append(value)
    return {task: sum(group) / len(group) for task, group in groups.items()}


def paired_difference(
    a: Mapping[tuple[Hashable, Hashable], float], b: Mapping[tuple[Hashable, Hashable], float], **options: float
) -> Estimate:
    """a minus b over the tasks that both have, given as {(task, seed): value}, with an `interval`.

    Where the two share seeds, only the shared (task, seed) pairs count: a seed may be a pipeline of its own.
    Where they share none, each is averaged over its own.
    """
    pairs = a.keys() & b.keys()
    if pairs:
        return interval({pair: a[pair] - b[pair] for pair in pairs}, **options)
    left, right = by_task(a), by_task(b)
    return bootstrap([left[task] - right[task] for task in left.keys() & right.keys()], **options)


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for as many tests as there are (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    adjusted, worst = np.empty(len(p)), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = worst
    return adjusted.tolist()


def ranks(values: ArrayLike) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank; (n,) to (n,)."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts + 1) / 2)[inverse]


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rho of x (n,) and y (n,), ties by mean ranks; NaN where one of them is constant."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's tau-b of x (n,) and y (n,), O(n^2) time and O(n) memory; NaN where one of them is constant."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    agreement = pairs_x = pairs_y = 0.0
    for i in range(1, len(x)):
        dx, dy = np.sign(x[i] - x[:i]), np.sign(y[i] - y[:i])
        agreement += dx @ dy
        pairs_x += dx @ dx  # pairs that x does not tie
        pairs_y += dy @ dy
    return float(agreement / np.sqrt(pairs_x * pairs_y)) if pairs_x and pairs_y else float("nan")
