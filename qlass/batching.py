"""Algorithms as generators: they yield requests to the models, and many share a batch."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from qlass import Refused, UserError
from qlass.chat import Rendering
from qlass.messages import State, react

if TYPE_CHECKING:
    from envs import TextEnv

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sample:
    """a ~ pi(a | s), n times. `key` names the draw in the noise: (task, branch or trial, step)."""

    state: State
    n: int
    key: tuple
    temperature: float
    valid: tuple[str, ...] = ()  # the actions to choose among; empty: free text


@dataclasses.dataclass(frozen=True)
class Score:
    """Q(s, a) of each action."""

    state: State
    actions: tuple[str, ...]


def finite(scores: list[list[float]]) -> list[list[float]]:
    """These values of a QNet. UserError for what no argmax may be taken of."""
    if not all(map(math.isfinite, itertools.chain(*scores))):
        raise UserError("QNet's values are not finite, so its training has diverged")
    return scores


class LogProb(Score):
    """log pi(a | s) of each action as free text, in nats, at temperature 1."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The answer to a Sample is a list of these."""

    text: str
    tokens: int  # sampled, the end of the turn included
    logprob: float  # log pi(a | s) in nats, at the temperature of the request
    ids: tuple[int, ...] = ()  # of free text, as sampled: tokenizing the text may give others


def ask(
    env: TextEnv,
    state: State,
    n: int,
    key: tuple,
    rendering: Rendering,
    temperature: float | None = None,
) -> Sample:
    """Request n actions in the state that `env` is in; temperature None: the rendering's."""
    candidates = env.candidates() if rendering.candidates == "valid" else ()
    valid = dict.fromkeys(react(*candidate) for candidate in candidates)
    if temperature is None:
        temperature = rendering.temperature
    return Sample(state, n, key, temperature, tuple(valid))


Models = dict[type, Callable[[list], list]]  # what answers a list of requests, by their type


def refusal_in(answer: Any) -> Refused | None:
    """The first Refused in an answer, or in a list of answers."""
    if isinstance(answer, list):
        return next(filter(None, map(refusal_in, answer)), None)
    return answer if isinstance(answer, Refused) else None


def drive(
    generators: Iterable[Generator[Any, Any, T]], models: Models, width: int = 64
) -> Iterator[T]:
    """Advance up to `width` generators side by side; yield what each returns as it finishes.

    A generator yields a request, or a list of requests of one type, whose answers it gets as a
    list. Requests of one type from all generators are answered in one call of `models[type]`.
    A Refused in the answer is raised in the generator that asked.
    """
    waiting = collections.defaultdict(list)  # by type: a generator and its request, or list of them
    finished: list[T] = []
    source = iter(generators)

    def advance(generator: Generator[Any, Any, T], answer: Any) -> None:
        try:
            refused = refusal_in(answer)
            requests = generator.throw(refused) if refused else generator.send(answer)
        except StopIteration as stop:
            finished.append(stop.value)
            return
        kind = type(requests[0] if isinstance(requests, list) else requests)
        waiting[kind].append((generator, requests))

    while True:
        room = width - sum(map(len, waiting.values())) - len(finished)
        for generator in itertools.islice(source, room):
            advance(generator, None)
        if finished:
            yield finished.pop(0)
            continue
        if not waiting:
            return
        # The most frequent type of request goes first: the others share larger batches later.
        chosen = max(waiting, key=lambda kind: (len(waiting[kind]), kind.__name__))
        turn = waiting.pop(chosen)
        batch: list[Any] = []
        for _, requests in turn:
            batch += requests if isinstance(requests, list) else [requests]
        answers = iter(models[chosen](batch))
        for generator, requests in turn:
            several = isinstance(requests, list)
            advance(generator, [next(answers) for _ in requests] if several else next(answers))
