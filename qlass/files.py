"""The files of the stages: how they are replaced, grow, are described, and have one writer.

Standard library and filelock only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qlass import UserError
from qlass.records import parse_json, read_object

Complete = Callable[[list[tuple[str, dict]]], int]

# ----------------------------------------------------------------------------------- one writer, complete or not at all


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the lock of an output, beside it, until the block or this process ends. Who holds it may take it again."""
    try:
        with FileLock(output.with_name(f".{output.name}.lock"), timeout=0, is_singleton=True):
            yield
    except Timeout:
        raise UserError(f"{output}: another process is writing it; wait for it, or name another --out") from None


@contextlib.contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """Where to write a file or a folder that takes the place of `output` when the block ends without an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.draft")
    discard(draft)  # of a call that was stopped
    yield draft
    if output.is_dir():
        discard(output)
    draft.replace(output)


def discard(path: Path) -> None:
    """Delete a file or a folder, if it is there; a folder under another name, as half a checkpoint passes for one."""
    if path.is_dir():
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}"))
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file opened for writing that takes the place of `path` when the block ends without an error."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: a folder or a device, where a file is to be written: name another")
    with draft_of(path) as draft, open(draft, "w", encoding="utf-8") as out:
        yield out


def dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was."""
    with replacing(path) as out:
        out.writelines(map(dumps, records))


def checkpoint_folder(folder: Path, read: str | Path | None = None) -> Path:
    """Where a checkpoint is to go: a new folder, an empty one, or an older checkpoint, which it will replace.

    Not the one that is `read`.
    """
    if read and folder.resolve() == Path(read).resolve():
        raise UserError(f"{folder}: is what the training starts from: name another --out (of a learner: --name)")
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something else than a checkpoint, which would be lost: name another --out")
    return folder


# ------------------------------------------------------------------------------------------------------------- metadata

# Arguments that may differ between a run and its resumption: of any stage, of one that samples, of one that trains.
FREE = ("run", "out", "device", "overwrite", "debug")
SAMPLING_FREE = ("plain", "cache_gb", "decode_tokens", "in_flight", "server")
TRAINING_FREE = ("save_every", "micro_tokens", "gradient_checkpointing")
PACKAGES = ("torch", "transformers", "numpy", "gymnasium")  # whose versions are recorded
HASHES: dict[tuple, str] = {}  # by path, size and time of the files, so that a large model is read once


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: Path) -> dict[str, Any]:
    """The metadata of an output; where there are none, no arguments and no inputs."""
    path = meta_path(output)
    return {"arguments": {}, "inputs": {}} | (read_object(path) if path.exists() else {})


def recorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """A stage's arguments (`vars(args)`) as the metadata hold them."""
    hidden = ("argv", "env_flags")  # no flags of the user's
    record = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items() if k not in hidden}
    if record.get("server"):  # whose address may change, but not its model
        record["server_model"] = record["server"].partition("#")[2]
    return record


def write_meta(output: Path, arguments: dict[str, Any], inputs: Iterable[Path | None] = (), **figures: Any) -> None:
    """How `output` came about: arguments, versions, commit, hashes of the inputs, and the figures of the run."""
    record = {
        "arguments": recorded(arguments),
        "argv": arguments.get("argv", []),
        "inputs": {str(path): sha256(path) for path in inputs if path and path.exists()},
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


def commit() -> str | None:
    """Of the clone that runs, ending in -dirty where files were changed since; None: it is installed."""
    clone = Path(__file__).parents[1]
    if not (clone / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", clone, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def sha256(path: Path) -> str:
    """Of a file, or of a folder's files one after the other in order of their names."""
    paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = tuple((p, p.stat().st_size, p.stat().st_mtime_ns) for p in paths)
    if files not in HASHES:
        total = hashlib.sha256()
        for p in paths:
            with open(p, "rb") as content:
                while chunk := content.read(1 << 20):
                    total.update(chunk)
        HASHES[files] = total.hexdigest()
    return HASHES[files]


def changed_inputs(output: Path) -> list[Path]:
    """What an output was made from and has changed since."""
    inputs = read_meta(output)["inputs"].items()
    return [Path(p) for p, content in inputs if Path(p).exists() and sha256(Path(p)) != content]


def same_arguments(output: Path, arguments: dict[str, Any], free: Iterable[str] = ()) -> None:
    """Resuming is only sound with the arguments and inputs that the output was begun with; UserError names others.

    free: arguments that may be others.
    """
    begun = read_meta(output)["arguments"]
    others = []
    for name, value in recorded(arguments).items():
        if name not in (*FREE, *free) and begun.get(name, value) != value:
            others.append(f"--{name.replace('_', '-')} {begun[name]}, not {value}")
    others += [f"{source}, which has changed since" for source in changed_inputs(output)]
    if others:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {', '.join(others)}: {way_out}")


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of an output and of all that it comes from."""
    for source in changed_inputs(output):
        yield output, source
    for source in map(Path, read_meta(output)["inputs"]):
        if source != output:  # labels may be made anew in their own place
            yield from outdated(source)


def is_complete(output: Path) -> bool:
    """A folder is complete as soon as it exists; a file if its metadata have `seconds`, or if it has no metadata, since
    it was then made elsewhere."""
    from_elsewhere = output.is_dir() or not meta_path(output).exists()
    return output.exists() and (from_elsewhere or "seconds" in read_meta(output))


def input_of(output: Path, name: str) -> Path | None:
    """The file or folder that an output's argument `name` named: there or, if it was moved with the output, beside it.

    None: the argument named nothing.
    """
    named = read_meta(output)["arguments"].get(name)
    if not isinstance(named, str):
        return None
    beside = output.parent / Path(named).name
    return beside if beside.exists() and not Path(named).exists() else Path(named)


def lineage(checkpoint: Path) -> Iterator[tuple[Path, dict]]:
    """A checkpoint and those it was trained from, down to the one that sft.py cloned, with the arguments of each."""
    folder: Path | None = checkpoint.absolute()
    for _ in range(10):  # metadata may lead in a circle
        if folder:
            yield folder, read_meta(folder)["arguments"]
            folder = input_of(folder, "sft")


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The file of demonstrations that a checkpoint, or the one it was trained from, was cloned from (None: there is no
    such file), and how many of them it was given (None: all)."""
    *_, (folder, arguments) = lineage(checkpoint)
    expert = None if "sft" in arguments else input_of(folder, "expert")  # a learner may have demonstrations too
    return (expert, arguments.get("n_expert")) if expert and expert.is_file() else (None, None)


# ------------------------------------------------------------------------------------------------------ files that grow


def complete_records(path: Path, complete: Complete) -> tuple[list[dict], int]:
    """The records of a file that form complete groups of lines (a tree, an episode's result), and their bytes.

    `complete(lines)` says how many of the first lines, each ("FILE:LINE", record), do. A stop may have left the last
    one unfinished.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    places = [f"{path}:{number}" for number in range(1, len(lines) + 1)]
    records = list(map(parse_json, lines, places))
    keep = complete([*zip(places, records, strict=True)])
    return records[:keep], sum(map(len, lines[:keep]))


class Resumable:
    """A JSONL file that grows by groups of lines and survives a stop at any byte: what is incomplete is cut off."""

    def __init__(self, path: Path, complete: Complete) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records, end = complete_records(path, complete)
        self.file = open(path, "ab")  # noqa: SIM115  (open for the life of the stage)
        self.file.truncate(end)

    def append(self, group: list[dict]) -> None:
        self.file.write("".join(map(dumps, group)).encode())
        self.file.flush()
        self.records += group


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE of this process, as torchrun, `accelerate launch` and job arrays set them; alone 0 and 1."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def parts_of(output: Path) -> list[Path]:
    """What several processes have written of an output and no single one has joined yet."""
    return sorted(output.parent.glob(f"{output.stem}.[0-9]*-of-[0-9]*.jsonl"))


class Output(Resumable):
    """A stage's output, with one writer, the same arguments whenever it resumes, and metadata beside it.

    complete: as of `complete_records`. free: arguments that may change from call to call. identity: what a record is
    of, the same in all of a group and in no other. With it processes may share the tasks (`share`): each writes a part
    and skips what is in the output or in any part; the next call by one process joins them.
    `records` is what need not be done again, whichever file it is in.
    """

    def __init__(
        self, output: Path, arguments: dict[str, Any], complete: Complete, inputs: Iterable[Path | None] = (),
        free: Iterable[str] = (), identity: Callable[[dict], Any] | None = None,
    ) -> None:  # fmt: skip
        rank, world = share() if identity else (0, 1)
        self.alone = world == 1
        if arguments.get("overwrite") and not self.alone:
            raise UserError(f"{output}: delete it: of several processes, one would overwrite what others wrote")
        path = output if self.alone else output.with_name(f"{output.stem}.{rank}-of-{world}.jsonl")
        others = [other for other in (output, *parts_of(output)) if other != path]
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(locked(path))
        for old in (path, *others):
            if not (old.exists() and old.stat().st_size):
                continue
            if not meta_path(old).exists():
                raise UserError(
                    f"{old}: not of this command, which leaves a .meta.json beside it: move it, or name it as an input"
                )
            if arguments.get("overwrite"):
                delete(old)
            else:
                same_arguments(old, arguments, ("limit", *free))
        super().__init__(path, complete)
        self.arguments, self.inputs = arguments, list(inputs)
        self.started = time.time()
        if not self.records:  # a call that is stopped at once is known by its arguments too
            self.describe()
        for other in others:
            finished = set(map(identity, self.records))
            records = [r for r in complete_records(other, complete)[0] if identity(r) not in finished]
            if self.alone:
                self.append(records)
                delete(other)
            else:
                self.records += records

    def describe(self, **figures: Any) -> None:
        write_meta(self.path, self.arguments, self.inputs, **figures)

    def append(self, group: list[dict]) -> None:
        if is_complete(self.path):
            self.describe()  # the file grows again, so it is not complete
        super().append(group)

    def grow(self, groups: Iterable[list[dict]], what: str, total: int, done: int = 0) -> None:
        from tqdm import tqdm  # here, since bellman.py does without

        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        for group in tqdm(groups, what, total, initial=done, mininterval=every):
            self.append(group)

    def finish(self, order: Callable[[dict], Any] | None = None, **figures: Any) -> None:
        """Close the file, put its groups in order (not a part's) and complete its metadata."""
        self.file.close()
        records = sorted(self.records, key=order) if order and self.alone else self.records
        if records != self.records:
            write_jsonl(self.path, records)
            self.records = records
        if not is_complete(self.path):  # lines were added, or a stop came after the last one
            self.describe(**figures, seconds=time.time() - self.started)
        self.lock.close()


def delete(output: Path) -> None:
    """A file and its metadata, which no other process may be writing."""
    with locked(output):
        discard(output)
        discard(meta_path(output))
