"""Curves of a training: a line of JSON an update, or TensorBoard or Weights & Biases where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from environments import UserError
from qlass.jsonl import Resumable

Log = Callable[[int, dict[str, float]], None]  # (update, figures)
LOGS = ("jsonl", "tensorboard", "wandb")


def log_path(out: Path) -> Path:
    return out.with_name(out.name + ".log.jsonl")


def open_log(kind: str, out: Path, step: int, config: dict[str, Any]) -> Log:
    """Where the figures of a training go that is at update `step`: OUT.log.jsonl, OUT.log/, or a run of that name."""
    if kind == "jsonl":
        return to_jsonl(log_path(out), step)
    if find_spec(kind) is None:
        raise UserError(f"--log {kind}: pip install {kind}, or leave it out")
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out.with_name(out.name + ".log")), purge_step=step + 1)

        def to_tensorboard(step: int, figures: dict[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return to_tensorboard
    import wandb

    run = wandb.init(project="qlass", name=out.name, config=config)
    return lambda step, figures: run.log(figures, step=step)


def to_jsonl(path: Path, step: int) -> Log:
    """What a stopped run logged after the checkpoint that it resumes from is dropped, for it comes again."""
    if not step:
        path.unlink(missing_ok=True)
    file = Resumable(path, lambda lines: sum(line["step"] <= step for line in lines))
    return lambda step, figures: file.append([{"step": step, **figures}])
