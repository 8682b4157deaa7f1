"""Training by several processes, a GPU each, or by one.

    torchrun --nproc-per-node 8 -- train_qnet.py ... [--fsdp]       (-- keeps torchrun from reading --run as its own)
    accelerate launch --multi_gpu|--use_fsdp train_qnet.py ...

Every process takes its share of each update's sequences, and the gradients are summed. Each holds the whole model, or
with --fsdp its part of the weights, gradients and moments (torch's FSDP2: a layer's weights are gathered while they are
used). What there is to do only once (demonstrations, checkpoints, metadata) is done by the first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed, nn
from tqdm import tqdm

from qlass import UserError
from qlass.files import (
    FREE,
    TRAINING_FREE,
    Resumable,
    discard,
    meta_path,
    read_meta,
    recorded,
    same_arguments,
    write_meta,
)

# ------------------------------------------------------------------------------------------------------------ processes

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=2)  # the others may wait as long as the first plays demonstrations


def start(fsdp: bool = False) -> bool:
    """Join the other processes, if a launcher has started several. Are they to divide the weights among them?"""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UserError("accelerate launch: DeepSpeed is not supported; FSDP shares the same: give --use_fsdp instead")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return False
    if not distributed.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, timeout=PATIENCE)
    return fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"


def count() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def first() -> bool:
    return rank() == 0


def say(text: str) -> None:
    """Once for all"""
    if first():
        print(text, flush=True)


@contextlib.contextmanager
def in_turn(really: bool = True) -> Iterator[None]:
    """One process after the other: what the first makes is there for the others."""
    if not really:
        yield
    for turn in range(count() if really else 0):
        if turn == rank():
            yield
        meet()


def meet() -> None:
    if count() > 1:
        distributed.all_reduce(torch.zeros(1))


def same(value: Any) -> Any:
    """The first process's value."""
    box = [value]
    if count() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def every(value: T) -> list[T]:
    """The values of all"""
    values = [value] * count()
    if count() > 1:
        distributed.all_gather_object(values, value)
    return values


def share(items: Sequence[T], in_step: bool) -> Iterator[tuple[T, bool]]:
    """This process's items, each with True; in step all processes have as many, the last one again with False.

    So they must go where weights are divided.
    """
    for i in range(rank(), math.ceil(len(items) / count()) * count(), count()):
        if i < len(items) or in_step:
            yield items[min(i, len(items) - 1)], i < len(items)


def total(*values: float) -> list[float]:
    """Sums over the"""
    sums = torch.tensor(values, dtype=torch.float64)
    if count() > 1:
        distributed.all_reduce(sums)
    return sums.tolist()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Of processes with other sequences each; one that had none adds nothing. Backward did it for divided weights."""
    if count() > 1:
        for p in (p for p in parameters if not hasattr(p, "full_tensor")):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad)


# ------------------------------------------------------------------------------------------------ weights in parts


def divide(model: nn.Module, layers: Iterable[nn.Module], bf16: bool) -> None:
    """Leave each process its part of the weights, on its GPU where it has one. Gradients will be sums.

    bf16: in this width layers are gathered and computed; gradients are summed in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = distributed.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (count(),))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returned a view: none is written to in place
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*layers, model):
        # By default what is outside of the layers would stay gathered, and parameters() name the wrong tensors.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo knows too


def divided(model: nn.Module) -> bool:
    return hasattr(model, "unshard")  # also while its weights are gathered


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """The whole weights in each process, so that it can go through them without the others, and not backward."""
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")] if divided(model) else []
    for module in parts:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in parts:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What of a tensor is this process's, where `like` is divided."""
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def local(x: torch.Tensor) -> torch.Tensor:
    """This process's part of a divided tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def whole(values: Any) -> Any:
    """A nested dict with the parts of its tensors put together, in the first process's memory; all have to ask."""
    if isinstance(values, dict):
        return {key: whole(value) for key, value in values.items()}
    values = values.detach() if isinstance(values, torch.Tensor) else values
    if not hasattr(values, "full_tensor"):
        return values
    full = values.full_tensor()
    return full.cpu() if first() else None


@torch.no_grad()
def set_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """From what `whole` gave: this process's part of each."""
    for name, p in trained(model).items():
        p.copy_(part(weights[name], p))


def set_moments(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """An optimiser's state, from what `whole` gave: this process's part of it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, moments in saved["state"].items():
        same = {k: m for k, m in moments.items() if getattr(m, "shape", None) == parameters[i].shape}
        moments |= {k: part(m, parameters[i]) for k, m in same.items()}
    optimizer.load_state_dict(saved)


def undivided(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """An ordinary model with the trained weights, in the first process: `make()` makes it as it was before them."""
    if not divided(model):
        return model
    weights = whole(trained(model))
    if first():
        model = make()
        model.load_state_dict(weights, strict=False)
    return model


# ------------------------------------------------------------------------------------------------------------- tracking

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


# ------------------------------------------------------------------------------------------------------------- training

EXPLODED = 10  # times the highest loss of the first updates, over as many updates
FIRST = 20
SAVED = {"about", "progress", "random", "weights", "optimizer"}
MAY_DIFFER = (*TRAINING_FREE, *FREE)  # between the start of a training and its continuation


def partial_folder(out: Path) -> Path:
    """Where an unfinished training keeps its checkpoints."""
    return out.with_name(out.name + ".partial")


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


@dataclasses.dataclass
class Progress:
    """Where a training stands: what a checkpoint holds beside weights, moments and random state."""

    epoch: int = 0  # completed
    update: int = 0  # completed, of the current epoch
    step: int = 0  # completed, of all epochs
    tokens: int = 0
    seconds: float = 0.0  # until the last checkpoint, of all calls
    losses: list[float] = dataclasses.field(default_factory=list)  # of the current epoch's updates
    recent: list[float] = dataclasses.field(default_factory=list)  # losses of the last updates, FIRST at most
    highest: float = 0.0  # loss of the first updates
    curve: list[dict] = dataclasses.field(default_factory=list)  # one entry an epoch
    best: int | None = None  # the epoch of the best validation score, from 1
    score: float = -math.inf


class Training:
    """Keeps count, saves and stops early; see above for how a loop uses it."""

    def __init__(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace,
        sizes: Sequence[int], data: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        """`sizes[i]` is what example i counts in a batch; by `data` a checkpoint knows its examples again."""
        self.name, self.model, self.optimizer, self.args = name, model, optimizer, args
        self.sizes, self.at = sizes, Progress()
        self.loss, self.tokens, self.counts = 0.0, 0, True  # of the update at hand
        self.divided = divided(model)
        self.steps = sum(len(updates_of(sizes, args.batch, args.seed, e)) for e in range(args.epochs))
        digest = hashlib.blake2b(digest_size=16)
        for values in data:
            digest.update(np.asarray(values).tobytes())
        self.about = {"examples": digest.hexdigest()}
        self.about |= {  # where inputs lie is no matter: they are among the examples, and in the metadata by their hash
            name: value for name, value in recorded(vars(args)).items()
            if name not in MAY_DIFFER and not isinstance(getattr(args, name), Path)
        }  # fmt: skip
        self.folder = partial_folder(args.out)
        with in_turn():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        self.log = open_log(args.log, args.out, self.at.step, self.about) if first() else lambda *_: None
        self.bar = tqdm(total=self.steps, initial=self.at.step, desc=name, disable=None if first() else True)
        self.said, self.saved = time.monotonic(), time.perf_counter()
        self.began = self.said, self.at.step, self.at.tokens

    # ------------------------------------------------------------------------------------------------- the loop's steps

    def epochs(self) -> Iterator[int]:
        """Epochs until --patience of them in a row bring no better validation, then the best one's weights."""
        at = self.at
        while at.epoch < self.args.epochs and (at.best is None or at.epoch - at.best < self.args.patience):
            self.model.train()
            yield at.epoch
        meet()  # the best weights are written
        if at.best not in (None, at.epoch):
            set_weights(self.model, read_state(self.folder / "best.pt", mmap=self.divided))
        self.bar.close()

    def updates(self) -> Iterator[list[int]]:
        yield from updates_of(self.sizes, self.args.batch, self.args.seed, self.at.epoch)[self.at.update :]

    def share(self, groups: Iterable[T]) -> Iterator[T]:
        """This process's. Where weights are divided, all go through them in step: the last one again, for nothing."""
        for group, counts in share(list(groups), self.divided):
            self.counts = counts
            yield group
        self.counts = True

    def backward(self, loss: torch.Tensor, tokens: int) -> None:
        """Gradients of a part of the update's loss, added to those at hand."""
        loss, tokens = (loss, tokens) if self.counts else (0 * loss, 0)
        loss.backward()
        self.loss, self.tokens = self.loss + loss.item(), self.tokens + tokens

    def step(self) -> None:
        """One update from the gradients at hand: clipped, at the schedule's rate."""
        at, trained = self.at, [p for p in self.model.parameters() if p.requires_grad]
        sum_gradients(trained)
        loss, tokens = total(self.loss, self.tokens)
        self.loss, self.tokens = 0.0, 0
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        norm = norm.full_tensor() if self.divided else norm
        self._check(loss, float(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * cosine(at.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.losses.append(loss)
        at.update, at.step, at.tokens = at.update + 1, at.step + 1, at.tokens + int(tokens)
        self._tell(loss)
        if at.step % self.args.save_every == 0:
            self._save()

    def validated(self, score: float | None, figures: dict) -> None:
        """The end of an epoch. Higher scores are better; None: there is nothing to validate on."""
        at, score = self.at, same(score)
        at.epoch, at.update = at.epoch + 1, 0
        loss = sum(at.losses) / len(at.losses)
        at.curve.append({"epoch": at.epoch, "step": at.step, "loss": loss, **figures})
        at.losses = []
        self.log(at.step, {"epoch": at.epoch} | {k: v for k, v in figures.items() if v is not None})
        if score is not None and score > at.score:
            at.score, at.best = score, at.epoch
            write_state(self.folder / "best.pt", trained(self.model))
        self._save()

    def figures(self) -> dict:
        """For the meta file."""
        at = self.at
        kept = at.best or at.epoch
        about = {"steps": at.step, "tokens": at.tokens, "seconds": at.seconds, "loss": at.curve[kept - 1]["loss"]}
        return about | {"best_epoch": kept, "curve": at.curve}

    def _tell(self, loss: float) -> None:
        """The log, the bar of a terminal, and elsewhere a line every half minute."""
        at, now, (began, step, tokens) = self.at, time.monotonic(), self.began
        speed = (at.tokens - tokens) / (now - began)
        rate = self.optimizer.param_groups[0]["lr"]
        self.log(at.step, {"loss": loss, "lr": rate, "tokens_per_second": round(speed, 1)})
        self.bar.set_postfix(loss=f"{loss:.4f}")
        self.bar.update()
        if self.bar.disable and first() and now - self.said >= 30:
            left = (self.steps - at.step) * (now - began) / (at.step - step) / 60
            self.said = now
            print(f"{self.name}: {at.step}/{self.steps} updates, loss {loss:.4f}, {speed:,.0f} tokens/s, "
                  f"{left:.0f} min left at most", file=sys.stderr, flush=True)  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _check(self, loss: float, norm: float) -> None:
        """Stop before an update that would spoil the weights: what was saved last stays good."""
        at = self.at
        if at.step < FIRST:
            at.highest = max(at.highest, loss)
        at.recent = [*at.recent, loss][-FIRST:]
        exploded = sum(at.recent) / FIRST > EXPLODED * at.highest
        if exploded or not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(
                f"{self.name}: stopped at update {at.step + 1}: loss {loss:.3g}, gradient norm {norm:.3g}; the last "
                f"checkpoint is in {self.folder}. Give --overwrite and a lower --lr than {self.args.lr:g}"
            )

    def _save(self) -> None:
        now = time.perf_counter()
        self.at.seconds, self.saved = self.at.seconds + now - self.saved, now
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        write_state(self.folder / "last.pt", {
            "about": self.about, "progress": dataclasses.asdict(self.at), "random": random,
            "weights": trained(self.model), "optimizer": self.optimizer.state_dict(),
        })  # fmt: skip

    def _resume(self) -> None:
        if not (self.folder / "last.pt").exists():
            return
        saved = read_state(self.folder / "last.pt", SAVED, self.divided)
        for name, value in self.about.items():
            before = saved["about"].get(name)
            if before != value:
                what = "other examples" if name == "examples" else f"--{name.replace('_', '-')} {before}, not {value}"
                raise UserError(f"{self.folder} was begun with {what}: --overwrite starts again")
        self.at = Progress(**saved["progress"])
        set_weights(self.model, saved["weights"])
        set_moments(self.optimizer, saved["optimizer"])
        torch.set_rng_state(saved["random"]["cpu"])
        if "cuda" in saved["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["random"]["cuda"])


def write_state(path: Path, content: dict) -> None:
    """Weights and moments, put together, under this name only when all are there; once for all"""
    content = whole(content)
    if not first():
        return
    draft = path.with_name(f"{path.name}.draft")
    try:
        torch.save(content, draft)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        draft.unlink(missing_ok=True)
        wrong = str(error).splitlines()[0]
        raise UserError(f"{draft}: {wrong}: make room, and the same command resumes from the last one") from None
    os.replace(draft, path)


def read_state(path: Path, needed: Iterable[str] = (), mmap: bool = False) -> dict:
    """What `write_state` wrote; UserError where it is damaged, or lacks what is needed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)  # runs no code
    except Exception as error:  # of many kinds: cut short, zeros, another's
        wrong = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise UserError(f"{path}: can't be read ({wrong}): --overwrite starts again") from None
    if not isinstance(content, dict) or not content.keys() >= set(needed):
        raise UserError(f"{path}: no checkpoint of a training: --overwrite starts again")
    return content


def is_trained(args: argparse.Namespace, inputs: Iterable[Path]) -> bool:
    """Whether the checkpoint args.out is complete, made with these arguments; if it is not, its metadata are written.

    They come before the training, so that a stopped one resumes with the arguments and inputs that it was begun with;
    others are a UserError. --overwrite deletes what is there.
    """
    out, partial = args.out, partial_folder(args.out)
    if args.overwrite:
        if first():
            finish(out)
            meta_path(out).unlink(missing_ok=True)
            discard(out)
    elif (out / "config.json").exists() or (partial / "last.pt").exists():
        same_arguments(out, vars(args), MAY_DIFFER)
        if not partial.exists():
            if "steps" not in read_meta(out):
                raise UserError(f"{out}: not made by this command: --overwrite replaces it, another --out keeps both")
            say(f"{out}: is complete; --overwrite trains it again")
            return True
    if first():
        partial.mkdir(parents=True, exist_ok=True)  # the mark of what is not complete
        write_meta(out, vars(args), inputs)
    return False


def finish(out: Path) -> None:
    """The checkpoint `out` is complete: what it could be resumed from can go."""
    shutil.rmtree(partial_folder(out), ignore_errors=True)


def cosine(step: int, steps: int, warmup: float = 0.03) -> float:
    """Learning-rate factor: linear warm-up over 3 % of the steps, then half a cosine to 0 (Table 5)."""
    rise = max(1, round(warmup * steps))
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
