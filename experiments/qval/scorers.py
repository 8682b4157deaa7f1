"""Every score of an action, in one table.

    await score(context, decision) -> list[float | None]

A score is a generator on the driver that search runs on. It gives a value to each candidate of a decision, comparable
within the state; None means that there is no score. It asks a model by a `Call`: calls of one function, from all states
that are scored side by side, share a batch.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bellman
import envs
from experiments.chat_policy import ChatPolicy
from experiments.qval.points import REFERENCES, exact
from qlass import UserError
from qlass.batching import Request, Sample, Score, ask
from qlass.chat import Rendering
from qlass.messages import State, parse_action, react, uniforms, without_thinking
from qlass.pairs import pairs_of
from qlass.policy import Policy, load_agent, load_policy
from qlass.settings import Sampling
from qlass.tiny import task_words
from qlass.trees import read_trees
from train_qnet import QNet, scorer

Scores = list[float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge(Sampling):
    """The language model that judges, whose functions are run."""

    judge: str | None = None  # chat server URL#MODEL, folder or GGUF file: its scores too
    judge_tokens: int = 1024  # of a reply


VOTES = 16


@dataclasses.dataclass(frozen=True)
class Call(Request[Any]):
    """One item for a function that answers lists of them."""

    function: Callable[[list], list]
    item: Any


def answer(calls: list[Call]) -> list:
    """What `drive` needs to serve calls: {Call: answer}."""
    items: dict[Callable, list] = defaultdict(list)
    for call in calls:
        items[call.function].append(call.item)
    answers = {function: iter(function(batch)) for function, batch in items.items()}
    return [next(answers[call.function]) for call in calls]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A state and the actions to choose among there. `env` is in that state, and a score leaves it there."""

    env: envs.TextEnv
    state: State
    candidates: list[str]
    key: tuple  # of its random numbers

    def after(self, action: str) -> tuple[State, list[str]]:
        """The next state, and the actions to choose among there: none if the episode has ended. On slippery ice the
        slip is drawn here, and is not the one to come."""
        start = self.env.snapshot()
        self.env.reseed(int(uniforms(1, *self.key, action, "after")[0] * 2**53))
        state, _, done = self.state.act(self.env, action)
        valid = [] if done else [react(*candidate) for candidate in self.env.candidates()]
        self.env.restore(start)
        return state, valid


@dataclasses.dataclass
class Context:
    """What scores are made from: settings, and what is loaded or computed when the first score asks for it."""

    config: Any  # of `qval` or of its search, with the fields of `Judge`
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    counts: Counter = dataclasses.field(default_factory=Counter)  # of a judge's answers

    def count(self, answers: list[float | None]) -> list[float | None]:
        """The answers, of which None cannot be read."""
        self.counts.update(answers=len(answers), unread=answers.count(None))
        return answers

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def path(self, name: str) -> Path:
        """Where an input lies: sft, trees, a QNet's folder."""
        config = self.config
        named = {"sft": config.sft, "trees": config.run / "trees.jsonl", "judge": config.judge}
        return Path(named.get(name) or config.run / name)

    def agent(self) -> Policy:
        return self.cached("sft", lambda: load_agent(self.path("sft"), self.config))

    def qnet(self, name: str) -> Any:
        return self.cached(name, lambda: self.read_qnet(name))

    def read_qnet(self, name: str) -> Any:
        qnet = QNet.from_pretrained(self.path(name), self.config)
        return scorer(qnet, self.config.plain, self.config.cache_gb)

    def title(self, name: str) -> str:
        """direct -> direct=MODEL: judgements are kept apart by their judge's model. Other scores' names as they are."""
        if "judge" not in entry(name, self).needs:
            return name
        model = re.split("[#/]", self.config.judge)[-1].removesuffix(".gguf")
        return f"{name}={model}"

    @cached_property
    def judge(self) -> Policy | ChatPolicy:
        """The chat model of --judge: a server's, or a checkpoint's, asked by its chat template."""
        config, tokens = self.config, self.config.judge_tokens
        if "://" in config.judge:
            return ChatPolicy(config.judge, tokens, config.seed)
        policy = load_policy(config.judge, config)
        policy.chat.rendering = Rendering(max_new_tokens=tokens, stop=())
        return policy

    def replies(self, requests: list[Sample]) -> list[list[str]]:
        """What the judge writes, without its thoughts."""
        return [[without_thinking(reply.text) for reply in drawn] for drawn in self.judge.sample(requests)]


Scorer = Callable[[Context, Decision], Coroutine[Any, Any, Scores]]


def each(value: Callable[[Context, Decision, str], float | None]) -> Scorer:
    """The score that is this value of each candidate."""

    async def scores(context: Context, decision: Decision) -> Scores:
        return [value(context, decision, action) for action in decision.candidates]

    return scores


def lake(state: State, action: str) -> float:
    """FrozenLake: minus the Manhattan distance to the goal after the move; a hole is the end, the edge a lost turn."""
    text = "\n".join(content for role, content in state.messages if role == "user")
    rows = [row.replace(" ", "") for row in re.findall(r"^(?:[FHG] ?){4,8}$", text, re.MULTILINE)]
    side = len(rows[-1])
    grid = rows[-side:]
    row, column = (int(digit) for digit in re.findall(r"cell (\d)(\d)", text)[-1])
    down, right = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}.get(parse_action(action), (0, 0))
    row, column = (min(max(x, 0), side - 1) for x in (row + down, column + right))
    distances = [abs(r - row) + abs(c - column) for r in range(side) for c in range(side) if grid[r][c] == "G"]
    return -float(min(distances)) - 100.0 * (grid[row][column] == "H")


def overlap(state: State, action: str) -> float:
    """How many of the task's words stand in the action and its thought, and as a tie-break how dense they stand."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", action.lower())
    shared = set(words) & task_words(state.task)
    return len(shared) + len(shared) / (1 + len(words))


def front(env: envs.TextEnv) -> int:
    """How many messages stand before the first one with an observation: system, instruction and agreement."""
    return bool(env.system) + 2 * bool(env.agreement)


def untried(decision: Decision, action: str) -> float:
    """Minus how often the action was taken already where the same was seen."""
    *past, now = [content for _, content in decision.state.messages[front(decision.env) :]]
    turns = zip(past[::2], past[1::2], strict=True)
    return -float(sum(seen == now and parse_action(step) == parse_action(action) for seen, step in turns))


def in_trees(target: str) -> Scorer:
    """The label of this state and action in the training trees, averaged over where they occur; None: nowhere."""

    def value(context: Context, decision: Decision, action: str) -> float | None:
        first = -1 if decision.env.markov else front(decision.env)  # the last observation alone, or all of them

        def place(state: State, action: str) -> tuple:
            turns = [parse_action(text) if role == "assistant" else text for role, text in state.messages[first:]]
            return (*turns, parse_action(action))

        def table() -> dict[tuple, list[float]]:
            labels = defaultdict(list)
            for tree in read_trees(context.path("trees")):
                for pair in pairs_of(bellman.label(tree, target, context.config.gamma)):
                    labels[place(pair.state, pair.action)].append(pair.q)
            return labels

        q = context.cached(("in trees", target), table).get(place(decision.state, action))
        return float(np.mean(q)) if q else None

    return each(value)


def by_qnet(name: str) -> Scorer:
    """Q(s, a) by the net in RUN/NAME."""

    async def scores(context: Context, decision: Decision) -> Scores:
        return await Call(context.qnet(name).score, Score(decision.state, tuple(decision.candidates)))

    return scores


async def value_gain(context: Context, decision: Decision) -> Scores:
    """V(s') - V(s), V = max_a Q(s, a) over the valid actions by QNet; where s' has none, as at the end of an episode,
    Q(s, a) - V(s). It sees the next state, and no reward."""
    state, valid = decision.state, [react(*candidate) for candidate in decision.env.candidates()]
    questions = [Score(state, tuple(valid or decision.candidates))]
    for action in decision.candidates:
        after, valid = decision.after(action)
        questions.append(Score(after, tuple(valid)) if valid else Score(state, (action,)))
    now, *later = [await Call(context.qnet("qnet").score, question) for question in questions]
    return [max(values) - max(now) for values in later]


async def logprob(context: Context, decision: Decision) -> Scores:
    """log pi(a | s)."""
    return [await Call(context.agent().logprobs, (decision.state, action)) for action in decision.candidates]


def per_token(context: Context, decision: Decision, logp: list[float]) -> list[float]:
    """Log-probabilities of the candidates, each by its number of tokens."""
    chat, task = context.agent().chat, decision.state.task
    return [value / len(chat.action(a, task)) for value, a in zip(logp, decision.candidates, strict=True)]


async def logprob_token(context: Context, decision: Decision) -> Scores:
    return per_token(context, decision, await logprob(context, decision))


async def self_distillation(context: Context, decision: Decision, truth: bool = False) -> Scores:
    """The mean log-ratio of an action's tokens with and without the next state in view (SDPO). With the `truth`
    what the best player makes of it is in view too: QVAL's evidence of an expert's rollout."""
    *earlier, (role, content) = decision.state.messages
    calls = []
    for action in decision.candidates:
        after, _ = decision.after(action)
        text = f"{content}\nYour action will lead to: {after.messages[-1][1]}"
        if truth:
            value = exact(decision.env, decision.state, action, context.config.gamma)
            text += f"\nThe best player then gets {value:.2f}."
        hinted_state = State((*earlier, (role, text)), decision.state.task)
        calls.append(Call(context.agent().logprobs, (hinted_state, action)))
    hinted = [await call for call in calls]
    blind = await logprob(context, decision)
    return per_token(context, decision, np.subtract(hinted, blind).tolist())


async def vote_share(context: Context, decision: Decision) -> Scores:
    """How many of VOTES draws of the agent are this action (self-consistency)."""
    rendering = context.agent().chat.rendering
    request = ask(decision.env, decision.state, VOTES, (*decision.key, "vote"), rendering)
    canonical = decision.env.canonical
    drawn = [canonical(parse_action(c.text)) for c in await Call(context.agent().sample, request)]
    return [drawn.count(canonical(parse_action(action))) / VOTES for action in decision.candidates]


class Entry(NamedTuple):
    family: str
    scores: Scorer
    needs: tuple[str, ...] = ()  # paths of a context; "truth": an environment that knows it


SCORERS = {
    "random": Entry("control", each(lambda c, d, a: uniforms(1, c.config.seed, *d.key, parse_action(a))[0])),
    "step_index": Entry("control", each(lambda c, d, a: float(d.env.steps))),
    "untried": Entry("control", each(lambda c, d, a: untried(d, a))),
    "state_value": Entry("control", each(lambda c, d, a: d.env.optimal_value(c.config.gamma)), ("truth",)),
    "oracle": Entry("control", each(lambda c, d, a: exact(d.env, d.state, a, c.config.gamma)), ("truth",)),
    "code": Entry("code", each(lambda c, d, a: (lake if c.config.env == "frozenlake" else overlap)(d.state, a))),
    "tree_bellman": Entry("tree", in_trees("q"), ("trees",)),
    "tree_average": Entry("tree", in_trees("avg"), ("trees",)),
    "tree_plain": Entry("tree", in_trees("reward"), ("trees",)),
    "logprob": Entry("policy", logprob, ("sft",)),
    "logprob_token": Entry("policy", logprob_token, ("sft",)),
    "vote_share": Entry("policy", vote_share, ("sft",)),
    "value_gain": Entry("hindsight", value_gain, ("qnet",)),
    "self_distillation": Entry("self-distillation", self_distillation, ("sft",)),
    "sdpo_gt": Entry("self-distillation", partial(self_distillation, truth=True), ("sft", "truth")),
}


def entries(context: Context) -> dict[str, Entry]:
    """SCORERS, and the nets in folders RUN/qnet*."""
    nets = sorted(path.name for path in context.config.run.glob("qnet*") if (path / "qnet.json").exists())
    return SCORERS | {name: Entry("learned", by_qnet(name), (name,)) for name in nets}


def entry(name: str, context: Context) -> Entry:
    """Of a score's name. UserError where nobody can answer what it asks."""
    chosen = entries(context).get(name)
    if chosen is None:
        raise UserError(f"unknown scorer {name!r}: choose among {', '.join([*SCORERS, 'qnet*'])}")
    if "judge" in chosen.needs and not context.config.judge:
        raise UserError(f"scorer {name}: name its language model: --judge URL#MODEL, or a checkpoint")
    if context.config.server and "sft" in chosen.needs and name != "vote_share":
        raise UserError(f"scorer {name}: --server does not tell log-probabilities: name other scorers")
    return chosen


def available(context: Context) -> list[str]:
    """The scores whose inputs are there."""
    there = {"truth"} if context.config.env in REFERENCES else set()
    there |= {"judge"} if context.config.judge else set()
    return [name for name, entry in entries(context).items() if {*entry.needs} <= there | {*inputs(entry, context)}]


def inputs(entry: Entry, context: Context) -> dict[str, Path]:
    """The files and checkpoints that a score is made from."""
    return {name: context.path(name) for name in entry.needs if context.path(name).exists()}
