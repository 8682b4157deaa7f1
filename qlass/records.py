"""The records between the stages: what a line holds, how it is read and checked, ETO's layouts.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond these are kept.
Standard library only.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from qlass import UserError

# --------------------------------------------------------------------------------------------------------------- fields

OF_A_NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # fields which it must have
OF_A_RESULT = ("task_id", "env", "method", "reward", "tokens")
NUMBERS = ("reward", "q", "q_raw")


def is_chat(messages: list[dict]) -> bool:
    """Messages of user and assistant in turns, the user first, after a system message if there is one."""
    if not all(isinstance(message["content"], str) for message in messages):
        return False
    roles = [message["role"] for message in messages]
    roles = roles[roles[:1] == ["system"] :]
    return bool(roles) and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def wrong(record: dict, needed: Iterable[str]) -> str | None:
    """What is wrong with a record: a field that it needs and lacks, or one that can't be. None: nothing."""
    for name in needed:
        if name not in record:
            return f"no {name}"
    for name in NUMBERS:
        if not isinstance(record.get(name, 0), int | float):
            return f"{name} can't be {record[name]!r:.40}"
    if "messages" in record and not is_chat(record["messages"]):
        return "messages are no chat of user and assistant in turns"
    return None


# -------------------------------------------------------------------------------------------------------------- reading


def finite(text: str) -> float:
    """A number of JSON, but not NaN or Infinity, which Python's reader allows, nor what has no finite square."""
    if not abs(float(text)) <= 1e30:
        raise ValueError(f"{text} is not a number")
    return float(text)


def parse_json(content: bytes, where: str) -> Any:
    """What JSON holds."""
    try:
        return json.loads(content.decode("utf-8-sig"), parse_float=finite, parse_constant=finite)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds."""
    return parse_json(path.read_bytes(), str(path))


def records_of(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Each object of JSON Lines, or of a JSON list as in ETO's files, and where it stands: "FILE:LINE"."""
    with open(path, "rb") as lines:
        if lines.peek(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, record in enumerate(parse_json(lines.read(), str(path)), 1):
                yield f"{path}: record {number}", record
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, parse_json(line, where)


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """The records of a file. UserError names FILE:LINE where one is malformed."""
    return (record for _, record in records_of(path))


def read_trees(path: str | Path, needed: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield one tree at a time as its list of nodes, the root first (trees.jsonl, q_labels.jsonl).

    needed: fields that a node must have besides those of every tree; "messages" the root alone.
    """
    rest = yield from trees_of(records_of(path), needed)
    if rest:
        raise UserError(
            f"{path}: the tree of task {rest[0]['task_id']} has {len(rest)} of {rest[0].get('nodes')} nodes; "
            "run build_trees.py again with the same arguments to complete it"
        )


def trees_of(lines: Iterable[tuple[str, dict]], needed: Iterable[str]) -> Generator:
    """Yield each tree of these lines (where it stands, node); returns the nodes of a last one that is not complete."""
    of_root = (*OF_A_NODE, *needed)
    of_node = [name for name in of_root if name != "messages"]
    tree: list[dict] = []
    ids: set = set()
    for where, node in lines:
        if mistake := wrong(node, of_node if tree else of_root):
            hint = "run bellman.py on it and name its output" if mistake == "no q" else "is this a trees.jsonl?"
            raise UserError(f"{where}: {mistake}; {hint}")
        tree.append(node)
        task, name, parent = node["task_id"], node["node_id"], node["parent_id"]
        if parent not in (ids or {None}) or name in ids or task != tree[0]["task_id"]:
            place = "stands before its parent, twice, or in another task's tree"
            raise UserError(f"{where}: node {name} of task {task} {place}")
        ids.add(name)
        if len(tree) == tree[0].get("nodes"):
            yield tree
            tree = []
            ids = set()
    return tree


def complete_trees(lines: Iterable[tuple[str, dict]]) -> int:
    """How many of these lines belong to trees that are all there."""
    return sum(map(len, trees_of(lines, ("done", "source"))))


def read_results(path: Path) -> Iterator[dict]:
    """The lines of results.jsonl."""
    for where, record in records_of(path):
        if mistake := wrong(record, OF_A_RESULT):
            raise UserError(f"{where}: {mistake}; is this a results.jsonl?")
        yield record


def identity(record: dict) -> tuple:
    """What a line of results.jsonl is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *(record.get(k) for k in ("split", "M", "N", "select", "player")))


# ------------------------------------------------------------------------------------------------------- demonstrations

ROLES = {"human": "user", "gpt": "assistant"}  # theirs and ours
OF_A_TURN = {"role", "content", "from", "value"}
USED = {"messages", "conversations", "system", "task_id", "id", "game_file", "task", "reward", "env", "source"}


def read_trajectories(path: Path) -> Iterator[tuple[Any, dict]]:
    """Each trajectory as a State, and its record, in our layout or in ETO's, QLASS's and AgentGym's.

    Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSONL, and may have a `system` text beside.
    """
    from qlass.chat import State

    for where, record in records_of(path):
        turns = record.get("messages") or record.get("conversations") or []
        messages = [message(turn) for turn in turns]
        if record.get("system") and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record["system"]})
        if not is_chat(messages) or len(messages) < 2:
            raise UserError(f"{where}: no chat of user and assistant in turns (data/README.md shows the layout)")
        for name in sorted(set(record).union(*turns) - USED - OF_A_TURN):
            note(f"{path}: not used: {name}")
        yield State.load(messages, record.get("task") or ""), record


def message(turn: dict) -> dict:
    role = turn.get("role", turn.get("from"))
    return {"role": ROLES.get(role, role), "content": turn.get("content", turn.get("value"))}


@functools.cache
def note(text: str) -> None:
    """Say it once."""
    print(f"note: {text}", file=sys.stderr)


def agreed(messages: Iterable[tuple[str, str]]) -> int:
    """1 where the agent's first words in a trajectory, of messages (role, content), agree to the instruction; else 0.

    ETO has "OK" there, AgentGym a longer sentence, and the first observation follows. Else they are an action.
    """
    users = sum(role == "user" for role, _ in messages)
    first, *later = [text for role, text in messages if role == "assistant"]
    return int(users > 1 and "Action:" not in first and (len(first) < 10 or any("Action:" in text for text in later)))


def task_id_of(record: dict, env: Any) -> str | None:
    """The id of a record's task, its own or ETO's; None: only its words tell the task."""
    return env.published_id(record) if record.get("task_id") is None else str(record["task_id"])


def actions_by_task(path: Path, env: Any, most: int | None = None) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The actions, worded as the environment words them, and the recorded rewards of the first `most` demonstrations.

    Both are by the task's id or, where a file does not tell it, by the first observation; no actions for one that
    several tasks begin with.
    """
    demonstrations: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    for state, record in itertools.islice(read_trajectories(path), most):
        if record.get("source") == "policy":  # self-training keeps what the agent did in one file with them
            continue
        at = agreed(state.messages)
        observation = [content for role, content in state.messages if role == "user"][at].strip()
        actions = [env.in_own_words(content) for role, content in state.messages if role == "assistant"][at:]
        task = task_id_of(record, env)
        if task is None:
            task = observation
            actions = actions if env.unique_tasks or task not in demonstrations else []
        demonstrations[task] = actions
        if actions and record.get("reward") is not None:
            rewards[task] = float(record["reward"])
    return demonstrations, rewards
