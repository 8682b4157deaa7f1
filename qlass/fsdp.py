"""FSDP 2: the processes of a training divide weights and moments among them.

accelerate launch --use_fsdp --fsdp_version 2 ... train_qnet.py ...
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from qlass import UserError


def divided() -> bool:
    """Does FSDP divide the weights among the processes? Else each has a copy of the model."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def check() -> None:
    if divided() and os.environ.get("FSDP_VERSION") != "2":  # 1 can't call QNet's parts
        raise UserError("--use_fsdp: give --fsdp_version 2 beside it")


def state_of(model: nn.Module, optimizer: Any) -> tuple[dict, dict]:
    """Weights and moments of what is trained, whole, in the first process."""
    from torch.distributed.checkpoint.state_dict import get_state_dict  # takes 2 seconds

    return get_state_dict(model, optimizer, options=whole())


def load_state(model: nn.Module, optimizer: Any, weights: dict, moments: dict) -> None:
    """Divide what `state_of` returned."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    parts = {"model_state_dict": weights, "optim_state_dict": moments}
    set_state_dict(model, optimizer, **parts, options=whole())


def whole() -> Any:
    """Of divided weights all parts together, without the frozen ones."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
    )
