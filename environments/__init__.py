"""The environments behind `envs.py`, by name: an engine, its data, its players and its `TextEnv`, a folder each.

No model and no stage of the pipeline is needed here.
"""

import qlass as qlass  # first: it says in one line which package is missing

# isort: split
import contextlib
import difflib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium

from environments import check
from qlass import UserError
from qlass.environment import TextEnv
from qlass.inputs import fingerprint
from qlass.records import as_user_error
from qlass.settings import Run

WHERE = "(docs/models.md, section Data, says where the originals' files are from)"  # of what is missing

# Each has a folder of its own, which is loaded when it is asked for.
ENVIRONMENTS = {
    "webshop": "environments.webshop.env:WebShopEnv",
    "alfworld": "environments.alfworld.env:ALFWorldEnv",
    "sciworld": "environments.sciworld.env:SciWorldEnv",
    "frozenlake": "environments.frozenlake.env:FrozenLakeEnv",
}
SHARED: dict[str, Any] = {"max_steps": None, "instruction": ""}  # options of every class (`make`)

for _name, _place in ENVIRONMENTS.items():  # gymnasium.make("envs:qlass/WebShop-v0", split="test")
    _kind = _place.partition(":")[2].removesuffix("Env")
    gymnasium.register(f"qlass/{_kind}-v0", "envs:make", kwargs={"name": _name})


def writable(folder: Path) -> Path:
    """The folder for generated data, or the user's cache where the package is installed read-only."""
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return folder
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "qlass"


def parameters(kind: Callable) -> dict[str, Any]:
    """The options of a class by name, each with its default."""
    return {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}


def options_of(kind: Callable, words: Iterable[str]) -> dict[str, Any]:
    """The options of an environment, from NAME=VALUE. A value is JSON, such as 3, true or null, or else a text;
    UserError for a text in the place of a number, or of true and false."""
    options = {}
    defaults = parameters(kind) | SHARED
    for word in words:
        name, _, value = word.partition("=")
        value = os.path.expanduser(value)  # no shell reads ~ behind a "="
        if name not in defaults:
            raise UserError(f"--env-option {word}: its options are {', '.join(defaults)}")
        default = defaults[name]
        options[name] = value
        if not isinstance(default, str):
            with contextlib.suppress(json.JSONDecodeError):
                options[name] = json.loads(value)
        if isinstance(default, bool | int | float) and isinstance(options[name], str):
            raise UserError(f"--env-option {word}: {name} takes no text (its default is {json.dumps(default)})")
    return options


def contents_of(kind: Callable, options: dict[str, Any]) -> dict[str, str]:
    """The fingerprint of each file or folder that an option names, but for a `cache`. An option whose default is a word
    names no file, though a folder may have the same name."""
    words = {"cache"}
    for name, default in parameters(kind).items():
        if isinstance(default, str) and default.isalnum() and not Path(default).exists():
            words.add(name)
    paths = {
        name: Path(value) for name, value in options.items() if isinstance(value, str) and value and name not in words
    }
    return {name: fingerprint(path) for name, path in paths.items() if path.exists()}


# ------------------------------------------------------------------------------------- environments by their names


def environment_class(name: str) -> Any:
    """The class of an environment by its name, by MODULE:CLASS for one of your own, or by openenv:URL."""
    module, _, kind = ENVIRONMENTS.get(name, name).partition(":")
    if module == "openenv":
        return importlib.import_module("integrations.openenv_client").at(kind)
    if not kind:
        raise UserError(f"--env {name}: there are {', '.join(ENVIRONMENTS)}, and MODULE:CLASS for your own")
    if not all(map(str.isidentifier, module.split("."))):
        raise UserError(f"--env {name}: a module is named as in an import, such as good:Mine")
    with as_user_error(f"--env {name}", errors=ModuleNotFoundError):
        namespace = importlib.import_module(module)
    if not hasattr(namespace, kind):
        near = [f" (there is {n})" for n in difflib.get_close_matches(kind, dir(namespace), 1)]
        raise UserError(f"--env {name}: no such class{''.join(near)}")
    return getattr(namespace, kind)


def make(name: str, split: str = "train", **options: Any) -> TextEnv:
    """Build an environment by name; options are those of its class (`data`, ...) and of every one:

    split: from which a reset without a task_id draws. max_steps: None for no limit.
    instruction: a file with another first user message.
    """
    kind = environment_class(name)
    if "render_mode" not in parameters(kind):
        options.pop("render_mode", None)  # of gymnasium.make; an observation is a text
    shared = {key: options.pop(key) for key in SHARED if key in options.keys() - parameters(kind)}
    env = kind(**options)
    env.split = split
    limit = env.max_steps = shared.get("max_steps", env.max_steps)
    counts = limit is None or (type(limit) is int and limit > 0)  # true is an int too
    if not counts and (env.name, limit) != ("sciworld", "eto"):
        raise UserError(f"--env-option max_steps={limit}: 1, 2, ... or null for no limit is expected")
    if file := shared.get("instruction"):
        env.instruct(env.in_own_words(Path(file).read_text(encoding="utf-8-sig")))
    return env


def from_config(config: Run) -> TextEnv:
    """The environment of --env and --env-option, which plays --in-flight episodes side by side.

    Its `settings` are its part of a recipe, in which a file counts by its content, not by its
    place. A class of your own is checked until the run has an output's metadata.
    """
    kind, folder = environment_class(config.env), Path.cwd()
    options = options_of(kind, config.env_option)
    env = make(config.env, **options)
    width = getattr(config, "in_flight", None) or env.side_by_side
    ours = config.env in ENVIRONMENTS and env.name != "sciworld"  # whose copies share nothing that changes
    if width > env.side_by_side and not ours:
        raise UserError(f"--in-flight {width}: {env.name} plays {env.side_by_side} side by side")
    if config.env not in ENVIRONMENTS and not any(config.run.glob("*.meta.json")):
        check.check(env)
    if Path.cwd() != folder:
        raise UserError(f"--env {config.env}: it changes the working directory, in which the run's files are")
    env.side_by_side = width
    files = contents_of(kind, options)
    places = {*files, "cache"}
    env.settings = {
        "env": config.env,
        "env_option": tuple(w for w in config.env_option if w.partition("=")[0] not in places),
        "env_files": files,
        "env_version": env.version,
    }
    return env
