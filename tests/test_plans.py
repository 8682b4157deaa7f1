"""Planned comparisons: Holm by hand, families, what only git's pages have, what is decided, and the real tables."""

import functools
import json
import re
import subprocess

import pandas as pd
import pytest
from fakes import dump
from scipy import stats

from reporting import plans

PLACE = {"environment": "lake", "split": "test", "agent": "a", "M": "1", "N": "1", "select": ""}
SIDES = ["agent", "method", "M", "N", "select"]
OPTIONAL = ["minus_split", "seeds", "commits", "gains", "stated", "stated_p", "source", "shown_first", "written"]


def rows(method: str, rewards: tuple, tokens: int, **fields: str) -> list[dict]:
    """Rows of results.csv of three units, and of all."""
    seeds = {"1": rewards[0], "2": rewards[1], "3": rewards[2], "all": sum(rewards) / 3}
    row = PLACE | {"method": method, "tokens": tokens} | fields
    return [row | {"seed": seed, "reward": reward} for seed, reward in seeds.items()]


def plan(family: str, method: str, minus: str, **fields: str) -> dict:
    """A row of plans.csv."""
    rival = PLACE | {"method": minus}
    row = {"family": family, "unit": "lake", "planned": "3", "changes": ""} | dict.fromkeys(OPTIONAL, "")
    row |= PLACE | {"method": method} | {f"minus_{name}": rival[name] for name in SIDES}
    return row | fields


RESULTS = pd.DataFrame([
    *rows("qlass", (0.5, 0.6, 0.7), 100),
    *rows("greedy", (0.4, 0.4, 0.4), 10),
    *rows("best_of_n", (0.9, 0.9, 0.9), 90, N="2", select="q"),
    *rows("best_of_n", (0.6, 0.6, 0.6), 110, N="4", select="q"),
])  # fmt: skip


def table(*planned: dict, results: pd.DataFrame = RESULTS) -> list[dict]:
    return plans.table(pd.DataFrame(planned), results).to_dict("records")


def test_a_table_and_holms_p_by_hand():
    rival = {"minus_N": "4", "minus_select": "q"}
    first, second, third, going_on = table(
        plan("f", "qlass", "greedy"),
        plan("f", "qlass", "best_of_n", **rival),
        plan("g", "sample", "greedy"),
        plan("h", "qlass", "greedy", planned="4"),
    )
    assert first["difference"].startswith("+0.200 [")
    assert (first["above"], first["tokens"]) == ("3/3", "100/10")
    assert second["comparison"] == "lake: qlass, a - best_of_n N=4 by q, a"
    assert (second["difference"][:6], second["tokens"]) == ("+0.000", "100/110")
    assert (third["difference"], third["above"], third["raw p"]) == ("not played", "", "")
    assert (going_on["difference"], going_on["raw p"]) == (first["difference"], "")
    p = stats.ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue
    assert [float(first[name]) for name in ("raw p", "in its family", "over all")] == pytest.approx(
        [p, 2 * p, 2 * p], abs=2e-4
    )
    corrected = plans.holm(pd.Series([0.01, 0.04, 0.03]))  # 3 x .01, then 2 x .03, and no less
    assert corrected.sort_index().tolist() == pytest.approx([0.03, 0.06, 0.06])


def test_what_only_a_page_of_git_has():
    gains = {"gains": "+.100 +.200 +.300", "stated": "+.2 [-.1, .5]"}
    first, second, third = table(
        plan("f", "qlass", "mcts", seeds="1 2 3", **gains),
        plan("g", "qlass", "mcts", seeds="1 2 3", stated="+.046", stated_p="1"),
        plan("h", "qlass", "greedy", seeds="1 2 3", planned=""),
    )
    # Of both intervals the wider one counts: half of .6 is 4.303 standard errors.
    wider = 2 * stats.t(2).sf(0.2 / (0.3 / stats.t(2).ppf(0.975)))
    assert wider > stats.ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue
    assert (float(first["raw p"]), float(first["over all"])) == pytest.approx((wider, 2 * wider), abs=2e-4)
    assert (second["difference"], second["raw p"], second["above"]) == ("+0.046 ‡", "1.0000", "")
    assert third["comparison"].endswith("†")
    assert not third["over all"]  # it counts for nobody else


def test_what_is_decided_and_what_of_it_holds_over_all():
    gains = {"seeds": "1 2 3", "gains": "+.100 +.101 +.102"}
    table_rows = table(
        plan("f", "qlass", "mcts", **gains),
        plan("g", "qlass", "mcts", stated_p=".07", **gains),
        plan("h", "qlass", "mcts", planned="", **gains),
        plan("i", "qlass", "mcts", shown_first="no", **gains),  # git does not show that it came first
        plan("j", "qlass", "mcts", seeds="1 2 3", gains="+.10 +.16 +.20"),
        plan("k", "qlass", "greedy"),
    )
    assert 0.025 < stats.ttest_1samp([0.1, 0.16, 0.2], 0.0).pvalue < 0.05  # so that it does not hold over all
    assert [row["difference"].startswith("**") for row in table_rows] == [True, False, False, False, True, False]
    assert [row["over all"].startswith("**") for row in table_rows] == [True, False, False, False, False, False]


def test_rows_of_run_folders(tmp_path):
    turns = [("left", "wall"), ("right", "ice"), ("left", "ice"), ("left", "wall"), ("left", "wall")]  # two are repeats
    steps = []
    for n, (action, page) in enumerate(turns):
        steps.append({"action": f"Thought: {n}\nAction: {action}", "observation": page})
    line = {"task_id": "a", "env": "lake", "method": "qlass", "M": 2, "player": "untried first", "steps": steps}
    for unit, reward in (("4", 0.2), ("5", 0.4), ("6", 0.9)):
        folder = tmp_path / f"run-{unit}"
        folder.mkdir()
        (folder / "results.jsonl").write_text(dump([line | {"reward": reward, "tokens": {"prompt": 7}}]))
        (folder / "results.meta.json").write_text(json.dumps({"recipe": {}, "inputs": {}, "commit": f"abcdef{unit}"}))
    table = plans.unit_rows(sorted(tmp_path.iterdir())).set_index("seed")
    assert list(table.index) == ["all", "4", "5", "6"]
    assert table.loc["all", ["reward", "tokens", "env_steps", "repeated", "trainings"]].tolist() == [0.5, 7, 5, 0.4, 3]
    assert table["commit"].tolist() == ["abcdef4 abcdef5 abcdef6", "abcdef4", "abcdef5", "abcdef6"]


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(plans.FOLDER), *words], capture_output=True, text=True).stdout.strip()


NEEDS_GIT = pytest.mark.skipif(git("rev-parse", "--is-shallow-repository") != "false", reason="needs git's commits")
PARTS = {  # of the test tasks of a split
    ("sciworld", "both"): ["test_seen", "test_unseen"],
    ("sciworld", "test_seen, 48 tasks"): ["test_seen"],
    ("sciworld", "test_unseen, 48 tasks"): ["test_unseen"],
    ("alfworld", "both"): ["valid_seen", "valid_unseen"],
}


@functools.cache
def day_of(commits: str) -> int:
    """When the newest of them was made, in seconds."""
    return max(int(git("log", "-1", "--format=%ct", commit)) for commit in commits.split())


def sides_of(plan: pd.Series) -> list[pd.Series]:
    """The two conditions of a comparison, as rows of results.csv name them."""
    minus = plan[plans.PLACE + plans.MINUS].set_axis(plans.PLACE + plans.CONDITION)
    minus["split"] = plan["minus_split"] or plan["split"]
    return [plan[plans.PLACE + plans.CONDITION], minus]


def rows_of(plan: pd.Series, results: pd.DataFrame, side: pd.Series) -> pd.DataFrame:
    """The rows of a side that count: of the plan's seeds and commits, where it names some."""
    rows = plans.rows_of(results, side)
    if plan["seeds"]:
        rows = rows[rows["seed"].isin([*plan["seeds"].split(), "all"])]
    named = set(plan["commits"].split())
    return rows[rows["commit"].map(lambda commits: not named or bool(named & set(commits.split()))).astype(bool)]


def tasks_of(row: pd.Series) -> set[tuple[str, ...]]:
    """Names of a row's test tasks: those of a shop or a set of games, or those that all trainings share."""
    environment, split = row["environment"], row["split"]
    if environment == "frozenlake" and split.startswith("lakes2") and "validation" not in split:
        return {("lakes2",)}
    if split.startswith("test, ") or split.endswith(("own worlds", "new games")):
        return {(environment, row.get("seed", ""))}  # none is played yet, if it names no seed
    return {(environment, part) for part in PARTS.get((environment, split), [split])}


def plays_of(planned: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """What was played, a row a condition and unit: rows of results.csv, and comparisons of which git has the gains."""
    rows = [results.query(plans.UNITS)]
    for _, plan in planned[(planned["gains"] != "") & (planned["commits"] != "")].iterrows():
        rows += [side.to_frame().T.assign(seed="", commit=plan["commits"]) for side in sides_of(plan)]
    return pd.concat(rows)


def seen_before(plan: pd.Series, plays: pd.DataFrame, results: pd.DataFrame) -> bool:
    """True if, when it was planned, both sides had been played on all test tasks of it."""
    for side in sides_of(plan):
        rows = rows_of(plan, results, side).query(plans.UNITS)
        tasks = set().union(*map(tasks_of, [row for _, row in rows.iterrows()] or [side]))
        same = plays[(plays[["environment", *plans.CONDITION]] == side[["environment", *plans.CONDITION]]).all(axis=1)]
        older = [row for _, row in same.iterrows() if day_of(row["commit"]) < day_of(plan["plan"])]
        if not tasks <= set().union(*map(tasks_of, older)):
            return False
    return True


@pytest.fixture(scope="module")
def tables():
    """plans.csv, results.csv, and the difference that each plan's row of the table shows."""
    planned, results = plans.read()
    return planned, results, plans.table(planned, results)["difference"]


@NEEDS_GIT
def test_no_difference_is_decided_if_a_row_of_it_is_of_older_code_than_its_plan(tables):
    planned, results, shown = tables
    wrong = []
    for index, plan in planned[planned["plan"] != ""].iterrows():
        rows = pd.concat([rows_of(plan, results, side) for side in sides_of(plan)])
        commits = set(" ".join(rows["commit"]).split()) & set(
            plan["commits"].split() or " ".join(rows["commit"]).split()
        )
        older = commits and min(map(day_of, commits)) < day_of(plan["plan"])
        if older and shown[index].startswith("**"):
            wrong.append(plan["family"])
    assert not wrong and len(planned[planned["plan"] != ""]) > 200


@NEEDS_GIT
def test_no_difference_is_decided_if_its_test_tasks_had_been_played_before_the_plan(tables):
    """ScienceWorld's had, by three earlier trainings of both sides."""
    planned, results, shown = tables
    plays = plays_of(planned, results)
    seen = [i for i, plan in planned[planned["plan"] != ""].iterrows() if seen_before(plan, plays, results)]
    assert "ScienceWorld: QLASS" in set(planned["family"][seen])
    assert [planned["family"][index] for index in seen if shown[index].startswith("**")] == []


def test_the_page_tells_what_git_does_not_show(capsys):
    plans.main([])
    page = capsys.readouterr().out
    assert re.search(r"209 of the \d+ rows of\s+plans.csv were written in one commit, fd0f923, after", page)
    assert "**+0.057" not in page  # of the shops with three epochs: their code is older than the plan
