"""How an output came about: a `.meta.json` beside each, and the check that a resumed run is the same run.

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from environments import UserError
from qlass.jsonl import is_text, read_object, replacing, wrong

# Arguments that may differ between a run and its resumption: of any stage, of one that samples, of one that trains.
FREE = ("run", "out", "shard", "device", "overwrite", "debug")
SAMPLING_FREE = ("plain", "cache_gb", "decode_tokens", "in_flight", "server")
TRAINING_FREE = ("save_every", "log", "fsdp", "micro_tokens", "gradient_checkpointing")
HIDDEN = ("argv", "env_flags")  # of `parse` itself, no arguments


def meta_path(output: str | Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    output = Path(output)
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: str | Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """The metadata of an output, {} where there is none; UserError where they lack what is needed."""
    path = meta_path(output)
    if not path.exists():
        return {}
    way_out = f"not the metadata of {output}; delete it, or name another --out"
    try:
        meta = read_object(path)
    except UserError as error:
        raise UserError(f"{error}: {way_out}") from None
    if mistake := wrong(meta, {"arguments": is_object, "inputs": is_object, "argv": is_words}, needed):
        raise UserError(f"{path}: {mistake}: {way_out}")
    return meta


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_words(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as the metadata hold them."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in HIDDEN}


def write_meta(
    output: str | Path, args: argparse.Namespace, inputs: Iterable[Path | None] = (), **figures: Any
) -> None:
    """How `output` came about: arguments, versions, commit, hashes of the inputs, and the figures of the run.

    A commit ends in -dirty where files were changed since.
    """
    versions = {}
    for package in ("torch", "transformers", "numpy", "gymnasium"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit, clone = "", Path(__file__).parents[1]
    with contextlib.suppress(OSError):  # a machine without git
        if (clone / ".git").exists():  # else it is installed, perhaps below another project's repository
            command = ["git", "-C", clone, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "arguments": recorded(args),
        "argv": getattr(args, "argv", []),
        "inputs": {str(p): sha256(Path(p)) for p in inputs if p and Path(p).exists()},
        "commit": commit or None,
        "python": platform.python_version(),
        "versions": versions,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


DIGESTS: dict[tuple, str] = {}  # of the files of this process, by (path, size, time)


def sha256(path: Path) -> str:
    """Of a file, or of a folder's files one after the other in order of their names."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    key = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if key not in DIGESTS:
        digest = hashlib.sha256()
        for file in files:
            with open(file, "rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
        DIGESTS[key] = digest.hexdigest()
    return DIGESTS[key]


def located(arguments: dict[str, Any], named: str | Path, output: Path) -> Path | None:
    """The file or folder that `output` was made from: of a moved run folder where it lies now, else where the metadata
    say or, of one that came from elsewhere, beside the output."""
    named, places = Path(named), [Path(named)]
    folder = Path(arguments["out"]).parent if arguments.get("out") else None
    if folder and named.is_absolute() == folder.is_absolute():
        places.insert(0, output.parent / os.path.relpath(named, folder))
    if not (folder and named.is_relative_to(folder)):
        places.append(output.parent / named.name)
    return next((path for path in places if path.exists()), None)


def outdated(output: Path) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of an output and of all that it comes from."""
    meta = read_meta(output)
    for source, digest in meta.get("inputs", {}).items():
        path = located(meta.get("arguments", {}), source, output)
        if path and path.resolve() != output.resolve():  # labels may be made anew in their own place
            if sha256(path) != digest:
                yield output, path
            yield from outdated(path)


def same_arguments(
    output: str | Path, args: argparse.Namespace, free: Iterable[str] = (), inputs_too: bool = True,
    way_out: str = "--overwrite starts again, another --out or --run keeps both",
) -> None:  # fmt: skip
    """Resuming is only sound with the arguments and the inputs that the output was begun with.

    An input that lies elsewhere now, as in a run folder that was moved, is the same if its content is.
    """
    old = read_meta(output, ["arguments", "inputs"])
    if not old:
        return
    begun, inputs = old["arguments"], dict(old["inputs"])
    now = {name: value for name, value in recorded(args).items() if name not in (*FREE, *free)}
    changed = {name: value for name, value in now.items() if begun.get(name, value) != value}
    for name, value in list(changed.items()):
        digest = inputs.get(begun[name]) if is_text(begun[name]) else None
        if value and digest and Path(value).exists() and sha256(Path(value)) == digest:
            del changed[name], inputs[begun[name]]
    if changed:
        flags = ", ".join(f"--{n.replace('_', '-')} {begun[n]}, not {value}" for n, value in changed.items())
        raise UserError(f"{output} was begun with {flags}: {way_out}")
    for source, digest in inputs.items() if inputs_too else ():
        if Path(source).exists() and sha256(Path(source)) != digest:
            raise UserError(f"{output} was begun with another {source}, which has changed since: {way_out}")
