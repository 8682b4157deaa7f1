"""The border between an environment's class and those who play it: what goes in fits, what comes out is plain Python,
and a crash of the class is one line that names the task and the action."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from qlass import UserError

# Of an option's default: the words for what fits it, and the types.
FITTING: dict[type, tuple] = {
    bool: ("true or false", bool),  # "False" would count as true
    int: ("a whole number", int, type(None)),
    float: ("a number", float, int, type(None)),
}


class Fault(UserError):
    """What a class does against the rules, or its crash."""


def attempt(what: Callable[[], str], act: Callable, *args: Any, **options: Any) -> Any:
    """act(...), whose crash is one line that begins with what was done."""
    try:
        return act(*args, **options)
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Fault(f"{what()}: {reason} (--debug shows where)") from error


@dataclass(frozen=True)
class Ended:
    """A snapshot of an episode that has ended, and its last answer."""

    snapshot: Any
    answer: tuple = field(compare=False)


def task_of(env: Any, seed: int | None, options: dict | None) -> str:
    """The task that `reset` begins: task_id, or of a split (by default train) the one at an index, or any."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if given.keys() - {"task_id", "split", "index"} or ("task_id" in given and len(given) > 1):
        raise UserError(f"{env.name}: reset takes task_id, or split and index, not {', '.join(given)}")
    if "task_id" in given:
        return str(given["task_id"])
    split, index = given.get("split", "train"), given.get("index")
    tasks = env.split_ids(split) if index is None else env.task_ids(split)
    if index is None and tasks:
        gymnasium.Env.reset(env, seed=seed)
        index = env.np_random.integers(len(tasks))
    if index not in range(len(tasks)):
        raise UserError(f"{env.name}: reset: no task {index} of {split}, which has {len(tasks)}, counted from 0")
    return tasks[int(index)]


def reset(method: Callable, env: Any, *, seed: int | None = None, options: dict | None = None) -> tuple:
    """A class's own `reset` always finds options["task_id"]."""
    env.playing, env.final_answer = task_of(env, seed, options), None
    return method(env, seed=seed, options={"task_id": env.playing})


def step(method: Callable, env: Any, action: str) -> tuple:
    """After the end the last answer, without its reward. numpy's booleans become Python's, which JSON knows; the
    reward's type is the business of `TextEnv.outcome`."""
    if env.playing is None:
        raise UserError(f"{env.name}: step before reset: no task is being played")
    if env.final_answer:
        return *env.final_answer[:4], copy.copy(env.final_answer[4])
    env.known = env.knows(action)
    observation, reward, terminated, truncated, info = method(env, action)
    info["known"] = env.known
    terminated, truncated = bool(terminated), bool(truncated)
    if terminated or truncated:
        env.final_answer = observation, 0.0, terminated, truncated, copy.copy(info)
    return observation, reward, terminated, truncated, info


def expert(method: Callable, env: Any, task_id: str) -> Iterator:
    moves, end = iter(method(env, task_id)), object()
    return iter(lambda: attempt(lambda: f"{env.name}: task {task_id}: expert", next, moves, end), end)


def snapshot(method: Callable, env: Any) -> Any:
    return Ended(method(env), env.final_answer) if env.final_answer else method(env)


def restore(method: Callable, env: Any, state: Any) -> None:
    state, env.final_answer = (state.snapshot, state.answer) if isinstance(state, Ended) else (state, None)
    env.playing = env.playing or ""
    method(env, state)


def guard(kind: type) -> None:
    """Put the functions above around the methods of these names."""
    for around in (reset, step, snapshot, restore, expert):
        method = getattr(kind, around.__name__)
        if getattr(method, "guarded", None) is not method:
            setattr(kind, around.__name__, guarded(method, around, around.__name__))


def guarded(method: Callable, around: Callable, name: str) -> Callable:
    @functools.wraps(method)
    def call(env: Any, *args: Any, **options: Any) -> Any:
        if getattr(type(env), name) is not call:  # a subclass's method, which has its own guard, calls this one
            return method(env, *args, **options)
        text = "{0.name}: task {0.playing}: {1}({2!r})" if name == "step" else "{0.name}: task {0.playing}: {1}"
        return attempt(lambda: text.format(env, name, *args), around, method, env, *args, **options)

    call.guarded = call  # a decorator's copy of this attribute is not the function that has it
    return call


def build(name: str, kind: type, options: dict[str, Any]) -> Any:
    """kind(**options), for --env NAME."""
    parameters = inspect.signature(kind)
    try:
        parameters.bind(**options)
    except TypeError as error:
        names = ", ".join(parameters.parameters) or "none"
        raise UserError(f"--env {name}: {error} (--env-option NAME=VALUE; its options: {names})") from None
    env = attempt(lambda: f"--env {name}", kind, **options)
    if "max_steps" in options:  # a class may take it and not pass it on
        env.max_steps = options["max_steps"]
    return env


def options_of(kind: Any, texts: list[str], others: Collection[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """NAME=VALUE of a class, with those that the surroundings set, as texts and by name. others: set by other flags.

    A value is text, or JSON (numbers, true, false, null) if the default is no text.
    """
    parameters = inspect.signature(kind).parameters
    given = {text.partition("=")[0] for text in texts}
    more = [f"{name}={value}" for name, value in kind.default_options().items() if name not in given]
    texts = sorted([*texts, *more])
    options = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in parameters or name in others:
            raise UserError(f"--env-option {text}: NAME=VALUE is expected, of {', '.join(parameters) or 'none'}")
        default = parameters[name].default
        if not isinstance(default, str):
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(value)
        words, *kinds = FITTING.get(type(default), ("",))
        if kinds and type(value) not in kinds:
            raise UserError(f"--env-option {text}: {name} must be {words}")
        options[name] = value
    return texts, options
