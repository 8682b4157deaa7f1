"""Scorers of candidates that see the environment's truth: what Q-guided search could reach at best."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from qlass.chat import State, parse_action
from qlass.driver import Candidate, Score

if TYPE_CHECKING:
    from envs import TextEnv

Scores = Generator[Any, Any, list[float]]


def by_true_value(env: TextEnv, state: State, candidates: list[Candidate], key: tuple) -> Scores:
    """The best that can still be reached after each candidate, by an environment that knows."""
    yield from ()
    return look_ahead(env, candidates, [None] * len(candidates))


def by_q_or_reward(env: TextEnv, state: State, candidates: list[Candidate], key: tuple) -> Scores:
    """Q, but the true reward where a candidate's step ends the episode."""
    return look_ahead(env, candidates, (yield Score(state, tuple(c.text for c in candidates))))


def look_ahead(env: TextEnv, candidates: list[Candidate], otherwise: list[float | None]) -> list[float]:
    """Step each candidate in the real environment: its reward if that ends the episode, else what is given."""
    scores, here = [], env.snapshot()
    for candidate, score in zip(candidates, otherwise, strict=True):
        _, reward, terminated, truncated, _ = env.step(parse_action(candidate.text))
        ended = terminated or truncated
        scores.append(reward if ended else env.optimal_value() if score is None else score)
        env.restore(here)
    return scores
