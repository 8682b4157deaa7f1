"""Attention over packs on a CPU: blocks of queries, each with the keys that one of them sees.

A token tree is stored depth first, so neighbours have nearly the same ancestors, and the keys that
BLOCK of them see are less than half of all. A dense kernel multiplies with all keys, which takes
half of a tiny model's training. The last layer's queries are the tokens that carry a loss alone:
nothing reads its other outputs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

BLOCK = 128
# Queries and the keys that one of them sees, as places in a batch (B, T) read row by row.
Block = tuple[Tensor, Tensor]


def blocks(sees: np.ndarray, queries: np.ndarray, start: int) -> Iterator[Block]:
    """Blocks of a tree that begins at place `start`. sees: (L, L), the tree's attention."""
    for first in range(0, len(queries), BLOCK):
        block = queries[first : first + BLOCK]
        keys = np.flatnonzero(sees[block].any(0))
        yield torch.from_numpy(block + start), torch.from_numpy(keys + start)


def select(x: Tensor, places: list[Tensor]) -> list[Tensor]:
    """x (B, heads, T, head dim) at the places of each block: (heads, n, head dim) each."""
    rows = x.transpose(1, 2).flatten(0, 1).index_select(0, torch.cat(places))
    return [block.transpose(0, 1) for block in rows.split(list(map(len, places)))]


def attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' "sdpa". With the option `blocks`, the first for all layers but the last and the
    second for that one, it returns 0 for a token that is no query of a block."""
    of_layer = options.pop("blocks", None)
    if mask is None or not of_layer or q.dtype != mask.dtype or options.get("dropout"):
        return sdpa_attention_forward(module, q, k, v, mask, **options)
    last = module.layer_idx == module.config.num_hidden_layers - 1
    queries, keys = map(list, zip(*of_layer[last], strict=True))
    batch, heads, width, size = q.shape
    scale = options.get("scaling") or size**-0.5
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    bias = mask.flatten(0, 2)  # (B T, T)
    selected = select(q, queries), select(k, keys), select(v, keys)
    rows = []
    for block, seen, q_block, k_block, v_block in zip(queries, keys, *selected, strict=True):
        of_block = bias[block][:, seen % width]
        scores = torch.baddbmm(of_block, q_block, k_block.mT, alpha=scale)
        rows.append((scores.softmax(-1) @ v_block).transpose(0, 1))
    out = torch.cat(rows)
    every = out.new_zeros(batch * width, *out.shape[1:])
    return every.index_copy(0, torch.cat(queries), out).unflatten(0, (batch, width)), None


# For the whole process: every model that computes by "sdpa" calls the function above from here on.
# Without the option `blocks` it is transformers' own.
AttentionInterface.register("sdpa", attention)
