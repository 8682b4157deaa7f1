"""results.jsonl: a line per task and method, what it holds, and what it costs in tokens."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlass.batching import Models, drive
from qlass.chat import Chat, State
from qlass.cli import leaks, my_share
from qlass.files import SAMPLING_FREE, Output, identity

if TYPE_CHECKING:
    from envs import TextEnv
    from q_search import Method, Step

Episodes = Sequence[Sequence["Step"]]
Scored = Callable[["Step"], list[str]]  # the actions of a step that QNet reads
Play = Callable[["TextEnv", str, "Method"], Generator]

# --------------------------------------------------------------------------- the outcome of a task


def outcome_of(chat: Chat, best: Sequence[Step], episodes: Episodes, scored: Scored) -> dict:
    """The episode of a task that counts, and what all of its episodes cost."""
    return describe(best, episodes, costs_of(chat, episodes, scored))


def describe(best: Sequence[Step], episodes: Episodes, costs: dict) -> dict:
    """The fields of a line that tell how a task was played; costs: as of `costs_of`."""
    reward = best[-1].reward
    steps = []
    for step in best:
        q = [round(float(q), 4) if math.isfinite(q) else None for q in step.scores]
        candidates = [{"action": a, "q": v} for a, v in zip(step.candidates, q, strict=True)]
        line = {"action": step.action, "observation": step.observation, "candidates": candidates}
        steps.append(line)
    return {
        "task": best[0].state.task,
        "reward": reward,
        "success": reward > 1 - 1e-9,
        "n_steps": len(best),
        **costs,
        "env_steps": sum(map(len, episodes)),
        "resets": len(episodes),
        "steps": steps,
    }


def costs_of(chat: Chat, episodes: Episodes, scored: Scored) -> dict[str, Any]:
    """Tokens of a task's episodes. Each model reads and writes a token once, as with a prompt cache.

    `prompt` counts what the policy reads of the environment's words (its own are in the cache since
    it wrote them), `generated` all that it writes, `scored` what QNet reads. What episodes share is
    read once. An agent that chooses among valid actions is charged the tokens of its choice.
    """
    generated = 0
    by_qnet: set[tuple[State, str]] = set()
    for episode in episodes:
        for step in episode:
            generated += sum(candidate.tokens for candidate in step.drawn)
            by_qnet.update((step.state, action) for action in scored(step))
    prompt = environment_tokens(chat, ([step.state for step in episode] for episode in episodes))
    actions = sum(len(chat.action(action, state.task)) for state, action in by_qnet)
    tokens = {
        "prompt": prompt,
        "generated": generated,
        "scored": actions + prompt if by_qnet else 0,
    }
    if not chat.rendering.truncate:
        return {"tokens": tokens}
    cut = 0
    for episode in episodes:
        cut += sum(1 for step in episode if chat.is_cut(step.state))
    return {"tokens": tokens, "cut_prompts": cut}


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
        own = ("method", "M", "N", "select", "split", "skip")  # each line says its own
        inputs = [args.sft, args.qnet, *inputs]
        super().__init__(args.out, vars(args), len, inputs, (*own, *SAMPLING_FREE), identity)
        self.args, self.env = args, env

    def lines(self, tasks: Iterable[str], method: Method) -> dict[str, dict]:
        """By task, what a line says besides the outcome."""
        env, args = self.env, self.args
        fields = {"env": env.name, "split": args.split, "label": args.label}
        fields |= method.settings() | {"seed": args.seed}
        lines = {}
        for task_id in tasks:
            of_task = {"type": env.task_type(task_id), "block": env.block(task_id)}
            lines[task_id] = {"task_id": task_id} | of_task | fields
        return lines

    def rewards(self, lines: Iterable[dict]) -> dict[str, float]:
        """By task, the rewards of those of the lines that were played."""
        wanted = set(map(identity, lines))
        records = [record for record in self.records if identity(record) in wanted]
        return {record["task_id"]: record["reward"] for record in records}

    def play(self, tasks: list[str], plan: Iterable[Method], play: Play, models: Models) -> None:
        """Play methods on this process's share of the tasks, a line for each task as it ends.

        play: a generator of requests that returns the outcome.
        """
        env, width = self.env, self.args.in_flight or self.env.side_by_side
        lines = [self.lines(tasks, method).values() for method in plan]
        self.expect([identity(line) for line in itertools.chain(*lines)])
        tasks = my_share(tasks)

        def play_line(method: Method, line: dict) -> Generator[Any, Any, list[dict]]:
            started, fork = time.time(), env.fork()
            outcome = yield from play(fork, line["task_id"], method)
            fork.close()
            return [line | outcome | {"seconds": round(time.time() - started, 3)}]

        for method in plan:
            lines = self.lines(tasks, method)
            done = self.rewards(lines.values())
            todo = (play_line(method, line) for task, line in lines.items() if task not in done)
            self.grow(drive(todo, models, width), str(method), len(lines), len(done))
            rewards = self.rewards(lines.values())
            mean = sum(rewards.values()) / len(rewards)
            print(f"{method}: mean reward {mean:.3f} over {len(rewards)} {self.args.split} tasks")
        self.complete()

    def complete(self) -> None:
        """Put the lines in order, methods as they were first played, and complete the metadata."""
        methods = list(dict.fromkeys(identity(record)[1:] for record in self.records))
        tasks = self.env.task_ids(self.args.split)
        rank = {task_id: n for n, task_id in enumerate(tasks)}
        args = self.args
        leaked = leaks(self.env, self.records, args)

        def place(record: dict) -> tuple[int, int]:
            return methods.index(identity(record)[1:]), rank.get(record["task_id"], 0)

        self.finish(place, leaks=leaked)
