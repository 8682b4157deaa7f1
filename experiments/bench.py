"""The speed of each part, side by side with what one would take without it, in one run.

    python -m experiments.bench                     # all: sampling, trees, qnet
    python -m experiments.bench --only sampling qnet

The ratio says how many times more is done a second, or how many times less is used. Seconds are CPU time of one thread.

    sampling  candidates of episodes side by side: free text behind short and long prompts, and valid actions. Beside
              it transformers' `generate` of the same batch. Both take turns, --repeats times: the ratio is the median,
              its range behind it
    trees     exploration trees on the bundled WebShop with a tiny Llama of random weights. Beside it one sequence at a
              time (--plain of the stages)
    qnet      training on these trees, forward and backward, and the tokens that their values take. Beside it --plain
"""

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch

import envs
import train_qnet
from bellman import label, q_values
from build_trees import Explorer, tree_records
from experiments import drive_in_order
from qlass import models
from qlass.batching import Sample, Score, ask
from qlass.chat import Chat, Rendering
from qlass.demonstrations import demonstrate
from qlass.fast.decode import FastPolicy
from qlass.messages import react, start, step
from qlass.pairs import Pair, pairs_of
from qlass.policy import Policy
from qlass.settings import Sampling, parse, run_stage
from qlass.tiny import AIDS, tiny_model
from qlass.training import micro_batches
from train_qnet import QNet, loss_of, packs_of, scorer

TEXT = 17  # tokens of a demonstration's mean action
N = 4  # candidates


Part = Literal["sampling", "trees", "qnet"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    only: tuple[Part, ...] = get_args(Part)  # parts to time
    model: str | None = None  # checkpoint of `sampling` (a tiny random Llama)
    repeats: int = 3  # of `sampling`


def line(name: str, other: float, ours: float, unit: str, spread: Sequence[float] = ()) -> str:
    """unit: with "/" a rate, else a cost. spread: of the ratio."""
    ratio = ours / other if "/" in unit else other / ours
    text = f"{name:60} {other:>10,.4g} -> {ours:>10,.4g} {unit:8}{ratio:8,.1f}x"
    return f"{text} ({min(spread):.1f} to {max(spread):.1f})" if spread else text


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


# ------------------------------------------------------------------------------------------------------------- sampling


class Generate:
    """The same candidates by transformers' `generate`, which reads all prompts of a batch at once."""

    def __init__(self, model: Any, chat: Chat) -> None:
        self.model, self.chat = model, chat

    def sample(self, requests: list[Sample]) -> list[str]:
        tokenizer = self.chat.tokenizer
        prompts = {"input_ids": [self.chat.prompt(request.state) for request in requests]}
        inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        ends = sorted(self.chat.stop_ids)
        options: dict[str, Any] = {"max_new_tokens": TEXT, "eos_token_id": ends, "pad_token_id": ends[0]}
        width = inputs["input_ids"].shape[1]
        if requests[0].valid:
            allowed, longest = self.valid_tokens(requests, width)
            options |= {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": longest}
        ids = self.model.generate(**inputs, **options, do_sample=True, top_k=0, num_return_sequences=N)
        return tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)

    def valid_tokens(self, requests: list[Sample], width: int) -> tuple[Callable, int]:
        """The tokens that may follow those of a row, so that it becomes a valid action; the longest action's tokens."""
        actions = []
        for request in requests:
            actions.append([self.chat.action(text, request.state.task) for text in request.valid])

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            written = ids[width:].tolist()
            n = len(written)
            following = {action[n] for action in actions[row // N] if action[:n] == written and len(action) > n}
            return list(following) or [self.chat.stop_id]  # the row has ended

        return allowed, max(map(len, itertools.chain(*actions)))


def rounds_of(env: envs.TextEnv, chat: Chat, episodes: int, skip: int, steps: int = 3) -> list[list[Sample]]:
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


def sampling(name: str, rounds: list[list[Sample]], model: Any, chat: Chat, repeats: int) -> str:
    requests = list(itertools.chain(*rounds))
    tokens = sum(len(chat.prompt(request.state)) for request in requests) // len(requests)
    rates: dict[type, list[float]] = {Generate: [], FastPolicy: []}
    for _ in range(repeats):
        for way, measured in rates.items():
            seconds, _ = timed(lambda way=way: list(map(way(model, chat).sample, rounds)))
            measured.append(N * len(requests) / seconds)
    ratios = [ours / other for other, ours in zip(*rates.values(), strict=True)]
    other, ours = map(statistics.median, rates.values())
    return line(f"{name}, {tokens:,} tokens", other, ours, "texts/s", ratios)


def three_cases(path: str | None, repeats: int) -> Iterator[str]:
    lake = envs.make("frozenlake")
    shop = envs.make("webshop")
    for name, env, skip in (
        ("free text, FrozenLake", lake, 0),
        ("free text, WebShop", shop, 4),
        ("valid actions, WebShop", shop, 4),
    ):
        candidates = name.split()[0]
        if path:
            model, chat = models.load(path, Sampling(plain=True))
        else:
            model, chat = random_agent(env, candidates)
        chat = Chat(chat.tokenizer, Rendering(candidates=candidates, max_new_tokens=TEXT, stop=()), chat.context)
        rounds = rounds_of(env, chat, 2 if path else 16, skip)
        yield sampling(name, rounds, model, chat, repeats)


# ------------------------------------------------------------------------------------------------- trees and their QNet


def grow(env: envs.TextEnv, tasks: list[str], policy: Policy, width: int = 64) -> list[list[dict]]:
    """The trees of these tasks, `width` of them side by side, as lines of trees.jsonl."""

    async def tree_of(task: str) -> list[dict]:
        explorer = Explorer(env.fork(), task, policy.chat.rendering, max_depth=3, max_rollouts=6)
        return tree_records(env, task, await explorer.explore({}), explorer.rewards)

    return list(drive_in_order(map(tree_of, tasks), {Sample: policy.sample}, width))


def random_agent(env: envs.TextEnv, candidates: str) -> tuple[Any, Chat]:
    torch.manual_seed(0)
    demonstrations = [demonstrate(env, task) for task in env.task_ids("train")[:30]]
    model, tokenizer = tiny_model(turn["content"] for line in demonstrations for turn in line["messages"])
    return model, Chat(tokenizer, Rendering(**AIDS | {"candidates": candidates, "max_new_tokens": TEXT}))


def trees(n: int = 64, few: int = 4) -> Iterator[str]:
    """The plain way builds the first few of our n trees."""
    env = envs.make("webshop")
    tasks = env.task_ids("train")[100 : 100 + n]
    for candidates, actions in ("free", "actions written freely"), ("valid", "actions among the valid ones"):
        model, chat = random_agent(env, candidates)
        slow, expected = timed(partial(grow, env, tasks[:few], Policy(model, chat), 1))
        fast, grown = timed(partial(grow, env, tasks, FastPolicy(model, chat)))
        rates = sum(map(len, expected)) / slow, sum(map(len, grown)) / fast
        yield line(f"exploration trees, {actions}", *rates, "nodes/s")


def epoch(net: QNet, trees: list[list[Pair]], plain: bool) -> int:
    """Leaves the gradient of all pairs in the net. Returns the tokens that went through it."""
    config = train_qnet.Config(plain=plain, max_tokens=1024)
    packs = [pack for tree in trees for pack in packs_of(net.chat, tree, config)]
    for portion in micro_batches(packs, lambda pack: pack.tokens, 1 if plain else 2048):
        loss_of(net, portion, config).backward()
    return sum(pack.tokens for pack in packs)


def qnet(n: int = 2) -> Iterator[str]:
    env = envs.make("webshop")
    model, chat = random_agent(env, "valid")
    grown = grow(env, env.task_ids("train")[100 : 100 + n], FastPolicy(model, chat))
    pairs = [pairs_of(label(tree, q_values(tree, 0.9))) for tree in grown]
    net = QNet(model.model, chat)
    slow, read = timed(partial(epoch, net, pairs, True))
    fast, computed = timed(partial(epoch, net, pairs, False))
    yield line("QNet, tokens of an epoch", read, computed, "tokens")
    yield line("QNet, time of an epoch", slow, fast, "s")
    ours = scorer(net)
    ours.score([Score(pair.state, (pair.action,)) for tree in pairs for pair in tree])
    yield line("values of these trees' nodes", read, ours.cache.computed, "tokens")


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "sampling": partial(three_cases, config.model, config.repeats),
        "trees": trees,
        "qnet": qnet,
    }
    for name in config.only:
        for text in parts[name]():
            print(text, flush=True)


if __name__ == "__main__":
    run_stage(main)
