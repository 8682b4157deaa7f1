"""The report's tables: rows of texts by column, printed as Markdown and put on the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from reporting.figures import scored_steps
from reporting.results import Group
from reporting.stats import paired_difference

Table = list[dict[str, str]]
HEADLINE = ("greedy", "sample", "best_of_n", "qlass")


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def headline(groups: Sequence[Group]) -> list[Group]:
    """The rows that matter: the agent, best-of-N and QLASS and, last, the best that looks at the true reward."""
    rows = []
    for env in dict.fromkeys(group.condition.env for group in groups):
        here = [group for group in groups if group.condition.env == env]
        here = [group for group in here if not group.condition.label] or here
        oracles = [g for g in here if g.condition.oracle and g.condition.method != "oracle"]
        rows += [g for g in here if g.condition.method in HEADLINE and not g.condition.oracle]
        rows += sorted(oracles, key=lambda group: group.reward.mean)[-1:]
    return rows


def short_table(groups: Sequence[Group]) -> Table:
    rows = [(group.condition.env, str(group.condition), f"{group.reward}") for group in groups]
    names = "environment", "method", "reward [95 %]"
    return [dict(zip(names, row, strict=True)) | costs(group) for row, group in zip(rows, groups, strict=True)]


def costs(group: Group) -> dict[str, str]:
    return {
        "success": number(group.mean("success"), 3),
        "tokens": number(group.mean("total")),
        "env steps": number(group.mean("env_steps"), 1),
        "paper": group.condition.paper,
    }


def results_table(groups: Sequence[Group]) -> Table:
    return [
        {
            "environment": group.condition.env,
            "method": group.condition.name,
            "M": str(group.condition.M or "–"),
            "N": str(group.condition.N or "–"),
            "reward [95 %]": f"{group.reward}",
            "tasks": str(group.reward.n),
            "seeds (their means)": group.seeds(),
            "zero reward": number((group.row["reward"] == 0).mean(), 3),
            "generated tokens": number(group.mean("generated")),
            **costs(group),
        }
        for group in groups
    ]


def types_table(groups: Sequence[Group]) -> Table:
    """Mean reward and number of episodes by type of task, where there are several."""
    types = pd.concat([group.episodes["type"] for group in groups]).replace("", None).dropna().unique()
    rows = []
    for group in groups if len(types) > 1 else ():
        rewards = group.episodes.groupby("type", dropna=False)["reward"].agg(["mean", "size"])
        cells = {name: f"{mean:.3f} ({size})" for name, mean, size in rewards.itertuples()}
        row = {"environment": group.condition.env, "method": str(group.condition)}
        rows.append(row | {f"{name} (episodes)": cells.get(name, "–") for name in sorted(types)})
    return rows


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
        if ours.label:
            for b in peers:
                theirs = b.condition
                same = (ours.method, ours.M, ours.N, ours.select) == (theirs.method, theirs.M, theirs.N, theirs.select)
                if same and not theirs.label:
                    yield a, b


def differences_table(groups: Sequence[Group]) -> Table:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for a, b in comparisons(groups):
        difference = paired_difference(a.values("reward"), b.values("reward"), a.blocks)
        if difference.n:
            key = a.condition.env, str(a.condition), str(b.condition)
            verdict = "undecided" if difference.covers_zero else "higher" if difference.mean > 0 else "lower"
            rows[key] = {
                **dict(zip(("environment", "method", "minus"), key, strict=True)),
                "difference [95 %]": f"{difference:+}",
                "verdict": verdict,
                "tasks": str(difference.n),
                "tokens (ratio)": f"{a.mean('total') / b.mean('total'):.2f}" if b.mean("total") else "–",
            }
    return list(rows.values())


def calibration_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        steps = scored_steps(group)
        if len(steps) > 1 and group.condition.method == "qlass" and not group.condition.oracle:
            names = {"environment": group.condition.env, "method": str(group.condition)}
            rho, tau = (steps[["q", "reward"]].corr(rank).loc["q", "reward"] for rank in ("spearman", "kendall"))
            ranks = {"Spearman's rho": number(rho, 3), "Kendall's tau-b": number(tau, 3)}
            rows.append(names | {"scored steps": str(len(steps))} | ranks)
    return rows


def markdown(table: Table) -> str:
    lines = [list(table[0]), ["---"] * len(table[0]), *(row.values() for row in table)]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)
