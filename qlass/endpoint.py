"""An OpenAI-compatible server, none of whose replies is believed: each is checked and, where
another try may help, asked for again."""

import contextlib
import email.utils
import json
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar
from urllib.parse import urlsplit

from qlass import UserError
from qlass.messages import State

T = TypeVar("T")
PATIENCE = 600.0  # seconds that a request waits in all for a server that is busy or away
FEW = 4  # retries after what may pass, but seldom does
BUSY = (408, 409, 425, 429, 502, 503, 504, 529)
HINTS = {  # by status; 0: no answer
    0: "; is an OpenAI-compatible server there?",
    404: "; does the URL end in /v1, and does the server have this model?",
}
JITTER = random.Random()  # requests that are refused together come back one by one


class Fault(Exception):
    """A reply that no number may come from; `retries` more tries may bring a better one."""

    status_code = 200

    def __init__(self, problem: str, retries: int = 0) -> None:
        super().__init__(problem)
        self.retries = retries


class Endpoint:
    """A server's URL, http://HOST:PORT/v1, with #MODEL if it serves several; $OPENAI_API_KEY.

    Replies pass through `read`, which believes none of them.
    """

    pause = staticmethod(time.sleep)

    def __init__(self, url: str, flag: str = "--server") -> None:
        import openai

        address, _, self.model = url.partition("#")
        self.name = f"{flag} {address}"
        self.failures, self.timeout = (openai.APIError, Fault), openai.APITimeoutError
        local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy
        http = openai.DefaultHttpxClient(trust_env=not local)
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.client = openai.OpenAI(base_url=address, api_key=key, http_client=http, max_retries=0)
        self.lock = threading.Lock()
        self.warnings: set[str] = set()
        self.works = False  # it has given a good reply
        self.first_draws: dict[int, tuple[int, str]] | None = {}  # hash of a prompt: seed, text
        self.repeats = 0
        if not self.model:
            self.model = self.patiently(self._only_model)

    def _only_model(self) -> str:
        """The name of the one model that the server lists: a base model may stand before the
        adapter that is meant."""
        models = at(json_of(self.client.models.with_raw_response.list()), "data")
        names = [str(at(model, "id")) for model in models] if isinstance(models, list) else []
        if len(names) != 1:
            problem = f"serves {', '.join(names[:9])}" if names else "lists no model"
            raise Fault(f"{problem}: name one, URL#MODEL")
        return names[0]

    def chat(self, messages: Iterable[tuple[str, str]], **options: Any) -> str:
        """The text of a chat completion; messages are (role, content)."""
        return self.reply(messages, **options)[0]

    def reply(self, messages: Iterable[tuple[str, str]], **options: Any) -> tuple[str, dict]:
        """The text of a chat completion, and the counts of tokens."""
        turns = State(tuple(messages)).dump()
        words = " ".join(turn["content"] for turn in turns).split()
        least = len(" ".join(words)) // 8  # tokens: text has 3 to 6 characters per token
        create = self.client.chat.completions.with_raw_response.create
        return self._ask(create, {"messages": turns} | options, least)

    def complete(self, prompt: list[int] | str, least: int, **options: Any) -> tuple[str, dict]:
        """The text and the token counts of a completion; `least`: tokens of the prompt."""
        create = self.client.completions.with_raw_response.create
        return self._ask(create, {"prompt": prompt} | options, least)

    def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """log p of each token but the first, given those before it, where the server tells."""
        create = self.client.completions.with_raw_response.create
        body = {"model": self.model, "prompt": ids, "max_tokens": 1}

        def ask() -> list[float]:
            reply = json_of(create(**body, extra_body={"prompt_logprobs": 0}))
            self.read(reply, body, len(ids))
            entries = at(reply, "choices", 0, "prompt_logprobs") or []
            values = [
                at(entry, str(token), "logprob") for entry, token in zip(entries, ids, strict=False)
            ]
            if len(entries) != len(ids) or not all(isinstance(v, float) for v in values[1:]):
                raise Fault("tells no log-probabilities of a prompt: leave --method likeliest out")
            return values[1:]

        return self.patiently(ask)

    def _ask(self, create: Callable, options: dict, least: int) -> tuple[str, dict]:
        """What `read` returns; a warning, once, if the server draws one text for ever.

        Four equal draws of a prompt by different seeds raise the question, four at temperature 2
        answer it: there an agent that is sure of its action writes different texts.
        """

        def draw(**changes: Any) -> tuple[str, dict]:
            body = {"model": self.model} | options | changes
            return self.patiently(lambda: self.read(json_of(create(**body)), body, least))

        text, usage = draw()
        if options.get("temperature") and self._repeats(options, text):
            with contextlib.suppress(UserError):  # it may refuse this temperature
                texts = {draw(temperature=2.0, seed=seed)[0] for seed in range(4)}
                if len(texts) == 1:
                    problem = "writes one text whatever the seed and the temperature"
                    self.warn(f"{problem}: the candidates of a state are all equal", "seed")
        return text, usage

    def _repeats(self, options: dict, text: str) -> bool:
        """Is this the third draw that repeats the first of its prompt? Not after one differs."""
        prompt, seed = options.get("prompt") or options["messages"], options.get("seed", 0)
        with self.lock:
            if self.first_draws is None:
                return False
            first_seed, first_text = self.first_draws.setdefault(hash(str(prompt)), (seed, text))
            if seed == first_seed:
                return False
            self.repeats += 1
            if text != first_text or self.repeats == 3:
                self.first_draws = None
            return text == first_text and self.repeats == 3

    def read(self, reply: Any, body: dict, least: int) -> tuple[str, dict]:
        """The text and the token counts of a reply to this body.

        Fault: the reply is none, is by another model, or was cut or given up.
        """
        choice = at(reply, "choices", 0)
        text = at(choice, "text") if "prompt" in body else at(choice, "message", "content")
        end, model = at(choice, "finish_reason"), at(reply, "model")
        counts = at(reply, "usage")
        counts = counts.items() if isinstance(counts, dict) else ()
        usage: dict[str, Any] = {n: c for n, c in counts if isinstance(c, int | dict)}
        length = usage.get("prompt_tokens") or least
        if error := at(reply, "error") or at(choice, "error"):
            raise Fault(f"answers with an error: {error}", FEW)
        if model and not same_model(self.model, str(model)):
            hint = "name the model as the server does, URL#MODEL"
            raise Fault(f"answers by {model}, not by {self.model}: {hint}")
        if length < least:
            problem = f"reads {length} tokens of a prompt of {least} or more"
            raise Fault(f"{problem}: it needs a longer context, or has another model")
        if end == "content_filter":
            raise Fault("withholds a reply (finish_reason content_filter)")
        if end in ("abort", "aborted", "cancelled", "error", "timeout"):
            raise Fault(f"gives up replies (finish_reason {end})", FEW)
        if end == "length" and not text and body.get("max_tokens") != 1:
            raise Fault("has no room for a text (finish_reason length): it needs a longer context")
        if not isinstance(text, str):
            raise Fault(f"answers without a text: {json.dumps(reply)[:100]}", FEW)
        self.works = True
        return text, usage

    def patiently(self, request: Callable[[], T]) -> T:
        """What `request` returns. After a failure that may pass it is made again, later and later.

        UserError: the failure stays, or PATIENCE is over.
        """
        tries, total = 1, 0.0
        while True:
            try:
                return request()
            except self.failures as error:
                delay = retry_after(error)
                wait = max(delay, min(2.0 ** min(tries, 8) / 4, 60)) * JITTER.uniform(1, 1.25)
                problem = " ".join(str(error).split())[:300]
                if tries > self._retries(error) or total + wait > PATIENCE:
                    problem += HINTS.get(getattr(error, "status_code", 0), "")
                    problem += f"; it asks to wait {delay:.0f} s" if delay > 60 else ""
                    problem += f"; {tries} tries in {total:.0f} s" if tries > 1 else ""
                    raise UserError(f"{self.name}: {problem}") from error
            self.warn(f"is asked again, here and later, after: {problem}", "again")
            self.pause(wait)
            tries, total = tries + 1, total + wait

    def _retries(self, error: Exception) -> float:
        """How often a request is made again after this failure."""
        if isinstance(error, Fault):
            return error.retries
        status = getattr(error, "status_code", 0)
        kinds = (getattr(error, "code", None), getattr(error, "type", None))
        if status in BUSY and "insufficient_quota" not in kinds:
            return math.inf
        if status:
            return FEW if status == 500 and self.works else 0
        away = self.works and not isinstance(error, self.timeout)  # that is ten minutes per try
        return math.inf if away else FEW

    def warn(self, text: str, key: str) -> None:
        """A line to stderr, once for each key."""
        with self.lock:
            if key not in self.warnings:
                print(f"warning: {self.name} {text}", file=sys.stderr)
            self.warnings.add(key)


def json_of(raw: Any) -> Any:
    """The body of an answer; text, such as a page of a proxy's, if it is no JSON."""
    text = raw.http_response.text
    try:
        return json.loads(text)
    except ValueError:
        return text


def at(reply: Any, *path: str | int) -> Any:
    """reply[a][b]..., None if there is no such entry: each part may be missing or null."""
    for key in path:
        try:
            reply = reply[key]
        except (KeyError, IndexError, TypeError):
            return None
    return reply


def same_model(name: str, reply: str) -> bool:
    """Does a reply name this model? Its date, the default revision or folders may be added."""
    bare = re.sub(r"(-\d{4}-?\d\d-?\d\d|@main|:latest)$", "", reply)
    pairs = (name, reply), (reply, name), (name, bare), (bare, name)
    return any(f"/{long}".endswith(f"/{short}") for long, short in pairs)


def retry_after(error: Exception) -> float:
    """Seconds that the server asks to wait, in its header a number or a date; 0: no wish."""
    text = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
    if date := email.utils.parsedate_tz(text):
        return max(email.utils.mktime_tz(date) - time.time(), 0)
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def side_by_side(function: Callable[[Any], T], jobs: list, width: int) -> list[T]:
    """`function` of each job, in order. Neither Ctrl-C nor an error waits for the other replies:
    the threads are daemons."""
    if not jobs:
        return []
    with ThreadPool(min(width, len(jobs))) as pool:
        return list(pool.imap(function, jobs))
