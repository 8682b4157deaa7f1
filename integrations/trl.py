"""An environment for TRL's GRPOTrainer: the model calls the function `act`, and the environment pays.

    GRPOTrainer(model, args=GRPOConfig(...), train_dataset=Dataset.from_list(prompts("webshop")),
                environment_factory=games("webshop"))

The model's chat template must know tool calls, and `max_completion_length` is for a whole episode.
"""

from collections.abc import Callable
from typing import Any

import envs
from qlass.messages import State, first_state, parse_action, react

HINT = "\n\nTake an action by calling the function act with it, one at a time.\n\n"


class TextGame:
    """A player, of one episode after another. TRL offers the model each public method but reset and get_reward."""

    state: State  # the dialogue as QNet reads it, of the actions alone

    def __init__(self, env: envs.TextEnv) -> None:
        self.env, self.info, self.over, self.reward = env, {}, True, 0.0

    def reset(self, task_id: str | None, seed: int | None = None, **row: Any) -> str:
        """The first observation of a row's task, which TRL adds to the prompt. None: of any task."""
        options = None if task_id is None else {"task_id": task_id}
        observation, self.info = self.env.reset(seed=seed, options=options)
        self.state = first_state(self.env, observation, self.info)
        self.over = False
        self.reward = 0.0
        return observation

    def act(self, action: str) -> str:
        """
        Take an action and see what it leads to.

        Args:
            action: The action, in a form that the instruction names.

        Returns:
            The observation that follows.
        """
        if self.over:
            raise ValueError("the episode is over" if self.info else "no episode has begun: reset comes first")
        action = parse_action(action)
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.state = self.state.extended(react("", action), self.env.message(observation))
        self.over = terminated or truncated
        self.reward = float(reward)
        return observation

    def get_reward(self) -> float:
        """The outcome in [0, 1]; of an episode that the trainer cut, what the environment pays there."""
        return self.reward if self.over else self.env.reward_if_cut()


def games(name: str, **options: Any) -> Callable[[], TextGame]:
    """An `environment_factory`, whose games have a player each; options: those of the environment's class."""
    world = envs.make(name, **options)
    return lambda: TextGame(world.fork() if world.side_by_side > 1 else envs.make(name, **options))


def prompts(name: str, split: str = "train", limit: int | None = None, **options: Any) -> list[dict[str, Any]]:
    """Rows of a dataset: a task's id, and the instruction that stands before its first observation."""
    env = envs.make(name, **options)
    rows = []
    for task_id in env.task_ids(split)[:limit]:
        env.reset(options={"task_id": task_id})  # its instruction may depend on the task
        rows.append({"prompt": [{"role": "user", "content": env.instruction + HINT}], "task_id": task_id})
    return rows
