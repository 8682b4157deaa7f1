"""Clients of OpenAI-compatible servers, and models that algorithms await one by one.

Once a server has answered, it is waited for when it is busy or away: each question has one deadline. A reply is read by
its type. A reply of another type, of another model than before, or one that counts other tokens than were sent, stops
the run in one line; the same command goes on.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, FiniteFloat, NonNegativeInt, TypeAdapter
from tqdm import tqdm

from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.messages import State, without_thinking
from qlass.noise import uniforms
from qlass.records import as_user_error
from qlass.settings import Sampling

SHORT = 5  # seconds of waiting that nobody need know of
C = TypeVar("C")

# ------------------------------------------------------------------------------------------------ models elsewhere


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, in a thread of its own, of all that waits for servers."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@dataclass
class Remote:
    """A model behind a server, which `drive` asks request by request."""

    answer: Callable[[Any], Coroutine]  # to a request

    def begin(self, request: Any, ready: Callable = bool) -> Callable[[], Any]:
        """Ask. Returns what waits for the answer; `ready` is called when it is there."""
        future = asyncio.run_coroutine_threadsafe(self.answer(request), event_loop())
        future.add_done_callback(ready)
        return future.result

    def __call__(self, requests: list) -> list:
        return [wait() for wait in list(map(self.begin, requests))]


def sampler(draw: Callable[[Sample, int], Coroutine[Any, Any, Candidate]], seed: int) -> Remote:
    """A model that draws each candidate of a request by a call of its own, with a seed for the server: of (seed, the
    request's key, candidate)."""

    async def candidates(request: Sample) -> list[Candidate]:
        noise = [float(uniforms(1, seed, *request.key, k)[0]) for k in range(request.n)]
        return await asyncio.gather(*(draw(request, int(x * 2**31)) for x in noise))

    return Remote(candidates)


# --------------------------------------------------------------------------------------------------------- replies


@dataclass
class Usage:
    """The tokens of a request and of its answer."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt | None = None


@dataclass
class Text:
    """A choice of /completions."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list | None = None


@dataclass
class Message:
    content: str | None = None
    refusal: str | None = None


@dataclass
class Turn:
    """A choice of /chat/completions."""

    message: Message
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass
class Reply(Generic[C]):
    """The fields that are read of a completion."""

    choices: Annotated[list[C], Field(min_length=1)]
    usage: Usage
    model: str | None = None


@dataclass
class Embedding:
    index: int
    embedding: tuple[FiniteFloat]


@dataclass
class Embeddings:
    data: list[Embedding]
    usage: Usage
    model: str | None = None


# ---------------------------------------------------------------------------------------------------------- a server


class Server:
    """The model at http://HOST:PORT/v1#MODEL, asked with $OPENAI_API_KEY.

    width: requests at once. timeout: seconds for the answer to a question, by however many requests; one that has no
    answer after half of them is closed.
    """

    def __init__(self, url: str, width: int | None = None, timeout: int = Sampling.timeout) -> None:
        import openai

        address, _, self.model = url.partition("#")
        if not self.model:
            raise UserError(f"{url}: name its model, URL#MODEL")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.url, self.timeout = url, timeout
        self.room = asyncio.Semaphore(width or 64)
        with as_user_error(url, " ($ALL_PROXY, $SSL_CERT_FILE)"):
            seconds = openai.Timeout(timeout / 2, connect=min(60, timeout / 2))
            self.client = openai.AsyncOpenAI(base_url=address, api_key=key, timeout=seconds, max_retries=0)
        self.answered = False
        self.answered_as: str | None = None  # the model's name in replies: an alias may come to mean another model
        self.late: set[Any] = set()  # questions that wait for a server that is busy or away

    async def ask(self, path: str, kind: Any, **body: Any) -> Any:
        """The reply to a question, by its type. UserError with what the server says instead."""
        task = asyncio.current_task()
        async with self.room:
            with as_user_error(self.url):
                text = await self.post(path, {"model": self.model} | body)
        self.answered = True
        if self.late == {task}:
            tqdm.write(f"{self.url}: answers again", file=sys.stderr)  # not on the line of a progress bar
        self.late.discard(task)
        with as_user_error(f"{self.url}: it answers {text!r:.400}"):
            reply = TypeAdapter(kind).validate_json(text)
        self.answered_as = self.answered_as or reply.model
        if reply.model and reply.model != self.answered_as:
            raise UserError(f"{self.url}: it answered as {self.answered_as}, and now as {reply.model}")
        return reply

    async def post(self, path: str, body: dict) -> str:
        """The text of a reply. A server that is busy or away is asked until the deadline, or twice if it has never
        answered. The client's own retries would end by their number, and at a Retry-After of two minutes."""
        import openai

        clock, problem = asyncio.get_running_loop().time, ""
        start = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                for tries in itertools.count():
                    try:
                        return await self.client.post(path, cast_to=str, body=body)
                    except openai.APIError as error:
                        status = getattr(error, "status_code", 500)  # no reply is as one of a server that is away
                        if (tries and not self.answered) or not (status in (408, 409, 429) or status >= 500):
                            raise
                        delay = retry_after(error)
                        problem = f"it asks for {delay:g} seconds: {error}" if delay else str(error)
                        pause = max(min(2**tries / 2, 8), delay)
                    waits = clock() - start + pause
                    if waits > self.timeout:
                        break
                    if waits > SHORT:
                        self.report_wait(problem)
                    await asyncio.sleep(pause)
        raise ValueError(f"no answer in {self.timeout} seconds (--timeout) {problem}")

    def report_wait(self, problem: str) -> None:
        if not self.late:
            most = f"{self.timeout / 60:g} minutes at most"
            tqdm.write(f"{self.url}: is busy or away: waiting for it, {most}: {problem}", file=sys.stderr)
        self.late.add(asyncio.current_task())

    async def complete(self, prompt: list[int], **options: Any) -> Reply[Text]:
        """The completion of a prompt of token ids."""
        reply = await self.ask("/completions", Reply[Text], prompt=prompt, **options)
        if reply.usage.prompt_tokens != len(prompt):
            raise UserError(f"{self.url}: reads {len(prompt)} tokens as {reply.usage}")
        return reply

    async def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> Reply[Turn]:
        """The completion of messages (role, content), which the server renders itself."""
        return await self.ask("/chat/completions", Reply[Turn], messages=State(tuple(messages)).dump(), **options)

    async def text(self, messages: Iterable[tuple[str, str]], **options: Any) -> str:
        """The text that follows messages, without thoughts; empty if the server gives none."""
        reply = await self.chat(messages, **options)
        return without_thinking(reply.choices[0].message.content or "")


def retry_after(error: Any) -> float:
    """Seconds for which a server asks to be left alone, or until a time; 0 if it does not."""
    response = getattr(error, "response", None)
    answer = response.headers.get("retry-after", "") if response else ""
    with contextlib.suppress(ValueError):
        return float(answer)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(answer) - datetime.now(UTC)).total_seconds())
    return 0.0
