"""The report's tables, of texts, printed as Markdown and put on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from reporting.results import METHODS, Condition, Group, protocol, tables_of
from reporting.stats import Estimate, paired, paired_difference

SIGNS = {"above greedy": 1, "equal": 0, "below": -1}
BILLED = ("billed tokens", "billed", 0), ("cost", "cost", 4)
FEW = 5  # seeds; the t interval of fewer is wider by a half and more than that of many
ROWS_NOTE = (
    "Mean over tasks with its 95 % interval, of several seeds over seeds and tasks. “Oracle” marks a method that looks "
    "at the true reward before it answers. Tokens a task are all: prompt computed, generated, scored by QNet. A row is "
    "charged for all its episodes, also for those that it shares with another row."
)
DIFFERENCES_NOTE = (
    "Differences are paired, over the tasks that both methods ran, and “undecided” where the interval covers 0 or p is "
    ".05 or more. QLASS meets the search by log-probability with as many candidates, the best-of-N nearest in tokens, "
    "and the best-of-N with as many samples. A method of your own meets QLASS and the search by log-probability with "
    "as many candidates, and the best-of-N nearest in tokens. Two labels of one method meet. No correction for so many "
    "comparisons."
)


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


# ------------------------------------------------------------------------------------------- which rows are compared


def own(group: Group) -> bool:
    """True if its method is a reader's."""
    return group.condition.method not in METHODS


def less_and_less(label: str) -> list[str]:
    """A label, whose parts are a run's and a variant's, and what is left without the last part, and so on, to ""."""
    parts = label.split(", ")
    return list(dict.fromkeys(", ".join(parts[:n]) for n in reversed(range(len(parts) + 1))))


def peer(
    group: Group, groups: Sequence[Group], method: str, M: int = 1, N: int = 1, oracle: bool = False
) -> Group | None:
    """The row of this method and budget with a row's label or, where there is none, with less of it: "b, rank" -> "b"
    -> ""."""
    env = group.condition.env
    for label in less_and_less(group.condition.label):
        wanted = (env, label, method, M, N, oracle)
        for other in groups:
            c = other.condition
            if (c.env, c.label, c.method, c.M or 1, c.N or 1, c.oracle) == wanted and other is not group:
                return other
    return None


def greedy_of(group: Group, groups: Sequence[Group]) -> Group | None:
    return peer(group, groups, "greedy")


def search_of(group: Group, groups: Sequence[Group], method: str) -> Group | None:
    """For a row of QLASS, or a reader's own, the search by another score that draws as many candidates."""
    c = group.condition
    searches = c.method == "qlass" or own(group)
    return peer(group, groups, method, c.M or 1, c.N or 1) if searches else None


def nearest(group: Group, groups: Sequence[Group], oracle: bool) -> Group | None:
    """The best-of-N whose tokens are nearest to the group's, if both are known."""
    ours, cost = group.condition, group.mean("total")
    rivals = {}
    for other in groups:
        c, theirs = other.condition, other.mean("total")
        same = (c.env, c.label, c.method, c.oracle) == (ours.env, ours.label, "best_of_n", oracle)
        if same and theirs > 0 < cost:
            rivals[abs(math.log(theirs / cost))] = other
    return rivals[min(rivals)] if rivals else None


def variants(one: Condition, other: Condition) -> bool:
    """True for two rows of one method and budget by two labels, such as two QNets, in this order."""
    return one.label < other.label and replace(one, label=other.label) == other


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """The rows that are compared: `DIFFERENCES_NOTE`; each with greedy; a labelled one with the same of another label,
    or of none."""
    for a in groups:
        ours = a.condition
        rivals = [greedy_of(a, groups), search_of(a, groups, "likeliest")]
        if ours.method == "qlass":
            samples = (ours.M or 1) * (ours.N or 1)
            for oracle in (False, True):
                rivals += [nearest(a, groups, oracle), peer(a, groups, "best_of_n", 1, samples, oracle)]
        elif own(a):
            rivals += [search_of(a, groups, "qlass"), nearest(a, groups, oracle=False)]
        plainer = [replace(ours, label=label) for label in less_and_less(ours.label)[1:]]
        rivals += [b for b in groups if b.condition in plainer][-1:]
        rivals += [b for b in groups if b.condition.label and variants(b.condition, ours)]
        yield from ((a, b) for b in rivals if b)


def difference(a: Group, b: Group) -> Estimate:
    return paired_difference(a.values("reward"), b.values("reward"), a.blocks)


# --------------------------------------------------------------------------------------------------------- the tables


def names(group: Group) -> dict[str, str]:
    return {"environment": group.condition.env, "method": str(group.condition)}


def results_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Each row's reward, what it earns over the agent and over the search without a QNet, and its costs."""
    rows = []
    for group in groups:
        rivals = {"SFT greedy": greedy_of(group, groups), "log-probability": search_of(group, groups, "likeliest")}
        row = names(group) | {"reward [95 %]": f"{group.reward}"}
        for name, rival in rivals.items():
            gain = difference(group, rival) if rival else None
            row[f"minus {name}"] = f"{gain:+}" if gain and gain.n else ""
        row |= {"tokens": number(group.mean("total")), "generated tokens": number(group.mean("generated"))}
        for title, name, digits in BILLED:  # of a chat model
            if any(other.mean(name) > 0 for other in groups):
                row[title] = number(group.mean(name), digits)
        row |= {"env steps": number(group.mean("env_steps"), 1), "success": number(group.mean("success"), 3)}
        rows.append(row | {"tasks": str(group.reward.n), "seeds": str(group.n_seeds)})
    return pd.DataFrame(rows)


def differences_table(groups: Sequence[Group]) -> pd.DataFrame:
    rows = []
    for a, b in comparisons(groups):
        gain = difference(a, b)
        if gain.n:
            verdict = "higher" if gain.mean > 0 else "lower"
            both, _ = paired(a.values("reward"), b.values("reward"))
            ours, theirs = (tokens.mean() for tokens in paired(a.values("total"), b.values("total")))
            row = names(a) | {"minus": str(b.condition), "difference [95 %]": f"{gain:+}"}
            row |= {"verdict": "undecided" if gain.covers_zero else verdict, "tasks": str(gain.n)}
            row |= {"seeds": str(both.index.unique(level=1).size)}
            rows.append(row | {"tokens (ratio)": f"{ours / theirs:.2f}" if theirs > 0 else "–"})
    return pd.DataFrame(rows).drop_duplicates()


def choices_table(groups: Sequence[Group]) -> pd.DataFrame:
    """In how many steps a method had several different actions to choose from, and its rewards beside greedy's: in how
    many tasks of all seeds it earns more, the same, less."""
    rows = []
    for group in groups:
        drawn, greedy = group.episodes, greedy_of(group, groups)
        if not drawn["choices"].any():
            continue
        steps, choices, without = drawn["steps"].sum(), drawn["choices"].sum(), (drawn["choices"] == 0).sum()
        row = {"steps": f"{steps:,}", "with a choice": f"{choices:,} ({choices / steps:.0%})"}
        row |= {"episodes": f"{len(drawn):,}", "without any choice": f"{without:,} ({without / len(drawn):.0%})"}
        if greedy:
            ours, theirs = paired(group.values("reward"), greedy.values("reward"))
            signs = np.sign((ours - theirs).round(9))
            row |= {name: f"{(signs == sign).sum()}" for name, sign in SIGNS.items()}
        rows.append(names(group) | row)
    return pd.DataFrame(rows).fillna("–")


TABLES = {
    "Paired differences in reward": differences_table,
    "How often there was a choice": choices_table,
}


# ----------------------------------------------------------------------------------------------------- in words


def what_qnet_adds(groups: Sequence[Group]) -> Iterator[str]:
    """A line for each row of QLASS that has a search by log-probability beside it."""
    for group in groups:
        greedy, search = greedy_of(group, groups), search_of(group, groups, "likeliest")
        if group.condition.method == "qlass" and greedy and search:
            gain, without, added = difference(group, greedy), difference(search, greedy), difference(group, search)
            doubt = ", which may be noise" * added.covers_zero
            yield (
                f"{group.condition.env}, {group.condition} minus SFT greedy: {gain.mean:+.3f}. Search by "
                f"log-probability has {without.mean:+.3f} without a QNet. QNet adds {added:+}{doubt}."
            )


def notes(groups: Sequence[Group]) -> list[str]:
    """Lines below the table of results: what QNet adds, how few seeds there are, and what a row is."""
    lines = [*what_qnet_adds(groups)]
    for group in groups:
        greedy = greedy_of(group, groups) if group.condition.method == "sample" else None
        gain = difference(group, greedy) if greedy else None
        if gain and gain.n and gain.high < -0.03:
            cure = "A lower --temperature costs less."
            lines.append(f"{group.condition.env}: one sample is below the greedy agent: {gain:+}. {cure}")
    seeds = {group.n_seeds for group in groups} - {1}
    if seeds and min(seeds) < FEW:
        lines.append(f"{min(seeds)} seeds say little of other trainings, so the intervals of such rows are wide.")
    return [*lines, ROWS_NOTE]


def protocols(groups: Sequence[Group]) -> list[str]:
    """A line for each environment: what its numbers mean."""
    lines = []
    for rows in tables_of(groups):
        fields = json.dumps(protocol(rows), ensure_ascii=False)
        lines.append(" ".join(f"Protocol of {rows[0].condition.env}: {fields}".split()))
    return lines


def text(groups: Sequence[Group], warnings: Sequence[str] = ()) -> str:
    """All tables as Markdown, below what is to be minded."""
    parts = [f"**Warning:** {warning}" for warning in warnings]
    parts += [markdown(results_table(groups)), *notes(groups), DIFFERENCES_NOTE]
    for title, table in TABLES.items():
        if len(rows := table(groups)):
            parts += [title, markdown(rows)]
    return "\n\n".join([*parts, *protocols(groups)]) + "\n"


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)
