"""The agent pi(a | s): a HuggingFace causal LM that answers `Sample` requests, the plain way.

Everything here reads one sequence at a time. `qlass/fast/` gives the same answers at a fraction of
the cost; it is on by default and off with `plain=True` (--plain). A random number depends on (seed,
task, node, candidate) alone, so the same seed gives the same files whatever the batch size.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat, Rendering
from qlass.cli import warn_of_another_world
from qlass.messages import State, uniforms
from qlass.models import load_chat, load_checkpoint


class Policy:
    """pi(a | s): free text, token by token, or a choice among the valid actions of a request."""

    def __init__(
        self,
        model: Any,
        chat: Chat,
        seed: int = 0,
        plain: bool = False,
        cache_gb: float | None = None,
    ) -> None:
        """cache_gb: room of qlass/fast/ for what it has read."""
        self.model, self.chat, self.seed = model.eval(), chat, seed
        self.plain_tokens = 0
        self.fast = None
        if not plain:
            from qlass.fast.decode import FastPolicy

            self.fast = FastPolicy(self, cache_gb)

    @classmethod
    def load(cls, path: str | Path, seed: int = 0, **options: Any) -> Policy:
        """The agent in a checkpoint; options: of `load_checkpoint`, and cache_gb."""
        cache_gb = options.pop("cache_gb", None)
        model, chat = load_checkpoint(path, AutoModelForCausalLM, **options)
        return cls(model, chat, seed, options.get("plain", False), cache_gb)

    @property
    def computed(self) -> int:
        """Tokens put through the model so far, padding aside."""
        return self.fast.cache.computed if self.fast else self.plain_tokens

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """a ~ pi(a | s), n times for each request."""
        if self.fast:
            answers = self.fast.sample(requests)
        else:
            answers = [
                self.choose(r, self.valid_logprobs(r)) if r.valid else self.write(r)
                for r in requests
            ]
        self.check(candidate.logprob for candidate in itertools.chain(*answers))
        return answers

    @torch.inference_mode()
    def write(self, request: Sample) -> list[Candidate]:
        """n candidates in free text, each token by token until its turn ends."""
        temperature = torch.tensor([float(request.temperature)], device=self.model.device)
        candidates = []
        for k in range(request.n):
            noise = uniforms(self.chat.rendering.max_new_tokens, self.seed, *request.key, k)
            ids, written, logprob = self.chat.prompt(request.state), [], 0.0
            cache: dict[str, Any] = {}
            for u in torch.from_numpy(noise).to(temperature.device).split(1):
                tokens = torch.tensor([ids], device=u.device)
                out = self.model(input_ids=tokens, use_cache=True, **cache)
                self.plain_tokens += len(ids)
                token, logp = self.draw(out.logits[:, -1], temperature, u)
                written.append(int(token))
                logprob += float(logp)
                if self.ended(written):
                    break
                ids = [*ids, written[-1]]
                if past := out.get("past_key_values"):  # a model need not keep what it has read
                    cache, ids = {"past_key_values": past}, written[-1:]
            text = self.chat.text(written)
            candidates.append(Candidate(text, len(written), logprob, tuple(written)))
        return candidates

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of (B, V), at temperature[b] by the random number noise[b].

        Returns tokens (B,) and their log-probabilities (B,), before top-k and top-p.
        """
        heat, rendering = temperature[:, None], self.chat.rendering
        logp = (logits.float() / torch.where(heat > 0, heat, 1.0)).log_softmax(-1)
        p = truncated(logp.double().exp(), rendering.top_k, rendering.top_p)
        cumulative = p.cumsum(-1)
        u = noise[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, u, right=True).clamp(max=p.shape[-1] - 1)
        tokens = torch.where(heat > 0, drawn, logits.argmax(-1, keepdim=True))
        return tokens[:, 0], logp.gather(-1, tokens)[:, 0].double()

    def ended(self, written: list[int]) -> bool:
        """Whether the turn ends here: by a token that ends it, or by one of the stop texts."""
        stops = self.chat.rendering.stop
        longest = max(map(len, stops), default=1)
        tail = self.chat.tokenizer.decode(written[-2 * longest :])  # longer: a letter may be bytes
        return written[-1] in self.chat.stop_ids or any(stop in tail for stop in stops)

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

    def valid_logprobs(self, request: Sample) -> np.ndarray:
        """log pi of each valid action (A,): of its tokens, each among those that continue a valid
        action there."""
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

    def logprobs(self, pairs: list[tuple[State, str]]) -> list[float]:
        """log pi(a | s) of actions as free text."""
        values = self.fast.logprobs(pairs) if self.fast else [self.logprob(*pair) for pair in pairs]
        self.check(values)
        return values

    def logprob(self, state: State, action: str) -> float:
        prompt = self.chat.prompt(state)
        ids = self.chat.action(action, state.task, len(prompt))
        logp = self.logits(prompt, ids).log_softmax(-1)
        return float(logp[range(len(ids)), ids].double().sum())

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        pairs: list[tuple[State, str]] = []
        for r in requests:
            pairs += [(r.state, action) for action in r.actions]
        values = iter(self.logprobs(pairs))
        return [[next(values) for _ in r.actions] for r in requests]

    @torch.inference_mode()
    def logits(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """Of each token after the prompt, as predicted before it: (len(ids), V)."""
        tokens = torch.tensor([prompt + ids], device=self.model.device)
        self.plain_tokens += tokens.numel()
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


# ---------------------------------------------------------------------- the agent that flags name

PROMPTED = ("max_new_tokens", "truncate")  # what a prompt depends on, for agent and QNet alike
RENDERED = ("temperature", "top_p", "top_k", "stop", "think", *PROMPTED)  # all that has a flag


def rendering_of(
    folder: Path, args: argparse.Namespace, names: Sequence[str] = RENDERED
) -> Rendering:
    """A checkpoint's rendering, but for what the flags of these names say."""
    flags = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in flags.items() if value is not None}
    return dataclasses.replace(Rendering.load(folder), **given)


def begin_as_cloned(env: Any, rendering: Rendering, args: argparse.Namespace) -> None:
    """Let the environment begin with the messages that the agent was cloned with.

    An option `instruction` of the environment overrides its part.
    """
    env.system = env.system if rendering.system is None else rendering.system
    env.agreement = rendering.agreement or env.agreement
    if rendering.instruction in (None, env.instruction):
        return
    if any(option.startswith("instruction=") for option in args.env_option):
        problem = "was cloned with another instruction than --env-option names"
        print(f"warning: {args.sft} {problem}", file=sys.stderr)
    else:
        env.instruct(rendering.instruction)


def load_agent(args: argparse.Namespace, env: Any = None) -> Any:
    """The agent that the flags describe, which is to play `env`; with --server only its tokenizer
    is here."""
    from qlass.server import ServerPolicy

    options = loading(args.sft, args)
    warn_of_another_world(args.sft, args)
    if env:
        begin_as_cloned(env, options["rendering"], args)
    if args.server:
        chat = load_chat(args.sft, options["rendering"])
        return ServerPolicy(args.server, chat, args.seed, args.in_flight or 64)
    return Policy.load(args.sft, args.seed, cache_gb=args.cache_gb, **options)


def loading(
    folder: Path, args: argparse.Namespace, names: Sequence[str] = RENDERED
) -> dict[str, Any]:
    """What `Policy.load` and `QNet.from_pretrained` take of the flags; names: `rendering_of`."""
    options = {name: getattr(args, name) for name in ("device", "load_in", "plain", "precision")}
    return options | {"rendering": rendering_of(folder, args, names)}
