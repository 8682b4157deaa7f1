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
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import product
from typing import Any

import envs
import q_search
from experiments.paraphrase import paraphrased, prompt_tokens
from q_search import Method, Step, best_of, by_q
from qlass import UserError
from qlass.batching import Sample, Score
from qlass.chat import Chat
from qlass.cli import at_least, run_stage
from qlass.messages import State, parse_action, react
from qlass.metadata import read_meta
from qlass.results import Results, costs_of, describe

PLAYERS = ("rule", "expert", "oracle")
COMPARED = [2, 4, 6]  # M and N of `all`


@dataclasses.dataclass(frozen=True)
class Variant(Method):
    """A method of an experiment."""

    player: str | None = None  # which rule, or with which settings

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"player": self.player}

    def __str__(self) -> str:
        return super().__str__().replace(self.name, f"{self.name}:{self.player}" if self.player else self.name, 1)


def by_true_value(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Generator:
    """The best that can still be reached after each candidate, by an environment that knows."""
    yield from ()
    return look_ahead(env, candidates, [None] * len(candidates))


def by_q_or_reward(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Generator:
    """Q, but the true reward where a candidate's step ends the episode."""
    return look_ahead(env, candidates, (yield Score(state, tuple(candidates))))


def look_ahead(env: envs.TextEnv, candidates: list[str], otherwise: Sequence[float | None]) -> list[float]:
    """Step each candidate in the real environment: its reward if that ends the episode, else what is given."""
    scores, here = [], env.snapshot()
    for action, score in zip(candidates, otherwise, strict=True):
        _, reward, terminated, truncated, _ = env.step(parse_action(action))
        if terminated or truncated:
            score = env.outcome(reward, done=True)
        scores.append(env.optimal_value() if score is None else score)
        env.restore(here)
    return scores


@dataclasses.dataclass(frozen=True)
class InEnv(Variant):
    """Its score takes the environment too, which is in the state."""

    looks: bool = True  # it steps every candidate, which costs environment steps

    def read_by_qnet(self, step: Step) -> list[str]:
        return step.candidates if self.score is by_q_or_reward else super().read_by_qnet(step)


ORACLES: dict[str, Callable] = {"oracle_step": by_true_value, "oracle_lookahead": by_q_or_reward}


def follow(env: envs.TextEnv, task_id: str, method: Variant) -> list[Step]:
    """An episode of one of the environment's own players, which draw nothing."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)
    steps: list[Step] = []
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


def play(
    env: envs.TextEnv, task_id: str, method: Method, chat: Chat | None, sampled: dict, reworded: bool = False
) -> Generator[Any, Any, dict]:
    """As `q_search.play`. chat: None if only players play. reworded: the draws are `paraphrase.Reworded`."""
    if method.name in PLAYERS:
        steps = follow(env, task_id, method)
        return describe(steps, [steps], {"tokens": {"prompt": 0, "generated": 0, "scored": 0}})
    bound = isinstance(method, InEnv)
    acting = dataclasses.replace(method, score=partial(method.score, env)) if bound else method
    best, episodes = yield from best_of(env, task_id, acting, chat.rendering, sampled)
    outcome = describe(best, episodes, costs_of(chat, episodes, method.read_by_qnet))
    if bound and method.looks:
        outcome["env_steps"] += sum(len(step.candidates) for steps in episodes for step in steps)
    if reworded:
        outcome["tokens"]["prompt"] = prompt_tokens(chat, episodes)
    return outcome


def plan_of(env: envs.TextEnv, args: argparse.Namespace) -> list[Method]:
    """The methods that the flags name."""
    plans = q_search.methods(args)
    for name, score in ORACLES.items():
        sizes = product(args.M, args.N or [1])
        plans[name] = [
            InEnv(name, score, m, n, args.select if n > 1 else None, distinct=args.distinct) for m, n in sizes
        ]
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
    plan += [Method("best_of_n", N=n, select=by) for by in ("q", "oracle") for n in args.M]
    plan += single["likeliest"] if not args.server else []  # which tells no log-probability
    plan += single["qlass"]
    if type(env).optimal_value is not envs.TextEnv.optimal_value:
        plan.append(InEnv("oracle_step", by_true_value, M=most))
    return plan


def parser(module: str, doc: str, rest: str = "") -> argparse.ArgumentParser:
    """Of an experiment that has q_search.py's flags beside its own, as `both` reads them."""
    name, text = f"python -m experiments.{module}", f"further flags: those of q_search.py{rest}"
    return argparse.ArgumentParser(name, description=doc.split("\n")[0], epilog=text, allow_abbrev=False)


def both(flags: argparse.ArgumentParser, argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """An experiment's own flags, and those of q_search.py."""
    argv = sys.argv[1:] if argv is None else argv
    own, rest = flags.parse_known_args(argv)
    args = q_search.arguments(rest)
    args.argv = [*argv]
    return own, args


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser("compare", __doc__)
    add = flags.add_argument
    names = ["all", "greedy", "sample", "best_of_n", "random", "likeliest", "qlass", *ORACLES, *PLAYERS]
    add("--method", nargs="+", default=["all"], choices=names, metavar="NAME", help=", ".join(names))
    add("-M", nargs="+", type=at_least(1), help="candidates a step (default: 2; with all: 2 4 6)")
    wordings = "wordings per task, one per candidate (no N: all different)"
    add("--paraphrase", nargs="?", type=at_least(0), const=0, metavar="N", help=wordings)
    add("--paraphrase-server", metavar="URL", help="wordings by a chat server, not by rules")
    own, args = both(flags, argv)
    own.M = own.M or (COMPARED if "all" in own.method else args.M)
    if own.paraphrase is not None or own.paraphrase_server:
        args.label = args.label or "paraphrased"
    return argparse.Namespace(**vars(args) | vars(own))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    reworded = args.paraphrase is not None or bool(args.paraphrase_server)
    begun = {} if args.overwrite or not args.out.exists() else read_meta(args.out)["arguments"]
    if reworded and begun and "paraphrase" not in begun:  # by q_search.py
        raise UserError(f"{args.out}: was begun without --paraphrase: name another --out")
    env, tasks = q_search.environment(args)
    plan = plan_of(env, args)
    chat, models = None, {}
    if any(method.name not in PLAYERS for method in plan):
        with_q = any(method.score in (by_q, by_q_or_reward) or method.select == "q" for method in plan)
        chat, models = q_search.load(args, env, with_q)
        models[Sample] = paraphrased(models[Sample], env, args.paraphrase, args.paraphrase_server)
    playing = partial(play, chat=chat, sampled={}, reworded=reworded)
    Results(args, env).play(tasks, plan, playing, models)


if __name__ == "__main__":
    run_stage(main)
