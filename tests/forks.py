"""Stages as processes of their own, forked from a server that has done their imports: to be killed or run side by side.

with Forks() as forks:
    one = forks.start("bellman", folder, ["--run", "run"])
    one.send_signal(signal.SIGKILL); code, output, error = one.wait()
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

STAGES = ["bellman", "build_trees", "q_search", "report", "sft", "train_qnet"]
PRELOADED = [*STAGES, "environments.frozenlake.env", "transformers.models.llama.modeling_llama"]


def run(stage: str, folder: Path, argv: list[str], env: dict[str, str]) -> None:
    """What a fork does: a stage with these arguments, in this folder; its output goes to files there."""
    from qlass.cli import run_stage

    os.setsid()
    os.chdir(folder)
    os.environ |= env
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(f".{name}.{os.getpid()}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [f"{stage}.py", *argv]
    code = 0
    try:
        run_stage(importlib.import_module(stage).main)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take down an interpreter with all these modules takes seconds


class Fork:
    def __init__(self, process: multiprocessing.Process, folder: Path) -> None:
        process.start()
        self.process, self.pid, self.folder = process, process.pid, folder

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may be over
            os.kill(self.pid, number)

    def wait(self) -> tuple[int, str, str]:
        """Exit code (of a signal its negative), standard output and error."""
        self.process.join()
        files = [self.folder / f".{name}.{self.pid}" for name in ("output", "error")]
        texts = [path.read_text() if path.exists() else "" for path in files]  # it may have been killed before
        for path in files:
            path.unlink(missing_ok=True)
        return (self.process.exitcode, *texts)


class Forks:
    """start() forks a stage off."""

    def __enter__(self) -> Forks:
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.started: list[Fork] = []
        return self

    def __exit__(self, *_) -> None:
        for fork in self.started:  # also one that is halted
            fork.process.kill()

    def start(self, stage: str, folder: Path, argv: list[str], env: dict[str, str] | None = None) -> Fork:
        process = self.context.Process(target=run, args=(stage, folder, argv, env or {}))
        self.started.append(Fork(process, folder))
        return self.started[-1]

    def run(self, stage: str, folder: Path, argv: list[str], **more) -> tuple[int, str, str]:
        return self.start(stage, folder, argv, **more).wait()
