"""The answers of `policy.Policy` in batches, each token computed once.

Among the valid actions the trie of their texts goes through the model in one pass after the
prompt, which gives every conditional probability that decoding among them would meet. In free text
a prompt is read once, its n candidates share its keys and values, and finished sequences leave the
batch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat
from qlass.fast import cache
from qlass.fast.cache import REMEMBERED, CachedPrompt, PromptCache, Question, Row, Tokens
from qlass.fast.token_tree import additive_masks, batches, windows_of
from qlass.fast.tries import Trie
from qlass.messages import State
from qlass.noise import uniforms
from qlass.policy import Policy

Choice = tuple[State, tuple[str, ...], float]  # a state, its valid actions, and a temperature


class RoomyLayer(DynamicLayer):
    """A layer's keys and values with room after them, into which new ones are written.

    DynamicLayer puts all of them together anew at each step, which takes most of the time of
    decoding."""

    key_room: Tensor | None = None
    value_room: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Tensors are (B, heads, tokens, head dim); returns all keys and values."""
        self.key_room, self.keys = written_behind(self.keys, keys, self.key_room)
        self.value_room, self.values = written_behind(self.values, values, self.value_room)
        return self.keys, self.values


def written_behind(old: Tensor, new: Tensor, room: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys or values (B, heads, tokens, head dim) after older ones. Returns the room, a larger one
    if need be, and a view of what it holds now. `old` begins it, unless a selection of rows has
    since made a copy of `old`."""
    start = old.shape[-2]
    end = start + new.shape[-2]
    if room is None or room.data_ptr() != old.data_ptr() or end > room.shape[-2]:
        *batch, _, size = new.shape
        room = new.new_empty(*batch, end + max(64, end // 4), size)
        room[..., :start, :] = old
    room[..., start:end, :] = new
    return room, room[..., :end, :]


class Batch:
    """Texts that are being written, each in a row. seen: (B, T), which of the cache's columns hold
    a token."""

    def __init__(self, model: Any, past: DynamicCache, seen: Tensor) -> None:
        self.model = model
        self.past = past
        self.seen = seen.to(model.device)
        self.windows = windows_of(model.config)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; one may come several times."""
        indices = torch.tensor(rows, device=self.model.device)
        self.past.batch_select_indices(indices)
        self.seen = self.seen[indices]

    def read(self, tokens: Tensor) -> Tensor:
        """Put the next token of each row (B,) through the model: the logits after it, (B, V)."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(tokens), 1)], -1)
        positions = (self.seen.cumsum(-1) - 1).clamp(min=0)
        last = positions[:, -1:]
        masks = additive_masks(self.seen[:, None], last, positions, self.windows, self.model.dtype)
        out = self.model(
            input_ids=tokens[:, None],
            attention_mask=masks,
            position_ids=last,
            past_key_values=self.past,
            use_cache=True,
        )
        return out.logits[:, -1]


class FastPolicy(Policy):
    """The same candidates as `Policy` and the same log-probabilities."""

    def __init__(
        self, model: Any, chat: Chat, seed: int = 0, cache_gb: float | None = None
    ) -> None:
        super().__init__(model, chat, seed)
        self.budget = cache.batch_for(self.model)
        most = min(self.budget, 16_384)  # each with a number for every token of the vocabulary
        self.cache = PromptCache(self.model, self.forward, most, cache_gb)
        # Log-probabilities of the valid actions in states already seen.
        self.memory: dict[Choice, np.ndarray] = {}

    def forward(self, inputs: dict, columns: Tensor) -> Tensor:
        """The model's logits at these columns, (B, len(columns), V)."""
        return self.model(**inputs, logits_to_keep=columns).logits.float()

    # ------------------------------------------------------------------------- texts that are given

    @torch.inference_mode()
    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log pi of each request's valid actions, (A,) each.

        Where the trie of their texts has one way to go, that way has probability 1: only tokens
        above a branching are computed."""
        if len(self.memory) > REMEMBERED:
            self.memory.clear()
        choices = [(r.state, r.valid, r.temperature) for r in requests]
        fresh: list[tuple[Choice, Trie]] = []
        questions: list[Question] = []
        for choice in dict.fromkeys(choices):
            if choice in self.memory:
                continue
            state, valid, _ = choice
            messages, texts = cache.question_of(self.chat, state, valid)
            trie = Trie(texts)
            if trie.branches:
                fresh.append((choice, trie))
                questions.append(Question(messages, trie.tails))
            else:  # a single valid action
                self.memory[choice] = np.zeros(len(valid))

        for number, logits, paths in self.cache.read(questions):
            choice, trie = fresh[number]
            _, _, temperature = choice
            places = [paths[action][t] for action, t, _ in trie.branches]
            tokens = [token for _, _, token in trie.branches]
            scores = logits[places, tokens].cpu().numpy()
            self.memory[choice] = trie.logprobs(scores / (temperature or 1.0))
        return [self.finite(self.memory[choice]) for choice in choices]

    @torch.inference_mode()
    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of actions as free text, each token of what they share computed once."""
        questions = [cache.question_of(self.chat, r.state, r.actions) for r in requests]
        answers: list[list[float]] = [[] for _ in requests]
        for number, logits, paths in self.cache.read(questions):
            for ids, path in zip(questions[number].tails, paths, strict=True):
                logp = logits[path[:-1]].log_softmax(-1)
                of_tokens = logp.gather(-1, torch.tensor(ids, device=logp.device)[:, None])
                answers[number].append(float(self.finite(of_tokens.double().sum())))
        return answers

    # ------------------------------------------------------------------------------------ free text

    def texts(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Free text. Requests whose prompts are of like length are answered side by side."""
        self.cache.next_round()
        prompts = [self.cache.prompt(self.chat.prompt_tokens(r.state)) for r in requests]
        lengths = [len(prompt.ids) + self.chat.rendering.max_new_tokens for prompt in prompts]
        budget = self.budget // max(r.n for r in requests)
        answers: dict[int, list[Candidate]] = {}
        for group in batches(lengths, budget):
            drawn = self.decode([prompts[i] for i in group], [requests[i] for i in group])
            answers.update(zip(group, drawn, strict=True))
        return [answers[i] for i in range(len(requests))]

    @torch.inference_mode()
    def decode(self, prompts: list[CachedPrompt], requests: list[Sample]) -> list[list[Candidate]]:
        """The candidates of each prompt, all side by side."""
        limit = self.chat.rendering.max_new_tokens
        noise = [uniforms(limit, self.seed, *r.key, k) for r in requests for k in range(r.n)]
        rows = [i for i, request in enumerate(requests) for _ in range(request.n)]

        batch, logits = self.prefill(prompts)
        batch.select(rows)  # from here on a row is a candidate
        for layer in batch.past.layers:  # which the model has made: their class alone is exchanged,
            layer.__class__ = RoomyLayer  # and keys and values of the prompts stay where they are

        temperature = torch.tensor([float(r.temperature) for r in requests], device=logits.device)
        random = torch.from_numpy(np.stack(noise)).to(logits.device)
        written, logprobs = self.write(batch, logits[rows], temperature[rows], random)
        answers: list[list[Candidate]] = [[] for _ in requests]
        for i, ids, logprob in zip(rows, written, logprobs, strict=True):
            answers[i].append(self.candidate(ids, logprob))
        return answers

    def prefill(self, prompts: list[CachedPrompt]) -> tuple[Batch, Tensor]:
        """A batch of prompts that have been read, and the logits after each, (B, V)."""
        rows = list(map(Row, prompts))
        for row, prompt in zip(rows, prompts, strict=True):
            row.add(prompt, 0, [])
        logits, past = self.cache.run(rows, [-1])

        width = max(row.cached for row in rows)  # of the cache's columns
        seen = torch.zeros((len(rows), past.get_seq_length()), dtype=torch.bool)
        for row, columns in zip(rows, seen, strict=True):
            columns[width - row.cached : width] = True
            columns[-len(row) :] = True
        return Batch(self.model, past, seen), logits[:, 0]

    def write(
        self, batch: Batch, logits: Tensor, temperature: Tensor, noise: Tensor
    ) -> tuple[list[Tokens], list[float]]:
        """Tokens of each text until its turn ends, and their log-probability.

        logits: (B, V) of the first. temperature: (B,). noise: (B, steps).
        """
        written: list[Tokens] = [[] for _ in logits]
        logprobs = torch.zeros(len(written), dtype=torch.float64, device=logits.device)
        alive = list(range(len(written)))  # the text of each row of the batch
        steps = noise.shape[1]
        for step in range(steps):
            at = torch.tensor(alive, device=logits.device)
            tokens, logp = self.draw(logits, temperature[at], noise[at, step])
            logprobs[at] += logp

            drawn = tokens.tolist()  # the one wait for the device in a step
            for text, token in zip(alive, drawn, strict=True):
                written[text].append(token)
            going = [row for row, text in enumerate(alive) if not self.chat.ended(written[text])]
            if not going or step == steps - 1:
                break

            if len(going) < len(alive):
                batch.select(going)
                tokens = tokens[going]
                alive = [alive[row] for row in going]
            logits = batch.read(tokens)
            self.cache.computed += len(alive)
        return written, logprobs.tolist()
