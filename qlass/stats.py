"""Statistics of the report: intervals over seeds and tasks, paired differences, rank correlations, on numpy.

A seed is a training. With several seeds an interval says how much a number would move with other trainings and other
tasks of the same kind (`crossed`); with one it is about this model alone, and tasks are resampled. Tasks of one block,
such as goals for one product, vary together: where the blocks are known, they are what is sampled (`of_blocks`). Every
draw is seeded and the values are sorted before it: the same results give the same interval, whatever the order of their
lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BLOCK = 2_000_000  # indices sampled at a time: bounds the memory, and with it the draws do not depend on the machine


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` tasks with its 95 % interval; the interval is NaN where there are fewer than two tasks.

    p: two-sided, of a mean of 0.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float = float("nan")

    @property
    def covers_zero(self) -> bool:
        return not (self.low > 0 or self.high < 0) or self.p >= 0.05  # NaN: nothing is known, so nothing differs

    def __format__(self, sign: str) -> str:
        """ "0.500 [0.402, 0.598]", of a difference with sign "+"."""
        spread = "" if np.isnan(self.low) else f" [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"
        return f"{self.mean:{sign}.3f}{spread}"


def bootstrap(values: Iterable[float], resamples: int = 10_000) -> Estimate:
    """Percentile bootstrap of the mean of `values` (n,), one value a task (Efron & Tibshirani 1993, ch. 13)."""
    sample = np.sort(np.asarray(list(values), dtype=float))
    n = len(sample)
    if n < 2:
        return Estimate(float(sample.mean()) if n else np.nan, np.nan, np.nan, n)
    rng = np.random.default_rng(0)
    means, step = np.empty(resamples), max(1, BLOCK // n)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        means[start:stop] = sample[rng.integers(n, size=(stop - start, n))].mean(axis=1)
    low, high = map(float, np.quantile(means, [0.025, 0.975]))
    tail = int(min(np.sum(means <= 0), np.sum(means >= 0)))
    p = max(2 * (tail + 1) / (resamples + 1), fewest(n))
    return Estimate(float(sample.mean()), low, high, n, min(1.0, p))


def fewest(n: int) -> float:
    """The least p that n tasks can give, by the sign test: all of them differ in one direction."""
    return 2.0 ** (1 - n)


def shared(values: Mapping[tuple[Hashable, Hashable], Any]) -> dict[tuple[Hashable, Hashable], Any]:
    """Of {(task, seed): value} what is of tasks that all seeds have; all of it, if there are no two such tasks."""
    seeds = {seed for _, seed in values}
    tasks = {task for task, _ in values if all((task, seed) in values for seed in seeds)}
    return {key: value for key, value in values.items() if key[0] in tasks or len(tasks) < 2}


def interval(
    values: Mapping[tuple[Hashable, Hashable], float], blocks: Mapping[Hashable, Hashable] | None = None
) -> Estimate:
    """The mean of {(task, seed): value} with its interval: of several seeds over the tasks that all of them have.

    One seed, or no two such tasks: tasks alone are resampled, each with the mean of its seeds. blocks: {task: block},
    of which blocks are sampled and not tasks.
    """
    values = shared(values)
    tasks, seeds = {task for task, _ in values}, {seed for _, seed in values}
    if len(seeds) < 2 or len(values) < len(tasks) * len(seeds):
        values = {(task, 0): value for task, value in by_task(values).items()}
    rows = of_blocks(values, blocks or {})
    if (rows == rows[:1]).all():  # as with a rule, which no training changes
        rows = rows[:1]
    found = crossed(rows) if min(rows.shape) > 1 else bootstrap(rows.sum(0) / max(1, len(rows)))
    return replace(found, n=len(tasks))


def of_blocks(values: Mapping[tuple[Hashable, Hashable], float], blocks: Mapping[Hashable, Hashable]) -> np.ndarray:
    """{(task, seed): value} as (seeds, blocks) values with the same mean: how far a block takes a seed's mean from it.

    The mean of tasks is a ratio, of a block's sum to its size; this is its linear part (Cochran 1977, ch. 6). A task
    without a block is one of its own.
    """
    mean = math.fsum(values.values()) / max(1, len(values))
    parts: dict[tuple[Hashable, Hashable], list[float]] = defaultdict(list)
    for (task, seed), value in values.items():
        parts[seed, blocks.get(task, task)].append(value - mean)
    seeds, names = (sorted({key[i] for key in parts}, key=repr) for i in (0, 1))
    rows = np.array([[math.fsum(parts[seed, name]) for name in names] for seed in seeds]).reshape(
        len(seeds), len(names)
    )
    return mean + rows * (rows.size / max(1, len(values)))


def crossed(values: np.ndarray) -> Estimate:
    """The mean of (seeds, tasks) values with a t interval, where both are samples: value = mean + seed + task + rest.

    Of an analysis of variance's mean squares, (seeds + tasks - rest) / (S T) estimates the mean's variance; a part of
    seeds or tasks below 0 is left out. Degrees of freedom by Satterthwaite (1946), but no more than seeds - 1: three
    seeds that agree by chance are no proof that trainings agree, and Holm's correction looks far out where that tells.
    In simulated cases without a difference three seeds had p < .0033 in up to .027 without this limit, in none with it.
    """
    n_seeds, n_tasks = values.shape
    mean, of_seeds, of_tasks = values.mean(), values.mean(1), values.mean(0)
    rest = values - of_seeds[:, None] - of_tasks + mean
    freedom = np.array([n_seeds - 1, n_tasks - 1, (n_seeds - 1) * (n_tasks - 1)])
    deviations = n_tasks * (of_seeds - mean) ** 2, n_seeds * (of_tasks - mean) ** 2, rest**2
    squares = np.array([d.sum() for d in deviations]) / freedom
    of_seed, of_task = squares[:2] > squares[2]
    parts = squares * [of_seed, of_task, 1.0 - of_seed - of_task] / values.size
    return t_interval(float(mean), parts, freedom, n_seeds - 1, n_tasks)


def t_interval(mean: float, parts: np.ndarray, freedom: np.ndarray, most: int, n: int) -> Estimate:
    """A mean of `n` tasks whose variance is the sum of `parts`, each with its degrees of freedom, and `most` in all."""
    variance = max(parts.sum(), 0.0)
    if variance < 1e-24:  # but for rounding all are equal
        return Estimate(mean, mean, mean, n, 1.0 if abs(mean) < 1e-9 else fewest(n))
    angle, within = t_distribution(min(most, max(1.0, variance**2 / (parts**2 / freedom).sum())))
    error = math.sqrt(variance)
    half = error * np.interp(0.95, within, angle)
    p = 1 - float(np.interp(abs(mean) / error, angle, within))
    return Estimate(mean, float(mean - half), float(mean + half), n, p)


def t_distribution(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Values t and P(|T| < t) of Student's T: where t = sqrt(freedom) tan(a), a has density cos(a)^(freedom - 1)."""
    a = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(a) ** (freedom - 1)
    within = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * np.tan(a), within / within[-1]


def by_task(values: Mapping[tuple[Hashable, Hashable], float]) -> dict[Hashable, float]:
    """{(task, seed): value} to {task: mean over its seeds}."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for (task, _seed), value in values.items():
        groups[task].append(value)
    return {task: sum(group) / len(group) for task, group in groups.items()}


def paired_difference(
    a: Mapping[tuple[Hashable, Hashable], float], b: Mapping[tuple[Hashable, Hashable], float],
    blocks: Mapping[Hashable, Hashable] | None = None,
) -> Estimate:  # fmt: skip
    """a minus b over the tasks that both have, given as {(task, seed): value}, with an `interval`.

    Where the two share seeds, only the shared (task, seed) pairs count: a seed may be a pipeline of its own.
    Where they share none, each is averaged over its own: the means of several seeds a side vary as theirs do
    (Welch's t, tasks beside them); of one seed a side, over tasks alone.
    """
    pairs = a.keys() & b.keys()
    if pairs:
        return interval({pair: a[pair] - b[pair] for pair in pairs}, blocks)
    left, right = by_task(a), by_task(b)
    tasks = left.keys() & right.keys()
    differences = {(task, 0): left[task] - right[task] for task in tasks}
    of_seeds = [by_task({(s, task): value for (task, s), value in side.items() if task in tasks}) for side in (a, b)]
    if min(len(tasks), *map(len, of_seeds)) < 2:
        return interval(differences, blocks)
    samples = [of_blocks(differences, blocks or {}).ravel(), *(np.array(list(means.values())) for means in of_seeds)]
    parts = np.array([sample.var(ddof=1) / len(sample) for sample in samples])
    freedom = np.array([len(sample) - 1 for sample in samples])
    return t_interval(float(samples[0].mean()), parts, freedom, int(freedom[1:].sum()), len(tasks))


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
