"""results.jsonl: a line for each task and method, with what it cost, resumed task by task."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from qlass import Refused, UserError
from qlass.agent import settled
from qlass.batching import Candidate, Models, drive
from qlass.chat import Chat, Rendering
from qlass.files import warn
from qlass.leaks import leaks
from qlass.messages import State
from qlass.runs import AGAIN, Inputs, Output, meta_of, outdated, recipe_of

# --------------------------------------------------------------------------- the outcome of a task


@dataclass(frozen=True)
class Step:
    """Lines 5 to 9 of Algorithm 4."""

    state: State  # s_t
    drawn: Sequence[Candidate]  # M candidates
    candidates: list[str]  # the distinct actions among them
    scores: list[float]  # of the candidates; nan where nothing scores them
    action: str  # the one taken
    observation: str  # what it led to
    reward: float
    known: bool = True  # to the environment


Episode = list[Step]


def describe(best: Episode, episodes: Sequence[Episode], costs: dict) -> dict:
    """The fields of a line: the episode that counts, and what all cost, as of `costs_of`."""
    steps = []
    for step in best:
        candidates = []
        for action, score in zip(step.candidates, step.scores, strict=True):
            q = round(float(score), 4) if math.isfinite(score) else None
            candidates.append({"action": action, "q": q})
        line = {"action": step.action, "observation": step.observation, "candidates": candidates}
        steps.append(line)
    return {
        "task": best[0].state.task,
        "reward": best[-1].reward,
        "success": best[-1].reward > 1 - 1e-9,
        "n_steps": len(best),
        "unknown_actions": len([step for step in best if not step.known]),
        **costs,
        "env_steps": sum(map(len, episodes)),
        "resets": len(episodes),
        "steps": steps,
    }


def costs_of(
    chat: Chat, episodes: Sequence[Episode], scored: Callable[[Step], list[str]]
) -> dict[str, Any]:
    """Tokens of a task's episodes: a model reads and writes each once, as with a prompt cache.

    `prompt` counts what the policy reads of the environment's words (its own are in the cache since
    it wrote them), `generated` all that it writes, `scored` what QNet reads, of the actions that
    `scored` gives. What episodes share is read once. An agent that chooses among valid actions is
    charged the tokens of its choice.
    """
    generated = 0
    by_qnet: set[tuple[State, str]] = set()
    for step in chain.from_iterable(episodes):
        generated += sum(candidate.tokens for candidate in step.drawn)
        by_qnet.update((step.state, action) for action in scored(step))
    prompt = environment_tokens(chat, ([step.state for step in episode] for episode in episodes))
    read = prompt if by_qnet else 0
    read += sum(len(chat.action(action, state.task)) for state, action in by_qnet)
    costs: dict[str, Any] = {"tokens": {"prompt": prompt, "generated": generated, "scored": read}}
    if chat.rendering.truncate:
        steps = chain.from_iterable(episodes)
        costs["cut_prompts"] = len([step for step in steps if chat.is_cut(step.state)])
    return costs


def environment_tokens(chat: Chat, episodes: Iterable[Sequence[State]]) -> int:
    """Tokens of the environment's words: all of a first state, then each last message.

    Where the oldest turns are left out, what follows them is read again, the agent's words too.
    """
    tokens: dict[State, int] = {}
    for states in episodes:
        for t, state in enumerate(states):
            if state in tokens:
                continue
            messages = chat.prompt_tokens(state)
            if t == 0:
                messages = messages[::2]  # not the agent's OK
            elif chat.is_cut(state):
                messages = messages[chat.stays(state) :]
            else:
                messages = messages[-1:]
            tokens[state] = sum(map(len, messages))
    return sum(tokens.values())


# --------------------------------------------------------------------------------------- the file

CONDITION = ("task_id", "method", "split", "M", "N", "select", "player")


def identity(record: dict) -> tuple:
    """What a result is about; no two lines are about the same."""
    return tuple(map(record.get, CONDITION))


def protocol(config: Any, env: Any, sft: Path) -> dict[str, Any]:
    """What the numbers of a file mean, as far as its lines do not tell it (data/README.md)."""
    rendering = Rendering.load(sft, config)
    data = {n: content for n, content in env.settings["env_files"].items() if n != "instruction"}
    fields = {"max_steps", "instruction", *data}  # the instruction is the agent's
    options = [o for o in env.settings["env_option"] if o.partition("=")[0] not in fields]
    return {
        "environment": config.env,
        "version": env.version,
        "options": options,
        "data": data,
        "max_steps": env.max_steps,
        "measure": "reward, 0 to 1; success is 1",
        "temperature": rendering.temperature,
        "tokens": "nominal" if rendering.candidates == "valid" else "real",
    }


def play(
    config: Any,
    env: Any,
    tasks: list[str],
    plan: Sequence[Any],
    chat: Chat | None,
    models: Models,
    inputs: Inputs,
    **facts: Any,
) -> None:
    """Play this process's share of the tasks by each method of the plan, a line as each ends.

    A method has `settings()`, the fields that tell it apart, a name, its text, and `play`: from an
    environment, a task, the agent's Chat and the episodes that methods share, a generator of
    requests that returns the outcome. inputs: agent, QNet, and what else results are made from.
    facts: what was settled at run time. With --show an episode is printed, and nothing written.
    """
    if getattr(config, "show", False):
        from reporting.show import show

        return show(config, env, tasks, plan, chat, models)
    recipe = recipe_of(config.recipe() | env.settings | settled(config) | facts, inputs)
    path = config.out or config.run / "results.jsonl"
    out = Output(path, config, recipe, inputs, identity)
    before = len(out.groups)
    width = config.in_flight or env.side_by_side
    shared = {"env": env.name, "split": config.split, "label": config.label}
    episodes: dict[tuple, Episode] = {}

    def line_of(method: Any, task_id: str) -> Generator[Any, Any, list[dict]]:
        started, fork = time.time(), env.fork()
        try:
            outcome = yield from method.play(fork, task_id, chat, episodes)
        except Refused as error:
            from qlass.optional.server import outcome_of_refusal

            outcome = outcome_of_refusal(fork, task_id, str(error))
        fork.close()
        line = {"task_id": task_id, "type": env.task_type(task_id), "block": env.block(task_id)}
        line |= shared | method.settings() | {"seed": config.seed} | outcome
        return [line | {"seconds": round(time.time() - started, 3)}]

    keys = {m: {identity({"task_id": t} | shared | m.settings()): t for t in tasks} for m in plan}
    for method, task_of in keys.items():
        if todo := out.todo(task_of):
            games = drive((line_of(method, task_of[key]) for key in todo), models, width)
            out.grow(games, str(method), len(todo))
    out.read()
    used = out.inputs
    sft, qnet = (used.get(name) or config.run / name for name in ("sft", "qnet"))
    figures = {
        "leaks": leaks(env, out.records, sft, qnet),
        "cloned": bool(meta_of(sft)["recipe"]),  # else it is a model as it came
        "protocol": protocol(config, env, sft),
    }
    out.finish([*chain(*keys.values())], **figures)
    nothing_new = len(out.groups) == before
    if nothing_new:
        refuse_stale(path, [sft, qnet] if any(m.needs_q for m in plan) else [sft])
    for method, task_of in keys.items():
        tell(method, [out.groups[key][0] for key in task_of if key in out.groups], config.split)
    if nothing_new:
        print(f"{path}: all of this was played before; --overwrite empties it first")


def refuse_stale(out: Path, checkpoints: list[Path]) -> None:
    """UserError if an input of agent or QNet has changed: old rewards must not pass for new."""
    for checkpoint in checkpoints:
        for product, source in outdated(checkpoint):
            reason = f"all was played before {source} changed"
            raise UserError(f"{out}: {reason}: {product}: {AGAIN}")


def tell(method: Any, records: list[dict], split: str) -> None:
    mean = sum(record["reward"] for record in records) / len(records)
    print(f"{method}: mean reward {mean:.3f} over {len(records)} {split} tasks")
    if refused := [record["refused"] for record in records if record.get("refused")]:
        problem = f"{len(refused)} of these tasks are refused, and count as 0"
        warn(f"{method}: {problem} ({refused[0]})")
    steps = sum(record["n_steps"] for record in records)
    unknown = sum(record.get("unknown_actions", 0) for record in records) / max(steps, 1)
    if unknown > 0.05:
        warn(f"{method}: the environment did not know {unknown:.0%} of its actions")
