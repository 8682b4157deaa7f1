"""Models on a server in the place of a `Policy`: the agent's weights, or a chat model."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qlass import Refused, UserError
from qlass.batching import Candidate, LogProb, Sample
from qlass.chat import Chat, Rendering
from qlass.files import warn
from qlass.messages import State, uniforms
from qlass.models import load_chat
from qlass.optional.foreign import FIXED, fits
from qlass.optional.server import HELLO, Reply, Server, side_by_side
from qlass.runs import meta_of
from qlass.templates import any_of

ALL = 1 << 30  # top-k of all tokens: 0 for some servers, -1 for others, a large number for each
NEUTRAL = {"repeat_penalty": 1, "repetition_penalty": 1, "min_p": 0}  # defaults of most servers
# What a strict server may not know. Texts are cut here too, and seeds that do nothing are told of.
OPTIONAL = (*NEUTRAL, "stop_token_ids", "top_k", "seed")
ALIKE = 0.1  # how far the log-probability of a token may be off: bf16 and float32 differ by .03


def load(folder: Path, rendering: Rendering, config: Any) -> "ServerPolicy":
    """The agent on the server that the settings name; a checkpoint's folder has its tokenizer."""
    chat = load_chat(folder, rendering)
    fingerprint = meta_of(folder).get("fingerprint")
    return ServerPolicy(config.server, chat, config.seed, config.in_flight or 64, fingerprint)


class ServerPolicy:
    """pi(a | s) by a server that holds the checkpoint's weights; free text.

    The checkpoint's folder gives tokenizer and rendering. Each text has a seed of (run seed, task,
    node, candidate), so a server that keeps seeds gives the same texts again: in bf16 only with
    the same --in-flight, as a batch of another size rounds in other ways.
    """

    def __init__(
        self,
        url: str,
        chat: Chat,
        seed: int = 0,
        parallel: int = 64,
        fingerprint: list[float] | None = None,
    ) -> None:
        """fingerprint: the checkpoint's (foreign.fingerprint), if it has one."""
        if chat.rendering.candidates == "valid":
            problem = "the checkpoint chooses by probabilities, which no server tells"
            raise UserError(f"--server: {problem}; leave it out, or train with --candidates free")
        self.chat = chat
        self.seed = seed
        self.parallel = parallel
        self.server = Server(url)
        self.computed = 0  # tokens read and written, as the server counts them
        others = []
        for token in sorted(chat.stop_ids - {chat.stop_id}):
            others.append(chat.tokenizer.decode([token]))
        self.ends = [text.strip() for text in (chat.template.stop, *others)]
        chat.context = min(chat.context, self.server.context)
        self._try_seeds()
        if fingerprint:
            self._check_weights(fingerprint)

    def _try_seeds(self) -> None:
        """Warn of a server that ignores seeds or keeps none, by a question with many answers."""
        body = self._body(State((HELLO,)), 2.0)  # here the surest agent's texts differ
        body |= {"max_tokens": 8, "top_p": 1, "top_k": ALL}
        ask = [partial(self.server.complete, body | {"seed": seed}) for seed in range(4)]
        fields = [name for name in OPTIONAL if name != "top_k" or not self.chat.rendering.top_k]
        first = self.server.settle(ask[0], fields).text
        again, *others = [question().text for question in ask]
        if {again, *others} == {first}:
            warn(f"{self.server.name} ignores seeds: texts are equal")
        elif again != first:
            problem = "keeps no seeds: a question has another answer when it is asked again"
            warn(f"{self.server.name} {problem}")

    def _check_weights(self, fingerprint: list[float]) -> None:
        """UserError if the server holds other weights than the checkpoint, as far as it tells."""
        if not fits(self.chat):
            return
        jobs = self._jobs(FIXED)
        logprobs = [self._logprob(job) for job in jobs]
        tokens = [len(ids) for _, ids in jobs]
        errors = np.abs(np.subtract(logprobs, fingerprint)) / tokens
        if np.isnan(errors).any():
            problem = "tells no log-probabilities of a prompt: whether it has these weights"
            warn(f"{self.server.name} {problem} is not known")
        elif errors.max() > ALIKE:
            problem = f"a fixed text's tokens have other log-probabilities, by {errors.max():.2f}"
            advice = "serve the checkpoint that --sft names (RUN/sft), as it is now"
            raise UserError(f"{self.server.name}: has other weights ({problem}); {advice}")

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Candidates are drawn one by one, each with its seed. In the place of one that the server
        refuses to write is its Refused."""
        jobs = []
        for r in requests:
            body = self._body(r.state, r.temperature)
            for k in range(r.n):
                u = uniforms(1, self.seed, *r.key, k)[0]
                jobs.append(body | {"seed": int(u * 2**31)})
        replies = iter(side_by_side(self.server.complete, jobs, self.parallel))
        answers = []
        for request in requests:
            answers.append([self._candidate(next(replies)) for _ in range(request.n)])
        return answers

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
            **NEUTRAL,
        }

    def _candidate(self, reply: Reply | Refused) -> Any:
        if isinstance(reply, Refused):
            return reply
        text = any_of(self.ends).split(reply.text)[0]
        tokens = reply.usage["completion_tokens"] or len(self.chat.action(text, ""))
        self.computed += reply.usage["prompt_tokens"] + tokens
        return Candidate(self.chat.action_in(text), tokens, float("nan"))

    def likelihoods(self, requests: list[LogProb]) -> list[list[float]]:
        """log pi(a | s) of texts, where the server tells log-probabilities of a prompt (vLLM)."""
        jobs = [job for r in requests for job in self._jobs(r)]
        self.computed += sum(len(prompt) + len(ids) for prompt, ids in jobs)
        logprobs = side_by_side(self._logprob, jobs, self.parallel)
        if any(map(math.isnan, logprobs)):
            raise UserError(f"{self.server.name} tells no log-probabilities: no --method likeliest")
        sums = iter(logprobs)
        return [[next(sums) for _ in r.actions] for r in requests]

    def _jobs(self, request: LogProb) -> list[tuple[list[int], list[int]]]:
        """The tokens of the prompt and of the action, for each of a request's actions."""
        prompt = self.chat.prompt(request.state)
        task = request.state.task
        return [(prompt, self.chat.action(a, task, len(prompt))) for a in request.actions]

    def _logprob(self, job: tuple[list[int], list[int]]) -> float:
        """log p of a text's tokens behind those of a prompt; nan if the server does not tell it."""
        prompt, ids = job
        body = {"prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 0}
        try:
            entries = self.server.complete(body).choice.get("prompt_logprobs") or []
        except Refused:  # by a strict server
            return math.nan
        if len(entries) != len(prompt) + len(ids):
            return math.nan
        total = 0.0
        for token, entry in zip(ids, entries[len(prompt) :], strict=True):
            total += entry[str(token)]["logprob"]
        return total


class ChatPolicy:
    """A chat model behind a server, which renders the messages: it answers what a `Policy` does.

    What the server refuses to answer has an empty text, and no log-probability.
    """

    def __init__(self, url: str, flag: str, max_tokens: int, seed: int = 0, parallel: int = 16):
        self.server = Server(url, flag)
        self.max_tokens, self.seed, self.parallel = max_tokens, seed, parallel

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        """Free text, whatever a request has as valid."""

        def reply(job: tuple[Sample, int]) -> Candidate:
            request, k = job
            noise = uniforms(1, self.seed, *request.key, k)
            seed = int(noise[0] * 2**31)
            options = {"temperature": request.temperature, "seed": seed}
            options["max_tokens"] = self.max_tokens
            try:
                answer = self.server.chat(request.state.messages, **options)
            except Refused:
                return Candidate("", 0, float("nan"))
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
        logprobs = dict.fromkeys(request.valid, -np.inf)
        try:
            choice = self.server.chat(request.state.messages, **options).choice
        except Refused:
            return np.array(list(logprobs.values()))
        tokens = (choice.get("logprobs") or {}).get("content")
        if not tokens:
            raise UserError(f"{self.server.name} tells no log-probabilities of a reply")
        for token in tokens[0]["top_logprobs"]:  # of "A" and " A" the likelier one
            text = token["token"].strip()
            if text in logprobs:
                logprobs[text] = max(logprobs[text], token["logprob"])
        return np.array(list(logprobs.values()))
