"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, OpenAI) as an engine.

The server holds the weights; the checkpoint folder named beside it gives tokenizer and rendering. Each text has a seed
of (run seed, task, node, candidate), so that a server that honours it gives the same answers again.
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
from urllib.request import getproxies

from qlass import UserError
from qlass.chat import Chat, State, any_of, uniforms
from qlass.driver import Candidate, Likelihood, Sample


class Endpoint:
    """A server's URL, http://HOST:PORT/v1, with #MODEL where it serves several; $OPENAI_API_KEY is sent if set."""

    def __init__(self, url: str, flag: str = "--server", retries: int = 5, timeout: float = 600) -> None:
        from qlass.models import needs

        if "," in url:
            raise UserError(f"{flag} {url}: one server is expected; several engines: a router in front")
        openai = needs("openai", flag)
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
            reason = f"{status} {error.response.text}" if status else str(error.__cause__ or error)
            reason = " ".join(reason.split())[:300]
            raise UserError(
                f"{self.name}: {reason}; start an OpenAI-compatible server there, or name another"
            ) from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self.name}: not what an OpenAI-compatible server answers ({error})") from error

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> str:
        """The text of a chat completion; messages are (role, content)."""
        turns = State(tuple(messages)).dump()
        with self.one_line():
            reply = self.client.chat.completions.create(model=self.model, messages=turns, **options)
            return reply.choices[0].message.content or ""


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text only, its log-probability unknown."""

    def __init__(self, url: str, chat: Chat, seed: int = 0, parallel: int = 64, **options: Any) -> None:
        if chat.rendering.candidates == "valid":
            raise UserError("--server: this checkpoint chooses among valid actions by their probabilities, which no "
                            "server tells: leave --server out, or train it with --candidates free")  # fmt: skip
        self.chat, self.seed, self.parallel, self.server = chat, seed, parallel, Endpoint(url, **options)
        self.computed = 0  # tokens read and written, as the server counts them
        others = sorted(chat.stop_ids - {chat.stop_id})
        self.ends = [chat.stop.strip(), *(chat.tokenizer.decode([token]).strip() for token in others)]
        ids = chat.prompt(State((("user", "a"),)))
        dialects = self._dialects()
        for dialect in dialects:
            self.by_ids, self.extra = dialect
            try:
                _, usage = self._complete(self._prompt(ids), 0.0, (), 1)
                break
            except UserError as error:
                # What a server refuses by 400, 422 or, as llama-cpp-python, 500, it may take in other words.
                if dialect is dialects[-1] or getattr(error.__cause__, "status_code", 0) not in (400, 422, 500):
                    raise
        if (length := usage.get("prompt_tokens") or len(ids)) != len(ids):
            print(f"warning: {self.server.name} reads {length} tokens where the checkpoint has {len(ids)}: is it the "
                  "same model?", file=sys.stderr)  # fmt: skip

    def _dialects(self) -> list[tuple[bool, dict]]:
        """Is a prompt its token ids, else text; and what is set beside OpenAI's settings, in the words of one server or
        another: else its own defaults would act."""
        k, ends = self.chat.rendering.top_k, sorted(self.chat.stop_ids)
        neutral = {"stop_token_ids": ends, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}
        config = json.dumps({"do_sample": True, "top_k": k, "eos_token_id": ends})
        extras = [{**neutral, "top_k": top} for top in ([k] if k else [-1, 0])]  # all tokens: -1 or 0
        extras += [{"generation_config": config}, *([] if k else [{}])]  # transformers serve; OpenAI
        return list(itertools.product((True, False), extras))

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed; of greedy ones, which are equal, one."""
        jobs = []  # with its tokens here: a tokenizer is not for threads
        for r in requests:
            prompt = self._prompt(self.chat.prompt(r.state))
            jobs += [(prompt, r.temperature, (*r.key, k)) for k in range(r.n if r.temperature else 1)]
        with ThreadPoolExecutor(self.parallel) as pool:
            replies = list(pool.map(lambda job: self._complete(*job), jobs))
        drawn = iter([self._candidate(*reply) for reply in replies])
        return [[next(drawn) for _ in range(r.n)] if r.temperature else [next(drawn)] * r.n for r in requests]

    def likelihoods(self, requests: list[Likelihood]) -> list[list[float]]:
        raise UserError("--server: a server does not tell the log-probability of a text: leave --method likeliest out")

    def _complete(
        self, prompt: list[int] | str, temperature: float, key: tuple, room: int | None = None
    ) -> tuple[str, dict]:
        """The text up to the end of the turn, and the server's counts of tokens. room: of a question put only once."""
        r = self.chat.rendering
        client = self.server.client.with_options(max_retries=0) if room else self.server.client
        with self.server.one_line():
            reply = client.completions.create(
                model=self.server.model, prompt=prompt, temperature=temperature, top_p=r.top_p, extra_body=self.extra,
                max_tokens=room or r.max_new_tokens, seed=int(uniforms(1, self.seed, *key)[0] * 2**31),
                stop=[*self.ends, *r.stop][:4],  # a server takes no more; the others end it here and in `Chat.said`
            )  # fmt: skip
            text = any_of(self.ends).split(reply.choices[0].text)[0]
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
