"""Demonstrations in our layout or in ETO's, QLASS's and AgentGym's, and the tasks that they are of.

Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSON Lines, and may have a
`system` text beside. data/README.md shows a line of each. No torch.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.chat import State
from qlass.cli import same_world
from qlass.files import is_chat, read_meta, records_of

ROLES = {"human": "user", "gpt": "assistant"}  # theirs and ours
TURN = {"role", "content", "from", "value"}  # fields of a turn
RECORD = {"messages", "conversations", "system", "task_id", "id", "game_file", "task"}
RECORD |= {"reward", "env", "source"}  # fields of a trajectory that are read


def read_trajectories(path: Path) -> Iterator[tuple[State, dict]]:
    """Yield each trajectory as a State, and its record. UserError names FILE:LINE of a bad one."""
    for where, record in records_of(path):
        turns = record.get("messages") or record.get("conversations") or []
        turns = [turn for turn in turns if isinstance(turn, dict)]
        messages = [message(turn) for turn in turns]
        if record.get("system") and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record["system"]})
        if not is_chat(messages) or len(messages) < 2:
            layout = "data/README.md shows the layout"
            raise UserError(f"{where}: no chat of user and assistant in turns ({layout})")
        for name in sorted(set(record).union(*turns) - RECORD - TURN):
            note(f"{path}: not used: {name}")
        yield State.load(messages, record.get("task") or ""), record


def message(turn: dict) -> dict:
    role = turn.get("role") or turn.get("from") or ""
    return {"role": ROLES.get(role, role), "content": turn.get("content", turn.get("value"))}


@functools.cache
def note(text: str) -> None:
    """Say it once."""
    print(f"note: {text}", file=sys.stderr)


def agreed(messages: Iterable[tuple[str, str]]) -> int:
    """1 if the agent's first words, of messages (role, content), agree to the instruction; else 0.

    ETO has "OK" there, AgentGym a longer sentence, and the first observation follows. Otherwise
    they are an action.
    """
    users = sum(role == "user" for role, _ in messages)
    first, *later = [text for role, text in messages if role == "assistant"]
    if users < 2 or "Action:" in first:
        return 0
    return int(len(first) < 10 or any("Action:" in text for text in later))


def demonstrations(env: Any, path: Path, most: int | None = None) -> list[State]:
    """The first `most` trajectories of a file, actions and answers worded as `env` words them."""
    states, failed = [], 0
    for state, record in itertools.islice(read_trajectories(path), most):
        messages = tuple((role, env.in_own_words(text)) for role, text in state.messages)
        states.append(State(messages, state.task))
        failed += record.get("reward") == 0
    if failed:
        print(f"{failed} of {len(states)} demonstrations earned nothing")
    return states


def opening(state: State) -> tuple[tuple[str, str], ...]:
    """Instruction, OK and first observation, after a system message if there is one."""
    return state.messages[: 4 if state.messages[0][0] == "system" else 3]


def first_messages(env: Any, states: list[State]) -> dict[str, str]:
    """System message, instruction and agreement that all demonstrations share, but `env` has not.

    Warns of demonstrations whose first messages a prompt will not have.
    """
    own = {"system": env.system, "instruction": env.instruction, "agreement": env.agreement}
    columns: dict[str, set[str]] = {name: set() for name in own}
    complete = [opening(state)[:-1] for state in states if agreed(state.messages)]
    for messages in complete:
        front = [text for _, text in messages]
        if len(front) < 3:  # no system message
            front.insert(0, "")
        for name, text in zip(own, front, strict=True):
            columns[name].add(text)
    if len(complete) < len(states):
        lack = "begin without an instruction and the agent's OK, which a prompt has at inference"
        rest = len(states) - len(complete)
        print(f"warning: {rest} of {len(states)} demonstrations {lack}", file=sys.stderr)
    for name, texts in columns.items():
        if len(texts) > 1:
            difference = f"their first {name} differs, so a prompt has the environment's own"
            print(f"warning: {difference}", file=sys.stderr)
    shared = {name: next(iter(texts)) for name, texts in columns.items() if len(texts) == 1}
    return {name: text for name, text in shared.items() if text != own[name]}


def task_id_of(record: dict, env: Any) -> str | None:
    """The id of a record's task, its own or ETO's; None: only its words tell the task."""
    return env.published_id(record) if record.get("task_id") is None else str(record["task_id"])


def actions_by_task(
    path: Path, env: Any, most: int | None = None
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Actions, worded as the environment does, and rewards of the first `most` demonstrations.

    Both are by the task's id or, if a file does not tell it, by the first observation; no actions
    for an observation that several tasks begin with.
    """
    demonstrations: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    for state, record in itertools.islice(read_trajectories(path), most):
        if record.get("source") == "policy":  # self-training keeps the agent's own in one file
            continue
        first = agreed(state.messages)
        users = [content for role, content in state.messages if role == "user"]
        observation = users[first].strip()
        texts = [content for role, content in state.messages if role == "assistant"]
        actions = [env.in_own_words(text) for text in texts[first:]]
        task = task_id_of(record, env)
        if task is None:
            task = observation
            if task in demonstrations and not env.unique_tasks:
                actions = []
        demonstrations[task] = actions
        if actions and record.get("reward") is not None:
            rewards[task] = float(record["reward"])
    return demonstrations, rewards


def tasks_of(path: Path, env: Any, most: int | None = None) -> set[str | None]:
    """Ids of the tasks of the first `most` demonstrations; None stands for those not told."""
    return {task_id_of(record, env) for _, record in itertools.islice(records_of(path), most)}


def learned_tasks(
    tasks: Iterable[str | None], base: str | Path, arguments: dict[str, Any]
) -> list[str] | None:
    """The tasks of a training and those that its start has learned from, for the metadata.

    base: a checkpoint, or a published model, which has learned from none of them. arguments: of
    the training. None: not known, since a record or a checkpoint does not tell its tasks.
    """
    ids: set[str | None] = set(tasks)
    meta = read_meta(Path(base).absolute())
    trained = meta["arguments"]
    if trained.get("env") == arguments["env"]:  # else its ids mean other tasks
        same = same_world(trained, arguments)
        ids.update((same and meta.get("tasks")) or [None])
    return None if None in ids else sorted(map(str, ids))


def matching(
    env: Any, tasks: list[str], file: Path | None, most: int | None, named: bool
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """`actions_by_task` of a file, and a line that tells how many of the tasks it is about.

    UserError if it is about none and was named. An agent's own demonstrations are mostly of other
    training tasks, which is not worth a line. No file: none.
    """
    if file is None:
        return {}, {}
    actions, rewards = actions_by_task(file, env, most)
    if named or not actions.keys() & set(env.task_ids("train")):
        others = [task for task in tasks if task not in actions]
        begins = [env.reset(options={"task_id": task})[0].strip() for task in others]
        matches = len(tasks) - len([begin for begin in begins if begin not in actions])
        if named and not matches:
            mistake = f"none of its {len(actions)} demonstrations is of a task here"
            raise UserError(f"{file}: {mistake}: --no-expert does without")
        print(f"{file}: demonstrations of {matches} of {len(tasks)} tasks; the expert plays others")
    return actions, rewards


def failures(records: list[dict], recorded: dict[str, float]) -> dict[str, int]:
    """How many demonstrations trees hold, and how many earned 0, or not what is `recorded`."""
    begins = {n["task_id"]: n["observation"].strip() for n in records if n["parent_id"] is None}
    rewards = {node["task_id"]: node["reward"] for node in records if node["expert"]}  # the last's
    failed = 0
    for task_id, reward in rewards.items():
        expected = recorded.get(task_id, recorded.get(begins[task_id], reward))
        if reward == 0 or abs(expected - reward) > 1e-3:
            failed += 1
    return {"demonstrations": len(rewards), "failed_demonstrations": failed}
