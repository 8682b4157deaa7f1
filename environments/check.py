"""Check the rules of docs/environment.md in a class of your own, in a second process too, and compare its splits.

python -m environments.check MODULE:CLASS --env-option NAME=VALUE
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time

from tyro.conf import Positional, UseAppendAction

import envs
from environments.guard import Fault, build, options_of
from environments.rules import STEPS, Player, check, splits_of
from qlass.config import parse, run_stage
from qlass.files import warn

SECONDS = 5  # for the first pages of a split
PLAYED = 3  # tasks of a split whose next pages are read too
SECOND = "import sys; from environments import check; check.print_pages(*sys.argv[1:])"  # what a second process does
SAME = "every process gives the same: sort what comes from a set"

Pages = dict[str, dict[str, list[dict]]]  # {split: {task id: pages}}; none of tasks for which there was no time


def load(name: str, options: list[str]) -> envs.TextEnv:
    """The environment, which is not checked yet. options: NAME=VALUE."""
    kind = envs.environment_class(name)
    return build(name, kind, options_of(kind, options)[1])


def pages_of(env: envs.TextEnv) -> Pages:
    """What tasks show first, and what the first of them show behind the expert's actions."""
    pages: Pages = {}
    for split in splits_of(env):
        pages[split] = {task_id: [] for task_id in env.task_ids(split)}
        end = time.monotonic() + SECONDS
        for number, (task_id, shown) in enumerate(pages[split].items()):
            if time.monotonic() > end:
                break
            player = Player(env, task_id)
            groups = {"type": env.task_type(task_id), "subject": env.subject(task_id), "block": env.block(task_id)}
            shown.append({"instruction": player.env.instruction, **player.first, **groups})
            for action in itertools.islice(player.actions(), STEPS if number < PLAYED else 0):
                shown.append(player.step(action))
                if shown[-1]["done"]:
                    break
            player.env.close()
    return pages


def compare_splits(name: str, pages: Pages) -> None:
    """Tell of tasks of two splits that begin alike: they may be the same, under other ids."""

    def text(page: dict) -> str:
        return json.dumps([page["instruction"], page["task"], page["observation"]])

    first = {split: {t: text(shown[0]) for t, shown in tasks.items() if shown} for split, tasks in pages.items()}
    for one, other in itertools.combinations(first, 2):
        twins = {page: task for task, page in first[one].items()}
        alike = [(task, twins[page]) for task, page in first[other].items() if twins.get(page, task) != task]
        if alike:
            task, twin = alike[0]
            warn(f"{name}: task {task!r} of {other} begins as {twin!r} of {one} does ({len(alike)} in all)")


def print_pages(name: str, *options: str) -> None:
    print(json.dumps(pages_of(load(name, [*options]))))


def compare_processes(name: str, pages: Pages, arguments: list[str]) -> None:
    """Refuse what differs in a process in which sets have another order, since texts have other hashes there."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    surroundings = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SECOND, *arguments]
    answer = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    if answer.returncode:
        warn(f"{name} can't be asked again in a second process: {answer.stderr.strip().splitlines()[-1]}")
        return
    there = json.loads(answer.stdout.splitlines()[-1])
    for split, tasks in pages.items():
        if list(tasks) != list(there[split]):
            raise Fault(f"{name}: {split} has other tasks in a second process, or in another order; the rule: {SAME}")
        for task_id, shown in tasks.items():
            for here, again in zip(shown, there[split][task_id], strict=False):
                if other := [field for field in here if here[field] != again[field]]:
                    raise Fault(f"{name}: task {task_id}: other {other[0]} in a second process; the rule: {SAME}")
    print(f"{name}: {SAME}")


@dataclasses.dataclass(frozen=True)
class Config:
    env: Positional[str] = ""  # MODULE:CLASS
    env_option: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, of the environment
    debug: bool = False  # show the traceback of an error


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, argv, doc=__doc__)
    env = load(config.env, list(config.env_option))
    for text in check(env):
        print(f"{env.name}: {text}")
    pages = pages_of(env)
    compare_splits(env.name, pages)
    compare_processes(env.name, pages, [config.env, *config.env_option])


if __name__ == "__main__":
    run_stage(main)
