"""An environment of your own, complete: switch on the lamps that the task names, then say that you are done.

python -m experiments.compare --env docs.switches:Switches    # runs all five stages
"""

from collections.abc import Iterator
from itertools import combinations

from envs import TextEnv
from qlass import UserError

LAMPS = ("red", "green", "blue", "white", "amber", "violet")
TASKS = ["-".join(lamps) for n in (1, 2, 3) for lamps in combinations(LAMPS, n)]


class Switches(TextEnv):
    name = "switches"
    instruction = "You switch lamps on and off. Answer with:\nThought: ...\nAction: switch LAMP, or done"
    max_steps = tree_steps = 8
    tree_depth, side_by_side = 3, 64  # D of Algorithm 2; episodes share nothing: `on` is replaced, not changed

    def split_ids(self, split: str) -> list[str]:
        bounds = {"train": range(6), "val": range(6, 8), "test": range(8, 10), "all": range(10)}  # of every ten
        if split not in bounds:
            raise UserError(f"switches: unknown split {split!r}: choose one of {', '.join(bounds)}")
        return [task for i, task in enumerate(TASKS) if i % 10 in bounds[split]]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        self.task_id = self.task_of(seed, options)
        if self.task_id not in TASKS:
            raise UserError(f"switches: unknown task {self.task_id!r}: write e.g. {TASKS[-1]}")
        self.wanted = frozenset(self.task_id.split("-"))
        self.on = frozenset()
        self.steps = 0
        return f"Task: {self.task}. All lamps are off.", self.info()

    @property
    def task(self) -> str:
        return f"switch on {' and '.join(sorted(self.wanted))}"

    def info(self) -> dict:
        return {"task_id": self.task_id, "task": self.task, "valid_actions": self.valid_actions()}

    def valid_actions(self) -> list[str]:
        return [*(f"switch {lamp}" for lamp in LAMPS), "done"]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.steps += 1
        done = action == "done"
        if action in self.valid_actions() and not done:
            self.on ^= {action.removeprefix("switch ")}
        reward = len(self.on & self.wanted) / len(self.on | self.wanted) if done and self.on else 0.0
        seen = f"On: {', '.join(sorted(self.on)) or 'none'}." if action in self.valid_actions() else "No such action."
        return seen, reward, done, not done and self.steps >= (self.max_steps or 10**9), self.info()

    def snapshot(self) -> tuple:
        return self.task_id, self.wanted, self.on, self.steps

    def restore(self, snapshot: tuple) -> None:
        self.task_id, self.wanted, self.on, self.steps = snapshot

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        actions = [f"switch {lamp}" for lamp in sorted(self.wanted)]
        for action in [*actions, "done"]:
            yield self.thought(action), action

    def candidates(self) -> list[tuple[str, str]]:
        """Each valid action with the thought that the expert would write: the tiny model chooses among these."""
        return [(self.thought(action), action) for action in self.valid_actions()]

    def thought(self, action: str) -> str:
        """What the agent sees of the lamp: the same words for a right action and for a wrong one."""
        lamp = action.removeprefix("switch ")
        return "That is all." if action == "done" else f"{lamp} is {'on' if lamp in self.on else 'off'}."
