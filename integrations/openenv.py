"""An environment behind OpenEnv's server, for many clients at once (docs/engines.md has one); for verifiers see
docs/verifiers.toml.

    python -m integrations.openenv --env alfworld --port 8000
"""

import dataclasses
import threading
import uuid
from collections import ChainMap
from typing import Any, ClassVar

import uvicorn
from environments.guard import named_task
from openenv.core.env_server import Action, Environment, Observation, State, create_app

import envs
from integrations.trl import TextGame
from qlass import UserError
from qlass.settings import Run, read, run_stage, runtime

ONE_AT_A_TIME = threading.Lock()  # sessions are threads, and players share what an engine keeps
HELD = 1000  # snapshots per session


class TextAction(Action):
    action: str  # alone, or behind the word Action: in a text


class TextObservation(Observation):
    text: str
    instruction: str = ""  # how to act; with an episode's first text


class Session(Environment):
    """A client's own player, and its snapshots, to which any session can go while this one is open.

    `open_sessions`: those that have begun, with their snapshots; an HTTP /reset is none of the server's sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: envs.TextEnv, open_sessions: dict[Any, dict[str, tuple]]) -> None:
        super().__init__()
        self.env, self.open_sessions, self.snapshots = world.fork(), open_sessions, {}
        self.game, self.steps, self.split = TextGame(self.env), 0, self.env.split

    def reset(
        self, seed: int | None = None, episode_id: Any = None, snapshot: str | None = None, **options: Any
    ) -> TextObservation:
        """Begin a task, or go to a snapshot: the answer is the one that was given there.

        options: task_id; or split (by default train) and index. Without either a task of the split is drawn.
        """
        with ONE_AT_A_TIME:
            if len(self.open_sessions.keys() - {self}) >= (most := self.env.side_by_side):
                raise UserError(f"{self.env.name}: {most} episodes are open, and may be at once: close one")
            if snapshot is None:
                self.env.split = options.pop("split", None) or self.split  # of this request alone
                text, self.steps = self.game.reset(named_task(self.env, options), seed), 0
                self.answer = TextObservation(text=text, instruction=self.env.instruction)
            elif point := ChainMap(*self.open_sessions.values()).get(snapshot):
                here, game, self.steps, self.answer = point
                self.env.restore(here)
                vars(self.game).update(game, env=self.env)
            else:
                raise UserError(f"no snapshot {snapshot}: a session holds its last {HELD}, until it closes")
            self.open_sessions[self] = self.snapshots
        return self.answer

    def step(self, action: TextAction, timeout_s: float | None = None) -> TextObservation:
        with ONE_AT_A_TIME:
            text = self.game.act(action.action)
        self.steps += 1
        self.answer = TextObservation(text=text, reward=self.game.reward, done=self.game.over)
        return self.answer

    @property
    def state(self) -> State:
        with ONE_AT_A_TIME:
            fields = {name: self.game.info.get(name) for name in ("task_id", "task", "valid_actions")}
            if self in self.open_sessions:
                fields["snapshot"] = uuid.uuid4().hex
                here, game = self.env.snapshot(), dict(vars(self.game))
                self.snapshots[fields["snapshot"]] = here, game, self.steps, self.answer
                if len(self.snapshots) > HELD:
                    del self.snapshots[next(iter(self.snapshots))]  # the oldest
        return State(step_count=self.steps, **fields)

    def close(self) -> None:
        self.open_sessions.pop(self, None)
        self.env.close()


def application(world: envs.TextEnv) -> Any:
    options, sessions = {"env_name": world.name, "max_concurrent_envs": world.side_by_side}, {}
    return create_app(lambda: Session(world, sessions), TextAction, TextObservation, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    plays_elsewhere: ClassVar[bool] = True

    host: str = runtime("127.0.0.1")
    port: int = runtime(8000)


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    uvicorn.run(application(envs.from_config(config)), host=config.host, port=config.port)


if __name__ == "__main__":
    run_stage(main)
