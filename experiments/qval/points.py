"""Points, the states in which scores are judged, and their labels: what an action is worth there.

A behaviour policy visits the points, on tasks that nothing was trained on. A line of points.jsonl is enough to restore
one anywhere: reset the task, replay the prefix; the hash of the observation says whether the state is the same.

Labels are Q(s, a) of a reference policy:

    exact    the optimal policy: FrozenLake by value iteration, WebShop by weighing every purchase in reach
    planner  the shortest plan of a player who knows where everything is (ALFWorld)
    expert   the environment's expert, from the state that the action leads to; K times where the ice slips
    policy   K rollouts of the agent: "max" is QVAL's MVMC, "mean" the plain Monte-Carlo value

If the episode ends with reward r after n steps, with the action's own, the action is worth gamma^(n - 1) r.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import envs
from experiments.compare import ahead
from q_search import distinct_actions
from qlass import UserError
from qlass.batching import ask
from qlass.chat import Rendering
from qlass.messages import State, react, replay, uniforms

DRAWS = 4  # of the agent in each state: what it does, and what else it might have done
FIRST, LAST, MOST = 1, 2, 3  # turns dropped at the two ends of a trajectory, and the most that are kept of one
REFERENCES = {  # the policies whose values can be labels; elsewhere only the agent's
    "frozenlake": ("exact", "expert", "policy"),
    "webshop": ("exact", "policy"),
    "alfworld": ("planner", "expert", "policy"),
}
EXACT = ("exact", "planner")  # without noise


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

    def restore(self, env: envs.TextEnv) -> State:
        """Put `env` into the state; UserError where the replay ends elsewhere."""
        *_, move = replay(env, self.task_id, self.prefix)
        if digest(move.state.observation) != self.hash:
            steps = f"task {self.task_id}: {len(self.prefix)} actions lead to another state than when the points were"
            raise UserError(f"{steps} collected; --overwrite starts the study again")
        return move.state


def digest(observation: str) -> str:
    return hashlib.sha256(observation.encode()).hexdigest()[:16]


async def trajectory(
    env: envs.TextEnv, task_id: str, n: int, actor: str, epsilon: float, width: int, rendering: Rendering, seed: int
) -> list[Point]:
    """The n-th episode of the behaviour policy: the actor, or with probability epsilon a uniform valid action.

    The candidates of a state are the action taken, the agent's other draws, then uniform valid actions up to `width`.
    """
    state, done = State.first(env, *env.reset(options={"task_id": task_id})), False
    expert = env.expert(task_id) if actor == "expert" else iter(())
    points: list[Point] = []
    prefix: list[str] = []
    while not done:
        key = (task_id, "qval", n, len(prefix))
        valid = [react(*candidate) for candidate in env.candidates()]
        drawn = uniform = sorted(valid, key=lambda action: uniforms(1, seed, *key, action)[0])
        if actor == "agent":
            drawn = [c.text for c in await ask(env, state, DRAWS, key, rendering)]
        elif actor == "expert":
            drawn = [react(*decision)] if (decision := next(expert, None)) else []
        stray, *order = uniforms(1 + width, seed, *key)
        if not drawn:  # an expert that is done, or nothing listed to draw from
            break
        taken = uniform[0] if uniform and stray < epsilon else drawn[0]
        candidates = distinct_actions(env, [taken, *drawn, *uniform])[:width]  # of equals the first: it is taken
        shuffled = [action for _, action in sorted(zip(order, candidates, strict=False))]
        seen, block = state.observation, env.block(task_id)
        points.append(Point(task_id, prefix, shuffled, shuffled.index(taken), seen, digest(seen), block))
        state, _, done = state.act(env, taken)
        prefix = [*prefix, taken]
    env.close()
    inner = points[FIRST : len(points) - LAST]
    order = uniforms(len(inner), seed, task_id, "keep", n)
    return [inner[i] for i in sorted(sorted(range(len(inner)), key=lambda i: order[i])[:MOST])]


def distinct(trajectories: Iterable[list[Point]]) -> Iterator[Point]:
    """The points one by one, each (task, observation) once."""
    seen: set[tuple[str, str]] = set()
    for point in itertools.chain.from_iterable(trajectories):
        if (point.task_id, point.hash) not in seen:
            seen.add((point.task_id, point.hash))
            yield point


def drawn(reference: str, task_id: str) -> bool:
    """Whether a label is K returns, which differ by their random numbers; else it is one."""
    return reference == "policy" or (reference == "expert" and task_id.startswith("slippery"))


async def label(
    env: envs.TextEnv, point: Point, i: int, k: int, reference: str, gamma: float, rendering: Rendering
) -> float:
    """The k-th return of a point's i-th candidate. Each has its own random numbers."""
    state, text = point.restore(env), point.candidates[i]
    key = (point.task_id, "label", point.hash, i, k)
    env.reseed(int(uniforms(1, *key, "ice")[0] * 2**53))  # of slippery ice
    if reference in EXACT:
        value = exact(env, state, text, gamma)
    elif reference == "expert":
        value = await rollout(env, state, text, gamma, key, rendering, env.expert(point.task_id))
    else:
        value = round(await rollout(env, state, text, gamma, key, rendering), 6)
    env.close()
    return value


def exact(env: envs.TextEnv, state: State, text: str, gamma: float) -> float:
    """Q*(s, a) where `env` stands, which is left as it was."""
    return ahead(env, state, text, None, gamma)


async def rollout(
    env: envs.TextEnv, state: State, text: str, gamma: float, key: tuple, rendering: Rendering, player: Any = None
) -> float:
    """The discounted reward after this action: of a player of the environment, without one of the agent."""
    state, reward, done = state.act(env, text)
    discount, moves = 1.0, itertools.count(1)
    while not done:
        if player:
            move = next(player, None)
            if move is None:
                return 0.0
            text = react(*move)
        else:
            # Of a Markov environment the same state, whatever led there: the agent reads it once.
            state = State(state.messages[-1:], state.task) if rendering.markov else state
            (candidate,) = await ask(env, state, 1, (*key, next(moves)), rendering)
            text = candidate.text
        state, reward, done = state.act(env, text)
        discount *= gamma
    return discount * reward
