"""Comparisons that were planned before a test task of them was played, and what came out.

    python -m experiments.plans                  # the table, from plans.csv and results.csv of runs/reference_output
    python -m experiments.plans --rows RUN ...   # rows of results.csv: each condition of each run folder, and the mean

A unit is a world (a shop, a set of games) or a training, which counts as one number, so that an interval is over
trainings and tasks at once: a t interval over units. p is also corrected by Holm's method in its family, and over all
planned comparisons that were played to their end. A comparison that still goes on has no p. A rival of N "equal" is the
cheapest best-of-N of at least as many tokens.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from scipy import stats

from qlass import UserError
from qlass.flags import run_stage
from reporting.results import read_results, result_files
from reporting.stats import Estimate
from reporting.tables import markdown

FOLDER = Path(__file__).parents[1] / "runs" / "reference_output"
PLACE, CONDITION = ["environment", "split"], ["agent", "method", "M", "N", "select"]
MINUS = [f"minus_{name}" for name in CONDITION]
# Columns of results.csv behind a condition; repeated: the share of steps whose action had the same answer earlier.
COSTS = {"total": "tokens", "generated": "generated", "env_steps": "env_steps", "resets": "resets"}  # means per task
NEW = ["seed", "reward", "low", "high", *COSTS.values(), "repeated", "trainings"]


def over_units(values: Sequence[float]) -> Estimate:
    """The mean of (units,) numbers with a t interval, and the p of its being 0."""
    if len(values) < 3:
        raise UserError("an interval needs three worlds or trainings or more")
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return Estimate(float(pd.Series(values).mean()), float(low), float(high), len(values), float(test.pvalue))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979)."""
    ranked = pd.Series(p, dtype=float).sort_values(kind="stable")
    return (ranked * [*range(len(p), 0, -1)]).clip(upper=1.0).cummax().sort_index().tolist()


def rows_of(units: pd.DataFrame, condition: pd.Series) -> pd.DataFrame:
    """A condition's rows by unit."""
    return units[(units[condition.index] == condition).all(axis=1)].set_index("seed")


def rival(units: pd.DataFrame, condition: pd.Series, tokens: float) -> pd.Series:
    """What a plan compares with; of N "equal" the cheapest best-of-N of at least as many tokens."""
    if condition["N"] != "equal":
        return condition
    means = rows_of(units, condition.drop("N")).groupby("N")["tokens"].mean()
    means = means[means >= tokens]
    if means.empty:
        raise UserError(f"{', '.join(condition[PLACE])}: no best-of-N of {tokens:.0f} tokens: play a larger N")
    return condition.replace("equal", means.idxmin())


def name_of(condition: pd.Series) -> str:
    agent, method, M, N, select = condition[CONDITION]
    sizes = [f"{key}={size}" for key, size in (("M", M), ("N", N)) if size != "1"]
    search = " ".join([method, *sizes, *([f"by {select}"] if select else [])])
    return ", ".join(filter(None, [search, agent.removeprefix("cloned").removeprefix(", ").strip()]))


def table(plans: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """A row per planned comparison; one that was not played has no difference."""
    units, rows, p = results[results["seed"] != "all"], [], {}
    for i, plan in plans.iterrows():
        condition, minus = plan[PLACE + CONDITION], plan[PLACE + MINUS].set_axis(PLACE + CONDITION)
        ours = rows_of(units, condition)
        row = {**plan[["family", "environment"]], "comparison": "", "difference [95 %]": "not played"}
        if not ours.empty:
            minus = rival(units, minus, ours["tokens"].mean())
            theirs = rows_of(units, minus)
            if ours.index.has_duplicates or theirs.index.has_duplicates:
                raise UserError(f"{', '.join(plan[PLACE])}: two rows of one unit of {name_of(condition)} or its rival")
            gains = (ours["reward"] - theirs["reward"]).dropna()  # of the units that have both
            if len(gains) >= int(plan["planned"]) or plan["changes"]:  # else it goes on: nothing is decided
                p[i] = over_units(gains).p
            row["difference [95 %]"] = f"{over_units(gains):+}" if len(gains) > 2 else f"{gains.mean():+.3f}"
            row["above"] = f"{int((gains > 0).sum())}/{len(gains)}"
            row["tokens"] = f"{ours['tokens'].mean():,.0f}/{theirs['tokens'].mean():,.0f}"
        names = f"{name_of(condition)} - {name_of(minus)}"
        rows.append(row | {"comparison": names})
    table, p = pd.DataFrame(rows), pd.Series(p, dtype=float)
    within = p.groupby(table["family"]).transform(holm)
    for name, values in (("p", p), ("in its family", within), ("over all", pd.Series(holm(p), p.index))):
        table[name] = values.map(lambda value: f"{value:.4f}" if value >= 1e-4 else "<.0001")
    return table.dropna(axis=1, how="all").fillna("")


def unit_rows(folders: Sequence[Path]) -> pd.DataFrame:
    """Rows of results.csv but for split and commit: each condition in each run folder, a unit, and over all of them."""
    rows = []
    for folder in folders:
        for group in read_results(result_files([str(folder)])):
            c, unit, N = group.condition, folder.name.rpartition("-")[2], group.condition.N or 1
            method, select = f"{c.method}: {c.player}" if c.player else c.method, c.select or ""
            condition = [c.env, c.label or "cloned", method, c.M or 1, N, select if N > 1 else ""]
            reward, *costs = map(group.mean, ("reward", *COSTS))
            repeated = group.row["repeats"].sum() / group.row["steps"].sum()
            rows.append([*condition, unit, reward, math.nan, math.nan, *costs, repeated, 1])
    units = pd.DataFrame(rows, columns=["environment", *CONDITION, *NEW])
    means = []
    for condition, of in units.groupby(["environment", *CONDITION], sort=False):
        mean, others = over_units(of["reward"]), of[[*COSTS.values(), "repeated"]].mean()
        means.append([*condition, "all", mean.mean, mean.low, mean.high, *others, len(of)])
    table = pd.concat([pd.DataFrame(means, columns=units.columns), units])
    return table.round(3).round(dict.fromkeys(COSTS.values(), 1))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.plans", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=Path, metavar="RUN", help="print rows of these run folders instead")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.rows:
        print(unit_rows(args.rows).to_csv(index=False), end="")
        return
    plans, results = (pd.read_csv(FOLDER / f"{name}.csv", dtype=str).fillna("") for name in ("plans", "results"))
    numbers = {name: pd.to_numeric(results[name]) for name in ("reward", "tokens")}
    print(markdown(table(plans, results.assign(**numbers))))


if __name__ == "__main__":
    run_stage(main)
