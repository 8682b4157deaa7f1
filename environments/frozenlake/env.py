"""FrozenLake behind `envs.TextEnv`, as text: its rules are Gymnasium's."""

import random
import re
from collections.abc import Callable

import numpy as np
from gymnasium.envs.toy_text.utils import categorical_sample

from qlass.environment import Player, TextEnv, pick

from . import lake


class FrozenLakeEnv(TextEnv):
    """Gymnasium's FrozenLake as text (see lake.py), with its exact Q*.

    map is "8x8", "4x4", "lakes" (tasks are starts; on 24 lakes, 21 of them different), "lakes2" (on 24 others, all
    different, enough of them to decide a claim), "random8" or "random4" (tasks are maps). Gymnasium's rules hold, so
    the ice slips by chance if it is slippery; a reset without a seed gives a task the same chances every time it is
    played.
    stray: how often the expert makes just any move that keeps the goal in reach, so that who learns from it knows
    more than one way. 0: always the shortest.
    """

    name, side_by_side = "frozenlake", 64
    task = "reach the goal"
    introduction = (
        "You are walking on a frozen lake. On its map F is ice, H a hole and G the goal. A cell is named by its row "
        "and its column, both from 0. Each turn you move one cell: your action is left, down, right or up. Reach the "
        "goal and do not fall into a hole.\n"
        "Your response should use the following format:\nThought: your thoughts\nAction: your next action"
    )
    prefix, instruction, markov = "", introduction, True
    tree_steps = 18
    replacement = ""  # another first user message, for all tasks

    def __init__(self, map: str = "8x8", slippery: bool = False, stray: float = 0.3) -> None:
        super().__init__()
        pick(dict.fromkeys(lake.LAYOUTS), map, "frozenlake: unknown map")
        self.layout, self.stray = ("slippery-" if slippery else "") + map, stray

    def split_ids(self, split: str) -> list[str]:
        parts = {"train": (0, 1), "val": (2,), "test": (3, 4), "all": (0, 1, 2, 3, 4)}  # 40, 20 and 40 %
        part = pick(parts, split, "frozenlake: unknown split")
        return [task for i, task in enumerate(lake.tasks(self.layout)) if i % 5 in part]

    def instruct(self, instruction: str) -> None:
        self.replacement = self.instruction = instruction

    def canonical(self, action: str) -> str:
        return move if (move := action.strip().lower()) in lake.MOVES else action

    def block(self, task_id: str) -> str:
        """The lake, on the maps "lakes"."""
        return task_id.rpartition("/")[0] if "lakes/" in task_id else task_id

    def _load(self, task_id: str) -> None:
        self.lake = lake.load(task_id)
        # A fixed map is shown once, and a lake by its number in each observation. A random map stands in each
        # observation, its rows to be read cell by cell.
        self.new_map = "random" in task_id
        rows = ((" " if self.new_map else "").join(row) for row in self.lake.desc.astype(str))
        self.rows = "\n".join(rows).replace("S", "F")
        own = self.introduction if self.new_map else f"{self.introduction}\nThe map:\n{self.rows}"
        self.instruction = self.replacement or own

    def begin(self, task_id: str) -> str:
        self._load(task_id)
        self.cell = int(self.lake.s)
        return self._look()

    def act(self, action: str) -> tuple[str, float, bool]:
        move = self.canonical(action)
        if move not in lake.MOVES:
            return f"Invalid action: choose left, down, right or up. {self._look()}", 0.0, False
        outcomes = self.lake.P[self.cell][lake.MOVES.index(move)]
        drawn = categorical_sample([probability for probability, *_ in outcomes], self.np_random)
        _, self.cell, reward, done = outcomes[drawn]
        return self._look(), float(reward), bool(done)

    def _look(self) -> str:
        kind, number = lake.kind(self.lake, self.cell), re.search(r"lakes/(\d+)", self.task_id)
        where = f"cell {lake.name_of(self.lake, self.cell)}" + (f" of lake {number[1]}" if number else "")
        if kind != "ice":
            return f"You fell into a hole at {where}." if "hole" in kind else f"You reached the goal at {where}."
        if not self.new_map:
            return f"At {where}."
        around = ", ".join(f"{move} {lake.ahead(self.lake, self.cell, move)}" for move in lake.MOVES)
        return f"{self.rows}\nAt {where}. Around you: {around}."

    def picture(self, observation: str) -> str:
        """The map with the agent in it, as @."""
        row, column = map(int, re.search(r"cell (\d)(\d)", observation).groups())
        cells = [list(line.replace(" ", "")) for line in self.rows.splitlines()]
        cells[row][column] = "@"
        return "\n".join(map(" ".join, cells))

    def valid_actions(self) -> list[str]:
        return list(lake.MOVES) if lake.kind(self.lake, self.cell) == "ice" else []

    def thought(self, action: str) -> str:
        """The cell that a random map shows in that direction. A fixed map is to be known by heart: no thoughts."""
        return f"{action} is {lake.ahead(self.lake, self.cell, action)}" if self.new_map else ""

    def expert(self, task_id: str) -> Player:
        """The optimal policy for gamma = 0.9 but for straying; the task id decides among equals and when to stray.

        It sees the map, as every player does: the map stands in the instruction or in each observation.
        """
        yield from self._walk(lake.q_star(self.lake), self.stray)

    def oracle(self, task_id: str) -> Player:
        """The optimal policy, without straying."""
        yield from self._walk(lake.q_star(self.lake))

    def rules(self) -> dict[str, Callable[[], Player]]:
        """The shortest path on the map, as if the ice did not slip: optimal where it does not."""
        return {"shortest path": lambda: self._walk(lake.q_star(lake.load(self.task_id.removeprefix("slippery-"))))}

    def _walk(self, q: np.ndarray, stray: float = 0.0) -> Player:
        rng = random.Random(self.task_id)
        while self.valid_actions():
            least = 0.0 if rng.random() < stray else q[self.cell].max() - 1e-9
            move = lake.MOVES[rng.choice(np.flatnonzero(q[self.cell] > least))]
            yield self.thought(move), move

    def save(self) -> int:
        return self.cell

    def load(self, saved: int) -> None:
        self._load(self.task_id)
        self.cell = saved

    def _q_here(self, gamma: float, later: int = 0) -> np.ndarray:
        """Q*(s, a) of this cell, shape (4,), within the steps that are left after so many more."""
        left = None if self.max_steps is None else max(0, self.max_steps - self.steps - later)
        return lake.q_star(self.lake, gamma, left)[self.cell]

    def q_star_of(self, action: str, gamma: float = 0.9) -> float:
        """Q*(s, a) here; an invalid action only costs its step."""
        if (move := self.canonical(action)) in lake.MOVES:
            return float(self._q_here(gamma)[lake.MOVES.index(move)])
        return gamma * float(self._q_here(gamma, 1).max())

    def optimal_value(self, gamma: float = 0.9) -> float:
        """The value of having come here, gamma * max_a Q*(s, a): without slipping gamma ** moves to the goal, and 0
        where the episode has ended."""
        return gamma * float(self._q_here(gamma).max())
