"""What results were made from: the files behind an output, and the flags that all of them were made with."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qlass.outputs import input_of, meta_of

COUNTS = ("trees", "budget")  # figures that seeds share too: of flags that may change while an output grows


def ancestors(output: Path, names: Iterable[str]) -> dict[Path, str]:
    """{path: " of labels of qnet"} of what an output was made from and, in turn, of what that was made from."""
    places: dict[Path, str] = {}
    queue = [(output, name, "") for name in names]
    for product, name, of in queue:  # grows as it is read
        path = input_of(product, name)
        path = path and path.parent.resolve() / path.name  # one place, whatever way leads there
        if path and path not in places:
            places[path] = f" of {name}{of}"
            queue += [(path, earlier, places[path]) for earlier in meta_of(path)["inputs"]]
    return places


def lineage(output: Path, used: Iterable[str]) -> dict[str, Any]:
    """{"--epochs of sft": 12}: the flags that results and all that they were made from were made with."""
    flags: dict[str, Any] = {}
    for path, of in {output: "", **ancestors(output, used)}.items():
        meta = meta_of(path)
        recipe = meta["recipe"] | {name: meta[name] for name in COUNTS if name in meta}
        skipped = {"seed", "label", *meta["inputs"], *(() if recipe.get("env_files") else ("env_files",))}
        flags |= {f"--{name.replace('_', '-')}{of}": recipe[name] for name in recipe if name not in skipped}
        if "kept" in meta:  # an agent's own trajectories: their number is a result
            flags.pop("--n-expert" + of.removeprefix(" of expert"), None)
    return flags
