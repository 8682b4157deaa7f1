"""results.jsonl: a line for each task and method, with what it cost, resumed task by task."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlass.batching import Models, drive
from qlass.chat import Chat
from qlass.cli import leaks, my_share
from qlass.messages import State
from qlass.metadata import read_meta
from qlass.models import settle_precision
from qlass.output import Output, identity

if TYPE_CHECKING:
    from envs import TextEnv
    from q_search import Method, Step

Episodes = Sequence[Sequence["Step"]]
Scored = Callable[["Step"], list[str]]  # the actions of a step that QNet reads
Play = Callable[["TextEnv", str, "Method"], Generator[Any, Any, dict]]

# --------------------------------------------------------------------------- the outcome of a task


def describe(best: Sequence[Step], episodes: Episodes, costs: dict) -> dict:
    """The fields of a line: the episode that counts, and what all cost, as of `costs_of`."""
    steps = []
    for step in best:
        candidates = []
        for action, score in zip(step.candidates, step.scores, strict=True):
            q = round(float(score), 4) if math.isfinite(score) else None
            candidates.append({"action": action, "q": q})
        line = {"action": step.action, "observation": step.observation, "candidates": candidates}
        steps.append(line)
    return {
        "task": best[0].state.task,
        "reward": best[-1].reward,
        "success": best[-1].reward > 1 - 1e-9,
        "n_steps": len(best),
        **costs,
        "env_steps": sum(map(len, episodes)),
        "resets": len(episodes),
        "steps": steps,
    }


def costs_of(chat: Chat, episodes: Episodes, scored: Scored) -> dict[str, Any]:
    """Tokens of a task's episodes: a model reads and writes each once, as with a prompt cache.

    `prompt` counts what the policy reads of the environment's words (its own are in the cache since
    it wrote them), `generated` all that it writes, `scored` what QNet reads. What episodes share is
    read once. An agent that chooses among valid actions is charged the tokens of its choice.
    """
    generated = 0
    by_qnet: set[tuple[State, str]] = set()
    for step in chain.from_iterable(episodes):
        generated += sum(candidate.tokens for candidate in step.drawn)
        by_qnet.update((step.state, action) for action in scored(step))
    prompt = environment_tokens(chat, ([step.state for step in episode] for episode in episodes))
    read = prompt if by_qnet else 0
    read += sum(len(chat.action(action, state.task)) for state, action in by_qnet)
    costs: dict[str, Any] = {"tokens": {"prompt": prompt, "generated": generated, "scored": read}}
    if chat.rendering.truncate:
        steps = chain.from_iterable(episodes)
        costs["cut_prompts"] = len([step for step in steps if chat.is_cut(step.state)])
    return costs


def environment_tokens(chat: Chat, episodes: Iterable[Sequence[State]]) -> int:
    """Tokens of the environment's words: all of a first state, then each last message.

    Where the oldest turns are left out, what follows them is read again, the agent's words too.
    """
    tokens: dict[State, int] = {}
    for states in episodes:
        for t, state in enumerate(states):
            if state in tokens:
                continue
            messages = chat.prompt_tokens(state)
            if t == 0:
                messages = messages[::2]  # not the agent's OK
            elif chat.is_cut(state):
                messages = messages[chat.stays(state) :]
            else:
                messages = messages[-1:]
            tokens[state] = sum(map(len, messages))
    return sum(tokens.values())


# --------------------------------------------------------------------------------------- the file


class Results(Output):
    """The file of a call; a task that it has a line of is not played again by that method."""

    def __init__(self, args: argparse.Namespace, env: TextEnv, inputs: Iterable[Path] = ()) -> None:
        """inputs: what results are made from besides agent and QNet."""
        # A file is of one agent and one QNet, also where the methods of this call need none.
        args.sft, args.qnet = args.sft or args.run / "sft", args.qnet or args.run / "qnet"
        settle_precision(args)
        of_a_line = ("method", "M", "N", "select", "split", "skip", "plain")
        super().__init__(args.out, vars(args), [args.sft, args.qnet, *inputs], of_a_line, identity)
        self.args, self.env = args, env

    def line(self, task_id: str, method: Method) -> dict:
        """What a line says besides the outcome."""
        env, args = self.env, self.args
        line = {"task_id": task_id, "type": env.task_type(task_id), "block": env.block(task_id)}
        line |= {"env": env.name, "split": args.split, "label": args.label}
        return line | method.settings() | {"seed": args.seed}

    def play(self, tasks: list[str], plan: Iterable[Method], play: Play, models: Models) -> None:
        """Play methods on this process's share of the tasks, a line for each task as it ends.

        play: a generator of requests that returns the outcome.
        """
        mine, width = set(my_share(tasks)), self.args.in_flight or self.env.side_by_side
        lines = {method: [self.line(task, method) for task in tasks] for method in plan}
        self.plan = list(map(identity, chain.from_iterable(lines.values())))

        def play_line(method: Method, line: dict) -> Generator[Any, Any, list[dict]]:
            started, fork = time.time(), self.env.fork()
            outcome = yield from play(fork, line["task_id"], method)
            fork.close()
            return [line | outcome | {"seconds": round(time.time() - started, 3)}]

        for method, of_method in lines.items():
            share = [line for line in of_method if line["task_id"] in mine]
            done = set(map(identity, self.records))
            todo = [play_line(method, line) for line in share if identity(line) not in done]
            games = drive(iter(todo), models, width)
            self.grow(games, str(method), len(share), len(share) - len(todo))
            rewards = {identity(record): record["reward"] for record in self.records}
            mean = sum(rewards[identity(line)] for line in share) / len(share)
            print(f"{method}: mean reward {mean:.3f} over {len(share)} {self.args.split} tasks")
        cloned = bool(read_meta(self.args.sft)["arguments"])  # else it is a model as it came
        self.finish(leaks=leaks(self.env, self.records, self.args), cloned=cloned)
