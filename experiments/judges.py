"""Search by any score of the candidates in the place of a QNet's, on the same draws.

    python -m experiments.judges --run RUN --judge qnet=RUN/qnet agent=RUN/sft-longer vote chance true_value -M 2 6
    python -m experiments.judges --run RUN --judge qnet=RUN/qnet overlap.py:score untried

    qnet=FOLDER         Q(s, a)
    agent=FOLDER        log pi(a | s) of another agent, among the valid actions if it chooses among these
    gain=AFTER,BEFORE   log pi(a | s) of one agent minus that of another, as after and before reinforcement learning
    vote                how many of the M draws are this action
    chance              a random number
    true_value          how much reward can still be reached behind it (method "oracle_judge")
    untried             or another score of experiments.qval that knows no true value, of equal ones one at random
    FILE.py:NAME        a function of your own, of a State and the list of its candidates: the list of their scores

In the same state all judges see the draws of q_search.py --method qlass. A line of RUN/results-judges.jsonl has the
method "judge" and, as `player`, the folder's name (of two AFTER-BEFORE), FILE.py:NAME or the word. The table shows each
judge's reward, its difference from the first judge, the tokens (a judge's model is charged the candidates, once, and
not what else a score of experiments.qval asks) and seconds of a task, and the share of pairs of siblings in held-out
trees (RUN/q_labels.jsonl) that it ranks as their q: where the demonstration's action is the better one of the two,
where it is the worse one, and where neither or both are the demonstration's. These trees are held out from QNet's
training, not from an agent that was cloned on their tasks, nor from the tables of the scores tree_*. What is played is
not played again, so a judge may come later.
"""

import dataclasses
import math
import runpy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

import q_search
from experiments import Call, answer
from experiments.compare import Oracle, Variant
from experiments.qval.scorers import SCORERS, Context, Decision, Entry, by_model, entries, votes
from qlass import UserError
from qlass.agent import load_policy
from qlass.batching import Candidate, LogProb, Sample, ask, drive
from qlass.chat import Rendering
from qlass.inputs import checkpoint
from qlass.messages import State, replay
from qlass.noise import uniforms
from qlass.pairs import GAP, HELD_OUT, states_of
from qlass.records import Label
from qlass.settings import place, read_settings, run_stage, workload
from qlass.trees import children_of, read_trees
from reporting.results import read_results, result_files
from reporting.tables import difference, markdown, number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config):
    output: ClassVar = "results-judges.jsonl"

    judge: tuple[str, ...] = workload(())  # one or more of the table above
    out: Path | None = place(None)  # RUN/results-judges.jsonl; its lines are not played again


# ------------------------------------------------------------------------------------------------------------- judges


@dataclasses.dataclass(frozen=True)
class Judge(Variant):
    """Takes the candidate with the highest score."""

    rank: Callable[[Decision], Awaitable[Sequence[float]]] | None = None
    reads: bool = False  # a model of its own reads the candidates, and is charged as QNet is

    async def scores(self, state: State, actions: list[str], samples: Sequence[Candidate], key: tuple) -> list[float]:
        scores = list(map(float, await self.rank(Decision(self.env, state, actions, key, samples))))
        if len(scores) != len(actions) or any(map(math.isnan, scores)):
            raise UserError(f"{self.player} gives {scores}: a number for each of {len(actions)} candidates is expected")
        return scores

    def read_by_qnet(self, step: q_search.Step) -> list[str]:
        return step.candidates if self.reads else []


async def by_chooser(model: Callable, rendering: Rendering, decision: Decision) -> Sequence[float]:
    """log pi(a | s) of an agent that chooses among the valid actions; -inf of free text that is none of them."""
    question = ask(decision.env, decision.state, 1, ("judge",), rendering, 1.0)
    (logprobs,) = await Call(model, (question,))
    valid = dict(zip(question.valid, logprobs, strict=True))
    return [valid.get(action, -math.inf) for action in decision.candidates]


async def by_function(function: Callable, decision: Decision) -> Sequence[float]:
    return function(decision.state, decision.candidates)


async def vote(decision: Decision) -> Sequence[float]:
    return votes(decision, decision.samples)


async def by_scorer(entry: Entry, context: Context, decision: Decision) -> Sequence[float]:
    """The scores, -inf where there is none, with one of the highest, at random, a hair above the others: search takes
    the first of equal ones, which is the agent's own preference."""
    scores = np.array(await entry.scores(context, decision), float)
    scores[np.isnan(scores)] = -math.inf
    noise = uniforms(len(scores), context.config.seed, *decision.key, "tie")
    top = np.lexsort((noise, scores))[-1]
    scores[top] = np.nextafter(scores[top], math.inf) if np.isfinite(scores[top]) else 0.0  # 0: none has a score
    return scores


WORDS = {
    "vote": Judge("judge", player="vote", rank=vote),
    "chance": Variant("judge", "chance", player="chance"),
    "true_value": Oracle("oracle_judge", player="true_value", looks=True),
}
SCORES = [name for name, entry in SCORERS.items() if not {"truth", "judge"}.intersection(entry.needs)]


def load(text: str, search: q_search.Search) -> Variant:
    """A judge; the inputs of the search get what it is read from."""
    config, inputs = search.config, search.inputs
    if text in WORDS:
        return dataclasses.replace(WORDS[text], seed=config.seed)
    if text in SCORES:
        return load_scorer(text, search)
    kind, _, places = text.rpartition("=")
    paths = list(map(Path, places.split(",")))
    judge = partial(Judge, "judge", player="-".join(path.name for path in paths))
    file, _, function = text.rpartition(":")
    if not kind and Path(file).is_file():
        inputs[f"judge {paths[0].name}"] = Path(file)
        names = runpy.run_path(file)
        if function not in names:
            raise UserError(f"--judge {text}: {file} has no {function}")
        return judge(rank=partial(by_function, names[function]))
    for path in paths:
        if inputs.setdefault(f"judge {path.name}", path) != path:
            raise UserError(f"--judge {text}: another folder is named {path.name}: rename one")
    if kind == "qnet":
        scorer, _ = q_search.load_scorer(dataclasses.replace(config, qnet=places))
        return judge(rank=partial(by_model, scorer.score), reads=True)
    if (kind, len(paths)) not in (("agent", 1), ("gain", 2)):
        ways = "qnet=FOLDER, agent=FOLDER, gain=AFTER,BEFORE, FILE.py:NAME"
        raise UserError(f"--judge {text}: none of {', '.join([*WORDS, *SCORES])}, {ways}")
    agents = [load_policy(checkpoint(path), config) for path in paths]
    rendering = agents[0].chat.rendering
    if rendering.candidates == "free":
        return judge(rank=partial(by_model, minus(*(agent.likelihoods for agent in agents))), reads=True)
    return judge(rank=partial(by_chooser, minus(*(agent.valid_logprobs for agent in agents)), rendering), reads=True)


def load_scorer(name: str, search: q_search.Search) -> Judge:
    """A score of experiments.qval, which asks the agent of the search."""
    context = Context(search.config)
    (entry,) = entries(context, [name]).values()
    if not search.config.server:
        context.agent = search.backends[Sample].__self__
    search.backends[LogProb] = context.agent.likelihoods
    search.inputs |= {need: context.inputs[need] for need in entry.needs if need not in search.inputs}
    reads = not {"sft", "qnet"}.isdisjoint(entry.needs)
    return Judge("judge", player=name, rank=partial(by_scorer, entry, context), reads=reads, looks=entry.looks)


def minus(model: Callable, other: Callable | None = None) -> Callable:
    """The answers of a model, minus those of another one to the same requests."""
    if other is None:
        return model
    return lambda requests: list(map(np.subtract, model(requests), other(requests)))


# ----------------------------------------------------------------------------------------------------------- siblings

CASES = {1: "demonstration better", -1: "demonstration worse", 0: "neither"}


async def rank_siblings(tree: list[dict], judge: Variant, search: q_search.Search) -> list[tuple[str, float]]:
    """(case, right) of each pair of siblings: right is 1 if their scores have the order of their q, .5 if equal
    (of experiments.qval's scores one of the highest is lifted, by lot)."""
    env, states, pairs = search.env.fork(), states_of(tree), []
    env.max_steps = None
    judge = dataclasses.replace(judge, env=env)
    for parent, children in enumerate(children_of(tree)):
        nodes = [tree[child] for child in children]
        q = [node["q"] for node in nodes]
        if max(q, default=0) - min(q, default=0) <= GAP:
            continue
        *_, move = replay(env, tree[0]["task_id"], states[parent].actions)
        if move.state.observation != states[parent].observation:  # on slippery ice it stands elsewhere
            continue
        key = (tree[0]["task_id"], "siblings", parent)
        samples = await judge.draw(env, states[parent], key, search.chat.rendering)
        scores = await judge.scores(states[parent], [node["action"] for node in nodes], samples, key)
        for (a, x), (b, y) in combinations(zip(nodes, scores, strict=True), 2):
            if abs(gap := a["q"] - b["q"]) > GAP:
                case = CASES[(a["expert"] - b["expert"]) * (1 if gap > 0 else -1)]
                pairs.append((case, 0.5 if x == y else float((x > y) == (gap > 0))))
    env.close()
    return pairs


def accuracies(pairs: Sequence[tuple[str, float]]) -> dict[str, str]:
    """The share of each case's pairs that are right, and their number."""
    cases = pd.DataFrame(pairs, columns=["case", "right"]).groupby("case")["right"].agg(["mean", "size"])
    return {row.Index: f"{row.mean:.2f} of {row.size}" for row in cases.itertuples()}


# --------------------------------------------------------------------------------------------------------------- main


def table(config: Config, siblings: dict[str, dict]) -> pd.DataFrame:
    """A row for each judge and M; empty while other processes go on. siblings: the accuracies of each judge."""
    groups = {
        (group.condition.player, group.condition.M): group
        for group in read_results(result_files([str(config.path)]) if config.path.exists() else ())
        if config.split in set(group.episodes["split"])
    }
    if not groups.keys() >= {*product(siblings, config.M)}:
        return pd.DataFrame()
    first, *_ = siblings
    rows = []
    for name, of_siblings in siblings.items():
        for M in config.M:
            group = groups[name, M]
            row = {"judge": name, "M": str(M), "reward [95 %]": f"{group.reward}"}
            row |= {f"minus {first}": f"{difference(group, groups[first, M]):+}", "tokens": number(group.mean("total"))}
            rows.append(row | {"seconds": number(group.mean("seconds"), 2)} | of_siblings)
    return pd.DataFrame(rows).fillna("")


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    if not config.judge or config.N or config.qnet or config.method != ("qlass",):
        raise UserError("--judge names what search follows, with N = 1: leave --method, --qnet and -N out")
    search = q_search.Search(config)
    search.load([])  # the agent alone
    search.backends[Call] = answer
    judges = [load(text, search) for text in config.judge]
    names = [judge.player for judge in judges]
    if len(set(names)) < len(names):
        raise UserError(f"--judge: {', '.join(names)}: two of one name; rename a folder")
    search.play([dataclasses.replace(judge, M=M) for judge in judges for M in config.M])
    labels = config.run / "q_labels.jsonl"
    trees = list(read_trees(labels, Label))[::HELD_OUT] if labels.exists() else []
    siblings = {}
    for judge in judges:
        players = (rank_siblings(tree, dataclasses.replace(judge, M=max(config.M)), search) for tree in trees)
        siblings[judge.player] = accuracies([*chain(*drive(players, search.backends, search.env.side_by_side))])
    print(markdown(table(config, siblings)))


if __name__ == "__main__":
    run_stage(main)
