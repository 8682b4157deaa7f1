"""Search that follows a score: q_search.py plays, and each score of experiments/qval takes the place of Q.

    python -m experiments.qval search --env frozenlake -M 6 --out runs/frozenlake/qval/results.jsonl

Result lines have method "scorer" and the score's name as player. What a score costs in tokens is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import envs
import q_search
from experiments.qval import judges
from experiments.qval.scorers import Call, Context, Scorer, Scores, answer, available, inputs, need_no_weights, scorer
from qlass import UserError
from qlass.chat import State, uniforms
from qlass.driver import Sample

KNOWING = {"oracle", "state_value"}  # they know the true values: --method oracle_step is their search
BLIND = {"step_index", "confidence", "self_certainty"}  # of the state alone: they choose at random, as `random` does
# They step each candidate to see the next state.
PEEKING = {"value_gain", "self_distillation", "ranking", "delta_belief", "gvl", "codegen", "codegen_16", "eureka"}


def decided(scores: Sequence[float | None], key: tuple) -> list[float]:
    """The scores, -inf where there is none, with one of the highest, at random, a hair above the others: search takes
    the first of equal ones, which is the agent's own preference."""
    values = [-math.inf if score is None or math.isnan(score) else float(score) for score in scores]
    noise = uniforms(len(values), *key, "tie")
    top = max(range(len(values)), key=lambda i: (values[i], noise[i]))
    values[top] = math.nextafter(values[top], math.inf) if math.isfinite(values[top]) else 0.0  # 0: none has a score
    return values


def steering(score: Scorer, context: Context, answers: dict) -> Callable[..., Scores]:
    """A score as q_search.SCORERS has them; `answers` are those of the search."""

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        sample = answers[Sample]  # of the agent that the search has loaded, below its wordings with --paraphrase
        context.cache.setdefault("sft", getattr(sample, "sample", sample).__self__)
        return decided((yield from score(env, state, candidates, key)), (context.args.seed, *key))

    return scores


def register(names: Sequence[str], args: argparse.Namespace, answers: dict) -> tuple[list[str], list[Path]]:
    """Enter these scores (none named: all whose inputs are there) into q_search.py; their methods, and their inputs."""
    context = Context(args)
    names = names or [name for name in available(context) if name not in KNOWING | BLIND]
    if args.qnet:
        raise UserError("--qnet: scores are of the nets in --run; leave it out, or give another --out")
    for name in KNOWING.intersection(names):
        raise UserError(f"--scorer {name}: it knows the true values; --method oracle_step searches with those")
    if args.server:
        need_no_weights(names, context)
    methods, paths = [], []
    for name, _, model in (given.partition("=") for given in names):
        judge = judges.load(model, args.device, args.seed, args.plain) if model else None
        judged = dataclasses.replace(context, judge=judge)
        score = steering(scorer(name, judged), judged, answers)
        methods.append(f"scorer:{judges.full_name(name, judge)}")
        paths += inputs(name, context)
        q_search.SCORERS[methods[-1]] = score
        q_search.STEP_EACH |= {score} if name in PEEKING else set()
    return methods, paths


def arguments(argv: list[str]) -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        "python -m experiments.qval search", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="further flags: those of q_search.py, but for --method",
    )  # fmt: skip
    what = "scores, judges as JUDGE=URL#MODEL (default: all scores whose inputs are there, but judges)"
    flags.add_argument("--scorer", nargs="+", default=[], metavar="NAME", help=what)
    own, rest = flags.parse_known_args(argv)
    args = q_search.arguments(rest)
    if args.method != ["qlass"]:
        raise UserError("--method: search follows what --scorer names; q_search.py plays the methods")
    return argparse.Namespace(**vars(args) | {"scorer": own.scorer, "base": None, "code": [], "gamma": 0.95})


def main(argv: list[str]) -> None:
    args, answers = arguments(argv), {Call: answer}
    methods, paths = register(args.scorer, args, answers)
    q_search.main([*args.argv, "--method", *methods], answers, paths)
