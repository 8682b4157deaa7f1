"""How much memory a training takes, estimated before its first step.

Weights, gradients and moments are counted; with --fsdp a process's part of them, and the layers that it gathers. What
autograd keeps for backward is measured on three short inputs, whatever the architecture, and extrapolated: a constant
(weights cast to bf16), a share that grows with the tokens, and one that grows with tokens x length. With gradient
checkpointing each layer keeps its input, and one layer at a time everything. docs/scale.md has it against peaks.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from qlass import UserError, loop
from qlass.models import layers_of, mixed_precision

LENGTHS = (32, 64, 128)
ROOM = 0.92  # of a GPU; the rest is for what the estimate does not know: fragments, temporary results
MOMENTS = {"adamw": 8.0, "adamw8bit": 2.1}  # bytes a trained weight
LORA = 0.01  # of the weights, about, are trained
WAYS_OUT = (  # in this order, until it fits
    ("gradient_checkpointing", True, "--gradient-checkpointing"),
    ("weights", "bf16", "--weights bf16"),
    ("lora", True, "--lora 16"),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: float
    gradients: float
    optimiser: float
    activations: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = (f"{name} {value / 1e9:.2f}" for name, value in dataclasses.asdict(self).items())
        return f"{' + '.join(parts)} = {self.total / 1e9:.2f} GB"


def kept_for_backward(forward: Callable[[], Any], backbone: Any) -> tuple[int, int]:
    """Bytes that autograd keeps of one forward pass beside weights and buffers: in all, and within the backbone."""
    own = {buffer.untyped_storage()._cdata for buffer in backbone.buffers()}
    kept: dict[int, int] = {}
    within: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own and not isinstance(x if x._base is None else x._base, nn.Parameter):
            kept[storage._cdata] = storage.nbytes()
        return x

    ends = (layers_of(backbone)[-1], backbone)  # some models call what is in the backbone, not itself
    watched = [end.register_forward_hook(lambda *_: within.append(sum(kept.values()))) for end in ends]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), mixed_precision(backbone):
        result = forward()  # held until the sum is taken, so that no storage is another's anew
    for hook in watched:
        hook.remove()
    total = sum(kept.values())
    del result
    return total, within[-1]


def curves(forward: Callable[[torch.Tensor], Any], backbone: Any) -> np.ndarray:
    """Coefficients (c, a, b) of what is kept, c + a tokens + b tokens x length: (2, 3), in all and in the backbone."""
    vocabulary = backbone.get_input_embeddings().num_embeddings
    rows = []
    for n in LENGTHS:
        ids = torch.randint(vocabulary, (1, n), generator=torch.Generator().manual_seed(n)).to(backbone.device)
        rows.append(kept_for_backward(lambda ids=ids: forward(ids), backbone))
    powers = np.vander(np.array(LENGTHS, float), 3, increasing=True)
    return np.linalg.solve(powers, np.array(rows, float)).clip(min=0).T


def estimate(
    model: nn.Module, backbone: Any, forward: Callable[[torch.Tensor], Any], args: argparse.Namespace, longest: int,
    beside: nn.Module | None = None,
) -> Callable[..., Memory]:  # fmt: skip
    """Peak of one update, as a function of the flags that change it (those given in `args` unless said otherwise).

    forward(ids) is the loss of one sequence (1, T), `backbone` the layers below the output layer, `longest` the tokens
    of the longest sequence, `beside` a second model that is only read, and may share weights.
    """
    tokens = max(longest, args.micro_tokens)
    at, training = np.array([1, tokens, tokens * longest]), model.training
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False
    model.train()  # with its dropout
    with torch.random.fork_rng():
        everything, layers = curves(forward, backbone) * at
    model.train(training)
    for module in checkpointed:
        module.gradient_checkpointing = True
    trained = [p for p in model.parameters() if p.requires_grad]
    numbers, config = sum(p.numel() for p in trained), backbone.config.get_text_config()
    inputs = config.num_hidden_layers * tokens * config.hidden_size * next(backbone.parameters()).element_size()
    held = sum(p.nbytes for p in model.parameters())
    single = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float32)
    own = set(model.parameters())
    read = sum(p.nbytes for p in beside.parameters() if p not in own) if beside else 0
    in_layers = sum(p.nbytes for p in layers_of(backbone).parameters())
    gathered = held - in_layers + 2 * in_layers / config.num_hidden_layers  # weights: the layer at work, and the next

    def memory(
        gradient_checkpointing: bool = args.gradient_checkpointing, weights: str = args.weights,
        optim: str = args.optim, lora: bool = bool(args.lora), parts: int = loop.count() if args.fsdp else 1,
    ) -> Memory:  # fmt: skip
        if (weights == "bf16" or parts > 1) and (optim != "adamw" or args.load_in):
            return Memory(math.inf, 0, 0, 0)  # refused (models.check_training)
        halved = (weights == "bf16" or lora) and any(p.dtype == torch.float32 for p in trained) and not args.lora
        share = LORA if lora and not args.lora else 1.0
        # Backward begins with gradients of what the output layer kept, twice its size; then the layers follow.
        output, kept = 3 * max(0.0, (everything - layers)[1:].sum()), layers[1:].sum()
        activations = everything[0] + output + kept
        if gradient_checkpointing:
            activations = everything[0] + (inputs + max(output, kept / config.num_hidden_layers))
        if halved or parts > 1:  # autocast has nothing left to cast
            activations -= everything[0]
        width, divided = 1 - 0.5 * halved * single / held, gathered * (parts > 1)
        return Memory(
            weights=width * (held / parts + divided + read),
            gradients=width * share * (sum(p.nbytes for p in trained) / parts + divided),
            optimiser=MOMENTS[optim] * numbers * share / parts,
            activations=activations,
        )

    return memory


def check_memory(memory: Callable[..., Memory], device: torch.device) -> None:
    """Print what the first update will take. UserError names flags that make it fit where a GPU has less."""
    said = f"memory: {memory()}"
    if device.type != "cuda":
        return loop.say(said)
    room = torch.cuda.get_device_properties(device).total_memory
    if memory().total <= ROOM * room:
        return loop.say(f"{said}, of {room / 1e9:.0f}")
    enough = (n for n in (2, 4, 8, 16, 32) if n > loop.count() and memory(parts=n).total <= ROOM * room)
    n = next(enough, 0)
    several = f"; or {n} GPUs divide it: torchrun --nproc-per-node {n} ... --fsdp (docs/scale.md)" if n else ""
    wider: dict[str, Any] = {}
    for name, value, _ in WAYS_OUT:
        wider |= {name: value} if math.isfinite(memory(**wider, **{name: value}).total) else {}
        if memory(**wider).total <= ROOM * room:
            flags = " ".join(flag for name, _, flag in WAYS_OUT if name in wider)
            raise UserError(f"{said}, and the GPU has {room / 1e9:.0f}: give {flags} ({memory(**wider)}){several}")
    fewer = "take a smaller model, or fewer --micro-tokens where the command has them"
    raise UserError(f"{said}, and the GPU has {room / 1e9:.0f}: {fewer}{several}")
