"""The agent that the flags of a stage name: its checkpoint, its engine, and how it is prompted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from qlass.chat import Rendering
from qlass.fast.decode import FastPolicy
from qlass.files import warn
from qlass.models import load_chat, load_checkpoint
from qlass.policy import Policy
from qlass.server import ServerPolicy


def begin_as_cloned(env: Any, rendering: Rendering, args: argparse.Namespace) -> None:
    """Let the environment begin with the messages that the agent was cloned with, but for an
    instruction that --env-option names."""
    env.system = env.system if rendering.system is None else rendering.system
    env.agreement = rendering.agreement = rendering.agreement or env.agreement
    if rendering.instruction not in (None, env.instruction):
        if any(option.startswith("instruction=") for option in args.env_option):
            warn(f"{args.sft} was cloned with another instruction than --env-option names")
        else:
            env.instruct(rendering.instruction)


def load_policy(path: str | Path, seed: int = 0, cache_gb: Any = None, **options: Any) -> Policy:
    """The agent in a checkpoint. options: of `load_checkpoint`. cache_gb: for what it has read."""
    model, chat = load_checkpoint(path, AutoModelForCausalLM, **options)
    if options.get("plain"):
        return Policy(model, chat, seed)
    return FastPolicy(model, chat, seed, cache_gb)


def load_agent(args: argparse.Namespace, env: Any = None) -> Any:
    """The agent that the flags describe, which is to play `env`; with --server only its tokenizer
    is here."""
    options = loading(args.sft, args)
    if env:
        begin_as_cloned(env, options["rendering"], args)
    if args.server:
        chat = load_chat(args.sft, options["rendering"])
        return ServerPolicy(args.server, chat, args.seed, args.in_flight or 64)
    return load_policy(args.sft, args.seed, args.cache_gb, **options)


def loading(folder: Path, args: Any) -> dict[str, Any]:
    """What `load_checkpoint` takes of the flags."""
    options = {name: getattr(args, name) for name in ("device", "load_in", "plain", "precision")}
    return options | {"rendering": Rendering.load(folder, args)}
