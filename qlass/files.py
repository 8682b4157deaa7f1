"""The files between the stages: what a line holds, how it is read, how files grow, are replaced and are described.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond the schema are kept.
Standard library and filelock only.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from filelock import FileLock, Timeout

from qlass import UserError

T = TypeVar("T")
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


# ----------------------------------------------------------------------------------- one writer, complete or not at all


def only_writer(output: Path) -> FileLock:
    """The lock of an output, beside it, until `release` or the end of this process, however that comes.

    Who holds it may take it again. UserError, with its id, where another process holds it.
    """
    path = output.absolute().with_name(f".{output.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text() if path.exists() else ""
        raise UserError(f"{output}: process {holder} is writing it; wait for it, or name another --out") from None
    path.write_text(str(os.getpid()))
    return lock


def release(lock: FileLock | None) -> None:
    if lock:
        if lock.lock_counter == 1:
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    lock = only_writer(output)
    try:
        yield
    finally:
        release(lock)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Any]:
    """A file opened for writing that takes the place of `path` when the block ends without an error."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: a folder or a device, where a file is to be written: name another")
    draft = path.with_name(f".{path.name}.draft")
    with locked(path):
        try:
            with open(draft, "w", encoding="utf-8") as out:
                yield out
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Write all records, or leave the old file as it was."""
    with replacing(path) as out:
        out.writelines(map(dumps, records))


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of the checkpoint `folder` when the block ends without an error."""
    draft = folder.with_name(folder.name + ".draft")
    with locked(folder):
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process
        draft.mkdir(parents=True)
        try:
            yield draft
            discard(folder)
            draft.rename(folder)
        except Exception as error:
            if "os error" in str(error):  # of safetensors, which knows no OSError
                raise UserError(f"{folder}: {error}: make room, and the same command resumes") from None
            raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)


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
    folder = folder if folder.name else folder.absolute()  # "." has no name
    if read and folder.resolve() == Path(read).resolve():
        raise UserError(f"{folder}: is what the training starts from: name another --out (of a learner: --name)")
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder}: holds something else than a checkpoint, which would be lost: name another --out")
    return folder


# ------------------------------------------------------------------------------------------------------------- metadata

# Arguments that may differ between a run and its resumption: of any stage, of one that samples, of one that trains.
FREE = ("run", "out", "device", "overwrite", "debug")
SAMPLING_FREE = ("plain", "cache_gb", "decode_tokens", "in_flight", "server")
TRAINING_FREE = ("save_every", "log", "micro_tokens", "gradient_checkpointing")


def meta_path(output: str | Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    output = Path(output)
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: str | Path) -> dict[str, Any]:
    """The metadata of an output, {} where there are none."""
    path = meta_path(output)
    if not path.exists():
        return {}
    way_out = f": not the metadata of {output}; delete it, or name another --out"
    record = parse_json(path.read_bytes(), str(path), way_out)
    parts = {"arguments": {}, "inputs": {}} | record if isinstance(record, dict) else {"arguments": None}
    if not all(isinstance(parts[name], dict) for name in ("arguments", "inputs")):
        raise UserError(f"{path}: an object with arguments and inputs is expected{way_out}")
    return parts


def recorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """A stage's arguments (`vars(args)`) as the metadata hold them."""
    hidden = ("argv", "env_flags")  # of cli.parse itself
    return {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items() if k not in hidden}


def write_meta(
    output: str | Path, arguments: dict[str, Any], inputs: Iterable[Path | None] = (), **figures: Any
) -> None:
    """How `output` came about: arguments, versions, commit, hashes of the inputs, and the figures of the run.

    A commit ends in -dirty where files were changed since.
    """
    versions = {}
    for package in ("torch", "transformers", "numpy", "gymnasium"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit, clone = "", Path(__file__).parents[1]
    with contextlib.suppress(OSError):  # a machine without git
        if (clone / ".git").exists():  # else it is installed, perhaps below another project's repository
            command = ["git", "-C", clone, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "arguments": recorded(arguments),
        "argv": arguments.get("argv", []),
        "inputs": {str(p): sha256(Path(p)) for p in inputs if p and Path(p).exists()},
        "commit": commit or None,
        "python": platform.python_version(),
        "versions": versions,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


def sha256(path: Path) -> str:
    """Of a file, or of a folder's files one after the other in order of their names."""
    paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return digest(tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths))


@functools.cache
def digest(files: tuple[tuple[str, int, int], ...]) -> str:
    """Of files by path, size and time: a large model is read once."""
    total = hashlib.sha256()
    for path, *_ in files:
        with open(path, "rb") as content:
            while chunk := content.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()


def same_arguments(output: str | Path, arguments: dict[str, Any], free: Iterable[str] = ()) -> None:
    """Resuming is only sound with the arguments and inputs that the output was begun with; UserError names others.

    An input is the same if its content is, wherever it lies.
    """
    begun = read_meta(output)
    hashes = dict(begun.get("inputs", {}))
    changed = []
    for name, value in recorded(arguments).items() if begun else ():
        before = begun["arguments"].get(name, value)
        content = hashes.pop(before, None) if is_text(before) else None
        is_input = bool(content and value and Path(value).exists())
        same = sha256(Path(value)) == content if is_input else before == value
        if not same and name not in (*FREE, *free):
            flag = f"--{name.replace('_', '-')} {before}"
            changed.append(f"another {flag}, which has changed since" if before == value else f"{flag}, not {value}")
    for source, content in hashes.items():  # which no argument names
        if Path(source).exists() and sha256(Path(source)) != content:
            changed.append(f"another {source}, which has changed since")
    if changed:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {', '.join(changed)}: {way_out}")


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of an output and of all that it comes from."""
    for source, content in read_meta(output).get("inputs", {}).items():
        path = Path(source)
        if path.exists() and path.resolve() != output.resolve():  # labels may be made anew in their own place
            if sha256(path) != content:
                yield output, path
            yield from outdated(path)


def is_complete(output: Path) -> bool:
    """A checkpoint's folder is, once it is there; a file when its metadata say in how many seconds it was made.

    A file from elsewhere has no metadata, but content.
    """
    if not output.is_file():
        return output.exists()
    record = read_meta(output)
    return "seconds" in record if record else output.stat().st_size > 0


def input_of(output: Path, name: str) -> Path | None:
    """Where the file or folder lies that an output's argument `name` named: there or, if a folder moved, beside it."""
    named = read_meta(output).get("arguments", {}).get(name)
    places = [Path(named), output.parent / Path(named).name] if is_text(named) else []
    return next((path for path in places if path.exists()), None)


def lineage(checkpoint: Path) -> Iterator[tuple[Path, dict]]:
    """A checkpoint and those it was trained from, down to the one that was cloned, with the arguments of each."""
    start: Path | None = checkpoint.absolute()
    for _ in range(10):  # metadata may lead in a circle
        if start:
            arguments = read_meta(start).get("arguments", {})
            yield start, arguments
            start = None if is_cloned(arguments) else input_of(start, "sft")


def is_cloned(arguments: dict) -> bool:
    """By sft.py: a learner (experiments/learning.py) may have demonstrations too, and is trained from a clone."""
    return is_text(arguments.get("expert")) and "budget_in" not in arguments


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The file of demonstrations that a checkpoint, or the one it was trained from, was cloned from (None: there is no
    such file), and how many of them it was given (None: all)."""
    *_, (folder, arguments) = lineage(checkpoint)
    expert = input_of(folder, "expert") if is_cloned(arguments) else None
    return (expert, arguments.get("n_expert")) if expert and expert.is_file() else (None, None)


# ------------------------------------------------------------------------------------------------------ files that grow


def complete_records(path: Path, complete: Callable[[list[dict]], int]) -> tuple[list[dict], int]:
    """The records of a file that complete groups of lines are made of (a tree, an episode's result), and their bytes.

    `complete(records)` says how many of the first records form such groups. A stop leaves the last line unfinished.
    """
    records: list[dict] = []
    ends = [0]
    at = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            at += len(line)
            if line.strip() and line.endswith(b"\n"):
                where = f"{path}:{number}"
                records.append(an_object(parse_json(line, where), where))
                ends.append(at)
    try:
        keep = complete(records)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        mistake = f"lines without {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: {mistake}: from another stage? Name another --out") from None
    return records[:keep], ends[keep]


class Resumable:
    """A JSONL file that grows by groups of lines and survives a stop at any byte: what is incomplete is cut off."""

    def __init__(self, path: str | Path, complete: Callable[[list[dict]], int]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records, end = complete_records(self.path, complete)
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the stage)
        self.file.truncate(end)

    def append(self, group: list[dict]) -> None:
        rest = memoryview("".join(map(dumps, group)).encode())
        while rest:  # a disk that is nearly full takes a part
            rest = rest[self.file.write(rest) :]
        self.records += group

    def close(self) -> None:
        self.file.close()


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE of this process, as torchrun, `accelerate launch` and job arrays set them; alone 0 and 1."""
    try:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise UserError("RANK and WORLD_SIZE: whole numbers are expected") from None
    if not 0 <= rank < world:
        raise UserError(f"RANK {rank}: is 0 to WORLD_SIZE - 1, and WORLD_SIZE is {world}")
    return rank, world


def progress(items: Iterable[T], what: str, total: int | None = None, done: int = 0) -> Iterator[T]:
    """The items, with a bar; off a terminal it is drawn every half minute."""
    from tqdm import tqdm

    seldom = {} if sys.stderr.isatty() else {"mininterval": 30, "delay": 30, "ascii": True}
    yield from tqdm(items, what, total, initial=done, **seldom)


class Output:
    """A stage's JSONL output: one writer, the same arguments whenever it resumes, metadata beside it.

    complete: as of `complete_records`. free: arguments that may change from call to call. identity: what a record is
    of, the same in all of a group and in no other. With it processes may share the tasks (`share`): each writes a part
    and skips what is in the output or in any part; the last one joins them, as does a later call by one process.
    """

    def __init__(
        self, path: str | Path, arguments: dict[str, Any], complete: Callable[[list[dict]], int],
        inputs: Iterable[Path | None] = (), free: Iterable[str] = (), identity: Callable[[dict], Any] | None = None,
    ) -> None:  # fmt: skip
        self.out = Path(path)
        self.arguments, self.inputs = arguments, list(inputs)
        self.free = ("limit", *free)
        self.complete, self.identity = complete, identity
        self.started = time.time()
        self.figures: dict[str, Any] = {}  # for the metadata, known before the work is done
        rank, self.world = share() if identity else (0, 1)
        if self.world > 1 and arguments.get("overwrite"):
            raise UserError(
                f"{self.out}: delete it: of several processes, one would overwrite what others have written"
            )
        own = self.part(rank) if self.world > 1 else self.out
        self.open(own, only_writer(own))

    def part(self, rank: int | str, world: int | str = "") -> Path:
        return self.out.with_name(f"{self.out.stem}.{rank}-of-{world or self.world}.jsonl")

    def open(self, path: Path, lock: FileLock) -> None:
        """Read what is complete in a file that is locked; if it is the output, take over the parts."""
        parts = sorted(path.parent.glob(self.part("*", "*").name)) if self.identity else []
        others = [other for other in (self.out, *parts) if other != path and other.exists()]
        if self.arguments.get("overwrite"):
            while others:
                delete(others.pop())
            delete(path)
        for old in (path, *others):
            if old.exists() and old.stat().st_size:
                same_arguments(old, self.arguments, self.free)
                if not read_meta(old) and not complete_records(old, self.complete)[0]:
                    raise UserError(f"{old}: holds something else, which would be lost: name another --out")
        self.path, self.lock, self.grown = path, lock, False
        self.file = Resumable(path, self.complete)
        self.earlier = read_meta(path) if self.file.records else {}  # of the calls before this one
        self.elsewhere: list[dict] = []
        for other in others:
            present = set(map(self.identity, self.records))
            records, _ = complete_records(other, self.complete)
            self.elsewhere += [record for record in records if self.identity(record) not in present]
        if path == self.out:
            joined, self.elsewhere = self.elsewhere, []
            self.append(joined)
            for part in others:
                delete(part)
        if path != self.out or not self.file.records:  # a call that is stopped at once is known by its arguments too
            self.describe()

    @property
    def records(self) -> list[dict]:
        """What need not be done again: the file's and, where tasks are shared, what other processes have written."""
        return self.elsewhere + self.file.records

    def describe(self, **figures: Any) -> None:
        write_meta(self.path, self.arguments, self.inputs, **self.figures, **figures)

    def append(self, group: list[dict]) -> None:
        if group and not self.grown:  # before the first line, so that no file is ever without its metadata
            self.describe()
            self.grown = True
        self.file.append(group)

    def grow(self, groups: Iterable[list[dict]], what: str, total: int, done: int = 0) -> None:
        for group in progress(groups, what, total, done):
            self.append(group)

    def join(self) -> None:
        """This process has done its share. The last one to say so goes on with the output, joined of all parts."""
        if self.path == self.out or self.file.file.closed:
            return
        self.file.close()
        self.elsewhere = []
        release(self.lock)
        self.describe(seconds=time.time() - self.started)
        if all(is_complete(self.part(rank)) for rank in range(self.world)):
            try:
                lock = only_writer(self.out)
            except UserError:  # another process joins them
                return
            self.open(self.out, lock)

    def finish(self, order: Callable[[dict], Any] | None = None, **figures: Any) -> None:
        """Close the file; if it is the output, put its groups in order and complete its metadata."""
        self.join()
        self.file.close()
        if self.path != self.out:
            return
        records = sorted(self.records, key=order) if order else self.records
        if records != self.file.records:
            write_jsonl(self.path, records)
            self.file.records = records
        if self.grown or "seconds" not in read_meta(self.path):  # a stop may have come behind the last line
            self.describe(**figures, seconds=time.time() - self.started)
        release(self.lock)


def delete(output: Path) -> None:
    """A file and its metadata, which no other process may be writing."""
    with locked(output):
        output.unlink(missing_ok=True)
        meta_path(output).unlink(missing_ok=True)
