"""What stages share besides algorithms: flags, settings of a run, inputs, errors in one line.

Standard library and filelock only, so that `bellman.py` starts at once.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import files_of, share, warn
from qlass.metadata import is_complete, outdated, read_meta

LORA_LR = 2e-4  # updates that start from 0 take larger steps than weights

# ------------------------------------------------------------------------------------------ flags


def parser(doc: str, epilog: str = "") -> argparse.ArgumentParser:
    """A stage's parser: its description is the first line of the stage's docstring."""
    stage = argparse.ArgumentParser(
        allow_abbrev=False,  # an abbreviated flag of an experiment would be q_search.py's
        description=doc.split("\n")[0],
        epilog=epilog,
        usage="%(prog)s [flags]",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30, width=100),
    )
    add = stage.add_argument
    names = "webshop (default), alfworld, sciworld, frozenlake, or MODULE:CLASS"
    add("--env", metavar="NAME", help=names)
    add("--env-option", type=option, action="append", metavar="NAME=VALUE", help="may be repeated")
    add("--run", type=Path, metavar="DIR", help="folder of this run's files (runs/ENV)")
    add("--seed", type=at_least(0, most=2**32 - 1), default=0, metavar="N", help="default: 0")
    add("--overwrite", action="store_true", help="make the output again from scratch")
    add("--debug", action="store_true", help="show the traceback of an error")
    return stage


def as_flags(settings: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def add_memory(parser: Any) -> None:
    """How a large model is trained in little memory; for `models.save_memory`."""
    add = parser.add_argument
    add("--load-in", choices=["4bit", "8bit"], help="bits per weight")
    add("--lora", type=at_least(1), metavar="RANK", help="train updates of this rank alone")
    add("--lora-alpha", type=at_least(1), metavar="A", help="their factor is A/RANK (2 RANK)")
    add("--optim", choices=["adamw", "adamw8bit"], default="adamw", help="default: adamw")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")


def add_training(parser: Any, batch: str) -> None:
    """The flags of a stage that trains; `batch`: what an update holds."""
    add = parser.add_argument
    add("--epochs", type=at_least(1), metavar="N", help="at most")
    add("--lr", type=at_least(0, float), help=f"its highest value; with --lora {LORA_LR}")
    add("--batch", type=at_least(1), metavar="N", help=f"{batch} per update")
    add("--micro-tokens", type=at_least(1), metavar="N", help="padded tokens in memory at once")
    add("--patience", type=at_least(1), default=2, metavar="N", help="epochs without a gain (2)")
    add("--save-every", type=at_least(1), default=50, metavar="N", help="updates (50)")
    add_precision(parser)
    add_memory(parser)


def add_precision(parser: Any) -> None:
    text = "default: bf16 on a GPU, float32 on a CPU"
    parser.add_argument("--precision", choices=["float32", "bf16"], help=text)


def add_prompt(parser: Any) -> None:
    """What a prompt depends on, which agent and QNet must share."""
    add = parser.add_argument
    add("--max-new-tokens", type=at_least(1), metavar="N", help="of an action (256; tiny: 48)")
    add("--truncate", choices=["oldest"], help="leave out old turns beyond the context")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The flags of a stage that samples, besides --temperature; for `policy.load_agent`."""
    group = parser.add_argument_group("sampling (defaults: the checkpoint's policy.json)")
    add_prompt(group)
    add = group.add_argument
    text = "of free text: the likeliest tokens that hold P"
    add("--top-p", type=at_least(0.01, float, 1), metavar="P", help=text)
    add("--top-k", type=at_least(0), metavar="K", help="of free text: the K likeliest (0: all)")
    add("--stop", nargs="+", metavar="TEXT", help="texts that end an action")
    add("--think", action="store_true", default=None, help="let a reasoning model think first")
    add("--plain", action="store_true", help="one sequence at a time, for recurrent models")
    add("--cache-gb", type=at_least(0, float), metavar="G", help="for prompts (2; GPU: 1/4 of it)")
    text = "trees or episodes side by side (64; sciworld: 4; own: 1)"
    add("--in-flight", type=at_least(1), metavar="N", help=text)
    add("--server", metavar="URL[#MODEL]", help="OpenAI-compatible, of this checkpoint")
    add("--load-in", choices=["4bit", "8bit"], help="bits per weight")
    add_precision(group)


def at_least(low: float, kind: Callable = int, most: float = 1e30) -> Callable[[str], Any]:
    """A flag's type: a number within [low, most]."""

    def number(text: str) -> Any:
        value = kind(text)  # argparse names what is none
        if not low <= value <= most:  # also refuses nan
            bounds = f"{low:g} or more" if most == 1e30 else f"{low:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: {bounds} is expected")
        return value

    return number


def option(text: str) -> str:
    """A flag's type: NAME=VALUE. The value of an unset shell variable is not what is bundled."""
    if not text.partition("=")[2]:
        mistake = "NAME=VALUE is expected; leave it out for the default"
        raise argparse.ArgumentTypeError(f"{text}: {mistake}")
    return text


def settle(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What no flag has set takes its value from the settings."""
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


# ------------------------------------------------------------------------------- settings of a run


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, search: bool = False
) -> argparse.Namespace:
    """The flags, with the environment and its options as the run has them if none are named.

    They are those of the first stage that wrote into the run, else of --sft's or --trees'. Other
    ones than the run's are refused, but for a `search`, which records and warns of them.
    """
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    if "lora" in args and not args.lora and (args.lora_alpha or args.load_in):
        reason = "a training has them beside --lora RANK alone; give that too"
        raise UserError(f"--lora-alpha, --load-in: {reason}")
    source = vars(args).get("sft") or vars(args).get("trees")
    agent = trained_with(source) if source else {}
    if args.run is None:
        env = args.env or agent.get("env", "webshop")
        args.run = Path("runs") / env.rpartition(":")[2].lower()
    begun = begun_with(args.run)
    settings = begun or agent
    options = args.env_option or []
    if args.env in (None, settings.get("env")):
        args.env = settings.get("env", "webshop")
        options = [*settings.get("env_option", []), *options]
    args.env_option = sorted({text.partition("=")[0]: text for text in options}.values())
    before, now = in_flags(settings), in_flags(vars(args))
    args.env_files = settings.get("env_files") if before == now else None
    if begun and before != now:
        reason = f"{args.run} was begun with {before}, not with {now}"
        if not search:
            raise UserError(f"{reason}: leave the flags out, or name another --run")
        warn(reason)
    return args


def begun_with(run: Path) -> dict[str, Any]:
    """The arguments of the earliest stage that has written into a run's folder.

    A stage without `env_files` has opened no environment, and its --env may be just the default.
    """
    names = ["sft", "expert", "trees", "q_labels", "qnet", "results"]
    names += [path.name.removesuffix(".meta.json") for path in sorted(run.glob("*.meta.json"))]
    for arguments in (trained_with(run / name) for name in names):
        if "env" in arguments and arguments.get("env_files", {}) is not None:
            return arguments
    return {}


def trained_with(checkpoint: Path) -> dict[str, Any]:
    return read_meta(checkpoint.absolute())["arguments"]


def in_flags(settings: dict[str, Any]) -> str:
    """The environment and its options as flags."""
    words = ["--env", settings.get("env", "webshop")]
    for text in settings.get("env_option", []):
        words += ["--env-option", text]
    return shlex.join(words)


def same_world(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether arguments tell of one environment, with one set of options and files."""
    files = [arguments.get("env_files") for arguments in (a, b)]
    return in_flags(a) == in_flags(b) and (None in files or files[0] == files[1])


def warn_of_another_world(folder: Path, args: argparse.Namespace) -> None:
    """A line if a checkpoint was trained with another environment or other options of it."""
    trained, now = trained_with(folder), in_flags(vars(args))
    if trained and not same_world(trained, vars(args)):
        before = in_flags(trained) if in_flags(trained) != now else "other files"
        warn(f"{folder} was trained with {before}, not with {now}")


def leaks(env: Any, results: list[dict], args: argparse.Namespace) -> dict[str, int | None]:
    """How many of the played tasks --sft and --qnet learned from, and a warning if any.

    Of the results, those count for which the agent wrote, or QNet read, tokens. None: not known.
    A task with the subject (a product) of a learned one counts too. A published split may overlap
    (WebShop's do, in 21 tasks), so this is no refusal.
    """
    counts: dict[str, int | None] = {}
    sources = ("demonstrations", args.sft, "generated"), ("trees", args.qnet, "scored")
    for source, checkpoint, cost in sources:
        played = {record["task_id"] for record in results if record["tokens"].get(cost)}
        meta = read_meta(checkpoint.absolute())
        same = same_world(meta["arguments"], vars(args))  # else its ids mean other tasks
        learned = meta.get("tasks") if same else None
        subjects = set(map(env.subject, learned or []))
        counts[source] = len([task for task in played if env.subject(task) in subjects])
        if played and learned is None:
            counts[source] = None
            reason = f"{checkpoint.name} does not tell which tasks of this environment it learned"
            warn(f"whether tasks played are also in the {source} is not known: {reason}")
        elif counts[source]:
            warn(f"{counts[source]} of {len(played)} tasks played are also in the {source}")
    return counts


# ---------------------------------------------------------------------------- inputs and processes


def handed_on(args: argparse.Namespace) -> list[str]:
    """The flags that all stages of a run share."""
    argv = ["--run", str(args.run), "--seed", str(args.seed)]
    if not begun_with(args.run):
        argv = [*shlex.split(in_flags(vars(args))), *argv]
    for name in ("device", "precision"):
        if value := getattr(args, name, None):
            argv += [f"--{name}", value]
    return argv


def find_or_make(named: Path | None, default: Path, stage: str, args: argparse.Namespace) -> Path:
    """A stage's input: what was named, else the earlier stage's output, made or resumed first.

    Several processes would all make it, so they are refused with the command that does.
    """
    if named is not None:
        if not files_of(named):
            raise UserError(f"{named}: no such file or folder")
        return named
    if is_complete(default):
        for output, source in dict.fromkeys(outdated(default)):
            warn(f"{output} was made from another {source} than there is now: make it again")
        return default
    agent, own = getattr(args, "sft", None), args.run / "sft"
    if agent and stage != "sft" and agent.resolve() != own.resolve():
        reason = f"would be made of {own}, not of --sft {agent}: make it first"
        raise UserError(f"{default}: {reason}")
    argv = handed_on(args)
    begun = read_meta(default).get("argv", argv)
    command = f"python {stage}.py {shlex.join(begun)}"
    if begun not in (argv, [*shlex.split(in_flags(vars(args))), *argv]) or share()[1] > 1:
        reason = "missing or not complete: make it first, by one process, as it was begun"
        raise UserError(f"{default}: {reason}: {command}")
    print(f"{default} is missing or not complete: making it with {command}", flush=True)
    importlib.import_module(stage).main(argv)
    first = begun_with(args.run)
    if args.env_files is None and same_world(first, vars(args)):  # a new run's are known now
        args.env_files = first.get("env_files")
    return default


def my_share(tasks: list[str]) -> list[str]:
    """The tasks of this process: from the RANK-th on, every WORLD_SIZE-th."""
    rank, world = share()
    if not tasks:
        raise UserError("no tasks are left: mind --split, --skip and --limit")
    if not 0 <= rank < world <= len(tasks):
        raise UserError(f"RANK {rank}, WORLD_SIZE {world}: no share of {len(tasks)} tasks")
    return tasks[rank::world]


# ---------------------------------------------------------------------------------------- running


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C without a traceback."""
    try:
        module = getattr(sys.modules.get("envs"), "__file__", None)
        if module and Path(module).parent != Path(__file__).parents[1]:
            raise UserError(f"{module} hides our module envs: rename it, or start elsewhere")
        main()
    except (UserError, OSError, ModuleNotFoundError) as error:
        if "--debug" in sys.argv:
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        hint = ": pip install it" if isinstance(error, ModuleNotFoundError) else ""
        print(f"error: {text}{hint}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # torch's, of a GPU or a CPU
        if "--debug" in sys.argv or not re.search("out of memory|allocate memory", str(error)):
            raise
        fewer = "fewer --micro-tokens, --in-flight or --cache-gb"
        less = f"--gradient-checkpointing, --lora 16, {fewer}"
        print(f"error: out of memory: give {less}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        text = "stopped; the same command, without --overwrite, resumes from what is written"
        print(f"\n{text}", file=sys.stderr)
        sys.exit(130)
