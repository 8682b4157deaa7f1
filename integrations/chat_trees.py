"""Exploration trees that a chat model grows, so that a QNet of one's own can learn to guide it.

    python -m integrations.chat_trees --env webshop --run RUN --model NAME --limit 100 --rollouts 8
    python bellman.py --run RUN
    python train_qnet.py --run RUN --sft BACKBONE    # any causal LM with a chat template
    python -m integrations.chat_agent --run RUN --model NAME -M 4

    reads   $OPENAI_API_KEY, $OPENAI_BASE_URL
    writes  RUN/trees.jsonl, as build_trees.py does

Each rollout costs as many answers as it has steps. The tasks are the first ones of training, and the environment's
expert plays the branch of each; with --expert they are those of a file of demonstrations, which are these branches.
"""

import dataclasses
import math
from operator import itemgetter
from typing import Any, ClassVar

from tyro.conf import Fixed

import build_trees
import envs
from build_trees import Explorer, grow
from integrations.chat_agent import ChatModel, Chatting
from qlass import demonstrations
from qlass.batching import Sample, drive
from qlass.outputs import Inputs, Output
from qlass.settings import read, run_stage, runtime
from qlass.trees import tree_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Chatting, build_trees.Config):
    """build_trees.py's settings, with bounds that an API's bill bears."""

    stage: ClassVar[str] = "chat_trees"  # no preset has settings for it

    tasks: Fixed[str] = "new"
    rollouts: int = 8  # at most, per tree (0: no bound)
    limit: int = runtime(100)  # number of tasks (0: all)


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    env = envs.from_config(config)
    agent = ChatModel(config, env)
    config = dataclasses.replace(config, model=agent.version())
    tasks = env.task_ids("train")
    known: Any = {}
    if config.expert:
        _, known = demonstrations.by_task(config.expert, config.expert, env)
        tasks = [task for task in tasks if task in known]
    tasks = tasks[: config.limit or None]
    known = None if config.no_expert else known

    inputs: Inputs = {"expert": config.expert}
    path = config.out or config.run / "trees.jsonl"
    trees = Output(path, config, config.recipe() | env.settings, inputs, itemgetter("task_id"))
    todo = trees.todo(tasks)
    depth = env.tree_depth if config.depth is None else config.depth
    limits = depth, config.width, config.rollouts or math.inf, config.steps or env.tree_steps, config.prune
    explorers = (Explorer(env.fork(), task, agent.rendering, *limits) for task in todo)
    growing = (grow(explorer, known) for explorer in explorers)
    groups = drive(growing, {Sample: agent.sample}, config.in_flight or env.side_by_side)
    trees.write(groups, "trees", len(todo))
    counts = tree_metrics(trees.records)
    trees.finish(tasks, tasks=list(trees.groups), **counts)
    print(f"{path}: {counts}")
    agent.warn()


if __name__ == "__main__":
    run_stage(main)
