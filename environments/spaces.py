"""The space of all texts, which Gymnasium's vector environments share between processes."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory


class AnyText(spaces.Text):
    """A space of all strings: pages of a shop hold any character."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class SharedTexts:
    """The observations of an AsyncVectorEnv's workers; a deep copy is the tuple of what they are now.

    Gymnasium's own form of a `Text` has a small alphabet and a longest text, and it is read once.
    """

    def __init__(self, space: AnyText, n: int = 1, ctx: Any = multiprocessing) -> None:
        self.texts = ctx.Manager().list([""] * n)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __deepcopy__(self, memo: dict) -> tuple[str, ...]:
        return tuple(self)


create_shared_memory.register(AnyText, SharedTexts)
read_from_shared_memory.register(AnyText, lambda space, shared, n=1: shared)
write_to_shared_memory.register(AnyText, lambda space, i, text, shared: shared.texts.__setitem__(i, text))
