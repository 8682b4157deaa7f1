"""A chat model behind a server in the place of a `Policy`: a judge."""

import math

import numpy as np

from integrations.servers import Remote, Server, sampler
from qlass.batching import Candidate, Sample
from qlass.records import as_user_error


class ChatPolicy:
    """A chat model behind a server, which renders the messages: it answers what a `Policy` does.

    sample: free text, whatever a request has as valid. valid_logprobs: log p of each valid text as the reply's first
    token, (A,); -inf where it is not among the 20 likeliest.
    """

    def __init__(self, url: str, max_tokens: int, seed: int = 0, timeout: int = 600) -> None:
        self.server, self.max_tokens = Server(url, 16, timeout), max_tokens
        self.sample, self.valid_logprobs = sampler(self.text, seed), Remote(self.first_token)

    async def text(self, request: Sample, seed: int) -> Candidate:
        options = {"temperature": request.temperature, "max_tokens": self.max_tokens, "seed": seed}
        reply = await self.server.chat(request.state.messages, **options)
        text = reply.choices[0].message.content or ""
        return Candidate(text, reply.usage.completion_tokens or 0, math.nan)

    async def first_token(self, request: Sample) -> np.ndarray:
        options = {"temperature": 1, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        reply = await self.server.chat(request.state.messages, **options)
        logprobs = dict.fromkeys(request.valid, -np.inf)
        with as_user_error(f"{self.server.url}: it tells no log-probabilities"):
            likeliest = reply.choices[0].logprobs["content"][0]["top_logprobs"]
            for token in likeliest:  # of "A" and " A" the likelier one
                text = token["token"].strip()
                if text in logprobs:
                    logprobs[text] = max(logprobs[text], token["logprob"])
        return np.array(list(logprobs.values()))
