"""The states in which scores are judged: a behaviour policy visits them, on tasks that nothing was trained on.

A line of points.jsonl is enough to restore a state anywhere: reset the task, replay the prefix; the hash of the
observation says whether the state is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import envs
from q_search import distinct as distinct_actions
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, react, uniforms
from qlass.driver import ask

DRAWS = 4  # of the agent in each state: what it does, and what else it might have done
FIRST, LAST, MOST = 1, 2, 3  # turns dropped at the two ends of a trajectory, and the most that are kept of one


@dataclasses.dataclass(frozen=True)
class Point:
    """A state and the actions to choose among there, as the agent writes them."""

    task_id: str
    prefix: tuple[str, ...]  # the actions that lead there from the task's start
    candidates: tuple[str, ...]  # distinct, in a random order
    taken: int  # which of them the behaviour policy took
    observation: str  # the message that the state ends with
    hash: str
    block: str = ""  # which tasks vary together (TextEnv.block)

    def restore(self, env: envs.TextEnv) -> State:
        """Put `env` into the state; UserError where the replay ends elsewhere."""
        observation, info = env.reset(options={"task_id": self.task_id})
        state = State.first(env, observation, info)
        for action in self.prefix:
            observation, *_ = env.step(parse_action(action))
            state = state.then(action, env.message(observation))
        if digest(state) != self.hash:
            raise UserError(
                f"task {self.task_id}: {len(self.prefix)} actions lead to another state than when the points were "
                "collected; --overwrite starts the study again"
            )
        return state

    @classmethod
    def load(cls, record: dict) -> Point:
        return cls(**{**record, "prefix": tuple(record["prefix"]), "candidates": tuple(record["candidates"])})


def digest(state: State) -> str:
    return hashlib.sha256(state.messages[-1][1].encode()).hexdigest()[:16]


def trajectory(
    env: envs.TextEnv, task_id: str, number: int, actor: str, epsilon: float, width: int, rendering: Rendering,
    seed: int,
) -> Generator[Any, Any, list[Point]]:  # fmt: skip
    """One episode of the behaviour policy: the actor, or with probability epsilon a uniform valid action.

    The candidates of a state are the action taken, the agent's other draws, then uniform valid actions up to `width`.
    """
    observation, info = env.reset(options={"task_id": task_id})
    state, done = State.first(env, observation, info), False
    expert = env.expert(task_id) if actor == "expert" else iter(())
    points: list[Point] = []
    prefix: tuple[str, ...] = ()
    while not done:
        key = (task_id, "qval", number, len(prefix))
        valid = [react(*candidate) for candidate in env.candidates()]
        drawn = uniform = sorted(valid, key=lambda action: uniforms(1, seed, *key, action)[0])
        if actor == "agent":
            drawn = [c.text for c in (yield ask(env, state, DRAWS, key, rendering))]
        elif decision := next(expert, None):
            drawn = [react(*decision)]
        stray, *order = uniforms(1 + width, seed, *key)
        if not drawn:  # an expert that is done, or nothing listed to draw from
            break
        taken = uniform[0] if uniform and stray < epsilon else drawn[0]
        candidates = distinct_actions([taken, *drawn, *uniform])[:width]  # the first of equals: the one taken stays
        shuffled = tuple(action for _, action in sorted(zip(order, candidates, strict=False)))
        seen, block = state.messages[-1][1], env.block(task_id)
        points.append(Point(task_id, prefix, shuffled, shuffled.index(taken), seen, digest(state), block))
        observation, _, terminated, truncated, _ = env.step(parse_action(taken))
        state, done = state.then(taken, env.message(observation)), terminated or truncated
        prefix += (taken,)
    env.close()
    inner = points[FIRST : len(points) - LAST]
    order = uniforms(len(inner), seed, task_id, "keep", number)
    return [inner[i] for i in sorted(sorted(range(len(inner)), key=lambda i: order[i])[:MOST])]


def distinct(trajectories: Iterable[list[Point]], wanted: int) -> Iterator[Point]:
    """The points one by one, each (task, observation) once, until there are as many as wanted."""
    seen: set[tuple[str, str]] = set()
    for points in trajectories:
        for point in points:
            if len(seen) < wanted and (point.task_id, point.hash) not in seen:
                seen.add((point.task_id, point.hash))
                yield point
        if len(seen) >= wanted:
            return
