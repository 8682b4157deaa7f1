"""The agent of a checkpoint: the plain policy, its fast twin, or one behind a server."""

import importlib
from pathlib import Path
from typing import Any

from qlass import models
from qlass.chat import Rendering
from qlass.environment import TextEnv
from qlass.policy import Policy
from qlass.settings import Run, Sampling


def load_agent(sft: Path, config: Sampling, env: TextEnv | None = None) -> Any:
    """The agent in the checkpoint `sft`, which is to play `env` from the messages that it was
    cloned with; with --server only its tokenizer is here."""
    agent = served().ServedPolicy(sft, config) if config.server else load_policy(sft, config)
    if env:
        set_first_messages(env, agent.chat.rendering, config)
    return agent


def served() -> Any:
    """The module for models behind a server. A flag with a URL alone opens it, by its name: qlass
    imports nothing from the rooms above."""
    return importlib.import_module("integrations.served")


def set_first_messages(env: TextEnv, rendering: Rendering, config: Run) -> None:
    """Let an environment begin with the messages that the agent was cloned with."""
    if rendering.agreement is not None:
        env.agreement = rendering.agreement
    named = any(option.startswith("instruction=") for option in config.env_option)
    if rendering.instruction and not named:
        env.instruct(rendering.instruction)


def load_policy(path: Path, config: Sampling) -> Policy:
    """The model in a checkpoint: `Policy`, or without --plain its fast twin."""
    model, chat = models.load_model(path, config)
    if config.plain:
        return Policy(model, chat, config.seed)
    from qlass.fast.decode import FastPolicy

    return FastPolicy(model, chat, config.seed, config.cache_gb)
