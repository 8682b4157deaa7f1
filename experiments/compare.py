"""All methods side by side: those of q_search.py, the environment's own players, and oracles, which see the reward.

    python -m experiments.compare --env webshop --skip 400 --limit 0    # --method all
    python -m experiments.compare --env webshop --method greedy qlass -M 2 4 --paraphrase

    rule, expert, oracle   the environment's own players: a rule without learning; the expert; one that knows all
    oracle_step            of M candidates the one behind which most can be reached (TextEnv.optimal_value)
    oracle_belief          the same on average over eight worlds that agree with what was seen, not in the true one
    oracle_lookahead       QLASS, but the true reward where a candidate ends the episode, as the released code has it
    untried_likeliest, untried_qlass    these searches, but candidates untried since the last new page come first
    all                    players, oracle_step and q_search.py's methods, with M = N, so that equal numbers are drawn

Result lines are q_search.py's; `player` names the rule. With --paraphrase each candidate is sampled under its own
wording of the task (App. A.3.2, experiments/paraphrase.py).
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Generator
from statistics import fmean
from typing import Any

import envs
import q_search
from experiments.paraphrase import Reworded, paraphrased, prompt_tokens
from q_search import Method, Player
from qlass import UserError, results
from qlass.batching import Sample, Score
from qlass.flags import at_least, run_stage
from qlass.messages import State, parse_action, react
from qlass.results import Episode, Step, describe

PLAYERS = ("rule", "expert", "oracle")
# By what they score, where the episode goes on, and in how many drawn worlds (0: in the true one).
ORACLES = {"oracle_step": ("truth", 0), "oracle_belief": ("truth", 8), "oracle_lookahead": ("q", 0)}
UNTRIED = {"untried_likeliest": "likeliest", "untried_qlass": "qlass"}
COMPARED = [2, 4, 6]  # M and N of `all`


@dataclasses.dataclass(frozen=True)
class Variant(Method):
    """A method of an experiment. Its `scores` may ask the environment, too."""

    player: str | None = None  # which rule, or with which settings
    env: Any = dataclasses.field(default=None, compare=False)  # of the episode: `Comparison` fills it in
    looks: bool = False  # it steps every candidate, which costs environment steps

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"player": self.player}

    def __str__(self) -> str:
        return super().__str__().replace(self.name, f"{self.name}:{self.player}" if self.player else self.name, 1)


@dataclasses.dataclass(frozen=True)
class Oracle(Variant):
    """Steps each candidate: its true reward if that ends the episode, else Q or the best that can still be reached."""

    drawn: int = 0  # worlds that agree with what was seen, over which it takes the mean; 0: the true world

    def scores(self, state: State, actions: list[str], key: tuple) -> Generator[Any, Any, list[float]]:
        q = (yield Score(state, tuple(actions))) if self.by == "q" else [None] * len(actions)
        worlds = [self.env.imagine(*key, number) for number in range(self.drawn)] or [self.env]
        values = [[ahead(world, state, *pair) for pair in zip(actions, q, strict=True)] for world in worlds]
        return list(map(fmean, zip(*values, strict=True)))


def ahead(env: envs.TextEnv, state: State, action: str, otherwise: float | None = None, *gamma: float) -> float:
    """What an action earns if it ends the episode, else `otherwise` or the best that can then be reached."""
    here = env.snapshot()
    _, reward, done = state.act(env, action)
    if not done:
        reward = env.optimal_value(*gamma) if otherwise is None else otherwise
    env.restore(here)
    return reward


class Untried(Variant):
    """A search that takes a candidate untried since the last page that was new when it came, if there is one."""

    def scores(self, state: State, actions: list[str], key: tuple) -> Generator[Any, Any, list[float]]:
        scores = yield from super().scores(state, actions, key)
        pages = [content for role, content in state.messages if role == "user"]
        turns = [content for role, content in state.messages if role == "assistant"]  # the first is "OK"
        newest = max(i for i, page in enumerate(pages) if page not in pages[:i])
        vain = set(map(parse_action, turns[newest:]))
        new = [parse_action(action) not in vain for action in actions]
        return [q if first else -math.inf for q, first in zip(scores, new, strict=True)] if any(new) else scores


def follow(env: envs.TextEnv, task_id: str, method: Variant) -> Episode:
    """An episode of one of the environment's own players, which draw nothing."""
    state = State.first(env, *env.reset(options={"task_id": task_id}))
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
    """Plays environments' own players and oracles too."""

    def play(self, env: envs.TextEnv, task_id: str, method: Method) -> Generator[Any, Any, dict]:
        if method.name in PLAYERS:
            steps = follow(env, task_id, method)
            return describe(steps, [steps], {"tokens": {"prompt": 0, "generated": 0, "scored": 0}})
        if isinstance(method, Variant):
            method = dataclasses.replace(method, env=env)
        return (yield from super().play(env, task_id, method))

    def outcome(self, method: Method, best: Episode, episodes: list[Episode]) -> dict:
        outcome = super().outcome(method, best, episodes)
        if isinstance(method, Variant) and method.looks:
            outcome["env_steps"] += sum(len(step.candidates) for steps in episodes for step in steps)
        if isinstance(best[0].drawn[0], Reworded):
            outcome["tokens"]["prompt"] = prompt_tokens(self.chat, episodes)
        return outcome


def plan_of(env: envs.TextEnv, args: argparse.Namespace) -> list[Method]:
    """The methods that the flags name."""
    plans = q_search.methods(args)
    for name, (by, drawn) in ORACLES.items():
        own = {"name": name, "by": by, "drawn": drawn, "looks": not drawn}
        plans[name] = [Oracle(**vars(method) | own) for method in plans["qlass"]]
    for name, search in UNTRIED.items():
        plans[name] = [Untried(**vars(method), player="untried first") for method in plans[search]]
    plans |= {
        "oracle": [Variant("oracle")],
        "expert": [Variant("oracle" if env.omniscient else "expert")],  # who knows more than the pages is an oracle
        "rule": [Variant("rule", player=name) for name in env.rules()],
    }
    if "rule" in args.method and not plans["rule"]:
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    if "oracle_belief" in args.method and not hasattr(env, "imagine"):
        raise UserError(f"--method oracle_belief: {env.name} draws no worlds that agree with what was seen")
    plans["all"] = everything(env, args, plans) if "all" in args.method else []
    return list({str(method): method for name in args.method for method in plans[name]}.values())


def everything(env: envs.TextEnv, args: argparse.Namespace, plans: dict[str, list[Method]]) -> list[Method]:
    """The comparison of all methods."""
    plan = [method for name in ("oracle", "expert", "rule", "greedy", "sample") for method in plans[name]]
    (sample,) = plans["sample"]
    plan += [dataclasses.replace(sample, name="best_of_n", N=n, select=by) for by in ("q", "oracle") for n in args.M]
    valued = type(env).optimal_value is not envs.TextEnv.optimal_value
    most, widest = max(args.M), plans["random"] + plans["oracle_step"] * valued
    searches = [method for method in widest if most == method.M]
    searches += plans["qlass"] + plans["likeliest"] * (not args.server)  # a server tells no log-probability
    return plan + [dataclasses.replace(method, N=1, select=None) for method in searches]


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
    names = ["all", "greedy", "sample", "best_of_n", "random", "likeliest", "qlass", *ORACLES, *UNTRIED, *PLAYERS]
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
    chat, models = None, {}  # none, if only players play
    if any(method.name not in PLAYERS for method in plan):
        chat, models = q_search.load(args, env, any(method.needs_q for method in plan))
        models[Sample] = paraphrased(models[Sample], env, args.paraphrase, args.paraphrase_server)
    results.play(args, env, tasks, plan, Comparison(chat).play, models)


if __name__ == "__main__":
    run_stage(main)
