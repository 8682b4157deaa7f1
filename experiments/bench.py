"""How fast each part is, side by side with the plain way of doing the same, in one run.

    python -m experiments.bench                     # all: sampling, trees, qnet, webshop, alfworld
    python -m experiments.bench --only sampling qnet

The plain way of a model is that of qlass/policy.py and train_qnet.py, one sequence at a time; ours is qlass/fast/. Both
do the same work: the same tree nodes, the same loss, the same pages. The ratio says how many times more is done a
second, or how many times less is used. Seconds are CPU time of one thread, which other work on the machine hardly
affects.

    sampling  candidates of episodes side by side: free text behind FrozenLake's short prompts and WebShop's long ones,
              and among valid actions. Beside the plain way stands transformers' `generate` on a padded batch. The three
              take turns, --repeats times: the ratio is the median, its range behind it. --model names a checkpoint
              (default: a tiny Llama of random weights).
    trees     exploration trees on the bundled WebShop with a tiny Llama of random weights, which cost what trained ones
              do, and the tokens that go through it.
    qnet      training on these trees, forward and backward, and the tokens that their values take.
    webshop   steps of a random shopper through fresh tasks, text and valid actions of each page included. Plain: what
              Princeton's engine does on its own 1,000 products, a recorded figure (--webshop-data names those files).
    alfworld  loads and steps of random walks. Plain: TextWorld, where requirements-alfworld.txt is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

import envs
from bellman import label
from build_trees import Explorer, tree_records
from environments.alfworld.games import load
from environments.alfworld.textworld import TextWorldGame
from experiments import drive_in_order
from qlass import UserError
from qlass.batching import Sample, Score, ask
from qlass.chat import Chat, Rendering, State, react, uniforms
from qlass.cli import run_stage
from qlass.fast.packing import pack_pairs, packed_loss
from qlass.fast.token_tree import batches
from qlass.models import load_checkpoint
from qlass.policy import Policy
from qlass.tiny import AIDS, tiny_model
from sft import demonstrate
from train_qnet import TINY, Pair, QNet, loss_tokens, pair_loss, pairs_of

WEBSHOP_RECORDED = 50.0  # steps/s of the original engine on 1,000 products: 2,366 scripted steps, step() alone


@dataclasses.dataclass
class Figure:
    name: str
    plain: float | None
    ours: float
    unit: str  # with "/" a rate: more is better; else a cost
    goal: float | None = None
    spread: tuple[float, float] | None = None  # of the ratio

    @property
    def ratio(self) -> float | None:
        if self.plain is None:
            return None
        return self.ours / self.plain if "/" in self.unit else self.plain / self.ours

    def __str__(self) -> str:
        plain = f"{self.plain:>10,.4g} -> " if self.plain is not None else " " * 14
        ratio = f"{self.ratio:8,.1f}x" if self.ratio is not None else ""
        goal = f" (goal: {self.goal}x)" if self.goal else ""
        if self.spread:
            goal = " ({:.1f} to {:.1f})".format(*self.spread)
        return f"{self.name:60} {plain}{self.ours:>10,.4g} {self.unit:8}{ratio}{goal}"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


# ---------------------------------------------------------------------------------------------------------- sampling


class Draw(LogitsProcessor):
    """The draws of `Policy.draw` for `generate`: of each row's logits (B, V) the token drawn stays."""

    def __init__(self, policy: Policy, heat: torch.Tensor, noise: torch.Tensor, start: int) -> None:
        self.policy, self.heat, self.noise, self.start = policy, heat, noise, start

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens, _ = self.policy.draw(logits, self.heat, self.noise[:, ids.shape[1] - self.start])
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0.0)


class Generate:
    """`Policy.sample` by transformers' own `generate`: a row for each candidate, padded on the left."""

    def __init__(self, model: Any, chat: Chat, budget: int = 16_384) -> None:
        self.policy, self.model, self.chat, self.budget = Policy(model, chat, plain=True), model.eval(), chat, budget

    def sample(self, requests: list[Sample]) -> list[list[str]]:
        prompts, room = [self.chat.prompt(r.state) for r in requests], self.chat.rendering.max_new_tokens
        answers: list[list[str]] = [[] for _ in requests]
        for group in batches(requests, lambda r: len(self.chat.prompt(r.state)) + room, self.budget, lambda r: r.n):
            rows = [(i, k) for i in group for k in range(requests[i].n)]
            for (i, _), text in zip(rows, self.generate(requests, prompts, rows), strict=True):
                answers[i].append(text)
        return answers

    @torch.inference_mode()
    def generate(self, requests: list[Sample], prompts: list[list[int]], rows: list[tuple[int, int]]) -> list[str]:
        width, room = max(len(prompts[i]) for i, _ in rows), self.chat.rendering.max_new_tokens
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        real = torch.zeros_like(ids)
        for row, (i, _) in enumerate(rows):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            real[row, width - len(prompts[i]) :] = 1
        heat = torch.tensor([requests[i].temperature for i, _ in rows])
        noise = torch.from_numpy(np.stack([uniforms(room, 0, *requests[i].key, k) for i, k in rows]))
        following = [self.following(requests[i]) for i, _ in rows]
        ends = sorted(self.chat.stop_ids)

        def allowed(row: int, tokens: torch.Tensor) -> list[int]:
            return following[row].get(tuple(tokens[width:].tolist()), ends)

        drawn = self.model.generate(
            ids, attention_mask=real, logits_processor=[Draw(self.policy, heat, noise, width)],
            prefix_allowed_tokens_fn=allowed if requests[rows[0][0]].valid else None,
            generation_config=GenerationConfig(max_new_tokens=room, eos_token_id=ends, pad_token_id=ends[0]),
        )  # fmt: skip
        return [self.chat.text(self.until(row.tolist(), ends)) for row in drawn[:, width:]]

    def following(self, request: Sample) -> dict[tuple, list[int]]:
        """Which tokens may follow each beginning of a valid action."""
        following: dict[tuple, list[int]] = {}
        for action in request.valid:
            ids = self.chat.action(action, request.state.task)
            for i, token in enumerate(ids):
                following.setdefault(tuple(ids[:i]), []).append(token)
        return following

    @staticmethod
    def until(ids: list[int], ends: list[int]) -> list[int]:
        stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        return ids[:stop]


def rounds_of(env: envs.TextEnv, chat: Chat, episodes: int, skip: int, steps: int, n: int) -> list[list[Sample]]:
    """What the steps of episodes side by side ask after the first `skip`, of a player who moves at random."""
    rng, rounds = random.Random(0), [[] for _ in range(skip + steps)]
    for task in env.task_ids("train")[:episodes]:
        observation, info = env.reset(options={"task_id": task})
        state = State.first(env, observation, info)
        for step, asked in enumerate(rounds):
            asked.append(ask(env, state, n, (task, step), chat.rendering, 1.0))
            action = rng.choice([a for a in info["valid_actions"] if "Buy" not in a])
            observation, _, terminated, truncated, info = env.step(action)
            state = state.then(react("", action), env.message(observation))
            if terminated or truncated:
                break
    return rounds[skip:]


def sampling(
    name: str, env: envs.TextEnv, model: Any, chat: Chat, repeats: int, episodes: int, skip: int, few: int, n: int = 4
) -> Iterator[Figure]:  # fmt: skip
    """The plain way answers the first `few` requests of each round."""
    rounds = rounds_of(env, chat, episodes, skip, 3, n)
    tokens = sum(len(chat.prompt(r.state)) for asked in rounds for r in asked) // sum(map(len, rounds))
    ways = {"plain": lambda: Policy(model, chat, plain=True), "generate": lambda: Generate(model, chat),
            "fast": lambda: Policy(model, chat)}  # fmt: skip
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        texts = {}
        for way, new in ways.items():
            agent, asked = new(), [some[: few if way == "plain" else None] for some in rounds]
            seconds, texts[way] = timed(lambda agent=agent, asked=asked: [agent.sample(some) for some in asked])
            rates[way].append(n * sum(map(len, asked)) / seconds)
        if "valid" not in name:  # there `generate` spends its noise token by token
            written = [[[c.text for c in answer] for answer in some] for some in texts["fast"]]
            same = [a == b for ours, theirs in zip(written, texts["generate"], strict=True)
                    for a, b in zip(ours, theirs, strict=True)]  # fmt: skip
            if sum(same) < 0.9 * len(same):
                raise AssertionError("other texts")
    for way in ("plain", "generate"):
        ratios = [ours / theirs for ours, theirs in zip(rates["fast"], rates[way], strict=True)]
        against = "one at a time" if way == "plain" else "generate"
        middle = statistics.median(rates[way]), statistics.median(rates["fast"])
        yield Figure(f"{name}, {tokens:,} tokens: {against}", *middle, "texts/s", spread=(min(ratios), max(ratios)))


def three_cases(path: str | None, data: str | None, repeats: int) -> Iterator[Figure]:
    lake, shop = envs.make("frozenlake"), envs.make("webshop", data=data)
    for name, env, candidates, episodes, skip in (
        ("free text, FrozenLake", lake, "free", 16, 0),
        ("free text, WebShop", shop, "free", 8, 4),
        ("valid actions, WebShop", shop, "valid", 8, 4),
    ):
        if path:
            model, chat = load_checkpoint(path, AutoModelForCausalLM, plain=True)
            episodes //= 8
        else:
            model, chat = random_agent(env, candidates)
        rendering = Rendering(candidates=candidates, max_new_tokens=17, stop=())  # a demonstration's mean
        chat = Chat(chat.tokenizer, rendering, chat.context)
        yield from sampling(name, env, model, chat, repeats, episodes, skip, 1)


# ------------------------------------------------------------------------------------------------- exploration trees


def grow(env: envs.TextEnv, tasks: list[str], policy: Policy, width: int = 64) -> list[list[dict]]:
    """The trees of these tasks, `width` of them side by side, as lines of trees.jsonl."""

    def lines_of(task: str) -> Iterator:
        explorer = Explorer(env.fork(), task, policy.chat.rendering, max_depth=3, max_rollouts=6)
        root = yield from explorer.explore({})
        return tree_records(env, task, root)

    return list(drive_in_order(map(lines_of, tasks), {Sample: policy.sample}, width))


def random_agent(env: envs.TextEnv, candidates: str) -> tuple[Any, Chat]:
    torch.manual_seed(0)
    demonstrations = [demonstrate(env, t) for t in env.task_ids("train")[:30]]
    model, tokenizer = tiny_model(m["content"] for d in demonstrations for m in d["messages"])
    rendering = Rendering(**AIDS)
    rendering = dataclasses.replace(rendering, candidates=candidates, max_new_tokens=17)  # a demonstration's mean
    return model, Chat(tokenizer, rendering)


def trees(candidates: str, n: int = 64, few: int = 4) -> Iterator[Figure]:
    """The plain way builds the first few of our n trees."""
    env = envs.make("webshop")
    model, chat = random_agent(env, candidates)
    tasks = env.task_ids("train")[100 : 100 + n]
    plain, ours = Policy(model, chat, plain=True), Policy(model, chat)
    slow, expected = timed(lambda: grow(env, tasks[:few], plain, 1))
    fast, grown = timed(lambda: grow(env, tasks, Policy(model, chat)))
    if grow(env, tasks[:few], ours) != expected:
        raise AssertionError("other trees")
    actions = "actions written freely" if candidates == "free" else "actions among the valid ones"
    rates = sum(map(len, expected)) / slow, sum(map(len, grown)) / fast
    yield Figure(f"exploration trees, {actions}", *rates, "nodes/s", goal=8)
    yield Figure(f"the same, {few} trees", plain.computed, ours.computed, "tokens")


# --------------------------------------------------------------------------------------------------------------- QNet


def plain_epoch(net: QNet, pairs: list[Pair]) -> tuple[float, int]:
    """The loss of these pairs, its gradient left in the parameters, and the tokens that went through the net."""
    total, before = 0.0, net.plain_tokens
    for pair in pairs:
        loss = pair_loss(net, pair)
        loss.backward()
        total += loss.item()
    return total, net.plain_tokens - before


def packed_epoch(net: QNet, pairs: list[Pair]) -> tuple[float, int]:
    """The same, each token of the tree once."""
    total, packs = 0.0, list(pack_pairs(net.chat, pairs, loss_tokens, max_tokens=1024))
    for group in batches(packs, lambda p: len(p.tree), TINY["micro_tokens"]):
        loss = packed_loss(net, [packs[i] for i in group])
        loss.backward()
        total += loss.item()
    return total, sum(len(p.tree) for p in packs)


def qnet(n: int = 2) -> Iterator[Figure]:
    env = envs.make("webshop")
    model, chat = random_agent(env, "valid")
    grown = grow(env, env.task_ids("train")[100 : 100 + n], Policy(model, chat))
    pairs = [pairs_of(label(tree, "q", 0.9)) for tree in grown]
    ways = [QNet(model.model, chat, plain=plain) for plain in (True, False)]
    seconds, tokens = [0.0, 0.0], [0, 0]
    for tree in pairs:
        for way, (net, epoch) in enumerate(zip(ways, (plain_epoch, packed_epoch), strict=True)):
            spent, (_, computed) = timed(lambda net=net, epoch=epoch, tree=tree: epoch(net, tree))
            seconds[way] += spent
            tokens[way] += computed
    yield Figure("QNet, tokens of an epoch", *tokens, "tokens", goal=4)
    yield Figure("QNet, time of an epoch", *seconds, "s", goal=4)
    before = ways[0].plain_tokens
    nodes = list(dict.fromkeys((p.state, p.action) for tree in pairs for p in tree))
    for net in ways:
        net.eval().score([Score(state, (action,)) for state, action in nodes])
    yield Figure("values of these trees' nodes", ways[0].computed - before, ways[1].computed, "tokens")


# ------------------------------------------------------------------------------------------------------- environments


def webshop(data: str | None, seconds: float = 5) -> Iterator[Figure]:
    """A shopper who clicks at random, through one task after the other: the searches are new ones."""
    env, rng = envs.make("webshop", data=data), random.Random(0)
    steps, done, tasks = 0, True, itertools.cycle(env.task_ids("all"))
    started = time.process_time()
    while (spent := time.process_time() - started) < seconds:
        if done:
            _, info = env.reset(options={"task_id": next(tasks)})
        _, _, bought, out_of_steps, info = env.step(rng.choice(info["valid_actions"]))
        steps, done = steps + 1, bought or out_of_steps
    name = f"WebShop, {len(env.shop.products):,} products of {data or 'the bundled catalogue'}"
    yield Figure(name, WEBSHOP_RECORDED if data else None, steps / spent, "steps/s", goal=100 if data else None)


def random_walk(game: Any, steps: int, rng: random.Random) -> list[str]:
    """Commands that can be given one after the other."""
    state, commands = game.start, []
    while len(commands) < steps and not state.won:
        commands.append(rng.choice(sorted(state.commands)))
        state, _ = game.step(state, commands[-1])
    return commands


def walk(game: Any, commands: list[str]) -> list[tuple[str, list[str]]]:
    """Feedback and next commands of each step, on our engine or on TextWorld."""
    state, answers = game.start, []
    for command in commands:
        state, feedback = game.step(state, command)
        answers.append((feedback.strip(), sorted(state.commands)))
    return answers


def speeds(kind: Callable[[Any], Any], paths: list[Any], walks: list[list[str]]) -> tuple[float, float]:
    """Games loaded a second, and steps of these walks."""
    loading, games = timed(lambda: [kind(path) for path in paths])
    walking, _ = timed(lambda: [walk(game, commands) for game, commands in zip(games, walks, strict=True)])
    return len(paths) / loading, sum(map(len, walks)) / walking


def alfworld(data: str | None, n: int = 100, plain: int = 4, steps: int = 50) -> Iterator[Figure]:
    """The first `plain` of `n` games on TextWorld too."""
    env, rng = envs.make("alfworld", data=data), random.Random(0)
    paths = [env.games.path(task) for task in random.Random(0).sample(env.task_ids("train"), n)]
    walks = [random_walk(load(path), steps, rng) for path in paths]
    ours, theirs = speeds(load, paths, walks), (None, None)
    with contextlib.suppress(UserError):  # not installed
        theirs = speeds(TextWorldGame, paths[:plain], walks[:plain])
    where = f"ALFWorld, games of {data}" if data else "ALFWorld, bundled games"
    yield Figure(f"{where}, loaded", theirs[0], ours[0], "games/s")
    yield Figure(f"{where}, played", theirs[1], ours[1], "steps/s", goal=theirs[1] and 500)


# --------------------------------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    names = ["sampling", "trees", "qnet", "webshop", "alfworld"]
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)}")
    add("--model", metavar="PATH", help="checkpoint of `sampling` (default: a tiny random Llama)")
    add("--repeats", type=int, default=3, metavar="N", help="of `sampling` (default: %(default)s)")
    add("--webshop-data", metavar="DIR", help="WebShop's own files (default: the bundled catalogue)")
    add("--alfworld-data", metavar="DIR", help="ALFWorld's games (default: $ALFWORLD_DATA, else bundled ones)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    benches: dict[str, Callable[[], Iterable[Figure]]] = {
        "sampling": lambda: three_cases(args.model, args.webshop_data, args.repeats),
        "trees": lambda: itertools.chain(trees("free"), trees("valid")),
        "qnet": qnet,
        "webshop": lambda: webshop(args.webshop_data),
        "alfworld": lambda: alfworld(args.alfworld_data),
    }
    for name in args.only:
        for figure in benches[name]():
            print(figure, flush=True)


if __name__ == "__main__":
    run_stage(main)
