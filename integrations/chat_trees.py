"""Exploration trees that a chat model grows, so that a QNet of one's own can learn to guide it.

    python -m integrations.chat_trees --env webshop --run RUN --model NAME --limit 100 --rollouts 8
    python bellman.py --run RUN
    python train_qnet.py --run RUN --sft BACKBONE    # any causal LM with a chat template
    python -m integrations.chat_agent --run RUN --model NAME -M 4

    reads   $OPENAI_API_KEY, $OPENAI_BASE_URL
    writes  RUN/trees.jsonl, as build_trees.py does; its metadata have the sum of the
            answers' tokens, those of all commands
            RUN/answers.trees.jsonl: each answer as it comes, and none is asked for again

Each rollout costs as many answers as it has steps. The tasks are the last ones of training, and the environment's
expert plays the branch of each, unless --expert names demonstrations (--tasks cloned: those of this file).
"""

import dataclasses
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

import build_trees
import envs
from integrations.chat_agent import ChatModel, Chatting
from qlass import demonstrations
from qlass.files import meta_path, read_json, write_json
from qlass.settings import read_settings, run_stage, workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Chatting, build_trees.Config):
    """build_trees.py's settings, with bounds that an API's bill bears."""

    stage: ClassVar = "chat_trees"  # no preset has settings for it

    tasks: Literal["cloned", "new"] = "new"  # cloned: those of --expert
    width: PositiveInt = 3  # W
    rollouts: NonNegativeInt = 8  # at most, per tree (0: no bound)
    prune: Literal["branch", "tail"] = "branch"  # tail: a branch without reward queues 2 nodes
    limit: NonNegativeInt = workload(100)  # number of tasks (0: all)


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    agent = ChatModel(config, env, "trees.jsonl")
    config = dataclasses.replace(config, model=agent.version() or config.model)
    expert, by_task = config.expert, {}
    if expert:
        _, by_task = demonstrations.by_task(expert, expert, env)
    try:
        build_trees.build(config, env, lambda: agent, by_task, {"expert": expert})
    finally:
        agent.report()
    if agent.output.exists():  # its answers may be of several processes
        meta, usage = meta_path(agent.output), ChatModel(config, env, "trees.jsonl").usage
        write_json(meta, read_json(meta) | {"usage": usage})


if __name__ == "__main__":
    run_stage(main)
