"""QNet's values in other trainers: Q of each of the agent's turns, as a reward of that turn or of the episode.

    q, gains = turn_values(scorer(QNet.from_pretrained(Path("runs/demo/qnet"))), messages, task)

Gains sum to the last Q. A mean over turns, also that of `episode_reward`, depends on when the agent chooses to stop
(docs/tools.md).

Messages are as QNet learned them: instruction, "OK", the first observation, then actions and observations in turns. The
tiny model also reads `task`, the task's sentence; others need none.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from qlass import UserError
from qlass.batching import Score
from qlass.messages import State


def turn_values(qnet: Any, messages: list, task: str = "") -> tuple[list[float], list[float]]:
    """Q(s, a) of each action, and its gain over the action before. The gains sum to the last Q."""
    chat = qnet.chat
    opening = 0 if chat.rendering.agreement == "" else 2
    state = State.from_messages([turn if isinstance(turn, dict) else vars(turn) for turn in messages], task, opening)
    turns = state.messages
    if (chat.rendering.mark_matches or chat.rendering.compact) and not task:
        raise UserError("this QNet reads a page beside the task's sentence, so give it: turn_values(..., task=)")
    if opening and turns[1:2] != (("assistant", chat.rendering.agreement or "OK"),):
        raise UserError("messages begin with an instruction and the agent's OK, as QNet learned them")
    requests = [Score(state.prefix(n), (turns[n][1],)) for n in range(opening + 1, len(turns), 2)]
    q = [value for [value] in qnet.score(requests)]
    gains = [after - before for before, after in pairwise([0.0, *q])]
    return q, gains


def episode_reward(qnet: Any, mean: bool = True) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainer and `integrations.trl`: the mean Q of an episode's actions, or the last,
    to which TRL adds the environment's own reward."""

    def q_value(environments: list, **_: Any) -> list[float | None]:
        episodes = [turn_values(qnet, game.state.dump(), game.state.task)[0] for game in environments]
        return [(sum(q) / len(q) if mean else q[-1]) if q else None for q in episodes]

    return q_value
