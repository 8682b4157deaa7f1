"""The space of all texts, which Gymnasium's vector environments share between processes."""

import multiprocessing
from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory


class AnyText(spaces.Text):
    """A space of all strings: pages of a shop hold any character.

    The workers of an AsyncVectorEnv write their observations into a shared list, since Gymnasium's own form of a `Text`
    has a small alphabet and a longest text. A deep copy of that list is a plain one.
    """

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


create_shared_memory.register(AnyText, lambda space, n=1, ctx=multiprocessing: ctx.Manager().list([""] * n))
read_from_shared_memory.register(AnyText, lambda space, shared, n=1: shared)
write_to_shared_memory.register(AnyText, lambda space, i, text, shared: shared.__setitem__(i, text))
