"""What every stage does besides its algorithm: arguments, inputs made by earlier stages, metadata, errors.

Standard library only, so that `bellman.py` and a reader without torch can use it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from environments import UserError
from qlass.jsonl import replacing

ENVIRONMENTS = ("webshop", "alfworld", "sciworld", "frozenlake")


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
        command = ["git", "-C", Path(__file__).parents[1], "rev-parse", "HEAD"]
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
