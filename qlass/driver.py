"""Algorithms as generators: what they may ask of the models, and how many of them share a batch.

A generator yields requests (`Sample`, `Score`, `Likelihood`); `drive` advances many and answers them in batches.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from qlass.chat import Rendering, State, react

if TYPE_CHECKING:
    from envs import TextEnv


@dataclasses.dataclass(frozen=True)
class Sample:
    """a ~ pi(a | s), n times. `key` names the state in the noise: (task, node or step)."""

    state: State
    n: int
    key: tuple
    temperature: float
    valid: tuple[str, ...] = ()  # the actions to choose among; empty: free


def ask(
    env: TextEnv, state: State, n: int, key: tuple, rendering: Rendering, temperature: float | None = None
) -> Sample:
    """Request n actions in the state that `env` is in, sampled as the checkpoint's rendering says."""
    valid = dict.fromkeys(react(*c) for c in env.candidates()) if rendering.candidates == "valid" else ()
    return Sample(state, n, key, rendering.temperature if temperature is None else temperature, tuple(valid))


@dataclasses.dataclass(frozen=True)
class Score:
    """Q(s, a) of each action."""

    state: State
    actions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """log pi(a | s) of each action, written freely."""

    state: State
    actions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    text: str
    tokens: int  # generated, the end of the turn included
    logprob: float
    ids: tuple[int, ...] = ()  # of free text, as sampled: its tokens read anew may be others
    task: str = ""  # the wording that it was sampled under, where the task was put in other words


@dataclasses.dataclass(frozen=True)
class Step:
    """s_t, the M draws, the distinct candidates among them with their scores, the action taken, and its answer."""

    state: State
    drawn: list[Candidate]
    candidates: list[str]
    scores: list[float]
    action: str
    observation: str
    reward: float


def follow(env: TextEnv, task_id: str, name: str) -> list[Step]:
    """A trajectory of one of the environment's own players ("expert", "oracle", "rule:NAME"), which draw nothing."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)
    steps: list[Step] = []
    player = env.rules()[name.removeprefix("rule:")]() if ":" in name else getattr(env, name)(task_id)
    for thought, move in player:
        action = react(thought, move)
        observation, reward, terminated, truncated, _ = env.step(move)
        observation = env.message(observation)
        steps.append(Step(state, [], [], [], action, observation, float(reward)))
        state = state.then(action, observation)
        if terminated or truncated:
            break
    return steps


Answers = dict[type, Callable[[list], list]]


def drive(episodes: Iterable[Generator], answers: Answers, width: int = 64, in_order: bool = False) -> Iterator[Any]:
    """Advance up to `width` generators side by side; yield what each returns as it finishes, or in the order given.

    A generator yields a request, or a list of requests of one type, whose answers it gets as a list; requests of one
    type from all generators are answered in one call of `answers[type]`. A failed generator fails the run: nothing is
    swallowed.
    """
    waiting: list[tuple[int, Generator, Any]] = []  # (index, generator, its request or requests)
    finished: list[tuple[int, Any]] = []
    source = enumerate(episodes)
    following = 0  # the next in order

    def advance(index: int, generator: Generator, answer: Any) -> None:
        try:
            waiting.append((index, generator, generator.send(answer)))
        except StopIteration as stop:
            heapq.heappush(finished, (index, stop.value))

    while True:
        # What is finished and not yet yielded counts too, so that a slow first episode can't pile up the rest.
        while len(waiting) + len(finished) < width and (item := next(source, None)) is not None:
            advance(*item, None)
        if finished and (finished[0][0] == following or not in_order):
            yield heapq.heappop(finished)[1]
            following += 1
            continue
        if not waiting:
            return
        # The most frequent kind of request goes first: the others share larger batches later.
        kinds = [type(r[0] if isinstance(r, list) else r) for _, _, r in waiting]
        kind = max(set(kinds), key=lambda k: (kinds.count(k), k.__name__))
        turn = [w for w, k in zip(waiting, kinds, strict=True) if k is kind]
        waiting = [w for w, k in zip(waiting, kinds, strict=True) if k is not kind]
        batches = [r if isinstance(r, list) else [r] for _, _, r in turn]  # of each generator
        replies = iter(answers[kind]([r for batch in batches for r in batch]))
        for (index, generator, request), batch in zip(turn, batches, strict=True):
            own = [next(replies) for _ in batch]
            advance(index, generator, own if isinstance(request, list) else own[0])
