"""JSON Lines between the stages: one object a line, UTF-8, written completely or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from environments import UserError
from qlass.locks import locked

LARGEST = 1e30  # of a number: sums, squares and differences of such are finite
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a character, which no UTF-8 file can hold


def parse_json(content: bytes) -> Any:
    """The value of JSON; NaN and Infinity, which Python's reader allows, are none. ValueError says what is wrong."""

    def no_number(name: str) -> NoReturn:
        raise ValueError(f"not valid JSON ({name} is not a number)")

    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=no_number)
        if SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except UnicodeEncodeError:
        raise ValueError("half a character (an unpaired surrogate)") from None
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"not valid JSON ({error.msg}{line})") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    return value


def numbered(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Each line's number and object. UserError names file:line where one is malformed or the file is missing."""
    if not Path(path).exists():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    record = parse_json(line)
                except ValueError as error:
                    hint = "a truncated line?" if not line.endswith(b"\n") else "one JSON object a line is expected"
                    raise UserError(f"{path}:{number}: {error}; {hint}") from None
                if not isinstance(record, dict):
                    raise UserError(f"{path}:{number}: a JSON object is expected, not {type(record).__name__}")
                yield number, record


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Each line's object; see `numbered`."""
    return (record for _, record in numbered(path))


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds; UserError where it holds none."""
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error})") from None


# --------------------------------------------------------------------------------------------------- what is expected


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_name(value: Any) -> bool:
    return isinstance(value, str | int)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST  # which NaN is not


def is_chat(value: Any) -> bool:
    """Messages of user and assistant in turns, the user first, behind a system message if there is one."""
    if not isinstance(value, list) or not all(isinstance(m, dict) and is_text(m.get("content")) for m in value):
        return False
    roles = [m.get("role") for m in value]
    roles = roles[roles[:1] == ["system"] :]
    return bool(roles) and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def maybe(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or kind(value)


def wrong(record: dict, kinds: dict[str, Callable[[Any], bool]], needed: Iterable[str] = ()) -> str | None:
    """What is wrong with a record: a needed field that it lacks, or one that is not of its kind. None: nothing."""
    for name in needed:
        if name not in record:
            return f"no {name}"
    for name, kind in kinds.items():
        if name in record and not kind(record[name]):
            shown = repr(record[name])
            return f"{name} can't be {shown if len(shown) < 40 else shown[:36] + ' ...'}"
    return None


# -------------------------------------------------------------------------------------------------- whole or not at all


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was: the new one takes its name only when it is whole."""
    with replacing(path) as out:
        out.writelines(map(dumps, records))


def dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Any]:
    """A file opened for writing that takes the place of `path` when the block ends without an error.

    One process at a time writes it. A draft that a killed one left is written over.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device"
        raise UserError(f"{path}: {kind}, where a file is to be written: name another")
    draft = path.with_name(f".{path.name}.draft")
    with locked(path):
        try:
            with naming(path), open(draft, "w", encoding="utf-8") as out:
                yield out
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error in writing that names no file, as on a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        kept = f"{error.strerror}: what was complete is kept; make room, and the same command resumes"
        raise OSError(error.errno, kept, str(path)) from None


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of the checkpoint `folder` when the block ends without an error."""
    draft = folder.with_name(folder.name + ".draft")
    with locked(folder):
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process
        draft.mkdir(parents=True)
        try:
            with naming(folder):
                yield draft
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if "os error" in str(error):  # safetensors' own
                raise UserError(f"{folder}: {error}: make room, and the same command resumes") from None
            raise
        discard(folder)
        draft.rename(folder)


def discard(folder: Path) -> None:
    """Delete a checkpoint, under another name: half of one must not be taken for one, nor for something else."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def checkpoint_folder(folder: Path, read: str | Path | None = None) -> Path:
    """Where a checkpoint is to go: a new folder, an empty one, or an older checkpoint, which it will replace.

    Not the one that is `read`.
    """
    folder = folder.absolute() if not folder.name else folder  # "." has no name
    if read and folder.resolve() == Path(read).resolve():
        raise UserError(f"{folder}: is what the training starts from: name another --out (of a learner: --name)")
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder}: holds something else than a checkpoint, which would be lost: name another --out")
    return folder


# ---------------------------------------------------------------------------------------------------- trees and results

NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # what every line of a tree has
KINDS = {  # of a tree's fields, where a line has them
    "task_id": is_name, "node_id": is_name, "parent_id": maybe(is_name), "action": maybe(is_text),
    "observation": is_text, "reward": is_number, "q": is_number, "q_raw": is_number, "branch": is_name,
    "done": is_flag, "expert": is_flag, "source": is_text, "task": is_text, "messages": is_chat, "nodes": is_name,
}  # fmt: skip
DEEPEST = 1000  # levels of a tree; each state holds all messages above it


def read_trees(path: str | Path, needed: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield one tree at a time as its list of nodes, the root first (trees.jsonl, q_labels.jsonl).

    needed: fields that a node must have besides `NODE`; "messages" the root alone.
    """
    needed = list(needed)
    of_root, of_node = (*NODE, *needed), (*NODE, *(name for name in needed if name != "messages"))
    tree: list[dict] = []
    depth: dict[Any, int] = {}
    for number, node in numbered(path):
        root = not tree or node.get("parent_id", 0) is None
        mistake = wrong(node, KINDS, of_root if root else of_node)
        if mistake:
            made_by = {"no q": "run bellman.py on it and name its output"}
            hint = made_by.get(mistake, "is this a trees.jsonl or q_labels.jsonl?")
            raise UserError(f"{path}:{number}: {mistake}; {hint}")
        if root:
            if tree:
                yield complete_tree(tree, path)
            tree, depth = [], {None: -1}
        name, parent = node["node_id"], node["parent_id"]
        told = f"{path}:{number}: node {name} of task {node['task_id']}"
        if node["task_id"] != (tree or [node])[0]["task_id"]:
            raise UserError(f"{told} stands in the tree of task {tree[0]['task_id']}: a tree's lines stand together")
        if parent not in depth:
            raise UserError(f"{told} stands before its parent {parent}: parents come first")
        if name in depth:
            raise UserError(f"{told} is there twice: each node of a tree has an id of its own")
        if tree and node["action"] is None:
            raise UserError(f"{told} has no action: only a root has none")
        depth[name] = depth[parent] + 1
        if depth[name] > DEEPEST:
            raise UserError(f"{told} is deeper than {DEEPEST:,} levels, which no environment's episodes are")
        tree.append(node)
    if tree:
        yield complete_tree(tree, path)


def complete_tree(tree: list[dict], path: str | Path) -> list[dict]:
    """The tree, if it has the number of nodes that its root line says."""
    if tree[0].get("nodes") != len(tree):
        raise UserError(
            f"{path}: the tree of task {tree[0]['task_id']} has {len(tree)} of {tree[0].get('nodes')} nodes; "
            "run build_trees.py again with the same arguments to complete it"
        )
    return tree


def identity(record: dict) -> tuple:
    """What a line of results.jsonl is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *(record.get(k) for k in ("split", "M", "N", "select", "player")))


def complete_results(records: list[dict]) -> int:
    """All of them, if each is a result."""
    for record in records:
        hash(identity(record))
        if not is_number(record["reward"]):
            raise ValueError(f"reward can't be {record['reward']!r}")
    return len(records)


def fields_of(path: Path) -> set[str] | None:
    """The fields of a file's first line, none if it is no object; None: there is nothing to lose."""
    if not path.exists() or not path.stat().st_size:
        return None
    with open(path, "rb") as lines:
        try:
            return set(parse_json(lines.readline()).keys())
        except (ValueError, AttributeError):
            return set()


# ------------------------------------------------------------------------------------------------------ files that grow


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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"lines without {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: {said}: from another stage? Name another --out") from None
    return records[:keep], ends[keep - 1] if keep else 0


class Resumable:
    """A JSONL file that grows by groups of lines and survives a stop at any byte: what is incomplete is cut off."""

    def __init__(self, path: str | Path, complete: Callable[[list[dict]], int]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records, end = complete_records(self.path, complete)
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the stage)
        self.file.truncate(end)

    def append(self, group: Iterable[dict]) -> None:
        group = list(group)
        rest = memoryview("".join(map(dumps, group)).encode())
        with naming(self.path):
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self.file.write(rest) :]
        self.records += group

    def close(self) -> None:
        self.file.close()
