"""What every stage does besides its algorithm: flags, inputs that an earlier stage makes, errors in one line.

Standard library and filelock only, so that `bellman.py` starts at once.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from qlass import UserError
from qlass.files import is_complete, outdated, parts_of, share

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------------------- flags


def parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A stage's parser: its description is the first line of the stage's docstring."""
    usage = "%(prog)s [flags], listed by --help and --help-more"
    stage = argparse.ArgumentParser(description=doc.split("\n")[0], epilog=epilog, usage=usage)
    add = stage.add_argument
    environments = "webshop (default), alfworld, sciworld, frozenlake, or MODULE:CLASS"
    add("--env", default="webshop", metavar="NAME", help=environments)
    add("--run", type=Path, metavar="DIR", help="folder of this run's files (default: runs/ENV)")
    add("--seed", type=at_least(0, most=2**32 - 1), default=0, metavar="N", help="default: %(default)s")
    add("--overwrite", action="store_true", help="make the output again from scratch")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--help-more", action="help", help="with the flags of the environment, of sampling and of large models")
    stage.set_defaults(env_flags=[])  # envs.add_arguments adds those of the environment
    return stage


def more(parser: Any) -> Callable[..., None]:
    """`add_argument` for flags that few need, which --help-more alone shows: --help is to fit a screen."""

    def add(*names: str, **options: Any) -> None:
        hidden = {} if "--help-more" in sys.argv else {"help": argparse.SUPPRESS}
        parser.add_argument(*names, **options | hidden)

    return add


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    args.run = args.run or Path("runs") / args.env.rpartition(":")[2].lower()
    return args


def settle(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What no flag has set takes its value from the settings."""
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def at_least(low: float, kind: Callable[[str], T] = int, most: float = 1e30) -> Callable[[str], T]:  # type: ignore[assignment]
    """A flag's type: a number within [low, most]."""

    def number(text: str) -> T:
        value = kind(text)  # argparse names what is none
        if not low <= value <= most:  # also refuses nan
            bounds = f"{low:g} or more" if most == 1e30 else f"{low:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: {bounds} is expected")
        return value

    return number


# ------------------------------------------------------------------------------------------------- inputs and processes


def handed_on(args: argparse.Namespace) -> list[str]:
    """The flags that all stages of a run share."""
    argv = ["--env", args.env, "--run", str(args.run), "--seed", str(args.seed)]
    for name in ("device", "precision", *args.env_flags):
        flag, value = "--" + name.replace("_", "-"), getattr(args, name, None)
        for item in value if isinstance(value, list) else [value]:
            argv += [flag] if item is True else [flag, str(item)] if item else []
    return argv


def must_exist(*named: Path | None) -> None:
    """What was named must be there; checked before what was not named is made."""
    for path in named:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def needed(named: Path | None, default: Path, stage: str, args: argparse.Namespace) -> Path:
    """The input of a stage: what was named, or else the earlier stage's output, which is made or resumed first.

    Several processes would all make it, so they are refused with the command that does.
    """
    must_exist(named)
    if named is not None:
        return named
    if not is_complete(default):
        agent = getattr(args, "sft", None)
        if agent and stage != "sft" and agent.resolve() != (args.run / "sft").resolve():
            raise UserError(f"{default}: would be made of {args.run / 'sft'}, not of --sft {agent}: make it first")
        if parts_of(default):
            raise UserError(f"{default}: the command that wrote its parts, by one process, joins them")
        argv = handed_on(args)
        command = f"python {stage}.py {shlex.join(argv)}"
        if share()[1] > 1:
            raise UserError(f"{default}: make it first, by one process: {command}")
        state = "not complete" if default.exists() else "missing"
        print(f"{default} is {state}: making it with {command}", flush=True)
        importlib.import_module(stage).main(argv)
    for output, source in dict.fromkeys(outdated(default)):
        print(f"warning: {output} was made from another {source} than there is now: make it again", file=sys.stderr)
    return default


def my_share(tasks: list[T]) -> list[T]:
    """The tasks of this process: from the RANK-th on, every WORLD_SIZE-th."""
    rank, world = share()
    if not tasks:
        raise UserError("no tasks are left: mind --split, --skip and --limit")
    if not 0 <= rank < world <= max(1, len(tasks)):
        raise UserError(f"RANK {rank}, WORLD_SIZE {world}: from 0 on, and no more than the {len(tasks)} tasks")
    return tasks[rank::world]


# -------------------------------------------------------------------------------------------------------------- running


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C without a traceback."""
    try:
        main()
    except (UserError, OSError, ModuleNotFoundError) as error:
        if "--debug" in sys.argv:
            raise
        text = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
        hint = ": pip install it" if isinstance(error, ModuleNotFoundError) else ""
        print(f"error: {text}{hint}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command, without --overwrite, resumes from what is written", file=sys.stderr)
        sys.exit(130)
