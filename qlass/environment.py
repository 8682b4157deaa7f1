"""The interface of an environment, which everything else here is built on (paper, App. A.2)."""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from qlass import UserError

OVER = "The episode is over."  # the answer to a step after the end
Player = Iterator[tuple[str, str]]  # of (thought, action); its caller steps between two


class AnyText(spaces.Text):
    """A space of all strings: pages of a shop hold any character."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


def fair_order(task_ids: Iterable[str], task_type: Callable[[str], str]) -> list[str]:
    """The tasks, shuffled so that every stretch holds each type in the proportion of the whole.

    The order depends on the ids alone: demonstrations, trees and `--limit` share it.
    """
    types: dict[str, list[tuple[bytes, str]]] = {}
    for task_id in task_ids:
        lot = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
        types.setdefault(task_type(task_id), []).append((lot, task_id))
    spread = []
    for members in types.values():
        for rank, (lot, task_id) in enumerate(sorted(members)):
            spread.append(((rank + 0.5) / len(members), lot, task_id))
    return [task_id for *_, task_id in sorted(spread)]


def pick(choices: Mapping[str, Any], name: str, what: str) -> Any:
    """The choice of a name; UserError that lists them where there is none. what: the words before a
    wrong name."""
    if name not in choices:
        raise UserError(f"{what} {name!r}: choose one of {', '.join(choices)}")
    return choices[name]


class TextEnv(gymnasium.Env):
    """The interface that stages, experiments and tables rely on.

    Each environment writes the methods of the first section below. All later ones have defaults, so
    that a class of your own names only those that it can serve.
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
    replay_every = 1  # one of so many trees is played again, and of its expert's demonstrations
    omniscient = False  # the expert knows what no page has shown: tables call it an oracle
    markov = False  # instruction and last observation say all that there is to know
    split = "train"  # from which a reset without a task_id draws
    observation_space = action_space = AnyText(20)
    draws: Any = None  # random numbers that choose tasks; np_random is the luck of an episode

    # of the episode at hand
    task_id = ""
    task = ""  # the instruction's sentence alone
    luck = 0  # the seed with which np_random began
    steps = 0
    end: tuple[bool, bool] | None = None  # terminated, truncated; None: nothing has begun

    def __init__(self) -> None:
        self.name = self.name or type(self).__name__.lower()
        self.settings: dict = {}  # its part of a recipe, from `from_config`
        self.known_actions: Counter[bool] = Counter()  # of the agent, in all forks

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
            if not tasks:
                raise UserError(f"{self.name}: the split {self.split!r} has no task")
            task_id = tasks[self.draws.integers(len(tasks))]
        self.task_id = str(task_id)
        self.luck = zlib.crc32(self.task_id.encode()) if seed is None else seed
        self.reseed(self.luck)
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
        if -1e-9 < reward < 1 + 1e-9:  # the last digit of a sum may be beyond 0 or 1
            reward = min(max(reward, 0.0), 1.0)
        return observation, float(reward), *self.end, self.info()

    def snapshot(self) -> Any:
        """All that a step changes, in whatever form `restore` takes."""
        chance = self.np_random.bit_generator.state
        return self.task_id, self.luck, self.steps, self.end, chance, self.save()

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot, which stays as it is: several branches begin there.

        `load` finds the task begun with the snapshot's luck, so that it may play the episode again.
        """
        task_id, luck, steps, end, chance, saved = snapshot
        self.reseed(luck)
        if (task_id, luck) != (self.task_id, self.luck):  # on which `begin` may depend
            self.task_id, self.luck = task_id, luck
            self.begin(task_id)
            self.reseed(self.luck)
        self.load(saved)
        self.steps, self.end = steps, end
        self.np_random.bit_generator.state = chance

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

    # ---------------------------------------------------------------------------- what it may write

    def info(self) -> dict:
        """The report of `reset` and `step` beside the observation."""
        actions = self.valid_actions()
        return {"task_id": self.task_id, "task": self.task, "valid_actions": actions}

    def instruct(self, instruction: str) -> None:
        """Begin with another first user message."""
        self.instruction = instruction

    def task_type(self, task_id: str) -> str:
        """The kind of task, where an environment has several: the order of tasks mixes them."""
        return ""

    def canonical(self, action: str) -> str:
        """One form for all texts that the engine takes for the same action, in whatever state.

        They are one child of a node, and one candidate of a search.
        """
        return action

    def knows(self, action: str) -> bool:
        """True if it would act on this text now."""
        valid = self.valid_actions()
        return not valid or self.canonical(action) in map(self.canonical, valid)

    def reward_if_cut(self) -> float:
        """The reward if a limit of steps stops the episode here."""
        return 0.0

    def expert(self, task_id: str) -> Player:
        """A player that knows the task and the pages shown so far, unless it is `omniscient`."""
        raise UserError(f"{self.name} has no expert: --expert FILE, or --no-expert")

    def thought(self, action: str) -> str:
        """The thought before a candidate, the same for a right action and for a wrong one.

        It says only what follows from the task, the pages so far and the valid actions.
        """
        return ""

    def candidates(self) -> list[tuple[str, str]]:
        """(thought, action) of every valid action at hand, for `--candidates valid`."""
        return [(self.thought(action), action) for action in self.valid_actions()]

    def reseed(self, seed: int) -> None:
        """Use other random numbers from here on. A restored state brings its own."""
        self.np_random, _ = seeding.np_random(seed)

    def forget(self) -> None:
        """Drop what is remembered of the episode at hand, which is about to be played again."""

    def step_limit(self) -> int | None:
        """The number of the step that ends the episode at hand at the latest; None: it goes on."""
        return self.max_steps

    def published_id(self, record: dict) -> str | None:
        """Our id of the task of a record of ETO's files; None: only its words tell the task."""
        return None

    def in_own_words(self, text: str) -> str:
        """A published text, such as a demonstration's message, in the words of this environment."""
        return text

    def subject(self, task_id: str) -> str:
        """The subject of a task: an agent that learned one task of a subject knows the others."""
        return task_id

    def block(self, task_id: str) -> str:
        """Tasks of one block vary together: intervals count blocks, by default subjects."""
        return self.subject(task_id)

    # ------------------------------------------------------------- what experiments and tables call

    def picture(self, observation: str) -> str:
        """The picture that `reporting.show` draws below an observation."""
        return ""

    def oracle(self, task_id: str) -> Player:
        """The best player there is. It may know what no page has shown."""
        return self.expert(task_id)

    def rules(self) -> dict[str, Callable[[], Player]]:
        """Players that learn nothing, by name: what a trained agent has to beat."""
        return {}

    def optimal_value(self, gamma: float = 0.99) -> float:
        """The best discounted outcome still in reach."""
        raise UserError(f"{self.name}: has no oracle for the value of a state")
