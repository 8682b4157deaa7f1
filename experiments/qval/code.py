"""Scores that are written by hand, a few lines per environment, and your own from a file.

A FILE.py of --code holds signal_function(state, action, next_state) -> float, like QVAL's generated functions. A
function of two parameters does without the next state; one of a single parameter gets the next state alone. The file is
run unchanged: read it first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from qlass import UserError
from qlass.chat import State, parse_action
from qlass.records import read_text
from qlass.tiny import task_words

Signal = Callable[[str, str, str], float]


def lake(state: State, action: str) -> float:
    """FrozenLake: minus the Manhattan distance to the goal after the move; a hole is the end, the edge a lost turn."""
    text = "\n".join(content for role, content in state.messages if role == "user")
    rows = [row.replace(" ", "") for row in re.findall(r"^(?:[FHG] ?){4,8}$", text, re.MULTILINE)]
    side = len(rows[-1])
    grid = rows[-side:]
    row, column = (int(digit) for digit in re.findall(r"cell (\d)(\d)", text)[-1])
    down, right = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}.get(parse_action(action), (0, 0))
    row, column = (min(max(x, 0), side - 1) for x in (row + down, column + right))
    distances = [abs(r - row) + abs(c - column) for r in range(side) for c in range(side) if grid[r][c] == "G"]
    return -float(min(distances)) - 100.0 * (grid[row][column] == "H")


def household(state: State, action: str) -> float:
    """ALFWorld: the subgoals in their order (find, take, treat, place), from the task and the player's own steps."""
    words = set(re.findall(r"[a-z]+", re.sub(r"\bhot\b", "heat", state.task).lower()))
    steps = [parse_action(content) for role, content in state.messages[3:] if role == "assistant"]

    def wanted(name: str) -> bool:
        return name.rsplit(" ", 1)[0] in words

    carried, treated = "", False
    for step in steps:
        if taken := re.match(r"take (\w+ \d+) from", step):
            carried, treated = taken[1], False
        elif step.startswith(("put ", "move ")):
            carried = ""
        treated = treated or step.startswith(("clean ", "heat ", "cool "))
    treatment = next((verb for verb in ("clean", "heat", "cool") if verb in words), "")
    tool = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}.get(treatment, "")
    untreated = treatment and not treated
    ready = carried and wanted(carried) and not untreated
    command = parse_action(action)
    verb, _, rest = command.partition(" ")
    place = rest.removeprefix("to ")
    if verb == "take":
        return 5.0 if not carried and wanted(rest.split(" from ")[0]) else -1.0
    if verb == treatment and carried and untreated:
        return 6.0
    if verb in ("put", "move"):
        return 7.0 if ready and wanted(re.split(r" (?:in/on|to) ", rest)[-1]) else -2.0
    if verb == "use":
        return 7.0 if ready and wanted(rest) else -1.0
    if verb == "open":
        return 2.0 if command not in steps else -1.0
    if verb == "go" and carried:
        return 4.0 if (place.startswith(tool) if untreated else wanted(place)) else -0.5
    if verb == "go":
        return 1.0 if command not in steps and place in state.messages[2][1] else 0.0
    return -1.0


def overlap(state: State, action: str) -> float:
    """How many of the task's words stand in the action and its thought, and as a tie-break how dense they stand."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", action.lower())
    shared = set(words) & task_words(state.task)
    return len(shared) + len(shared) / (1 + len(words))


def untried(state: State, action: str) -> float:
    """Minus how often the action was taken already where the same was seen."""
    *past, now = [content for _, content in state.messages[2:]]
    turns = zip(past[::2], past[1::2], strict=True)
    return -float(sum(seen == now and parse_action(step) == parse_action(action) for seen, step in turns))


WRITTEN = {"frozenlake": lake, "alfworld": household, "webshop": overlap, "sciworld": overlap}


def text_of(state: State) -> str:
    return "\n\n".join(content for _, content in state.messages)


def load(path: Path) -> Signal:
    return compiled(read_text(path), str(path))


def compiled(source: str, name: str = "signal_function") -> Signal:
    """The signal_function of a source text, with three parameters whatever it was written with."""
    scope: dict = {}
    try:
        exec(compile(source, name, "exec"), scope)
        function = scope["signal_function"]
        n = len(inspect.signature(function).parameters)
    except Exception as error:
        raise UserError(f"{name}: holds no signal_function that can be called ({error!r})") from None
    return lambda state, action, after: float(function(*((after,) if n == 1 else (state, action, after)[:n])))
