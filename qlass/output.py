"""A file of a stage that grows line by line, and is complete or resumed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from qlass import UserError
from qlass.files import (
    discard,
    dumps,
    files_of,
    is_complete,
    locked,
    meta_path,
    part_of,
    same_arguments,
    share,
    whole_groups,
    write_jsonl,
    write_meta,
)


class Output:
    """A JSONL file that grows by groups of lines: one writer, and metadata that begin with it.

    A group is a tree, or one line. The same command with the same inputs resumes; what a stop left
    incomplete goes.

    free: arguments that may change. identity: what a line is about, the same in all of a group and
    in no other. With it processes may share the tasks: each writes a part (`part_of`) and skips
    what stands in any file. plan: identities of all that is to be done, by all processes, in order.
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
        self.path = part_of(output, rank, world)
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
