"""An environment of your own, complete: switch on the lamps that the task names, then say that you are done.

python -m experiments.compare --env docs.switches:Switches    # runs all five stages
"""

from collections.abc import Iterator
from itertools import combinations

from envs import TextEnv
from qlass import UserError
from qlass.environment import pick

LAMPS = ("red", "green", "blue", "white", "amber", "violet")
TASKS = ["-".join(lamps) for n in (1, 2, 3) for lamps in combinations(LAMPS, n)]


class Switches(TextEnv):
    name = "switches"
    instruction = "You switch lamps on and off. Answer with:\nThought: ...\nAction: switch LAMP, or done"
    max_steps = 8
    tree_depth, side_by_side = 3, 64  # D of Algorithm 2; episodes share nothing: `on` is replaced, not changed

    def split_ids(self, split: str) -> list[str]:
        bounds = {"train": range(6), "val": range(6, 8), "test": range(8, 10), "all": range(10)}  # of every ten
        part = pick(bounds, split, "switches: unknown split")
        return [task for i, task in enumerate(TASKS) if i % 10 in part]

    def begin(self, task_id: str) -> str:
        if task_id not in TASKS:
            raise UserError(f"switches: unknown task {task_id!r}: write e.g. {TASKS[-1]}")
        self.on = frozenset()
        return f"Task: {self.task}. All lamps are off."

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset(self.task_id.split("-"))

    @property
    def task(self) -> str:
        return f"switch on {' and '.join(sorted(self.wanted))}"

    def valid_actions(self) -> list[str]:
        return [*(f"switch {lamp}" for lamp in LAMPS), "done"]

    def act(self, action: str) -> tuple[str, float, bool]:
        done = action == "done"
        if action in self.valid_actions() and not done:
            self.on ^= {action.removeprefix("switch ")}
        reward = len(self.on & self.wanted) / len(self.on | self.wanted) if done and self.on else 0.0
        seen = f"On: {', '.join(sorted(self.on)) or 'none'}." if action in self.valid_actions() else "No such action."
        return seen, reward, done

    def save(self) -> frozenset[str]:
        return self.on

    def load(self, saved: frozenset[str]) -> None:
        self.on = saved

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        actions = [f"switch {lamp}" for lamp in sorted(self.wanted)]
        for action in [*actions, "done"]:
            yield self.thought(action), action

    def thought(self, action: str) -> str:
        """The lamp as the agent sees it: the tiny model chooses among valid actions, each with its thought."""
        lamp = action.removeprefix("switch ")
        return "That is all." if action == "done" else f"{lamp} is {'on' if lamp in self.on else 'off'}."
