"""Every score of an action that the project knows, as generators on the driver that search runs on.

    scorer(name, context)(env, state, candidates, key) -> Generator[requests, answers, list[float | None]]

`env` is in that state and is left in it. Scores are comparable within a state; None means that there is no score. A
scorer asks a model by a `Call`: calls of one function, from all states that are scored side by side, share a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bellman
import envs
from experiments.qval import code
from experiments.qval.labels import exact, references
from qlass import UserError
from qlass.chat import State, parse_action, react, uniforms
from qlass.driver import Score, ask
from qlass.fast.token_tree import batches
from qlass.files import read_trees
from qlass.flags import load_agent, load_qnet
from qlass.policy import Policy
from qlass.qnet import QNet, pairs_of
from qlass.server import ServerPolicy

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
    items: dict[Callable, list] = {}
    for call in calls:
        items.setdefault(call.function, []).append(call.item)
    answers = {function: iter(function(some)) for function, some in items.items()}
    return [next(answers[call.function]) for call in calls]


@dataclasses.dataclass
class Context:
    """What scorers are made from; models are loaded when the first scorer asks for them."""

    env: str
    run: Path  # with sft/, qnet/, qnet-NAME/, trees.jsonl
    sft: Path | None = None
    base: Path | None = None  # the agent that log_ratio holds the policy against, RUN/base if that is there
    judge: Any = None  # experiments.qval.judges
    code: tuple[Path, ...] = ()
    gamma: float = 0.95
    seed: int = 0
    device: str | None = None
    flags: argparse.Namespace | None = None  # how the agent and QNets are loaded
    nets: dict[str, QNet] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base is None and (self.run / "base").exists():
            self.base = self.run / "base"

    @functools.cached_property
    def policy(self) -> Policy:
        return self.agent(self.sft or self.run / "sft")

    @functools.cached_property
    def reference(self) -> Policy:
        if self.base is None:
            raise UserError("log_ratio: needs --base, another checkpoint of the agent")
        return self.agent(self.base)

    def agent(self, folder: Path) -> Policy | ServerPolicy:
        given = self.flags and argparse.Namespace(**vars(self.flags) | {"sft": folder})
        return load_agent(given) if given else Policy.load(folder, self.device, self.seed)

    def qnet(self, name: str) -> QNet:
        if name not in self.nets:
            flags, folder = self.flags, self.run / name
            self.nets[name] = load_qnet(folder, flags) if flags else QNet.from_pretrained(folder, self.device)
        return self.nets[name]

    @functools.cached_property
    def trees(self) -> list[list[dict]]:
        return list(read_trees(self.run / "trees.jsonl"))


def of(function: Callable[..., Scores], **options: Any) -> Callable[[Context], Scorer]:
    """What makes a scorer of a generator function whose first argument is the context."""
    return lambda context: functools.partial(function, context, **options)


def each(function: Callable[[envs.TextEnv, State, str, tuple], float | None]) -> Scorer:
    """A scorer that needs no model: `function` of one action at a time."""

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        return [function(env, state, action, key) for action in candidates]
        yield

    return scores


def peek(env: envs.TextEnv, state: State, action: str) -> tuple[State, list[str]]:
    """The next state and the actions to choose among there, none if the episode has ended. `env` stays as it was."""
    here = env.snapshot()
    observation, _, terminated, truncated, _ = env.step(parse_action(action))
    after = state.then(action, env.message(observation))
    valid = [] if terminated or truncated else [react(*candidate) for candidate in env.candidates()]
    env.restore(here)
    return after, valid


# --------------------------------------------------------------------------------------------------- hand-written code


def by_signal(signal: code.Signal, env: envs.TextEnv, state: State, action: str, key: tuple = ()) -> float | None:
    """What a signal_function gives, which sees the next state too; None where it fails, or gives no finite number."""
    after, _ = peek(env, state, action)
    try:
        found = signal(code.text_of(state), parse_action(action), code.text_of(after))
    except UserError:  # of `driver.in_time`: it does not return
        raise
    except Exception:
        return None
    return found if math.isfinite(found) else None


# -------------------------------------------------------------------------------------------------------------- learned


def by_qnet(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple, name: str) -> Scores:
    return (yield Call(context.qnet(name).score, Score(state, tuple(candidates))))


# ------------------------------------------------------------------------------------------------- look-up in the trees


def in_trees(context: Context, target: str) -> Scorer:
    """The label of this state and action in the training trees, averaged over where they occur; None: nowhere."""
    found: dict[tuple, list[float]] = {}
    for tree in context.trees:
        for pair in pairs_of(bellman.label(tree, target, context.gamma)):
            for markov in (False, True):
                found.setdefault(place(pair.state, pair.action, markov), []).append(pair.q)

    def value(env: envs.TextEnv, state: State, action: str, key: tuple) -> float | None:
        labels = found.get(place(state, action, env.markov))
        return float(np.mean(labels)) if labels else None

    return each(value)


def place(state: State, action: str, markov: bool) -> tuple:
    said = [parse_action(content) if role == "assistant" else content for role, content in state.messages[2:]]
    return (said[-1], parse_action(action)) if markov else (*said, parse_action(action))


# --------------------------------------------------------------------------------------------------------------- policy


def by_logprob(context: Context, form: Callable[[np.ndarray, np.ndarray], np.ndarray], base: bool = False) -> Scorer:
    """`form` of the candidates' log pi(a | s) (minus the base's) and their numbers of tokens."""

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        policy = context.policy
        logp = np.array((yield [Call(policy.logprobs, (state, action)) for action in candidates]))
        if base:
            logp -= np.array((yield [Call(context.reference.logprobs, (state, action)) for action in candidates]))
        tokens = np.array([len(policy.chat.action(action, state.task)) for action in candidates])
        return [float(score) for score in form(logp, tokens)]

    return scores


def log_softmax(logp: np.ndarray) -> np.ndarray:
    shifted = logp - logp.max()
    return shifted - np.log(np.exp(shifted).sum())


def confidence(logp: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Minus the entropy of the policy over the candidates: a function of the state alone."""
    return np.full(len(logp), np.exp(log_softmax(logp)) @ log_softmax(logp))


def self_certainty(logp: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """KL(uniform || pi) over the candidates (Kang et al. 2025, on actions): a function of the state alone."""
    return np.full(len(logp), -np.mean(log_softmax(logp)) - np.log(len(logp)))


def vote_share(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """How many of VOTES draws of the agent are this action (self-consistency)."""
    request = ask(env, state, VOTES, (*key, "vote"), context.policy.chat.rendering)
    drawn = [parse_action(c.text) for c in (yield Call(context.policy.sample, request))]
    return [drawn.count(parse_action(action)) / VOTES for action in candidates]


# ------------------------------------------------------------------------------------------------------------ hindsight


def value_gain(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """V(s') - V(s), V = max_a Q(s, a) over the valid actions by QNet; where s' has none, as at the end of an episode,
    Q(s, a) - V(s). It sees the next state, and no reward."""
    here = [react(*candidate) for candidate in env.candidates()] or candidates
    ahead = [peek(env, state, action) for action in candidates]
    asked = [(state, here), *((a, v) if v else (state, [c]) for (a, v), c in zip(ahead, candidates, strict=True))]
    now, *later = yield [Call(context.qnet("qnet").score, Score(s, tuple(actions))) for s, actions in asked]
    return [max(values) - max(now) for values in later]


def self_distillation(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """The mean log-ratio of an action's tokens with and without the next state in view (SDPO)."""
    pairs = []
    for action in candidates:
        after = peek(env, state, action)[0].messages[-1][1]
        (role, content) = state.messages[-1]
        told = State((*state.messages[:-1], (role, f"{content}\nYour action will lead to: {after}")), state.task)
        pairs += [(told, action), (state, action)]
    logp = yield [Call(context.policy.logprobs, pair) for pair in pairs]
    tokens = [len(context.policy.chat.action(action, state.task)) for action in candidates]
    return [(logp[2 * i] - logp[2 * i + 1]) / n for i, n in enumerate(tokens)]


# ------------------------------------------------------------------------------------------------------------ embedding


@torch.inference_mode()
def embeddings(policy: Policy, pairs: list[tuple[State, str]]) -> list[np.ndarray]:
    """The mean hidden state of an action's tokens after its state, of length 1; "" for the prompt's last token."""
    model, chat = policy.model, policy.chat
    texts = [(chat.prompt(s), chat.action(a, s.task) if a else []) for s, a in pairs]
    found: list[Any] = [None] * len(texts)
    for group in batches(texts, lambda text: len(text[0]) + len(text[1]), policy.budget):
        rows = [[*texts[i][0], *texts[i][1]] for i in group]
        ids = torch.full((len(rows), max(map(len, rows))), chat.tokenizer.pad_token_id, device=model.device)
        for row, some in enumerate(rows):  # padding on the right: nothing that counts can see it
            ids[row, : len(some)] = torch.tensor(some)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
        for row, i in enumerate(group):
            mean = hidden[row, len(rows[row]) - max(1, len(texts[i][1])) : len(rows[row])].mean(0).cpu().numpy()
            found[i] = mean / np.linalg.norm(mean)
    return found


def task_cosine(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    pairs = [(State((("user", state.task),), state.task), ""), *((state, action) for action in candidates)]
    task, *vectors = embeddings(context.policy, pairs)
    return [float(task @ vector) for vector in vectors]
    yield


def neighbours(context: Context, k: int = 8, most: int = 2000) -> Scorer:
    """The mean Q label of the k nearest pairs of the training trees."""
    pairs = [pair for tree in context.trees for pair in pairs_of(bellman.label(tree, "q", context.gamma))]
    pairs = pairs[:: 1 + len(pairs) // most]
    known = np.stack(embeddings(context.policy, [(pair.state, pair.action) for pair in pairs]))
    q = np.array([pair.q for pair in pairs])

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        near = np.stack(embeddings(context.policy, [(state, action) for action in candidates])) @ known.T
        return [float(q[np.argsort(-row)[:k]].mean()) for row in near]
        yield

    return scores


# ---------------------------------------------------------------------------------------------------------------- names

# name: (family, what makes it from a context)
SCORERS: dict[str, tuple[str, Callable[[Context], Scorer]]] = {
    "random": ("control", lambda c: each(lambda env, s, a, key: uniforms(1, c.seed, *key, parse_action(a))[0])),
    "step_index": ("control", lambda c: each(lambda env, s, a, key: float(env.steps))),
    "untried": ("control", lambda c: each(lambda env, s, a, key: code.untried(s, a))),
    "state_value": ("control", lambda c: each(lambda env, s, a, key: env.optimal_value(c.gamma))),
    "oracle": ("control", lambda c: each(lambda env, s, a, key: exact(env, parse_action(a), c.gamma))),
    "code": ("code", lambda c: each(lambda env, s, a, key: code.WRITTEN[c.env](s, a))),
    "tree_bellman": ("tree", lambda c: in_trees(c, "q")),
    "tree_average": ("tree", lambda c: in_trees(c, "avg")),
    "tree_plain": ("tree", lambda c: in_trees(c, "reward")),
    "logprob": ("policy", lambda c: by_logprob(c, lambda logp, tokens: logp)),
    "logprob_token": ("policy", lambda c: by_logprob(c, lambda logp, tokens: logp / tokens)),
    "log_ratio": ("policy", lambda c: by_logprob(c, lambda logp, tokens: logp, base=True)),
    "confidence": ("policy", lambda c: by_logprob(c, confidence)),
    "self_certainty": ("policy", lambda c: by_logprob(c, self_certainty)),
    "vote_share": ("policy", of(vote_share)),
    "value_gain": ("hindsight", of(value_gain)),
    "self_distillation": ("hindsight", of(self_distillation)),
    "task_cosine": ("embedding", of(task_cosine)),
    "neighbours": ("embedding", neighbours),
}


def scorer(name: str, context: Context) -> Scorer:
    """The scorer of this name: of SCORERS, a judge (JUDGE or JUDGE=MODEL), a file of --code, or a folder RUN/qnet*."""
    if name in SCORERS:
        return SCORERS[name][1](context)
    if name.startswith("qnet"):
        return functools.partial(by_qnet, context, name=name)
    for path in context.code:
        if name == path.stem:
            return each(functools.partial(by_signal, code.load(path)))
    from experiments.qval.judges import JUDGES

    judge, _, model = name.partition("=")
    if judge in JUDGES:
        if context.judge is None or model not in ("", context.judge.name):
            raise UserError(f"{name}: needs its language model: --judge URL#MODEL or --judge CHECKPOINT")
        return JUDGES[judge](context)
    raise UserError(f"unknown scorer {name!r}: choose among {', '.join([*SCORERS, 'qnet*', *JUDGES])}")


def family(name: str, context: Context) -> str:
    if name in SCORERS:
        return SCORERS[name][0]
    return "learned" if name.startswith("qnet") else "code" if name in {p.stem for p in context.code} else "judge"


def need_no_weights(names: Sequence[str], context: Context) -> None:
    """UserError where a scorer asks more of the agent than a server can do, which samples."""
    for name in set(names) - {"vote_share", "value_gain"}:
        if family(name, context) in ("policy", "hindsight", "embedding"):
            raise UserError(f"scorer {name}: --server does not tell log-probabilities: name other scorers")


def available(context: Context) -> list[str]:
    """The scorers whose inputs are there; those of a judge have to be asked for by name."""
    nets = sorted(path.name for path in context.run.glob("qnet*") if (path / "qnet.json").exists())
    of_trees = {"tree_bellman", "tree_average", "tree_plain", "neighbours"}
    lacking = set() if (context.run / "trees.jsonl").exists() else of_trees
    if not (context.sft or context.run / "sft").exists():
        lacking |= {name for name, (kind, _) in SCORERS.items() if kind in ("policy", "hindsight", "embedding")}
    lacking |= set() if context.base else {"log_ratio"}
    lacking |= set() if "qnet" in nets else {"value_gain"}
    lacking |= {"state_value", "oracle"} if references(context.env) == ("policy",) else set()
    lacking |= set() if context.env in code.WRITTEN else {"code"}
    return [name for name in SCORERS if name not in lacking] + nets + [path.stem for path in context.code]
