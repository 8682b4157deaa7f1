"""Does alignment predict what search gains? The scores that have steered a search, by their alignment and reward.

    python -m experiments.qval.downstream RUN/frozenlake/qval RUN/webshop/qval --out RUN/downstream.md

The folders are what `python -m experiments.qval --results FILE` wrote. For several environments the correlation is the
mean of the environments' own, since neither rewards nor alignments compare between environments.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from tyro.conf import Positional

from experiments.qval.metrics import RHO, markdown
from qlass import UserError
from qlass.outputs import atomic, changed_inputs, warn
from qlass.settings import parse, run_stage
from reporting.results import lines_of
from reporting.stats import Estimate

PREDICT = [RHO, "failures last", "top-1", "gain", "centred", "global", "actor"]  # figures that may predict the reward
LEAST = 4  # scorers for a correlation


@dataclasses.dataclass(frozen=True)
class Played:
    """One environment: each scorer's alignment (scorers x metrics) and rewards (scorers x tasks)."""

    title: str
    alignment: pd.DataFrame
    rewards: pd.DataFrame


def rewards(path: Path, env: str) -> dict[str, dict[str, float]]:
    """{scorer: {task: reward}} of the lines of `experiments.qval search` in a results file of this environment."""
    for source in changed_inputs(path):
        warn(f"{path} was made from another {source} than there is now")
    lines = pd.DataFrame.from_records([record for _, record in lines_of(path) if record["method"] == "scorer"])
    if lines.empty:
        raise UserError(f"{path}: nothing of experiments.qval search")
    if others := {*lines.env} - {env}:
        raise UserError(f"{path}: of {', '.join(others)}, not of {env}")
    if lines.duplicated(["player", "task_id"]).any():
        raise UserError(f"{path}: a scorer plays a task twice: one M, split, seed and label a file is expected")
    return {name: dict(zip(own.task_id, own.reward, strict=True)) for name, own in lines.groupby("player", sort=False)}


def played(summary: dict) -> Played | None:
    """From alignment.json, against its first labels. Left out: scores without a rho, and scores of the state alone,
    which all choose at random. None where fewer than LEAST scores are left."""
    alignment = pd.DataFrame.from_dict(next(iter(summary["labels"].values())), orient="index")
    rewards = pd.DataFrame.from_dict(summary["rewards"], orient="index")
    alignment[RHO] = alignment[RHO].map(lambda estimate: estimate["mean"])
    names = rewards.index.intersection(alignment[alignment.orders & alignment[RHO].notna()].index, sort=False)
    rewards = rewards.loc[names].dropna(axis=1).sort_index(axis=1)  # tasks that all have played
    if len(names) < LEAST or rewards.empty:
        return None
    return Played(summary["title"], alignment.loc[names, PREDICT].fillna(0.0), rewards)


def correlations(studies: Sequence[Played], draws: int = 2000) -> dict[str, Estimate]:
    """Spearman of alignment and reward over scorers, mean over environments; 95 % over scorers, the same ones in all
    environments, and over tasks. The alignments themselves are taken as they are."""
    names = [name for name in studies[0].rewards.index if all(name in study.rewards.index for study in studies)]
    if len(names) < LEAST:
        raise UserError(f"{len(names)} scorers have steered in all of these; {LEAST} or more are needed")
    tables = [(study.alignment.loc[names].to_numpy(), study.rewards.loc[names].to_numpy()) for study in studies]
    n, sizes = len(names), [rewards.shape[1] for _, rewards in tables]

    def rhos(scorers: np.ndarray, tasks: Sequence[np.ndarray]) -> np.ndarray:
        """Each metric's Spearman with these scorers' rewards on these tasks; last the first's beyond the global one."""
        values = []
        for (metrics, rewards), drawn in zip(tables, tasks, strict=True):
            columns = np.column_stack([metrics[scorers], rewards[scorers][:, drawn].mean(axis=1)])
            with np.errstate(invalid="ignore"):  # of a resample without an order: NaN
                values.append(np.corrcoef(rankdata(columns, axis=0), rowvar=False)[-1, :-1])
        mean = np.mean(values, axis=0)
        return np.append(mean, mean[0] - mean[PREDICT.index("global")])

    rng = np.random.default_rng(0)
    drawn = [rhos(rng.integers(n, size=n), [rng.integers(size, size=size) for size in sizes]) for _ in range(draws)]
    low, high = pd.DataFrame(drawn).quantile([0.025, 0.975]).to_numpy()
    mean = rhos(np.arange(n), [np.arange(size) for size in sizes])
    heads = [*PREDICT, f"{RHO} - global"]
    return {head: Estimate(*map(float, row), n) for head, *row in zip(heads, mean, low, high, strict=True)}


def table(studies: Sequence[Played]) -> str:
    """Which metric predicts the reward, in each environment and over all, and the rewards."""
    columns = {study.title: correlations([study]) for study in studies}
    sizes = {study.title: "{} scorers, {} tasks".format(*study.rewards.shape) for study in studies}
    if len(studies) > 1:
        mean = columns["mean of the environments"] = correlations(studies)
        sizes["mean of the environments"] = f"{mean['global'].n} scorers"
    rows = pd.DataFrame(columns)
    rows.loc["played"] = sizes
    tables = [rows.rename_axis("rank correlation with reward [95 % over scorers and tasks]")]
    for study in studies:
        reward = study.rewards.mean(axis=1).sort_values(ascending=False, kind="stable")
        columns = {"reward": reward, RHO: study.alignment[RHO].loc[reward.index]}
        tables.append(pd.DataFrame(columns).rename_axis(f"scorer ({study.title})"))
    return "\n\n".join(markdown(rows.reset_index()) for rows in tables)


@dataclasses.dataclass(frozen=True)
class Config:
    folders: Positional[tuple[Path, ...]] = ()  # with alignment.json, one an environment
    out: Path = Path("downstream.md")  # the table


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    if not config.folders:
        raise UserError("name the folders of one study or more, as RUN/qval")
    studies = []
    for folder in config.folders:
        study = played(json.loads((folder / "alignment.json").read_bytes()))  # with NaN, where nothing was measured
        if study is None:
            raise UserError(f"{folder}: fewer than {LEAST} scores have steered there; run qval with --results")
        studies.append(study)
    text = table(studies) + "\n"
    with atomic(config.out) as out:
        out.write(text)
    print(text)


if __name__ == "__main__":
    run_stage(main)
