"""The noise that draws actions, from a counter-based generator: order and batches do not matter."""

import hashlib
from collections.abc import Hashable

import numpy as np


def uniforms(n: int, *key: Hashable) -> np.ndarray:
    """n numbers in [0, 1) that depend on nothing but the key, of seed, task, branch, step and
    candidate."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(philox).random(n)
