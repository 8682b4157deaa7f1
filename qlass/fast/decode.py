"""What `policy.Policy` answers, in batches, each token computed once.

Among the valid actions the trie of their texts goes through the model in one pass behind the prompt, which gives every
conditional probability that decoding among them would meet. In free text a prompt is read once, its n candidates share
its keys and values, and finished sequences leave the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from qlass.batching import Candidate, Sample
from qlass.chat import Chat
from qlass.fast.cache import Lists, Prompt, PromptCache, Reading, Row, batch_for, room_for, tokens_of, unread
from qlass.fast.token_tree import additive_masks, batches, tree_inputs, windows_of
from qlass.fast.tries import Trie
from qlass.messages import State, uniforms
from qlass.policy import Policy


class RoomyLayer(DynamicLayer):
    """A layer's keys and values with room behind them, into which new ones are written.

    DynamicLayer puts all of them together anew at each step, which takes most of the time of decoding. What replaces
    `keys` by a copy (batch_select_indices) leaves it without room: the next step makes new room.
    """

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors are (B, heads, tokens, head dim); returns all keys and values."""
        self.keys, self.values = self.append("keys", keys), self.append("values", values)
        return self.keys, self.values

    def append(self, name: str, new: torch.Tensor) -> torch.Tensor:
        old, rooms = getattr(self, name), self.__dict__.setdefault("rooms", {})
        start, end = old.shape[-2], old.shape[-2] + new.shape[-2]
        room = rooms.get(name)
        if room is None or room.data_ptr() != old.data_ptr() or end > room.shape[-2]:
            room = rooms[name] = new.new_empty((*new.shape[:-2], end + max(64, end // 4), new.shape[-1]))
            room[..., :start, :] = old
        room[..., start:end, :] = new
        return room[..., :end, :]


class FastPolicy(Policy):
    """The same candidates as `Policy` and the same log-probabilities."""

    def __init__(self, model: Any, chat: Chat, seed: int = 0, cache_gb: float | None = None) -> None:
        super().__init__(model, chat, seed)
        self.budget = batch_for(self.model)
        self.cache = PromptCache(room_for(self.model, cache_gb))
        self.memory: dict[tuple, np.ndarray] = {}  # log-probabilities of valid actions in states already seen
        self.written: dict[tuple[State, str], float] = {}  # log-probabilities of texts

    @property
    def computed(self) -> int:
        return self.cache.computed

    def read(self, states: Lists, tails: Lists) -> Iterator[Reading]:
        """`PromptCache.read` of the model's logits."""

        def logits(inputs: dict, columns: torch.Tensor) -> torch.Tensor:  # (B, len(columns), V)
            return self.model(**inputs, logits_to_keep=columns).logits.float()

        most = min(self.budget, 16_384)  # each with a number for every token of the vocabulary
        return self.cache.read(logits, self.model, most, states, tails)

    @torch.inference_mode()
    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log pi of each request's valid actions, (A,) each.

        Where the trie of their texts has one way to go, that way has probability 1: only tokens above a branching are
        computed.
        """
        if len(self.memory) > 200_000:
            self.memory.clear()
        keys = [(r.state, r.valid, r.temperature) for r in requests]
        fresh: list[tuple[tuple, Trie, list[list[int]]]] = []
        for key in dict.fromkeys(key for key in keys if key not in self.memory):
            state, valid, _ = key
            prompt, texts = tokens_of(self.chat, state, valid)
            trie = Trie(texts)
            if trie.branches:
                fresh.append((key, trie, prompt))
            else:  # a single valid action
                self.memory[key] = np.zeros(len(valid))
        for n, out, last, paths in self.read([prompt for *_, prompt in fresh], [trie.tails for _, trie, _ in fresh]):
            key, trie, _ = fresh[n]
            rows = [paths[a][t - 1] if t else last for a, t, _ in trie.branches]
            tokens = [token for *_, token in trie.branches]
            scores = out[rows, tokens].cpu().numpy()
            self.memory[key] = trie.logprobs(scores / (key[-1] or 1.0))
        return [self.memory[key] for key in keys]

    @torch.inference_mode()
    def logprobs(self, pairs: list[tuple[State, str]]) -> list[float]:
        """log pi(a | s) of actions as free text, each token of what they share computed once."""
        if len(self.written) > 200_000:
            self.written.clear()
        for pair, ids, out, places in unread(self.chat, pairs, self.written, self.read):
            logp = out[places[:-1]].log_softmax(-1)
            value = logp.gather(-1, torch.tensor(ids, device=out.device)[:, None]).double().sum()
            self.written[pair] = float(value)
        return [self.written[pair] for pair in pairs]

    def texts(self, requests: list[Sample]) -> list[list[Candidate]]:
        answers: dict[int, list[Candidate]] = {}
        self.cache.round += 1
        prompts = [self.cache.prompt(self.chat.prompt_tokens(r.state)) for r in requests]
        room = self.chat.rendering.max_new_tokens
        items = list(zip(prompts, requests, strict=True))
        for group in batches(items, lambda item: len(item[0].ids) + room, self.budget, lambda item: item[1].n):
            drawn = self.decode([prompts[i] for i in group], [requests[i] for i in group])
            answers |= zip(group, drawn, strict=True)
        return [answers[i] for i in range(len(requests))]

    @torch.inference_mode()
    def decode(self, prompts: list[Prompt], requests: list[Sample]) -> list[list[Candidate]]:
        device, room = self.model.device, self.chat.rendering.max_new_tokens
        owner = np.repeat(np.arange(len(requests)), [r.n for r in requests])
        noise = np.stack([uniforms(room, self.seed, *r.key, k) for r in requests for k in range(r.n)])
        noise = torch.from_numpy(noise).to(device)
        heat = torch.tensor([float(requests[i].temperature) for i in owner], device=device)
        cache, seen, logits = self.prefill(prompts)
        each = torch.from_numpy(owner).to(device)  # from here on a row is a candidate
        cache.batch_select_indices(each)
        for layer in cache.layers:
            if type(layer) is DynamicLayer:  # layers with windows keep their own ways
                layer.__class__ = RoomyLayer
        seen, logits = seen[each], logits[each]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        windows = windows_of(self.model.config)

        written: list[list[int]] = [[] for _ in owner]
        total = torch.zeros(len(owner), dtype=torch.float64, device=device)  # log-probabilities
        alive = np.arange(len(owner))  # which candidate each row of the batch is
        for step in range(room):
            at = torch.from_numpy(alive).to(device)
            tokens, logp = self.draw(logits, heat[at], noise[at, step])
            total[at] += logp
            for row, token in zip(alive, tokens.tolist(), strict=True):  # the one wait for the device in a step
                written[row].append(token)
            going = [i for i, row in enumerate(alive) if not self.ended(written[row])]
            if not going or step == room - 1:
                break
            if len(going) < len(alive):
                alive = alive[going]
                rows = torch.tensor(going, device=device)
                cache.batch_select_indices(rows)
                seen, positions, tokens = seen[rows], positions[rows], tokens[rows]
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], -1)
            positions = torch.cat([positions, positions[:, -1:] + 1], -1)
            masks = additive_masks(seen[:, None], positions[:, -1:], positions, windows, self.model.dtype)
            self.cache.computed += len(alive)
            inputs = {"input_ids": tokens[:, None], "attention_mask": masks, "position_ids": positions[:, -1:]}
            logits = self.model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]

        answers: list[list[Candidate]] = [[] for _ in requests]
        for i, ids, logprob in zip(owner, written, total.tolist(), strict=True):
            answers[i].append(Candidate(self.chat.text(ids), len(ids), logprob, tuple(ids)))
        return answers

    def prefill(self, prompts: list[Prompt]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Read prompts: their cache, which of its columns hold a token (B, T), the logits of the last one (B, V)."""
        rows = [Row(prompt.past, prompt.cached) for prompt in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.add(prompt)
        cache = self.cache.batch(rows)
        before, width = max(r.cached for r in rows), max(len(r.tree) for r in rows)
        inputs = tree_inputs(self.model, [r.tree for r in rows], [r.cached for r in rows])
        out = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.cache.computed += sum(len(r.tree) for r in rows)
        seen = torch.zeros((len(rows), before + width), dtype=torch.bool)
        for at, row in enumerate(rows):
            start = before + width - len(row.tree)
            self.cache.remember(row, cache, at, start)
            seen[at, before - row.cached : before] = True
            seen[at, start:] = True
        return cache, seen.to(self.model.device), out.logits[:, -1]
