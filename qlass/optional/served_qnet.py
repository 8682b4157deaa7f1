"""QNet on a server, such as vLLM with integrations/vllm_qnet.py: `--qnet URL[#MODEL]`."""

import base64
from pathlib import Path
from typing import Any

import numpy as np

from qlass import UserError
from qlass.batching import Score, finite
from qlass.chat import Chat, Rendering
from qlass.models import load_chat
from qlass.optional.foreign import FIXED, fits
from qlass.optional.server import Server, side_by_side, usage_of
from qlass.runs import meta_of

ALIKE = 0.02  # how far a value may be off: bf16 and float32 differ by .006


def load(url: str, config: Any) -> tuple["ServedQNet", Path]:
    """A served QNet and its folder here, which gives tokenizer, rendering and fingerprint: the one
    that the server names its model by, as vLLM does unless it is told another name, else RUN/qnet.
    """
    server = Server(url, "--qnet")
    folder, default = Path(server.model), config.run / "qnet"
    if not (folder / "qnet.json").exists():
        folder = default
    if not (folder / "qnet.json").exists():
        problem = f"its folder is needed here, for its tokenizer: {server.model} or {default}"
        raise UserError(f"{server.name}: {problem}")
    chat = load_chat(folder, Rendering.load(folder, config))
    qnet = ServedQNet(server, chat, config.in_flight or 64)
    qnet.check(meta_of(folder).get("fingerprint"))
    return qnet, folder


class ServedQNet:
    """The scores of `QNet.score`, by a server of its weights. chat: of QNet's own folder."""

    def __init__(self, server: Server, chat: Chat, parallel: int = 64) -> None:
        self.server = server
        self.chat = chat
        self.parallel = parallel
        chat.context = min(chat.context, server.context)

    def check(self, fingerprint: list[float] | None) -> None:
        """UserError if the server holds another QNet than the folder (foreign.fingerprint), or what
        is no QNet."""
        if not fits(self.chat):
            return
        values = self.values(self._texts(FIXED))
        error = np.abs(np.subtract(values, fingerprint or values)).max()
        if error > ALIKE:
            problem = f"has other weights (a fixed text has another value, by {error:.3f})"
            raise UserError(
                f"{self.server.name}: {problem}; serve the QNet of this run as it is now"
            )

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Siblings are one call, so that one replica reads their prefix, once."""
        return side_by_side(self.values, [self._texts(r) for r in requests], self.parallel)

    def _texts(self, request: Score) -> list[list[int]]:
        """The tokens of (s, a) for each of a request's actions."""
        prompt = self.chat.prompt(request.state)
        task = request.state.task
        return [prompt + self.chat.action(a, task, len(prompt)) for a in request.actions]

    def values(self, texts: list[list[int]]) -> list[float]:
        """The value at each text's last token: an embedding of one number."""

        def read(reply: dict) -> list[float]:
            usage_of(reply, sum(map(len, texts)))
            entries = {entry["index"]: entry["embedding"] for entry in reply["data"]}
            return [value_of(entries[i]) for i in range(len(texts))]

        body = {"model": self.server.model, "input": texts, "encoding_format": "base64"}
        return self.server.ask("/embeddings", read, body)


def value_of(embedding: str) -> float:
    """The one number of an embedding. UserError if it is not one, or not finite."""
    numbers = np.frombuffer(base64.b64decode(embedding), "<f4").tolist()
    if len(numbers) != 1:
        problem = f"gives {len(numbers)} numbers for a text, where a QNet gives one"
        raise UserError(f"{problem}: serve the folder that train_qnet.py wrote")
    finite([numbers])
    return numbers[0]
