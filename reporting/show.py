"""An episode on the terminal, step by step, for `q_search.py --show`."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from qlass.messages import parse_action
from qlass.results import Step

WIDTH = 100  # columns
BAR = 24  # columns of a bar from the least score of a step to the most
WORD = 48  # columns of an action, at most


def paint(text: str, code: str) -> str:
    """In colour on a terminal, plain in a pipe."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def bar(score: float, scores: Sequence[float]) -> str:
    """A score as a bar, which tells it from the step's others, and as a number."""
    if not math.isfinite(score):
        return ""
    least, most = min(scores), max(scores)
    share = (score - least) / (most - least) if most > least else 1.0
    return f"{'█' * round(1 + (BAR - 1) * share):{BAR}} {score:.3f}"


def lines_of(step: Step, number: int, picture: str) -> list[str]:
    """What the agent read, its candidates with their scores, the one taken."""
    page = step.state.observation.replace(step.state.task or "\n", "...")  # it stands above
    page = textwrap.shorten(page, 2 * WIDTH, placeholder=" ...")
    lines = [paint(f"step {number}", "1")]
    lines.append(textwrap.fill(page, WIDTH, initial_indent="  ", subsequent_indent="  "))
    lines += [f"    {row}" for row in picture.splitlines()]

    words = [textwrap.shorten(parse_action(a), WORD, placeholder=" ...") for a in step.candidates]
    column = max(map(len, words))
    for action, word, score in zip(step.candidates, words, step.scores, strict=True):
        line = f"{word:{column}}  {bar(score, step.scores)}".rstrip()
        line = paint(f"> {line}", "32") if action == step.action else f"  {line}"
        lines.append(f"  {line}")
    return lines


def show(env: Any, step: Step, number: int, done: bool) -> None:
    """Print step `number` of an episode, from 1; at its end the reward too."""
    if number == 1:
        print(paint(step.state.task or "a new episode", "1;36"))
    for line in lines_of(step, number, env.picture(step.state.observation)):
        print(line)
    if done:
        reward = paint(f"reward {step.reward:.3g}", "1;36")
        print(f"{reward} after {number} steps\n")
    sys.stdout.flush()  # a pipe too shows each step as it is played
