"""Language models as judges of an action: one mechanism; each judge has a prompt and a way to read the answer.

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

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import envs
from experiments.qval import code
from experiments.qval.scorers import Call, Context, Scorer, Scores, by_signal, of, peek
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

    def _ask(self, question: Question, **options: Any) -> tuple[str, dict]:
        seed = int(uniforms(1, *question.key)[0] * 2**31)
        options = {"temperature": question.temperature, "seed": seed, "max_tokens": ROOM} | options
        return self.server.chat(question.messages, **options)

    def write(self, questions: list[Question]) -> list[str]:
        with ThreadPoolExecutor(self.side_by_side) as pool:
            return [text for text, _ in pool.map(self._ask, questions)]

    def choose(self, items: list[tuple[Question, tuple[str, ...]]]) -> list[list[float] | None]:
        """log p of each option as the answer's first token, -inf where it is not among the 20 likeliest."""

        def first(item: tuple[Question, tuple[str, ...]]) -> list[float] | None:
            _, choice = self._ask(item[0], max_tokens=1, logprobs=True, top_logprobs=20)
            try:
                top = choice["logprobs"]["content"][0]["top_logprobs"]
            except (KeyError, IndexError, TypeError):
                return None
            known: dict[str, float] = {}
            for t in reversed(top):
                known[t["token"].strip()] = t["logprob"]
            return [known.get(option, -math.inf) for option in item[1]]

        with ThreadPoolExecutor(self.side_by_side) as pool:
            return list(pool.map(first, items))


class Checkpoint:
    """A HuggingFace causal LM as a judge. An answer has half of a small context."""

    def __init__(self, policy: Policy, name: str = "") -> None:
        self.policy, self.name, chat = policy, name, policy.chat
        chat.rendering.max_new_tokens = min(ROOM, chat.context // 2) if chat.context else ROOM

    def write(self, questions: list[Question]) -> list[str]:
        asked = [Sample(State(q.messages), 1, ("judge", q.messages, *q.key), q.temperature) for q in questions]
        return [answer[0].text for answer in self.policy.sample(asked)]

    def choose(self, items: list[tuple[Question, tuple[str, ...]]]) -> list[list[float] | None]:
        logp = iter(self.policy.logprobs([(State(q.messages), o) for q, options in items for o in options]))
        return [[next(logp) for _ in options] for _, options in items]


@functools.lru_cache(1)  # all judges share the model
def load(name: str, device: str | None, seed: int, plain: bool = False) -> ChatServer | Checkpoint:
    if "://" in name:
        return ChatServer(name)
    folder = Path(name)  # of which there are many of one name, and the same one may be trained again
    known = f"{folder.resolve().name}-{sha256(folder)[:8]}" if folder.exists() else name
    return Checkpoint(Policy.load(name, device, seed, plain=plain), slug(known))


def slug(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-")


def full_name(name: str, judge: Any) -> str:
    """direct -> direct=MODEL: what judgements are kept by, whichever server they came from. Other scores' as it is."""
    return f"{name}={judge.name}" if judge and name in JUDGES else name


# -------------------------------------------------------------------------------------------------------------- prompts


def brief(state: State) -> str:
    said = "\n\n".join(f"{'It did' if role == 'assistant' else 'It saw'}: {text}" for role, text in state.messages[2:])
    return f"{state.messages[0][1]}\n\nAn agent has this task: {state.task}\n\nIts episode so far:\n\n{said}\n\n"


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


def number(text: str, label: str = "score") -> float | None:
    found = re.findall(rf"{label}\W{{0,4}}?(-?\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return float(found[-1]) if found else None


def listed(text: str, n: int) -> list[float | None]:
    """The numbers of the lines "1: 70", ..., "n: 20"."""
    lines = re.findall(r"^\W*(\d+)[^\w\n]*?[:.)=][^\w\n]*?(-?\d+(?:\.\d+)?)", text, re.MULTILINE)
    found = {int(i): float(value) for i, value in lines}
    return [found.get(i) for i in range(1, n + 1)]


def user(text: str, **options: Any) -> Question:
    return Question((("user", text),), **options)


# --------------------------------------------------------------------------------------------------------------- judges


def direct(
    context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple, samples: int = 1
) -> Scores:
    asked = []
    for action in candidates:
        text = f"{brief(state)}It considers this action:\n{action}\n\nJudge {VALUE}\nEnd with `Score: N`."
        asked += [user(text, temperature=0.7 * (samples > 1), key=(*key, i)) for i in range(samples)]
    replies = [number(text) for text in (yield [Call(context.judge.write, q) for q in asked])]
    rows = [replies[i : i + samples] for i in range(0, len(replies), samples)]
    return [float(np.mean(known)) if (known := [s for s in row if s is not None]) else None for row in rows]


def batched(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    text = f"{brief(state)}It considers these actions:\n{numbered(candidates)}\n\nJudge of each {VALUE}\n"
    reply = yield Call(context.judge.write, user(text + "End with a line `I: N` for each, with its number I.", key=key))
    return listed(reply, len(candidates))


def sequential(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    talk: tuple[tuple[str, str], ...] = ()
    found = []
    for action in candidates:
        text = f"It considers this action:\n{action}\n\nJudge {VALUE}\nEnd with `Score: N`."
        talk += (("user", (brief(state) if not talk else "") + text),)
        reply = yield Call(context.judge.write, Question(talk, key=key))
        found.append(number(reply))
        talk += (("assistant", reply),)
    return found


def ranking(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    shown = [f"{a}\nIt would see: {peek(env, state, a)[0].messages[-1][1]}" for a in candidates]
    text = f"{brief(state)}It considers these actions:\n{numbered(shown)}\n\nPut them in order, the best first, by "
    reply = yield Call(context.judge.write, user(f"{text}{VALUE}\nEnd with `Ranking:` and their numbers.", key=key))
    said = re.findall(r"ranking\W*?((?:\d+[\s,>]*)+)", reply, re.IGNORECASE)
    order = [int(i) for i in re.findall(r"\d+", said[-1])] if said else []
    if sorted(order) != list(range(1, len(candidates) + 1)):
        return [None] * len(candidates)
    return [-float(order.index(i)) for i in range(1, len(candidates) + 1)]


def verifier(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    scale = "Answer with one letter from A (not at all) to T (entirely)."
    asked = [(user(f"{brief(state)}It considers this action:\n{a}\n\n{c} {scale}", key=key), GRADES)
             for a in candidates for c in CRITERIA]  # fmt: skip
    grades = [expected(logp) for logp in (yield [Call(context.judge.choose, item) for item in asked])]
    rows = [grades[i : i + len(CRITERIA)] for i in range(0, len(grades), len(CRITERIA))]
    return [None if None in row else float(np.mean(row)) for row in rows]


def expected(logp: list[float] | None) -> float | None:
    """The mean grade, 0 to 19, under probabilities that are known up to a factor."""
    if logp is None or max(logp) == -math.inf:
        return None
    p = np.exp(np.array(logp) - max(logp))
    return float(p @ np.arange(len(logp)) / p.sum())


def delta_belief(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    states = [state, *(peek(env, state, action)[0] for action in candidates)]
    text = "Will the agent succeed? Answer Yes or No."
    asked = [Call(context.judge.choose, (user(brief(s) + text, key=key), ("Yes", "No"))) for s in states]
    yes = [belief(logp) for logp in (yield asked)]
    return [None if None in (yes[0], after) else after - yes[0] for after in yes[1:]]


def belief(logp: list[float] | None) -> float | None:
    """log p(Yes) among Yes and No."""
    if logp is None or logp[0] == -math.inf:
        return None
    return -float(np.logaddexp(0.0, logp[1] - logp[0]))


def gvl(context: Context, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Progress of an action's next state among the episode's observations, shuffled (generative value learning)."""
    asked, places = [], []
    for k, action in enumerate(candidates):
        seen = [text for role, text in peek(env, state, action)[0].messages[2:] if role == "user"]
        order = np.argsort(uniforms(len(seen), *key, k))
        places.append(int(np.flatnonzero(order == len(seen) - 1)[0]))
        text = f"{state.messages[0][1]}\n\nAn agent has this task: {state.task}\n\nThese are observations of its "
        text += f"episode, shuffled:\n{numbered([seen[i] for i in order])}\n\nHow much of the task is done at each, in "
        asked.append((user(text + "percent? End with a line `I: N` for each, with its number I.", key=key), len(seen)))
    replies = yield [Call(context.judge.write, question) for question, _ in asked]
    return [listed(reply, n)[at] for reply, (_, n), at in zip(replies, asked, places, strict=True)]


# ----------------------------------------------------------------------------------------------------- code generation


def codegen(context: Context, functions: int = 1, rounds: int = 1) -> Scorer:
    """The mean of `functions` programs that the model writes when the first state is seen. With several rounds
    (Eureka) each round writes that many, the model names the best by what they give in that state, and the next
    round improves on it; the last one named is the scorer."""
    signals: list[code.Signal] = []

    def write(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> None:
        task = (
            f"{env.instruction}\n\nWrite a Python function `signal_function(state: str, action: str, next_state: str)"
            f" -> float` that says {VALUE} Use the standard library, no search and no look-ahead. A state is the "
            f"episode's text, for example:\n\n{code.text_of(state)}\n\nAn action is for example "
            f"{parse_action(candidates[0])!r}. Answer with one Python code block."
        )
        best = ""
        for turn in range(rounds):
            hint = f"\n\nImprove on this one:\n```python\n{best}\n```" if best else ""
            asked = [user(task + hint, temperature=0.7, key=(*key, turn, i)) for i in range(functions)]
            sources = [found[-1] for text in context.judge.write(asked)
                       if (found := re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL))]  # fmt: skip
            made = []
            for source in sources:
                try:
                    made.append((source, code.compiled(source, "what the judge wrote")))
                except UserError:
                    continue
            if rounds == 1:
                signals.extend(signal for _, signal in made)
            elif made:
                rows = [[by_signal(signal, env, state, action) for action in candidates] for _, signal in made]
                shown = [f"{source}\nIt gives {row}" for (source, _), row in zip(made, rows, strict=True)]
                text = f"{brief(state)}The actions are {candidates}.\n\nWhich of these functions judges them best?\n"
                (reply,) = context.judge.write(
                    [user(f"{text}{numbered(shown)}\nEnd with `Best: I`.", key=(*key, turn))]
                )
                chosen = int(number(reply, "best") or 1) - 1
                best, signal = made[chosen if 0 <= chosen < len(made) else 0]
                signals[:] = [signal]

    tried = False

    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        nonlocal tried
        if not tried:
            tried = True
            write(env, state, candidates, key)
        rows = [[v for s in signals if (v := by_signal(s, env, state, a)) is not None] for a in candidates]
        return [float(np.mean(row)) if row else None for row in rows]
        yield

    return scores


JUDGES: dict[str, Callable[[Context], Scorer]] = {
    **{judge.__name__: of(judge) for judge in (direct, batched, sequential, ranking, verifier, delta_belief, gvl)},
    "direct_16": of(direct, samples=16),
    "codegen": codegen,
    "codegen_16": lambda c: codegen(c, 16),
    "eureka": lambda c: codegen(c, 8, 16),
}
