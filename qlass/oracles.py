"""Scorers of candidates that see the environment's truth: oracles, to compare Q with."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from qlass.chat import State, parse_action
from qlass.driver import Score

if TYPE_CHECKING:
    from envs import TextEnv

Scores = Generator[Any, Any, list[float]]  # yields requests, returns a number for each candidate


def by_true_value(env: TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """The best that can still be reached after each candidate, by an environment that knows."""
    yield from ()
    return look_ahead(env, candidates, [None] * len(candidates))


def by_q_or_reward(env: TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Q, but the true reward where a candidate's step ends the episode."""
    return look_ahead(env, candidates, (yield Score(state, tuple(candidates))))


def look_ahead(env: TextEnv, candidates: list[str], otherwise: list[float | None]) -> list[float]:
    """Step each candidate in the real environment: its reward if that ends the episode, else what is given."""
    scores, here = [], env.snapshot()
    for action, score in zip(candidates, otherwise, strict=True):
        _, reward, terminated, truncated, _ = env.step(parse_action(action))
        if terminated or truncated:
            score = reward
        scores.append(env.optimal_value() if score is None else score)
        env.restore(here)
    return scores
