"""The scores of `train_qnet.QNet` in batches, each token computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlass.batching import Score
from qlass.fast.cache import (
    PromptCache,
    Question,
    Reading,
    StateAction,
    batch_for,
    free_bytes_for,
    unread,
)


class FastQNet:
    """The same scores as `QNet.score`. It remembers what it has read: when the weights change, make
    a new one."""

    def __init__(self, qnet: Any, cache_gb: float | None = None) -> None:
        self.qnet, self.chat = qnet.eval(), qnet.chat
        self.budget = batch_for(qnet.backbone)
        self.cache = PromptCache(free_bytes_for(qnet.backbone, cache_gb))
        self.memory: dict[StateAction, float] = {}

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        for pair, _, values in unread(self.chat, requests, self.memory, self.read):
            self.memory[pair] = float(values[-1])
        return [[self.memory[r.state, action] for action in r.actions] for r in requests]

    def read(self, questions: list[Question]) -> Iterator[Reading]:
        """`PromptCache.read` of QNet's values."""
        return self.cache.read(self.forward, self.qnet.backbone, self.budget, questions)

    def forward(self, inputs: dict, columns: Tensor) -> np.ndarray:
        """Values at these columns, (B, len(columns))."""
        mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        mask[:, columns] = True
        return self.qnet(mask, **inputs).view(len(mask), -1).float().cpu().numpy()
