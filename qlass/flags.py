"""How a script is called: the flags that stages share, and mistakes told in one line."""

from __future__ import annotations

import argparse
import functools
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlass import UserError

LORA_LR = 2e-4  # updates that start from 0 take larger steps than weights
FREE = "a stopped run may resume with other values of these"


class Parser(argparse.ArgumentParser):
    """A stage's parser: its description is the first line of the stage's docstring."""

    def __init__(self, doc: str, epilog: str = "") -> None:
        help_format = functools.partial(argparse.HelpFormatter, max_help_position=30, width=100)
        usage, first = "%(prog)s [flags]", doc.split("\n")[0]
        # Without abbreviations: one of an experiment's flag would be q_search.py's.
        super().__init__(
            None, usage, first, epilog, formatter_class=help_format, allow_abbrev=False
        )
        self.group, self.free_names = self.add_argument_group(FREE), list[str]()
        add = self.add_argument
        names = "webshop (default), alfworld, sciworld, frozenlake, or MODULE:CLASS"
        add("--env", metavar="NAME", help=names)
        add("--env-option", type=option, action="append", metavar="NAME=VALUE", help="repeatable")
        add("--run", type=Path, metavar="DIR", help="folder of this run's files (runs/ENV)")
        add("--seed", type=at_least(0, most=2**32 - 1), metavar="N", help="the run's, or 0")
        add("--overwrite", action="store_true", help="make the output again from scratch")
        add("--debug", action="store_true", help="show the traceback of an error")

    def free(self, *names: str, **options: Any) -> None:
        """Add a flag that may differ when a run resumes."""
        self.free_names.append(self.group.add_argument(*names, **options).dest)


def defaults_text(paper: dict[str, Any], tiny: dict[str, Any], small: str) -> str:
    """What a stage's --help says of them; small: the models that have the second."""

    def text(settings: dict[str, Any]) -> str:
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())

    return f"Defaults: {text(paper)}; of {small} {text(tiny)}."


def add_memory(parser: Parser) -> None:
    """How a large model is trained in little memory; for `models.prepare_training`."""
    add = parser.add_argument
    add("--load-in", choices=["4bit", "8bit"], help="bits per weight")
    add("--lora", type=positive, metavar="RANK", help="train updates of this rank alone")
    add("--lora-alpha", type=positive, metavar="A", help="their factor is A/RANK (2 RANK)")
    add("--optim", choices=["adamw", "adamw8bit"], default="adamw", help="default: adamw")
    text = "less memory, a third more time"
    parser.free("--gradient-checkpointing", action="store_true", help=text)
    parser.free("--device")


def add_training(parser: Parser, batch: str) -> None:
    """The flags of a stage that trains; `batch`: what an update holds."""
    add = parser.add_argument
    add("--epochs", type=positive, metavar="N", help="at most")
    add("--lr", type=real, help=f"peak learning rate; with --lora {LORA_LR}")
    add("--batch", type=positive, metavar="N", help=f"{batch} per update")
    add("--patience", type=positive, default=2, metavar="N", help="epochs without a gain (2)")
    add_precision(parser)
    text = "padded tokens in memory at once"
    parser.free("--micro-tokens", type=positive, metavar="N", help=text)
    parser.free("--save-every", type=positive, default=50, metavar="N", help="updates (50)")
    parser.free("--log-with", choices=["wandb", "tensorboard", "trackio"], help="curves, live")
    add_memory(parser)


def add_precision(parser: Parser) -> None:
    text = "default: bf16 on a GPU, float32 on a CPU"
    parser.add_argument("--precision", choices=["float32", "bf16"], help=text)


def add_prompt(parser: Parser) -> None:
    """What a prompt depends on, which agent and QNet must share."""
    add = parser.add_argument
    add("--max-new-tokens", type=positive, metavar="N", help="of an action (256; tiny: 48)")
    add("--truncate", choices=["oldest"], help="leave out old turns beyond the context")


def add_sampling(parser: Parser) -> None:
    """The flags of a stage that samples, besides --temperature; for `agent.load_agent`."""
    add, free = parser.add_argument, parser.free
    add_prompt(parser)
    add("--top-p", type=at_least(0.01, float, 1), metavar="P", help="of free text (1)")
    add("--top-k", type=natural, metavar="K", help="of free text: the K likeliest (0: all)")
    add("--stop", nargs="+", metavar="TEXT", help="texts that end an action")
    add("--load-in", choices=["4bit", "8bit"], help="bits per weight")
    add_precision(parser)
    free("--plain", action="store_true", help="one sequence at a time, for recurrent models")
    free("--cache-gb", type=real, metavar="G", help="for prompts (2; GPU: 1/4 of it)")
    text = "trees or episodes side by side (64; sciworld: 4; own: 1)"
    free("--in-flight", type=positive, metavar="N", help=text)
    free("--server", metavar="URL[#MODEL]", help="OpenAI-compatible, of this checkpoint")
    free("--device")


def at_least(low: float, kind: Callable = int, most: float = 1e30) -> Callable[[str], Any]:
    """A flag's type: a number within [low, most]."""

    def number(text: str) -> Any:
        value = kind(text)  # argparse names what is none
        if not low <= value <= most:  # also refuses nan
            bounds = f"{low:g} or more" if most == 1e30 else f"{low:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: {bounds} is expected")
        return value

    return number


natural, positive, real = at_least(0), at_least(1), at_least(0, float)


def path_or_url(text: str) -> Path | str:
    return text if re.match("https?:", text) else Path(text)


def option(text: str) -> str:
    """A flag's type: NAME=VALUE. The value of an unset shell variable is not what is bundled."""
    if not text.partition("=")[2]:
        mistake = "NAME=VALUE is expected; leave it out for the default"
        raise argparse.ArgumentTypeError(f"{text}: {mistake}")
    return text


def fill_defaults(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What no flag has set takes its value from the settings."""
    for name, value in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


# ---------------------------------------------------------------------------------------- mistakes


OUT_OF_MEMORY = "out of memory|allocate memory"  # of a GPU or a CPU
FEWER = "--gradient-checkpointing, --lora 16, fewer --micro-tokens, --in-flight or --cache-gb"


def run_stage(main: Callable[[], Any]) -> None:
    """A script's last line: mistakes in one line with exit code 2, Ctrl-C without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console may have no "█"
    try:
        module = getattr(sys.modules.get("envs"), "__file__", None)
        if module and Path(module).parent != Path(__file__).parents[1]:
            raise UserError(f"{module} hides our module envs: rename it, or start elsewhere")
        return main()
    except KeyboardInterrupt:
        text = "\nstopped; the same command, without --overwrite, resumes from what is written"
        sys.exit(print(text, file=sys.stderr) or 130)
    except (UserError, OSError, ModuleNotFoundError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        elif isinstance(error, ModuleNotFoundError):
            text += ": pip install it"
        elif "failed writing file" in text:  # torch's
            text = "a file can't be written: is the disk full?"
        elif re.search(OUT_OF_MEMORY, text):
            text = f"out of memory: give {FEWER}"
        if "--debug" in sys.argv or (text == str(error) and isinstance(error, RuntimeError)):
            raise
        sys.exit(print(f"error: {text}", file=sys.stderr) or 2)
