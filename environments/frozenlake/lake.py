"""Gymnasium's FrozenLake by task id, and its exact Q*: the world in which every stage can be checked against the truth.

A cell is named by its row and its column, both from 0: 23 is row 2, column 3. A task is `[slippery-]MAP/REST`: on a
fixed map a start, `8x8/23`, on any ice from which the goal can be reached; on the fixed lakes, of which there are two
sets, as many starts as on all of a set, `lakes/7/23`; on random maps the seed of Gymnasium's `generate_random_map`,
`random8/17`, each map once.
"""

import functools
import itertools
import re

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map

from qlass import UserError

MOVES = ("left", "down", "right", "up")  # Gymnasium's actions 0, 1, 2, 3
LAYOUTS = ("8x8", "4x4", "lakes", "lakes2", "random4", "random8")
RANDOM_MAPS = 1000
# Fixed maps beside one another, each to be known by heart; no setting was chosen in view of the second set. The
# generator repeats itself: of the first set 3 is 2, 16 is 8 and 20 is 13, and lake 33 of the second is 2.
LAKES, LAKE_SIZE = {"lakes": range(24), "lakes2": range(24, 48)}, 4
KINDS = {"F": "ice", "S": "ice", "H": "a hole", "G": "the goal"}


@functools.lru_cache(maxsize=256)
def load(task_id: str) -> FrozenLakeEnv:
    """The lake of a task, shared, with `s` its start; UserError where the id names none."""
    match = re.fullmatch(r"(slippery-)?(?:(4x4|8x8|lakes/\d+)/(\d)(\d)|random([48])/(\d+))", task_id)
    if not match:
        raise UserError(
            f"frozenlake: unknown task {task_id!r}: write e.g. 8x8/23, slippery-4x4/00, lakes/7/23 or random8/17"
        )
    slippery, fixed, row, column, size, seed = match.groups()
    desc = fixed_map(fixed) if fixed else generate_random_map(int(size), seed=int(seed))
    lake = FrozenLakeEnv(desc=desc, is_slippery=bool(slippery))
    lake.s = int(row) * lake.ncol + int(column) if fixed else 0
    if fixed and (max(int(row), int(column)) >= lake.ncol or kind(lake, lake.s) != "ice"):
        raise UserError(f"frozenlake: task {task_id!r} does not start on ice: choose one of task_ids('all')")
    return lake


def fixed_map(name: str) -> list[str]:
    """Gymnasium's "4x4" or "8x8", or "lakes/7"; UserError where there is no such lake."""
    if name in MAPS:
        return MAPS[name]
    number, count = int(name.removeprefix("lakes/")), sum(map(len, LAKES.values()))
    if number >= count:
        raise UserError(f"frozenlake: no lake {number}: there are 0 to {count - 1}")
    return generate_random_map(LAKE_SIZE, seed=number)


@functools.cache
def tasks(layout: str) -> tuple[str, ...]:
    """All task ids of `[slippery-]MAP`, by map and cell."""
    name = layout.removeprefix("slippery-")
    if name.startswith("random"):
        maps: dict[tuple[str, ...], int] = {}  # small maps repeat: only the first seed of each is a task
        for seed in itertools.count():
            maps.setdefault(tuple(generate_random_map(int(name[-1]), seed=seed)), seed)
            if len(maps) == RANDOM_MAPS:
                return tuple(f"{layout}/{seed}" for seed in maps.values())
    task_ids = []
    for one in [f"lakes/{number}" for number in LAKES[name]] if name in LAKES else [name]:
        lake = FrozenLakeEnv(desc=fixed_map(one), is_slippery=False)
        starts = [name_of(lake, cell) for cell in np.flatnonzero(q_star(lake).max(1) > 0)]
        task_ids += [f"{layout.removesuffix(name)}{one}/{start}" for start in starts]
    return tuple(task_ids)


def name_of(lake: FrozenLakeEnv, cell: int) -> str:
    return f"{cell // lake.ncol}{cell % lake.ncol}"


def kind(lake: FrozenLakeEnv, cell: int) -> str:
    return KINDS[lake.desc.flat[cell].decode()]


def ahead(lake: FrozenLakeEnv, cell: int, move: str) -> str:
    """The neighbour of a cell: "ice", "a hole", "the goal" or "the edge"."""
    row, column = divmod(cell, lake.ncol)
    row, column = row + (move == "down") - (move == "up"), column + (move == "right") - (move == "left")
    inside = 0 <= row < lake.nrow and 0 <= column < lake.ncol
    return kind(lake, row * lake.ncol + column) if inside else "the edge"


@functools.lru_cache(maxsize=4096)
def q_star(lake: FrozenLakeEnv, gamma: float = 0.9, steps: int | None = None) -> np.ndarray:
    """The exact Q*(s, a), shape (cells, 4), by value iteration on Gymnasium's transition table.

    It is 0 where an episode has ended. Without slipping, d moves from the goal: max_a Q*(s, a) = gamma**(d - 1).
    steps: how many are left, None: any number.
    """
    cells = lake.desc.size
    reward, to = np.zeros((cells, 4)), np.zeros((cells, 4, cells))
    for state, action in itertools.product(range(cells), range(4)):
        for probability, successor, r, terminated in lake.P[state][action]:
            reward[state, action] += probability * r
            to[state, action, successor] += probability * (not terminated)
    q, previous = reward if steps != 0 else 0 * reward, None
    while (steps is None or steps > 1) and (previous is None or np.abs(q - previous).max() > 1e-12):
        q, previous = reward + gamma * to @ q.max(1), q
        steps = steps and steps - 1
    q.setflags(write=False)  # shared by all who ask
    return q
