"""ALFWorld's original engine behind the interface of engine.Game, for `--env-option engine=textworld`.

It needs the `alfworld` package (requirements-alfworld.txt; compiles C++). TextWorld can't copy its state, so a state
here is the path to it, and a step from any other state than the last one plays that path again (about 50 ms a step).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from qlass import UserError


def package() -> tuple[Any, Any, Any]:
    """textworld, alfworld's naming of objects, and the paths of the domain and the grammar that it ships."""
    before = os.environ.get("ALFWORLD_DATA")
    try:
        import textworld
        from alfworld import info
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        remedy = "pip install -r requirements-alfworld.txt, or leave out --env-option engine=textworld"
        raise UserError(f"the original engine of ALFWorld is not installed ({error}): {remedy}") from None
    if before is None:  # the package sets it to a cache folder of its own, which is not the user's choice
        os.environ.pop("ALFWORLD_DATA", None)
    return textworld, AlfredDemangler, info


def with_grammar(content: dict[str, Any]) -> dict[str, Any]:
    """A game file's content with the domain and the grammar that data/make_alfworld.py leaves out."""
    if content["pddl_domain"]:
        return content
    _, _, info = package()
    sentence = content["grammar"].split("Your task is to: ")[1].split('"')[0]
    grammar = Path(info.ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL.", sentence)
    return content | {"pddl_domain": Path(info.ALFRED_PDDL_PATH).read_text(), "grammar": grammar}


class TextWorldState(NamedTuple):
    actions: tuple[str, ...]  # the path from the start
    commands: tuple[str, ...]
    won: bool


class TextWorldGame:
    """One loaded game; `start`, `first` and `step` as in engine.Game."""

    def __init__(self, path: str | Path) -> None:
        textworld, demangler, _ = package()
        wanted = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "game.tw-pddl"
            file.write_text(json.dumps(with_grammar(json.loads(Path(path).read_text(encoding="utf-8")))))
            self.env = textworld.start(str(file), wanted, wrappers=[demangler])
            self.start, self.first = self._begin()

    def _begin(self) -> tuple[TextWorldState, str]:
        answer = self.env.reset()
        self.now = TextWorldState((), tuple(answer["admissible_commands"]), bool(answer["won"]))
        return self.now, answer["feedback"]

    def step(self, state: TextWorldState, command: str) -> tuple[TextWorldState, str]:
        if self.now.actions != state.actions:
            self._begin()
            for action in state.actions:
                self.env.step(action)
        answer, _, _ = self.env.step(command.strip())
        commands = tuple(answer["admissible_commands"])
        self.now = TextWorldState((*state.actions, command), commands, bool(answer["won"]))
        return self.now, answer["feedback"]
