"""The border between an environment's class and those who play it: what goes in fits, what comes out is plain Python,
and a crash of the class is one line that names the task and the action."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from qlass import UserError

# Of an option's default: the words for what fits it, and the types.
FITTING: dict[type, tuple] = {
    bool: ("true or false", bool),  # "False" would count as true
    int: ("a whole number", int, type(None)),
    float: ("a number", float, int, type(None)),
}


class Fault(UserError):
    """What a class does against the rules, or its crash."""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """A crash within in one line that begins with what was done."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Fault(f"{what}: {reason} (--debug shows where)") from error


def guard_reset(reset: Callable) -> Callable:
    @functools.wraps(reset)
    def guarded(env: Any, *, seed: int | None = None, options: dict | None = None) -> tuple:
        env.playing = (options or {}).get("task_id", "")
        with named(f"{env.name}: task {env.playing}: reset"):
            return reset(env, seed=seed, options=options)

    return guarded


def guard_step(step: Callable) -> Callable:
    """numpy's booleans become Python's, which JSON knows; the reward's type is the business of `TextEnv.outcome`."""

    @functools.wraps(step)
    def guarded(env: Any, action: str) -> tuple:
        with named(f"{env.name}: task {env.playing}: step({action!r})"):
            observation, reward, terminated, truncated, info = step(env, action)
            return observation, reward, bool(terminated), bool(truncated), info

    return guarded


def build(name: str, kind: type, options: dict[str, Any]) -> Any:
    """kind(**options), for --env NAME."""
    parameters = inspect.signature(kind)
    try:
        parameters.bind(**options)
    except TypeError as error:
        known = ", ".join(parameters.parameters) or "none"
        raise UserError(f"--env {name}: {error} (--env-option NAME=VALUE; its options: {known})") from None
    with named(f"--env {name}"):
        env = kind(**options)
    if "max_steps" in options:  # a class may take it and not pass it on
        env.max_steps = options["max_steps"]
    return env


def options_of(kind: Any, texts: list[str], others: Collection[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """NAME=VALUE of a class, with those that the surroundings set, as texts and by name. others: set by other flags."""
    parameters = inspect.signature(kind).parameters
    given = {text.partition("=")[0] for text in texts}
    more = [f"{name}={value}" for name, value in kind.default_options().items() if name not in given]
    texts = sorted([*texts, *more])
    options = {}
    for text in texts:
        name = text.partition("=")[0]
        if name not in parameters or name in others:
            raise UserError(f"--env-option {text}: NAME=VALUE is expected, of {', '.join(parameters) or 'none'}")
        options[name] = value_of(text, parameters[name].default)
    return texts, options


def value_of(option: str, default: Any) -> Any:
    """The value in NAME=VALUE: text, or JSON (numbers, true, false, null) where the default is no text."""
    name, _, value = option.partition("=")
    if not isinstance(default, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    words, *kinds = FITTING.get(type(default), ("",))
    if kinds and type(value) not in kinds:
        raise UserError(f"--env-option {option}: {name} must be {words}")
    return value
