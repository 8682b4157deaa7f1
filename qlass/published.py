"""Demonstrations in our layout or in ETO's, QLASS's and AgentGym's, and the tasks that they are of.

Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSON Lines, and may have a
`system` text beside. data/README.md shows a line of each. No torch.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.cli import same_world
from qlass.files import records_of
from qlass.messages import State, without_thinking
from qlass.metadata import cloned_from, read_meta
from qlass.output import chat_fault

ROLES = {"human": "user", "gpt": "assistant"}  # theirs and ours
TURN = {"role", "content", "from", "value"}  # fields of a turn
CALLS = ("tool_calls", "function_call")  # fields of a turn that acts, but not by its text
RECORD = {"messages", "conversations", "system", "task_id", "id", "game_file", "task"}
RECORD |= {"reward", "env", "source"}  # fields of a trajectory that are read
LAYOUT = "(data/README.md shows the layout)"
AGREEMENT = re.compile(r"\s*(ok|okay|sure|understood)\b", re.IGNORECASE)


def records(path: Path) -> Iterator[tuple[str, dict]]:
    """`records_of` a file of demonstrations. UserError for a table and for an empty file."""
    with open(path, "rb") as file:
        begin = file.read(1000).removeprefix(codecs.BOM_UTF8).lstrip()
    if begin[:1] not in (b"[", b"{", b""):
        way_out = "of a table, pandas' to_json(orient='records', lines=True) writes it"
        raise UserError(f"{path}: neither JSON nor JSON Lines in UTF-8: {way_out}")
    empty = True
    try:
        for line in records_of(path):
            yield line
            empty = False
    except UserError as error:
        raise UserError(f"{error} {LAYOUT}") from None
    if empty:
        raise UserError(f"{path}: holds no demonstration {LAYOUT}")


def read_trajectories(path: Path) -> Iterator[tuple[State, dict]]:
    """Yield each trajectory as a State, and its record. UserError names FILE:LINE of a bad one."""
    for where, record in records(path):
        turns = record.get("messages") or record.get("conversations") or []
        messages = list(map(message, turns)) if isinstance(turns, list) else turns
        fault = tool_call(turns) or chat_fault(messages) or demonstration_fault(record, messages)
        if fault:
            raise UserError(f"{where}: no chat of user and assistant in turns: {fault} {LAYOUT}")
        for name in sorted(set(record).union(*turns) - RECORD - TURN):
            note(f"{path}: not used: {name}")
        if record.get("system") and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record["system"]})
        yield State.load(messages, record.get("task") or ""), record


def tool_call(turns: Any) -> str:
    """That a turn acts, but not by its text; empty if none does."""
    for number, turn in enumerate(turns if isinstance(turns, list) else [], 1):
        if isinstance(turn, dict) and any(map(turn.get, CALLS)):
            return f"turn {number} acts by a tool call: write the action into its content, as text"
    return ""


def message(turn: Any) -> Any:
    """A turn as {"role", "content"}; what is no turn, as it is."""
    if not isinstance(turn, dict):
        return turn
    role = turn.get("role") or turn.get("from")
    return {"role": ROLES.get(str(role), role), "content": turn.get("content", turn.get("value"))}


def demonstration_fault(record: dict, messages: list[dict]) -> str:
    """Why a chat is no demonstration that can be cloned and replayed; empty if it is."""
    if record.get("messages") and record.get("conversations"):
        return "it has messages and conversations: leave one"
    for name in ("system", "task"):
        if not isinstance(record.get(name) or "", str):
            return f"{name} is no text"
    first = messages[0]
    if first["role"] == "system" and (record.get("system") or first["content"]) != first["content"]:
        return "its system text and its first turn are two system messages: leave one"
    if not isinstance(record.get("reward"), int | float | None):
        return f"reward can't be {record['reward']!r:.40}"
    actions = written([(turn["role"], turn["content"]) for turn in messages])
    if not actions:
        return "the assistant does nothing"
    if silent := [text for text in actions if not without_thinking(text).strip()]:
        return f"the assistant writes {silent[0]!r:.40}, which is no action"
    return ""


@functools.cache
def note(text: str) -> None:
    """Say it once."""
    print(f"note: {text}", file=sys.stderr)


def agreed(messages: Iterable[tuple[str, str]]) -> int:
    """1 if the agent's first words, of messages (role, content), agree to the instruction; else 0.

    ETO has "OK" there, AgentGym a longer sentence, and the first observation follows. Otherwise
    they are an action.
    """
    users = [text for role, text in messages if role == "user"]
    first, *later = [text for role, text in messages if role == "assistant"] or [""]
    if len(users) < 2 or "Action:" in first:
        return 0
    return int(bool(AGREEMENT.match(first)) or any("Action:" in text for text in later))


def written(messages: Sequence[tuple[str, str]]) -> list[str]:
    """What the agent wrote after it agreed: its actions."""
    return [text for role, text in messages if role == "assistant"][agreed(messages) :]


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
    for an observation that several tasks begin with. Of several demonstrations of a task that of
    the highest reward counts, of equals the first; a line tells how many others there are.
    """
    demonstrations: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    others = 0
    for state, record in itertools.islice(read_trajectories(path), most):
        if record.get("source") == "policy":  # self-training keeps the agent's own in one file
            continue
        users = [content for role, content in state.messages if role == "user"]
        observation = users[agreed(state.messages)].strip()
        task, reward = task_id_of(record, env), record.get("reward")
        if task is None and observation in demonstrations and not env.unique_tasks:
            demonstrations[observation] = []
            rewards.pop(observation, None)
            continue
        task = observation if task is None else task
        if task in demonstrations:
            others += 1
            if (reward or 0.0) <= rewards.get(task, 0.0):
                continue
        demonstrations[task] = [env.in_own_words(text) for text in written(state.messages)]
        if reward is not None:
            rewards[task] = float(reward)
    if others:
        kept = "of several of a task the best is kept, of equals the first"
        print(f"{path}: {others} demonstrations are set aside: {kept}")
    return demonstrations, rewards


def tasks_of(path: Path, env: Any, most: int | None = None) -> set[str | None]:
    """Ids of the tasks of the first `most` demonstrations; None stands for those not told."""
    return {task_id_of(record, env) for _, record in itertools.islice(records(path), most)}


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


def expert_actions(
    env: Any, tasks: list[str], args: Any
) -> tuple[dict[str, list[str]] | None, dict]:
    """`actions_by_task` of --expert, else of what the agent was cloned from: then `args` name it.

    A line tells how many of the tasks it is about; UserError if it is about none and was named. An
    agent's own demonstrations are mostly of other training tasks, which is not worth a line. No
    actions: the environment's expert plays; None, with --no-expert: nobody does.
    """
    named = args.expert is not None
    file, most = (args.expert, None) if named else cloned_from(args.sft)
    args.expert = file
    if args.no_expert:
        return None, {}
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
