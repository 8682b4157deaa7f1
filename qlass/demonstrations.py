"""Expert trajectories on disk: our layout, ETO's and QLASS's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from environments import UserError
from qlass.chat import State
from qlass.jsonl import read_jsonl
from qlass.stage import meta_path


def read_trajectories(path: Path) -> Iterator[tuple[State, dict]]:
    """Each trajectory and the record that it is from, in our layout or in ETO's and QLASS's.

    Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSONL.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        is_list = file.read(100).lstrip().startswith(b"[")
    try:
        records = json.loads(path.read_bytes()) if is_list else read_jsonl(path)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    roles = {"human": "user", "gpt": "assistant"}
    for number, record in enumerate(records, 1):
        try:
            turns = record.get("messages") or [
                {"role": roles.get(turn["from"]), "content": turn["value"]} for turn in record["conversations"]
            ]
            state = State.load(turns, record.get("task", ""))
            in_turns = all(role == ("user", "assistant")[i % 2] for i, (role, _) in enumerate(state.messages))
            sound = in_turns and len(turns) > 1 and all(isinstance(text, str) for _, text in state.messages)
        except (AttributeError, KeyError, TypeError):
            sound = False
        if not sound:
            raise UserError(f"{path}: record {number} is no chat of user and assistant in turns (data/README.md)")
        yield state, record


def actions_by_task(path: Path) -> dict[str, list[str]]:
    """The actions of each demonstration, by its task id or, where a file has none (ETO's), by its first observation."""
    found = {}
    for state, record in read_trajectories(path):
        told = [content for role, content in state.messages if role == "user"]
        actions = [content for role, content in state.messages if role == "assistant"]
        agreed = len(told) > 1 and len(actions[0]) < 10  # instruction, "OK", first observation
        key = record.get("task_id") or told[agreed].strip()
        found[str(key)] = actions[agreed:]
    return found


def cloned_from(checkpoint: Path) -> Path | None:
    """The demonstrations that a checkpoint was trained on, if its metadata name a file that is there."""
    meta = meta_path(checkpoint.absolute())
    named = json.loads(meta.read_text(encoding="utf-8"))["arguments"].get("expert") if meta.exists() else None
    return Path(named) if named and Path(named).is_file() else None
