"""Learners, searches and studies beside the paper's methods. Each is a module with a command line."""

import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import envs
from qlass.batching import Models, drive

if not hasattr(envs, "TextEnv"):  # `python -m` looks for modules where it is started first
    print(f"error: {envs.__file__} hides our module envs: rename it, or start elsewhere", file=sys.stderr)
    sys.exit(2)


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
