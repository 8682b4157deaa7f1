"""Curves of a training in TensorBoard, Weights & Biases or Trackio: follows the logs of a run from outside.

    python -m integrations.trackers runs/webshop --to tensorboard            # then tensorboard --logdir runs/webshop
    python -m integrations.trackers runs/webshop --to wandb --follow         # until Ctrl-C, while the stages train

    reads   RUN/*.log.jsonl, a line for each update and for each epoch, as sft.py and train_qnet.py write them
    writes  RUN/NAME.curves/, the tracker's files, anew at each call (Trackio's are in $TRACKIO_DIR)

A training that goes on after a stop writes some lines of its log again: the same ones, so a tracker gets each once. A
training that is begun again (--overwrite) gets new curves.
"""

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from qlass import UserError
from qlass.files import remove
from qlass.records import as_user_error
from qlass.settings import parse, run_stage

SECONDS = 10  # between two looks at the logs


@dataclass(frozen=True)
class Config:
    run: Positional[Path]  # a run folder
    to: Literal["tensorboard", "wandb", "trackio"] = "tensorboard"  # pip install it
    follow: bool = False  # go on until Ctrl-C


def tracker_of(name: str, folder: Path) -> Callable[[dict[str, float], int], None]:
    """Return a function that hands the figures of a step to a tracker, whose files are in the folder."""
    with as_user_error(f"pip install {name}"):
        module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    remove(folder)
    folder.mkdir()
    if name == "tensorboard":
        writer = module.SummaryWriter(str(folder))

        def write(figures: dict[str, float], step: int) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return write
    options = {"dir": str(folder), "reinit": "create_new"} if name == "wandb" else {}  # a run for each log
    run = module.init(project="qlass", name=folder.stem, **options)
    return lambda figures, step: run.log(figures, step=step)


def figures_of(line: dict) -> dict[str, float]:
    """The numbers of a line of the log, by whether it is of an update or of an epoch."""
    kind = "epoch" if "epoch" in line else "update"
    numbers = line | line.get("held_out", {})
    return {f"{kind}/{name}": x for name, x in numbers.items() if isinstance(x, int | float) and name != "step"}


class Curves:
    """A log and what a tracker has had of it."""

    def __init__(self, log: Path, tracker: str) -> None:
        self.log, self.tracker = log, tracker
        self.folder = log.with_name(log.name.removesuffix(".log.jsonl") + ".curves")
        self.lines: list[str] = []

    def hand_on(self) -> None:
        """Give the tracker what is new."""
        text = self.log.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines[:1] != self.lines[:1]:  # the first look, or another training
            self.write = tracker_of(self.tracker, self.folder)
            self.lines = []
        new = lines[len(self.lines) :]
        for line in map(json.loads, new):
            self.write(figures_of(line), line["step"])
        self.lines += new
        if new:
            print(f"{self.log}: {len(new)} lines to {self.tracker}", flush=True)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    curves: dict[Path, Curves] = {}
    while True:
        for log in sorted(config.run.glob("*.log.jsonl")):
            curves.setdefault(log, Curves(log, config.to)).hand_on()
        if not curves:
            raise UserError(f"{config.run}: no training has written a log here")
        if not config.follow:
            return
        time.sleep(SECONDS)


if __name__ == "__main__":
    run_stage(main)
