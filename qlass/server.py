"""An OpenAI-compatible server, such as vLLM or SGLang: `--server URL[#MODEL]`, and `--qnet`.

The weights are there; the agent's checkpoint folder named beside it gives tokenizer and rendering.
A `ChatPolicy` needs no folder, as the server renders its messages. Each text has a seed of
(run seed, task, node, candidate): a server gives the same answers again.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

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
        if "://" not in address:
            address = f"http://{address}"
        self.name = f"{flag} {address}"
        self.errors = openai.OpenAIError
        self.first_retry = Lock()
        local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy
        self.client = openai.OpenAI(
            base_url=address,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=TRIES,
            timeout=openai.Timeout(600.0, connect=5.0),
            http_client=openai.DefaultHttpxClient(
                trust_env=not local, event_hooks={"request": [self._warn]}
            ),
        )
        self.model = self.model or self._only_model()

    def _warn(self, request: Any) -> None:
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        if retry and self.first_retry.acquire(blocking=False):
            print(f"warning: {self.name} is busy or away; retried for 10 minutes", file=sys.stderr)

    def _only_model(self) -> str:
        """UserError if there are several: a base may be listed before the adapter that is meant."""
        names = self.ask("/models", lambda reply: [str(m["id"]) for m in reply["data"] or []])
        if len(names) != 1:
            several = ", ".join(names[:9]) or "no model"
            raise UserError(f"{self.name}: serves {several}: name one, URL#MODEL")
        return names[0]

    def ask(self, path: str, read: Callable[[dict], Any], body: dict | None = None) -> Any:
        """What `read` finds in the reply; UserError if no number may come from it."""
        text = ""
        try:
            if body is None:
                text = self.client.get(path, cast_to=str)
            else:
                text = self.client.post(path, body=body, cast_to=str)
            return read(parse_json(text.encode(), "its reply"))
        except (UserError, self.errors) as error:
            problem = str(error)
            if not text and getattr(error, "status_code", 404) == 404:
                problem += "; is it a server's URL, with /v1?"
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            problem = f"answers {text}"
        problem = " ".join(problem.split())[:300]
        raise UserError(f"{self.name}: {problem}")

    def complete(self, options: dict[str, Any]) -> Reply:
        """A completion of a prompt of token ids."""
        body = {"model": self.model} | options

        def read(reply: dict) -> Reply:
            choice = reply["choices"][0]
            usage = self.usage_of(reply, len(body["prompt"]))
            answer = reply_of(choice, choice["text"], usage)
            tokens, room = usage["completion_tokens"], body["max_tokens"]
            if answer.cut and room > 1 and (not answer.text or 0 < tokens < room):
                advice = "it needs a longer context"
                raise UserError(f"has room for {tokens} of {room} tokens: {advice}")
            return answer

        return self.ask("/completions", read, body)

    def chat(self, messages: Sequence[tuple[str, str]], **options: Any) -> Reply:
        """A chat completion; messages are (role, content)."""
        body = {"model": self.model, "messages": State(tuple(messages)).dump()} | options
        letters = sum(len(word) + 1 for _, text in messages for word in text.split())

        def read(reply: dict) -> Reply:
            choice = reply["choices"][0]
            usage = self.usage_of(reply, letters // 8, more=True)  # a token has 3 to 6 letters
            return reply_of(choice, content_of(choice["message"]), usage)

        return self.ask("/chat/completions", read, body)

    def usage_of(self, reply: dict, least: int, more: bool = False) -> dict[str, Any]:
        """As of a Reply, if the model that is meant has read `least` tokens, or `more`."""
        usage = dict(reply.get("usage") or {})
        length = int(usage.get("prompt_tokens") or 0)
        if 0 < length < least:  # some servers count apart what they have cached
            details = usage.get("prompt_tokens_details") or {}
            length += details.get("cached_tokens") or 0
        model = str(reply.get("model") or self.model)
        if not same_model(self.model, model):
            raise UserError(f"answers by {model}, not by {self.model}: name it as the server does")
        if 0 < length < least or (length > least and not more):
            raise UserError(f"reads {length} tokens of {least}: a short context or another model?")
        usage["prompt_tokens"] = length
        usage["completion_tokens"] = int(usage.get("completion_tokens") or 0)
        return usage


def reply_of(choice: dict, text: Any, usage: dict[str, Any]) -> Reply:
    """UserError if the server gave up its reply."""
    end = choice.get("finish_reason")
    if end not in ENDS or not isinstance(text, str):
        raise UserError(f"gives up a reply: {choice}")
    return Reply(text, end == "length", usage, choice)


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
    pairs = [(name, reply), (reply, name), (name, bare), (bare, name)]
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
        self.chat = chat
        self.seed = seed
        self.parallel = parallel
        self.server = Server(url)
        self.computed = 0  # tokens read and written, as the server counts them
        others = [chat.tokenizer.decode([t]) for t in sorted(chat.stop_ids - {chat.stop_id})]
        self.ends = [text.strip() for text in (chat.stop, *others)]
        self._check_seeds()

    def _check_seeds(self) -> None:
        """Warn of a server that ignores them, by a question whose answers should differ."""
        body = self._body(State((("user", "a"),)), 2.0)  # here the surest agent's texts differ
        body |= {"max_tokens": 8, "top_p": 1, "top_k": ALL}
        texts = {self.server.complete(body | {"seed": seed}).text for seed in range(4)}
        if len(texts) == 1:
            print(f"warning: {self.server.name} ignores seeds: texts are equal", file=sys.stderr)

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed."""
        jobs = []
        for r in requests:
            body = self._body(r.state, r.temperature)
            for k in range(r.n):
                u = uniforms(1, self.seed, *r.key, k)[0]
                jobs.append(body | {"seed": int(u * 2**31)})
        replies = side_by_side(self.server.complete, jobs, self.parallel)
        drawn = map(self._candidate, replies)
        return [[next(drawn) for _ in range(r.n)] for r in requests]

    def _body(self, state: State, temperature: float) -> dict[str, Any]:
        """A request of an action; each setting, else a default of the server's would act."""
        rendering = self.chat.rendering
        stop = [*self.ends, *rendering.stop]
        return {
            "prompt": self.chat.prompt(state),
            "max_tokens": rendering.max_new_tokens,
            "stop": stop[:4],  # a server takes no more; `action_in` has the others
            "stop_token_ids": sorted(self.chat.stop_ids),
            "temperature": temperature,
            "top_p": rendering.top_p,
            "top_k": rendering.top_k or ALL,
            "min_p": 0,
            "repetition_penalty": 1,
            "repeat_penalty": 1,
        }

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
            for action in r.actions:
                ids = self.chat.action(action, r.state.task, len(prompt))
                jobs.append((prompt, ids))
                self.computed += len(prompt) + len(ids)
        sums = iter(side_by_side(self._logprob, jobs, self.parallel))
        return [[next(sums) for _ in r.actions] for r in requests]

    def _logprob(self, job: tuple[list[int], list[int]]) -> float:
        """log p of a text's tokens behind those of a prompt."""
        prompt, ids = job
        body = {"prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 0}
        entries = self.server.complete(body).choice.get("prompt_logprobs") or []
        if len(entries) != len(prompt) + len(ids):
            raise UserError(f"{self.server.name} tells no log-probabilities: no --method likeliest")
        total = 0.0
        for token, entry in zip(ids, entries[len(prompt) :], strict=True):
            total += entry[str(token)]["logprob"]
        return total


class ChatPolicy:
    """A chat model behind a server, which renders the messages: it answers what a `Policy` does."""

    def __init__(self, url: str, flag: str, max_tokens: int, seed: int = 0, parallel: int = 16):
        self.server = Server(url, flag)
        self.max_tokens, self.seed, self.parallel = max_tokens, seed, parallel

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Free text, whatever a request has as valid."""

        def reply(job: tuple[Sample, int]) -> Candidate:
            request, k = job
            seed = int(uniforms(1, self.seed, *request.key, k)[0] * 2**31)
            options = {"temperature": request.temperature, "seed": seed}
            options["max_tokens"] = self.max_tokens
            answer = self.server.chat(request.state.messages, **options)
            return Candidate(answer.text, answer.usage["completion_tokens"], float("nan"))

        jobs = [(request, k) for request in requests for k in range(request.n)]
        replies = iter(side_by_side(reply, jobs, self.parallel))
        return [[next(replies) for _ in range(request.n)] for request in requests]

    def valid_logprobs(self, requests: list[Sample]) -> list[np.ndarray]:
        """log p of each valid text as the reply's first token, (A,); -inf where it is not among the
        20 likeliest. UserError if the server tells no log-probabilities."""
        return side_by_side(self._first_token, requests, self.parallel)

    def _first_token(self, request: Sample) -> np.ndarray:
        options = {"temperature": 1, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        choice = self.server.chat(request.state.messages, **options).choice
        tokens = (choice.get("logprobs") or {}).get("content")
        if not tokens:
            raise UserError(f"{self.server.name} tells no log-probabilities of a reply")
        logprobs = dict.fromkeys(request.valid, -np.inf)
        for token in tokens[0]["top_logprobs"]:  # of "A" and " A" the likelier one
            text = token["token"].strip()
            if text in logprobs:
                logprobs[text] = max(logprobs[text], token["logprob"])
        return np.array(list(logprobs.values()))
