"""QNet on a server, such as vLLM with integrations/vllm_qnet.py: `--qnet URL[#MODEL]`."""

import base64
import math

import numpy as np

from qlass import UserError
from qlass.batching import Score
from qlass.chat import Chat
from qlass.server import Server, side_by_side


class ServedQNet:
    """The scores of `QNet.score`, by a server of its weights (integrations/vllm_qnet.py)."""

    def __init__(self, url: str, chat: Chat, parallel: int = 64) -> None:
        self.server = Server(url, "--qnet")
        self.chat = chat
        self.parallel = parallel

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Siblings are one call, so that one replica reads their prefix, once."""
        jobs = []
        for r in requests:
            prompt = self.chat.prompt(r.state)
            jobs.append(
                [prompt + self.chat.action(a, r.state.task, len(prompt)) for a in r.actions]
            )
        return side_by_side(self.values, jobs, self.parallel)

    def values(self, texts: list[list[int]]) -> list[float]:
        """The value at each text's last token: an embedding of one number."""

        def read(reply: dict) -> list[float]:
            self.server.usage_of(reply, sum(map(len, texts)))
            entries = {
                entry["index"]: base64.b64decode(entry["embedding"]) for entry in reply["data"]
            }
            values = [np.frombuffer(entries[i], "<f4").item() for i in range(len(texts))]
            if not all(map(math.isfinite, values)):
                raise UserError("QNet's values are not finite, so its training has diverged")
            return values

        body = {"model": self.server.model, "input": texts, "encoding_format": "base64"}
        return self.server.ask("/embeddings", read, body)
