"""Stage 5: Q-guided generation (Sec. 4.4, Alg. 4), and the paper's other ways to act.

    python q_search.py --env webshop --method qlass -M 2 -N 1

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: a line per task and method, with each step's candidates and their Q

One loop plays all methods: sample M actions, score them, take the best, step. It plays N episodes,
of which one counts.

    method     M   N   score of a candidate
    greedy     1   1   (temperature 0)
    sample     1   1
    best_of_n  1   N
    random     M   N   a random number
    likeliest  M   N   the agent's own log pi(a | s), of the whole text: search without a QNet
    qlass      M   N   Q(s, a)

-M and -N set M and N of all methods that have them.
Of N episodes --select takes one, by Q or, as the paper does, by the final reward ("oracle").
Nothing else here sees the reward. `python -m experiments.compare` plays all methods.
"""

from __future__ import annotations

# qlass comes first: it says in one line which packages are missing.
from qlass import results  # isort: skip

import dataclasses
import math
from collections.abc import Generator, Iterable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

import envs
from qlass.agent import load_agent
from qlass.batching import Candidate, LogProb, Models, Sample, Score, ask
from qlass.chat import Chat, Rendering
from qlass.config import Natural, Positive, Sampling, free, is_url, read, run_stage
from qlass.leaks import check_qnet
from qlass.messages import State, parse_action, uniforms
from qlass.results import Episode, Step, costs_of, describe
from qlass.runs import find_or_make
from train_qnet import load_qnet

# What scores the candidates of each method.
METHODS = {
    "greedy": None,
    "sample": None,
    "best_of_n": None,
    "random": "chance",
    "likeliest": "likelihood",
    "qlass": "q",
}
Name = Literal["greedy", "sample", "best_of_n", "random", "likeliest", "qlass"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    """The paper's (App. A.2): M = 2 and N = 1."""

    stage: ClassVar[str] = "q_search"
    plays_elsewhere: ClassVar[bool] = True

    method: tuple[Name, ...] = free(("qlass",))  # one or more
    M: Annotated[tuple[Positive, ...], arg(aliases=["-M"])] = free((2,))  # candidates per step
    N: Annotated[tuple[Positive, ...], arg(aliases=["-N"])] = free(())  # episodes (1; best_of_n: 4)
    select: Literal["q", "oracle"] = free("q")  # which of N episodes counts
    distinct: bool = False  # draw until M actions differ, 3M times at most
    show: bool = free(False)  # only print an episode with choices, and greedy's way beside it
    split: str = free("test")  # tasks to play
    limit: Natural = free(0)  # number of tasks (0: all)
    skip: Natural = free(0)  # leave out the first tasks
    sft: Path | None = free(None)  # the agent's checkpoint (RUN/sft, made if missing)
    qnet: str | None = free(None)  # folder, or URL[#MODEL] of a server (RUN/qnet, made if missing)
    out: Path | None = free(None)  # RUN/results.jsonl; its lines are not played again
    label: str | None = None  # a variant's name, kept in each line
    max_steps: Positive | None = None  # the environment's


# -------------------------------------------------------------------------------------- the methods


@dataclasses.dataclass(frozen=True)
class Method:
    """M candidates per step, of which the one of the highest score is taken; N episodes, of which
    `select` takes one."""

    name: str
    by: str | None = None  # what scores candidates: "q", "likelihood", "chance"
    M: int = 1
    N: int = 1
    select: str | None = None  # "q", "oracle"; None: the first episode
    temperature: float | None = None  # None: --temperature, or the checkpoint's own
    distinct: bool = False  # draw until M actions differ, 3M times at most
    seed: int = 0  # of chance

    def play(
        self, env: envs.TextEnv, task_id: str, chat: Chat, played: dict[tuple, Episode]
    ) -> Generator[Any, Any, dict]:
        """Algorithm 4. Returns the outcome, as a result line tells it.

        played: episodes in which nothing scores actions; such methods (sample, best-of-N) share
        them.
        """
        episodes = []
        for trial in range(self.N):  # lines 1-2
            episodes.append((yield from self.shared_episode(env, task_id, trial, chat, played)))
        best = yield from choose_episode(episodes, self.select)  # line 11
        return self.outcome(chat, best, episodes)

    def shared_episode(
        self, env: envs.TextEnv, task_id: str, trial: int, chat: Chat, played: dict[tuple, Episode]
    ) -> Generator[Any, Any, Episode]:
        """An episode, perhaps one that another method has played."""
        key = (task_id, trial, self.temperature)
        if self.by is None and key in played:
            return played[key]
        steps = yield from episode(env, task_id, self, trial, chat.rendering)
        if self.by is None:
            played[key] = steps
        return steps

    def outcome(self, chat: Chat, best: Episode, episodes: list[Episode]) -> dict:
        return describe(best, episodes, costs_of(chat, episodes, self.read_by_qnet))

    def scores(
        self, state: State, actions: list[str], key: tuple
    ) -> Generator[Any, Any, list[float]]:
        """The score of each candidate of step `key` (task, episode, step); a model is asked."""
        if self.by == "q":
            return (yield Score(state, tuple(actions)))  # Q(s, a)
        if self.by == "likelihood":  # of the whole text, even if only valid ones are drawn
            return (yield LogProb(state, tuple(actions)))  # log pi(a | s)
        if self.by == "chance":
            return list(uniforms(len(actions), "random", self.seed, *key))
        return [math.nan] * len(actions)  # null in the file: the first is taken

    def greedy(self) -> Method:
        """The agent without this search, which --show plays beside it."""
        return Method("greedy", temperature=0.0)

    @property
    def needs_q(self) -> bool:
        return "q" in (self.by, self.select)

    def settings(self) -> dict[str, Any]:
        """The fields of a result line that tell methods apart."""
        fields = {"method": self.name, "M": self.M, "N": self.N, "select": self.select}
        return fields | {"player": None}

    def read_by_qnet(self, step: Step) -> list[str]:
        """The actions of a step whose tokens QNet has read, which costs tokens."""
        if self.by == "q":
            return step.candidates
        return [step.action] if self.select == "q" else []

    def __str__(self) -> str:
        fields = {"M": self.M, "N": self.N, "select": self.select}
        shown = [f"{name}={value}" for name, value in fields.items() if value not in (1, None)]
        return " ".join([self.name, *shown])


def methods_of(name: str, config: Config) -> list[Method]:
    """The methods of a name, with every -M and -N that it has."""
    if name == "greedy":
        return [Method("greedy", temperature=0.0)]
    by = METHODS[name]
    Ms = config.M if by else (1,)
    Ns = config.N or ((4,) if name == "best_of_n" else (1,))
    if name == "sample":
        Ns = (1,)
    methods = []
    for m, n in product(Ms, Ns):
        select = config.select if n > 1 else None
        methods.append(Method(name, by, m, n, select, distinct=config.distinct, seed=config.seed))
    return methods


# -------------------------------------------------------------------------------------- Algorithm 4


def episode(
    env: envs.TextEnv, task_id: str, method: Method, trial: int, rendering: Rendering
) -> Generator[Any, Any, Episode]:
    """One episode (lines 3-10). It yields requests to the models."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)  # line 3
    steps: Episode = []
    done = False
    while not done:  # line 4
        key = (task_id, trial, len(steps))  # the same for all methods: paired differences
        drawn = yield from draw(env, state, method, key, rendering)  # lines 5-6
        candidates = distinct_actions(env, [c.text for c in drawn])[: method.M]
        scores = yield from method.scores(state, candidates, key)  # line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # line 8: argmax_a Q(s, a)
        after, reward, done = state.act(env, action)  # line 9
        outcome = action, after.observation, reward, env.known
        steps.append(Step(state, drawn, candidates, scores, *outcome))
        state = after  # line 10
    return steps


def draw(
    env: envs.TextEnv, state: State, method: Method, key: tuple, rendering: Rendering
) -> Generator[Sample, list[Candidate], list[Candidate]]:
    """M samples of the agent. With `distinct` up to 2M more, until M actions differ."""
    drawn = yield ask(env, state, method.M, key, rendering, method.temperature)
    rounds = 3 if method.distinct else 1
    for _ in range(1, rounds):
        if len(distinct_actions(env, [c.text for c in drawn])) >= method.M:
            break
        noise = (*key, len(drawn))  # the same key would draw the same
        drawn = drawn + (yield ask(env, state, method.M, noise, rendering, method.temperature))
    return drawn


def distinct_actions(env: envs.TextEnv, actions: Iterable[str]) -> list[str]:
    """The first of each group of actions that are the same to the environment."""
    first: dict[str, str] = {}
    for action in actions:
        first.setdefault(env.canonical(parse_action(action)), action)
    return list(first.values())


def choose_episode(episodes: list[Episode], by: str | None) -> Generator[Any, Any, Episode]:
    """The episode that counts (line 11)."""
    values = [0.0] * len(episodes)
    if by == "q":  # the last action's Q speaks for the episode
        scores = yield [Score(steps[-1].state, (steps[-1].action,)) for steps in episodes]
        values = [q for (q,) in scores]
    elif by == "oracle":
        values = [steps[-1].reward for steps in episodes]
    return episodes[values.index(max(values))]


# --------------------------------------------------------------------------------------------- main


def environment(config: Config) -> tuple[envs.TextEnv, list[str]]:
    """The environment that the settings name, and the tasks to play in it."""
    options = {"max_steps": config.max_steps} if config.max_steps else {}
    env = envs.from_config(config, **options)
    tasks = env.task_ids(config.split)[config.skip :]
    return env, tasks[: config.limit] if config.limit else tasks


def load(
    config: Config, env: envs.TextEnv, with_q: bool
) -> tuple[Chat, Models, dict[str, Path | None]]:
    """The agent's Chat, what answers requests, and the checkpoints that do."""
    models: Models = {}
    inputs: dict[str, Path | None] = {}
    sft = inputs["sft"] = find_or_make(config.sft, "sft", "sft", config)
    if with_q:
        named = Path(config.qnet) if config.qnet else None
        served = None
        if config.qnet and is_url(config.qnet):
            from qlass.optional import served_qnet

            served, named = served_qnet.load(config.qnet, config)
        qnet = inputs["qnet"] = find_or_make(named, "train_qnet", "qnet", config)
        check_qnet(qnet, sft, config.env)
        models[Score] = (served or load_qnet(qnet, config)).score
    agent = load_agent(sft, config, env)
    return agent.chat, models | {Sample: agent.sample, LogProb: agent.likelihoods}, inputs


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    env, tasks = environment(config)
    names = dict.fromkeys(config.method)
    plan = [method for name in names for method in methods_of(name, config)]
    chat, models, inputs = load(config, env, any(method.needs_q for method in plan))
    results.play(config, env, tasks, plan, chat, models, inputs)


if __name__ == "__main__":
    run_stage(main)
