"""Curves that follow a training's log from outside."""

import json

import pytest

from integrations import trackers
from qlass import UserError


def log_of(folder, *steps):
    lines = [{"step": step, "seconds": 0.1, "loss": 1 / step, "lr": 0.1} for step in steps]
    if steps[-1] % 4 == 0:
        lines.append({"step": steps[-1], "epoch": steps[-1] // 4, "loss": 0.5, "held_out": {"mse": 0.25, "x": None}})
    (folder / "qnet.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_step_is_handed_on_once_also_after_a_stop(tmp_path, monkeypatch):
    told = []
    write = lambda figures, step: told.append((step, figures))  # noqa: E731
    monkeypatch.setattr(trackers, "tracker_of", lambda name, folder: write)
    for steps in (
        (1, 2, 3),
        (1, 2),
        (1, 2, 3, 4),
        (1, 2, 3, 4),
    ):  # the second is a training that was resumed from step 2
        log_of(tmp_path, *steps)
        trackers.main([str(tmp_path)])
    assert [step for step, _ in told] == [1, 2, 3, 4, 4]
    assert told[0][1] == {"update/seconds": 0.1, "update/loss": 1.0, "update/lr": 0.1}
    assert told[-1][1] == {"epoch/epoch": 1, "epoch/loss": 0.5, "epoch/mse": 0.25}


def test_a_run_without_a_log_and_a_tracker_that_is_not_installed_are_told(tmp_path):
    with pytest.raises(UserError, match="no training has written a log"):
        trackers.main([str(tmp_path)])
    log_of(tmp_path, 1)
    with pytest.raises(ModuleNotFoundError, match="trackio"):
        trackers.main([str(tmp_path), "--to", "trackio"])
