"""Every score of an action, as generators on the driver that search runs on, in one table.

    score(env, state, candidates, key) -> Generator[requests, answers, list[float | None]]

`env` is in that state and is left in it. Scores are comparable within a state; None means that there is no score. A
score asks a model by a `Call`: calls of one function, from all states that are scored side by side, share a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import log_softmax

import bellman
import envs
from experiments.qval import code
from experiments.qval.labels import exact, references
from qlass import UserError
from qlass.chat import State, parse_action, react, uniforms
from qlass.driver import Score, ask
from qlass.fast.token_tree import batches
from qlass.files import sha256
from qlass.flags import load_agent, load_qnet
from qlass.policy import Policy
from qlass.qnet import Pair, QNet, pairs_of
from qlass.records import read_trees

Scores = Generator[Any, Any, list[float | None]]
Scorer = Callable[[envs.TextEnv, State, list[str], tuple], Scores]
VOTES = 16


@dataclasses.dataclass(frozen=True)
class Call:
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


@dataclasses.dataclass
class Context:
    """What scores are made from: flags, a judge, and what is loaded or computed when the first score asks for it."""

    args: argparse.Namespace
    judge: Any = None  # experiments.qval.judges
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def path(self, name: str) -> Path:
        """Where an input lies: sft, base, trees, a QNet's folder, a file of --code."""
        named = {"sft": self.args.sft, "base": self.args.base, "trees": self.args.run / "trees.jsonl"}
        return named.get(name) or self.files.get(name) or self.args.run / name

    @property
    def files(self) -> dict[str, Path]:
        """Of --code, by the score's name."""
        return {Path(path).stem: Path(path) for path in self.args.code}

    def agent(self, name: str = "sft") -> Policy:
        flags = argparse.Namespace(**vars(self.args) | {"sft": self.path(name)})
        return self.cached(name, lambda: load_agent(flags))

    def qnet(self, name: str) -> QNet:
        return self.cached(name, lambda: load_qnet(self.path(name), self.args))

    def pairs(self, target: str) -> Iterator[Pair]:
        """The (s, a) of the training trees, labelled by bellman.py."""
        for tree in read_trees(self.path("trees")):
            yield from pairs_of(bellman.label(tree, target, self.args.gamma))


def each(value: Callable[..., float | None]) -> Callable[..., Scores]:
    """A score by a function (context, env, state, action, key) of one action at a time."""

    def scores(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        yield from ()
        return [value(context, env, state, action, key) for action in candidates]

    return scores


def peek(env: envs.TextEnv, state: State, action: str) -> tuple[State, list[str]]:
    """The next state and the actions to choose among there, none if the episode has ended. `env` stays as it was."""
    start = env.snapshot()
    observation, _, terminated, truncated, _ = env.step(parse_action(action))
    after = state.then(action, env.message(observation))
    valid = [] if terminated or truncated else [react(*candidate) for candidate in env.candidates()]
    env.restore(start)
    return after, valid


def signalled(signal: code.Signal, env: envs.TextEnv, state: State, action: str) -> float | None:
    """What a signal_function gives, which sees the next state too; None where it fails, or gives no finite number."""
    after, _ = peek(env, state, action)
    try:
        value = signal(code.text_of(state), parse_action(action), code.text_of(after))
    except Exception:
        return None
    return value if np.isfinite(value) else None


def by_file(name: str, context: Context, env: envs.TextEnv, state: State, action: str, key: tuple) -> float | None:
    return signalled(context.cached(name, lambda: code.load(context.path(name))), env, state, action)


def in_trees(target: str) -> Callable[..., Scores]:
    """The label of this state and action in the training trees, averaged over where they occur; None: nowhere."""

    def place(state: State, action: str, markov: bool) -> tuple:
        turns = [parse_action(text) if role == "assistant" else text for role, text in state.messages[2:]]
        return (*turns[-1 if markov else 0 :], parse_action(action))

    def table(context: Context, markov: bool) -> dict[tuple, list[float]]:
        labels = defaultdict(list)
        for pair in context.pairs(target):
            labels[place(pair.state, pair.action, markov)].append(pair.q)
        return labels

    def value(context: Context, env: envs.TextEnv, state: State, action: str, key: tuple) -> float | None:
        labels = context.cached(("in trees", target), lambda: table(context, env.markov))
        q = labels.get(place(state, action, env.markov))
        return float(np.mean(q)) if q else None

    return each(value)


def by_logprob(form: Callable[[np.ndarray, np.ndarray], Any], base: bool = False) -> Callable[..., Scores]:
    """`form` of the candidates' log pi(a | s) (minus the base's) and their numbers of tokens."""

    def scores(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        pairs = [(state, action) for action in candidates]
        logp = np.array((yield [Call(context.agent().logprobs, pair) for pair in pairs]))
        if base:
            logp -= np.array((yield [Call(context.agent("base").logprobs, pair) for pair in pairs]))
        tokens = np.array([len(context.agent().chat.action(action, state.task)) for action in candidates])
        return np.broadcast_to(form(logp, tokens), len(candidates)).tolist()

    return scores


def confidence(logp: np.ndarray, tokens: np.ndarray) -> float:
    """Minus the entropy of the policy over the candidates: of the state alone."""
    return np.exp(log_softmax(logp)) @ log_softmax(logp)


def self_certainty(logp: np.ndarray, tokens: np.ndarray) -> float:
    """KL(uniform || pi) over the candidates (Kang et al. 2025, on actions): of the state alone."""
    return -np.mean(log_softmax(logp)) - np.log(len(logp))


def vote_share(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """How many of VOTES draws of the agent are this action (self-consistency)."""
    request = ask(env, state, VOTES, (*key, "vote"), context.agent().chat.rendering)
    drawn = [parse_action(c.text) for c in (yield Call(context.agent().sample, request))]
    return [drawn.count(parse_action(action)) / VOTES for action in candidates]


def by_qnet(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple, name: str) -> Scores:
    return (yield Call(context.qnet(name).score, Score(state, tuple(candidates))))


def value_gain(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """V(s') - V(s), V = max_a Q(s, a) over the valid actions by QNet; where s' has none, as at the end of an episode,
    Q(s, a) - V(s). It sees the next state, and no reward."""
    questions = [Score(state, tuple(react(*candidate) for candidate in env.candidates()) or tuple(candidates))]
    for action in candidates:
        after, valid = peek(env, state, action)
        questions.append(Score(after, tuple(valid)) if valid else Score(state, (action,)))
    now, *later = yield [Call(context.qnet("qnet").score, question) for question in questions]
    return [max(values) - max(now) for values in later]


def self_distillation(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """The mean log-ratio of an action's tokens with and without the next state in view (SDPO)."""
    calls = []
    role, content = state.messages[-1]
    for action in candidates:
        after = peek(env, state, action)[0].messages[-1][1]
        hint = (role, f"{content}\nYour action will lead to: {after}")
        hinted = State((*state.messages[:-1], hint), state.task)
        calls += [Call(context.agent().logprobs, (s, action)) for s in (hinted, state)]
    logp = yield calls
    tokens = [len(context.agent().chat.action(action, state.task)) for action in candidates]
    return [(logp[2 * i] - logp[2 * i + 1]) / n for i, n in enumerate(tokens)]


@torch.inference_mode()
def embeddings(policy: Policy, pairs: list[tuple[State, str]]) -> np.ndarray:
    """(B, D): the mean hidden state of an action's tokens after its state, of length 1; "": of the prompt's last."""
    model, chat = policy.model, policy.chat
    actions = [chat.action(action, state.task) if action else [] for state, action in pairs]
    rows = [[*chat.prompt(state), *action] for (state, _), action in zip(pairs, actions, strict=True)]
    means: list[Any] = [None] * len(pairs)
    for group in batches(rows, len, policy.fast.budget if policy.fast else 1):
        ids = [torch.tensor(rows[i], device=model.device) for i in group]  # padded on the right, which nothing sees
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=chat.tokenizer.pad_token_id)
        hidden = model.base_model(input_ids=padded, use_cache=False).last_hidden_state.float()
        for row, i in enumerate(group):
            mean = hidden[row, len(rows[i]) - max(1, len(actions[i])) : len(rows[i])].mean(0).cpu().numpy()
            means[i] = mean / np.linalg.norm(mean)
    return np.stack(means)


def task_cosine(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    yield from ()
    pairs = [(State((("user", state.task),), state.task), ""), *((state, action) for action in candidates)]
    task, *vectors = embeddings(context.agent(), pairs)
    return [float(task @ vector) for vector in vectors]


def neighbours(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """The mean Q label of the 8 nearest of some 2,000 pairs of the training trees."""
    yield from ()

    def table() -> tuple[np.ndarray, np.ndarray]:
        pairs = list(context.pairs("q"))
        pairs = pairs[:: 1 + len(pairs) // 2000]
        vectors = embeddings(context.agent(), [(pair.state, pair.action) for pair in pairs])
        return vectors, np.array([pair.q for pair in pairs])

    vectors, q = context.cached("neighbours", table)
    near = embeddings(context.agent(), [(state, action) for action in candidates]) @ vectors.T
    return [float(q[np.argsort(-row)[:8]].mean()) for row in near]


class Entry(NamedTuple):
    family: str
    scores: Callable[..., Scores]  # (context, env, state, candidates, key)
    needs: tuple[str, ...] = ()  # paths of a context; "truth" and "rules": what its environment must have


SCORERS = {  # judges.py adds its own
    "random": Entry("control", each(lambda c, env, s, a, key: uniforms(1, c.args.seed, *key, parse_action(a))[0])),
    "step_index": Entry("control", each(lambda c, env, s, a, key: float(env.steps))),
    "untried": Entry("control", each(lambda c, env, s, a, key: code.untried(s, a))),
    "state_value": Entry("control", each(lambda c, env, s, a, key: env.optimal_value(c.args.gamma)), ("truth",)),
    "oracle": Entry("control", each(lambda c, env, s, a, key: exact(env, parse_action(a), c.args.gamma)), ("truth",)),
    "code": Entry("code", each(lambda c, env, s, a, key: code.WRITTEN[c.args.env](s, a)), ("rules",)),
    "tree_bellman": Entry("tree", in_trees("q"), ("trees",)),
    "tree_average": Entry("tree", in_trees("avg"), ("trees",)),
    "tree_plain": Entry("tree", in_trees("reward"), ("trees",)),
    "logprob": Entry("policy", by_logprob(lambda logp, tokens: logp), ("sft",)),
    "logprob_token": Entry("policy", by_logprob(lambda logp, tokens: logp / tokens), ("sft",)),
    "log_ratio": Entry("policy", by_logprob(lambda logp, tokens: logp, base=True), ("sft", "base")),
    "confidence": Entry("policy", by_logprob(confidence), ("sft",)),
    "self_certainty": Entry("policy", by_logprob(self_certainty), ("sft",)),
    "vote_share": Entry("policy", vote_share, ("sft",)),
    "value_gain": Entry("hindsight", value_gain, ("sft", "qnet")),
    "self_distillation": Entry("hindsight", self_distillation, ("sft",)),
    "task_cosine": Entry("embedding", task_cosine, ("sft",)),
    "neighbours": Entry("embedding", neighbours, ("sft", "trees")),
}
# What the predictions of a family depend on, where that is more than one of its scores needs.
SOURCES = {"policy": ("sft", "base"), "hindsight": ("sft", "qnet"), "embedding": ("sft", "trees")}


ELSEWHERE = Entry("judge", each(lambda *_: None))  # of predictions that others made


def entries(context: Context) -> dict[str, Entry]:
    """SCORERS, the nets in folders RUN/qnet*, and the functions of --code."""
    nets = sorted(path.name for path in context.args.run.glob("qnet*") if (path / "qnet.json").exists())
    named = {name: Entry("learned", functools.partial(by_qnet, name=name), (name,)) for name in nets}
    named |= {name: Entry("code", each(functools.partial(by_file, name)), (name,)) for name in context.files}
    return SCORERS | named


def entry(name: str, context: Context) -> Entry:
    """Of a score's name; a judge is JUDGE or JUDGE=MODEL."""
    return entries(context).get(name.partition("=")[0], ELSEWHERE)


def scorer(name: str, context: Context) -> Scorer:
    score, model = entry(name, context), name.partition("=")[2]
    if score is ELSEWHERE:
        raise UserError(f"unknown scorer {name!r}: choose among {', '.join([*SCORERS, 'qnet*'])}")
    if score.family == "judge" and (context.judge is None or model not in ("", context.judge.name)):
        raise UserError(f"{name}: needs its language model: --judge URL#MODEL or --judge CHECKPOINT")
    return functools.partial(score.scores, context)


def inputs(name: str, context: Context) -> list[Path]:
    """The files and checkpoints that a score is made from, those that are there."""
    family, _, needs = entry(name, context)
    return [path for path in map(context.path, SOURCES.get(family, needs)) if path.exists()]


def sources(name: str, context: Context) -> dict[str, str]:
    """{what a score is made from: its hash, of a judge its model}; where that has changed, it is scored again."""
    if entry(name, context).family == "judge":
        return {"judge": name.partition("=")[2]}
    return {path.name: sha256(path) for path in inputs(name, context)}


def available(context: Context) -> list[str]:
    """The scores whose inputs are there; those of a judge have to be asked for by name."""
    env = context.args.env
    there = {"judge": False, "truth": references(env) != ("policy",), "rules": env in code.WRITTEN}
    return [name for name, (_, _, needs) in entries(context).items()
            if all(there.get(part, context.path(part).exists()) for part in needs)]  # fmt: skip


def need_no_weights(names: Iterable[str], context: Context) -> None:
    """UserError where a score asks more of the agent than a server can do, which samples."""
    for name in set(names) - {"vote_share", "value_gain"}:
        if entry(name, context).family in ("policy", "hindsight", "embedding"):
            raise UserError(f"scorer {name}: --server does not tell log-probabilities: name other scorers")
