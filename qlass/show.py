"""An episode on the terminal, step by step, for `q_search.py --show`."""

from __future__ import annotations

import math
import sys
import textwrap

from qlass.messages import parse_action
from qlass.results import Step

WIDTH = 100  # columns
BAR = 24  # columns of a bar from Q = 0 to 1
WORD = 48  # columns of an action, at most


def paint(text: str, code: str) -> str:
    """In colour on a terminal, plain in a pipe."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def bar(score: float) -> str:
    """A score as a bar and a number; a log-probability, below 0, has no bar."""
    if not math.isfinite(score):
        return ""
    return f"{'█' * round(BAR * min(max(score, 0.0), 1.0)):{BAR}} {score:.3f}"


def lines_of(step: Step, number: int) -> list[str]:
    """What the agent read, its candidates with their scores, the one taken."""
    page = step.state.observation.replace(step.state.task or "\n", "...")  # it stands above
    page = textwrap.shorten(page, 2 * WIDTH, placeholder=" ...")
    page = textwrap.fill(page, WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines = [paint(f"step {number}", "1"), page]
    words = [textwrap.shorten(parse_action(a), WORD, placeholder=" ...") for a in step.candidates]
    column = max(map(len, words))
    for action, word, score in zip(step.candidates, words, step.scores, strict=True):
        taken = action == step.action
        line = f"{'>' if taken else ' '} {word:{column}}  {bar(score)}".rstrip()
        lines.append(f"  {paint(line, '32') if taken else line}")
    return lines


def show(step: Step, number: int, done: bool) -> None:
    """Print step `number` of an episode, from 1; at its end the reward too."""
    if number == 1:
        print(paint(step.state.task or "a new episode", "1;36"))
    print("\n".join(lines_of(step, number)), flush=True)
    if done:
        print(f"{paint(f'reward {step.reward:.3g}', '1;36')} after {number} steps\n", flush=True)
