"""Points, labels and scores -> tables (report.md), and alignment.json for experiments.qval.downstream."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pandas as pd

from experiments.qval import downstream, metrics
from experiments.qval.metrics import RHO, alignment, cell, correlation, markdown
from experiments.qval.points import EXACT, Point
from qlass.outputs import atomic
from reporting.stats import bootstrap

FAMILIES = ["control", "code", "learned", "tree", "policy", "hindsight", "self-distillation"]
FAMILIES += ["direct prompting", "ranking", "intrinsic", "published"]
NOTE = (
    "rho: Spearman per state, mean of the tasks' means, 95 % over tasks (those of one product or lake count as one). "
    "tied: states whose labels are all equal; no rho there. minus {against}: the difference in rho on the states that "
    "both have; of many scores, one in twenty differs by chance. failures last: rho with candidates without a score "
    "ranked last. centred: global Spearman of scores and labels without their state's mean. global, tau: Spearman and "
    "Kendall over all (s, a); actor, actor tau: over the actions taken, QVAL's published figure. top-1, gain: of the "
    "highest score, ties in expectation. unread: answers of a judge that could not be read."
)


@dataclasses.dataclass
class Study:
    """Points with their reference labels and the scores that are judged; a row of each table is a candidate."""

    points: list[Point]
    against: str = "random"
    returns: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)  # of a reference: (candidates, K)
    scores: dict[str, pd.Series] = dataclasses.field(default_factory=dict)
    families: dict[str, str] = dataclasses.field(default_factory=dict)
    unread: dict[str, str] = dataclasses.field(default_factory=dict)  # how many answers of how many, of a judge

    def __post_init__(self) -> None:
        blocks = [point.block or point.task_id for point in self.points]
        self.index = metrics.index([len(p.candidates) for p in self.points], blocks, [p.taken for p in self.points])

    def labels(self) -> dict[str, pd.Series]:
        """By name: "exact", or of several returns "policy max" and "policy mean"; rounded so that equals are equal."""
        labels = {}
        for reference, returns in self.returns.items():
            kinds = {" max": returns.max(axis=1), " mean": returns.mean(axis=1)}
            kinds = kinds if returns.shape[1] > 1 else {"": returns[0]}
            labels |= {reference + kind: values.round(9) for kind, values in kinds.items()}
        return labels

    def noise_ceiling(self, name: str) -> float:
        """What a scorer that knows the truth would reach against these labels; NaN where that is not known."""
        reference, _, kind = name.partition(" ")
        if kind == "max":
            return math.nan
        return 1.0 if reference in EXACT else metrics.label_ceiling(self.returns[reference])


def alignments(study: Study, labels: pd.Series) -> pd.DataFrame:
    """A row a score, best first within a family, families in their order; with the difference to `against`."""
    rows = pd.DataFrame([alignment(scores, labels) for scores in study.scores.values()], list(study.scores))
    rows.insert(0, "family", pd.Categorical([study.families[name] for name in rows.index], FAMILIES))
    rows = rows.assign(order=-means(rows)).sort_values(["family", "order"], kind="stable").drop(columns="order")
    beyond = pd.Series("–", rows.index)
    for name in rows.index.drop(study.against) if study.against in rows.index else ():
        blocks = metrics.difference(study.scores[name], study.scores[study.against], labels).dropna()
        beyond[name] = f"{bootstrap(blocks):+}" if len(blocks) else "–"
    rows.insert(2, f"minus {study.against}", beyond)
    return rows.assign(unread=pd.Series(study.unread, rows.index, dtype=object).fillna("–")) if study.unread else rows


def means(rows: pd.DataFrame) -> pd.Series:
    """rho of each score; one without any is below all others."""
    return rows[RHO].map(lambda estimate: estimate.mean).fillna(-2.0)


def table(study: Study, name: str, labels: pd.Series, rows: pd.DataFrame) -> str:
    sizes = labels.groupby("state").size()
    tasks, tied = len({point.task_id for point in study.points}), (~metrics.differ(labels)).sum()
    return (
        f"### Labels: {name}\n\n{len(sizes)} states of {tasks} tasks, {tied} tied ({(sizes < 2).sum()} with one "
        f"candidate). Ceilings per state: {cell(study.noise_ceiling(name))} for the labels' noise, "
        f"{cell(metrics.permutation_ceiling(labels))} for a ranking without ties.\n\n"
        f"{markdown(rows.rename_axis('scorer').reset_index())}"
    )


def references_table(study: Study, rows: dict[str, pd.DataFrame]) -> str:
    """How far two sets of labels agree, and whether they order the scorers alike; then QVAL's V targets: what the state
    is worth, whatever was done there."""
    labels, lines = study.labels(), []
    for a, b in itertools.combinations(labels, 2):
        order = correlation(means(rows[a]), means(rows[b]))
        lines.append((a, b, correlation(labels[a], labels[b]), metrics.mean_rho(labels[a], labels[b]), order))
    for name, values in labels.items():
        v = values.groupby("state").transform("max")
        of_v = pd.Series({scorer: alignment(scores, v)["actor"] for scorer, scores in study.scores.items()})
        order = correlation(rows[name].actor.fillna(-2.0), of_v.fillna(-2.0))
        lines.append((name, "its V(s), over the actions taken", math.nan, math.nan, order))
    heads = ["labels", "and", "global", "per state that the second orders", "order of the scorers"]
    return markdown(pd.DataFrame(lines, columns=heads))


def write(study: Study, folder: Path, title: str, rewards: dict[str, dict[str, float]]) -> str:
    """report.md and alignment.json in `folder`; returns the report."""
    parts = [f"## {title}", NOTE.format(against=study.against)]
    orders = pd.Series({name: metrics.differ(s.fillna(-math.inf)).any() for name, s in study.scores.items()})
    rows, records = {}, {}
    for name, labels in study.labels().items():
        rows[name] = alignments(study, labels)
        parts.append(table(study, name, labels, rows[name]))
        records[name] = rows[name].assign(orders=orders, **{RHO: rows[name][RHO].map(vars)}).to_dict("index")
    summary = {"title": title, "labels": records, "rewards": rewards}
    with atomic(folder / "alignment.json") as out:
        json.dump(summary, out, indent=1)
    parts.append(f"### References\n\n{references_table(study, rows)}")
    if played := downstream.played(summary):
        parts.append(f"### Alignment against downstream reward\n\n{downstream.table([played])}")
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text
