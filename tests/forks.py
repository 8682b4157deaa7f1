"""Stages as processes of their own, forked from one that has done their imports: to be killed, stopped, run side by side.

    with Forks() as forks:
        one = forks.start("bellman", folder, ["--run", "run"])
        one.send_signal(signal.SIGKILL); code, output, error = one.wait()
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fork(NamedTuple):
    forks: Forks
    pid: int
    folder: Path

    def send_signal(self, signal: int) -> None:
        os.kill(self.pid, signal)

    def wait(self) -> tuple[int, str, str]:
        """Exit code (of a signal its negative), standard output and error."""
        code = self.forks.ask({"wait": self.pid})
        said = [(self.folder / f".{name}.{self.pid}") for name in ("output", "error")]
        texts = [path.read_text() for path in said]
        for path in said:
            path.unlink()
        return (code, *texts)


class Forks:
    """start() forks a stage off; limit: bytes that a file of it may have, as on a full disk; plain_user: no root."""

    def __enter__(self) -> Forks:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
        assert self.server.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_) -> None:
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()

    def ask(self, command: dict) -> int:
        self.server.stdin.write(json.dumps(command) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(
        self, stage: str, folder: Path, argv: list[str], limit: int = 0, plain_user: bool = False, env: dict | None = None
    ) -> Fork:
        asked = {"stage": stage, "folder": str(folder), "argv": argv, "limit": limit, "plain_user": plain_user}
        return Fork(self, self.ask(asked | {"env": env or {}}), folder)

    def run(self, stage: str, folder: Path, argv: list[str], **more) -> tuple[int, str, str]:
        return self.start(stage, folder, argv, **more).wait()


def serve() -> None:
    import importlib
    import resource

    sys.path.insert(0, str(ROOT))
    from transformers.models.llama import modeling_llama  # noqa: F401

    from qlass.stage import run_stage

    modules = {name: importlib.import_module(name) for name in ("sft", "build_trees", "train_qnet", "q_search", "report")}
    modules["bellman"] = importlib.import_module("bellman")
    importlib.import_module("environments.frozenlake.env")
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.setsid()
        os.chdir(asked["folder"])
        os.environ |= asked["env"]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(f".{name}.{os.getpid()}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [f"{asked['stage']}.py", *asked["argv"]]
        if asked["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"],) * 2)
        if asked["plain_user"] and os.geteuid() == 0:
            os.seteuid(65534)
        run_stage(modules[asked["stage"]].main)
        return


if __name__ == "__main__":
    serve()
