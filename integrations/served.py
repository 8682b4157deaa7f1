"""The agent's weights, or a QNet's, behind an OpenAI-compatible server, such as vLLM or SGLang. The folder of these
weights is here too: it has tokenizer and metadata. `--server` and `--qnet URL#MODEL` of a stage lead here.
"""

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from integrations.servers import Embeddings, Remote, Server, sampler
from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample, Score
from qlass.files import meta_of, warn
from qlass.messages import State
from qlass.models import load_chat
from qlass.policy import QUESTION
from qlass.settings import Sampling

# Else vLLM and SGLang take these from the model's generation_config.json.
NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}


class Untold(UserError):
    """The server does not tell what is asked."""


def check(server: Server, folder: Path, answer: Callable[[list], list], config: Sampling, most: float) -> None:
    """Ask a fixed question, whose answer the checkpoint's metadata have. UserError if the server's
    differs by more than `most`, or by ten times as much with --load-in: served in few bits."""
    fingerprint = meta_of(folder).get("fingerprint")
    try:
        if not fingerprint:
            raise Untold(f"{folder} has no fingerprint")
        (values,) = answer([QUESTION])
    except Untold as problem:
        warn(f"{problem}: whether {server.url} has these weights is not known")
        return
    difference = np.abs(np.subtract(values, fingerprint[: len(values)])).max()  # QNet's has other values behind
    message = f"{server.url}: a fixed text differs by {difference:.3f} from that of {folder}"
    if not difference < most * (10 if config.load_in else 1):
        raise UserError(f"{message}: other weights, or few bits (--load-in says so)")
    print(message, file=sys.stderr)


class ServedPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text.

    A server that keeps seeds gives the same texts again: in bf16 only with the same --in-flight.
    """

    def __init__(self, folder: Path, config: Sampling) -> None:
        self.chat = load_chat(folder, config)
        if self.chat.rendering.candidates == "valid":
            raise UserError("--server: the agent chooses by probabilities, which no server tells")
        self.server = Server(str(config.server), config.in_flight, config.timeout)
        self.sample, self.likelihoods = sampler(self.text, config.seed), Remote(self.logprobs)
        check(self.server, folder, self.likelihoods, config, most=2.0)

    async def text(self, request: Sample, seed: int) -> Candidate:
        """A candidate; each setting is named, else a default of the server's would act."""
        rendering = self.chat.rendering
        options = {
            "temperature": request.temperature,
            "max_tokens": rendering.max_new_tokens,
            "stop": list(rendering.stop),
            "seed": seed,
            "stop_token_ids": sorted(self.chat.stop_ids),
        }
        reply = await self.server.complete(self.chat.prompt(request.state), **options | NEUTRAL)
        if reply.choices[0].finish_reason == "length":
            warn(f"{self.server.url}: an action is cut at --max-new-tokens {options['max_tokens']}")
        text = self.chat.action_in(reply.choices[0].text)
        return Candidate(text, reply.usage.completion_tokens or 0, math.nan)

    async def logprobs(self, request: LogProb) -> list[float]:
        return await asyncio.gather(*(self.likelihood(request.state, text) for text in request.actions))

    async def likelihood(self, state: State, action: str) -> float:
        """log pi(a | s) of a text, in nats, where the server tells that of a prompt (vLLM)."""
        prompt = self.chat.prompt(state)
        ids = self.chat.action_tokens(action, state.task, len(prompt))
        reply = await self.server.complete(prompt + ids, max_tokens=1, prompt_logprobs=0)
        logprobs = reply.choices[0].prompt_logprobs
        if not logprobs:
            raise Untold(f"{self.server.url}: tells no log-probabilities of a prompt, as vLLM does")
        of_tokens = zip(ids, logprobs[len(prompt) :], strict=True)
        return sum(entry[str(token)]["logprob"] for token, entry in of_tokens)


class ServedQNet:
    """The scores of `train_qnet.QNet`, by a server of its folder."""

    def __init__(self, url: str, config: Sampling) -> None:
        self.server = Server(url, config.in_flight, config.timeout)
        self.folder = Path(self.server.model)
        if not self.folder.is_dir():
            raise UserError(f"{url}: no folder {self.folder}: the server's model has the name of its QNet's folder")
        self.chat = load_chat(self.folder, config)
        # Siblings are one call, so that one replica reads their prefix, once.
        self.score = Remote(self.values)
        check(self.server, self.folder, self.score, config, most=0.02)

    async def values(self, request: Score) -> list[float]:
        """The value at each text's last token: an embedding of one number."""
        texts = [self.chat.pair(request.state, action) for action in request.actions]
        reply = await self.server.ask("/embeddings", Embeddings, input=texts)
        values = {entry.index: entry.embedding[0] for entry in reply.data}
        if reply.usage.prompt_tokens != sum(map(len, texts)) or sorted(values) != [*range(len(texts))]:
            raise UserError(f"{self.server.url}: reads {reply.usage}, and gives {values}")
        return [values[index] for index in range(len(texts))]
