"""Points, labels and predictions of a folder -> tables (report.md), figures, and alignment.json for the HTML report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.qval import downstream, metrics
from experiments.qval.labels import EXACT, variants
from experiments.qval.metrics import alignment, cell, markdown
from experiments.qval.points import Point
from qlass.files import replacing
from reporting.figures import STYLE, save
from reporting.stats import bootstrap

FAMILIES = {"control": "#8c8c8c", "code": "#009e73", "learned": "#0072b2", "tree": "#56b4e9", "policy": "#e69f00",
            "hindsight": "#cc79a7", "embedding": "#d55e00", "judge": "#000000"}  # fmt: skip
SHOWN = ["failed_last", "coverage", "top_1", "gain", "centred", "overall", "tau", "actor", "actor_tau"]
NOTE = (
    "rho: Spearman per state, mean of the tasks' means, 95 % over tasks (those of one product or lake count as one). "
    "tied: states whose labels are all equal, or with one candidate; no rho there. minus {against}: the difference in "
    "rho on the states that both have, p by sign flips over tasks, Holm. failures last: rho with candidates without a "
    "score ranked last. centred: global Spearman of scores and labels without their state's mean. global, tau: "
    "Spearman and Kendall over all (s, a); actor, actor tau: over the actions taken, QVAL's published figure. top-1, "
    "gain: of the highest score, ties in expectation."
)


@dataclasses.dataclass
class Study:
    """Points with their reference labels and the scores that are judged; a row of each table is a candidate."""

    points: list[Point]
    against: str = "random"
    returns: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)  # of a reference: (candidates, K)
    scores: dict[str, pd.Series] = dataclasses.field(default_factory=dict)
    families: dict[str, str] = dataclasses.field(default_factory=dict)
    stale: Sequence[str] = ()  # scores that are left out

    def __post_init__(self) -> None:
        blocks = [point.block or point.task_id for point in self.points]
        self.index = metrics.index([len(p.candidates) for p in self.points], blocks, [p.taken for p in self.points])

    def labels(self) -> dict[str, tuple[str, pd.Series]]:
        """{name of a set of labels: its reference and the labels}."""
        return {name: (reference, labels) for reference, returns in self.returns.items()
                for name, labels in variants(reference, returns).items()}  # fmt: skip


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for as many tests as there are (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1, np.arange(len(p), 0, -1) * np.asarray(p)[order])
    return np.maximum.accumulate(steps)[np.argsort(order)].tolist()


def alignments(study: Study, labels: pd.Series) -> pd.DataFrame:
    """A row a score, best first within a family, families in their order; with the difference to `against`."""
    rows = pd.DataFrame([alignment(scores, labels) for scores in study.scores.values()], list(study.scores))
    rows.insert(0, "family", pd.Categorical([study.families[name] for name in rows.index], list(FAMILIES)))
    rows = rows.assign(order=-means(rows)).sort_values(["family", "order"], kind="stable").drop(columns="order")
    beyond = {}
    for name in rows.index.drop(study.against) if study.against in rows.index else ():
        blocks = metrics.difference(study.scores[name], study.scores[study.against], labels).dropna()
        beyond |= {name: blocks} if len(blocks) else {}
    p = holm([metrics.sign_flip(blocks) for blocks in beyond.values()])
    rows["minus"] = [f"{bootstrap(beyond[name]):+}" if name in beyond else "–" for name in rows.index]
    rows["p"] = pd.Series(dict(zip(beyond, p, strict=True)), dtype=float)
    return rows


def means(rows: pd.DataFrame) -> pd.Series:
    """rho of each score; one without any is below all others."""
    return rows.rho.map(lambda estimate: estimate.mean).fillna(-2.0)


def table(study: Study, name: str, reference: str, labels: pd.Series, rows: pd.DataFrame) -> str:
    sizes = labels.groupby("state").size()
    returns = study.returns[reference]
    noise = 1.0 if reference in EXACT else math.nan if name.endswith(" max") else metrics.label_ceiling(returns)
    heads = {
        "index": "scorer",
        "rho": "rho per state [95 %]",
        "minus": f"minus {study.against} [95 %]",
        "failed_last": "failures last",
        "top_1": "top-1",
        "overall": "global",
        "actor_tau": "actor tau",
    }
    rows = rows.reset_index()[["family", "index", "rho", "minus", "p", "states", *SHOWN]].rename(columns=heads)
    tasks, tied = len({point.task_id for point in study.points}), (labels.groupby("state").nunique() < 2).sum()
    return (
        f"### Labels: {name}\n\n{len(sizes)} states of {tasks} tasks, {tied} tied ({(sizes < 2).sum()} with one "
        f"candidate). Ceilings per state: {cell(noise)} for the labels' noise, "
        f"{cell(metrics.permutation_ceiling(labels))} for a ranking without ties.\n\n{markdown(rows)}"
    )


def references_table(study: Study, rows: dict[str, pd.DataFrame]) -> str:
    """How far two sets of labels agree, and whether they order the scorers alike; then QVAL's V targets: what the state
    is worth, whatever was done there."""
    labels = {name: values for name, (_, values) in study.labels().items()}
    lines = []
    for a, b in itertools.combinations(labels, 2):
        per_state = float(metrics.of_blocks(metrics.per_state(labels[a], labels[b])).mean())
        lines.append((a, b, spearman(labels[a], labels[b]), per_state, spearman(means(rows[a]), means(rows[b]))))
    for name, values in labels.items():
        v = values.groupby("state").transform("max")
        of_v = pd.Series({scorer: alignment(scores, v)["actor"] for scorer, scores in study.scores.items()})
        order = spearman(rows[name].actor.fillna(-2.0), of_v.fillna(-2.0))
        lines.append((name, "its V(s), over the actions taken", math.nan, math.nan, order))
    heads = ["labels", "and", "global", "per state that the second orders", "order of the scorers"]
    return markdown(pd.DataFrame(lines, columns=heads))


def spearman(a: pd.Series, b: pd.Series) -> float:
    return metrics.correlation(pd.DataFrame({"a": a, "b": b}))


def rollouts_table(study: Study) -> str:
    """Labels from the first K rollouts against the exact ones: what K buys, for the maximum and for the mean."""
    truth = next((reference for reference in EXACT if reference in study.returns), None)
    lines = []
    sampled = {reference: returns for reference, returns in study.returns.items() if returns.shape[1] > 1}
    for reference, returns in sampled.items() if truth else ():
        exact = study.labels()[truth][1]
        for k in (2**i for i in range(returns.shape[1].bit_length())):
            for name, labels in variants(reference, returns.iloc[:, :k]).items():
                a = alignment(labels, exact)
                lines.append((name, k, a["rho"], a["overall"], a["top_1"]))
    heads = ["labels", "K", f"rho per state with {truth} [95 %]", "global", "top-1"]
    return markdown(pd.DataFrame(lines, columns=heads)) if lines else ""


def forest(rows: pd.DataFrame, path: Path) -> None:
    """rho per state with its interval, and the global one beside it, as PNG and SVG."""
    rows = rows[::-1]
    colours = [FAMILIES[family] for family in rows.family]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 1 + 0.27 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        left.hlines(range(len(rows)), rows.rho.map(lambda e: e.low), rows.rho.map(lambda e: e.high), colours)
        left.scatter(rows.rho.map(lambda e: e.mean), range(len(rows)), c=colours)
        left.set_yticks(range(len(rows)), [f"{name} ({family})" for name, family in rows.family.items()])
        left.axvline(0, color=FAMILIES["control"], linewidth=0.8)
        left.set_xlabel("Spearman per state")
        right.scatter(rows.overall, rows.rho.map(lambda e: e.mean), c=colours)
        right.set_xlabel("global Spearman")
        right.set_ylabel("per state")
    path.with_suffix(".svg").write_text(save(figure, path), encoding="utf-8")


def write(study: Study, folder: Path, title: str, rewards: dict[str, dict[str, float]]) -> str:
    """report.md, the figures and alignment.json in `folder`; returns the report."""
    parts = [f"## {title}", NOTE.format(against=study.against)]
    if study.stale:
        names = ", ".join(study.stale)
        parts.append(f"Left out, as made from something else than there is now, or than this call names: {names}.")
    rows, record = {}, {}
    orders = {name: bool(metrics.ordered(metrics.last(scores)).any()) for name, scores in study.scores.items()}
    for name, (reference, labels) in study.labels().items():
        rows[name] = alignments(study, labels)
        parts.append(table(study, name, reference, labels, rows[name]))
        forest(rows[name], folder / f"forest-{name.replace(' ', '-')}.png")
        fields = rows[name].drop(columns=["minus", "p"]).assign(rho=rows[name].rho.map(dataclasses.asdict))
        record[name] = {
            scorer: {"family": row.pop("family"), "orders": orders[scorer], **row}
            for scorer, row in fields.to_dict("index").items()
        }
    summary = {"title": title, "labels": record, "rewards": rewards}
    with replacing(folder / "alignment.json") as out:
        json.dump(summary, out, indent=1)
    sections = {"References": references_table(study, rows), "What rollouts buy": rollouts_table(study)}
    played = downstream.played(summary)
    sections["Alignment against downstream reward"] = downstream.table([played]) if played else ""
    parts += [f"### {heading}\n\n{text}" for heading, text in sections.items() if text]
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text
