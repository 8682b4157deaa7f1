"""Contrasts over worlds: Holm by hand, which rival is taken, and an interval over the worlds' means."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from experiments import worlds
from qlass import UserError

TASKS = {"a": 0.1, "b": -0.1}  # what a task adds to its world's mean


def line(world: int, method: str, reward: float, tokens: int, **more: object) -> list[dict]:
    base = {"env": "lake", "method": method, "M": 1, "N": 1, "seed": world, "tokens": {"generated": tokens}}
    return [base | {"task_id": f"{world}-{task}", "reward": reward + extra} | more for task, extra in TASKS.items()]


def write(folder, world: int, gain: float) -> None:
    best = {"select": "q"}
    records = [
        *line(world, "likeliest", 0.5, 80, M=4),
        *line(world, "likeliest", 0.9, 20, M=2),  # the contrasts are of the most candidates
        *line(world, "qlass", 0.4, 100, M=4),
        *line(world, "qlass", 0.4 + gain, 100, M=4, label="rank"),
        *line(world, "best_of_n", 0.8, 90, N=2, **best),  # good, but not with as many tokens
        *line(world, "best_of_n", 0.6, 120, N=4, **best),
        *line(world, "best_of_n", 0.7, 110, N=4, label="rank", **best),
        *line(world, "best_of_n", 0.9, 120, N=4, select="oracle"),  # an oracle is no rival
    ]
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_contrasts_over_worlds(tmp_path, capsys):
    gains = [0.1, 0.2, 0.3]
    folders = [tmp_path / str(world) for world in range(len(gains))]
    for world, (folder, gain) in enumerate(zip(folders, gains, strict=True)):
        write(folder, world, gain)
    write(tmp_path / "more", 9, 0.5)  # a world without the rivals is in no contrast
    file = tmp_path / "more" / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "rank" in line and "qlass" in line))
    worlds.main([str(folder) for folder in [*folders, tmp_path / "more"]])
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert [row[2] for row in rows] == [
        "QLASS M=4", "search by the agent's log-probability M=4", "best-of-N, picked by QNet [rank] N=4",
    ]  # fmt: skip
    half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5  # of .1, .2, .3
    assert rows[0][3:5] == [f"+0.200 [{0.2 - half:+.3f}, {0.2 + half:+.3f}]", "3 of 3"]
    assert [row[3].split()[0] for row in rows] == ["+0.200", "+0.100", "-0.100"]
    p = [float(row[5]) for row in rows]
    assert p[0] == pytest.approx(2 * stats.t.sf(0.2 / (0.1 / 3**0.5), 2), abs=5e-5)
    assert float(rows[0][6]) == pytest.approx(3 * p[0], abs=2e-4)
    assert [row[7] for row in rows] == ["no"] * 3


def test_holm_by_hand():
    assert worlds.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert worlds.holm([0.6, 0.7]) == [1.0, 1.0]


def test_what_is_missing_is_named(tmp_path):
    write(tmp_path / "one", 0, 0.1)
    with pytest.raises(UserError, match="three worlds or more"):
        worlds.main([str(tmp_path / "one")])
    records = line(0, "qlass", 0.5, 100, M=4, label="rank")
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match="no result of qlass"):
        worlds.main([str(tmp_path / name) for name in "abc"])
