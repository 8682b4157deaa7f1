"""Points, the states in which scores are judged, and their labels: what an action is worth there.

A behaviour policy visits the points, on tasks that nothing was trained on. A line of points.jsonl is enough to restore
one anywhere: reset the task, replay the prefix; the hash of the observation says whether the state is the same.

Labels are Q(s, a) of a reference policy:

    exact    the optimal policy: FrozenLake by value iteration, WebShop by weighing every purchase in reach, ALFWorld by
             the shortest plan of a player who knows where everything is
    policy   K rollouts of the agent: "max" is QVAL's MVMC, "mean" the plain Monte-Carlo value

If the episode ends with reward r after n steps, with the action's own, the action is worth GAMMA^(n - 1) r.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import envs
from experiments.compare import ahead
from q_search import distinct_actions
from qlass import UserError
from qlass.batching import ask
from qlass.chat import Rendering
from qlass.messages import State, react, replay, start, step
from qlass.noise import uniforms

DRAWS = 4  # of the agent in each state: what it does, and what else it might have done
EPSILON = 0.25  # the share of uniform valid actions in what it does
CANDIDATES = 4  # actions of a state, at most
GAMMA = 0.95  # discount of the labels, as QVAL has it
FIRST, LAST, MOST = 1, 2, 3  # turns dropped at the two ends of a trajectory, and the most that are kept of one
EXACT = ("frozenlake", "webshop", "alfworld")  # where `exact` labels can be had (TextEnv.optimal_value)


@dataclasses.dataclass(frozen=True)
class Point:
    """A state and the actions to choose among there, as the agent writes them."""

    task_id: str
    prefix: list[str]  # the actions that lead there from the task's start
    candidates: list[str]  # distinct, in a random order
    taken: int  # which of them the behaviour policy took
    observation: str  # the message that the state ends with
    hash: str
    block: str = ""  # which tasks vary together (TextEnv.block)

    @property
    def key(self) -> tuple[str, str]:
        return self.task_id, self.hash

    def restore(self, env: envs.TextEnv) -> State:
        """Put `env` into the state; UserError where the replay ends elsewhere."""
        *_, move = replay(env, self.task_id, self.prefix)
        if digest(move.state.observation) != self.hash:
            steps = f"task {self.task_id}: {len(self.prefix)} actions lead to another state than when the points were"
            raise UserError(f"{steps} collected; --overwrite starts the study again")
        return move.state


def digest(observation: str) -> str:
    return hashlib.sha256(observation.encode()).hexdigest()[:16]


async def trajectory(env: envs.TextEnv, task_id: str, n: int, seed: int, rendering: Rendering) -> list[Point]:
    """The n-th episode of the behaviour policy: the agent, or with probability EPSILON a uniform valid action.

    The candidates of a state are the action taken, the agent's other draws, then uniform valid actions.
    """
    state, done = start(env, task_id), False
    points: list[Point] = []
    prefix: list[str] = []
    while not done:
        key = (task_id, "qval", n, len(prefix))
        valid = [react(*candidate) for candidate in env.candidates()]
        uniform = sorted(valid, key=lambda action: uniforms(1, seed, *key, action)[0])
        drawn = [candidate.text for candidate in await ask(env, state, DRAWS, key, rendering)]
        stray, *order = uniforms(1 + CANDIDATES, seed, *key)
        preferred = [*uniform, *drawn] if stray < EPSILON else drawn
        taken = preferred[0]
        candidates = distinct_actions(env, [taken, *drawn, *uniform])[:CANDIDATES]  # of equals the first
        shuffled = [action for _, action in sorted(zip(order, candidates, strict=False))]
        seen, block = state.observation, env.block(task_id)
        points.append(Point(task_id, prefix, shuffled, shuffled.index(taken), seen, digest(seen), block))
        state, _, done = step(env, state, taken)
        prefix = [*prefix, taken]
    env.close()
    inner = points[FIRST : len(points) - LAST]
    order = np.argsort(uniforms(len(inner), seed, task_id, "keep", n))
    return [inner[i] for i in sorted(order[:MOST])]


def distinct(trajectories: Iterable[list[Point]]) -> Iterator[Point]:
    """The points one by one, each (task, observation) once."""
    seen: set[tuple[str, str]] = set()
    for point in itertools.chain.from_iterable(trajectories):
        if point.key not in seen:
            seen.add(point.key)
            yield point


async def labelled(env: envs.TextEnv, point: Point, reference: str, K: int, rendering: Rendering) -> dict[str, Any]:
    """The returns of each of a point's candidates, (candidates, K); the exact value is one."""
    rows = []
    for i, action in enumerate(point.candidates):
        if reference == "exact":
            rows.append([exact(env, point.restore(env), action)])
        else:
            rows.append([await rollout(env, point, i, k, rendering) for k in range(K)])
    return {"returns": rows}


def exact(env: envs.TextEnv, state: State, action: str) -> float:
    """Q*(s, a) where `env` stands, which is left as it was."""
    return ahead(env, state, action, None, GAMMA)


async def rollout(env: envs.TextEnv, point: Point, i: int, k: int, rendering: Rendering) -> float:
    """The discounted reward of the agent after a point's i-th candidate, with the k-th random numbers."""
    state = point.restore(env)
    key = (point.task_id, "label", point.hash, i, k)
    env.reseed(int(uniforms(1, *key, "ice")[0] * 2**53))  # of slippery ice
    state, reward, done = step(env, state, point.candidates[i])
    steps = 1
    while not done:
        if rendering.markov:  # the same state, whatever led there: the agent reads it once
            state = State(state.messages[-1:], state.task, 0)
        (candidate,) = await ask(env, state, 1, (*key, steps), rendering)
        state, reward, done = step(env, state, candidate.text)
        steps += 1
    return round(GAMMA ** (steps - 1) * reward, 6)
