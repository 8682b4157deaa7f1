"""What an action is worth: Q(s, a) of a reference policy, all returns kept.

    exact    the optimal policy: FrozenLake by value iteration, WebShop by weighing every purchase in reach
    planner  the shortest plan of a player who knows where everything is (ALFWorld)
    expert   the environment's expert, from the state that the action leads to; K times where the ice slips
    policy   K rollouts of the agent: "max" is QVAL's MVMC, "mean" the plain Monte-Carlo value

If the episode ends with reward r after n steps, the action's own included, the action is worth gamma^(n - 1) r. The
step limit counts for all references.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

import numpy as np
import pandas as pd

import envs
from experiments.qval.points import Point
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, uniforms
from qlass.driver import ask
from qlass.records import is_number

REFERENCES = {
    "frozenlake": ("exact", "expert", "policy"),
    "webshop": ("exact", "policy"),
    "alfworld": ("planner", "expert", "policy"),
    "sciworld": ("policy",),
}
EXACT = ("exact", "planner")  # without noise


def references(env: str) -> tuple[str, ...]:
    """Of an environment of your own nobody knows the values."""
    return REFERENCES.get(env, ("policy",))


def check(env: str, reference: str) -> None:
    """UserError where an environment has no such reference."""
    if reference not in references(env):
        raise UserError(f"{env}: no {reference} labels; choose among {', '.join(references(env))}")


def exact(env: envs.TextEnv, action: str, gamma: float) -> float:
    """Q*(s, a) where `env` stands, which is left as it was."""
    if hasattr(env, "q_star_of"):  # its steps may slip: no single next state decides
        return env.q_star_of(action, gamma)
    start = env.snapshot()
    _, reward, terminated, truncated, _ = env.step(action)
    value = reward if terminated or truncated else env.optimal_value(gamma)
    env.restore(start)
    return float(value)


def expert(env: envs.TextEnv, task_id: str, action: str, gamma: float, key: tuple = ()) -> float:
    """The discounted reward of the expert after this action."""
    start = env.snapshot()
    reseed(env, key)
    _, reward, terminated, truncated, _ = env.step(action)
    player, discount = env.expert(task_id), 1.0
    while not (terminated or truncated) and (decision := next(player, None)):
        _, reward, terminated, truncated, _ = env.step(decision[1])
        discount *= gamma
    env.restore(start)
    return discount * float(reward)


def reseed(env: envs.TextEnv, key: tuple) -> None:
    """Give slippery ice other random numbers from here on."""
    env.reseed(int(uniforms(1, *key, "ice")[0] * 2**53))


def rollouts(
    env: envs.TextEnv, state: State, actions: list[str], K: int, gamma: float, key: tuple, rendering: Rendering
) -> Generator[list, list, list[list[float]]]:
    """gamma^t r of K rollouts of the agent after each action (t = 0: it ends the episode), all side by side.

    Each has its own random numbers, those of slippery ice too. The environment is left where the last of them ended.
    """
    start, returns = env.snapshot(), np.zeros((len(actions), K))
    alive = [(i, k, state, start) for i in range(len(actions)) for k in range(K)]
    texts = [actions[i] for i, *_ in alive]
    for t in itertools.count():
        going, requests = [], []
        for (i, k, before, snapshot), text in zip(alive, texts, strict=True):
            env.restore(snapshot)
            if t == 0:
                reseed(env, (*key, i, k))
            observation, reward, terminated, truncated, _ = env.step(parse_action(text))
            if terminated or truncated:
                returns[i, k] = gamma**t * reward
                continue
            after = before.then(text, env.message(observation))
            if rendering.markov:  # the same state, whatever led there: the agent reads it once
                after = State(after.messages[-1:], after.task)
            going.append((i, k, after, env.snapshot()))
            requests.append(ask(env, after, 1, (*key, i, k, t + 1), rendering))
        if not going:
            return [[round(float(value), 6) for value in row] for row in returns]
        alive, texts = going, [answer[0].text for answer in (yield requests)]


def drawn(reference: str, task_id: str) -> bool:
    """Whether a label is K returns, which differ by their random numbers; else it is one."""
    return reference == "policy" or (reference == "expert" and task_id.startswith("slippery"))


def label(
    env: envs.TextEnv, point: Point, reference: str, K: int, gamma: float, rendering: Rendering
) -> Generator[list, list, dict]:
    """A line of labels-REFERENCE.jsonl: the returns of each candidate of a point, in the point's order."""
    state = point.restore(env)
    actions = [parse_action(text) for text in point.candidates]
    key = (point.task_id, "label", point.hash)
    if reference == "policy":
        returns = yield from rollouts(env, state, list(point.candidates), K, gamma, key, rendering)
    elif reference == "expert":
        times = range(K if drawn(reference, point.task_id) else 1)
        returns = [[expert(env, point.task_id, a, gamma, (*key, i, k)) for k in times] for i, a in enumerate(actions)]
    else:
        returns = [[exact(env, action, gamma)] for action in actions]
    env.close()
    return {"task_id": point.task_id, "hash": point.hash, "returns": returns}


def load(record: dict) -> tuple[str, list[list[float]]]:
    """The point's hash and the returns, of a line that `label` made."""
    if not all(row and all(map(is_number, row)) for row in record["returns"]):
        raise ValueError(f"returns can't be {record['returns']!r}")
    return record["hash"], record["returns"]


def variants(reference: str, returns: pd.DataFrame) -> dict[str, pd.Series]:
    """{name: labels} of the returns (candidates, K): their maximum and their mean, rounded so that equals are equal."""
    names = {f"{reference} max": "max", f"{reference} mean": "mean"} if returns.shape[1] > 1 else {reference: "max"}
    return {name: returns.agg(how, axis=1).map(lambda v: round(v, 9)) for name, how in names.items()}
