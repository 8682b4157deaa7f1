"""Comparisons that were planned before a test task of them was played, and what came out.

    python -m experiments.plans                  # the tables, from plans.csv and results.csv of runs/reference_output
    python -m experiments.plans --rows RUN ...   # rows of results.csv: each condition of each run folder, and the mean

A unit is a shop, a set of games or a training. It counts as one number, so the interval of a difference is a t interval
over units. The gains of units come from rows of results.csv. Where git has the page of an older comparison but not its
rows, they come from the column `gains`, and where it has no gains either, the column `stated` gives the difference as
that page states it. A stated interval is over trainings and tasks together, and where there is one, the larger of both
p counts. p is corrected by Holm's method in its family, and over all planned comparisons that were played to their end.
A comparison that still goes on has no p. A rival of N "equal" is the cheapest best-of-N of at least as many tokens.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from scipy import stats

from qlass import UserError
from qlass.settings import parse, run_stage
from reporting.results import read_results, result_files
from reporting.stats import Estimate
from reporting.tables import markdown


@dataclasses.dataclass(frozen=True)
class Config:
    rows: tuple[Path, ...] = ()  # print rows of these run folders instead


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


def as_stated(text: str, units: int) -> Estimate:
    """A page's "+.133 [.045, .221]", or its mean alone. p is of a t distribution of units - 1 degrees of freedom."""
    mean, *ends = map(float, re.findall(r"[+-]?[\d.]*\d", text))
    if not ends:
        return Estimate(mean, math.nan, math.nan, units)
    low, high = ends
    t = stats.t(units - 1)
    error = (high - low) / 2 / t.ppf(0.975)
    return Estimate(mean, low, high, units, float(2 * t.sf(abs(mean) / error)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979)."""
    ranked = pd.Series(p, dtype=float).sort_values(kind="stable")
    return (ranked * [*range(len(p), 0, -1)]).clip(upper=1.0).cummax().sort_index().tolist()


def rows_of(results: pd.DataFrame, condition: pd.Series) -> pd.DataFrame:
    """A condition's rows, the means over all units included."""
    return results[(results[condition.index] == condition).all(axis=1)]


def units_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A condition's rows by unit."""
    units = rows[rows["seed"] != "all"].set_index("seed")
    if units.index.has_duplicates:
        row = units[units.index.duplicated()].iloc[0]
        raise UserError(f"{', '.join(row[PLACE])}: two rows of one unit of {name_of(row)}")
    return units


def tokens_of(rows: pd.DataFrame) -> float:
    """Mean tokens per task over units, or of the row over all of them where the units' rows have none; NaN: unknown."""
    of_units = rows[rows["seed"] != "all"]["tokens"].mean()
    return rows["tokens"].mean() if math.isnan(of_units) else of_units


def rival(results: pd.DataFrame, condition: pd.Series, tokens: float) -> pd.Series:
    """What a plan compares with; of N "equal" the cheapest best-of-N of at least as many tokens."""
    if condition["N"] != "equal":
        return condition
    rivals = rows_of(results, condition.drop("N"))
    means = rivals[rivals["seed"] != "all"].groupby("N")["tokens"].mean()
    means = means[means >= tokens]
    if means.empty:
        raise UserError(f"{', '.join(condition[PLACE])}: no best-of-N of {tokens:.0f} tokens: play a larger N")
    return condition.replace("equal", means.idxmin())


def name_of(condition: pd.Series) -> str:
    agent, method, M, N, select = condition[CONDITION]
    sizes = [f"{key}={size}" for key, size in (("M", M), ("N", N)) if size != "1"]
    search = " ".join([method, *sizes, *([f"by {select}"] if select else [])])
    return ", ".join(filter(None, [search, agent.removeprefix("cloned").removeprefix(", ").strip()]))


def sides(plan: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The two conditions that a plan compares."""
    condition, minus = plan[PLACE + CONDITION], plan[PLACE + MINUS].set_axis(PLACE + CONDITION)
    minus["split"] = plan["minus_split"] or plan["split"]
    return condition, minus


def meant(results: pd.DataFrame, plan: pd.Series) -> pd.DataFrame:
    """The rows of a plan's commits and seeds, and the means over all."""
    if plan["commits"]:
        results = results[results["commit"].isin(plan["commits"].split())]
    if plan["seeds"]:
        results = results[results["seed"].isin([*plan["seeds"].split(), "all"])]
    return results


def gains_of(plan: pd.Series, ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.Series:
    """The differences of the units that have both, by unit: as git's page has them, or of rows."""
    if plan["gains"]:
        return pd.Series(map(float, plan["gains"].split()), plan["seeds"].split())
    return (units_of(ours)["reward"] - units_of(theirs)["reward"]).dropna()


def difference(gains: pd.Series, stated: Estimate | None) -> str:
    """A cell of the table. A double dagger: not computed here."""
    if len(gains) > 2:
        return f"{over_units(gains):+}"
    if len(gains):
        return f"{gains.mean():+.3f}"
    return f"{stated:+} ‡" if stated else "not played"


def compare(plan: pd.Series, results: pd.DataFrame) -> tuple[dict[str, str], float]:
    """A plan's row of the table, and its p: NaN if nothing was played, or if the play goes on."""
    results = meant(results, plan)
    condition, minus = sides(plan)
    ours = rows_of(results, condition)
    if not ours.empty:
        minus = rival(results, minus, tokens_of(ours))
    theirs = rows_of(results, minus)
    gains = gains_of(plan, ours, theirs)
    stated = as_stated(plan["stated"], len(plan["seeds"].split())) if plan["stated"] else None
    dagger = "" if plan["planned"] else " †"
    row = {"family": plan["family"], "environment": plan["environment"]}
    row["comparison"] = f"{name_of(condition)} - {name_of(minus)}{dagger}"
    row["difference [95 %]"] = difference(gains, stated)
    if len(gains):
        row["above"] = f"{int((gains > 0).sum())}/{len(gains)}"
    costs = tokens_of(ours), tokens_of(theirs)
    if not any(map(math.isnan, costs)):
        row["tokens"] = "/".join(f"{cost:,.0f}" for cost in costs)
    row |= {"stated [95 %]": plan["stated"], "p stated": plan["stated_p"]}
    p = []
    played_to_the_end = len(gains) >= int(plan["planned"] or 0) or plan["changes"]
    if len(gains) > 2 and played_to_the_end:
        p.append(over_units(gains).p)
    if stated:  # a p without an interval is a corrected one, which is no smaller than the p that is asked for
        p.append(float(plan["stated_p"]) if math.isnan(stated.p) else stated.p)
    return row, max(p, default=math.nan)


def table(plans: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """A row per comparison; one that was not played has no difference.

    A difference is decided, and bold, if it was planned and its p, corrected in its family, is below .05 here and, if a
    page states a p, there. A comparison that was not planned has a dagger. It is corrected among those of its family,
    and does not count over all.
    """
    compared = [compare(plan, results) for _, plan in plans.iterrows()]
    table = pd.DataFrame([row for row, _ in compared])
    p = pd.Series([p for _, p in compared], dtype=float).dropna()
    planned = (plans["planned"] != "").reset_index(drop=True)
    within = p.groupby(table["family"]).transform(holm)
    p_planned = p[planned]
    over_all = pd.Series(holm(p_planned), p_planned.index)
    for name, values in (("p", p), ("in its family", within), ("over all", over_all)):
        table[name] = values.map(lambda value: f"{value:.4f}" if value >= 1e-4 else "<.0001")
    stated = pd.to_numeric(table["p stated"])  # NaN: no page states one
    decided = planned & (within.reindex(table.index) < 0.05) & ~(stated >= 0.05)
    table.loc[decided, "difference [95 %]"] = "**" + table["difference [95 %]"] + "**"
    return table.dropna(axis=1, how="all").fillna("")


def head(plans: pd.DataFrame) -> str:
    """Where a set of families was planned, of how many units, and what changed later."""
    planned = plans[plans["planned"] != ""]
    where = dict.fromkeys(planned["settings"] + ", " + planned["date"])
    units = dict.fromkeys(planned["planned"] + " " + planned["unit"])
    stated = [source for source in dict.fromkeys(plans["source"]) if source]
    changes = [text for text in dict.fromkeys(plans["changes"]) if text not in ("", "as above")]
    lines = [*changes]
    if where:
        lines.insert(0, f"Planned: {'; '.join(where)}; {', '.join(units)}.")
    if stated:
        lines.append(f"Stated: {', '.join(stated)}.")
    return textwrap.fill(" ".join(lines), 120, break_on_hyphens=False, break_long_words=False)


def page(plans: pd.DataFrame, results: pd.DataFrame) -> Iterator[str]:
    """The tables as Markdown, one per set of families: a set's name ends at the colon of a family's name."""
    rows = table(plans, results)
    sets, families = (rows["family"].str.partition(":")[i].str.strip() for i in (0, 2))
    rows["family"] = families
    for name in dict.fromkeys(sets):
        shown = rows[sets == name]
        plans_here = plans[(sets == name).to_numpy()]
        constant = {column for column in ("environment", "family") if shown[column].nunique() == 1}
        empty = {column for column in shown if (shown[column] == "").all()}
        yield f"## {name}\n\n{head(plans_here)}\n\n{markdown(shown.drop(columns=constant | empty))}\n"
    over_all = rows.loc[rows["over all"] != "", "over all"].str.removeprefix("<").astype(float)
    yield f"*Over all* is over {len(over_all)} planned comparisons. {(over_all < 0.05).sum()} of them are below .05."


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


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    if config.rows:
        print(unit_rows(config.rows).to_csv(index=False), end="")
        return
    plans, results = (pd.read_csv(FOLDER / f"{name}.csv", dtype=str).fillna("") for name in ("plans", "results"))
    numbers = {name: pd.to_numeric(results[name]) for name in ("reward", "tokens")}
    print("\n".join(page(plans, results.assign(**numbers))))


if __name__ == "__main__":
    run_stage(main)
