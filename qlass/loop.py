"""What both training loops share, on Accelerate: processes, log, save and resume, early stop.

torchrun --nproc-per-node 8 -- train_qnet.py ...           (-- keeps torchrun from reading --run as its own)
accelerate launch --use_fsdp ... train_qnet.py ...         (GPUs that divide weights, gradients and moments)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import json
import math
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from qlass import UserError, files
from qlass.records import read_object

MAY_DIFFER = (*files.TRAINING_FREE, *files.FREE)  # between a training and its continuation
FIRST = 20  # updates
EXPLODED = 10  # a training has diverged when its last FIRST losses average so many times the highest of its first ones


def start(device: str | None = None) -> accelerate.PartialState:
    """Join the other processes, if a launcher has started several; the state says which one this is."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UserError("accelerate launch: DeepSpeed is not supported; FSDP shares the same: give --use_fsdp instead")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    way = f"start them by torchrun --nproc-per-node {launched} --, or unset WORLD_SIZE"
    if launched > 1 and "MASTER_ADDR" not in os.environ:  # as in a job array, whose processes do not know one another
        raise UserError(f"WORLD_SIZE is {launched}, but MASTER_ADDR is not set: {way}")
    patience = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations
    state = accelerate.PartialState(cpu=on_cpu(device), timeout=patience)
    if state.num_processes != launched:
        raise UserError(f"WORLD_SIZE is {launched}, but this process sees {state.num_processes}: {way}")
    return state


def on_cpu(device: str | None) -> bool:
    """Accelerate has to be told: else it starts one process without a GPU, and says nothing."""
    return not torch.cuda.is_available() or (device or "").startswith("cpu")


def divides() -> bool:
    """Whether processes divide the weights among them (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


class Replica(DistributedDataParallel):
    """A process's copy of a model. Its attributes and methods are the model's own; what these call goes through here,
    where gradients are exchanged."""

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return super().__getattr__(name)
        method = getattr(type(self.module), name, None)
        return types.MethodType(method, self) if inspect.isfunction(method) else getattr(self.module, name)


def updates_of(sizes: Sequence[int], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """An epoch's order: examples, of `sizes[i]` each, in updates of at least `batch` (the last one: of the rest).

    It depends on the seed and the epoch alone, so that a resumed run needs no memory of it.
    """
    order = torch.Generator().manual_seed((seed << 20) + epoch)
    plan: list[list[int]] = []
    room = 0
    for i in torch.randperm(len(sizes), generator=order).tolist():
        if room <= 0:
            plan.append([])
            room = batch
        plan[-1].append(i)
        room -= sizes[i]
    return plan


def cosine(step: int, steps: int, warmup: float = 0.03) -> float:
    """Learning-rate factor: linear warm-up over 3 % of the steps, then half a cosine to 0 (Table 5)."""
    rise = max(1, round(warmup * steps))
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@dataclasses.dataclass
class Progress:
    """Where a training stands: what a state holds beside weights, moments and random numbers."""

    update: int = 0  # completed, of the current epoch
    tokens: int = 0
    seconds: float = 0.0  # until the last state, of all calls
    losses: list[float] = dataclasses.field(default_factory=list)  # one a completed update
    curve: list[dict] = dataclasses.field(default_factory=list)  # one entry a completed epoch
    scores: list[float | None] = dataclasses.field(default_factory=list)  # likewise, by validation

    @property
    def best(self) -> int:
        """The epoch of the best validation, from 1; the last one where there is none."""
        scores = [score for score in self.scores if score is not None]
        return self.scores.index(max(scores)) + 1 if scores else len(self.curve)


class Training:
    """Shares the updates of a training among processes, keeps count, saves states and stops early.

    for _ in fit.epochs():
        for update in fit.updates():  # indices of examples
            for group in fit.share(micro_batches):
                fit.backward(loss, tokens)
            fit.step()
        fit.validated(score, figures)
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any],
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """`sizes[i]`: what example i counts in a batch. settings: the stage's arguments."""
        self.name, self.settings, self.at = name, settings, Progress()
        batch, seed, out, log = (settings[key] for key in ("batch", "seed", "out", "log"))
        self.plans = [updates_of(sizes, batch, seed, epoch) for epoch in range(settings["epochs"])]
        self.steps = sum(map(len, self.plans))
        self.folder = partial_folder(out)
        cpu = on_cpu(settings.get("device"))
        precision = settings.get("precision") or ("float32" if cpu else "bf16")
        if log != "jsonl" and find_spec(log) is None:
            raise UserError(f"--log {log}: pip install {log}, or leave it out")
        self.accelerator = accelerate.Accelerator(
            cpu=cpu, mixed_precision={"float32": "no", "bf16": "bf16"}[precision], device_placement=False,
            project_dir=out.parent, log_with=None if log == "jsonl" else log,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )  # fmt: skip
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(self.model, DistributedDataParallel):
            self.model.__class__ = Replica
        self.accelerator.register_save_state_pre_hook(trained_alone)
        self.folder.mkdir(parents=True, exist_ok=True)
        if states := self._states():
            self.at = self._load(states[-1])

        step = len(self.at.losses)
        first = self.accelerator.is_main_process
        self.lines = log_lines(out, step) if log == "jsonl" and first else None
        options = {"tensorboard": {"purge_step": step + 1}, "wandb": {"name": out.name}}
        self.accelerator.init_trackers(f"{out.name}.log" if log == "tensorboard" else "qlass", init_kwargs=options)
        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        self.bar = tqdm(total=self.steps, initial=step, desc=name, disable=not first, mininterval=every)
        self.weight, self.loss, self.tokens = self.accelerator.num_processes, 0.0, 0  # of the update at hand
        self.saved = self.began = time.perf_counter()
        self.began_at = self.at.tokens

    # ------------------------------------------------------------------------------------------------- the loop's steps

    def epochs(self) -> Iterator[int]:
        """Epochs until --patience of them in a row bring no better validation, then the best one's weights."""
        at = self.at
        while len(at.curve) < min(len(self.plans), at.best + self.settings["patience"]):
            self.model.train()
            yield len(at.curve)
        if at.best < len(at.curve):
            self._load(self.folder / f"state-{at.best}-0")

    def updates(self) -> Iterator[list[int]]:
        yield from self.plans[len(self.at.curve)][self.at.update :]

    def share(self, groups: Sequence[Any]) -> Iterator[Any]:
        """This process's micro-batches of an update, every n-th; behind the last one gradients are exchanged.

        Processes wait for one another, so each goes through as many: the last one may come again, with weight 0.
        """
        n = self.accelerator.num_processes
        end = math.ceil(len(groups) / n) * n
        for i in range(self.accelerator.process_index, end, n):
            self.weight = n if i < len(groups) else 0  # the exchange averages, and the loss is a sum
            with self.accelerator.no_sync(self.model) if i + n < end else contextlib.nullcontext():
                yield groups[min(i, len(groups) - 1)]

    def backward(self, loss: torch.Tensor, tokens: int) -> None:
        """Gradients of a part of the update's loss, added to those at hand."""
        self.accelerator.backward(self.weight * loss)
        if self.weight:
            self.loss, self.tokens = self.loss + loss.item(), self.tokens + tokens

    def step(self) -> None:
        """One update from the gradients at hand: clipped, at the schedule's rate."""
        at = self.at
        rate = self.settings["lr"] * cosine(len(at.losses), self.steps)
        loss, tokens = map(sum, zip(*gather_object([(self.loss, self.tokens)]), strict=True))
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
        self.loss, self.tokens = 0.0, 0
        at.losses.append(loss)
        exploded = sum(at.losses[-FIRST:]) / FIRST > EXPLODED * max(at.losses[:FIRST])
        if exploded or not (math.isfinite(loss) and math.isfinite(norm)):  # before it spoils the weights
            raise UserError(
                f"{self.name}: stopped at update {len(at.losses)}: loss {loss:.3g}, gradient norm {norm:.3g}; the last "
                f"state is in {self.folder}. Give --overwrite and a lower --lr than {self.settings['lr']:g}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.update, at.tokens = at.update + 1, at.tokens + tokens
        speed = (at.tokens - self.began_at) / (time.perf_counter() - self.began)
        self._log({"loss": loss, "lr": rate, "tokens_per_second": round(speed, 1)})
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if len(at.losses) % self.settings["save_every"] == 0:
            self._save()

    def validated(self, score: float | None, figures: dict) -> None:
        """The end of an epoch. Higher scores are better; None: there is nothing to validate on."""
        at = self.at
        at.scores += broadcast_object_list([score])
        at.curve.append({"epoch": len(at.scores), "step": len(at.losses)})
        at.curve[-1] |= {"loss": sum(at.losses[-at.update :]) / at.update, **figures}
        at.update = 0
        self._log({"epoch": len(at.curve)} | {k: v for k, v in figures.items() if v is not None})
        self._save()

    def figures(self) -> dict:
        """For the metadata."""
        at = self.at
        figures = {"steps": len(at.losses), "tokens": at.tokens, "seconds": at.seconds}
        return figures | {"loss": at.curve[at.best - 1]["loss"], "best_epoch": at.best, "curve": at.curve}

    def result(self, parts: tuple, again: Callable[[], tuple]) -> tuple:
        """The parts that a training began with, the first of them the model; if divided, put together in new parts."""
        if not divides():
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            return parts
        weights = self.accelerator.get_state_dict(self.model)  # all of them, in the first process
        if self.accelerator.is_main_process:
            parts = again()
            parts[0].load_state_dict(weights, strict=False)
        return parts

    # ------------------------------------------------------------------------------------------------- log and states

    def _log(self, figures: dict[str, float]) -> None:
        step = len(self.at.losses)
        self.accelerator.log(figures, step=step)
        if self.lines:
            self.lines.append([{"step": step, **figures}])

    def _states(self) -> list[Path]:
        return sorted(self.folder.glob("state-*"), key=lambda state: [int(n) for n in state.name.split("-")[1:]])

    def _save(self) -> None:
        """A state, under its name only when all of it is there. Of the older ones the best epoch's stays."""
        draft = self.folder / "draft"
        first = self.accelerator.is_main_process
        now = time.perf_counter()
        self.at.seconds += now - self.saved
        self.saved = now
        if first:
            shutil.rmtree(draft, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(draft))
            state = {"processes": self.accelerator.num_processes, "progress": dataclasses.asdict(self.at)}
            if first:
                (draft / "progress.json").write_text(json.dumps(state))
        except Exception as error:  # torch and safetensors have their own
            why = str(error).splitlines()[0]
            raise UserError(f"{draft}: {why}: make room, and the same command resumes from the last state") from None
        self.accelerator.wait_for_everyone()
        if first:
            state = draft.rename(self.folder / f"state-{len(self.at.curve)}-{self.at.update}")
            for older in self._states():
                if older.name not in (state.name, f"state-{self.at.best}-0"):
                    shutil.rmtree(older)

    def _load(self, state: Path) -> Progress:
        """Weights, moments and random numbers of a state, and where it stands."""
        n = self.accelerator.num_processes
        try:
            saved = read_object(state / "progress.json")
            before, progress = saved["processes"], Progress(**saved["progress"])
            if before == n:
                accelerate.utils.load(state / f"random_states_{self.accelerator.process_index}.pkl")  # see below
                self.accelerator.load_state(str(state), strict=False)  # it passes over missing random numbers
        except Exception as error:  # of many kinds: cut short, zeros, another's
            why = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
            raise UserError(f"{state}: can't be read ({why}): --overwrite starts again") from None
        if before != n:
            raise UserError(f"{state}: of {before} processes, not {n}: start as many, or give --overwrite")
        return progress


def trained_alone(models: list[nn.Module], weights: list[dict], _: str) -> None:
    """What is not trained need not be saved: with LoRA it is nearly all."""
    for model, saved in zip(models, weights, strict=False):
        for name in saved.keys() - {name for name, p in model.named_parameters() if p.requires_grad}:
            del saved[name]


# ------------------------------------------------------------------------------------------------------------ the files


def partial_folder(out: Path) -> Path:
    """Where an unfinished training keeps its states."""
    return out.with_name(out.name + ".partial")


def log_lines(out: Path, step: int) -> files.Resumable:
    """OUT.log.jsonl at update `step`: what a stopped run logged behind it comes again, and is dropped."""
    path = out.with_name(out.name + ".log.jsonl")
    if not step:
        path.unlink(missing_ok=True)
    return files.Resumable(path, lambda lines: sum(line["step"] <= step for line in lines))


def is_trained(arguments: dict[str, Any], inputs: Iterable[Path]) -> bool:
    """Whether the checkpoint `out` is complete, made with these arguments; if it is not, its metadata are written.

    They come before the training, so that a stopped one resumes with the arguments and inputs that it was begun with;
    others are a UserError. --overwrite deletes what is there.
    """
    out, partial = arguments["out"], partial_folder(arguments["out"])
    first = accelerate.PartialState().is_main_process
    if arguments["overwrite"] and first:
        finish(out)
        files.meta_path(out).unlink(missing_ok=True)
        files.discard(out)
    if (partial / "last.pt").exists():
        raise UserError(f"{partial}: a training that an earlier version began: --overwrite starts it again")
    begun = any(partial.glob("state-*"))
    if not arguments["overwrite"] and ((out / "config.json").exists() or begun):
        files.same_arguments(out, arguments, MAY_DIFFER)
        if not partial.exists():
            if "steps" not in files.read_meta(out):
                raise UserError(f"{out}: not made by this command: --overwrite replaces it, another --out keeps both")
            print(f"{out}: is complete; --overwrite trains it again", flush=True)
            return True
    if first:
        partial.mkdir(parents=True, exist_ok=True)  # the mark of what is not complete
        files.write_meta(out, arguments, inputs)
    return False


def finish(out: Path) -> None:
    """The checkpoint `out` is complete: what it could be resumed from can go."""
    shutil.rmtree(partial_folder(out), ignore_errors=True)
