"""ALFWorld's own class on our engine: a loop written for the `alfworld` package runs with the import changed.

It answers as alfworld 0.4.2 on TextWorld 1.7: in tuples; after a step with None for `infos["extra.gamefile"]`; a game
that is done repeats its last answer. `infos["extra.expert_plan"]` is left out: a DAgger loop misses the key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import make_alfworld
from environments import writable
from environments.alfworld import games
from qlass import UserError

PATHS = {"train": "data", "eval_in_distribution": "eval_id_data", "eval_out_of_distribution": "eval_ood_data"}
TASK_TYPES = {1: "pick_and_place_simple", 2: "look_at_obj_in_light", 3: "pick_clean_then_place_in_recep"}
TASK_TYPES |= {4: "pick_heat_then_place_in_recep", 5: "pick_cool_then_place_in_recep", 6: "pick_two_obj_and_place"}


class AlfredTWEnv:
    """A split's solvable games of the config's task types, as the folder lists them: `game_files`, before `init_env`.

    config: alfworld's base_config.yaml as a dictionary. Without the variable ALFWORLD_DATA, a path that names it leads
    to the bundled generator's games.
    """

    def __init__(self, config: dict[str, Any], train_eval: str = "train") -> None:
        if train_eval == "train" and config["env"].get("domain_randomization"):
            raise UserError("alfworld: domain_randomization is not supported")
        self.config, self.train_eval, settings = config, train_eval, config["dataset"]
        wanted = [TASK_TYPES[number] for number in config["env"]["task_types"]]
        root, self.game_files = settings[f"{PATHS[train_eval]}_path"], []
        if "ALFWORLD_DATA" not in os.environ and "$ALFWORLD_DATA" in root:
            root = root.replace("$ALFWORLD_DATA", str(make_alfworld.ensure(0, writable(make_alfworld.GENERATED))))
        for folder, _, files in os.walk(os.path.expandvars(root), topdown=False):  # the original's order
            task, path = Path(folder).parent.name, os.path.join(folder, "game.tw-pddl")
            if "game.tw-pddl" not in files or "movable" in task or "Sliced" in task or task.split("-")[0] not in wanted:
                continue
            if (problem := games.problem(path)) is None:
                self.game_files.append(path)
            elif problem != games.UNSOLVABLE:
                raise UserError(f"alfworld: {path} {problem}")
        if not self.game_files:
            raise UserError(f"alfworld: {os.path.expandvars(root)}: no games of the types {', '.join(wanted)}")
        limit = settings["num_train_games" if train_eval == "train" else "num_eval_games"]
        self.game_files = self.game_files[:limit] if limit > 0 else self.game_files
        self.num_games = len(self.game_files)

    def init_env(self, batch_size: int) -> BatchEnv:
        section = {"dqn": "rl", "dagger": "dagger"}[self.config["general"]["training_method"]]
        return BatchEnv(self.game_files, batch_size, self.config[section]["training"]["max_nb_steps_per_episode"])


class BatchEnv:
    """Games side by side; what it returns has an entry for each of them. max_steps: 0 for no limit."""

    def __init__(self, game_files: Sequence[str], batch_size: int, max_steps: int) -> None:
        self.gamefiles, self.batch_size, self.max_steps = game_files, batch_size, max_steps
        self.last: list[tuple[str, int, bool]] = []
        self.seed(1234)

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.rng, self.order, self.number = np.random.RandomState(seed), list(self.gamefiles), 0
        return [seed]

    def next_game(self) -> str:
        """All games in one order, then in another, without end."""
        place = self.number % len(self.order)
        if place == 0:
            self.rng.shuffle(self.order)
        self.number += 1
        return self.order[place]

    def skip(self, nb_games: int = 1) -> None:
        for _ in range(nb_games):
            self.next_game()

    def reset(self) -> tuple[tuple[str, ...], dict[str, list]]:
        paths = [self.next_game() for _ in range(self.batch_size)]
        self.games, self.steps = [games.load(path) for path in paths], 0
        self.states = [game.start for game in self.games]
        self.last = [(game.first, 0, False) for game in self.games]
        return tuple(game.first for game in self.games), self.infos(paths)

    def step(self, commands: Sequence[str]) -> tuple[tuple, tuple, tuple, dict[str, list]]:
        """Observations, scores (1: won), dones (won, or out of steps) and infos."""
        self.steps += 1
        for i, (game, command) in enumerate(zip(self.games, commands, strict=True)):
            if not self.last[i][2]:
                self.states[i], text = game.step(self.states[i], command)
                won = self.states[i].won
                out_of_steps = 0 < self.max_steps <= self.steps
                self.last[i] = (text, int(won), won or out_of_steps)
        return *zip(*self.last, strict=True), self.infos([None] * self.batch_size)

    def infos(self, paths: list) -> dict[str, list]:
        commands = [sorted(state.commands) for state in self.states]
        return {"won": [s.won for s in self.states], "admissible_commands": commands, "extra.gamefile": paths}

    def close(self) -> None:
        """Nothing is open."""


def get_environment(env_type: str) -> type:
    return {"AlfredTWEnv": AlfredTWEnv}[env_type]
