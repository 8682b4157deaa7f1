"""Settings: one frozen dataclass per command is its flags, its --help, its defaults and its recipe.

A field's comment is the help of its flag; in brackets it has what stands for a missing flag. What
no flag says comes from RUN/run.json, then from a preset (qlass/presets.py), then from the class,
where the paper's settings stand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro
from tyro.conf import Suppress, UseAppendAction, arg

from qlass import UserError, presets
from qlass.files import read_object, warn

C = TypeVar("C")
R = TypeVar("R", bound="Run")

# --------------------------------------------------------------------------------- kinds of fields


def free(default: Any) -> Any:
    """A field that may differ when a run goes on: no byte of a line, or of weights, depends on it
    (but it may say which lines there are, as --limit does)."""
    return dataclasses.field(default=default, metadata={"free": True})


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The least and the largest value of a number, in the type of its field."""

    low: float
    high: float = float("inf")


Natural = Annotated[int, Bounds(0)]
Positive = Annotated[int, Bounds(1)]
Real = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]


def bounds_in(hint: Any) -> list[Bounds]:
    """The bounds in a type: of Positive | None those of Positive."""
    if isinstance(hint, Bounds):
        return [hint]
    return [bounds for part in typing.get_args(hint) for bounds in bounds_in(part)]


def check_bounds(config: Any) -> None:
    """UserError for a number outside the bounds of its field's type."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        for bounds in bounds_in(hint):
            for number in value if isinstance(value, tuple) else [value]:
                if number is not None and not bounds.low <= number <= bounds.high:  # nan neither
                    limits = f"{bounds.low:g} to {bounds.high:g}".replace("to inf", "or more")
                    raise UserError(f"{flag(name)} {number}: {limits} is expected")


def flag(name: str) -> str:
    """A field's name -> its flag."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def is_url(text: str) -> bool:
    """Is this the URL of a server, perhaps as HOST:PORT, and no path?"""
    return bool(re.match(r"\w+://|([\w.-]+|\[[\da-f:]+\]):\d+\b", text))


# ------------------------------------------------------------------- settings that commands share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every command of a run has."""

    stage: ClassVar[str] = ""  # whose settings a preset has for this command
    plays_elsewhere: ClassVar[bool] = False  # in another environment than the run's, if asked to

    env: str = "webshop"  # webshop, alfworld, sciworld, frozenlake, or MODULE:CLASS
    env_option: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, of the environment
    run: Path = free(Path("runs/ENV"))  # folder of this run's files
    preset: Literal["tiny", "paper"] | None = free(None)  # whose defaults (qlass/presets.py)
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0  # of all random numbers
    overwrite: bool = free(False)  # make the output again from scratch
    debug: bool = free(False)  # show the traceback of an error
    argv: Suppress[tuple[str, ...]] = free(())  # the flags as they were given

    def recipe(self) -> dict[str, Any]:
        """The settings that the bytes of an output depend on."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if not f.metadata.get("free")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Run):
    """What a prompt depends on, which agent and QNet must share."""

    max_new_tokens: Positive | None = None  # of an action (the checkpoint's: 256; tiny: 48)
    truncate: Literal["oldest"] | None = None  # leave out old turns beyond the context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Prompt):
    """How a stage in which the agent acts samples from it."""

    temperature: Real | None = None  # else the checkpoint's own (0.7; tiny: 1)
    top_p: Annotated[float, Bounds(0.01, 1)] | None = None  # of free text (1)
    top_k: Natural | None = None  # of free text: the K likeliest tokens (0: all)
    stop: tuple[str, ...] | None = None  # texts that end an action
    load_in: Literal["4bit", "8bit"] | None = None  # bits per weight
    precision: Literal["float32", "bf16"] | None = None  # bf16 on a GPU, float32 on a CPU
    plain: bool = free(False)  # one sequence at a time, for recurrent models
    cache_gb: Real | None = free(None)  # GB for prompts (2; on a GPU a quarter of its memory)
    in_flight: Positive | None = free(None)  # trees or episodes side by side (64; sciworld: 4)
    server: Annotated[str | None, arg(metavar="URL[#MODEL]")] = free(None)  # OpenAI-compatible
    device: str | None = free(None)  # the GPU, or without one the CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Run):
    """How a large model is trained in little memory."""

    load_in: Literal["4bit", "8bit"] | None = None  # bits per weight of what LoRA leaves as it is
    lora: Positive | None = None  # train updates of this rank alone
    lora_alpha: Positive | None = None  # their factor is alpha / rank (alpha: twice the rank)
    optim: Literal["adamw", "adamw8bit"] = "adamw"  # moments in 32 or in 8 bits
    gradient_checkpointing: bool = free(False)  # less memory, a third more time
    device: str | None = free(None)  # the GPU, or without one the CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Memory):
    """What both trainings have; the defaults are Table 5's."""

    lr: Real = 1e-5  # learning rate at its peak
    batch: Positive = 64  # examples per update (of pairs at least)
    patience: Positive = 2  # epochs without a better validation before it ends
    precision: Literal["float32", "bf16"] | None = None  # bf16 on a GPU, float32 on a CPU
    micro_tokens: Positive = free(8192)  # tokens in memory at once, padding included
    save_every: Positive = free(50)  # updates


# ------------------------------------------------------------------------------ reading the flags

FORM = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)


MORE_HELP: list[Callable[[str], str]] = []  # what envs.py says of an environment's options


def parse(
    kind: type[C], argv: Sequence[str] | None, default: C | None = None, doc: str | None = None
) -> C:
    """The Config that flags say; --help begins with the first words of `doc`, a module's.

    UserError, in one line, for flags that it does not have.
    """
    home = os.path.expanduser("~/")
    words = sys.argv[1:] if argv is None else argv
    words = [word.replace("=~/", f"={home}") for word in words]  # no shell does it behind an =
    start = kind() if default is None else default
    command = functools.partial(
        tyro.cli, kind, args=words, default=start, description=" ", config=FORM
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # some mistakes are printed nonetheless
            config = command(console_outputs=False)
    except SystemExit:
        from qlass.optional import usage

        usage.explain(command, doc)
        if env := getattr(start, "env", None):
            print(*(describe(env) for describe in MORE_HELP), sep="\n")
        raise
    check_bounds(config)
    return config


def read(kind: type[R], doc: str | None, argv: Sequence[str] | None) -> R:
    """The settings of a command of a run. doc: its module's docstring, which --help begins with.

    UserError if the run is of another environment, or of other options, than the flags name.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--run=" in argv or ("--run", "") in itertools.pairwise(argv):  # it would be this folder
        raise UserError("--run names no folder: is a variable of the shell empty?")
    words = [word for word in argv if word not in ("-h", "--help")]
    blank: Any = {"env": ""}  # which no flag leaves so
    first = parse(kind, words, dataclasses.replace(kind(), **blank))
    run = first.run
    if run == kind().run:
        run = Path("runs") / (first.env or kind.env).rpartition(":")[2].lower()
    begun = begun_with(run)
    env = first.env or begun.get("env", kind.env)
    inherited = begun if begun.get("env") == env else {}
    preset = first.preset or inherited.get("preset") or presets.suited(first, run)
    chosen = presets.settings(preset, env, kind, lora=bool(getattr(first, "lora", None)))
    if inherited:
        chosen |= {"seed": inherited["seed"], "env_option": tuple(inherited["env_option"])}
    chosen |= {"env": env, "run": run, "preset": preset}
    config = parse(kind, argv, kind(**chosen), doc)
    by_name = {text.partition("=")[0]: text for text in config.env_option}
    options = tuple(sorted(by_name.values()))
    config = dataclasses.replace(config, env_option=options, argv=tuple(argv))
    if begun and (env, options) != (begun["env"], tuple(begun["env_option"])):
        before = " ".join([begun["env"], *begun["env_option"]])
        reason = f"{run} is of {before}, not of {' '.join([env, *options])}"
        if not kind.plays_elsewhere:
            raise UserError(f"{reason}: leave the flags out, or name another --run")
        warn(f"{reason}: its agent plays elsewhere")
    if getattr(config, "load_in", None) and getattr(config, "lora", True) is None:
        raise UserError("--load-in: weights in few bits can't be trained; --lora adds others")
    began_tiny = not first.preset and inherited.get("preset") == "tiny"
    if began_tiny and presets.names_pretrained(first):
        warn(f"{run} was begun with the preset tiny: another --run, or --preset paper, has another")
    presets.announce(config, chosen)
    return config


def begun_with(run: Path) -> dict[str, Any]:
    """What RUN/run.json says of a run that has begun: environment, options, files, seed, preset."""
    file = run / "run.json"
    return read_object(file) if file.exists() else {}


# --------------------------------------------------------------------------------------- mistakes


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console may have no "█"
    try:
        return main()
    except KeyboardInterrupt:
        text = "\nstopped; the same command, without --overwrite, resumes from what is written"
        print(text, file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError, ModuleNotFoundError, RuntimeError) as error:
        from qlass.optional import usage

        text = usage.advice(error)
        if "--debug" in sys.argv or not text:
            raise
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)
