"""What both training loops share beside the loop: processes, the order of updates, log and states.

torchrun --nproc-per-node 8 -- train_qnet.py ...     (-- keeps torchrun from reading --run)
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from tqdm import tqdm

from qlass import UserError, files, models, runs

T = TypeVar("T")
LAUNCHER = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"]
PLUGINS = ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"]

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
def processes(args: Namespace) -> Iterator[accelerate.PartialState]:
    """The processes of a stage that trains `args.out`: yields this one; the first alone writes."""
    rank, n = files.share()
    if n > 1 and "MASTER_ADDR" not in os.environ:  # as in a job array
        reason = "WORLD_SIZE is set, but the processes see no others"
        raise UserError(f"{reason}: start them by torchrun, or unset it")
    for name in () if n > 1 else LAUNCHER:  # alone, whatever a launcher has left in the shell
        os.environ.pop(name, None)
    for name in PLUGINS:
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            raise UserError(
                f"Accelerate's {name}: each process holds the whole model: leave it out"
            )
    cpu = not torch.cuda.is_available() or (args.device or "").startswith("cpu")
    patience = datetime.timedelta(days=2)  # for as long as the first plays demonstrations
    process = accelerate.PartialState(cpu=cpu, timeout=patience)
    with files.locked(args.out) if rank == 0 else contextlib.nullcontext():
        yield process
        if rank == 0:  # the checkpoint is complete
            shutil.rmtree(runs.states_of(args.out), ignore_errors=True)


def begin(args: Namespace, **inputs: Path | None) -> dict | None:
    """The recipe of `args.out`; None if it is trained already."""
    models.settle_precision(args)
    process, recipe = accelerate.PartialState(), {}
    if process.is_main_process:
        recipe = runs.claim(args.out, args, inputs)
        if not runs.is_there(args.out):
            runs.write_meta(args.out, args, recipe, inputs)
    process.wait_for_everyone()
    if runs.is_there(args.out):
        process.print(f"{args.out}: is complete; --overwrite trains it again", flush=True)
        return None
    return recipe


# ----------------------------------------------------------------------------------- log and states


class Training:
    """Model, optimizer, the lines of the log, and the states from which a stopped training resumes.

    The model is not wrapped: DDP would miss what `forward` does not call, and micro-batches that
    differ in number would hang it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Namespace,
        sizes: Sequence[int],
        rates: list[tuple[nn.Module, float]],
    ) -> None:
        """sizes[i]: what example i counts in a batch. rates: of the model's parts."""
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if args.precision == "bf16" else "no",
            device_placement=False,
            log_with=args.log_with,
            project_dir=args.out.with_name(args.out.name + ".curves"),
        )
        self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, and no wrapper
        self.args, self.model, self.states = args, model, runs.states_of(args.out)
        self.optimizer: Any = models.adamw(rates, args.optim)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]  # at their highest
        self.plan = [updates_of(sizes, args.batch, args.seed, e) for e in range(args.epochs)]
        self.starts = [0, *itertools.accumulate(map(len, self.plan))]  # updates before each epoch
        self.lines: list[dict] = []  # of the log: one per update, one per epoch
        if there := sorted(self.states.glob("state-*.pt")):
            self.load(there[-1])
        again = {"tensorboard": {"purge_step": self.step + 1}}  # or a stop's updates stand twice
        self.accelerator.init_trackers("qlass", init_kwargs=again)
        self.began = time.perf_counter() - (self.lines[-1]["seconds"] if self.lines else 0)
        first = self.accelerator.is_main_process
        log = args.out.with_name(args.out.name + ".log.jsonl") if first else os.devnull
        self.log = open(log, "w", encoding="utf-8")  # noqa: SIM115
        self.log.writelines(map(files.dumps, self.lines))
        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        shown = {"initial": self.step, "disable": not first, "mininterval": every}
        self.bar = tqdm(None, args.out.name, self.starts[-1], **shown)

    @property
    def step(self) -> int:
        """How many updates are done."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def curve(self) -> list[dict]:
        """The line of each epoch."""
        return [line for line in self.lines if "epoch" in line]

    @property
    def best(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one if there is none."""
        losses = [line["validation"] for line in self.curve]
        return losses.index(min(losses)) + 1 if losses and None not in losses else len(losses)

    def updates(self) -> Iterator[tuple[list[int], bool]]:
        """What is left: the indices of an update's examples, and whether it ends its epoch.

        It ends after --patience epochs without a better validation.
        """
        for epoch in range(len(self.curve), len(self.plan)):
            if epoch >= self.best + self.args.patience:
                return
            start, end = self.starts[epoch : epoch + 2]
            for step in range(self.step, end):
                yield self.plan[epoch][step - start], step + 1 == end

    def share(self, groups: Sequence[T]) -> Sequence[T]:
        """This process's micro-batches, every n-th of n processes."""
        return groups[self.accelerator.process_index :: self.accelerator.num_processes]

    def reduce(self, loss: float) -> float:
        """Sum loss and gradients of the processes and clip them; UserError before NaN spoils the
        weights."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.accelerator.num_processes > 1:
            for p in parameters:
                p.grad = self.accelerator.reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        loss = sum(gather_object([loss]))
        norm = self.accelerator.clip_grad_norm_(parameters, 1.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            failure = f"update {self.step + 1}: loss {loss:.3g}, gradient norm {float(norm):.3g}"
            hint = f"--overwrite and a lower --lr than {self.args.lr:g} start again"
            raise UserError(f"{failure}: {hint}")
        return loss

    def end_update(self, loss: float, tokens: int, last: bool) -> None:
        """tokens: of all its micro-batches. last: `end_epoch` follows, and saves."""
        tokens += next((line["tokens"] for line in reversed(self.lines) if "lr" in line), 0)
        rate = self.optimizer.param_groups[0]["lr"]
        self.write(self.step + 1, {"loss": loss, "lr": rate, "tokens": tokens})
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if self.step % self.args.save_every == 0 and not last:
            self.save()

    def end_epoch(self, validation: float | None, **figures: Any) -> None:
        """validation: the loss that early stopping watches, None if there is none."""
        epoch = len(self.curve) + 1
        if not math.isfinite(validation or 0.0):
            raise UserError(f"epoch {epoch}: validation loss {validation}, so it has diverged")
        losses = [line["loss"] for line in self.lines if "lr" in line][self.starts[epoch - 1] :]
        line = {"epoch": epoch, "loss": sum(losses) / len(losses), **figures}
        (line,) = broadcast_object_list([line | {"validation": validation}])
        self.write(self.step, line, "epoch/")
        self.save()

    def finish(self) -> dict:
        """Give the model the best epoch's weights. Returns figures for the metadata."""
        self.bar.close()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # no autocast, in place
        for tracker in self.accelerator.trackers:  # `end_training` would end the processes too
            tracker.finish()
        (update, epoch), curve = self.lines[-2:], self.curve
        figures = {"steps": self.step, "tokens": update["tokens"], "seconds": epoch["seconds"]}
        figures |= {"loss": curve[self.best - 1]["loss"], "best_epoch": self.best, "curve": curve}
        if self.best < len(self.curve):
            self.load(self.state(self.starts[self.best]))
        return figures

    def write(self, step: int, figures: dict, kind: str = "update/") -> None:
        """A line of the log; a tracker's curves begin with their kind."""
        seconds = round(time.perf_counter() - self.began, 3)
        self.lines.append({"step": step, "seconds": seconds, **figures})
        self.log.write(files.dumps(self.lines[-1]))
        self.log.flush()
        numbers = (figures | figures.get("held_out", {})).items()
        self.accelerator.log({kind + n: x for n, x in numbers if isinstance(x, int | float)}, step)

    def state(self, step: int) -> Path:
        return self.states / f"state-{step:08}.pt"

    def save(self) -> None:
        """Write a state; of the older ones the best epoch's stays."""
        if not self.accelerator.is_main_process:
            return
        trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        state = {"weights": trained, "moments": self.optimizer.state_dict(), "lines": self.lines}
        path, best = self.state(self.step), self.state(self.starts[self.best])
        with files.draft_of(path) as draft:
            random = torch.get_rng_state(), torch.cuda.get_rng_state_all()
            torch.save(state | {"random": random}, draft)
        for old in {*self.states.glob("state-*.pt")} - {path, best}:
            old.unlink()

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code
        self.model.load_state_dict(state["weights"], strict=False)  # not the frozen ones
        self.optimizer.load_state_dict(state["moments"])
        torch.set_rng_state(state["random"][0])
        torch.cuda.set_rng_state_all(state["random"][1])
        self.lines = state["lines"]
