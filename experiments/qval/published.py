"""Prediction files that others published in QVAL's layout: QVAL's figure for them, and what it leaves out.

    python -m experiments.qval.published GT.json EVAL.json ...

Files with one value per point give a global Spearman, rankings give one per point. QVAL drops values that could not be
parsed, and rankings that lack a value. Beside its figure stand the share of values that could be parsed, and the figure
with failures ranked last. A constant ranking counts 0 here; QVAL's mean is then not a number. In this way environments
that no pip install brings (OpenApps, TerminalBench) are evaluated without being run; docs/environment.md says what
playing them takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.qval import metrics
from experiments.qval.report import KINDS, by_point, cell
from qlass import UserError
from qlass.cli import run_stage
from qlass.files import read_object, wrong
from qlass.stats import Estimate, bootstrap, spearman


def states(path: Path) -> list[list[float | None]]:
    """A file's values by point; all as one state where there is one value a point."""
    record = read_object(path)
    if mistake := wrong(record, KINDS, ["values"]):
        raise UserError(f"{path}: {mistake}; a file of QVAL's predictions or labels is expected")
    counts = (record.get("config") or {}).get("candidate_counts")
    return by_point(record["values"], counts) if counts else [record["values"]]


def agreement(
    truth: list[list[float]], values: list[list[float | None]], draws: int = 2000
) -> tuple[float, Estimate, float]:
    """Coverage; Spearman of what was parsed (mean over rankings, or global), 95 % over points; with failures last."""
    if [len(s) for s in truth] != [len(s) for s in values]:
        raise UserError("the two files are of other points")
    flat = [v for some in values for v in some]
    coverage = float(np.mean([v is not None for v in flat]))
    if len(truth) > 1:
        numbers = range(len(truth))
        some = [i for i in numbers if None not in values[i]]  # as QVAL's, which skips a ranking with a failure
        parsed = metrics.per_state(some, [values[i] for i in some], [truth[i] for i in some])
        last = metrics.per_state(numbers, values, truth, failed_last=True)
        return coverage, bootstrap(parsed.values()), metrics.mean_of(last)
    pairs = np.array([(v, t) for v, t in zip(values[0], truth[0], strict=True) if v is not None])
    if len(pairs) < 2:
        return coverage, Estimate(np.nan, np.nan, np.nan, len(pairs)), np.nan
    lots = np.random.default_rng(0).integers(len(pairs), size=(draws, len(pairs)))
    low, high = np.nanquantile([spearman(*pairs[lot].T) for lot in lots], [0.025, 0.975])
    last = spearman([-np.inf if v is None else v for v in values[0]], truth[0])
    return coverage, Estimate(spearman(*pairs.T), float(low), float(high), len(pairs)), last


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("truth", type=Path, help="file of the labels")
    parser.add_argument("files", type=Path, nargs="+", help="files of predictions")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    truth = states(args.truth)
    print("| file | parsed | Spearman [95 % over points] | failures last |\n|---|---|---|---|")
    for path in args.files:
        coverage, estimate, last = agreement(truth, states(path))  # type: ignore[arg-type]
        print(f"| {path.stem} | {cell(coverage)} | {estimate} | {cell(last)} |")


if __name__ == "__main__":
    run_stage(main)
