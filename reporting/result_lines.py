"""The type of a line of results.jsonl, of whichever program."""

from typing import Any, Required

from pydantic import NonNegativeFloat

from qlass.records import Line, Reward


class Move(Line, total=False):
    """A step of a result's episode."""

    action: str
    observation: str
    candidates: list[Any] | None


class Result(Line, total=False):
    """A line of results.jsonl."""

    task_id: Required[str | int]
    env: Required[str]
    method: Required[str]
    reward: Required[Reward]
    tokens: Required[dict[str, NonNegativeFloat]]
    block: str | int
    split: str
    type: str
    label: str
    player: str
    agent: str
    select: str
    seed: int
    M: int
    N: int
    success: bool
    n_steps: int
    unknown_actions: int
    env_steps: int
    resets: int
    seconds: NonNegativeFloat
    usage: dict[str, NonNegativeFloat]
    cut_prompts: int
    steps: list[Move]
