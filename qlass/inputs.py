"""Inputs of the stages: found, or made by the stage before, and known by their content.

No torch here, so that bellman.py starts at once.
"""

import functools
import hashlib
import importlib
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.chat import Rendering
from qlass.files import begun_meta, input_of, meta_of, rank_and_size, read_json, read_meta, warn
from qlass.records import WeightIndex, as_user_error
from qlass.settings import Run, default_run, other_kind, settings_in

# What is read of a checkpoint, beside its weights.
INDEX = "model.safetensors.index.json"
LOADED = (
    INDEX, "config.json", "generation_config.json",
    "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "policy.json", "qnet.json", "head.safetensors",
)  # fmt: skip


def checkpoint(name: str | Path) -> Path:
    """The folder of a model. Of a hub name it is the newest snapshot or, with the hub away, the one
    at hand: a model is known by its content, as each input is."""
    path = Path(name)
    if path.exists():
        return path
    if len(path.parts) > 1 and path.parent.is_dir():
        raise UserError(f"{path}: no such folder")
    from huggingface_hub import snapshot_download

    with as_user_error(f"{name}: no such folder, and not on the hub"):
        fetch = partial(snapshot_download, str(name), ignore_patterns="*/*")
        folder = Path(fetch(allow_patterns=[*LOADED]))
        return Path(fetch(allow_patterns=[*LOADED, *weight_files(folder)]))


def find_agent(config: Any) -> Path:
    """The agent: --sft, a folder or a name on the hub, else RUN/sft. UserError for one of another
    kind than the run's, tiny or pretrained."""
    named = config.sft
    path = find_or_make(named and checkpoint(named), "sft", "sft", config)
    if named and Rendering.load(path).mark_matches != (config.preset == "tiny"):
        if not (path / "config.json").exists():
            raise UserError(f"--sft {named}: is no checkpoint: it has no config.json")
        raise other_kind(config, f"--sft {named}")
    return path


def find_or_make(named: Path | None, stage: str, name: str, config: Run) -> Path:
    """An input of a stage: what was named, else RUN/name, which the earlier stage makes first."""
    path = named or config.run / name
    if not path.exists():
        if named:
            raise UserError(f"{path}: no such file or folder ({stage}.py makes one)")
        make(path, stage, config)
    for problem in changes(path):
        warn(problem)
    return path


def make(path: Path, stage: str, config: Run) -> None:
    """Run the stage that makes an output, if the flags of the run are all that it needs."""
    words = ["--run", str(config.run), "--env", config.env, "--seed", str(config.seed)]
    words += ["--preset", config.preset, *map("--env-option={}".format, config.env_option)]
    flags = shlex.join(words)
    commands = read_meta(begun_meta(path)).get("flags", [flags])
    if config.run != default_run(config.env) and not config.file.exists():
        raise UserError(f"{config.run}: no such run; python sft.py {flags} begins it")
    if any(without_folder(shlex.split(command)) != without_folder(words) for command in commands):
        raise UserError(f"{path} was begun by a command of its own: {stage} {commands[-1]}")
    _, processes = rank_and_size()
    other_agent = stage != "sft" and getattr(config, "sft", None)  # these flags would not name it
    if processes > 1 or other_agent:
        raise UserError(f"{path} is missing: make it first, by {stage}.py and one process")
    labels = config.run / "q_labels.jsonl"
    if stage == "build_trees" and labels.exists():
        raise UserError(
            f"{path} is missing, of which {labels} was made: the run came without it; begin"
            " another --run"
        )
    print(f"{path} is missing: making it with python {stage}.py {flags}", flush=True)
    importlib.import_module(stage).main(words)


def without_folder(words: list[str]) -> list[str]:
    """The words behind --run FOLDER: the folder may have been moved, or be named in another way."""
    return words[:1] + words[2:]


def changes(output: Path) -> Iterator[str]:
    """A sentence for each input of an output, or of an input behind it, that has changed since, and
    for each setting that was edited since."""
    meta, file = meta_of(output), output.with_name("settings.toml")
    recipe, old = meta["recipe"], meta.get("settings", {})
    # Without old ones the file may be anybody's.
    now = settings_in(file, recipe["stage"], recipe.get("lora")) if old else {}
    for name, value in now.items():
        if not (name in old and name in recipe) or old[name] == value:
            continue  # nobody has edited it
        if name == "env_option":  # files of another place that are the same
            value = [word for word in value if not same_files(word, recipe.get("env_files", {}))]
        elif name == "model" and Path(value).exists():
            value = sha256(Path(value))
        if value != recipe[name]:
            difference = f"was made with {name} {recipe[name]}, and {file} says {value} now"
            yield f"{output} {difference}: make it again"
    for name in meta["inputs"]:
        if path := input_of(output, name):
            if path.exists() and sha256(path) != recipe[name]:
                yield f"{output} was made from another {path} than there is now: make it again"
            yield from changes(path)


def same_files(word: str, files: dict[str, str]) -> bool:
    """True if an option NAME=PATH names what `files` has the fingerprint of, or a cache."""
    name, _, value = word.partition("=")
    path = Path(value).expanduser()
    return name == "cache" or (path.exists() and fingerprint(path) == files.get(name))


# ------------------------------------------------------------------------------ content of an input


def fingerprint(path: Path) -> str:
    """A hash of a file's content or, as a folder may hold gigabytes, of the names and sizes of its
    files. What is hidden in a folder does not count."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    listing = ""
    for file in sorted(filter(Path.is_file, path.rglob("*"))):
        name = file.relative_to(path).as_posix()
        if "/." not in f"/{name}":
            listing += f"{name} {file.stat().st_size}\n"
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """The hash of a file, or of the files of a checkpoint's folder that are loaded."""
    total = hashlib.sha256()
    for file in files_of(path) if path.is_dir() else [path]:
        total.update(hash_of(file, file.stat().st_mtime_ns))
    return total.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint that are loaded. UserError for an adapter, for two sets of weights,
    and for what git has not fetched."""
    weights = weight_files(folder)
    if "model.safetensors" not in weights and (folder / "model.safetensors").exists():
        raise UserError(f"{folder}: model.safetensors beside {INDEX}: keep one of the two")
    files = sorted(filter(Path.exists, map(folder.joinpath, [*LOADED, *weights])))
    for file in files:
        if file.stat().st_size < 200 and b"https://git-lfs" in file.read_bytes():
            raise UserError(f"{folder}: {file.name} is a pointer of Git LFS: git lfs pull")
    ours = (folder / "policy.json").exists()  # which keeps its adapter, in a folder of its own
    if adapters := list(folder.glob("adapter_config.json" if ours else "**/adapter_config.json")):
        raise UserError(
            f"{folder}: {adapters[0].relative_to(folder)} is an adapter's: merge it with its base"
            " first (docs/models.md)"
        )
    return files


def weight_files(folder: Path) -> set[str]:
    """The names of a checkpoint's files of weights, whichever its index gives them."""
    index = folder / INDEX
    if not index.exists():
        return {"model.safetensors"}
    return set(read_json(index, WeightIndex)["weight_map"].values())


@functools.cache  # a large model is read once
def hash_of(file: Path, changed_at: int) -> bytes:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").digest()
