"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, OpenAI) as an engine.

The server holds the weights; the checkpoint folder named beside it gives tokenizer and rendering.
Each text has a seed of (run seed, task, node, candidate): a server that honours it gives the same
answers again.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat, State, any_of, uniforms

ALL = 1 << 30  # top-k of all tokens: 0 for some servers, -1 for others, a large number for each


class Endpoint:
    """A server's URL, http://HOST:PORT/v1, with #MODEL if it serves several; $OPENAI_API_KEY."""

    def __init__(self, url: str, flag: str = "--server") -> None:
        import openai

        address, _, self.model = url.partition("#")
        self.name, self.fault = f"{flag} {address}", openai.APIError
        local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy
        http = openai.DefaultHttpxClient(trust_env=not local)
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.client = openai.OpenAI(base_url=address, api_key=key, http_client=http)
        if not self.model:
            with self.one_line():
                self.model = self.client.models.list().data[0].id

    @contextlib.contextmanager
    def one_line(self) -> Iterator[None]:
        """UserError for what the client raises after its retries."""
        try:
            yield
        except self.fault as error:
            reason = " ".join(str(error).split())[:300]
            reason += "; is an OpenAI-compatible server there?"
            raise UserError(f"{self.name}: {reason}") from error

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> str:
        """The text of a chat completion; messages are (role, content)."""
        return self.reply(messages, **options)[0]

    def reply(self, messages: Iterable[tuple[str, str]], **options: Any) -> tuple[str, dict]:
        """The text of a chat completion, and the counts of tokens."""
        turns = State(tuple(messages)).dump()
        with self.one_line():
            reply = self.client.chat.completions.create(model=self.model, messages=turns, **options)
        usage = reply.usage.model_dump() if reply.usage else {}
        return reply.choices[0].message.content or "", usage


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text, no probabilities."""

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
                _, usage = self._complete(self._prompt(ids), 0.0, (), 1)
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
            jobs += [(prompt, r.temperature, (*r.key, k)) for k in range(r.n)]
        with ThreadPoolExecutor(self.parallel) as pool:
            replies = list(pool.map(lambda job: self._complete(*job), jobs))
        drawn = iter([self._candidate(*reply) for reply in replies])
        return [[next(drawn) for _ in range(r.n)] for r in requests]

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        problem = "a server does not tell the log-probability of a text"
        raise UserError(f"--server: {problem}: leave --method likeliest out")

    def _complete(
        self, prompt: list[int] | str, temperature: float, key: tuple, room: int = 0
    ) -> tuple[str, dict]:
        """The text up to the end of the turn, of `room` tokens at most (0: an action's), and the
        counts of tokens."""
        r = self.chat.rendering
        options = {
            "model": self.server.model,
            "temperature": temperature,
            "top_p": r.top_p,
            "max_tokens": room or r.max_new_tokens,
            "seed": int(uniforms(1, self.seed, *key)[0] * 2**31),
            "stop": [*self.ends, *r.stop][:4],  # a server takes no more; `action_in` has the others
            "extra_body": self.extra,
        }
        with self.server.one_line():
            reply = self.server.client.completions.create(prompt=prompt, **options)
        text = any_of(self.ends).split(reply.choices[0].text)[0]
        return text, reply.usage.model_dump() if reply.usage else {}

    def _prompt(self, ids: list[int]) -> list[int] | str:
        """Text has no BOS where a server, as the tokenizer does, begins it with one."""
        if self.by_ids:
            return ids
        text, bos = self.chat.tokenizer.decode(ids), self.chat.tokenizer.bos_token or ""
        bare = text.removeprefix(bos).removeprefix(" " if bos else "")
        return bare if self.chat.tokenizer(bare).input_ids == ids else text

    def _candidate(self, text: str, usage: dict) -> Candidate:
        tokens = usage.get("completion_tokens") or len(self.chat.action(text, ""))
        self.computed += usage.get("total_tokens") or tokens
        return Candidate(self.chat.action_in(text), tokens, float("nan"))
