"""Files: JSON Lines read and written, replaced as a whole or not at all, hashed, locked.

Standard library and filelock only, so that bellman.py starts at once.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qlass import UserError


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


warn_once = functools.cache(warn)


@contextlib.contextmanager
def one_line(path: str | Path) -> Iterator[None]:
    """A UserError for whatever a library raises about a checkpoint that it can't load."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": .")
        raise UserError(f"{path}: can't be loaded ({reason}); is it complete?") from error


# ---------------------------------------------------------------------------------------- reading


def parse_json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def an_object(value: Any, where: str) -> dict:
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object, but a {type(value).__name__}")
    return value


def a_record(value: Any, where: str) -> dict:
    """A line of a file, whoever wrote it: an object, whose reward is a number from 0 to 1, and
    whose task_id is a text or a whole number, which becomes its text. UserError for others."""
    record = an_object(value, where)
    reward = record.get("reward")
    if reward is not None and not (type(reward) in (int, float) and 0 <= reward <= 1):
        rule = "a number from 0 to 1 is expected, and 1 is success"
        raise UserError(f"{where}: reward can't be {reward!r:.40}: {rule}")
    task_id = record.get("task_id")
    if type(task_id) is int:
        record["task_id"] = str(task_id)
    elif not isinstance(task_id, str | None):
        rule = "a text or a whole number is expected"
        raise UserError(f"{where}: task_id can't be {task_id!r:.40}: {rule}")
    return record


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds."""
    return an_object(parse_json(path.read_bytes(), str(path)), str(path))


def records_of(path: Path) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", record) of JSON Lines, or of a JSON list as in ETO's files."""
    with open(path, "rb") as lines:
        if lines.peek(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, record in enumerate(parse_json(lines.read(), str(path)), 1):
                where = f"{path}: record {number}"
                yield where, a_record(record, where)
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, a_record(parse_json(line, where), where)


def read_jsonl(path: Path) -> Iterator[dict]:
    """The records of one file. UserError names FILE:LINE of a malformed one."""
    return (record for _, record in records_of(path))


# ------------------------------------------------------------------------------------------ content


# Files of a checkpoint: their suffixes or, where others have these too, their names.
LOADED = {
    ".json",
    ".safetensors",
    ".jinja",
    ".model",
    ".tiktoken",
    "vocab.txt",
    "merges.txt",
    "MERGED",
}
LINES = {".json", ".jsonl", ".txt", ".jinja"}  # the same with other line ends


def sha256(path: Path) -> str:
    """Of a file or, of a checkpoint's folder, of the files that loading it reads, in order of their
    names: what else lies there, such as a model card or a desktop.ini, changes no number.
    """
    paths = [path]
    if path.is_dir():
        files = [p for p in path.rglob("[!.]*") if p.suffix in LOADED or p.name in LOADED]
        paths = sorted(p for p in files if p.is_file())
    return digest(*((p, p.stat().st_size, p.stat().st_mtime_ns) for p in paths))


@functools.cache  # a large model is read once
def digest(*files: tuple[Path, int, int]) -> str:
    total = hashlib.sha256()
    for path, *_ in files:
        with open(path, "rb") as content:
            text = path.suffix in LINES
            for block in content if text else iter(functools.partial(content.read, 1 << 20), b""):
                total.update(block.replace(b"\r\n", b"\n") if text else block)
    return total.hexdigest()


# ---------------------------------------------------------------------------------------- writing


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun, Accelerate and job arrays set them; alone 0 and 1."""
    try:
        return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError as error:
        raise UserError(f"RANK and WORLD_SIZE number processes, but: {error}") from None


ALMOST_NOTHING = 1 << 20  # bytes that are left of a disk when a write has failed for want of more


def parts_of(output: Path) -> Path:
    return output.with_name(output.name + ".parts")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the lock of an output until the block or this process ends; its holder may nest it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0, is_singleton=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Timeout:
            reason = "another process is writing it; wait for it, or name another --out"
            raise UserError(f"{output}: {reason} (its lock: {lock.lock_file})") from None
        except (OSError, NotImplementedError) as error:  # a file system without locks
            warn(f"{output} can't be locked ({error}): start no second process that writes it")
        yield


@contextlib.contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """Where to write what takes the place of `output` when the block ends without an error."""
    output = output.resolve()  # a link stays, and may lead to a larger disk
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(".{}.draft-{}-of-{}".format(output.name, *share()))
    discard(draft)  # of a call that was killed
    try:
        yield draft
    except Exception as error:  # each library has its own words for a full disk
        if shutil.disk_usage(output.parent).free < ALMOST_NOTHING:
            raise UserError(f"{output}: can't be written: the disk is full") from error
        raise
    if output.is_dir():
        discard(output)
    draft.replace(output)


def discard(path: Path) -> None:
    """Delete a file or a folder, or what a link leads to, if it is there."""
    path = path.resolve()
    if path.is_dir():  # under another name, since half a checkpoint passes for one
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}.old"))
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def refuse_folder(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: a folder or a device, not a file: name another")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file opened for writing that replaces `path` when the block ends without an error."""
    refuse_folder(path)
    with draft_of(path) as draft, open(draft, "w", encoding="utf-8") as out:
        yield out


def dumps(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was."""
    with replacing(path) as out:
        out.writelines(map(dumps, records))


def checkpoint_folder(folder: Path, start: str | Path | None = None) -> Path:
    """Where a checkpoint goes: a new or empty folder, or an older checkpoint, not the `start`."""
    if start and folder.resolve() == Path(start).resolve():
        raise UserError(f"{folder}: is what the training starts from: name another --out")
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        reason = "holds something else than a checkpoint, which would be lost: name another --out"
        raise UserError(f"{folder}: {reason}")
    return folder
