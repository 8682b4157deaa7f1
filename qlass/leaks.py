"""Leaks: which tasks a checkpoint has learned from, and whether it is judged on one of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import sha256, warn
from qlass.published import first_observation
from qlass.runs import meta_of


def of_same_world(recipe: dict[str, Any], env: Any) -> bool:
    """Whether a recipe is of this environment, with the same options and files."""
    shared = ("env", "env_option", "env_files")
    return all(recipe.get(name) == env.settings.get(name) for name in shared)


def check_qnet(qnet: Path, sft: Path, env: str) -> None:
    """UserError if `qnet` is an agent's folder; warns of a QNet that began as another agent than
    `sft`, or that was trained in another environment than `env`."""
    if not (qnet / "qnet.json").exists():
        raise UserError(f"{qnet}: no QNet; name the folder that train_qnet.py wrote")
    recipe = meta_of(qnet)["recipe"]
    if recipe.get("env", env) != env:
        warn(f"{qnet}: was trained on {recipe['env']}, and plays {env}")
    if recipe.get("sft", sha256(sft)) != sha256(sft):
        warn(f"{qnet}: began as another agent than {sft}")


def begin_of(observation: str) -> str:
    """A first observation as a short hash."""
    return hashlib.sha256(observation.strip().encode()).hexdigest()[:12]


def begins_of(tasks: Sequence[tuple[str | None, str]], unique: bool = False) -> list[str]:
    """The first observations that tell a task, as `begin_of`: no other task begins with them.

    tasks: (id, first observation). unique: whether each observation tells a task. Where it does
    not, two tasks without an id may be one or two, so nothing is known: an empty list.
    """
    members: dict[str, set] = {}  # the tasks that begin so; one without an id by its number
    for number, (task_id, observation) in enumerate(tasks):
        name = number if task_id is None else task_id
        members.setdefault(begin_of(observation), set()).add(name)
    telling = [begin for begin, names in members.items() if unique or len(names) == 1]
    nameless = any(task_id is None for task_id, _ in tasks)
    if nameless and len(telling) < len(members):
        return []
    return sorted(telling)


def start_of(base: str | Path) -> Path:
    """The checkpoint whose metadata tell what a start has learned from: of an adapter that of the
    weights that it is merged into, or else of its base."""
    from qlass.optional import foreign

    if Path(base).is_dir() and foreign.is_adapter(base):
        from qlass.optional import lora

        merged = Path(base, lora.MERGED).exists()
        return start_of(Path(base).absolute().parent if merged else lora.base_of(base))
    return Path(base).absolute()


def learned_tasks(
    tasks: Iterable[tuple[str | None, str | None]], base: str | Path, env: Any
) -> dict[str, Any]:
    """The tasks of a training and those that its start has learned from, for the metadata: their
    ids (None: a record or a checkpoint does not tell them), and their first observations.

    tasks: (id, first observation; None: the id is this environment's own, and enough). base: a
    checkpoint, or a published model, which has learned from none.
    """
    tasks = list(tasks)
    ids: set[Any] = {task_id for task_id, _ in tasks}
    pages = [(task_id, page) for task_id, page in tasks if page is not None]
    begins = begins_of(pages, env.unique_tasks)
    meta = meta_of(start_of(base))
    if meta["recipe"].get("env") == env.settings["env"]:  # else its ids mean other tasks
        before = meta.get("tasks") if of_same_world(meta["recipe"], env) else None
        ids.update(before or [None])
        begins = [*begins, *meta["begins"]] if meta.get("begins") else []
    task_ids = None if None in ids else sorted(ids)
    return {"tasks": task_ids, "begins": sorted(set(begins))}


def leaks(env: Any, records: list[dict], sft: Path, qnet: Path) -> dict[str, int | None]:
    """How many of the played tasks the agent and QNet learned from (None: not known); warns of any.

    Results count that have tokens of the model. A task counts that was learned from under its id,
    or has the subject (a product) or the first observation of a learned one. Published splits
    overlap (WebShop's in 21 tasks), so this is no refusal.
    """
    begin = functools.cache(lambda task_id: begin_of(first_observation(env, task_id)))
    counts: dict[str, int | None] = {}
    sources = [
        ("demonstrations", sft, "generated"),
        ("trees", qnet, "scored"),
    ]
    for source, checkpoint, cost in sources:
        played = {record["task_id"] for record in records if record["tokens"].get(cost)}
        meta = meta_of(checkpoint.absolute())
        learned = meta.get("tasks") if of_same_world(meta["recipe"], env) else None
        begins = meta.get("begins") or []
        subjects = set(map(env.subject, learned or []))
        leaked = {task_id for task_id in played if env.subject(task_id) in subjects}
        if begins:
            for task_id in played - leaked:
                if begin(task_id) in begins:
                    leaked.add(task_id)
        unknown = played and learned is None and not begins
        counts[source] = None if unknown else len(leaked)
        if counts[source] != 0:
            number = counts[source] or "it is not known how many"
            facts = f"{number} of {len(played)} tasks played"
            warn(f"{facts} are also, or begin as one does, in the {source} of {checkpoint}")
    return counts
