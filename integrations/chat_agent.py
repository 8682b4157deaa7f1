"""Q-guided search for a model that one can only chat with: Best-of-Q (arXiv 2601.22701) for text environments.

    python -m integrations.chat_agent --env webshop --model NAME --qnet RUN/qnet -M 4
    python -m integrations.chat_agent --env webshop --model NAME --method greedy sample    # without a QNet

    reads   a QNet's folder, or URL#MODEL of its server (RUN/qnet)
            $OPENAI_API_KEY; the API's URL is --server, $OPENAI_BASE_URL or OpenAI's
    writes  RUN/results_MODEL.jsonl: lines as q_search.py's

At each step the chat model answers M times, QNet scores the answers, and the best one is taken. The other methods are
those of q_search.py too: the model alone (greedy, sample), the best of N episodes, and a random one of M answers.
`python -m integrations.chat_trees` grows the trees from which such a QNet learns.

An answer is what stands behind `</think>`, and its action what follows "Action:". --examples puts demonstrations in
front of the task, as in ReAct (arXiv 2210.03629): training tasks of its type, played by the environment's expert.
QNet does not read these.

Tokens of prompts and answers are as the server counts them: `prompt` has each page once, as with a prompt cache, and
`usage` all that was sent and written, which is what an API bills. QNet's tokens are `scored`.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt
from tyro.conf import Fixed, arg

import envs
import q_search
from experiments.chat_policy import ChatServer
from q_search import Method, methods_of
from qlass import UserError
from qlass.batching import Candidate, Sample, Score
from qlass.chat import Rendering, any_of
from qlass.demonstrations import demonstrate
from qlass.files import Inputs, warn
from qlass.messages import State, without_thinking
from qlass.noise import uniforms
from qlass.results import Episode, costs_of, describe
from qlass.settings import Sampling, read_settings, run_stage, runtime

OPENAI = "https://api.openai.com/v1"
EPISODES = 8  # side by side; a run that is stopped asks again for those that had not ended
Name = Literal["greedy", "sample", "best_of_n", "random", "qlass"]

# ---------------------------------------------------------------------------------------- the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chatting(Sampling):
    """A chat model in the place of an agent's checkpoint."""

    sft: Fixed[None] = runtime(None)
    model: str = ""  # its name, if it is not in --server URL#MODEL
    examples: NonNegativeInt = 0  # demonstrations in front of the task
    body: Annotated[str, arg(metavar="JSON")] = "{}"  # more fields of a request; null leaves one out


@dataclasses.dataclass(frozen=True)
class Answer(Candidate):
    prompt: int = 0  # tokens read


class ChatModel:
    """pi(a | s) of a chat model, which needs no checkpoint and no tokenizer here.

    qnet: what scores its answers, if a method asks for Q. silent: how many answers have no action.
    """

    def __init__(self, config: Chatting, env: envs.TextEnv) -> None:
        address = config.server or os.environ.get("OPENAI_BASE_URL", OPENAI)
        self.server = ChatServer(f"{address.partition('#')[0]}#{config.model}" if config.model else address)
        self.env = env.fork()
        env.side_by_side = min(EPISODES, env.side_by_side)
        self.config = config
        self.body = json.loads(config.body)
        self.rendering = Rendering.load(os.devnull, config)  # no checkpoint's
        self.chat = self  # its rendering is all that stages ask of an agent's Chat
        self.examples = functools.cache(self._examples)
        self.qnet: Any = None
        self.silent = 0

    def version(self) -> str | None:
        """The model's name in an answer: a run that goes on must not mix two that had one alias."""
        self.server.chat([("user", "Hello")])
        return self.server.answered_as

    def sample(self, requests: list[Sample]) -> list[list[Answer]]:
        jobs = []
        for request in requests:
            shown = self.examples(request.key[0])  # here: an environment is not for threads
            jobs.append([(request, shown, k) for k in range(request.n)])
        return self.server.side_by_side(self.answer, jobs)

    def answer(self, request: Sample, shown: list[tuple[str, str]], k: int) -> Answer:
        """Answer k, with a seed of its own, which many servers ignore."""
        messages = list(request.state.messages)
        messages[request.state.opening : request.state.opening] = shown
        (noise,) = uniforms(1, self.config.seed, *request.key, k)
        options = {
            "temperature": request.temperature,
            "max_tokens": self.rendering.max_new_tokens,
            "stop": list(self.rendering.stop),
            "seed": int(noise * 2**31),
        }
        options = {name: value for name, value in options.items() if name not in self.body}
        more = {name: value for name, value in self.body.items() if value is not None}
        choice, usage = self.server.chat(messages, **options, extra_body=more)
        content = without_thinking(choice.message.content or "")
        text = any_of(self.rendering.stop).split(content)[0].strip()
        self.silent += "Action:" not in text
        return Answer(text, usage.completion_tokens, math.nan, prompt=usage.prompt_tokens)

    def _examples(self, task_id: str) -> list[tuple[str, str]]:
        """The turns of demonstrations for a task, of others than its subject."""
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
            example = State.load(demonstrate(self.env, task)["messages"])
            turns += example.messages[example.opening :]
        return turns

    def warn(self) -> None:
        """A thought alone is played too, as an action that no environment knows."""
        if self.silent:
            warn(f'{self.silent} answers have no "Action:"; --max-new-tokens may have cut them')


# --------------------------------------------------------------------------------------- the search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Chatting, q_search.Config):
    """q_search.py's settings; those of precision and device are QNet's.

    out: RUN/results_MODEL.jsonl. label: the model's name.
    """

    method: tuple[Name, ...] = runtime(("greedy", "random", "best_of_n", "qlass"))


class ChatMethod(Method):
    """A method of q_search.py, whose tokens the server counts."""

    def outcome(self, chat: Any, best: Episode, episodes: list[Episode]) -> dict:
        costs: dict[str, Any] = {"tokens": {"scored": 0}}
        if self.needs_q:
            costs = costs_of(chat.qnet.chat, episodes, self.read_by_qnet)
        answers = [answer for steps in episodes for step in steps for answer in step.samples]
        written = sum(answer.tokens for answer in answers)
        costs["tokens"] |= {"prompt": tokens_read(episodes), "generated": written}
        costs["usage"] = {"prompt": sum(answer.prompt for answer in answers), "generated": written}
        return describe(best, episodes, costs)


def tokens_read(episodes: Sequence[Episode]) -> int:
    """Tokens of all prompts, each read once, as with a prompt cache.

    UserError if a prompt is no longer than the one before it: the server cuts them.
    """
    read: dict[State, int] = {}
    for steps in episodes:
        before = 0
        for step in steps:
            prompt = step.samples[0].prompt
            if prompt <= before:
                problem = f"reads {prompt} tokens of a prompt, and {before} of the shorter one before"
                raise UserError(f"--server: it {problem}: it needs a longer context")
            read[step.state] = prompt - before
            before = prompt
    return sum(read.values())


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env, tasks = q_search.environment(config)
    agent = ChatModel(config, env)
    name = Path(agent.server.model).name  # of a hub name or a folder its last part
    out = config.out or config.run / f"results_{name}.jsonl"
    config = dataclasses.replace(config, model=agent.version(), out=out, label=config.label or name)
    plan = [ChatMethod(**vars(m)) for kind in config.method for m in methods_of(kind, config)]
    models = {Sample: agent.sample}
    inputs: Inputs = {}
    if any(method.needs_q for method in plan):
        # Temperature and length of an answer are the chat model's.
        named = config.qnet or str(config.run / "qnet")
        reading = dataclasses.replace(config, qnet=named, temperature=None, max_new_tokens=None)
        agent.qnet, inputs["qnet"] = q_search.load_scorer(reading)
        models[Score] = agent.qnet.score
    q_search.evaluate(config, env, tasks, plan, agent, models, inputs)
    agent.warn()


if __name__ == "__main__":
    run_stage(main)
