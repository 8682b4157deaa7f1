"""The report's tables, of texts, printed as Markdown and put on the page."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from reporting.results import METHODS, Condition, Group, protocol, tables_of
from reporting.stats import Estimate, paired_difference

RESULTS_NOTE = (
    "Mean over tasks with its 95 % interval, of several seeds over seeds and tasks. Differences are over the tasks of "
    "both rows, and unclear where the interval covers 0 or p is .05 or more. They are not corrected for their "
    "number. Choices are the steps whose samples were several actions. Tokens a task are all: prompt computed, "
    "generated, scored by QNet. Seconds a task are of the clock: those of a row's tasks add up to the time of its play."
)
QNET_NOTE = (
    "QLASS, or a method of your own, meets the search by log-probability with as many candidates and two best-of-N: "
    "the one nearest in tokens, and the one with as many samples. Your own meets QLASS too, and two labels of one "
    "method meet."
)
ASIDE_NOTE = (
    "An oracle looks at the true reward before it answers, which no agent could do; a rule knows the environment."
)


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


# ------------------------------------------------------------------------------------------- which rows are compared


def peer(condition: Condition, groups: Sequence[Group]) -> Group | None:
    """The row of this condition or, where there is none, with less of its label: "b, rank" -> "b" -> ""."""
    rows = {group.condition: group for group in groups}
    parts = condition.label.split(", ")
    for n in range(len(parts), -1, -1):
        wanted = replace(condition, label=", ".join(parts[:n]))
        if wanted in rows:
            return rows[wanted]
    return None


def greedy_of(group: Group, groups: Sequence[Group]) -> Group | None:
    c = group.condition
    return peer(Condition(c.env, "greedy", label=c.label, agent=c.agent), groups) if c.method != "greedy" else None


def nearest(group: Group, groups: Sequence[Group]) -> Group | None:
    """The best-of-N by QNet whose tokens are nearest to the group's, if there is one."""
    best, cost = replace(group.condition, method="best_of_n", M=1, select="q", player=""), group.mean("total")
    rivals = [b for b in groups if b.condition == replace(best, N=b.condition.N)]
    return min(rivals, key=lambda rival: abs(rival.mean("total") - cost), default=None)


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """The rows that meet: `QNET_NOTE`."""
    for a in groups:
        c = a.condition
        own = c.method not in METHODS
        rivals: list[Group | None] = []
        if own or c.method == "qlass":
            usual = replace(c, player="")  # a method of one's own may have one
            samples = replace(usual, method="best_of_n", M=1, N=c.M * c.N, select="q")
            rivals = [peer(replace(usual, method="likeliest"), groups), nearest(a, groups), peer(samples, groups)]
        if own:
            rivals.append(peer(replace(usual, method="qlass"), groups))
        rivals += [b for b in groups if b.condition.label < c.label and replace(b.condition, label=c.label) == c]
        yield from ((a, b) for b in dict.fromkeys(filter(None, rivals)))


def difference(a: Group, b: Group) -> Estimate:
    return paired_difference(a.values("reward"), b.values("reward"), a.blocks)


def aside(group: Group) -> bool:
    """True of rules and oracles, which no agent can be."""
    return group.condition.oracle or group.condition.method in ("expert", "rule")


# --------------------------------------------------------------------------------------------------------- the tables


def names(group: Group) -> dict[str, str]:
    return {"environment": group.condition.env, "method": str(group.condition)}


def results_table(shown: Sequence[Group], groups: Sequence[Group]) -> pd.DataFrame:
    """Each row's reward, what it earns over the agent of these groups, and its costs."""
    rows = []
    for group in shown:
        greedy = greedy_of(group, groups)
        gain = difference(group, greedy) if greedy else None
        row = names(group) | {"reward [95 %]": f"{group.reward}"}
        row["minus greedy"] = f"{gain:+}" if gain and gain.n else ""
        row["choices"] = f"{group.row['choices'].sum() / max(1, group.row['steps'].sum()):.0%}"
        row["tokens"] = number(group.mean("total"))
        if any(other.mean("billed") > 0 for other in shown):  # of a chat model
            row["billed tokens"] = number(group.mean("billed"))
        row |= {"env steps": number(group.mean("env_steps"), 1), "seconds": number(group.mean("seconds"), 2)}
        row["success"] = number(group.mean("success"), 3)
        rows.append(row | {"tasks": str(group.reward.n), "seeds": str(group.n_seeds)})
    return pd.DataFrame(rows)


def differences_table(groups: Sequence[Group]) -> pd.DataFrame:
    rows = []
    for a, b in comparisons(groups):
        gain = difference(a, b)
        verdict = "unclear" if gain.covers_zero else "higher" if gain.mean > 0 else "lower"
        if gain.n:
            row = names(a) | {"minus": str(b.condition), "difference [95 %]": f"{gain:+}"}
            rows.append(row | {"verdict": verdict, "tasks": str(gain.n)})
    return pd.DataFrame(rows)


# ----------------------------------------------------------------------------------------------------- in words


def headlines(groups: Sequence[Group]) -> Iterator[str]:
    """A sentence for each environment and label about QLASS with the most candidates, over its rivals' tasks."""
    searches = {}
    for group in sorted(groups, key=lambda group: group.condition.M * group.condition.N):
        c = group.condition
        if c.method == "qlass" and not aside(group):
            searches[c.env, c.label] = group  # the last one
    for search in searches.values():
        likeliest = peer(replace(search.condition, method="likeliest"), groups)
        rivals = [rival for rival in (greedy_of(search, groups), likeliest, nearest(search, groups)) if rival]
        tasks = set(search.blocks).intersection(*(rival.blocks for rival in rivals))
        if not tasks:
            continue
        qlass = search.among(tasks)
        text = f"{qlass.condition.env}: {qlass.condition} earns {qlass.reward} on {qlass.reward.n} tasks"
        for rival in rivals:
            gain = difference(qlass, rival)
            doubt = " (unclear)" * gain.covers_zero
            text += f"; {gain:+} over {rival.condition}{doubt}"
        yield f"{text}."


def notes(groups: Sequence[Group]) -> Iterator[str]:
    """Lines below the table of results: a temperature that costs much, and what a row is."""
    for group in groups:
        greedy = greedy_of(group, groups)
        if group.condition.method == "sample" and greedy and (gain := difference(group, greedy)).high < -0.03:
            text = f"one sample is below the greedy agent: {gain:+}. A lower --temperature costs less."
            yield f"{group.condition.env}: {text}"
    yield RESULTS_NOTE


def protocols(groups: Sequence[Group]) -> Iterator[str]:
    """A line for each environment: what its numbers mean."""
    for rows in tables_of(groups):
        fields = json.dumps(protocol(rows), ensure_ascii=False)
        yield " ".join(f"Protocol of {rows[0].condition.env}: {fields}".split())


def sections(groups: Sequence[Group], remarks: Sequence[str]) -> Iterator[tuple[str, list[str], pd.DataFrame]]:
    """(title, lines, table) of each part of the report. remarks: what stands below the headlines."""
    agents, others = [group for group in groups if not aside(group)], [group for group in groups if aside(group)]
    nothing = pd.DataFrame()
    yield "Summary", [*headlines(groups), *remarks], nothing
    yield "Results", [*notes(groups)], results_table(agents, groups)
    differences = differences_table(groups)
    yield "What QNet adds", [QNET_NOTE] if len(differences) else [], differences
    yield "Rules and oracles", [ASIDE_NOTE] if others else [], results_table(others, groups)
    yield "Protocol", [*protocols(groups)], nothing


def text(groups: Sequence[Group], remarks: Sequence[str]) -> str:
    """All parts as Markdown."""
    parts = []
    for title, lines, table in sections(groups, remarks):
        if lines:
            parts += [f"## {title}", markdown(table), *lines]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown(table: pd.DataFrame) -> str:
    """A table of texts; "" for an empty one."""
    if table.empty:
        return ""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)
