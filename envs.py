"""The environments behind one `gymnasium.Env` interface (paper, App. A.2).

    env = envs.make("webshop", data=DIR, max_steps=None)  # None: no limit
    obs, info = env.reset(options={"task_id": t})  # t of env.task_ids("train")
    obs, info = env.reset(seed=0)  # any task of `env.split`
    obs, reward, terminated, truncated, info = env.step("click[buy now]")
    s = env.snapshot(); env.restore(s)
    for thought, action in env.expert(t): ...  # the caller steps `env` with each action

An action is the executable part of a ReAct step, an observation the engine's answer. The reward is
the *outcome*: it arrives with the step that ends the episode, from 0 to 1, and is 0 before. `info`
always holds

    task_id         the id given to reset
    task            the instruction sentence, e.g. "i need a red shirt, and price lower than ..."
    valid_actions   the executable actions that the environment would act on now, in a fixed order

and what the engine itself reports (`clickables`, `admissible_commands`, `won`, ...).
`environments.check` plays the rules of docs/environment.md in your own, at its first use.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium

from environments import ENVIRONMENTS, AnyText, contents_of, fair_order, options_of
from environments.check import check
from environments.hooks import Hooks
from qlass import UserError
from qlass.settings import Run, read_run

UNSET: Any = object()  # "the environment's own limit", where None means no limit at all


class TextEnv(Hooks, gymnasium.Env):
    """What every stage relies on; each environment overrides the part below the line.

    `Hooks` are what experiments and tables ask.
    """

    name = ""  # by default that of its class, in small letters
    version = "0"  # of its rules and rewards: raise it when an outcome changes
    instruction = ""  # the first user message: what the environment is and how to answer
    agreement = "OK"  # the agent's answer to it; empty: the task is in the same message
    prefix = "Observation: "  # stands before every observation but the first, as in ETO
    max_steps: int | None = 40  # inference (App. A.2)
    tree_steps = 18  # exploration trees
    tree_depth = 8  # D of Algorithm 2
    side_by_side = 1  # forks open at once: more only if they share nothing that changes
    markov = False  # instruction and last observation say all that there is to know
    split = "train"  # from which a reset draws that names no task

    def __init__(
        self, max_steps: int | None = UNSET, instruction: str | Path | None = None
    ) -> None:
        """max_steps: None for no limit. instruction: a file with another first user message."""
        self.name = self.name or type(self).__name__.lower()
        if max_steps is not UNSET:
            self.max_steps = max_steps
        if instruction:
            self.instruction = Path(instruction).read_text(encoding="utf-8-sig")
        self.observation_space = self.action_space = AnyText(20)
        self.steps = 0
        self.settings: dict[str, Any] = {}  # what a recipe tells of it, from `from_config`

    def task_of(self, seed: int | None, options: dict | None) -> str:
        """The task that a reset's options name or, if they name none, one of `split` by chance."""
        super().reset(seed=seed)
        if options and "task_id" in options:
            return str(options["task_id"])
        tasks = self.split_ids(self.split)
        return tasks[self.np_random.integers(len(tasks))]

    def instruct(self, instruction: str) -> None:
        """Begin with another first user message."""
        self.instruction = instruction

    def message(self, observation: str) -> str:
        """The user message that carries an observation (all but the first) to the model."""
        return self.prefix + observation

    def task_ids(self, split: str) -> list[str]:
        """The tasks of a split in fair order: every stretch is a fair sample of its types."""
        return fair_order(self.split_ids(split), self.task_type)

    def fork(self) -> TextEnv:
        """Another player on the same data, for episodes side by side; `close` it after use.

        A shallow copy: each fork needs its own of what an episode changes, such as a simulator.
        """
        return copy.copy(self)

    # ------------------------------------------------------------- what each environment overrides

    def split_ids(self, split: str) -> list[str]:
        """The tasks of a split, in any order; UserError if there is no such split."""
        raise NotImplementedError

    def task_type(self, task_id: str) -> str:
        """The kind of task, where an environment has several: tables have a row for each."""
        return ""

    def canonical(self, action: str) -> str:
        """One form for all texts that the engine takes for the same action, in whatever state.

        They are one child of a node, and one candidate of a search.
        """
        return action

    def knows(self, action: str) -> bool:
        """Whether it would act on this text now."""
        return self.canonical(action) in map(self.canonical, self.valid_actions())

    def snapshot(self) -> Any:
        """All that a step changes, in whatever form `restore` takes."""
        raise NotImplementedError

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot, which stays as it is: several branches begin there."""
        raise NotImplementedError

    def reward_if_cut(self) -> float:
        """What the environment pays if the episode is cut here, by a limit of steps."""
        return 0.0

    # A player yields (thought, action); its caller steps this environment between two of them.

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        """A player that knows the task and the pages shown so far, unless it is `omniscient`."""
        raise NotImplementedError

    def candidates(self) -> list[tuple[str, str]]:
        """(thought, action) of every valid action in the state at hand, for `--candidates valid`.

        A thought says only what follows from the task, the pages so far and the valid actions.
        """
        return [("", action) for action in self.valid_actions()]

    def valid_actions(self) -> list[str]:
        """Every action that would be acted on now, each once, in a fixed order."""
        raise NotImplementedError


# -------------------------------------------------------------------- environments by their names


def environment_class(name: str) -> type[TextEnv]:
    """The class of an environment by its name, or by MODULE:CLASS for one of your own."""
    module, _, kind = ENVIRONMENTS.get(name, name).partition(":")
    if not kind:
        choice = f"there are {', '.join(ENVIRONMENTS)}, and MODULE:CLASS for your own"
        raise UserError(f"--env {name}: {choice}")
    return getattr(importlib.import_module(module), kind)


def make(name: str, split: str = "train", **options: Any) -> TextEnv:
    """Build an environment by name; options are those of its class (`data`, `max_steps`, ...).

    split: from which every reset draws that names no task.
    """
    env = environment_class(name)(**options)
    env.split = split
    return env


def from_config(config: Run) -> TextEnv:
    """The environment of --env and --env-option.

    Its `settings` are what a recipe tells of it. A class of your own is checked at its first use.
    """
    options = options_of(environment_class(config.env), config.env_option)
    env = make(config.env, **options)
    if config.env not in ENVIRONMENTS and read_run(config.run).get("env") != config.env:
        check(make(config.env, **options))
    env.settings = {
        "env": config.env,
        "env_option": config.env_option,
        "env_files": contents_of(options),
        "env_version": env.version,
    }
    return env
