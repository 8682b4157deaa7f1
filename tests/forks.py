"""Stages as processes of their own, forked from one that has done their imports: to be killed or run side by side.

with Forks() as forks:
    one = forks.start("bellman", folder, ["--run", "run"])
    one.send_signal(signal.SIGKILL); code, output, error = one.wait()
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fork(NamedTuple):
    forks: Forks
    pid: int
    folder: Path

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def computed(self) -> float:
        """Seconds on a processor so far: what a run has done, however busy the machine is; infinite when it is over."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return math.inf
        ticks = int(state[11]) + int(state[12])
        return math.inf if state[0] == "Z" else ticks / os.sysconf("SC_CLK_TCK")

    def wait(self) -> tuple[int, str, str]:
        """Exit code (of a signal its negative), standard output and error."""
        code = self.forks.ask({"wait": self.pid})
        files = [(self.folder / f".{name}.{self.pid}") for name in ("output", "error")]
        texts = [path.read_text() if path.exists() else "" for path in files]  # it may have been killed before
        for path in files:
            path.unlink(missing_ok=True)
        return (code, *texts)


class Forks:
    """start() forks a stage off; limit: bytes that a file of it may have, as on a full disk."""

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
        self, stage: str, folder: Path, argv: list[str], limit: int = 0, env: dict[str, str] | None = None
    ) -> Fork:
        command = {"stage": stage, "folder": str(folder), "argv": argv, "limit": limit, "env": env or {}}
        return Fork(self, self.ask(command), folder)

    def run(self, stage: str, folder: Path, argv: list[str], **more) -> tuple[int, str, str]:
        return self.start(stage, folder, argv, **more).wait()


def serve() -> None:
    import importlib
    import resource
    import traceback

    sys.path.insert(0, str(ROOT))
    from transformers.models.llama import modeling_llama  # noqa: F401

    from qlass.cli import run_stage

    stages = ("bellman", "build_trees", "q_search", "report", "sft", "train_qnet")
    modules = {name: importlib.import_module(name) for name in (*stages, "environments.frozenlake.env")}
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            print(os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
        os.chdir(command["folder"])
        os.environ |= command["env"]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(f".{name}.{os.getpid()}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [f"{command['stage']}.py", *command["argv"]]
        if command["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (command["limit"],) * 2)
        code = 0
        try:
            run_stage(modules[command["stage"]].main)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to take down an interpreter with all these modules takes seconds


if __name__ == "__main__":
    serve()
    os._exit(0)  # to take down an interpreter with all these modules takes seconds
