"""An environment behind OpenEnv's server, for many clients at once (docs/tools.md has one); for verifiers see
docs/verifiers.toml.

    python -m integrations.openenv --env alfworld --port 8000
"""

import dataclasses
import functools
import threading
import uuid
from collections import ChainMap
from typing import Any, ClassVar

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import NonNegativeInt

import envs
from integrations.trl import TextGame
from qlass import UserError
from qlass.settings import Run, read_settings, run_stage, workload

ONE_AT_A_TIME = threading.Lock()  # sessions are threads, and players share what an engine keeps


class TextAction(Action):
    action: str  # alone, or behind the word Action: in a text


class TextObservation(Observation):
    text: str
    valid_actions: list[str]
    task: str
    instruction: str = ""  # how to act; with an episode's first text


class Session(Environment):
    """A client's own player, and its snapshots, to which any session can go while this one is open.

    sessions: those that play; an HTTP /reset is none of the server's own.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: envs.TextEnv, sessions: list["Session"]) -> None:
        super().__init__()
        self.env = world.fork()
        self.sessions = sessions
        self.snapshots: dict[str, tuple] = {}
        self.game = TextGame(self.env)

    def reset(
        self, seed: int | None = None, episode_id: Any = None, snapshot: str | None = None, **options: Any
    ) -> TextObservation:
        """Begin a task, or go to a snapshot: the answer is the one that was given there.

        options: task_id; or split (by default train) and index. Without either a task of the split is drawn.
        """
        with ONE_AT_A_TIME:
            new = self not in self.sessions
            if new and len(self.sessions) >= self.env.side_by_side:
                raise UserError(f"{len(self.sessions)} episodes are open, and may be at once: close one")
            if snapshot is None:
                self.begin(seed, **options)
            else:
                self.go_to(snapshot)
            if new:
                self.sessions.append(self)
        return self.answer

    def begin(
        self, seed: int | None, task_id: str | None = None, split: str = "train", index: int | None = None
    ) -> None:
        self.env.split = split  # from which a reset draws that names no task
        if index is not None:
            task_id = self.get_task(split, index)["task_id"]
        self.answer = self.observation(self.game.reset(task_id, seed), instruction=self.env.instruction)

    def go_to(self, snapshot: str) -> None:
        snapshots = ChainMap(*(session.snapshots for session in self.sessions))
        if snapshot not in snapshots:
            raise UserError(f"no snapshot {snapshot}: a session holds its own until it closes")
        here, game, self.answer = snapshots[snapshot]
        self.env.restore(here)
        vars(self.game).update(game, env=self.env)

    def step(self, action: TextAction, timeout_s: float | None = None) -> TextObservation:
        with ONE_AT_A_TIME:
            text = self.game.act(action.action)
            self.answer = self.observation(text, reward=self.game.reward, done=self.game.over)
        return self.answer

    def observation(self, text: str, **more: Any) -> TextObservation:
        seen = {name: self.game.info[name] for name in ("task", "valid_actions")}
        return TextObservation(text=text, **seen, **more)

    @property
    def state(self) -> State:
        with ONE_AT_A_TIME:
            fields = {name: self.game.info.get(name) for name in ("task_id", "task", "valid_actions")}
            if self in self.sessions:
                name = fields["snapshot"] = uuid.uuid4().hex
                self.snapshots[name] = self.env.snapshot(), dict(vars(self.game)), self.answer
        return State(step_count=self.env.steps, **fields)

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
        """The buttons of the server's page /web: the label and the action of each."""
        return [(action, {"action": action}) for action in observation["valid_actions"]]

    def close(self) -> None:
        if self in self.sessions:
            self.sessions.remove(self)
        self.env.close()

    # OpenEnv's Task API: the server begins and closes a session for each of these calls.

    def list_splits(self) -> list[str]:
        return ["train", "val", "test"]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """The fields by which `reset` takes each task. IndexError for no such split: status 400."""
        try:
            tasks = self.env.task_ids(split)
        except UserError as error:
            raise IndexError(str(error)) from error
        return [{"task_id": task_id, "split": split, "index": index} for index, task_id in enumerate(tasks)]

    def num_tasks(self, split: str) -> int:
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        if index < 0:  # not the last one
            raise IndexError(index)
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return self.list_tasks(split)[start:stop]  # the bounds of a slice, by OpenEnv's protocol


def application(world: envs.TextEnv) -> Any:
    begin = functools.partial(Session, world, [])
    options = {"env_name": world.name, "max_concurrent_envs": world.side_by_side}
    return create_app(begin, TextAction, TextObservation, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    extends_options: ClassVar = True

    host: str = workload("127.0.0.1")
    port: NonNegativeInt = workload(8000)


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    uvicorn.run(application(envs.from_config(config)), host=config.host, port=config.port)


if __name__ == "__main__":
    run_stage(main)
