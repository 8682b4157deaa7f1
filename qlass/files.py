"""One writer to a file or folder at a time: a lock beside it, named after its holder. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from qlass import UserError

# ---------------------------------------------------------------------------------------------------------------- locks

HELD: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()  # this process's own


def only_writer(output: Path) -> Any:
    """Hold the lock of an output for as long as the file returned is open; it ends with the process, however that ends.

    UserError if another process holds it, with its id.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(f".{output.name}.lock")
    lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(f"{output}: process {holder} is writing it; wait for it, or name another --out") from None
    except OSError:  # a file system without locks
        pass
    if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:  # released in the meantime
        lock.close()
        return only_writer(output)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    HELD[output.absolute()] = lock
    return lock


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """For as long as the block runs, unless this process has the lock already."""
    held = HELD.get(output.absolute())
    if held is not None and not held.closed:
        yield
        return
    lock = only_writer(output)
    try:
        yield
    finally:
        release(lock)


def release(lock: Any) -> None:
    if lock is not None:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


# ---------------------------------------------------------------------------------------------------------------- jsonl

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


# ------------------------------------------------------------------------------------------------------------- metadata

# Arguments that may differ between a run and its resumption: of any stage, of one that samples, of one that trains.
FREE = ("run", "out", "shard", "device", "overwrite", "debug")
SAMPLING_FREE = ("plain", "cache_gb", "decode_tokens", "in_flight", "server")
TRAINING_FREE = ("save_every", "log", "micro_tokens", "gradient_checkpointing")
HIDDEN = ("argv", "env_flags")  # of `parse` itself, no arguments


def meta_path(output: str | Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    output = Path(output)
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: str | Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """The metadata of an output, {} where there is none; UserError where they lack what is needed."""
    path = meta_path(output)
    if not path.exists():
        return {}
    way_out = f"not the metadata of {output}; delete it, or name another --out"
    try:
        meta = read_object(path)
    except UserError as error:
        raise UserError(f"{error}: {way_out}") from None
    if mistake := wrong(meta, {"arguments": is_object, "inputs": is_object, "argv": is_words}, needed):
        raise UserError(f"{path}: {mistake}: {way_out}")
    return meta


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_words(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as the metadata hold them."""
    arguments = args if isinstance(args, dict) else vars(args)
    return {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items() if k not in HIDDEN}


def write_meta(
    output: str | Path, args: argparse.Namespace, inputs: Iterable[Path | None] = (), **figures: Any
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
        "arguments": recorded(args),
        "argv": (args if isinstance(args, dict) else vars(args)).get("argv", []),
        "inputs": {str(p): sha256(Path(p)) for p in inputs if p and Path(p).exists()},
        "commit": commit or None,
        "python": platform.python_version(),
        "versions": versions,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


DIGESTS: dict[tuple, str] = {}  # of the files of this process, by (path, size, time)


def sha256(path: Path) -> str:
    """Of a file, or of a folder's files one after the other in order of their names."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    key = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if key not in DIGESTS:
        digest = hashlib.sha256()
        for file in files:
            with open(file, "rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
        DIGESTS[key] = digest.hexdigest()
    return DIGESTS[key]


def located(arguments: dict[str, Any], named: str | Path, output: Path) -> Path | None:
    """The file or folder that `output` was made from: of a moved run folder where it lies now, else where the metadata
    say or, of one that came from elsewhere, beside the output."""
    named, places = Path(named), [Path(named)]
    folder = Path(arguments["out"]).parent if arguments.get("out") else None
    if folder and named.is_absolute() == folder.is_absolute():
        places.insert(0, output.parent / os.path.relpath(named, folder))
    if not (folder and named.is_relative_to(folder)):
        places.append(output.parent / named.name)
    return next((path for path in places if path.exists()), None)


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of an output and of all that it comes from."""
    meta = read_meta(output)
    for source, digest in meta.get("inputs", {}).items():
        path = located(meta.get("arguments", {}), source, output)
        if path and path.resolve() != output.resolve():  # labels may be made anew in their own place
            if sha256(path) != digest:
                yield output, path
            yield from outdated(path)


def same_arguments(
    output: str | Path, args: argparse.Namespace, free: Iterable[str] = (), inputs_too: bool = True,
    way_out: str = "--overwrite starts again, another --out or --run keeps both",
) -> None:  # fmt: skip
    """Resuming is only sound with the arguments and the inputs that the output was begun with.

    An input that lies elsewhere now, as in a run folder that was moved, is the same if its content is.
    """
    old = read_meta(output, ["arguments", "inputs"])
    if not old:
        return
    begun, inputs = old["arguments"], dict(old["inputs"])
    now = {name: value for name, value in recorded(args).items() if name not in (*FREE, *free)}
    changed = {name: value for name, value in now.items() if begun.get(name, value) != value}
    for name, value in list(changed.items()):
        digest = inputs.get(begun[name]) if is_text(begun[name]) else None
        if value and digest and Path(value).exists() and sha256(Path(value)) == digest:
            del changed[name], inputs[begun[name]]
    if changed:
        flags = ", ".join(f"--{n.replace('_', '-')} {begun[n]}, not {value}" for n, value in changed.items())
        raise UserError(f"{output} was begun with {flags}: {way_out}")
    for source, digest in inputs.items() if inputs_too else ():
        if Path(source).exists() and sha256(Path(source)) != digest:
            raise UserError(f"{output} was begun with another {source}, which has changed since: {way_out}")


# ------------------------------------------------------------------------------------------------------- demonstrations


def read_trajectories(path: Path) -> Iterator[tuple[Any, dict]]:
    """Each trajectory and the record that it is from, in our layout or in ETO's and QLASS's.

    Theirs has `conversations` of {"from", "value"}, as a JSON list or as JSONL.
    """
    from qlass.chat import State

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
        if mistake := wrong(record, EXPERT_KINDS):
            raise UserError(f"{where}: {mistake} (data/README.md shows the layout)")
        yield State.load(turns, record.get("task") or ""), record


EXPERT_KINDS = {"task_id": maybe(is_name), "task": maybe(is_text), "reward": maybe(is_number)}


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


def first_observation(state: Any) -> tuple[int, str]:
    """Which user message of a trajectory holds the first observation, and its text."""
    told = [content for role, content in state.messages if role == "user"]
    agreement = next(content for role, content in state.messages if role == "assistant")
    at = int(len(told) > 1 and len(agreement) < 10)  # instruction, "OK", first observation
    return at, told[at].strip()


def known_id(record: dict, env: Any) -> str | None:
    """The id of a record's task, its own or ETO's; None: only its words tell the task."""
    return env.published_id(record) if record.get("task_id") is None else str(record["task_id"])


def by_agent(record: dict) -> bool:
    """Whether an agent did this itself: self-training keeps it in one file with the demonstrations."""
    return record.get("source") == "policy"


def actions_by_task(path: Path, env: Any, most: int | None = None) -> dict[str, list[str]]:
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
