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
import functools
import hashlib
import importlib
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from qlass import UserError
from qlass.records import Line, one_line, read

PACKAGES = ("torch", "transformers", "numpy", "gymnasium")  # whose versions metadata tell
# What is read of a checkpoint.
LOADED = ("[!.]*.json", "[!.]*.safetensors", "[!.]*.model", "[!.]*.jinja", "[!.]*.txt")
LAYOUT = 2  # of a run's folder
Inputs = dict[str, Path | None]  # by the flags that name them; None: there is none


@functools.cache  # once a process
def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


# ------------------------------------------------------------------------------------------- files


def read_json(path: Path) -> dict[str, Any]:
    with one_line(path):
        return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as draft:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_jsonl(path: Path) -> list[Any]:
    return list(read(path, Line))


def dumps(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    with atomic(path) as draft, open(draft, "w", encoding="utf-8") as out:
        out.writelines(map(dumps, records))


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Where to write a file or a folder that takes the place of `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft{share()[0]}")
    remove(draft)  # of a call that was killed
    yield draft
    if path.is_dir():
        remove(path)
    draft.replace(path)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def lock(path: Path) -> FileLock:
    """The lock of an output, held until it is released or this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
    try:
        file_lock.acquire()
    except Timeout:
        raise UserError(f"{path}: another process is writing it") from None
    return file_lock


def sha256(path: Path) -> str:
    """Of a file, or of the files of a checkpoint's folder that are loaded."""
    files = itertools.chain(*map(path.glob, LOADED)) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(hash_of(file, file.stat().st_mtime_ns))
    return total.hexdigest()


@functools.cache  # a large model is read once
def hash_of(file: Path, changed_at: int) -> bytes:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def share() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun and job arrays set them; alone 0 and 1."""
    rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < n:
        raise UserError(f"RANK {rank} of WORLD_SIZE {n}: ranks are 0 to {n - 1}")
    return rank, n


# ------------------------------------------------------------------------------------- the recipe


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def meta_of(output: Path) -> dict[str, Any]:
    path = meta_path(output)
    return read_json(path) if path.exists() else {"recipe": {}, "inputs": {}}


def parts_folder(output: Path) -> Path:
    """The folder of what is done of an unfinished output."""
    return output.with_name(output.name + ".parts")


def input_of(output: Path, name: str) -> Path | None:
    """Where an input of an output was; None: there was none."""
    place = meta_of(output)["inputs"].get(name)
    return output.parent / place if place else None


def checkpoint(name: str | Path) -> Path:
    """The folder of a model. Of a hub name it is the newest snapshot or, with the hub away, the one
    at hand: a model is known by its content, as each input is."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    with one_line(f"{name}: no such folder, and not on the hub"):
        return Path(snapshot_download(str(name), allow_patterns=list(LOADED)))


def default_run(env: str) -> Path:
    return Path("runs") / env.rpartition(":")[2].lower()


def find_or_make(named: Path | None, stage: str, name: str, config: Any) -> Path:
    """An input of a stage: what was named, else RUN/name, which the earlier stage makes first."""
    path = named or config.run / name
    if named and not name.endswith(".jsonl"):
        path = checkpoint(named)
    if not named and not path.exists():
        make(path, stage, config)
    for problem in stale(path):
        warn(problem)
    return path


def make(path: Path, stage: str, config: Any) -> None:
    """Run the stage that makes an output, if the flags of the run are all that it needs."""
    flags = shared_flags(config)
    words = shlex.join(flags)
    if config.run != default_run(config.env) and not (config.run / "run.json").exists():
        raise UserError(f"{config.run}: no such run; python sft.py {words} begins it")
    if share()[1] > 1 or (stage != "sft" and getattr(config, "sft", None)):
        raise UserError(f"{path} is missing: make it first, by {stage}.py and one process")
    print(f"{path} is missing: making it with python {stage}.py {words}", flush=True)
    importlib.import_module(stage).main(flags)


def shared_flags(config: Any) -> list[str]:
    """What the commands of a run have in common."""
    flags = ["--run", str(config.run), "--env", config.env, "--seed", str(config.seed)]
    flags += ["--preset", config.preset]
    return flags + [f"--env-option={option}" for option in config.env_option]


def stale(output: Path) -> Iterator[str]:
    """A sentence for each input of an output that has changed since."""
    meta = meta_of(output)
    for name in meta["inputs"]:
        path = input_of(output, name)
        if path and path.exists() and sha256(path) != meta["recipe"][name]:
            yield f"{output} was made from another {path} than there is now: make it again"


def begin(output: Path, config: Any, settings: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
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
    run = config.run / "run.json"
    if output.parent == config.run and not run.exists():
        shared = {n: getattr(config, n) for n in ("env", "env_option", "seed", "preset")}
        write_json(run, shared | {"layout": LAYOUT})
    write_json(meta_path(output), meta)
    return meta


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
        config: Any,
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
        self.part.parent.mkdir(exist_ok=True)
        with open(self.part, "ab") as out:
            out.write(b"\n")  # behind what a stop cut
            for group in tqdm(groups, title, total, mininterval=0.5):
                out.write(dumps(group).encode())
                out.flush()
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
