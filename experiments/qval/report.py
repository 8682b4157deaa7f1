"""Points, labels and scores -> tables: report.md and alignment.csv."""

import math
from pathlib import Path

import pandas as pd

from experiments.qval import metrics
from qlass import UserError, records
from reporting import tables
from reporting.result_lines import Result
from reporting.stats import bootstrap

NOTE = (
    "rho: Spearman per state, mean of the tasks' means; low, high: its 95 % interval over tasks (those of one product "
    "or lake count as one). tied: states whose labels are all equal; no rho there. minus random: the difference in rho "
    "on the states that both have; of many scores, one in twenty differs by chance. top-1: how often the highest score "
    "has the best label, ties in expectation. actor: Spearman over the actions taken, QVAL's published figure. unread: "
    "answers of a judge that could not be read."
)
PREDICT = ["rho", "top-1", "actor"]  # figures that may predict the reward


def labels_of(returns: dict[str, pd.DataFrame]) -> dict[str, pd.Series]:
    """Labels by their names, "exact", "policy max", "policy mean"; rounded so that equals are equal. returns:
    (candidates, K)."""
    labels = {}
    for reference, values in returns.items():
        if reference == "exact":
            labels["exact"] = values[0]
        else:
            labels |= {f"{reference} max": values.max(axis=1), f"{reference} mean": values.mean(axis=1)}
    return {name: values.round(9) for name, values in labels.items()}


def alignments(scores: pd.DataFrame, labels: pd.Series, about: pd.DataFrame) -> pd.DataFrame:
    """A row a score, best first within a family; with the difference to `random`. scores: a column a score.

    about: family and unread answers of each score.
    """
    figures = {name: metrics.alignment(scores[name], labels) for name in scores}
    rows = about[["family"]].join(pd.DataFrame.from_dict(figures, orient="index"))
    beyond = pd.Series("–", rows.index)
    for name in rows.index.drop("random"):
        blocks = metrics.difference(scores[name], scores["random"], labels)
        if len(blocks):
            beyond[name] = f"{bootstrap(blocks):+}"
    rows.insert(4, "minus random", beyond)
    return rows.join(about["unread"]).sort_values(["family", "rho"], ascending=[True, False], kind="stable")


def markdown(rows: pd.DataFrame) -> str:
    """Numbers with three digits, what could not be measured as a dash."""
    return tables.markdown(rows.reset_index().map(cell))


def cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no -0.000
    return str(value)


def rewards_of(path: Path, env: str) -> pd.Series:
    """The mean reward of each judge in a results file of experiments.judges, on tasks that all have played."""
    lines = [record for record in records.read(path, Result) if (record["method"], record["env"]) == ("judge", env)]
    if not lines:
        raise UserError(f"{path}: nothing of experiments.judges in {env}")
    table = pd.DataFrame.from_records(lines)
    if table.duplicated(["task_id", "player"]).any():
        raise UserError(f"{path}: a judge plays a task twice: a file of one -M, --split and --label is expected")
    return table.pivot(index="task_id", columns="player", values="reward").dropna().mean()


def downstream(played: pd.DataFrame) -> str:
    """A table of how well each figure of alignment predicts the reward of a search, over the scores that have both."""
    coefficients = {figure: metrics.correlation(played[figure], played["reward"]) for figure in PREDICT}
    correlations = pd.Series(coefficients).rename_axis("figure").to_frame("rank correlation with reward")
    shown = played[["reward", "rho"]].sort_values("reward", ascending=False).rename_axis("scorer")
    return f"Over {len(played)} scores:\n\n{markdown(correlations)}\n\n{markdown(shown)}"


def report(
    scores: pd.DataFrame, about: pd.DataFrame, returns: dict[str, pd.DataFrame], rewards: pd.Series | None
) -> tuple[str, pd.DataFrame]:
    """The tables as Markdown, and all of their rows. A row of scores and returns is a candidate (metrics.index)."""
    parts, tables = [NOTE], {}
    for name, labels in labels_of(returns).items():
        rows = tables[name] = alignments(scores, labels, about)
        differ = metrics.differ(labels)
        parts.append(
            f"### Labels: {name}\n\n{len(differ)} states, {(~differ).sum()} tied.\n\n"
            f"{markdown(rows.rename_axis('scorer'))}"
        )
    if rewards is not None:
        rows = next(iter(tables.values()))
        played = rows.dropna(subset=PREDICT).join(rewards.rename("reward"), how="inner")
        parts.append(f"### Alignment and the reward of search\n\n{downstream(played)}")
    return "\n\n".join(parts) + "\n", pd.concat(tables, names=["labels", "scorer"])
