"""Stages as processes of their own, forked from a server that has done their imports: to be killed or run at once."""

import importlib
import multiprocessing
import os
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

STAGES = ["bellman", "build_trees", "q_search", "sft", "train_qnet"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([*STAGES, "environments.frozenlake.env", "transformers.models.llama.modeling_llama"])
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(stage: str, folder: Path, argv: list[str], env: dict[str, str]) -> None:
    """In the fork. Errors go to a file in the folder."""
    from qlass.runs import run_stage

    os.chdir(folder)
    os.environ |= env
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(f".error.{os.getpid()}", os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = [f"{stage}.py", *argv]
    code = 0
    try:
        run_stage(importlib.import_module(stage).main)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # to take down an interpreter with all these modules takes seconds


def start(stage: str, folder: Path, argv: list[str], **env: str) -> BaseProcess:
    process = SERVER.Process(target=run, args=(stage, folder, argv, env), daemon=True)
    process.start()
    return process


def finish(process: BaseProcess, folder: Path, *codes: int) -> None:
    """Wait for its end, with one of these exit codes (of a signal its negative)."""
    process.join()
    assert process.exitcode in codes, (folder / f".error.{process.pid}").read_text()
