"""Stages killed at any moment, several at once: the same command completes the same files."""

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


def completed(folder: Path, stage: str, after: Path) -> None:
    """The same command, in one process, ends with the files of a run that nothing disturbed."""
    argv, name = STAGES[stage]
    finish(start(stage, folder, argv), folder, 0)
    assert content(folder / "run" / name) == content(after / name)
    assert {path.name for path in folder.glob("run/[!.]*")} == {path.name for path in after.glob("[!.]*")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, tuple]:
    """Of each stage of a run: a copy of the run before it and after it, and how many seconds it took."""
    folder, stages = tmp_path_factory.mktemp("undisturbed"), {}
    (folder / "run").mkdir()
    before = shutil.copytree(folder / "run", folder / "before")
    for stage, (argv, _) in STAGES.items():
        begun = time.monotonic()
        finish(start(stage, folder, argv), folder, 0)
        after = shutil.copytree(folder / "run", folder / stage)
        stages[stage] = before, after, time.monotonic() - begun
        before = after
    return stages


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_completes_the_same_files(stage, undisturbed, tmp_path):
    """Killed three times at random moments, wherever they strike."""
    (argv, _), (before, after, seconds) = STAGES[stage], undisturbed[stage]
    shutil.copytree(before, tmp_path / "run")
    rng = random.Random(stage)
    for _ in range(3):
        process = start(stage, tmp_path, argv)
        process.join(rng.random() * seconds)
        process.kill()
        finish(process, tmp_path, 0, -signal.SIGKILL)  # and not refused
    completed(tmp_path, stage, after)


@pytest.mark.parametrize("stage", ["build_trees", "q_search"])
def test_several_processes_of_any_width_make_the_same_file(stage, undisturbed, tmp_path):
    """At once, though one of them is killed: all that they did is kept, and a call by one process does the rest."""
    (argv, _), (before, after, _) = STAGES[stage], undisturbed[stage]
    shutil.copytree(before, tmp_path / "run")
    started = [start(stage, tmp_path, argv, RANK=str(rank), WORLD_SIZE="3") for rank in range(3)]
    started[2].kill()
    for process, code in zip(started, (0, 0, -signal.SIGKILL), strict=True):
        finish(process, tmp_path, code)
    completed(tmp_path, stage, after)
