"""Lines of results.jsonl: what a task and a method came to, and what they cost."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from qlass.chat import Chat
from qlass.environment import TextEnv
from qlass.messages import State

Episode = list[Any]  # of q_search.Step

# --------------------------------------------------------------------------- the outcome of a task


def first_of_best(values: Sequence[float]) -> int:
    """The first of the highest values. Those of episodes that end alike differ by rounding, in each
    batch in another way."""
    return next(i for i, value in enumerate(values) if value > max(values) - 1e-6)


def describe(best: Episode, episodes: Sequence[Episode], costs: dict) -> dict:
    """The fields of a line: the episode that counts, and what all cost, as of `costs_of`."""
    steps = []
    for step in best:
        candidates = [
            {"action": action, "q": round(float(score), 4) if math.isfinite(score) else None}
            for action, score in zip(step.candidates, step.scores, strict=True)
        ]
        steps.append(
            {"action": step.action, "observation": step.observation, "candidates": candidates}
        )
    return {
        "task": best[0].state.task,
        "reward": best[-1].reward,
        "success": best[-1].reward > 1 - 1e-9,
        "n_steps": len(best),
        "unknown_actions": len([step for step in best if not step.is_valid]),
        **costs,
        "env_steps": sum(map(len, episodes)),
        "resets": len(episodes),
        "steps": steps,
    }


def costs_of(
    chat: Chat, episodes: Sequence[Episode], read_by_qnet: Callable[[Any], list[str]]
) -> dict:
    """Tokens of a task's episodes: each counts once, as with a prompt cache.

    `prompt` counts what the policy reads of the environment's words (its own are in the cache since
    it wrote them), `generated` all that it writes, `scored` what QNet reads, of the actions that
    `read_by_qnet` gives. What episodes share is read once. An agent that chooses among valid
    actions is charged the tokens of its choice.
    """
    steps = list(chain.from_iterable(episodes))
    by_qnet = {(step.state, action) for step in steps for action in read_by_qnet(step)}
    prompt = environment_tokens(chat, (step.state for step in steps))
    read = sum(len(chat.action_tokens(action, state.task)) for state, action in by_qnet)
    generated = sum(candidate.tokens for step in steps for candidate in step.samples)
    tokens = {"prompt": prompt, "generated": generated, "scored": prompt + read if read else 0}
    cut_prompts = len([step for step in steps if chat.is_truncated(step.state)])
    return {"tokens": tokens, "cut_prompts": cut_prompts}


def environment_tokens(chat: Chat, states: Iterable[State]) -> int:
    """Tokens of the environment's words: all of a first state, of later ones the last message.

    Where the oldest turns are left out beyond the model's context, what follows them is read again,
    the agent's words too.
    """
    total = 0
    for state in set(states):
        messages = chat.prompt_tokens(state)
        if len(state.messages) == state.opening + 1:
            messages = messages[::2]  # not the agent's OK
        elif chat.is_truncated(state):
            messages = messages[chat.fixed_messages(state) :]
        else:
            messages = messages[-1:]
        total += sum(map(len, messages))
    return total


# --------------------------------------------------------------------------------------- the file

CONDITION = ("task_id", "method", "split", "M", "N", "select", "player")


def identity(record: dict) -> tuple:
    """The key of a result; no two lines share it."""
    return tuple(map(record.get, CONDITION))


def protocol(env: TextEnv, chat: Chat | None) -> dict:
    """The way tasks were played, as far as neither lines nor recipe report it (docs/files.md)."""
    fields: dict[str, Any] = {"max_steps": env.max_steps}
    if chat:
        fields["temperature"] = chat.rendering.temperature
        fields["tokens"] = "nominal" if chat.rendering.candidates == "valid" else "real"
    return fields
