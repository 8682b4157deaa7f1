"""Search that follows a score: q_search.py plays, and each score of experiments/qval takes the place of Q.

    python -m experiments.qval search --env frozenlake -M 6 --out runs/frozenlake/qval/results.jsonl

Result lines have method "scorer" and the score's name as player. What a score costs in tokens is not counted.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import q_search
from experiments.compare import Variant, refuse_unused
from experiments.qval.judges import JUDGED
from experiments.qval.scorers import Call, Context, Decision, Entry, Judge, answer, available, entry, inputs
from qlass import UserError, outputs
from qlass.batching import Sample
from qlass.messages import State, uniforms
from qlass.settings import read, runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config, Judge):
    scorer: tuple[str, ...] = runtime(())  # scores (all whose inputs are there)
    gamma: float = 0.95  # discount of the scores that look ahead


KNOWING = {"oracle", "state_value", "sdpo_gt"}  # true values: experiments.compare --method oracle_step is their search
BLIND = {"step_index"}  # of the state alone: it chooses at random, as `random` does
PEEKING = {"value_gain", "self_distillation", *JUDGED}  # they step each candidate


def decided(scores: Sequence[float | None], key: tuple) -> list[float]:
    """The scores, -inf where there is none, with one of the highest, at random, a hair above the others: search takes
    the first of equal ones, which is the agent's own preference."""
    values = [-math.inf if score is None or math.isnan(score) else float(score) for score in scores]
    noise = uniforms(len(values), *key, "tie")
    top = max(range(len(values)), key=lambda i: (values[i], noise[i]))
    values[top] = math.nextafter(values[top], math.inf) if math.isfinite(values[top]) else 0.0  # 0: none has a score
    return values


@dataclasses.dataclass(frozen=True)
class Steered(Variant):
    """Takes the action of the highest score; `by` is the score's name."""

    entry: Entry | None = None
    context: Context | None = dataclasses.field(default=None, compare=False)

    async def scores(self, state: State, actions: list[str], key: tuple) -> list[float]:
        values = await self.entry.scores(self.context, Decision(self.env, state, actions, key))
        return decided(values, (self.context.config.seed, *key))


def planned(config: Config, context: Context) -> tuple[list[Steered], dict[str, Path]]:
    """Search by these scores (none named: by all whose inputs are there), and these inputs."""
    if config.qnet:
        raise UserError("--qnet: scores are of the nets in --run; leave it out, or give another --out")
    plan: list[Steered] = []
    paths: dict[str, Path] = {}
    for name in config.scorer or [name for name in available(context) if name not in KNOWING | BLIND]:
        if name in KNOWING:
            reason = "it knows the true values; experiments.compare --method oracle_step searches with those"
            raise UserError(f"--scorer {name}: {reason}")
        chosen = entry(name, context)
        how = {"player": context.title(name), "looks": name in PEEKING, "entry": chosen, "context": context}
        for m, n in product(config.M, config.N or (1,)):
            plan.append(Steered("scorer", how["player"], m, n, config.select if n > 1 else None, **how))
        paths |= inputs(chosen, context)
    return plan, paths


def main(argv: list[str]) -> None:
    config = read(Config, __doc__, argv)
    if config.method != ("qlass",):
        raise UserError("--method: search follows what --scorer names; q_search.py plays the methods")
    refuse_unused(config, "distinct")
    env, tasks = q_search.environment(config)
    context = Context(config)
    plan, paths = planned(config, context)
    chat, models, used = q_search.load(config, env, any(method.needs_q for method in plan))
    context.cache["sft"] = models[Sample].__self__  # scores ask the agent that is loaded
    models[Call] = answer
    out = config.out or config.run / "results.jsonl"
    earlier = {name: outputs.input_of(out, name) for name in outputs.meta_of(out)["inputs"]}
    q_search.evaluate(config, env, tasks, plan, chat, models, earlier | paths | used)
