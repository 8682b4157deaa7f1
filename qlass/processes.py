"""Several processes that train one model, each with all of it: torchrun --nproc-per-node 8 sft.py
The model is not wrapped: DDP would hang on micro-batches that differ in number."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from qlass import UserError, files


@contextlib.contextmanager
def together(output: Path, device: str | None) -> Iterator[bool]:
    """Join the processes that torchrun started. Yields whether this is the first: it writes."""
    rank, n = files.share()
    if n > 1 and "MASTER_ADDR" not in os.environ:  # as in a job array
        raise UserError("WORLD_SIZE is set without a MASTER_ADDR: start by torchrun, or unset it")
    if n > 1:
        on_gpu = torch.cuda.is_available() and not (device or "").startswith("cpu")
        if on_gpu:  # else each process would also open the first one's GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        patience = datetime.timedelta(days=2)  # for as long as the first plays demonstrations
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=patience)
    with files.locked(output) if rank == 0 else contextlib.nullcontext():
        yield rank == 0


def wait() -> None:
    """Until all processes are here."""
    if files.share()[1] > 1:
        distributed.barrier()


def mine(groups: Sequence[Any]) -> Sequence[Any]:
    """This process's micro-batches: every n-th of n processes."""
    rank, n = files.share()
    return groups[rank::n]


def of_first(model: torch.nn.Module, value: float | None) -> float | None:
    """The first process's value, where rounding may give the others another one."""
    if value is None or files.share()[1] == 1:
        return value
    tensor = torch.tensor(value, device=next(model.parameters()).device, dtype=torch.float64)
    distributed.broadcast(tensor, 0)
    return tensor.item()


def summed(model: torch.nn.Module, loss: float) -> float:
    """The sum of all processes' losses; every gradient becomes their sum, too."""
    if files.share()[1] == 1:
        return loss
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.tensor(loss, device=trained[0].device, dtype=torch.float64)
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for tensor in (total, *(p.grad for p in trained)):
        distributed.all_reduce(tensor)
    return total.item()
