"""Demonstrations on WebShop by people who err, to be cloned by sft.py --expert.

    python -m experiments.demonstrators --run RUN --kind halves --out RUN/halves.jsonl
    python -m experiments.demonstrators --run RUN --kind halves --best 400 --out RUN/halves-best.jsonl
    python -m experiments.demonstrators --run RUN --kind noisy --episodes RUN/results-train.jsonl --out RUN/noisy.jsonl
    python -m experiments.demonstrators --run RUN --trees RUN/trees.jsonl --out RUN/branches.jsonl

    halves   half of them, the careful, find the product as the expert does, and choose no options; half, the careless,
             take the first product and choose its options; one in seven to ten is right in both, by luck
    careful, careless    one half alone
    mixed    the expert's or, in 63 %, by one who searches, takes the first product and buys it without options
    noisy    an agent's episodes on these tasks, as q_search.py --split train --method sample has played them

Trees that hold such demonstrations have better branches: --trees takes the best of each, whoever made it.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import envs
from environments.webshop.expert import named_options, read
from experiments.self_train import branch_to
from qlass import UserError
from qlass.demonstrations import demonstrate
from qlass.environment import Player, TextEnv
from qlass.files import Inputs, read_jsonl
from qlass.noise import uniforms
from qlass.outputs import begin, publish
from qlass.settings import NonNegativeInt, PositiveInt, Run, place, read_settings, run_stage
from qlass.trees import read_trees

CARELESS = {"halves": 0.5, "careful": 0.0, "careless": 1.0, "mixed": 0.63}  # the share who take the first product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    stage: ClassVar = "demonstrators"

    out: Path = place(Path("demonstrations.jsonl"))  # a file in expert.jsonl's layout
    kind: Literal["halves", "careful", "careless", "mixed", "noisy"] = "halves"
    limit: PositiveInt = 1000  # number of tasks
    split: str = "train"  # of these tasks
    best: NonNegativeInt = 0  # the best paid of them alone (0: all)
    episodes: Path | None = place(None)  # of noisy: a results.jsonl
    trees: Path | None = place(None)  # the best branch of each tree, in the place of demonstrations


def without_options(env: TextEnv, moves: Player) -> Player:
    for thought, action in moves:
        if action not in named_options(env):
            yield thought, action


def demonstrator(env: TextEnv, task_id: str, config: Config) -> Player:
    """The moves of the demonstrator whom chance gives to a task."""
    (luck,) = uniforms(1, config.seed, config.kind, task_id)
    careless = luck < CARELESS[config.kind]
    moves = env.rules()["first result"]() if careless else read(env)
    leaves_out = careless if config.kind == "mixed" else not careless
    return without_options(env, moves) if leaves_out else moves


def best_branch(tree: list[dict]) -> dict:
    """The branch of the highest reward, of equals the shortest, and of these the demonstrator's."""
    ends = [node for node in tree if node["done"]]
    return branch_to(tree, max(ends, key=lambda node: (node["reward"], -node["depth"], node["expert"])))


def lines_of(env: TextEnv, config: Config) -> Iterator[dict]:
    """A line of expert.jsonl for each task."""
    if config.trees:
        yield from map(best_branch, read_trees(config.trees))
        return
    tasks = env.task_ids(config.split)[: config.limit]
    if config.kind == "noisy":
        if config.episodes is None:
            raise UserError("--kind noisy: --episodes names results of q_search.py --split train --method sample")
        episodes = [line for line in read_jsonl(config.episodes) if line["task_id"] in tasks]
        if not episodes or len(episodes) > len({line["task_id"] for line in episodes}):
            expected = f"an episode of each of the first {len(tasks)} training tasks is expected"
            raise UserError(f"{config.episodes}: {expected}, by one method")
        played = {line["task_id"]: [step["action"] for step in line["steps"]] for line in episodes}
        yield from (demonstrate(env, task_id, played[task_id]) for task_id in tasks if task_id in played)
        return
    env.expert = lambda task_id: demonstrator(env, task_id, config)
    yield from (demonstrate(env, task_id) for task_id in tasks)


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    if env.name != "webshop":
        raise UserError(f"--env {config.env}: these demonstrators go shopping")
    inputs: Inputs = {"episodes": config.episodes, "trees": config.trees}
    lines = list(lines_of(env, config))
    if config.best:
        lines = sorted(lines, key=lambda line: -line["reward"])[: config.best]
    mean = sum(line["reward"] for line in lines) / len(lines)
    meta = begin(config.out, config, config.recipe() | env.settings, inputs)
    publish(config.out, lines, meta | {"demonstrations": len(lines), "mean_reward": mean})
    print(f"{config.out}: {len(lines)} demonstrations, mean reward {mean:.3f}")


if __name__ == "__main__":
    run_stage(main)
