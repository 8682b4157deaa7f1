"""The speed of this code: the fast engine beside --plain on one thread, and training and play on a GPU.

    python -m experiments.bench                      # engines, by a tiny Llama of random weights
    python -m experiments.bench engines FOLDER       # texts by a checkpoint
    python -m experiments.bench model RUN            # RUN/base: random weights in the shape of Llama-2-7B
    python -m experiments.bench gpu RUN              # after the stages in RUN: the table RUN/gpu_check.md

    texts   four candidates a page, of WebShop episodes side by side
    trees   exploration trees on the bundled WebShop, among valid actions; --plain builds the first few of them

`bash runs/paper.sh gpu_check` runs the last two, and the stages between them.
"""

import dataclasses
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tyro.conf import Positional

import envs
import train_qnet
from build_trees import Explorer
from experiments import drive_in_order
from qlass import UserError, models
from qlass.agent import load_policy
from qlass.batching import Sample, ask
from qlass.chat import Chat, Rendering
from qlass.demonstrations import demonstrate
from qlass.device import autocast
from qlass.fast.decode import FastPolicy
from qlass.fast.packing import pack_pairs, packed_loss
from qlass.messages import react, start, step
from qlass.pairs import pairs_of
from qlass.policy import Policy
from qlass.records import Label
from qlass.settings import Sampling, parse, read_settings, run_stage
from qlass.tiny import AIDS, tiny_model
from qlass.trees import read_trees, tree_records

TEXT = 17  # tokens of a demonstration's mean action
N = 4  # candidates
GPU = torch.cuda.is_available()
LLAMA_2_7B = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 4096}  # fmt: skip
SMALL = {"vocab_size": 5_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 4096}  # fmt: skip
MICRO = 8192 if GPU else 1024  # tokens of a training step


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of a call, of the clock on a GPU until it has done all, else of this process; and its result."""
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if GPU else (bool, time.process_time)
    wait()
    began = clock()
    result = work()
    wait()
    return clock() - began, result


def random_agent(env: envs.TextEnv, candidates: str) -> tuple[Any, Chat]:
    torch.manual_seed(0)
    demonstrations = [demonstrate(env, task) for task in env.task_ids("train")[:30]]
    model, tokenizer = tiny_model(turn["content"] for line in demonstrations for turn in line["messages"])
    return model, Chat(tokenizer, Rendering(**AIDS | {"candidates": candidates, "max_new_tokens": TEXT}))


# -------------------------------------------------------------------------------------------- the engines on one thread


def line(name: str, plain: float, fast: float, unit: str) -> str:
    return f"{name:45} {plain:>10,.4g} -> {fast:>10,.4g} {unit} a second {fast / plain:8,.1f}x"


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
    model, chat = models.load_model(path, Sampling(plain=True)) if path else random_agent(env, "free")
    chat = Chat(chat.tokenizer, Rendering(max_new_tokens=TEXT, stop=()), chat.context)
    rounds = rounds_of(env, chat, 2 if path else 16)
    requests = list(itertools.chain(*rounds))
    tokens = sum(len(chat.prompt(request.state)) for request in requests) // len(requests)
    rates = []
    for kind in (Policy, FastPolicy):
        spent, _ = timed(lambda kind=kind: list(map(kind(model, chat).sample, rounds)))
        rates.append(N * len(requests) / spent)
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


# ------------------------------------------------------------------------------------------------------------- on a GPU


def make_model(folder: Path) -> None:
    """A checkpoint of random weights with a tokenizer trained on WebShop's demonstrations: nothing is downloaded."""
    tokenizer = random_agent(envs.make("webshop"), "free")[1].tokenizer
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    shape = transformers.LlamaConfig(**(LLAMA_2_7B if GPU else SMALL) | ends)
    config = Sampling()
    where, precision = models.device_and_precision(config)
    torch.manual_seed(0)
    with where:
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=models.PRECISIONS[precision])
    models.save(model, Chat(tokenizer, Rendering()), folder, config)


def decoding(run: Path) -> Iterator[str]:
    """Tokens that the agent writes a second."""
    policy = load_policy(run / "base", Sampling())
    env = envs.make("webshop")
    state = start(env, env.task_ids("train")[0])
    for n in (1, 16, 64):

        def write(tokens: int, n: int = n) -> float:
            policy.chat.rendering.max_new_tokens = tokens
            return timed(lambda: policy.sample([Sample(state, n, ("gpu check",), temperature=1.0)]))[0]

        write(4)  # the prompt is read, memory is there
        yield f"| {n} | {64 * n / (write(68) - write(4)):,.0f} |"


OPTIONS: dict[str, dict[str, Any]] = {  # settings of train_qnet.py, beside --gradient-checkpointing
    "all weights": {},
    "all weights, 8-bit AdamW": {"optim": "adamw8bit"},
    "LoRA 16": {"lora": 16},
    "LoRA 16, all activations kept": {"lora": 16, "gradient_checkpointing": False},
    "LoRA 16, 4 bits": {"lora": 16, "load_in": "4bit"},
}


def training(run: Path, config: train_qnet.Config) -> str:
    """Peak memory and tokens a second of packed QNet training, as cells of a row."""
    qnet = train_qnet.new_qnet(run / "base", config).train()
    models.prepare_training(qnet.backbone, config)
    optimizer = models.adamw([(qnet, config.lr)], config.optim)
    pairs = [[pair] for tree in read_trees(run / "q_labels.jsonl", Label) for pair in pairs_of(tree)]
    largest = max(pack_pairs(qnet.chat, pairs, "all", MICRO // 2), key=lambda pack: pack.tokens)
    packs = [largest] * max(1, MICRO // largest.tokens)

    def update() -> None:
        with autocast(config):
            loss = packed_loss(qnet, packs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if GPU:
        torch.cuda.reset_peak_memory_stats()
    update()  # makes the moments
    spent = min(timed(update)[0] for _ in range(2))
    peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if GPU else ""
    return f"{peak} | {len(packs) * largest.tokens / spent:,.0f}"


def figures(run: Path) -> Iterator[str]:
    card = torch.cuda.get_device_name() if GPU else "no GPU: **a small model on a CPU, the figures mean nothing**"
    yield f"# {card}; torch {torch.__version__}, transformers {transformers.__version__}\n"
    yield "| candidates at once | tokens/s |\n|---|---|"
    yield from decoding(run)
    yield f"\nQNet's training in steps of {MICRO:,} packed tokens, gradient checkpointing unless said otherwise.\n"
    yield "| option | peak memory | tokens/s |\n|---|---|---|"
    config = read_settings(train_qnet.Config, None, ["--preset", "paper", "--run", str(run / "qnet")])
    for name, option in OPTIONS.items():
        gc.collect()
        torch.cuda.empty_cache()
        try:
            cells = training(run, dataclasses.replace(config, **{"gradient_checkpointing": True} | option))
        except (UserError, torch.cuda.OutOfMemoryError) as error:
            cells = f"{str(error).split('. ')[0]} | "
        yield f"| {name} | {cells} |"


@dataclasses.dataclass(frozen=True)
class Config:
    what: Positional[Literal["engines", "model", "gpu"]] = "engines"
    folder: Positional[Path | None] = None


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    folder = config.folder or Path("runs/gpu-check")
    if config.what == "engines":
        torch.set_num_threads(1)
        print(texts(config.folder), flush=True)
        print(trees())
    elif config.what == "model":
        make_model(folder / "base")
    else:
        with open(folder / "gpu_check.md", "w", encoding="utf-8") as page:
            for line in figures(folder):
                print(line, flush=True)
                print(line, file=page, flush=True)


if __name__ == "__main__":
    run_stage(main)
