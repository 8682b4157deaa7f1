"""Learners, searches and studies beside the paper's methods. Each is a module with a command line."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from qlass.batching import Models, drive


def drive_in_order(generators: Iterable[Generator], models: Models, width: int = 64) -> Iterator[Any]:
    """What `drive` yields, in the order of the generators."""

    def numbered(number: int, generator: Generator) -> Generator:
        return number, (yield from generator)

    early: dict[int, Any] = {}  # what has ended before one in front of it
    following = 0
    for number, value in drive((numbered(*pair) for pair in enumerate(generators)), models, width):
        early[number] = value
        while following in early:
            yield early.pop(following)
            following += 1
