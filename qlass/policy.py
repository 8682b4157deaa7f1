"""What an algorithm may ask of the models, and how many algorithms share a batch.

    Sample, Score, drive      generators yield requests; the driver advances many and answers them in batches
    Policy                    answers Sample requests with a HuggingFace causal LM

Sampling noise is a function of (seed, task, node, candidate) alone, so the same seed gives the same files whatever the
batch size.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from envs import TextEnv
from qlass.chat import Chat, Rendering, State, react, uniforms
from qlass.models import quantised
from qlass.stage import UserError
from qlass.token_tree import Prompt, Prompts, batches

# -------------------------------------------------------------------------------------------------- requests, driver


@dataclasses.dataclass(frozen=True)
class Sample:
    """a ~ pi(a | s), n times. `key` names the state in the noise: (task, node or step)."""

    state: State
    n: int
    key: tuple
    temperature: float
    valid: tuple[str, ...] = ()  # the actions to choose among; empty: free


def ask(
    env: TextEnv, state: State, n: int, key: tuple, rendering: Rendering, temperature: float | None = None
) -> Sample:
    """Request n actions in the state that `env` is in, drawn as the checkpoint's rendering says."""
    valid = tuple(react(*c) for c in env.candidates()) if rendering.candidates == "valid" else ()
    return Sample(state, n, key, rendering.temperature if temperature is None else temperature, valid)


@dataclasses.dataclass(frozen=True)
class Score:
    """Q(s, a) of each action."""

    state: State
    actions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    text: str
    tokens: int  # generated, the end of the turn included
    logprob: float


Answers = dict[type, Callable[[list], list]]


def drive(episodes: Iterable[Generator], answers: Answers, width: int = 64) -> Iterator[Any]:
    """Advance up to `width` generators side by side and yield what they return, in the order they were given.

    A generator yields a request, or a list of requests of one type, whose answers it gets as a list; requests of one
    type from all generators are answered in one call of `answers[type]`. A failed generator fails the run: nothing is
    swallowed.
    """
    waiting: list[tuple[int, Generator, Any]] = []  # (index, generator, its request or requests)
    finished: list[tuple[int, Any]] = []
    source, following = enumerate(episodes), 0

    def advance(index: int, generator: Generator, answer: Any) -> None:
        try:
            waiting.append((index, generator, generator.send(answer)))
        except StopIteration as stop:
            heapq.heappush(finished, (index, stop.value))

    while True:
        # What is finished and not yet yielded counts too, so that a slow first episode can't pile up the rest.
        while len(waiting) + len(finished) < width and (item := next(source, None)) is not None:
            advance(*item, None)
        if finished and finished[0][0] == following:
            yield heapq.heappop(finished)[1]
            following += 1
            continue
        if not waiting:
            return
        # The most frequent kind of request goes first: the others meet more company later.
        kinds = [type(r[0] if isinstance(r, list) else r) for _, _, r in waiting]
        kind = max(set(kinds), key=lambda k: (kinds.count(k), k.__name__))
        turn = [w for w, k in zip(waiting, kinds, strict=True) if k is kind]
        waiting = [w for w, k in zip(waiting, kinds, strict=True) if k is not kind]
        asked = [r if isinstance(r, list) else [r] for _, _, r in turn]
        answered = iter(answers[kind]([r for some in asked for r in some]))
        for (index, generator, request), some in zip(turn, asked, strict=True):
            mine = [next(answered) for _ in some]
            advance(index, generator, mine if isinstance(request, list) else mine[0])


# ---------------------------------------------------------------------------------------------------------- the policy


def device_and_dtype(device: str | None) -> tuple[torch.device, torch.dtype]:
    """bf16 on a GPU, float32 on a CPU."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"--device {device}: not here ({str(error).splitlines()[0]})") from None
    return chosen, torch.bfloat16 if chosen.type == "cuda" else torch.float32


def mixed_precision(model: Any) -> torch.autocast:
    """bf16 arithmetic on float32 weights: on a GPU, and on a CPU that has it (1.4 to 1.6 times as fast)."""
    has_it = model.device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(model.device.type, torch.bfloat16, enabled=has_it)


def load_tokenizer(path: str | Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_checkpoint(
    path: str | Path, kind: Any, device: str | None, load_in: str | None = None, train: bool = False
) -> tuple[Any, Chat]:
    """A HuggingFace model of class `kind` (AutoModelForCausalLM, AutoModel) and its Chat; a folder or a hub name.

    To be trained, it is float32: an AdamW step of 1e-5 is less than half a bf16 step of a weight above 0.005.
    """
    where, dtype = device_and_dtype(device)
    dtype = torch.float32 if train else dtype
    options = quantised(load_in, where)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what matters of its load report is checked below
    try:
        model, about = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
        chat = Chat(load_tokenizer(path), Rendering.load(path))
    except (OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint that transformers can load ({str(error).splitlines()[0]})") from None
    if about["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"{path}: no weights for {min(about['missing_keys'])}; was the folder mixed from two?")
    if len(chat.tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError(f"{path}: its tokenizer has more tokens than its model; was the folder mixed from two?")
    return model if load_in else model.to(where), chat


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

        states, tails = [self.chat.runs(requests[i].state) for i in which], [texts[i] for i in which]
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
        runs = [self.chat.runs(s) for s, _ in pairs]
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
        prompts = [self.prompts.prompt(self.chat.runs(r.state)) for r in requests]
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
