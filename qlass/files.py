"""Files of the stages: how they are read, checked, replaced, described, and how they grow.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond
these are kept. Standard library and filelock only, so that bellman.py starts at once.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import heapq
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qlass import UserError

# ---------------------------------------------------------------------------------------- records

NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # required fields
RESULT = ("task_id", "env", "method", "reward", "tokens")
NUMBERS = ("reward", "q", "q_raw")
CONDITION = ("split", "M", "N", "select", "player")  # of a result, besides task and method


def is_chat(messages: list[dict]) -> bool:
    """Whether user and assistant take turns, the user first, after at most one system message."""
    if not all(isinstance(message["content"], str) for message in messages):
        return False
    roles = [message["role"] for message in messages]
    roles = roles[roles[:1] == ["system"] :]
    return bool(roles) and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def fault(record: dict, required: Iterable[str]) -> str | None:
    """What is wrong with a record; None: nothing."""
    for name in required:
        if name not in record:
            return f"no {name}"
    for name in NUMBERS:
        if not isinstance(record.get(name, 0), int | float):
            return f"{name} can't be {record[name]!r:.40}"
    if "messages" in record and not is_chat(record["messages"]):
        return "messages are no chat of user and assistant in turns"
    return None


def finite(text: str) -> float:
    """A JSON number. Python also reads NaN and Infinity; those and what overflows are refused."""
    if not abs(float(text)) <= 1e30:
        raise ValueError(f"{text} is not a number")
    return float(text)


def parse_json(content: bytes, where: str) -> Any:
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds."""
    return parse_json(path.read_bytes(), str(path))


def records_of(path: str | Path, cut: bool = False) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", record) of JSON Lines, or of a JSON list as in ETO's files.

    cut: leave out a last line without its end, which a stopped writer left.
    """
    with open(path, "rb") as lines:
        if lines.peek(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, record in enumerate(parse_json(lines.read(), str(path)), 1):
                yield f"{path}: record {number}", record
        for number, line in enumerate(lines, 1):
            if line.strip() and (line.endswith(b"\n") or not cut):
                where = f"{path}:{number}"
                yield where, parse_json(line, where)


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """The records of one file. UserError names FILE:LINE of a malformed one."""
    return (record for _, record in records_of(path))


def trees_of(lines: Iterable[tuple[str, dict]], required: Iterable[str] = ()) -> Any:
    """Yield each tree as its list of nodes, the root first; return the nodes of an incomplete one.

    required: fields of a node besides NODE; "messages" of the root alone.
    """
    of_root = (*NODE, *required)
    of_node = [name for name in of_root if name != "messages"]
    tree: list[dict] = []
    ids: set = set()
    for where, node in lines:
        if mistake := fault(node, of_node if tree else of_root):
            hint = "run bellman.py on it and name its output"
            raise UserError(
                f"{where}: {mistake}; {hint if mistake == 'no q' else 'is this a trees.jsonl?'}"
            )
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
    """How many of these lines belong to complete trees."""
    return sum(map(len, trees_of(lines, ("done", "source"))))


def read_trees(path: str | Path, required: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield the trees of a file and its parts, each task once, in the order of the tasks.

    UserError if a file or a part is missing or not finished. `required` as of `trees_of`.
    """
    path = Path(path)
    files = files_of(path)
    if missing := gaps(path):
        names = ", ".join(missing)
        raise UserError(
            f"{path}: {names}: the same command as before (build_trees.py) completes it"
        )
    if files == [path]:
        rest = yield from trees_of(records_of(path), required)
        if rest:
            size = f"{len(rest)} of {rest[0].get('nodes')} nodes"
            reason = f"the tree of task {rest[0]['task_id']} has {size}"
            raise UserError(f"{path}: {reason}; run build_trees.py again to complete it")
        return
    plans = {file: read_meta(file).get("tasks") or [] for file in files}
    tasks = dict.fromkeys(task for plan in sorted(plans.values(), key=len)[::-1] for task in plan)
    rank = {task: i for i, task in enumerate(tasks)}

    def place(tree: list[dict]) -> int:
        return rank.get(tree[0]["task_id"], len(rank))

    streams = []
    for file in files:
        trees = trees_of(records_of(file, cut=True), required)
        in_order = plans[file] and "seconds" in read_meta(file)
        streams.append(trees if in_order else sorted(trees, key=place))
    seen = set()
    for tree in heapq.merge(*streams, key=place):  # one tree of each file in memory
        if tree[0]["task_id"] not in seen:
            seen.add(tree[0]["task_id"])
            yield tree


def read_results(path: Path) -> Iterator[dict]:
    """The lines of results.jsonl and its parts; what stands in several files is read once."""
    seen: set = set()
    for file in files_of(path) or [path]:
        ours = set()
        stopped = meta_path(file).exists() and "seconds" not in read_meta(file)
        for where, record in records_of(file, cut=stopped):
            if mistake := fault(record, RESULT):
                raise UserError(f"{where}: {mistake}; is this a results.jsonl?")
            ours.add(identity(record))
            if identity(record) not in seen:
                yield record
        seen |= ours


def identity(record: dict) -> tuple:
    """What a result is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *map(record.get, CONDITION))


# --------------------------------------------------------------------------- a file and its parts


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun, Accelerate and job arrays set them; alone 0 and 1."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def part_of(output: Path, rank: int, world: int) -> Path:
    return output.with_name(f"{output.stem}.{rank}-of-{world}.jsonl") if world > 1 else output


def files_of(output: Path) -> list[Path]:
    """The files that hold an output: the one of its name, and the parts of several processes."""
    pattern = f"{glob.escape(output.stem)}.[0-9]*-of-[0-9]*.jsonl"
    parts = sorted(output.parent.glob(pattern)) if output.suffix == ".jsonl" else []
    return [output] * output.exists() + parts


def whole_of(part: Path) -> Path:
    """results.0-of-2.jsonl -> results.jsonl, of which it may be a part."""
    return part.with_name(re.sub(r"\.\d+-of-\d+(?=\.jsonl$)", "", part.name))


def gaps(output: Path) -> list[str]:
    """What an output lacks, in words; nothing if it is complete.

    A folder is complete as soon as it exists, and so is a file without metadata, which was made
    elsewhere. A process finishes its file when each task of its share stands in some file; so one
    finished file is enough, or all n parts of some n. It must have known of all planned tasks.
    """
    files = files_of(output)
    if not files:
        return [f"{output.name} is missing"]
    if output in files and (output.is_dir() or not meta_path(output).exists()):
        return []
    metas = {file: read_meta(file) for file in files}
    planned = max(meta.get("planned", 0) for meta in metas.values())
    finished = [
        f for f, meta in metas.items() if "seconds" in meta and meta.get("planned", 0) >= planned
    ]
    if output in finished:
        return []
    worlds = {int(file.stem.rpartition("-of-")[2]) for file in files if file != output}
    names = [[part_of(output, i, n) for i in range(n)] for n in worlds] or [[output]]
    lacking = [
        [f"{part.name} is not finished" for part in parts if part not in finished]
        for parts in names
    ]
    return min(lacking, key=len)


def is_complete(output: Path) -> bool:
    return not gaps(output)


def sha256(path: Path) -> str:
    """Of a file and its parts, or of a folder's files in order of their names; not hidden ones."""
    paths = files_of(path)
    if path.is_dir():
        paths = sorted(p for p in path.rglob("[!.]*") if p.is_file())
    files = tuple((p, p.stat().st_size, p.stat().st_mtime_ns) for p in paths)
    if files not in HASHES:
        total = hashlib.sha256()
        for p in paths:
            with open(p, "rb") as content:
                while chunk := content.read(1 << 20):
                    total.update(chunk)
        HASHES[files] = total.hexdigest()
    return HASHES[files]


HASHES: dict[tuple, str] = {}  # so that a large model is read once

# --------------------------------------------------------------- one writer, complete or not at all


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the lock of an output until the block or this process ends; its holder may nest it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0, is_singleton=True)
    try:
        with lock:
            yield
    except Timeout:
        reason = "another process is writing it; wait for it, or name another --out"
        raise UserError(f"{output}: {reason}") from None


@contextlib.contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """Where to write what takes the place of `output` when the block ends without an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.draft")
    discard(draft)  # of a call that was stopped
    yield draft
    if output.is_dir():
        discard(output)
    draft.replace(output)


def discard(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():  # under another name, since half a checkpoint passes for one
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}"))
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file opened for writing that replaces `path` when the block ends without an error."""
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path}: a folder or a device, where a file is to be written: name another"
        )
    with draft_of(path) as draft, open(draft, "w", encoding="utf-8") as out:
        yield out


def dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was."""
    with replacing(path) as out:
        out.writelines(map(dumps, records))


def checkpoint_folder(folder: Path, start: str | Path | None = None) -> Path:
    """Where a checkpoint goes: a new or empty folder, or an older checkpoint, not the `start`."""
    if start and folder.resolve() == Path(start).resolve():
        way_out = "name another --out (of a learner: --name)"
        raise UserError(f"{folder}: is what the training starts from: {way_out}")
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        reason = "holds something else than a checkpoint, which would be lost: name another --out"
        raise UserError(f"{folder}: {reason}")
    return folder


# --------------------------------------------------------------------------------------- metadata

# Arguments that may differ when a run resumes: of any stage, of sampling, of training.
FREE = ("run", "out", "device", "overwrite", "debug")
SAMPLING_FREE = ("plain", "cache_gb", "decode_tokens", "in_flight", "server")
TRAINING_FREE = ("save_every", "micro_tokens", "gradient_checkpointing")
PACKAGES = ("torch", "transformers", "numpy", "gymnasium")  # whose versions are recorded
OLD_FLAGS = {"webshop_data": "data", "alfworld_data": "data"}  # of environments, once
OLD_FLAGS |= {n: n for n in ("human_goals", "split_file", "instruction", "engine", "tasks", "map")}


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def has_meta(output: Path) -> bool:
    return any(meta_path(file).exists() for file in (output, *files_of(output)))


def read_meta(output: Path) -> dict[str, Any]:
    """The metadata of an output or of its first part; without any, no arguments and no inputs."""
    paths = [meta_path(file) for file in (output, *files_of(output))]
    path = next((p for p in paths if p.exists()), None)
    meta = {"arguments": {}, "inputs": {}} | (read_object(path) if path else {})
    arguments = meta["arguments"]
    if "env_option" in arguments:
        options = arguments["env_option"] = list(arguments["env_option"])
        for flag in OLD_FLAGS.keys() & arguments.keys():
            if value := arguments.pop(flag):
                value = "true" if value is True else value
                options.append(f"{OLD_FLAGS[flag]}={value}")
        options.sort()
    return meta


def recorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """A stage's arguments (`vars(args)`) as the metadata hold them."""
    record = {name: str(v) if isinstance(v, Path) else v for name, v in arguments.items()}
    record.pop("argv", None)
    if record.get("server"):  # its address may change, but not its model
        record["server_model"] = record["server"].partition("#")[2]
    return record


def write_meta(
    output: Path, arguments: dict[str, Any], inputs: Iterable[Path | None] = (), **figures: Any
) -> None:
    """Record arguments, versions, commit, hashes of the inputs, and the figures of the run."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name)]
    record = {
        "arguments": recorded(arguments),
        "argv": arguments.get("argv", []),
        "inputs": {str(path): sha256(path) for path in inputs if path and files_of(path)},
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in installed},
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


def commit() -> str | None:
    """Of the clone that runs, ending in -dirty if files were changed; None: it is installed."""
    clone = Path(__file__).parents[1]
    if not (clone / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", clone, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def place_of(output: Path, named: str) -> Path:
    """Where an input of an output is now: at its path or beside the output, known by content."""
    content = read_meta(output)["inputs"].get(named)
    places = [Path(named), output.parent / Path(named).name]
    places = [place for place in places if files_of(place)]
    same = [place for place in places if content in (None, sha256(place))]
    return (same or places[::-1] or [Path(named)])[0]


def input_of(output: Path, name: str) -> Path | None:
    """The file or folder that an output's argument `name` named; None: it named nothing."""
    named = read_meta(output)["arguments"].get(name)
    return place_of(output, named) if isinstance(named, str) else None


def changed_inputs(output: Path) -> list[Path]:
    """What an output was made from and has changed since."""
    inputs = read_meta(output)["inputs"]
    places = {place_of(output, named): content for named, content in inputs.items()}
    return [p for p, content in places.items() if files_of(p) and sha256(p) != content]


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(output, input that has changed since), of an output and of all that it comes from."""
    for source in changed_inputs(output):
        yield output, source
    for source in read_meta(output)["inputs"]:
        if Path(source) != output:  # labels may be made anew in their own place
            yield from outdated(place_of(output, source))


def same_arguments(output: Path, arguments: dict[str, Any], free: Iterable[str] = ()) -> None:
    """Refuse to resume with other arguments, but for `free` ones, or other inputs than at first."""
    meta = read_meta(output)
    begun, inputs = meta["arguments"], meta["inputs"]
    others = []
    for name, value in recorded(arguments).items():
        before = begun.get(name, value)
        if name in (*FREE, *free) or before == value:
            continue
        content = inputs.get(before) if isinstance(before, str) else None
        if not (content and value and content == sha256(Path(value))):  # else it was moved
            others.append(f"--{name.replace('_', '-')} {before}, not {value}")
    others += [f"{source}, which has changed since" for source in changed_inputs(output)]
    if others:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {', '.join(others)}: {way_out}")


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from.

    Their file (None: there is none), and how many of them were given (None: all).
    """
    folder = checkpoint.absolute()
    for _ in range(10):  # metadata may lead in a circle
        if source := input_of(folder, "sft"):
            folder = source.absolute()
    arguments = read_meta(folder)["arguments"]
    expert = None if "sft" in arguments else input_of(folder, "expert")
    return (expert, arguments.get("n_expert")) if expert and expert.is_file() else (None, None)


# --------------------------------------------------------------------------------- files that grow

Complete = Callable[[list[tuple[str, dict]]], int]


def complete_records(path: Path, complete: Complete) -> tuple[list[dict], int]:
    """The records of a file that form complete groups (a tree, a result), and their bytes.

    `complete(lines)` says how many of the first lines, each ("FILE:LINE", record), do so.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    places = [f"{path}:{number}" for number in range(1, len(lines) + 1)]
    records = list(map(parse_json, lines, places))
    keep = complete(list(zip(places, records, strict=True)))
    return records[:keep], sum(map(len, lines[:keep]))


class Resumable:
    """A JSONL file that grows by groups of lines; what a stop left incomplete is cut off."""

    def __init__(self, path: Path, complete: Complete) -> None:
        self.path, self.file = path, None
        self.own, self.end = complete_records(path, complete)
        self.records = list(self.own)

    def append(self, group: list[dict]) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab")  # noqa: SIM115  (open as long as the stage runs)
            self.file.truncate(self.end)
        self.file.write("".join(map(dumps, group)).encode())
        self.file.flush()
        self.own += group
        self.records += group

    def close(self) -> None:
        if self.file:
            self.file.close()


class Output(Resumable):
    """A stage's output: one writer, the same arguments whenever it resumes, metadata beside it.

    identity: what a record is of, the same in all of a group and in no other. With it processes
    may share the tasks: each writes a part (`part_of`) and skips what stands in any file.
    free: arguments that may change. `records` need not be made again, whichever file they are in.
    """

    def __init__(
        self,
        output: Path,
        arguments: dict[str, Any],
        complete: Complete,
        inputs: Iterable[Path | None] = (),
        free: Iterable[str] = (),
        identity: Callable[[dict], Any] | None = None,
        plan: Sequence[Any] = (),
    ) -> None:
        rank, world = share() if identity else (0, 1)
        path = part_of(output, rank, world)
        overwrite = arguments.get("overwrite")
        if overwrite and world > 1:
            reason = "of several processes, one would overwrite what others wrote"
            raise UserError(f"{output}: delete it: {reason}")
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(locked(path))
        for file in filter(lambda file: file.stat().st_size, files_of(output)):
            if not meta_path(file).exists():
                way_out = "move it, or name it as an input"
                reason = f"not of this command, which leaves a .meta.json beside it: {way_out}"
                raise UserError(f"{file}: {reason}")
            if not overwrite:
                same_arguments(file, arguments, ("limit", *free))
        for file in files_of(output) if overwrite else ():
            with locked(file):
                discard(file)
                discard(meta_path(file))
        super().__init__(path, complete)
        self.output, self.arguments, self.inputs = output, arguments, list(inputs)
        self.identity, self.started = identity, time.time()
        if identity:
            finished = set(map(identity, self.own))
            for file in files_of(output):
                if file != path:
                    records = complete_records(file, complete)[0]
                    self.records += [r for r in records if identity(r) not in finished]
                    finished |= set(map(identity, records))
        self.expect(plan)

    def expect(self, plan: Sequence[Any]) -> None:
        """plan: identities of all that is to be done, by all processes, in order."""
        self.plan, self.planned = plan, 0
        if self.identity:
            self.planned = len({*map(self.identity, self.records), *plan})

    def describe(self, **figures: Any) -> None:
        tasks = dict.fromkeys(p[0] if isinstance(p, tuple) else p for p in self.plan)
        known = {"tasks": list(tasks), "planned": self.planned} if tasks else {}
        write_meta(self.path, self.arguments, self.inputs, **known, **figures)

    def append(self, group: list[dict]) -> None:
        if self.file is None:  # the file grows, so it is not complete
            self.describe()
        super().append(group)

    def grow(self, groups: Iterable[list[dict]], what: str, total: int, done: int = 0) -> None:
        from tqdm import tqdm  # here, since bellman.py does without

        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        for group in tqdm(groups, what, total, initial=done, mininterval=every):
            self.append(group)

    def finish(self, order: Callable[[dict], Any] | None = None, **figures: Any) -> None:
        """Close the file, put its groups in order and complete its metadata."""
        self.close()
        own = sorted(self.own, key=order) if order else self.own
        stopped = self.path.exists() and self.path.stat().st_size > self.end and self.file is None
        if own != self.own or stopped or (not self.path.exists() and gaps(self.output)):
            write_jsonl(self.path, own)
        if gaps(self.output) or (self.own and "seconds" not in read_meta(self.path)):
            self.describe(**figures, seconds=time.time() - self.started)
        self.lock.close()
