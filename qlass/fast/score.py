"""The scores of `train_qnet.QNet` in batches, each token computed once."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlass.batching import Score
from qlass.fast.cache import REMEMBERED, PromptCache, batch_for, question_of
from qlass.messages import State


class FastQNet:
    """The same scores as `QNet.score`. It remembers what it has read: when the weights change, make
    a new one."""

    def __init__(self, qnet: Any, cache_gb: float | None = None) -> None:
        self.qnet, self.chat = qnet.eval(), qnet.chat
        model = qnet.backbone
        self.cache = PromptCache(model, self.forward, batch_for(model), cache_gb)
        self.memory: dict[tuple[State, str], float] = {}

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        if len(self.memory) > REMEMBERED:
            self.memory.clear()
        fresh: dict[State, dict[str, None]] = {}  # the (s, a) that were not read yet
        for r in requests:
            for action in r.actions:
                if (r.state, action) not in self.memory:
                    fresh.setdefault(r.state, {})[action] = None
        states = list(fresh)
        questions = [question_of(self.chat, state, fresh[state]) for state in states]
        for number, values, paths in self.cache.read(questions):
            state = states[number]
            for action, path in zip(fresh[state], paths, strict=True):
                self.memory[state, action] = float(values[path[-1]])
        return [[self.memory[r.state, action] for action in r.actions] for r in requests]

    def forward(self, inputs: dict, columns: Tensor) -> np.ndarray:
        """Values at these columns, (B, len(columns))."""
        return self.qnet((slice(None), columns), **inputs).float().cpu().numpy()
