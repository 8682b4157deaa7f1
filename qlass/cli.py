"""What every stage does besides its algorithm: flags, inputs that an earlier stage makes, errors in one line.

Standard library and filelock only, so that `bellman.py` and every --help start at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from qlass import UserError
from qlass.files import is_complete, outdated, parts_of, share

T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HANDED_ON = {  # flags that a stage hands on where it makes a missing input, and the stages that know them
    "device": ("sft", "build_trees", "bellman", "train_qnet"),
    "server": ("build_trees", "bellman"),
    "load_in": ("build_trees", "bellman"),
}

# --------------------------------------------------------------------------------------------------------------- flags


def parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A stage's parser: its description is the first line of the stage's docstring."""
    stage = argparse.ArgumentParser(description=doc.split("\n")[0], epilog=epilog, usage="%(prog)s [flags]")
    add = stage.add_argument
    environments = "webshop (default), alfworld, sciworld, frozenlake, or MODULE:CLASS"
    add("--env", default="webshop", metavar="NAME", help=environments)
    add("--run", type=Path, metavar="DIR", help="folder of this run's files (default: runs/ENV)")
    add("--seed", type=at_least(0, below=2**32), default=0, metavar="N", help="default: %(default)s")
    add("--overwrite", action="store_true", help="make the output again from scratch")
    add("--debug", action="store_true", help="show the traceback of an error")
    rest = "with the flags of the environment, of sampling and of large models"
    add("--help-more", action=HelpMore, nargs=0, help=rest)
    stage.set_defaults(env_flags=[])  # envs.add_arguments adds those of the environment

    def error(message: str) -> NoReturn:
        raise UserError(f"{message} (--help-more lists the flags)")

    stage.error = error  # type: ignore[method-assign]
    return stage


class HelpMore(argparse.Action):
    """--help-more: --help, with the flags that `more` has hidden."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        for action in parser._actions:
            action.help = getattr(action, "hidden_help", action.help)
        parser.print_help()
        parser.exit()


def more(parser: argparse.ArgumentParser, *adders: Callable[[argparse.ArgumentParser], Any]) -> None:
    """Add flags that few need, which --help-more alone shows: --help is to fit a screen."""
    visible = len(parser._actions)
    for add in adders:
        add(parser)
    for action in parser._actions[visible:]:
        action.hidden_help = action.help  # type: ignore[attr-defined]
        action.help = argparse.SUPPRESS


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    args.run = args.run or Path("runs") / args.env.rpartition(":")[2].lower()
    return args


def choices(paper: dict[str, Any], tiny: dict[str, Any]) -> Callable[[str], str]:
    """For --help: the value of a setting for pretrained models (the paper's) and for the tiny one."""

    def defaults(name: str) -> str:
        one, other = ("all" if settings[name] is None else settings[name] for settings in (paper, tiny))
        return f"default: {one}" if one == other else f"default: {one}; tiny: {other}"

    return defaults


def settle(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What no flag has set takes its value from the settings."""
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def at_least(low: float, kind: Callable[[str], T] = int, below: float = 1e30) -> Callable[[str], T]:  # type: ignore[assignment]
    """A flag's type: a number within [low, below]."""

    def number(text: str) -> T:
        value = kind(text)  # argparse names what is none
        if not low <= value <= below:  # also refuses nan
            bounds = f"{low} or more" if below == 1e30 else f"{low} to {below}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: {bounds}")
        return value

    number.__name__ = kind.__name__
    return number


# ------------------------------------------------------------------------------------------------- inputs and processes


def command_line(stage: str) -> str:
    """How a person calls a stage: by its file in a clone, or by its installed command."""
    installed = Path(sys.argv[0]).name.startswith("qlass-")
    return f"qlass-{stage.replace('_', '-')}" if installed else f"python {stage}.py"


def handed_on(args: argparse.Namespace, stage: str = "") -> list[str]:
    """The flags that all stages of a run share, and those of HANDED_ON that `stage` knows."""
    argv = ["--env", args.env, "--run", str(args.run), "--seed", str(args.seed)]
    for name in (*(name for name, stages in HANDED_ON.items() if stage in stages), *args.env_flags):
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
        state = f"{default} is {'not complete' if default.exists() else 'missing'}"
        agent = getattr(args, "sft", None)
        if agent and stage != "sft" and agent.resolve() != (args.run / "sft").resolve():
            raise UserError(f"{state}, and would be made of {args.run / 'sft'}, not of --sft {agent}: make it first")
        if parts_of(default):
            raise UserError(f"{state}: the command that wrote its parts, by one process, joins them")
        argv = handed_on(args, stage)
        command = f"{command_line(stage)} {shlex.join(argv)}"
        if share()[1] > 1:
            raise UserError(f"{state}: make it first, by one process: {command}")
        maker = importlib.import_module(stage)
        print(f"{state}: making it with {command} ({maker.TAKES})", flush=True)
        maker.main(argv)
    for output, source in dict.fromkeys(outdated(default)):
        way_out = f"{command_line(stage)} --overwrite makes it again" if output == default else "make it again first"
        print(f"warning: {output} was made from another {source} than there is now: {way_out}", file=sys.stderr)
    return default


def my_share(tasks: list[T]) -> list[T]:
    """The tasks of this process: from the RANK-th on, every WORLD_SIZE-th."""
    rank, world = share()
    if 0 < len(tasks) < world:
        raise UserError(f"WORLD_SIZE {world}: there are {len(tasks)} tasks, so at most as many processes")
    return tasks[rank::world]


# -------------------------------------------------------------------------------------------------------------- running


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C and SIGTERM without a traceback."""

    def terminated(*_: Any) -> NoReturn:
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, terminated)  # as a cluster sends it before it kills; the default leaves drafts
    try:
        main()
    except Exception as error:
        of_system = isinstance(error, OSError) or "os error" in str(error)  # that of safetensors
        if not (of_system or isinstance(error, UserError)):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        text = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
        if any(f"os error {number}" in text or getattr(error, "errno", None) == number for number in NO_ROOM):
            text += ": make room; what was complete is kept, and the same command resumes"
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print("\nstopped; the same command, without --overwrite, resumes from what is written", file=sys.stderr)
        sys.exit(143 if stop.args else 130)


def command() -> None:
    """The installed commands: qlass-build-trees is build_trees.py."""
    name = Path(sys.argv[0]).stem.removeprefix("qlass-").replace("-", "_")
    run_stage(importlib.import_module(name).main)
