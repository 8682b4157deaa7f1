"""QVAL: what a study keeps, what it makes again, and what it leaves out of its report."""

import json
import re

import pytest
from test_qval import series

from experiments.qval import __main__ as qval
from experiments.qval import judges, metrics
from qlass import UserError


class Judge:
    """Numbers in the order of the candidates, or the other way round."""

    def __init__(self, name):
        self.name = name

    def write(self, questions):
        sign = "-" if self.name == "a" else ""
        return ["\n".join(f"{i}: {sign}{i}" for i in range(1, 5)) for _ in questions]


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Run a study of a few states of small lakes, whose names of scores and report are returned."""
    monkeypatch.setattr(judges, "load", lambda name, *_: Judge(name.partition("#")[2]))

    def run(*flags, scorers=("random", "code"), points=5, options=("map=random4",)):
        options = [word for option in options for word in ("--env-option", option)]
        common = ["--env", "frozenlake", *options, "--run", str(tmp_path), "--actor", "random", "--points", str(points)]
        qval.main([*common, "--references", "exact", "--scorers", *scorers, *flags])
        rows = json.loads((tmp_path / "qval" / "alignment.json").read_text())["labels"]
        return {name: set(some) for name, some in rows.items()}, capsys.readouterr().out

    return run


def predictions(tmp_path):
    return {path.name: path for path in (tmp_path / "qval" / "predictions").glob("*.json")}


def test_each_judge_has_judgements_of_its_own(study, tmp_path):
    study("--judge", "http://host:1/v1#a", scorers=["batched"])
    found, said = study("--judge", "http://host:1/v1#b", scorers=["batched"])
    assert found["exact"] == {"batched=a", "batched=b"} and "Left out" not in said
    kept = predictions(tmp_path)["batched=a.json"].read_bytes()
    assert json.loads(kept)["values"] != json.loads(predictions(tmp_path)["batched=b.json"].read_bytes())["values"]
    study("--judge", "http://host:2/v1#a", scorers=["batched"])  # the same model elsewhere
    assert predictions(tmp_path)["batched=a.json"].read_bytes() == kept
    assert study(scorers=["batched=a"])[0]["exact"] == {"batched=a", "batched=b"}  # nothing to ask
    with pytest.raises(UserError, match=r"batched=c: needs its language model: --judge"):
        study("--judge", "http://host:1/v1#a", scorers=["batched=c"])


def test_overwrite_starts_the_study_again_and_leaves_what_is_of_others(study, tmp_path):
    study()
    notes = tmp_path / "qval" / "notes.md"
    notes.touch()
    with pytest.raises(UserError, match="--points 5, not 6: --overwrite starts again"):
        study(points=6)
    kept, _ = study("--overwrite", points=6, scorers=["random"])
    assert kept == {"exact": {"random"}} and notes.exists()
    assert set(predictions(tmp_path)) == {"random.json", "random_ranking.json"}


@pytest.mark.parametrize("flags, options, ceiling", [
    (("--references", "exact"), ("map=random4",), r"1\.000 for the labels"),
    (("--references", "expert", "-K", "1"), ("map=4x4", "slippery=true"), "– for the labels"),
    (("--references", "expert", "-K", "8"), ("map=4x4", "slippery=true"), r"0\.\d+ for the labels"),
])  # fmt: skip
def test_the_ceiling_of_noise_is_told_where_it_is_known(study, flags, options, ceiling):
    assert re.search(rf"Ceilings per state: {ceiling}' noise", study(*flags, options=options, points=20)[1])


def test_two_scores_are_compared_on_the_candidates_that_both_have():
    """A score that is the rival's, but for a hard candidate that it does not score, is no better."""
    labels = series([[0.0, 0.3, 0.6, 1.0]] * 6)
    rival = series([[0.9, 0.2, 0.4, 0.6]] * 6)  # wrong about the first
    fewer = series([[None, 0.2, 0.4, 0.6]] * 6)
    assert metrics.difference(fewer, rival, labels).mean() == 0


def test_tasks_of_one_block_count_as_one():
    """Four lakes of three starts each are four values of an interval, not twelve."""
    score = [[0.1, 0.2] if i % 4 else [0.2, 0.1] for i in range(12)]  # wrong on the first lake alone

    def rho(blocks):
        return metrics.alignment(series(score, blocks), series([[0.0, 1.0]] * 12, blocks))["rho"]

    lakes, tasks = rho([f"lake {i % 4}" for i in range(12)]), rho([])
    assert (lakes.n, tasks.n) == (4, 12) and lakes.mean == pytest.approx(tasks.mean) == 0.5
    assert lakes.low < tasks.low and lakes.high > tasks.high - 1e-12
