"""The agent's weights, or a QNet's, behind an OpenAI-compatible server, such as vLLM or SGLang. The
folder of these weights is here too: it has tokenizer and metadata.

The client of `openai` waits for a server that is busy or away. What a server answers otherwise, and
what it has read in part or not finished, stops the run in one line: the same command goes on.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample, Score
from qlass.files import meta_of, warn
from qlass.messages import State
from qlass.models import load_chat
from qlass.noise import uniforms
from qlass.policy import QUESTION
from qlass.records import as_user_error
from qlass.settings import Sampling

ENDS = ("stop", "length")  # of a reply that was not given up
TRIES = 80  # after waits of 0.5, 1, 2, 4, 8, 8, ... seconds


class Server:
    """The model at http://HOST:PORT/v1#MODEL, asked with $OPENAI_API_KEY."""

    def __init__(self, url: str, width: int | None = None) -> None:
        import openai

        address, _, self.model = url.partition("#")
        if not self.model:
            raise UserError(f"{url}: name its model, URL#MODEL")
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.url = url
        self.width = width or 64
        self.client = openai.OpenAI(base_url=address, api_key=key, max_retries=TRIES)

    def ask(self, method: Callable, **body: Any) -> Any:
        """The reply of a method of the client. UserError with what the server says instead."""
        import openai

        with as_user_error(self.url):
            try:
                return method(**body)
            except openai.APIStatusError as error:
                raise ValueError(f"status {error.status_code} {error.response.text}") from error

    def complete(self, prompt: list[int], **options: Any) -> tuple[Any, Any]:
        """The completion of a prompt of token ids, and what it read and wrote."""
        body = {"model": self.model, "prompt": prompt, **options}
        reply = self.ask(self.client.completions.create, **body)
        (choice,) = reply.choices
        tokens_read = reply.usage.prompt_tokens
        if tokens_read != len(prompt) or choice.finish_reason not in ENDS:
            raise UserError(f"{self.url}: reads {len(prompt)} tokens as {reply.usage}: {choice}")
        return choice, reply.usage

    def side_by_side(self, function: Callable, groups: list[list[tuple]]) -> list[list[Any]]:
        """What the function gives for each tuple of arguments, in groups as these are."""
        jobs = itertools.chain(*groups)
        with ThreadPool(self.width) as pool:
            values = iter(pool.starmap(function, jobs, chunksize=1))
        return [[next(values) for _ in group] for group in groups]


class Untold(UserError):
    """The server does not tell what is asked."""


def check(
    server: Server, folder: Path, answer: Callable[[list], list], config: Sampling, most: float
) -> None:
    """Ask a fixed question, whose answer the checkpoint's metadata have. UserError if the server's
    differs by more than `most`, or by ten times as much with --load-in: served in few bits."""
    fingerprint = meta_of(folder).get("fingerprint")
    print(f"{server.url}: asking for a fixed text, for ten minutes at most", file=sys.stderr)
    try:
        (values,) = answer([QUESTION])
    except Untold as error:
        fingerprint = None
        warn(str(error))
    if not fingerprint:
        warn(f"{server.url}: whether it has the weights of {folder} is not known")
        return
    difference = np.abs(np.subtract(values, fingerprint)).max()
    message = f"{server.url}: a fixed text differs by {difference:.3f} from that of {folder}"
    if not difference < most * (10 if config.load_in else 1):
        raise UserError(f"{message}: other weights, or few bits (--load-in says so)")
    print(message, file=sys.stderr)


class ServedPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text.

    Each text has a seed of (run seed, task, node, candidate), so a server that keeps seeds gives
    the same texts again: in bf16 only with the same --in-flight.
    """

    def __init__(self, folder: Path, config: Sampling) -> None:
        self.chat, self.seed = load_chat(folder, config), config.seed
        if self.chat.rendering.candidates == "valid":
            raise UserError("--server: the agent chooses by probabilities, which no server tells")
        self.server = Server(str(config.server), config.in_flight)
        check(self.server, folder, self.likelihoods, config, most=2.0)

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        jobs = [[(request, k) for k in range(request.n)] for request in requests]
        return self.server.side_by_side(self.text, jobs)

    def text(self, request: Sample, k: int) -> Candidate:
        """Candidate k; each setting is named, else a default of the server's would act."""
        rendering = self.chat.rendering
        (noise,) = uniforms(1, self.seed, *request.key, k)
        options = {
            "temperature": request.temperature,
            "max_tokens": rendering.max_new_tokens,
            "stop": list(rendering.stop),
            "seed": int(noise * 2**31),
            "extra_body": {"stop_token_ids": sorted(self.chat.stop_ids)},
        }
        prompt = self.chat.prompt(request.state)
        choice, usage = self.server.complete(prompt, **options)
        action = self.chat.action_in(choice.text)
        return Candidate(action, usage.completion_tokens, math.nan)

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of texts, where the server tells log-probabilities of a prompt (vLLM)."""
        jobs = [[(request.state, action) for action in request.actions] for request in requests]
        return self.server.side_by_side(self.likelihood, jobs)

    def likelihood(self, state: State, action: str) -> float:
        """log pi(a | s) of one text, in nats."""
        prompt = self.chat.prompt(state)
        ids = self.chat.action(action, state.task, len(prompt))
        more = {"prompt_logprobs": 0}
        choice, _ = self.server.complete(prompt + ids, max_tokens=1, extra_body=more)
        logprobs = getattr(choice, "prompt_logprobs", None)
        if not logprobs:
            raise Untold(f"{self.server.url}: tells no log-probabilities of a prompt, as vLLM does")
        of_tokens = zip(ids, logprobs[len(prompt) :], strict=True)
        return sum(entry[str(token)]["logprob"] for token, entry in of_tokens)


class ServedQNet:
    """The scores of `train_qnet.QNet`, by a server of its folder."""

    def __init__(self, url: str, config: Sampling) -> None:
        self.server = Server(url, config.in_flight)
        self.folder = Path(self.server.model)
        self.chat = load_chat(self.folder, config)
        check(self.server, self.folder, self.score, config, most=0.02)

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Siblings are one call, so that one replica reads their prefix, once."""
        (values,) = self.server.side_by_side(self.values, [[(request,) for request in requests]])
        return values

    def values(self, request: Score) -> list[float]:
        """The value at each text's last token: an embedding of one number."""
        texts = [self.chat.pair(request.state, action) for action in request.actions]
        body = {"model": self.server.model, "input": texts}
        reply = self.server.ask(self.server.client.embeddings.create, **body)
        values = [e.embedding[0] for e in sorted(reply.data, key=lambda entry: entry.index)]
        tokens = sum(map(len, texts))
        if reply.usage.prompt_tokens != tokens or not np.isfinite(values).all():
            raise UserError(f"{self.server.url}: reads {reply.usage}, and gives {values}")
        return values
