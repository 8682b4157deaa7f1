"""Scores by a chat model that judges: QVAL's families that ask a language model.

    direct        a number for each action by itself
    direct_16     the mean of 16 such numbers, sampled
    batched       numbers for all actions of the state in one reply
    sequential    numbers one by one, in one conversation
    ranking       the actions in order, equal ones allowed
    verifier      the expected one of 20 grades, from A to T
    delta_belief  log p(success) after the action, minus before

As in QVAL a judge sees what an action leads to, but no page after that: no search knows it. What cannot be read in a
reply is None, and a decision's counts say how often that was.
"""

import re
from collections.abc import Coroutine
from functools import partial, partialmethod
from typing import Any

import numpy as np

from experiments import Call
from experiments.qval.scorers import SCORERS, Context, Decision, Entry, Scores
from qlass.batching import Sample
from qlass.messages import State, without_thinking

GRADES = tuple("ABCDEFGHIJKLMNOPQRST")  # the best first
SCALE = (
    "An action is worth 100 if it begins the shortest way to full success, less for a longer way or a smaller reward, "
    "0 if success is then out of reach. The agent acts well afterwards."
)
LINES = "a line `I: N` for each action I"
ORDER = "a line `Ranking: ` with their numbers, the best first, `=` between equal ones and `,` between others"


def numbers(text: str, n: int) -> Scores:
    """Read the lines "1: 70" to "n: 20", the last of each; a number that is not within 0 and 100 is none."""
    lines = re.findall(r"^\W*(\d+)[^\w\n.-]*(?:[:)=]|\.(?!\d))[^\w\n.-]*(\d+(?:\.\d+)?)(?![\d.,]*\d)", text, re.M)
    if n == 1:  # small models go on counting
        lines = [("1", value) for _, value in lines[:1]] + lines
    grades = {int(i): float(value) if float(value) <= 100 else None for i, value in lines}
    return [grades.get(i) for i in range(1, n + 1)]


def places(text: str, n: int) -> Scores:
    """Minus the place of each of 1 to n in the last list of them such as "2, 1 = 3"."""
    for order in reversed(re.findall(r"\d+(?:\s*[,>=]\s*\d+)*", text)):
        placed = []
        for place, group in enumerate(re.split("[,>]", order)):
            placed += [(int(i), -float(place)) for i in group.split("=")]
        placed.sort()
        if [i for i, _ in placed] == list(range(1, n + 1)):
            return [place for _, place in placed]
    return [None] * n


class Judging:
    """A decision before a judge. The methods from `direct` on are scores."""

    def __init__(self, context: Context, decision: Decision) -> None:
        self.context, self.decision, self.actions = context, decision, decision.candidates
        messages = decision.state.messages
        turns = messages[-1:] if decision.env.markov else messages[decision.state.opening :]
        parts = [f"An agent was told:\n{decision.env.instruction}\n\nIts task: {decision.state.task}"]
        for role, text in turns:
            parts.append(f"{'It did' if role == 'assistant' else 'It saw'}: {text}")
        parts.append(f"You judge actions. {SCALE}")
        # What all questions share stands in front, as it is read once.
        self.talk = (("user", "\n\n".join(parts)), ("assistant", "I have read it."))

    def after(self, action: str) -> str:
        state, _ = self.decision.after(action)
        return f"{action}\nAfter it the agent would see: {state.observation}"

    def question(self, actions: list[str], how: str = "What is each worth?") -> str:
        listed = "\n".join(f"{i}. {self.after(action)}" for i, action in enumerate(actions, 1))
        return f"The agent may do this:\n{listed}\n\n{how}"

    def shown(self, form: str, example: str) -> tuple:
        """The conversation with an answer that prefers no action, for its form: small models copy what they see."""
        return (*self.talk, ("user", f"Answer with {form}. Show the form first."), ("assistant", example))

    def count(self, answers: Scores) -> Scores:
        """The answers, of which None cannot be read."""
        self.decision.counts.update(answers=len(answers), unread=answers.count(None))
        return answers

    def request(self, talk: tuple, text: str, n: int = 1, valid: tuple[str, ...] = ()) -> Sample:
        key = (*self.decision.key, "judge", text)
        return Sample(State((*talk, ("user", text)), opening=0), n, key, 0.7 if n > 1 else 0.0, valid)

    async def replies(self, talk: tuple, texts: list[str], n: int = 1) -> list[list[str]]:
        """n replies to each text behind this conversation, without the judge's thoughts."""
        requests = tuple(self.request(talk, text, n) for text in texts)
        drawn = await Call(self.context.judge.sample, requests)
        return [[without_thinking(reply.text) for reply in several] for several in drawn]

    async def beliefs(self, texts: list[str], valid: tuple[str, ...]) -> Any:
        """The probabilities of the valid answers to each text, (texts, answers)."""
        requests = tuple(self.request(self.talk, text, valid=valid) for text in texts)
        return np.exp(await Call(self.context.judge.valid_logprobs, requests))

    async def direct(self, n: int = 1) -> Scores:
        texts = [self.question([action]) for action in self.actions]
        values: Scores = []
        for replies in await self.replies(self.shown(LINES, "1: 50"), texts, n):
            grades = self.count([numbers(text, 1)[0] for text in replies])
            read = [grade for grade in grades if grade is not None]
            values.append(float(np.mean(read)) if read else None)
        return values

    async def sequential(self) -> Scores:
        talk = self.shown(LINES, "1: 50")
        values: Scores = []
        for action in self.actions:
            question = self.question([action])
            ((text,),) = await self.replies(talk, [question])
            talk = (*talk, ("user", question), ("assistant", text or "-"))
            values += self.count(numbers(text, 1))
        return values

    async def batched(self) -> Scores:
        form = "\n".join(f"{i}: 50" for i, _ in enumerate(self.actions, 1))
        ((text,),) = await self.replies(self.shown(LINES, form), [self.question(self.actions)])
        return self.count(numbers(text, len(self.actions)))

    async def ranking(self) -> Scores:
        form = "Ranking: " + " = ".join(str(i) for i, _ in enumerate(self.actions, 1))
        question = self.question(self.actions, "Put them in order.")
        ((text,),) = await self.replies(self.shown(ORDER, form), [question])
        return self.count(places(text, len(self.actions)))

    async def verifier(self) -> Scores:
        question = "What is that worth? Answer with one letter, from A for 100 to T for 0."
        texts = [f"The agent may do this:\n{self.after(action)}\n\n{question}" for action in self.actions]
        values: Scores = []
        for p in await self.beliefs(texts, GRADES):
            values.append(float(p @ np.linspace(1, 0, 20) / p.sum()) if p.any() else None)
        return self.count(values)

    async def delta_belief(self) -> Scores:
        question = "Will the agent succeed, if it acts well from now on? Answer with one word, Yes or No."
        texts = [question, *(f"It did: {self.after(action)}\n\n{question}" for action in self.actions)]
        logs: Scores = []
        for yes, no in await self.beliefs(texts, ("Yes", "No")):
            logs.append(float(np.log(yes / (yes + no))) if yes else None)
        before, *after = self.count(logs)
        return [None if None in (before, value) else value - before for value in after]

    direct_16 = partialmethod(direct, n=16)


JUDGED = {
    "verifier": "intrinsic",
    "delta_belief": "intrinsic",
    "direct": "direct prompting",
    "direct_16": "direct prompting",
    "batched": "direct prompting",
    "sequential": "direct prompting",
    "ranking": "ranking",
}


def judged(name: str, context: Context, decision: Decision) -> Coroutine:
    return getattr(Judging(context, decision), name)()


SCORERS |= {name: Entry(family, partial(judged, name), ("judge",)) for name, family in JUDGED.items()}
