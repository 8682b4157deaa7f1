"""The files between the stages: JSON Lines, a `<name>.meta.json` beside each output, and how a stage finds its input.

Standard library only, so that `bellman.py` and a reader without torch can use it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
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
from typing import Any, NoReturn

ENVIRONMENTS = ("webshop", "alfworld", "sciworld", "frozenlake")


class UserError(Exception):
    """A mistake that its message tells how to mend; the scripts print that one line and exit with code 2."""


# ---------------------------------------------------------------------------------------------------------- JSON Lines


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
            yield whole(tree, path)
            tree = []
        tree.append(node)
    if tree:
        yield whole(tree, path)


def whole(tree: list[dict], path: str | Path) -> list[dict]:
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


class Resumable:
    """A JSONL file that grows by groups of lines (a tree, an episode's result) and survives a stop at any byte.

    `complete(lines)` tells from the lines read so far how many of them form whole groups; the rest is cut off.
    """

    def __init__(self, path: str | Path, complete: Callable[[list[dict]], int]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[dict] = []
        ends: list[int] = []  # of each line, in bytes
        if self.path.exists():
            with open(self.path, "rb") as lines:
                at = 0
                for line in lines:
                    at += len(line)
                    if line.strip() and line.endswith(b"\n"):  # a stop leaves the last line unfinished
                        ends.append(at)
            self.records = list(itertools.islice(read_jsonl(self.path), len(ends)))
        try:
            keep = complete(self.records)
        except KeyError as error:
            raise UserError(f"{self.path}: lines without {error}, from another stage? Name another --out") from None
        del self.records[keep:]
        self.file = open(self.path, "ab")  # noqa: SIM115  (open for the life of the stage)
        self.file.truncate(ends[keep - 1] if keep else 0)

    def append(self, group: Iterable[dict]) -> None:
        self.file.write("".join(map(dumps, group)).encode())
        self.file.flush()

    def close(self) -> None:
        self.file.close()


# --------------------------------------------------------------------------------------------------- metadata, chaining


def meta_path(output: str | Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    output = Path(output)
    return output.with_name(output.stem + ".meta.json")


def write_meta(output: str | Path, args: argparse.Namespace, inputs: Iterable[Any] = (), **figures: Any) -> None:
    """How `output` came about: arguments, versions, commit, hashes of the inputs, and the figures of the run."""
    versions = {}
    for package in ("torch", "transformers", "numpy", "gymnasium"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit = ""
    with contextlib.suppress(OSError):  # a machine without git
        command = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
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
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def same_arguments(output: str | Path, args: argparse.Namespace, names: Iterable[str]) -> None:
    """Resuming is only sound with the arguments and the inputs that the file was begun with."""
    path = meta_path(output)
    if Path(output).exists() and path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        way_out = "delete it, or name another --out or --run"
        for name in ("env", "seed", "webshop_data", "alfworld_data", "engine", "env_option", *names):
            now = getattr(args, name)
            now = str(now) if isinstance(now, Path) else now
            before = old["arguments"].get(name, now)
            if before != now:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{output} was begun with {flag} {before}, not {now}: {way_out}")
        for source, digest in old["inputs"].items():
            if Path(source).exists() and sha256(Path(source)) != digest:
                raise UserError(f"{output} was begun with another {source}, which has changed since: {way_out}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every stage shares; `stage_argv` hands them on when one stage makes another's missing input."""
    add = parser.add_argument
    add("--env", default="webshop", choices=ENVIRONMENTS)
    add("--run", type=Path, help="folder of this run's files (default: runs/ENV)")
    add("--seed", type=int, default=0)
    add("--webshop-data", metavar="DIR", help="WebShop's own files (default: the bundled catalogue)")
    add("--alfworld-data", metavar="DIR", help="ALFWorld's games (default: $ALFWORLD_DATA, bundled)")
    engines = ["python", "textworld"]
    add("--engine", choices=engines, metavar="NAME", help="ALFWorld's: python (ours, the default) or textworld")
    add("--env-option", action="append", default=[], metavar="NAME=VALUE", help="any other option of the environment")


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    def error(message: str) -> NoReturn:
        raise UserError(f"{message} (python {parser.prog} --help lists the flags)")

    parser.error = error  # type: ignore[method-assign]
    parser.usage = "python %(prog)s [flags]"  # all of them would fill the screen twice
    args = parser.parse_args(argv)
    if args.engine and args.env != "alfworld":
        raise UserError(f"--engine {args.engine}: for alfworld, not for {args.env}; leave it out")
    args.run = args.run or Path("runs") / args.env
    return args


def stage_argv(args: argparse.Namespace) -> list[str]:
    argv = ["--env", args.env, "--run", str(args.run), "--seed", str(args.seed)]
    for flag in ("webshop_data", "alfworld_data", "engine"):
        if getattr(args, flag):
            argv += ["--" + flag.replace("_", "-"), getattr(args, flag)]
    return argv + [word for option in args.env_option for word in ("--env-option", option)]


def must_exist(*named: Path | None) -> None:
    """What was named must be there; to be told before what was not named is made."""
    for path in named:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def needed(named: Path | None, default: Path, stage: str, argv: list[str]) -> Path:
    """The input of a stage: what was named, or what the earlier stage makes by its defaults where it is missing."""
    must_exist(named)
    if named is not None:
        return named
    if not default.exists():
        print(f"{default} is missing: making it with python {stage}.py {' '.join(argv)}", flush=True)
        importlib.import_module(stage).main(argv)
    return default


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C without a traceback."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from what is written", file=sys.stderr)
        sys.exit(130)
