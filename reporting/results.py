"""Result files -> one group of episodes a condition: what the report's tables and figures are made from."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import complete_records, is_name, is_number, is_text, maybe, parse_json, wrong
from qlass.stats import Estimate, by_task, interval, shared
from reporting.pooling import check_pools

# Table 2 of the paper (Llama-2-7B-Chat), reward x 100: WebShop; SciWorld and ALFWorld seen, unseen.
PAPER = {
    "greedy": {"webshop": (63.1,), "sciworld": (67.4, 53.0), "alfworld": (60.0, 67.2)},
    "best_of_n": {"webshop": (67.9,), "sciworld": (70.2, 57.6), "alfworld": (62.1, 69.4)},
    "qlass": {"webshop": (70.3,), "sciworld": (75.3, 66.4), "alfworld": (77.9, 82.8)},
}
METHODS = {  # in the order of the table
    "oracle": "best player, who may know the goal (oracle)",
    "expert": "demonstrator",
    "rule": "rule",
    "random": "random candidate",
    "greedy": "SFT greedy",
    "sample": "SFT sampled",
    "best_of_n": "best-of-N",
    "likeliest": "search by the agent's log-probability",
    "qlass": "QLASS",
    "oracle_step": "choice by true value (oracle)",
    "oracle_lookahead": "look-ahead of the released code (oracle)",
}
TARGET = re.compile(r"(?:^|target[ =:_-]*)(q|avg|reward)\b")  # a process reward, in a label


@dataclass(frozen=True)
class Condition:
    """A row of the table: a method with its budget, environment and label."""

    env: str
    method: str
    M: int | None
    N: int | None
    select: str | None
    label: str
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
    def budget(self) -> str:
        """ "M=4 N=2", without what is 1."""
        return " ".join(f"{k}={v}" for k, v in (("M", self.M), ("N", self.N)) if (v or 1) > 1)

    @property
    def target(self) -> str | None:
        """The process reward that QNet learnt, where the label names one (Fig. 4)."""
        found = TARGET.search(self.label)
        return found[1] if found else "q" if self.method == "qlass" and not self.label else None

    @property
    def otherwise(self) -> str:
        """What the label says besides the process reward."""
        return TARGET.sub("", self.label).removeprefix("self-trained").strip(", ")

    @property
    def self_trained(self) -> bool:
        return self.label.startswith("self-trained")

    @property
    def paper(self) -> str:
        if self.label or (self.method == "best_of_n" and not self.oracle):
            return "–"
        numbers = PAPER.get(self.method, {}).get(self.env.split()[0], ())
        return " / ".join(f"{x / 100:.3f}" for x in numbers) or "–"

    def order(self) -> tuple:
        rank = list(METHODS).index(self.method) if self.method in METHODS else len(METHODS)
        return self.env, rank, self.method, self.label, self.player, self.oracle, self.N or 1, self.M or 1


@dataclass
class Result:
    """One episode: the numbers of its line, and where the line is, so that its text need not stay in memory."""

    task: str
    type: str  # of the task, where its environment has several
    block: str  # which tasks vary together (TextEnv.block)
    seed: int
    reward: float
    success: float | None
    generated: float
    total: float  # tokens: prompt computed + generated + scored
    env_steps: float
    q: list[float]  # QNet's value of each action taken, where it scored them
    where: tuple[Path, int, int]  # file, line number, byte offset


@dataclass
class Group:
    """All results of one condition, keyed by (task, seed)."""

    condition: Condition
    results: dict[tuple[str, int], Result] = field(default_factory=dict)

    def values(self, name: str) -> dict[tuple[str, int], float]:
        pairs = ((key, getattr(result, name)) for key, result in self.results.items())
        return {key: float(value) for key, value in pairs if value is not None}

    @cached_property
    def blocks(self) -> dict[str, str]:
        return {task: result.block for (task, _seed), result in self.results.items()}

    @cached_property
    def row(self) -> dict[tuple[str, int], Result]:
        """What the table's row is of: the tasks that all seeds have played."""
        return shared(self.results)

    @cached_property
    def reward(self) -> Estimate:
        return interval(self.values("reward"), self.blocks)

    def mean(self, name: str) -> float:
        values = by_task({key: value for key, value in self.values(name).items() if key in self.row}).values()
        return sum(values) / len(values) if values else math.nan

    def zero_share(self) -> float:
        return sum(result.reward == 0 for result in self.row.values()) / len(self.row)

    def seeds(self) -> str:
        """The number of seeds, and the lowest and highest of their mean rewards."""
        rewards = defaultdict(list)
        for (_task, seed), result in self.row.items():
            rewards[seed].append(result.reward)
        means = [sum(group) / len(group) for group in rewards.values()]
        return "1" if len(means) == 1 else f"{len(means)} ({min(means):.3f}–{max(means):.3f})"


# ------------------------------------------------------------------------------------------------------------- reading


def result_files(arguments: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(label, file) of each argument: a file, a folder's results*.jsonl, either with LABEL= in front."""
    for argument in arguments:
        label, path = "", Path(argument)
        if not path.exists() and "=" in argument:
            label, _, rest = argument.partition("=")
            path = Path(rest)
        if path.is_dir():
            found = sorted(path.glob("results*.jsonl"))
            if not found:
                raise UserError(f"{path}: no results*.jsonl in this folder; python q_search.py --run {path} writes one")
            yield from ((label, file) for file in found)
        elif path.is_file():
            yield label, path
        else:
            raise UserError(f"{path}: no such file or folder; python q_search.py writes results.jsonl")


def read_results(sources: Iterable[tuple[str, Path]]) -> list[Group]:
    """Read (label, file) pairs into one group a condition, in the order of the table.

    UserError names file:line of a malformed line, and both lines where two results claim the same method, task and
    seed but differ. A last line that was cut short (a run that was stopped) is skipped with a warning.
    """
    groups: dict[Condition, Group] = {}
    for label, path in sources:
        offset = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        condition, result = parse_result(line, label, (path, number, offset))
                    except (ValueError, UserError) as error:
                        if line.endswith(b"\n"):
                            raise UserError(f"{path}:{number}: {error}; fix or delete this line") from None
                        print(f"warning: {path}:{number}: skipped, cut short by a stopped run", file=sys.stderr)
                    else:
                        insert(groups.setdefault(condition, Group(condition)), result)
                offset += len(line)
    if not groups:
        raise UserError("the result files hold no result; python q_search.py writes some")
    found = [groups[condition] for condition in sorted(groups, key=Condition.order)]
    check_pools(found)
    return found


def read_curves(folders: Iterable[tuple[str, Path]]) -> dict[str, list[list[dict]]]:
    """{NAME: the lines of each sft-NAME.updates.jsonl} of some run folders with their labels, which NAME ends in."""
    curves: dict[str, list[list[dict]]] = {}
    for label, path in sorted((label, path) for label, run in folders for path in run.glob("sft-*.updates.jsonl")):
        name = path.name.removeprefix("sft-").removesuffix(".updates.jsonl") + f", {label}" * bool(label)
        lines, _ = complete_records(path, len)  # the last one may have been cut short
        if not all({"val", "tokens", "env_steps"} <= line.keys() for line in lines):
            raise UserError(f"{path}: lines without val, tokens or env_steps; a learner writes them (experiments)")
        curves.setdefault(name, []).append(lines)
    return curves


def is_tokens(value: Any) -> bool:
    """{"prompt", "generated", "scored"}"""
    return isinstance(value, dict) and all(map(is_number, value.values()))


def is_candidate(value: Any) -> bool:
    return isinstance(value, dict) and is_text(value.get("action")) and maybe(is_number)(value.get("q"))


def is_steps(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(s, dict) and not wrong(s, STEP, ["action"]) for s in value)


STEP = {
    "action": is_text, "thought": maybe(is_text), "observation": maybe(is_text),
    "candidates": maybe(lambda value: isinstance(value, list) and all(map(is_candidate, value))),
}  # fmt: skip
KINDS = {
    "task_id": is_name, "env": lambda v: is_text(v) and bool(v.split()), "method": is_text, "reward": is_number,
    "tokens": is_tokens, "steps": maybe(is_steps), "success": maybe(is_number), "env_steps": is_number,
    "n_steps": is_number, "seconds": is_number, "task": maybe(is_text),
    **dict.fromkeys(("split", "label", "player", "select", "type", "block"), maybe(is_text)),
    **dict.fromkeys(("M", "N", "seed"), maybe(lambda value: type(value) is int)),
}  # fmt: skip


def parse_result(line: bytes, label: str, where: tuple[Path, int, int]) -> tuple[Condition, Result]:
    """ValueError says what is wrong with a line."""
    row = parse_json(line, "not a result")
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is expected, not {type(row).__name__}")
    if mistake := wrong(row, KINDS, ["task_id", "env", "method", "reward", "tokens"]):
        raise ValueError(mistake)
    steps, tokens = row.get("steps") or [], row["tokens"]
    label = ", ".join(filter(None, (label, row.get("label") or "")))
    split = row.get("split") if row.get("split") not in (None, "test") else ""
    env = f"{row['env']} {split}".strip()
    return Condition(
        env, row["method"], row.get("M"), row.get("N"), row.get("select"), label, row.get("player") or ""
    ), Result(
        task=str(row["task_id"]),
        type=row.get("type") or "",
        block=row.get("block") or str(row["task_id"]),
        seed=row.get("seed") or 0,
        reward=row["reward"],
        success=row.get("success"),
        generated=tokens.get("generated", 0),
        total=sum(tokens.get(part, 0) for part in ("prompt", "generated", "scored")),
        env_steps=row.get("env_steps", row.get("n_steps", len(steps))),
        q=[taken["q"] for step in steps if (taken := scored_candidates(step)[1])],
        where=where,
    )


def split_react(text: str | None) -> tuple[str, str]:
    """(thought, executable part) of "Thought: ...\\nAction: ...", for display; any other text as it is."""
    thought, mark, action = (text or "").partition("Action:")
    return (thought.removeprefix("Thought:").strip(), action.strip()) if mark else ("", text or "")


def scored_candidates(step: dict) -> tuple[list[dict], dict | None]:
    """The candidates that QNet scored, best first, and the one of them that was taken."""
    scored = [candidate for candidate in step.get("candidates") or [] if candidate.get("q") is not None]
    scored.sort(key=lambda candidate: -candidate["q"])
    _, action = split_react(step["action"])
    return scored, next((c for c in scored if split_react(c["action"])[1] == action), None)


def insert(group: Group, result: Result) -> None:
    old = group.results.setdefault((result.task, result.seed), result)
    if (old.reward, old.total, old.q) != (result.reward, result.total, result.q):
        places = " and ".join(f"{path}:{number}" for path, number, _ in (old.where, result.where))
        raise UserError(
            f"{places}: two different results of {group.condition.name} for task {result.task}, seed {result.seed}; "
            'name the runs apart: python report.py "first=PATH" "second=PATH"'
        )


def load_row(result: Result) -> dict:
    path, _, offset = result.where
    with open(path, "rb") as lines:
        lines.seek(offset)
        return json.loads(lines.readline())
