"""Prediction files in QVAL's layout: ours, and QVAL's figure for those that others published.

    python -m experiments.qval.published GT.json EVAL.json ...

NAME.json holds a value for each point's taken action, and gives a global Spearman; NAME_ranking.json the ranks of all
candidates, which give one per point. QVAL drops values that could not be parsed, and rankings that lack a value. Beside
its figure stand the share of values that could be parsed, and the figure with failures ranked last. A constant ranking
counts 0 here; QVAL's mean is then not a number. In this way environments that no pip install brings (OpenApps,
TerminalBench) are evaluated without being run; docs/environment.md says what playing them takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.qval import metrics
from experiments.qval.metrics import Values, correlation, last, per_state, series
from experiments.qval.points import Point
from qlass import UserError
from qlass.cli import run_stage
from qlass.files import replacing
from qlass.records import is_number, read_object, wrong
from reporting.stats import Estimate, bootstrap

KINDS = {
    "method_name": str,
    "values": lambda v: isinstance(v, list) and all(value is None or is_number(value) for value in v),
    "config": dict | None,
    "metadata": dict | None,
}


def as_ranks(scores: Sequence[float | None]) -> list[float | None]:
    """1 for the highest; equal scores share their mean rank, as far as there is a score."""
    ranks = pd.Series(scores, dtype=float).rank(ascending=False).tolist()
    return [None if score is None else rank for score, rank in zip(scores, ranks, strict=True)]


def write(folder: Path, name: str, points: Sequence[Point], values: Values, config: dict, kind: str = "eval") -> None:
    """The file of one value a point carries those of all candidates in its metadata."""
    counts = [len(scores) for scores in values]
    metadata = {"ranking_point_hashes": [point.hash for point in points], "num_ranking_points": len(points),
                "total_candidates": sum(counts)}  # fmt: skip
    taken = [scores[point.taken] for scores, point in zip(values, points, strict=True)]
    ranks = [rank for scores in values for rank in as_ranks(scores)]
    ranking = {**config, "prediction_format": "ranking_predicted", "candidate_counts": counts}
    complete = {**metadata, "candidate_values": [list(scores) for scores in values]}
    for ending, *fields in (("", taken, config, complete), ("_ranking", ranks, ranking, metadata)):
        record = {"method_name": name, "method_type": kind}
        with replacing(folder / f"{name}{ending}.json") as out:
            json.dump(record | dict(zip(("values", "config", "metadata"), fields, strict=True)), out, indent=1)


def read(path: Path) -> dict:
    record = read_object(path)
    if mistake := wrong(record, KINDS, ["values"]):
        raise UserError(f"{path}: {mistake}; a file of QVAL's predictions or labels is expected")
    return {"method_name": path.stem, **record, "config": record.get("config") or {},
            "metadata": record.get("metadata") or {}}  # fmt: skip


def by_point(ranking: Sequence[float | None], counts: Sequence[int]) -> Values:
    """A ranking's places by point, their sign turned: the best is the highest, as of any score."""
    if sum(counts) != len(ranking):
        raise UserError(f"a ranking of {len(ranking)} candidates, where its candidate_counts add up to {sum(counts)}")
    turned = [None if place is None else -place for place in ranking]
    return [turned[a:b] for a, b in itertools.pairwise(np.cumsum([0, *counts]))]


def values_of(record: dict, path: Path, points: Sequence[Point]) -> Values:
    """The values of each point's candidates. A file with one value a point knows the actions taken alone."""
    if "candidate_values" in record["metadata"]:
        values = record["metadata"]["candidate_values"]
    elif counts := record["config"].get("candidate_counts"):
        values = by_point(record["values"], counts)
    else:
        values = [[v if i == p.taken else None for i in range(len(p.candidates))]
                  for v, p in zip(record["values"], points, strict=False)]  # fmt: skip
    hashes = [point.hash for point in points]
    counts = [len(point.candidates) for point in points]
    if [len(v) for v in values] != counts or record["metadata"].get("ranking_point_hashes", hashes) != hashes:
        raise UserError(f"{path}: predictions for other points; delete it, or name another --out")
    return values


def is_current(record: dict, sources: dict[str, str]) -> bool:
    """Whether a prediction is from these very sources; one from elsewhere says nothing of its own."""
    return record["config"].get("made_from", sources) == sources


def read_folder(
    folder: Path, points: Sequence[Point], sources: Callable[[str], dict[str, str]]
) -> tuple[dict[str, tuple[str | None, Values]], list[str]]:
    """{name: (family, values)} of what is there, and the names of what was made from something else than `sources`
    gives now. A ranking counts where it stands alone."""
    predictions, stale = {}, []
    for path in sorted(folder.glob("*.json")):
        name = path.stem.removesuffix("_ranking")
        if name != path.stem and path.with_stem(name).exists():
            continue
        record = read(path)
        method = record["method_name"]
        if not is_current(record, sources(name)):
            stale.append(name)
            continue
        if method in predictions:
            raise UserError(f"{folder}: two files are predictions of {method!r}: rename one's method_name")
        predictions[method] = record["config"].get("family"), values_of(record, path, points)
    return predictions, stale


def agreement(truth: Values, values: Values, draws: int = 2000) -> dict[str, object]:
    """Coverage; Spearman of what was parsed (mean over rankings, or global), 95 % over points; with failures last."""
    if [len(labels) for labels in truth] != [len(scores) for scores in values]:
        raise UserError("the two files are of other points")
    index = metrics.index([len(labels) for labels in truth])
    scores, labels = series(values, index), series(truth, index)
    pairs = pd.DataFrame({"score": scores, "label": labels})
    if len(truth) > 1:
        complete = pairs[scores.notna().groupby("state").transform("all")]  # QVAL skips a ranking with a failure
        figure = bootstrap(per_state(complete.score, complete.label))
        failed_last = float(per_state(last(scores), labels).mean())
    else:
        parsed, rng = pairs.dropna(), np.random.default_rng(0)
        drawn = [correlation(parsed.sample(frac=1, replace=True, random_state=rng)) for _ in range(draws)]
        figure = Estimate(correlation(parsed), *pd.Series(drawn).quantile([0.025, 0.975]), len(parsed))
        failed_last = correlation(pairs.assign(score=last(scores)))
    return {"parsed": float(scores.notna().mean()), "Spearman [95 % over points]": figure, "failures last": failed_last}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("truth", type=Path, help="file of the labels")
    parser.add_argument("files", type=Path, nargs="+", help="files of predictions")
    args = parser.parse_args(argv)

    def values(path: Path) -> Values:
        record = read(path)
        counts = record["config"].get("candidate_counts")
        return by_point(record["values"], counts) if counts else [record["values"]]

    print(
        metrics.markdown(
            pd.DataFrame([{"file": path.stem} | agreement(values(args.truth), values(path)) for path in args.files])
        )
    )


if __name__ == "__main__":
    run_stage(main)
