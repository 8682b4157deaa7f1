"""The environments behind one `gymnasium.Env` interface (paper, App. A.2).

    env = envs.make("webshop", data=DIR, max_steps=None)      # None: no limit; default: the environment's own
    obs, info = env.reset(options={"task_id": t})             # t from env.task_ids("train" | "val" | "test" | "all")
    obs, reward, terminated, truncated, info = env.step("click[buy now]")
    s = env.snapshot(); env.restore(s)
    for thought, action in env.expert(t): ...                 # a demonstration, played on `env` by the caller

Text in, text out: an action is the executable part of a ReAct step, an observation what the engine answers. The reward
is the *outcome*: it arrives with the step that ends the episode and is 0 before. `info` always holds

    task_id         the id given to reset
    task            the instruction sentence alone, e.g. "i need a red shirt, and price lower than 20.00 dollars"
    valid_actions   the executable actions that the environment would act on now, in a fixed order

beside what the engine itself tells (`clickables`, `admissible_commands`, `feedback`, `won`, `reward_details`, ...).
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import random
import re
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.utils import categorical_sample
from gymnasium.utils import seeding

import alfworld_data
import alfworld_engine
import alfworld_expert
import alfworld_textworld
import frozenlake
import sciworld
import sciworld_expert
import webshop
import webshop_data
from data import make_alfworld, make_webshop
from files import UserError as UserError

UNSET: Any = object()  # "the environment's own limit", where None means no limit at all


class AnyText(spaces.Text):
    """A space of all strings: pages of a shop hold any character, so membership is the type alone."""

    def __init__(self) -> None:
        super().__init__(max_length=1_000_000, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(1, 20))
        return "".join(self.np_random.choice(list(string.ascii_lowercase + " []"), size=length))


class TextEnv(gymnasium.Env):
    """What every stage relies on; each environment overrides the part below the line."""

    name = ""
    instruction = ""  # the first user message of ETO's layout: what the environment is and how to answer
    prefix = "Observation: "  # ETO puts this in front of every observation but the first
    max_steps: int | None = 40  # inference (App. A.2)
    tree_steps = 18  # exploration trees
    tree_depth = 8  # D of Algorithm 2
    side_by_side = 64  # how many forks may be open at once
    markov = False  # instruction and last observation say all that there is to know

    def __init__(self, max_steps: int | None = UNSET) -> None:
        if max_steps is not UNSET:
            self.max_steps = max_steps
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.steps = 0

    def message(self, observation: str) -> str:
        """The user message that carries an observation (all but the first) to the model."""
        return self.prefix + observation

    def fork(self) -> TextEnv:
        """Another player on the same data, so that many episodes can advance side by side; `close` it after use."""
        return copy.copy(self)

    # --------------------------------------------------------------------------------------------------------------
    def task_ids(self, split: str) -> list[str]:
        raise NotImplementedError

    def snapshot(self) -> Any:
        raise NotImplementedError

    def restore(self, snapshot: Any) -> None:
        raise NotImplementedError

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        """Yield (thought, action); the caller steps this very environment between two of them."""
        raise NotImplementedError

    def candidates(self) -> list[tuple[str, str]]:
        """(thought, action) of every valid action in the state at hand, for `--candidates valid`.

        A thought here says only what the page already shows of the action's object, never what is right.
        """
        return [("", action) for action in self.valid_actions()]

    def valid_actions(self) -> list[str]:
        raise NotImplementedError

    def optimal_value(self, gamma: float = 0.99) -> float:
        """The best discounted outcome still in reach: an oracle, for `q_search.py --method oracle_step` alone."""
        raise UserError(f"{self.name}: has no oracle for the value of a state")


# ------------------------------------------------------------------------------------------------------------ WebShop
class WebShopEnv(TextEnv):
    """WebShop on its own files or on the bundled catalogue (see webshop.py).

    data: folder with items_shuffle*, items_ins_v2*, items_human_ins (.json or .json.gz); None: the bundled catalogue,
    with its own page length and step limit. goals, title_nouns: recorded files instead of drawn goals and of a tagger.
    human_goals: the instructions that people wrote. split_file: published splits by goal index (webshop_data.splits).
    Task i is goal i. Other splits are by product, so that none is in two of them.
    """

    name = "webshop"
    prefix = "Observation:\n"
    max_steps, tree_steps, tree_depth = webshop.MAX_STEPS, webshop.MAX_STEPS, 3
    instruction = (
        "You are shopping on the web.\n"
        "You get an instruction that says what to buy, and have to follow it.\n"
        "Each turn shows you an observation, and you answer with one action that fits it and the instruction.\n"
        "Where the page has a search box you can search; otherwise you can click a button, a product or an option.\n"
        "An action has one of these two forms:\nsearch[keywords]\nclick[value]\n"
        "An action that is not valid changes nothing.\n"
        "The keywords are yours to choose, with care; the value of a click must stand on the page.\n"
        "Your response should use the following format:\n\nThought: I think ...\nAction: click[something]"
    )

    def __init__(
        self,
        data: str | Path | None = None,
        goals: str | Path | None = None,
        title_nouns: str | Path | None = None,
        human_goals: bool = False,
        split_file: str | Path | dict[str, str] | None = None,
        instruction: str | Path | None = None,
        page_size: int | None = None,
        seed: int = 0,
        max_steps: int | None = UNSET,
    ) -> None:
        if data is None:
            self.max_steps = self.tree_steps = webshop.BUNDLED_MAX_STEPS
            page_size = page_size or webshop.BUNDLED_PAGE_SIZE
            data = make_webshop.ensure(seed)
        super().__init__(max_steps)
        files = [path and Path(path) for path in (goals, title_nouns)]
        self.shop = webshop.load(Path(data), *files, human_goals, seed, page_size or webshop.PAGE_SIZE)
        self.splits = webshop_data.splits(self.shop.goals, split_file)
        if instruction:
            self.instruction = webshop_data.read_text(Path(instruction))
        self.index, self.session = 0, webshop.Session()

    @property
    def goal(self) -> dict:
        return self.shop.goals[self.index]

    def task_ids(self, split: str) -> list[str]:
        if split not in self.splits:
            raise UserError(f"webshop: unknown split {split!r}: choose one of {', '.join(self.splits)}")
        return [str(i) for i in self.splits[split]]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        task = (options or {}).get("task_id")
        self.index = int(self.np_random.choice(self.splits["all"])) if task is None else self._index(task)
        self.session, self.steps = webshop.Session(), 0
        return self.shop.text(self.session, self.index), self._info()

    def _index(self, task_id: str) -> int:
        if not str(task_id).isdecimal() or int(task_id) >= len(self.shop.goals):
            raise UserError(f"webshop: unknown task {task_id!r}: tasks are 0 to {len(self.shop.goals) - 1}")
        return int(task_id)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.steps += 1
        self.session, details = self.shop.act(self.session, self.index, action)
        bought = details is not None
        reward = self.session.reward if bought else 0.0
        truncated = not bought and self.max_steps is not None and self.steps >= self.max_steps
        info = self._info() | ({"reward_details": details} if bought else {})
        return self.shop.text(self.session, self.index), reward, bought, truncated, info

    def _info(self) -> dict[str, Any]:
        clickables = list(self.shop.page(self.session).clickables)
        about = {"task_id": str(self.index), "task": self.goal["instruction_text"]}
        return about | {"valid_actions": self.valid_actions(), "clickables": clickables}

    def valid_actions(self) -> list[str]:
        return [action for _, action in self.candidates()]

    def candidates(self) -> list[tuple[str, str]]:
        if self.session.page == "start":
            return [("search for it", f"search[{query}]") for query in self.shop.queries(self.index)]
        return list(self.shop.page(self.session).candidates)

    def snapshot(self) -> tuple[int, webshop.Session, int]:
        return self.index, self.session, self.steps

    def restore(self, snapshot: tuple[int, webshop.Session, int]) -> None:
        self.index, self.session, self.steps = snapshot

    def score(self, asin: str, options: dict[str, str]) -> tuple[float, dict[str, Any]]:
        """The reward that buying this product with these options would give, and its parts."""
        return self.shop.score(self.index, self.shop.position[asin], tuple(options.values()))

    def optimal_value(self, gamma: float = 0.99) -> float:
        """The best discounted final reward within the steps that are left (webshop.Shop.value); for ceilings only."""
        left = 10**6 if self.max_steps is None else self.max_steps - self.steps
        return self.shop.value(self.session, self.index, left, gamma)

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        from experts import shop

        return shop(self)


# ----------------------------------------------------------------------------------------------------------- ALFWorld
class ALFWorldEnv(TextEnv):
    """ALFWorld's household tasks on our engine of its game files (alfworld_engine.py), or on TextWorld itself.

    data: folder with json_2.1.1/ as ALFWorld ships it; None: $ALFWORLD_DATA, else the bundled generator's games.
    engine: "python", or "textworld" for the original (requirements-alfworld.txt). expert: "search", who looks for
    things as a person would, or "walkthrough", the file's shortest plan, which knows where everything is.
    instruction: a file with the first user message; PUT in it stands for the wording of a game's own grammar.
    """

    name = "alfworld"
    instruction = (
        "You are in a household and have a task to do there.\n"
        "First you are told what is in the room and what your task is. Then, each turn, you read what your last action "
        "led to, think about it, and choose one action.\n"
        "Your response should use the following format:\nThought: your thoughts\nAction: your next action\n\n"
        "The actions are:\ngo to {recep}\ntake {obj} from {recep}\nPUT\nopen {recep}\nclose {recep}\nuse {obj}\n"
        "clean {obj} with {recep}\nheat {obj} with {recep}\ncool {obj} with {recep}\nexamine {obj or recep}\n"
        "look\ninventory\nwhere {obj} is an object and {recep} a receptacle, both with their number.\n"
        'An action that is not possible changes nothing, and is answered with "Nothing happens."'
    )
    wordings = ("move {obj} to {recep}", "put {obj} in/on {recep}")  # PUT in games of the newer, the older grammar

    def __init__(
        self,
        data: str | Path | None = None,
        engine: str = "python",
        expert: str = "search",
        instruction: str | Path | None = None,
        seed: int = 0,
        max_steps: int | None = UNSET,
    ) -> None:
        super().__init__(max_steps)
        for name, value, known in (("engine", engine, "python textworld"), ("expert", expert, "search walkthrough")):
            if value not in known.split():
                raise UserError(f"alfworld: unknown {name} {value!r}: choose {known.replace(' ', ' or ')}")
        self.engine, self.teacher = engine, expert
        self.games = alfworld_data.Games(data or os.environ.get("ALFWORLD_DATA") or make_alfworld.ensure(seed))
        self.told = webshop_data.read_text(Path(instruction)) if instruction else self.instruction
        self.task_id, self.instruction = "", self.told.replace("PUT", self.wordings[0])

    def task_ids(self, split: str) -> list[str]:
        return self.games.ids(split)

    def _load(self, task_id: str) -> None:
        if task_id != self.task_id:
            self.game = self.player = self.games.load(task_id)
            if self.engine == "textworld":
                self.player = alfworld_textworld.TextWorldGame(self.games.path(task_id))
            self.instruction = self.told.replace("PUT", self.wordings[self.game.old])
            self.task_id = task_id

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self._load((options or {}).get("task_id") or str(self.np_random.choice(self.task_ids("all"))))
        self.state, self.steps, self.feedback = self.player.start, 0, self.player.first
        observation = self.feedback.removeprefix(alfworld_engine.BANNER)
        self.memory = alfworld_expert.Memory.first(observation, self.games.rates, self.game.old)
        return observation, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.steps += 1
        self.state, self.feedback = self.player.step(self.state, action)
        observation = re.sub(r"^You arrive at loc \d+\. ", "", self.feedback.strip())
        self.memory = self.memory.after(action.strip(), observation, self.state.commands)
        truncated = not self.state.won and self.max_steps is not None and self.steps >= self.max_steps
        return observation, float(self.state.won), self.state.won, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "task": self.game.task,
            "valid_actions": self.valid_actions(),
            "admissible_commands": sorted(self.state.commands),
            "feedback": self.feedback,
            "won": self.state.won,
        }

    def valid_actions(self) -> list[str]:
        return [command for command in sorted(self.state.commands) if command != "help"]

    def candidates(self) -> list[tuple[str, str]]:
        """Each with a thought on what was seen so far of its object and what the task asks; nothing hidden enters."""
        return [(self.memory.thought(action), action) for action in self.valid_actions()]

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        walkthrough = iter(self.game.walkthrough or alfworld_expert.plan(self.game, self.game.start) or [])
        while not self.state.won:
            action = next(walkthrough, None) if self.teacher == "walkthrough" else self.memory.decide()
            if action is None:  # nothing left to search
                return
            yield self.memory.thought(action), action

    def snapshot(self) -> tuple:
        return self.task_id, self.state, self.memory, self.steps, self.feedback

    def restore(self, snapshot: tuple) -> None:
        self._load(snapshot[0])
        _, self.state, self.memory, self.steps, self.feedback = snapshot

    def distance(self) -> int | None:
        """Steps that one needs from here who knows where everything is (alfworld_expert.plan); None: no way is left."""
        if self.engine != "python":
            raise UserError("alfworld: plans need engine='python': TextWorld hides its state")
        way = alfworld_expert.plan(self.game, self.state)
        return None if way is None else len(way)

    def optimal_value(self, gamma: float = 0.99) -> float:
        """gamma ** distance, 0 where the goal is out of reach in the steps that are left. An oracle, for ceilings."""
        distance = self.distance()
        left = float("inf") if self.max_steps is None else self.max_steps - self.steps
        return 0.0 if distance is None or distance > left else gamma**distance


# ------------------------------------------------------------------------------------------------------- ScienceWorld
class SciWorldEnv(TextEnv):
    """ScienceWorld on the simulator of the `scienceworld` package (see sciworld.py).

    Tasks are `split/name/variation`; "test_seen" is the package's dev split and "test_unseen" its test split, as ETO
    has them. max_steps "eto": ETO's own limit for each task. simulators: how many JVMs (0.5 GB each) may run at once.
    tasks: "all" 30, "eto" for the 24 that ETO has, or names with commas between them.
    simplifications: the simulator's own list; "easy" opens doors, not containers, and adds teleporting.
    The reward is the best score of the episode, 0 to 1: it ends when the task is done, spoilt, or out of steps.
    A restore replays the actions of the episode, unless a simulator is there already.
    """

    name = "sciworld"
    tree_depth, side_by_side = 6, 4
    instruction = (
        "You are a scientist who does an experiment in a building and its surroundings. Its rooms are: kitchen, "
        "foundry, workshop, bathroom, outside, living room, bedroom, greenhouse, art studio, hallway.\n"
        "Explore, find what you need, and complete the experiment. You can teleport to any room in one step.\n\n"
        "The actions are, with an object for OBJ and a room for LOC:\nlook around\nteleport to LOC\nlook at OBJ\n"
        "open OBJ\nclose OBJ\n"
        "pick up OBJ\nput down OBJ\nmove OBJ to OBJ\npour OBJ into OBJ\nmix OBJ\nactivate OBJ\ndeactivate OBJ\n"
        "use OBJ on OBJ\nconnect OBJ to OBJ\ndisconnect OBJ\nread OBJ\neat OBJ\ninventory\n"
        "focus on OBJ: tell that this is the object that the task asks for\nwait: let 10 steps pass\n"
        "wait1: let one step pass\n\n"
        "Your response should use the following format:\nThought: your thoughts\nAction: your next action"
    )

    def __init__(
        self,
        tasks: str = "all",
        simplifications: str = "easy",
        simulators: int = 4,
        instruction: str | Path | None = None,
        max_steps: int | str | None = UNSET,
    ) -> None:
        super().__init__(max_steps)
        if isinstance(self.max_steps, str) and self.max_steps != "eto":
            raise UserError(f"sciworld: max_steps is a number or eto, not {max_steps!r}")
        self.tasks, self.simplifications, self.side_by_side = tasks, simplifications, simulators
        self.pool = sciworld.simulators()
        self.pool.size = simulators
        if instruction:
            self.instruction = webshop_data.read_text(Path(instruction))

    def task_ids(self, split: str) -> list[str]:
        if split not in (ids := sciworld.task_ids(self.tasks)):
            raise UserError(f"sciworld: unknown split {split!r}: choose one of {', '.join(ids)}")
        return ids[split]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        task_id = (options or {}).get("task_id") or str(self.np_random.choice(self.task_ids("train")))
        self.task = sciworld.find_task(task_id, self.simplifications)
        self.task_id, self.played, self.recent, self.best, self.steps = task_id, (), (), 0.0, 0
        self.pool.players.add(self)
        description = self.pool.description(self.task)
        return description, self._info(description, 0.0)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        turn, self.played = self.pool.step(self.task, self.played, action)
        self.recent = (*self.recent, (action, turn.observation))[-3:]
        self.best, self.steps = max(self.best, turn.score), self.steps + 1
        limit = sciworld.eto_steps(self.task) if self.max_steps == "eto" else self.max_steps
        truncated = not turn.over and limit is not None and self.steps >= limit
        reward = self.best if turn.over or truncated else 0.0
        return turn.observation, reward, turn.over, truncated, self._info(turn.observation, turn.score)

    def _info(self, feedback: str, score: float) -> dict[str, Any]:
        task = self.pool.description(self.task).removeprefix("Task Description:\n")
        info = {"task_id": self.task_id, "task": task, "feedback": feedback, "score": score, "won": score >= 1}
        valid = functools.partial(self.pool.valid_actions, self.task, self.played)  # costs ten times what a step does
        return sciworld.Lazy(info, valid_actions=valid, admissible_commands=valid)

    def valid_actions(self) -> list[str]:
        return self.pool.valid_actions(self.task, self.played)

    def candidates(self) -> list[tuple[str, str]]:
        """At most 60 (see sciworld_expert.candidates); where the simulator asks which object is meant, the answers."""
        if self.recent and self.recent[-1][1].startswith(sciworld.AMBIGUOUS):
            return [(meant, str(i)) for i, meant in enumerate(sciworld.choices(self.recent[-1][1]))]
        told = " ".join(f"{a} {o}" for a, o in self.recent if not re.match("This (room|outside location) is", o))
        task, held = self.pool.description(self.task), self.pool.inventory(self.task, self.played)
        chosen = sciworld_expert.candidates(self.valid_actions(), task, told, held)
        return [(sciworld_expert.thought(action), action) for action in chosen]

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        for action in sciworld_expert.expert_plan(sciworld.find_task(task_id, self.simplifications)):
            yield sciworld_expert.thought(action), action

    def snapshot(self) -> Any:
        return self.task, self.task_id, self.played, self.recent, self.best, self.steps

    def restore(self, snapshot: Any) -> None:
        self.task, self.task_id, self.played, self.recent, self.best, self.steps = snapshot
        self.pool.players.add(self)

    def close(self) -> None:
        """Leave the simulator to others; it ends with this process, or by `sciworld.simulators().close()`."""
        self.pool.players.discard(self)


# --------------------------------------------------------------------------------------------------------- FrozenLake
class FrozenLakeEnv(TextEnv):
    """Gymnasium's FrozenLake as text (see frozenlake.py), with its exact Q*.

    map is "8x8", "4x4" (tasks are starts), "random8" or "random4" (tasks are maps). Gymnasium's rules hold, so the ice
    slips by chance if it is slippery; a reset without a seed gives a task the same chances every time it is played.
    stray: how often the demonstrator makes just any move that keeps the goal in reach, so that who learns from it knows
    more than one way. 0: always the shortest.
    """

    name = "frozenlake"
    task = "reach the goal"
    rules = (
        "You are walking on a frozen lake. On its map F is ice, H a hole and G the goal. A cell is named by its row "
        "and its column, both from 0. Each turn you move one cell: your action is left, down, right or up. Reach the "
        "goal and do not fall into a hole.\n"
        "Your response should use the following format:\nThought: your thoughts\nAction: your next action"
    )
    prefix, instruction, markov = "", rules, True

    def __init__(
        self, map: str = "8x8", slippery: bool = False, stray: float = 0.3, max_steps: int | None = UNSET
    ) -> None:
        super().__init__(max_steps)
        if map not in frozenlake.LAYOUTS:
            raise UserError(f"frozenlake: unknown map {map!r}: choose one of {', '.join(frozenlake.LAYOUTS)}")
        self.layout, self.stray = ("slippery-" if slippery else "") + map, stray

    def task_ids(self, split: str) -> list[str]:
        parts = {"train": (0, 1), "val": (2,), "test": (3, 4), "all": (0, 1, 2, 3, 4)}  # 40, 20 and 40 %
        if split not in parts:
            raise UserError(f"frozenlake: unknown split {split!r}: choose one of {', '.join(parts)}")
        return [task for i, task in enumerate(frozenlake.tasks(self.layout)) if i % 5 in parts[split]]

    def _load(self, task_id: str) -> None:
        try:
            self.lake = frozenlake.load(task_id)
        except ValueError as error:
            raise UserError(f"frozenlake: {error}") from None
        self.task_id, self.cell = task_id, int(self.lake.s)
        # A fixed map is told once; a random one stands in each observation, its rows to be read cell by cell.
        self.new_map = "random" in task_id
        rows = ((" " if self.new_map else "").join(row) for row in self.lake.desc.astype(str))
        self.rows = "\n".join(rows).replace("S", "F")
        self.instruction = self.rules if self.new_map else f"{self.rules}\nThe map:\n{self.rows}"

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self._load((options or {}).get("task_id") or str(self.np_random.choice(self.task_ids("train"))))
        self.chances, _ = seeding.np_random(zlib.crc32(self.task_id.encode()) if seed is None else seed)
        self.steps = 0
        return self._look(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.steps += 1
        move, reward, terminated, note = action.strip().lower(), 0.0, False, ""
        if move in frozenlake.MOVES:
            outcomes = self.lake.P[self.cell][frozenlake.MOVES.index(move)]
            chosen = categorical_sample([probability for probability, *_ in outcomes], self.chances)
            _, self.cell, reward, terminated = outcomes[chosen]
        else:
            note = "Invalid action: choose left, down, right or up. "
        truncated = not terminated and self.max_steps is not None and self.steps >= self.max_steps
        return note + self._look(), float(reward), bool(terminated), truncated, self._info()

    def _where(self) -> str:
        return f"cell {frozenlake.name_of(self.lake, self.cell)}"

    def _look(self) -> str:
        kind, where = frozenlake.kind(self.lake, self.cell), self._where()
        if kind != "ice":
            return f"You fell into a hole at {where}." if "hole" in kind else f"You reached the goal at {where}."
        if not self.new_map:
            return f"At {where}."
        around = ", ".join(f"{move} {frozenlake.ahead(self.lake, self.cell, move)}" for move in frozenlake.MOVES)
        return f"{self.rows}\nAt {where}. Around you: {around}."

    def _info(self) -> dict[str, Any]:
        return {"task_id": self.task_id, "task": self.task, "valid_actions": self.valid_actions()}

    def valid_actions(self) -> list[str]:
        return list(frozenlake.MOVES) if frozenlake.kind(self.lake, self.cell) == "ice" else []

    def candidates(self) -> list[tuple[str, str]]:
        return [(self._thought(move), move) for move in self.valid_actions()]

    def _thought(self, move: str) -> str:
        """What a random map shows in that direction, the same words for a right move and a wrong one. A fixed map is
        to be known by heart: no thoughts."""
        return f"{move} is {frozenlake.ahead(self.lake, self.cell, move)}" if self.new_map else ""

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        """The optimal policy for gamma = 0.9 but for straying; the task id decides among equals and when to stray."""
        q, rng = self.q_star(), random.Random(task_id)
        while self.valid_actions():
            least = 0.0 if rng.random() < self.stray else q[self.cell].max() - 1e-9
            move = frozenlake.MOVES[rng.choice(np.flatnonzero(q[self.cell] > least))]
            yield self._thought(move), move

    def snapshot(self) -> Any:
        return self.task_id, self.cell, self.steps, copy.deepcopy(self.chances)

    def restore(self, snapshot: Any) -> None:
        task_id, cell, steps, chances = snapshot
        self._load(task_id)
        self.cell, self.steps, self.chances = cell, steps, copy.deepcopy(chances)

    def q_star(self, gamma: float = 0.9) -> np.ndarray:
        """Q*(s, a) of every cell, row by row, shape (cells, 4): see frozenlake.q_star."""
        return frozenlake.q_star(self.lake, gamma)

    def q_star_of(self, action: str, gamma: float = 0.9) -> float:
        """Q*(s, a) here; an invalid action only costs its step: gamma * max_a Q*(s, a)."""
        q, move = self.q_star(gamma)[self.cell], action.strip().lower()
        return float(q[frozenlake.MOVES.index(move)] if move in frozenlake.MOVES else gamma * q.max())

    def optimal_value(self, gamma: float = 0.9) -> float:
        """What it is worth to have come here, gamma * max_a Q*(s, a): without slipping, gamma ** moves to the goal."""
        return gamma * float(self.q_star(gamma)[self.cell].max())


# ------------------------------------------------------------------------------------------------------------ registry
# name -> (class name in this file); `make` is the one door, also behind gymnasium.make("qlass/WebShop-v0").
ENVIRONMENTS = {
    "webshop": "WebShopEnv",
    "alfworld": "ALFWorldEnv",
    "sciworld": "SciWorldEnv",
    "frozenlake": "FrozenLakeEnv",
}


def make(name: str, **options: Any) -> TextEnv:
    """Build an environment by name; options are those of its class (`data`, `max_steps`, ...)."""
    if name not in ENVIRONMENTS:
        raise UserError(f"unknown environment {name!r}: choose one of {', '.join(ENVIRONMENTS)}")
    return globals()[ENVIRONMENTS[name]](**options)


for _name, _class in ENVIRONMENTS.items():
    gymnasium.register(id=f"qlass/{_class[:-3]}-v0", entry_point=f"envs:{_class}")


def from_arguments(args: argparse.Namespace, **options: Any) -> TextEnv:
    """The environment that the flags name; `options` are the stage's own (`max_steps`)."""
    data = {"webshop": args.webshop_data, "alfworld": args.alfworld_data}.get(args.env)
    if data:
        options["data"] = data
    if args.engine:
        options["engine"] = args.engine
    for option in args.env_option:
        name, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"--env-option {option}: NAME=VALUE is expected, e.g. map=4x4")
        try:
            options[name] = json.loads(value)  # numbers, true, false, null
        except json.JSONDecodeError:
            options[name] = value
    try:
        return make(args.env, **options)
    except TypeError as error:
        raise UserError(f"--env-option: {error}") from None
