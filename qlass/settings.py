"""Settings: one frozen dataclass per command is its flags, its --help and its recipe.

A run has one settings file, RUN/settings.toml, which its first command copies from a preset: there
is a preset for each environment and kind of model. A setting that presets have stands there alone.
Flags override the file, and `--help` shows the values that apply.
"""

import argparse
import dataclasses
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter
from tqdm import tqdm
from tyro.conf import arg as arg  # stages import no package before ours

from qlass import UserError
from qlass.files import write_text
from qlass.records import as_user_error, out_of_memory

PRESETS = Path(__file__).with_name("presets")  # KIND/ENV.toml
Fraction = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
C = TypeVar("C")
R = TypeVar("R", bound="Run")


def place(default: Any) -> Any:
    """A field that says where something is: the recipe of an output has the content of what its
    bytes depend on, and not the place."""
    return dataclasses.field(default=default, metadata={"in recipe": "content"})


def workload(default: Any = dataclasses.MISSING) -> Any:
    """A field that says how much a command makes, how fast, or in which portions.

    The lines and the weights that are there stay. Numbers that are computed in other portions round
    otherwise: weights and Q-values in their last digits and, with bf16, what an agent draws.
    """
    return dataclasses.field(default=default, metadata={"in recipe": "nothing"})


def hint(default: str) -> str:
    """The words of --help about a default. For None a flag's comment has them; a switch is off."""
    return "" if default in ("None", "False", "") else f"(default: {default})"


class Flags:
    """A class whose fields are flags."""

    def __init_subclass__(cls) -> None:
        for name, kind in cls.__annotations__.items():
            if "ClassVar" not in str(kind):
                cls.__annotations__[name] = Annotated[kind, arg(help_behavior_hint=hint)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Flags):
    """The settings of every command of a run."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a file names no other setting
    stage: ClassVar[str] = ""  # whose table of a settings file this command reads
    output: ClassVar[str] = ""  # in the run's folder
    extends_options: ClassVar[bool] = False  # may add --env-option to those of the run

    env: str = "webshop"  # webshop, alfworld, sciworld, frozenlake, MODULE:CLASS, openenv:URL
    # NAME=VALUE, of the environment, beside those of the preset
    env_option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = place(())
    run: Path = place(Path("runs/ENV"))  # folder of this run's files
    preset: Literal["tiny", "paper"] = place("tiny")  # of a new run (paper: pretrained)
    seed: Annotated[NonNegativeInt, Field(lt=1 << 44)] = 0  # of all random numbers
    overwrite: bool = workload(False)  # make the output again from scratch
    flags: tyro.conf.Suppress[str] = workload("")  # of this command

    @property
    def file(self) -> Path:
        """The settings of the run, which begins when its first output writes them."""
        return self.run / "settings.toml"

    @property
    def path(self) -> Path:
        """The output of this command."""
        return getattr(self, "out", None) or self.run / self.output

    def recipe(self) -> dict:
        """The settings that the bytes of an output depend on."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if not f.metadata}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Run):
    """The bits of a model's weights. An output is of one precision."""

    load_in: Literal["4bit"] | None = None  # bits per weight (bitsandbytes)
    precision: Literal["float32", "bf16"] | None = None  # bf16 on a GPU that has it, else float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionLength(Model):
    """The room for an action behind a prompt, which agent and QNet must share."""

    max_new_tokens: PositiveInt | None = None  # of an action (the checkpoint's: 256; tiny: 48)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(ActionLength):
    """Sampling in a stage in which the agent acts."""

    temperature: Number | None = None  # of the draws (the checkpoint's own)
    plain: bool = workload(False)  # one sequence at a time, for recurrent models
    # GB for prompts, for each model (2; on a GPU a quarter of its free memory)
    cache_gb: Number | None = workload(None)
    # trees or episodes at once (64; sciworld: 4; your own: its side_by_side)
    in_flight: PositiveInt | None = workload(None)
    # URL#MODEL of an OpenAI-compatible server of the agent
    server: str | None = place(None)
    timeout: PositiveInt = workload(600)  # seconds for an answer, a server's pauses included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning(Model):
    """The training of a model."""

    lr: Number  # learning rate at its peak
    epochs: PositiveInt  # at most
    batch: PositiveInt  # examples of an update
    patience: PositiveInt  # epochs without a better validation that end it
    lora: PositiveInt | None = None  # LoRA's rank: its updates alone are trained
    optim: Literal["adamw", "adamw8bit"]  # moments in 32 or in 8 bits
    gradient_checkpointing: bool = workload(False)  # less memory, a third more time
    micro_tokens: PositiveInt = workload()  # tokens in memory at once, padding included
    save_every: PositiveInt = workload(50)  # updates between two saved states


# ------------------------------------------------------------------------------ reading the flags


FORM = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)


def parse(
    kind: type[C], doc: str | None, argv: Sequence[str] | None = None, default: Any = None
) -> C:
    """Read the flags, then `default`, then the class. doc: a module's docstring, with whose first
    paragraphs, up to the commands, --help begins."""
    head = "\n\n".join((doc or "").split("\n\n")[:3])
    return tyro.cli(kind, args=argv, description=head, config=FORM, default=default)


def read_settings(kind: type[R], doc: str | None, argv: Sequence[str] | None = None) -> R:
    """The settings of a command of a run."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = [word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word)]
    names = [flag.lstrip("-").replace("_", "-") for flag in flags]
    for flag, name in zip(flags, names, strict=True):
        if name != "env-option" and names.count(name) > 1:  # the first one would count for nothing
            raise UserError(f"{flag} stands twice")
    own = defaults(kind, words)
    config = parse(kind, doc, words, own)
    # A chat model's name, of other stages, says nothing of the kind of QNet beside it.
    model = getattr(config, "model", "") if kind.stage == "sft" else own.preset
    if config.preset != own.preset:
        raise other_kind(own, f"--preset {config.preset}")
    if (model == "tiny") != (own.preset == "tiny"):
        raise other_kind(own, f"--model {model}")
    for word in config.env_option:
        if "=" not in word:
            raise UserError(f"--env-option {word}: NAME=VALUE is expected")
    options = tuple({word.partition("=")[0]: word for word in config.env_option}.values())
    if own.file.exists():
        more = options != own.env_option and not kind.extends_options
        if more or config.env != own.env:
            shown = " ".join([own.env, *own.env_option])
            raise UserError(f"{own.run} is of {shown}, as are its files: name another --run")
    values = vars(config) | {"env_option": options, "flags": shlex.join(words)}
    return by_types(kind, values, "flags")


def defaults(kind: type[R], words: Sequence[str]) -> R:
    """The settings of the run's file or, if there is none, of a preset; a few flags choose it."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--env", default=kind.env)
    chooser.add_argument("--model", default=getattr(kind, "model", "tiny"))
    chooser.add_argument("--preset", choices=("tiny", "paper"))
    for name in ("--run", "--lora", "--expert"):
        chooser.add_argument(name)
    chosen, _ = chooser.parse_known_args(words)
    run = Path(chosen.run or default_run(chosen.env))
    if (run / "run.json").exists():
        raise UserError(f"{run}: of another version of this code: give another --run")
    file, values = run / "settings.toml", {"run": run}
    if not file.exists():
        preset = chosen.preset or ("tiny" if chosen.model == "tiny" else "paper")
        file = preset_file(preset, chosen.env)
        values["env"] = chosen.env
    table = settings_in(file, kind.stage, chosen.lora, chosen.expert)
    return by_types(kind, table | values, str(file))


def settings_in(file: Path, stage: str, lora: Any = None, expert: Any = None) -> dict:
    """The settings that a file has for a stage, none if it is not there; "preset" is the kind of
    its model. lora, expert: flags that change the defaults of others."""
    if not file.exists():
        return {}
    with as_user_error(f"{file} has not the settings of a run"):
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        table = tables["run"] | tables.get(stage, {})
        table["preset"] = "tiny" if tables["sft"]["model"] == "tiny" else "paper"
    with_lora = table.pop("with_lora", {})
    if expert:
        table.pop("n_expert", None)  # a file is read to its end
    return table | with_lora if lora or table.get("lora") else table


def by_types(kind: type[C], values: dict, place: str) -> C:
    """Settings of these values. UserError for one that its type does not allow."""
    with as_user_error(place):
        return TypeAdapter(kind).validate_python(values)


def other_kind(config: Run, model: str) -> UserError:
    """A model that is not of the run's kind."""
    other = "paper" if config.preset == "tiny" else "tiny"
    return UserError(
        f"{model}: {config.run} is a run of --preset {config.preset}: name another --run, and begin"
        f" it with --preset {other}"
    )


def preset_file(preset: str, env: str) -> Path:
    """The settings of a new run."""
    file = PRESETS / preset / f"{env}.toml"
    return file if file.exists() else PRESETS / preset / "any.toml"


def write_settings(config: Run) -> None:
    """Begin a run: copy its preset to RUN/settings.toml, with what its flags say of it."""
    preset = preset_file(config.preset, config.env)
    text = preset.read_text(encoding="utf-8")
    own = ("model",) if config.stage == "sft" else ()
    for name in ("env", "env_option", "seed", *own):
        line = f"{name} = {json.dumps(getattr(config, name), ensure_ascii=False)}"
        text = re.sub(f"^{name} = .*", line.replace("\\", r"\\"), text, count=1, flags=re.M)
    write_text(config.file, text)
    origin = preset.relative_to(PRESETS.parents[1])
    print(f"{config.file}: the settings of this run, those of {origin}", flush=True)


def default_run(env: str) -> Path:
    return Path("runs") / env.rpartition(":")[2].strip("/").lower()


FITS = (
    "in a training --load-in 4bit --lora 16, --gradient-checkpointing, a smaller --micro-tokens;"
    " in play --load-in 4bit, --cache-gb 0, a smaller --in-flight"
)


def run_stage(main: Callable[[], None]) -> None:
    """Run a script. A mistake is printed in one line, with exit code 2."""
    try:
        main()
    except KeyboardInterrupt:
        again = "(without --overwrite, once a part of its output is there)"
        tqdm.write(f"stopped; the same command resumes {again}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        problem = str(error)
        if out_of_memory(error):
            problem = f"out of memory: {FITS}"
        elif isinstance(error, ModuleNotFoundError) and "." not in str(error.name):
            problem = f"{error}: pip install it"
        elif not isinstance(error, UserError | OSError):
            raise
        tqdm.write(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
