"""A task's line of results.jsonl, and what its trajectories cost in tokens.

Each model reads and writes every token once, as with a prompt cache.

`prompt` counts what the policy reads of the environment's words (its own are in the cache since it wrote them),
`generated` all that it writes, and `scored` what QNet reads. What trajectories share is read once. An agent that
chooses among valid actions is charged the tokens of its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qlass.chat import Chat, State
from qlass.paraphrase import reword


def read(chat: Chat, trials: Iterable[Iterable[State]]) -> int:
    """Tokens of the environment's words along trajectories: all of a first state, then each last message.

    Where the oldest turns are left out, what follows them is read again, the agent's words too.
    """
    fresh: dict[State, list[list[int]]] = {}
    for states in trials:
        for t, state in enumerate(states):
            if state not in fresh:
                lists = chat.prompt_tokens(state)
                later = slice(chat.stays(state) if chat.is_cut(state) else -1, None)
                fresh[state] = lists[later] if t else lists[::2]
    return sum(len(tokens) for lists in fresh.values() for tokens in lists)


def tokens(chat: Chat | None, trials: Sequence[Sequence[Any]], scored: Callable[[Any], list[str]]) -> dict[str, int]:
    """The costs of some trajectories of a task, from their steps' states and draws (`driver.Step`).

    chat: None where nothing is drawn or scored. scored: the actions of a step that QNet reads.
    """
    by_policy, again = [], 0
    for steps in trials:
        states = [step.state for step in steps]
        own = states[-1].task
        wordings = {candidate.task or own for step in steps for candidate in step.drawn}
        # With one wording the agent's words are in the cache. With several, only the task's own wording has them there;
        # each other one reads the full conversation.
        cached = wordings if len(wordings) == 1 else wordings & {own}
        by_policy += [[reword(state, wording) for state in states] for wording in cached]
        again += sum(len(chat.prompt(reword(states[-1], wording))) for wording in wordings - cached)
    by_qnet = {(step.state, action) for steps in trials for step in steps for action in scored(step)}
    environment = read(chat, ([step.state for step in steps] for steps in trials)) if by_qnet else 0
    return {
        "prompt": read(chat, by_policy) + again,
        "generated": sum(candidate.tokens for steps in trials for step in steps for candidate in step.drawn),
        "scored": sum(len(chat.action(action, state.task)) for state, action in by_qnet) + environment,
    }


def outcome(chat: Chat | None, method: Any, best: Sequence[Any], trials: Sequence[Any]) -> dict:
    """What a task's trajectories cost by a `q_search.Method`, and the best of them; chat: None of a player without."""
    steps = []
    for step in best:
        q = [None if score is None or not math.isfinite(score) else round(float(score), 4) for score in step.scores]
        candidates = [{"action": a, "q": value} for a, value in zip(step.candidates, q, strict=True)]
        steps.append({"action": step.action, "observation": step.observation, "candidates": candidates})
    reward = best[-1].reward
    fields = {
        "task": best[0].state.task, "reward": reward, "success": reward > 1 - 1e-9, "n_steps": len(best),
        "tokens": tokens(chat, trials, method.read_by_qnet),
        "env_steps": sum(method.env_steps(step) for trial in trials for step in trial), "resets": len(trials),
        "steps": steps,
    }  # fmt: skip
    if any(step.drawn for step in best) and chat.rendering.truncate:
        fields["cut_prompts"] = sum(chat.is_cut(step.state) for trial in trials for step in trial)
    return fields
