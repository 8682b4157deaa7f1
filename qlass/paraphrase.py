"""The task in other words, so that each of the M candidates of a step is sampled under its own wording (App. A.3.2).

Wording 0 is the original; the others are the environment's own (--paraphrase) or a language model's
(--paraphrase-server), which is asked in our words for what the paper describes. Nothing checks its answers, as nothing
does in the paper.
"""

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qlass import UserError
from qlass.chat import State
from qlass.cli import at_least
from qlass.driver import Candidate, Sample
from qlass.server import Endpoint

Reworder = Callable[[list[tuple[str, int]]], list[str]]  # of (task, wording's index, where 0 is the task)

PROMPT = (
    "Say the following shopping request in other words. Keep all that it asks for: the product, its attributes, each "
    "option with its value, numbers, units and the price limit. Answer with the new request alone, in one line.\n\n"
)


def add_paraphrases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("perturbation").add_argument
    purpose = "sample each candidate under its own wording of the task, of N (without N: all different)"
    add("--paraphrase", nargs="?", type=at_least(0), const=0, metavar="N", help=purpose)
    add("--paraphrase-server", metavar="URL[#MODEL]", help="wordings by an OpenAI-compatible server, not by rules")


def reword(state: State, wording: str) -> State:
    """The state as it would be if its task had been worded like this: in the user's messages, not in the agent's."""
    task = state.task.strip()
    messages = ((role, text.replace(task, wording) if role == "user" else text) for role, text in state.messages)
    return state if wording == state.task else State(tuple(messages), wording)


class Paraphrased:
    """Answers `Sample` requests as `sample` does, candidate k of trial n under wording n M + k of the task.

    wordings: how many there are of each task, counted with the original; 0: all different.
    """

    def __init__(self, sample: Callable, reworded: Reworder, wordings: int = 0) -> None:
        self.sample, self.reworded, self.wordings = sample, reworded, wordings or sys.maxsize

    def __call__(self, requests: list[Sample]) -> list[list[Candidate]]:
        """A request's key is (task, trial, step)."""
        pairs = [(r.state.task, (r.key[1] * r.n + k) % self.wordings) for r in requests for k in range(r.n)]
        words = iter(self.reworded(pairs))
        parts: list[list[Sample]] = []  # of each request, one for each wording
        for r in requests:
            counts = Counter(next(words) for _ in range(r.n))
            keys = {wording: r.key if wording == r.state.task else (*r.key, wording) for wording in counts}
            parts.append([dataclasses.replace(r, state=reword(r.state, w), n=counts[w], key=keys[w]) for w in counts])
        drawn = iter(self.sample([part for several in parts for part in several]))
        return [
            [dataclasses.replace(c, task=part.state.task) for part in several for c in next(drawn)] for several in parts
        ]


def by_rules(env: Any) -> Reworder:
    return lambda requests: [env.paraphrase(task, index) for task, index in requests]


class Server(Endpoint):
    """A `Reworder` by an OpenAI-compatible chat server, which is asked for each wording once."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, "--paraphrase-server", **options)
        self.wordings: dict[tuple[str, int], str] = {}

    def ask(self, request: tuple[str, int]) -> str:
        task, index = request
        for attempt in range(3):  # an empty answer would come again with the same seed
            options = {"temperature": 0.7, "max_tokens": 200, "seed": 1000 * index + attempt}
            text, _ = self.chat([("user", PROMPT + task)], **options)
            if text := " ".join(text.split()).strip("\"' "):
                return text
        raise UserError(f"{self.name}: {self.model} has no words for {task!r}; --paraphrase has rules")

    def __call__(self, requests: list[tuple[str, int]]) -> list[str]:
        fresh = [r for r in dict.fromkeys(requests) if r[1] and r not in self.wordings]
        with ThreadPoolExecutor(8) as pool:
            self.wordings |= zip(fresh, pool.map(self.ask, fresh), strict=True)
        return [self.wordings.get(r, r[0]) for r in requests]


def paraphrased(sample: Callable, env: Any, wordings: int | None, server: str | None) -> Callable:
    """What answers the Sample requests of a search; wordings None: as `sample` does."""
    return sample if wordings is None else Paraphrased(sample, Server(server) if server else by_rules(env), wordings)
