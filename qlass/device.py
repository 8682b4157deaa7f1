"""Where a model computes, and in how many bits."""

import os
from typing import Any

import torch

from qlass import UserError
from qlass.files import warn

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def device_and_precision(config: Any) -> tuple[torch.device, str]:
    """--device, else this process's GPU or, without any, the CPU. --precision, else bf16 on a GPU
    and float32 on a CPU, of which few have bf16 arithmetic."""
    gpu = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not gpu:
        raise UserError("--device cuda: torch sees no GPU")
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    place = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if config.precision:
        return place, config.precision
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if gpu and not bf16:
        warn("this GPU computes no bf16: --precision float32 is taken")
    return place, "bf16" if bf16 else "float32"
