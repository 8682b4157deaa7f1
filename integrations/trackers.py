"""Curves of a training in TensorBoard, Weights & Biases or Trackio: follows the logs of a run from outside.

    python -m integrations.trackers runs/webshop --to tensorboard            # then tensorboard --logdir runs/webshop
    python -m integrations.trackers runs/webshop --to wandb --follow         # until Ctrl-C, while the stages train

    reads   RUN/*.log.jsonl, a line for each update and for each epoch, as sft.py and train_qnet.py write them
    writes  RUN/NAME.curves/, the tracker's files and handed_on-TRACKER.json, which says what it has

A training that was stopped writes some lines of its log again. A tracker gets each step once. A training that is begun
again (--overwrite) gets new curves.
"""

import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from qlass import UserError
from qlass.outputs import atomic, read_json, remove
from qlass.settings import parse, run_stage

SECONDS = 10  # between two looks at the logs


@dataclasses.dataclass(frozen=True)
class Config:
    run: Positional[Path]  # a run folder
    to: Literal["tensorboard", "wandb", "trackio"] = "tensorboard"  # pip install it
    follow: bool = False  # go on until Ctrl-C


Tracker = Callable[[dict[str, float], int], None]  # takes the figures of a step


def tracker_of(name: str, folder: Path, begun: str) -> Tracker:
    """What hands figures to a tracker, whose files are in the folder. begun: a training's first line."""
    module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    if name == "tensorboard":
        writer = module.SummaryWriter(str(folder))

        def write(figures: dict[str, float], step: int) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return write
    options: dict[str, Any] = {"dir": str(folder), "resume": "allow"} if name == "wandb" else {}
    run = module.init(project="qlass", name=folder.with_suffix("").name, **options)
    return lambda figures, step: run.log(figures, step=step) if name == "wandb" else module.log(figures, step=step)


def figures_of(line: dict) -> tuple[str, dict[str, float]]:
    """Whether a line of the log is of an update or of an epoch, and its numbers."""
    kind = "epoch" if "epoch" in line else "update"
    numbers = line | line.get("held_out", {})
    return kind, {f"{kind}/{name}": x for name, x in numbers.items() if isinstance(x, int | float) and name != "step"}


def hand_on(log: Path, tracker: Callable[[Path, str], Tracker], name: str) -> int:
    """Give the tracker of this name what is new in a log. Returns the number of steps."""
    folder = log.with_name(log.name.removesuffix(".log.jsonl") + ".curves")
    state = folder / f"handed_on-{name}.json"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    begun = "".join(lines[:1])
    last = read_json(state) if state.exists() else {"begun": begun}
    if last["begun"] != begun:  # the curves of another training
        remove(folder)
        last = {"begun": begun}
    new = [(line["step"], *figures_of(line)) for line in map(json.loads, lines)]
    new = [(step, kind, figures) for step, kind, figures in new if step > last.get(kind, -1)]
    if new:
        folder.mkdir(exist_ok=True)
        write = tracker(folder, begun)
        for step, kind, figures in new:
            write(figures, step)
            last[kind] = step
        with atomic(state) as out:
            json.dump(last, out)
    return len(new)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    tracker = functools.cache(functools.partial(tracker_of, config.to))  # one a training
    if not list(config.run.glob("*.log.jsonl")):
        raise UserError(f"{config.run}: no training has written a log here")
    while True:
        for log in sorted(config.run.glob("*.log.jsonl")):
            if n := hand_on(log, tracker, config.to):
                print(f"{log}: {n} lines to {config.to}", flush=True)
        if not config.follow:
            return
        time.sleep(SECONDS)


if __name__ == "__main__":
    run_stage(main)
