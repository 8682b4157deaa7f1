"""What the stages write: complete or absent, made again by the same command, byte for byte.

    RUN/run.json            environment, options, seed, preset
    RUN/trees.jsonl         an output
    RUN/trees.meta.json     its recipe: settings and inputs that its bytes depend on; and figures
    RUN/trees.jsonl.parts/  what is done of an unfinished output: of a file a part per process, of a
                            checkpoint its training's states

1. An output gets its name by one rename. To be there is to be complete.
2. The same recipe gives the same bytes: it resumes an output, and another recipe is refused.
3. A group of lines (a tree, a result) depends on the recipe and on its own key alone. So whichever
   process makes it, and however often, it is the same group.

No torch here, so that bellman.py starts at once.
"""

import contextlib
import importlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qlass import UserError
from qlass.files import (
    LAYOUT,
    LOADED,
    Inputs,
    dumps,
    input_of,
    lock,
    meta_of,
    meta_path,
    parts_folder,
    read_jsonl,
    remove,
    sha256,
    share,
    warn,
    write_json,
    write_jsonl,
)
from qlass.records import as_user_error
from qlass.settings import Run, default_run

PACKAGES = ("torch", "transformers", "numpy", "gymnasium")  # whose versions metadata tell

# ------------------------------------------------------------------------------------- the recipe


def checkpoint(name: str | Path) -> Path:
    """The folder of a model. Of a hub name it is the newest snapshot or, with the hub away, the one
    at hand: a model is known by its content, as each input is."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    with as_user_error(f"{name}: no such folder, and not on the hub"):
        names = list(LOADED)
        return Path(snapshot_download(str(name), allow_patterns=names, ignore_patterns="*/*"))


def find_or_make(named: Path | None, stage: str, name: str, config: Run) -> Path:
    """An input of a stage: what was named, else RUN/name, which the earlier stage makes first."""
    path = named or config.run / name
    if named and not name.endswith(".jsonl"):
        path = checkpoint(named)
    if not named and not path.exists():
        make(path, stage, config)
    for problem in stale(path):
        warn(problem)
    return path


def make(path: Path, stage: str, config: Run) -> None:
    """Run the stage that makes an output, if the flags of the run are all that it needs."""
    flags = shared_flags(config)
    words = shlex.join(flags)
    if config.run != default_run(config.env) and not (config.run / "run.json").exists():
        raise UserError(f"{config.run}: no such run; python sft.py {words} begins it")
    if share()[1] > 1 or (stage != "sft" and getattr(config, "sft", None)):
        raise UserError(f"{path} is missing: make it first, by {stage}.py and one process")
    print(f"{path} is missing: making it with python {stage}.py {words}", flush=True)
    importlib.import_module(stage).main(flags)


def shared_flags(config: Run) -> list[str]:
    """What the commands of a run have in common."""
    flags = ["--run", str(config.run), "--env", config.env, "--seed", str(config.seed)]
    flags += ["--preset", str(config.preset)]
    return flags + [f"--env-option={option}" for option in config.env_option]


def stale(output: Path) -> Iterator[str]:
    """A sentence for each input of an output that has changed since."""
    meta = meta_of(output)
    for name in meta["inputs"]:
        path = input_of(output, name)
        if path and path.exists() and sha256(path) != meta["recipe"][name]:
            yield f"{output} was made from another {path} than there is now: make it again"


def begin(output: Path, config: Run, settings: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Claim an output: write its metadata, or compare what it was begun with. Returns those.

    settings: what its bytes depend on, beside the content of the inputs.
    """
    if output in inputs.values():
        raise UserError(f"{output} is an input too: name another --out")
    rules = settings.get("env_version")  # a stage that plays nothing has its inputs'
    for name, path in inputs.items():
        source = meta_of(path)["recipe"] if path else {}
        env, version = source.get("env", config.env), source.get("env_version") or rules
        if env != config.env:
            raise UserError(f"{path} is of {env}, not of {config.env}: name another --{name}")
        rules = rules or version
        if version != rules:
            warn(f"{path} is of version {version} of {env}, and the rest of version {rules}")
    hashes = {name: sha256(path) if path else None for name, path in inputs.items()}
    recipe = json.loads(
        json.dumps(settings | hashes | {"stage": config.stage, "env_version": rules}, default=str)
    )
    begun = parts_folder(output).exists() or output.exists()  # in this order, see Output.read
    meta = meta_of(output)
    if begun and not meta["recipe"]:
        problem = "is there without its .meta.json, so not of this command: move it"
        raise UserError(f"{output}: {problem}")
    own = meta["recipe"].get("stage", config.stage) == config.stage
    differs = differences(meta["recipe"], recipe, inputs)
    if begun and differs and not (own and config.overwrite):
        more = ", --overwrite starts again" if own else ""
        raise UserError(
            f"{output} was begun with {differs}: another --out or --run keeps both{more}"
        )
    if config.overwrite:
        for path in (output, parts_folder(output), meta_path(output)):
            remove(path)
    if config.overwrite or not begun:
        meta = {"recipe": {}, "inputs": {}}
    folder = output.parent.resolve()
    places = {n: os.path.relpath(path.resolve(), folder) for n, path in inputs.items() if path}
    meta |= {"recipe": meta["recipe"] | recipe, "inputs": meta["inputs"] | places}
    meta["versions"] = {name: metadata.version(name) for name in PACKAGES}
    meta.setdefault("commit", code_version())
    run = config.run / "run.json"
    if output.parent == config.run and not run.exists():
        shared = {n: getattr(config, n) for n in ("env", "env_option", "seed", "preset")}
        write_json(run, shared | {"layout": LAYOUT})
    write_json(meta_path(output), meta)
    return meta


def code_version() -> str:
    """The commit of this code, "-dirty" behind it if files differ; empty where git has none."""
    words = "describe --always --dirty --abbrev=7 --exclude=*"
    git = ["git", "-C", str(Path(__file__).parent), *words.split()]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def differences(old: dict[str, Any], new: dict[str, Any], inputs: Inputs) -> str:
    """Where two recipes differ, in words: an input by its name alone, any other by both values."""
    names = [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    words = [f"another {n}" if n in inputs else f"{n} {old[n]}, not {new[n]}" for n in names]
    return "; ".join(words)


# ------------------------------------------------------------------------ outputs of several parts


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
        settings: dict[str, Any],
        inputs: Inputs,
        key: Callable[[dict], Any],
    ) -> None:
        rank, n = share()
        if n > 1 and config.overwrite:
            raise UserError(f"{path}: --overwrite is for one process: delete it")
        self.path, self.key = path, key
        self.part = parts_folder(path) / f"{rank}-of-{n}.jsonl"
        self.lock = lock(path.with_name(f"{path.name}.{rank}-of-{n}") if n > 1 else path)
        self.meta = begin(path, config, settings, inputs)
        self.read()

    @property
    def records(self) -> list[dict]:
        return list(itertools.chain(*self.groups.values()))

    def read(self) -> None:
        """All groups that are done, by their keys. The parts first: where another process finishes
        meanwhile, and removes them, the output has all."""
        parts: dict[Any, list[dict]] = {}
        with contextlib.suppress(FileNotFoundError):
            for part in sorted(self.part.parent.glob("*.jsonl")):
                for line in part.read_bytes().split(b"\n"):
                    with contextlib.suppress(ValueError):  # empty, or what a stop cut
                        group = json.loads(line)
                        parts[self.key(group[0])] = group
        records = read_jsonl(self.path) if self.path.exists() else []
        finished = {key: list(group) for key, group in itertools.groupby(records, self.key)}
        self.groups = finished | parts
        self.named = set(finished)  # what the output has already

    def todo(self, keys: Sequence[Any]) -> list[Any]:
        """What is missing of this process's share."""
        if not keys:
            raise UserError(f"{self.path}: no tasks are left to play")
        rank, n = share()
        return [key for key in keys[rank::n] if key not in self.groups]

    def write(self, groups: Iterable[list[dict]], title: str, total: int) -> None:
        """Write groups as they come, each as one line of this process's part."""
        if not total:
            return  # others may finish meanwhile, and remove the folder of the parts
        for group in tqdm(groups, title, total, mininterval=0.5):
            self.part.parent.mkdir(exist_ok=True)  # the first group claims the output
            with open(self.part, "ab") as out:
                out.write(
                    b"\n" + dumps(group).encode()
                )  # a line of its own, behind what a stop cut
        self.read()

    def finish(self, plan: Sequence[Any], **figures: Any) -> None:
        """Give the output its name, once all that is planned is done, by whichever process."""
        missing = [key for key in plan if key not in self.groups]
        if missing:
            print(f"{self.path}: {len(missing)} of {len(plan)} are left to other processes")
        else:
            for key in plan:  # in this order, behind what it has
                if key not in self.named:
                    self.groups[key] = self.groups.pop(key)
            write_json(meta_path(self.path), self.meta | figures)
            write_jsonl(self.path, self.records)
            shutil.rmtree(self.part.parent, ignore_errors=True)
        self.lock.release()
