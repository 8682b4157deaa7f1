"""The rules of docs/environment.md, checked by some twenty steps at the first use of a class of your own."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

from qlass.files import warn

from .guard import Fault, attempt

STEPS = 3  # of the path that is played over and over
NONSENSE = "sing a song"  # as a model may


def splits_of(env: Any) -> dict[str, list[str]]:
    """{split: task ids} of train and of each other split that there is."""
    splits = {"train": env.split_ids("train")}
    for split in ("val", "test"):
        with contextlib.suppress(Exception):  # there is none
            splits[split] = env.split_ids(split)
    return splits


class Player:
    """A fork that plays a task and looks at all that it is given. A page is what a step leads to."""

    def __init__(self, env: Any, task_id: str, max_steps: int = STEPS) -> None:
        self.env, self.task_id, self.unoffered = env.fork(), task_id, None
        self.env.max_steps = max_steps
        self.first = self.look("reset", *self.env.reset(options={"task_id": task_id}))

    def step(self, action: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        done = terminated or truncated
        page = self.look(f"step({action!r})", observation, info)
        return page | {"reward": self.env.outcome(reward, done), "done": done}

    def look(self, call: str, text: Any, info: dict) -> dict[str, Any]:
        if call != "reset":
            with contextlib.suppress(() if isinstance(text, str) else Fault):  # of the usual message
                text = self.env.message(text)
        if not isinstance(text, str):
            raise Fault(f"the observation of {call} is of type {type(text).__name__}, not str")
        for name, kind in (("task_id", str), ("task", str), ("valid_actions", list)):
            if not isinstance(info.get(name), kind):
                raise Fault(f"info of {call} has no {name}, or one that is no {kind.__name__}")
        if info["task_id"] != self.task_id:
            raise Fault(f"info of {call} has the task_id {info['task_id']!r}, in task {self.task_id!r}")
        valid = info["valid_actions"]
        if valid != self.env.valid_actions() or not all(isinstance(action, str) for action in valid):
            raise Fault(f"valid_actions of {call} are no str, or not those of valid_actions()")
        candidates = [list(candidate) for candidate in self.env.candidates()]
        return {"observation": text, "task": info["task"], "valid_actions": list(valid), "candidates": candidates}

    def actions(self) -> Iterator[str]:
        """The expert's, if there is one, then any."""
        moves = move = None
        with contextlib.suppress(NotImplementedError):
            moves = self.env.expert(self.task_id)
        for move in moves or ():
            if not (len(move) == 2 and all(isinstance(text, str) for text in move)):
                raise Fault(f"expert yields {move!r}, not (thought, action)")
            if tuple(move) not in map(tuple, self.env.candidates()):
                self.unoffered = self.unoffered or move
            yield move[1]
        if moves is not None and move is None:
            raise Fault(f"expert({self.task_id!r}) yields no step")
        while True:
            yield (self.env.valid_actions() or [NONSENSE])[0]

    def replay(self, path: list[tuple]) -> None:
        for _, _, action, page in path:
            same(page, self.step(action), f"step({action!r})")


def same(before: dict[str, Any], now: dict[str, Any], call: str) -> None:
    for name in before:
        old, new = repr(before[name]), repr(now[name])
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            old, new = (text[max(0, at - 20) :][:60] for text in (old, new))
            raise Fault(f"{call} gives, as {name}, ... {new}, and before ... {old}")


class Rules:
    """Each method checks the rule that its docstring is. They are called in this order."""

    def __init__(self, env: Any) -> None:
        self.env, self.tasks, self.player = env, [], None
        self.path: list[tuple] = []  # (snapshot, a copy of it or itself, action, page)

    def task_ids(self) -> None:
        """task_ids(split) gives texts, each once and in the same order (str(i) there, int(task_id) in reset)"""
        self.tasks, splits = self.env.split_ids("train"), splits_of(self.env)
        if not self.tasks:
            raise Fault("train has no tasks")
        for split, tasks in splits.items():
            if odd := [task_id for task_id in tasks if not isinstance(task_id, str)]:
                raise Fault(f"{split} has the task id {odd[0]!r}, which is no str")
            for read in (self.env.split_ids, self.env.task_ids):
                once, again = read(split), read(split)
                if once != again or len(set(again)) < len(again):
                    raise Fault(f"{split} has a task id twice, or other ones at the next call")
        for one, other in itertools.combinations(splits, 2):
            if both := {*splits[one]} & {*splits[other]}:
                warn(f"{self.env.name}: {len(both)} tasks of {one} are in {other} too, e.g. {min(both)!r}")
        self.tasks = self.env.task_ids("train")

    def play(self) -> None:
        """reset and step return text, the outcome and info; the expert yields (thought, action), texts too"""
        self.player = Player(self.env, self.tasks[0])
        for action in itertools.islice(self.player.actions(), STEPS):
            twin = snapshot = self.player.env.snapshot()
            with contextlib.suppress(Exception):  # of what can't be copied or compared
                copied = copy.deepcopy(snapshot)
                twin = copied if copied == snapshot else snapshot
            self.path.append((snapshot, twin, action, self.player.step(action)))
            if self.path[-1][3]["done"]:
                break
        if self.player.unoffered:
            problem = f"the expert writes {self.player.unoffered!r}, which is not among candidates()"
            remedy = "the tiny model chooses among these, so give them the expert's thoughts, or the expert none"
            warn(f"{self.env.name}: task {self.tasks[0]}: {problem}: {remedy}")

    def restore(self) -> None:
        """snapshot copies all that step changes, its count too; restore puts that back and keeps the copy as it is"""
        for start in (0, 0, len(self.path) - 1):
            self.player.env.restore(self.path[start][0])
            self.player.replay(self.path[start:])
        if any(snapshot is not twin and snapshot != twin for snapshot, twin, *_ in self.path):
            raise Fault("a snapshot changes while the episode goes on")
        self.player.env.close()

    def close(self) -> None:
        """each play of a task is alike (random numbers come of its id), also after close() of another fork"""
        again = Player(self.env, self.tasks[0])
        same(self.player.first, again.first, "reset")
        again.replay(self.path)
        again.env.close()

    def max_steps(self) -> None:
        """any text is answered, and step number max_steps (an attribute) ends the episode, by truncated=True"""
        if len(self.path) == STEPS and not self.path[-1][3]["done"]:
            raise Fault(f"the episode goes on after {STEPS} steps with max_steps = {STEPS}")
        for action in (NONSENSE, self.path[0][2]):
            player = Player(self.env, self.tasks[0], max_steps=1)
            if not player.step(action)["done"]:
                raise Fault(f"the episode goes on after step({action!r}) with max_steps = 1")
            player.env.close()

    def side_by_side(self) -> None:
        """with side_by_side above 1, forks share nothing that an episode changes: fork() copies it, else set it to 1"""
        if self.env.side_by_side > 1:
            player = Player(self.env, self.tasks[0])
            for turn in self.path:
                other = Player(player.env, self.tasks[-1])
                other.step((other.first["valid_actions"] or [NONSENSE])[-1])
                other.env.close()
                player.replay([turn])
            player.env.close()


def check(env: Any) -> list[str]:
    """Play some twenty steps in forks of `env`. Returns the rules; UserError for the first that does not hold."""
    rules, limit = Rules(env), env.max_steps
    texts = []
    for rule in (rules.task_ids, rules.play, rules.restore, rules.close, rules.max_steps, rules.side_by_side):
        try:
            attempt(lambda rule=rule: rule.__name__, rule)
        except Fault as fault:
            problem = str(fault).removeprefix(f"{env.name}: ")
            raise Fault(f"{env.name}: {problem}; the rule: {rule.__doc__}") from fault
        finally:
            if env.max_steps != limit:  # fork() gave `env` itself
                env.max_steps = limit
        texts.append(rule.__doc__)
    return texts
