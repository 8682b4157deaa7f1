"""Does alignment predict what search gains? The scores that have steered a search, by their alignment and reward.

    python -m experiments.qval.downstream RUN/frozenlake/qval RUN/webshop/qval --out RUN/downstream.md

The folders are what `python -m experiments.qval --results FILE` wrote. For several environments the correlation is the
mean of the environments' own, since neither rewards nor alignments compare between environments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from qlass import UserError
from qlass.cli import run_stage
from qlass.files import is_number, is_text, read_jsonl, replacing, wrong
from qlass.stats import Estimate, spearman
from reporting.figures import STYLE, save

FAMILIES = {"control": "#8c8c8c", "code": "#009e73", "learned": "#0072b2", "tree": "#56b4e9", "policy": "#e69f00",
            "hindsight": "#cc79a7", "embedding": "#d55e00", "judge": "#000000"}  # fmt: skip
METRICS: dict[str, Callable[[dict], float]] = {
    "rho per state": lambda row: row["rho"]["mean"],
    "failures last": lambda row: row["failed_last"],
    "top-1": lambda row: row["top_1"],
    "gain": lambda row: row["gain"],
    "centred": lambda row: row["centred"],
    "global": lambda row: row["overall"],
    "actor": lambda row: row["actor"],
}
LEAST = 4  # scorers for a correlation


@dataclasses.dataclass(frozen=True)
class Played:
    """One environment: each scorer's alignment, (scorers,) a metric, and its rewards, (scorers, tasks)."""

    title: str
    names: list[str]
    families: list[str]
    metrics: dict[str, np.ndarray]
    rewards: np.ndarray

    def of(self, names: list[str]) -> Played:
        some = [self.names.index(name) for name in names]
        measured = {metric: values[some] for metric, values in self.metrics.items()}
        return Played(self.title, names, [self.families[i] for i in some], measured, self.rewards[some])


def rewards(path: Path, env: str) -> dict[str, dict[str, float]]:
    """{scorer: {task: reward}} of the lines of --method scorer in a results file of this environment."""
    found: dict[str, dict[str, float]] = {}
    for record in read_jsonl(path):
        if record.get("method") == "scorer":
            if mistake := wrong(record, {"player": is_text, "reward": is_number}, ["player", "task_id", "reward"]):
                raise UserError(f"{path}: {mistake}; is it of q_search.py --method scorer?")
            if record.get("env") != env:
                raise UserError(f"{path}: of {record.get('env')}, not of {env}")
            if record["task_id"] in (of := found.setdefault(record["player"], {})):
                twice = f"{record['player']} plays {record['task_id']} twice"
                raise UserError(f"{path}: {twice}: one M, split, seed and label a file is expected")
            of[record["task_id"]] = record["reward"]
    if not found:
        raise UserError(f"{path}: nothing of q_search.py --method scorer")
    return found


def played(summary: dict) -> Played | None:
    """From alignment.json, against its first labels. Left out: scores without a rho, and scores of the state alone,
    which all choose at random."""
    rows, of = next(iter(summary["labels"].values())), summary.get("rewards") or {}
    names = [n for n in of if n in rows and rows[n]["orders"] and not math.isnan(rows[n]["rho"]["mean"])]
    if len(names) < LEAST:
        return None
    if not (tasks := sorted(set.intersection(*(set(of[name]) for name in names)))):
        return None
    measured = {m: np.nan_to_num([get(rows[name]) for name in names]) for m, get in METRICS.items()}
    table = np.array([[of[name][task] for task in tasks] for name in names])
    return Played(summary["title"], names, [rows[name]["family"] for name in names], measured, table)


def correlations(studies: Sequence[Played], draws: int = 2000) -> dict[str, Estimate]:
    """Spearman of alignment and reward over scorers, mean over environments; 95 % over scorers, the same ones in all
    environments, and over tasks. The alignments themselves are taken as they are."""
    names = [name for name in studies[0].names if all(name in study.names for study in studies)]
    if len(names) < LEAST:
        raise UserError(f"{len(names)} scorers have steered in all of these; {LEAST} or more are needed")
    studies, rng = [study.of(names) for study in studies], np.random.default_rng(0)
    drawn: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for _ in range(draws):
        some = rng.integers(len(names), size=len(names))
        lots = [rng.integers(study.rewards.shape[1], size=study.rewards.shape[1]) for study in studies]
        won = [study.rewards[some][:, lot].mean(1) for study, lot in zip(studies, lots, strict=True)]
        for metric, values in drawn.items():
            pairs = zip(studies, won, strict=True)
            values.append(float(np.mean([spearman(study.metrics[metric][some], y) for study, y in pairs])))
    found = {}
    for metric, values in drawn.items():
        mean = np.mean([spearman(study.metrics[metric], study.rewards.mean(1)) for study in studies])
        found[metric] = Estimate(float(mean), *middle(values), len(names))
    beyond = [a - b for a, b in zip(drawn["rho per state"], drawn["global"], strict=True)]
    mean = found["rho per state"].mean - found["global"].mean
    return {**found, "rho per state - global": Estimate(mean, *middle(beyond), len(names))}


def middle(values: list[float]) -> tuple[float, float]:
    """95 % of them; NaN, where a resample has no order, left out."""
    known = [value for value in values if not math.isnan(value)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (math.nan, math.nan)
    return float(low), float(high)


def table(studies: Sequence[Played]) -> str:
    """Which metric predicts the reward, in each environment and over all, and the rewards."""
    titles = [study.title for study in studies]
    columns = [correlations([study]) for study in studies]
    if len(studies) > 1:
        titles, columns = [*titles, "mean of the environments"], [*columns, correlations(studies)]
    lines = ["| rank correlation with reward [95 % over scorers and tasks] | " + " | ".join(titles) + " |"]
    lines += ["|---" * (1 + len(titles)) + "|"]
    lines += ["| " + " | ".join([metric, *(f"{c[metric]}" for c in columns)]) + " |" for metric in columns[0]]
    sizes = [f"{study.rewards.shape[0]} scorers, {study.rewards.shape[1]} tasks" for study in studies]
    sizes += [f"{columns[-1]['global'].n} scorers"] if len(studies) > 1 else []
    lines += ["| played | " + " | ".join(sizes) + " |"]
    for study in studies:
        ranked = sorted(zip(study.names, study.rewards.mean(1), study.metrics["rho per state"], strict=True),
                        key=lambda row: -row[1])  # fmt: skip
        lines += ["", f"| scorer ({study.title}) | reward | rho per state |", "|---|---|---|"]
        lines += [f"| {name} | {reward:.3f} | {rho:.3f} |" for name, reward, rho in ranked]
    return "\n".join(lines)


def figure(studies: Sequence[Played]) -> Figure:
    """Mean reward against the per-state and the global figure, a row an environment."""
    with mpl.rc_context(STYLE):
        made = Figure(figsize=(8.5, 3.4 * len(studies)), layout="constrained")
        rows = made.subplots(len(studies), 2, sharey="row", squeeze=False)
        for study, row in zip(studies, rows, strict=True):
            for axes, metric, label in zip(row, ("rho per state", "global"),
                                           ("Spearman per state", "global Spearman"), strict=True):  # fmt: skip
                for family, colour in FAMILIES.items():
                    here = [i for i, f in enumerate(study.families) if f == family]
                    if here:
                        axes.plot(
                            study.metrics[metric][here], study.rewards.mean(1)[here], "o", color=colour, label=family
                        )
                axes.set_xlabel(label)
            row[0].set_ylabel("mean reward of the search")
            row[0].set_title(study.title, loc="left", fontsize=10)
            row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            row[0].margins(y=0.08)
    return made


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="with alignment.json, one an environment")
    parser.add_argument("--out", type=Path, default=Path("downstream.md"), help="table; the figure goes beside it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, studies = parse_args(argv), []
    for folder in args.folders:
        path = folder / "alignment.json"
        try:
            study = played(json.loads(path.read_bytes()))  # with NaN, where nothing could be measured
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not what experiments.qval writes ({type(error).__name__}: {error})") from None
        if study is None:
            raise UserError(f"{folder}: fewer than {LEAST} scores have steered there; run qval with --results")
        studies.append(study)
    text = table(studies) + "\n"
    with replacing(args.out) as out:
        out.write(text)
    save(figure(studies), args.out.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    run_stage(main)
