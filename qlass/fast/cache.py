"""Keys and values of the states read before, so that every token of a tree goes through a model
once.

A *question* is a state's prompt with tails that may follow it, such as the valid actions:

    messages   <user> task, page 1    click[A] page 2    click[B] page 3
    turns      [       turn 1      ] [    turn 2      ] [    turn 3    ]
    tails                                                               click[C], buy, ...

The cache has an entry for each turn that it has read, whose name is a hash of all tokens up to its
end. Here it knows turns 1 and 2 (*cached*), so the model reads turn 3 and the tails alone. Prompts
with the same cached turns are a *family*, and one *row* of the batch: their new tokens stand in one
token tree after the cached ones.

    columns    [ padding | turn 1  turn 2 ][ padding | turn 3  click[C]  buy ]   row 1
               [           turn 1         ][ turn 2  turn 3'  click[A]  ...  ]   row 2
                 from the cache              a token tree, read now, and then kept by turns

A *reading* is what the model gives for a question: for each tail the outputs at the token before it
and at its own tokens, from which a policy has log pi(a | s) and QNet has Q(s, a).
"""

import dataclasses
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from qlass.chat import Chat
from qlass.device import broadcast
from qlass.fast.token_tree import TokenTree, batches, tree_inputs
from qlass.messages import State

Tokens = list[int]
Places = list[int]  # of tokens, in a tree or among a model's outputs
REMEMBERED = 200_000  # answers that an agent or a QNet keeps
# From a model's inputs and columns to outputs (B, len(columns), ...).
Forward = Callable[[dict, Tensor], Any]


class Question(NamedTuple):
    messages: list[Tokens]  # a prompt: user and assistant in turns, the user first and last
    tails: list[Tokens]  # what may follow it, such as actions, each by itself


class Reading(NamedTuple):
    number: int  # of the question
    outputs: Any  # (columns, ...)
    # Of each tail a, one longer than it: outputs[paths[a][t]] is of the token before its t-th, and
    # outputs[paths[a][-1]] of its last one.
    paths: list[Places]


class Turn(NamedTuple):
    """An action and its observation, or the messages before the first action: the unit of the
    cache."""

    name: bytes  # of the prefix that ends with it
    ids: Tokens


@dataclasses.dataclass
class CachedPrompt:
    """A prompt. The cache may know its first turns, but its last one is always read again."""

    ids: Tokens
    turns: list[Turn]
    past: list[Tensor]  # keys and values of the first turns: (tokens, features of all layers) each

    @property
    def family(self) -> tuple[int, bytes]:
        """Prompts of one family have the same cached turns or, without any, the same first turn."""
        n = len(self.past)
        return n, self.turns[max(n - 1, 0)].name


class Row:
    """Prompts of one family and their tails, as one token tree after their cached tokens."""

    def __init__(self, prompt: CachedPrompt) -> None:
        self.past = prompt.past
        self.cached = sum(map(len, self.past))  # tokens
        self.tree = TokenTree()
        self.turns: dict[bytes, Places] = {}  # by name, the places of its tokens in the tree
        # By the number of a question, as in its Reading, but in the tree.
        self.paths: dict[int, list[Places]] = {}

    def __len__(self) -> int:
        return len(self.tree)

    def columns(self, path: Places) -> Places:
        """The columns of a path's tokens in a batch. They are negative, as rows have trees of
        several sizes, which all end at the last column, -1."""
        size = len(self.tree)
        return [token - size for token in path]

    def add(self, prompt: CachedPrompt, number: int, tails: Sequence[Tokens]) -> None:
        last = -1
        for turn in prompt.turns[len(self.past) :]:
            path = self.tree.add(turn.ids, last)
            self.turns[turn.name] = path
            last = path[-1]
        self.paths[number] = [[last, *self.tree.add(ids, last)] for ids in tails]


@dataclasses.dataclass
class Entry:
    tensor: Tensor  # keys and values of one turn: (tokens, features of all layers)
    last_used: int  # round


class PromptCache:
    """Keys and values of the states read before, an entry a turn.

    A state's prompt begins with its parent's, so a step of an episode costs its last turn and the
    candidates, and the siblings in a tree share all that came before them. A full cache forgets
    what no prompt of the last rounds began with. What these used stays: a cache that is too small
    for all open episodes serves some of them fully, where a plain LRU would serve none."""

    ROUNDS = 3  # calls after which a full cache forgets an unused entry
    ROW = 2048  # tokens of a family in one row; its mask is the square
    MIN_FILL = 0.75  # share of a pass's longest row that its shortest one has

    def __init__(
        self, model: Any, forward: Forward, budget: int, gigabytes: float | None = None
    ) -> None:
        """forward: the model's outputs. budget: padded tokens of a pass."""
        self.model, self.forward, self.budget = model, forward, budget
        self.capacity = free_bytes_for(model, gigabytes)  # bytes of all entries together
        self.used = 0
        self.full = False
        self.round = 0
        self.computed = 0  # tokens that the model has read, padding aside
        self._entries: dict[bytes, Entry] = {}
        # (heads, head dim) of each layer's keys and values, in turns.
        self._shapes: list[tuple[int, int]] = []

    def prompt(self, messages: list[Tokens]) -> CachedPrompt:
        """The prompt of a state, from the tokens of its messages."""
        later = [
            action + answer for action, answer in zip(messages[1::2], messages[2::2], strict=True)
        ]
        turns: list[Turn] = []
        name = b""
        for ids in [messages[0], *later]:
            content = np.array(ids, np.int64).tobytes()
            name = hashlib.blake2b(name + content, digest_size=16).digest()
            turns.append(Turn(name, ids))
        past = []
        for turn in turns[:-1]:
            if entry := self._entries.get(turn.name):
                entry.last_used = self.round
                past.append(entry.tensor)
        return CachedPrompt(list(itertools.chain(*messages)), turns, past)

    def next_round(self) -> None:
        """Begin a call. A turn's entry is used whenever one that continues it is, so that what a
        full cache forgets has no turn left after it."""
        self.round += 1
        if self.full:
            recent = self.round - self.ROUNDS
            self._entries = {n: e for n, e in self._entries.items() if e.last_used >= recent}
            self.used = sum(entry.tensor.nbytes for entry in self._entries.values())
            self.full = False

    def batch(self, rows: Sequence[Row]) -> DynamicCache:
        """A batch's cache with what is known of each row, aligned on the right."""
        width = max(row.cached for row in rows)
        if not width:
            return DynamicCache()
        like = next(row.past[0] for row in rows if row.past)
        joined = like.new_zeros(len(rows), width, like.shape[-1])
        for row, columns in zip(rows, joined, strict=True):
            if row.past:
                torch.cat(row.past, out=columns[width - row.cached :])
        parts = joined.split([heads * dim for heads, dim in self._shapes], -1)
        tensors = [
            part.unflatten(-1, shape).transpose(1, 2)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]
        return DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))

    def remember(self, row: Row, layers: list[Tensor]) -> None:
        """Keep the keys and values of a row's turns; layers: (heads, tokens, head dim) each, of
        which the last tokens are the row's tree."""
        self._shapes = [(tensor.shape[0], tensor.shape[2]) for tensor in layers]
        size = sum(tensor[:, 0].nbytes for tensor in layers)  # of a token
        for name, path in row.turns.items():
            if name in self._entries:
                continue
            if self.used + size * len(path) > self.capacity:
                self.full = True
                return  # the turns that continue this one come later
            columns = torch.tensor(row.columns(path), device=layers[0].device)
            tensor = torch.cat([t[:, columns].transpose(0, 1).flatten(1) for t in layers], -1)
            self._entries[name] = Entry(tensor, self.round)
            self.used += tensor.nbytes

    def read(self, questions: Sequence[Question]) -> Iterator[Reading]:
        """Put each question's tails through the model after its prompt, every token once. Readings
        come in any order.

        What has no room in a large family's row is read after what that row left in the cache.
        """
        self.next_round()
        waiting = list(range(len(questions)))
        while waiting:
            rows, waiting = self.rows(questions, waiting)
            # First reads are long and later ones short: side by side, half of what the model
            # computes would be padding.
            cached = [row.cached for row in rows]
            for group in batches(list(map(len, rows)), self.budget, cached, self.MIN_FILL):
                yield from self._read([rows[i] for i in group])

    def rows(
        self, questions: Sequence[Question], numbers: Sequence[int]
    ) -> tuple[list[Row], list[int]]:
        """A row for each family of these questions; the numbers of those that found no room in
        it."""
        prompts = {n: self.prompt(questions[n].messages) for n in numbers}
        families = defaultdict(list)
        for n, prompt in prompts.items():
            families[prompt.family].append(n)
        rows: list[Row] = []
        later: list[int] = []
        for members in families.values():
            members.sort(key=lambda n: prompts[n].ids)  # depth first
            row = Row(prompts[members[0]])
            for n in members:
                prompt, tails = prompts[n], questions[n].tails
                more = row.tree.growth(prompt.ids[row.cached :]) + sum(map(len, tails))  # at most
                if row.paths and len(row) + more > self.ROW:
                    later.append(n)
                else:
                    row.add(prompt, n, tails)
            rows.append(row)
        return rows, later

    def _read(self, rows: Sequence[Row]) -> Iterator[Reading]:
        """One pass of the model, and what it gives for the questions of its rows."""
        needed: set[int] = set()
        for row in rows:
            for path in itertools.chain(*row.paths.values()):
                needed.update(row.columns(path))
        columns = sorted(needed)
        outputs, _ = self.run(rows, columns)
        place = {column: i for i, column in enumerate(columns)}
        for row, out in zip(rows, outputs, strict=True):
            for number, paths in row.paths.items():
                yield Reading(
                    number, out, [[place[column] for column in row.columns(path)] for path in paths]
                )

    def run(self, rows: Sequence[Row], columns: Places) -> tuple[Any, DynamicCache]:
        """Read rows in one pass, and keep what is new. Returns outputs (B, len(columns), ...) and
        the batch's cache."""
        cache = self.batch(rows)
        inputs = tree_inputs(self.model, [row.tree for row in rows], [row.cached for row in rows])
        inputs.update(past_key_values=cache, use_cache=True)
        outputs = self.forward(inputs, torch.tensor(columns, device=self.model.device))
        self.computed += sum(map(len, rows))
        for i, row in enumerate(rows):
            self.remember(
                row, [tensor[i] for keys, values, _ in cache for tensor in (keys, values)]
            )
        return outputs, cache


def question_of(chat: Chat, state: State, actions: Iterable[str]) -> Question:
    """The tokens of a state's messages, and of actions in it."""
    messages = chat.prompt_tokens(state)
    length = sum(map(len, messages))
    return Question(messages, [chat.action_tokens(text, state.task, length) for text in actions])


def free_bytes_for(model: Any, gigabytes: float | None) -> int:
    """Bytes of a cache for this model; by default a quarter of what is free on a GPU, elsewhere 2
    GiB."""
    if gigabytes is None and model.device.type == "cuda":
        return torch.cuda.mem_get_info(model.device)[0] // 4
    return int((2 if gigabytes is None else gigabytes) * (1 << 30))


def batch_for(model: Any) -> int:
    """Padded tokens of a batch: 16,384 or, on a GPU, what has its keys and values in an eighth of
    the free memory."""
    least, most = 1 << 14, 1 << 18
    if model.device.type != "cuda":
        return least
    free = broadcast(torch.cuda.mem_get_info(model.device)[0])  # or some would read more often
    return min(max(least, free // 8 // token_bytes(model)), most)


@torch.no_grad()
def token_bytes(model: Any) -> int:
    """Bytes of a token's keys and values, as a cache holds them that has been filled."""
    # A model's own cache has empty places too, of layers that share another's keys.
    cache = DynamicCache()
    model(input_ids=torch.tensor([[0]], device=model.device), past_key_values=cache, use_cache=True)
    return sum(keys.nbytes + values.nbytes for keys, values, _ in cache)
