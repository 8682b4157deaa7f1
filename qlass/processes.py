"""Training by several processes, a GPU each, or by one.

    torchrun --nproc-per-node 8 train_qnet.py ...        (or accelerate launch --multi_gpu)

Every process holds the model and takes its share of each update's sequences; the gradients are summed. What there is to
do only once (demonstrations, checkpoints, metadata) is done by the first.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed, nn

PATIENCE = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations


def start() -> None:
    """Join the other processes, if a launcher has started several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or distributed.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, timeout=PATIENCE)


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
def in_turn() -> Iterator[None]:
    """One process after the other: what the first makes is there for the others."""
    for turn in range(count()):
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


def total(*values: float) -> list[float]:
    """Sums over the processes."""
    sums = torch.tensor(values, dtype=torch.float64)
    if count() > 1:
        distributed.all_reduce(sums)
    return sums.tolist()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Of processes that had other sequences each; one that had none adds nothing."""
    if count() > 1:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad)
