"""All methods side by side: those of q_search.py, the environment's own players, and oracles, which see the reward.

    python -m experiments.compare --env webshop --skip 400 --limit 0    # --method all
    python -m experiments.compare --env webshop --method greedy qlass -M 2 4 --paraphrase

    rule, expert, oracle   the environment's own players: a rule without learning; the expert; one that knows all
    oracle_step            of M candidates the one behind which most can be reached (TextEnv.optimal_value)
    oracle_lookahead       QLASS, but the true reward where a candidate ends the episode, as the released code has it
    all                    all of these but the last, with M = N, so that equal numbers of actions are drawn

Result lines are q_search.py's; `player` names the rule. With --paraphrase each candidate is sampled under its own
wording of the task (App. A.3.2, experiments/paraphrase.py).
"""

import argparse
import dataclasses
import sys
from collections.abc import Generator
from itertools import product
from typing import Any

import envs
import q_search
from experiments.paraphrase import paraphrased, prompt_tokens
from q_search import Method, Player
from qlass import UserError, results
from qlass.batching import Sample, Score
from qlass.chat import Chat
from qlass.flags import at_least
from qlass.messages import State, react
from qlass.results import Episode, Step, costs_of, describe
from qlass.runs import run_stage

PLAYERS = ("rule", "expert", "oracle")
ORACLES = {"oracle_step": "truth", "oracle_lookahead": "q"}  # by what they score, where the episode goes on
COMPARED = [2, 4, 6]  # M and N of `all`


@dataclasses.dataclass(frozen=True)
class Variant(Method):
    """A method of an experiment."""

    player: str | None = None  # which rule, or with which settings

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"player": self.player}

    def __str__(self) -> str:
        return super().__str__().replace(self.name, f"{self.name}:{self.player}" if self.player else self.name, 1)


@dataclasses.dataclass(frozen=True)
class InEnv(Variant):
    """Its `scores` take the environment too, which is in the state."""

    env: Any = dataclasses.field(default=None, compare=False)  # of the episode: `Comparison` fills it in
    looks: bool = True  # it steps every candidate, which costs environment steps


class Oracle(InEnv):
    """Steps each candidate: its true reward if that ends the episode, else Q or the best that can still be reached."""

    def scores(self, state: State, actions: list[str], key: tuple) -> Generator[Any, Any, list[float]]:
        q = (yield Score(state, tuple(actions))) if self.by == "q" else [None] * len(actions)
        scores, here = [], self.env.snapshot()
        for action, otherwise in zip(actions, q, strict=True):
            _, reward, done = state.act(self.env, action)
            if not done:
                reward = self.env.optimal_value() if otherwise is None else otherwise
            scores.append(reward)
            self.env.restore(here)
        return scores


def follow(env: envs.TextEnv, task_id: str, method: Variant) -> Episode:
    """An episode of one of the environment's own players, which draw nothing."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)
    steps: Episode = []
    moves = env.rules()[method.player]() if method.player else getattr(env, method.name)(task_id)
    for thought, move in moves:
        action = react(thought, move)
        after, reward, done = state.act(env, action)
        steps.append(Step(state, [], [], [], action, after.observation, reward))
        state = after
        if done:
            break
    if not steps:
        raise UserError(f"{env.name}: {method} does nothing in task {task_id}")
    return steps


class Comparison(Player):
    """Plays environments' own players and oracles too. reworded: the draws are `paraphrase.Reworded`."""

    def __init__(self, chat: Chat | None, reworded: bool = False) -> None:
        """chat: None if only players play."""
        super().__init__(chat)
        self.reworded = reworded

    def play(self, env: envs.TextEnv, task_id: str, method: Method) -> Generator[Any, Any, dict]:
        if method.name in PLAYERS:
            steps = follow(env, task_id, method)
            return describe(steps, [steps], {"tokens": {"prompt": 0, "generated": 0, "scored": 0}})
        if isinstance(method, InEnv):
            method = dataclasses.replace(method, env=env)
        best, episodes = yield from self.best_of(env, task_id, method)
        outcome = describe(best, episodes, costs_of(self.chat, episodes, method.read_by_qnet))
        if isinstance(method, InEnv) and method.looks:
            outcome["env_steps"] += sum(len(step.candidates) for steps in episodes for step in steps)
        if self.reworded:
            outcome["tokens"]["prompt"] = prompt_tokens(self.chat, episodes)
        return outcome


def plan_of(env: envs.TextEnv, args: argparse.Namespace) -> list[Method]:
    """The methods that the flags name."""
    plans = q_search.methods(args)
    for name, by in ORACLES.items():
        sizes = product(args.M, args.N or [1])
        plans[name] = [Oracle(name, by, m, n, args.select if n > 1 else None, distinct=args.distinct) for m, n in sizes]
    plans |= {
        "oracle": [Variant("oracle")],
        "expert": [Variant("oracle" if env.omniscient else "expert")],  # who knows more than the pages is an oracle
        "rule": [Variant("rule", player=name) for name in env.rules()],
    }
    if "rule" in args.method and not plans["rule"]:
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    plans["all"] = everything(env, args, plans) if "all" in args.method else []
    return list({str(method): method for name in args.method for method in plans[name]}.values())


def everything(env: envs.TextEnv, args: argparse.Namespace, plans: dict[str, list[Method]]) -> list[Method]:
    """The comparison of all methods."""
    plan = [method for name in ("oracle", "expert", "rule", "greedy", "sample") for method in plans[name]]
    most, single = max(args.M), q_search.methods(argparse.Namespace(**vars(args) | {"N": [1]}))
    plan += [method for method in single["random"] if most == method.M]
    (sample,) = plans["sample"]
    plan += [dataclasses.replace(sample, name="best_of_n", N=n, select=by) for by in ("q", "oracle") for n in args.M]
    plan += single["likeliest"] if not args.server else []  # which tells no log-probability
    plan += single["qlass"]
    if type(env).optimal_value is not envs.TextEnv.optimal_value:
        plan.append(Oracle("oracle_step", "truth", M=most))
    return plan


def parser(module: str, doc: str, rest: str = "") -> argparse.ArgumentParser:
    """Of an experiment that has q_search.py's flags beside its own, as `with_search` reads them."""
    name, text = f"python -m experiments.{module}", f"further flags: those of q_search.py{rest}"
    return argparse.ArgumentParser(name, description=doc.split("\n")[0], epilog=text, allow_abbrev=False)


def with_search(flags: argparse.ArgumentParser, argv: list[str] | None, *recipe: str) -> argparse.Namespace:
    """An experiment's own flags and those of q_search.py. Each line tells the own ones, but for those in the recipe."""
    argv = sys.argv[1:] if argv is None else argv
    own, rest = flags.parse_known_args(argv)
    args = q_search.arguments(rest)
    args.free = [*args.free, *(name for name in vars(own) if name not in recipe)]
    return argparse.Namespace(**vars(args) | vars(own) | {"argv": [*argv]})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser("compare", __doc__)
    add = flags.add_argument
    names = ["all", "greedy", "sample", "best_of_n", "random", "likeliest", "qlass", *ORACLES, *PLAYERS]
    add("--method", nargs="+", default=["all"], choices=names, metavar="NAME", help=", ".join(names))
    add("-M", nargs="+", type=at_least(1), help="candidates a step (default: 2; with all: 2 4 6)")
    wordings = "wordings per task, one per candidate (no N: all different)"
    add("--paraphrase", nargs="?", type=at_least(0), const=0, metavar="N", help=wordings)
    add("--paraphrase-server", metavar="URL", help="wordings by a chat server, not by rules")
    args = with_search(flags, argv, "paraphrase", "paraphrase_server")
    args.M = args.M or (COMPARED if "all" in args.method else [q_search.PAPER["M"]])
    if args.paraphrase is not None or args.paraphrase_server:
        args.label = args.label or "paraphrased"
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env, tasks = q_search.environment(args)
    plan = plan_of(env, args)
    chat, models = None, {}
    if any(method.name not in PLAYERS for method in plan):
        chat, models = q_search.load(args, env, any(method.needs_q for method in plan))
        models[Sample] = paraphrased(models[Sample], env, args.paraphrase, args.paraphrase_server)
    game = Comparison(chat, args.paraphrase is not None or bool(args.paraphrase_server)).play
    results.play(args, env, tasks, plan, game, models)


if __name__ == "__main__":
    run_stage(main)
