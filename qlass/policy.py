"""The agent pi(a | s): a HuggingFace causal LM that answers `Sample` requests, the plain way.

Everything here reads one sequence at a time. `FastPolicy` (qlass/fast/decode.py) gives the same
answers at a fraction of the cost; --plain does without it. A random number depends on (seed, the
request's key, candidate) alone. The key names the task, the branch or trial, and the step. So in
float32 the same seed gives the same draws whatever the batch size; in bf16 a batch of another size
rounds in other ways.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat
from qlass.files import warn
from qlass.messages import State, react
from qlass.noise import uniforms

# One question for every checkpoint. The answer tells whether files or a server have its weights.
TASK = "put a clean cup into the drawer 4."
PAGE = "You are in the middle of a kitchen. Around you are a sink 1 and a table 2. Your task: "
QUESTION = LogProb(
    State(
        messages=(
            ("user", "Walk through a house."),
            ("assistant", "OK"),
            ("user", PAGE + TASK),
        ),
        task=TASK,
    ),
    actions=(
        react("The cup may lie on the table.", "go to table 2"),
        react("", "go to sink 1"),
    ),
)


class Policy:
    """pi(a | s): free text, token by token, or a choice among the valid actions of a request."""

    def __init__(self, model: Any, chat: Chat, seed: int = 0) -> None:
        self.model, self.chat, self.seed = model, chat, seed

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """a ~ pi(a | s), n times for each request; `FastPolicy` batches those of a kind."""
        logprobs = iter(self.valid_logprobs([r for r in requests if r.valid]))
        free = [r for r in requests if not r.valid]
        texts = iter(self.texts(free) if free else ())
        return [self.choose(r, next(logprobs)) if r.valid else next(texts) for r in requests]

    # ------------------------------------------------------------------------------- free text

    def texts(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Free text, n times for each request."""
        return [[self.text(request, k) for k in range(request.n)] for request in requests]

    @torch.inference_mode()
    def text(self, request: Sample, k: int) -> Candidate:
        """Candidate k, token by token until its turn ends, each drawn by a random number."""
        limit, device = self.chat.rendering.max_new_tokens, self.model.device
        noise = torch.from_numpy(uniforms(limit, self.seed, *request.key, k)).to(device)
        temperature = torch.tensor([float(request.temperature)], device=device)
        logprobs: list[float] = []

        def draw_next(read: Tensor, logits: Tensor) -> Tensor:
            """Leave no token possible but the one that the text's own noise draws."""
            token, logp = self.draw(logits, temperature, noise[len(logprobs), None])
            logprobs.append(float(logp))
            return torch.full_like(logits, -torch.inf).index_fill(1, token, 0.0)

        prompt = self.chat.prompt(request.state)
        inputs = torch.tensor([prompt], device=device)

        def at_end(read: Tensor, scores: Any) -> Tensor:
            """True for the row of a batch of one if its turn ends."""
            return torch.tensor([self.chat.ended(read[0, len(prompt) :].tolist())], device=device)

        (tokens,) = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),  # else what pads is not read
            max_new_tokens=limit,
            logits_processor=[draw_next],
            stopping_criteria=[at_end],
            do_sample=False,
        )
        ids = tokens[len(prompt) :].tolist()
        return self.candidate(ids, sum(logprobs))

    def candidate(self, ids: list[int], logprob: float) -> Candidate:
        """A text that the model wrote. One that was cut, as a long thought is, gets a warning."""
        if not self.chat.ended(ids):
            warn(f"an action is cut at --max-new-tokens {self.chat.rendering.max_new_tokens}")
        return Candidate(self.chat.text(ids), len(ids), logprob, tuple(ids))

    def draw(self, logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row of a batch.

        logits: (B, V). temperature: (B,); at 0 the likeliest token is taken. noise: (B,), random
        numbers in [0, 1). Returns tokens (B,) and their log-probabilities (B,) at this temperature,
        at 1 where it is 0.
        """
        greedy = (temperature == 0)[:, None]
        divisor = torch.where(greedy, 1.0, temperature[:, None])
        logp = (logits.float() / divisor).log_softmax(-1)
        cumulative = logp.double().exp().cumsum(-1)
        u = noise[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, u, right=True)  # (B, 1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # rounding may lead beyond the last token
        likeliest = logits.argmax(-1, keepdim=True)
        tokens = torch.where(greedy, likeliest, tokens)
        return tokens[:, 0], self.finite(logp.gather(-1, tokens)[:, 0].double())

    def finite(self, logprobs: Any) -> Any:
        """The same numbers, a tensor or an array. UserError for one that is not finite."""
        if not torch.as_tensor(logprobs).isfinite().all():
            raise UserError(f"{self.model.name_or_path}: its log-probabilities are not finite")
        return logprobs

    # ------------------------------------------------------------------- among the valid actions

    def choose(self, request: Sample, logp: np.ndarray) -> list[Candidate]:
        """n of the valid actions, by their log-probabilities (A,)."""
        cumulative = np.exp(logp).cumsum()
        candidates = []
        for k in range(request.n):
            pick = logp.argmax()
            if request.temperature:
                (u,) = uniforms(1, self.seed, *request.key, k)
                pick = np.searchsorted(cumulative, u * cumulative[-1])
            action = request.valid[pick]
            tokens = len(self.chat.action_tokens(action, request.state.task))
            candidates.append(Candidate(action, tokens, float(logp[pick])))
        return candidates

    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log pi of each valid action of each request, (A,)."""
        return [self.valid_logprob(r) for r in requests]

    def valid_logprob(self, request: Sample) -> np.ndarray:
        """(A,): the sum over an action's tokens, each among those that continue a valid action.

        Each action ends with the token that ends the turn, so none is the beginning of another.
        """
        prompt = self.chat.prompt(request.state)
        task = request.state.task
        actions = [self.chat.action_tokens(action, task, len(prompt)) for action in request.valid]

        totals = np.zeros(len(actions))
        for a, ids in enumerate(actions):
            logits = self.logits(prompt, ids) / (request.temperature or 1.0)
            for i, token in enumerate(ids):
                allowed = sorted({other[i] for other in actions if other[:i] == ids[:i]})
                logp = logits[i, allowed].double().log_softmax(-1)
                totals[a] += float(logp[allowed.index(token)])
        return self.finite(totals)

    # --------------------------------------------------------------------- of texts that are given

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of each request's actions as free text, in nats."""
        return [[self.likelihood(r.state, action) for action in r.actions] for r in requests]

    def fingerprint(self) -> list[float]:
        """log pi of the actions of the fixed question."""
        return self.likelihoods([QUESTION])[0]

    def likelihood(self, state: State, action: str) -> float:
        """log pi(a | s) of one action.

        It is the sum of its tokens'. The end of the turn is one of these.
        """
        prompt = self.chat.prompt(state)
        ids = self.chat.action_tokens(action, state.task, len(prompt))
        logp = self.logits(prompt, ids).log_softmax(-1)
        of_tokens = logp[range(len(ids)), ids]  # (len(ids),)
        return float(self.finite(of_tokens.double().sum()))

    @torch.inference_mode()
    def logits(self, prompt: list[int], ids: list[int]) -> Tensor:
        """The logits of each token after the prompt, as predicted before it: (len(ids), V)."""
        tokens = torch.tensor([prompt + ids], device=self.model.device)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1].float()  # the last one predicts what follows the text
