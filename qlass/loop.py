"""What both training loops share, on Accelerate: processes, updates, log, save and resume, early stop.

torchrun --nproc-per-node 8 -- train_qnet.py ...           (-- keeps torchrun from reading --run as its own)
accelerate launch --use_fsdp ... train_qnet.py ...         (GPUs that divide weights, gradients and moments)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from tqdm import tqdm

from qlass import UserError, files, models

T = TypeVar("T")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
MAY_DIFFER = (*files.TRAINING_FREE, *files.FREE)  # between a training and its continuation

# ----------------------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def training(out: Path, device: str | None) -> Iterator[accelerate.PartialState]:
    """The frame of a stage that trains the checkpoint `out`: its processes, of which only the first writes there.

    When the block ends, the checkpoint is complete, and what it could be resumed from goes.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    alone = launched > 1 and "MASTER_ADDR" not in os.environ  # as in a job array
    cpu = not torch.cuda.is_available() or (device or "").startswith("cpu")  # else it starts one process without a GPU
    patience = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations
    process = None if alone else accelerate.PartialState(cpu=cpu, timeout=patience)
    if alone or process.num_processes != launched:
        way = f"start them by torchrun --nproc-per-node {launched} --, or unset WORLD_SIZE"
        raise UserError(f"WORLD_SIZE is {launched}, but the processes do not see one another: {way}")
    lock = files.locked(out) if process.is_main_process else contextlib.nullcontext()
    with lock, models.within_memory():
        yield process
        if process.is_main_process:
            shutil.rmtree(partial_folder(out), ignore_errors=True)


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


@dataclasses.dataclass
class Progress:
    """Where a training stands: what a state holds beside weights, moments and random numbers."""

    update: int = 0  # completed, of the current epoch
    tokens: int = 0
    seconds: float = 0.0  # of all calls
    losses: list[float] = dataclasses.field(default_factory=list)  # one a completed update
    curve: list[dict] = dataclasses.field(default_factory=list)  # one entry a completed epoch

    @property
    def best(self) -> int:
        """The epoch of the lowest validation loss, from 1; the last one where there is none."""
        losses = [entry["validation"] for entry in self.curve]
        return losses.index(min(losses)) + 1 if losses and None not in losses else len(losses)


class Training:
    """Shares the updates of a training among processes, keeps count, saves states and stops early.

    for _ in fit.epochs():
        for update in fit.updates():  # indices of examples
            for group in fit.share(micro_batches):
                fit.backward(loss, tokens)
            fit.step()
        fit.validated(loss, figures)
    """

    def __init__(
        self, name: str, model: nn.Module, settings: dict[str, Any], sizes: Sequence[int], adapter: Any = None
    ) -> None:
        """settings: the stage's arguments. `sizes[i]`: what example i counts in a batch. adapter: LoRA's view."""
        self.name, self.settings, self.at = name, settings, Progress()
        epochs, batch, seed, out = (settings[key] for key in ("epochs", "batch", "seed", "out"))
        self.plan = [updates_of(sizes, batch, seed, epoch) for epoch in range(epochs)]
        self.steps = sum(map(len, self.plan))
        _, dtype = models.device_and_dtype(settings["device"], settings["precision"])
        mixed = "bf16" if dtype == torch.bfloat16 else "no"
        self.accelerator = accelerate.Accelerator(mixed_precision=mixed, device_placement=False)
        self.accelerator.print(models.memory_of(model, settings["optim"]))
        optimizer = models.adamw(model.parameters(), settings["lr"], settings["optim"])
        self.model, self.optimizer, self.parts = model, optimizer, (model, adapter)
        self.divided = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if self.divided:
            self.parts = copy.deepcopy(self.parts) if self.accelerator.is_main_process else self.parts
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        else:  # each process has a copy of the model, and `step` averages their gradients
            self.accelerator.prepare_model(model, evaluation_mode=True)
        self.folder = partial_folder(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        if states := self._states():
            self.at = self._load(states[-1])
        first, step = self.accelerator.is_main_process, len(self.at.losses)
        self.log = log_lines(out, step) if first else None
        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        self.bar = tqdm(total=self.steps, initial=step, desc=name, disable=not first, mininterval=every)
        self.weight, self.loss, self.tokens = 1, 0.0, 0  # of the update at hand
        self.clock = time.perf_counter()

    def epochs(self) -> Iterator[int]:
        """Epochs until --patience of them in a row bring no better validation, then the best one's weights."""
        with self.bar:
            while len(self.at.curve) < min(len(self.plan), self.at.best + self.settings["patience"]):
                self.model.train()
                yield len(self.at.curve)
        if self.at.best < len(self.at.curve):
            self._load(self.folder / f"state-{self.at.best}-0.pt")

    def updates(self) -> Iterator[list[int]]:
        yield from self.plan[len(self.at.curve)][self.at.update :]

    def share(self, groups: Sequence[T]) -> Iterator[T]:
        """This process's micro-batches of an update: of n processes each takes every n-th.

        With FSDP all must make as many passes, so the last one may come again, with weight 0.
        """
        n = self.accelerator.num_processes
        for i in range(self.accelerator.process_index, math.ceil(len(groups) / n) * n, n):
            self.weight = n if i < len(groups) else 0  # gradients are averaged, and the loss is a sum
            yield groups[min(i, len(groups) - 1)]

    def backward(self, loss: torch.Tensor, tokens: int) -> None:
        """Gradients of a part of the update's loss, added to those at hand."""
        self.accelerator.backward(self.weight * loss)
        if self.weight:
            self.loss, self.tokens = self.loss + loss.item(), self.tokens + tokens

    def step(self) -> None:
        """One update from the gradients at hand: clipped, at the schedule's rate."""
        at, processes = self.at, self.accelerator.num_processes
        for p in self.model.parameters() if processes > 1 and not self.divided else ():
            p.grad = None if p.grad is None else reduce(p.grad, "mean")
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
        loss, tokens = map(sum, zip(*gather_object([(self.loss, self.tokens)]), strict=True))
        self.loss, self.tokens = 0.0, 0
        if not (math.isfinite(loss) and math.isfinite(norm)):  # before it spoils the weights
            raise UserError(
                f"{self.name}: stopped at update {len(at.losses) + 1}: loss {loss:.3g}, gradient norm {norm:.3g}; the "
                f"last state is in {self.folder}. Give --overwrite and a lower --lr than {self.settings['lr']:g}"
            )
        rate = self.settings["lr"] * cosine(len(at.losses), self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.losses.append(loss)
        at.update += 1
        at.tokens += tokens
        self._log(loss=loss, lr=rate, tokens=at.tokens)
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if len(at.losses) % self.settings["save_every"] == 0:
            self._save()

    def validated(self, loss: float | None, figures: dict[str, Any] | None = None) -> None:
        """The end of an epoch. loss: of the validation, None if there is none; figures: more that is known of it."""
        at = self.at
        entry = {"epoch": len(at.curve) + 1, "loss": sum(at.losses[-at.update :]) / at.update, **(figures or {})}
        at.curve += broadcast_object_list([entry | {"validation": loss}])
        at.update = 0
        self._log(**at.curve[-1])
        self._save()

    def figures(self) -> dict:
        """For the metadata."""
        at = self.at
        figures = {"steps": len(at.losses), "tokens": at.tokens, "seconds": at.seconds}
        return figures | {"loss": at.curve[at.best - 1]["loss"], "best_epoch": at.best, "curve": at.curve}

    def result(self) -> tuple[Any, Any]:
        """The trained model and LoRA's view of it, in the first process."""
        if self.divided:
            weights = get_model_state_dict(self.model, options=WHOLE)  # all of them, in the first process
            self.parts[0].load_state_dict(weights, strict=False)
        else:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return self.parts

    # ------------------------------------------------------------------------------------------------- log and states

    def _log(self, **figures: float | None) -> None:
        now = time.perf_counter()
        self.at.seconds += now - self.clock
        self.clock = now
        if self.log:
            self.log.append([{"step": len(self.at.losses), "seconds": round(self.at.seconds, 3), **figures}])

    def _states(self) -> list[Path]:
        return sorted(self.folder.glob("state-*.pt"), key=lambda state: [int(n) for n in state.stem.split("-")[1:]])

    def _save(self) -> None:
        """The state, under its name only when all of it is written. Of the older ones the best epoch's stays."""
        weights, moments = get_state_dict(self.model, self.optimizer, options=WHOLE)
        if self.accelerator.is_main_process:
            state = {"weights": weights, "moments": moments, "random": torch.get_rng_state()}
            latest, draft = self.folder / f"state-{len(self.at.curve)}-{self.at.update}.pt", self.folder / "draft"
            try:
                torch.save(state | {"progress": dataclasses.asdict(self.at)}, draft)
            except RuntimeError as error:  # torch's own
                reason = str(error).splitlines()[0]
                raise UserError(f"{draft}: {reason}: make room, and the same command resumes") from None
            draft.replace(latest)
            for state in self._states():
                if state.name not in (latest.name, f"state-{self.at.best}-0.pt"):
                    state.unlink()

    def _load(self, state: Path) -> Progress:
        """Weights, moments and random numbers of a state, and where it stands."""
        try:
            saved = torch.load(state, map_location="cpu", weights_only=True)  # runs no code
            weights, moments = saved["weights"], saved["moments"]
            set_state_dict(
                self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=WHOLE
            )
            torch.set_rng_state(saved["random"])
            return Progress(**saved["progress"])
        except Exception as error:  # of many kinds: cut short, zeros, another's
            raise UserError(f"{state}: can't be read ({models.in_a_line(error)}): --overwrite starts again") from None


# ------------------------------------------------------------------------------------------------------------ the files


def partial_folder(out: Path) -> Path:
    """Where an unfinished training keeps its states; its being there says that the training is not complete."""
    return out.with_name(out.name + ".partial")


def log_lines(out: Path, step: int) -> files.Resumable:
    """OUT.log.jsonl at update `step`: what a stopped run logged behind it comes again, and is dropped."""
    path = out.with_name(out.name + ".log.jsonl")
    if not step:
        path.unlink(missing_ok=True)
    return files.Resumable(path, lambda lines: sum(line["step"] <= step for _, line in lines))


def is_trained(arguments: dict[str, Any], inputs: Iterable[Path]) -> bool:
    """Whether the checkpoint `out` is complete, made with these arguments; if it is not, its metadata are written.

    They come before the training, so that a stopped one resumes with the arguments and inputs that it was begun with;
    others are a UserError. --overwrite deletes what is there.
    """
    out, partial = arguments["out"], partial_folder(arguments["out"])
    first = accelerate.PartialState().is_main_process
    if not arguments["overwrite"] and ((out / "config.json").exists() or any(partial.glob("state-*"))):
        files.same_arguments(out, arguments, MAY_DIFFER)
        if not partial.exists():
            if "steps" not in files.read_meta(out):
                raise UserError(f"{out}: not made by this command: --overwrite replaces it, another --out keeps both")
            print(f"{out}: is complete; --overwrite trains it again", flush=True)
            return True
    if arguments["overwrite"] and first:
        shutil.rmtree(partial, ignore_errors=True)
        files.meta_path(out).unlink(missing_ok=True)
        files.discard(out)
    if first:
        partial.mkdir(parents=True, exist_ok=True)
        files.write_meta(out, arguments, inputs)
    return False
