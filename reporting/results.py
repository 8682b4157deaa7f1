"""Result files -> a table of episodes -> one group a condition: what the report's tables and figures are made from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import pandas as pd

from qlass import UserError, records
from qlass.messages import parse_action
from qlass.outputs import meta_of, parts_of, warn
from reporting.lineage import lineage
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
    "oracle_belief": "choice by the value in worlds that agree with what was seen (oracle)",
    "oracle_lookahead": "look-ahead of the released code (oracle)",
    "lookahead": "look-ahead by QNet",
    "beam": "beam by QNet",
    "mcts": "MCTS by QNet",
    "particles": "particles by QNet",
}
APART = 'not one row: name the runs apart: python -m reporting "first=PATH" "second=PATH"'
ALONE = "not one table: report on each alone"
UNTRAINED = ("oracle", "expert", "rule", "chat")  # methods that no training of ours changes
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
        return interval(self.values("reward"), self.blocks, rewards=True)

    def mean(self, name: str) -> float:
        return float(self.row.groupby("task", dropna=False)[name].mean().mean())


def result_files(arguments: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(label, file) of each argument: a file, a folder's results*.jsonl, either with LABEL= in front."""
    for argument in arguments:
        label, path = "", Path(argument)
        if not path.exists() and "=" in argument:
            label, _, rest = argument.partition("=")
            path = Path(rest)
        there = [*path.glob("results*.jsonl"), *path.glob("results*.jsonl.parts")]
        names = sorted({file.name.removesuffix(".parts") for file in there})
        paths = [path / name for name in names] if path.is_dir() else [path]
        if not any(place.exists() for file in paths for place in (file, parts_of(file))):
            raise UserError(f"{path}: no results*.jsonl; python q_search.py --run FOLDER writes one")
        yield from ((label, file) for file in paths)


def lines_of(path: Path) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", result). UserError for a file that is not complete, and for what is no result."""
    if not path.exists() and parts_of(path).exists():
        raise UserError(f"{path}: is not complete: the command that began it (again) completes it")
    for number, line in enumerate(records.read(path, records.Result), 1):
        yield f"{path}:{number}", {name: value for name, value in line.items() if value is not None}


def read_results(sources: Iterable[tuple[str, Path]], warnings: list[str] | None = None) -> list[Group]:
    """Read (label, file) pairs into one group per condition, in the order of the table.

    UserError names malformed lines, two results of one method, task and seed that differ, and files not to be pooled.
    warnings: a list that gets what is printed as well.
    """
    rows: list[dict] = []
    warnings = [] if warnings is None else warnings
    for label, path in sources:
        meta = meta_of(path)
        for where, record in lines_of(path):
            own = meta.get("cloned") is False and record["method"] not in UNTRAINED
            name = ", ".join(filter(None, (label, "base agent" if own else "")))
            rows.append(episode(record, name, path, where))
        if parts_of(path).exists():
            warnings.append(f"{path}: is being extended; what is new is read when that is complete")
    if not rows:
        raise UserError("the result files hold no result; python q_search.py writes some")
    table = pd.DataFrame.from_records(rows).astype({"M": "Int64", "N": "Int64"})
    table = table.sort_values(["task", "seed"], kind="stable")  # the same report, whatever the order of the lines
    same = [*CONDITION, "task", "seed"]
    table = table.drop_duplicates([*same, "reward", "total"])
    twins = table[table.duplicated(same, keep=False)].sort_values(same, kind="stable")
    for first, second in zip(twins[:1].itertuples(), twins[1:2].itertuples(), strict=True):
        places = f"{first.where} and {second.where}"
        subject = f"{first.method} for task {first.task}, seed {first.seed}"
        raise UserError(f"{places}: two different results of {subject}, {APART}")
    groups = []
    for key, episodes in table.groupby(CONDITION, dropna=False):
        conditions = {name: value for name, value in zip(CONDITION, key, strict=True) if not pd.isna(value)}
        groups.append(Group(Condition(**conditions), episodes))
    groups.sort(key=lambda group: group.condition.order())
    warnings += dict.fromkeys([*check_tables(groups), *check_rows(groups), *tell_unknown(groups)])
    for warning in warnings:
        warn(warning)
    return groups


def tell_unknown(groups: Iterable[Group]) -> Iterator[str]:
    """Rows whose rewards say less than they seem to: tasks refused, prompts cut, or texts that are no action."""
    for group in groups:
        refused, cut = group.episodes["refused"].sum(), group.episodes["cut"].sum()
        if refused:
            yield f"{group.condition}: {refused} tasks were refused, and count as reward 0 at no tokens"
        if cut:
            yield f"{group.condition}: {cut} prompts lost their oldest turns"
        share = group.episodes["unknown"].sum() / max(1, group.episodes["steps"].sum())
        if share > 0.05:
            yield f"{group.condition}: the environment did not know {share:.0%} of its actions"


def episode(record: dict, label: str, path: Path, where: str) -> dict[str, Any]:
    """The numbers of a result, and where it stands, so that its texts need not stay in memory."""
    steps, tokens, success = record.get("steps") or [], record["tokens"], record.get("success")
    split = record.get("split") or "test"
    turns = {(parse_action(step.get("action", "")), step.get("observation")) for step in steps}
    return {
        "env": record["env"] if split == "test" else f"{record['env']} {split}",
        "split": split,
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
        "steps": record.get("n_steps", len(steps)),
        "unknown": record.get("unknown_actions", 0),
        "refused": "refused" in record,
        "cut": record.get("cut_prompts", 0),
        "choices": len([step for step in steps if len(step.get("candidates") or ()) > 1]),
        "repeats": len(steps) - len(turns),  # steps whose action had the same answer earlier in the episode
        "env_steps": record.get("env_steps", record.get("n_steps", len(steps))),
        "resets": record.get("resets", 1),
        "file": path,
        "where": where,
    }


# ---------------------------------------------------------------------------------------------- what a table is about

AGENT = ("temperature", "tokens")  # fields of a protocol in which a table's rows may differ


def tables_of(groups: Sequence[Group]) -> list[list[Group]]:
    """The rows of each environment and split."""
    return [list(rows) for _, rows in groupby(groups, lambda group: group.condition.env)]


def protocol(groups: Sequence[Group]) -> dict[str, Any]:
    """What the numbers of these rows mean: what their files' metadata and lines tell, several values as a list."""
    episodes = pd.concat([group.episodes for group in groups])
    fields: dict[str, list] = {}
    for path in episodes["file"].unique():
        for name, value in meta_of(path).get("protocol", {"not told by": str(path)}).items():
            if value not in fields.setdefault(name, []):
                fields[name].append(value)
    tasks = {}
    for split, rows in episodes.groupby("split"):
        ids = "".join(f"{task}\n" for task in sorted(rows["task"].unique()))
        tasks[split] = {"n": rows["task"].nunique(), "sha256": hashlib.sha256(ids.encode()).hexdigest()[:16]}
    shared = {name: values[0] if len(values) == 1 else values for name, values in fields.items()}
    methods, seeds = [str(group.condition) for group in groups], sorted(map(int, episodes["seed"].unique()))
    return shared | {"tasks": tasks, "seeds": seeds, "methods": methods}


def check_tables(groups: Sequence[Group]) -> Iterator[str]:
    """UserError for a table of two protocols, or of tasks that are no part of another row's: a --limit leaves a fair
    part. Yields rows over fewer tasks, and how many files tell no protocol."""
    for rows in tables_of(groups):
        env, most = rows[0].condition.env, max(rows, key=lambda group: len(group.blocks))
        files = dict.fromkeys(path for group in rows for path in group.episodes["file"])
        protocols = {path: meta_of(path)["protocol"] for path in files if "protocol" in meta_of(path)}
        for a, b in combinations(protocols, 2):
            ours = {name: value for name, value in protocols[a].items() if name not in AGENT}
            check_same(a, b, ours, protocols[b], env, ALONE)
        if len(protocols) < len(files) > 1:
            yield f"{env}: {len(files) - len(protocols)} of {len(files)} files tell no protocol: theirs may be another"
        for group in rows:
            if not group.blocks.keys() <= most.blocks.keys():
                raise UserError(f"{env}: {most.condition} and {group.condition} with different tasks, {ALONE}")
        sizes = sorted({group.reward.n for group in rows})
        if len(sizes) > 1:
            yield f"{env}: rows over {sizes[0]} tasks and over {sizes[-1]}: their means may differ by the tasks alone"


# --------------------------------------------------------------------------------------- what one row may be made from


def check_rows(groups: Sequence[Group]) -> Iterator[str]:
    """UserError names two files in one row whose agents, QNets or environments differ in more than their seed. Yields
    what cannot be told."""
    for group in groups:
        name, used = group.condition.name, models_of(group.condition)
        seeds = group.episodes.groupby("file")["seed"].agg(set)
        for (a, of_a), (b, of_b) in combinations(seeds.items(), 2):
            flags = [lineage(path, used) for path in (a, b)]
            models = [{f"--{n} of one seed": meta_of(path)["recipe"].get(n) for n in used} for path in (a, b)]
            yield from (f"{path}: no metadata beside it, so its agent and QNet may be other ones"
                        for path, told in zip((a, b), flags, strict=True) if not told)  # fmt: skip
            if of_a & of_b:
                check_same(a, b, *models, name)
            elif used and models[0] == models[1] and all(models[0].values()):
                yield f"{a} and {b}: {name} is of one model under two --seed, so not of two trainings"
            check_same(a, b, *flags, name)


def check_same(a: Path, b: Path, ours: dict, theirs: dict, subject: str, mistake: str = APART) -> None:
    """UserError for flags of two files that differ, of those that both have."""
    for flag in ours:
        if flag in theirs and ours[flag] != theirs[flag]:
            values = f"{ours[flag]}, {theirs[flag]}"
            raise UserError(f"{a} and {b}: {subject} with different {flag} ({values}), {mistake}")


def models_of(condition: Condition) -> tuple[str, ...]:
    """Whose results they are: of nobody's training (environment's players, chat model), of the agent, of QNet too."""
    if condition.method in UNTRAINED:
        return ()
    scored = condition.method in ("qlass", "oracle_lookahead") or condition.select == "q"
    return ("sft", "qnet") if scored else ("sft",)
