"""What both training loops share beside the loop: the order of updates, the learning rate, and the
log and states from which a stopped training goes on."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from qlass import UserError, files, processes, runs
from qlass.config import Training

T = TypeVar("T")


def updates_of(sizes: Sequence[int], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle the examples and cut them into updates: lists of indices.

    An update is full when the sizes of its examples sum to at least `batch`; the last may not be.
    The order depends on seed and epoch alone: a resumed training needs no memory of it.
    """
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    updates: list[list[int]] = []
    room = 0
    for i in torch.randperm(len(sizes), generator=generator).tolist():
        if room <= 0:
            updates.append([])
            room = batch
        updates[-1].append(i)
        room -= sizes[i]
    return updates


def micro_batches(examples: Sequence[T], length: Callable[[T], int], budget: int) -> list[list[T]]:
    """The examples of an update in portions that are in memory at once, of like length each.

    length: tokens of an example. budget (--micro-tokens): tokens of a portion (B, T), B * T with
    the padding; a longer example is a portion of its own. The log counts tokens without padding.
    """
    portions: list[list[T]] = []
    for example in sorted(examples, key=length, reverse=True):
        if not portions or length(portions[-1][0]) * (len(portions[-1]) + 1) > budget:
            portions.append([])
        portions[-1].append(example)
    return portions


def cosine(step: int, steps: int) -> float:
    """The rate's factor: linear warm-up over 3 % of the steps, half a cosine to 0 (Table 5)."""
    rise = max(1, round(0.03 * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def autocast(model: nn.Module, dtype: torch.dtype) -> torch.autocast:
    """bf16 arithmetic on float32 weights where dtype is bf16; else nothing."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)


def clip(model: nn.Module, loss: float, step: int, lr: float) -> None:
    """Clip the gradient's norm at 1. UserError before a NaN spoils the weights."""
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        failure = f"update {step + 1}: loss {loss:.3g}, gradient norm {float(norm):.3g}"
        raise UserError(f"{failure}: --overwrite and a lower --lr than {lr:g} start again")


def begin(out: Path, config: Training, recipe: dict, inputs: runs.Inputs, first: bool) -> bool:
    """Begin a checkpoint, or resume it. Returns whether there is anything left to train.

    first: whether this is the first of several processes, which alone writes.
    """
    if first:
        runs.claim(out, recipe, config.overwrite)
        if runs.is_there(out):
            print(f"{out}: is complete; --overwrite trains it again", flush=True)
        else:
            runs.write_meta(out, config, recipe, inputs)
    processes.wait()
    return not runs.is_there(out)


class TrainingLog:
    """A training's log, NAME.log.jsonl, and its states in NAME.partial/: the last and the best.

    A state is weights, moments, random numbers and the log so far.
    updates, curve: the log's lines, one per update and one per epoch.
    """

    def __init__(
        self,
        out: Path,
        model: nn.Module,
        optimizer: Any,
        order: list[list[list[int]]],
        config: Training,
    ) -> None:
        """Resumes from the last state, if there is one. order: the updates of each epoch, as
        `updates_of` gives them."""
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.order = order
        self.steps = sum(map(len, order))  # updates of all epochs
        self.states = runs.states_of(out)
        self.updates: list[dict] = []
        self.curve: list[dict] = []
        if (self.states / "last.pt").exists():
            self.load("last.pt")
        lines = sorted([*self.updates, *self.curve], key=lambda line: line["step"])
        self.began = time.perf_counter() - (lines[-1]["seconds"] if lines else 0)
        self.first = files.share()[0] == 0
        path = out.with_name(out.name + ".log.jsonl") if self.first else os.devnull
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self.file.writelines(map(files.dumps, lines))
        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        shown: Any = {"initial": self.step, "disable": not self.first, "mininterval": every}
        self.bar = tqdm(None, out.name, self.steps, **shown)

    @property
    def step(self) -> int:
        """How many updates are done."""
        return len(self.updates)

    @property
    def best_epoch(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one if there is none."""
        losses = [line["validation"] for line in self.curve]
        if not losses or None in losses:
            return len(losses)
        return losses.index(min(losses)) + 1

    def epochs_left(self) -> Iterator[int]:
        """The epochs to do, from 0, until --patience of them bring no better validation."""
        while len(self.curve) < min(len(self.order), self.best_epoch + self.config.patience):
            yield len(self.curve)

    def updates_left(self, epoch: int) -> list[list[int]]:
        """What is left to do of the epoch at hand."""
        done = self.step - sum(map(len, self.order[:epoch]))
        return self.order[epoch][done:]

    def end_update(self, loss: float, tokens: int) -> None:
        """loss: the mean of the update. tokens: of its examples, without padding, which
        --micro-tokens counts; the log's `tokens` are the sum of all updates so far."""
        total = tokens + (self.updates[-1]["tokens"] if self.updates else 0)
        lr = self.optimizer.param_groups[0]["lr"]
        self.updates.append(self.write(self.step + 1, loss=loss, lr=lr, tokens=total))
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if self.step % self.config.save_every == 0:
            self.save("last.pt")

    def end_epoch(self, validation: float | None, **figures: Any) -> None:
        """validation: the loss that early stopping watches, None if there is none."""
        epoch = len(self.curve) + 1
        validation = processes.of_first(self.model, validation)  # all stop after the same epoch
        if validation is not None and not math.isfinite(validation):
            raise UserError(f"epoch {epoch}: validation loss {validation}, so it has diverged")
        updates = self.updates[-len(self.order[epoch - 1]) :]
        loss = sum(line["loss"] for line in updates) / len(updates)
        line = self.write(self.step, epoch=epoch, loss=loss, **figures, validation=validation)
        self.curve.append(line)
        if validation is not None and self.best_epoch == epoch:
            self.save("best.pt")

    def finish(self) -> dict[str, Any]:
        """Give the model the best epoch's weights. Returns figures for the metadata."""
        self.bar.close()
        self.file.close()
        curve = self.curve
        best = self.best_epoch
        figures = {
            "steps": self.step,
            "tokens": self.updates[-1]["tokens"],
            "seconds": curve[-1]["seconds"],
            "loss": curve[best - 1]["loss"],
            "best_epoch": best,
            "curve": curve,
        }
        if best < len(curve):
            self.load("best.pt")
        return figures

    def write(self, step: int, **figures: Any) -> dict[str, Any]:
        """Write a line of the log."""
        seconds = round(time.perf_counter() - self.began, 3)
        line = {"step": step, "seconds": seconds, **figures}
        self.file.write(files.dumps(line))
        self.file.flush()
        return line

    def save(self, name: str) -> None:
        """Write a state, whole or not at all."""
        if not self.first:
            return
        state = {
            "weights": {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad},
            "moments": self.optimizer.state_dict(),
            "random": (torch.get_rng_state(), torch.cuda.get_rng_state_all()),
            "updates": self.updates,
            "curve": self.curve,
        }
        with files.draft_of(self.states / name) as draft:
            torch.save(state, draft)

    def load(self, name: str) -> None:
        """Take model, optimizer, random numbers and log from a state."""
        path = self.states / name
        with files.one_line(path):
            state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code
        self.model.load_state_dict(state["weights"], strict=False)  # not the frozen ones
        self.optimizer.load_state_dict(state["moments"])
        torch.set_rng_state(state["random"][0])
        torch.cuda.set_rng_state_all(state["random"][1][: torch.cuda.device_count()])
        self.updates = state["updates"]
        self.curve = state["curve"]
