"""What `train_qnet.QNet` answers, in batches, each token computed once."""

from __future__ import annotations

from typing import Any

import torch

from qlass.batching import Score
from qlass.fast.cache import PromptCache, batch_for, room_for, tokens_of
from qlass.messages import State


class FastQNet:
    """The same values as `QNet.q`. It remembers what it has read, so a QNet makes a new one when its weights change."""

    def __init__(self, qnet: Any, cache_gb: float | None = None) -> None:
        """cache_gb: room for read prompts (`room_for`)."""
        self.qnet, self.budget = qnet, batch_for(qnet.backbone)
        self.cache = PromptCache(room_for(qnet.backbone, cache_gb))
        self.memory: dict[tuple[State, str], float] = {}

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        fresh: dict[State, dict[str, None]] = {}
        for r in requests:
            for action in r.actions:
                if (r.state, action) not in self.memory:
                    fresh.setdefault(r.state, {})[action] = None
        states = list(fresh)
        prompts, tails = tokens_of(self.qnet.chat, fresh)

        def values(inputs: dict, columns: torch.Tensor) -> torch.Tensor:
            return self.qnet(at=(slice(None), columns), **inputs).float()

        for n, out, _, paths in self.cache.read(values, self.qnet.backbone, self.budget, prompts, tails):
            v = out.cpu().numpy()
            for action, at in zip(fresh[states[n]], paths, strict=True):
                self.memory[states[n], action] = float(v[at[-1]])
        return [[self.memory[r.state, action] for action in r.actions] for r in requests]
