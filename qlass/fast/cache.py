"""Keys and values of the states read before, so that every token of a tree goes through a model once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from qlass.chat import Chat
from qlass.fast.token_tree import TokenTree, batches, tree_inputs
from qlass.messages import State

Forward = Callable[[dict, torch.Tensor], Any]  # (a model's inputs, columns) to outputs (B, len(columns), ...)
Pair = tuple[State, str]  # (s, a)
Lists = Sequence[Sequence[Sequence[int]]]  # of each state lists of tokens: its messages', or those of its tails
# (index of a state, its row's outputs, where among them the prompt's last token is, and where each tail's tokens are)
Reading = tuple[int, Any, int, list[list[int]]]


@dataclasses.dataclass
class Turn:
    """An action and its observation, or the messages before the first action: the unit of the cache."""

    name: bytes  # of the prefix that ends with it
    parent: bytes
    start: int
    end: int


@dataclasses.dataclass
class Prompt:
    """A prompt's tokens; keys and values of its first `cached` ones are in `past`, its last turn is always fresh."""

    ids: list[int]
    turns: list[Turn]
    past: list[torch.Tensor]  # of the cached turns: (tokens, features of all layers) each

    @property
    def cached(self) -> int:
        return sum(map(len, self.past))

    @property
    def fresh(self) -> list[int]:
        return self.ids[self.cached :]

    @property
    def family(self) -> tuple[int, bytes]:
        """Prompts of one family have the same cached tokens, and can stand in one token tree."""
        return len(self.past), self.turns[len(self.past)].parent or self.turns[0].name


@dataclasses.dataclass
class Row:
    """Prompts of one family and what follows them, as one token tree behind their cached tokens."""

    past: list[torch.Tensor]
    cached: int
    tree: TokenTree = dataclasses.field(default_factory=TokenTree)
    turns: dict[bytes, tuple[bytes, list[int]]] = dataclasses.field(default_factory=dict)  # name: (parent, its tokens)
    read: list[tuple[int, int, list[list[int]]]] = dataclasses.field(default_factory=list)  # (index, last, tails)

    def add(self, prompt: Prompt, index: int = 0, tails: Sequence[Sequence[int]] = ()) -> None:
        path = self.tree.add(prompt.fresh)
        for turn in prompt.turns[len(self.past) :]:
            self.turns[turn.name] = (turn.parent, path[turn.start - self.cached : turn.end - self.cached])
        self.read.append((index, path[-1], [self.tree.add(ids, path[-1]) for ids in tails]))


@dataclasses.dataclass
class Entry:
    tensor: torch.Tensor  # keys and values of one turn: (tokens, features of all layers)
    parent: bytes
    last_used: int = 0  # round


class PromptCache:
    """Keys and values of the states read before, an entry a turn.

    A state's prompt begins with its parent's, so a step of an episode costs its last turn and the candidates, and
    the siblings in a tree share all that came before them. An entry is younger than those that continue it, so that the
    oldest is always a leaf. What the last rounds used stays: a cache too small for the episodes side by side serves
    some of them fully rather than forget each turn before it is read again.
    """

    ROUNDS = 3  # calls after which an unused entry may make room for another
    ROW = 2048  # tokens of a family in one row; its mask is the square
    LIKE = 0.75  # of the longest row of a pass, the shortest has this share

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.used = room, 0  # bytes
        self.round = 0
        self.computed = 0  # tokens that the model has read, padding aside
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._shapes: list[tuple[int, int]] = []  # (heads, head dim) of each layer's keys and values, in turns

    def prompt(self, message_tokens: Sequence[Sequence[int]]) -> Prompt:
        """The prompt of a state, from the tokens of each of its messages (user and assistant in turns)."""
        prompt, start, name = Prompt([], [], []), 0, b""
        for i, tokens in enumerate(message_tokens):
            prompt.ids += tokens
            if (len(message_tokens) - i) % 2:  # a user's message: here a turn ends
                content = np.array(prompt.ids[start:], np.int64).tobytes()
                parent, name = name, hashlib.blake2b(name + content, digest_size=16).digest()
                unbroken = len(prompt.past) == len(prompt.turns)
                prompt.turns.append(Turn(name, parent, start, len(prompt.ids)))
                if unbroken and i < len(message_tokens) - 1 and name in self._entries:
                    prompt.past.append(self._entries[name].tensor)
                start = len(prompt.ids)
        if prompt.past:
            self._touch(prompt.turns[len(prompt.past) - 1].name)
        return prompt

    def _touch(self, name: bytes) -> None:
        """An entry has been used, and with it those that it continues."""
        while name:
            self._entries.move_to_end(name)
            self._entries[name].last_used = self.round
            name = self._entries[name].parent

    def rows(self, prompts: Sequence[Prompt], tails: Lists) -> tuple[list[Row], list[int]]:
        """Prompts in as few rows as their families allow, a row each; the indices of those that found no room."""
        families: dict[tuple[int, bytes], list[int]] = {}
        for i, prompt in enumerate(prompts):
            families.setdefault(prompt.family, []).append(i)
        rows, later = [], []
        for members in families.values():
            members.sort(key=lambda i: prompts[i].ids)  # depth first
            row = Row(prompts[members[0]].past, prompts[members[0]].cached)
            for i in members:
                if row.read and len(row.tree) + row.tree.growth(prompts[i].fresh) + sum(map(len, tails[i])) > self.ROW:
                    later.append(i)
                else:
                    row.add(prompts[i], i, tails[i])
            rows.append(row)
        return rows, later

    def batch(self, rows: Sequence[Row]) -> DynamicCache:
        """A batch's cache with what is known of each row, aligned on the right."""
        width = max(r.cached for r in rows)
        if not width:
            return DynamicCache()
        like = next(r.past[0] for r in rows if r.past)
        joined = like.new_zeros(len(rows), width, like.shape[-1])
        for row, r in enumerate(rows):
            if r.past:
                torch.cat(r.past, out=joined[row, width - r.cached :])
        parts = joined.split([heads * dim for heads, dim in self._shapes], -1)
        parts = [part.unflatten(-1, s).transpose(1, 2) for part, s in zip(parts, self._shapes, strict=True)]
        return DynamicCache(list(zip(parts[::2], parts[1::2], strict=True)))

    def remember(self, row: Row, cache: DynamicCache, at: int, first: int) -> None:
        """Keep the keys and values that a pass left for the turns of batch row `at`, whose tree begins at `first`."""
        layers = [tensor[at] for k, v, _ in cache for tensor in (k, v)]  # (heads, tokens, head dim) each
        self._shapes = [(t.shape[0], t.shape[2]) for t in layers]
        size = sum(heads * dim for heads, dim in self._shapes) * layers[0].element_size()
        for name, (parent, tokens) in row.turns.items():  # parents first
            if name in self._entries or (parent and parent not in self._entries):
                continue
            if self._make_room(size * len(tokens)):
                columns = torch.tensor(tokens, device=layers[0].device) + first
                tensor = torch.cat([t[:, columns].transpose(0, 1).flatten(1) for t in layers], -1)
                self._entries[name] = Entry(tensor, parent)
                self.used += tensor.nbytes
                self._touch(name)

    def _make_room(self, size: int) -> bool:
        """Forget the oldest until `size` bytes fit, unless the last rounds used it."""
        while self.used + size > self.room:
            oldest = next(iter(self._entries), None)
            if oldest is None or self.round - self._entries[oldest].last_used < self.ROUNDS:
                return False
            self.used -= self._entries.pop(oldest).tensor.nbytes
        return True

    def read(self, forward: Forward, model: Any, budget: int, states: Lists, tails: Lists) -> Iterator[Reading]:
        """Put each state's tails (candidate actions) through the model behind the state's prompt, every token once.

        Yields a reading of each, in any order.
        """
        waiting = list(range(len(states)))
        self.round += 1
        while waiting:  # what a large family did not fit in is read behind what the first rows left in the cache
            prompts = [self.prompt(states[i]) for i in waiting]
            rows, later = self.rows(prompts, [tails[i] for i in waiting])
            # First reads are long and later ones short: side by side, half of what the model computes would be padding.
            for group in batches(rows, lambda r: len(r.tree), budget, before=lambda r: r.cached, like=self.LIKE):
                members = [rows[g] for g in group]
                cache = self.batch(members)
                before = max(row.cached for row in members)
                width = max(len(row.tree) for row in members)
                pads = [width - len(row.tree) for row in members]
                needed: set[int] = set()
                for row, pad in zip(members, pads, strict=True):
                    for _, last, paths in row.read:
                        needed.update(pad + token for path in ([last], *paths) for token in path)
                column = {c: i for i, c in enumerate(sorted(needed))}
                inputs = tree_inputs(model, [row.tree for row in members], [row.cached for row in members])
                columns = torch.tensor(list(column), device=model.device)
                outputs = forward({**inputs, "past_key_values": cache, "use_cache": True}, columns)
                self.computed += sum(len(row.tree) for row in members)
                for at, (row, pad) in enumerate(zip(members, pads, strict=True)):
                    self.remember(row, cache, at, before + pad)
                    for i, last, paths in row.read:
                        places = [[column[pad + token] for token in path] for path in paths]
                        yield waiting[i], outputs[at], column[pad + last], places
            waiting = [waiting[i] for i in later]


def tokens_of(chat: Chat, state: State, actions: Iterable[str]) -> tuple[list[list[int]], list[list[int]]]:
    """A state's messages as tokens, and actions in it."""
    prompt = chat.prompt_tokens(state)
    length = sum(map(len, prompt))
    return prompt, [chat.action(text, state.task, length) for text in actions]


def unread(chat: Chat, pairs: Iterable[Pair], memory: Mapping[Pair, float], read: Callable) -> Iterator[tuple]:
    """Read the (s, a) that `memory` lacks: each, a's tokens, outputs, and there the places of s's last and of a's."""
    fresh: dict[State, dict[str, None]] = {}
    for state, action in pairs:
        if (state, action) not in memory:
            fresh.setdefault(state, {})[action] = None
    states, tokens = list(fresh), [tokens_of(chat, *state) for state in fresh.items()]
    for n, out, last, paths in read([prompt for prompt, _ in tokens], [tails for _, tails in tokens]):
        for action, ids, path in zip(fresh[states[n]], tokens[n][1], paths, strict=True):
            yield (states[n], action), ids, out, [last, *path]


def room_for(model: Any, gigabytes: float | None = None) -> int:
    """Bytes of a cache for this model; by default a quarter of what is free on a GPU, elsewhere 2 GiB."""
    if gigabytes is not None:
        return int(gigabytes * (1 << 30))
    return torch.cuda.mem_get_info(model.device)[0] // 4 if model.device.type == "cuda" else 2 << 30


def batch_for(model: Any) -> int:
    """Padded tokens of a batch: 16,384 or, on a GPU, what has its keys and values in an eighth of the free memory."""
    config, least, most = model.config.get_text_config(), 1 << 14, 1 << 18
    if model.device.type != "cuda" or not getattr(config, "num_attention_heads", None):
        return least
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    return min(max(least, torch.cuda.mem_get_info(model.device)[0] // 8 // token), most)
