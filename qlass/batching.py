"""Algorithms await the models: `candidates = await Sample(...)`. Many tasks share a batch."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import queue
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from qlass import UserError
from qlass.chat import Rendering
from qlass.environment import TextEnv
from qlass.messages import State, react

T = TypeVar("T")
Answer = TypeVar("Answer")


class Request(Generic[Answer]):
    """A question that an algorithm awaits: `drive` takes it, and gives the answer back."""

    def __await__(self) -> Generator[Request, Answer, Answer]:
        return (yield self)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The answer to a Sample is a list of these."""

    text: str
    tokens: int  # sampled, the end of the turn included
    logprob: float  # log pi(a | s) in nats, at the request's temperature (at 1 where it is 0)
    ids: tuple[int, ...] = ()  # of free text, as sampled: tokenizing the text may give others


@dataclasses.dataclass(frozen=True)
class Sample(Request[list[Candidate]]):
    """a ~ pi(a | s), n times. `key` names the draw in the noise: (task, branch or trial, step)."""

    state: State
    n: int
    key: tuple
    temperature: float
    valid: tuple[str, ...] = ()  # the actions to choose among; empty: free text
    # Whether the environment acts on an action now.
    knows: Callable[[str], bool] = dataclasses.field(default=bool, compare=False)


@dataclasses.dataclass(frozen=True)
class Score(Request[list[float]]):
    """Q(s, a) of each action. UserError for a value that is not finite, whoever gives it."""

    state: State
    actions: tuple[str, ...]

    def __await__(self) -> Generator[Request, list[float], list[float]]:
        return finite((yield self))


def finite(values: list[float]) -> list[float]:
    """The same values. UserError if one is not finite."""
    if not all(map(math.isfinite, values)):
        raise UserError("scores are not finite: damaged weights, or --precision float32 helps")
    return values


class LogProb(Score):
    """log pi(a | s) of each action as free text, in nats, at temperature 1."""


def ask(
    env: TextEnv,
    state: State,
    n: int,
    key: tuple,
    rendering: Rendering,
    temperature: float | None = None,
) -> Sample:
    """The request for n actions in the state of `env`; temperature None: the rendering's."""
    candidates = env.candidates() if rendering.candidates == "valid" else ()
    if rendering.candidates == "valid" and not candidates:
        raise UserError(
            f"{env.name} lists no valid actions: clone the agent with --candidates free"
        )
    valid = dict.fromkeys(react(*candidate) for candidate in candidates)
    if temperature is None:
        temperature = rendering.temperature
    return Sample(state, n, key, temperature, tuple(valid), env.knows)


Backends = dict[type, Callable[[list], list]]  # what answers a list of requests, by their type


@runtime_checkable
class RemoteModel(Protocol):
    """A model elsewhere, such as behind a server: each player's request is on its way at once."""

    def begin(self, request: Request, ready: Callable[[Any], Any]) -> Callable[[], Any]:
        """Ask. Returns what waits for the answer; `ready` is called when it is there."""


def drive(
    players: Iterable[Coroutine[Any, Any, T]], backends: Backends, width: int = 64
) -> Iterator[T]:
    """Advance up to `width` coroutines side by side; yield what each returns as it finishes.

    This is an event loop without a clock: a player sleeps until a model has answered it. Requests
    of one type from all players are answered in one call of `backends[type]`. A RemoteModel is
    asked at once, and its player goes on with the answer.
    """
    asleep: dict[type, list] = collections.defaultdict(list)  # players, each with its request
    remote: dict[Coroutine, Callable] = {}  # players, each with what waits for its answer
    ready: queue.SimpleQueue[Coroutine] = queue.SimpleQueue()  # those that it has answered
    finished: list[T] = []
    source = iter(players)

    def resume(player: Coroutine[Any, Any, T], answer: Any) -> None:
        try:
            request = player.send(answer)
        except StopIteration as stop:
            finished.append(stop.value)
            return
        backend = backends[type(request)]
        if isinstance(backend, RemoteModel):
            remote[player] = backend.begin(request, lambda _: ready.put(player))
        else:
            asleep[type(request)].append((player, request))

    while True:
        room = width - sum(map(len, [*asleep.values(), remote, finished]))
        for player in itertools.islice(source, room):
            resume(player, None)
        if finished:
            yield finished.pop(0)
            continue
        if remote and not (asleep and ready.empty()):  # a local model works before one waits
            player = ready.get()
            resume(player, remote.pop(player)())
            continue
        if not asleep:
            return
        # The most frequent type of request goes first: the others share larger batches later.
        *_, kind = max((len(turn), kind.__name__, kind) for kind, turn in asleep.items())
        turn = asleep.pop(kind)
        answers = backends[kind]([request for _, request in turn])
        for (player, _), answer in zip(turn, answers, strict=True):
            resume(player, answer)
