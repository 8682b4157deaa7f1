"""How fast each part is, side by side with the plain way of doing the same, in one run.

    python -m experiments.bench                     # all: sampling, trees, qnet, webshop, alfworld
    python -m experiments.bench --only sampling qnet

The plain way of a model is one sequence at a time (--plain of the stages); ours is qlass/fast/. The ratio says how many
times more is done a second, or how many times less is used. Seconds are CPU time of one thread.

    sampling  candidates of episodes side by side, behind short and long prompts. Both ways take turns, --repeats
              times: the ratio is the median, its range behind it
    trees     exploration trees on the bundled WebShop with a tiny Llama of random weights, and its tokens
    qnet      training on these trees, forward and backward, and the tokens that their values take
    webshop   steps of a random shopper through fresh tasks, text and valid actions of each page included. Plain: what
              Princeton's engine does on its own 1,000 products, a recorded figure (--webshop-data names those files)
    alfworld  loads and steps of random walks. Plain: TextWorld, where requirements-alfworld.txt is installed
"""

import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch

import build_trees
import envs
import train_qnet
from bellman import label
from build_trees import Explorer
from environments.alfworld.games import load
from environments.alfworld.textworld import TextWorldGame
from experiments import drive_in_order
from qlass import UserError
from qlass.batching import Sample, Score, ask
from qlass.chat import Chat, Rendering
from qlass.demonstrations import demonstrate
from qlass.fast.decode import FastPolicy
from qlass.messages import State, react
from qlass.models import load as load_model
from qlass.pairs import Pairs, pairs_of
from qlass.policy import Policy
from qlass.settings import Sampling, parse, run_stage
from qlass.tiny import AIDS, tiny_model
from qlass.training import micro_batches
from train_qnet import QNet, loss_of, parts_of, scorer

WEBSHOP_RECORDED = 50.0  # steps/s of the original engine on 1,000 products: 2,366 scripted steps, step() alone
TEXT = 17  # tokens of a demonstration's mean action


Part = Literal["sampling", "trees", "qnet", "webshop", "alfworld"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    only: tuple[Part, ...] = get_args(Part)  # parts to time
    model: str | None = None  # checkpoint of `sampling` (a tiny random Llama)
    repeats: int = 3  # of `sampling`
    webshop_data: str | None = None  # WebShop's own files (the bundled catalogue)
    alfworld_data: str | None = None  # ALFWorld's games ($ALFWORLD_DATA, else bundled ones)


def line(name: str, plain: float | None, ours: float, unit: str, spread: tuple[float, ...] = ()) -> str:
    """plain: None if there is nothing to compare with. unit: with "/" a rate, else a cost. spread: of the ratio."""
    text = f"{name:60} {plain:>10,.4g} -> " if plain else f"{name:60} {'':14}"
    text += f"{ours:>10,.4g} {unit:8}"
    if plain:
        text += f"{ours / plain if '/' in unit else plain / ours:8,.1f}x"
    return text + (f" ({spread[0]:.1f} to {spread[1]:.1f})" if spread else "")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def rounds_of(
    env: envs.TextEnv, chat: Chat, episodes: int, skip: int, steps: int = 3, n: int = 4
) -> list[list[Sample]]:
    """What the steps of episodes side by side ask after the first `skip`, of a player who moves at random."""
    rng, rounds = random.Random(0), [[] for _ in range(skip + steps)]
    for task in env.task_ids("train")[:episodes]:
        state = State.first(env, *env.reset(options={"task_id": task}))
        for step, requests in enumerate(rounds):
            requests.append(ask(env, state, n, (task, step), chat.rendering, 1.0))
            action = rng.choice([a for a in env.valid_actions() if "Buy" not in a])
            state, _, done = state.act(env, react("", action))
            if done:
                break
    return rounds[skip:]


def sampling(name: str, rounds: list[list[Sample]], model: Any, chat: Chat, repeats: int) -> Iterator[str]:
    """The plain way answers the first request of each round."""
    tokens = sum(len(chat.prompt(r.state)) for r in itertools.chain(*rounds)) // sum(map(len, rounds))
    ways = {Policy: [requests[:1] for requests in rounds], FastPolicy: rounds}
    rates: dict[type[Policy], list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, groups in ways.items():
            seconds, _ = timed(partial(list, map(way(model, chat).sample, groups)))
            rates[way].append(sum(r.n for requests in groups for r in requests) / seconds)
    plain, fast = rates.values()
    ratios = [ours / theirs for ours, theirs in zip(fast, plain, strict=True)]
    middle = statistics.median(plain), statistics.median(fast)
    yield line(f"{name}, {tokens:,} tokens", *middle, "texts/s", (min(ratios), max(ratios)))


def three_cases(path: str | None, data: str | None, repeats: int) -> Iterator[str]:
    lake, shop = envs.make("frozenlake"), envs.make("webshop", data=data)
    cases = ("free text, FrozenLake", lake, 16, 0), ("free text, WebShop", shop, 8, 4)
    for name, env, episodes, skip in (*cases, ("valid actions, WebShop", shop, 8, 4)):
        candidates = name.split()[0]
        if path:
            model, chat = load_model(path, Sampling(plain=True))
            episodes //= 8
        else:
            model, chat = random_agent(env, candidates)
        chat = Chat(chat.tokenizer, Rendering(candidates=candidates, max_new_tokens=TEXT, stop=()), chat.context)
        yield from sampling(name, rounds_of(env, chat, episodes, skip), model, chat, repeats)


def grow(env: envs.TextEnv, tasks: list[str], policy: Policy, width: int = 64) -> list[list[dict]]:
    """The trees of these tasks, `width` of them side by side, as lines of trees.jsonl."""
    rendering = policy.chat.rendering
    explorers = (Explorer(env.fork(), task, rendering, max_depth=3, max_rollouts=6) for task in tasks)
    growing = (build_trees.grow(explorer, {}) for explorer in explorers)
    return list(drive_in_order(growing, {Sample: policy.sample}, width))


def random_agent(env: envs.TextEnv, candidates: str) -> tuple[Any, Chat]:
    torch.manual_seed(0)
    demonstrations = [demonstrate(env, t) for t in env.task_ids("train")[:30]]
    model, tokenizer = tiny_model(m["content"] for d in demonstrations for m in d["messages"])
    return model, Chat(tokenizer, Rendering(**AIDS | {"candidates": candidates, "max_new_tokens": TEXT}))


def trees(n: int = 64, few: int = 4) -> Iterator[str]:
    """The plain way builds the first few of our n trees."""
    env = envs.make("webshop")
    tasks = env.task_ids("train")[100 : 100 + n]
    for candidates, actions in ("free", "actions written freely"), ("valid", "actions among the valid ones"):
        model, chat = random_agent(env, candidates)
        plain, ours = Policy(model, chat), FastPolicy(model, chat)
        slow, expected = timed(partial(grow, env, tasks[:few], plain, 1))
        fast, grown = timed(partial(grow, env, tasks, FastPolicy(model, chat)))
        if grow(env, tasks[:few], ours) != expected:
            raise AssertionError("other trees")
        rates = sum(map(len, expected)) / slow, sum(map(len, grown)) / fast
        yield line(f"exploration trees, {actions}", *rates, "nodes/s")
        yield line(f"the same, {few} trees", plain.computed, ours.computed, "tokens")


def epoch(net: QNet, trees: list[Pairs], plain: bool) -> int:
    """Leaves the gradient of all pairs in the net. Returns the tokens that went through it."""
    config = train_qnet.Config(plain=plain, max_tokens=1024)
    groups = [part for tree in trees for part in parts_of(net.chat, tree, config)]
    for portion in micro_batches(groups, lambda group: group.tokens, 1 if plain else 2048):
        loss_of(net, portion, config).backward()
    return sum(group.tokens for group in groups)


def qnet(n: int = 2) -> Iterator[str]:
    env = envs.make("webshop")
    model, chat = random_agent(env, "valid")
    grown = grow(env, env.task_ids("train")[100 : 100 + n], FastPolicy(model, chat))
    pairs = [pairs_of(label(tree, "q", 0.9)) for tree in grown]
    net = QNet(model.model, chat)
    (slow, read), (fast, computed) = (timed(partial(epoch, net, pairs, plain)) for plain in (True, False))
    yield line("QNet, tokens of an epoch", read, computed, "tokens")
    yield line("QNet, time of an epoch", slow, fast, "s")
    ours = scorer(net)
    ours.score([Score(pair.state, (pair.action,)) for tree in pairs for pair in tree])
    yield line("values of these trees' nodes", read, ours.cache.computed, "tokens")


def webshop(data: str | None, seconds: float = 5) -> Iterator[str]:
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
    yield line(name, WEBSHOP_RECORDED if data else None, steps / spent, "steps/s")


def random_walk(game: Any, steps: int, rng: random.Random) -> list[str]:
    """Commands that can be given one after the other."""
    state, commands = game.start, []
    while len(commands) < steps and not state.won:
        commands.append(rng.choice(sorted(state.commands)))
        state, _ = game.step(state, commands[-1])
    return commands


def speeds(kind: Callable[[Any], Any], paths: list[Any], walks: list[list[str]]) -> tuple[float, float]:
    """Games loaded a second, and steps of these walks, whose next commands are listed."""
    loading, games = timed(lambda: [kind(path) for path in paths])

    def walk() -> None:
        for game, commands in zip(games, walks, strict=True):
            state = game.start
            for command in commands:
                state, _ = game.step(state, command)
                sorted(state.commands)

    return len(paths) / loading, sum(map(len, walks)) / timed(walk)[0]


def alfworld(data: str | None, n: int = 100, plain: int = 4, steps: int = 50) -> Iterator[str]:
    """The first `plain` of `n` games on TextWorld too."""
    env, rng = envs.make("alfworld", data=data), random.Random(0)
    paths = [env.games.path(task) for task in random.Random(0).sample(env.task_ids("train"), n)]
    walks = [random_walk(load(path), steps, rng) for path in paths]
    ours, theirs = speeds(load, paths, walks), (None, None)
    with contextlib.suppress(UserError):  # not installed
        theirs = speeds(TextWorldGame, paths[:plain], walks[:plain])
    where = f"ALFWorld, games of {data}" if data else "ALFWorld, bundled games"
    yield line(f"{where}, loaded", theirs[0], ours[0], "games/s")
    yield line(f"{where}, played", theirs[1], ours[1], "steps/s")


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "sampling": partial(three_cases, config.model, config.webshop_data, config.repeats),
        "trees": trees,
        "qnet": qnet,
        "webshop": partial(webshop, config.webshop_data),
        "alfworld": partial(alfworld, config.alfworld_data),
    }
    for name in config.only:
        for text in parts[name]():
            print(text, flush=True)


if __name__ == "__main__":
    run_stage(main)
