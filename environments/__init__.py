"""The environments behind `envs.py`: an engine, its data, its players and its `TextEnv`, a folder each.

No model and no stage of the pipeline is needed here, so that a folder can be lifted into another project.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from qlass import UserError

WHERE = "(docs/paper.md, section Data, says where the originals' files are from)"  # of what is missing


def fair_order(task_ids: Iterable[str], task_type: Callable[[str], str]) -> list[str]:
    """The tasks, shuffled so that every stretch holds each type in the proportion of the whole.

    The order depends on the ids alone: demonstrations, trees and `--limit` share it.
    """
    types: dict[str, list[tuple[bytes, str]]] = {}
    for task_id in task_ids:
        lot = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
        types.setdefault(task_type(task_id), []).append((lot, task_id))
    spread = []
    for members in types.values():
        for rank, (lot, task_id) in enumerate(sorted(members)):
            spread.append(((rank + 0.5) / len(members), lot, task_id))
    return [task_id for *_, task_id in sorted(spread)]


def split_files(published: str | Path) -> dict[str, Path]:
    """{name: file} of published splits: a file, or a folder of NAME_indices*.json, as ETO has them."""
    path = Path(published)
    files = sorted(path.glob("*_indices*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no NAME_indices.json in this folder")
    return {file.name.split(".")[0].replace("_indices", ""): file for file in files}


def writable(folder: Path) -> Path:
    """The folder for generated data, or the user's cache where the package was installed for all to read only."""
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return folder
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qlass"


def fingerprint(path: str) -> str:
    """Of a data set of any size, the same for a copy: names, sizes, and up to 256 MB of content.

    What a system leaves in a folder does not count, nor do the line ends of files that are read whole.
    """
    names = glob.glob(f"{glob.escape(path)}/**", recursive=True)  # through links; not hidden files
    debris = {"Thumbs.db", "desktop.ini", "__pycache__"}
    paths = sorted(name for name in names if os.path.isfile(name) and not debris & {*Path(name).parts}) or [path]
    every = len(paths) // 500 + 1
    total = hashlib.sha256()
    for i, file in enumerate(paths):
        content, size = b"", os.path.getsize(file)
        if i % every == 0:
            with open(file, "rb") as opened:
                content = opened.read(2**28 * every // len(paths))
            if len(content) == size:
                content = content.replace(b"\r\n", b"\n")
                size = len(content)
        total.update(f"{os.path.relpath(file, path)} {size}\n".encode() + content)
    return total.hexdigest()[:16]
