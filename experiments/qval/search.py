"""Search that follows a score: q_search.py plays, and each score of experiments/qval takes the place of Q.

    python -m experiments.qval search --env frozenlake -M 6 --out runs/frozenlake/qval/results.jsonl

Result lines have method "scorer" and the score's name as player. What a score costs in tokens is not counted.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import envs
import q_search
from experiments.compare import InEnv, both, parser, play
from experiments.qval.judges import Judge, full_name
from experiments.qval.scorers import Call, Context, Decision, Entry, Scores, answer, available, entry, inputs
from qlass import UserError
from qlass.batching import Sample
from qlass.messages import State, uniforms
from qlass.results import Results

KNOWING = {"oracle", "state_value"}  # the true values: experiments.compare --method oracle_step is their search
BLIND = {"step_index"}  # of the state alone: it chooses at random, as `random` does
PEEKING = {"value_gain", "self_distillation", "ranking"}  # they step each candidate


def decided(scores: Sequence[float | None], key: tuple) -> list[float]:
    """The scores, -inf where there is none, with one of the highest, at random, a hair above the others: search takes
    the first of equal ones, which is the agent's own preference."""
    values = [-math.inf if score is None or math.isnan(score) else float(score) for score in scores]
    noise = uniforms(len(values), *key, "tie")
    top = max(range(len(values)), key=lambda i: (values[i], noise[i]))
    values[top] = math.nextafter(values[top], math.inf) if math.isfinite(values[top]) else 0.0  # 0: none has a score
    return values


def steering(entry: Entry, context: Context) -> Callable[..., Scores]:
    """A score as a `q_search.Scorer`, of an environment that is in the state."""

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        values = yield from entry.scores(context, Decision(env, state, candidates, key))
        return decided(values, (context.args.seed, *key))

    return scores


def planned(names: Sequence[str], args: argparse.Namespace, context: Context) -> tuple[list[InEnv], list[Path]]:
    """Search by these scores (none named: by all whose inputs are there), and these inputs."""
    if args.qnet:
        raise UserError("--qnet: scores are of the nets in --run; leave it out, or give another --out")
    plan, paths = [], []
    sizes = list(product(args.M, args.N or [1]))
    for given in names or [name for name in available(context) if name not in KNOWING | BLIND]:
        name, _, url = given.partition("=")
        if name in KNOWING:
            known = "it knows the true values; experiments.compare --method oracle_step searches with those"
            raise UserError(f"--scorer {name}: {known}")
        judged = dataclasses.replace(context, judge=Judge(url) if url else None)
        chosen = entry(name, judged)
        how = {"player": full_name(name, judged.judge), "looks": name in PEEKING}
        score = steering(chosen, judged)
        plan += [InEnv("scorer", score, m, n, args.select if n > 1 else None, **how) for m, n in sizes]
        paths += inputs(chosen, context)
    return plan, paths


def arguments(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    flags = parser("qval search", __doc__, ", but for --method")
    what = "scores, of a judge JUDGE=URL#MODEL (default: all whose inputs are there, without judges)"
    flags.add_argument("--scorer", nargs="+", default=[], metavar="NAME", help=what)
    return both(flags, argv)


def main(argv: list[str]) -> None:
    own, args = arguments(argv)
    if args.method != ["qlass"]:
        raise UserError("--method: search follows what --scorer names; q_search.py plays the methods")
    env, tasks = q_search.environment(args)
    context = Context(argparse.Namespace(**vars(args) | {"gamma": 0.95}))
    plan, paths = planned(own.scorer, args, context)
    chat, models = q_search.load(args, env, with_q=any(method.select == "q" for method in plan))
    context.cache["sft"] = models[Sample].__self__  # scores ask the agent that is loaded
    models[Call] = answer
    Results(args, env, paths).play(tasks, plan, partial(play, chat=chat, sampled={}), models)
