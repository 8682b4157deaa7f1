"""The agent pi(a | s): a HuggingFace causal LM that answers `Sample` requests, the plain way.

Everything here reads one sequence at a time. `FastPolicy` (qlass/fast/decode.py) gives the same
answers at a fraction of the cost; --plain does without it. A random number depends on (seed, task,
node, candidate) alone, so the same seed gives the same files whatever the batch size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat
from qlass.messages import State, uniforms


class Policy:
    """pi(a | s): free text, token by token, or a choice among the valid actions of a request."""

    computed = 0  # tokens put through the model so far, padding aside

    def __init__(self, model: Any, chat: Chat, seed: int = 0) -> None:
        self.model, self.chat, self.seed = model.eval(), chat, seed

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """a ~ pi(a | s), n times for each request."""
        logprobs = iter(self.valid_logprobs([r for r in requests if r.valid]))
        written = iter(self.texts([r for r in requests if not r.valid]))
        answers = [self.choose(r, next(logprobs)) if r.valid else next(written) for r in requests]
        self.check(candidate.logprob for candidate in itertools.chain(*answers))
        return answers

    # ------------------------------------------------------------------------------- free text

    def texts(self, requests: list[Sample]) -> list[list[Candidate]]:
        """n candidates in free text for each request."""
        return [[self.text(r, k) for k in range(r.n)] for r in requests]

    @torch.inference_mode()
    def text(self, request: Sample, k: int) -> Candidate:
        """Candidate k, token by token until its turn ends, each drawn by a random number."""
        device = self.model.device
        noise = uniforms(self.chat.rendering.max_new_tokens, self.seed, *request.key, k)
        temperature = torch.tensor([float(request.temperature)], device=device)
        ids, written, logprob = self.chat.prompt(request.state), [], 0.0
        cache: dict[str, Any] = {}
        for u in torch.from_numpy(noise).to(device).split(1):
            out = self.model(input_ids=torch.tensor([ids], device=device), use_cache=True, **cache)
            self.computed += len(ids)
            token, logp = self.draw(out.logits[:, -1], temperature, u)
            written.append(int(token))
            logprob += float(logp)
            if self.ended(written):
                break
            ids = [*ids, written[-1]]
            if past := out.get("past_key_values"):  # a model need not keep what it has read
                cache, ids = {"past_key_values": past}, written[-1:]
        return Candidate(self.chat.text(written), len(written), logprob, tuple(written))

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of (B, V), at temperature[b] by the random number noise[b].

        Returns tokens (B,) and their log-probabilities (B,), before top-k and top-p.
        """
        rendering, temperature = self.chat.rendering, temperature[:, None]
        logp = (logits.float() / torch.where(temperature > 0, temperature, 1.0)).log_softmax(-1)
        p = truncated(logp.double().exp(), rendering.top_k, rendering.top_p)
        cumulative = p.cumsum(-1)
        u = noise[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, u, right=True).clamp(max=p.shape[-1] - 1)
        tokens = torch.where(temperature > 0, drawn, logits.argmax(-1, keepdim=True))
        return tokens[:, 0], logp.gather(-1, tokens)[:, 0].double()

    def ended(self, written: list[int]) -> bool:
        """Whether the turn ends here: by a token that ends it, or by one of the stop texts."""
        stops = self.chat.rendering.stop
        longest = max(map(len, stops), default=1)
        tail = self.chat.tokenizer.decode(written[-2 * longest :])  # longer: a letter may be bytes
        return written[-1] in self.chat.stop_ids or any(stop in tail for stop in stops)

    # ------------------------------------------------------------------- among the valid actions

    def choose(self, request: Sample, logp: np.ndarray) -> list[Candidate]:
        """n of the valid actions, by their log-probabilities (A,)."""
        cumulative = np.exp(logp).cumsum()
        candidates = []
        for k in range(request.n):
            u = uniforms(1, self.seed, *request.key, k)[0] * cumulative[-1]
            pick = np.searchsorted(cumulative, u) if request.temperature else logp.argmax()
            action = request.valid[pick]
            n = len(self.chat.action(action, request.state.task))
            candidates.append(Candidate(action, n, float(logp[pick])))
        return candidates

    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log pi of each valid action of each request, (A,)."""
        return [self.valid_logprob(r) for r in requests]

    def valid_logprob(self, request: Sample) -> np.ndarray:
        """(A,), of an action's tokens, each among those that continue a valid action there."""
        prompt, task = self.chat.prompt(request.state), request.state.task
        actions = [self.chat.action(action, task, len(prompt)) for action in request.valid]
        totals = np.zeros(len(actions))
        for a, ids in enumerate(actions):
            logits = self.logits(prompt, ids) / (request.temperature or 1.0)
            for i, token in enumerate(ids):
                rivals = [other for other in actions if other[:i] == ids[:i] and len(other) > i]
                allowed = sorted({other[i] for other in rivals})
                logp = logits[i, allowed].double().log_softmax(-1)
                totals[a] += float(logp[allowed.index(token)])
        return totals

    # --------------------------------------------------------------------- of texts that are given

    def logprobs(self, pairs: list[tuple[State, str]]) -> list[float]:
        """log pi(a | s) of actions as free text."""
        sums = []
        for state, action in pairs:
            prompt = self.chat.prompt(state)
            ids = self.chat.action(action, state.task, len(prompt))
            logp = self.logits(prompt, ids).log_softmax(-1)
            sums.append(float(logp[range(len(ids)), ids].double().sum()))
        return sums

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        logprobs = self.logprobs([(r.state, action) for r in requests for action in r.actions])
        self.check(logprobs)
        values = iter(logprobs)
        return [[next(values) for _ in r.actions] for r in requests]

    @torch.inference_mode()
    def logits(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """Of each token after the prompt, as predicted before it: (len(ids), V)."""
        tokens = torch.tensor([prompt + ids], device=self.model.device)
        self.computed += tokens.numel()
        return self.model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()

    def check(self, logprobs: Iterable[float]) -> None:
        """UserError for what is not finite: all tokens of such logits are drawn alike."""
        if not all(map(math.isfinite, logprobs)):
            problem = "its log-probabilities are not finite: its weights are damaged, or overflow"
            raise UserError(f"{self.model.name_or_path}: {problem} (try --precision float32)")


def truncated(p: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Probabilities (B, V), 0 for all but the k likeliest, and of these for all but the fewest that
    hold top_p."""
    if not top_k and top_p >= 1:
        return p
    values, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k:
        values[:, top_k:] = 0
    keep = values.cumsum(-1) - values < top_p * values.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, values * keep)
