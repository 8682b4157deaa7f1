"""An OpenAI-compatible server, such as vLLM or SGLang: `--server URL[#MODEL]`, and `--qnet`.

The weights are there; the agent's checkpoint folder named beside it gives tokenizer and rendering.
Each text has a seed of (run seed, task, node, candidate): a server gives the same answers again.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from qlass import UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat, any_of
from qlass.files import parse_json
from qlass.messages import State, uniforms

ALL = 1 << 30  # top-k of all tokens: 0 for some servers, -1 for others, a large number for each
TRIES = 80  # after waits of 0.5, 1, 2, 4, 8, 8, ... seconds, or what the server asks for
ENDS = (None, "", "stop", "length", "eos", "eos_token", "stop_sequence", "end_turn")


class Reply(NamedTuple):
    text: str
    cut: bool  # by max_tokens
    usage: dict[str, Any]  # prompt_tokens, completion_tokens (0: not told), and others
    choice: dict[str, Any]


class Server:
    """The model at http://HOST:PORT/v1, with #MODEL if there are several; $OPENAI_API_KEY."""

    def __init__(self, url: str, flag: str = "--server") -> None:
        import openai

        address, _, self.model = url.partition("#")
        address = address if "://" in address else f"http://{address}"
        self.name, self.errors, self.first_retry = f"{flag} {address}", openai.OpenAIError, Lock()
        local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy
        http = openai.DefaultHttpxClient(trust_env=not local, event_hooks={"request": [self._warn]})
        key = os.environ.get("OPENAI_API_KEY") or "none"
        options: dict = {"max_retries": TRIES, "timeout": openai.Timeout(600.0, connect=5.0)}
        self.client = openai.OpenAI(base_url=address, api_key=key, http_client=http, **options)
        if not self.model:  # a base model may be listed before the adapter that is meant
            names = self.ask("/models", lambda reply: [str(m["id"]) for m in reply["data"] or []])
            if len(names) != 1:
                several = ", ".join(names[:9]) or "no model"
                raise UserError(f"{self.name}: serves {several}: name one, URL#MODEL")
            self.model = names[0]

    def _warn(self, request: Any) -> None:
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        if retry and self.first_retry.acquire(blocking=False):
            print(f"warning: {self.name} is busy or away; retried for 10 minutes", file=sys.stderr)

    def ask(self, path: str, read: Callable, body: dict | None = None) -> Any:
        """What `read` finds in the reply; UserError if no number may come from it."""
        text, method = "", partial(self.client.post, body=body) if body else self.client.get
        try:
            text = method(path, cast_to=str)
            return read(parse_json(text.encode(), "its reply"))
        except (UserError, self.errors) as error:
            lost = not text and getattr(error, "status_code", 404) == 404
            problem = f"{error}; is it a server's URL, with /v1?" if lost else str(error)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            problem = f"answers {text}"
        raise UserError(f"{self.name}: {' '.join(problem.split())[:300]}")

    def complete(self, options: dict) -> Reply:
        body = {"model": self.model} | options
        return self.ask("/completions", partial(self._read, body, len(body["prompt"])), body)

    def chat(self, messages: Sequence[tuple[str, str]], **options: Any) -> Reply:
        """A chat completion; messages are (role, content)."""
        # A token has 3 to 6 letters.
        least = sum(len(word) + 1 for _, text in messages for word in text.split()) // 8
        body = {"model": self.model, "messages": State(tuple(messages)).dump()} | options
        return self.ask("/chat/completions", partial(self._read, body, least), body)

    def _read(self, body: dict, least: int, reply: dict) -> Reply:
        """The reply to a prompt of `least` tokens; of messages: or more."""
        choice, chat = reply["choices"][0], "messages" in body
        text = content_of(choice["message"]) if chat else choice["text"]
        end, usage = choice.get("finish_reason"), self.usage_of(reply, least, chat)
        if end not in ENDS or not isinstance(text, str):
            raise UserError(f"gives up a reply: {choice}")
        tokens, room = usage["completion_tokens"], 0 if chat else body["max_tokens"]
        if end == "length" and room > 1 and (not text or 0 < tokens < room):
            raise UserError(f"has room for {tokens} of {room} tokens: it needs a longer context")
        return Reply(text, end == "length", usage, choice)

    def usage_of(self, reply: dict, least: int, more: bool = False) -> dict[str, Any]:
        """As of a Reply, if the model that is meant has read `least` tokens, or `more`."""
        usage, model = dict(reply.get("usage") or {}), str(reply.get("model") or self.model)
        length, tokens = (int(usage.get(f"{n}_tokens") or 0) for n in ("prompt", "completion"))
        if 0 < length < least:  # some servers count apart what they have cached
            length += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not same_model(self.model, model):
            raise UserError(f"answers by {model}, not by {self.model}: name it as the server does")
        if 0 < length < least or (length > least and not more):
            raise UserError(f"reads {length} tokens of {least}: a short context or another model?")
        return usage | {"prompt_tokens": length, "completion_tokens": tokens}


def content_of(message: dict) -> str | None:
    """The text of a chat completion, of its parts, or a refusal; '' beside a thought alone."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    thought = message.get("reasoning_content") or message.get("reasoning")
    return content or message.get("refusal") or ("" if thought else content)


def same_model(name: str, reply: str) -> bool:
    """Does a reply name this model? Its date, the default revision or folders may be added."""
    bare = re.sub(r"(-\d{4}-?\d\d-?\d\d|@main|:latest)$", "", reply)
    pairs = (name, reply), (reply, name), (name, bare), (bare, name)
    return any(f"/{long}".endswith(f"/{short}") for long, short in pairs)


def side_by_side(function: Callable[[Any], Any], jobs: list, width: int) -> list[Any]:
    """`function` of each job, in order; its threads are daemons: Ctrl-C waits for no reply."""
    with ThreadPool(max(1, min(width, len(jobs)))) as pool:
        return list(pool.imap(function, jobs))


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text."""

    def __init__(self, url: str, chat: Chat, seed: int = 0, parallel: int = 64) -> None:
        if chat.rendering.candidates == "valid":
            problem = "the checkpoint chooses by probabilities, which no server tells"
            raise UserError(f"--server: {problem}; leave it out, or train with --candidates free")
        self.chat, self.seed, self.parallel, self.server = chat, seed, parallel, Server(url)
        self.computed = 0  # tokens read and written, as the server counts them
        others = [chat.tokenizer.decode([t]) for t in sorted(chat.stop_ids - {chat.stop_id})]
        self.ends = [text.strip() for text in (chat.stop, *others)]
        body = self._body(State((("user", "a"),)), 2.0)  # here the surest agent's texts differ
        body |= {"max_tokens": 8, "top_p": 1, "top_k": ALL}
        if len({self.server.complete(body | {"seed": k}).text for k in range(4)}) == 1:
            print(f"warning: {self.server.name} ignores seeds: texts are equal", file=sys.stderr)

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed."""
        jobs = []
        for r in requests:
            body = self._body(r.state, r.temperature)
            noise = [uniforms(1, self.seed, *r.key, k)[0] for k in range(r.n)]
            jobs += [body | {"seed": int(u * 2**31)} for u in noise]
        drawn = map(self._candidate, side_by_side(self.server.complete, jobs, self.parallel))
        return [[next(drawn) for _ in range(r.n)] for r in requests]

    def _body(self, state: State, temperature: float) -> dict[str, Any]:
        """A request of an action; each setting, else a default of the server's would act."""
        r = self.chat.rendering
        stop = [*self.ends, *r.stop][:4]  # a server takes no more; `action_in` has the others
        body = {"prompt": self.chat.prompt(state), "max_tokens": r.max_new_tokens}
        body |= {"stop": stop, "stop_token_ids": sorted(self.chat.stop_ids)}
        body |= {"temperature": temperature, "top_p": r.top_p, "top_k": r.top_k or ALL}
        return body | {"min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}

    def _candidate(self, reply: Reply) -> Candidate:
        text = any_of(self.ends).split(reply.text)[0]
        tokens = reply.usage["completion_tokens"] or len(self.chat.action(text, ""))
        self.computed += reply.usage["prompt_tokens"] + tokens
        return Candidate(self.chat.action_in(text), tokens, float("nan"))

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of texts, where the server tells log-probabilities of a prompt (vLLM)."""
        jobs = []
        for r in requests:
            prompt = self.chat.prompt(r.state)
            jobs += [(prompt, self.chat.action(a, r.state.task, len(prompt))) for a in r.actions]
        self.computed += sum(len(prompt) + len(ids) for prompt, ids in jobs)
        sums = iter(side_by_side(self._logprob, jobs, self.parallel))
        return [[next(sums) for _ in r.actions] for r in requests]

    def _logprob(self, job: tuple[list[int], list[int]]) -> float:
        (prompt, ids), settings = job, {"max_tokens": 1, "prompt_logprobs": 0}
        choice = self.server.complete({"prompt": prompt + ids} | settings).choice
        entries = (choice.get("prompt_logprobs") or [])[len(prompt) :]
        if len(entries) != len(ids):
            raise UserError(f"{self.server.name} tells no log-probabilities: no --method likeliest")
        return sum(entry[str(token)]["logprob"] for entry, token in zip(entries, ids, strict=True))
