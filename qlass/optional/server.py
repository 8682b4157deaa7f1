"""An OpenAI-compatible server, such as vLLM or SGLang: how it is asked, and what of its replies
counts. No number may come from a reply that was cut, given up, or written by another model.

What it is asked stands in qlass/optional/served_policy.py and qlass/optional/served_qnet.py.
"""

import math
import os
import re
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from qlass import Refused, UserError
from qlass.files import parse_json, warn
from qlass.messages import State

TRIES = 80  # after waits of 0.5, 1, 2, 4, 8, 8, ... seconds, or what the server asks for
REFUSALS = (400, 413, 422)  # of this request, whatever the answers to others are
HELLO = ("user", "a")  # a first question, which no server refuses for its words
CHAT_OPTIONAL = ("seed", "stop")  # fields that a chat can do without
# What lists of models call a model's context, in tokens.
CONTEXTS = ("max_model_len", "context_length", "max_context_length", "context_window")
ENDS = (None, "", "stop", "length", "eos", "eos_token", "stop_sequence", "end_turn")
# In JSON: two halves of a character, another escape, or half a character alone.
HALF = re.compile(r"(\\ud[89ab]..\\ud[c-f]..|\\[^u])|\\ud[89a-f]..", re.IGNORECASE)


def valid_escape(escape: re.Match) -> str:
    """An escape of JSON; for half a character, which no file takes, the replacement character."""
    return escape[1] or r"\ufffd"


class Reply(NamedTuple):
    text: str
    cut: bool  # by max_tokens
    usage: dict[str, Any]  # prompt_tokens, completion_tokens (0: not told), and others
    choice: dict[str, Any]


class Away(UserError):
    """No reply came."""


class Server:
    """The model at http://HOST:PORT/v1, with #MODEL if there are several; $OPENAI_API_KEY.

    context: the model's there, in tokens; inf if the server does not tell it.
    """

    def __init__(self, url: str, flag: str = "--server") -> None:
        import openai

        address, _, self.model = url.partition("#")
        if "://" not in address:
            address = f"http://{address}"
        self.openai = openai
        self.name = f"{flag} {address}"
        self.answers_as = ""  # the model's name in replies
        self.left_out: list[str] = []  # fields that are not sent
        self.chat_settled: set[str] | None = None  # optional fields that were tried
        self.first_chat = Lock()
        self.first_retry = Lock()
        self.client = self._connect(address)
        listed = self._list_models()
        if not self.model and len(listed) != 1:
            several = ", ".join([*listed][:9]) or "no model"
            raise UserError(f"{self.name}: serves {several}: name one, URL#MODEL")
        self.model = self.model or next(iter(listed))
        entry = listed.get(self.model, {})
        self.base = entry.get("parent")  # of an adapter
        sizes = []
        for model in (entry, listed.get(self.base or "", {})):
            sizes += [model[name] for name in CONTEXTS if isinstance(model.get(name), int)]
        self.context: float = min(sizes, default=math.inf)

    def _connect(self, address: str) -> Any:
        """A client of one server. UserError for a fault that another try would meet again: a bad
        key, address or proxy, or https where http is served."""
        key = os.environ.get("OPENAI_API_KEY") or "none"
        if not re.fullmatch("[!-~]+", key):
            raise UserError("OPENAI_API_KEY holds a space, a line end or a letter beyond ASCII")
        try:
            parts = urlsplit(address)
            form = re.fullmatch(r"(?i)https?://\S+", address)
            if not form or not parts.hostname or parts.port == 0:
                raise ValueError("it is no http://HOST:PORT/v1")
            local = parts.hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy
            hooks = {"request": [self._warn], "response": [self._give_up]}
            client = self.openai.OpenAI(
                base_url=address,
                api_key=key,
                max_retries=TRIES,
                timeout=self.openai.Timeout(600.0, connect=5.0),
                http_client=self.openai.DefaultHttpxClient(trust_env=not local, event_hooks=hooks),
            )
            if parts.scheme == "https":
                client.with_options(max_retries=0).get("/models", cast_to=str)
        except self.openai.APIStatusError:  # not every server has a list
            pass
        except self.openai.APIConnectionError as error:
            cause = innermost(error)
            if isinstance(cause, ssl.SSLError):
                raise UserError(f"{self.name}: {cause}") from None
        except Exception as error:  # whatever the client's library raises about an address
            raise UserError(f"{self.name}: {error}") from None
        return client

    def _warn(self, request: Any) -> None:
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        if retry and self.first_retry.acquire(blocking=False):
            warn(f"{self.name} is busy or away; retried for 10 minutes")

    def _give_up(self, response: Any) -> None:
        """Mark a reply that would be the same again: no such endpoint, or an account without
        money."""
        unpaid = response.status_code == 429 and b"insufficient_quota" in response.read()
        if unpaid or response.status_code == 501:
            response.headers["x-should-retry"] = "false"
        for header, most in (("retry-after", 120), ("retry-after-ms", 120_000)):
            wait = response.headers.get(header, "")
            if wait.replace(".", "", 1).isdigit() and float(wait) > most:
                response.headers[header] = str(most)  # of more its client would give up

    def _list_models(self) -> dict[str, dict]:
        """What the server says of its models, by their names. A base may be listed before the
        adapter that is meant."""

        def read(reply: dict) -> dict[str, dict]:
            return {str(entry["id"]): dict(entry) for entry in reply["data"] or []}

        try:
            return self.ask("/models", read)
        except Away:
            raise
        except UserError:
            if self.model:  # not every server has a list
                return {}
            raise

    def ask(self, path: str, read: Callable[[dict], Any], body: dict | None = None) -> Any:
        """What `read` finds in the reply. UserError if no number may come from it: Refused, if that
        is for this question alone."""
        text = ""
        kind: type[UserError] = UserError
        complete = bool(urlsplit(str(self.client.base_url)).path.strip("/"))
        hint = "" if complete else "; is the URL complete, with /v1?"
        try:
            if body is None:
                text = self.client.get(path, cast_to=str)
            else:
                sent = {name: value for name, value in body.items() if name not in self.left_out}
                text = self.client.post(path, body=sent, cast_to=str)
            reply = parse_json(HALF.sub(valid_escape, text).encode(), "its reply")
            self._hold_on_to_name(reply)
            return read(reply)
        except UserError as error:
            kind = type(error)
            problem = f"{error}{hint}"
        except self.openai.APIConnectionError as error:
            kind = Away
            problem = str(innermost(error))
        except self.openai.APIStatusError as error:
            kind = Refused if error.status_code in REFUSALS else UserError
            problem = f"{path}: {error}{hint}"
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            problem = f"answers {text}"
        problem = " ".join(problem.split())[:300]
        raise kind(f"{self.name}: {problem}")

    def _hold_on_to_name(self, reply: dict) -> None:
        """The first reply says how the server calls its model, perhaps by an alias, with a date or
        a folder. UserError for another name later, and for an adapter's base."""
        name = reply.get("model")
        if not name:
            return
        if not self.answers_as:
            self.answers_as = name
            if name != self.model:
                print(f"{self.name}: {self.model} answers as {name}", file=sys.stderr)
        if name != self.answers_as:
            raise UserError(f"answers by {name}, and by {self.answers_as} before")
        if name == self.base:
            raise UserError(f"answers by {name}, the base of {self.model}")

    def settle(self, ask: Callable[[], Reply], fields: Sequence[str]) -> Reply:
        """Ask a first question. Of these fields, those that the server refuses are left out from
        now on, one by one: the one that it names or, if it names none, the next.

        UserError if it refuses what remains.
        """
        rest = list(fields)
        while True:
            try:
                reply = ask()
                break
            except Refused as error:
                problem = str(error)
            if not rest:
                raise UserError(problem)
            named = [name for name in rest if re.search(rf"\b{name}\b", problem)]
            field = (named or rest)[0]
            rest.remove(field)
            self.left_out.append(field)
        if self.left_out:
            warn(f"{self.name} refuses {', '.join(self.left_out)}: left out of each request")
        return reply

    def complete(self, options: dict[str, Any]) -> Reply:
        """A completion of a prompt of token ids."""
        body = {"model": self.model} | options

        def read(reply: dict) -> Reply:
            choice = reply["choices"][0]
            usage = usage_of(reply, len(body["prompt"]))
            answer = reply_of(choice, choice["text"], usage)
            tokens, room = usage["completion_tokens"], body["max_tokens"]
            if answer.cut and room > 1 and (not answer.text or 0 < tokens < room):
                advice = "it needs a longer context"
                raise UserError(f"has room for {tokens} of {room} tokens: {advice}")
            return answer

        return self.ask("/completions", read, body)

    def chat(self, messages: Sequence[tuple[str, str]], **options: Any) -> Reply:
        """A chat completion; messages are (role, content). The first one has a short one before
        it: what is refused later is refused for its words."""
        with self.first_chat:
            fields = {name for name in CHAT_OPTIONAL if name in options}
            if self.chat_settled is None or not fields <= self.chat_settled:
                self.settle(partial(self._chat, [HELLO], options), CHAT_OPTIONAL)
                self.chat_settled = fields | (self.chat_settled or set())
        return self._chat(messages, options)

    def _chat(self, messages: Sequence[tuple[str, str]], options: dict[str, Any]) -> Reply:
        body = {"model": self.model, "messages": State(tuple(messages)).dump()} | options
        letters = sum(len(word) + 1 for _, text in messages for word in text.split())

        def read(reply: dict) -> Reply:
            choice = reply["choices"][0]
            usage = usage_of(reply, letters // 8, more=True)  # a token has 3 to 6 letters
            return reply_of(choice, content_of(choice["message"]), usage)

        return self.ask("/chat/completions", read, body)


def innermost(error: BaseException) -> BaseException:
    """What caused an error in the first place."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


def usage_of(reply: dict, least: int, more: bool = False) -> dict[str, Any]:
    """As of a Reply. UserError unless the model has read `least` tokens, or `more`."""
    usage = dict(reply.get("usage") or {})
    length = int(usage.get("prompt_tokens") or 0)
    if 0 < length < least:  # some servers count apart what they have cached
        details = usage.get("prompt_tokens_details") or {}
        length += details.get("cached_tokens") or 0
    if 0 < length < least or (length > least and not more):
        raise UserError(f"reads {length} tokens of {least}: a short context or another model?")
    usage["prompt_tokens"] = length
    usage["completion_tokens"] = int(usage.get("completion_tokens") or 0)
    return usage


def reply_of(choice: dict, text: Any, usage: dict[str, Any]) -> Reply:
    """UserError if the server gave up its reply; Refused for what it would filter again."""
    end = choice.get("finish_reason")
    if end not in ENDS or not isinstance(text, str):
        kind = Refused if end == "content_filter" else UserError
        raise kind(f"gives up a reply: {choice}")
    return Reply(text, end == "length", usage, choice)


def content_of(message: dict) -> str | None:
    """The text of a chat completion, of its parts, or a refusal; '' beside a thought alone."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    thought = message.get("reasoning_content") or message.get("reasoning")
    return content or message.get("refusal") or ("" if thought else content)


def or_refused(function: Callable) -> Callable:
    """The function, which now returns the Refused that it raised."""

    def answer(*job: Any) -> Any:
        try:
            return function(*job)
        except Refused as error:
            return error

    return answer


def side_by_side(function: Callable[[Any], Any], jobs: list, width: int) -> list[Any]:
    """`function` of each job, in order, or its Refused. Its threads are daemons: Ctrl-C waits for
    no reply."""
    with ThreadPool(max(1, min(width, len(jobs)))) as pool:
        return list(pool.imap(or_refused(function), jobs))


def outcome_of_refusal(env: Any, task_id: str, reason: str) -> dict[str, Any]:
    """A result line of a task that the server refuses: a reward of 0, told as `refused`."""
    _, info = env.reset(options={"task_id": task_id})
    return {
        "task": info["task"],
        "reward": 0.0,
        "success": False,
        "n_steps": 0,
        "unknown_actions": 0,
        "refused": reason,
        "tokens": {"prompt": 0, "generated": 0, "scored": 0},
        "env_steps": 0,
        "resets": 0,
        "steps": [],
    }
