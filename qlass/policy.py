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

from environments import UserError
from qlass.chat import Chat, State, uniforms
from qlass.driver import Candidate, Sample
from qlass.models import load_checkpoint
from qlass.token_tree import Prompt, Prompts, batches


class Policy:
    """pi(a | s): a causal LM that answers Sample requests, free or among the valid actions."""

    def __init__(self, model: Any, chat: Chat, seed: int = 0, budget: int = 16_384) -> None:
        self.model, self.chat, self.seed, self.budget = model.eval(), chat, seed, budget
        self.prompts = Prompts()
        self.computed = 0  # tokens put through the model, padding included
        self._known: dict[tuple, np.ndarray] = {}  # log-probabilities of valid actions in states already seen

    @classmethod
    def load(cls, path: str | Path, device: str | None = None, seed: int = 0, load_in: str | None = None) -> Policy:
        if (Path(path) / "qnet.json").exists():
            raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")
        return cls(*load_checkpoint(path, transformers.AutoModelForCausalLM, device, load_in), seed)

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        answers: list[Any] = [None] * len(requests)
        for solve, which in ((self._choose, bool), (self._generate, lambda valid: not valid)):
            mine = [i for i, request in enumerate(requests) if which(request.valid)]
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
        """log pi(a | s) of each request's valid actions."""
        keys = [(r.state, r.valid, r.temperature) for r in requests]
        fresh = {k: i for i, k in enumerate(keys) if k not in self._known}
        if len(self._known) > 200_000:
            self._known.clear()
            fresh = {k: i for i, k in enumerate(keys)}
        which = list(fresh.values())

        def logits(inputs: dict, keep: int) -> torch.Tensor:
            self.computed += inputs["input_ids"].numel()
            return self.model(**inputs, logits_to_keep=keep).logits.float()

        states, tails = [self.chat.message_tokens(requests[i].state) for i in which], [texts[i] for i in which]
        for n, out, tree, last, paths in self.prompts.read(
            logits, self.model, self.chat.tokenizer.pad_token_id, self.budget, states, tails
        ):
            # Each token's log-probability among its siblings, given the path to it.
            at = np.array(tree.parent[last + 1 :]) - last
            ids = np.array(tree.ids[last + 1 :])
            score = out.cpu().numpy()[at, ids].astype(np.float64) / (requests[which[n]].temperature or 1.0)
            top = np.full(len(out), -np.inf)
            np.maximum.at(top, at, score)
            total = np.zeros(len(out))
            np.add.at(total, at, np.exp(score - top[at]))
            conditional = score - top[at] - np.log(total[at])
            known = np.array([conditional[np.array(path) - last - 1].sum() for path in paths])
            self._known[keys[which[n]]] = known
        return [self._known[k] for k in keys]

    @torch.inference_mode()
    def logprobs(self, pairs: list[tuple[State, str]]) -> list[float]:
        """log pi(a | s) of actions as free text."""
        answers = [0.0] * len(pairs)
        runs = [self.chat.message_tokens(s) for s, _ in pairs]
        tails = [[self.chat.action(a, s.task)] for s, a in pairs]

        def logp(inputs: dict, keep: int) -> torch.Tensor:
            return self.model(**inputs, logits_to_keep=keep).logits.float().log_softmax(-1)

        pad_id = self.chat.tokenizer.pad_token_id
        for n, out, tree, last, _ in self.prompts.read(logp, self.model, pad_id, self.budget, runs, tails):
            ids = torch.tensor(tree.ids[last + 1 :], device=out.device)
            answers[n] = float(out[:-1].gather(-1, ids[:, None]).sum())
        return answers

    # Free: one prefill a prompt, whose keys and values its n candidates share; finished sequences leave the batch.

    def _generate(self, requests: list[Sample]) -> list[list[Candidate]]:
        answers: list[Any] = [None] * len(requests)
        prompts = [self.prompts.prompt(self.chat.message_tokens(r.state)) for r in requests]
        room = self.chat.rendering.max_new_tokens
        sizes = [(len(p.ids) + room) * r.n for p, r in zip(prompts, requests, strict=True)]
        for group in batches(sizes, lambda size: size, self.budget):
            rows = self._decode([requests[g] for g in group], [prompts[g] for g in group])
            for g, row in zip(group, rows, strict=True):
                answers[g] = row
        return answers

    @torch.inference_mode()
    def _decode(self, requests: list[Sample], prompts: list[Prompt]) -> list[list[Candidate]]:
        device, chat, room = self.model.device, self.chat, self.chat.rendering.max_new_tokens
        owner = np.repeat(np.arange(len(requests)), [r.n for r in requests])
        noise = np.stack([uniforms(room, self.seed, *r.key, k) for r in requests for k in range(r.n)])
        heat = np.array([r.temperature for r in requests])[owner]

        before, width = max(p.known for p in prompts), max(len(p.fresh) for p in prompts)
        pads = [width - len(p.fresh) for p in prompts]
        pad_id = chat.tokenizer.pad_token_id
        ids = torch.tensor([[pad_id] * n + p.fresh for n, p in zip(pads, prompts, strict=True)])
        mask = torch.tensor(
            [
                [0] * (before - p.known) + [1] * p.known + [0] * n + [1] * len(p.fresh)
                for n, p in zip(pads, prompts, strict=True)
            ]
        )
        ids, mask, cache = ids.to(device), mask.to(device), self.prompts.cache(prompts)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                         use_cache=True, logits_to_keep=1)  # fmt: skip
        self.computed += ids.numel()
        for row, (n, prompt) in enumerate(zip(pads, prompts, strict=True)):
            self.prompts.remember(prompt, cache, row, before + n)
        rows = torch.from_numpy(owner).to(device)
        cache.batch_select_indices(rows)
        mask, logits, positions = mask[rows], out.logits[rows, -1], positions[rows, -1:]

        written: list[list[int]] = [[] for _ in owner]
        logprob = np.zeros(len(owner))
        alive = np.arange(len(owner))  # which candidate each row of the batch is
        for step in range(room):
            logp = torch.log_softmax(logits.float() / torch.tensor(np.where(heat[alive] > 0, heat[alive], 1.0))
                                     .to(device, torch.float32)[:, None], -1)  # fmt: skip
            cumulative = logp.double().exp().cumsum(-1)
            u = torch.from_numpy(noise[alive, step]).to(device)[:, None] * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, u).clamp(max=logp.shape[-1] - 1)[:, 0]
            greedy = torch.from_numpy(heat[alive] == 0).to(device)
            tokens = torch.where(greedy, logits.argmax(-1), drawn)
            logprob[alive] += logp.gather(-1, tokens[:, None])[:, 0].double().cpu().numpy()
            for row, token in zip(alive, tokens.tolist(), strict=True):
                written[row].append(token)
            going = (tokens != chat.stop_id).nonzero()[:, 0]
            if not len(going) or step == room - 1:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(going)
                mask, positions, tokens = mask[going], positions[going], tokens[going]
                alive = alive[going.cpu().numpy()]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
            positions = positions + 1
            self.computed += len(alive)
            logits = self.model(input_ids=tokens[:, None], attention_mask=mask, position_ids=positions,
                                past_key_values=cache, use_cache=True).logits[:, -1]  # fmt: skip
        answers: list[list[Candidate]] = [[] for _ in requests]
        for row, ids_ in enumerate(written):
            answers[owner[row]].append(Candidate(chat.text(ids_), len(ids_), float(logprob[row])))
        return answers
