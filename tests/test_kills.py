"""Stages killed at any moment, several at once: the same command completes the same files.

Each stage runs as a process of its own on a lake of sixteen cells; one that is killed is given the same command again.
"""

import math
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from forks import Forks

from qlass.records import read_jsonl

LAKE = ["--env", "frozenlake", "--map", "4x4", "--run", "run"]
STAGES = {  # a command whose run lasts seconds, and what it writes
    "sft": ([*LAKE, "--epochs", "3", "--save-every", "1", "--n-expert", "6"], "sft"),
    "build_trees": ([*LAKE, "--rollouts", "4", "--limit", "4"], "trees.jsonl"),
    "bellman": (["--run", "run"], "q_labels.jsonl"),
    "train_qnet": ([*LAKE, "--epochs", "2", "--batch", "8", "--save-every", "1"], "qnet"),
    "q_search": ([*LAKE, "--method", "qlass", "sample", "--limit", "4"], "results.jsonl"),
}


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


def content(path: Path):
    """What must be the same: weights byte by byte, lines but for their seconds."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_jsonl(path)]


@pytest.fixture(scope="module")
def undisturbed(forks, tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """A run of all stages, and how many seconds each computed."""
    folder, seconds = tmp_path_factory.mktemp("undisturbed"), {}
    for stage, (argv, _) in STAGES.items():
        process = forks.start(stage, folder, argv)
        while (computed := process.computed()) < math.inf:
            seconds[stage] = computed
            time.sleep(0.002)
        code, _, error = process.wait()
        assert code == 0, error
    return folder / "run", seconds


def inputs(stage: str, run: Path, folder: Path) -> Path:
    """A folder with what the stages before this one wrote."""
    (folder / "run").mkdir(parents=True)
    for earlier in list(STAGES)[: list(STAGES).index(stage)]:
        name = STAGES[earlier][1]
        (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, folder / "run" / name)
    return folder


def made_by(stage: str) -> set[str]:
    """All that a stage leaves behind."""
    name = STAGES[stage][1]
    meta = name.removesuffix(".jsonl") + ".meta.json"
    more = {"sft": {"sft.log.jsonl", "expert.jsonl", "expert.meta.json"}, "train_qnet": {"qnet.log.jsonl"}}
    return {name, meta, *more.get(stage, ())}


def killed(forks, stage: str, argv: list[str], folder: Path, after: float) -> bool:
    """Kill the stage when it has computed for so many seconds; whether it was still running."""
    process = forks.start(stage, folder, argv)
    while process.computed() < after:
        time.sleep(0.002)
    time.sleep(random.random() / 100)  # processor time is counted in hundredths of a second
    process.send_signal(signal.SIGKILL)
    code, _, error = process.wait()
    assert code in (0, -signal.SIGKILL), error  # and not refused
    return code != 0


def survives(forks, stage: str, undisturbed: tuple, folder: Path, seed: int) -> int:
    """Kill the stage up to three times at random moments, let it finish, compare; returns how often it was killed."""
    run, seconds = undisturbed
    argv, name = STAGES[stage]
    before = {path.name for path in (inputs(stage, run, folder) / "run").iterdir()}
    rng = random.Random(f"{seed}/{stage}")
    hit = sum(killed(forks, stage, argv, folder, rng.random() * seconds[stage]) for _ in range(3))
    code, _, error = forks.run(stage, folder, argv)
    assert code == 0, error
    assert content(folder / "run" / name) == content(run / name)
    assert {path.name for path in (folder / "run").glob("[!.]*")} == before | made_by(stage)
    return hit


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_completes_the_same_files(forks, stage, undisturbed, tmp_path):
    # Until a kill has struck: on an idle machine a stage may be over before.
    assert any(survives(forks, stage, undisturbed, tmp_path / f"{stage}-{n}", n) for n in range(50))


# ------------------------------------------------------------------------------------------------------ several at once


@pytest.mark.parametrize("stage", ["sft", "q_search"])
def test_a_second_process_is_refused_at_once(forks, stage, undisturbed, tmp_path):
    """While the first one is halted with the lock in its hands; then it finishes as if nothing had been."""
    run, _ = undisturbed
    argv, name = STAGES[stage]
    inputs(stage, run, tmp_path)
    first = forks.start(stage, tmp_path, argv)
    lock, until = tmp_path / "run" / f".{name}.lock", time.monotonic() + 30
    while not lock.exists() and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)  # the file is there a moment before it is locked
    first.send_signal(signal.SIGSTOP)
    code, _, error = forks.run(stage, tmp_path, argv)
    first.send_signal(signal.SIGCONT)
    assert code == 2 and error.startswith(f"error: run/{name}: another process is writing it"), error
    assert first.wait()[0] == 0
    assert content(tmp_path / "run" / name) == content(run / name)


@pytest.mark.parametrize("stage", ["build_trees", "q_search"])
def test_several_processes_of_any_width_make_the_same_file(forks, stage, undisturbed, tmp_path):
    """At once, though one of them is killed: all that they did is kept, and a call by one process joins it."""
    run, _ = undisturbed
    argv, name = STAGES[stage]
    inputs(stage, run, tmp_path)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    shares = [{"RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
    started = [forks.start(stage, tmp_path, argv, env=share) for share in shares]
    started[2].send_signal(signal.SIGKILL)
    assert [process.wait()[0] for process in started] == [0, 0, -signal.SIGKILL]
    code, _, error = forks.run(stage, tmp_path, argv)
    assert code == 0, error
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} == before | made_by(stage)
    assert content(tmp_path / "run" / name) == content(run / name)


def test_a_key_reaches_no_file_and_no_output(forks, undisturbed, tmp_path):
    inputs("q_search", undisturbed[0], tmp_path)
    argv = [*STAGES["q_search"][0], "--server", "http://127.0.0.1:9/v1", "--debug"]
    code, *printed = forks.run("q_search", tmp_path, argv, env={"OPENAI_API_KEY": "sesame-1234"})
    assert code == 1 and "--server" in printed[1] and "sesame" not in "".join(printed)
    assert not any(b"sesame" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
