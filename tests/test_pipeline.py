"""The five scripts on a lake of sixteen cells, also killed and by several processes; in a fresh clone; installed."""

import functools
import importlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import ROOT, fork, without_seconds

import q_search
from qlass.files import meta_of, read_jsonl
from qlass.trees import read_trees
from reporting.results import protocol_of

STAGES = {"sft": "sft", "build_trees": "trees.jsonl", "bellman": "q_labels.jsonl", "train_qnet": "qnet",
          "q_search": "results.jsonl"}  # fmt: skip
# Named as one's own environment, it has the preset of one, which takes seconds.
OWN = "environments.frozenlake.env:FrozenLakeEnv"
LAKE = f"--env {OWN} --env-option map=4x4"


def python(command, cwd=Path(), **more):
    """What a Python of its own prints; it must end well, and find nothing changed. more: of its environment."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | more  # several threads would wait for one another
    words = [sys.executable, *shlex.split(command)]
    process = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env)
    assert process.returncode == 0, process.stderr
    assert not any(words in process.stderr for words in ("Traceback", "make it again"))
    return process.stdout


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Where the five scripts were run with their defaults, one after the other."""
    folder = tmp_path_factory.mktemp("lake")
    for stage in STAGES:  # each finds what the one before it left
        assert "missing" not in python(f"{shlex.quote(str(ROOT))}/{stage}.py {LAKE}", folder)
    return folder / "runs" / "frozenlakeenv"


def test_each_stage_leaves_its_file_and_how_it_came_about_and_the_next_one_means_the_same(lake):
    for name in STAGES.values():
        assert (lake / name).exists()
        meta = meta_of(lake / name)
        assert meta["recipe"]["env"] == OWN and meta["versions"]["torch"]
        assert meta["inputs"].keys() <= meta["recipe"].keys()
        assert 0 <= meta["seconds"] < 86400 and meta["memory_mb"] > 10 and meta["gpu_memory_mb"] == 0
    world = {"environment": OWN, "version": "0", "options": ["map=4x4"], "data": {}, "max_steps": 40}
    assert protocol_of(lake / "results.jsonl") == world | {"temperature": 1.0, "tokens": "nominal"}
    demonstrations, trees, labels, results = (
        {line["task_id"] for line in read_jsonl(lake / f"{name}.jsonl")}
        for name in ("expert", "trees", "q_labels", "results")
    )
    assert trees == labels == demonstrations and results.isdisjoint(demonstrations)


def test_what_is_missing_is_made_and_is_the_same(lake, tmp_path, capsys):
    """From the agent alone, search makes the trees, their labels and QNet, as the scripts did."""
    again = tmp_path / "runs" / "frozenlakeenv"
    shutil.copytree(lake / "sft", again / "sft")
    q_search.main(LAKE.split())
    announced = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "missing" in line]
    missing = [f"runs/frozenlakeenv/{name}" for name in ("qnet", "q_labels.jsonl", "trees.jsonl")]
    assert announced == [f"{path} is missing" for path in missing]
    for name in ("trees.jsonl", "q_labels.jsonl"):
        assert (again / name).read_bytes() == (lake / name).read_bytes()
    assert without_seconds(again / "results.jsonl") == without_seconds(lake / "results.jsonl")


SHORT = {  # flags with which a run lasts seconds
    "sft": "--epochs 3 --save-every 1 --n-expert 6",
    "build_trees": "--rollouts 4 --limit 4",
    "bellman": "",
    "train_qnet": "--epochs 2 --batch 8 --save-every 1",
    "q_search": "--method qlass sample --limit 4",
}


def test_killed_stages_complete_the_same_files(tmp_path, monkeypatch):
    """Killed at a random moment; where processes share the work, one of three is, and one does the rest."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    monkeypatch.chdir(whole)
    rng = random.Random(0)
    for stage, flags in SHORT.items():
        main, argv = importlib.import_module(stage).main, f"--run run {LAKE} {flags}".split()
        begun = time.monotonic()
        main(argv)
        seconds = time.monotonic() - begun
        width = 3 if stage in ("build_trees", "q_search") else 1
        processes = [fork(main, argv, killed, RANK=str(rank), WORLD_SIZE=str(width)) for rank in range(width)]
        processes[-1].join(rng.random() * seconds)
        processes[-1].kill()
        for process in processes:
            process.join(3600)
            assert process.exitcode in (0, -signal.SIGKILL)  # and not refused
        last = fork(main, argv, killed)
        last.join(3600)
        assert last.exitcode == 0
        one, other = (folder / "run" / STAGES[stage] for folder in (whole, killed))
        assert contents(one) == contents(other) if one.is_dir() else without_seconds(one) == without_seconds(other)
    assert {path.name for path in killed.glob("run/[!.]*")} == {path.name for path in whole.glob("run/[!.]*")}


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_plain_needs_neither_the_fast_engine_nor_a_server():
    """All stages, where these can't be imported."""
    program = [
        "import sys; sys.modules |= dict.fromkeys(('qlass.fast', 'integrations.served', 'integrations.servers'))"
    ]
    for stage, flags in SHORT.items():
        plain = "" if stage == "bellman" else "--plain"
        program += [f"import {stage}; {stage}.main('{LAKE} {flags} {plain}'.split())"]
    assert "missing" not in python(f'-c "{chr(10).join(program)}"', PYTHONPATH=str(ROOT))
    assert len(read_jsonl(Path("runs/frozenlakeenv/results.jsonl"))) == 8


def test_the_first_command_works_in_a_fresh_clone(agent, tmp_path):
    clone = tmp_path / "clone"
    if not shutil.which("git") or subprocess.run(["git", "clone", "-q", ROOT, clone]).returncode:
        pytest.skip("not a clone")
    if not (clone / "build_trees.py").exists():
        pytest.skip("nothing is committed")
    run = clone / "runs" / "webshop"
    shutil.copytree(agent, run / "sft")
    python("build_trees.py --env webshop --depth 3 --tasks new --limit 2 --rollouts 2", clone)
    assert len(list(read_trees(run / "trees.jsonl"))) == 2


def test_stages_run_from_a_wheel(tmp_path):
    site = tmp_path / "site"
    run = functools.partial(python, PYTHONPATH=str(site), XDG_CACHE_HOME=str(tmp_path))
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "runs", "generated", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    run("-m pip install -q --no-deps --no-build-isolation --target site ./source")
    assert {path.name for path in site.glob("*.py")} == {path.name for path in ROOT.glob("*.py")}
    played = run("-m experiments.compare --env frozenlake --method expert rule --limit 2")
    assert "expert: mean reward" in played and Path("runs/frozenlake/results.jsonl").exists()
    run("-m reporting --run runs/frozenlake")
    run("-c \"import gymnasium; gymnasium.make('envs:qlass/FrozenLake-v0').reset()\"")
