"""Language models as judges of an action: each judge has a prompt and a way to read the answer.

    direct        a score for each action by itself          ranking       all actions in order, next states shown
    direct_16     the mean of 16 such scores                 verifier      the expected grade, of 20 grades
    batched       all actions of a state in one prompt       delta_belief  log p(Yes | after) - log p(Yes | before)
    sequential    one after the other in one conversation    gvl           progress of shuffled observations
    codegen       a signal_function that the model writes    codegen_16    the mean of 16 such functions
    eureka        its choice of 8 functions, 16 times over: each time they are to improve on the last choice

A model is any OpenAI-compatible chat server or HuggingFace checkpoint. verifier and delta_belief need a server that
gives top_logprobs (vLLM, SGLang, llama.cpp do; `transformers serve` 5.23 refuses). An answer that can't be read gives
None. The code that codegen and eureka get is run in this process: use them with a model that you would let write your
scripts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import envs
from experiments.qval import code
from experiments.qval.scorers import SCORERS, Call, Context, Entry, Scores, peek, signalled
from qlass import UserError
from qlass.chat import State, parse_action, uniforms
from qlass.driver import Sample
from qlass.files import sha256
from qlass.policy import Policy
from qlass.server import Endpoint

GRADES = tuple("ABCDEFGHIJKLMNOPQRST")
ROOM = 2048  # tokens of an answer: a function has to end, or there is none


@dataclasses.dataclass(frozen=True)
class Question:
    """A conversation that ends with the user; `key` distinguishes equal questions."""

    messages: tuple[tuple[str, str], ...]
    temperature: float = 0.0
    key: tuple = ()


class ChatServer:
    """A judge behind an OpenAI-compatible server: http://HOST:PORT/v1#MODEL."""

    def __init__(self, url: str, side_by_side: int = 16) -> None:
        self.server = Endpoint(url, "--judge")
        self.name, self.side_by_side = slug(self.server.model), side_by_side

    def _ask(self, questions: list[Question], **options: Any) -> list[tuple[str, dict]]:
        def one(question: Question) -> tuple[str, dict]:
            seed = int(uniforms(1, *question.key)[0] * 2**31)
            settings = {"temperature": question.temperature, "seed": seed, "max_tokens": ROOM} | options
            return self.server.chat(question.messages, **settings)

        with ThreadPoolExecutor(self.side_by_side) as pool:
            return list(pool.map(one, questions))

    def write(self, questions: list[Question]) -> list[str]:
        return [text for text, _ in self._ask(questions)]

    def choose(self, choices: list[tuple[Question, tuple[str, ...]]]) -> list[list[float] | None]:
        """log p of each option as the answer's first token, -inf where it is not among the 20 likeliest."""
        replies = self._ask([question for question, _ in choices], max_tokens=1, logprobs=True, top_logprobs=20)
        return [first_token(reply, options) for (_, reply), (_, options) in zip(replies, choices, strict=True)]


def first_token(choice: dict, options: Sequence[str]) -> list[float] | None:
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
    except (IndexError, KeyError, TypeError):
        return None
    logp = {token["token"].strip(): token["logprob"] for token in reversed(top)}
    return [logp.get(option, -math.inf) for option in options]


class Checkpoint:
    """A HuggingFace causal LM as a judge. An answer has half of a small context."""

    def __init__(self, policy: Policy, name: str = "") -> None:
        self.policy, self.name, chat = policy, name, policy.chat
        chat.rendering.max_new_tokens = min(ROOM, chat.context // 2) if chat.context else ROOM

    def write(self, questions: list[Question]) -> list[str]:
        requests = [Sample(State(q.messages), 1, ("judge", q.messages, *q.key), q.temperature) for q in questions]
        return [answer[0].text for answer in self.policy.sample(requests)]

    def choose(self, choices: list[tuple[Question, tuple[str, ...]]]) -> list[list[float] | None]:
        logp = iter(self.policy.logprobs([(State(q.messages), o) for q, options in choices for o in options]))
        return [[next(logp) for _ in options] for _, options in choices]


@functools.lru_cache(1)  # all judges share the model
def load(name: str, device: str | None, seed: int, plain: bool = False) -> ChatServer | Checkpoint:
    if "://" in name:
        return ChatServer(name)
    folder = Path(name)  # the hash tells folders of one name apart, and a model that was trained again
    name_of_files = f"{folder.resolve().name}-{sha256(folder)[:8]}" if folder.exists() else name
    return Checkpoint(Policy.load(name, device, seed, plain=plain), slug(name_of_files))


def slug(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-")


def full_name(name: str, judge: Any) -> str:
    """direct -> direct=MODEL: what judgements are kept by, whichever server they came from. Other scores' as it is."""
    return f"{name}={judge.name}" if judge and name in JUDGES else name


def brief(state: State) -> str:
    turns = "\n\n".join(f"{'It did' if role == 'assistant' else 'It saw'}: {text}" for role, text in state.messages[2:])
    return f"{state.messages[0][1]}\n\nAn agent has this task: {state.task}\n\nIts episode so far:\n\n{turns}\n\n"


VALUE = (
    "how good it is to act so now: 100 if this begins the shortest way to full success, less the longer the way or the "
    "smaller the reward will be, 0 if success becomes impossible. Assume good play afterwards."
)
CRITERIA = (
    "Does this action bring the agent nearer to its goal?",
    "Is there nothing better that the agent could do now?",
    "Is success still in reach after this action?",
)


def numbered(lines: list[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def user(text: str, **options: Any) -> Question:
    return Question((("user", text),), **options)


def number(text: str, label: str = "score") -> float | None:
    numbers = re.findall(rf"{label}\W{{0,4}}?(-?\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return float(numbers[-1]) if numbers else None


def listed(text: str, n: int) -> list[float | None]:
    """The numbers of the lines "1: 70", ..., "n: 20"."""
    lines = re.findall(r"^\W*(\d+)[^\w\n]*?[:.)=][^\w\n]*?(-?\d+(?:\.\d+)?)", text, re.MULTILINE)
    numbers = {int(i): float(value) for i, value in lines}
    return [numbers.get(i) for i in range(1, n + 1)]


def mean(values: list[float | None]) -> float | None:
    """Of the values that there are."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def direct(
    context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple, samples: int = 1
) -> Scores:
    asks = [f"It considers this action:\n{action}\n\nJudge {VALUE}\nEnd with `Score: N`." for action in candidates]
    heat = 0.7 if samples > 1 else 0.0
    questions = [user(brief(state) + ask, temperature=heat, key=(*key, i)) for ask in asks for i in range(samples)]
    numbers = [number(text) for text in (yield [Call(context.judge.write, question) for question in questions])]
    return [mean(numbers[i : i + samples]) for i in range(0, len(numbers), samples)]


def batched(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    text = f"{brief(state)}It considers these actions:\n{numbered(candidates)}\n\nJudge of each {VALUE}\n"
    reply = yield Call(context.judge.write, user(text + "End with a line `I: N` for each, with its number I.", key=key))
    return listed(reply, len(candidates))


def sequential(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    messages: tuple[tuple[str, str], ...] = ()
    scores = []
    for action in candidates:
        text = f"It considers this action:\n{action}\n\nJudge {VALUE}\nEnd with `Score: N`."
        messages += (("user", text if messages else brief(state) + text),)
        reply = yield Call(context.judge.write, Question(messages, key=key))
        scores.append(number(reply))
        messages += (("assistant", reply),)
    return scores


def ranking(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    shown = [f"{a}\nIt would see: {peek(env, state, a)[0].messages[-1][1]}" for a in candidates]
    text = f"{brief(state)}It considers these actions:\n{numbered(shown)}\n\nPut them in order, the best first, by "
    reply = yield Call(context.judge.write, user(f"{text}{VALUE}\nEnd with `Ranking:` and their numbers.", key=key))
    rankings = re.findall(r"ranking\W*?((?:\d+[\s,>]*)+)", reply, re.IGNORECASE)
    order = [int(i) for i in re.findall(r"\d+", rankings[-1])] if rankings else []
    if sorted(order) != list(range(1, len(candidates) + 1)):
        return [None] * len(candidates)
    return [-float(order.index(i)) for i in range(1, len(candidates) + 1)]


def verifier(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    scale = "Answer with one letter from A (not at all) to T (entirely)."
    texts = [f"{brief(state)}It considers this action:\n{a}\n\n{c} {scale}" for a in candidates for c in CRITERIA]
    answers = yield [Call(context.judge.choose, (user(text, key=key), GRADES)) for text in texts]
    grades = [expected(logp) for logp in answers]
    rows = [grades[i : i + len(CRITERIA)] for i in range(0, len(grades), len(CRITERIA))]
    return [None if None in row else mean(row) for row in rows]


def expected(logp: list[float] | None) -> float | None:
    """The mean grade, 0 to 19, under probabilities that are known up to a factor."""
    if logp is None or max(logp) == -math.inf:
        return None
    p = np.exp(np.array(logp) - max(logp))
    return float(p @ np.arange(len(logp)) / p.sum())


def delta_belief(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """log p(Yes) among Yes and No, after the action less before."""
    states = [state, *(peek(env, state, action)[0] for action in candidates)]
    questions = [user(f"{brief(s)}Will the agent succeed? Answer Yes or No.", key=key) for s in states]
    answers = yield [Call(context.judge.choose, (question, ("Yes", "No"))) for question in questions]
    answers = [None if logp is None or logp[0] == -math.inf else logp for logp in answers]
    before, *after = [logp and -float(np.logaddexp(0.0, logp[1] - logp[0])) for logp in answers]
    return [None if None in (before, yes) else yes - before for yes in after]


def gvl(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Progress of an action's next state among the episode's observations, shuffled (generative value learning)."""
    calls, places = [], []
    for k, action in enumerate(candidates):
        seen = [text for role, text in peek(env, state, action)[0].messages[2:] if role == "user"]
        order = np.argsort(uniforms(len(seen), *key, k)).tolist()
        places.append((order.index(len(seen) - 1), len(seen)))
        text = f"{state.messages[0][1]}\n\nAn agent has this task: {state.task}\n\nThese are observations of its "
        text += f"episode, shuffled:\n{numbered([seen[i] for i in order])}\n\nHow much of the task is done at each, in "
        text += "percent? End with a line `I: N` for each, with its number I."
        calls.append(Call(context.judge.write, user(text, key=key)))
    replies = yield calls
    return [listed(reply, n)[place] for reply, (place, n) in zip(replies, places, strict=True)]


def programs(context: Context, text: str, n: int, key: tuple) -> list[tuple[str, code.Signal]]:
    """The functions that can be run, of n answers."""
    written = []
    for reply in context.judge.write([user(text, temperature=0.7, key=(*key, i)) for i in range(n)]):
        for source in re.findall(r"```(?:python)?\n(.*?)```", reply, re.DOTALL)[-1:]:
            with contextlib.suppress(UserError):
                written.append((source, code.compiled(source, "what the judge wrote")))
    return written


def signals(
    context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple, functions: int, rounds: int
) -> list[code.Signal]:
    task = (
        f"{env.instruction}\n\nWrite a Python function `signal_function(state: str, action: str, next_state: str)"
        f" -> float` that says {VALUE} Use the standard library, no search and no look-ahead. A state is the "
        f"episode's text, for example:\n\n{code.text_of(state)}\n\nAn action is for example "
        f"{parse_action(candidates[0])!r}. Answer with one Python code block."
    )
    best: list[tuple[str, code.Signal]] = []
    for turn in range(rounds):
        hint = f"\n\nImprove on this one:\n```python\n{best[0][0]}\n```" if best else ""
        written = programs(context, task + hint, functions, (*key, turn))
        if rounds == 1:
            best = written
        elif written:
            rows = [[signalled(signal, env, state, action) for action in candidates] for _, signal in written]
            shown = [f"{source}\nIt gives {row}" for (source, _), row in zip(written, rows, strict=True)]
            text = f"{brief(state)}The actions are {candidates}.\n\nWhich of these functions judges them best?\n"
            (reply,) = context.judge.write([user(f"{text}{numbered(shown)}\nEnd with `Best: I`.", key=(*key, turn))])
            choice = int(number(reply, "best") or 1) - 1
            best = [written[choice if 0 <= choice < len(written) else 0]]
    return [signal for _, signal in best]


def codegen(functions: int = 1, rounds: int = 1) -> Callable[..., Scores]:
    """The mean of `functions` programs that the model writes when the first state is seen. With several rounds
    (Eureka) each round writes that many, the model names the best by what they give in that state, and the next
    round improves on it; the last one named is the score."""

    def scores(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        yield from ()
        first = (context, env, state, candidates, key, functions, rounds)
        written = context.cached(("codegen", context.judge.name, functions, rounds), lambda: signals(*first))
        return [mean([signalled(signal, env, state, action) for signal in written]) for action in candidates]

    return scores


JUDGES = {
    **{judge.__name__: judge for judge in (direct, batched, sequential, ranking, verifier, delta_belief, gvl)},
    "direct_16": functools.partial(direct, samples=16),
    "codegen": codegen(),
    "codegen_16": codegen(functions=16),
    "eureka": codegen(functions=8, rounds=16),
}
SCORERS |= {name: Entry("judge", scores, ("judge",)) for name, scores in JUDGES.items()}
