"""JSON Lines between the stages: one object a line, UTF-8, written completely or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from environments import UserError


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Yield each line's object. UserError names file:line where one is malformed or the file is missing."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    record = json.loads(line.decode())
                except UnicodeDecodeError:
                    raise UserError(f"{path}:{number}: not UTF-8 text; is this a JSONL file?") from None
                except json.JSONDecodeError as error:
                    hint = "a truncated line?" if not line.endswith(b"\n") else "one JSON object a line is expected"
                    raise UserError(f"{path}:{number}: not valid JSON ({error.msg}); {hint}") from None
                if not isinstance(record, dict):
                    raise UserError(f"{path}:{number}: a JSON object is expected, not {type(record).__name__}")
                yield record


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error})") from None


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was: the new one takes its name only when it is whole."""
    with replacing(path) as out:
        for record in records:
            out.write(dumps(record))


def dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Any]:
    """A file opened for writing that takes the place of `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8") as out:
            yield out
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # what every line of a tree has


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of the checkpoint `folder` when the block ends without an error."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def checkpoint_folder(folder: Path) -> Path:
    """Where a checkpoint is to go: a new folder, an empty one, or an older checkpoint, which it will replace."""
    folder = folder.absolute() if not folder.name else folder  # "." has no name
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder}: holds something else than a checkpoint, which would be lost: name another --out")
    return folder


def read_trees(path: str | Path) -> Iterator[list[dict]]:
    """Yield one tree at a time as its list of nodes, the root first (trees.jsonl, q_labels.jsonl)."""
    tree: list[dict] = []
    for number, node in enumerate(read_jsonl(path), 1):
        missing = [key for key in NODE if key not in node]
        if missing or not isinstance(node["reward"], int | float):
            wrong = f"no {missing[0]}" if missing else f"reward {node['reward']!r} is no number"
            raise UserError(f"{path}:{number}: {wrong}; is this a trees.jsonl or q_labels.jsonl?")
        if node["parent_id"] is None and tree:
            yield complete_tree(tree, path)
            tree = []
        tree.append(node)
    if tree:
        yield complete_tree(tree, path)


def complete_tree(tree: list[dict], path: str | Path) -> list[dict]:
    """The tree, if it has the number of nodes that its root line says, parents before children."""
    if tree[0].get("nodes") != len(tree):
        raise UserError(
            f"{path}: the tree of task {tree[0].get('task_id')} has {len(tree)} of {tree[0].get('nodes')} nodes; "
            "run build_trees.py again with the same arguments to complete it"
        )
    above: set[Any] = {None}
    for node in tree:
        if node["parent_id"] not in above:
            raise UserError(f"{path}: task {node['task_id']}: node {node['node_id']} stands before its parent")
        above.add(node["node_id"])
    return tree


def complete_records(path: Path, complete: Callable[[list[dict]], int]) -> tuple[list[dict], int]:
    """The records of a file that whole groups of lines are made of (a tree, an episode's result), and their bytes.

    `complete(records)` says how many of the first records form whole groups. A stop leaves the last line unfinished.
    """
    ends: list[int] = []
    if path.exists():
        with open(path, "rb") as lines:
            at = 0
            for line in lines:
                at += len(line)
                if line.strip() and line.endswith(b"\n"):
                    ends.append(at)
    records = list(itertools.islice(read_jsonl(path), len(ends))) if ends else []
    try:
        keep = complete(records)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: lines without {error}, from another stage? Name another --out") from None
    return records[:keep], ends[keep - 1] if keep else 0


class Resumable:
    """A JSONL file that grows by groups of lines and survives a stop at any byte: what is incomplete is cut off."""

    def __init__(self, path: str | Path, complete: Callable[[list[dict]], int]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records, end = complete_records(self.path, complete)
        self.file = open(self.path, "ab")  # noqa: SIM115  (open for the life of the stage)
        self.file.truncate(end)

    def append(self, group: Iterable[dict]) -> None:
        group = list(group)
        self.file.write("".join(map(dumps, group)).encode())
        self.file.flush()
        self.records += group

    def close(self) -> None:
        self.file.close()
