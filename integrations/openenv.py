"""An environment behind OpenEnv's server, for many clients at once; for verifiers see docs/verifiers.toml.

python -m integrations.openenv --env alfworld --port 8000

with GenericEnvClient(base_url="http://localhost:8000").sync() as client:
    client.reset(split="test", index=0)  # or task_id=...; without an index any of the split, by default of train
    client.step({"action": "look"})  # observation["text"], reward, done
"""

import sys
import threading
from typing import Any

try:
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_app
    from pydantic import Field
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        print(f"error: {error}: pip install -r requirements-integrations.txt", file=sys.stderr)
        sys.exit(2)
    raise

import envs
from environments.guard import task_of
from integrations.trl import TextGame
from qlass import UserError
from qlass.flags import Parser, at_least
from qlass.runs import parse, run_stage

ONE_AT_A_TIME = threading.Lock()  # sessions are threads, and players share what an engine keeps


class TextAction(Action):
    action: str = Field(description="The action alone, or behind the word Action: in a text.")


class TextObservation(Observation):
    text: str
    instruction: str = Field(default="", description="How to act; with an episode's first text.")


class Session(Environment):
    """A client's own player. `players` are those that have begun: an HTTP /reset is none of the server's sessions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: envs.TextEnv, players: set[Any]) -> None:
        super().__init__()
        self.env, self.players = world.fork(), players
        self.game, self.steps = TextGame(self.env), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> TextObservation:
        with ONE_AT_A_TIME:
            task_id, most = task_of(self.env, seed, options), self.env.side_by_side
            if len(self.players - {self}) >= most:
                raise UserError(f"{self.env.name}: {most} episodes are open, and may be at once: close one")
            self.players.add(self)
            text, self.steps = self.game.reset(task_id, seed), 0
        return TextObservation(text=text, instruction=self.env.instruction)

    def step(self, action: TextAction, timeout_s: float | None = None) -> TextObservation:
        with ONE_AT_A_TIME:
            text = self.game.act(action.action)
        self.steps += 1
        return TextObservation(text=text, reward=self.game.reward, done=self.game.over)

    @property
    def state(self) -> State:
        told = {name: self.game.info.get(name) for name in ("task_id", "task", "valid_actions")}
        return State(step_count=self.steps, **told)

    def close(self) -> None:
        self.players.discard(self)
        self.env.close()


def application(world: envs.TextEnv) -> Any:
    options, players = {"env_name": world.name, "max_concurrent_envs": world.side_by_side}, set()
    return create_app(lambda: Session(world, players), TextAction, TextObservation, **options)


def main(argv: list[str] | None = None) -> None:
    flags = Parser(__doc__)
    flags.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    flags.add_argument("--port", type=at_least(1), default=8000, metavar="N", help="default: %(default)s")
    args = parse(flags, argv, search=True)
    uvicorn.run(application(envs.from_arguments(args)), host=args.host, port=args.port)


if __name__ == "__main__":
    run_stage(main)
