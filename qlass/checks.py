"""Were the tasks that are played also learned from?

A published split may overlap (WebShop's do, in 21 tasks), so a leak is a warning and a figure, no refusal. What cannot
be told is None, not 0.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlass import UserError
from qlass.files import input_of, lineage, read_meta
from qlass.records import records_of, task_id_of

if TYPE_CHECKING:
    from envs import TextEnv


def leaks(env: TextEnv, results: list[dict], sft: Path, qnet: Path, arguments: dict) -> dict[str, int | None]:
    """How many of the tasks played are also in the agent's demonstrations and in QNet's trees, and a line where any is.

    Of the results, those count for which the agent wrote, or QNet read, tokens. None: not known. A task of which
    another is about the same subject (a product) counts too.
    """
    counts: dict[str, int | None] = {}
    for source, checkpoint, cost in (("demonstrations", sft, "generated"), ("trees", qnet, "scored")):
        tasks = {record["task_id"] for record in results if record["tokens"].get(cost)}
        try:
            subjects = {env.subject(task) for task in learned_tasks(env, checkpoint, arguments)} if tasks else set()
            n = counts[source] = sum(env.subject(task) in subjects for task in tasks)
            if n:
                print(f"warning: {n} of {len(tasks)} tasks played are also in the {source}", file=sys.stderr)
        except (UserError, OSError) as reason:
            counts[source] = None
            print(f"warning: whether tasks played are also in the {source} is not known: {reason}", file=sys.stderr)
    return counts


def learned_tasks(env: TextEnv, checkpoint: Path, arguments: dict[str, Any]) -> set[str]:
    """The tasks that a checkpoint and those it was trained from have learned from; UserError where it is not known.

    arguments: of the environment that is played now, "env" and the names in "env_flags".
    """
    tasks: set[str] = set()
    for folder, trained in lineage(checkpoint):
        if not trained:
            raise UserError(f"{folder.name} has no metadata")
        if any(trained.get(name) != arguments[name] for name in ("env", *arguments["env_flags"])):
            raise UserError(f"{folder.name} is of another environment, whose ids mean other tasks")
        if "rounds" in trained or "chains" in trained:  # of experiments.tree_grpo and ppo, which play them
            tasks.update(env.task_ids("train"))
        for name, most in (("labels", "limit"), ("expert", "n_expert")):
            if path := input_of(folder, name):
                tasks |= tasks_of(env, path, trained.get(most))
        if "labels" in trained and "budget_in" not in trained:
            break  # a QNet: its backbone is the agent's matter
        base = input_of(folder, "model")  # of an agent that was cloned twice
        if base and base.resolve() != folder.resolve():
            base = base.absolute()
            same_tasks = read_meta(base)["arguments"].get("env") == arguments["env"]
            tasks |= learned_tasks(env, base, arguments) if same_tasks else set()
    if not tasks:
        raise UserError(f"{checkpoint.name} names no file")
    return tasks


def tasks_of(env: TextEnv, path: Path, most: int | None) -> set[str]:
    """The tasks of the first `most` trajectories or trees of a file."""
    records = (record for _, record in records_of(path) if record.get("parent_id") is None)  # of a tree: the root
    ids = {task_id_of(record, env) for record in itertools.islice(records, most)}
    if None in ids:
        raise UserError(f"{path.name}: no task ids")
    return {str(task) for task in ids}
