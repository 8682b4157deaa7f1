"""Comparisons that were planned before their units played a test task, and what came out.

    python -m reporting.plans                  # the tables, from plans.csv and results.csv of runs/reference_output
    python -m reporting.plans --rows RUN ...   # rows of results.csv: each condition of each run folder, and the mean

A row of plans.csv is a comparison of two conditions as results.csv names them. The gains of units come from rows of
results.csv. Where git has the page of an older comparison but not its rows, they come from the column `gains`, and
where it has no gains either, the column `stated` gives the difference as that page states it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from scipy import stats

from qlass.files import meta_of
from qlass.settings import parse, run_stage
from reporting.results import read_results, result_files
from reporting.stats import Estimate
from reporting.tables import markdown

NOTE = """\
# Planned comparisons

A comparison is *planned* if it was committed before its units played a test task. {later} of the {plans} rows of
plans.csv were written in one commit, fd0f923, after their results, from older pages; the commits that they name hold
the plans. Git's times are the author's own: they show an order, and prove nothing. {played} planned comparisons have
been played.

- A **unit** is a shop, a set of games or a training, and counts as one number. *Above* counts the units in which the
  first condition has the higher reward. *Tokens* are means per task of both conditions.
- The **difference** has a t interval over units. A shop or a set of games has test tasks of its own. Trainings of one
  environment share their test tasks, so an interval over them says nothing about other tasks.
- **stated** repeats the difference that an older page of runs/reference_output gave: "README at 17114c9" is the README
  there in commit 17114c9. A stated interval is over trainings and tasks together, and most are wider. *stated_p* is
  that page's p, corrected in its family.
- **raw p** belongs to the interval in the column *difference*; where there is a stated interval too, it is the larger p
  of the two. It is corrected by Holm's method *in its family* and, if it was planned, *over all* that were planned. A
  comparison that still goes on has no p; one that `changes` says anything of has ended. The larger a family, the larger
  is the corrected p. Each family was fixed before the play, but their sizes differ.
- **Bold** differences are decided: they were planned, git does not leave open whether the plan came before the play, no
  earlier trainings had played both sides on all of the test tasks, p in the family is below .05, and so is the page's p
  where one is stated. Where p *over all* is bold too, the difference holds over all planned comparisons. In plans.csv
  `shown_first` is *no* where git leaves the order open, and *seen* where the test tasks had been played.
- **†** was not planned. It is corrected among those of its family, and does not count over all.
- **‡** is not computed here: git has neither the rewards nor the gains of its units.
- **Names.** A condition is a method, M or N, and what is not the usual agent or QNet. `likeliest` searches by the
  agent's own probability. `text_likelihood` does so by that of the free text, which a tiny agent does not act by
  (text_likelihood.csv), and `oracle_belief` by the true value in worlds that agree with the pages so far; the commits
  of their rows have their code. `grpo` is chain GRPO, `eto` is ETO against the expert, and `eto-siblings` is ETO on
  siblings. An *old QNet* is of the cloned agent's trees, an *own QNet* is of the learner's.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: tuple[Path, ...] = ()  # print rows of these run folders instead


FOLDER = Path(__file__).parents[1] / "runs" / "reference_output"
PLACE, CONDITION = ["environment", "split"], ["agent", "method", "M", "N", "select"]
MINUS = [f"minus_{name}" for name in CONDITION]
KEYS = ["environment", *CONDITION]
# Columns of results.csv behind a condition; repeated: the share of steps whose action had the same answer earlier.
COSTS = {"total": "tokens", "generated": "generated", "env_steps": "env_steps", "resets": "resets"}  # means per task
NEW = ["seed", "reward", "low", "high", *COSTS.values(), "repeated", "trainings", "commit"]
UNITS = "seed != 'all'"  # of the rows of results.csv


def over_units(values: pd.Series) -> Estimate:
    """The mean of (units,) numbers with a t interval, and the p of its being 0; of a few their mean alone."""
    mean, n = values.mean(), len(values)
    if n < 3:
        return Estimate(mean, math.nan, math.nan, n)
    test = stats.ttest_1samp(values, 0.0)
    return Estimate(mean, *test.confidence_interval(), n, test.pvalue)


def as_stated(text: str, units: int) -> Estimate:
    """A page's "+.133 [.045, .221]", or its mean alone. p is of a t distribution of units - 1 degrees of freedom."""
    numbers = [float(number) for number in re.findall(r"[+-]?[\d.]*\d", text)]
    mean, low, high = [*numbers, math.nan, math.nan][:3]
    t = stats.t(units - 1)
    error = (high - low) / 2 / t.ppf(0.975)
    return Estimate(mean, low, high, units, float(2 * t.sf(abs(mean) / error)))


def holm(p: pd.Series) -> pd.Series:
    """p-values corrected for their number (Holm 1979)."""
    ranked = p.sort_values(kind="stable")
    corrected = ranked * [*range(len(p), 0, -1)]
    return corrected.clip(upper=1.0).cummax()


def name_of(condition: pd.Series) -> str:
    agent, method, M, N, select = condition[CONDITION]
    name = method
    if M != "1":
        name += f" M={M}"
    if N != "1":
        name += f" N={N}"
    if select:
        name += f" by {select}"
    return f"{name}, {agent.removeprefix('cloned').lstrip(', ')}".removesuffix(", ")


def sides_of(plan: pd.Series) -> list[pd.Series]:
    """The two conditions of a comparison, as rows of results.csv name them."""
    minus = plan[PLACE + MINUS].set_axis(PLACE + CONDITION)
    minus["split"] = plan["minus_split"] or plan["split"]
    return [plan[PLACE + CONDITION], minus]


def rows_of(plan: pd.Series, results: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of results.csv of each side, of the plan's units and commits; "all" is the seed of means over units."""
    if plan["commits"]:
        results = results[results["commit"].isin(plan["commits"].split())]
    if plan["seeds"]:
        results = results[results["seed"].isin([*plan["seeds"].split(), "all"])]
    for side in sides_of(plan):
        yield results[(results[side.index] == side).all(axis=1)]


def tokens_of(rows: pd.DataFrame) -> float:
    """Mean tokens per task over units, or of the row over all of them where the units' rows have none; NaN: unknown."""
    of_units = rows.query(UNITS)["tokens"].mean()
    return rows["tokens"].mean() if math.isnan(of_units) else of_units


def gains_of(plan: pd.Series, ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.Series:
    """The differences of the units that have both: as git's page has them, or of rows, of which a unit has one."""
    if plan["gains"]:
        return pd.Series(plan["gains"].split(), dtype=float)
    pairs = ours.query(UNITS).merge(theirs.query(UNITS), on="seed", validate="one_to_one")
    return (pairs["reward_x"] - pairs["reward_y"]).dropna()


def compare(plan: pd.Series, results: pd.DataFrame) -> dict[str, str | float]:
    """A plan's row of the table; its p is NaN if nothing was played, or if the play goes on."""
    ours, theirs = rows_of(plan, results)
    gains = gains_of(plan, ours, theirs)
    estimate = over_units(gains)

    dagger = "" if plan["planned"] else " †"
    row = {"family": plan["family"]}
    row["comparison"] = f"{plan['environment']}: {' - '.join(map(name_of, sides_of(plan)))}{dagger}"
    row["difference"] = "not played"
    p = []
    if plan["stated"]:
        stated = as_stated(plan["stated"], len(plan["seeds"].split()))
        row["difference"] = f"{stated:+} ‡"
        p.append(stated.p)
    if estimate.n:
        row["difference"] = f"{estimate:+}"
        row["above"] = f"{(gains > 0).sum()}/{estimate.n}"
    if plan["changes"] or estimate.n >= int(plan["planned"] or 0):  # it was played to its end
        p.append(estimate.p)
    tokens = f"{tokens_of(ours):,.0f}/{tokens_of(theirs):,.0f}"
    if "nan" not in tokens:
        row["tokens"] = tokens
    return row | {"p": pd.Series(p, dtype=float).max()}


def table(plans: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """A row per comparison with p; what is decided is bold (NOTE), and what was not played has no difference."""
    table = pd.DataFrame([compare(plan, results) for _, plan in plans.iterrows()])
    planned, corrected = plans["planned"] != "", pd.to_numeric(plans["stated_p"])
    # Where no interval tells p, the page's stands in: it is corrected, so that it is no smaller.
    raw = table.pop("p").fillna(corrected).dropna()
    within = raw.groupby(table["family"]).transform(holm)
    over_all = holm(raw[planned])
    p = pd.DataFrame({"raw p": raw, "in its family": within, "over all": over_all}, table.index)
    texts = p.map(lambda value: f"{value:.4f}" if value >= 1e-4 else "<.0001", na_action="ignore")
    table = table.join(plans[["stated", "stated_p"]]).join(texts).astype(object).fillna("")
    denied = (plans["shown_first"] != "") | (corrected >= 0.05)
    decided = planned & ~denied & (p["in its family"] < 0.05)
    bold = {"difference": decided, "over all": decided & (p["over all"] < 0.05)}
    for name, rows in bold.items():
        table.loc[rows, name] = "**" + table[name] + "**"
    return table


def head(plans: pd.DataFrame) -> str:
    """The plan of a set of families: its place, its units, what changed later, and the pages that state it."""
    planned = plans[plans["planned"] != ""].itertuples()
    lines = [
        f"Planned{plan.plan and ' at '}{plan.plan}: {plan.settings}, {plan.date}, {plan.planned} {plan.unit}."
        for plan in planned
    ]
    lines += [change for change in plans["changes"] if change not in ("", "as above")]
    lines += [f"Stated: {source}." for source in plans["source"] if source]
    return " ".join(dict.fromkeys(lines))


def page(plans: pd.DataFrame, results: pd.DataFrame) -> Iterator[str]:
    """The tables as Markdown, one per set of families: a set's name ends at the colon of a family's name."""
    rows = table(plans, results)
    later, played = (plans["written"] == "fd0f923").sum(), (rows["over all"] != "").sum()
    yield NOTE.format(plans=len(plans), later=later, played=played)
    names = plans["family"].str.partition(": ")
    rows["family"] = names[2]
    for name in names[0].unique():
        here = rows[names[0] == name]
        filled = here.loc[:, (here != "").any()]
        yield f"## {name}\n\n{head(plans[names[0] == name])}\n\n{markdown(filled)}\n"


def unit_rows(folders: Sequence[Path]) -> pd.DataFrame:
    """Rows of results.csv but for the split, which stands behind the environment if it is not test: each condition in
    each run folder, a unit, and over all of them."""
    rows = []
    for folder in folders:
        for group in read_results(result_files([str(folder)])):
            c, unit = group.condition, str(group.episodes["seed"].iloc[0])
            method = f"{c.method}: {c.player}".removesuffix(": ")
            condition = [c.env, c.label or "cloned", method, c.M or 1, c.N or 1, c.select or ""]
            reward, *costs = map(group.mean, ("reward", *COSTS))
            repeated = group.row["repeats"].sum() / group.row["steps"].sum()
            commits = sorted({meta_of(file).get("commit", "") for file in group.episodes["file"].unique()})
            rows.append([*condition, unit, reward, math.nan, math.nan, *costs, repeated, 1, " ".join(commits)])
    units = pd.DataFrame(rows, columns=[*KEYS, *NEW])
    conditions = units.groupby(KEYS, sort=False)
    means = conditions.mean(numeric_only=True).assign(seed="all", trainings=conditions.size())
    means["commit"] = conditions["commit"].agg(lambda of: " ".join(of.unique()))
    estimates = pd.DataFrame([vars(over_units(of["reward"])) for _, of in conditions], means.index)
    means[["low", "high"]] = estimates[["low", "high"]]
    table = pd.concat([means.reset_index(), units])[units.columns]
    return table.round(3).round(dict.fromkeys(COSTS.values(), 1))


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """plans.csv; results.csv and, in a file of their own, rows of a method that is no more."""
    plans = pd.read_csv(FOLDER / "plans.csv", dtype=str, keep_default_na=False)
    as_text = dict.fromkeys(["M", "N", "seed", "commit"], str)
    files = FOLDER / "results.csv", FOLDER / "text_likelihood.csv"
    options = {"dtype": as_text, "keep_default_na": False, "na_values": {"tokens": ""}}
    return plans, pd.concat([pd.read_csv(file, **options) for file in files], ignore_index=True)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    if config.rows:
        print(unit_rows(config.rows).to_csv(index=False), end="")
        return
    print("\n".join(page(*read())))


if __name__ == "__main__":
    run_stage(main)
