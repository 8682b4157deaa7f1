"""A run folder: what an output is made by, and how a stopped stage resumes.

    RUN/run.json            environment, options, content of data files, seed, preset
    RUN/trees.jsonl         an output
    RUN/trees.meta.json     its recipe: settings and inputs that its bytes depend on; and figures
    RUN/trees.jsonl.parts/  what is done of an unfinished output, a file per process

1. An output gets its name by one rename. To be there is to be complete.
2. The same recipe gives the same bytes: it resumes an output, and another recipe is refused.
3. A group of lines (a tree, a result) depends on the recipe and on its own key alone. So whichever
   process makes it, and however often, it is the same group.

No torch here, so that bellman.py starts at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qlass import UserError, files
from qlass.config import Run, begun_with, flag
from qlass.files import parts_of, share

PACKAGES = ("torch", "transformers", "numpy", "gymnasium", "scienceworld", "textworld")
AGAIN = "make it and each later output again (--overwrite)"
Inputs = dict[str, Path | None]  # by the flags that name them; None: there is none


def find_or_make(named: Path | None, stage: str, name: str, config: Run) -> Path:
    """An input of a stage: what was named, else RUN/name, which the earlier stage makes first."""
    path = named or config.run / name
    if named and not path.exists():
        raise UserError(f"{named}: no such file or folder")
    if name.endswith(".jsonl"):  # told before minutes pass in which other inputs are made
        files.refuse_folder(path)
    if not is_there(path):
        from qlass.optional import missing

        missing.make(path, stage, config, meta_of(path).get("argv", []))
    for product, source in outdated(path):
        files.warn(f"{product} was made from another {source} than there is now: {AGAIN}")
    return path


# ------------------------------------------------------------------------------------- the recipe


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    output = output if output.name not in ("", "..") else output.resolve()
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def meta_of(output: Path) -> dict[str, Any]:
    path = meta_path(output)
    return {"recipe": {}, "inputs": {}} | (files.read_object(path) if path.exists() else {})


def recipe_of(settings: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """What the bytes of an output depend on: settings, and the content of inputs."""
    hashes: dict[str, str | None] = {}
    for name, path in inputs.items():
        hashes[name] = files.sha256(path) if path and path.exists() else None
    return json.loads(json.dumps(settings | hashes, default=str))


def claim(output: Path, recipe: dict, overwrite: bool, may_change: Sequence[str] = ()) -> dict:
    """Begin an output, or resume it. Returns its recipe, with what only an earlier call has used.

    may_change: names of settings and inputs. UserError if it was begun with another recipe.
    """
    # Asked first, as metadata came before them.
    begun_parts = any(parts_of(output).glob("*.jsonl")) or states_of(output).exists()
    begun = meta_of(output)["recipe"]
    if not begun and (begun_parts or is_there(output)):  # also with --overwrite: it may be yours
        reason = "not of this command, which leaves a .meta.json beside it"
        raise UserError(f"{output}: {reason}: move it, or name it as an input")
    if overwrite:  # the metadata last: what a stop leaves is still known
        for old in (output, parts_of(output), states_of(output), meta_path(output)):
            files.discard(old)
        return recipe
    if not begun:
        return recipe
    for name in begun | recipe:
        before, now = begun.get(name), recipe.get(name)
        if before == now or name in may_change:
            continue
        hashed = any(isinstance(value, str) and len(value) == 64 for value in (before, now))
        # An input that not every call has, as a search without Q has no QNet, nor a server of one.
        which = "qnet" if name == "qnet_model" else name
        if (hashed or which != name) and not (which in begun and which in recipe):
            continue
        text = "that has changed or is another" if hashed else f"{before}, not {now}"
        way_out = "--overwrite starts again, another --out or --run keeps both"
        named = flag(name.removesuffix("_model"))  # a server's, which stands in its URL
        if name in ("env_version", "env_code", "env_files"):  # which no flag sets
            named = name.replace("env_", "the environment's ")
        raise UserError(f"{output} was begun with {named} {text}: {way_out}")
    return begun | recipe


def is_there(output: Path) -> bool:
    """Whether it is complete; an empty folder, perhaps on another disk, waits for a checkpoint."""
    return output.exists() and (output.is_file() or any(output.iterdir()))


def write_meta(output: Path, config: Run, recipe: dict, inputs: Inputs, **figures: Any) -> None:
    """Write NAME.meta.json and, if the run has none yet, RUN/run.json.

    Inputs are named relative to the output, so that a run may be moved.
    """
    folder = output.parent.resolve()
    places = {
        name: os.path.relpath(path.parent.resolve() / path.name, folder)
        for name, path in inputs.items()
        if path
    }
    record = {
        "recipe": recipe,
        "inputs": places,
        "argv": config.argv,
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
        **figures,
    }
    with files.replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)
    opened = recipe.get("env_files") is not None  # an environment
    if opened and not begun_with(config.run):
        shared = {name: recipe[name] for name in ("env", "env_option", "env_files")}
        with files.replacing(config.run / "run.json") as out:
            json.dump(shared | {"seed": config.seed, "preset": config.preset}, out, indent=1)


def write_at_once(
    output: Path,
    config: Run,
    records: Iterable[dict],
    inputs: Inputs,
    may_change: Sequence[str] = (),
    **figures: Any,
) -> None:
    """An output that takes no time to make, so it is made anew each time."""
    files.refuse_folder(output)
    with files.locked(output):
        recipe = recipe_of(config.recipe(), inputs)
        recipe = claim(output, recipe, config.overwrite, may_change)
        files.discard(output)  # a stop leaves no old lines beside new metadata
        write_meta(output, config, recipe, inputs, **figures)
        files.write_jsonl(output, records)


def input_of(output: Path, name: str) -> Path | None:
    """Where an input of an output is; None: there was none, or it is gone."""
    path = meta_of(output)["inputs"].get(name)
    place = output.parent / (path or output.name)  # metadata may have been moved to their own input
    return place if place.exists() and place.resolve() != output.resolve() else None


def outdated(output: Path, above: frozenset = frozenset()) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of all that it is made of."""
    meta, above = meta_of(output), above | {output.resolve()}  # metadata may lead in a circle
    for name in meta["inputs"]:
        source = input_of(output, name)
        if source and source.resolve() not in above:
            yield from outdated(source, above)
            if files.sha256(source) != meta["recipe"].get(name):
                yield output, source


# ------------------------------------------------------------------------ outputs of several parts


def states_of(checkpoint: Path) -> Path:
    """The folder of an unfinished training's states."""
    return checkpoint.with_name(checkpoint.name + ".partial")


class Output:
    """A JSONL file made group by group, by one process or several.

    A *group* is the lines that are about one thing and are written at once: of trees.jsonl the tree
    of a task, of expert.jsonl and results.jsonl one line. (A training's Group is another thing.)

    key: what a group is about, the same for all of its lines. groups: what need not be made again.
    alone: this process writes all of it, although it has others beside it.
    """

    def __init__(
        self,
        path: Path,
        config: Run,
        recipe: dict[str, Any],
        inputs: Inputs,
        key: Callable[[dict], Any],
        alone: bool = False,
    ) -> None:
        rank, n = (0, 1) if alone else share()
        files.refuse_folder(path)
        if config.overwrite and n > 1:
            raise UserError(f"{path}: several processes with --overwrite: delete it")
        self.path, self.config, self.key = path, config, key
        self.part = parts_of(path) / f"{rank}-of-{n}.jsonl"
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(files.locked(self.part if n > 1 else path))
        self.recipe = claim(path, recipe, config.overwrite)
        # Others that only an earlier call has used, such as the QNet of a search.
        self.inputs = {name: input_of(path, name) for name in meta_of(path)["inputs"]} | inputs
        self.started = time.time()
        self.read()
        self.one_call = n == 1 and not self.groups  # this call makes all of it

    @property
    def records(self) -> list[dict]:
        return list(itertools.chain(*self.groups.values()))

    def read(self) -> None:
        """All groups that are done, whoever made them, by their keys."""
        groups: dict[Any, list[dict]] = {}
        parts: dict[Any, list[dict]] = {}
        for part in sorted(parts_of(self.path).glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # another process has just finished
                for line in part.read_bytes().splitlines(keepends=True):
                    if line.endswith(b"\n"):  # else its writer was stopped
                        group = files.parse_json(line, str(part))
                        parts[self.key(group[0])] = group
        if self.path.exists():  # asked last, as parts are in it before they go
            for key, lines in itertools.groupby(files.read_jsonl(self.path), self.key):
                groups[key] = list(lines)
        self.groups = groups | parts

    def todo(self, keys: Iterable[Any]) -> list[Any]:
        """What is missing of this process's share: from the RANK-th on, every WORLD_SIZE-th."""
        (rank, n), keys = share(), list(keys)
        if not keys:
            raise UserError("no tasks are left: mind --split, --skip and --limit")
        if not 0 <= rank < n <= len(keys):
            raise UserError(f"RANK {rank}, WORLD_SIZE {n}: no share of {len(keys)} tasks")
        return self.missing(keys[rank::n])

    def missing(self, keys: Iterable[Any]) -> list[Any]:
        """Which of these groups are still to be made, by whichever process."""
        return [key for key in keys if key not in self.groups]

    def grow(self, groups: Iterable[list[dict]], title: str, total: int) -> None:
        """Write groups as they come, each as one line of this process's part."""
        from tqdm import tqdm

        if meta_of(self.path)["recipe"] != self.recipe:
            write_meta(self.path, self.config, self.recipe, self.inputs)
        self.part.parent.mkdir(exist_ok=True)
        with open(self.part, "a", encoding="utf-8") as out:
            out.truncate(self.part.read_bytes().rfind(b"\n") + 1)  # what a stop cut
            every = 0.1 if sys.stderr.isatty() else 30  # seconds
            for group in tqdm(groups, title, total, mininterval=every):
                out.write(files.dumps(group))
                out.flush()

    def finish(self, plan: Sequence[Any], **figures: Any) -> None:
        """Give the output its name, once all that is planned is done, by whichever process."""
        self.read()
        if missing := self.missing(plan):
            print(f"{self.path}: {len(missing)} of {len(plan)} are left to other processes")
        elif parts_of(self.path).exists() or not self.path.exists():
            for key in plan:
                self.groups[key] = self.groups.pop(key)  # in this order, behind older ones
            files.write_jsonl(self.path, self.records)
            seconds = time.time() - self.started if self.one_call else None
            figures["seconds"] = seconds
            write_meta(self.path, self.config, self.recipe, self.inputs, **figures)
            shutil.rmtree(parts_of(self.path), ignore_errors=True)
        self.lock.close()
