"""What `experiments.bench` compares with: the same work in its simplest form, one sequence and one pair at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import envs
from qlass.chat import Chat, uniforms
from qlass.driver import Candidate, Sample
from qlass.fast.tries import Trie
from qlass.qnet import Pair, QNet, pair_loss


class Replayed:
    """An environment without snapshots: a state is its task and the actions so far, reached by playing them."""

    def __init__(self, env: envs.TextEnv) -> None:
        self.env, self.here = env, ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, options: dict) -> tuple[str, dict]:
        self.here = (options["task_id"],)
        return self.env.reset(options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.here += (action,)
        return self.env.step(action)

    def snapshot(self) -> tuple[str, ...]:
        return self.here

    def restore(self, snapshot: tuple[str, ...]) -> None:
        if snapshot != self.here:
            self.reset({"task_id": snapshot[0]})
            for action in snapshot[1:]:
                self.step(action)


class OneByOne:
    """`policy.Policy` in its simplest form: every sequence by itself, prompt and all."""

    def __init__(self, model: Any, chat: Chat, seed: int = 0) -> None:
        self.model, self.chat, self.seed = model.eval(), chat, seed

    @torch.inference_mode()
    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        choose = self.choose if requests[0].valid else self.write
        return [[choose(r, prompt, (*r.key, k)) for k in range(r.n)] for r in requests
                for prompt in [self.chat.prompt(r.state)]]  # fmt: skip

    def write(self, r: Sample, prompt: list[int], key: tuple) -> Candidate:
        """Token by token, as `generate` does."""
        noise = uniforms(self.chat.rendering.max_new_tokens, self.seed, *key)
        fresh, past, written, total = prompt, None, [], 0.0
        for u in noise:
            out = self.model(input_ids=torch.tensor([fresh]), past_key_values=past, use_cache=True, logits_to_keep=1)
            logp = torch.log_softmax(out.logits[0, -1] / r.temperature, -1)
            cumulative = logp.double().exp().cumsum(-1)
            token = min(int(torch.searchsorted(cumulative, u * cumulative[-1])), len(logp) - 1)
            written.append(token)
            total += float(logp[token])
            if token == self.chat.stop_id:
                break
            fresh, past = [token], out.past_key_values
        return Candidate(self.chat.text(written), len(written), total, tuple(written))

    def choose(self, r: Sample, prompt: list[int], key: tuple) -> Candidate:
        """Each valid action gets its probability: of its tokens, among those that continue a valid action."""
        texts = [self.chat.action(a, r.state.task) for a in r.valid]
        logp = []
        for text in texts:
            logits = self.model(input_ids=torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            logp.append(0.0)
            for i, token in enumerate(text):
                allowed = sorted({t[i] for t in texts if t[:i] == text[:i]})
                logp[-1] += float(torch.log_softmax(logits[i, allowed] / r.temperature, -1)[allowed.index(token)])
        cumulative = np.cumsum(np.exp(logp))
        u = uniforms(1, self.seed, *key)[0] * cumulative[-1]
        pick = min(int(np.searchsorted(cumulative, u)), len(logp) - 1)
        return Candidate(r.valid[pick], len(texts[pick]), logp[pick])


class WholeTrie(Trie):
    """Valid actions to their ends, also where only one way is left."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(texts)
        self.tails = texts


def one_pair_at_a_time(net: QNet, pairs: list[Pair]) -> tuple[float, int]:
    """The loss of these pairs, with its gradient left in the parameters, and the tokens that went through the net."""
    total, tokens = 0.0, 0
    for pair in pairs:
        loss = pair_loss(net, pair)
        loss.backward()
        total += loss.item()
        tokens += len(net.chat.prompt(pair.state)) + len(net.chat.action(pair.action, pair.state.task))
    return total, tokens
