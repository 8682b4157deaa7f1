"""Scores by a chat model that judges: QVAL's families that ask a language model.

    direct      a number for each action by itself         ranking       the actions in order, equal ones allowed
    direct_16   the mean of 16 such numbers, sampled        verifier      the expected one of 20 grades, from A to T
    batched     all actions of the state in one reply       delta_belief  log p(success) after the action, minus before
    sequential  one by one, in one conversation             codegen       a function that it writes; _mean: of 16
    gvl         as direct, earlier pages shuffled           eureka        the function that it chose in its third round

As in QVAL a judge sees what an action leads to, but no page after that: no search knows it. What cannot be read in a
reply is None, and Context.count counts it. Nothing forbids functions to look ahead, as nothing could check that: the
metadata of their predictions has their sources.
"""

import re
from functools import partial, partialmethod

import numpy as np

from experiments import child
from experiments.qval.scorers import SCORERS, Call, Context, Decision, Entry, Scores, front
from qlass.batching import Sample
from qlass.messages import State, parse_action, uniforms

GRADES = tuple("ABCDEFGHIJKLMNOPQRST")  # the best first
SCALE = (
    "An action is worth 100 if it begins the shortest way to full success, less for a longer way or a smaller reward, "
    "0 if success is then out of reach. The agent acts well afterwards."
)
LINES = "a line `I: N` for each action I"
ORDER = "a line `Ranking: ` with their numbers, the best first, `=` between equal ones and `,` between others"
FUNCTION = (
    "Write a Python function `signal_function(state: str, action: str, next_state: str) -> float` that says how good "
    "an action is. Use the standard library alone, and answer with one Python code block. It returns"
)


def numbers(text: str, n: int) -> list[float | None]:
    """Of the lines "1: 70" to "n: 20", the last of each; a number that is not within 0 and 100 is none."""
    lines = re.findall(r"^\W*(\d+)[^\w\n-]*[:.)=][^\w\n-]*(\d+(?:\.\d+)?)", text, re.MULTILINE)
    lines = [("1", value) for _, value in lines[:1]] + lines if n == 1 else lines  # small models go on counting
    grades = {int(i): float(value) for i, value in lines if float(value) <= 100}
    return [grades.get(i) for i in range(1, n + 1)]


def places(text: str, n: int) -> list[float | None]:
    """Minus the place of each of 1 to n in the last list of them such as "2, 1 = 3"."""
    for order in reversed(re.findall(r"\d+(?:\s*[,>=]\s*\d+)*", text)):
        groups = enumerate(re.split("[,>]", order))
        placed = sorted((int(i), -float(place)) for place, group in groups for i in group.split("="))
        if [i for i, _ in placed] == list(range(1, n + 1)):
            return [place for _, place in placed]
    return [None] * n


class Judging:
    """A decision before a judge. The methods from `direct` on are scores."""

    def __init__(self, context: Context, decision: Decision) -> None:
        self.context, self.decision = context, decision
        self.actions, self.count = decision.candidates, context.count
        messages = decision.state.messages
        self.task = f"An agent was told:\n{decision.env.instruction}\n\nIts task: {decision.state.task}"
        turns = messages[-1:] if decision.env.markov else messages[front(decision.env) :]
        pages = [f"{'It did' if role == 'assistant' else 'It saw'}: {text}" for role, text in turns]
        self.talk = self.told(pages)

    def told(self, pages: list[str]) -> tuple:
        """How a conversation begins. What all of its questions share stands here, as it is read once."""
        text = "\n\n".join([self.task, *pages, f"You judge actions. {SCALE}"])
        return ("user", text), ("assistant", "I have read it.")

    def after(self, action: str) -> str:
        return f"{action}\nAfter it the agent would see: {self.decision.after(action)[0].observation}"

    def question(self, actions: list[str], how: str = "What is each worth?") -> str:
        listed = "\n".join(f"{i}. {self.after(action)}" for i, action in enumerate(actions, 1))
        return f"The agent may do this:\n{listed}\n\n{how}"

    def shown(self, form: str, example: str) -> tuple:
        """The conversation with an answer that prefers no action, for its form: small models copy what they see."""
        return (*self.talk, ("user", f"Answer with {form}. Show the form first."), ("assistant", example))

    def ask(self, text: str, talk: tuple = (), n: int = 1, valid: tuple[str, ...] = ()) -> Call:
        """What gets n replies, or the log-probabilities of the valid ones."""
        key, temperature = (*self.decision.key, "judge", text), 0.7 if n > 1 else 0.0
        request = Sample(State((*talk, ("user", text))), n, key, temperature, valid)
        return Call(self.context.judge.valid_logprobs if valid else self.context.replies, request)

    async def direct(self, n: int = 1) -> Scores:
        talk = self.shown(LINES, "1: 50")
        replies = [await self.ask(self.question([action]), talk, n) for action in self.actions]
        read = [self.count([numbers(text, 1)[0] for text in texts]) for texts in replies]
        grades = [[value for value in values if value is not None] for values in read]
        return [float(np.mean(values)) if values else None for values in grades]

    async def sequential(self) -> Scores:
        talk, values = self.shown(LINES, "1: 50"), []
        for action in self.actions:
            question = self.question([action])
            (text,) = await self.ask(question, talk)
            talk = (*talk, ("user", question), ("assistant", text or "-"))
            values += self.count(numbers(text, 1))
        return values

    async def batched(self) -> Scores:
        talk = self.shown(LINES, "\n".join(f"{i}: 50" for i, _ in enumerate(self.actions, 1)))
        (text,) = await self.ask(self.question(self.actions), talk)
        return self.count(numbers(text, len(self.actions)))

    async def ranking(self) -> Scores:
        talk = self.shown(ORDER, "Ranking: " + " = ".join(str(i) for i, _ in enumerate(self.actions, 1)))
        (text,) = await self.ask(self.question(self.actions, "Put them in order."), talk)
        return self.count(places(text, len(self.actions)))

    async def gvl(self) -> Scores:
        """Generative value learning: the pages before the last stand in random order."""
        *earlier, page = [text for role, text in self.decision.state.messages if role == "user"][1:]
        order = np.argsort(uniforms(len(earlier), *self.decision.key, "gvl"))
        self.talk = self.told(["It saw, in random order:", *(earlier[i] for i in order), f"It sees: {page}"])
        return await self.direct()

    async def verifier(self) -> Scores:
        question = "What is that worth? Answer with one letter, from A for 100 to T for 0."
        texts = [f"The agent may do this:\n{self.after(action)}\n\n{question}" for action in self.actions]
        p = np.exp([await self.ask(text, self.talk, valid=GRADES) for text in texts])
        return self.count([float(row @ np.linspace(1, 0, 20) / row.sum()) if row.any() else None for row in p])

    async def delta_belief(self) -> Scores:
        question = "Will the agent succeed, if it acts well from now on? Answer with one word, Yes or No."
        texts = [question, *(f"It did: {self.after(action)}\n\n{question}" for action in self.actions)]
        p = np.exp([await self.ask(text, self.talk, valid=("Yes", "No")) for text in texts])
        before, *after = self.count([float(np.log(yes / (yes + no))) if yes else None for yes, no in p])
        return [None if None in (before, value) else value - before for value in after]

    async def codegen(self, n: int = 1, make: str = "written") -> Scores:
        """The mean of n functions, of those that value each action. They are written for the first decision."""
        states = [self.decision.state, *(self.decision.after(action)[0] for action in self.actions)]
        now, *later = ["\n\n".join(content for _, content in state.messages) for state in states]
        calls = [(now, parse_action(action), text) for action, text in zip(self.actions, later, strict=True)]
        functions = self.context.cached(make, lambda: getattr(self, make)(calls))[:n]
        self.context.counts["sources"] = [function.args[1] for function in functions]
        values = self.count([await Call(function, call) for function in functions for call in calls])
        rows = np.array(values, float).reshape(len(functions), len(calls))
        finite = rows[np.isfinite(rows).all(axis=1)]
        return finite.mean(axis=0).tolist() if len(finite) else [None] * len(calls)

    def written(self, calls: list[tuple[str, str, str]], n: int = 16, best: str = "") -> list[partial]:
        """n functions of (state, action, next state), better ones than the best so far."""
        text = f"{FUNCTION} {SCALE} A state is for example\n\n{calls[0][0]}\n\nand an action {calls[0][1]!r}."
        text += f"\n\nImprove on this one:\n```python\n{best}\n```" if best else ""
        (texts,) = self.context.replies([self.ask(text, n=n).item])
        blocks = [re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL) for text in texts]
        return [partial(child.values, "signal_function", codes[-1] if codes else "") for codes in blocks]

    def improved(self, calls: list[tuple[str, str, str]]) -> list[partial]:
        """The function whose values of these calls the judge prefers, after three rounds of four."""
        best = ""
        for _ in range(3):
            functions = self.written(calls, 4, best)
            values = [f"Function {i}: {function(calls)}" for i, function in enumerate(functions, 1)]
            question = self.question(self.actions, "Which function values them right? Answer with its number.")
            ((text,),) = self.context.replies([self.ask("\n".join([question, *values]), self.talk).item])
            (choice,) = self.count([next(iter(re.findall(r"\b[1-4]\b", text)), None)])
            chosen = functions[int(choice or 1) - 1]
            best = chosen.args[1]
        return [chosen]

    direct_16, codegen_mean = partialmethod(direct, n=16), partialmethod(codegen, n=16)
    eureka = partialmethod(codegen, make="improved")


FAMILIES = {
    "intrinsic": ("verifier", "delta_belief"),  # first: they read all episodes in one pass, for the others too
    "direct prompting": ("direct", "direct_16", "batched", "sequential", "gvl"),
    "ranking": ("ranking",),
    "code": ("codegen", "codegen_mean", "eureka"),
}
JUDGED = {name: family for family, names in FAMILIES.items() for name in names}


def judged(name: str, context: Context, decision: Decision) -> Scores:
    return getattr(Judging(context, decision), name)()


SCORERS |= {name: Entry(family, partial(judged, name), ("judge",)) for name, family in JUDGED.items()}
