"""The agent that the settings of a stage name: its checkpoint, its first messages, its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from qlass.chat import Rendering
from qlass.config import Sampling, is_url
from qlass.files import warn
from qlass.models import device_and_precision, load_checkpoint
from qlass.policy import Policy


def begin_as_cloned(env: Any, rendering: Rendering, config: Any) -> None:
    """Let the environment begin with the messages that the agent was cloned with, but for an
    instruction that --env-option names."""
    env.system = env.system if rendering.system is None else rendering.system
    env.agreement = rendering.agreement = rendering.agreement or env.agreement
    if rendering.instruction not in (None, env.instruction):
        if any(option.startswith("instruction=") for option in config.env_option):
            warn("the agent was cloned with another instruction than --env-option names")
        else:
            env.instruct(rendering.instruction)


def load_policy(path: str | Path, seed: int = 0, cache_gb: Any = None, **options: Any) -> Policy:
    """The agent in a checkpoint. options: of `load_checkpoint`. cache_gb: for what it has read."""
    model, chat = load_checkpoint(path, AutoModelForCausalLM, **options)
    if options.get("plain"):
        return Policy(model, chat, seed)
    from qlass.fast.decode import FastPolicy

    return FastPolicy(model, chat, seed, cache_gb)


def load_agent(sft: Path, config: Sampling, env: Any = None) -> Any:
    """The agent in the checkpoint `sft`, which is to play `env`; with --server only its tokenizer
    is here."""
    options = loading(sft, config)
    if env:
        begin_as_cloned(env, options["rendering"], config)
    if config.server:
        from qlass.optional import served_policy

        return served_policy.load(sft, options["rendering"], config)
    return load_policy(sft, config.seed, config.cache_gb, **options)


def loading(folder: Path, config: Any) -> dict[str, Any]:
    """What `load_checkpoint` takes of the settings."""
    options = {name: getattr(config, name) for name in ("device", "load_in", "precision")}
    options["plain"] = getattr(config, "plain", False)
    return options | {"rendering": Rendering.load(folder, config)}


def settled(config: Any) -> dict[str, Any]:
    """What --precision, --server and a --qnet's URL stand for here, for the recipe: a resumed run
    must not mix a GPU's numbers and a CPU's, nor two models'."""
    facts: dict[str, Any] = {}
    if hasattr(config, "device"):  # a chat model has none here
        named = getattr(config, "precision", None)
        facts["precision"] = device_and_precision(config.device, named)[1]
    for name in ("server", "qnet"):
        url = getattr(config, name, None)
        if url and (name == "server" or is_url(str(url))):
            from qlass.optional.server import Server

            facts[f"{name}_model"] = Server(url, f"--{name}").model
    return facts
