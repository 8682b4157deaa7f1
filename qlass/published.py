"""Demonstrations, the environment's own or people's: each file is read here, into one layout.

ETO, QLASS and AgentGym publish `conversations` of {"from", "value"}, as a JSON list or as JSON
Lines, perhaps with a `system` text; ours are `messages`. data/README.md shows a line of each.
"""

from __future__ import annotations

import argparse
import codecs
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import records_of, warn
from qlass.messages import State, without_thinking
from qlass.runs import input_of, meta_of, same_world

ROLES = {"human": "user", "gpt": "assistant"}  # theirs and ours
TURN = {"role", "content", "from", "value"}  # fields of a turn
CALLS = ("tool_calls", "function_call")  # fields of a turn that acts, but not by its text
RECORD = {"messages", "conversations", "system", "task_id", "id", "game_file", "task"}
RECORD |= {"reward", "env", "source"}  # fields of a trajectory that are read
LAYOUT = "(data/README.md shows the layout)"
AGREEMENT = r"\W*(ok|okay|sure|yes|understood|i understand|i will|got it|certainly|all ?right)\b"


@dataclass(frozen=True)
class Demonstration:
    """A trajectory up to its last action, in the environment's words."""

    task_id: str | None  # None: only its words tell the task
    state: State
    reward: float | None = None
    source: str = "expert"  # "policy": self-training has added a trajectory of the agent's

    @property
    def opening(self) -> tuple[tuple[str, str], ...]:
        """Instruction, OK and first observation, after a system message if there is one."""
        return self.state.messages[: 4 if self.state.messages[0][0] == "system" else 3]

    @property
    def agreed(self) -> int:
        """1 if the agent's first words agree to the instruction; else they are an action: 0.

        ETO has "OK" there, AgentGym a longer sentence, and the first observation follows.
        """
        messages = self.state.messages
        first, *later = [text for role, text in messages if role == "assistant"] or [""]
        if re.search("Thought:|Action:", first) or [role for role, _ in messages].count("user") < 2:
            return 0
        return int(
            bool(re.match(AGREEMENT, first, re.IGNORECASE))
            or any("Action:" in text for text in later)
        )

    @property
    def actions(self) -> list[str]:
        """What the agent wrote after it agreed."""
        return [text for role, text in self.state.messages if role == "assistant"][self.agreed :]

    @property
    def observation(self) -> str:
        """The first one."""
        users = [text for role, text in self.state.messages if role == "user"]
        return users[self.agreed].strip()


# ----------------------------------------------------------------------------------------- reading


def read(path: Path, env: Any, most: int | None = None) -> list[Demonstration]:
    """The first `most` demonstrations of a file. UserError names FILE:LINE of a bad one."""
    expert = []
    for where, record in itertools.islice(records(path), most):
        try:
            expert.append(demonstration(record, env))
        except UserError as error:
            raise UserError(f"{where}: no demonstration: {error} {LAYOUT}") from None
        turns = record.get("messages") or record["conversations"]
        for name in sorted(set(record).union(*turns) - RECORD - TURN):
            note(f"{path}: not used: {name}")
    if failed := len([demonstration for demonstration in expert if demonstration.reward == 0]):
        note(f"{path}: {failed} of {len(expert)} demonstrations earned nothing")
    return expert


def records(path: Path) -> Iterator[tuple[str, dict]]:
    """`records_of` a file of demonstrations. UserError for a table and for an empty file."""
    with open(path, "rb") as file:
        begin = file.read(1000).removeprefix(codecs.BOM_UTF8).lstrip()
    if begin[:1] not in (b"[", b"{", b""):
        way_out = "of a table, pandas' to_json(orient='records', lines=True) writes it"
        raise UserError(f"{path}: neither JSON nor JSON Lines in UTF-8: {way_out}")
    empty = True
    for line in records_of(path):
        yield line
        empty = False
    if empty:
        raise UserError(f"{path}: holds no demonstration {LAYOUT}")


def demonstration(record: dict, env: Any) -> Demonstration:
    """UserError for a record that can't be cloned and replayed."""
    if record.get("messages") and record.get("conversations"):
        raise UserError("it has messages and conversations: leave one")
    for name, kind in (("system", str), ("task", str), ("reward", (int, float))):
        if not isinstance(record.get(name), (kind, type(None))):  # type: ignore[arg-type]
            raise UserError(f"{name} can't be {record[name]!r:.40}")
    turns = record.get("messages") or record.get("conversations") or []
    messages = list(map(message, turns)) if isinstance(turns, list) else turns
    if system := record.get("system"):
        if messages[:1] == [{"role": "system", "content": system}]:
            messages = messages[1:]
        messages = [{"role": "system", "content": system}, *messages]
    state = State.load(messages, record.get("task") or "")
    words = tuple((role, env.in_own_words(text)) for role, text in state.messages)
    task_id = record.get("task_id")
    read = Demonstration(
        env.published_id(record) if task_id is None else str(task_id),
        State(words, state.task),
        record.get("reward"),
        record.get("source", "expert"),
    )
    if not (texts := read.actions):
        raise UserError("the assistant does nothing")
    if silent := [text for text in texts if not without_thinking(text).strip()]:
        raise UserError(f"the assistant writes {silent[0]!r:.40}, which is no action")
    return read


def message(turn: Any) -> Any:
    """A turn as {"role", "content"}; what is no turn, as it is."""
    if not isinstance(turn, dict):
        return turn
    if any(map(turn.get, CALLS)):
        raise UserError("a turn acts by a tool call: write the action into its content, as text")
    role = turn.get("role") or turn.get("from")
    return {"role": ROLES.get(str(role), role), "content": turn.get("content", turn.get("value"))}


@functools.cache
def note(text: str) -> None:
    """Say it once."""
    print(f"note: {text}", file=sys.stderr)


# -------------------------------------------------------------------------- what stages ask of them


def first_messages(env: Any, expert: list[Demonstration]) -> dict[str, str]:
    """System message, instruction and agreement that all demonstrations share, but `env` has not.

    Warns of demonstrations whose first messages a prompt will not have.
    """
    own = {"system": env.system, "instruction": env.instruction, "agreement": env.agreement}
    complete = [demonstration.opening[:-1] for demonstration in expert if demonstration.agreed]
    if others := len(expert) - len(complete):
        lack = "begin without an instruction and the agent's OK, which a prompt has at inference"
        warn(f"{others} of {len(expert)} demonstrations {lack}")
    fronts = [["", *texts][-3:] for texts in ([text for _, text in front] for front in complete)]
    shared = {}
    for name, column in zip(own, zip(*fronts, strict=True), strict=False):
        if len(set(column)) > 1:
            warn(f"their first {name} differs, so a prompt has the environment's own")
        elif column[0] != own[name]:
            shared[name] = column[0]
    return shared


def learned_tasks(
    tasks: Iterable[str | None], base: str | Path, args: argparse.Namespace
) -> list[str] | None:
    """The tasks of a training and those that its start has learned from, for the metadata.

    base: a checkpoint, or a published model, which has learned from none of them. None: not known,
    since a record or a checkpoint does not tell its tasks.
    """
    ids: set[str | None] = set(tasks)
    meta = meta_of(Path(base).absolute())
    if meta["recipe"].get("env") == args.env:  # else its ids mean other tasks
        same = same_world(meta["recipe"], vars(args))
        ids.update((same and meta.get("tasks")) or [None])
    return None if None in ids else sorted(map(str, ids))


def leaks(env: Any, records: list[dict], args: argparse.Namespace) -> dict[str, int | None]:
    """How many of the played tasks --sft and --qnet learned from (None: not known); warns of any.

    Results count for which the agent wrote, or QNet read, tokens. A task with the subject (a
    product) of a learned one counts too. A published split may overlap (WebShop's do, in 21 tasks),
    so this is no refusal.
    """
    counts: dict[str, int | None] = {}
    sources = ("demonstrations", args.sft, "generated"), ("trees", args.qnet, "scored")
    for source, checkpoint, cost in sources:
        played = {record["task_id"] for record in records if record["tokens"].get(cost)}
        meta = meta_of(checkpoint.absolute())
        learned = meta.get("tasks") if same_world(meta["recipe"], vars(args)) else None
        subjects = set(map(env.subject, learned or []))
        n = len([task_id for task_id in played if env.subject(task_id) in subjects])
        counts[source] = None if played and learned is None else n
        if counts[source] != 0:
            number = "it is not known how many" if counts[source] is None else n
            warn(f"{number} of {len(played)} tasks played are also in the {source} of {checkpoint}")
    return counts


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from.

    Their file (None: there is none), and how many of them were given (None: all).
    """
    checkpoint = checkpoint.absolute()
    if start := input_of(checkpoint, "sft"):
        return cloned_from(start)
    return input_of(checkpoint, "expert"), meta_of(checkpoint)["recipe"].get("n_expert")


def by_task(expert: list[Demonstration], env: Any) -> dict[str, Demonstration]:
    """The best demonstration of each task, of equals the first, by the task's id or, without one,
    by its first observation if no other task begins with that."""
    best: dict[str, Demonstration] = {}
    twins = set()
    for demonstration in expert:
        if demonstration.source == "policy":
            continue
        key = demonstration.task_id or demonstration.observation
        if key in best and demonstration.task_id is None and not env.unique_tasks:
            twins.add(key)
        if key not in best or (demonstration.reward or 0) > (best[key].reward or 0):
            best[key] = demonstration
    return {key: demonstration for key, demonstration in best.items() if key not in twins}


def demonstrations_for(
    env: Any, tasks: list[str], args: argparse.Namespace
) -> dict[str, Demonstration] | None:
    """`by_task` of --expert, else of what the agent was cloned from: then `args` name it.

    The environment's expert plays other tasks. None: --no-expert, so that nobody does. UserError if
    a file that was named is about none of the tasks.
    """
    if args.no_expert:
        return None
    named, most = args.expert, None
    if named is None:
        args.expert, most = cloned_from(args.sft)
    if args.expert is None:
        return {}
    best = by_task(read(args.expert, env, most), env)
    if named or not best.keys() & set(env.task_ids("train")):
        others = [task for task in tasks if task not in best]
        begins = [env.reset(options={"task_id": task})[0].strip() for task in others]
        matches = len(tasks) - len([begin for begin in begins if begin not in best])
        if named and not matches:
            mistake = f"none of its {len(best)} demonstrations is of a task here"
            raise UserError(f"{named}: {mistake}: --no-expert does without")
        facts = f"demonstrations of {matches} of {len(tasks)} tasks"
        print(f"{args.expert}: {facts}; the environment's expert plays others")
    return best


def failures(records: list[dict], demonstrations: dict[str, Demonstration]) -> dict[str, int]:
    """How many demonstrations trees hold, and how many earned 0, or not what is recorded."""
    begins = {n["task_id"]: n["observation"].strip() for n in records if n["parent_id"] is None}
    ends = {n["task_id"]: n["reward"] for n in records if n["expert"]}  # the last node counts
    failed = 0
    for task_id, reward in ends.items():
        tau = demonstrations.get(task_id) or demonstrations.get(begins[task_id])
        recorded = reward if tau is None or tau.reward is None else tau.reward
        failed += reward == 0 or abs(recorded - reward) > 1e-3
    return {"demonstrations": len(ends), "failed_demonstrations": failed}
