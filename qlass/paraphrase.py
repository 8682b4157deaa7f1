"""The task in other words, so that each of the M candidates of a step is sampled under its own wording (App. A.3.2).

    python q_search.py --method qlass -M 4 --paraphrase                       # the environment's own rules
    python q_search.py --method qlass -M 4 --paraphrase-server http://localhost:8000/v1      # a language model

Wording 0 is the original. A server is asked in our own words for what the paper describes; nothing checks its answers,
as nothing does in the paper.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs import TextEnv
from qlass import UserError
from qlass.chat import State
from qlass.cli import at_least
from qlass.driver import Candidate, Sample
from qlass.server import Endpoint


def add_paraphrases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("perturbation").add_argument
    said = "sample each candidate under its own wording of the task, of N (without N: all different)"
    add("--paraphrase", nargs="?", type=at_least(0), const=0, metavar="N", help=said)
    add("--paraphrase-server", metavar="URL[#MODEL]", help="wordings by an OpenAI-compatible server, not by rules")


@dataclasses.dataclass(frozen=True)
class Reword:
    """A request for wording `index` of a task; 0 is the task itself."""

    task: str
    index: int


def reword(state: State, wording: str) -> State:
    """The state as it would be if its task had been worded like this: in the user's messages, not in the agent's."""
    if wording == state.task:
        return state
    task = state.task.strip()
    said = ((role, text.replace(task, wording) if role == "user" else text) for role, text in state.messages)
    return State(tuple(said), wording)


class Paraphrased:
    """Answers `Sample` requests as `sample` does, candidate k of trial n under wording n M + k of the task.

    reword: answers `Reword` requests. wordings: how many there are of each task, counted with the original.
    """

    def __init__(self, sample: Callable, reworded: Callable[[list[Reword]], list[str]], wordings: int) -> None:
        self.sample, self.reworded, self.wordings = sample, reworded, wordings

    def __call__(self, requests: list[Sample]) -> list[list[Candidate]]:
        asked = [
            Reword(r.state.task, (r.key[1] * r.n + k) % self.wordings) for r in requests for k in range(r.n)
        ]  # r.key is (task, trial, step)
        words, split, owner = iter(self.reworded(asked)), [], []
        for i, r in enumerate(requests):
            for wording, n in Counter(next(words) for _ in range(r.n)).items():
                key = r.key if wording == r.state.task else (*r.key, wording)
                split.append(dataclasses.replace(r, state=reword(r.state, wording), n=n, key=key))
                owner.append(i)
        answers: list[list[Candidate]] = [[] for _ in requests]
        for i, request, drawn in zip(owner, split, self.sample(split), strict=True):
            answers[i] += [dataclasses.replace(c, task=request.state.task) for c in drawn]
        return answers


def by_rules(env: TextEnv) -> Callable[[list[Reword]], list[str]]:
    """Answers `Reword` requests by the rules of the environment."""
    return lambda requests: [env.paraphrase(r.task, r.index) for r in requests]


# -------------------------------------------------------------------------------------------------------------- server

PROMPT = (
    "Say the following shopping request in other words. Keep all that it asks for: the product, its attributes, each "
    "option with its value, numbers, units and the price limit. Answer with the new request alone, in one line.\n\n"
)


class Server(Endpoint):
    """An OpenAI-compatible chat server (vLLM, SGLang, llama.cpp, OpenAI) that answers `Reword` requests."""

    def __init__(self, url: str, timeout: float = 60, attempts: int = 3, pause: float = 1) -> None:
        self.known: dict[Reword, str] = {}
        super().__init__(url, "--paraphrase-server", timeout, attempts, pause, "use --paraphrase for the bundled rules")

    def ask(self, request: Reword) -> str:
        for attempt in range(self.attempts):
            options = {"temperature": 0.7, "max_tokens": 200, "seed": 1000 * request.index + attempt}
            text, _ = self.chat([("user", PROMPT + request.task)], **options)
            if text := " ".join(text.split()).strip("\"' "):
                return text
        raise UserError(f"--paraphrase-server {self.url}: {self.model} has no words for {request.task!r}")

    def __call__(self, requests: list[Reword]) -> list[str]:
        """Answers to `Reword` requests, eight at a time; each is asked for once."""
        fresh = [r for r in dict.fromkeys(requests) if r.index and r not in self.known]
        with ThreadPoolExecutor(8) as pool:
            self.known |= zip(fresh, pool.map(self.ask, fresh), strict=True)
        return [self.known[r] if r.index else r.task for r in requests]


def rewording(policy: Any, env: Any, wordings: int | None, server: str | None) -> Callable | None:
    """What answers the Sample requests of a method, given it; None where nothing is to be reworded."""
    if wordings is None or policy is None:
        return None
    paraphraser = Server(server) if server else by_rules(env)
    return lambda method: Paraphrased(policy.sample, paraphraser, wordings or method.M * method.N)
