"""QNet's values in other trainers: Q of each of the agent's turns, as a reward of that turn or of the episode.

    q, gains = turn_values(scorer(QNet.from_pretrained("runs/webshop/qnet")), messages, task)

Messages are as QNet learned them: instruction, "OK", the first observation, then actions and observations in turns. The
tiny model also reads `task`, the task's sentence, which verifiers has in `info["task_sentence"]`; others need none.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from qlass import UserError
from qlass.batching import Score
from qlass.messages import State


def turn_values(qnet: Any, messages: list, task: str = "") -> tuple[list[float], list[float]]:
    """Q(s, a) of each action, and its gain over the action before. The gains sum to the last Q."""
    state = State.load([turn if isinstance(turn, dict) else vars(turn) for turn in messages], task)
    turns, system = state.messages, state.messages[0][0] == "system"
    chat = getattr(qnet, "qnet", qnet).chat
    if (chat.rendering.mark_matches or chat.rendering.compact) and not task:
        raise UserError("this QNet reads a page beside the task's sentence, so give it: turn_values(..., task=)")
    if not (opening := chat.aids.opening(turns[system:])):
        raise UserError("messages begin with an instruction and the agent's OK, as QNet learned them")
    start = system + opening  # of the first observation
    places = range(start + 1, len(turns), 2)
    q = [value for [value] in qnet.score([Score(State(turns[:n], task), (turns[n][1],)) for n in places])]
    return q, [after - before for before, after in pairwise([0.0, *q])]


def episode_reward(qnet: Any, mean: bool = True) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainer and `integrations.trl`: the mean Q of an episode's actions, or the last."""

    def q_value(environments: list, **_: Any) -> list[float | None]:
        episodes = [turn_values(qnet, game.state.dump(), game.state.task)[0] for game in environments]
        return [(sum(q) / len(q) if mean else q[-1]) if q else None for q in episodes]

    return q_value


def step_reward(qnet: Any) -> Callable[..., Any]:
    """A handler of verifiers' `@vf.step_reward`, or for `state.add_step_reward`: the gain of the turn just taken."""

    async def gain(state: Any) -> float:
        step, task = state["trajectory"][-1], (state.get("info") or {}).get("task_sentence", "")
        return turn_values(qnet, [*step["prompt"], *step["completion"]], task)[1][-1]

    return gain
