"""A chat model behind a server in the place of a `Policy`: a judge of experiments/qval."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.messages import State
from qlass.noise import uniforms
from qlass.served import Server


class ChatServer(Server):
    """A server of a chat model, which renders the messages itself. answered_as: the model's name in its replies, which
    must stay one, as an alias may come to mean another model."""

    answered_as: str | None = None

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> tuple[Any, Any]:
        """A chat completion, and what it read and wrote; messages are (role, content). UserError if another model
        answers than before."""
        talk = State(tuple(messages)).dump()
        reply = self.ask(self.client.chat.completions.create, model=self.model, messages=talk, **options)
        self.answered_as = self.answered_as or reply.model
        if reply.model and reply.model != self.answered_as:
            raise UserError(f"{self.url}: it answered as {self.answered_as}, and now as {reply.model}")
        return reply.choices[0], reply.usage


class ChatPolicy:
    """A chat model behind a server, which renders the messages: it answers what a `Policy` does."""

    def __init__(self, url: str, max_tokens: int, seed: int = 0) -> None:
        self.server, self.max_tokens, self.seed = ChatServer(url, 16), max_tokens, seed

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Free text, whatever a request has as valid."""
        jobs = [[(request, k) for k in range(request.n)] for request in requests]
        return self.server.side_by_side(self.text, jobs)

    def text(self, request: Sample, k: int) -> Candidate:
        options = {"temperature": request.temperature, "max_tokens": self.max_tokens}
        options["seed"] = int(uniforms(1, self.seed, *request.key, k)[0] * 2**31)
        choice, usage = self.server.chat(request.state.messages, **options)
        return Candidate(choice.message.content or "", usage.completion_tokens, math.nan)

    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log p of each valid text as the reply's first token, (A,); -inf where it is not among the
        20 likeliest."""
        (logprobs,) = self.server.side_by_side(self.first_token, [[(r,) for r in requests]])
        return logprobs

    def first_token(self, request: Sample) -> np.ndarray:
        options = {"temperature": 1, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        choice, _ = self.server.chat(request.state.messages, **options)
        logprobs = dict.fromkeys(request.valid, -np.inf)
        for token in choice.logprobs.content[0].top_logprobs:  # of "A" and " A" the likelier one
            text = token.token.strip()
            if text in logprobs:
                logprobs[text] = max(logprobs[text], token.logprob)
        return np.array(list(logprobs.values()))
