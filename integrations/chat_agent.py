"""Any chat model as an agent: it answers /chat/completions, and needs no checkpoint and no tokenizer here.

    python -m integrations.chat_agent --env webshop --server https://HOST/v1#MODEL --examples 2 -N 1 4

    reads   $OPENAI_API_KEY
    writes  RUN/results_MODEL.jsonl: lines as q_search.py's, which the report calls "chat agent"
            RUN/answers_MODEL.jsonl: each answer as it comes, so that none is asked for twice

The model reads the state's messages and, with --examples, demonstrations in front of the task as in ReAct (arXiv
2210.03629): training tasks of the task's type, played by the environment's expert. Of N episodes the one with the
highest true reward counts, an oracle. Tokens are as the server counts them. An answer without an action, or that was
cut, is played, and counted at the end.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

import envs
import q_search
from experiments.compare import Variant
from qlass import UserError, outputs
from qlass.batching import Candidate, Sample
from qlass.chat import Rendering, any_of
from qlass.demonstrations import demonstrate
from qlass.messages import State, react, uniforms, without_thinking
from qlass.results import Episode, describe
from qlass.served import Server
from qlass.settings import Run, read, run_stage, runtime

FINAL = "<|channel|>final<|message|>"  # harmony's answer begins behind it, and ends before the next mark
LABEL = re.compile(r"(?im)^[^\w\n]*action *\d*[^\w\n]*?[:：\n][*`\s]*")
INLINE = re.compile(r"[*`]*\bAction *\d*[*`]*[:：][*`\s]*")  # only if no line begins with the label
CALL = re.compile(r"\w+\[([^\[\]]|\[[^\[\]]*\])*\]")
REMARK = re.compile(r"\.(?=\s|$).*|\s(\(|[-–—]\s).*")  # behind an action that is no call


def in_react_style(text: str, stop: Sequence[str], instruction: str) -> str:
    """An answer as the instruction asks for it: "Thought: ...\nAction: ...", the action in one line, its verb in the
    instruction's case. Thoughts between marks, markdown, JSON, and what follows the action are gone.
    """
    reply = without_thinking(text.rpartition(FINAL)[2]).partition("<|")[0]
    text = any_of(stop).split(reply)[0]
    text = re.sub(r"```(\w*\n)?", "", text).strip()
    with contextlib.suppress(AttributeError, KeyError, ValueError):
        fields = {name.lower(): value for name, value in json.loads(text).items()}
        action, thought = fields.pop("action"), str(fields.pop("thought", None) or "")
        text = text if fields else react(thought, str(action))
    labels = list(LABEL.finditer(text)) or list(INLINE.finditer(text))
    if not labels and "\n" in text:
        return text
    head = text[: labels[-1].start()] + "Action: " if labels else ""
    action = text[labels[-1].end() if labels else 0 :].partition("\n")[0].strip("*` ")
    call = CALL.match(action)
    action = call[0] if call else REMARK.sub("", action).rstrip("*` ")
    verb, words = re.findall(r"^\w*", action)[0], re.findall(r"\w+", instruction)
    if verb not in words and verb.lower() in words:
        action = verb.lower() + action[len(verb) :]
    return (head + action).strip()


@dataclasses.dataclass(frozen=True)
class Answer(Candidate):
    prompt: int = 0  # tokens read
    kept: int = 0  # tokens written that later prompts have, by their part of the letters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    stage: ClassVar[str] = "q_search"  # whose presets name the tasks to play, so that rows are of the same ones
    plays_elsewhere: ClassVar[bool] = True

    server: Annotated[str, arg(metavar="URL[#MODEL]")] = runtime("")  # of an OpenAI-compatible API
    examples: int = 0  # demonstrations in front of the task
    N: Annotated[tuple[int, ...], arg(aliases=["-N"])] = runtime((1,))  # episodes, of which the best counts
    split: str = runtime("test")  # tasks to play
    limit: int = runtime(0)  # number of tasks (0: all)
    skip: int = runtime(0)  # leave out the first tasks
    temperature: float = 0.7
    max_new_tokens: int = 256  # of an answer
    max_steps: int | None = None  # the environment's
    body: Annotated[str, arg(metavar="JSON")] = "{}"  # more fields of a request; null leaves one out
    in_flight: int | None = runtime(None)  # episodes side by side (8; sciworld: 4; own: 1)
    out: Path | None = runtime(None)  # RUN/results_MODEL.jsonl; its lines are not played again
    label: str | None = None  # a variant's name, kept in each line


class ChatAgent:
    """pi(a | s) of a chat model. It asks each question once, whatever stops it in between."""

    def __init__(self, server: Server, env: envs.TextEnv, answers: Path, config: Config) -> None:
        self.server, self.env, self.config, self.answers = server, env.fork(), config, answers
        self.body = json.loads(config.body)
        self.rendering = Rendering(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        self.instruction, self.front = env.instruction, 2  # messages before the first observation
        self.examples, self.lock = functools.cache(self._examples), threading.Lock()
        if config.overwrite:
            outputs.remove(answers)
        answers.touch()
        os.truncate(answers, answers.read_bytes().rfind(b"\n") + 1)  # what a stop cut
        self.records = {record["request"]: record for record in outputs.read_jsonl(answers)}
        self.silent: set[str] = set()  # requests whose answers were cut, or have no action

    def sample(self, requests: list[Sample]) -> list[list[Answer]]:
        jobs = [(r, self.examples(r.key[0])) for r in requests]  # here: an environment is not for threads
        with ThreadPool(self.config.in_flight) as pool:  # it raises an error when all others have answered
            return [[answer] for answer in pool.starmap(self.answer, jobs, chunksize=1)]

    def _examples(self, task_id: str) -> list[tuple[str, str]]:
        """The turns of demonstrations for a task, of others than its subject."""
        kind, subject, number = self.env.task_type(task_id), self.env.subject(task_id), self.config.examples
        if number and not self.env.agreement:
            raise UserError(
                f"--examples {number}: in {self.env.name} the task is in the first message, in front of them"
            )
        train = self.env.task_ids("train") if number else []
        alike = (t for t in train if self.env.task_type(t) == kind and self.env.subject(t) != subject)
        lines = [demonstrate(self.env, task)["messages"] for task in itertools.islice(alike, number)]
        if len(lines) < number:
            raise UserError(f"--examples {number}: there are {len(lines)} for a task such as {task_id}")
        return [(m["role"], m["content"]) for messages in lines for m in messages[self.front :]]

    def answer(self, request: Sample, examples: list[tuple[str, str]]) -> Answer:
        """From the file or by the server; then it is in the file before anything can fail."""
        messages, key = list(request.state.messages), (self.config.seed, *request.key)
        messages[self.front : self.front] = examples
        settings = {"temperature": request.temperature, "max_tokens": self.rendering.max_new_tokens}
        settings |= {"seed": int(uniforms(1, *key)[0] * 2**31), "stop": list(self.rendering.stop)}
        settings = {name: value for name, value in (settings | self.body).items() if value is not None}
        question = repr((self.server.model, messages, settings, key))
        name = hashlib.blake2b(question.encode(), digest_size=16).hexdigest()
        if name not in self.records:
            choice, read = self.server.chat(messages, **settings)
            text, cut, usage = choice.message.content or "", choice.finish_reason == "length", read.model_dump()
            self.records[name] = {"request": name, "text": text, "usage": usage, "cut": cut}
            with self.lock, open(self.answers, "a", encoding="utf-8") as file:
                file.write(outputs.dumps(self.records[name]))
        text, usage = self.records[name]["text"], self.records[name]["usage"]
        action = in_react_style(text, self.rendering.stop, self.instruction)
        if self.records[name].get("cut") or not action:
            self.silent.add(name)
        hidden = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        kept = round((usage["completion_tokens"] - hidden) * min(len(action) / max(len(text), 1), 1))
        return Answer(action, usage["completion_tokens"], math.nan, (), usage["prompt_tokens"], kept)


def tokens_of(episodes: Sequence[Episode]) -> dict[str, int]:
    """As `results.costs_of`: a prompt cache holds what was read or written before.

    UserError if a prompt is no longer than the one before it: the server cuts them.
    """
    read: dict[State, int] = {}
    for steps in episodes:
        last = Answer("", 0, math.nan)
        for step in steps:
            (answer,) = step.samples
            if answer.prompt <= last.prompt:
                problem = f"reads {answer.prompt} tokens of a prompt, and {last.prompt} of the shorter one before"
                raise UserError(f"--server: it {problem}: it needs a longer context")
            read[step.state] = max(answer.prompt - last.prompt - last.kept, 0)
            last = answer
    generated = sum(step.samples[0].tokens for steps in episodes for step in steps)
    return {"prompt": sum(read.values()), "generated": generated, "scored": 0}


@dataclasses.dataclass(frozen=True)
class Chat(Variant):
    """Episodes of a `ChatAgent`, whose tokens the server counts."""

    def outcome(self, agent: Any, best: Episode, episodes: list[Episode]) -> dict:
        return describe(best, episodes, {"tokens": tokens_of(episodes)})


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    if not config.server:
        raise UserError("--server URL[#MODEL]: name a server")
    env, tasks = q_search.environment(config)
    server = Server(config.server)
    model = re.sub(r"[^\w.-]+", "-", server.model.rpartition("/")[2])
    out = config.out or config.run / f"results_{model}.jsonl"
    config = dataclasses.replace(config, in_flight=config.in_flight or min(8, env.side_by_side), out=out)
    answers = out.with_name(f"answers_{model}.jsonl")
    plan = [Chat("chat", N=n, select="oracle" if n > 1 else None, player=model) for n in config.N]
    with outputs.lock(answers):
        agent = ChatAgent(server, env, answers, config)
        inputs = {"sft": None, "qnet": None}  # the agent is that model, whatever the run folder has
        q_search.evaluate(config, env, tasks, plan, agent, {Sample: agent.sample}, inputs)
    if agent.silent:
        problem = f"{len(agent.silent)} answers were cut by --max-new-tokens, or are only a thought"
        outputs.warn(f"{config.server}: {problem}")


if __name__ == "__main__":
    run_stage(main)
