"""Stages killed at any moment, several at once: the same command completes the same files."""

import importlib
import random
import signal
import time
from pathlib import Path

from fakes import fork

from qlass.files import read_jsonl

LAKE = "--run run --env frozenlake --env-option map=4x4"
STAGES = {  # a command whose run lasts seconds, its output, and how many processes can share it
    "sft": (f"{LAKE} --epochs 3 --save-every 1 --n-expert 6", "sft", 1),
    "build_trees": (f"{LAKE} --rollouts 4 --limit 4", "trees.jsonl", 3),
    "bellman": ("--run run", "q_labels.jsonl", 1),
    "train_qnet": (f"{LAKE} --epochs 2 --batch 8 --save-every 1", "qnet", 1),
    "q_search": (f"{LAKE} --method qlass sample --limit 4", "results.jsonl", 3),
}


def content(path: Path):
    """What must be the same: weights byte by byte, lines but for their seconds."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir()}
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_jsonl(path)]


def test_killed_stages_complete_the_same_files(tmp_path, monkeypatch):
    """Killed three times at random moments; where processes share the work, one of three is, and one does the rest."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    monkeypatch.chdir(whole)
    rng = random.Random(0)
    for stage, (flags, name, width) in STAGES.items():
        main, argv, begun = importlib.import_module(stage).main, flags.split(), time.monotonic()
        main(argv)
        seconds = time.monotonic() - begun
        for ranks in [range(width)] * (3 if width == 1 else 1):
            processes = [fork(main, argv, killed, RANK=str(rank), WORLD_SIZE=str(width)) for rank in ranks]
            processes[-1].join(rng.random() * seconds)
            processes[-1].kill()
            for process in processes:
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL)  # and not refused
        last = fork(main, argv, killed)
        last.join()
        assert last.exitcode == 0 and content(killed / "run" / name) == content(whole / "run" / name)
    assert {path.name for path in killed.glob("run/[!.]*")} == {path.name for path in whole.glob("run/[!.]*")}
