"""The parts that both training loops share: the order of updates, the learning rate, the log and
states from which a stopped training goes on, and the processes that torchrun starts.

Processes divide weights, gradients and moments among them (FSDP2), and gather each layer while it
computes. Each process has whole what LoRA adds, weights in few bits, and a model from scratch.

NOTES. Gradients are sums over processes, and the loss is divided by the update's own count. All
processes gather a layer at the same time, so each must do as many passes as the others: one with
fewer portions repeats one with weight 0, and what a process would decide by its own free memory or
rounding is the first one's decision.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from qlass import UserError
from qlass.device import broadcast, divided_like, gather, is_first, wait, whole
from qlass.files import (
    Inputs,
    atomic,
    dumps,
    is_begun,
    lock,
    meta_path,
    parts_folder,
    rank_and_size,
    write_json,
    write_jsonl,
)
from qlass.outputs import begin, claim, costs, remove_parts
from qlass.records import as_user_error
from qlass.settings import Learning

T = TypeVar("T")
RANDOM: Any = torch.cuda if torch.cuda.is_available() else torch


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


# --------------------------------------------------------------------------------- the checkpoint


@torch.no_grad()
def restore(state: Any, weights: dict[str, nn.Parameter], optimizer: Any) -> None:
    """Read weights from an open state, which has them by their names, and their moments."""
    for name, weight in weights.items():
        weight.copy_(divided_like(weight, state.get_tensor(f"{name} ")))
    for key in state.offset_keys():
        name, _, kind = key.partition(" ")
        if kind:
            weight = weights[name]
            optimizer.state[weight][kind] = divided_like(weight, state.get_tensor(key))


class Training:
    """The making of a checkpoint: its metadata, its log NAME.log.jsonl, and in NAME.parts/ the last
    state and the weights of the best epoch.

    lines: the log, one per update and one per epoch, written as it grows. A state is weights,
    moments, random numbers and the log so far. From a state any number of processes go on; they
    repeat, and log again, what came after it. The first process writes.
    complete: there is nothing to do.
    """

    def __init__(self, out: Path, config: Learning, settings: dict, inputs: Inputs) -> None:
        self.out, self.config = out, config
        self.parts = parts_folder(out)
        self.log_path = out.with_name(out.name + ".log.jsonl")
        self.lines: list[dict] = []
        self.began = time.monotonic()
        if is_first():
            self.lock = lock(out)
            self.meta = begin(out, config, config.recipe() | settings, inputs)
        wait()
        self.complete = out.exists() and not (config.overwrite or self.parts.exists())
        self.again = config.overwrite  # until the first state
        if self.complete and is_first():
            print(f"{out}: is complete; --overwrite trains it again", flush=True)

    def resume(self, model: nn.Module, optimizer: Any, sizes: Sequence[int]) -> None:
        """Begin, or go on from the last state. sizes: of the examples, for `updates_of`."""
        self.model, self.optimizer = model, optimizer
        batch, seed, epochs = self.config.batch, self.config.seed, range(self.config.epochs)
        self.order = [updates_of(sizes, batch, seed, epoch) for epoch in epochs]
        self.steps = sum(map(len, self.order))
        if (self.parts / "last.safetensors").exists() and not self.again:
            self.lines = self.load_state("last")
        if self.logs:
            write_jsonl(self.log_path, self.lines)
        self.bar = tqdm(None, self.out.name, self.steps, initial=self.step, mininterval=0.5)

    def write(self, line: dict) -> None:
        """Add a line to the log."""
        self.lines.append(line)
        if self.logs:
            with as_user_error(self.log_path), open(self.log_path, "a", encoding="utf-8") as log:
                log.write(dumps(line))

    @property
    def logs(self) -> bool:
        """True for the process that writes the log, unless the file is still an older training's,
        which stays until the new one has a state."""
        return is_first() and not (self.again and is_begun(self.out))

    @property
    def curve(self) -> list[dict]:
        return [line for line in self.lines if "epoch" in line]

    @property
    def step(self) -> int:
        """The number of finished updates."""
        return len(self.lines) - len(self.curve)

    @property
    def best_epoch(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one if there is none."""
        losses = [line["validation"] for line in self.curve]
        if not losses or None in losses:
            return len(losses)
        return losses.index(min(losses)) + 1

    @property
    def best(self) -> dict:
        """The log's line of the best epoch."""
        return self.curve[self.best_epoch - 1]

    def epochs_left(self) -> Iterator[int]:
        """The epochs to do, from 0, until --patience of them bring no better validation."""
        while len(self.curve) < min(len(self.order), self.best_epoch + self.config.patience):
            yield len(self.curve)

    def updates_left(self, epoch: int) -> list[list[int]]:
        """The unfinished updates of the epoch at hand."""
        done = self.step - sum(map(len, self.order[:epoch]))
        return self.order[epoch][done:]

    def portions(
        self, update: Sequence[T], length: Callable[[T], int], budget: int
    ) -> list[tuple[list[T], int]]:
        """This process's micro batches of an update, every n-th of n processes, each with the
        weight of its loss: 1, or 0 of a spare one, as processes that gather layers together need as
        many portions each."""
        rank, n = rank_and_size()
        portions = micro_batches(update, length, budget)
        own = [(portion, 1) for portion in portions[rank::n]]
        spare = math.ceil(len(portions) / n) - len(own)
        return own + [(portions[-1], 0)] * spare

    def sum_gradients(self, loss: float) -> float:
        """Sum the gradients of all processes. Returns the sum of their losses, the update's."""
        if not distributed.is_initialized():
            return loss
        weights = self.trainable.values()
        total = torch.tensor(loss, device=next(iter(weights)).device, dtype=torch.float64)
        distributed.all_reduce(total)
        for weight in weights:
            if not isinstance(weight, DTensor):  # whose gradients FSDP2 has summed
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                distributed.all_reduce(weight.grad)
        return total.item()

    def clip_gradients(self, loss: float) -> None:
        """Clip the gradients to norm 1. UserError, before a weight has changed, for an update that
        is not finite."""
        gradient = whole(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)).item()
        if not math.isfinite(loss + gradient):
            raise UserError(
                f"{self.out}: loss {loss}, gradient {gradient}: it has diverged: --overwrite and a"
                " lower --lr"
            )

    def set_rate(self) -> None:
        """Set the learning rate of this update."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * cosine(self.step, self.steps)

    def end_update(self, loss: float, tokens: int) -> None:
        """Log an update. tokens: of its examples, without padding."""
        lr = self.optimizer.param_groups[0]["lr"]
        self.write({"step": self.step + 1, "loss": loss, "lr": lr, "tokens": tokens})
        self.bar.update()
        if self.step % self.config.save_every == 0:
            self.save_state("last")

    def end_epoch(self, validation: float | None, **figures: Any) -> None:
        """Log an epoch. validation: the loss that --patience is about, None if there is none."""
        epoch = len(self.curve) + 1
        losses = [line["loss"] for line in self.lines[-len(self.order[epoch - 1]) :]]
        line = {"step": self.step, "epoch": epoch, "loss": sum(losses) / len(losses)}
        validation = broadcast(validation)  # all stop after the same epoch
        self.write(line | figures | {"validation": validation})
        if validation is not None and self.best_epoch == epoch:
            self.save_state("best")

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by their names."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save_state(self, name: str) -> None:
        """Write a state: each weight by its name, and its moments by its name and theirs. `name`:
        "last", or "best", which has no moments. All processes gather; the first one writes, and its
        random numbers stand for all."""
        state = {"random": RANDOM.get_rng_state()}
        for weight_name, weight in self.trainable.items():
            moments = self.optimizer.state[weight] if name == "last" else {}
            for kind, tensor in {"": weight, **moments}.items():
                tensor = whole(torch.as_tensor(tensor).detach())
                if is_first():  # a copy, as moments in 8 bits share their tables
                    state[f"{weight_name} {kind}"] = tensor.to("cpu", copy=True)
        if is_first():
            claim(self.out, self.meta, self.again)
            if self.again:
                write_jsonl(self.log_path, self.lines)
            with atomic(self.parts / f"{name}.safetensors") as draft:
                save_file(state, draft, {"log": json.dumps(self.lines)})
        self.again = False
        wait()

    def load_state(self, name: str) -> list[dict]:
        """Take model, optimizer and random numbers from a state. Returns its log."""
        path = self.parts / f"{name}.safetensors"
        with as_user_error(f"{path} can't be read; delete {self.parts} to begin again"):
            state = safe_open(path, "pt")
            restore(state, self.trainable, self.optimizer)
            RANDOM.set_rng_state(state.get_tensor("random"))
            return json.loads(state.metadata()["log"])

    def load_best(self) -> None:
        """Give the model the best epoch's weights. UserError if the state is of another epoch:
        other processes, which go on after a stop, round otherwise and may find another one best."""
        best = self.best_epoch
        if best < len(self.curve):
            epoch = self.load_state("best")[-1]["epoch"]
            if epoch != best:
                reason = f"its best state is of epoch {epoch}, and the best is {best}"
                raise UserError(f"{self.parts}: {reason}: --overwrite starts again")

    def finish(
        self, save: Callable[[Path], list[float]], expected: list[float], **figures: Any
    ) -> dict:
        """Write the checkpoint and its metadata, with these figures, which are returned.

        save: writes the files, reads them again, and returns their fingerprint. UserError if it
        differs from the expected one, of the model in memory, by .02 and 2 % of it; in few bits by
        .2 and 20 %.
        """
        figures |= {"steps": self.step, "curve": self.curve, "best_epoch": self.best_epoch}
        tokens = sum(line.get("tokens", 0) for line in self.lines)
        figures |= {"tokens": tokens} | costs(self.began)
        figures["loss"] = self.best["loss"]
        gather(self.model)
        if distributed.is_initialized():
            distributed.destroy_process_group()  # the first process works on alone
        if is_first():
            with atomic(self.out) as draft:
                figures["fingerprint"] = files = save(draft)
                most = 0.2 if self.config.load_in else 0.02
                if not np.allclose(files, expected, most, most):
                    raise UserError(
                        f"{self.out}: its files give {files}, not {expected} as in memory"
                    )
            write_json(meta_path(self.out), self.meta | figures)
            remove_parts(self.out)
            self.lock.release()
        return figures
