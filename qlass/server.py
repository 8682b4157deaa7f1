"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, OpenAI) as an engine.

The server holds the weights; the checkpoint folder named beside it gives tokenizer and rendering.
Each text has a seed of (run seed, task, node, candidate): a server that honours it gives the same
answers again.
"""

import itertools
import json
import sys
from collections.abc import Iterator

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat, any_of
from qlass.endpoint import Endpoint, side_by_side
from qlass.messages import State, uniforms

ALL = 1 << 30  # top-k of all tokens: 0 for some servers, -1 for others, a large number for each


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text."""

    def __init__(self, url: str, chat: Chat, seed: int = 0, parallel: int = 64) -> None:
        if chat.rendering.candidates == "valid":
            problem = "the checkpoint chooses by probabilities, which no server tells"
            raise UserError(f"--server: {problem}; leave it out, or train with --candidates free")
        self.chat, self.seed, self.parallel, self.server = chat, seed, parallel, Endpoint(url)
        self.computed = 0  # tokens read and written, as the server counts them
        others = sorted(chat.stop_ids - {chat.stop_id})
        self.ends = [chat.stop, *(chat.tokenizer.decode([token]) for token in others)]
        self.ends = [text.strip() for text in self.ends]
        ids = chat.prompt(State((("user", "a"),)))
        for dialect in self._dialects():
            self.by_ids, self.extra = dialect
            try:
                _, usage = self._complete(*self._prompt(ids), 0.0, (), 1)
                break
            except UserError as error:
                if getattr(error.__cause__, "status_code", 0) not in (400, 422, 500):
                    raise
                refusal = error  # which it may take in other words; llama-cpp-python says 500
        else:
            raise refusal
        if (length := usage.get("prompt_tokens") or len(ids)) != len(ids):
            counts = f"reads {length} tokens where the checkpoint has {len(ids)}"
            print(f"warning: {self.server.name} {counts}: is it the same model?", file=sys.stderr)

    def _dialects(self) -> Iterator[tuple[bool, dict]]:
        """Is a prompt its token ids, else text; and settings beside OpenAI's, in the words of most
        servers or of `transformers serve`: else their own defaults would act."""
        k, ends = self.chat.rendering.top_k, sorted(self.chat.stop_ids)
        neutral = {"top_k": k or ALL, "min_p": 0, "stop_token_ids": ends}
        neutral |= {"repetition_penalty": 1, "repeat_penalty": 1}
        config = json.dumps({"do_sample": True, "top_k": k, "eos_token_id": ends})
        return itertools.product((True, False), (neutral, {"generation_config": config}))

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed."""
        jobs = []
        for r in requests:
            prompt = self._prompt(self.chat.prompt(r.state))  # here: a tokenizer is not for threads
            jobs += [(*prompt, r.temperature, (*r.key, k)) for k in range(r.n)]
        replies = side_by_side(lambda job: self._complete(*job), jobs, self.parallel)
        drawn = iter([self._candidate(*reply) for reply in replies])
        return [[next(drawn) for _ in range(r.n)] for r in requests]

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of texts, where the server tells log-probabilities of a prompt (vLLM)."""
        jobs = []
        for r in requests:
            prompt = self.chat.prompt(r.state)
            ends = [self.chat.action(a, r.state.task, len(prompt)) for a in r.actions]
            jobs += [(prompt, ids) for ids in ends]
        self.computed += sum(len(prompt) + len(ids) for prompt, ids in jobs)
        values = side_by_side(
            lambda job: self.server.prompt_logprobs([*job[0], *job[1]]), jobs, self.parallel
        )
        sums = iter([sum(t[-len(ids) :]) for t, (_, ids) in zip(values, jobs, strict=True)])
        return [[next(sums) for _ in r.actions] for r in requests]

    def _complete(
        self, prompt: list[int] | str, least: int, temperature: float, key: tuple, room: int = 0
    ) -> tuple[str, dict]:
        """The text up to the end of the turn, of `room` tokens at most (0: an action's), and the
        counts of tokens."""
        r = self.chat.rendering
        options = {
            "temperature": temperature,
            "top_p": r.top_p,
            "max_tokens": room or r.max_new_tokens,
            "seed": int(uniforms(1, self.seed, *key)[0] * 2**31),
            "stop": [*self.ends, *r.stop][:4],  # a server takes no more; `action_in` has the others
            "extra_body": self.extra,
        }
        text, usage = self.server.complete(prompt, least, **options)
        return any_of(self.ends).split(text)[0], usage

    def _prompt(self, ids: list[int]) -> tuple[list[int] | str, int]:
        """The prompt, and how many tokens of it the server reads at least.

        Text has no BOS where a server, as the tokenizer does, begins it with one.
        """
        if self.by_ids:
            return ids, len(ids)
        text, bos = self.chat.tokenizer.decode(ids), self.chat.tokenizer.bos_token or ""
        bare = text.removeprefix(bos).removeprefix(" " if bos else "")
        text = bare if self.chat.tokenizer(bare).input_ids == ids else text
        return text, min(len(ids), len(self.chat.tokenizer(text).input_ids)) - 1  # without BOS

    def _candidate(self, text: str, usage: dict) -> Candidate:
        tokens = usage.get("completion_tokens") or len(self.chat.action(text, ""))
        self.computed += usage.get("total_tokens") or tokens
        return Candidate(self.chat.action_in(text), tokens, float("nan"))
