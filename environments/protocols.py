"""Tasks of published protocols as files that any program reads: data/protocols/NAME.json (docs/protocols.md).

    python -m environments.protocols webshop-500 > data/protocols/webshop-500.json
    python -m environments.protocols alfworld-unseen --data data/alfworld > data/protocols/alfworld-unseen.json

`--env-option split_file=FILE` plays the tasks of a file.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from environments import make
from qlass import UserError
from qlass.environment import pick
from qlass.files import read_json
from qlass.records import Line
from qlass.settings import parse, run_stage

PROTOCOLS = {  # name: environment, its split (of WebShop a number of goals, the first ones), source
    "webshop-500": ("webshop", 500, "test goals of WebShop's paper: whole catalogue, people's instructions"),
    "webshop-small-500": ("webshop", 500, "validation goals of verl-agent: 1,000 products, made instructions"),
    "webshop-bundled": ("webshop", "test", "the bundled shop of QLASS's reference implementation"),
    "alfworld-seen": ("alfworld", "valid_seen", "ALFWorld's games; seen games of ETO and QLASS"),
    "alfworld-unseen": ("alfworld", "valid_unseen", "ALFWorld's games; unseen games of ETO and QLASS"),
    "alfworld-valid-train": ("alfworld", "valid_train", "ALFWorld's games; test games of AgentGym"),
    "alfworld-bundled-seen": ("alfworld", "valid_seen", "the bundled games of QLASS's reference implementation"),
    "alfworld-bundled-unseen": ("alfworld", "valid_unseen", "the bundled games of QLASS's reference implementation"),
}


class Protocol(Line):
    """The tasks of a protocol, which are a split of the environment that plays them."""

    name: str
    env: str
    split: str
    source: str
    n: int
    sha256: str  # their `digest`
    ids: list


def digest(ids: Iterable[Any]) -> str:
    """A hash of tasks, whatever their order: 16 digits of the SHA-256 of their sorted ids, one a line."""
    text = "".join(f"{task_id}\n" for task_id in sorted(map(str, ids)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def published_splits(published: str | Path) -> dict[str, tuple[Path, list]]:
    """{split: (file, tasks)} of a file, or of a folder of NAME_indices*.json, as ETO has them. A file is a JSON list or
    a `Protocol`."""
    path = Path(published)
    files = sorted(path.glob("*_indices*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no NAME_indices.json in this folder")
    splits = {}
    for file in files:
        split, tasks = file.name.split(".")[0].replace("_indices", ""), read_json(file, Protocol | list)
        if isinstance(tasks, dict):
            if digest(tasks["ids"]) != tasks["sha256"]:
                raise UserError(f"{file}: its ids are not those of its sha256: take the file as it was published")
            split, tasks = tasks["split"], tasks["ids"]
        splits[split] = file, tasks
    return splits


@dataclass(frozen=True)
class Config:
    name: Positional[str]
    data: Path | None = None  # folder with ALFWorld's own games


def protocol(name: str, data: Path | None = None) -> Protocol:
    """The file of a name. data: ALFWorld's own games, where it is of these."""
    env, split, source = pick(PROTOCOLS, name, "unknown protocol")
    if (env == "alfworld" and "bundled" not in name) != bool(data):
        raise UserError(f"{name} is {'not ' * bool(data)}of ALFWorld's own games, whose folder --data names")
    ids: list = list(range(split)) if isinstance(split, int) else make(env, data=data).split_ids(split)
    if env == "webshop":  # whose tasks are numbers elsewhere
        ids = list(map(int, ids))
    return Protocol(name=name, env=env, split="test", source=source, n=len(ids), sha256=digest(ids), ids=ids)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    print(json.dumps(protocol(config.name, config.data), indent=1))


if __name__ == "__main__":
    run_stage(main)
