"""What the two training loops share: the order of the data, early stopping, checkpoints to resume from.

The loops themselves, forward and backward, stand in `sft.py` and `train_qnet.py`:

    fit = Training("sft", model, optimizer, args, sizes, data)
    for _ in fit.epochs():                     # until validation stops improving, --epochs at most
        for update in fit.updates():           # indices of the examples of one update
            for group in fit.share(groups):    # those of its micro-batches that are this process's
                ...                            # forward, loss
                fit.backward(loss, tokens)
            fit.step()
        fit.validated(score, figures)

A killed run resumes from the last checkpoint in OUT.partial/ and, on a CPU, ends with the same weights as any other.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from environments import UserError
from qlass import processes
from qlass.jsonl import discard
from qlass.metadata import FREE, TRAINING_FREE, meta_path, read_meta, recorded, same_arguments, write_meta
from qlass.models import cosine
from qlass.tracking import open_log

T = TypeVar("T")

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
        self.divided = processes.divided(model)
        self.steps = sum(len(updates_of(sizes, args.batch, args.seed, e)) for e in range(args.epochs))
        digest = hashlib.blake2b(digest_size=16)
        for values in data:
            digest.update(np.asarray(values).tobytes())
        self.about = {"examples": digest.hexdigest()}
        self.about |= {  # where inputs lie is no matter: they are among the examples, and in the metadata by their hash
            name: value for name, value in recorded(args).items()
            if name not in MAY_DIFFER and not isinstance(getattr(args, name), Path)
        }  # fmt: skip
        self.folder = partial_folder(args.out)
        with processes.in_turn():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        self.log = open_log(args.log, args.out, self.at.step, self.about) if processes.first() else lambda *_: None
        self.bar = tqdm(total=self.steps, initial=self.at.step, desc=name, disable=None if processes.first() else True)
        self.said, self.saved = time.monotonic(), time.perf_counter()
        self.began = self.said, self.at.step, self.at.tokens

    # ------------------------------------------------------------------------------------------------- the loop's steps

    def epochs(self) -> Iterator[int]:
        """Epochs until --patience of them in a row bring no better validation, then the best one's weights."""
        at = self.at
        while at.epoch < self.args.epochs and (at.best is None or at.epoch - at.best < self.args.patience):
            self.model.train()
            yield at.epoch
        processes.meet()  # the best weights are written
        if at.best not in (None, at.epoch):
            processes.set_weights(self.model, read_state(self.folder / "best.pt", mmap=self.divided))
        self.bar.close()

    def updates(self) -> Iterator[list[int]]:
        yield from updates_of(self.sizes, self.args.batch, self.args.seed, self.at.epoch)[self.at.update :]

    def share(self, groups: Iterable[T]) -> Iterator[T]:
        """This process's. Where weights are divided, all go through them in step: the last one again, for nothing."""
        for group, counts in processes.share(list(groups), self.divided):
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
        processes.sum_gradients(trained)
        loss, tokens = processes.total(self.loss, self.tokens)
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
        at, score = self.at, processes.same(score)
        at.epoch, at.update = at.epoch + 1, 0
        loss = sum(at.losses) / len(at.losses)
        at.curve.append({"epoch": at.epoch, "step": at.step, "loss": loss, **figures})
        at.losses = []
        self.log(at.step, {"epoch": at.epoch} | {k: v for k, v in figures.items() if v is not None})
        if score is not None and score > at.score:
            at.score, at.best = score, at.epoch
            write_state(self.folder / "best.pt", processes.trained(self.model))
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
        if self.bar.disable and processes.first() and now - self.said >= 30:
            left = (self.steps - at.step) * (now - began) / (at.step - step) / 60
            self.said = now
            print(f"{self.name}: {at.step}/{self.steps} updates, loss {loss:.4f}, {speed:,.0f} tokens/s, "
                  f"{left:.0f} min left at most", file=sys.stderr, flush=True)  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- checkpoints

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
            "weights": processes.trained(self.model), "optimizer": self.optimizer.state_dict(),
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
        processes.set_weights(self.model, saved["weights"])
        processes.set_moments(self.optimizer, saved["optimizer"])
        torch.set_rng_state(saved["random"]["cpu"])
        if "cuda" in saved["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["random"]["cuda"])


def write_state(path: Path, content: dict) -> None:
    """Weights and moments, put together, under this name only when all are there; once for all processes."""
    content = processes.whole(content)
    if not processes.first():
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
        if processes.first():
            finish(out)
            meta_path(out).unlink(missing_ok=True)
            discard(out)
    elif (out / "config.json").exists() or (partial / "last.pt").exists():
        same_arguments(out, args, MAY_DIFFER)
        if not partial.exists():
            if "steps" not in read_meta(out):
                raise UserError(f"{out}: not made by this command: --overwrite replaces it, another --out keeps both")
            processes.say(f"{out}: is complete; --overwrite trains it again")
            return True
    if processes.first():
        partial.mkdir(parents=True, exist_ok=True)  # the mark of what is not complete
        write_meta(out, args, inputs)
    return False


def finish(out: Path) -> None:
    """The checkpoint `out` is complete: what it could be resumed from can go."""
    shutil.rmtree(partial_folder(out), ignore_errors=True)
