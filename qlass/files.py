"""Files: JSON and JSON lines, written whole or not at all; locks, and what stands beside an output.

No torch here.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from safetensors import SafetensorError
from tqdm import tqdm

from qlass import UserError
from qlass.records import Line, Metadata, as_user_error, read

Inputs = dict[str, Path | None]  # by the flags that name them; None: there is none


@functools.cache  # once a process
def warn(text: str) -> None:
    tqdm.write(f"warning: {text}", file=sys.stderr)  # not on the line of a progress bar


def read_json(path: Path, kind: Any = dict) -> Any:
    """The value in a JSON file. UserError unless it is of this type."""
    with as_user_error(path):
        return TypeAdapter(kind).validate_python(json.loads(path.read_text(encoding="utf-8")))


def write_text(path: Path, text: str) -> None:
    with atomic(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Any]:
    return list(read(path, Line))


def dumps(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    with atomic(path) as draft, open(draft, "w", encoding="utf-8") as out:
        out.writelines(map(dumps, records))


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a draft of a file or folder, which becomes `path` when the block ends well."""
    make_folder(path.parent)
    rank, _ = rank_and_size()
    draft, old = (path.with_name(f".{path.name}.{name}{rank}") for name in ("draft", "old"))
    remove(draft)  # of a call that was killed
    remove(old)
    with as_user_error(path, errors=(OSError, SafetensorError)):  # a full disk
        yield draft
    for file in filter(Path.is_file, draft.rglob("*")):  # safetensors writes for its owner alone
        with contextlib.suppress(OSError):  # not every file system has modes
            file.chmod(draft.stat().st_mode & 0o666)
    if path.is_dir():  # half of it must not be there for a moment
        path.replace(old)
    draft.replace(path)
    remove(old)


def make_folder(path: Path) -> None:
    with as_user_error(path, errors=OSError):  # a file has this name
        path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def lock(path: Path) -> FileLock:
    """The lock of an output, held until it is released or this process ends."""
    make_folder(path.parent)
    file_lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
    with as_user_error(f"{path}: another process is writing it", errors=Timeout):
        file_lock.acquire()
    return file_lock


def rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun and job arrays set them; alone 0 and 1."""
    with as_user_error("RANK, WORLD_SIZE", errors=ValueError):
        rank, n = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    if not 0 <= rank < n:
        raise UserError(f"RANK {rank} of WORLD_SIZE {n}: ranks are 0 to {n - 1}")
    return rank, n


# ---------------------------------------------------------------------------- beside an output


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def meta_of(output: Path) -> dict:
    return read_meta(meta_path(output))


def read_meta(path: Path) -> dict:
    """The metadata in a file, with an empty recipe and no inputs where these are missing."""
    return {"recipe": {}, "inputs": {}} | (read_json(path, Metadata) if path.exists() else {})


def parts_folder(output: Path) -> Path:
    """The folder of what is done of an unfinished output."""
    return output.with_name(output.name + ".parts")


def input_of(output: Path, name: str) -> Path | None:
    """The path of an output's input, from its metadata; None if it had no such input."""
    relative = meta_of(output)["inputs"].get(name)
    if not relative:
        return None
    path, here = (output.parent / relative).resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def is_begun(output: Path) -> bool:
    return parts_folder(output).exists() or output.exists()  # in this order, see Output.read


def begun_meta(output: Path) -> Path:
    """The metadata of what the next command goes on with."""
    own = parts_folder(output) / "meta.json"
    return own if own.exists() else meta_path(output)
