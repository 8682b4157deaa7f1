"""`q_search.py --method scorer`: every score of experiments/qval as the one that search follows."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envs
from experiments.qval import judges
from experiments.qval.scorers import Call, Context, Scores, answer, available, family, need_no_weights, scorer
from q_search import Scorer
from qlass import UserError
from qlass.chat import State, uniforms

KNOWING = {"oracle", "state_value"}  # they know the true values: --method oracle_step is their search
# They look at the next state of each candidate.
PEEKING = {"value_gain", "self_distillation", "ranking", "delta_belief", "gvl", "codegen", "codegen_16", "eureka"}
BLIND = {"step_index", "confidence", "self_certainty"}  # of the state alone: they choose at random, as `random` does


def steering(
    args: argparse.Namespace, answers: dict, policy: Callable[[], Any]
) -> tuple[dict[str, Scorer], list[Path]]:
    """{name: scorer of q_search.py} for --scorer, and the files they are made of; `answers` gets what serves them.

    `policy` gives the agent, which is loaded after this call and before the first score.
    """
    context = Context(args.env, args.run, args.sft, seed=args.seed, device=args.device, flags=args)
    if args.qnet:
        raise UserError("--qnet: scores are of the nets in --run; leave it out, or give another --out")
    names = args.scorer or [name for name in available(context) if name not in KNOWING | BLIND]
    if known := KNOWING.intersection(names):
        raise UserError(f"--scorer {known.pop()}: it knows the true values; --method oracle_step searches with those")
    if args.server:
        need_no_weights(names, context)
    answers[Call] = answer
    found = {}
    for name, _, model in (given.partition("=") for given in names):
        judge = judges.load(model, args.device, args.seed, args.plain) if model else None
        known = dataclasses.replace(context, judge=judge) if judge else context
        found[judges.full_name(name, judge)] = following(name, known, policy)
    return found, [path for name in found for path in made_of(name, context)]


def made_of(name: str, context: Context) -> list[Path]:
    """The files and checkpoints that a score is made of, those that are there."""
    sft, trees, net = context.sft or context.run / "sft", context.run / "trees.jsonl", context.run / "qnet"
    codes = [path for path in context.code if path.stem == name]
    paths = {"learned": [context.run / name], "tree": [trees], "policy": [sft, context.base], "hindsight": [sft, net],
             "embedding": [sft, trees], "code": codes}.get(family(name, context), [])  # fmt: skip
    return [path for path in paths if path and path.exists()]


def following(name: str, context: Context, policy: Callable[[], Any]) -> Scorer:
    made: list[Scorer] = []

    def by_score(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        if not made:
            context.policy = policy()
            made.append(scorer(name, context))
        return decided((yield from made[0](env, state, candidates, key)), (context.seed, *key))

    return Scorer(by_score, steps_all=name in PEEKING)


def decided(scores: list[float | None], key: tuple) -> list[float]:
    """The scores, -inf where there is none, with one of the highest, at random, a hair above the others: search takes
    the first of equal ones, which is the agent's own preference."""
    known = [-math.inf if s is None or math.isnan(s) else float(s) for s in scores]
    luck = uniforms(len(known), *key, "tie")
    top = max(range(len(known)), key=lambda i: (known[i], luck[i]))
    known[top] = math.nextafter(known[top], math.inf) if math.isfinite(known[top]) else 0.0  # 0: nothing has a score
    return known
