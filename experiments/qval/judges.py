"""Judges: a language model behind an OpenAI-compatible server values an action. Each has its prompt, and reads answers.

    direct     a score for each action by itself        batched  all actions of a state in one prompt
    direct_16  the mean of 16 such scores               ranking  all actions in order, next states shown

An answer that can't be read gives None.
"""

import re
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.qval.scorers import SCORERS, Call, Context, Decision, Entry, Scores
from qlass.messages import State, uniforms
from qlass.server import Server, side_by_side

ROOM = 2048  # tokens of an answer


class Question(NamedTuple):
    text: str
    key: tuple = ()  # tells equal questions apart
    temperature: float = 0.0


class Judge:
    """The model behind http://HOST:PORT/v1#MODEL; `name` is its name as a part of a file's."""

    def __init__(self, url: str, width: int = 16) -> None:
        self.server, self.width = Server(url, "--judge"), width
        self.name = re.sub(r"[^\w.-]+", "-", self.server.model).strip("-")

    def write(self, questions: list[Question]) -> list[str]:
        def one(question: Question) -> str:
            seed = int(uniforms(1, *question.key)[0] * 2**31)
            settings = {"temperature": question.temperature, "seed": seed, "max_tokens": ROOM}
            return self.server.chat([("user", question.text)], **settings).text

        return side_by_side(one, questions, self.width)


def full_name(name: str, judge: Judge | None) -> str:
    """direct -> direct=MODEL: what judgements are kept by, whichever server they came from. Other scores' as it is."""
    return f"{name}={judge.name}" if judge and name in JUDGES else name


VALUE = (
    "how good it is to act so now: 100 if this begins the shortest way to full success, less the longer the way or the "
    "smaller the reward will be, 0 if success becomes impossible. Assume good play afterwards."
)


def brief(state: State) -> str:
    turns = "\n\n".join(f"{'It did' if role == 'assistant' else 'It saw'}: {text}" for role, text in state.messages[2:])
    return f"{state.messages[0][1]}\n\nAn agent has this task: {state.task}\n\nIts episode so far:\n\n{turns}\n\n"


def numbered(lines: list[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def number(text: str) -> float | None:
    """The last "Score: N"."""
    numbers = re.findall(r"score\W{0,4}?(-?\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return float(numbers[-1]) if numbers else None


def listed(text: str, n: int) -> list[float | None]:
    """The numbers of the lines "1: 70", ..., "n: 20"."""
    lines = re.findall(r"^\W*(\d+)[^\w\n]*?[:.)=][^\w\n]*?(-?\d+(?:\.\d+)?)", text, re.MULTILINE)
    numbers = {int(i): float(value) for i, value in lines}
    return [numbers.get(i) for i in range(1, n + 1)]


def ranked(text: str, n: int) -> list[float | None]:
    """The places of 1 to n in the last "Ranking: 2, 1, ...", their sign turned: the best is the highest."""
    rankings = re.findall(r"ranking\W*?((?:\d+[\s,>]*)+)", text, re.IGNORECASE)
    order = [int(i) for i in re.findall(r"\d+", rankings[-1])] if rankings else []
    if sorted(order) != list(range(1, n + 1)):
        return [None] * n
    return [-float(order.index(i)) for i in range(1, n + 1)]


def direct(context: Context, decision: Decision, samples: int = 1) -> Scores:
    questions = []
    for action in decision.candidates:
        text = f"{brief(decision.state)}It considers this action:\n{action}\n\nJudge {VALUE}\nEnd with `Score: N`."
        temperature = 0.7 if samples > 1 else 0.0
        questions += [Question(text, (*decision.key, i), temperature) for i in range(samples)]
    numbers = [number(text) for text in (yield [Call(context.judge.write, question) for question in questions])]
    parts = [numbers[i : i + samples] for i in range(0, len(numbers), samples)]  # of each candidate
    read = [[value for value in part if value is not None] for part in parts]
    return [float(np.mean(part)) if part else None for part in read]


def batched(context: Context, decision: Decision) -> Scores:
    text = f"{brief(decision.state)}It considers these actions:\n{numbered(decision.candidates)}\n\nJudge of each "
    text += f"{VALUE}\nEnd with a line `I: N` for each, with its number I."
    reply = yield Call(context.judge.write, Question(text, decision.key))
    return listed(reply, len(decision.candidates))


def ranking(context: Context, decision: Decision) -> Scores:
    shown = [f"{action}\nIt would see: {decision.after(action)[0].messages[-1][1]}" for action in decision.candidates]
    text = f"{brief(decision.state)}It considers these actions:\n{numbered(shown)}\n\nPut them in order, the best "
    text += f"first, by {VALUE}\nEnd with `Ranking:` and their numbers."
    reply = yield Call(context.judge.write, Question(text, decision.key))
    return ranked(reply, len(decision.candidates))


JUDGES = {"direct": direct, "direct_16": partial(direct, samples=16), "batched": batched, "ranking": ranking}
SCORERS |= {name: Entry("judge", scores, ("judge",)) for name, scores in JUDGES.items()}
