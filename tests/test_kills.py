"""Stages killed at any moment, several at once: the same command completes the same files.

Each stage runs as a process of its own on a lake of sixteen cells; one that is killed is given the same command again.
"""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from forks import finish, start

from qlass.files import read_jsonl

LAKE = ["--env", "frozenlake", "--env-option", "map=4x4", "--run", "run"]
STAGES = {  # a command whose run lasts seconds, and its output
    "sft": ([*LAKE, "--epochs", "3", "--save-every", "1", "--n-expert", "6"], "sft"),
    "build_trees": ([*LAKE, "--rollouts", "4", "--limit", "4"], "trees.jsonl"),
    "bellman": (["--run", "run"], "q_labels.jsonl"),
    "train_qnet": ([*LAKE, "--epochs", "2", "--batch", "8", "--save-every", "1"], "qnet"),
    "q_search": ([*LAKE, "--method", "qlass", "sample", "--limit", "4"], "results.jsonl"),
}


def content(path: Path):
    """What must be the same: weights byte by byte, lines but for their seconds."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_jsonl(path)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """A run of all stages, and how many seconds each took."""
    folder, seconds = tmp_path_factory.mktemp("undisturbed"), {}
    for stage, (argv, _) in STAGES.items():
        begun = time.monotonic()
        finish(start(stage, folder, argv), folder, 0)
        seconds[stage] = time.monotonic() - begun
    return folder / "run", seconds


def inputs(stage: str, run: Path, folder: Path) -> set[str]:
    """Copy what the stages before this one wrote: their names."""
    earlier = list(STAGES)[: list(STAGES).index(stage)]
    (folder / "run").mkdir()
    for path in run.glob("[!.]*"):
        if path.name in sum(map(MADE.get, earlier), []):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / "run" / path.name)
    return {path.name for path in (folder / "run").iterdir()}


MADE = {  # all that a stage leaves behind
    "sft": ["run.json", "sft", "sft.meta.json", "sft.log.jsonl", "expert.jsonl", "expert.meta.json"],
    "build_trees": ["trees.jsonl", "trees.meta.json"],
    "bellman": ["q_labels.jsonl", "q_labels.meta.json"],
    "train_qnet": ["qnet", "qnet.meta.json", "qnet.log.jsonl"],
    "q_search": ["results.jsonl", "results.meta.json"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_completes_the_same_files(stage, undisturbed, tmp_path):
    """Killed three times at random moments, wherever they strike."""
    run, seconds = undisturbed
    argv, name = STAGES[stage]
    before = inputs(stage, run, tmp_path)
    rng = random.Random(stage)
    for _ in range(3):
        process = start(stage, tmp_path, argv)
        process.join(rng.random() * seconds[stage])
        process.kill()
        finish(process, tmp_path, 0, -signal.SIGKILL)  # and not refused
    finish(start(stage, tmp_path, argv), tmp_path, 0)
    assert content(tmp_path / "run" / name) == content(run / name)
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} == before | set(MADE[stage])


@pytest.mark.parametrize("stage", ["build_trees", "q_search"])
def test_several_processes_of_any_width_make_the_same_file(stage, undisturbed, tmp_path):
    """At once, though one of them is killed: all that they did is kept, and a call by one process does the rest."""
    run, _ = undisturbed
    argv, name = STAGES[stage]
    inputs(stage, run, tmp_path)
    started = [start(stage, tmp_path, argv, RANK=str(rank), WORLD_SIZE="3") for rank in range(3)]
    started[2].kill()
    for process, code in zip(started, (0, 0, -signal.SIGKILL), strict=True):
        finish(process, tmp_path, code)
    finish(start(stage, tmp_path, argv), tmp_path, 0)
    assert content(tmp_path / "run" / name) == content(run / name)
