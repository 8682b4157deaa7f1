"""Demonstrations: played by the environment's expert, or read from a file of ours or of ETO's.

ETO publishes `conversations` of {"from", "value"}, as a JSON list; ours are `messages`.
docs/files.md shows a line of each.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from qlass import UserError, records
from qlass.environment import TextEnv
from qlass.files import input_of, meta_of, rank_and_size, read_jsonl, warn
from qlass.messages import State, replay, start
from qlass.outputs import Output
from qlass.settings import Run


@dataclass(frozen=True)
class Demonstration:
    """A trajectory up to its last action, in the environment's words."""

    task_id: str | None
    state: State
    reward: float | None = None
    source: str = "expert"  # "policy": self-training has added a trajectory of the agent's


def demonstrate(env: TextEnv, task_id: str, recorded: Sequence[str] | None = None) -> dict:
    """Play the environment's expert, or these actions, through one task: a line of expert.jsonl."""
    *_, end = replay(env, task_id, recorded)
    return {
        "task_id": task_id,
        "env": env.name,
        "task": end.state.task,
        "messages": end.state.dump()[:-1],  # up to the last action
        "reward": end.reward,
    }


def collect(env: TextEnv, config: Run, most: int | None) -> Path:
    """RUN/expert.jsonl with the first --n-expert training tasks."""
    path = config.run / "expert.jsonl"
    if rank_and_size()[1] > 1:  # they may train again, and share what has been played
        config = replace(config, overwrite=False)
    if most and path.exists():  # of which others may be made
        most = max(most, len(read_jsonl(path)))
    out = Output(path, config, env.settings, {}, itemgetter("task_id"))
    tasks = env.task_ids("train")[:most]
    todo = out.todo(tasks)
    if todo and out.done:
        warn(f"{path}: grows, so that what was made from it counts as made from another file")
    out.write(([demonstrate(env, task_id)] for task_id in todo), "expert", len(todo))
    out.finish(tasks)
    return path


def read(path: Path, env: TextEnv, most: int | None = None) -> list[Demonstration]:
    """The first `most` demonstrations of a file."""
    expert: list[Demonstration] = []
    train, fork = {*env.split_ids("train")}, env.fork()
    lines: Any = itertools.islice(records.read(path, records.DemonstrationLine), most)
    for line in lines:
        task_id, task = line.get("task_id"), line.get("task") or ""
        if task_id is None and "conversations" in line:
            task_id = env.published_id(line)
        if not task and task_id in train:
            task = start(fork, task_id).task
        for turn in line["messages"]:
            turn["content"] = env.in_own_words(turn["content"])
        state = State.from_messages(line["messages"], task, opening_of(line["messages"]))
        source = line.get("source") or "expert"
        expert.append(Demonstration(task_id, state, line.get("reward"), source))
        if not state.actions:
            raise UserError(f"{path}: demonstration {len(expert)} has no action")
    fork.close()
    if not expert:
        raise UserError(f"{path}: holds no demonstration")
    if others := [line.task_id for line in expert if line.task_id not in train]:
        warn(
            f"{path}: no training task's task_id in {len(others)} of {len(expert)} demonstrations"
            f" (such as {others[0]}), so they may be of test tasks"
        )
    return expert


def opening_of(messages: list[dict]) -> int:
    """`State.opening` of a demonstration: 2 if the agent's first words, such as "OK", are no action
    yet, else 0."""
    answers = [turn["content"] for turn in messages[1::2]]
    acts = ["Action:" in text for text in answers]
    return 2 if answers[:1] == ["OK"] or (any(acts) and not acts[0]) else 0


def demonstrations_of(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from: their
    file (None: there is none), and how many of them were used (None: all)."""
    if start := input_of(checkpoint, "sft"):
        return demonstrations_of(start)
    return input_of(checkpoint, "expert"), meta_of(checkpoint)["recipe"].get("n_expert")


def by_task(
    named: Path | None, sft: Path, env: TextEnv
) -> tuple[Path | None, dict[str, Demonstration]]:
    """The named file, or the one that the agent was cloned from; of each task in it the first line
    or, if it has a higher reward, the best of the expert's. A missing reward counts as 0."""
    path, most = (named, None) if named else demonstrations_of(sft)
    if path is None:
        warn(f"{sft}: its demonstrations are not at hand (--expert)")
        return None, {}
    best: dict[str, Demonstration] = {}
    for demonstration in read(path, env, most):
        task = demonstration.task_id
        if task is None:
            continue
        other = best.setdefault(task, demonstration)
        if demonstration.source != "policy" and (demonstration.reward or 0) > (other.reward or 0):
            best[task] = demonstration
    return path, best
