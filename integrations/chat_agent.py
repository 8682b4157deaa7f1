"""Q-guided search for a model that one can only chat with: Best-of-Q (arXiv 2601.22701) for text environments.

    python -m integrations.chat_agent --env webshop --model NAME --qnet RUN/qnet -M 4
    python -m integrations.chat_agent --env webshop --model NAME --method greedy sample    # without a QNet

    reads   a QNet's folder, or URL#MODEL of its server (RUN/qnet)
            $OPENAI_API_KEY; the API's URL is --server, $OPENAI_BASE_URL or OpenAI's
    writes  RUN/results_MODEL.jsonl: lines as q_search.py's
            RUN/answers.results_MODEL.jsonl: each answer as it comes, and none is asked for again

At each step the chat model answers M times, QNet scores the answers, and the best one is taken. The other methods are
those of q_search.py too: the model alone (greedy, sample), the best of N episodes, and one of M distinct answers by
chance. `python -m integrations.chat_trees` grows the trees from which such a QNet learns.

An answer is what stands behind `</think>`, up to an observation that the model has invented (integrations/answers.py
finds its action). --examples puts demonstrations in front of the task, as in ReAct (arXiv 2210.03629): training tasks
of its type, played by the environment's expert. QNet does not read these.

Tokens of prompts and answers are as the server counts them: `prompt` has each page once, as with a prompt cache, and
`usage` all that was sent and written, which is what an API bills. QNet's tokens are `scored`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveInt
from tyro.conf import Fixed, arg

import envs
import q_search
from integrations.answers import read_answer
from integrations.servers import Remote, Reply, Server, Turn
from q_search import Episode, Method, methods_of
from qlass import UserError
from qlass.batching import Candidate, Sample, Score
from qlass.chat import Rendering
from qlass.demonstrations import demonstrate
from qlass.files import dumps, warn
from qlass.messages import State
from qlass.noise import uniforms
from qlass.records import as_user_error
from qlass.results import costs_of, describe
from qlass.settings import Sampling, place, read_settings, run_stage, workload

OPENAI = "https://api.openai.com/v1"
EPISODES = 8  # side by side
FIRST = 20  # prompts with several answers, after which a doubt is told
Name = Literal["greedy", "sample", "best_of_n", "random", "qlass"]

# ---------------------------------------------------------------------------------------- the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chatting(Sampling):
    """A chat model in the place of an agent's checkpoint."""

    sft: Fixed[None] = place(None)
    model: str = ""  # its name, if it is not in --server URL#MODEL
    examples: NonNegativeInt = 0  # demonstrations in front of the task
    body: Annotated[str, arg(metavar="JSON")] = "{}"  # more fields of a request; null leaves one out
    max_answers: PositiveInt | None = workload(None)  # that this command asks for


@dataclasses.dataclass(frozen=True)
class Answer(Candidate):
    prompt: int = 0  # tokens of the prompt and, once it is read, those that the one before it had not
    billed: int = 0  # tokens read for it: of several answers to one request the first is charged
    end: str = ""  # why it ends


class ChatModel(Remote):
    """pi(a | s) of a chat model, which needs no checkpoint and no tokenizer here.

    Its answers are in a file beside the output. qnet: what scores them, if a method asks for Q.
    """

    def __init__(self, config: Chatting, env: envs.TextEnv, output: str) -> None:
        """output: name of what is made from the answers, in the run's folder; {} is the model's."""
        super().__init__(self.draw)
        address = config.server or os.environ.get("OPENAI_BASE_URL") or OPENAI
        url = f"{address.partition('#')[0]}#{config.model}" if config.model else address
        self.server = Server(url, config.in_flight, config.timeout)
        self.name = Path(self.server.model).name  # of a hub name or a folder its last part
        with as_user_error(f"--body {config.body}: is no JSON object"):
            self.body = {**json.loads(config.body)}
        self.alone = "n" in self.body or None  # an answer to a request; None: not yet known
        self.config, self.env = config, env.fork()
        if not config.in_flight:
            env.side_by_side = min(EPISODES, env.side_by_side)
        self.rendering = Rendering.load(Path(os.devnull), config)  # no checkpoint's
        self.rendering.temperature = self.body.get("temperature", self.rendering.temperature)
        self.sample = self.chat = self  # its rendering is all that stages ask of an agent's Chat
        self.demonstrations = functools.cache(self.demonstrations)
        self.qnet: Any = None
        self.prompts: dict[tuple, int] = {}  # tokens, by task and messages
        self.counts: Counter[str] = Counter()  # of answers, by what they are and how they end
        self.output = config.out or config.run / output.format(self.name)
        self.file = self.output.with_name(f"answers.{self.output.name}")
        self.answers: dict[str, Answer] = {}  # as written, by their draws
        self.usage: Counter[str] = Counter()
        for line in self.file.read_bytes().split(b"\n") if self.file.exists() else ():
            with contextlib.suppress(ValueError):  # empty, or what a stop cut
                self.keep(**json.loads(line))
        self.before, self.requests, self.under_way = self.usage.copy(), 0, 0

    def version(self) -> str | None:
        """The model's name in an answer: a run that goes on must not mix two that had one alias."""
        Remote(self.reply)([([("user", "Hello")], self.rendering.temperature)])
        return self.server.answered_as

    # ------------------------------------------------------------------------------ asking the server

    async def reply(self, question: tuple, **more: Any) -> Reply[Turn]:
        """The server's reply to messages, at a temperature. more: fields that --body may leave out."""
        messages, temperature = question
        fields = {"temperature": temperature, "max_tokens": self.rendering.max_new_tokens} | more | self.body
        return await self.server.chat(messages, **{name: x for name, x in fields.items() if x is not None})

    def begin(self, request: Sample, ready: Callable = bool) -> Callable[[], list[Answer]]:
        messages = list(request.state.messages)
        opening = request.state.opening
        messages[opening:opening] = self.demonstrations(request.key[0])
        wait = super().begin((request, messages), ready)
        return lambda: self.read(request, wait())

    async def draw(self, question: tuple[Sample, list[tuple[str, str]]]) -> list[Answer]:
        """The answers to a request, as written: those at hand, and what the server gives."""
        request, messages = question
        about = self.server.url, self.server.answered_as, messages, request.temperature
        about += self.rendering.max_new_tokens, self.config.body, self.config.seed, *request.key
        names = [hashlib.sha256(repr((*about, k)).encode()).hexdigest()[:32] for k in range(request.n)]
        (noise,) = uniforms(1, self.config.seed, *request.key)
        while missing := [k for k in range(request.n) if names[k] not in self.answers]:
            requests = []
            for group in [[k] for k in missing] if self.alone else [missing]:
                seed = int(noise * 2**30) + group[0]
                requests.append(self.ask_for([names[k] for k in group], (messages, request.temperature), seed))
            await asyncio.gather(*requests)
        return [self.answers[name] for name in names]

    async def ask_for(self, draws: list[str], question: tuple, seed: int) -> None:
        """Ask by one request for an answer of each draw, and write down what comes."""
        n, most = len(draws), self.config.max_answers or math.inf
        if self.requests + n > most:
            while self.under_way:  # they are paid for
                await asyncio.sleep(0.1)
            raise UserError(f"--max-answers {most}: no more are asked for; the same command with more goes on")
        self.requests += n
        self.under_way += 1
        try:
            reply = await self.reply(question, seed=seed, n=n if n > 1 else None)
        except UserError as error:
            refused = getattr(error.__cause__, "status_code", 0) in (400, 404, 422)
            if n == 1 or self.alone is False or not refused:
                raise
            self.requests -= n
            self.alone = True
            warn(f"each answer is a request of its own, as the server refuses one for several: {error}")
            return
        finally:
            self.under_way -= 1
        if n > 1:
            self.alone = False
        choices, usage = reply.choices[:n], reply.usage
        self.requests -= n - len(choices)
        if len(choices) < n:
            warn("the server gives one answer to a request for several: --body '{\"n\": null}' is faster")
        if usage.completion_tokens is None:
            warn(f"{self.server.url} does not count the tokens that it writes: they are 0 here")
        line = {
            "draws": draws[: len(choices)],
            "texts": [choice.message.content or choice.message.refusal or "" for choice in choices],
            "ends": [choice.finish_reason or "" for choice in choices],
            "prompt": usage.prompt_tokens,
            "generated": usage.completion_tokens or 0,
        }
        self.keep(**line)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a", encoding="utf-8") as out:  # in one piece: other processes write too
            out.write("\n" + dumps(line))

    def keep(self, draws: list[str], texts: list[str], ends: list[str], prompt: int, generated: int) -> None:
        """Take the answers to one request as known."""
        share, rest = divmod(generated, len(texts))
        for draw, text, end in zip(draws, texts, ends, strict=False):
            first = draw == draws[0]
            self.answers[draw] = Answer(text, share + rest * first, math.nan, (), prompt, prompt * first, end)
        self.usage.update(answers=len(texts), requests=1, prompt=prompt, generated=generated)

    # ------------------------------------------------------------------------------ reading its answers

    def read(self, request: Sample, written: list[Answer]) -> list[Answer]:
        """The answers in the environment's words. UserError for a prompt that is no longer than the one before it."""
        task, messages, prompt = request.key[0], request.state.messages, written[0].prompt
        before = self.prompts.get((task, messages[:-2]), 0)
        if prompt <= before:
            problem = f"reads {prompt} tokens of a prompt, and {before} of the shorter one before"
            raise UserError(f"--server: it {problem}: it needs a longer context, or does not count what it has cached")
        self.prompts[task, messages] = prompt
        answers, counts = [], self.counts
        for answer in written:
            text, _, is_clear = read_answer(answer.text, request.knows)
            counts.update({"unclear": not is_clear, "empty": not text, answer.end: 1})
            answers.append(dataclasses.replace(answer, text=text, prompt=prompt - before))
        if len(written) > 1 and request.temperature != 0:
            counts.update(several=1, alike=len({answer.text for answer in written}) == 1)
            if counts["several"] == counts["alike"] == FIRST:
                warn(f"all answers to a prompt were alike, {FIRST} times: does the server draw by --temperature?")
        return answers

    def demonstrations(self, task_id: str) -> list[tuple[str, str]]:
        """The turns of --examples demonstrations for a task, of others than its subject."""
        most = self.config.examples
        if not most:
            return []
        kind, subject = self.env.task_type(task_id), self.env.subject(task_id)
        train = self.env.task_ids("train") if self.env.agreement else []  # else the task is the first message
        alike = [task for task in train if self.env.task_type(task) == kind and self.env.subject(task) != subject]
        if len(alike) < most:
            raise UserError(f"--examples {most}: {len(alike)} can stand in front of task {task_id}")
        turns = []
        for task in alike[:most]:
            example = State.from_messages(demonstrate(self.env, task)["messages"])
            turns += example.messages[example.opening :]
        return turns

    def report(self) -> None:
        """Report the bill of this command, and answers that were not what they should be."""
        print("billed:", json.dumps(self.usage - self.before))
        for name, count in self.counts.items():
            if count and name not in WELL:
                warn(f"{count} answers {PROBLEMS.get(name, f'ended with {name!r}')}")


WELL = {"", "stop", "eos", "several", "alike"}
PROBLEMS = {
    "length": "were cut at their limit: --max-new-tokens",
    "content_filter": "were refused or filtered",
    "unclear": 'have no action, or several lines "Action:", of which the first that is known is played',
    "empty": "were empty",
}


# --------------------------------------------------------------------------------------- the search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Chatting, q_search.Config):
    """q_search.py's settings; those of precision and device are QNet's.

    out: RUN/results_MODEL.jsonl. label: the model's name.
    """

    method: tuple[Name, ...] = workload(("greedy", "random", "best_of_n", "qlass"))


class ChatMethod(Method):
    """A method of q_search.py, whose tokens the server counts."""

    def outcome(self, chat: Any, best: Episode, episodes: list[Episode]) -> dict:
        costs: dict[str, Any] = {"tokens": {"scored": 0}}
        if self.needs_q:
            costs = costs_of(chat.qnet.chat, episodes, self.read_by_qnet)
        steps = [step for episode in episodes for step in episode]
        answers = [answer for step in steps for answer in step.samples]
        written = sum(answer.tokens for answer in answers)
        read = {step.state: step.samples[0].prompt for step in steps}  # each page once, as with a prompt cache
        costs["tokens"] |= {"prompt": sum(read.values()), "generated": written}
        usage = {"prompt": sum(answer.billed for answer in answers), "generated": written}
        return describe(best, episodes, costs | {"usage": usage, "agent": chat.name})


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    search = q_search.Search(config)
    agent = search.chat = ChatModel(config, search.env, "results_{}.jsonl")
    if "greedy" in config.method and "temperature" in agent.body:
        raise UserError("greedy is at temperature 0, and --body names another: leave it out of --method")
    label = config.label or agent.name
    config = dataclasses.replace(config, model=agent.version(), out=agent.output, label=label)
    search.config = config
    plan = [ChatMethod(**vars(m)) for kind in config.method for m in methods_of(kind, config)]
    n, limit = len(search.tasks), search.env.max_steps
    steps = limit if isinstance(limit, int) else math.inf  # ScienceWorld has one for each task, "eto"
    draws = sum(method.M * method.N for method in plan)
    bound = f"{n} tasks, {steps} steps, {draws} for a step of all methods"
    print(f"at most {n * steps * draws:,} answers ({bound}); --max-answers asks for less", file=sys.stderr)
    search.backends[Sample] = agent
    if any(method.needs_q for method in plan):
        # Temperature and length of an answer are the chat model's.
        named = config.qnet or str(config.run / "qnet")
        if not (config.qnet or Path(named).exists()):
            raise UserError(f"{named}: no such QNet: integrations.chat_trees begins one, --method sample needs none")
        reading = dataclasses.replace(config, qnet=named, temperature=None, max_new_tokens=None)
        agent.qnet, search.inputs["qnet"] = q_search.load_scorer(reading)
        search.backends[Score] = agent.qnet.score
    try:
        search.play(plan)
    finally:
        agent.report()


if __name__ == "__main__":
    run_stage(main)
