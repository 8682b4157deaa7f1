"""What both training loops share beside the loop: processes, the order of updates, states.

torchrun --nproc-per-node 8 -- train_qnet.py ...     (-- keeps torchrun from reading --run)
accelerate launch --use_fsdp ... train_qnet.py ...   (GPUs that divide weights and moments)
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
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, gather_object
from torch import nn
from tqdm import tqdm

from qlass import UserError, files, fsdp, metadata, models
from qlass.fsdp import divided

T = TypeVar("T")

# ----------------------------------------------------------------------------- the order of updates


def updates_of(sizes: Sequence[int], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle the examples and cut them into updates.

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
    """Examples of like length, as many together as fit `budget` padded tokens, at least one."""
    groups: list[list[T]] = []
    for example in sorted(examples, key=length, reverse=True):
        if not groups or length(groups[-1][0]) * (len(groups[-1]) + 1) > budget:
            groups.append([])
        groups[-1].append(example)
    return groups


def cosine(step: int, steps: int) -> float:
    """The rate's factor: linear warm-up over 3 % of the steps, half a cosine to 0 (Table 5)."""
    rise = max(1, round(0.03 * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


# ---------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def processes(out: Path, device: str | None) -> Iterator[accelerate.PartialState]:
    """The processes of a stage that trains `out`: yields this one; the first alone writes.

    When the block ends, the checkpoint is complete, and its states go.
    """
    rank, world = files.share()
    linked = world == 1 or "MASTER_ADDR" in os.environ  # the processes of a job array are not
    if linked and world > 1 and rank == 0:
        print(f"waiting for {world} processes (WORLD_SIZE)", file=sys.stderr)
    cpu = not torch.cuda.is_available() or (device or "").startswith("cpu")
    patience = datetime.timedelta(days=2)  # for as long as the first plays demonstrations
    process = accelerate.PartialState(cpu=cpu, timeout=patience) if linked else None
    if not process or process.num_processes != world:
        reason = "WORLD_SIZE is set, but the processes see no others"
        raise UserError(f"{reason}: start them by torchrun, or unset it")
    fsdp.check()
    first = process.is_main_process
    with files.locked(out) if first else contextlib.nullcontext():
        yield process
        if first:
            shutil.rmtree(resume_folder(out), ignore_errors=True)


# ----------------------------------------------------------------------------------- log and states


def resume_folder(out: Path) -> Path:
    """The folder of an unfinished training's states; the end of the training deletes it."""
    return out.with_name(out.name + ".partial")


def begin(args: Namespace, inputs: Iterable[Path]) -> bool:
    """Whether `args.out` is still to be trained; if so, its metadata are written.

    They come before the training, so that a stopped one resumes with the arguments and inputs that
    it was begun with; others are a UserError. --overwrite deletes what is there.
    """
    process, out, states = accelerate.PartialState(), args.out, resume_folder(args.out)
    models.settle_precision(args)
    there = (out / "config.json").exists() or any(states.glob("state-*"))
    if there and not args.overwrite:
        metadata.same_arguments(out, vars(args))
        if not states.exists():
            process.print(f"{out}: is complete; --overwrite trains it again", flush=True)
            return False
    process.wait_for_everyone()  # all have looked
    if process.is_main_process:
        if args.overwrite:
            shutil.rmtree(states, ignore_errors=True)
            files.discard(out)
            files.discard(metadata.meta_path(out))
        states.mkdir(parents=True, exist_ok=True)
        metadata.write_meta(out, vars(args), inputs)
    process.wait_for_everyone()
    return True


class Progress:
    """A training in progress: what its loop calls, and the lines of its log.

    accelerator, model, optimizer: of Accelerate. The model is not wrapped: DDP would miss what
    `forward` does not call, and micro-batches that differ in number would hang it. With FSDP it is
    a divided copy. lines: one per update and one per epoch; a state holds them with the trained
    weights and their moments, and a stopped training resumes from the last state.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Namespace,
        sizes: Sequence[int],
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """sizes[i]: what example i counts in a batch. rates: instead of args.lr, of the parameters
        whose names begin so."""
        if divided() and args.optim == "adamw8bit":
            raise UserError("--optim adamw8bit: FSDP can't divide its moments; leave it out")
        self.args, self.original = args, model
        _, dtype = models.device_and_dtype(args.device, args.precision)
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if dtype == torch.bfloat16 else "no",
            device_placement=False,
            # The shell's variables must not divide the gradients again.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        first = self.accelerator.is_main_process
        self.model: Any = copy.deepcopy(model) if divided() and first else model
        self.optimizer: Any = models.adamw(self.model, {"": args.lr, **rates}, args.optim)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]  # at their highest
        if divided():
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        else:
            # Evaluation mode: autocast on `forward`, and no wrapper.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        epochs = range(args.epochs)
        self.plan = [updates_of(sizes, args.batch, args.seed, epoch) for epoch in epochs]
        self.starts = [0, *itertools.accumulate(map(len, self.plan))]  # updates before each epoch
        self.steps = self.starts[-1]
        self.lines: list[dict] = []
        if states := sorted(resume_folder(args.out).glob("state-*.pt")):
            self._load(states[-1])
        self.began = time.perf_counter() - (self.lines[-1]["seconds"] if self.lines else 0.0)
        log = args.out.with_name(args.out.name + ".log.jsonl")
        self.log = open(log if first else os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.log.writelines(map(files.dumps, self.lines))
        self.bar = tqdm(
            total=self.steps,
            initial=self.step,
            desc=args.out.name,
            disable=not first,
            mininterval=0.1 if sys.stderr.isatty() else 30,  # off a terminal a report is a line
        )

    @property
    def curve(self) -> list[dict]:
        """One entry per epoch."""
        lines = [line for line in self.lines if "epoch" in line]
        return [{k: v for k, v in line.items() if k not in ("step", "seconds")} for line in lines]

    @property
    def step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def best(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one if there is none."""
        losses = [line["validation"] for line in self.curve]
        return losses.index(min(losses)) + 1 if losses and None not in losses else len(losses)

    @property
    def finished(self) -> bool:
        """All epochs are over, or --patience of them in a row brought no better validation."""
        return len(self.curve) >= min(len(self.plan), self.best + self.args.patience)

    def updates(self) -> list[list[int]]:
        """The updates that are left of the current epoch, each as the indices of its examples."""
        epoch = len(self.curve)
        return self.plan[epoch][self.step - self.starts[epoch] :]

    def share(self, groups: Sequence[T]) -> Iterator[tuple[T, int]]:
        """This process's micro-batches, every n-th of n processes, with the weight of its loss.

        The loss is a sum, but gradients are averaged: the weight is n. With FSDP all must make as
        many passes, so the last group may come again, with weight 0.
        """
        n = self.accelerator.num_processes
        for i in range(self.accelerator.process_index, math.ceil(len(groups) / n) * n, n):
            yield groups[min(i, len(groups) - 1)], n if i < len(groups) else 0

    def average_gradients(self) -> None:
        """The mean of the processes' gradients, once per update; FSDP does it by itself."""
        if self.accelerator.num_processes > 1 and not divided():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad = self.accelerator.reduce(p.grad, "mean")

    def total(self, loss: float, norm: torch.Tensor) -> float:
        """The update's loss, of all processes; UserError before NaN spoils the weights."""
        loss = sum(gather_object([loss]))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            failure = f"update {self.step + 1}: loss {loss:.3g}, gradient norm {float(norm):.3g}"
            hint = f"--overwrite and a lower --lr than {self.args.lr:g} start again"
            raise UserError(f"{failure}: {hint}")
        return loss

    def end_update(self, loss: float, tokens: int) -> None:
        """tokens: of all its micro-batches."""
        tokens += next((line["tokens"] for line in reversed(self.lines) if "lr" in line), 0)
        rate = self.optimizer.param_groups[0]["lr"]
        self._add({"step": self.step + 1}, {"loss": loss, "lr": rate, "tokens": tokens})
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if self.step % self.args.save_every == 0:
            self._save()

    def end_epoch(self, validation: float | None, **figures: Any) -> None:
        """validation: the loss that early stopping watches, None if there is none."""
        epoch = len(self.curve) + 1
        if not math.isfinite(validation or 0.0):
            raise UserError(f"epoch {epoch}: validation loss {validation}, so it has diverged")
        updates = [line for line in self.lines if "lr" in line]
        losses = [line["loss"] for line in updates[self.starts[epoch - 1] :]]
        line = {"epoch": epoch, "loss": sum(losses) / len(losses), **figures}
        (line,) = broadcast_object_list([line | {"validation": validation}])
        self._add({"step": self.step}, line)
        self._save()

    def end(self) -> dict:
        """Give the model, in the first process, the best epoch's weights. Returns figures."""
        self.bar.close()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # no autocast, in place
        first = self.accelerator.is_main_process
        if first and (divided() or self.best < len(self.curve)):
            state = read_state(self._path(self.starts[self.best]))
            self.original.load_state_dict(state["weights"], strict=False)  # not the frozen ones
        last, best = self.lines[-2], self.curve[self.best - 1]
        figures = {"steps": self.step, "tokens": last["tokens"], "loss": best["loss"]}
        figures |= {"best_epoch": self.best, "curve": self.curve}
        return figures | {"seconds": self.lines[-1]["seconds"]}

    def _add(self, step: dict, figures: dict) -> None:
        line = {**step, "seconds": round(time.perf_counter() - self.began, 3), **figures}
        self.lines.append(line)
        self.log.write(files.dumps(line))
        self.log.flush()

    def _path(self, step: int) -> Path:
        return resume_folder(self.args.out) / f"state-{step:08}.pt"

    def _save(self) -> None:
        """Write a state; of the older ones the best epoch's stays."""
        if divided():
            weights, moments = fsdp.state_of(self.model, self.optimizer)
        else:
            parameters = self.model.named_parameters()
            weights = {name: p.detach() for name, p in parameters if p.requires_grad}
            moments = self.optimizer.state_dict()
        if self.accelerator.is_main_process:
            state = {"weights": weights, "moments": moments, "lines": self.lines}
            path, best = self._path(self.step), self._path(self.starts[self.best])
            with files.draft_of(path) as draft:  # under its name only when all of it is written
                torch.save(state | {"random": torch.get_rng_state()}, draft)
            for old in {*path.parent.glob("state-*.pt")} - {path, best}:
                old.unlink()

    def _load(self, path: Path) -> None:
        state = read_state(path)
        if divided():
            fsdp.load_state(self.model, self.optimizer, state["weights"], state["moments"])
        else:
            self.model.load_state_dict(state["weights"], strict=False)
            self.optimizer.load_state_dict(state["moments"])
        torch.set_rng_state(state["random"])
        self.lines = state["lines"]


def read_state(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)  # runs no code
