"""What is said: states as chat messages, actions as ReAct steps, and the noise that draws them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qlass import UserError


@dataclasses.dataclass(frozen=True)
class State:
    """s_t: the chat messages up to the last observation, and the task's sentence.

    Messages are (role, content): "user" and "assistant" in turns.
    """

    messages: tuple[tuple[str, str], ...]
    task: str = ""

    def then(self, action: str, observation: str) -> State:
        turn = ("assistant", action), ("user", observation)
        return State(self.messages + turn, self.task)

    def act(self, env: Any, action: str) -> tuple[State, float, bool]:
        """The state that an action leads to, the outcome, and whether the episode is over."""
        observation, reward, terminated, truncated, _ = env.step(parse_action(action))
        done = bool(terminated or truncated)
        if not 0 <= reward <= 1:
            raise UserError(f"{env.name}: {action!r} earns {reward}, which is not from 0 to 1")
        return self.then(action, env.message(observation)), float(reward), done

    @property
    def observation(self) -> str:
        return self.messages[-1][1]

    @staticmethod
    def first(env: Any, observation: str, info: dict) -> State:
        """ETO's layout: instruction, "OK", and the first observation without its prefix.

        An environment without an agreement says instruction and observation in one message.
        """
        if not env.agreement:
            return State((("user", env.instruction + observation),), info["task"])
        agreed = ("user", env.instruction), ("assistant", env.agreement)
        return State((*agreed, ("user", observation)), info["task"])

    @staticmethod
    def load(messages: list[dict], task: str = "") -> State:
        """Of a record."""
        return State(tuple((turn["role"], turn["content"]) for turn in messages), task)

    def dump(self) -> list[dict]:
        return [{"role": role, "content": content} for role, content in self.messages]


class Move(NamedTuple):
    """An action, the state that it leads to, its reward, and whether the episode is over."""

    action: str
    state: State
    reward: float
    done: bool


def replay(env: Any, task_id: str, recorded: Sequence[str] | None = None) -> Iterator[Move]:
    """Recorded actions in `env`, move by move; the first move is the task's start, of no action.

    They may be more than the limit of steps, which was another one when they were recorded.
    Without them the environment's expert plays.
    """
    limit = env.max_steps
    try:
        state = State.first(env, *env.reset(options={"task_id": task_id}))
        actions: Iterable[str] = recorded or ()
        if recorded is None:
            actions = (react(*move) for move in env.expert(task_id))
        elif limit is not None:
            env.max_steps = max(env.step_limit(), len(recorded))
        yield Move("", state, 0.0, False)
        for n, action in enumerate(actions, 1):
            state, reward, done = state.act(env, action)
            if done and recorded and n < len(recorded):
                ended = f"{n} of {len(recorded)} recorded actions end the episode"
                raise UserError(f"{env.name}: task {task_id}: {ended}")
            yield Move(action, state, reward, done)
            if done:
                break
    finally:
        env.max_steps = limit


def react(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def without_thinking(text: str) -> str:
    """What a model says after its thoughts between marks; nothing if these have no end."""
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


def uniforms(n: int, *key: Hashable) -> np.ndarray:
    """n numbers in [0, 1) that depend on nothing but the key, of seed, task, branch, step and
    candidate."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(philox).random(n)
