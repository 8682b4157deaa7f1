"""The metadata of an output: what it was made with and from, what may resume it, is it complete?

NAME.meta.json stands beside each output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qlass import UserError
from qlass.files import files_of, read_object, replacing, sha256, warn

# Arguments that change no number, so that they may differ when a run resumes.
FREE = ["run", "out", "device", "overwrite", "debug", "save_every", "micro_tokens"]
FREE += ["gradient_checkpointing", "cache_gb", "decode_tokens", "in_flight", "server"]
FOUND = ("precision", "env_files")  # arguments that stages find out; None: not known
# Options of environments that older metadata have as flags.
OLD_FLAGS = {"webshop_data", "alfworld_data", "human_goals", "split_file", "instruction", "engine"}
OLD_FLAGS |= {"tasks", "map"}


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def read_meta(output: Path) -> dict[str, Any]:
    """The metadata of an output or of its first part; without any, no arguments and no inputs."""
    there = [path for path in map(meta_path, (output, *files_of(output))) if path.exists()]
    meta: dict[str, Any] = {"arguments": {}, "inputs": {}}
    meta |= read_object(there[0]) if there else {}
    arguments = meta["arguments"]
    for flag in sorted(OLD_FLAGS & arguments.keys()) if "env_option" in arguments else ():
        if value := arguments.pop(flag):
            name = flag.removeprefix(f"{arguments['env']}_")
            option = f"{name}={'true' if value is True else value}"
            arguments["env_option"] = sorted([*arguments["env_option"], option])
    return meta


def recorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """A stage's arguments (`vars(args)`) as the metadata hold them."""
    record = {name: str(v) if isinstance(v, Path) else v for name, v in arguments.items()}
    record.pop("argv", None)
    if record.get("server"):  # its address may change, but not its model
        record["server_model"] = record["server"].partition("#")[2]
    return record


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "numpy", "gymnasium", "scienceworld", "textworld")
    return {name: version(name) for name in packages if find_spec(name)}


def write_meta(
    output: Path, arguments: dict[str, Any], inputs: Iterable[Path | None] = (), **metrics: Any
) -> None:
    """Record arguments, versions (the earlier ones of a resumed run too), hashes, and metrics."""
    before, now = read_object(meta_path(output)) if meta_path(output).exists() else {}, versions()
    earlier = [*before.get("earlier_versions", []), before.get("versions", now)]
    if earlier := [others for others in earlier if others != now]:
        metrics["earlier_versions"] = earlier
    record = {
        "arguments": recorded(arguments),
        "argv": arguments.get("argv", []),
        "inputs": {str(path): sha256(path) for path in inputs if path and files_of(path)},
        "versions": now,
        **metrics,
    }
    with replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)


def is_complete(output: Path) -> bool:
    """Whether an output is there, with all its parts, and a process saw all that was planned in it.

    A folder is complete as soon as it exists, and so is a file without metadata, which was made
    elsewhere.
    """
    if output.exists() and (output.is_dir() or not meta_path(output).exists()):
        return True
    files = files_of(output)
    metas = list(map(read_meta, files))
    planned = max((meta.get("planned", 0) for meta in metas), default=0)
    for meta in metas:
        if "seconds" in meta and meta.get("planned", 0) == planned:
            return meta.get("parts", 1) <= len(files)
    return False


# --------------------------------------------------------------------- what an output was made from


def place_of(output: Path, source: str) -> Path:
    """Where an input of an output is now: at its path or beside the output, known by content."""
    content = read_meta(output)["inputs"].get(source)
    places = [Path(source), output.parent / Path(source).name]
    there = [place for place in places if files_of(place)]
    same = [place for place in there if content in (None, sha256(place))]
    return (same or there or places)[0]


def input_of(output: Path, name: str) -> Path | None:
    """The file or folder that an output's argument `name` named; None: it named nothing."""
    source = read_meta(output)["arguments"].get(name)
    return place_of(output, source) if isinstance(source, str) else None


def changed_inputs(output: Path) -> list[Path]:
    """What an output was made from and has changed since, where it is now."""
    inputs = read_meta(output)["inputs"]
    places = {place_of(output, source): content for source, content in inputs.items()}
    return [p for p, content in places.items() if files_of(p) and sha256(p) != content]


def outdated(output: Path, above: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of all that an output is of."""
    for source in changed_inputs(output):
        yield output, source
    above |= {output}
    for source in read_meta(output)["inputs"]:
        place = place_of(output, source)
        if place not in above:  # metadata may lead in a circle
            yield from outdated(place, above)


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from.

    Their file (None: there is none), and how many of them were given (None: all).
    """
    folder = checkpoint.absolute()
    for _ in range(10):  # metadata may lead in a circle
        folder = (input_of(folder, "sft") or folder).absolute()
    arguments = read_meta(folder)["arguments"]
    expert = None if "sft" in arguments else input_of(folder, "expert")
    return (expert, arguments.get("n_expert")) if expert and expert.is_file() else (None, None)


# ----------------------------------------------------------------------------------------- resuming


def same_arguments(output: Path, arguments: dict[str, Any], free: Iterable[str] = ()) -> None:
    """Refuse to resume with other arguments, but for `free` ones, or other inputs than at first.

    What is not among the arguments, a flag of another command, must not have been set.
    """
    meta = read_meta(output)
    begun = meta["arguments"]
    now = {"server_model": begun.get("server_model")} | recorded(arguments)
    differences = []
    for name, before in begun.items():
        unset = before is None or before is False or before == []
        value = now.get(name, before if unset else None)
        same = before == value
        content = meta["inputs"].get(str(before))
        if content and value and files_of(Path(value)):  # an input, which may have been moved
            same = content == sha256(Path(value))
        if same or name in (*FREE, *free) or (name in FOUND and before is None):
            continue
        difference = f"--{name.replace('_', '-')} {before}, not {value}"
        if name == "env_files":
            difference = "other files than --env-option names now"
        elif before == value:
            difference = f"{before}, which has changed since"
        differences.append(difference)
    named = set(map(str, begun.values()))
    others = [source for source in changed_inputs(output) if str(source) not in named]
    differences += [f"{source}, which has changed since" for source in others]
    if differences:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {', '.join(differences)}: {way_out}")
    here = versions()
    older = [f"{n} {v}" for n, v in meta.get("versions", {}).items() if here.get(n, v) != v]
    if older:
        warn(f"{output} was begun with {', '.join(older)}, which here is another: numbers differ")
