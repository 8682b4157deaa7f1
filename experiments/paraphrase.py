"""The task in other words, so that each of the M candidates of a step is sampled under its own wording (App. A.3.2).

Wording 0 is the original; the others are made by rules (--paraphrase, RULES) or by a language model
(--paraphrase-server), which is asked in our words for what the paper describes. Nothing checks its answers, as nothing
does in the paper.
"""

import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experiments import rewording
from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.chat import Chat
from qlass.demonstrations import Demonstration
from qlass.messages import State
from qlass.results import Step, environment_tokens
from qlass.served import Server
from qlass.tiny import sentence

Reworder = Callable[[str, int], str]  # (task, wording's index) -> wording

RULES: dict[str, Reworder] = {"webshop": rewording.paraphrase}  # by environment
ROOM = 200  # tokens of a wording
PROMPT = (
    "Say the following shopping request in other words. Keep all that it asks for: the product, its attributes, each "
    "option with its value, numbers, units and the price limit. Answer with the new request alone, in one line.\n\n"
)


def reword(state: State, wording: str) -> State:
    """The state as it would be if its task had been worded like this: in the user's messages, wherever they say it as
    the first of them do, and not in the agent's. UserError if those do not say the task."""
    if wording == state.task:
        return state
    users = [text for role, text in state.messages if role == "user"]
    begin = users[: Demonstration(None, state).agreed + 1]  # the instruction and the first observation
    patterns = list(filter(None, (sentence(state.task, text) for text in begin)))
    if not patterns:
        problem = "does not stand in the first messages, as a sentence of its own: leave --paraphrase out"
        raise UserError(f"the task {state.task!r:.60} {problem}")
    messages = []
    for role, text in state.messages:
        for pattern in patterns if role == "user" else ():
            text = pattern.sub(lambda _: wording, text)
        messages.append((role, text))
    return State(tuple(messages), wording)


@dataclasses.dataclass(frozen=True)
class Reworded(Candidate):
    wording: str = ""  # that it was sampled under


def under_wordings(sample: Callable, reworder: Reworder, wordings: int = 0) -> Callable:
    """What answers `Sample` requests as `sample` does, candidate k of trial n under wording n M + k of the task.

    wordings: how many there are of each task, counted with the original; 0: all different. Each is asked for once.
    """
    reworder, wordings = functools.cache(reworder), wordings or sys.maxsize

    def answer(requests: list[Sample]) -> list[list[Candidate]]:  # a request's key is (task, trial, step)
        parts: list[list[Sample]] = [[] for _ in requests]  # of each request, one for each wording
        for r, several in zip(requests, parts, strict=True):
            indices = [(r.key[1] * r.n + k) % wordings for k in range(r.n)]
            for wording, n in Counter(reworder(r.state.task, index) for index in indices).items():
                key = r.key if wording == r.state.task else (*r.key, wording)
                several.append(dataclasses.replace(r, state=reword(r.state, wording), n=n, key=key))
        drawn = iter(sample(list(itertools.chain(*parts))))
        return [[worded(c, p) for p in several for c in next(drawn)] for several in parts]

    return answer


def worded(candidate: Any, request: Sample) -> Any:
    """With the wording that it was sampled under."""
    return Reworded(**vars(candidate), wording=request.state.task)


def by_server(url: str) -> Reworder:
    """Wordings by an OpenAI-compatible chat server; where it says nothing, the task's own."""
    server = Server(url)

    def ask(task: str, index: int) -> str:
        if index == 0:
            return task
        choice, _ = server.chat([("user", PROMPT + task)], temperature=0.7, max_tokens=ROOM, seed=index)
        return " ".join((choice.message.content or "").split()).strip("\"' ") or task

    return ask


def paraphrased(sample: Callable, env: Any, wordings: int | None, server: str | None) -> Callable:
    """What answers the Sample requests of a search, as `sample` does under wordings of rules or of a server."""
    if server is None and env.name not in RULES:
        raise UserError(f"--paraphrase: there are no rules for {env.name}: leave it out")
    return under_wordings(sample, by_server(server) if server else RULES[env.name], wordings or 0)


def prompt_tokens(chat: Chat, episodes: Sequence[Sequence[Step]]) -> int:
    """What the policy reads for `Reworded` draws, as `results.costs_of` counts it with one wording. Of several, the
    task's own alone has the agent's words in the cache; each other one reads the full conversation."""
    cached, again = [], 0
    for steps in episodes:
        states = [step.state for step in steps]
        own = {states[-1].task}
        wordings = {candidate.wording for step in steps for candidate in step.samples}
        alone = wordings if len(wordings) == 1 else wordings & own
        cached += [[reword(state, wording) for state in states] for wording in alone]
        again += sum(len(chat.prompt(reword(states[-1], wording))) for wording in wordings - alone)
    return environment_tokens(chat, cached) + again
