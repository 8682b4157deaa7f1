"""What only a GPU can show. runs/gpu_check.sh runs it, and says what it measures.

    python -m experiments.gpu_check model DIR       # DIR/base: random weights in the shape of Llama-2-7B
    python -m experiments.gpu_check figures DIR     # after the stages: the table DIR/gpu_check.md

Without a GPU the model's shape is small, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

import envs
import train_qnet
from qlass import UserError, memory, models
from qlass.chat import Chat, Rendering, State
from qlass.cli import run_stage
from qlass.driver import Sample
from qlass.fast.packing import PackedPairs, packed_loss
from qlass.files import read_trees
from qlass.policy import Policy
from qlass.qnet import pairs_of
from qlass.tiny import tiny_model
from sft import demonstrate

GPU = torch.cuda.is_available()
LLAMA_2_7B = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 4096}  # fmt: skip
SMALL = {"vocab_size": 5_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 4096}  # fmt: skip
PEAK = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "L40S": 362, "4090": 165}  # data sheets: bf16 TFLOP/s
MICRO = 8192 if GPU else 1024  # tokens of a training step
NEEDED_BY = {"peft": {"--lora"}, "bitsandbytes": {"--load-in", "adamw8bit"}}
Row = tuple[str, str, str, str]


def make_model(folder: Path) -> None:
    """A checkpoint of random weights with a tokenizer trained on WebShop's demonstrations: nothing is downloaded."""
    env = envs.make("webshop")
    demonstrations = [demonstrate(env, task) for task in env.task_ids("train")[:50]]
    _, tokenizer = tiny_model(m["content"] for d in demonstrations for m in d["messages"])
    config = transformers.LlamaConfig(
        **(LLAMA_2_7B if GPU else SMALL), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    where, dtype = models.device_and_dtype(None)
    torch.manual_seed(0)
    with where:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    models.save_checkpoint(model, Chat(tokenizer, Rendering()), folder)


# ------------------------------------------------------------------------------------------------------------ figures


def seconds(work: Callable[[], Any]) -> float:
    """Of a call, until the device has done it."""
    if GPU:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def bandwidth(gigabytes: float) -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.empty(int(gigabytes * 1e9) // 4, device="cuda" if GPU else "cpu")
    y = x.clone()
    return 2 * x.nbytes / min(seconds(lambda: y.copy_(x)) for _ in range(5))


def decoding(run: Path) -> Iterator[Row]:
    """Tokens a second, against one reading of all weights (and of the keys and values) for each token of the batch."""
    policy, rate = Policy.load(run / "base"), bandwidth(8 if GPU else 0.1)
    yield "memory bandwidth of a copy", f"{rate / 1e9:,.0f} GB/s", "", ""
    env = envs.make("webshop")
    observation, info = env.reset(options={"task_id": env.task_ids("train")[0]})
    state, config = State.first(env, observation, info), policy.model.config
    weights = sum(p.nbytes for p in policy.model.parameters())
    a_token = 2 * config.num_hidden_layers * config.hidden_size * policy.model.dtype.itemsize  # keys and values
    for n in (1, 16, 64):

        def write(tokens: int, n: int = n) -> Callable[[], Any]:
            policy.chat.rendering.max_new_tokens = tokens
            return lambda: policy.sample([Sample(state, n, ("gpu check",), temperature=1.0)])

        seconds(write(4))  # the prompt is read, memory is there
        spent = seconds(write(68)) - seconds(write(4))
        reads = weights + n * a_token * (len(policy.chat.prompt(state)) + 34)
        speed, limit = 64 * n / spent, n * rate / reads
        yield f"decoding, {n} at once", f"{speed:,.0f} tokens/s", f"{limit:,.0f} by bandwidth", f"{speed / limit:.0%}"


OPTIONS = (  # peak memory of QNet's training, and how fast it is
    ("all weights, bf16", ["--weights", "bf16"], True),
    ("all weights, float32", [], True),
    ("all weights, float32, 8-bit AdamW", ["--optim", "adamw8bit"], True),
    ("LoRA 16", ["--lora", "16"], True),
    ("LoRA 16, all activations kept", ["--lora", "16"], False),
    ("LoRA 16, 8 bits", ["--lora", "16", "--load-in", "8bit"], True),
    ("LoRA 16, 4 bits", ["--lora", "16", "--load-in", "4bit"], True),
)


def training(run: Path, flags: list[str], checkpointing: bool) -> tuple[str, str, str, str, str]:
    """Peak, its estimate and their ratio, tokens a second, and model FLOP utilisation, of packed QNet training."""
    argv = ["--env", "webshop", "--sft", str(run / "base"), "--max-tokens", str(MICRO // 2)]
    args = train_qnet.arguments([*argv, *flags, *["--gradient-checkpointing"] * checkpointing])
    qnet = train_qnet.to_train(args).train()
    backbone = qnet.backbone
    trees = [pairs_of(tree) for tree in read_trees(run / "q_labels.jsonl", ["q", "messages"])]
    packs = full_packs(train_qnet.packed_trees(qnet, trees, args))
    longest, tokens = max(len(p.tree) for p in packs), sum(len(p.tree) for p in packs)
    args.micro_tokens = longest * len(packs)
    of = memory.estimate(qnet, backbone, lambda ids: qnet(input_ids=ids, use_cache=False), args, longest)
    room = torch.cuda.get_device_properties(0).total_memory if GPU else float("inf")
    if of().total > memory.ROOM * room:
        return "does not fit", f"{of().total / 1e9:.1f} GB", "", "", ""
    optimizer = models.adamw((p for p in qnet.parameters() if p.requires_grad), args.lr, args.optim)

    def update() -> None:
        with models.mixed_precision(backbone):
            loss = packed_loss(qnet, packs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if GPU:
        torch.cuda.reset_peak_memory_stats()
    update()  # makes the moments
    spent = min(seconds(update) for _ in range(2))
    peak = torch.cuda.max_memory_allocated() if GPU else float("nan")
    n = sum(p.numel() for p in backbone.parameters())  # in 4 bits two a byte: none of them is counted then
    flops = (4 if args.lora else 6) * n * tokens / spent  # forward, backward to inputs, to weights; not done again
    known = [tera for name, tera in PEAK.items() if GPU and name in torch.cuda.get_device_name()]
    used = f"{flops / known[0] / 1e12:.0%}" if known and not args.load_in else ""
    about = of().total
    measured = (f"{peak / 1e9:.1f} GB", f"{about / 1e9:.1f} GB", f"{about / peak:.2f}") if GPU else ("", "", "")
    return *measured, f"{tokens / spent:,.0f}", used


def full_packs(packs: list[PackedPairs]) -> list[PackedPairs]:
    """The largest, as many times as fill a step."""
    largest = max(packs, key=lambda p: len(p.tree))
    return [largest] * max(1, MICRO // len(largest.tree))


def figures(run: Path) -> Iterator[str]:
    name = torch.cuda.get_device_name() if GPU else "no GPU: **a small model on a CPU, the figures mean nothing**"
    yield f"# {name}; torch {torch.__version__}, transformers {transformers.__version__}\n"
    yield "| decoding | measured | limit | share |\n|---|---|---|---|"
    for row in decoding(run):
        yield f"| {' | '.join(row)} |"
    yield f"\nQNet's training in steps of {MICRO:,} packed tokens, gradient checkpointing unless said otherwise.\n"
    yield "| option | peak | estimate | ratio | tokens/s | FLOP utilisation |\n|---|---|---|---|---|---|"
    for name, flags, checkpointing in OPTIONS:
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        missing = [p for p, of in NEEDED_BY.items() if of & set(flags) and not find_spec(p)]
        if missing:
            yield f"| {name} | {missing[0]} is not installed | | | | |"
            continue
        try:
            row = training(run, flags, checkpointing)
        except (UserError, torch.cuda.OutOfMemoryError) as error:
            row = (str(error).splitlines()[0], "", "", "", "")
        yield f"| {name} | {' | '.join(row)} |"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["model", "figures"])
    parser.add_argument("run", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.what == "model":
        make_model(args.run / "base")
        return
    with open(args.run / "gpu_check.md", "w", encoding="utf-8") as page:
        for line in figures(args.run):
            print(line, flush=True)
            print(line, file=page, flush=True)
    print(f"{args.run / 'gpu_check.md'}", file=sys.stderr)


if __name__ == "__main__":
    run_stage(main)
