"""A run folder: what its stages share, what an output is made by, and how a stopped stage resumes.

    RUN/run.json            environment, options, content of data files, seed: of the first stage
    RUN/trees.jsonl         an output
    RUN/trees.meta.json     its recipe: the flags and inputs that its bytes depend on; and figures
    RUN/trees.jsonl.parts/  what is done of an unfinished output, a file per process

1. An output gets its name by one rename. To be there is to be complete.
2. The same recipe gives the same bytes: it resumes an output, and another recipe is refused.
3. A group of lines (a tree, a result) depends on the recipe and on its own key alone. So whichever
   process makes it, and however often, it is the same group.

Standard library and filelock only, so that bellman.py starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qlass import UserError, files
from qlass.files import parts_of, share
from qlass.flags import Parser

SHARED = ("env", "env_option", "env_files", "seed")  # what run.json holds
NOT_IN_RECIPE = {"argv", "free", "run", "out", "overwrite", "debug"}  # nor are free flags
PACKAGES = ("torch", "transformers", "numpy", "gymnasium", "scienceworld", "textworld")

# ---------------------------------------------------------------------------------------- the run


def parse(parser: Parser, argv: list[str] | None, search: bool = False) -> argparse.Namespace:
    """The flags of a stage; those of SHARED that are left out are the run's.

    A new run has those of the run that made --sft, --trees, --labels or --qnet. Another environment
    than the run's is refused, but a `search` only warns of it.
    """
    first, _ = parser.parse_known_args(argv)
    sources = filter(None, map(vars(first).get, ("sft", "trees", "labels", "qnet")))
    makers = [(source, made_in(Path(source).absolute())) for source in sources]
    home = makers[0][1] if makers else {}
    env = first.env or home.get("env", "webshop")
    run = first.run or Path("runs") / env.rpartition(":")[2].lower()
    begun = run_of(run)
    env, home = first.env or begun.get("env", env), begun or home
    shared = {"env": env, "env_option": [], "seed": 0, "env_files": None}
    shared |= home if env == home.get("env") else {}
    parser.set_defaults(run=run, **shared)
    args = parser.parse_args(argv)
    if "lora" in args and not args.lora and (args.lora_alpha or args.load_in):
        raise UserError("--lora-alpha, --load-in: they need --lora RANK")
    args.argv, args.free = sys.argv[1:] if argv is None else list(argv), parser.free_names
    args.env_option = sorted({text.partition("=")[0]: text for text in args.env_option}.values())
    for folder, settings in ((run, begun), *makers):
        if settings and world(settings) != world(vars(args)):
            args.env_files = None
            before, now = shlex.join(world(settings)), shlex.join(world(vars(args)))
            reason = f"{folder} is of {before}, not of {now}"
            if settings is begun and not search:
                raise UserError(f"{reason}: leave the flags out, or name another --run")
            files.warn(reason)
    return args


def run_of(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    return files.read_object(file) if file.exists() else {}


def made_in(output: Path) -> dict[str, Any]:
    """What SHARED was when an output was made: in its recipe, wherever it is, else in its run."""
    recipe = meta_of(output)["recipe"]
    return {name: recipe[name] for name in SHARED if name in recipe} or run_of(output.parent)


def world(settings: dict[str, Any]) -> list[str]:
    """The environment and its options as flags."""
    options = [["--env-option", text] for text in settings["env_option"]]
    return ["--env", settings["env"], *itertools.chain(*options)]


def same_world(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether recipes are of one environment, with one set of options and of files."""
    return all(a.get(name) == b.get(name) for name in ("env", "env_option", "env_files"))


def need(named: Path | None, default: Path, stage: str, args: argparse.Namespace) -> Path:
    """A stage's input: what was named, else the earlier stage's output, made or resumed first."""
    path = named or default
    path = path if path.name not in ("", "..") else path.resolve()  # "--sft ." has a name
    if named and not path.exists():
        raise UserError(f"{named}: no such file or folder")
    if not path.exists():
        make(path, stage, args)
    for product, source in outdated(path):
        files.warn(f"{product} was made from another {source} than there is now: make it again")
    return path


def make(output: Path, stage: str, args: argparse.Namespace) -> None:
    """Run an earlier stage with the flags that all stages share."""
    argv = [word for word in meta_of(output).get("argv", []) if word != "--overwrite"]
    # A stopped stage goes on as it was begun, from whatever folder.
    argv = [*argv, "--run", str(args.run)] if argv else handed_on(args)
    problem = f"{output} is missing or not complete"
    command = f"python {stage}.py {shlex.join(argv)}"
    agent = None if stage == "sft" else vars(args).get("sft")
    if share()[1] > 1 or (agent and agent.resolve() != (args.run / "sft").resolve()):
        reason = "make it first, by one process and from the --sft that is meant"
        raise UserError(f"{problem}: {reason}: {command}")
    print(f"{problem}: making it with {command}", flush=True)
    importlib.import_module(stage).main(argv)
    args.env_files = args.env_files or run_of(args.run).get("env_files")


def handed_on(args: argparse.Namespace) -> list[str]:
    """The flags that all stages of a run share; the environment's only of a new run."""
    argv = [] if run_of(args.run) else world(vars(args))
    for name in ("run", "seed", "device", "precision"):
        value = vars(args).get(name)
        argv += [] if value is None else [f"--{name}", str(value)]
    return argv


# ------------------------------------------------------------------------------------- the recipe


def meta_path(output: Path) -> Path:
    """trees.jsonl -> trees.meta.json; a checkpoint folder sft -> sft.meta.json."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".meta.json")


def meta_of(output: Path) -> dict[str, Any]:
    path = meta_path(output)
    return {"recipe": {}, "inputs": {}} | (files.read_object(path) if path.exists() else {})


Inputs = dict[str, Path | None]  # by the flags that name them


def only(args: argparse.Namespace, *names: str) -> argparse.Namespace:
    """The arguments of an output that depends on few of them: all others are free."""
    return argparse.Namespace(**vars(args) | {"free": [n for n in vars(args) if n not in names]})


def claim(output: Path, args: argparse.Namespace, inputs: Inputs) -> dict[str, Any]:
    """Begin an output, or resume it. Returns its recipe: all flags but the free ones, and the
    content of the inputs. UserError if it was begun with another one."""
    left_out = {*NOT_IN_RECIPE, *args.free, *inputs}
    recipe = {name: value for name, value in vars(args).items() if name not in left_out}
    recipe |= {name: files.sha256(path) for name, path in inputs.items() if path and path.exists()}
    recipe = json.loads(json.dumps(recipe, default=str))
    begun_parts = any(parts_of(output).glob("*.jsonl"))  # asked first, as metadata came before them
    begun = meta_of(output)["recipe"]
    if args.overwrite:
        for old in (output, parts_of(output), states_of(output), meta_path(output)):
            files.discard(old)
        return recipe
    if not begun and (begun_parts or is_there(output)):
        reason = "not of this command, which leaves a .meta.json beside it"
        raise UserError(f"{output}: {reason}: move it, or name it as an input")
    differences = []
    for name in {**begun, **recipe} if begun else ():
        before, now = begun.get(name), recipe.get(name)
        new_input = name == "qnet" and not before  # what methods without it began
        if before != now and name not in args.free and not new_input:
            other = "which has changed or is another"
            text = f"{inputs[name]}, {other}" if name in inputs else f"{before}, not {now}"
            differences.append(f"--{name.replace('_', '-')} {text}")
    if differences:
        way_out = "--overwrite starts again, another --out or --run keeps both"
        raise UserError(f"{output} was begun with {'; '.join(differences)}: {way_out}")
    return recipe


def is_there(output: Path) -> bool:
    """Whether it is complete; an empty folder, perhaps on another disk, waits for a checkpoint."""
    return output.exists() and (output.is_file() or any(output.iterdir()))


def write_meta(
    output: Path, args: argparse.Namespace, recipe: dict, inputs: Inputs, **figures: Any
) -> None:
    """Inputs are named relative to the output, so that a run may be moved."""
    folder, named = output.parent.resolve(), {n: path for n, path in inputs.items() if path}
    places = {n: os.path.relpath(p.parent.resolve() / p.name, folder) for n, p in named.items()}
    record = {
        "recipe": recipe,
        "inputs": places,
        "argv": args.argv,
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
        **figures,
    }
    with files.replacing(meta_path(output)) as out:
        json.dump(record, out, indent=1, ensure_ascii=False)
    if args.env_files is not None and not run_of(args.run):  # an environment was opened
        with files.replacing(args.run / "run.json") as out:
            json.dump({name: getattr(args, name) for name in SHARED}, out, indent=1)


def write_at_once(
    output: Path, args: argparse.Namespace, records: Iterable[dict], inputs: Inputs, **figures: Any
) -> None:
    """An output that takes no time to make, so it is made anew each time."""
    files.refuse_folder(output)
    with files.locked(output):
        recipe = claim(output, args, inputs)
        files.discard(output)  # a stop leaves no old lines beside new metadata
        write_meta(output, args, recipe, inputs, **figures)
        files.write_jsonl(output, records)


def input_of(output: Path, name: str) -> Path | None:
    """Where an input of an output is; None: there was none, or it is gone."""
    path = meta_of(output)["inputs"].get(name)
    place = output.parent / (path or output.name)  # metadata may have been moved to their own input
    return place if place.exists() and place.resolve() != output.resolve() else None


def outdated(output: Path, above: frozenset = frozenset()) -> Iterator[tuple[Path, Path]]:
    """(what was made, what it was made from and has changed since), of all that it is made of."""
    meta, above = meta_of(output), above | {output.resolve()}  # metadata may lead in a circle
    for name in meta["inputs"]:
        source = input_of(output, name)
        if source and source.resolve() not in above:
            yield from outdated(source, above)
            if files.sha256(source) != meta["recipe"].get(name):
                yield output, source


# ------------------------------------------------------------------------ outputs of several parts


def states_of(checkpoint: Path) -> Path:
    """The folder of an unfinished training's states."""
    return checkpoint.with_name(checkpoint.name + ".partial")


class Output:
    """A JSONL file made group by group, by one process or several; a group is a tree or a line.

    key: what a group is about, the same for all of its lines. groups: what need not be made again.
    alone: this process writes all of it, although it has others beside it.
    """

    def __init__(
        self, path: Path, args: Any, key: Callable[[dict], Any], alone: bool = False, **inputs: Any
    ) -> None:
        rank, n = (0, 1) if alone else share()
        files.refuse_folder(path)
        if args.overwrite and n > 1:
            raise UserError(f"{path}: several processes with --overwrite: delete it")
        self.path, self.args, self.key, self.inputs = path, args, key, inputs
        self.part = parts_of(path) / f"{rank}-of-{n}.jsonl"
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(files.locked(self.part if n > 1 else path))
        self.recipe = claim(path, args, inputs)
        self.started = time.time()
        self.read()
        self.one_call = n == 1 and not self.groups  # this call makes all of it

    @property
    def records(self) -> list[dict]:
        return list(itertools.chain(*self.groups.values()))

    def read(self) -> None:
        """All groups that are done, whoever made them, by their keys."""
        groups: dict[Any, list[dict]] = {}
        parts: dict[Any, list[dict]] = {}
        for part in sorted(parts_of(self.path).glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # another process has just finished
                for line in part.read_bytes().splitlines(keepends=True):
                    if line.endswith(b"\n"):  # else its writer was stopped
                        group = files.parse_json(line, str(part))
                        parts[self.key(group[0])] = group
        if self.path.exists():  # asked last, as parts are in it before they go
            for key, lines in itertools.groupby(files.read_jsonl(self.path), self.key):
                groups[key] = list(lines)
        self.groups = groups | parts

    def todo(self, keys: Iterable[Any]) -> list[Any]:
        """What is missing of this process's share: from the RANK-th on, every WORLD_SIZE-th."""
        (rank, n), keys = share(), list(keys)
        if not keys:
            raise UserError("no tasks are left: mind --split, --skip and --limit")
        if not 0 <= rank < n <= len(keys):
            raise UserError(f"RANK {rank}, WORLD_SIZE {n}: no share of {len(keys)} tasks")
        return self.missing(keys[rank::n])

    def missing(self, keys: Iterable[Any]) -> list[Any]:
        """Which of these groups are still to be made, by whichever process."""
        return [key for key in keys if key not in self.groups]

    def grow(self, groups: Iterable[list[dict]], title: str, total: int) -> None:
        """Write groups as they come, each as one line of this process's part."""
        from tqdm import tqdm

        if meta_of(self.path)["recipe"] != self.recipe:
            write_meta(self.path, self.args, self.recipe, self.inputs)
        self.part.parent.mkdir(exist_ok=True)
        with open(self.part, "a", encoding="utf-8") as out:
            out.truncate(self.part.read_bytes().rfind(b"\n") + 1)  # what a stop cut
            every = 0.1 if sys.stderr.isatty() else 30  # seconds
            for group in tqdm(groups, title, total, mininterval=every):
                out.write(files.dumps(group))
                out.flush()

    def finish(self, plan: Sequence[Any], **figures: Any) -> None:
        """Give the output its name, once all that is planned is done, by whichever process."""
        self.read()
        if missing := self.missing(plan):
            print(f"{self.path}: {len(missing)} of {len(plan)} are left to other processes")
        elif parts_of(self.path).exists() or not self.path.exists():
            for key in plan:
                self.groups[key] = self.groups.pop(key)  # in this order, behind older ones
            files.write_jsonl(self.path, self.records)
            seconds = time.time() - self.started if self.one_call else None
            write_meta(self.path, self.args, self.recipe, self.inputs, seconds=seconds, **figures)
            shutil.rmtree(parts_of(self.path), ignore_errors=True)
        self.lock.close()
