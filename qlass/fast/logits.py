"""The logits of those tokens alone that the cloning loss reads: the output layer is wide, and most tokens are read."""

from __future__ import annotations

from typing import Any

import torch


def columns(wrote: torch.Tensor, ends: bool = False) -> torch.Tensor:
    """The K positions whose prediction counts: those before a token that the agent wrote in some row and, with `ends`,
    those where its turn has just ended. (B, T) -> (K,)."""
    return (wrote[:, 1:] | wrote[:, :-1] & ends).any(0).nonzero()[:, 0]


def predictions(model: Any, ids: torch.Tensor, labels: torch.Tensor, ends: bool = False) -> tuple[torch.Tensor, ...]:
    """As sft.predictions, at `columns` alone: logits (B, K, V), labels (B, K), positions (K,)."""
    kept = columns(labels != -100, ends)
    return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits, labels[:, 1:][:, kept], kept
