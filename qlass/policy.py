"""The agent pi(a | s): a HuggingFace causal LM that answers `Sample` requests, the plain way.

Everything here reads one sequence at a time. `FastPolicy` (qlass/fast/decode.py) gives the same
answers at a fraction of the cost; --plain does without it. A random number depends on (seed, the
request's key, candidate) alone. The key names the task, the branch or trial, and the step. So in
float32 the same seed gives the same files whatever the batch size; in bf16 a batch of another size
rounds in other ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat
from qlass.messages import State, uniforms


def next_logits(
    model: Any, ids: list[int], past: Any = None, start: int = 0
) -> tuple[torch.Tensor, Any]:
    """The logits (1, V) behind tokens that stand at positions from `start` on, and the cache of
    what was read; None, with which the next call reads the whole text, if the model keeps none."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=model.device)}
    if past:
        places = range(start, start + len(ids))
        inputs["position_ids"] = torch.tensor([[*places]], device=model.device)
        inputs["past_key_values"] = past
    out = model(**inputs, use_cache=True)
    return out.logits[:, -1], out.get("past_key_values")


class Policy:
    """pi(a | s): free text, token by token, or a choice among the valid actions of a request."""

    computed = 0  # tokens put through the model so far, padding aside

    def __init__(self, model: Any, chat: Chat, seed: int = 0) -> None:
        self.model = model.eval()
        self.chat = chat
        self.seed = seed

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """a ~ pi(a | s), n times for each request."""
        logprobs = iter(self.valid_logprobs([r for r in requests if r.valid]))
        texts = iter(self.texts([r for r in requests if not r.valid]))

        answers = []
        for request in requests:
            drawn = self.choose(request, next(logprobs)) if request.valid else next(texts)
            self.check([candidate.logprob for candidate in drawn])
            answers.append(drawn)
        return answers

    # ------------------------------------------------------------------------------- free text

    def texts(self, requests: list[Sample]) -> list[list[Candidate]]:
        """n candidates in free text for each request."""
        answers = []
        for request in requests:
            answers.append([self.text(request, k) for k in range(request.n)])
        return answers

    @torch.inference_mode()
    def text(self, request: Sample, k: int) -> Candidate:
        """Candidate k, token by token until its turn ends, each drawn by a random number."""
        device = self.model.device
        noise = uniforms(self.chat.rendering.max_new_tokens, self.seed, *request.key, k)
        temperature = torch.tensor([float(request.temperature)], device=device)
        ids = self.chat.prompt(request.state)
        written: list[int] = []
        logprob = 0.0
        past = None
        for u in torch.from_numpy(noise).to(device).split(1):
            unread = ids[-1:] if past else ids
            start = len(ids) - len(unread)
            logits, past = next_logits(self.model, unread, past, start)
            self.computed += len(unread)
            token, logp = self.draw(logits, temperature, u)
            written.append(int(token))
            logprob += float(logp)
            if self.ended(written):
                break
            ids = [*ids, written[-1]]
        return Candidate(self.chat.text(written), len(written), logprob, tuple(written))

    def draw(self, logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row of a batch.

        logits: (B, V). temperature: (B,); at 0 the likeliest token is taken. noise: (B,), random
        numbers in [0, 1). Returns tokens (B,) and their log-probabilities (B,) at this temperature,
        before top-k and top-p.
        """
        rendering = self.chat.rendering
        temperature = temperature[:, None]
        greedy = temperature == 0
        logp = (logits.float() / torch.where(greedy, 1.0, temperature)).log_softmax(-1)

        p = logp.double().exp()
        if rendering.top_k or rendering.top_p < 1:
            from qlass.optional.truncation import truncated

            p = truncated(p, rendering.top_k, rendering.top_p)
        cumulative = p.cumsum(-1)
        u = noise[:, None] * cumulative[:, -1:]  # what is kept need not sum to 1
        drawn = torch.searchsorted(cumulative, u, right=True)
        drawn = drawn.clamp(max=p.shape[-1] - 1)  # where rounding leads behind the last token

        likeliest = logits.argmax(-1, keepdim=True)
        tokens = torch.where(greedy, likeliest, drawn)  # (B, 1)
        logp_of_tokens = logp.gather(-1, tokens)
        return tokens[:, 0], logp_of_tokens[:, 0].double()

    def ended(self, written: list[int]) -> bool:
        """Whether the turn ends here: by a token that ends it, or by one of the stop texts."""
        if written[-1] in self.chat.stop_ids:
            return True
        stops = self.chat.rendering.stop
        longest = max((len(stop.encode()) for stop in stops), default=1)  # a token may be a byte
        tail = self.chat.tokenizer.decode(written[-2 * longest :])
        return any(stop in tail for stop in stops)

    # ------------------------------------------------------------------- among the valid actions

    def choose(self, request: Sample, logp: np.ndarray) -> list[Candidate]:
        """n of the valid actions, by their log-probabilities (A,)."""
        task = request.state.task
        cumulative = np.exp(logp).cumsum()

        candidates = []
        for k in range(request.n):
            if request.temperature:
                u = uniforms(1, self.seed, *request.key, k)[0]
                pick = np.searchsorted(cumulative, u * cumulative[-1])
            else:
                pick = logp.argmax()
            action = request.valid[pick]
            tokens = self.chat.action(action, task)
            candidates.append(Candidate(action, len(tokens), float(logp[pick])))
        return candidates

    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log pi of each valid action of each request, (A,)."""
        return [self.valid_logprob(r) for r in requests]

    def valid_logprob(self, request: Sample) -> np.ndarray:
        """(A,), of an action's tokens, each among those that continue a valid action there.

        Each action ends with a token that no other place has, so none is the beginning of another.
        """
        prompt = self.chat.prompt(request.state)
        task = request.state.task
        actions = [self.chat.action(action, task, len(prompt)) for action in request.valid]

        totals = np.zeros(len(actions))
        for a, ids in enumerate(actions):
            logits = self.logits(prompt, ids) / (request.temperature or 1.0)
            for i, token in enumerate(ids):
                alike = [other for other in actions if other[:i] == ids[:i]]
                allowed = sorted({other[i] for other in alike})
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
            of_tokens = logp[range(len(ids)), ids]
            sums.append(float(of_tokens.double().sum()))
        return sums

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of each request's actions."""
        pairs = [(r.state, action) for r in requests for action in r.actions]
        logprobs = self.logprobs(pairs)
        self.check(logprobs)
        values = iter(logprobs)
        return [[next(values) for _ in r.actions] for r in requests]

    @torch.inference_mode()
    def logits(self, prompt: list[int], ids: list[int]) -> Tensor:
        """Of each token after the prompt, as predicted before it: (len(ids), V)."""
        tokens = torch.tensor([prompt + ids], device=self.model.device)
        self.computed += tokens.numel()
        logits = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1].float()  # the last one predicts what follows the text

    def check(self, logprobs: list[float]) -> None:
        """UserError for what is not finite: all tokens of such logits are drawn alike."""
        if not np.isfinite(logprobs).all():
            problem = "its log-probabilities are not finite: its weights are damaged, or overflow"
            raise UserError(f"{self.model.name_or_path}: {problem} (try --precision float32)")
