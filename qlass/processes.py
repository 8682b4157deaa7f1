"""Training by several processes, a GPU each, or by one.

    torchrun --nproc-per-node 8 -- train_qnet.py ... [--fsdp]       (-- keeps torchrun from reading --run as its own)
    accelerate launch --multi_gpu|--use_fsdp train_qnet.py ...

Every process takes its share of each update's sequences, and the gradients are summed. Each holds the whole model, or
with --fsdp its part of the weights, gradients and moments (torch's FSDP2: a layer's weights are gathered while they are
used). What there is to do only once (demonstrations, checkpoints, metadata) is done by the first.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from environments import UserError

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations


def start(fsdp: bool = False) -> bool:
    """Join the other processes, if a launcher has started several. Are they to divide the weights among them?"""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UserError("accelerate launch: DeepSpeed is not supported; FSDP shares the same: give --use_fsdp instead")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return False
    if not distributed.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, timeout=PATIENCE)
    return fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"


def count() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def first() -> bool:
    return rank() == 0


def say(text: str) -> None:
    """Once for all processes."""
    if first():
        print(text, flush=True)


@contextlib.contextmanager
def in_turn(really: bool = True) -> Iterator[None]:
    """One process after the other: what the first makes is there for the others."""
    if not really:
        yield
    for turn in range(count() if really else 0):
        if turn == rank():
            yield
        meet()


def meet() -> None:
    if count() > 1:
        distributed.all_reduce(torch.zeros(1))


def same(value: Any) -> Any:
    """The first process's value."""
    box = [value]
    if count() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def every(value: T) -> list[T]:
    """The values of all processes."""
    values = [value] * count()
    if count() > 1:
        distributed.all_gather_object(values, value)
    return values


def share(items: Sequence[T], in_step: bool) -> Iterator[tuple[T, bool]]:
    """This process's items, each with True; in step all processes have as many, the last one again with False.

    So they must go where weights are divided.
    """
    for i in range(rank(), math.ceil(len(items) / count()) * count(), count()):
        if i < len(items) or in_step:
            yield items[min(i, len(items) - 1)], i < len(items)


def total(*values: float) -> list[float]:
    """Sums over the processes."""
    sums = torch.tensor(values, dtype=torch.float64)
    if count() > 1:
        distributed.all_reduce(sums)
    return sums.tolist()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Of processes with other sequences each; one that had none adds nothing. Backward did it for divided weights."""
    if count() > 1:
        for p in (p for p in parameters if not hasattr(p, "full_tensor")):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad)


# ------------------------------------------------------------------------------------------------ weights in parts


def divide(model: nn.Module, layers: Iterable[nn.Module], bf16: bool) -> None:
    """Leave each process its part of the weights, on its GPU where it has one. Gradients will be sums.

    bf16: in this width layers are gathered and computed; gradients are summed in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = distributed.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (count(),))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returned a view: none is written to in place
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*layers, model):
        # By default what is outside of the layers would stay gathered, and parameters() name the wrong tensors.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo knows too


def divided(model: nn.Module) -> bool:
    return hasattr(model, "unshard")  # also while its weights are gathered


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """The whole weights in each process, so that it can go through them without the others, and not backward."""
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")] if divided(model) else []
    for module in parts:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in parts:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What of a tensor is this process's, where `like` is divided."""
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def local(x: torch.Tensor) -> torch.Tensor:
    """This process's part of a divided tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def whole(values: Any) -> Any:
    """A nested dict with the parts of its tensors put together, in the first process's memory; all have to ask."""
    if isinstance(values, dict):
        return {key: whole(value) for key, value in values.items()}
    values = values.detach() if isinstance(values, torch.Tensor) else values
    if not hasattr(values, "full_tensor"):
        return values
    full = values.full_tensor()
    return full.cpu() if first() else None


@torch.no_grad()
def set_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """From what `whole` gave: this process's part of each."""
    for name, p in trained(model).items():
        p.copy_(part(weights[name], p))


def set_moments(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """An optimiser's state, from what `whole` gave: this process's part of it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, moments in saved["state"].items():
        same = {k: m for k, m in moments.items() if getattr(m, "shape", None) == parameters[i].shape}
        moments |= {k: part(m, parameters[i]) for k, m in same.items()}
    optimizer.load_state_dict(saved)


def undivided(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """An ordinary model with the trained weights, in the first process: `make()` makes it as it was before them."""
    if not divided(model):
        return model
    weights = whole(trained(model))
    if first():
        model = make()
        model.load_state_dict(weights, strict=False)
    return model
