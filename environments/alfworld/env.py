"""ALFWorld behind `envs.TextEnv`: its rules are engine.py's."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import make_alfworld
from environments import writable
from environments.protocols import published_splits
from qlass import UserError
from qlass.environment import Player, TextEnv

from . import engine, expert, games, plans
from .engine import PUT, PUT_ANSWERS


class ALFWorldEnv(TextEnv):
    """ALFWorld's household tasks on our engine of its game files (engine.py).

    data: folder with json_2.1.1/ as ALFWorld ships it; None: the bundled generator's games,
    made when they are first asked for.
    PUT in an instruction stands for the wording of a game's own grammar.
    split_file: published splits instead (protocols.published_splits).
    thoughts: whether candidates and the expert have them; they restate the task and all texts so far. Where the task
    is an annotator's sentence there are none, and the expert knows the game's goal.
    """

    name, side_by_side = "alfworld", 64
    tree_steps = 18
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

    def __init__(
        self,
        data: str | Path | None = None,
        thoughts: bool = True,
        seed: int = 0,
        split_file: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.published = published_splits(split_file) if split_file else {}
        self.thoughts = thoughts
        self.seed = seed
        if data:
            self.games = games.Games(data)
        self.loaded = ""  # no task yet
        self.instruct(self.instruction)

    @functools.cached_property
    def games(self) -> games.Games:
        """The bundled ones: a command that is refused before it asks for a task has made none."""
        return games.Games(make_alfworld.ensure(self.seed, writable(make_alfworld.GENERATED)))

    def split_ids(self, split: str) -> list[str]:
        if split not in self.published:
            if self.published and split.startswith("valid"):  # as presets have it
                raise UserError(f"{self.name}: split_file has no {split}: --split names {', '.join(self.published)}")
            return self.games.ids(split)
        file, ids = self.published[split]
        for task_id in ids:
            if not self.games.path(str(task_id)).is_file():
                raise UserError(f"{file}: {self.games.root} has no game {task_id}: take the games it is for")
        return list(dict.fromkeys(ids))

    def block(self, task_id: str) -> str:
        """Trials of one goal in one room hardly differ."""
        return task_id.rpartition("/")[0]

    def published_id(self, record: dict) -> str | None:
        folders = "|".join(games.FOLDERS)
        match = re.search(rf"(?<![^/])({folders})/[^/]+/trial_[^/]+", str(record.get("game_file")))
        return match and match[0]

    def instruct(self, instruction: str) -> None:
        self.template = instruction
        put = PUT[bool(self.loaded) and self.game.old].format("{obj}", "{recep}")
        self.instruction = re.sub(r"\bPUT\b", put, instruction)

    def in_own_words(self, text: str) -> str:
        """ETO's demonstrations are of the older grammar (put X in/on Y), alfworld's games since 0.4 of the newer."""
        if not self.loaded:
            self._load(self.split_ids("train")[0])
        for newer, older in (PUT, PUT_ANSWERS):
            theirs, ours = (newer, older) if self.game.old else (older, newer)
            pattern = re.escape(theirs).replace(r"\{\}", r"([a-z]+ \d+|\{\w+\})")
            text = re.sub(pattern, lambda match, ours=ours: ours.format(*match.groups()), text)
        return text

    def task_type(self, task_id: str) -> str:
        return task_id.split("/")[1].split("-")[0]

    def _load(self, task_id: str) -> None:
        if task_id != self.loaded:
            self.game = self.games.load(task_id)
            self.loaded = task_id
            self.instruct(self.template)

    def begin(self, task_id: str) -> str:
        self._load(task_id)
        self.state, self.feedback = self.game.start, self.game.first
        observation = self.feedback.removeprefix(engine.BANNER)
        self.memory = expert.Memory.first(observation, self.game.goal, self.games.rates, self.game.old)
        return observation

    def act(self, action: str) -> tuple[str, float, bool]:
        self.state, self.feedback = self.game.step(self.state, action)
        observation = re.sub(r"^You arrive at loc \d+\. ", "", self.feedback.strip())
        self.memory = self.memory.after(action.strip(), observation, self.state.commands)
        return observation, float(self.state.won), self.state.won

    def knows(self, action: str) -> bool:
        return action.strip() in self.state.commands

    @property
    def task(self) -> str:
        return self.game.task

    def info(self) -> dict[str, Any]:
        commands = sorted(self.state.commands)
        return super().info() | {"admissible_commands": commands, "feedback": self.feedback, "won": self.state.won}

    def valid_actions(self) -> list[str]:
        return [command for command in sorted(self.state.commands) if command != "help"]

    def thought(self, action: str) -> str:
        """What was seen so far of its object and what the task asks; nothing hidden enters."""
        return self.memory.thought(action) if self.thoughts else ""

    def expert(self, task_id: str) -> Player:
        """Searches the likeliest places first, remembers what it saw, then does what the task asks. It knows the texts
        and commands so far, and from the training games how often such things lie in such places."""
        while not self.state.won and (action := self.memory.decide()):  # None: nothing is left to search
            yield self.thought(action), action

    def rules(self) -> dict[str, Callable[[], Player]]:
        """The searching expert is itself a rule: nothing in it is learned but the rates."""
        return {"search": lambda: self.expert(self.task_id)}

    def oracle(self, task_id: str) -> Player:
        """The shortest plan of a player who knows where everything is: the game file's own, else ours."""
        for action in self.game.walkthrough or plans.plan(self.game, self.game.start) or ():
            yield self.thought(action), action

    def save(self) -> tuple:
        return self.state, self.memory, self.feedback

    def load(self, saved: tuple) -> None:
        self._load(self.task_id)
        self.state, self.memory, self.feedback = saved

    def optimal_value(self, gamma: float = 0.99) -> float:
        """gamma ** the steps of a player who knows where everything is, 0 where the goal is out of reach.

        It is the best player's value. The agent may not propose the best actions, so it is no ceiling for a QNet.
        """
        way = plans.plan(self.game, self.state)
        if way is None or (self.max_steps is not None and self.steps + len(way) > self.max_steps):
            return 0.0
        return gamma ** len(way)
