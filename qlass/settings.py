"""Settings: one frozen dataclass per command is its flags, its --help, its defaults and its recipe.

What no flag says comes from RUN/run.json, then from a preset (qlass/presets.toml), then from the
class, where the paper's settings stand.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from tyro.conf import UseAppendAction

from qlass import UserError, presets
from qlass.files import LAYOUT, read_json, warn
from qlass.records import out_of_memory

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UNNAMED = Path("runs/ENV")
C = TypeVar("C")
R = TypeVar("R", bound="Run")


def runtime(default: Any) -> Any:
    """A field that may differ when a run goes on: no byte of an output depends on it."""
    return dataclasses.field(default=default, metadata={"runtime": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every command of a run has."""

    stage: ClassVar[str] = ""  # whose settings a preset has for this command
    plays_elsewhere: ClassVar[bool] = False  # with more options of the environment, if asked to

    env: str = "webshop"  # webshop, alfworld, sciworld, frozenlake, or MODULE:CLASS
    env_option: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, of the environment
    run: Path = runtime(UNNAMED)  # folder of this run's files
    preset: Literal["tiny", "paper"] | None = runtime(None)  # whose defaults (qlass/presets.toml)
    seed: NonNegativeInt = 0  # of all random numbers
    overwrite: bool = runtime(False)  # make the output again from scratch

    def recipe(self) -> dict[str, Any]:
        """The settings that the bytes of an output depend on."""
        fields = dataclasses.fields(self)
        recipe = {f.name: getattr(self, f.name) for f in fields if not f.metadata.get("runtime")}
        if "precision" in recipe:
            from qlass.device import device_and_precision

            recipe["precision"] = device_and_precision(self)[1]
        return recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Run):
    """Where a model computes, and in how many bits. What a GPU began no CPU goes on with."""

    load_in: Literal["4bit", "8bit"] | None = None  # bits per weight (bitsandbytes)
    precision: Literal["float32", "bf16"] | None = None  # bf16 on a GPU, float32 on a CPU
    device: Literal["cpu", "cuda"] | None = runtime(None)  # the GPU, or without one the CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Model):
    """What a prompt depends on, which agent and QNet must share."""

    max_new_tokens: PositiveInt | None = None  # of an action (the checkpoint's: 256; tiny: 48)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Prompt):
    """How a stage in which the agent acts samples from it."""

    temperature: Number | None = None  # else the checkpoint's own (0.7; tiny: 1)
    plain: bool = runtime(False)  # one sequence at a time, for recurrent models
    cache_gb: Number | None = runtime(None)  # GB for prompts (2; on a GPU a quarter of its memory)
    in_flight: PositiveInt | None = runtime(None)  # trees or episodes at once (64; sciworld: 4)
    server: str | None = runtime(None)  # URL#MODEL of an OpenAI-compatible server of the agent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning(Model):
    """How a large model is trained in little memory; the defaults are Table 5's."""

    lr: Number = 1e-5  # learning rate at its peak
    epochs: PositiveInt = 3  # at most
    batch: PositiveInt = 64  # examples per update (of pairs at least)
    patience: PositiveInt = 2  # epochs without a better validation before it ends
    lora: PositiveInt | None = None  # train updates of this rank alone
    optim: Literal["adamw", "adamw8bit"] = "adamw"  # moments in 32 or in 8 bits
    gradient_checkpointing: bool = runtime(False)  # less memory, a third more time
    micro_tokens: PositiveInt = runtime(8192)  # tokens in memory at once, padding included
    save_every: PositiveInt = runtime(50)  # updates


# ------------------------------------------------------------------------------ reading the flags


FORM = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)


def parse(
    kind: type[C], doc: str | None, argv: Sequence[str] | None = None, default: Any = None
) -> C:
    """What the flags say, then `default`, then the class. doc: a module's docstring, with which
    --help begins."""
    return tyro.cli(kind, args=argv, description=doc, config=FORM, default=default)


def read_settings(kind: type[R], doc: str | None, argv: Sequence[str] | None = None) -> R:
    """The settings of a command of a run."""
    config = parse(kind, doc, argv)  # which run, and of what
    options = config.env_option
    folder = default_run(config.env) if config.run == UNNAMED else config.run
    run = read_run(folder)
    shared = {name: run[name] for name in ("env", "seed", "preset") if run} | {"run": folder}
    config = parse(kind, doc, argv, kind(**shared))  # which preset
    shared["preset"], defaults = presets.settings(config)
    config = parse(kind, doc, argv, kind(**shared | defaults))
    if run:
        own = run["env_option"]
        options = tuple(dict.fromkeys((*own, *options)))
        if config.env != run["env"] or (len(options) > len(own) and not kind.plays_elsewhere):
            raise UserError(f"{folder} is of {' '.join([run['env'], *own])}: name another --run")
    elif not options:
        options = defaults.get("env_option", ())
    config = dataclasses.replace(config, env_option=options)
    taken = [name for name, value in defaults.items() if getattr(config, name) == value]
    if taken:
        shown = ", ".join(f"{name} {defaults[name]}" for name in taken)
        print(f"settings of the {config.preset} preset, {config.env}: {shown}", file=sys.stderr)
    check_bounds(config)
    return config


def check_bounds(config: Run) -> None:
    """UserError for a number out of the bounds of its type."""
    try:
        TypeAdapter(type(config)).validate_python(vars(config))
    except ValidationError as error:
        problem = error.errors()[0]
        flag = f"--{problem['loc'][0]}".replace("_", "-")
        raise UserError(f"{flag} {problem['input']}: {problem['msg']}") from None


def default_run(env: str) -> Path:
    return Path("runs") / env.rpartition(":")[2].lower()


def read_run(run: Path) -> dict[str, Any]:
    """RUN/run.json: environment, options, seed, preset; of a new run nothing."""
    file = run / "run.json"
    if not file.exists():
        if any(run.glob("*.meta.json")):
            warn(f"{file} is missing: this command takes {run} for a new run")
        return {}
    values = read_json(file)
    if values.get("layout") != LAYOUT:
        raise UserError(f"{file}: of another version of this code: give another --run")
    return values


FITS = (
    "in a training --load-in 4bit --lora 16, --gradient-checkpointing, a smaller --micro-tokens;"
    " in play --load-in 4bit, --cache-gb 0, a smaller --in-flight"
)


def reader_is_gone() -> bool:
    """True if nobody reads stdout any more, as with `| head`; else another pipe is broken."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def run_stage(main: Callable[[], None]) -> None:
    """A script's last line: a mistake in one line, with exit code 2."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the same command resumes, without --overwrite", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        problem = str(error)
        if out_of_memory(error):
            problem = f"out of memory: {FITS}"
        elif isinstance(error, ModuleNotFoundError) and "." not in str(error.name):
            problem = f"{error}: pip install it"
        elif not isinstance(error, UserError | OSError):
            raise
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
