"""Files of the stages: how they are read, checked, replaced and described.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond
these are kept. Standard library and filelock only, so that bellman.py starts at once.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qlass import UserError


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


# ---------------------------------------------------------------------------------------- records

NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # required fields
RESULT = ("task_id", "env", "method", "reward", "tokens")
NUMBERS = ("reward", "q", "q_raw")
CONDITION = ("split", "M", "N", "select", "player")  # of a result, besides task and method


def chat_fault(messages: Any) -> str:
    """Why this is no list of turns of user and assistant; empty if it is.

    The user is first, after at most one system message.
    """
    if not isinstance(messages, list):
        return "no list of turns (json.loads reads JSON text)"
    turns = ["user", "assistant"] * len(messages)
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        turns.insert(0, "system")
    for number, (turn, role) in enumerate(zip(messages, turns, strict=False), 1):
        if not isinstance(turn, dict):
            return f"turn {number} is no object with role and content"
        if turn.get("role") != role:
            return f"turn {number} is of {turn.get('role')!r:.20}, not of {role}"
        if not isinstance(turn.get("content"), str):
            return f"the content of turn {number} is {turn.get('content')!r:.40}, which is no text"
    return "" if "user" in turns[: len(messages)] else "no turns"


def check(where: str, record: dict, required: Iterable[str], kind: str) -> None:
    """UserError unless the fields are there, numbers are numbers and messages a chat."""
    mistakes = [f"no {name}" for name in required if name not in record]
    for name in NUMBERS:
        if not isinstance(record.get(name, 0), int | float):
            mistakes.append(f"{name} can't be {record[name]!r:.40}")
    if fault := "messages" in record and chat_fault(record["messages"]):
        mistakes.append(f"messages are no chat of user and assistant in turns ({fault})")
    if mistakes:
        raise UserError(f"{where}: {mistakes[0]}; is this a {kind}?")


def finite(text: str) -> float:
    """A JSON number. Python also reads NaN and Infinity; those and what overflows are refused."""
    if not abs(float(text)) <= 1e30:
        raise ValueError(f"{text} is not a number")
    return float(text)


def unique(fields: list[tuple[str, Any]]) -> dict:
    """A JSON object. Python would keep the last of several fields of one name."""
    record = dict(fields)
    if len(record) < len(fields):
        names = [name for name, _ in fields]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands twice in an object")
    return record


def parse_json(content: bytes, where: str) -> Any:
    numbers: Any = {"parse_float": finite, "parse_constant": finite}
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique, **numbers)
        if "\\ud" in text.lower():  # half a character, which no tokenizer and no file takes
            dumps(value).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def read_object(path: Path) -> dict:
    """The one JSON object that a file holds."""
    return an_object(parse_json(path.read_bytes(), str(path)), str(path))


def an_object(record: Any, where: str) -> dict:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UserError(f"{where}: not a JSON object, but a {kind}")
    return record


def records_of(path: Path, cut: bool = False) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", record) of JSON Lines, or of a JSON list as in ETO's files.

    cut: leave out a last line without its end, which a stopped writer left.
    """
    with open(path, "rb") as lines:
        if lines.peek(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, record in enumerate(parse_json(lines.read(), str(path)), 1):
                where = f"{path}: record {number}"
                yield where, an_object(record, where)
        for number, line in enumerate(lines, 1):
            if line.strip() and (line.endswith(b"\n") or not cut):
                where = f"{path}:{number}"
                yield where, an_object(parse_json(line, where), where)


def read_jsonl(path: Path) -> Iterator[dict]:
    """The records of one file. UserError names FILE:LINE of a malformed one."""
    return (record for _, record in records_of(path))


def groups_of(path: Path, cut: bool = False) -> Iterator[list[tuple[str, dict]]]:
    """Yield each tree of a file, as ("FILE:LINE", node), or each line that is of no tree.

    cut: leave out an incomplete tree, which a stopped writer left; else it is a UserError.
    """
    group: list[tuple[str, dict]] = []
    for line in records_of(path, cut):
        group.append(line)
        if len(group) == group[0][1].get("nodes", 1):
            yield group
            group = []
    if group and not cut:
        root = group[0][1]
        size = f"the tree of task {root['task_id']} has {len(group)} of {root['nodes']} nodes"
        raise UserError(f"{path}: {size}; run build_trees.py again to complete it")


def whole_groups(path: Path) -> list[dict]:
    """The records of a file that may not be there, of which one that was stopped wrote a part."""
    records = []
    for group in groups_of(path, cut=True) if path.exists() else ():
        records += [record for _, record in group]
    return records


def trees_of(path: Path, required: Iterable[str]) -> Iterator[list[dict]]:
    of_root = (*NODE, *required)
    of_node = [name for name in of_root if name != "messages"]
    kind = "q_labels.jsonl, which bellman.py writes" if "q" in of_root else "trees.jsonl"
    for group in groups_of(path, cut=not is_complete(path)):
        tree = [node for _, node in group]
        parents = {None}
        for where, node in group:
            check(where, node, of_root if node is tree[0] else of_node, kind)
            task, name = node["task_id"], node["node_id"]
            if node["parent_id"] not in parents or name in parents or task != tree[0]["task_id"]:
                place = "stands before its parent, twice, or in another task's tree"
                raise UserError(f"{where}: node {name} of task {task} {place}")
            parents.discard(None)  # the root's parent
            parents.add(name)
        yield tree


def read_trees(path: str | Path, required: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield the trees of a file and its parts, each as its list of nodes, the root first.

    Trees of parts come in the order of the tasks, each once. UserError if a part is missing or not
    finished. required: fields of a node besides NODE; "messages" of the root alone.
    """
    path = Path(path)
    if not is_complete(path):
        raise UserError(f"{path}: is not complete: the command that began it (again) completes it")
    files = files_of(path)
    if files == [path]:  # one tree in memory at a time
        yield from trees_of(path, required)
        return
    trees: dict[str, list[dict]] = {}
    for file in files:
        for tree in trees_of(file, required):
            trees.setdefault(tree[0]["task_id"], tree)
    plans = [read_meta(file).get("tasks", []) for file in files]
    for task in max(plans, key=len):
        if task in trees:
            yield trees.pop(task)
    yield from trees.values()


def read_results(path: Path) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", result) of a file and its parts; what stands in several is read once."""
    first: dict[tuple, Path] = {}
    for file in files_of(path) or [path]:
        for where, record in records_of(file, cut=not is_complete(file)):
            check(where, record, RESULT, "results.jsonl")
            if first.setdefault(identity(record), file) == file:
                yield where, record


def identity(record: dict) -> tuple:
    """What a result is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *map(record.get, CONDITION))


# --------------------------------------------------------------------------- a file and its parts


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun, Accelerate and job arrays set them; alone 0 and 1."""
    try:
        return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError:
        raise UserError("RANK and WORLD_SIZE are whole numbers: set both, or neither") from None


def part_of(output: Path, rank: int, world: int) -> Path:
    return output.with_name(f"{output.stem}.{rank}-of-{world}.jsonl") if world > 1 else output


def files_of(output: Path) -> list[Path]:
    """The files that hold an output: the one of its name, and the parts of several processes."""
    parts = output.parent.glob(f"{glob.escape(output.stem)}.[0-9]*-of-[0-9]*.jsonl")
    return [output] * output.exists() + (sorted(parts) if output.suffix == ".jsonl" else [])


def is_complete(output: Path) -> bool:
    """Whether an output is there, with all its parts, and a process saw all that was planned in it.

    A folder is complete as soon as it exists, and so is a file without metadata, which was made
    elsewhere.
    """
    if output.exists() and (output.is_dir() or not meta_path(output).exists()):
        return True
    files = files_of(output)
    metas = list(map(read_meta, files))
    planned = max((meta.get("planned", 0) for meta in metas), default=0)
    for meta in metas:
        if "seconds" in meta and meta.get("planned", 0) == planned:
            return meta.get("parts", 1) <= len(files)
    return False


def sha256(path: Path) -> str:
    """Of a file and its parts, or of a folder's files in order of their names.

    Hidden ones and the model card do not count: they change no number.
    """
    paths = files_of(path)
    if path.is_dir():
        paths = sorted(p for p in path.rglob("[!.]*") if p.is_file() and p.name != CARD)
    key = tuple((p, p.stat().st_size, p.stat().st_mtime_ns) for p in paths)
    if key not in HASHES:
        total = hashlib.sha256()
        for p in paths:
            with open(p, "rb") as content:
                hashlib.file_digest(content, lambda: total)  # adds to it, block by block
        HASHES[key] = total.hexdigest()
    return HASHES[key]


HASHES: dict[tuple, str] = {}  # so that a large model is read once
CARD = "README.md"


def fingerprint(path: str) -> str:
    """Of a data set of any size, the same for a copy: names, sizes, and up to 256 MB of content."""
    found = glob.glob(f"{glob.escape(path)}/**", recursive=True)  # through links; not hidden files
    paths = sorted(filter(os.path.isfile, found)) or [path]
    every = len(paths) // 500 + 1
    total = hashlib.sha256()
    for i, file in enumerate(paths):
        total.update(f"{os.path.relpath(file, path)} {os.path.getsize(file)}\n".encode())
        if i % every == 0:
            with open(file, "rb") as content:
                total.update(content.read(2**28 * every // len(paths)))
    return total.hexdigest()[:16]


# --------------------------------------------------------------- one writer, complete or not at all


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
            stale = f"if none does, on any machine, delete {lock.lock_file}"
            raise UserError(f"{output}: {reason}; {stale}") from None
        except (OSError, NotImplementedError) as error:  # a file system without locks
            if not os.access(output.parent, os.W_OK):
                raise
            warn(f"{output} can't be locked ({error}): start no second process that writes it")
        yield


@contextlib.contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """Where to write what takes the place of `output` when the block ends without an error."""
    output = output.resolve()  # a link stays, and may lead to a larger disk
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.draft")
    discard(draft)  # of a call that was stopped
    yield draft
    if output.is_dir():
        discard(output)
    draft.replace(output)


def discard(path: Path) -> None:
    """Delete a file or a folder, or what a link leads to, if it is there."""
    path = path.resolve()
    if path.is_dir():  # under another name, since half a checkpoint passes for one
        path = path.rename(path.with_name(f".{path.name}.{os.getpid()}"))
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file opened for writing that replaces `path` when the block ends without an error."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: a folder or a device, not a file to write: name another")
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

# Arguments that change no number, so that they may differ when a run resumes.
FREE = ["run", "out", "device", "overwrite", "debug", "save_every", "micro_tokens"]
FREE += ["gradient_checkpointing", "cache_gb", "decode_tokens", "in_flight", "server"]
FOUND = ("precision", "env_files")  # arguments that stages find out; None: not known
# Options of environments that older metadata have as flags.
OLD_FLAGS = {"webshop_data", "alfworld_data", "human_goals", "split_file", "instruction", "engine"}
OLD_FLAGS |= {"tasks", "map"}


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: Path) -> dict[str, Any]:
    """The metadata of an output or of its first part; without any, no arguments and no inputs."""
    meta: dict[str, Any] = {"arguments": {}, "inputs": {}}
    for file in (output, *files_of(output)):
        if meta_path(file).exists():
            meta |= read_object(meta_path(file))
            break
    arguments = meta["arguments"]
    for flag in sorted(OLD_FLAGS & arguments.keys()) if "env_option" in arguments else ():
        if value := arguments.pop(flag):
            name = flag.removeprefix(f"{arguments['env']}_")
            option = f"{name}={'true' if value is True else value}"
            arguments["env_option"] = sorted([*arguments["env_option"], option])
    return meta


def recorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """A stage's arguments (`vars(args)`) as the metadata hold them."""
    record = {name: str(v) if isinstance(v, Path) else v for name, v in arguments.items()}
    record.pop("argv", None)
    if record.get("server"):  # its address may change, but not its model
        record["server_model"] = record["server"].partition("#")[2]
    return record


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "numpy", "gymnasium", "scienceworld", "textworld")
    return {name: metadata.version(name) for name in packages if find_spec(name)}


def write_meta(
    output: Path, arguments: dict[str, Any], inputs: Iterable[Path | None] = (), **metrics: Any
) -> None:
    """Record arguments, versions (the earlier ones of a resumed run too), hashes, and metrics."""
    before, now = read_object(meta_path(output)) if meta_path(output).exists() else {}, versions()
    earlier = [*before.get("earlier_versions", []), before.get("versions", now)]
    if earlier := [others for others in earlier if others != now]:
        metrics["earlier_versions"] = earlier
    record = {
        "arguments": recorded(arguments),
        "argv": arguments.get("argv", []),
        "inputs": {str(path): sha256(path) for path in inputs if path and files_of(path)},
        "python": platform.python_version(),
        "versions": now,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **metrics,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


def place_of(output: Path, source: str) -> Path:
    """Where an input of an output is now: at its path or beside the output, known by content."""
    content = read_meta(output)["inputs"].get(source)
    places = [Path(source), output.parent / Path(source).name]
    there = [place for place in places if files_of(place)]
    same = [place for place in there if content in (None, sha256(place))]
    return (same or there or places)[0]


def input_of(output: Path, name: str) -> Path | None:
    """The file or folder that an output's argument `name` named; None: it named nothing."""
    source = read_meta(output)["arguments"].get(name)
    return place_of(output, source) if isinstance(source, str) else None


def changed_inputs(output: Path) -> list[Path]:
    """What an output was made from and has changed since, where it is now."""
    changed = []
    for source, content in read_meta(output)["inputs"].items():
        place = place_of(output, source)
        if files_of(place) and sha256(place) != content:
            changed.append(place)
    return changed


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of all that an output is of."""
    for source in changed_inputs(output):
        yield output, source
    for source in read_meta(output)["inputs"]:
        place = place_of(output, source)
        if place != output:
            yield from outdated(place)


def same_arguments(output: Path, arguments: dict[str, Any], free: Iterable[str] = ()) -> None:
    """Refuse to resume with other arguments, but for `free` ones, or other inputs than at first.

    What is not among the arguments, a flag of another command, must not have been set.
    """
    meta = read_meta(output)
    begun = meta["arguments"]
    now = {"server_model": begun.get("server_model")} | recorded(arguments)
    differences = []
    for name, before in begun.items():
        unset = before is None or before is False or before == []
        value = now.get(name, before if unset else None)
        if name in (*FREE, *free) or (name in FOUND and before is None):
            continue
        content = meta["inputs"].get(str(before))
        if content and value and files_of(Path(value)):  # an input, which may have been moved
            if content != sha256(Path(value)):
                change = "which has changed since" if value == before else f"not {value}"
                differences.append(f"--{name.replace('_', '-')} {before}, {change}")
        elif before != value and name == "env_files":
            differences.append("other files than --env-option names now")
        elif before != value:
            differences.append(f"--{name.replace('_', '-')} {before}, not {value}")
    named = set(map(str, begun.values()))
    others = [source for source in changed_inputs(output) if str(source) not in named]
    differences += [f"{source}, which has changed since" for source in others]
    if differences:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {', '.join(differences)}: {way_out}")
    here = versions()
    older = [f"{n} {v}" for n, v in meta.get("versions", {}).items() if here.get(n, v) != v]
    if older:
        warn(f"{output} was begun with {', '.join(older)}, which here is another: numbers differ")


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from.

    Their file (None: there is none), and how many of them were given (None: all).
    """
    folder = checkpoint.absolute()
    for _ in range(10):  # metadata may lead in a circle
        folder = (input_of(folder, "sft") or folder).absolute()
    arguments = read_meta(folder)["arguments"]
    expert = None if "sft" in arguments else input_of(folder, "expert")
    return (expert, arguments.get("n_expert")) if expert and expert.is_file() else (None, None)
