"""--top-k and --top-p: a text is drawn from the likeliest tokens alone."""

import torch
from torch import Tensor


def truncated(p: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities (B, V), 0 for all but the k likeliest, and of these for all but the fewest that
    hold top_p."""
    values, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k:
        values[:, top_k:] = 0
    before = values.cumsum(-1) - values  # what likelier ones hold
    total = values.sum(-1, keepdim=True)
    keep = before < top_p * total
    return torch.zeros_like(p).scatter(-1, order, values * keep)
