"""Stages killed at any moment, and disks that are full: the same command completes the same files.

Each stage runs as a process of its own on a lake of sixteen cells; one that is killed is given the same command again.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qlass.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
LAKE = ["--env", "frozenlake", "--map", "4x4"]
STAGES = {  # flags that make a run last seconds, and what it writes
    "sft": (["--epochs", "3", "--save-every", "1", "--n-expert", "6"], "sft"),
    "build_trees": (["--rollouts", "4", "--limit", "4"], "trees.jsonl"),
    "bellman": ([], "q_labels.jsonl"),
    "train_qnet": (["--epochs", "2", "--batch", "8", "--save-every", "1"], "qnet"),
    "q_search": (["--method", "qlass", "sample", "--limit", "4"], "results.jsonl"),
}
RUN = """
import importlib, sys
sys.path.insert(0, {root!r})
from qlass.stage import run_stage
module = importlib.import_module({stage!r})
print("begun", flush=True)
run_stage(lambda: module.main(sys.argv[1:]))
"""


def start(stage: str, folder: Path, *more: str, limit: int | None = None) -> subprocess.Popen:
    """The stage in `folder`, once its imports are done; limit: bytes that a file of it may have, as on a full disk."""
    flags = [] if stage == "bellman" else LAKE
    command = [sys.executable, "-c", RUN.format(root=str(ROOT), stage=stage), *flags, "--run", "run", *STAGES[stage][0]]
    process = subprocess.Popen(
        [*command, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))),
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    return process


def content(path: Path):
    """What must be the same: weights byte by byte, lines but for their seconds."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_jsonl(path)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """A run of all stages, and how many seconds each took behind its imports."""
    folder, seconds = tmp_path_factory.mktemp("undisturbed"), {}
    for stage in STAGES:
        process, began = start(stage, folder), time.monotonic()
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        seconds[stage] = time.monotonic() - began
    return folder / "run", seconds


def inputs(stage: str, run: Path, folder: Path) -> Path:
    """A folder with what the stages before this one wrote."""
    (folder / "run").mkdir(parents=True)
    for earlier in list(STAGES)[: list(STAGES).index(stage)]:
        name = STAGES[earlier][1]
        (folder / "run" / name).symlink_to(run / name)
    return folder


def survives(stage: str, undisturbed: tuple, folder: Path, kills: int, seed: int) -> int:
    """Kill the stage up to `kills` times at random moments, let it finish, compare; returns how often it was killed."""
    run, seconds = undisturbed
    inputs(stage, run, folder)
    rng, hit = random.Random(f"{seed}/{stage}"), 0
    for _ in range(kills):
        process = start(stage, folder)
        time.sleep(rng.random() * seconds[stage])
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hit += process.returncode == -signal.SIGKILL
    process = start(stage, folder)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    name = STAGES[stage][1]
    assert content(folder / "run" / name) == content(run / name)
    made = {path.name for path in (folder / "run").iterdir() if not path.name.startswith(".")}
    assert not any(name.endswith((".draft", ".partial")) for name in made)
    return hit


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_completes_the_same_files(stage, undisturbed, tmp_path):
    assert survives(stage, undisturbed, tmp_path / stage, 3, 0) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_however_often_it_is_killed(stage, undisturbed, tmp_path):
    """Thirty kills: ten runs that are killed three times each."""
    hit = sum(survives(stage, undisturbed, tmp_path / f"{stage}-{seed}", 3, seed) for seed in range(1, 11))
    print(f"{stage}: {hit} of 30 kills struck")
    assert hit >= 10


@pytest.mark.parametrize(("stage", "room"), [("build_trees", 3000), ("bellman", 3000), ("sft", 100_000)])
def test_a_full_disk_is_one_line_and_the_run_resumes(stage, room, undisturbed, tmp_path):
    run, _ = undisturbed
    inputs(stage, run, tmp_path)
    name = STAGES[stage][1]
    process = start(stage, tmp_path, limit=room)
    _, error = process.communicate(timeout=300)
    said = [line for line in error.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2 and len(said) == 1 and "Traceback" not in error, error
    assert "make room" in said[0], said
    if stage != "build_trees":  # that one grows under its name, line by line
        assert not (tmp_path / "run" / name).exists()
    process = start(stage, tmp_path)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert content(tmp_path / "run" / name) == content(run / name)


@pytest.mark.parametrize("stage", ["build_trees", "bellman"])
def test_a_path_that_is_a_folder_or_below_a_file_is_one_line(stage, undisturbed, tmp_path):
    run, _ = undisturbed
    inputs(stage, run, tmp_path)
    (tmp_path / "out.jsonl").mkdir()
    (tmp_path / "file").touch()
    for out in ("out.jsonl", "file/trees.jsonl", "/proc/nowhere/trees.jsonl"):
        process = start(stage, tmp_path, "--out", out)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert not list((tmp_path / "out.jsonl").iterdir())


def test_a_read_only_folder_is_one_line(undisturbed, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    inputs("bellman", undisturbed[0], tmp_path)
    (tmp_path / "closed").mkdir(mode=0o555)
    process = start("bellman", tmp_path, "--out", "closed/q.jsonl")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2 and error.startswith("error: ") and "Permission denied" in error, error


def test_no_key_reaches_a_file(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-1234")
    inputs("bellman", undisturbed[0], tmp_path)
    process = start("bellman", tmp_path)
    printed = "".join(process.communicate(timeout=300))
    assert process.returncode == 0 and "sesame" not in printed
    assert json.loads((tmp_path / "run" / "q_labels.meta.json").read_text())["trees"]
    for folder in (tmp_path / "run", undisturbed[0]):
        assert not any(b"sesame" in file.read_bytes() for file in folder.rglob("*.meta.json"))
