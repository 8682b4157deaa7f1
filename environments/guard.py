"""The border between an environment's class and those who play it: what goes in fits, what comes out is plain Python,
and a crash of the class is one line that names the task and the action."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib
import inspect
import itertools
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from environments import WHERE
from qlass import UserError
from qlass.messages import broken

# Of an option's default: the words for what fits it, and the types.
FITTING: dict[type, tuple] = {
    bool: ("true or false", bool),  # "False" would count as true
    int: ("a whole number", int),
    float: ("a number", float, int),
}
# Options of a reset that name a task. One that names none draws from `env.split`.
NAMING = (set(), {"task_id"}, {"index"}, {"split", "index"})


class Fault(UserError):
    """What a class does against the rules, or its crash."""


class Missing(Fault, NotImplementedError):
    """A method that a class has to define for what it is asked for."""


def attempt(what: Callable[[], str], act: Callable, /, *args: Any, **options: Any) -> Any:
    """act(...), whose crash is one line that begins with what was done."""
    try:
        return act(*args, **options)
    except UserError:
        raise
    except NotImplementedError as error:
        reason = f"{error or 'this'} is for a class to define (docs/environment.md)"
        raise Missing(f"{what()}: {reason}") from error
    except FileNotFoundError as error:
        raise UserError(f"{what()}: {error.filename}: {error.strerror} {WHERE}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Fault(f"{what()}: {reason} (--debug shows where)") from error


@dataclass(frozen=True)
class Ended:
    """A snapshot of an episode that has ended, and its last answer."""

    snapshot: Any
    answer: tuple = field(compare=False)


def named_task(env: Any, options: dict | None) -> str | None:
    """The task that a reset's options name, by its id or by its index in a split (by default `env.split`), or None."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if set(given) == {"split"}:
        way = f"make(..., split={given['split']!r}) draws from it at every reset"
        raise UserError(f"{env.name}: reset takes a split with an index, or none; {way}")
    if set(given) not in NAMING:
        raise UserError(f"{env.name}: reset takes task_id, or split and index, not {', '.join(given)}")
    if "index" in given:
        split, index = given.get("split", env.split), given["index"]
        tasks = env.task_ids(split)
        if index not in range(len(tasks)):
            raise UserError(f"{env.name}: reset: no task {index} of {split}, which has {len(tasks)}, counted from 0")
        return tasks[int(index)]
    return str(given["task_id"]) if given else None


def readable(text: Any) -> Any:
    """The text with the replacement character for half a surrogate. What is no text is left to the rules."""
    if isinstance(text, str) and broken(text):
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def reset(method: Callable, env: Any, *, seed: int | None = None, options: dict | None = None) -> tuple:
    """Who draws, seeds: the generator is set and the task drawn here, and a class's own `reset` always finds
    options["task_id"]. Its seed is that of this call, or for a task that was drawn without one a number drawn too."""
    if seed is not None:
        gymnasium.Env.reset(env, seed=seed)
    task_id = named_task(env, options)
    if task_id is None:
        tasks = env.split_ids(env.split)
        if not tasks:
            raise UserError(f"{env.name}: reset: {env.split} has no tasks")
        task_id = tasks[env.np_random.integers(len(tasks))]
        seed = int(env.np_random.integers(2**31)) if seed is None else seed
    env.playing, env.final_answer = task_id, None
    generator, begun_with = env._np_random, env._np_random_seed
    answer = method(env, seed=seed, options={"task_id": task_id})
    env._np_random, env._np_random_seed = generator, begun_with  # a class's super().reset(seed=seed) sets it back
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise Fault(f"{env.name}: reset returns {type(answer).__name__}, not (observation, info)")
    return shown(*answer)


def shown(observation: Any, info: dict) -> tuple[Any, dict]:
    if "task" in info:
        info["task"] = readable(info["task"])
    return readable(observation), info


def step(method: Callable, env: Any, action: str) -> tuple:
    """After the end the last answer, without its reward. numpy's booleans become Python's, which JSON knows; the
    reward's type is the business of `outcome`."""
    if env.playing is None:
        raise UserError(f"{env.name}: step before reset: no task is being played")
    if env.final_answer:
        return *env.final_answer[:4], copy.copy(env.final_answer[4])
    env.known = env.knows(action)
    observation, reward, terminated, truncated, info = method(env, action)
    observation, info = shown(observation, info)
    info["known"] = env.known
    terminated, truncated = bool(terminated), bool(truncated)
    if terminated or truncated:
        env.final_answer = observation, 0.0, terminated, truncated, copy.copy(info)
    return observation, reward, terminated, truncated, info


def snapshot(method: Callable, env: Any) -> Any:
    return Ended(method(env), env.final_answer) if env.final_answer else method(env)


def restore(method: Callable, env: Any, state: Any) -> None:
    state, env.final_answer = (state.snapshot, state.answer) if isinstance(state, Ended) else (state, None)
    env.playing = env.playing or ""
    method(env, state)


def candidates(method: Callable, env: Any) -> list[tuple[str, str]]:
    offered = method(env)
    texts = list(itertools.chain(*offered))
    if broken("".join(texts)):
        odd = next(filter(broken, texts))
        raise Fault(f"{env.name}: task {env.playing}: candidates: half a surrogate in {odd!r}")
    return offered


def expert(method: Callable, env: Any, task_id: str) -> Iterator:
    return player(env, "expert", lambda: method(env, task_id))


def oracle(method: Callable, env: Any, task_id: str) -> Iterator:
    return player(env, "oracle", lambda: method(env, task_id))


def rules(method: Callable, env: Any) -> dict[str, Callable[[], Iterator]]:
    return {name: functools.partial(player, env, f"rule {name!r}", begin) for name, begin in method(env).items()}


def player(env: Any, who: str, begin: Callable[[], Iterable]) -> Iterator:
    """The moves of one of the environment's own players."""

    def what() -> str:
        return f"{env.name}: task {env.playing}: {who}"

    moves, end = attempt(what, lambda: iter(begin())), object()
    return iter(lambda: attempt(what, next, moves, end), end)


def message(method: Callable, env: Any, observation: str) -> str:
    return readable(method(env, observation))


def plain(method: Callable, env: Any, *args: Any) -> Any:
    return method(env, *args)


AROUND = {each.__name__: each for each in (reset, step, snapshot, restore, message, candidates, expert, oracle, rules)}
OTHERS = ("split_ids", "task_type", "subject", "block", "picture", "published_id", "in_own_words")
AROUND |= dict.fromkeys(("canonical", "reward_if_cut", *OTHERS), plain)


TOLD = ("step", "canonical", "split_ids", "task_type", "subject", "block")  # whose argument a crash tells


class Guarded:
    """What stands between its subclasses and their callers: the functions above, around the methods of these names."""

    name: str
    playing: str | None = None  # the task of the last reset, which a crash names
    final_answer: tuple | None = None  # the last one of an episode that has ended

    def outcome(self, reward: Any, done: bool) -> float:
        """A step's reward as a number: 0, but for the last step's, which is in [0, 1].

        1 is success. UserError for any other reward: success, the trees' line 9 and the labels would be wrong without
        a word.
        """
        value = float(reward)
        if not 0 <= value <= 1 or (value and not done):
            rule = "an episode earns 0 to 1 with its last step, and 0 before; 1 is success"
            raise UserError(f"{self.name}: a step earned {reward}, but {rule}")
        return value

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name") or cls.__name__.lower()  # not that of the class it is derived from
        for name, around in AROUND.items():
            method = getattr(cls, name)
            if getattr(method, "guarded", None) is not method:
                setattr(cls, name, guarded(method, around, name))


def guarded(method: Callable, around: Callable, name: str) -> Callable:
    @functools.wraps(method)
    def call(env: Any, *args: Any, **options: Any) -> Any:
        if getattr(type(env), name) is not call:  # a subclass's method, which has its own guard, calls this one
            return method(env, *args, **options)
        text = "{0.name}: task {0.playing}: {1}" + ("({2!r})" if name in TOLD else "")
        return attempt(lambda: text.format(env, name, *args), around, method, env, *args, **options)

    call.guarded = call  # a decorator's copy of this attribute is not the function that has it
    return call


def class_named(name: str, classes: dict[str, str], base: type) -> Any:
    """A class derived from `base`, by its name in `classes` or by MODULE:CLASS."""
    module, _, kind = classes.get(name, name).partition(":")
    if "" not in sys.path:
        sys.path.append("")  # a module of the folder at hand, as with `python -m`
    try:
        cls = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(name, classes, 1)
        if near and name not in classes:
            raise UserError(f"--env {name}: perhaps you meant {near[0]}") from None
        choice = f"there are {', '.join(classes)}, and MODULE:CLASS for your own"
        hidden = "is a folder of yours named as one of ours?"
        raise UserError(f"--env {name}: {error}; {choice} ({hidden})") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"--env {name}: {kind} is no class that is derived from envs.{base.__name__}")
    return cls


def checked_limit(name: str, steps: Any) -> int | None:
    if steps is not None and (type(steps) is not int or steps < 1):
        reason = "a number of steps is expected, or null for no limit"
        raise UserError(f"{name}: max_steps={steps}: {reason}")
    return steps


def check_forks(env: Any, in_flight: int | None) -> None:
    """UserError for more forks side by side than a class of your own allows."""
    if (in_flight or 1) > env.side_by_side:
        reason = f"{env.name} may have {env.side_by_side} open at once, its side_by_side"
        raise UserError(f"--in-flight {in_flight}: {reason}")


def build(name: str, kind: type, options: dict[str, Any]) -> Any:
    """kind(**options), for --env NAME. `split`, unless a class has an option of this name: see `TextEnv.split`."""
    parameters, options = inspect.signature(kind), dict(options)
    split = None if "split" in parameters.parameters else options.pop("split", None)
    try:
        parameters.bind(**options)
    except TypeError as error:
        names = ", ".join(parameters.parameters) or "none"
        raise UserError(f"--env {name}: {error} (--env-option NAME=VALUE; its options: {names})") from None
    env = attempt(lambda: f"--env {name}", kind, **options)
    if "max_steps" in options:  # a class may take it and not pass it on
        env.max_steps = options["max_steps"]
    if split is not None:
        env.split_ids(split)  # UserError if there is none
        env.split = split
    return env


def unknown_option(name: str, options: list[str]) -> str:
    near = difflib.get_close_matches(name, options, 1)
    hint = f"; perhaps you meant {near[0]}" if near else ""
    return f"there is no option {name}, but {', '.join(options) or 'none'}{hint}"


def describe_options(name: str, kind: Any) -> str:
    """For --help: the options of an environment with their defaults, and what its class says of them."""
    options = []
    for option, parameter in inspect.signature(kind).parameters.items():
        simple = type(parameter.default) in (bool, int, float, str) and parameter.default != math.inf
        options.append(f"{option}={json.dumps(parameter.default)}" if simple else option)
    title = f"--env-option of {name}: {', '.join(options) or 'none'}"
    about = re.sub(r"(?m)\n(?!\n|\w+: )", " ", inspect.cleandoc(vars(kind).get("__doc__") or ""))
    width = shutil.get_terminal_size().columns - 2
    rows = [textwrap.fill(row, width) for row in (title, *filter(None, about.split("\n")))]
    return "\n" + textwrap.indent("\n".join(rows), "  ")


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
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--env-option {text}: NAME=VALUE is expected")
        if name in others:
            raise UserError(f"--env-option {text}: --{name.replace('_', '-')} says so here")
        if name not in parameters:
            raise UserError(f"--env-option {text}: {unknown_option(name, list(parameters))}")
        default, annotation = parameters[name].default, str(parameters[name].annotation)
        if not isinstance(default, str):
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(value)
        words, *kinds = FITTING.get(type(default), ("",))
        if kinds and type(value) not in kinds and not (value is None and "None" in annotation):
            raise UserError(f"--env-option {text}: {name} must be {words}")
        options[name] = value
    return texts, options
