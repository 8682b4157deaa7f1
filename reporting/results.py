"""Result files -> a table of episodes -> one group a condition: what the report's tables and figures are made from."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from qlass import UserError, files, metadata
from qlass.output import read_results as lines_of
from reporting.stats import Estimate, interval

METHODS = {  # in the order of the table
    "oracle": "best player, who may know the goal (oracle)",
    "expert": "expert",
    "rule": "rule",
    "chat": "chat agent",
    "random": "random candidate",
    "greedy": "SFT greedy",
    "sample": "SFT sampled",
    "best_of_n": "best-of-N",
    "likeliest": "search by the agent's log-probability",
    "qlass": "QLASS",
    "oracle_step": "choice by true value (oracle)",
    "oracle_lookahead": "look-ahead of the released code (oracle)",
    "lookahead": "look-ahead by QNet",
    "beam": "beam by QNet",
    "mcts": "MCTS by QNet",
    "oracle_mcts": "MCTS by QNet, ends by true reward (oracle)",
    "particles": "particles by QNet",
}
APART = 'name the runs apart: python report.py "first=PATH" "second=PATH"'
COSTS = ("prompt", "generated", "scored")
CONDITION = ["env", "method", "M", "N", "select", "label", "player"]


@dataclass(frozen=True)
class Condition:
    """A row of the table: a method with its budget, environment and label."""

    env: str
    method: str
    M: int | None = None
    N: int | None = None
    select: str | None = None
    label: str = ""
    player: str = ""  # which of the environment's rules

    @property
    def oracle(self) -> bool:
        return self.method.startswith("oracle") or (self.select == "oracle" and (self.N or 1) > 1)

    @property
    def name(self) -> str:
        name = METHODS.get(self.method, self.method) + (f": {self.player}" if self.player else "")
        if (self.N or 1) > 1:
            name += {"q": ", picked by QNet", "oracle": ", picked by true reward (oracle)"}.get(self.select or "", "")
        return f"{name} [{self.label}]" if self.label else name

    @property
    def budget(self) -> str:  # without what is 1
        return " ".join(f"{k}={v}" for k, v in (("M", self.M), ("N", self.N)) if (v or 1) > 1)

    def __str__(self) -> str:
        return f"{self.name} {self.budget}".strip()

    def order(self) -> tuple:
        rank = list(METHODS).index(self.method) if self.method in METHODS else len(METHODS)
        return self.env, rank, self.method, self.label, self.player, self.oracle, self.N or 1, self.M or 1


@dataclass
class Group:
    """All episodes of one condition, a row each (`episode`)."""

    condition: Condition
    episodes: pd.DataFrame

    def values(self, name: str) -> pd.Series:
        """A column, by (task, seed)."""
        return self.episodes.set_index(["task", "seed"])[name].dropna()

    @cached_property
    def blocks(self) -> dict[str, str]:
        return dict(zip(self.episodes["task"], self.episodes["block"], strict=True))

    @cached_property
    def row(self) -> pd.DataFrame:
        """What the table's row is of: the tasks that all seeds have played, or all where there are not two such."""
        seeds = self.episodes.groupby("task", dropna=False)["seed"].transform("nunique")
        row = self.episodes[seeds == self.episodes["seed"].nunique()]
        return row if row["task"].nunique() > 1 else self.episodes

    @cached_property
    def reward(self) -> Estimate:
        return interval(self.values("reward"), self.blocks)

    def mean(self, name: str) -> float:
        return float(self.row.groupby("task", dropna=False)[name].mean().mean())


def result_files(arguments: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(label, file) of each argument: a file, a folder's results*.jsonl, either with LABEL= in front."""
    for argument in arguments:
        label, path = "", Path(argument)
        if not path.exists() and "=" in argument:
            label, _, rest = argument.partition("=")
            path = Path(rest)
        names = {re.sub(r"\.\d+-of-\d+(?=\.jsonl$)", "", file.name) for file in path.glob("results*.jsonl")}
        paths = [path / name for name in sorted(names)] if path.is_dir() else [path]  # parts make one file
        if not paths or not any(map(files.files_of, paths)):
            raise UserError(f"{path}: no results*.jsonl; python q_search.py --run FOLDER writes one")
        yield from ((label, file) for file in paths)


def read_results(sources: Iterable[tuple[str, Path]], warnings: list[str] | None = None) -> list[Group]:
    """Read (label, file) pairs into one group per condition, in the order of the table.

    UserError names malformed lines, two results of one method, task and seed that differ, and files not to be pooled.
    warnings: a list that gets what is printed as well.
    """
    sources, rows = list(sources), []
    warnings = [] if warnings is None else warnings
    data = {path: data_of(path) for _, path in sources}
    for label, path in sources:
        if not metadata.is_complete(path):
            warnings.append(f"{path}: incomplete; short episodes end first, so its means are biased to them")
        base = metadata.read_meta(path).get("cloned") is False
        for where, record in lines_of(path):
            own = base and record["method"] not in ("oracle", "expert", "rule", "chat")
            name = ", ".join(filter(None, (label, "base agent" if own else "")))
            rows.append(episode(record, name, path, where))
            rows[-1]["data"] = data[path]
    if not rows:
        raise UserError("the result files hold no result; python q_search.py writes some")
    warnings += tell_data_apart(rows)
    table = pd.DataFrame.from_records(rows).astype({"M": "Int64", "N": "Int64"})
    table = table.sort_values(["task", "seed"], kind="stable")  # the same report, whatever the order of the lines
    same = [*CONDITION, "task", "seed"]
    table = table.drop_duplicates([*same, "reward", "total"])
    twins = table[table.duplicated(same, keep=False)].sort_values(same, kind="stable")
    for first, second in zip(twins[:1].itertuples(), twins[1:2].itertuples(), strict=True):
        places = f"{first.where} and {second.where}"
        subject = f"{first.method} for task {first.task}, seed {first.seed}"
        raise UserError(f"{places}: two different results of {subject}: {APART}")
    groups = []
    for key, episodes in table.groupby(CONDITION, dropna=False):
        conditions = {name: value for name, value in zip(CONDITION, key, strict=True) if not pd.isna(value)}
        groups.append(Group(Condition(**conditions), episodes))
    groups.sort(key=lambda group: group.condition.order())
    warnings += check_pools(groups)
    check_worlds(groups)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return groups


def episode(record: dict, label: str, path: Path, where: str) -> dict[str, Any]:
    """The numbers of a result, and where it stands, so that its texts need not stay in memory."""
    steps, tokens, success = record.get("steps") or [], record["tokens"], record.get("success")
    split = record.get("split") or "test"
    return {
        "env": record["env"] if split == "test" else f"{record['env']} {split}",
        **{name: record.get(name) for name in ("method", "M", "N", "select", "player")},
        "label": ", ".join(filter(None, (label, record.get("label")))) or None,
        "task": str(record["task_id"]),
        "type": record.get("type") or "",
        "block": record.get("block") or str(record["task_id"]),  # tasks that vary together (TextEnv.block)
        "seed": record.get("seed") or 0,
        "reward": float(record["reward"]),
        "success": math.nan if success is None else float(success),
        "generated": tokens.get("generated", 0),
        # Of a scorer of experiments.qval only the agent's own are known.
        "total": math.nan if record["method"] == "scorer" else sum(tokens.get(part, 0) for part in COSTS),
        "env_steps": record.get("env_steps", record.get("n_steps", len(steps))),
        "file": path,
        "where": where,
    }


# --------------------------------------------------------------------------------------- what one row may be made from

INPUTS = ("sft", "qnet", "labels", "trees", "expert")  # arguments that name what an earlier stage wrote
# Arguments that may differ between the seeds of a pipeline: names, places, speed; of results, what each line says.
ANY = {*metadata.FREE, *INPUTS, "seed"}
OF_A_LINE = {"method", "M", "N", "select", "split", "limit", "label", "scorer"}


WORLD = ("env", "env_option", "max_steps")  # arguments that all rows under one label share


def data_of(output: Path) -> str:
    """What results were played on, by content: the files that options name, but for the instruction; "": not known."""
    held = metadata.read_meta(output)["arguments"].get("env_files")
    data = {name: content for name, content in (held or {}).items() if name != "instruction"}
    return "" if held is None else json.dumps(data, sort_keys=True)


def tell_data_apart(rows: list[dict]) -> Iterator[str]:
    """Give results on different data environments of their own, as a task of one is not that of the other; say so."""
    known: dict[str, list[str]] = {}
    for row in rows:
        several = known.setdefault(row["env"], [])
        if row["data"] not in ("", *several):
            several.append(row["data"])
    for row in rows:
        several = known[row["env"]]
        if len(several) > 1 and row["data"]:
            row["env"] += f", data {several.index(row['data']) + 1}"
    for env, several in known.items():
        if len(several) > 1:
            yield f"{env}: results on {len(several)} sets of data, which are not compared"


def check_worlds(groups: Sequence[Group]) -> None:
    """UserError names two files under one label whose environments differ, so that no two rows can be compared."""
    first: dict[tuple, tuple[Path, dict]] = {}
    for group in groups:
        for path in dict.fromkeys(group.episodes["file"]):
            arguments = metadata.read_meta(path)["arguments"]
            key = group.condition.env, group.condition.label
            other, theirs = first.setdefault(key, (path, arguments)) if arguments else (path, {})
            for name in WORLD:
                if name in theirs and arguments.get(name) != theirs[name]:
                    values = f"{name.replace('_', '-')} ({theirs[name]}, {arguments.get(name)})"
                    raise UserError(f"{other} and {path}: {key[0]} with different --{values}: {APART}")


def check_pools(groups: Iterable[Group]) -> list[str]:
    """UserError names two files in one row whose metadata tell of agents, QNets or environments that differ in more
    than their seed. Returns warnings of what cannot be told."""
    warnings: list[str] = []
    for group in groups:
        name, used = group.condition.name, inputs_of(group.condition)
        seeds = group.episodes.groupby("file", dropna=False)["seed"].agg(set)
        for (a, of_a), (b, of_b) in combinations(seeds.items(), 2):
            for path in (a, b):
                if not metadata.read_meta(path)["arguments"]:
                    warnings.append(f"{path}: no metadata beside it, so its agent and QNet may be other ones")
            ours, theirs = recipe(a, used), recipe(b, used)
            models = [input_hashes(path, used) for path in (a, b)]
            if of_a & of_b:
                ours, theirs = ours | models[0], theirs | models[1]
            elif used and models[0] == models[1] and len(models[0]) == len(used):
                warnings.append(f"{a} and {b}: {name} is of one model under two --seed, so not of two trainings")
            for flag in ours:
                if flag in theirs and ours[flag] != theirs[flag]:
                    mistake = f"{name} with different {flag} ({ours[flag]}, {theirs[flag]}), which is not one row"
                    raise UserError(f"{a} and {b}: {mistake}: {APART}")
    return list(dict.fromkeys(warnings))


def inputs_of(condition: Condition) -> tuple[str, ...]:
    """Whose results they are: of nobody's training (environment's players, chat model), of the agent, of QNet too."""
    if condition.method in ("rule", "expert", "oracle", "chat"):
        return ()
    scored = condition.method in ("qlass", "oracle_lookahead") or condition.select == "q"
    return ("sft", "qnet") if scored else ("sft",)


def input_hashes(output: Path, used: Iterable[str]) -> dict[str, str]:
    meta = metadata.read_meta(output)
    hashes = {name: meta["inputs"].get(str(meta["arguments"].get(name))) for name in used}
    return {f"--{name} of one seed": digest for name, digest in hashes.items() if digest}


def ancestors(output: Path, names: Iterable[str]) -> dict[Path, str]:
    """{path: " of labels of qnet"} of what an output was made from and, in turn, of what that was made from."""
    places: dict[Path, str] = {}
    queue = [(output, name, "") for name in names]
    for product, name, of in queue:  # grows as it is read
        path = metadata.input_of(product, name)
        if path and path not in places:
            places[path] = f" of {name}{of}"
            queue += [(path, earlier, places[path]) for earlier in INPUTS]
    return places


def recipe(output: Path, used: Iterable[str]) -> dict[str, Any]:
    """{"--epochs of sft": 12}: the arguments that results and all that they were made from were made with."""
    flags: dict[str, Any] = {}
    for path, of in {output: "", **ancestors(output, used)}.items():
        meta = metadata.read_meta(path)
        skipped = ANY if of else ANY | OF_A_LINE
        arguments = {name: value for name, value in meta["arguments"].items() if name not in skipped}
        arguments = {n: value for n, value in arguments.items() if value is not None or n not in metadata.FOUND}
        flags |= {f"--{name.replace('_', '-')}{of}": value for name, value in arguments.items()}
        if "kept" in meta:  # an agent's own trajectories: their number is a result
            flags.pop("--n-expert" + of.removeprefix(" of expert"), None)
    return flags
