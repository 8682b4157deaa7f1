"""The reference pages agree with their files: tables with results.csv, the demo's ranges with expected.csv."""

from __future__ import annotations

import csv
import re

import pytest

from reporting import reference


def rows_of(name):
    return list(csv.DictReader((reference.FOLDER / name).read_text(encoding="utf-8").splitlines()))


def short(number):
    return number.removeprefix("0")


@pytest.mark.parametrize("page", ["README.md", "train_or_search.md", "table2.md"])
def test_rewards_of_the_tables_are_in_the_results(page):
    known = {f"{short(r['reward'])} [{short(r['low'])}, {short(r['high'])}]" for r in rows_of("results.csv")}
    text = (reference.FOLDER / page).read_text(encoding="utf-8")
    shown = re.findall(r"(?<= )\.\d{3} \[[^]]+\]", text)  # a reward has no sign, a difference has one
    assert len(shown) > 25 and set(shown) <= known


def test_the_runs_of_the_demo_are_in_the_expected_ranges():
    expected = rows_of("expected.csv")
    text = (reference.FOLDER / "README.md").read_text(encoding="utf-8")
    for row in expected:
        condition = [row[name] for name in ("method", "M", "N", "select")]
        demo = [r for r in rows_of("results.csv") if r["agent"] == "cloned, make demo"]
        rewards = [float(r["reward"]) for r in demo if [r["method"], r["M"], r["N"], r["select"]] == condition]
        assert len(rewards) == 3 and all(float(row["low"]) <= reward <= float(row["high"]) for reward in rewards)
        assert f"| {short(row['low'])} to {short(row['high'])} |" in text


def test_figures_are_drawn_from_the_files(tmp_path, monkeypatch):
    (tmp_path / "results.csv").write_bytes((reference.FOLDER / "results.csv").read_bytes())
    committed = {path.name for path in reference.FOLDER.glob("*.png")}
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    reference.main()
    assert {path.name for path in tmp_path.glob("*.png")} == committed
