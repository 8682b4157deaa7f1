"""The agent pi(a | s): a HuggingFace causal LM that answers `Sample` requests.

Sampling noise is a function of (seed, task, node, candidate) alone, so the same seed gives the same files whatever the
batch size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from qlass.chat import Chat, Rendering, State, uniforms
from qlass.driver import Candidate, Likelihood, Sample
from qlass.fast.cache import PlainReader, Prompt, Row, reader
from qlass.fast.token_tree import TokenTree, additive_masks, batches, tree_inputs, windows_of
from qlass.models import load_checkpoint


class Policy:
    """pi(a | s): a causal LM that answers Sample requests, free or among the valid actions."""

    def __init__(
        self, model: Any, chat: Chat, seed: int = 0, budget: int = 16_384, cache_gb: float | None = None
    ) -> None:
        self.model, self.chat, self.seed, self.budget = model.eval(), chat, seed, budget
        self.reader = reader(model, cache_gb)
        self._known: dict[tuple, np.ndarray] = {}  # log-probabilities of valid actions in states already seen

    @classmethod
    def load(
        cls, path: str | Path, device: str | None = None, seed: int = 0, load_in: str | None = None,
        plain: bool = False, rendering: Rendering | None = None, **options: Any,
    ) -> Policy:  # fmt: skip
        model, chat = load_checkpoint(
            path, transformers.AutoModelForCausalLM, device, load_in, plain=plain, rendering=rendering
        )
        return cls(model, chat, seed, **options)

    @property
    def computed(self) -> int:
        """Tokens put through the model so far; padding is not counted."""
        return self.reader.computed

    def _logits(self, inputs: dict, columns: torch.Tensor) -> torch.Tensor:
        """(B, len(columns), V)"""
        return self.model(**inputs, logits_to_keep=columns).logits.float()

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        answers: list[Any] = [None] * len(requests)
        for solve, among_valid in ((self._choose, True), (self._generate, False)):
            mine = [i for i, request in enumerate(requests) if bool(request.valid) == among_valid]
            for i, answer in zip(mine, solve([requests[i] for i in mine]), strict=True):
                answers[i] = answer
        return answers

    # Among the valid actions: the trie of their texts goes through the model in one pass behind the prompt, which gives
    # every conditional probability that trie-constrained decoding would meet; sampling is then a draw of a leaf.

    def _choose(self, requests: list[Sample]) -> list[list[Candidate]]:
        answers = []
        texts = [[self.chat.action(a, r.state.task) for a in r.valid] for r in requests]
        for r, tokens, logp in zip(requests, texts, self._trie_logprobs(requests, texts), strict=True):
            picks = [int(logp.argmax())] * r.n
            if r.temperature:
                cumulative = np.cumsum(np.exp(logp))
                draws = [uniforms(1, self.seed, *r.key, k)[0] for k in range(r.n)]
                picks = [min(int(np.searchsorted(cumulative, u * cumulative[-1])), len(logp) - 1) for u in draws]
            answers.append([Candidate(r.valid[p], len(tokens[p]), float(logp[p])) for p in picks])
        return answers

    @torch.inference_mode()
    def _trie_logprobs(self, requests: list[Sample], texts: list[list[list[int]]]) -> list[np.ndarray]:
        """log pi(a | s) of each request's valid actions.

        Where the trie of their texts has one way to go, that way has probability 1: only tokens above a branching are
        computed.
        """
        if len(self._known) > 200_000:
            self._known.clear()
        keys = [(r.state, r.valid, r.temperature) for r in requests]
        which, tries = [], []
        for key, i in {k: i for i, k in enumerate(keys) if k not in self._known}.items():
            trie = Trie(texts[i])
            if trie.branches:
                which.append(i)
                tries.append(trie)
            else:  # a single valid action
                self._known[key] = np.zeros(len(texts[i]))
        states, tails = [self.chat.prompt_tokens(requests[i].state) for i in which], [trie.tails for trie in tries]
        for n, out, last, paths in self.reader.read(self._logits, self.model, self.budget, states, tails):
            rows = [paths[a][t - 1] if t else last for a, t, _ in tries[n].branches]
            tokens = [token for *_, token in tries[n].branches]
            scores = out[torch.tensor(rows, device=out.device), torch.tensor(tokens, device=out.device)].cpu().numpy()
            self._known[keys[which[n]]] = tries[n].logprobs(scores / (requests[which[n]].temperature or 1.0))
        return [self._known[k] for k in keys]

    @torch.inference_mode()
    def logprobs(self, pairs: list[tuple[State, str]]) -> list[float]:
        """log pi(a | s) of actions as free text, each token of what they share computed once."""
        which: dict[State, list[int]] = {}
        for i, (state, _) in enumerate(pairs):
            which.setdefault(state, []).append(i)
        states = [self.chat.prompt_tokens(s) for s in which]
        tails = [[self.chat.action(pairs[i][1], s.task) for i in some] for s, some in which.items()]
        answers, members = [0.0] * len(pairs), list(which.values())
        for n, out, last, paths in self.reader.read(self._logits, self.model, self.budget, states, tails):
            for i, ids, path in zip(members[n], tails[n], paths, strict=True):
                logp = out[[last, *path[:-1]]].log_softmax(-1)
                answers[i] = float(logp.gather(-1, torch.tensor(ids, device=out.device)[:, None]).double().sum())
        return answers

    def likelihoods(self, requests: list[Likelihood]) -> list[list[float]]:
        logp = iter(self.logprobs([(r.state, action) for r in requests for action in r.actions]))
        return [[next(logp) for _ in r.actions] for r in requests]

    # Free: one prefill a prompt, whose keys and values its n candidates share; finished sequences leave the batch.

    def _generate(self, requests: list[Sample]) -> list[list[Candidate]]:
        if isinstance(self.reader, PlainReader):
            return [[self._write(r, k) for k in range(r.n)] for r in requests]
        answers: list[Any] = [None] * len(requests)
        self.reader.round += 1
        prompts = [self.reader.prompt(self.chat.prompt_tokens(r.state)) for r in requests]
        room = self.chat.rendering.max_new_tokens
        both = list(zip(prompts, requests, strict=True))
        for group in batches(both, lambda one: len(one[0].ids) + room, self.budget, lambda one: one[1].n):
            rows = self._decode(*zip(*(both[g] for g in group), strict=True))
            for g, row in zip(group, rows, strict=True):
                answers[g] = row
        return answers

    @torch.inference_mode()
    def _decode(self, prompts: tuple[Prompt, ...], requests: tuple[Sample, ...]) -> list[list[Candidate]]:
        device, chat, room = self.model.device, self.chat, self.chat.rendering.max_new_tokens
        owner = np.repeat(np.arange(len(requests)), [r.n for r in requests])
        noise = np.stack([uniforms(room, self.seed, *r.key, k) for r in requests for k in range(r.n)])
        heat = np.array([r.temperature for r in requests])[owner]

        rows = [Row.of(prompt) for prompt in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.add(prompt)
        windows, cache = windows_of(self.model.config), self.reader.cache(rows)
        before, width = max(r.known for r in rows), max(len(r.tree) for r in rows)
        inputs = tree_inputs(self.model, [r.tree for r in rows], [r.known for r in rows])
        out = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.reader.computed += sum(len(r.tree) for r in rows)
        seen = torch.zeros((len(rows), before + width), dtype=torch.bool)  # which columns of the cache hold a token
        for at, row in enumerate(rows):
            start = before + width - len(row.tree)
            self.reader.remember(row, cache, at, start)
            seen[at, before - row.known : before] = True
            seen[at, start:] = True
        each = torch.from_numpy(owner).to(device)  # from here on a row is a candidate
        seen, logits = seen.to(device)[each], out.logits[each, -1]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        cache.batch_select_indices(each)

        written: list[list[int]] = [[] for _ in owner]
        told: list[tuple[np.ndarray, torch.Tensor]] = []  # log-probabilities of the rows alive at each step
        alive = np.arange(len(owner))  # which candidate each row of the batch is
        for step in range(room):
            tokens, logp = self._draw(logits, heat[alive], noise[alive, step])
            told.append((alive, logp))
            for row, token in zip(alive, tokens.tolist(), strict=True):  # the one wait for the device in a step
                written[row].append(token)
            going = [i for i, row in enumerate(alive) if not self._ended(written[row])]
            if not going or step == room - 1:
                break
            if len(going) < len(alive):
                alive, left = alive[going], torch.tensor(going, device=device)
                cache.batch_select_indices(left)
                seen, positions, tokens = seen[left], positions[left], tokens[left]
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], -1)
            positions = torch.cat([positions, positions[:, -1:] + 1], -1)
            masks = additive_masks(seen[:, None], positions[:, -1:], positions, windows, self.model.dtype)
            self.reader.computed += len(alive)
            logits = self.model(input_ids=tokens[:, None], attention_mask=masks, position_ids=positions[:, -1:],
                                past_key_values=cache, use_cache=True).logits[:, -1]  # fmt: skip
        logprob = np.zeros(len(owner))
        for some, logp in told:
            logprob[some] += logp.cpu().numpy()
        answers: list[list[Candidate]] = [[] for _ in requests]
        for row, ids in enumerate(written):
            answers[owner[row]].append(Candidate(chat.text(ids), len(ids), float(logprob[row]), tuple(ids)))
        return answers

    @torch.inference_mode()
    def _write(self, request: Sample, k: int) -> Candidate:
        """Candidate k of a free request by itself; what a model keeps of the past it keeps in its own way."""
        fresh = ids = self.chat.prompt(request.state)
        written, total, past = [], 0.0, None
        for u in uniforms(self.chat.rendering.max_new_tokens, self.seed, *request.key, k):
            inputs = {"input_ids": torch.tensor([fresh], device=self.model.device)}
            out = self.model(**inputs, **({} if past is None else {"past_key_values": past}), use_cache=True)
            self.reader.computed += len(fresh)
            tokens, logp = self._draw(out.logits[:, -1], np.array([request.temperature]), np.array([u]))
            written, total, past = [*written, int(tokens)], total + float(logp), out.get("past_key_values")
            fresh = written[-1:] if past is not None else ids + written
            if self._ended(written):
                break
        return Candidate(self.chat.text(written), len(written), total, tuple(written))

    def _ended(self, written: list[int]) -> bool:
        if written[-1] == self.chat.stop_id:
            return True
        stops = self.chat.rendering.stop
        return bool(stops) and any(stop in self.chat.tokenizer.decode(written) for stop in stops)

    def _draw(self, logits: torch.Tensor, heat: np.ndarray, noise: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of (B, V), and its log-probability at its temperature, before top-k and top-p."""
        device, rendering = logits.device, self.chat.rendering
        heat = torch.from_numpy(heat).to(device, torch.float32)[:, None]
        logp = torch.log_softmax(logits.float() / torch.where(heat > 0, heat, 1.0), -1)
        p = truncated(logp.double().exp(), rendering.top_k, rendering.top_p)
        cumulative = p.cumsum(-1)
        u = torch.from_numpy(noise).to(device)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, u, right=True).clamp(max=logp.shape[-1] - 1)
        tokens = torch.where(heat > 0, drawn, logits.argmax(-1, keepdim=True))
        return tokens[:, 0], logp.gather(-1, tokens)[:, 0].double()


def truncated(p: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Probabilities (B, V), 0 for all but the k likeliest, and of these for all but the fewest that hold top_p."""
    if not top_k and top_p >= 1:
        return p
    values, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k:
        values[:, top_k:] = 0
    keep = values.cumsum(-1) - values < top_p * values.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, values * keep)


class Trie:
    """The token sequences of the valid actions: where they part, and their probabilities from the scores there.

    tails[a]: the tokens of action a up to the last place where another action may follow instead.
    branches: (a, t, token) of each token that has siblings; a is the first action whose token t it is.
    forks[b]: the number of the place where branch b begins. through[a]: the branches that action a passes.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        tree = TokenTree()
        paths = [tree.add(ids) for ids in texts]
        children = np.bincount(np.array(tree.parent) + 1)
        self.branches: list[tuple[int, int, int]] = []
        self.tails: list[list[int]] = []
        self.through: list[list[int]] = []
        number: dict[int, int] = {}
        for a, path in enumerate(paths):
            parting = [t for t, token in enumerate(path) if children[tree.parent[token] + 1] > 1]
            self.tails.append(texts[a][: parting[-1]] if parting else [])
            for t in parting:
                if path[t] not in number:
                    number[path[t]] = len(self.branches)
                    self.branches.append((a, t, texts[a][t]))
            self.through.append([number[path[t]] for t in parting])
        self.forks = np.unique([tree.parent[token] for token in number], return_inverse=True)[1]

    def logprobs(self, scores: np.ndarray) -> np.ndarray:
        """log p of each action, from the score of each branch among its siblings."""
        scores, at = scores.astype(np.float64), self.forks
        top = np.full(at.max() + 1, -np.inf)
        np.maximum.at(top, at, scores)
        total = np.zeros(len(top))
        np.add.at(total, at, np.exp(scores - top[at]))
        conditional = scores - top[at] - np.log(total[at])
        return np.array([conditional[through].sum() for through in self.through])
