"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, OpenAI) as an engine.

    Endpoint         one server: requests tried again where the fault may pass
    ServerPolicy     answers `Sample` requests as `policy.Policy` does, by /completions of one server or of several

The server holds the weights; the checkpoint folder named beside it gives tokenizer and rendering. Texts are sampled
with a seed of (run seed, task, node), so that a server that honours it gives the same answers again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from qlass import UserError
from qlass.chat import Chat
from qlass.driver import Candidate, Sample


class Refused(UserError):
    """The server is there and does not do what it was asked (4xx); to ask again, or elsewhere, is no use."""


class Endpoint:
    """A server's base URL, http://HOST:PORT/v1, with #MODEL where it serves several; $OPENAI_API_KEY is sent if set.

    flag, otherwise: what an error names, and what it offers instead.
    """

    def __init__(
        self, url: str, flag: str = "--server", timeout: float = 600, attempts: int = 5, pause: float = 1,
        otherwise: str = "leave --server out to sample here",
    ) -> None:  # fmt: skip
        self.url, _, self.model = url.partition("#")
        self.flag, self.timeout, self.attempts, self.pause, self.otherwise = flag, timeout, attempts, pause, otherwise
        if not self.model:
            try:
                self.model = self.call("/models")["data"][0]["id"]
            except (IndexError, KeyError, TypeError):
                self.model = ""

    def call(self, path: str, body: dict | None = None) -> dict:
        """One exchange: tried again, later each time, where the fault may pass; UserError where it does not."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        for attempt in range(self.attempts):
            wait = self.pause * 2**attempt
            try:
                request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    answer = json.load(reply)
                if isinstance(answer, dict):
                    return answer
                reason = f"no JSON object in its answer ({str(answer)[:80]})"
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {error.read(200).decode(errors='replace').strip()}"
                if error.code < 500 and error.code not in (408, 429):
                    raise Refused(self.message(path, reason)) from None
                asked = error.headers.get("Retry-After", "")
                wait = min(float(asked), 60.0) if asked.isdigit() else wait
            except (OSError, ValueError, HTTPException) as error:  # no connection, time out; no JSON; cut short
                reason = str(error) or type(error).__name__
            if attempt < self.attempts - 1:
                time.sleep(wait)
        raise UserError(self.message(path, reason))

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> tuple[str, dict]:
        """The text of a chat completion's first choice, and that choice; messages are (role, content)."""
        said = [{"role": role, "content": content} for role, content in messages]
        reply = self.call("/chat/completions", {"model": self.model, "messages": said, **options})
        try:
            choice = reply["choices"][0]
            return choice["message"]["content"] or "", choice
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.flag} {self.url}: no chat completion in its answer {str(reply)[:200]}") from None

    def message(self, path: str, reason: str) -> str:
        start = "start an OpenAI-compatible server there"
        return f"{self.flag} {self.url}{path}: {' '.join(reason.split())}; {start}, or {self.otherwise}"


class ServerPolicy:
    """pi(a | s) by servers with equal weights, which share the load; free text only.

    Prompts go as token ids where the server takes them (vLLM, SGLang, llama.cpp), else as text. `n` candidates are one
    request; a server that gives fewer is asked again for the rest. A server that fails for good is left out.
    """

    def __init__(
        self, urls: Sequence[str], chat: Chat, seed: int = 0, parallel: int = 64, timeout: float = 600, pause: float = 1
    ) -> None:
        if chat.rendering.candidates == "valid":
            raise UserError(
                "--server writes free text, but this checkpoint chooses among the valid actions, which needs "
                "probabilities that no completion server gives: leave --server out, or train it with --candidates free"
            )
        self.chat, self.seed, self.parallel = chat, seed, parallel
        self.servers = [Endpoint(url, timeout=timeout, pause=pause) for url in urls]
        self.open = dict.fromkeys(range(len(self.servers)), 0)  # requests under way at each server in use
        self.computed = 0  # tokens read and written, as the servers count them
        self._lock = threading.Lock()
        self.by_ids = [self._takes_ids(server) for server in self.servers]

    def _takes_ids(self, server: Endpoint) -> bool:
        body = {"model": server.model, "prompt": self.chat._ids("", "a", ""), "max_tokens": 1}
        try:
            server.call("/completions", body)
        except Refused:
            return False
        return True

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Many requests at once; a failure of all servers fails the run, whose files the same command continues."""
        prompts = [self.chat.prompt(request.state) for request in requests]  # here: a tokenizer is not for threads
        with ThreadPoolExecutor(self.parallel * len(self.servers)) as pool:
            return list(pool.map(self._answer, requests, prompts))

    def _answer(self, request: Sample, ids: list[int]) -> list[Candidate]:
        if request.valid:
            raise UserError("--server: a server can't choose among valid actions; leave --server out")
        wanted = request.n if request.temperature else 1  # greedy ones are equal, and some servers refuse n > 1
        found: list[Candidate] = []
        empty = 0
        while len(found) < wanted:
            some = self._ask(request, ids, wanted - len(found), len(found) + 1000 * empty)[: wanted - len(found)]
            empty = 0 if some else empty + 1
            if empty == 3:
                raise UserError("--server: three answers in turn without a choice in them; is it a completion server?")
            found += some
        return found if request.temperature else found * request.n

    def _ask(self, request: Sample, ids: list[int], n: int, part: int) -> list[Candidate]:
        """One exchange with the server that has the least to do; with another one if that fails for good."""
        while True:
            with self._lock:
                if not self.open:
                    raise UserError("--server: none answers any more; what is written so far is kept")
                at = min(self.open, key=self.open.__getitem__)
                self.open[at] += 1
            try:
                return self._parse(self.servers[at].call("/completions", self._body(at, request, ids, n, part)))
            except Refused:
                raise
            except UserError as error:
                with self._lock:
                    lost = self.open.pop(at, None) is not None
                    if not self.open:
                        raise UserError(f"{error}; what is written so far is kept") from None
                if lost:
                    print(f"{error}; going on with {len(self.open)} other(s)", flush=True)
            finally:
                with self._lock:
                    if at in self.open:
                        self.open[at] -= 1

    def _body(self, at: int, request: Sample, ids: list[int], n: int, part: int) -> dict:
        chat, r = self.chat, self.chat.rendering
        digest = hashlib.blake2b(repr((self.seed, *request.key, part)).encode(), digest_size=4).digest()
        body = {
            "model": self.servers[at].model, "prompt": ids if self.by_ids[at] else self._text(ids), "n": n,
            "max_tokens": r.max_new_tokens, "temperature": request.temperature, "top_p": r.top_p, "logprobs": 0,
            "stop": [chat.stop.strip(), *r.stop][:4], "seed": int.from_bytes(digest, "big") >> 1,
        }  # fmt: skip
        if self.by_ids[at]:  # such servers know these too
            body |= {"stop_token_ids": [chat.stop_id], **({"top_k": r.top_k} if r.top_k else {})}
        return body

    def _text(self, ids: list[int]) -> str:
        """The text whose tokens, as a server makes them, are these: one that begins each text by itself gets no BOS."""
        tokenizer = self.chat.tokenizer
        with self._lock:
            text = tokenizer.decode(ids)
            bare = text.removeprefix(tokenizer.bos_token or "").removeprefix(" " if tokenizer.bos_token else "")
            return bare if bare != text and tokenizer(bare).input_ids == ids else text

    def _parse(self, reply: dict) -> list[Candidate]:
        candidates = []
        try:
            choices, usage = reply.get("choices") or [], reply.get("usage") or {}
            alone = usage.get("completion_tokens") if len(choices) == 1 else None
            for choice in choices:
                text = choice["text"].split(self.chat.stop.strip(), 1)[0]
                told = (choice.get("logprobs") or {}).get("token_logprobs") or []
                with self._lock:
                    tokens = len(told) or alone or len(self.chat.action(text, ""))
                logprob = sum(x for x in told if x is not None) if told else float("nan")
                candidates.append(Candidate(self.chat.said(text), tokens, logprob))
            spent = usage.get("total_tokens") or sum(c.tokens for c in candidates)
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"--server: no completion in its answer {str(reply)[:200]}") from None
        with self._lock:
            self.computed += spent
        return candidates
