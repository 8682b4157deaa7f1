"""Every score of an action, in one table.

    await score(context, decision) -> list[float | None]

A score is a coroutine on the driver that search runs on. It gives a value to each candidate of a decision, comparable
within the state; None means that there is no score. It asks the agent by `Sample` and `LogProb`, another model by a
`Call`: calls of one function, from all states that are scored side by side, share a batch.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import bellman
import envs
from experiments import Call
from experiments.qval.chat_policy import ChatPolicy
from experiments.qval.points import EXACT, GAMMA, Point, exact
from experiments.targets import TARGETS
from qlass import UserError
from qlass.agent import load_agent, load_policy
from qlass.batching import Candidate, LogProb, Score, ask
from qlass.chat import Rendering
from qlass.messages import State, parse_action, react, step
from qlass.noise import uniforms
from qlass.pairs import pairs_of
from qlass.policy import Policy
from qlass.settings import Sampling, workload
from qlass.tiny import task_words
from qlass.trees import read_trees
from train_qnet import QNet, scorer

Scores = list[float | None]
VOTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge(Sampling):
    """The language model that judges."""

    judge: str | None = None  # chat server URL#MODEL, or a checkpoint: its scores too
    judge_tokens: int = workload(1024)  # of a reply; scores that are there stay


@dataclasses.dataclass(frozen=True)
class Decision:
    """A state and the actions to choose among there. `env` is in that state, and a score leaves it there."""

    env: envs.TextEnv
    state: State
    candidates: list[str]
    key: tuple  # of its random numbers
    samples: Sequence[Candidate] = ()  # the draws whose distinct actions are the candidates, in a search
    counts: Counter = dataclasses.field(default_factory=Counter)  # of a judge's answers

    def after(self, action: str) -> tuple[State, list[str]]:
        """The next state, and the actions to choose among there: none if the episode has ended. On slippery ice the
        slip is drawn here, and is not the one to come."""
        start = self.env.snapshot()
        self.env.reseed(int(uniforms(1, *self.key, action, "after")[0] * 2**53))
        state, _, done = step(self.env, self.state, action)
        valid = [] if done else [react(*candidate) for candidate in self.env.candidates()]
        self.env.restore(start)
        return state, valid


class Context:
    """The sources of scores, each loaded when the first score asks for it."""

    def __init__(self, config: Any, language_model: str | None = None) -> None:
        """config: a stage's. language_model: the --judge of `qval`."""
        self.config, self.language_model = config, language_model
        self.qnet = cache(self.qnet)

    @cached_property
    def inputs(self) -> dict[str, Path]:
        """The files and checkpoints that are there."""
        run = self.config.run
        paths = {"sft": self.config.sft or run / "sft", "trees": run / "trees.jsonl"}
        paths |= {file.parent.name: file.parent for file in sorted(run.glob("qnet*/qnet.json"))}
        if self.language_model:
            paths["judge"] = Path(self.language_model)
        return {name: path for name, path in paths.items() if path.exists()}

    @cached_property
    def agent(self) -> Policy:
        return load_agent(self.inputs["sft"], self.config)

    @cached_property
    def judge(self) -> Policy | ChatPolicy:
        """The chat model of --judge: a server's, or a checkpoint's, asked by its chat template."""
        config, name = self.config, self.language_model
        if "://" in name:
            return ChatPolicy(name, config.judge_tokens, config.seed, config.timeout)
        policy = load_policy(Path(name), config)
        policy.chat.rendering = Rendering(max_new_tokens=config.judge_tokens, stop=())
        return policy

    def qnet(self, name: str) -> Any:
        """Return a function that answers Score requests by the net in RUN/NAME."""
        qnet = QNet.from_pretrained(self.config.run / name, self.config)
        return scorer(qnet, self.config.plain, self.config.cache_gb)


Scorer = Callable[[Context, Decision], Coroutine[Any, Any, Scores]]


def each(value: Callable[[Context, Decision, str], float | None]) -> Scorer:
    """The score that is this value of each candidate."""

    async def scores(context: Context, decision: Decision) -> Scores:
        return [value(context, decision, action) for action in decision.candidates]

    return scores


def rule(context: Context, decision: Decision, action: str) -> float:
    """The score "code", which a person has written."""
    return lake(decision.env, action) if context.config.env == "frozenlake" else overlap(decision.state, action)


def lake(env: Any, action: str) -> float:
    """FrozenLake: minus the Manhattan distance to the goal after the move; a hole is the end, the edge a lost turn."""
    grid = env.lake.desc.astype(str)
    moves = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
    way = moves.get(parse_action(action), (0, 0))
    after = np.add(divmod(env.cell, len(grid)), way).clip(0, len(grid) - 1)
    distance = np.abs(np.argwhere(grid == "G") - after).sum(axis=1).min()
    return -float(distance) - 100.0 * (grid[tuple(after)] == "H")


def overlap(state: State, action: str) -> float:
    """The number of the task's words in the action and its thought, and as a tie-break how dense they stand."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", action.lower())
    shared = set(words) & task_words(state.task)
    return len(shared) + len(shared) / (1 + len(words))


def untried(context: Context, decision: Decision, action: str) -> float:
    """Minus how often the action was taken already where the same was seen."""
    state, again = decision.state, parse_action(action)
    turns = zip(state.observations, state.actions, strict=False)  # an observation more: the one at hand
    return -float(sum(seen == state.observation and parse_action(done) == again for seen, done in turns))


def place(state: State, action: str, first: int) -> tuple[str, ...]:
    """A state's messages from `first` on, and an action, without thoughts."""
    return (*(parse_action(text) for _, text in state.messages[first:]), parse_action(action))


@cache
def labels_of(trees: Path, target: str, first: int) -> dict[tuple[str, ...], float]:
    """The mean label of each state and action of the trees."""
    labels = defaultdict(list)
    for tree in read_trees(trees):
        for pair in pairs_of(bellman.label(tree, TARGETS[target](tree, GAMMA))):
            labels[place(pair.state, pair.action, first)].append(pair.q)
    return {pair: fmean(q) for pair, q in labels.items()}


def in_trees(context: Context, decision: Decision, action: str, target: str) -> float | None:
    """The label of this state and action in the training trees, averaged over where they occur; None: nowhere."""
    first = -1 if decision.env.markov else decision.state.opening  # the last observation alone, or all of them
    labels = labels_of(context.inputs["trees"], target, first)
    return labels.get(place(decision.state, action, first))


async def by_model(model: Callable[[list], list], decision: Decision) -> Scores:
    """The values of a function that answers Score requests."""
    (values,) = await Call(model, (Score(decision.state, tuple(decision.candidates)),))
    return values


async def by_qnet(name: str, context: Context, decision: Decision) -> Scores:
    """Q(s, a) by the net in RUN/NAME."""
    return await by_model(context.qnet(name).score, decision)


async def value_gain(context: Context, decision: Decision) -> Scores:
    """V(s') - V(s), V = max_a Q(s, a) over the valid actions by QNet; where s' has none, as at the end of an episode,
    Q(s, a) - V(s). It sees the next state, and no reward."""
    state, valid = decision.state, [react(*candidate) for candidate in decision.env.candidates()]
    questions = [Score(state, tuple(valid or decision.candidates))]
    for action in decision.candidates:
        after, valid = decision.after(action)
        questions.append(Score(after, tuple(valid)) if valid else Score(state, (action,)))
    now, *later = await Call(context.qnet("qnet").score, tuple(questions))
    return [max(values) - max(now) for values in later]


async def logprob(context: Context, decision: Decision) -> Scores:
    """log pi(a | s)."""
    return await LogProb(decision.state, tuple(decision.candidates))


def per_token(context: Context, decision: Decision, logp: Scores) -> Scores:
    """Log-probabilities of the candidates, each by its number of tokens."""
    chat, task = context.agent.chat, decision.state.task
    return [
        value / len(chat.action_tokens(action, task)) for value, action in zip(logp, decision.candidates, strict=True)
    ]


async def logprob_token(context: Context, decision: Decision) -> Scores:
    return per_token(context, decision, await logprob(context, decision))


async def self_distillation(context: Context, decision: Decision, truth: bool = False) -> Scores:
    """The mean log-ratio of an action's tokens with and without the next state in view (SDPO). With the `truth`
    what the best player makes of it is in view too: QVAL's evidence of an expert's rollout."""
    *earlier, (role, content) = decision.state.messages
    ratios = []
    blind = await logprob(context, decision)
    for action, before in zip(decision.candidates, blind, strict=True):
        after, _ = decision.after(action)
        text = f"{content}\nYour action will lead to: {after.observation}"
        if truth:
            value = exact(decision.env, decision.state, action)
            text += f"\nThe best player then gets {value:.2f}."
        (hinted,) = await LogProb(dataclasses.replace(decision.state, messages=(*earlier, (role, text))), (action,))
        ratios.append(hinted - before)
    return per_token(context, decision, ratios)


def votes(decision: Decision, draws: Sequence[Candidate]) -> list[int]:
    """The number of draws that are each candidate."""
    canonical = decision.env.canonical
    counts = Counter(canonical(parse_action(draw.text)) for draw in draws)
    return [counts[canonical(parse_action(action))] for action in decision.candidates]


async def vote_share(context: Context, decision: Decision) -> Scores:
    """The share of VOTES draws of the agent that are this action (self-consistency)."""
    rendering = context.agent.chat.rendering
    draws = await ask(decision.env, decision.state, VOTES, (*decision.key, "vote"), rendering)
    return [n / VOTES for n in votes(decision, draws)]


class Entry(NamedTuple):
    family: str
    scores: Scorer
    needs: tuple[str, ...] = ()  # names of Context.inputs, "judge", or "truth": an environment that knows it
    looks: bool = False  # it steps each candidate


SCORERS = {
    "random": Entry("control", each(lambda c, d, a: uniforms(1, c.config.seed, *d.key, parse_action(a))[0])),
    "untried": Entry("control", each(untried)),
    "oracle": Entry("control", each(lambda c, d, a: exact(d.env, d.state, a)), ("truth",)),
    "code": Entry("code", each(rule)),
    "tree_bellman": Entry("tree", each(partial(in_trees, target="q")), ("trees",)),
    "tree_average": Entry("tree", each(partial(in_trees, target="avg")), ("trees",)),
    "tree_plain": Entry("tree", each(partial(in_trees, target="reward")), ("trees",)),
    "logprob": Entry("policy", logprob, ("sft",)),
    "logprob_token": Entry("policy", logprob_token, ("sft",)),
    "vote_share": Entry("policy", vote_share, ("sft",)),
    "value_gain": Entry("hindsight", value_gain, ("qnet",), looks=True),
    "self_distillation": Entry("self-distillation", self_distillation, ("sft",), looks=True),
    "sdpo_gt": Entry("self-distillation", partial(self_distillation, truth=True), ("sft", "truth")),
}


def entries(context: Context, named: Sequence[str]) -> dict[str, Entry]:
    """The named scores; none named: all whose inputs are there. UserError for one that cannot be had."""
    there = {*context.inputs}
    if context.config.env in EXACT:
        there.add("truth")
    if context.language_model:
        there.add("judge")
    nets = [name for name in context.inputs if name.startswith("qnet")]
    scorers = SCORERS | {name: Entry("learned", partial(by_qnet, name), (name,)) for name in nets}
    able = {name: entry for name, entry in scorers.items() if there.issuperset(entry.needs)}
    if missing := set(named) - able.keys():
        raise UserError(f"scorer {missing.pop()}: unknown, or its inputs are missing; choose among {', '.join(able)}")
    return {name: able[name] for name in named or able}


async def scored(env: envs.TextEnv, point: Point, entry: Entry, context: Context) -> dict[str, Any]:
    """A score's value for each candidate and, of a judge, how many answers there are, and how many are unread."""
    decision = Decision(env, point.restore(env), point.candidates, (point.task_id, "score", point.hash))
    values = await entry.scores(context, decision)
    numbers = [None if value is None else float(value) for value in values]
    return {"values": numbers} | decision.counts
