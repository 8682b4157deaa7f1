"""What `train_qnet.QNet` answers, in batches, each token computed once; or by a server."""

from __future__ import annotations

import base64
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import torch

from qlass import UserError
from qlass.batching import Score
from qlass.chat import Chat
from qlass.fast.cache import PromptCache, batch_for, room_for, unread
from qlass.messages import State
from qlass.server import Server, side_by_side


def finite(scores: list[list[float]]) -> list[list[float]]:
    """These scores. UserError for what no argmax may be taken of."""
    if not all(map(math.isfinite, itertools.chain(*scores))):
        raise UserError("QNet's values are not finite, so its training has diverged")
    return scores


class FastQNet:
    """The same scores as `QNet.score`. It remembers what it has read: when the weights change, make a new one."""

    def __init__(self, qnet: Any, cache_gb: float | None = None) -> None:
        self.qnet, self.budget = qnet.eval(), batch_for(qnet.backbone)
        self.cache = PromptCache(room_for(qnet.backbone, cache_gb))
        self.memory: dict[tuple[State, str], float] = {}

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        def values(inputs: dict, columns: torch.Tensor) -> np.ndarray:  # (B, len(columns))
            where = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
            where[:, columns] = True
            return self.qnet(where, **inputs).view(len(where), -1).float().cpu().numpy()

        pairs = [(r.state, action) for r in requests for action in r.actions]
        read = partial(self.cache.read, values, self.qnet.backbone, self.budget)
        for pair, _, out, places in unread(self.qnet.chat, pairs, self.memory, read):
            self.memory[pair] = float(out[places[-1]])
        return finite([[self.memory[r.state, action] for action in r.actions] for r in requests])


class ServedQNet:
    """The same scores by a server that holds QNet's weights, such as vLLM with integrations/vllm_qnet.py."""

    def __init__(self, server: Server, chat: Chat, parallel: int = 64) -> None:
        self.server, self.chat, self.parallel = server, chat, parallel

    def score(self, requests: list[Score]) -> list[list[float]]:
        jobs = []
        for r in requests:
            prompt = self.chat.prompt(r.state)
            jobs.append([prompt + self.chat.action(a, r.state.task, len(prompt)) for a in r.actions])
        return finite(side_by_side(self.values, jobs, self.parallel))

    def values(self, texts: list[list[int]]) -> list[float]:
        """Embeddings of one number. Siblings are one call, so that one replica reads their prefix, once."""

        def read(reply: dict) -> list[float]:
            self.server.usage_of(reply, sum(map(len, texts)))
            entries = {entry["index"]: base64.b64decode(entry["embedding"]) for entry in reply["data"]}
            return [np.frombuffer(entries[i], "<f4").item() for i in range(len(texts))]

        body = {"model": self.server.model, "input": texts, "encoding_format": "base64"}
        return self.server.ask("/embeddings", read, body)
