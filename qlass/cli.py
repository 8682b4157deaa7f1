"""What every stage does besides its algorithm: flags, inputs that an earlier stage makes, outputs that resume, errors.

Standard library only, so that `bellman.py` and a reader without torch can use it.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from qlass import UserError
from qlass.files import (
    Resumable,
    complete_records,
    dumps,
    meta_path,
    only_writer,
    outdated,
    read_meta,
    release,
    same_arguments,
    write_jsonl,
    write_meta,
)

T = TypeVar("T")

# ----------------------------------------------------------------------------------------------------------- arguments


def parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A stage's parser: its description is the first line of the stage's docstring."""
    made = argparse.ArgumentParser(description=doc.split("\n")[0], epilog=epilog, usage=f"{command_line()} [flags]")
    said = "webshop (default), alfworld, sciworld, frozenlake, or MODULE:CLASS"
    made.add_argument("--env", default="webshop", metavar="NAME", help=said)
    made.add_argument("--run", type=Path, metavar="DIR", help="folder of this run's files (default: runs/ENV)")
    made.add_argument("--seed", type=at_least(0, below=2**32), default=0, metavar="N", help="default: %(default)s")
    made.add_argument("--overwrite", action="store_true", help="make the output again from scratch")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    said = "with the flags of the environment, of sampling and of large models"
    made.add_argument("--help-more", action=HelpMore, nargs=0, const=[], help=said)

    def error(message: str) -> NoReturn:
        raise UserError(f"{message} ({command_line()} --help lists the flags)")

    made.error = error  # type: ignore[method-assign]
    made.set_defaults(env_flags=[])  # envs.add_arguments adds those of the environment
    return made


def command_line(stage: str | None = None) -> str:
    """How a person calls this stage or that one: by its file in a clone, or by its installed command."""
    called = Path(sys.argv[0]).name
    if called.startswith("qlass-"):
        return f"qlass-{stage.replace('_', '-')}" if stage else called
    module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "").removesuffix(".__main__")
    if stage is None and module.startswith("experiments."):
        return f"python -m {module}"
    return f"python {stage}.py" if stage else f"python {called}"


class HelpMore(argparse.Action):
    """--help-more: --help, with the flags that `more` has hidden."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        for action, said in self.const:
            action.help = said
        parser.print_help()
        parser.exit()


def more(made: argparse.ArgumentParser, *adders: Callable[[argparse.ArgumentParser], Any]) -> None:
    """Add flags that few need, which --help-more alone shows: --help is to fit a screen."""
    shown = list(made._actions)
    for add in adders:
        add(made)
    hidden = next(action.const for action in made._actions if isinstance(action, HelpMore))
    for action in made._actions:
        if action not in shown:
            hidden.append((action, action.help))
            action.help = argparse.SUPPRESS


def parse(made: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = made.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    args.run = args.run or Path("runs") / args.env.rpartition(":")[2].lower()
    my_share([], getattr(args, "shard", None))  # a mistake is said before anything is made
    return args


def choices(paper: dict[str, Any], tiny: dict[str, Any]) -> Callable[[str], str]:
    """For --help: the value of a setting for pretrained models (the paper's) and for the tiny one."""

    def said(name: str) -> str:
        one, other = (("all" if s[name] is None else s[name]) for s in (paper, tiny))
        return f"default: {one}" if one == other else f"default: {one}; tiny: {other}"

    return said


def settle(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What no flag has set takes its value from the settings."""
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def at_least(low: float, kind: Callable[[str], T] = int, below: float = float("inf")) -> Callable[[str], T]:  # type: ignore[assignment]
    """A flag's type: a number within [low, below]."""

    def number(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None
        if not low <= value <= below or value == float("inf"):  # also refuses nan
            bounds = f"{low} or more" if below == float("inf") else f"{low} to {below}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: {bounds}")
        return value

    return number


# ---------------------------------------------------------------------------------------------------------- the inputs


def must_exist(*named: Path | None) -> None:
    """What was named must be there; checked before what was not named is made."""
    for path in named:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def needed(named: Path | None, default: Path, stage: str, args: argparse.Namespace) -> Path:
    """The input of a stage: what was named, or else the earlier stage's output, made now if it is missing.

    What a stopped stage left resumes first, if it was begun with the arguments that would make it now. One begun with
    others is left for the user to resume, so that a failed large model never becomes a tiny one, nor ten trees a run's.
    """
    must_exist(named)
    if named is not None:
        return named
    if not is_complete(default):
        agent = getattr(args, "sft", None)
        if agent and stage != "sft" and agent.resolve() != (args.run / "sft").resolve():
            said = f"what would be made now is of {args.run / 'sft'}, not of --sft {agent}"
            raise UserError(f"{default}: missing or not complete, and {said}: make it first, or name another")
        made_by = importlib.import_module(stage)
        argv = handed_on(args)
        if meta_path(default).exists():
            begun = read_meta(default).get("argv", argv)
            if begun != argv:  # not run from here: a folder may come from a stranger
                command = f"{command_line(stage)} {shlex.join(word for word in begun if word != '--overwrite')}"
                raise UserError(f"{default} was begun and is not complete: resume it with {command}")
        state = "not complete" if default.exists() else "missing"
        said = f"{default} is {state}: making it with {command_line(stage)} {shlex.join(argv)} ({made_by.TAKES})"
        print(said, flush=True)
        made_by.main(argv)
    for made, source in dict.fromkeys(outdated(default)):
        way_out = f"{command_line(stage)} --overwrite makes it again" if made == default else "make it again first"
        print(f"warning: {made} was made from another {source} than there is now: {way_out}", file=sys.stderr)
    return default


def is_complete(output: Path) -> bool:
    """A checkpoint's folder is, once it is there; a file when its metadata say in how many seconds it was made.

    A file from elsewhere has no metadata, but content.
    """
    if not output.is_file():
        return output.exists()
    made = read_meta(output)
    return "seconds" in made if made else output.stat().st_size > 0


def handed_on(args: argparse.Namespace) -> list[str]:
    """The flags that all stages of a run share."""
    argv = ["--env", args.env, "--run", str(args.run), "--seed", str(args.seed)]
    for name in args.env_flags:
        flag, value = "--" + name.replace("_", "-"), getattr(args, name)
        for given in value if isinstance(value, list) else [value]:
            argv += [flag] if given is True else [flag, str(given)] if given else []
    return argv


def my_share(tasks: list[T], shard: str | None) -> list[T]:
    """Every N-th task from the I-th on, for `--shard I/N`."""
    if shard is None:
        return tasks
    try:
        i, n = map(int, shard.split("/"))
    except ValueError:
        raise UserError(f"--shard {shard}: I/N is expected, e.g. 1/4") from None
    if not 1 <= i <= n:
        raise UserError(f"--shard {shard}: I is 1 to N")
    if 0 < len(tasks) < n:
        raise UserError(f"--shard {shard}: there are {len(tasks)} tasks, so at most as many shards")
    return tasks[i - 1 :: n]


# --------------------------------------------------------------------------------------------------------- the outputs


class Output(Resumable):
    """A stage's JSONL output: one writer, the same arguments whenever it resumes, progress shown, metadata beside it.

    complete(records): how many of the lines read so far form complete groups (jsonl.Resumable). free: the arguments
    that may change from call to call. With --shard I/N the shard has a file of its own; without, shards are taken in,
    but for what is there already: about(line), a tree's task or what a result is of, is that of one group alone.
    """

    def __init__(
        self, args: argparse.Namespace, complete: Callable[[list[dict]], int], inputs: Iterable[Path | None] = (),
        free: Iterable[str] = (), about: Callable[[dict], Any] = dumps,
    ) -> None:  # fmt: skip
        self.args, self.inputs, self.started, self.grown = args, list(inputs), time.time(), False
        shard, output = getattr(args, "shard", None), Path(args.out)
        path = output.with_name(f"{output.stem}.{shard.replace('/', '-of-')}{output.suffix}") if shard else output
        self.lock = only_writer(path)
        found = () if shard else sorted(output.parent.glob(f"{output.stem}.*-of-*{output.suffix}"))
        parts = [part for part in found if not part.name.endswith(".meta.json")]
        if args.overwrite:
            if parts:
                raise UserError(f"{parts[0]}: --overwrite would join it again; delete it to start from nothing")
            for old in (path, meta_path(path)):
                old.unlink(missing_ok=True)
        free = ("limit", *free)
        if path.exists() and path.stat().st_size:
            same_arguments(path, args, free)
            if not read_meta(path) and not complete_records(path, complete)[0]:
                raise UserError(f"{path}: holds something else, which would be lost: name another --out")
        super().__init__(path, complete)
        self.earlier = read_meta(path) if self.records else {}  # of the last call, which has added up those before it
        self.known: dict[str, Any] = {}  # figures that are known before the work is done
        for part in parts:
            way_out = "the same flags without --shard join it with the others; delete it to leave it out"
            same_arguments(part, args, free, way_out=way_out)
            known = set(map(about, self.records))
            self.append([r for r in complete_records(part, complete)[0] if about(r) not in known])
        self.begun = bool(self.records)
        if not self.begun:  # a call that is stopped before its first line is known by its arguments too
            write_meta(self.path, args, self.inputs)

    def append(self, group: Iterable[dict]) -> None:
        if group and not self.grown:  # before the first line, so that no file is ever without its metadata
            write_meta(self.path, self.args, self.inputs, **self.known)
            self.grown = True
        super().append(group)

    def with_earlier(
        self, name: str, now: dict[str, int | None], both: Callable[[int, int], int], stopped: int | None = 0
    ) -> dict[str, int | None]:
        """Figures of this call and of those that wrote before it; None: not known. stopped: of a call that was."""
        before = self.earlier.get(name) or dict.fromkeys(now, stopped if self.begun else 0)
        return {key: None if None in (before[key], n) else both(before[key], n) for key, n in now.items()}

    def grow(self, groups: Iterable[list[dict]], what: str, total: int, done: int = 0) -> None:
        for group in progress(groups, what, total, done):
            self.append(group)

    def finish(self, order: Callable[[dict], Any] | None = None, **figures: Any) -> None:
        """Close the file, its groups in order, and complete its metadata."""
        self.close()
        in_order = sorted(self.records, key=order) if order else self.records
        if in_order != self.records:
            write_jsonl(self.path, in_order)
            self.records = in_order
        if self.grown or "seconds" not in read_meta(self.path):  # a stop may have come behind the last line
            seconds = time.time() - self.started
            write_meta(self.path, self.args, self.inputs, **self.known, **figures, seconds=seconds)
        release(self.lock)


def progress(items: Iterable[T], what: str, total: int | None = None, done: int = 0) -> Iterator[T]:
    """The items, with a bar on a terminal and elsewhere a line every half minute."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, what, total, initial=done)
        return
    started = said = time.monotonic()
    for n, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= 30:
            said, rate = now, n / (now - started)
            left = f", {(total - done - n) / rate / 60:.0f} min left" if total else ""
            print(f"{what}: {done + n}/{total or '?'}, {rate:.2g}/s{left}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------------- errors


class Terminated(KeyboardInterrupt):
    """By SIGTERM, as a cluster sends it before it kills."""


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C and SIGTERM without a traceback."""

    def terminated(number: int, _: Any) -> NoReturn:
        raise Terminated

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)  # whose default leaves temporary files
    try:
        main()
    except (UserError, OSError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        again = " (without --overwrite, once that has deleted the old)" if "--overwrite" in sys.argv else ""
        print(f"\nstopped; the same command{again} resumes from what is written", file=sys.stderr)
        sys.exit(143 if isinstance(stop, Terminated) else 130)


def command() -> None:
    """The installed commands: qlass-build-trees is build_trees.py."""
    name = Path(sys.argv[0]).stem.removeprefix("qlass-").replace("-", "_")
    run_stage(importlib.import_module(name).main)
