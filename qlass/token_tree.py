"""Every token once: token trees, which store what sequences share, and the keys and values of prompts seen before.

    TokenTree, packed     many sequences with common beginnings as one row of a batch, under a tree attention mask
    Prompts               a causal model that remembers the keys and values of the states that it has read

A causal LM computes for each token of a tree what it would in that token's own sequence (equal within 1e-6 in float32),
since positions are depths and the mask lets a token see its ancestors alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache


class TokenTree:
    """A trie of token sequences: what two sequences begin with in common is stored, and computed, once.

    >>> t = TokenTree(); t.add([5, 6, 7]), t.add([5, 6, 8]); t.ids
    [5, 6, 7, 8]
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], after: int = -1) -> list[int]:
        """Insert a sequence below the token `after` (-1: from the root); the index of each of its tokens."""
        path = []
        for token in ids:
            at = self._child.get((after, token))
            if at is None:
                at = self._child[after, token] = len(self.ids)
                self.ids.append(token)
                self.parent.append(after)
                self.depth.append(self.depth[after] + 1 if after >= 0 else 0)
            path.append(after := at)
        return path

    def growth(self, ids: Sequence[int]) -> int:
        """How many tokens `add` would have to store for this sequence."""
        after = -1
        for i, token in enumerate(ids):
            after = self._child.get((after, token), -2)
            if after == -2:
                return len(ids) - i
        return 0

    def frozen(self) -> TokenTree:
        """A copy that can be read and no longer added to, at 12 bytes a token."""
        tree = TokenTree()
        tree.ids, tree.parent, tree.depth = (np.array(x, np.int32) for x in (self.ids, self.parent, self.depth))
        return tree

    def above(self, token: int) -> list[int]:
        """The token and its ancestors, upwards."""
        path = []
        while token >= 0:
            path.append(token)
            token = int(self.parent[token])
        return path

    def attention(self) -> np.ndarray:
        """(L, L) bool: a token sees itself and its ancestors, as it would in its own sequence."""
        sees = np.eye(len(self), dtype=bool)
        for i, p in enumerate(self.parent):
            if p >= 0:
                sees[i] |= sees[p]
        return sees


def packed(
    trees: Sequence[TokenTree], pad_id: int, device: Any, dtype: torch.dtype, past: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """Model inputs of B token trees, padded on the left to L: ids and positions (B, L), additive mask (B, 1, L, P + L).

    `past[i]` tokens stand before tree i in a cache of width P = max(past), padded on the left too.
    """
    past = past or [0] * len(trees)
    width, before = max(map(len, trees)), max(past)
    ids = torch.full((len(trees), width), pad_id)
    positions = torch.zeros((len(trees), width), dtype=torch.long)
    sees = torch.zeros((len(trees), 1, width, before + width), dtype=torch.bool)
    sees[:, 0, :, before:].diagonal(dim1=-2, dim2=-1).fill_(True)  # padding sees itself, or softmax would be 0/0
    for row, (tree, known) in enumerate(zip(trees, past, strict=True)):
        at = width - len(tree)
        ids[row, at:] = torch.tensor(tree.ids)
        positions[row, at:] = torch.tensor(tree.depth) + known
        sees[row, 0, at:, before - known : before] = True
        sees[row, 0, at:, before + at :] = torch.from_numpy(tree.attention())
    bias = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
    return {"input_ids": ids.to(device), "position_ids": positions.to(device), "attention_mask": bias.to(device)}


def batches(items: Sequence[Any], length: Callable[[Any], int], budget: int) -> Iterator[list[int]]:
    """Indices of items of like length, in groups whose padded size stays within `budget` tokens (or of one item)."""
    group: list[int] = []
    for i in sorted(range(len(items)), key=lambda i: -length(items[i])):
        if group and length(items[group[0]]) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# ------------------------------------------------------------------------------------------------ prompts seen before


@dataclasses.dataclass
class Prompt:
    """A prompt's tokens; keys and values of its first `known` ones are in `past`, its last turn is always fresh."""

    ids: list[int]
    turns: list[tuple[bytes, int, int]]  # (name of the prefix that it completes, start, end) of the fresh turns
    past: list[torch.Tensor]  # of the known turns: (layers, 2, heads, tokens, head dim) each

    @property
    def known(self) -> int:
        return self.turns[0][1]

    @property
    def fresh(self) -> list[int]:
        return self.ids[self.known :]


class Prompts:
    """Keys and values of the states read before, an entry a turn (an action and its observation), oldest out first.

    A state's prompt begins with its parent's, so a step of an episode costs its last turn and the candidates, and
    the siblings in a tree share all that came before them.
    """

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.used = room, 0  # bytes
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def prompt(self, runs: Sequence[Sequence[int]]) -> Prompt:
        """The prompt of a state, from the tokens of each of its messages (user and assistant in turns)."""
        ids: list[int] = []
        turns: list[tuple[bytes, int, int]] = []
        name, start, past = b"", 0, []
        for i, run in enumerate(runs):
            ids += run
            if (len(runs) - i) % 2:  # a user's message: here a turn ends
                content = np.array(ids[start:], np.int64).tobytes()
                name = hashlib.blake2b(name + content, digest_size=16).digest()
                if not turns and i < len(runs) - 1 and name in self._entries:
                    self._entries.move_to_end(name)
                    past.append(self._entries[name])
                else:
                    turns.append((name, start, len(ids)))
                start = len(ids)
        return Prompt(ids, turns, past)

    def cache(self, prompts: Sequence[Prompt]) -> DynamicCache:
        """A batch's cache with what is known of each prompt, aligned on the right."""
        width = max(p.known for p in prompts)
        if not width:
            return DynamicCache()
        like = next(p.past[0] for p in prompts if p.past)
        layers, two, heads, _, dim = like.shape
        joined = like.new_zeros(layers, two, len(prompts), heads, width, dim)
        for row, p in enumerate(prompts):
            if p.past:
                joined[:, :, row, :, width - p.known :] = torch.cat(p.past, dim=-2)
        return DynamicCache([(layer[0], layer[1]) for layer in joined])

    def remember(self, prompt: Prompt, cache: DynamicCache, row: int, at: int) -> None:
        """Keep the keys and values that a forward pass left for the fresh tokens, from column `at` of the cache on."""
        for name, start, end in prompt.turns:
            if name not in self._entries:
                columns = slice(at + start - prompt.known, at + end - prompt.known)
                entry = torch.stack([torch.stack([k[row, :, columns], v[row, :, columns]]) for k, v, _ in cache])
                self._entries[name] = entry
                self.used += entry.nbytes
        while self.used > self.room:
            self.used -= self._entries.popitem(last=False)[1].nbytes

    def read(
        self, forward: Callable[..., torch.Tensor], model: Any, pad_id: int, budget: int,
        states: Sequence[Sequence[Sequence[int]]], tails: Sequence[Sequence[Sequence[int]]],
    ) -> Iterator[tuple[int, torch.Tensor, TokenTree, int, list[list[int]]]]:  # fmt: skip
        """Put the trie of each state's tails (candidate actions) through the model behind the state's prompt.

        forward(inputs, keep) gives the outputs (B, keep, ...) of the last `keep` tokens. Yields, in any order,
        (index of the state, outputs from the prompt's last token on, trie, index of that token, paths of the tails).
        """
        items = []
        for runs, texts in zip(states, tails, strict=True):
            prompt, tree = self.prompt(runs), TokenTree()
            last = tree.add(prompt.fresh)[-1]
            items.append((prompt, tree, last, [tree.add(ids, last) for ids in texts]))
        for group in batches(items, lambda item: len(item[1]) + item[0].known, budget):
            prompts, trees = [items[i][0] for i in group], [items[i][1] for i in group]
            cache = self.cache(prompts)
            before, width = max(p.known for p in prompts), max(map(len, trees))
            keep = max(len(items[i][1]) - items[i][2] for i in group)
            inputs = packed(trees, pad_id, model.device, model.dtype, [p.known for p in prompts])
            outputs = forward({**inputs, "past_key_values": cache, "use_cache": True}, keep)
            for row, i in enumerate(group):
                prompt, tree, last, paths = items[i]
                self.remember(prompt, cache, row, before + width - len(tree))
                yield i, outputs[row, keep - (len(tree) - last) :], tree, last, paths
