"""What a trajectory costs in tokens: each model reads and writes every token once, as with a prompt cache.

`prompt` counts what the policy reads of the environment's words (its own are in the cache since it wrote them),
`generated` all that it writes, and `scored` what QNet reads. An agent that chooses among valid actions is charged the
tokens of its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlass.chat import Chat, State
from qlass.paraphrasing import reword


def read(chat: Chat, states: Sequence[State]) -> int:
    """Tokens of the environment's words along a trajectory: all of the first state, then each last message.

    Where the oldest turns are left out, what stands behind them is read again, the agent's words too.
    """
    told = [chat.prompt_tokens(state) for state in states]
    rest = (sum(map(len, p[1:])) if chat.is_cut(s) else len(p[-1]) for s, p in zip(states[1:], told[1:], strict=True))
    return sum(map(len, told[0][::2])) + sum(rest)


def scoring(chat: Chat, state: State, actions: Sequence[str]) -> int:
    return sum(len(chat.action(action, state.task)) for action in actions)


def tokens(chat: Chat, steps: Sequence[Any], by_qnet: bool) -> dict[str, int]:
    """The costs of a trajectory, from its steps' states, draws and candidates (`q_search.Step`)."""
    environment = read(chat, [step.state for step in steps])
    last = steps[-1].state
    # Under each further wording of the task the policy reads the full conversation once more.
    others = {candidate.task for step in steps for candidate in step.drawn} - {"", last.task}
    again = sum(len(chat.prompt(reword(last, wording))) for wording in others)
    return {
        "prompt": environment + again,
        "generated": sum(candidate.tokens for step in steps for candidate in step.drawn),
        "scored": environment + sum(scoring(chat, s.state, s.candidates) for s in steps) if by_qnet else 0,
    }
