"""What an action is worth: Q(s, a) of a reference policy, all returns kept.

    exact    the optimal policy: FrozenLake by value iteration, WebShop by weighing every purchase in reach
    planner  the shortest plan of a player who knows where everything is (ALFWorld)
    expert   the environment's demonstrator, from the state that the action leads to; K times where the ice slips
    policy   K rollouts of the agent: "max" is QVAL's MVMC, "mean" the plain Monte-Carlo value

If the episode ends with reward r after n steps, the action's own included, the action is worth gamma^(n - 1) r. The
step limit counts for all references.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

import envs
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, uniforms
from qlass.driver import ask
from qlass.files import is_number

REFERENCES = {
    "frozenlake": ("exact", "expert", "policy"),
    "webshop": ("exact", "policy"),
    "alfworld": ("planner", "expert", "policy"),
    "sciworld": ("policy",),
}
EXACT = ("exact", "planner")  # known, not sampled: without noise


def references(env: str) -> tuple[str, ...]:
    return REFERENCES.get(env, ("policy",))  # of an environment of your own: nobody knows its values


def exact(env: envs.TextEnv, action: str, gamma: float) -> float:
    """Q*(s, a) where `env` stands, which is left as it was."""
    if hasattr(env, "q_star_of"):  # its steps may slip: no single next state decides
        return env.q_star_of(action, gamma)
    here = env.snapshot()
    _, reward, terminated, truncated, _ = env.step(action)
    value = reward if terminated or truncated else env.optimal_value(gamma)
    env.restore(here)
    return float(value)


def expert(env: envs.TextEnv, task_id: str, action: str, gamma: float, luck: tuple = ()) -> float:
    """The discounted reward of the demonstrator after this action."""
    here = env.snapshot()
    reseed(env, luck)
    _, reward, terminated, truncated, _ = env.step(action)
    player, worth = env.expert(task_id), 1.0
    while not (terminated or truncated) and (decided := next(player, None)):
        _, reward, terminated, truncated, _ = env.step(decided[1])
        worth *= gamma
    env.restore(here)
    return worth * float(reward)


def reseed(env: envs.TextEnv, luck: tuple) -> None:
    """Give slippery ice other chances from here on."""
    env.reseed(int(uniforms(1, *luck, "ice")[0] * 2**53))


def rollouts(
    env: envs.TextEnv, state: State, actions: list[str], K: int, gamma: float, key: tuple, rendering: Rendering
) -> Generator[list, list, list[list[float]]]:
    """gamma^t r of K rollouts of the agent after each action (t = 0: it ends the episode), all side by side.

    Each has its own luck, that of slippery ice too. The environment is left wherever the last of them ended.
    """
    here, returns = env.snapshot(), np.zeros((len(actions), K))
    alive = [(i, k, state, here) for i in range(len(actions)) for k in range(K)]
    texts, t = [actions[i] for i, *_ in alive], 0
    while alive:
        going, requests = [], []
        for (i, k, s, snapshot), text in zip(alive, texts, strict=True):
            env.restore(snapshot)
            if t == 0:
                reseed(env, (*key, i, k))
            observation, reward, terminated, truncated, _ = env.step(parse_action(text))
            if terminated or truncated:
                returns[i, k] = gamma**t * reward
                continue
            after = s.then(text, env.message(observation))
            if rendering.markov:  # the same state, whatever led there: the agent reads it once
                after = State(after.messages[-1:], after.task)
            going.append((i, k, after, env.snapshot()))
            requests.append(ask(env, after, 1, (*key, i, k, t + 1), rendering))
        alive, t = going, t + 1
        texts = [answer[0].text for answer in (yield requests)] if requests else []
    return [[round(float(value), 6) for value in row] for row in returns]


def drawn(reference: str, task_id: str) -> bool:
    """Whether a label is K returns, which luck tells apart; else it is one."""
    return reference == "policy" or (reference == "expert" and task_id.startswith("slippery"))


def label(
    env: envs.TextEnv, point: Any, reference: str, K: int, gamma: float, rendering: Rendering | None
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


def known(env: str, reference: str) -> None:
    """UserError where an environment has no such reference."""
    if reference not in references(env):
        raise UserError(f"{env}: no {reference} labels; choose among {', '.join(references(env))}")


def values(returns: list[list[list[float]]], how: str) -> list[list[float]]:
    """The labels of each point's candidates: the "max" or "mean" of its returns, rounded so that equals are equal."""
    return [[round(float(getattr(np, how)(some)), 9) for some in state] for state in returns]


def load(record: dict) -> tuple[str, list[list[float]]]:
    """The point's hash and the returns, of a line that `label` made."""
    if not all(some and all(map(is_number, some)) for some in record["returns"]):
        raise ValueError(f"returns can't be {record['returns']!r}")
    return record["hash"], record["returns"]


def variants(reference: str, returns: list[list[list[float]]]) -> dict[str, str]:
    """{name of a set of labels: how its returns become one}; with single returns there is nothing to choose."""
    single = all(len(some) == 1 for state in returns for some in state)
    return {reference: "mean"} if single else {f"{reference} max": "max", f"{reference} mean": "mean"}
