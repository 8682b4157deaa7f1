"""Were the tasks that are played also learned from?

A published split may overlap (WebShop's do, in 21 tasks), so what is found is a warning and a figure, no refusal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qlass.demonstrations import cloned_from
from qlass.jsonl import is_text
from qlass.metadata import read_meta

if TYPE_CHECKING:
    import envs


def tasks_of(path: Path) -> set[str]:
    """The task ids in demonstrations, trees or labels; of files without ids (ETO's) none."""
    from qlass.demonstrations import records_of

    return {str(record["task_id"]) for _, record in records_of(path) if record.get("task_id") is not None}


def learned_from(checkpoint: Path | None, args: argparse.Namespace) -> set[str]:
    """The tasks of the file that an agent or a QNet was trained on, if it is there and of the environment at hand."""
    if checkpoint is None:
        return set()
    made = read_meta(checkpoint.absolute()).get("arguments", {})
    if any(made.get(name) != getattr(args, name) for name in ("env", *args.env_flags)):
        return set()  # its ids mean other tasks
    labels = made.get("labels")
    path = Path(labels) if is_text(labels) and Path(labels).is_file() else cloned_from(checkpoint)
    return tasks_of(path) if path else set()


def leaked(env: envs.TextEnv, played: Iterable[str], learned: Iterable[str], source: str) -> int:
    """How many of the played tasks are about what was learned from, the same task or product; a line where any are."""
    subjects = set(map(env.subject, learned))
    played = list(played)
    n = sum(env.subject(task) in subjects for task in played)
    if n:
        print(f"warning: {n} of {len(played)} tasks played are also in the {source}", file=sys.stderr)
    return n
