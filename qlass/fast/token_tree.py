"""Token trees: many sequences with common beginnings as one row of a batch, under a tree attention
mask.

A causal LM computes for each token of a tree what it would in that token's own sequence (equal
within 1e-6 in float32), since positions are depths and the mask lets a token see its ancestors
alone; attention windows count depths too."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class TokenTree:
    """A trie of token sequences: what two sequences begin with in common is stored, and computed,
    once.

    >>> t = TokenTree()
    >>> t.add([5, 6, 7]), t.add([5, 6, 8])
    ([0, 1, 2], [0, 1, 3])
    >>> t.ids
    array('i', [5, 6, 7, 8])
    """

    def __init__(self) -> None:
        self.ids = array("i")
        self.parent = array("i")
        self.depth = array("i")
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], after: int = -1) -> list[int]:
        """Insert a sequence below the token `after` (-1: from the root); the index of each of its
        tokens."""
        path = []
        for token in ids:
            place = self._child.get((after, token))
            if place is None:
                place = self._child[after, token] = len(self.ids)
                self.ids.append(token)
                self.parent.append(after)
                self.depth.append(0 if after < 0 else self.depth[after] + 1)
            path.append(place)
            after = place
        return path

    def growth(self, *rows: Sequence[int]) -> int:
        """Count the tokens that `add` would store for these sequences."""
        size = len(self)
        for ids in rows:
            self.add(ids)
        grown = len(self) - size
        self.cut(size)
        return grown

    def cut(self, size: int) -> None:
        """Take away what was added to a tree of `size` tokens."""
        for token in range(size, len(self)):
            del self._child[self.parent[token], self.ids[token]]
        del self.ids[size:], self.parent[size:], self.depth[size:]

    def close(self) -> None:
        """Forget what `add` alone needs, which leaves 12 bytes a token."""
        self._child.clear()

    def attention(self) -> np.ndarray:
        """(L, L) bool: a token sees itself and its ancestors, as it would in its own sequence."""
        sees = np.eye(len(self), dtype=bool)
        for token, parent in enumerate(self.parent):
            if parent >= 0:
                sees[token] |= sees[parent]
        return sees


def windows_of(config: Any) -> dict[str, int]:
    """{layer type: w}: the model's layers see the last w tokens, or all of them if w is 0."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    # Without layer types (Mistral, Phi-3, StarCoder 2), a window is every layer's.
    types = getattr(config, "layer_types", None) or [
        "sliding_attention" if window else "full_attention"
    ]
    return {kind: window if kind == "sliding_attention" else 0 for kind in dict.fromkeys(types)}


def additive_masks(
    sees: Tensor, at: Tensor, keys: Tensor, windows: dict[str, int], dtype: torch.dtype
) -> Any:
    """Attention bias (B, 1, L, K): 0 where a token may see a key, else the lowest number.

    sees: (B, L, K), before windows. at: (B, L), positions of the tokens. keys: (B, K), of the keys.
    Where a model has several layer types, a dict with one bias for each, as its `forward` takes
    them."""
    masks = {}
    at = at[:, :, None]
    keys = keys[:, None]
    for kind, window in windows.items():
        allowed = sees & (at - keys < window) if window else sees
        bias = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
        masks[kind] = bias.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def tree_inputs(
    model: Any, trees: Sequence[TokenTree], past: Sequence[int] | None = None
) -> dict[str, Any]:
    """A model's inputs for B token trees, padded on the left to L: ids and positions (B, L), masks
    (B, 1, L, P + L).

    `past[i]` tokens stand before tree i in a cache of width P = max(past), padded on the left too.
    Nothing sees the padding, so any id will do. A sequence by itself needs no mask."""
    device = model.device
    past = past or [0] * len(trees)
    width = max(map(len, trees))
    before = max(past)
    if len(trees) == 1 and not before and list(trees[0].parent) == list(range(-1, width - 1)):
        return {"input_ids": torch.tensor(trees[0].ids, device=device)[None]}

    ids = torch.zeros((len(trees), width), dtype=torch.long)
    # Of the cache's columns too.
    positions = torch.zeros((len(trees), before + width), dtype=torch.long)
    sees = torch.zeros((len(trees), width, before + width), dtype=torch.bool)
    # Padding sees itself, or softmax would be 0/0.
    sees[:, :, before:].diagonal(dim1=-2, dim2=-1).fill_(True)
    for row, (tree, cached) in enumerate(zip(trees, past, strict=True)):
        start = width - len(tree)
        cache = slice(before - cached, before)
        fresh = slice(before + start, None)
        ids[row, start:] = torch.tensor(tree.ids)
        positions[row, cache] = torch.arange(cached)
        positions[row, fresh] = torch.tensor(tree.depth) + cached
        sees[row, start:, cache] = True
        sees[row, start:, fresh] = torch.from_numpy(tree.attention())
    positions = positions.to(device)
    at = positions[:, before:]
    masks = additive_masks(sees.to(device), at, positions, windows_of(model.config), model.dtype)
    return {"input_ids": ids.to(device), "position_ids": at, "attention_mask": masks}


def batches(
    lengths: Sequence[int], budget: int, before: Sequence[int] | None = None, min_fill: float = 0.0
) -> Iterator[list[int]]:
    """Group items of like length by their indices. A group's padded size stays within `budget`
    tokens, or it has one item.

    before: tokens of each item that only take memory, such as those in a cache, padded by
    themselves. min_fill: share of a group's longest item that its shortest one has at least."""
    before = before or [0] * len(lengths)
    group: list[int] = []
    longest = most = 0  # tokens of the group's items, and before them
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        wide = max(most, before[i])
        full = (longest + wide) * (len(group) + 1) > budget
        if group and (full or lengths[i] < min_fill * longest):
            yield group
            group = []
        if not group:
            longest = lengths[i]
            wide = before[i]
        group.append(i)
        most = wide
    if group:
        yield group
