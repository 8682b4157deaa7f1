"""The records between the stages: what a line holds, how it is read and checked, ETO's layouts.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond the schema are kept.
Standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

from qlass import UserError

Check = Callable[[Any], bool]

# ----------------------------------------------------------------------------------------------------------- the schema


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1e30  # not NaN; sums and squares of such are finite


def is_chat(value: Any) -> bool:
    """Messages of user and assistant in turns, the user first, behind a system message if there is one."""
    if not isinstance(value, list) or not all(isinstance(m, dict) and is_text(m.get("content")) for m in value):
        return False
    roles = [message.get("role") for message in value]
    roles = roles[roles[:1] == ["system"] :]
    return bool(roles) and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def check_of(kind: Any) -> Check:
    """Whether a value is of a field's type, as a function. Numbers are finite; `Annotated` adds a check to a type."""
    origin = typing.get_origin(kind)
    parts = [check_of(part) for part in typing.get_args(kind)]
    if origin is Annotated:
        return lambda value: all(part(value) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(part(value) for part in parts)
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(parts[0], value))
    if kind is float:
        return is_number
    return (lambda value: isinstance(value, kind)) if isinstance(kind, type) else kind


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


is_text, is_flag, is_name = check_of(str), check_of(bool), check_of(str | int)
Name = str | int  # an id
Chat = Annotated[list, is_chat]
Counts = Annotated[dict, lambda counts: all(map(is_number, counts.values()))]


@dataclass
class Trajectory:
    """A line of expert.jsonl. ETO's and QLASS's files have `conversations` in place of `messages`."""

    messages: Chat
    task_id: Name | None = None
    task: str | None = None
    reward: float | None = None


@dataclass
class TreeNode:
    """A line of trees.jsonl and, with the values that bellman.py adds, of q_labels.jsonl."""

    task_id: Name
    node_id: Name
    parent_id: Name | None
    action: str | None
    observation: str
    reward: float
    done: bool = False
    source: str = "policy"
    branch: Name = 0
    expert: bool = False
    q_raw: float = 0.0
    q: float = 0.0
    task: str = ""  # of a root, as are the next two
    messages: Chat = field(default_factory=list)
    nodes: Name = 0


@dataclass
class Result:
    """A line of results.jsonl."""

    task_id: Name
    env: Annotated[str, str.split]  # more than blanks
    method: str
    reward: float
    tokens: Counts
    M: int | None = None
    N: int | None = None
    select: str | None = None
    player: str | None = None
    split: str | None = None
    label: str | None = None
    seed: int | None = None
    type: str | None = None
    block: str | None = None
    task: str | None = None
    success: float | None = None
    n_steps: float = 0
    env_steps: float = 0
    seconds: float = 0
    steps: list[dict] | None = None


@functools.cache
def schema(kind: type) -> tuple[dict[str, Check], list[str]]:
    """The check of each field of a dataclass, and the fields without a default, which a record must have."""
    checks = {name: check_of(of) for name, of in typing.get_type_hints(kind, include_extras=True).items()}
    return checks, [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def wrong(record: dict, kind: type | dict[str, Check], needed: Iterable[str] = ()) -> str | None:
    """What is wrong with a record: a field that it lacks, or one that is not of its kind. None: nothing."""
    checks, required = schema(kind) if isinstance(kind, type) else (kind, [])
    for name in (*required, *needed):
        if name not in record:
            return f"no {name}"
    for name, value in record.items():
        if name in checks and not checks[name](value):
            shown = repr(value)
            return f"{name} can't be {shown if len(shown) < 40 else shown[:36] + ' ...'}"
    return None


# -------------------------------------------------------------------------------------------------------------- reading


def parse_json(content: bytes, where: str, hint: str = "") -> Any:
    """The value of JSON; NaN and Infinity, which Python's reader allows, are none. UserError says where it stands."""

    def no_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}){hint}") from None


def an_object(value: Any, where: str) -> dict:
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON object is expected, not {type(value).__name__}")
    return value


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds."""
    return an_object(parse_json(path.read_bytes(), str(path)), str(path))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte-order mark is no character of a prompt
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error})") from None


def records_of(path: str | Path, skip_cut: bool = False) -> Iterator[tuple[str, dict]]:
    """Each object of JSON Lines, or of a JSON list as in ETO's files, and where it stands: "FILE:LINE".

    skip_cut: a last line that a stopped run has cut short is left out, with a warning.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as lines:
        if lines.peek(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, value in enumerate(parse_json(lines.read(), str(path)), 1):
                where = f"{path}: record {number}"
                yield where, an_object(value, where)
        for number, line in enumerate(lines, 1):
            where, cut = f"{path}:{number}", not line.endswith(b"\n")
            hint = "; a truncated line?" if cut else "; one JSON object a line is expected"
            try:
                if line.strip():
                    yield where, an_object(parse_json(line, where, hint), where)
            except UserError:
                if not (cut and skip_cut):
                    raise
                print(f"warning: {where}: skipped, cut short by a stopped run", file=sys.stderr)


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """The records of a file. UserError names FILE:LINE where one is malformed."""
    return (record for _, record in records_of(path))


def fields_of(path: Path) -> set[str] | None:
    """The fields of a file's first record, none if it is no object; None: there is nothing to lose."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return set(next(read_jsonl(path), ()))
    except UserError:
        return set()


def read_trees(path: str | Path, needed: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield one tree at a time as its list of nodes, the root first (trees.jsonl, q_labels.jsonl).

    needed: fields that a node must have besides those of every tree; "messages" the root alone.
    """
    of_root = list(needed)
    of_node = [name for name in of_root if name != "messages"]
    lines = records_of(path)
    for where, root in lines:
        tree: list[dict] = []
        ids: set = {None}
        for place, node in itertools.chain([(where, root)], lines):
            if mistake := wrong(node, TreeNode, of_node if tree else of_root):
                hint = "run bellman.py on it and name its output" if mistake == "no q" else "is this a trees.jsonl?"
                raise UserError(f"{place}: {mistake}; {hint}")
            if node["parent_id"] not in ids or node["node_id"] in ids or node["task_id"] != root["task_id"]:
                name = f"node {node['node_id']} of task {node['task_id']}"
                raise UserError(f"{place}: {name} stands before its parent, twice, or in another task's tree")
            tree.append(node)
            ids.discard(None)
            ids.add(node["node_id"])
            if len(tree) == root.get("nodes"):
                break
        else:
            raise UserError(
                f"{path}: the tree of task {root['task_id']} has {len(tree)} of {root.get('nodes')} nodes; "
                "run build_trees.py again with the same arguments to complete it"
            )
        yield tree


def read_results(path: str | Path) -> Iterator[dict]:
    """The lines of results.jsonl, ids as they are written; a last one that a stop has cut short is left out."""
    for where, record in records_of(path, skip_cut=True):
        if mistake := wrong(record, Result):
            raise UserError(f"{where}: {mistake}; fix or delete this line")
        yield record


def identity(record: dict) -> tuple:
    """What a line of results.jsonl is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *(record.get(k) for k in ("split", "M", "N", "select", "player")))


def complete_results(records: list[dict]) -> int:
    """All of them, if each is a result."""
    for record in records:
        if mistake := wrong(record, Result):
            raise ValueError(mistake)
    return len(records)


# ------------------------------------------------------------------------------------------------------- demonstrations


USED = {"id", "game_file", "env", "source", "conversations"}  # by somebody, beside `Trajectory`'s fields
ROLES = {"human": "user", "gpt": "assistant"}
NAMED: set[tuple[Path, str]] = set()  # files and their unused fields, once they have been named


def read_trajectories(path: Path) -> Iterator[tuple[Any, dict]]:
    """Each trajectory as a State, and its record, in our layout or in ETO's and QLASS's.

    Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSONL, and may have a `system` text beside.
    """
    from qlass.chat import State

    for where, record in records_of(path):
        turns = record.get("messages")
        with contextlib.suppress(KeyError, TypeError):
            turns = turns or [
                {"role": ROLES.get(t["from"], t["from"]), "content": t["value"]} for t in record["conversations"]
            ]
        beside = is_text(record.get("system")) and is_chat(turns) and turns[0]["role"] != "system"
        if beside and record["system"]:
            turns = [{"role": "system", "content": record["system"]}, *turns]
        mistake = wrong(record | {"messages": turns}, Trajectory)
        if not is_chat(turns) or not any(turn["role"] == "assistant" for turn in turns):
            mistake = "no chat of user and assistant in turns"
        if mistake:
            raise UserError(f"{where}: {mistake} (data/README.md shows the layout)")
        name_unused(path, record, {"system"} if beside else set())
        yield State.load(turns, record.get("task") or ""), record


def name_unused(path: Path, record: dict, used: set[str]) -> None:
    """A line on what a record holds and nobody uses, where no earlier one of the file has it."""
    of_record = {name for name in record if record[name]} - schema(Trajectory)[0].keys() - USED - used
    of_turns = set().union(*(record.get("messages") or record["conversations"])) - {"role", "content", "from", "value"}
    names = [*sorted(of_record), *(f"{name} of a turn" for name in sorted(of_turns))]
    unused = [name for name in names if (path, name) not in NAMED]
    NAMED.update((path, name) for name in unused)
    if unused:
        print(f"note: {path}: not used: {', '.join(unused)}", file=sys.stderr)


def agreed(messages: Iterable[tuple[str, str]]) -> bool:
    """Do the agent's first words in a trajectory, of messages (role, content), agree to the instruction?

    ETO has "OK" there, AgentGym a longer sentence. Else they are an action.
    """
    users = sum(role == "user" for role, _ in messages)
    first, *later = [text for role, text in messages if role == "assistant"]
    return users > 1 and "Action:" not in first and (len(first) < 10 or any("Action:" in text for text in later))


def first_observation(state: Any) -> tuple[int, str]:
    """Which user message of a trajectory holds the first observation, and its text."""
    users = [text for role, text in state.messages if role == "user"]
    at = int(agreed(state.messages))  # instruction, agreement, first observation
    return at, users[at].strip()


def known_id(record: dict, env: Any) -> str | None:
    """The id of a record's task, its own or ETO's; None: only its words tell the task."""
    return env.published_id(record) if record.get("task_id") is None else str(record["task_id"])


def by_agent(record: dict) -> bool:
    """Whether an agent did this itself: self-training keeps it in one file with the demonstrations."""
    return record.get("source") == "policy"


def actions_by_task(
    path: Path, env: Any, most: int | None = None, rewards: dict[str, float] | None = None
) -> dict[str, list[str]]:
    """The actions of each of the first `most` demonstrations, by its task's id or, where a file does not tell it, by
    its first observation; [] for one that several tasks begin with. rewards: takes those that are recorded."""
    demonstrations: dict[str, list[str]] = {}
    for state, record in itertools.islice(read_trajectories(path), most):
        agreed, observation = first_observation(state)
        actions = [content for role, content in state.messages if role == "assistant"][agreed:]
        task_id = known_id(record, env)
        if task_id is None and observation in demonstrations and not env.unique_tasks:
            actions = []
        if not by_agent(record):
            task = observation if task_id is None else task_id
            demonstrations[task] = actions
            if rewards is not None and actions and record.get("reward") is not None:
                rewards[task] = record["reward"]
    return demonstrations


def openings(path: Path, most: int | None = None) -> list[str]:
    """The first observation of each of the first `most` demonstrations that has no task id."""
    trajectories = itertools.islice(read_trajectories(path), most)
    return [first_observation(state)[1] for state, record in trajectories if record.get("task_id") is None]
