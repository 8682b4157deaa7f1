"""Any chat model as an agent: it answers /chat/completions, and needs no checkpoint and no tokenizer here.

    python -m integrations.chat_agent --env webshop --server https://HOST/v1#MODEL --examples 2 -N 1 4

    reads   $OPENAI_API_KEY
    writes  RUN/results_MODEL.jsonl: lines as q_search.py's, which the report calls "chat agent"
            RUN/answers_MODEL.jsonl: each answer as it comes, so that none is asked for twice

The model reads the state's messages and, with --examples, demonstrations in front of the task as in ReAct (arXiv
2210.03629): training tasks of the task's type, played by the environment's expert. Of N episodes the one with the
highest true reward counts, an oracle. Tokens are as the server counts them.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import envs
import q_search
from experiments.compare import Variant
from q_search import Method, Step, best_of
from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.chat import Rendering, State, any_of, uniforms
from qlass.cli import at_least, parse, parser, run_stage
from qlass.files import Output
from qlass.results import Results, describe
from qlass.server import Endpoint
from sft import demonstrate

LIMITS = ("timeout", "retries", "max_requests")  # a call may have others than the one that it resumes


@dataclasses.dataclass(frozen=True)
class Answer(Candidate):
    prompt: int = 0  # tokens read
    reasoning: int = 0  # tokens of a hidden thought, which later prompts lack


class ChatAgent:
    """pi(a | s) of a chat model; `sample` answers requests, each once."""

    def __init__(self, server: Endpoint, env: envs.TextEnv, args: argparse.Namespace, answers: Path) -> None:
        self.server, self.env, self.args = server, env.fork(), args
        self.rendering = Rendering(temperature=args.temperature, max_new_tokens=args.max_new_tokens)
        self.lock, self.asked = threading.Lock(), 0
        self.file = Output(answers, {"overwrite": args.overwrite}, identity=itemgetter("request"))
        self.known = {record["request"]: record for record in self.file.records}
        self.examples = functools.cache(self._examples)
        self.demonstration = functools.cache(self._demonstration)

    def sample(self, requests: list[Sample]) -> list[list[Answer]]:
        prompts = [self.messages(r) for r in requests]  # here: an environment is not for threads
        with ThreadPoolExecutor(self.args.in_flight) as pool:
            return [[answer] for answer in pool.map(self.answer, requests, prompts)]

    def messages(self, request: Sample) -> list[tuple[str, str]]:
        """The state's, with the examples between the instruction and the task."""
        messages = list(request.state.messages)
        front = 3 if messages[0][0] == "system" else 2
        return messages[:front] + self.examples(request.key[0]) + messages[front:]

    def _examples(self, task_id: str) -> list[tuple[str, str]]:
        """Turns of training tasks of a task's type, but not of its subject."""
        kind, subject, number = self.env.task_type(task_id), self.env.subject(task_id), self.args.examples
        tasks = self.env.task_ids("train") if number else []
        fit = (t for t in tasks if self.env.task_type(t) == kind and self.env.subject(t) != subject)
        chosen = list(itertools.islice(fit, number))
        if len(chosen) < number:
            raise UserError(f"--examples {number}: there are {len(chosen)} for a task such as {task_id}")
        return [turn for task in chosen for turn in self.demonstration(task)]

    def _demonstration(self, task_id: str) -> list[tuple[str, str]]:
        line = demonstrate(self.env, task_id)
        messages = State.load(line["messages"], line["task"]).messages
        return list(messages[3 if messages[0][0] == "system" else 2 :])

    def answer(self, request: Sample, messages: list[tuple[str, str]]) -> Answer:
        """As the file has it, or by the server: the file has it before anything else fails."""
        body, key = self.args.body, (self.args.seed, *request.key)
        settings = {"temperature": request.temperature, "max_tokens": self.rendering.max_new_tokens}
        settings |= {"seed": int(uniforms(1, *key)[0] * 2**31), "stop": list(self.rendering.stop)}
        settings = {name: value for name, value in settings.items() if name not in body}
        settings["extra_body"] = {name: value for name, value in body.items() if value is not None}
        question = repr((self.server.model, messages, settings, key))
        name = hashlib.blake2b(question.encode(), digest_size=16).hexdigest()
        if name not in self.known:
            with self.lock:
                if self.asked == self.args.max_requests:
                    raise UserError(f"--max-requests {self.asked} are spent: the same command goes on from here")
                self.asked += 1
            text, usage = self.server.reply(messages, timeout=self.args.timeout, **settings)
            if not usage.get("prompt_tokens"):
                raise UserError(f"{self.server.name}: its answers do not tell their usage of tokens")
            with self.lock:
                self.known[name] = {"request": name, "text": text, "usage": usage}
                self.file.append([self.known[name]])
        return self.read(**self.known[name])

    def read(self, request: str, text: str, usage: dict) -> Answer:
        """The action in a reply: after a thought in it, which may have been cut, up to the first stop text."""
        unfinished = "<think>" in text and "</think>" not in text
        action = "" if unfinished else any_of(self.rendering.stop).split(text.rpartition("</think>")[2])[0].strip()
        hidden = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        return Answer(action, usage["completion_tokens"], float("nan"), (), usage["prompt_tokens"], hidden)


def tokens_of(episodes: Sequence[Sequence[Step]]) -> dict[str, int]:
    """As `results.costs_of`: what is read again, the agent's own words too, stands in the prompt cache.

    UserError if a prompt is no longer than the one that it goes on from: the server cuts them.
    """
    read: dict[State, int] = {}
    generated = 0
    for steps in episodes:
        prompt = cached = 0
        for step in steps:
            (answer,) = step.drawn
            if answer.prompt <= prompt:
                mistake = f"counts a prompt of {answer.prompt} tokens after one of {prompt}, so it cuts them"
                raise UserError(f"--server: {mistake}: give it a longer context, or fewer --examples")
            read[step.state] = max(answer.prompt - cached, 0)
            generated += answer.tokens
            prompt, cached = answer.prompt, answer.prompt + answer.tokens - answer.reasoning
    return {"prompt": sum(read.values()), "generated": generated, "scored": 0}


def play(env: envs.TextEnv, task_id: str, method: Method, rendering: Rendering) -> Generator[Any, Any, dict]:
    """As `q_search.play`."""
    best, episodes = yield from best_of(env, task_id, method, rendering, {})
    return describe(best, episodes, {"tokens": tokens_of(episodes)})


def methods(model: str, numbers: Iterable[int]) -> list[Variant]:
    return [Variant("chat", N=n, select="oracle" if n > 1 else None, player=model) for n in numbers]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__)
    add = flags.add_argument
    add("--server", required=True, metavar="URL[#MODEL]", help="of an OpenAI-compatible API")
    add("--examples", type=at_least(0), default=0, metavar="N", help="demonstrations in front (0)")
    add("-N", nargs="+", type=at_least(1), default=[1], help="episodes per task, the best counts (1)")
    add("--split", default="test", help="tasks to play (default: %(default)s)")
    add("--limit", type=at_least(0), default=100, metavar="N", help="tasks (100; 0: all)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave out the first N tasks")
    add("--temperature", type=at_least(0, float), default=0.7, metavar="T", help="default: %(default)s")
    add("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="of an answer (256)")
    add("--max-steps", type=at_least(1), metavar="N", help="default: the environment's")
    text = "more fields of a request; one that is null is left out, also of temperature, max_tokens, seed, stop"
    add("--body", type=json.loads, default={}, metavar="JSON", help=text)
    add("--max-requests", type=at_least(1), metavar="N", help="end after so many; resume to go on (no limit)")
    add("--timeout", type=at_least(1, float), default=120, metavar="S", help="seconds for an answer (120)")
    add("--retries", type=at_least(0), default=8, metavar="N", help="of a request, ever later (8)")
    add("--in-flight", type=at_least(1), metavar="N", help="episodes side by side (8; sciworld: 4; own: 1)")
    add("--out", type=Path, help="default: RUN/results_MODEL.jsonl; its lines are not played again")
    add("--label", help="a variant's name, kept in each line")
    flags.set_defaults(sft=None, qnet=None)
    return parse(flags, argv, search=True)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env, tasks = q_search.environment(args)
    server = Endpoint(args.server)
    server.client = server.client.with_options(max_retries=args.retries)
    model = re.sub(r"[^\w.-]+", "-", server.model.rpartition("/")[2])
    args.sft = args.qnet = Path(server.model)  # the agent is that model, whatever the run folder holds
    args.in_flight = args.in_flight or min(8, env.side_by_side)
    args.out = args.out or args.run / f"results_{model}.jsonl"
    agent = ChatAgent(server, env, argparse.Namespace(**vars(args)), args.run / f"answers_{model}.jsonl")
    for name in LIMITS:
        delattr(args, name)
    playing = partial(play, rendering=agent.rendering)
    Results(args, env).play(tasks, methods(model, args.N), playing, {Sample: agent.sample})
    agent.file.finish()


if __name__ == "__main__":
    run_stage(main)
