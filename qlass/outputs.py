"""Outputs of the stages: complete or absent, made again by the same command, byte for byte but for
the seconds in lines and metadata.

    RUN/settings.toml       the settings of all stages, environment and seed too
    RUN/trees.jsonl         an output
    RUN/trees.meta.json     its recipe: settings and inputs that its bytes depend on; and figures
    RUN/trees.jsonl.parts/  what is done of an unfinished output: of a file a part per process, of a
                            checkpoint its training's states; its own meta.json, if it will replace
                            an output

1. An output gets its name by one rename: if it is there, a command has completed it. With
   --overwrite the old output stays until the new one is whole, and old parts stay until the new
   output has one.
2. The same recipe, by the same commands, gives the same bytes, but for what other portions round
   (`settings.workload`). Its command goes on with a stopped output, and another recipe is refused.
3. A group of lines (a tree, a result) depends on the recipe and on its own key alone. So whichever
   process makes it, and however often, it is the same group, but for that rounding.

No torch here, so that bellman.py starts at once.
"""

import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qlass import UserError
from qlass.files import (
    Inputs,
    atomic,
    begun_meta,
    dumps,
    is_begun,
    lock,
    meta_of,
    meta_path,
    parts_folder,
    rank_and_size,
    read_jsonl,
    read_meta,
    remove,
    warn,
    write_json,
    write_jsonl,
)
from qlass.inputs import sha256
from qlass.settings import Run, settings_in, write_settings

PACKAGES = ("torch", "transformers", "numpy", "gymnasium")  # whose versions metadata report

# ------------------------------------------------------------------------------ recipe and metadata


def recipe_of(output: Path, config: Run, settings: dict, inputs: Inputs) -> dict:
    """All that the bytes of an output depend on. UserError for an input that is the output, or of
    another environment, and for an output that was begun with another recipe.

    settings: what they depend on beside the content of the inputs.
    """
    version = settings.get("env_version")
    for name, path in inputs.items():
        if path is None:
            continue
        if output.exists() and output.samefile(path):
            raise UserError(f"{output} is an input of this command: name another --out")
        world = meta_of(path)["recipe"]
        # Without metadata the first line says the name of an environment, and not its class.
        if not world and path.suffix == ".jsonl" and ":" not in config.env:
            world = next(iter(read_jsonl(path)), {})
        env, other = world.get("env"), world.get("env_version")
        if env not in (None, config.env):
            raise UserError(f"{path} is of {env}, not of {config.env}: --env, or another --{name}")
        version = version or other
        if other not in (None, version):
            warn(f"{path} is of version {other} of {config.env}, the rest of version {version}")
    if version:  # a stage that plays nothing has its inputs'
        settings = settings | {"env_version": version}
    hashes = {name: sha256(path) if path else None for name, path in inputs.items()}
    settings = settings | hashes | {"stage": config.stage}
    if "precision" in settings:
        from qlass.device import device_and_precision  # loads torch

        settings["precision"] = device_and_precision(config)[1]
    recipe = json.loads(json.dumps(settings, default=str))
    if is_begun(output):
        refuse_another_recipe(output, config, recipe, inputs)
    return recipe


def refuse_another_recipe(output: Path, config: Run, recipe: dict, inputs: Inputs) -> None:
    """UserError if an output was begun with another recipe than this one."""
    meta_file = begun_meta(output)
    old = read_meta(meta_file)["recipe"]
    if not old:
        raise UserError(
            f"{output}: is there without its .meta.json, so not of this command: move it"
        )
    names = [name for name in sorted(old.keys() & recipe.keys()) if old[name] != recipe[name]]
    own = old["stage"] == config.stage
    if names and not (own and config.overwrite):
        words = [f"another {n}" if n in inputs else f"{n} {old[n]}, not {recipe[n]}" for n in names]
        way = "another --out or --run keeps both" + (", --overwrite starts again" if own else "")
        raise UserError(f"{output} was begun with {'; '.join(words)} ({meta_file}): {way}")


def begin(output: Path, config: Run, settings: dict, inputs: Inputs) -> dict:
    """Return an output's metadata, from `recipe_of`'s arguments, and write them; with --overwrite
    `claim` or `publish` writes them later."""
    recipe = recipe_of(output, config, settings, inputs)
    meta_file = begun_meta(output)
    new = config.overwrite or not is_begun(output)
    old = {} if new else read_meta(meta_file)
    folder = output.parent.resolve()
    places = {n: os.path.relpath(path.resolve(), folder) for n, path in inputs.items() if path}
    meta = old | {
        "recipe": old.get("recipe", {}) | recipe,
        "inputs": old.get("inputs", {}) | places,
    }
    meta.setdefault("versions", {name: metadata.version(name) for name in PACKAGES})
    meta.setdefault("commit", code_version())
    meta["flags"] = list(dict.fromkeys([*meta.get("flags", ()), config.flags]))  # each command's
    if folder == config.run.resolve():
        if not config.file.exists():
            write_settings(config)
        lora, expert = (getattr(config, name, None) for name in ("lora", "expert"))
        meta.setdefault("settings", settings_in(config.file, config.stage, lora, expert))
    if meta != old and not config.overwrite:
        write_json(meta_file, meta)
    return meta


def code_version() -> str:
    """The commit of this code, "-dirty" after it if files differ; empty where git has none."""
    root = Path(__file__).parents[1]  # not a repository around this code
    words = ["--always", "--dirty", "--abbrev=7", "--exclude=*"]
    git = ["git", f"--git-dir={root}/.git", f"--work-tree={root}", "describe", *words]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def costs(began: float) -> dict:
    """Figures for the metadata: the seconds since `began`, and this process's peak memory in MB
    (10^6 bytes), resident and, by torch's allocator, on its GPU, which LOCAL_RANK may name."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch: Any = sys.modules.get("torch")
    gpus = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())) if torch else ()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "memory_mb": resident * (1 if sys.platform == "darwin" else 1024) // 10**6,
        "gpu_memory_mb": max(gpus, default=0) // 10**6,
    }


# --------------------------------------------------------------------------------------- the output


def publish(output: Path, records: Iterable[dict], meta: dict) -> None:
    """Give a JSONL file its name, and write its metadata."""
    with atomic(output) as draft:
        write_jsonl(draft, records)
        write_json(meta_path(output), meta)


def claim(output: Path, meta: dict, again: bool) -> None:
    """Make the folder of an output's parts. again: they replace older parts, and have metadata of
    their own, as those beside the output are the old output's."""
    folder = parts_folder(output)
    for file in folder.glob("*") if again else ():
        if file.name != "meta.json":  # which tells until the last whose parts they are
            remove(file)
    folder.mkdir(exist_ok=True)
    if again:
        write_json(folder / "meta.json", meta)


def remove_parts(output: Path) -> None:
    """Remove the parts of a complete output, their metadata first: parts that have metadata would
    replace the output."""
    remove(parts_folder(output) / "meta.json")
    shutil.rmtree(parts_folder(output), ignore_errors=True)


class Output:
    """A JSONL file made group by group, by one process or several.

    A *group* is the lines that are about one thing and are written at once: of trees.jsonl the tree
    of a task, of expert.jsonl and results.jsonl one line. key: what a group is about, the same for
    all of its lines. groups: what is done, by whichever process.
    """

    def __init__(
        self,
        path: Path,
        config: Run,
        settings: dict,
        inputs: Inputs,
        key: Callable[[dict], Any],
    ) -> None:
        rank, n = rank_and_size()
        if n > 1 and config.overwrite:
            raise UserError(f"{path}: --overwrite is for one process: delete the file")
        self.path, self.key = path, key
        self.parts = parts_folder(path)
        self.part = self.parts / f"{rank}-of-{n}.jsonl"
        self.lock = lock(path.with_name(f"{path.name}.{rank}-of-{n}") if n > 1 else path)
        self.meta = begin(path, config, settings, inputs)
        if n > 1:  # the others, too, are refused another recipe from here on
            self.parts.mkdir(exist_ok=True)
        self.began = time.monotonic()
        self.again = config.overwrite  # until the first group
        self.read()

    @property
    def records(self) -> list[dict]:
        return list(itertools.chain(*self.groups.values()))

    def read(self) -> None:
        """Read all finished groups. The parts come first: if another process finishes in between
        and deletes them, the output already has their groups."""
        parts: dict[Any, list[dict]] = {}
        with contextlib.suppress(FileNotFoundError):
            for part in [] if self.again else sorted(self.parts.glob("*.jsonl")):
                for line in part.read_bytes().split(b"\n"):
                    # empty, or what a stop cut
                    with contextlib.suppress(ValueError, LookupError, TypeError):
                        group = json.loads(line)
                        parts[self.key(group[0])] = group
        replaces = self.again or (self.parts / "meta.json").exists()
        records = read_jsonl(self.path) if self.path.exists() and not replaces else []
        done = {key: list(group) for key, group in itertools.groupby(records, self.key)}
        self.groups = done | parts
        self.done = done  # what the output has already

    def todo(self, keys: Sequence[Any]) -> list[Any]:
        """The missing keys of this process's share."""
        if not keys:
            raise UserError(f"{self.path}: no task is left (--split and --skip, or --tasks)")
        rank, n = rank_and_size()
        return [key for key in keys[rank::n] if key not in self.groups]

    def write(self, groups: Iterable[list[dict]], title: str, total: int) -> None:
        """Write groups as they come, each as one line of this process's part."""
        if not total:
            return  # others may finish meanwhile, and remove the folder of the parts
        for group in tqdm(groups, title, total, mininterval=0.5):
            claim(self.path, self.meta, self.again)  # also after another process has finished
            self.again = False
            with open(self.part, "ab") as out:
                out.write(b"\n" + dumps(group).encode())  # a line of its own, after what a stop cut
        self.read()

    def finish(self, plan: Sequence[Any], **figures: Any) -> None:
        """Give the output its name, once all that is planned is done, by whichever process."""
        missing = [key for key in plan if key not in self.groups]
        if missing:
            print(f"{self.path}: {len(missing)} of {len(plan)} are left to other processes")
        else:
            planned = {key: self.groups[key] for key in plan}
            self.groups = self.done | planned | self.groups  # in this order
            if self.groups.keys() != self.done.keys():
                publish(self.path, self.records, self.meta | figures | costs(self.began))
            remove_parts(self.path)
        self.lock.release()
