"""Is a QNet with --rank-weight better for the search? Contrasts over worlds, each with tasks and trainings of its own.

    python -m experiments.worlds runs/ranking-webshop-* runs/ranking-alfworld-*

A folder is a world: its agent, trees, two QNets and test tasks (runs/ranking.sh). Results of the QNet with the rank
weight have the label "rank", those of the paper's loss none. The mean over a world's tasks is one number, so that an
interval is over trainings and tasks at once: a t interval over worlds. Three contrasts in each environment, fixed
before they were measured, are one family of Holm's. They are QLASS by the new QNet minus QLASS by the paper's, minus
the search by log-probability (each with the most candidates that were played), and minus the better best-of-N, by
either QNet, of those that cost at least as many tokens.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from scipy import stats

from qlass import UserError
from qlass.runs import run_stage
from reporting.results import Condition, read_results, result_files
from reporting.stats import Estimate
from reporting.tables import markdown

NEW = "rank"


def read_worlds(folders: Iterable[Path]) -> pd.DataFrame:
    """A row for each condition of each world: `condition`, `world`, mean `reward` over its tasks, and its costs."""
    rows = []
    for folder in folders:
        for group in read_results(result_files([str(folder)])):
            means = {name: group.mean(name) for name in ("reward", "total", "env_steps")}
            rows.append({"condition": group.condition, "world": str(folder), "tasks": group.reward.n} | means)
    return pd.DataFrame(rows)


def over_worlds(values: pd.Series) -> Estimate:
    """The mean of (worlds,) numbers with a t interval, and the p of its being 0."""
    if len(values) < 3:
        raise UserError("an interval needs three worlds or more: name the folder of each")
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return Estimate(float(values.mean()), float(low), float(high), len(values), float(test.pvalue))


def holm(p: list[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979), in the order given."""
    order = sorted(range(len(p)), key=p.__getitem__)
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def contrasts(worlds: pd.DataFrame, env: str) -> Iterator[tuple[Condition, Condition]]:
    """What is compared in an environment: the search by the new QNet, and each of its three rivals."""
    means = worlds.groupby("condition", sort=False)[["reward", "total"]].mean()
    conditions = [c for c in means.index if c.env == env]

    def largest(method: str, label: str) -> Condition:
        """With the most candidates."""
        single = [c for c in conditions if (c.method, c.label) == (method, label) and (c.N or 1) == 1]
        if not single:
            raise UserError(f"{env}: no result of {method} with the label {label!r}")
        return max(single, key=lambda c: c.M or 1)

    new = largest("qlass", NEW)
    yield new, largest("qlass", "")
    yield new, largest("likeliest", "")
    dear = [c for c in conditions if c.method == "best_of_n" and not c.oracle]
    dear = [c for c in dear if means["total"][c] >= means["total"][new]]
    if not dear:
        raise UserError(f"{env}: no best-of-N with as many tokens as {new}: play more episodes (-N)")
    yield new, max(dear, key=lambda c: means["reward"][c])


def results_table(worlds: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for condition, of in worlds.groupby("condition", sort=False):
        row = {"environment": condition.env, "method": str(condition), "reward [95 %]": f"{over_worlds(of['reward'])}"}
        row |= {"total": f"{of['total'].mean():,.0f}", "env_steps": f"{of['env_steps'].mean():,.1f}"}
        rows.append(row | {"worlds": str(len(of)), "tasks": str(of["tasks"].sum())})
    return pd.DataFrame(rows)


def contrasts_table(worlds: pd.DataFrame) -> pd.DataFrame:
    rows, p = [], []
    for env in dict.fromkeys(condition.env for condition in worlds["condition"]):
        for a, b in contrasts(worlds, env):
            of = [worlds[worlds["condition"] == c].set_index("world")["reward"] for c in (a, b)]
            gains = (of[0] - of[1]).dropna()  # of the worlds that have both
            difference = over_worlds(gains)
            p.append(difference.p)
            rows.append({"environment": env, "method": str(a), "minus": str(b), "difference [95 %]": f"{difference:+}"})
            rows[-1]["worlds above"] = f"{int((gains > 0).sum())} of {difference.n}"
    for row, alone, corrected in zip(rows, p, holm(p), strict=True):
        row |= {"p": f"{alone:.4f}", "p, Holm": f"{corrected:.4f}", "decided": "yes" if corrected < 0.05 else "no"}
    return pd.DataFrame(rows)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, one a world")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    worlds = read_worlds(arguments(argv).runs)
    print(markdown(results_table(worlds)), markdown(contrasts_table(worlds)), sep="\n\n")


if __name__ == "__main__":
    run_stage(main)
