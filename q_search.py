"""Stage 5: Q-guided generation (Sec. 4.4, Alg. 4), and the paper's other ways to act.

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: a line per task and method, with each step's candidates and their Q

    python q_search.py --env webshop --method qlass -M 2 -N 1

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

import argparse
import dataclasses
import math
from collections.abc import Callable, Generator, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import envs
from qlass import results
from qlass.agent import load_agent
from qlass.batching import Candidate, LogProb, Sample, Score, ask
from qlass.chat import Chat, Rendering
from qlass.fast.score import ServedQNet
from qlass.flags import Parser, add_sampling, natural, path_or_url, positive, real, run_stage
from qlass.messages import State, parse_action, uniforms
from qlass.results import Episode, Step, costs_of, describe
from qlass.runs import need, parse
from qlass.server import Server
from qlass.show import show
from train_qnet import load_qnet

PAPER = {"M": 2, "N": 1}  # App. A.2

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
    temperature: float | None = None  # None: the checkpoint's own
    distinct: bool = False  # draw until M actions differ, 3M times at most
    seed: int = 0  # of chance
    show: bool = False  # print each step

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


def methods(args: argparse.Namespace) -> dict[str, list[Method]]:
    """The methods that --method can name, each with every -M and -N that it has."""

    def each(name: str, by: str | None, Ms: list[int], Ns: list[int]) -> list[Method]:
        options = {"distinct": args.distinct, "seed": args.seed, "show": args.show}
        plan = []
        for m, n in product(Ms, Ns):
            plan.append(Method(name, by, m, n, args.select if n > 1 else None, **options))
        return plan

    one = args.N or [PAPER["N"]]
    return {
        "greedy": [Method("greedy", temperature=0.0, show=args.show)],
        "sample": each("sample", None, [1], [1]),
        "best_of_n": each("best_of_n", None, [1], args.N or [4]),
        "random": each("random", "chance", args.M, one),
        "likeliest": each("likeliest", "likelihood", args.M, one),
        "qlass": each("qlass", "q", args.M, one),
    }


# -------------------------------------------------------------------------------------- Algorithm 4


def episode(
    env: envs.TextEnv, task_id: str, method: Method, trial: int, rendering: Rendering
) -> Generator[Any, Any, Episode]:
    """One episode (lines 3-10). It yields requests to the models."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)  # line 3
    steps: Episode = []
    done = False
    most = method.M * (3 if method.distinct else 1)  # draws
    while not done:  # line 4
        key = (task_id, trial, len(steps))  # the same for all methods: paired differences
        drawn: list[Candidate] = []
        candidates: list[str] = []
        while len(candidates) < method.M and len(drawn) < most:  # lines 5-6
            noise = (*key, len(drawn)) if drawn else key  # the same key draws the same
            drawn += yield ask(env, state, method.M, noise, rendering, method.temperature)
            candidates = distinct_actions(env, [c.text for c in drawn])[: method.M]
        scores = yield from method.scores(state, candidates, key)  # line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # line 8: argmax_a Q(s, a)
        after, reward, done = state.act(env, action)  # line 9
        outcome = action, after.observation, reward, env.known
        steps.append(Step(state, drawn, candidates, scores, *outcome))
        if method.show:
            show(env, steps[-1], len(steps), done)
        state = after  # line 10
    return steps


def distinct_actions(env: envs.TextEnv, actions: Iterable[str]) -> list[str]:
    """The first of each group of actions that are the same to the environment."""
    first: dict[str, str] = {}
    for action in actions:
        first.setdefault(env.canonical(parse_action(action)), action)
    return list(first.values())


def select(episodes: list[Episode], by: str | None) -> Generator[Any, Any, Episode]:
    """The episode that counts (line 11)."""
    values = [0.0] * len(episodes)
    if by == "q":  # the last action's Q speaks for the episode
        values = yield [Score(steps[-1].state, (steps[-1].action,)) for steps in episodes]
    elif by == "oracle":
        values = [steps[-1].reward for steps in episodes]
    return episodes[values.index(max(values))]


class Player:
    """Plays tasks with an agent. Methods that act alike (sample, best-of-N) share episodes."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.episodes: dict[tuple, Episode] = {}

    def play(self, env: envs.TextEnv, task_id: str, method: Method) -> Generator[Any, Any, dict]:
        """Algorithm 4. Returns the outcome, as a result line tells it."""
        episodes = []
        for trial in range(method.N):  # lines 1-2
            episodes.append((yield from self.shared_episode(env, task_id, method, trial)))
        best = yield from select(episodes, method.select)
        return self.outcome(method, best, episodes)

    def shared_episode(
        self, env: envs.TextEnv, task_id: str, method: Method, trial: int
    ) -> Generator[Any, Any, Episode]:
        """An episode. Methods share those whose actions nothing scores."""
        key = (task_id, trial, method.temperature)
        if method.by is None and key in self.episodes:
            return self.episodes[key]
        steps = yield from episode(env, task_id, method, trial, self.chat.rendering)
        if method.by is None:
            self.episodes[key] = steps
        return steps

    def outcome(self, method: Method, best: Episode, episodes: list[Episode]) -> dict:
        return describe(best, episodes, costs_of(self.chat, episodes, method.read_by_qnet))


# ----------------------------------------------------------------------------------------- the file


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, epilog="App. A.2: M = 2 and N = 1 on WebShop.")
    add, free = parser.add_argument, parser.free
    names = ["greedy", "sample", "best_of_n", "random", "likeliest", "qlass"]
    listed = f"{', '.join(names)} (default: qlass)"
    free("--method", nargs="+", default=["qlass"], choices=names, metavar="NAME", help=listed)
    free("-M", nargs="+", type=positive, default=[PAPER["M"]], help="candidates per step (2)")
    free("-N", nargs="+", type=positive, help="episodes per task (default: 1; best_of_n: 4)")
    free("--select", choices=["q", "oracle"], default="q", help="which of N counts (default: q)")
    add("--distinct", action="store_true", help="draw until M actions differ, 3M times at most")
    free("--show", action="store_true", help="print episodes as they are played, one at a time")
    free("--split", default="test", help="tasks to play (default: %(default)s)")
    free("--limit", type=natural, default=400, metavar="N", help="tasks (400; 0: all)")
    free("--skip", type=natural, default=0, metavar="N", help="leave out the first N tasks")
    add("--sft", type=Path, help="the agent's checkpoint (default: RUN/sft, made if missing)")
    add("--qnet", type=path_or_url, help="or URL[#MODEL] of a server (RUN/qnet, made if missing)")
    add("--out", type=Path, help="default: RUN/results.jsonl; its lines are not played again")
    add("--label", help="a variant's name, kept in each line")
    add("--temperature", type=real, metavar="T", help="default: the checkpoint's")
    add("--max-steps", type=positive, metavar="N", help="default: the environment's")
    add_sampling(parser)
    args = parse(parser, argv, search=True)
    if args.show:
        args.overwrite, args.in_flight = args.overwrite or args.out is None, 1
    args.out = args.out or args.run / ("shown.jsonl" if args.show else "results.jsonl")
    return args


def environment(args: argparse.Namespace) -> tuple[envs.TextEnv, list[str]]:
    """The environment that the flags name, and the tasks to play in it."""
    env = envs.from_arguments(args, **({"max_steps": args.max_steps} if args.max_steps else {}))
    return env, env.task_ids(args.split)[args.skip :][: args.limit or None]


def load(args: argparse.Namespace, env: envs.TextEnv, with_q: bool) -> tuple[Chat, dict]:
    """The agent's Chat, and what answers requests."""
    models: dict[type, Callable] = {}
    server = None
    if isinstance(args.qnet, str):
        server = Server(args.qnet, "--qnet")
        args.qnet, args.qnet_model = Path(server.model), server.model
    elif with_q:
        args.qnet = need(args.qnet, args.run / "qnet", "train_qnet", args)
        models[Score] = load_qnet(args.qnet, args).score
    args.sft = need(args.sft, args.run / "sft", "sft", args)
    agent = load_agent(args, env)
    if server:
        models[Score] = ServedQNet(server, agent.chat, args.in_flight or 64).score
    return agent.chat, models | {Sample: agent.sample, LogProb: agent.likelihoods}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env, tasks = environment(args)
    by_name = methods(args)
    plan = [method for name in dict.fromkeys(args.method) for method in by_name[name]]
    chat, models = load(args, env, any(method.needs_q for method in plan))
    results.play(args, env, tasks, plan, Player(chat).play, models)


if __name__ == "__main__":
    run_stage(main)
