"""Somebody's environment, behind an OpenEnv server, for all stages here.

    python build_trees.py --env openenv:http://localhost:8000 --env-option tasks=task_id ...

    text     the field of an observation that the agent reads
    action   the field of an action
    tasks    seed: tasks are numbers, with which an episode begins. Or the name by which `reset` takes a task that the
             server's Task API lists, such as task_id

An observation may also have `task` (else its first text is the task), `instruction` (else --env-option
instruction=FILE) and `valid_actions`. The outcome is the reward of the last step, from 0 to 1. A state is the actions
so far: to return to it they are played again, and a page that is another one ends the run.
"""

import json
from typing import Any, NamedTuple

from qlass import UserError
from qlass.environment import TextEnv, pick
from qlass.records import as_user_error

SEEDS = {"train": range(1000), "val": range(1000, 1100), "test": range(1100, 1300)}


class Move(NamedTuple):
    """An action, or the task with which an episode begins, and what came."""

    action: str
    text: str
    reward: float
    done: bool
    valid: tuple[str, ...]


class OpenEnv(TextEnv):
    """The player of a server. All forks share one session, as many servers allow one."""

    url = ""

    def __init__(self, text: str = "text", action: str = "action", tasks: str = "seed") -> None:
        super().__init__()
        from openenv import GenericEnvClient

        self.fields = text, action, tasks
        with as_user_error(self.url):
            self.client = GenericEnvClient(base_url=self.url).sync().connect()
        self.session: list[Move] = []  # what the server has played last
        self.connection: Any = None  # of the session
        self.moves: list[Move] = []  # of the episode at hand

    def split_ids(self, split: str) -> list[str]:
        field = self.fields[2]
        if field == "seed":
            return list(map(str, pick(SEEDS, split, f"{self.url}: split")))
        import requests

        with as_user_error(f"{self.url}: its Task API, split {split}"):
            (name,) = requests.get(f"{self.url}/list_environments", timeout=60).json()
            tasks = requests.post(f"{self.url}/{name}/tasks", json={"split": split}, timeout=60).json()["tasks"]
            return [str(task[field] if isinstance(task, dict) else task) for task in tasks]

    def begin(self, task_id: str) -> str:
        self.session.clear()
        self.moves = [self.ask(task_id)]
        return self.moves[0].text

    def ask(self, action: str) -> Move:
        """The next move of the session: a task, if it has none."""
        text_field, action_field, task_field = self.fields
        with as_user_error(f"{self.url}: {action!r}"):
            if self.session:
                result = self.client.step({action_field: action})
            else:
                task = {task_field: int(action) if task_field == "seed" else action}
                result = self.client.reset(**task)
        connection = self.client.async_client._ws
        if self.session and connection is not self.connection:  # the library has opened another, with no task
            self.refuse("it has lost the session; the same command goes on")
        self.connection = connection
        seen: dict[str, Any] = result.observation
        if text_field not in seen:
            self.refuse(f"an observation has {', '.join(seen)}, and no {text_field}: --env-option text=FIELD")
        text = seen[text_field] if isinstance(seen[text_field], str) else json.dumps(seen[text_field])
        if not self.session:
            self.task = seen.get("task") or text
            self.instruction = self.instruction or seen.get("instruction", "")
        move = Move(action, text, float(result.reward or 0), result.done, tuple(seen.get("valid_actions") or ()))
        self.session.append(move)
        return move

    def refuse(self, problem: str) -> Any:
        raise UserError(f"{self.url}: {problem}")

    def act(self, action: str) -> tuple[str, float, bool]:
        if self.session != self.moves[: len(self.session)]:
            self.session.clear()
        for move in self.moves[len(self.session) :]:
            again = self.ask(move.action)
            if again != move:
                self.refuse(f"task {self.task_id} can't be played again: {move.action!r} led to {move}, now to {again}")
        move = self.ask(action)
        self.moves = [*self.moves, move]
        return move.text, move.reward if move.done else 0.0, move.done

    def reward_if_cut(self) -> float:
        return self.moves[-1].reward

    def valid_actions(self) -> list[str]:
        return list(self.moves[-1].valid)

    def save(self) -> list[Move]:
        return self.moves

    def load(self, saved: list[Move]) -> None:
        self.moves = saved


def at(url: str) -> type[OpenEnv]:
    """The class of the environment at a URL."""
    return type("OpenEnv", (OpenEnv,), {"url": url.rstrip("/")})
