"""Expert trajectories on disk: our layout, ETO's and QLASS's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from environments import UserError
from envs import TextEnv
from qlass.chat import State
from qlass.jsonl import is_chat, is_name, is_number, is_text, maybe, numbered, parse_json, wrong
from qlass.metadata import located, read_meta


def read_trajectories(path: Path) -> Iterator[tuple[State, dict]]:
    """Each trajectory and the record that it is from, in our layout or in ETO's and QLASS's.

    Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSONL.
    """
    roles = {"human": "user", "gpt": "assistant"}
    for where, record in records_of(path):
        turns = record.get("messages")
        try:
            turns = turns or [
                {"role": roles.get(t["from"], t["from"]), "content": t["value"]} for t in record["conversations"]
            ]
        except (KeyError, TypeError):
            turns = None
        if not is_chat(turns) or not any(turn["role"] == "assistant" for turn in turns):
            raise UserError(f"{where}: no chat of user and assistant in turns (data/README.md shows the layout)")
        if mistake := wrong(record, KINDS):
            raise UserError(f"{where}: {mistake} (data/README.md shows the layout)")
        yield State.load(turns, record.get("task") or ""), record


KINDS = {"task_id": maybe(is_name), "task": maybe(is_text), "reward": maybe(is_number)}


def records_of(path: Path) -> Iterator[tuple[str, dict]]:
    """Each record of a JSON list or of a JSONL file, and where it stands."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        is_list = file.read(100).lstrip().startswith(b"[")
    if not is_list:
        yield from ((f"{path}:{number}", record) for number, record in numbered(path))
        return
    try:
        records = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {error}; a list of trajectories is expected") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise UserError(f"{path}: record {number}: a JSON object is expected, not {type(record).__name__}")
        yield f"{path}: record {number}", record


def first_observation(state: State) -> tuple[int, str]:
    """Which user message of a trajectory holds the first observation, and its text."""
    told = [content for role, content in state.messages if role == "user"]
    agreement = next(content for role, content in state.messages if role == "assistant")
    at = int(len(told) > 1 and len(agreement) < 10)  # instruction, "OK", first observation
    return at, told[at].strip()


def known_id(record: dict, env: TextEnv) -> str | None:
    """The id of a record's task, its own or ETO's; None: only its words tell the task."""
    return env.published_id(record) if record.get("task_id") is None else str(record["task_id"])


def by_agent(record: dict) -> bool:
    """Whether an agent did this itself: self-training keeps it in one file with the demonstrations."""
    return record.get("source") == "policy"


def actions_by_task(path: Path, env: TextEnv, most: int | None = None) -> dict[str, list[str]]:
    """The actions of each of the first `most` demonstrations, by its task's id or, where a file does not tell it, by
    its first observation; [] for one that several tasks begin with."""
    found: dict[str, list[str]] = {}
    for state, record in itertools.islice(read_trajectories(path), most):
        agreed, observation = first_observation(state)
        actions = [content for role, content in state.messages if role == "assistant"][agreed:]
        task_id = known_id(record, env)
        if by_agent(record):
            continue
        if task_id is None and observation in found and not env.unique_tasks:
            actions = []
        found[observation if task_id is None else str(task_id)] = actions
    return found


def openings(path: Path, most: int | None = None) -> list[str]:
    """The first observation of each of the first `most` demonstrations that has no task id."""
    some = itertools.islice(read_trajectories(path), most)
    return [first_observation(state)[1] for state, record in some if record.get("task_id") is None]


def lineage(checkpoint: Path) -> Iterator[tuple[Path, dict]]:
    """A checkpoint and those it was trained from, down to the one that was cloned, with the arguments of each."""
    for _ in range(10):
        checkpoint = checkpoint.absolute()
        made = read_meta(checkpoint).get("arguments", {})
        yield checkpoint, made
        before = located(made, made["sft"], checkpoint) if is_text(made.get("sft")) else None
        if is_cloned(made) or before is None:
            return
        checkpoint = before


def is_cloned(made: dict) -> bool:
    """By sft.py: a learner (experiments/learning.py) may have demonstrations too, and is trained from a clone."""
    return is_text(made.get("expert")) and "budget_in" not in made


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The file of demonstrations that a checkpoint, or the one it was trained from, was cloned from (None: there is no
    such file), and how many of them it was given (None: all)."""
    for folder, made in lineage(checkpoint):
        if is_cloned(made):
            found = located(made, made["expert"], folder)
            return (found, made.get("n_expert")) if found and found.is_file() else (None, None)
    return None, None
