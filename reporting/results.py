"""Result files -> a table of episodes -> one group a condition: what the report's tables and figures are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pandas as pd

import envs
from environments import environment_class, options_of
from environments.protocols import digest
from qlass import UserError, records
from qlass.files import input_of, meta_of, warn
from qlass.messages import parse_action
from qlass.settings import settings_in
from reporting.result_lines import Result
from reporting.stats import Estimate, interval

METHODS = {  # in the order of the table
    "oracle": "best player, who may know the goal (oracle)",
    "expert": "expert",
    "rule": "rule",
    "chat": "chat agent",
    "random": "random candidate",
    "greedy": "agent, greedy",
    "sample": "agent, one sample",
    "best_of_n": "best-of-N",
    "likeliest": "search by log-probability",
    "qlass": "QLASS",
    "oracle_step": "choice by true value (oracle)",
    "oracle_lookahead": "look-ahead of the released code (oracle)",
    "lookahead": "look-ahead by QNet",
    "beam": "beam by QNet",
    "mcts": "MCTS by QNet",
    "particles": "particles by QNet",
}
PICKED = {"q": ", picked by QNet", "oracle": ", picked by true reward (oracle)"}  # the best of N episodes
APART = 'not one row: name the runs apart: python -m reporting "first=PATH" "second=PATH"'
ALONE = "not one table: report on each alone"


@dataclass(frozen=True)
class Condition:
    """A row of the table: a method with its budget, environment and label."""

    env: str
    method: str
    M: int = 1
    N: int = 1
    select: str = ""
    label: str = ""
    player: str = ""  # which of the environment's rules
    agent: str = ""  # a chat model's name, where that is the agent

    @property
    def oracle(self) -> bool:
        return self.method.startswith("oracle") or (self.select == "oracle" and self.N > 1)

    @property
    def name(self) -> str:
        name = METHODS.get(self.method, self.method)
        if self.agent:
            name = name.replace("agent", self.agent)
        if self.player:
            name += f": {self.player}"
        if self.N > 1:
            name += PICKED.get(self.select, "")
        return name if self.label in ("", self.agent) else f"{name} [{self.label}]"

    @property
    def budget(self) -> str:  # without what is 1
        return " ".join(f"{name}={n}" for name, n in (("M", self.M), ("N", self.N)) if n > 1)

    def __str__(self) -> str:
        return f"{self.name} {self.budget}".strip()

    def order(self) -> tuple:
        rank = [*METHODS, self.method].index(self.method)
        return self.env, rank, self.method, self.label, self.player, self.oracle, self.N, self.M


CONDITION = [field.name for field in fields(Condition)]


@dataclass(eq=False)
class Group:
    """All episodes of one condition, a row each (`episode`)."""

    condition: Condition
    episodes: pd.DataFrame

    def values(self, name: str) -> pd.Series:
        """A column, by (task, seed)."""
        return self.episodes.set_index(["task", "seed"])[name].dropna()

    def among(self, tasks: Set[str]) -> Group:
        return Group(self.condition, self.episodes[self.episodes["task"].isin(tasks)])

    @cached_property
    def blocks(self) -> dict[str, str]:
        return dict(zip(self.episodes["task"], self.episodes["block"], strict=True))

    @cached_property
    def row(self) -> pd.DataFrame:
        """Episodes of the table's row: the tasks that all seeds have played, or all where there are not two such."""
        seeds = self.episodes.groupby("task")["seed"].transform("nunique")
        row = self.episodes[seeds == self.n_seeds]
        return row if row["task"].nunique() > 1 else self.episodes

    @property
    def n_seeds(self) -> int:
        return self.episodes["seed"].nunique()

    @cached_property
    def reward(self) -> Estimate:
        return interval(self.values("reward"), self.blocks, rewards=True)

    def mean(self, name: str) -> float:
        return float(self.row.groupby("task")[name].mean().mean())


# --------------------------------------------------------------------------------------------------- reading the files


def choices(line: Mapping) -> list[int]:
    """The steps of an episode, from 1, whose samples were several different actions."""
    steps = enumerate(line.get("steps", ()), 1)
    return [number for number, step in steps if len(step.get("candidates") or ()) > 1]


def worth(line: Mapping) -> tuple[float, int]:
    """A key that sorts episodes by how much they show of a search: by reward, then by choices."""
    return line["reward"], len(choices(line))


def result_files(arguments: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(label, file) of each argument: a file, or a folder's results*.jsonl, either with LABEL= in front."""
    for argument in arguments:
        label, path = "", Path(argument)
        if not path.exists() and "=" in argument:
            label, _, rest = argument.partition("=")
            path = Path(rest)
        files = sorted(path.glob("results*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path}: no complete results*.jsonl; python q_search.py --run FOLDER writes one")
        yield from ((label, file) for file in files)


def read_results(sources: Iterable[tuple[str, Path]], warnings: list[str] | None = None) -> list[Group]:
    """Read (label, file) pairs into one group per condition, in the order of the table.

    UserError names malformed lines, two results of one method, task and seed that differ, and files not to be pooled.
    warnings: a list that gets what is printed as well.
    """
    rows: list[dict] = []
    for label, path in sources:
        for number, record in enumerate(records.read(path, Result), 1):
            labels = filter(None, (label, record.get("label")))
            where = f"{path}:{number}"
            rows.append(episode(record) | {"label": ", ".join(labels), "file": path, "where": where})
    if not rows:
        raise UserError("the result files hold no result; python q_search.py writes some")
    # Sorted, so that the report is the same whatever the order of the lines.
    table = pd.DataFrame.from_records(rows).sort_values(["task", "seed"], kind="stable")
    same = [*CONDITION, "task", "seed"]
    table = table.drop_duplicates([*same, "reward", "total"])
    twins = table[table.duplicated(same, keep=False)].sort_values(same, kind="stable")
    if len(twins):
        first, second = twins["where"].iloc[:2]
        raise UserError(f"{first} and {second}: two different results of a task, a method and a seed, {APART}")
    groups = [Group(Condition(*key), episodes) for key, episodes in table.groupby(CONDITION, dropna=False)]
    groups.sort(key=lambda group: group.condition.order())
    warnings = [] if warnings is None else warnings
    problems = unfinished(table), check_tables(groups), check_rows(groups), doubts(groups), leaks(table)
    warnings += dict.fromkeys(chain.from_iterable(problems))
    for warning in warnings:
        warn(warning)
    return groups


def episode(record: dict) -> dict[str, Any]:
    """The numbers of a result, so that its texts need not stay in memory."""
    steps, tokens, usage = record.get("steps", []), record["tokens"], record.get("usage", {})
    split, task, n_steps = record.get("split", "test"), str(record["task_id"]), record.get("n_steps", len(steps))
    turns = {(parse_action(step.get("action", "")), step.get("observation")) for step in steps}
    return {
        "env": record["env"] if split == "test" else f"{record['env']} {split}",
        "split": split,
        "method": record["method"],
        **{name: record.get(name, 1) for name in ("M", "N")},
        **{name: record.get(name, "") for name in ("select", "player", "agent")},
        "task": task,
        "block": record.get("block", task),  # tasks that vary together (TextEnv.block)
        "seed": record.get("seed", 0),
        "reward": float(record["reward"]),
        "success": float(record.get("success", math.nan)),
        "generated": tokens.get("generated", 0),
        "total": sum(tokens.values()),
        "billed": usage.get("prompt", math.nan) + usage.get("generated", math.nan),
        "steps": n_steps,
        "unknown": record.get("unknown_actions", 0),
        "cut": record.get("cut_prompts", 0),
        "choices": len(choices(record)),
        "repeats": len(steps) - len(turns),  # steps whose action had the same answer earlier in the episode
        "env_steps": record.get("env_steps", n_steps),
        "resets": record.get("resets", 1),
        "seconds": record.get("seconds", math.nan),
    }


def doubts(groups: Iterable[Group]) -> Iterator[str]:
    """Rows whose rewards say less than they seem to: prompts cut, or texts that are no action."""
    for group in groups:
        if cut := group.episodes["cut"].sum():
            yield f"{group.condition}: {cut} prompts lost their oldest turns"
        share = group.episodes["unknown"].sum() / max(1, group.episodes["steps"].sum())
        if share > 0.05:
            yield f"{group.condition}: the environment did not know {share:.0%} of its actions"


def unfinished(table: pd.DataFrame) -> Iterator[str]:
    """Files that a command is writing, or has begun to extend."""
    for folder in {file.parent: None for file in table["file"]}:
        for parts in sorted(folder.glob("results*.jsonl.parts")):
            yield f"{parts.with_suffix('')} is not complete, so nothing new is read: give its command again"


def leaks(table: pd.DataFrame) -> Iterator[str]:
    """Files whose agent, QNet or judge has learned from tasks that were played, or from others of their subjects.
    Published splits overlap (WebShop's in 21 tasks), so this is no refusal."""
    for path, episodes in table.groupby("file"):
        tasks = set(episodes["task"])
        checkpoints = filter(None, (input_of(path, name) for name in meta_of(path)["inputs"]))
        learned = {checkpoint: meta_of(checkpoint).get("tasks") for checkpoint in checkpoints}
        # With --out elsewhere the results have no settings beside them, but the checkpoints have.
        settings = [file for place in (path, *learned) if (file := place.with_name("settings.toml")).exists()]
        if settings and any(learned.values()):
            try:
                run = settings_in(settings[0], "")
                env = envs.make(run["env"], **options_of(environment_class(run["env"]), run["env_option"]))
            except (UserError, OSError) as error:
                yield f"{path}: whether its models have learned from its tasks is not known: {error}"
                continue
            for checkpoint, ids in learned.items():
                subjects = set(map(env.subject, ids or ()))
                if n := sum(env.subject(task) in subjects for task in tasks):
                    yield f"{checkpoint} has learned from {n} of {len(tasks)} tasks that were played, or their subjects"


# -------------------------------------------------------------------------------- what one table, and one row, may hold

AGENT = ("temperature", "tokens", "not told by")  # fields of a protocol in which a table's rows may differ


def tables_of(groups: Sequence[Group]) -> list[list[Group]]:
    """The rows of each environment and split."""
    return [list(rows) for _, rows in groupby(groups, lambda group: group.condition.env)]


WORLD = {"environment": "env", "version": "env_version", "options": "env_option", "data": "env_files"}  # of a recipe


def protocol_of(path: Path) -> dict[str, Any]:
    """The protocol of a file's numbers: the environment of its recipe, and how its tasks were played."""
    meta = meta_of(path)
    world = {name: meta["recipe"][setting] for name, setting in WORLD.items() if setting in meta["recipe"]}
    return world | meta.get("protocol", {"not told by": str(path)})


def protocol(groups: Sequence[Group]) -> dict[str, Any]:
    """The protocol of these rows' numbers: what their files' metadata and lines tell, several values as a list."""
    episodes = pd.concat([group.episodes for group in groups])
    several: dict[str, list] = {}
    for path in episodes["file"].unique():
        for name, value in protocol_of(path).items():
            if value not in several.setdefault(name, []):
                several[name].append(value)
    splits = episodes.groupby("split")["task"].unique()
    tasks = {split: {"n": len(ids), "sha256": digest(ids)} for split, ids in splits.items()}
    shared = {name: values if len(values) > 1 else values[0] for name, values in several.items()}
    return shared | {"tasks": tasks}


def check_tables(groups: Sequence[Group]) -> Iterator[str]:
    """UserError for a table of two protocols, or of tasks that are no part of another row's: a --limit leaves a fair
    part. Yields rows over fewer tasks."""
    for rows in tables_of(groups):
        env, most = rows[0].condition.env, max(rows, key=lambda group: len(group.blocks))
        protocols = {}
        for path in pd.concat([group.episodes["file"] for group in rows]).unique():
            protocols[path] = {name: value for name, value in protocol_of(path).items() if name not in AGENT}
        check_alike(protocols, env, ALONE)
        for group in rows:
            if not group.blocks.keys() <= most.blocks.keys():
                raise UserError(f"{env}: {most.condition} and {group.condition} with different tasks, {ALONE}")
        sizes = {group.reward.n for group in rows}
        if len(sizes) > 1:
            yield f"{env}: rows over {min(sizes)} tasks and over {max(sizes)}: means may differ by the tasks alone"


def check_rows(groups: Sequence[Group]) -> Iterator[str]:
    """UserError names two files in one row whose agents, QNets or environments differ in more than their seed. Yields
    agents that count as two trainings."""
    for group in groups:
        env, name = group.condition.env, group.condition.name
        check_alike({path: made_with(path) for path in group.episodes["file"].unique()}, name, APART)
        seeds: dict[str, int] = {}  # by the content of the agent
        for seed, episodes in group.episodes.groupby("seed"):
            recipes = {path: meta_of(path)["recipe"] for path in episodes["file"].unique()}
            models = {path: {n: recipe[n] for n in ("sft", "qnet") if n in recipe} for path, recipe in recipes.items()}
            check_alike(models, f"{name} of one seed", APART)
            for agent in {recipe["sft"] for recipe in models.values() if "sft" in recipe}:
                if seeds.setdefault(agent, seed) != seed:
                    yield f"{env}: one agent under two --seed, so not two trainings"


def made_with(output: Path, stage: str = "") -> dict[str, Any]:
    """{"sft epochs": 12}: the settings, but for the seed, of an output and of all behind it."""
    meta = meta_of(output)
    recipe = meta["recipe"] | {"trees": meta.get("trees")}  # how many: a tree file may grow
    others = {"seed", "label", *meta["inputs"]}
    settings = {f"{stage} {name}".strip(): value for name, value in recipe.items() if name not in others}
    for name in meta["inputs"]:
        if path := input_of(output, name):
            settings |= made_with(path, name)
    return settings


def check_alike(fields: dict[Path, dict[str, Any]], subject: str, mistake: str) -> None:
    """UserError for fields of two files that differ, of those that both have."""
    first: dict[str, tuple[Path, Any]] = {}
    for path, values in fields.items():
        for name, value in values.items():
            earlier, before = first.setdefault(name, (path, value))
            if value != before:
                places = f"{earlier} and {path}"
                raise UserError(f"{places}: {subject} with different {name} ({before}, {value}), {mistake}")
