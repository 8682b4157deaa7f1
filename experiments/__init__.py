"""Learners, searches and studies beside the paper's methods. Each is a module with a command line."""

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import envs
from qlass.batching import Backends, Request, drive

if not hasattr(envs, "TextEnv"):  # `python -m` looks for modules where it is started first
    print(f"error: {envs.__file__} hides our module envs: rename it, or start elsewhere", file=sys.stderr)
    sys.exit(2)


def drive_in_order(players: Iterable[Coroutine], backends: Backends, width: int = 64) -> Iterator[Any]:
    """The results of `drive`, in the order of the players."""

    async def numbered(number: int, player: Coroutine) -> tuple[int, Any]:
        return number, await player

    early: dict[int, Any] = {}  # what has ended before one in front of it
    following = 0
    for number, value in drive((numbered(*pair) for pair in enumerate(players)), backends, width):
        early[number] = value
        while following in early:
            yield early.pop(following)
            following += 1


@dataclasses.dataclass(frozen=True)
class Call(Request[list]):
    """Items for a function that answers lists of them; `drive` gives calls of one function one batch of all."""

    function: Callable[[list], list]
    items: tuple


def answer(calls: list[Call]) -> list[list]:
    """The backend of calls: {Call: answer}."""
    items: dict[Callable, list] = defaultdict(list)
    for call in calls:
        items[call.function] += call.items
    replies = {function: iter(function(batch)) for function, batch in items.items()}
    return [[next(replies[call.function]) for _ in call.items] for call in calls]
