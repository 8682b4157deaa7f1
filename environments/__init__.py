"""The environments behind `envs.py`: an engine, its data, its players and its `TextEnv`, a folder each.

No model and no stage of the pipeline is needed here, so that a folder can be lifted into another project.
"""

import ast
import contextlib
import glob
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from qlass import UserError

WHERE = "(docs/paper.md, section Data, says where the originals' files are from)"  # of what is missing
OURS = ("envs", "environments", "qlass")


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
    home = os.path.expanduser("~")  # "~" of a user who has none, as in a container
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if not os.path.isabs(cache):
        raise UserError(f"{folder} is read only, and there is no home: set XDG_CACHE_HOME to a folder that is not")
    return Path(cache) / "qlass"


def code_of(kind: type) -> str:
    """A hash of the source that a class of your own is made of: its module and what that imports of its package or from
    beside it, and so on. This project's own source does not count: `version` tells of that."""
    package, *below = kind.__module__.split(".")
    root = Path(sys.modules[kind.__module__].__file__ or "").resolve().parents[len(below)]
    sources: dict[str, bytes] = {}
    todo = [base.__module__ for base in kind.__mro__]
    while todo:
        name = todo.pop()
        top, *_ = parts = name.split(".")
        place = root.joinpath(*parts)
        files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        near = top == package or "site-packages" not in root.parts
        if files and near and top not in OURS and name not in sources:
            sources[name] = files[0].read_bytes().replace(b"\r\n", b"\n")
            todo += imports_of(sources[name], name if files[0].stem == "__init__" else name.rpartition(".")[0])
    total = hashlib.sha256()
    for name in sorted(sources):
        total.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return total.hexdigest()


def imports_of(source: bytes, package: str) -> Iterator[str]:
    """The names of what a module of this package imports, wherever it does."""
    tree = ast.parse("")
    with contextlib.suppress(SyntaxError):  # of another Python
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                name = importlib.util.resolve_name("." * node.level + name, package)
            yield from (name, *(f"{name}.{alias.name}" for alias in node.names))


def contents_of(options: dict[str, Any]) -> dict[str, str]:
    """The fingerprint of each file or folder that an option names, but for a `cache`, which is no data."""
    paths = {name: value for name, value in options.items() if isinstance(value, str) and name != "cache"}
    return {name: fingerprint(path) for name, path in paths.items() if os.path.exists(path)}


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
