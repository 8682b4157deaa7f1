"""The device of a model, its precision, and its division among the processes of torchrun."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qlass.files import rank_and_size
from qlass.records import as_user_error
from qlass.settings import Model

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def device_and_precision(config: Any) -> tuple[torch.device, str]:
    """This process's GPU or, without any, the CPU. --precision, else bf16 on a GPU that computes
    it, and float32 elsewhere."""
    gpu = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    place = torch.device("cuda", rank) if gpu else torch.device("cpu")
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return place, config.precision or ("bf16" if bf16 else "float32")


def autocast(config: Model) -> torch.autocast:
    """bf16 arithmetic on what is trained in float32, where that is the precision; else nothing. Its
    cache would keep a bf16 copy of every weight until the update ends."""
    place, precision = device_and_precision(config)
    bf16 = precision == "bf16"
    return torch.autocast(place.type, torch.bfloat16, enabled=bf16, cache_enabled=False)


# --------------------------------------------------------------------------------------- processes


def join(config: Model) -> None:
    """Join the processes that torchrun started. A process alone does nothing."""
    place, _ = device_and_precision(config)
    _, processes = rank_and_size()
    if processes > 1:
        if place.type == "cuda":  # else each process would also open the first one's GPU
            with as_user_error(place, " (torchrun: one process per GPU)", RuntimeError):
                torch.cuda.set_device(place)
        with as_user_error("torchrun sets RANK, WORLD_SIZE and MASTER_ADDR", errors=ValueError):
            distributed.init_process_group(timeout=timedelta(hours=2))  # disks can be slow


def is_first() -> bool:
    """True for the process that writes."""
    rank, _ = rank_and_size()
    return rank == 0


def wait() -> None:
    """Until all processes are here."""
    if distributed.is_initialized():
        distributed.barrier()


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """One process after the other, so that the machine's memory holds one whole model."""
    rank, n = rank_and_size()
    for _ in range(rank):
        wait()
    yield
    for _ in range(rank, n):
        wait()


def broadcast(value: Any) -> Any:
    """The first process's value, where rounding or memory may give the others another one."""
    values = [value]
    if distributed.is_initialized():
        distributed.broadcast_object_list(values)
    return values[0]


# ---------------------------------------------------------------- weights divided among processes


def divide_blocks(model: Any, mesh: DeviceMesh) -> None:
    """Block by block each process takes its share of a HuggingFace model's weights (FSDP2).

    By hand, as transformers' own plan trains a tied output layer apart from its embeddings.
    """
    for block in model.modules():
        if type(block).__name__ in (model._no_split_modules or ()):
            divide(block, mesh)
    divide(model, mesh)


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide what is not yet divided of a layer, which is gathered while it computes. Gradients
    become sums: an average is wrong in gloo, and another factor in NCCL."""
    divided: Any = fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be divided; all processes ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(weight: torch.Tensor, tensor: torch.Tensor) -> Any:
    """This process's rows of a tensor, if the weight is divided. A count of steps is on no GPU."""
    if not tensor.dim():
        return tensor if tensor.is_floating_point() else tensor.item()
    if isinstance(weight, DTensor):
        mesh, places = weight.device_mesh, weight.placements
        return distribute_tensor(tensor, mesh, places, src_data_rank=None)
    return tensor.to(weight.device)


def gather(model: nn.Module) -> None:
    """Make a model whole, on the first process's CPU, where it can be saved; a GPU that it filled
    has room to read it again."""
    keep = "cpu" if is_first() else "meta"
    weights: dict[nn.Parameter, nn.Parameter] = {}  # layers may share one
    for layer in model.modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            weights.setdefault(
                weight, nn.Parameter(whole(weight.detach()).to(keep), requires_grad=False)
            )
            setattr(layer, name, weights[weight])
