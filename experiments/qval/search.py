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
from experiments.qval.judges import Judge, full_name
from experiments.qval.scorers import Call, Context, Decision, Entry, Scores, answer, available, entry, inputs
from qlass import UserError
from qlass.chat import State, uniforms
from qlass.driver import Sample

KNOWING = {"oracle", "state_value"}  # they know the true values: --method oracle_step is their search
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


def steering(entry: Entry, context: Context, answers: dict) -> Callable[..., Scores]:
    """A score as q_search.SCORERS has them; `answers` are those of the search."""

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        sample = answers[Sample]  # of the agent that the search has loaded, below its wordings with --paraphrase
        context.cache.setdefault("sft", getattr(sample, "sample", sample).__self__)
        values = yield from entry.scores(context, Decision(env, state, candidates, key))
        return decided(values, (context.args.seed, *key))

    return scores


def register(names: Sequence[str], args: argparse.Namespace, answers: dict) -> tuple[list[str], list[Path]]:
    """Enter these scores (none named: all whose inputs are there) into q_search.py; their methods, and their inputs."""
    context = Context(args)
    if args.qnet:
        raise UserError("--qnet: scores are of the nets in --run; leave it out, or give another --out")
    methods, paths = [], []
    for given in names or [name for name in available(context) if name not in KNOWING | BLIND]:
        name, _, url = given.partition("=")
        if name in KNOWING:
            raise UserError(f"--scorer {name}: it knows the true values; --method oracle_step searches with those")
        judged = dataclasses.replace(context, judge=Judge(url) if url else None)
        chosen, method = entry(name, judged), f"scorer:{full_name(name, judged.judge)}"
        q_search.SCORERS[method] = steering(chosen, judged, answers)
        if name in PEEKING:
            q_search.STEP_EACH.add(q_search.SCORERS[method])
        methods.append(method)
        paths += inputs(chosen, context)
    return methods, paths


def arguments(argv: list[str]) -> argparse.Namespace:
    name, rest = "python -m experiments.qval search", "further flags: those of q_search.py, but for --method"
    flags = argparse.ArgumentParser(name, description=__doc__.split("\n")[0], epilog=rest, allow_abbrev=False)
    what = "scores, of a judge JUDGE=URL#MODEL (default: all whose inputs are there, without judges)"
    flags.add_argument("--scorer", nargs="+", default=[], metavar="NAME", help=what)
    own, rest = flags.parse_known_args(argv)
    args = q_search.arguments(rest)
    if args.method != ["qlass"]:
        raise UserError("--method: search follows what --scorer names; q_search.py plays the methods")
    return argparse.Namespace(**vars(args) | {"scorer": own.scorer, "gamma": 0.95})


def main(argv: list[str]) -> None:
    args, answers = arguments(argv), {Call: answer}
    methods, paths = register(args.scorer, args, answers)
    q_search.main([*args.argv, "--method", *methods], answers, paths)
