"""The speed of the fast engine beside that of --plain, in CPU time of one thread.

python -m experiments.bench                   # both by a tiny Llama of random weights
python -m experiments.bench --model FOLDER    # the texts by a checkpoint

texts   four candidates a page, of WebShop episodes side by side
trees   exploration trees on the bundled WebShop, among valid actions; --plain builds the first few of them
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import envs
from build_trees import Explorer, tree_records
from experiments import drive_in_order
from qlass import models
from qlass.batching import Sample, ask
from qlass.chat import Chat, Rendering
from qlass.demonstrations import demonstrate
from qlass.fast.decode import FastPolicy
from qlass.messages import react, start, step
from qlass.policy import Policy
from qlass.settings import Sampling, parse, run_stage
from qlass.tiny import AIDS, tiny_model

TEXT = 17  # tokens of a demonstration's mean action
N = 4  # candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: Path | None = None  # checkpoint that writes the texts (a tiny random Llama)


def line(name: str, plain: float, fast: float, unit: str) -> str:
    return f"{name:45} {plain:>10,.4g} -> {fast:>10,.4g} {unit} a second {fast / plain:8,.1f}x"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def random_agent(env: envs.TextEnv, candidates: str) -> tuple[Any, Chat]:
    torch.manual_seed(0)
    demonstrations = [demonstrate(env, task) for task in env.task_ids("train")[:30]]
    model, tokenizer = tiny_model(turn["content"] for line in demonstrations for turn in line["messages"])
    return model, Chat(tokenizer, Rendering(**AIDS | {"candidates": candidates, "max_new_tokens": TEXT}))


def rounds_of(env: envs.TextEnv, chat: Chat, episodes: int, skip: int = 4, steps: int = 3) -> list[list[Sample]]:
    """Requests of the steps of episodes side by side, after the first `skip`, of a player who moves at random."""
    rng = random.Random(0)
    rounds: list[list[Sample]] = [[] for _ in range(skip + steps)]
    for task in env.task_ids("train")[:episodes]:
        state = start(env, task)
        for number, requests in enumerate(rounds):
            requests.append(ask(env, state, N, (task, number), chat.rendering, 1.0))
            action = rng.choice([a for a in env.valid_actions() if "Buy" not in a])
            state, _, done = step(env, state, react("", action))
            if done:
                break
    return rounds[skip:]


def texts(path: Path | None) -> str:
    env = envs.make("webshop")
    model, chat = models.load(path, Sampling(plain=True)) if path else random_agent(env, "free")
    chat = Chat(chat.tokenizer, Rendering(max_new_tokens=TEXT, stop=()), chat.context)
    rounds = rounds_of(env, chat, 2 if path else 16)
    requests = list(itertools.chain(*rounds))
    tokens = sum(len(chat.prompt(request.state)) for request in requests) // len(requests)
    rates = []
    for kind in (Policy, FastPolicy):
        seconds, _ = timed(lambda kind=kind: list(map(kind(model, chat).sample, rounds)))
        rates.append(N * len(requests) / seconds)
    return line(f"texts behind {tokens:,} tokens", *rates, "texts")


def grow(env: envs.TextEnv, tasks: list[str], policy: Policy, width: int = 64) -> int:
    """The number of nodes of these tasks' trees, `width` of them side by side."""

    async def tree_of(task: str) -> list[dict]:
        explorer = Explorer(env.fork(), task, policy.chat.rendering, max_depth=3, max_rollouts=6)
        return tree_records(env, task, await explorer.explore({}), explorer.rewards)

    return sum(map(len, drive_in_order(map(tree_of, tasks), {Sample: policy.sample}, width)))


def trees(n: int = 64, few: int = 4) -> str:
    env = envs.make("webshop")
    tasks = env.task_ids("train")[100 : 100 + n]
    model, chat = random_agent(env, "valid")
    slow, expected = timed(partial(grow, env, tasks[:few], Policy(model, chat), 1))
    fast, grown = timed(partial(grow, env, tasks, FastPolicy(model, chat)))
    return line("exploration trees", expected / slow, grown / fast, "nodes")


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    torch.set_num_threads(1)
    print(texts(config.model), flush=True)
    print(trees())


if __name__ == "__main__":
    run_stage(main)
