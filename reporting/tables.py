"""The report's tables, of texts, printed as Markdown and put on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from reporting.results import Group, protocol, tables_of
from reporting.stats import paired, paired_difference

FEW = 5  # seeds; the t interval of fewer is wider by a half and more than that of many
SHORT = ["environment", "method", "reward [95 %]", "tasks", "seeds", "success", "tokens", "env steps"]
HEADLINE = ("chat", "greedy", "sample", "best_of_n", "qlass")
ROWS_NOTE = (
    "Mean over tasks with its 95 % interval, of several seeds over seeds and tasks. “Oracle” marks a method that looks "
    "at the true reward before it answers. Tokens a task are all: prompt computed, generated, scored by QNet. A row is "
    "charged for all its episodes, also for those that it shares with another row."
)
DIFFERENCES_NOTE = (
    "Differences are paired, over the tasks that both methods ran, and “undecided” where the interval covers 0. QLASS "
    "meets the best-of-N nearest in tokens, and the one with as many samples. No correction for so many comparisons."
)


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def headline(groups: Sequence[Group]) -> list[Group]:
    """The rows that matter: the agent, best-of-N and QLASS and, last, the best that looks at the true reward."""
    rows = []
    for table in tables_of(groups):
        here = [group for group in table if not group.condition.label] or table
        oracles = [g for g in here if g.condition.oracle and g.condition.method != "oracle"]
        rows += [g for g in here if g.condition.method in HEADLINE and not g.condition.oracle]
        rows += sorted(oracles, key=lambda group: group.reward.mean)[-1:]
    return rows or list(groups)


def notes(groups: Sequence[Group]) -> list[str]:
    """Lines below the results: the protocol of each environment, and what a row is."""
    protocols = {rows[0].condition.env: protocol(rows) for rows in tables_of(groups)}
    lines = [f"Protocol of {env}: {json.dumps(fields, ensure_ascii=False)}" for env, fields in protocols.items()]
    seeds = {group.episodes["seed"].nunique() for group in groups} - {1}
    if seeds and min(seeds) < FEW:
        lines.append(f"{min(seeds)} seeds say little of other trainings, so the intervals of such rows are wide.")
    return [*(" ".join(line.split()) for line in lines), ROWS_NOTE]


def names(group: Group) -> dict[str, str]:
    return {"environment": group.condition.env, "method": str(group.condition)}


def results_table(groups: Sequence[Group]) -> pd.DataFrame:
    return pd.DataFrame(
        names(group)
        | {"reward [95 %]": f"{group.reward}", "tasks": str(group.reward.n)}
        | {"seeds": str(group.episodes["seed"].nunique()), "success": number(group.mean("success"), 3)}
        | {"generated tokens": number(group.mean("generated")), "tokens": number(group.mean("total"))}
        | {"env steps": number(group.mean("env_steps"), 1)}
        for group in groups
    )


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Which methods are compared: each with greedy; QLASS with best-of-N; a labelled one with the same unlabelled."""
    for a in groups:
        ours = a.condition
        peers = [b for b in groups if b.condition.env == ours.env and b is not a]
        greedy = [b for b in peers if b.condition.method == "greedy" and b.condition.label in (ours.label, "")]
        greedy.sort(key=lambda b: b.condition.label != ours.label)  # that of the same run where it has one
        yield from ((a, b) for b in greedy[:1])
        for oracle in (False, True) if ours.method == "qlass" else ():
            kind = ("best_of_n", oracle, ours.label)
            rivals = [b for b in peers if (b.condition.method, b.condition.oracle, b.condition.label) == kind]
            if rivals and a.mean("total") > 0:  # at equal cost, and at an equal number of samples
                yield a, min(rivals, key=lambda b: abs(math.log((b.mean("total") or 1e-9) / a.mean("total"))))
            yield from ((a, b) for b in rivals if (b.condition.N or 1) == (ours.M or 1) * (ours.N or 1))
        yield from ((a, b) for b in peers if ours.label and b.condition == replace(ours, label=""))


def types_table(groups: Sequence[Group]) -> pd.DataFrame:
    """A row for each type of task, of methods that have played several."""
    rows = []
    for group in groups:
        types = group.row.groupby("type") if group.row["type"].nunique() > 1 else ()
        for kind, episodes in types:
            tasks = episodes.groupby("task")[["reward", "success"]].mean()
            numbers = {name: number(tasks[name].mean(), 3) for name in ("reward", "success")}
            rows.append(names(group) | {"type": kind} | numbers | {"tasks": str(len(tasks))})
    return pd.DataFrame(rows)


def differences_table(groups: Sequence[Group]) -> pd.DataFrame:
    rows = []
    for a, b in comparisons(groups):
        difference = paired_difference(a.values("reward"), b.values("reward"), a.blocks)
        if difference.n:
            verdict = "higher" if difference.mean > 0 else "lower"
            both, _ = paired(a.values("reward"), b.values("reward"))
            ours, theirs = (tokens.mean() for tokens in paired(a.values("total"), b.values("total")))
            row = names(a) | {"minus": str(b.condition), "difference [95 %]": f"{difference:+}"}
            row |= {"verdict": "undecided" if difference.covers_zero else verdict, "tasks": str(difference.n)}
            row |= {"seeds": str(both.index.unique(level=1).size)}
            rows.append(row | {"tokens (ratio)": f"{ours / theirs:.2f}" if theirs > 0 else "–"})
    return pd.DataFrame(rows).drop_duplicates()


TABLES = {  # of all groups
    "All results": results_table,
    "Results by type of task": types_table,
    "All paired differences in reward": differences_table,
}


def text(groups: Sequence[Group], warnings: Sequence[str] = ()) -> str:
    """All tables as Markdown, those of the headline first, below what is to be minded."""
    rows = headline(groups)
    parts = [f"**Warning:** {warning}" for warning in warnings]
    parts += [markdown(results_table(rows)[SHORT]), *notes(groups), DIFFERENCES_NOTE]
    for title, table in TABLES.items():
        if len(rows := table(groups)):
            parts += [title, markdown(rows)]
    return "\n\n".join(parts) + "\n"


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)
