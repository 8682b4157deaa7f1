"""States as chat messages, actions as ReAct steps, and an environment that plays them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from qlass import UserError
from qlass.environment import TextEnv


@dataclasses.dataclass(frozen=True)
class State:
    """s_t: the chat messages up to the last observation, or a trajectory's, which end with an
    action; and the task's sentence.

    Messages are (role, content): "user" and "assistant" in turns. The first two are instruction and
    agreement, as in ETO's layout, or the first holds instruction and observation.
    """

    messages: tuple[tuple[str, str], ...]
    task: str = ""
    opening: int = 2  # messages before the first observation: 2, or 0 without an agreement

    @property
    def observations(self) -> tuple[str, ...]:
        return tuple(content for _, content in self.messages[self.opening :: 2])

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(content for _, content in self.messages[self.opening + 1 :: 2])

    @property
    def observation(self) -> str:
        """The last one, of a state in which the agent is to act."""
        return self.messages[-1][1]

    def extended(self, action: str, observation: str) -> State:
        """s_{t+1}."""
        turn = message("assistant", action), message("user", observation)
        return dataclasses.replace(self, messages=self.messages + turn)

    def prefix(self, n: int) -> State:
        """The first n messages; with -n all but the last n."""
        return dataclasses.replace(self, messages=self.messages[:n])

    @staticmethod
    def from_messages(messages: list[dict], task: str = "", opening: int = 2) -> State:
        """The state in a record."""
        return State(tuple((turn["role"], turn["content"]) for turn in messages), task, opening)

    def dump(self) -> list[dict]:
        return [{"role": role, "content": content} for role, content in self.messages]


def message(role: str, content: str) -> tuple[str, str]:
    """A message, with a fixed text in the place of blanks alone, which servers refuse."""
    return role, content if content.strip() else "(empty)"


def start(env: TextEnv, task_id: str) -> State:
    """The state in which a task begins; `env` stands there."""
    return first_state(env, *env.reset(options={"task_id": task_id}))


def first_state(env: TextEnv, observation: str, info: dict) -> State:
    """The state of an environment that was reset, from what `reset` returned."""
    if not env.agreement:
        return State((message("user", env.instruction + observation),), info["task"], 0)
    agreed = message("user", env.instruction), ("assistant", env.agreement)
    return State((*agreed, message("user", observation)), info["task"])


def step(env: TextEnv, state: State, action: str) -> tuple[State, float, bool]:
    """The state that an action leads to, the outcome, and whether the episode is over."""
    observation, reward, terminated, truncated, _ = env.step(parse_action(action))
    done = bool(terminated or truncated)
    if not 0 <= reward <= 1 or (reward and not done):
        raise UserError(
            f"{env.name}: {action!r} earns {reward}: the last step earns 0 to 1, others 0"
        )
    return state.extended(action, env.message(observation)), float(reward), done


class Move(NamedTuple):
    """An action, the state that it leads to, its reward, and whether the episode is over."""

    action: str
    state: State
    reward: float
    done: bool


def replay(
    env: TextEnv,
    task_id: str,
    recorded: Sequence[str] | None = None,
    player: Callable[[str], Iterable] | None = None,
) -> Iterator[Move]:
    """Recorded actions in `env`, move by move; the first move is the task's start, of no action.

    The limit of steps is raised for them, as it may have been another one when they were recorded,
    and they end with the episode. Where they end earlier, the last move has what the environment
    pays there. Without them `player`, or the environment's expert, plays the task.
    """
    limit = env.max_steps
    try:
        state = start(env, task_id)
        actions = iter(recorded or ())
        if recorded is None:
            actions = (react(*move) for move in (player or env.expert)(task_id))
        elif (own := env.step_limit()) is not None:
            env.max_steps = max(own, len(recorded))
        yield Move("", state, 0.0, False)
        action = next(actions, None)
        if recorded is None and action is None:
            raise UserError(f"{env.name}: task {task_id}: its player yields no action")
        while action is not None:
            state, reward, done = step(env, state, action)
            after = None if done else next(actions, None)
            if not done and after is None:
                reward = env.reward_if_cut()
            yield Move(action, state, reward, done)
            action = after
    finally:
        env.max_steps = limit


def react(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def without_thinking(text: str) -> str:
    """The text after a model's marked thoughts, and before those that have no end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def parse_action(text: str) -> str:
    """The executable part, for every stage: what follows "Action:" or, without one, the whole text.

    A thought may hold "Action:", and so may an action. The last one that begins a line counts or,
    if none does, the last. Actions whose parts are equal to the engine (`TextEnv.canonical`) are
    one child of a node ("child nodes that differ", Alg. 2). The environment answers to what it
    cannot do.
    """
    *others, last = re.split(r"(?m)^\s*Action:", without_thinking(text))
    return (last if others else last.rpartition("Action:")[2]).strip()
