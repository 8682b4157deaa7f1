"""Demonstrations: played by the environment's expert, or read from a file of ours or of ETO's.

ETO publishes `conversations` of {"from", "value"}, as a JSON list; ours are `messages`.
docs/files.md shows a line of each.
"""

import functools
import itertools
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from qlass import UserError, records
from qlass.files import input_of, meta_of, warn
from qlass.messages import State, replay
from qlass.outputs import Output
from qlass.settings import Run

ROLES = {"human": "user", "gpt": "assistant"}  # ETO's and ours


@dataclass(frozen=True)
class Demonstration:
    """A trajectory up to its last action, in the environment's words."""

    task_id: str | None
    state: State
    reward: float | None = None
    source: str = "expert"  # "policy": self-training has added a trajectory of the agent's

    @property
    def actions(self) -> tuple[str, ...]:
        return self.state.actions

    @property
    def observation(self) -> str:
        """The first one."""
        return self.state.observations[0].strip()


def opening_of(messages: list[dict]) -> int:
    """`State.opening` of a demonstration: 2 if the agent's first words, such as "OK", are no action
    yet, else 0."""
    answers = [turn["content"] for turn in messages[1::2]]
    acts = ["Action:" in text for text in answers]
    return 2 * (answers[:1] == ["OK"] or (any(acts) and not acts[0]))


def demonstrate(env: Any, task_id: str) -> dict:
    """Play the environment's expert through one task: a line of expert.jsonl."""
    *_, end = replay(env, task_id)
    messages = end.state.dump()[:-1]  # up to the last action
    line = {"task_id": task_id, "env": env.name, "task": end.state.task, "messages": messages}
    return line | {"reward": end.reward}


def collect(env: Any, config: Run, most: int | None) -> Path:
    """RUN/expert.jsonl with the first --n-expert training tasks."""
    path = config.run / "expert.jsonl"
    out = Output(path, config, env.settings, {}, itemgetter("task_id"))
    tasks = env.task_ids("train")[:most]
    todo = out.todo(tasks)
    out.write(([demonstrate(env, task_id)] for task_id in todo), "expert", len(todo))
    out.finish(tasks)
    return path


def read(path: Path, env: Any, most: int | None = None) -> list[Demonstration]:
    """The first `most` demonstrations of a file."""
    convert = functools.partial(in_our_layout, env)
    lines: Any = itertools.islice(records.read(path, records.Demonstration, convert), most)
    expert: list[Demonstration] = []
    unread: set[str] = set()
    for line in lines:
        unread |= line.keys() - records.Demonstration.__annotations__
        opening = opening_of(line["messages"])
        state = State.load(line["messages"], line.get("task", ""), opening)
        source = line.get("source", "expert")
        expert.append(Demonstration(line.get("task_id"), state, line.get("reward"), source))
        if not expert[-1].actions:
            raise UserError(f"{path}: demonstration {len(expert)} has no action")
    if not expert:
        raise UserError(f"{path}: holds no demonstration")
    if unread:
        warn(f"{path}: {', '.join(sorted(unread))} is not read (an outcome is a `reward`)")
    if unnamed := [tau for tau in expert if tau.task_id is None]:
        warn(f"{path}: {len(unnamed)} have no task_id, so they may be of test tasks")
    return expert


def in_our_layout(env: Any, line: dict) -> dict:
    """A line of ours, or of ETO's, in our layout and the environment's words."""
    if "conversations" in line:
        messages = []
        for turn in line["conversations"]:
            role = ROLES.get(turn["from"], turn["from"])
            messages.append({"role": role, "content": turn["value"]})
        line = {"task_id": env.published_id(line), "messages": messages}
    elif "messages" not in line:
        raise ValueError("neither messages, as ours, nor conversations, as ETO's")
    for turn in line["messages"]:
        turn["content"] = env.in_own_words(turn["content"])
    return line


def demonstrations_of(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from: their
    file (None: there is none), and how many of them were given (None: all)."""
    if start := input_of(checkpoint, "sft"):
        return demonstrations_of(start)
    return input_of(checkpoint, "expert"), meta_of(checkpoint)["recipe"].get("n_expert")


def by_task(
    named: Path | None, sft: Path, env: Any
) -> tuple[Path | None, dict[str, Demonstration]]:
    """The named file, or the one that the agent was cloned from; of each task in it the
    demonstration of the highest reward, of equals the first. A trajectory that self-training has
    added counts where it comes first."""
    path, most = (named, None) if named else demonstrations_of(sft)
    if path is None:
        warn(f"{sft}: its demonstrations are not at hand (--expert)")
        return None, {}
    best: dict[str, Demonstration] = {}
    for tau in read(path, env, most):
        if tau.task_id is None:
            continue
        other = best.setdefault(tau.task_id, tau)
        if tau.source != "policy" and (tau.reward or 0) > (other.reward or 0):
            best[tau.task_id] = tau
    return path, best
