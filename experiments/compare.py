"""All methods side by side: those of q_search.py, the environment's own players, and oracles, which see the reward.

    python -m experiments.compare --env webshop --limit 0    # --method all
    python -m experiments.compare --env webshop --method greedy qlass -M 2 4

    rule, expert, oracle   the environment's own players: a rule without learning; the expert; one that knows all
    oracle_step            of M candidates the one behind which most can be reached (TextEnv.optimal_value)
    oracle_lookahead       QLASS, but the true reward where a candidate ends the episode, as the released code has it
    untried_likeliest, untried_qlass    these searches, but candidates untried since the last new page come first
    best_of_n              q_search.py's; without -N it has N = M, so that equal numbers are drawn
    all                    players, oracle_step and q_search.py's methods

Result lines are q_search.py's; `player` names the rule. With --paraphrase-server each candidate is sampled under its
own wording of the task (App. A.3.2, experiments/paraphrase.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PositiveInt
from tyro.conf import arg

import envs
import q_search
from experiments import paraphrase
from q_search import Episode, Method, Step, methods_of
from qlass import UserError
from qlass.batching import Candidate, Sample, Score
from qlass.chat import Chat, Rendering
from qlass.files import begun_meta, read_meta
from qlass.messages import State, parse_action, replay, step
from qlass.results import describe
from qlass.settings import read_settings, run_stage, workload

PLAYERS = ("rule", "expert", "oracle")
ORACLES = {"oracle_step": "truth", "oracle_lookahead": "q"}  # what scores where the episode goes on
UNTRIED = {"untried_likeliest": "likeliest", "untried_qlass": "qlass"}
Searches = Literal["oracle_step", "oracle_lookahead", "untried_likeliest", "untried_qlass"]
Name = Literal[q_search.Name, Searches, "rule", "expert", "oracle", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config):
    """q_search.py's settings, and whose wordings the agent reads."""

    method: tuple[Name, ...] = workload(("all",))  # one or more of the table above
    # candidates per step (2; all: 2 4 6)
    M: Annotated[tuple[PositiveInt, ...], arg(aliases=["-M"])] = workload(())
    # episodes (1; best_of_n: as many as M)
    N: Annotated[tuple[PositiveInt, ...], arg(aliases=["-N"])] = workload(())
    distinct: bool = False  # draw until M actions differ, 3M times at most
    paraphrase_server: str | None = None  # a chat server that words the task anew for each candidate


@dataclasses.dataclass(frozen=True)
class Variant(Method):
    """A method of an experiment. Its `scores` may ask the environment, too."""

    player: str | None = None  # which rule, or with which settings
    env: Any = dataclasses.field(default=None, compare=False)  # of the episode: `play` fills it in
    looks: bool = False  # is charged a step for every candidate, on FrozenLake too, where Q* is known without
    distinct: bool = False  # draws again, up to 2M samples more, until M actions differ

    async def play(self, env: envs.TextEnv, task_id: str, chat: Chat) -> dict:
        if self.env is None:
            method = dataclasses.replace(self, env=env)
            return await method.play(env, task_id, chat)
        return await super().play(env, task_id, chat)

    async def draw(self, env: envs.TextEnv, state: State, key: tuple, rendering: Rendering) -> list[Candidate]:
        samples = await super().draw(env, state, key, rendering)
        for _ in range(2 if self.distinct else 0):
            if len(q_search.distinct_actions(env, [sample.text for sample in samples])) >= self.M:
                break
            draw_key = (*key, len(samples))  # the same key would draw the same
            samples = samples + await super().draw(env, state, draw_key, rendering)
        return samples

    def outcome(self, chat: Chat, best: Episode, episodes: list[Episode]) -> dict:
        outcome = super().outcome(chat, best, episodes)
        if self.looks:
            for steps in episodes:
                outcome["env_steps"] += sum(len(step.candidates) for step in steps)
        return outcome

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"player": self.player or ""}

    def __str__(self) -> str:
        name = f"{self.name}:{self.player}" if self.player else self.name
        return super().__str__().replace(self.name, name, 1)


def distinct(method: Method) -> Variant:
    """The same method, which draws until M actions differ."""
    if isinstance(method, Variant):
        return dataclasses.replace(method, distinct=True)
    return Variant(**vars(method), distinct=True)


class Oracle(Variant):
    """Steps each candidate: its true reward if that ends the episode, else Q or the best that can still be reached."""

    async def scores(self, state: State, actions: list[str], samples: Sequence[Candidate], key: tuple) -> list[float]:
        if self.by != "q":
            return [ahead(self.env, state, action) for action in actions]
        values = await Score(state, tuple(actions))
        return [ahead(self.env, state, action, q) for action, q in zip(actions, values, strict=True)]


def ahead(env: envs.TextEnv, state: State, action: str, otherwise: float | None = None, *gamma: float) -> float:
    """The reward of an action if it ends the episode, else `otherwise` or the best that can then be reached."""
    if otherwise is None and hasattr(env, "q_star_of"):  # its steps may slip: no single next state decides
        return env.q_star_of(parse_action(action), *gamma)
    here = env.snapshot()
    _, reward, done = step(env, state, action)
    if not done:
        reward = env.optimal_value(*gamma) if otherwise is None else otherwise
    env.restore(here)
    return reward


class Untried(Variant):
    """A search that takes a candidate untried since the last page that was new when it came, if there is one."""

    async def scores(self, state: State, actions: list[str], samples: Sequence[Candidate], key: tuple) -> list[float]:
        scores = await super().scores(state, actions, samples, key)
        pages = state.observations
        newest = max(i for i, page in enumerate(pages) if page not in pages[:i])
        vain = set(map(parse_action, state.actions[newest:]))
        first = [parse_action(action) not in vain for action in actions]
        if not any(first):
            return scores
        return [score if new else -math.inf for score, new in zip(scores, first, strict=True)]


class Player(Variant):
    """One of the environment's own players, which draw nothing."""

    replays: ClassVar[bool] = False  # such a player may stop before the end

    async def play(self, env: envs.TextEnv, task_id: str, chat: Chat) -> dict:
        steps = self.episode(env, task_id)
        return describe(steps, [steps], {"tokens": {"prompt": 0, "generated": 0, "scored": 0}})

    def episode(self, env: envs.TextEnv, task_id: str) -> Episode:
        player = (lambda _: env.rules()[self.player]()) if self.player else getattr(env, self.name)
        return [
            Step(before.state, [], [], [], move.action, move.state.observation, move.reward)
            for before, move in pairwise(replay(env, task_id, player=player))
        ]


def plan_of(env: envs.TextEnv, config: Config) -> list[Method]:
    """The methods that the settings name, each once."""
    if "rule" in config.method and not env.rules():
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    plan = []
    for name in config.method:
        plan += everything(env, config) if name == "all" else methods_named(name, env, config)
    if config.distinct:
        plan = [distinct(method) for method in plan]
    return list({str(method): method for method in plan}.values())


def methods_named(name: str, env: envs.TextEnv, config: Config) -> list[Method]:
    """The methods of a name, with every -M and -N that it has."""
    if name == "rule":
        return [Player("rule", player=rule) for rule in env.rules()]
    if name in PLAYERS:  # who knows more than the pages is an oracle
        return [Player("oracle" if env.omniscient else name)]
    if name in ORACLES:
        own = {"name": name, "by": ORACLES[name], "looks": True}
        return [Oracle(**vars(method) | own) for method in methods_of("qlass", config)]
    if name in UNTRIED:
        searches = methods_of(UNTRIED[name], config)
        return [Untried(**vars(method), player="untried first") for method in searches]
    if name == "best_of_n" and not config.N:  # equal numbers are drawn
        config = dataclasses.replace(config, N=config.M)
    return methods_of(name, config)


def everything(env: envs.TextEnv, config: Config) -> list[Method]:
    """The comparison of all methods, best-of-N by Q and by the reward."""
    widest = dataclasses.replace(config, M=(max(config.M),))
    plan = []

    def has(name: str) -> bool:  # a class of one's own may lack it
        return getattr(type(env), name) is not getattr(envs.TextEnv, name)

    missing = {"oracle": not (has("oracle") or has("expert")), "expert": not has("expert")}
    for name in ("oracle", "expert", "rule", "greedy", "sample"):
        plan += [] if missing.get(name) else methods_named(name, env, config)
    for by in ("q", "oracle"):
        plan += methods_named("best_of_n", env, dataclasses.replace(config, select=by))
    plan += methods_of("random", widest)
    if has("optimal_value"):
        plan += methods_named("oracle_step", env, widest)
    plan += methods_of("qlass", config)
    if not config.server:  # which does not tell the pi(a | s) of its draws
        plan += methods_of("likeliest", config)
    return plan


def settings_of(argv: list[str] | None) -> Config:
    config = read_settings(Config, __doc__, argv)
    M = config.M or ((2, 4, 6) if "all" in config.method else (2,))
    label = config.label
    if not label and (config.paraphrase_server or config.distinct):
        label = "paraphrased" if config.paraphrase_server else "distinct"
    return dataclasses.replace(config, M=M, label=label)


def main(argv: list[str] | None = None) -> None:
    config = settings_of(argv)
    old = {} if config.overwrite else read_meta(begun_meta(config.path))["recipe"]  # q_search.py's lacks these settings
    for name in ("distinct", "paraphrase_server"):
        if old and (old.get(name) or None) != (getattr(config, name) or None):
            raise UserError(f"{config.path}: has lines of another {name}, of like names: another --out keeps both")
    search = q_search.Search(config)
    plan = plan_of(search.env, config)
    if not all(isinstance(method, Player) for method in plan):
        search.load(plan)
        if config.paraphrase_server:
            reworder = paraphrase.by_server(config.paraphrase_server, config.timeout)
            search.backends[Sample] = paraphrase.under_wordings(search.backends[Sample], reworder)
            plan = [method if isinstance(method, Player) else paraphrase.counted(method) for method in plan]
    search.play(plan)


if __name__ == "__main__":
    run_stage(main)
