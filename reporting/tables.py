"""The report's tables, of texts, printed as Markdown and put on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from reporting.results import METHODS, Group, protocol, tables_of
from reporting.stats import Estimate, paired, paired_difference

FEW = 5  # seeds; the t interval of fewer is wider by a half and more than that of many
GAINS = {"greedy": "minus SFT greedy", "likeliest": "minus log-probability"}  # columns of the headline
SHORT = ["environment", "method", "reward [95 %]", *GAINS.values()]
SHORT += ["tokens", "env steps", "success", "tasks", "seeds"]
HEADLINE = ("chat", "greedy", "sample", "best_of_n", "likeliest", "qlass")
ROWS_NOTE = (
    "Mean over tasks with its 95 % interval, of several seeds over seeds and tasks. “Oracle” marks a method that looks "
    "at the true reward before it answers. Tokens a task are all: prompt computed, generated, scored by QNet. A row is "
    "charged for all its episodes, also for those that it shares with another row."
)
DIFFERENCES_NOTE = (
    "Differences are paired, over the tasks that both methods ran, and “undecided” where the interval covers 0 or p is "
    ".05 or more. QLASS meets the search by log-probability with as many candidates, the best-of-N nearest in tokens, "
    "and the best-of-N with as many samples. No correction for so many comparisons."
)


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def headline(groups: Sequence[Group]) -> list[Group]:
    """The rows that matter: agent, best-of-N, the two searches and, last, the best that looks at the true reward."""
    rows = []
    for table in tables_of(groups):
        here = [group for group in table if not group.condition.label] or table
        oracles = [g for g in here if g.condition.oracle and g.condition.method != "oracle"]
        rows += [g for g in here if g.condition.method in HEADLINE and not g.condition.oracle]
        rows += sorted(oracles, key=lambda group: group.reward.mean)[-1:]
    return rows or list(groups)


def headline_table(rows: Sequence[Group]) -> pd.DataFrame:
    """The table of these rows, with what each earns over the agent, and QLASS over the search without a QNet."""
    table = results_table(rows)
    for method, column in GAINS.items():
        table[column] = [f"{gain:+}" if (gain := gain_over(group, method, rows)) else "" for group in rows]
    return table[SHORT]


def gain_over(group: Group, method: str, rows: Sequence[Group]) -> Estimate | None:
    """A row's reward minus greedy's, or that of QLASS minus the search's by log-probability with as many candidates."""
    peer = greedy_of(group, rows) if method == "greedy" else likeliest_of(group, rows)
    if peer is None:
        return None
    gain = paired_difference(group.values("reward"), peer.values("reward"), group.blocks)
    return gain if gain.n else None


def greedy_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """Greedy with the label of a row or, where there is none, with less of it: "b, rank" -> "b" -> ""; None for greedy
    itself."""
    ours = group.condition
    for label in less_and_less(ours.label):
        for other in groups:
            theirs = other.condition
            if (theirs.env, theirs.method, theirs.label) == (ours.env, "greedy", label) and other is not group:
                return other
    return None


def less_and_less(label: str) -> list[str]:
    """A label, whose parts are a run's and a variant's, and what is left without the last part, and so on, to ""."""
    parts = label.split(", ")
    return list(dict.fromkeys(", ".join(parts[:n]) for n in reversed(range(len(parts) + 1))))


def likeliest_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """Of a row of QLASS the search by log-probability that draws as many candidates."""
    wanted = replace(group.condition, method="likeliest")
    same = [other for other in groups if other.condition == wanted and group.condition.method == "qlass"]
    return same[0] if same else None


def what_qnet_adds(rows: Sequence[Group]) -> list[str]:
    """A line for each row of QLASS that has a search by log-probability beside it."""
    lines, several = [], len({group.condition.env for group in rows}) > 1
    for group in rows:
        search, added = likeliest_of(group, rows), gain_over(group, "likeliest", rows)
        if search is None or added is None:
            continue
        where = f"{group.condition.env}, {group.condition}" if several else str(group.condition)
        gain, without = gain_over(group, "greedy", rows), gain_over(search, "greedy", rows)
        doubt = ", which may be noise" if added.covers_zero else ""
        if gain and without:
            lift = f"{where} minus SFT greedy: {gain.mean:+.3f}. Search by log-probability has {without.mean:+.3f}"
            lines.append(f"{lift} without a QNet. QNet adds {added:+}{doubt}.")
    return lines


def notes(rows: Sequence[Group]) -> list[str]:
    """Lines below a table of rows: what QNet adds, how few seeds there are, and what a row is."""
    lines = what_qnet_adds(rows)
    seeds = {group.episodes["seed"].nunique() for group in rows} - {1}
    if seeds and min(seeds) < FEW:
        lines.append(f"{min(seeds)} seeds say little of other trainings, so the intervals of such rows are wide.")
    return [*lines, ROWS_NOTE]


def protocols(groups: Sequence[Group]) -> list[str]:
    """A line for each environment: what its numbers mean."""
    fields_of = {rows[0].condition.env: protocol(rows) for rows in tables_of(groups)}
    lines = [f"Protocol of {env}: {json.dumps(fields, ensure_ascii=False)}" for env, fields in fields_of.items()]
    return [" ".join(line.split()) for line in lines]


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


def nearest(group: Group, others: Sequence[Group]) -> list[Group]:
    """The one of the others whose tokens are nearest to the group's; none if there are no others, or no tokens."""
    if not others or not group.mean("total") > 0:
        return []
    return [min(others, key=lambda other: abs(math.log((other.mean("total") or 1e-9) / group.mean("total"))))]


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Which methods are compared: each with greedy; QLASS with best-of-N, and with the search by
    log-probability that draws as many; a reader's own method with QLASS and best-of-N; a labelled one with the same
    unlabelled."""
    for a in groups:
        ours = a.condition
        peers = [b for b in groups if b.condition.env == ours.env and b is not a]
        yield from ((a, b) for b in (greedy_of(a, groups), likeliest_of(a, groups)) if b)
        for oracle in (False, True) if ours.method == "qlass" else ():
            kind = ("best_of_n", oracle, ours.label)
            rivals = [b for b in peers if (b.condition.method, b.condition.oracle, b.condition.label) == kind]
            yield from ((a, b) for b in nearest(a, rivals))  # at equal cost, and at an equal number of samples
            yield from ((a, b) for b in rivals if (b.condition.N or 1) == (ours.M or 1) * (ours.N or 1))
        for method in ("qlass", "best_of_n") if ours.method not in METHODS else ():  # one of the reader's own
            rivals = [b for b in peers if b.condition.method == method and not b.condition.oracle]
            yield from ((a, b) for b in nearest(a, rivals))
        plainer = [replace(ours, label=label) for label in less_and_less(ours.label)[1:]]
        plain = [b for condition in plainer for b in peers if b.condition == condition]
        yield from ((a, b) for b in plain[:1])


def choices_table(groups: Sequence[Group]) -> pd.DataFrame:
    """In how many steps a method had several different actions to choose from, and its rewards beside greedy's."""
    rows = []
    for group in groups:
        drawn = group.episodes
        if not drawn["choices"].any():
            continue
        steps, chosen, without = drawn["steps"].sum(), drawn["choices"].sum(), (drawn["choices"] == 0).sum()
        row = {"steps": f"{steps:,}", "with a choice": f"{chosen:,} ({chosen / steps:.0%})"}
        row |= {"episodes": f"{len(drawn):,}", "without any choice": f"{without:,} ({without / len(drawn):.0%})"}
        rows.append(names(group) | row | against_greedy(group, groups))
    return pd.DataFrame(rows)


def against_greedy(group: Group, groups: Sequence[Group]) -> dict[str, str]:
    """In how many tasks of all seeds it earns more than greedy, the same, less."""
    greedy = greedy_of(group, groups)
    if greedy is None:
        return dict.fromkeys(("above greedy", "equal", "below"), "–")
    a, b = paired(group.values("reward"), greedy.values("reward"))
    gain = (a - b).round(9)
    return {"above greedy": str((gain > 0).sum()), "equal": str((gain == 0).sum()), "below": str((gain < 0).sum())}


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
    "How often there was a choice": choices_table,
    "Results by type of task": types_table,
    "All paired differences in reward": differences_table,
}


def text(groups: Sequence[Group], warnings: Sequence[str] = ()) -> str:
    """All tables as Markdown, those of the headline first, below what is to be minded."""
    rows = headline(groups)
    parts = [f"**Warning:** {warning}" for warning in warnings]
    parts += [markdown(headline_table(rows)), *notes(rows), DIFFERENCES_NOTE]
    for title, table in TABLES.items():
        if len(rows := table(groups)):
            parts += [title, markdown(rows)]
    parts += protocols(groups)
    return "\n\n".join(parts) + "\n"


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)
