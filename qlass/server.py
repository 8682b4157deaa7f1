"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, OpenAI) as an engine.

The server holds the weights; the checkpoint folder named beside it gives tokenizer and rendering. Each text has a seed
of (run seed, task, node, candidate), so that a server that honours it gives the same answers again.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from qlass import UserError
from qlass.chat import Chat, State
from qlass.driver import Candidate, Likelihood, Sample


class Refused(UserError):
    """The server refuses a request for what it says; it may take it in another form."""


class Endpoint:
    """A server's URL, http://HOST:PORT/v1, with #MODEL where it serves several; $OPENAI_API_KEY is sent if set."""

    def __init__(self, url: str, flag: str = "--server", retries: int = 5, timeout: float = 600) -> None:
        if "," in url:
            raise UserError(f"{flag} {url}: one server is expected; several engines: a router in front")
        try:
            import openai
        except ImportError:
            raise UserError(f"{flag}: openai is missing: pip install openai") from None
        self.url, _, self.model = url.partition("#")
        local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")  # where no proxy is to answer
        self.name = f"{flag} {self.url}" + (f" (by proxies {getproxies()})" if getproxies() and not local else "")
        self.fault = openai.APIError
        self.client = openai.OpenAI(
            base_url=self.url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=retries,
            timeout=timeout, http_client=openai.DefaultHttpxClient(trust_env=not local),
        )  # fmt: skip
        if not self.model:
            with self.one_line():
                self.model = next((model.id for model in self.client.models.list().data or ()), "")

    @contextlib.contextmanager
    def one_line(self) -> Iterator[None]:
        """UserError for what the client raises after its retries, and for an answer of another shape than expected."""
        try:
            yield
        except self.fault as error:
            status = getattr(error, "status_code", None)
            kind = Refused if status in (400, 422, 500) else UserError  # 500: llama-cpp-python's for a wrong type
            reason = f"{status} {error.response.text}" if status else str(error.__cause__ or error)
            reason = " ".join(reason.split())[:300]
            raise kind(f"{self.name}: {reason}; start an OpenAI-compatible server there, or name another") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self.name}: not what an OpenAI-compatible server answers ({error})") from error

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> tuple[str, dict]:
        """The text of a chat completion's first choice, and that choice; messages are (role, content)."""
        turns = [{"role": role, "content": content} for role, content in messages]
        with self.one_line():
            choice = self.client.chat.completions.create(model=self.model, messages=turns, **options).choices[0]
            return choice.message.content or "", choice.to_dict()


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text only, its log-probability unknown."""

    def __init__(self, url: str, chat: Chat, seed: int = 0, parallel: int = 64, **options: Any) -> None:
        if chat.rendering.candidates == "valid":
            raise UserError("--server: this checkpoint chooses among valid actions by their probabilities, which no "
                            "server tells: leave --server out, or train it with --candidates free")  # fmt: skip
        self.chat, self.seed, self.parallel, self.server = chat, seed, parallel, Endpoint(url, **options)
        self.computed = 0  # tokens read and written, as the server counts them
        ids = chat.prompt(State((("user", "a"),)))
        for dialect in itertools.product((True, False), self._extras()):  # the first that the server takes
            self.by_ids, self.extra = dialect
            try:
                _, usage = self._complete(self._prompt(ids), 0.0, (), 1)
                break
            except Refused as error:
                refusal = error
        else:
            raise refusal
        if (length := usage.get("prompt_tokens") or len(ids)) != len(ids):
            print(f"warning: {self.server.name} reads {length} tokens where the checkpoint has {len(ids)}: is it the "
                  "same model?", file=sys.stderr)  # fmt: skip

    def _extras(self) -> Iterator[dict]:
        """Settings beside OpenAI's, in the words of one server or another: else its own defaults would act."""
        k, ends = self.chat.rendering.top_k, sorted(self.chat.stop_ids)
        neutral = {"stop_token_ids": ends, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}
        yield from ({**neutral, "top_k": top} for top in ([k] if k else [-1, 0]))  # all tokens: -1 or 0
        yield {"generation_config": json.dumps({"do_sample": True, "top_k": k, "eos_token_id": ends})}  # transformers
        if not k:
            yield {}

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed; of greedy ones, which are equal, one."""
        prompts = [self._prompt(self.chat.prompt(r.state)) for r in requests]  # here: a tokenizer is not for threads
        jobs = [
            (prompt, r.temperature, (*r.key, k))
            for r, prompt in zip(requests, prompts, strict=True)
            for k in range(r.n if r.temperature else 1)
        ]
        with ThreadPoolExecutor(self.parallel) as pool:
            drawn = iter([self._candidate(*reply) for reply in pool.map(self._complete, *zip(*jobs, strict=True))])
        return [[next(drawn) for _ in range(r.n)] if r.temperature else [next(drawn)] * r.n for r in requests]

    def likelihoods(self, requests: list[Likelihood]) -> list[list[float]]:
        raise UserError("--server: a server does not tell the log-probability of a text: leave --method likeliest out")

    def _complete(
        self, prompt: list[int] | str, temperature: float, key: tuple, room: int | None = None
    ) -> tuple[str, dict]:
        """The text up to the end of the turn, and the server's counts of tokens."""
        r, chat = self.chat.rendering, self.chat
        others = sorted(chat.stop_ids - {chat.stop_id})
        ends = [chat.stop.strip(), *(chat.tokenizer.decode([token]).strip() for token in others)]
        digest = hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=4).digest()
        client = self.server.client.with_options(max_retries=0) if room else self.server.client
        with self.server.one_line():
            reply = client.completions.create(
                model=self.server.model, prompt=prompt, temperature=temperature, top_p=r.top_p, extra_body=self.extra,
                max_tokens=room or r.max_new_tokens, seed=int.from_bytes(digest, "big") >> 1,
                stop=[*ends, *r.stop][:4],  # a server takes no more; what is beyond is cut here
            )  # fmt: skip
            text = reply.choices[0].text
            for end in ends:  # `Chat.said` cuts at the stop texts
                text = text.split(end, 1)[0]
            return text, reply.usage.model_dump() if reply.usage else {}

    def _prompt(self, ids: list[int]) -> list[int] | str:
        """Text has no BOS where a server, as the tokenizer does, begins it with one."""
        if self.by_ids:
            return ids
        text, bos = self.chat.tokenizer.decode(ids), self.chat.tokenizer.bos_token or ""
        bare = text.removeprefix(bos).removeprefix(" " if bos else "")
        return bare if bare != text and self.chat.tokenizer(bare).input_ids == ids else text

    def _candidate(self, text: str, usage: dict) -> Candidate:
        tokens = usage.get("completion_tokens") or len(self.chat.action(text, ""))
        self.computed += usage.get("total_tokens") or tokens
        return Candidate(self.chat.said(text), tokens, float("nan"))
