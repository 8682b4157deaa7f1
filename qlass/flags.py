"""The flags of a stage that loads or trains a model, and the agent and QNet that they name."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.chat import Rendering
from qlass.cli import at_least, more
from qlass.files import read_meta

LORA_LR = 2e-4  # updates that start from 0 take larger steps than weights
PROMPTED = ("max_new_tokens", "truncate")  # of a Rendering: what a prompt depends on, for the agent and QNet alike
RENDERED = ("temperature", "top_p", "top_k", "stop", "think", *PROMPTED)  # all of it that has a flag
LOAD_IN = {"choices": ["4bit", "8bit"], "metavar": "BITS", "help": "fewer bits a weight: 4bit or 8bit (a GPU's)"}
DTYPE = "float32 or bf16 (default: bf16 on a GPU, float32 on a CPU)"
PRECISION = {"choices": ["float32", "bf16"], "metavar": "NAME", "help": DTYPE}


def add_memory(parser: Any) -> None:
    """How a large model is trained in little memory; for `check_training` and `models.save_memory`."""
    add = more(parser)
    add("--load-in", **LOAD_IN)
    add("--lora", type=at_least(1), metavar="RANK", help="train updates of this rank instead of the weights")
    add("--lora-alpha", type=at_least(1), metavar="A", help="the updates' factor is A / RANK (default: twice the rank)")
    optimisers = {"choices": ["adamw", "adamw8bit"], "default": "adamw", "metavar": "NAME"}
    add("--optim", **optimisers, help="adamw or adamw8bit (default: %(default)s)")
    trade = "keep one layer's activations at a time, compute a third more"
    add("--gradient-checkpointing", action="store_true", help=trade)


def add_training(parser: Any, paper: dict, tiny: dict, batch: str) -> None:
    """The flags of a stage that trains; `batch`: what an update holds."""
    add = parser.add_argument
    default = {name: f"default: {value}; tiny: {tiny[name]}" for name, value in paper.items()}
    add("--epochs", type=at_least(1), help=f"at most ({default['epochs']})")
    add("--lr", type=at_least(0, float), help=f"{default['lr']}; with --lora {LORA_LR}")
    add("--batch", type=at_least(1), help=f"{batch} an update ({default['batch']})")
    add("--micro-tokens", type=at_least(1), help=f"padded tokens in memory at once ({default['micro_tokens']})")
    add_memory(parser)
    add = more(parser)
    add("--precision", **PRECISION)
    add("--patience", type=at_least(1), default=2, help="epochs without a better validation until it stops (2)")
    add("--save-every", type=at_least(1), default=50, metavar="N", help="updates between checkpoints (default: 50)")


def check_training(args: argparse.Namespace) -> None:
    if (args.lora_alpha or args.load_in) and not args.lora:
        raise UserError("--lora-alpha, --load-in: a training has them beside --lora RANK alone; give that too")


def add_prompted(parser: Any) -> None:
    """The flags of PROMPTED, which agent and QNet must share."""
    add = more(parser)
    add("--max-new-tokens", type=at_least(1), metavar="N", help="of an action (256; tiny: 48)")
    text = "leave out the oldest turns of a prompt beyond the model's context"
    add("--truncate", choices=["oldest"], help=text)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The flags of a stage that samples from the agent, besides --temperature; for `load_agent`."""
    group = parser.add_argument_group("sampling (defaults: the checkpoint's policy.json)")
    add_prompted(group)
    add = more(group)
    add("--load-in", **LOAD_IN)
    add("--precision", **PRECISION)
    add("--top-p", type=at_least(0.01, float, 1), metavar="P", help="of free text: the likeliest that hold P together")
    add("--top-k", type=at_least(0), metavar="K", help="of free text: the K likeliest (0: all)")
    add("--stop", nargs="+", metavar="TEXT", help="texts that end an action, as the end of the turn does")
    add("--think", action="store_true", default=None, help="let a reasoning model think first (raise --max-new-tokens)")
    add("--plain", action="store_true", help="one sequence at a time, for models that read no token trees")
    add("--cache-gb", type=at_least(0, float), metavar="G", help="room for read prompts (default: 2; GPU: 1/4 of it)")
    add("--decode-tokens", type=at_least(1), default=16_384, metavar="N", help="of a batch (default: %(default)s)")
    add("--in-flight", type=at_least(1), metavar="N", help="trees or episodes side by side (64; sciworld: 4; own: 1)")
    add("--server", metavar="URL[#MODEL]", help="sample on an OpenAI-compatible server of this checkpoint")


def rendering_of(folder: Path, args: argparse.Namespace, names: Sequence[str] = RENDERED) -> Rendering:
    """A checkpoint's rendering, but for what the flags of these names say."""
    settings = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return dataclasses.replace(Rendering.load(folder), **settings)


def warn_of_another_world(folder: Path, args: argparse.Namespace) -> None:
    """A line for each flag of the environment that a checkpoint was trained with otherwise."""
    trained = read_meta(folder.absolute())["arguments"]
    for name in ("env", *getattr(args, "env_flags", ())):
        before, now = trained.get(name, getattr(args, name)), getattr(args, name)
        if before != now:
            flag = "--" + name.replace("_", "-")
            print(f"warning: {folder} was trained with {flag} {before}, not with {now}", file=sys.stderr)


def begin_as_cloned(env: Any, rendering: Rendering, args: argparse.Namespace) -> None:
    """Let the environment begin with the messages that the agent was cloned with; --instruction overrides its part."""
    env.system = env.system if rendering.system is None else rendering.system
    env.agreement = rendering.agreement or env.agreement
    cloned = rendering.instruction or env.instruction
    if cloned != env.instruction and getattr(args, "instruction", None):
        print(f"warning: {args.sft} was cloned with another instruction than --instruction", file=sys.stderr)
    elif cloned != env.instruction:
        env.instruct(cloned)


def load_agent(args: argparse.Namespace, env: Any = None) -> Any:
    """The agent that the flags describe, and that is to play `env`: --sft here, or its tokenizer with --server."""
    from qlass.models import load_chat
    from qlass.policy import Policy
    from qlass.server import ServerPolicy

    rendering = rendering_of(args.sft, args)
    warn_of_another_world(args.sft, args)
    if env:
        begin_as_cloned(env, rendering, args)
    if args.server:
        return ServerPolicy(args.server, load_chat(args.sft, rendering), args.seed, args.in_flight or 64)
    return Policy.load(args.sft, seed=args.seed, **loading(args, rendering))


def load_qnet(folder: Path, args: argparse.Namespace) -> Any:
    """The QNet in a folder, with the agent's prompts."""
    from qlass.qnet import QNet

    return QNet.from_pretrained(folder, **loading(args, rendering_of(folder, args, PROMPTED)))


def loading(args: argparse.Namespace, rendering: Rendering) -> dict[str, Any]:
    names = ("device", "load_in", "plain", "precision", "cache_gb")
    return {name: getattr(args, name) for name in names} | {"rendering": rendering, "budget": args.decode_tokens}
