"""What may stand in one row of the table: results of one agent and one QNet or, over seeds, of one way to make them.

The metadata beside a result file hold the hashes of agent and QNet, and their own say how they came about.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlass import UserError
from qlass.chat import RENDERED
from qlass.files import FREE, SAMPLING_FREE, TRAINING_FREE, input_of, is_text, read_meta

if TYPE_CHECKING:
    from reporting.results import Condition, Group

INPUTS = ("sft", "qnet", "labels", "trees", "expert")  # arguments that name what an earlier stage made
# Arguments that may differ between the seeds of a pipeline: names, places, speed.
ANY = (*FREE, *SAMPLING_FREE, *TRAINING_FREE, "seed", "help_more", "chat")
OF_A_LINE = ("method", "M", "N", "select", "split", "limit", "label", "scorer")  # of results: each line says its own
OF_AN_AGENT = (*RENDERED, "load_in", "readout", "paraphrase", "paraphrase_server")


def check_pools(groups: Iterable[Group]) -> None:
    """UserError names two files whose results stand in one row and are not of the same agent, QNet or environment."""
    unknown: set[Path] = set()
    of_one: dict[tuple[Path, Path], str] = {}  # files of two seeds, but of one training
    for group in groups:
        seeds: dict[Path, set[int]] = {}
        for (_, seed), result in group.results.items():
            seeds.setdefault(result.where[0], set()).add(seed)
        if len(seeds) > 1:
            unknown |= {path for path in seeds if "arguments" not in read_meta(path)}
        for a, b in combinations((path for path in seeds if path not in unknown), 2):
            used, same_seed = inputs_of(group.condition), bool(seeds[a] & seeds[b])
            if used and not same_seed and all(equal_inputs(a, b, name) for name in used):
                of_one.setdefault((a, b), group.condition.name)
            if mistake := next(differences(a, b, used, same_seed), None):
                raise UserError(
                    f"{a} and {b}: {group.condition.name} with {mistake}, which is not one row: name the runs apart: "
                    'python report.py "first=PATH" "second=PATH"'
                )
    for (a, b), name in of_one.items():
        said = "two --seed, so not two trainings, as the intervals take them for"
        print(f"warning: {a} and {b}: {name} is of one model under {said}", file=sys.stderr)
    for path in sorted(unknown):
        said = "no metadata beside it, so nothing tells whether its agent and QNet are those of the other files"
        print(f"warning: {path}: {said}", file=sys.stderr)


def inputs_of(condition: Condition) -> tuple[str, ...]:
    """Whose results they are: of nobody's training (the environment's own players), of the agent, of QNet too."""
    if condition.method in ("rule", "expert", "oracle"):
        return ()
    scored = condition.method in ("qlass", "oracle_lookahead") or (condition.select == "q" and (condition.N or 1) > 1)
    return ("sft", "qnet") if scored else ("sft",)


def differences(a: Path, b: Path, used: tuple[str, ...], same_seed: bool) -> Iterator[str]:
    """In what two result files differ that one row must not."""
    ours, theirs = read_meta(a), read_meta(b)
    for name in used if same_seed else ():
        if equal_inputs(a, b, name) is False:
            yield f"different --{name} ({ours['arguments'][name]}, {theirs['arguments'][name]}) of one seed"
    without = (*OF_A_LINE, *(name for name in INPUTS if name not in used), *(() if used else OF_AN_AGENT))
    yield from differing(recipe(a, without), recipe(b, without))


def equal_inputs(a: Path, b: Path, name: str) -> bool | None:
    """Whether two result files are of one agent (name "sft") or QNet ("qnet"); None: not known."""
    one, other = (meta.get("inputs", {}).get(str(meta["arguments"].get(name))) for meta in map(read_meta, (a, b)))
    return None if one is None or other is None else one == other


def recipe(output: Path, without: tuple[str, ...] = (), stages: int = 5) -> dict[str, Any]:
    """The arguments that an output was made with, those of its inputs within them."""
    arguments, made = read_meta(output).get("arguments", {}), {}
    for name, value in arguments.items():
        if name in INPUTS and name not in without and is_text(value):
            path = input_of(output, name)
            made[name] = recipe(path, stages=stages - 1) if path and stages else {}
        elif name not in (*ANY, *INPUTS, *without):
            made[name] = value
    if "sft" in made.get("expert", {}):  # an agent's own trajectories: their number is a result
        made.pop("n_expert", None)
    return made


def differing(ours: dict[str, Any], theirs: dict[str, Any], of: str = "") -> Iterator[str]:
    for name in ours.keys() & theirs.keys():  # a flag may be newer than a file
        a, b = ours[name], theirs[name]
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differing(a, b, f" of {name}{of}")
        elif a != b:
            yield f"different --{name.replace('_', '-')}{of} ({a}, {b})"
