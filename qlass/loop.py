"""What both training loops share, on Accelerate: processes, updates, log, save and resume, early stop.

torchrun --nproc-per-node 8 -- train_qnet.py ...           (-- keeps torchrun from reading --run as its own)
accelerate launch --use_fsdp ... train_qnet.py ...         (GPUs that divide weights and moments: docs/scale.md)
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.utils import broadcast_object_list, gather_object, reduce
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from tqdm import tqdm

from qlass import UserError, files, models

T = TypeVar("T")
PROGRESS = ("tokens", "seconds", "losses", "curve")  # attributes of a Training that say where it stands
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)

# ----------------------------------------------------------------------------------------------------------- the stage


@contextlib.contextmanager
def processes(out: Path, device: str | None) -> Iterator[accelerate.PartialState]:
    """The processes of a stage that trains the checkpoint `out`: yields this one; only the first of all writes there.

    When the block ends, the checkpoint is complete, and what it could be resumed from goes.
    """
    cpu = not torch.cuda.is_available() or (device or "").startswith("cpu")  # else it starts one process without a GPU
    patience = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations
    linked = "MASTER_ADDR" in os.environ or files.share()[1] == 1  # a job array's are not
    process = accelerate.PartialState(cpu=cpu, timeout=patience) if linked else None
    if not process or process.num_processes != files.share()[1]:
        raise UserError("WORLD_SIZE is set, but the processes see no others: start them by torchrun, or unset it")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("--use_fsdp: give --fsdp_version 2 beside it")  # in version 1 a part of QNet can't be called
    with files.locked(out) if process.is_main_process else contextlib.nullcontext(), models.within_memory():
        yield process
        if process.is_main_process:
            shutil.rmtree(partial_folder(out), ignore_errors=True)


def partial_folder(out: Path) -> Path:
    """Where an unfinished training keeps its states; its being there says that the training is not complete."""
    return out.with_name(out.name + ".partial")


def begin(arguments: dict[str, Any], inputs: Iterable[Path]) -> bool:
    """Whether the checkpoint `out` is still to be trained; if so, its metadata are written.

    They come before the training, so that a stopped one resumes with the arguments and inputs that it was begun with;
    others are a UserError. --overwrite deletes what is there.
    """
    process, out = accelerate.PartialState(), arguments["out"]
    partial = partial_folder(out)
    if not arguments["overwrite"] and ((out / "config.json").exists() or any(partial.glob("state-*"))):
        files.same_arguments(out, arguments, files.TRAINING_FREE)
        if not partial.exists():
            process.print(f"{out}: is complete; --overwrite trains it again", flush=True)
            return False
    process.wait_for_everyone()  # all have looked
    if process.is_main_process:
        if arguments["overwrite"]:
            shutil.rmtree(partial, ignore_errors=True)
            files.discard(out)
        partial.mkdir(parents=True, exist_ok=True)
        files.write_meta(out, arguments, inputs)
    process.wait_for_everyone()
    return True


# ------------------------------------------------------------------------------------------------------------- updates


def updates_of(sizes: Sequence[int], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """An epoch's order: examples, of `sizes[i]` each, in updates of at least `batch` (the last one: of the rest).

    It depends on the seed and the epoch alone, so that a resumed run needs no memory of it.
    """
    order = torch.Generator().manual_seed((seed << 20) + epoch)
    updates: list[list[int]] = []
    room = 0
    for i in torch.randperm(len(sizes), generator=order).tolist():
        if room <= 0:
            updates.append([])
            room = batch
        updates[-1].append(i)
        room -= sizes[i]
    return updates


def micro_batches(examples: Sequence[T], length: Callable[[T], int], budget: int) -> list[list[T]]:
    """Examples of like length, as many together as fit into `budget` padded tokens, at least one."""
    groups: list[list[T]] = []
    for example in sorted(examples, key=length, reverse=True):
        if not groups or length(groups[-1][0]) * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(example)
    return groups


def cosine(step: int, steps: int, warmup: float = 0.03) -> float:
    """Learning-rate factor: linear warm-up over 3 % of the steps, then half a cosine to 0 (Table 5)."""
    rise = max(1, round(warmup * steps))
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


# ------------------------------------------------------------------------------------------------------------ training


class Training:
    """What a loop such as `sft.train` needs beside its loss: the order of examples, several processes, the learning
    rate, a log, states to resume from, early stop."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], sizes: Sequence[int]) -> None:
        """settings: the stage's arguments. `sizes[i]`: what example i counts in a batch.

        A loop calls `self.model`. `model` has the trained weights when the epochs are over, in the first process.
        """
        self.settings, self.result = settings, model
        epochs, batch, seed, out = (settings[name] for name in ("epochs", "batch", "seed", "out"))
        self.plan = [updates_of(sizes, batch, seed, epoch) for epoch in range(epochs)]
        self.starts = [0, *itertools.accumulate(map(len, self.plan))]  # updates before each epoch
        _, self.dtype = models.device_and_dtype(settings["device"], settings["precision"])  # of the checkpoint
        mixed = "bf16" if self.dtype == torch.bfloat16 else "no"
        self.accelerator = accelerate.Accelerator(mixed_precision=mixed, device_placement=False)
        first = self.accelerator.is_main_process
        self.fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        self.model = copy.deepcopy(model) if self.fsdp and first else model
        self.optimizer = models.adamw(self.model.parameters(), settings["lr"], settings["optim"])
        if self.fsdp:
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        else:  # each process has a copy of the model, and `step` averages their gradients
            self.accelerator.prepare_model(model, evaluation_mode=True)

        self.tokens, self.seconds = 0, 0.0  # of all calls
        self.losses: list[float] = []  # one a completed update
        self.curve: list[dict] = []  # one entry a completed epoch
        self.folder = partial_folder(out)
        if states := sorted(self.folder.glob("state-*.pt")):
            self._load(states[-1])
        step = len(self.losses)
        log = out.with_name(out.name + ".log.jsonl")
        self.log = files.Resumable(log, lambda lines: sum(line["step"] <= step for _, line in lines)) if first else None
        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        self.bar = tqdm(total=self.starts[-1], initial=step, desc=out.name, disable=not first, mininterval=every)
        self.weight, self.loss = 1, 0.0  # of this process's part of an update
        self.clock = time.perf_counter()

    def epochs(self) -> Iterator[int]:
        """Epochs until --patience of them in a row bring no better validation, then the best one's weights."""
        with self.bar:
            while len(self.curve) < min(len(self.plan), self.best + self.settings["patience"]):
                yield len(self.curve)
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if self.accelerator.is_main_process and (self.fsdp or self.best < len(self.curve)):
            state = torch.load(self._state(self.starts[self.best]), map_location="cpu", weights_only=True)
            self.result.load_state_dict(state["weights"], strict=False)  # without the frozen ones

    @property
    def best(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one where there is none."""
        losses = [entry["validation"] for entry in self.curve]
        return losses.index(min(losses)) + 1 if losses and None not in losses else len(losses)

    def batches(self, examples: Sequence[T]) -> Iterator[list[T]]:
        """The examples of each update that is left of the current epoch."""
        epoch = len(self.curve)
        for update in self.plan[epoch][len(self.losses) - self.starts[epoch] :]:
            yield [examples[i] for i in update]

    def share(self, groups: Sequence[T]) -> Iterator[T]:
        """This process's micro-batches of an update: of n processes each takes every n-th.

        With FSDP all must make as many passes, so the last one may come again, with weight 0.
        """
        n = self.accelerator.num_processes
        for i in range(self.accelerator.process_index, math.ceil(len(groups) / n) * n, n):
            self.weight = n if i < len(groups) else 0  # gradients are averaged, and the loss is a sum
            yield groups[min(i, len(groups) - 1)]

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch's part of the update's loss, added to those at hand."""
        self.accelerator.backward(self.weight * loss)
        self.loss += loss.item() if self.weight else 0.0

    def step(self, tokens: int) -> None:
        """One update from the gradients at hand, clipped, at the schedule's rate. tokens: of all its micro-batches."""
        if self.accelerator.num_processes > 1 and not self.fsdp:
            for p in self.model.parameters():
                p.grad = None if p.grad is None else reduce(p.grad, "mean")
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
        loss = sum(gather_object([self.loss]))
        if not (math.isfinite(loss) and math.isfinite(norm)):  # before it spoils the weights
            failure = f"update {len(self.losses) + 1}: loss {loss:.3g}, gradient norm {norm:.3g}"
            raise UserError(f"{failure}: --overwrite and a lower --lr than {self.settings['lr']:g} start again")
        rate = self.settings["lr"] * cosine(len(self.losses), self.starts[-1])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = 0.0
        self.losses.append(loss)
        self.tokens += tokens
        self._log(loss=loss, lr=rate, tokens=self.tokens)
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if len(self.losses) % self.settings["save_every"] == 0:
            self._save()

    def end_epoch(self, validation: float | None, **figures: Any) -> None:
        """validation: the loss that early stopping watches, None if there is none; figures: more for the curve."""
        losses = self.losses[self.starts[len(self.curve)] :]
        entry = {"epoch": len(self.curve) + 1, "loss": sum(losses) / len(losses), **figures, "validation": validation}
        self.curve += broadcast_object_list([entry])
        self._log(**self.curve[-1])
        self._save()

    def figures(self) -> dict:
        """For the metadata."""
        figures = {"steps": len(self.losses), "tokens": self.tokens, "seconds": self.seconds}
        return figures | {"loss": self.curve[self.best - 1]["loss"], "best_epoch": self.best, "curve": self.curve}

    # ------------------------------------------------------------------------------------------------- log and states

    def _log(self, **figures: float | None) -> None:
        now = time.perf_counter()
        self.seconds += now - self.clock
        self.clock = now
        if self.log:
            self.log.append([{"step": len(self.losses), "seconds": round(self.seconds, 3), **figures}])

    def _state(self, step: int) -> Path:
        return self.folder / f"state-{step:08}.pt"

    def _save(self) -> None:
        """Write a state; of the older ones the best epoch's stays."""
        weights, moments = get_state_dict(self.model, self.optimizer, options=FULL_STATE)
        if self.accelerator.is_main_process:
            state = {"weights": weights, "moments": moments, "random": torch.get_rng_state()}
            state |= {name: getattr(self, name) for name in PROGRESS}
            path, best = self._state(len(self.losses)), self._state(self.starts[self.best])
            with files.draft_of(path) as draft:  # under its name only when all of it is written
                torch.save(state, draft)
            for old in {*self.folder.glob("state-*.pt")} - {path, best}:
                old.unlink()

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code
        parts = {"model_state_dict": state["weights"], "optim_state_dict": state["moments"]}
        set_state_dict(self.model, self.optimizer, **parts, options=FULL_STATE)
        torch.set_rng_state(state["random"])
        for name in PROGRESS:
            setattr(self, name, state[name])
