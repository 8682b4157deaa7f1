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
`environments.check` plays the rules of docs/environment.md in your own, as a run begins.
"""

from __future__ import annotations

from qlass import UserError  # first: it tells a missing package in one line

# isort: split
import copy
import zlib
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from environments import AnyText, fair_order
from environments import from_config as from_config
from environments import make as make
from environments.hooks import Hooks

OVER = "The episode is over."  # the answer to a step after the end


class TextEnv(Hooks, gymnasium.Env):
    """The interface that every stage relies on; each environment writes the part below the line.

    `Hooks` has the optional methods, with their defaults: `expert`, `candidates`, `canonical`, ...
    """

    name = ""  # by default that of its class, in small letters
    version = "0"  # of its rules and rewards: raise it when an outcome changes
    instruction = ""  # the first user message: what the environment is and how to answer
    agreement = "OK"  # the agent's answer to it; empty: the task is in the same message
    prefix = "Observation: "  # stands before every observation but the first, as in ETO
    max_steps: int | None = 40  # None: no limit
    tree_steps: int | None = None  # another limit, of exploration trees
    tree_depth = 8  # D of Algorithm 2
    side_by_side = 1  # forks open at once: more only if they share nothing that changes
    markov = False  # instruction and last observation say all that there is to know
    split = "train"  # from which a reset without a task_id draws
    observation_space = action_space = AnyText(20)
    draws: Any = None  # random numbers that choose tasks; np_random is the luck of an episode

    # of the episode at hand
    task_id = ""
    task = ""  # the instruction's sentence alone
    steps = 0
    end: tuple[bool, bool] | None = None  # terminated, truncated; None: nothing has begun

    def __init__(self) -> None:
        self.name = self.name or type(self).__name__.lower()
        self.settings: dict = {}  # its part of a recipe, from `from_config`

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin options["task_id"] or, if it is not given, one of the tasks of `split` by chance.

        A task has the same luck at each play, unless a seed gives it another.
        """
        others = dict(options or {})
        task_id = others.pop("task_id", None)
        if others:
            raise UserError(f"{self.name}: reset has no option {', '.join(others)}: it has task_id")
        if self.draws is None or seed is not None:
            self.draws, _ = seeding.np_random(seed)
        if task_id is None:
            tasks = self.split_ids(self.split)
            task_id = tasks[self.draws.integers(len(tasks))]
        self.task_id = str(task_id)
        self.reseed(zlib.crc32(self.task_id.encode()) if seed is None else seed)
        self.end = None
        observation = self.begin(self.task_id)
        self.steps = 0
        self.end = False, False
        return observation, self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Observation, reward, terminated, truncated and info. After its end an episode stays so.

        Gymnasium's ResetNeeded if no episode has begun.
        """
        if self.end is None:
            raise ResetNeeded(f"{self.name}: call reset before step")
        if any(self.end):
            return OVER, 0.0, *self.end, self.info()
        self.steps += 1
        observation, reward, done = self.act(action)
        limit = self.step_limit()
        truncated = not done and limit is not None and self.steps >= limit
        if truncated:
            reward = self.reward_if_cut()
        self.end = bool(done), truncated
        return observation, float(reward), *self.end, self.info()

    def snapshot(self) -> Any:
        """All that a step changes, in whatever form `restore` takes."""
        luck = self.np_random.bit_generator.state
        return self.task_id, self.steps, self.end, luck, self.save()

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot, which stays as it is: several branches begin there."""
        self.task_id, self.steps, self.end, luck, saved = snapshot
        self.np_random.bit_generator.state = luck
        self.load(saved)

    def fork(self) -> TextEnv:
        """Another player on the same data, for episodes side by side; `close` it after use.

        A shallow copy: each fork needs its own of what an episode changes, such as a simulator.
        """
        other = copy.copy(self)
        other.np_random = copy.deepcopy(self.np_random)
        return other

    def message(self, observation: str) -> str:
        """The user message that carries an observation (all but the first) to the model."""
        return self.prefix + observation

    def task_ids(self, split: str) -> list[str]:
        """The tasks of a split in fair order: every stretch is a fair sample of its types."""
        return fair_order(self.split_ids(split), self.task_type)

    # ----------------------------------------------------------- what each environment has to write

    def split_ids(self, split: str) -> list[str]:
        """The tasks of a split, in any order; UserError if there is no such split."""
        raise NotImplementedError

    def begin(self, task_id: str) -> str:
        """Begin a task. Returns the first observation; UserError if there is no such task."""
        raise NotImplementedError

    def act(self, action: str) -> tuple[str, float, bool]:
        """Observation, reward, and whether the task has ended; any text is answered.

        The reward comes with the end. Chance is drawn from `self.np_random`.
        """
        raise NotImplementedError

    def valid_actions(self) -> list[str]:
        """Every action that would be acted on now, each once, in a fixed order.

        An empty list before the end: actions are not listed, and any text may be one.
        """
        raise NotImplementedError

    def save(self) -> Any:
        """All that `act` changes, in whatever form `load` takes, but for `np_random`."""
        raise NotImplementedError

    def load(self, saved: Any) -> None:
        """Return to what was saved, also in another task; `saved` must stay as it is."""
        raise NotImplementedError
