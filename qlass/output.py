"""Outputs of the stages: how they grow line by line, in parts of several processes, and are read.

data/README.md shows a line of each. Records stay the dicts that JSON gives, so that fields beyond
these are kept.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from qlass import UserError
from qlass.files import (
    discard,
    dumps,
    files_of,
    groups_of,
    locked,
    records_of,
    share,
    whole_groups,
    write_jsonl,
)
from qlass.metadata import is_complete, meta_path, read_meta, same_arguments, write_meta


class Output:
    """A JSONL file that grows by groups of lines: one writer, and metadata that begin with it.

    A group is a tree, or one line. The same command with the same inputs resumes; what a stop left
    incomplete goes.

    free: arguments that may change. identity: what a line is about, the same in all of a group and
    in no other. With it processes may share the tasks: each writes a part and skips what stands in
    any file. plan: identities of all that is to be done, by all processes, in order.
    `records` need not be made again, whichever file they are in; `own` are those of `path`.
    """

    def __init__(
        self,
        output: Path,
        arguments: dict[str, Any],
        inputs: Iterable[Path | None] = (),
        free: Iterable[str] = (),
        identity: Callable[[dict], Any] | None = None,
        plan: Sequence[Any] = (),
    ) -> None:
        self.output, self.arguments, self.inputs = output, arguments, list(inputs)
        self.identity, self.plan = identity, plan
        self.started = time.time()
        self.file: TextIO | None = None  # open from the first `append` on
        rank, world = share() if identity else (0, 1)
        self.path = output
        if world > 1:
            self.path = output.with_name(f"{output.stem}.{rank}-of-{world}.jsonl")
        if output.is_dir() or (world > 1 and output.suffix != ".jsonl"):  # parts end with it
            raise UserError(f"{output}: a file is written here: give it a name with .jsonl")
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(locked(self.path))
        if arguments.get("overwrite") and world > 1:
            reason = "of several processes, one would overwrite what others wrote"
            raise UserError(f"{output}: delete it: {reason}")
        for file in files_of(output):
            if not meta_path(file).exists():
                reason = "not of this command, which leaves a .meta.json beside it"
                raise UserError(f"{file}: {reason}: move it, or name it as an input")
            if arguments.get("overwrite"):
                with locked(file):
                    discard(file)
                    discard(meta_path(file))
            else:
                same_arguments(file, arguments, ("limit", *free))
        self.read()

    def read(self) -> None:
        """What stands in the files now."""
        self.own = whole_groups(self.path)
        self.records = list(self.own)
        if self.identity:
            for file in files_of(self.output):
                read = set(map(self.identity, self.records))
                self.records += [r for r in whole_groups(file) if self.identity(r) not in read]

    def append(self, group: list[dict]) -> None:
        if self.file is None:
            self.describe()  # it is not complete from now on
            write_jsonl(self.path, self.own)
            self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (until `finish`)
        self.file.write("".join(map(dumps, group)))
        self.file.flush()
        self.own += group
        self.records += group

    def grow(self, groups: Iterable[list[dict]], title: str, total: int, done: int = 0) -> None:
        from tqdm import tqdm  # here, since bellman.py does without

        every = 0.1 if sys.stderr.isatty() else 30  # seconds; off a terminal a report is a line
        for group in tqdm(groups, title, total, initial=done, mininterval=every):
            self.append(group)

    def describe(self, **metrics: Any) -> None:
        planned = {*self.plan, *map(self.identity, self.records)} if self.identity else ()
        write_meta(self.path, self.arguments, self.inputs, planned=len(planned), **metrics)

    def finish(self, **metrics: Any) -> None:
        """Close the file; put it in the order of the plan, and say if nothing is left to do."""
        if self.file:
            self.file.close()
        if self.file or not is_complete(self.output):
            self.read()
            done = set()
            if identity := self.identity:
                rank = {name: i for i, name in enumerate(self.plan)}
                self.own.sort(key=lambda record: rank.get(identity(record), -1))
                done = set(map(identity, self.records))
            write_jsonl(self.path, self.own)
            if done.issuperset(self.plan):
                metrics |= {"parts": len(files_of(self.output))}
                metrics |= {"seconds": time.time() - self.started}
            self.describe(**metrics)
        self.lock.close()


# ------------------------------------------------------------------------------ trees and results

NODE = ("task_id", "node_id", "parent_id", "action", "observation", "reward")  # required fields
RESULT = ("task_id", "env", "method", "reward", "tokens")
NUMBERS = ("reward", "q", "q_raw")
CONDITION = ("split", "M", "N", "select", "player")  # of a result, besides task and method


def chat_fault(messages: Any) -> str:
    """Why this is no list of turns of user and assistant; empty if it is.

    The user is first, after at most one system message.
    """
    if not isinstance(messages, list):
        return "no list of turns (json.loads reads JSON text)"
    turns = ["user", "assistant"] * len(messages)
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        turns.insert(0, "system")
    for number, (turn, role) in enumerate(zip(messages, turns, strict=False), 1):
        if not isinstance(turn, dict):
            return f"turn {number} is no object with role and content"
        if turn.get("role") != role:
            return f"turn {number} is of {turn.get('role')!r:.20}, not of {role}"
        if not isinstance(turn.get("content"), str):
            return f"the content of turn {number} is {turn.get('content')!r:.40}, which is no text"
    return "" if "user" in turns[: len(messages)] else "no turns"


def check(where: str, record: dict, required: Iterable[str], kind: str) -> None:
    """UserError unless the fields are there, numbers are numbers and messages a chat."""
    mistakes = [f"no {name}" for name in required if name not in record]
    for name in NUMBERS:
        if not isinstance(record.get(name, 0), int | float):
            mistakes.append(f"{name} can't be {record[name]!r:.40}")
    if fault := "messages" in record and chat_fault(record["messages"]):
        mistakes.append(f"messages are no chat of user and assistant in turns ({fault})")
    if mistakes:
        raise UserError(f"{where}: {mistakes[0]}; is this a {kind}?")


def trees_of(path: Path, required: Iterable[str]) -> Iterator[list[dict]]:
    of_root = (*NODE, *required)
    of_node = [name for name in of_root if name != "messages"]
    kind = "q_labels.jsonl, which bellman.py writes" if "q" in of_root else "trees.jsonl"
    for group in groups_of(path, cut=not is_complete(path)):
        tree = [node for _, node in group]
        parents = {None}
        for where, node in group:
            check(where, node, of_root if node is tree[0] else of_node, kind)
            task, name = node["task_id"], node["node_id"]
            if node["parent_id"] not in parents or name in parents or task != tree[0]["task_id"]:
                place = "stands before its parent, twice, or in another task's tree"
                raise UserError(f"{where}: node {name} of task {task} {place}")
            parents.discard(None)  # the root's parent
            parents.add(name)
        yield tree


def read_trees(path: str | Path, required: Iterable[str] = ()) -> Iterator[list[dict]]:
    """Yield the trees of a file and its parts, each as its list of nodes, the root first.

    Trees of parts come in the order of the tasks, each once. UserError if a part is missing or not
    finished. required: fields of a node besides NODE; "messages" of the root alone.
    """
    path = Path(path)
    if not is_complete(path):
        raise UserError(f"{path}: is not complete: the command that began it (again) completes it")
    files = files_of(path)
    if files == [path]:  # one tree in memory at a time
        yield from trees_of(path, required)
        return
    trees: dict[str, list[dict]] = {}
    for file in files:
        for tree in trees_of(file, required):
            trees.setdefault(tree[0]["task_id"], tree)
    plan = max((read_meta(file).get("tasks", []) for file in files), key=len)
    for task in dict.fromkeys([*plan, *trees]):
        if task in trees:
            yield trees[task]


def read_results(path: Path) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", result) of a file and its parts; what stands in several is read once."""
    first: dict[tuple, Path] = {}
    for file in files_of(path) or [path]:
        for where, record in records_of(file, cut=not is_complete(file)):
            check(where, record, RESULT, "results.jsonl")
            if first.setdefault(identity(record), file) == file:
                yield where, record


def identity(record: dict) -> tuple:
    """What a result is about; no two lines are about the same."""
    return (record["task_id"], record["method"], *map(record.get, CONDITION))
