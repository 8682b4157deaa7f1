"""ScienceWorld's tasks: 30 names, some hundred variations each, in splits.

task_ids       split -> ids "SPLIT/NAME/VARIATION"
published_ids  the same of ETO's files of indices
find_task      the Task of an id
eto_steps      the step limit that ETO grants it
"""

import functools
import hashlib
import itertools
import random
import re
from pathlib import Path

from environments.protocols import published_splits
from qlass import UserError

from .simulator import Task, simulators

# The place of a task is its number in the ids of ETO's trajectories, NUMBER_VARIATION (its data/sciworld/
# taskname2id.json, which has no 5); beside it the steps that ETO grants (max_steps.json), which leaves six tasks out.
TASKS = """
boil=100 change-the-state-of-matter-of=80 freeze=80 melt=80 measure-melting-point-known-substance=120 =0
use-thermometer=30 power-component=20 power-component-renewable-vs-nonrenewable-energy=30 test-conductivity=30
test-conductivity-of-unknown-substances=30 find-animal=15 find-living-thing=15 find-non-living-thing=15 find-plant=15
grow-fruit=60 grow-plant=30 chemistry-mix=60 chemistry-mix-paint-secondary-color=15
chemistry-mix-paint-tertiary-color=30 lifespan-longest-lived=10 lifespan-longest-lived-then-shortest-lived=12
lifespan-shortest-lived=10 identify-life-stages-1=30 identify-life-stages-2=30 inclined-plane-determine-angle=0
inclined-plane-friction-named-surfaces=0 inclined-plane-friction-unnamed-surfaces=0 mendelian-genetics-known-plant=0
mendelian-genetics-unknown-plant=0"""
ETO_TASKS = [task.split("=") for task in TASKS.split()]
ETO_STEPS = {name: int(steps) for name, steps in ETO_TASKS if steps != "0"}

# Variations of a task in each split, at most; ten to test with is ETO's number.
MOST = {"train": 60, "val": 10, "test_seen": 10, "test_unseen": 10}
USED = (0, 2, 4)  # the places of those in each test split that were played while settings were chosen


def eto_steps(task: Task) -> int:
    """ETO's step limit; for the six tasks that ETO omits, its largest one."""
    return ETO_STEPS.get(task.name, max(ETO_STEPS.values()))


def task_name(name: str) -> str:
    """The name since version 1.1 of the package: "task-2a-test-conductivity" is "test-conductivity" now, as in ETO's
    files, "task-9-mendellian-genetics-(known-plant)" is "mendelian-genetics-known-plant"."""
    return re.sub(r"^task-\w+?-|[()]", "", name.strip().lower()).replace("mendellian", "mendelian")


def published_id(theirs: str) -> str | None:
    """Our task id of ETO's "13_21", variation 21 of find-non-living-thing; None for what is no such id."""
    match = re.fullmatch(r"(\d+)_(\d+)", theirs)
    name = ETO_TASKS[int(match[1])][0] if match and int(match[1]) < len(ETO_TASKS) else ""
    return id_of(name, int(match[2])) if name else None


def id_of(name: str, variation: int) -> str:
    number = simulators().variations.get(name, 0)
    if variation not in range(number):
        raise UserError(f"sciworld: the package has no {name} {variation}; of this task it has {number} variations")
    return f"{split_of(name, variation, number)}/{name}/{variation}"


def split_of(name: str, variation: int, variations: int) -> str:
    """The package's splits, by quarters of a task's variations: two for training, the third ("dev"; ETO: test seen),
    the rest ("test"; ETO: test unseen). A tenth of the training variations is held out by hash, as "val"."""
    quarter = max(1, variations // 4)
    if variation >= 3 * quarter:
        return "test_unseen"
    if variation >= 2 * quarter:
        return "test_seen"
    return "val" if hashlib.blake2b(f"{name}/{variation}".encode()).digest()[0] < 26 else "train"


@functools.cache
def task_ids(which: str = "all") -> dict[str, list[str]]:
    """Split -> task ids `split/name/variation` of "all" tasks, or of ETO's ("eto").

    A split has at most MOST variations of a task, so that no task outweighs the others: a third of all variations are
    about conductivity. USED variations are in neither test split.
    """
    counts = simulators().variations
    names = {"all": counts, "eto": ETO_STEPS}.get(which)
    if names is None:
        raise UserError(f"sciworld: tasks {which}: all or eto is expected")
    ids: dict[str, list[str]] = {split: [] for split in MOST}
    for name in names:
        for split, most in MOST.items():
            members = [v for v in range(counts[name]) if split_of(name, v, counts[name]) == split]
            if split.startswith("test"):
                members = [v for i, v in enumerate(members) if i not in USED]
            if len(members) > most:
                members = random.Random(f"{split}/{name}").sample(members, most)
            ids[split] += [f"{split}/{name}/{v}" for v in members]
    return ids | {"test": ids["test_unseen"], "all": [task_id for split in MOST for task_id in ids[split]]}


ETO_SPLITS = {"dev": "test_seen", "test": "test_unseen"}  # by ETO's names of its files


def published_ids(published: str | Path) -> dict[str, list[str]]:
    """Split -> task ids, from a folder of NAME_indices.json, each a list of [task, variation].

    An id begins with the package's split even so: some of ETO's training tasks are of the package's dev split.
    """
    ids: dict[str, list[str]] = {}
    for name, (file, pairs) in published_splits(published).items():
        members = {}
        try:
            for task, variation in pairs:
                members[id_of(task_name(task), variation)] = None  # each once
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{file}: a JSON list of [task, variation] is expected ({error})") from None
        ids[ETO_SPLITS.get(name, name)] = list(members)
    everything = dict.fromkeys(itertools.chain(*ids.values()))
    return {"test": ids.get("test_unseen", [])} | ids | {"all": list(everything)}


def find_task(task_id: str) -> Task:
    """Task of an id; its name may be the one that older versions of the package used."""
    match = re.fullmatch(r"\w+/(.+)/(\d+)", task_id)
    if not match:
        raise UserError(f"sciworld: unknown task {task_id!r}: write SPLIT/NAME/VARIATION, e.g. test_unseen/boil/21")
    task = Task(task_name(match[1]), int(match[2]))
    right = id_of(*task)
    if task_id.split("/")[0] != right.split("/")[0]:
        raise UserError(f"sciworld: unknown task {task_id!r}: write {right}")
    return task
