"""Were the tasks that are played also learned from?

A published split may overlap (WebShop's do, in 21 tasks), so what is found is a warning and a figure, no refusal. What
is not known is said too: None is not 0.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from envs import TextEnv
from qlass.demonstrations import cloned_from, known_id, openings, records_of
from qlass.jsonl import is_text
from qlass.metadata import located, read_meta

TRIED = 100  # training tasks, by whose words it is seen whether demonstrations without ids are of this environment


def learned_from(checkpoint: Path, args: argparse.Namespace) -> tuple[Path, int | None] | str:
    """The file that an agent or a QNet was trained on, and how many of its trajectories or trees (None: all); text: why
    that is not known."""
    checkpoint = checkpoint.absolute()
    made = read_meta(checkpoint).get("arguments", {})
    if not made:
        return f"{checkpoint.name} has no metadata"
    if any(made.get(name) != getattr(args, name) for name in ("env", *args.env_flags)):
        return f"{checkpoint.name} is of another environment, whose ids mean other tasks"
    named = is_text(made.get("labels"))
    path, most = (located(made, made["labels"], checkpoint), made.get("limit")) if named else cloned_from(checkpoint)
    return (path, most) if path and path.is_file() else "the file is gone"


def leaked(env: TextEnv, played: Iterable[str], learned: tuple[Path, int | None] | str, source: str) -> int | None:
    """How many of the played tasks are about what was learned from, the same task or product; a line where any are.

    Demonstrations without ids (ETO's of WebShop) are known by their words: a task's first observation or, where that
    has other words too, its instruction. None, with a line, where nothing is known.
    """
    played, n = list(played), None
    if isinstance(learned, tuple):
        (path, most), player = learned, env.fork()
        records = (record for _, record in records_of(path) if record.get("parent_id") is None)  # of a tree its root
        ids = [known_id(record, env) for record in itertools.islice(records, most)]
        texts = [words(text) for text in openings(path, most)] if None in ids else []
        subjects = {env.subject(str(task)) for task in set(ids) - {None}}
        n = sum(env.subject(task) in subjects or told(player, task, texts) for task in played)
        if texts and not n and not any(told(player, task, texts) for task in env.task_ids("train")[:TRIED]):
            n, learned = None, f"{path.name} has no task ids, and none of its texts is of a task known here"
        player.close()
    if n is None:
        print(f"warning: whether tasks played are also in the {source} is not known: {learned}", file=sys.stderr)
    elif n:
        print(f"warning: {n} of {len(played)} tasks played are also in the {source}", file=sys.stderr)
    return n


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def told(env: TextEnv, task: str, texts: list[str]) -> bool:
    """Whether one of these texts tells a player the task."""
    if not texts:
        return False
    observation, info = env.reset(options={"task_id": task})
    if any(words(observation) in text for text in texts):
        return True
    return env.unique_tasks and any(words(info["task"]) in text for text in texts)
