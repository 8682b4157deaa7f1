"""Planned comparisons: Holm by hand, families, what only git's pages have, what is decided, and the real tables."""

import functools
import math
import re
import shutil
import subprocess
from itertools import chain

import pandas as pd
import pytest
from fakes import write
from scipy import stats

from reporting import plans

PLACE = {"environment": "lake", "split": "test", "agent": "a", "M": "1", "N": "1", "select": ""}
SIDES = ["agent", "method", "M", "N", "select"]
OPTIONAL = ["minus_split", "seeds", "commits", "gains", "stated", "stated_p", "source", "shown_first", "written"]


def rows(method, rewards, tokens, **fields):
    """Rows of results.csv of three units, and of all."""
    row = PLACE | {"method": method, "tokens": tokens} | fields
    seeds = zip(("1", "2", "3", "all"), (*rewards, sum(rewards) / 3), strict=True)
    return [row | {"seed": seed, "reward": reward} for seed, reward in seeds]


RESULTS = pd.DataFrame([
    *rows("qlass", (0.5, 0.6, 0.7), 100),
    *rows("greedy", (0.4, 0.4, 0.4), 10),
    *rows("best_of_n", (0.9, 0.9, 0.9), 90, N="2", select="q"),
    *rows("best_of_n", (0.6, 0.6, 0.6), 110, N="4", select="q"),
])  # fmt: skip


def plan(family, minus="greedy", **fields):
    """A row of plans.csv, of QLASS."""
    row = {"family": family, "unit": "lake", "planned": "3", "changes": ""} | dict.fromkeys(OPTIONAL, "")
    rival = {f"minus_{name}": (PLACE | {"method": minus})[name] for name in SIDES}
    return row | PLACE | {"method": "qlass"} | rival | fields


def table(*planned):
    return plans.table(pd.DataFrame(planned), RESULTS).to_dict("records")


def p_of(*gains):
    return stats.ttest_1samp(gains, 0.0).pvalue


def test_a_table_and_holms_p_by_hand():
    first, second, third, going_on = table(
        plan("f"),
        plan("f", "best_of_n", minus_N="4", minus_select="q"),
        plan("g", method="sample"),
        plan("h", planned="4"),
    )
    assert first["difference"].startswith("+0.200 [")
    assert (first["above"], first["tokens"]) == ("3/3", "100/10")
    assert second["comparison"] == "lake: qlass, a - best_of_n N=4 by q, a"
    assert (second["difference"][:6], second["tokens"]) == ("+0.000", "100/110")
    assert (third["difference"], third["above"], third["raw p"]) == ("not played", "", "")
    assert (going_on["difference"], going_on["raw p"]) == (first["difference"], "")
    shown = [float(first[name]) for name in ("raw p", "in its family", "over all")]
    assert shown == pytest.approx([p_of(0.1, 0.2, 0.3) * n for n in (1, 2, 2)], abs=2e-4)
    corrected = plans.holm(pd.Series([0.01, 0.04, 0.03]))  # 3 x .01, then 2 x .03, and no less
    assert corrected.sort_index().tolist() == pytest.approx([0.03, 0.06, 0.06])


def test_what_only_a_page_of_git_has():
    first, second, third = table(
        plan("f", "mcts", seeds="1 2 3", gains="+.100 +.200 +.300", stated="+.2 [-.1, .5]"),
        plan("g", "mcts", seeds="1 2 3", stated="+.046", stated_p="1"),
        plan("h", seeds="1 2 3", planned=""),
    )
    # Of both intervals the wider one counts: half of .6 is 4.303 standard errors.
    wider = 2 * stats.t(2).sf(0.2 / (0.3 / stats.t(2).ppf(0.975)))
    assert wider > p_of(0.1, 0.2, 0.3)
    assert (float(first["raw p"]), float(first["over all"])) == pytest.approx((wider, 2 * wider), abs=2e-4)
    assert (second["difference"], second["raw p"], second["above"]) == ("+0.046 ‡", "1.0000", "")
    assert third["comparison"].endswith("†")
    assert not third["over all"]  # it counts for nobody else


def test_what_is_decided_and_what_of_it_holds_over_all():
    gains = {"minus": "mcts", "seeds": "1 2 3", "gains": "+.100 +.101 +.102"}
    shown = table(
        plan("f", **gains),
        plan("g", stated_p=".07", **gains),
        plan("h", planned="", **gains),
        plan("i", shown_first="no", **gains),  # git does not show that it came first
        plan("j", **gains | {"gains": "+.10 +.16 +.20"}),
        plan("k"),
    )
    assert 0.025 < p_of(0.1, 0.16, 0.2) < 0.05  # so that it does not hold over all
    for column, bold in (("difference", "fj"), ("over all", "f")):
        assert "".join(row["family"] for row in shown if row[column].startswith("**")) == bold


def test_rows_of_run_folders(tmp_path):
    turns = [("left", "wall"), ("right", "ice"), ("left", "ice"), ("left", "wall"), ("left", "wall")]  # two are repeats
    steps = []
    for n, (action, page) in enumerate(turns):
        steps.append({"action": f"Thought: {n}\nAction: {action}", "observation": page})
    line = {"task_id": "a", "env": "lake", "method": "qlass", "M": 2, "player": "untried first", "steps": steps}
    for unit, reward in (("4", 0.2), ("5", 0.4), ("6", 0.9)):
        folder = tmp_path / f"run-{unit}{unit}"  # whatever its name
        folder.mkdir()
        own = {"seed": int(unit), "reward": reward, "tokens": {"prompt": 7}}
        write(folder / "results.jsonl", [line | own])
        write(folder / "results.meta.json", [{"recipe": {}, "inputs": {}, "commit": f"abcdef{unit}"}])
    table = plans.unit_rows(sorted(tmp_path.iterdir())).set_index("seed")
    assert list(table.index) == ["all", "4", "5", "6"]
    assert table.loc["all", ["reward", "tokens", "env_steps", "repeated", "trainings"]].tolist() == [0.5, 7, 5, 0.4, 3]
    assert table["commit"].tolist() == ["abcdef4 abcdef5 abcdef6", "abcdef4", "abcdef5", "abcdef6"]


def git(*words):
    if not shutil.which("git"):
        return ""
    return subprocess.run(["git", "-C", str(plans.FOLDER), *words], capture_output=True, text=True).stdout.strip()


HAS_COMMITS = git("rev-parse", "--is-shallow-repository") == "false" and git("cat-file", "-t", "fd0f923") == "commit"
NEEDS_GIT = pytest.mark.skipif(not HAS_COMMITS, reason="needs the commits of the rows")
PARTS = {  # of the test tasks of a split
    ("sciworld", "both"): ["test_seen", "test_unseen"],
    ("sciworld", "test_seen, 48 tasks"): ["test_seen"],
    ("sciworld", "test_unseen, 48 tasks"): ["test_unseen"],
    ("alfworld", "both"): ["valid_seen", "valid_unseen"],
}


@functools.cache
def times_of(commits):
    """When these were made, the oldest first."""
    return sorted(map(int, git("log", "--no-walk", "--format=%ct", *commits.split()).split()))


def tasks_of(row):
    """A row's condition with each name of its test tasks: those of a shop or a set of games, or shared by all."""
    environment, split = row["environment"], row["split"]
    parts = PARTS.get((environment, split), [split])
    if re.match("lakes2(?! validation)", split):
        parts = ["lakes2"]
    elif re.match("test, |.* (own worlds|new games)$", split):
        parts = [row.get("seed", "")]  # none is played yet, if it names no seed
    return [(*row[plans.KEYS], part) for part in parts]


def first_plays(planned, results):
    """When each condition first played each set of test tasks, by rows of results.csv and comparisons of which git has
    the gains."""
    plays = [(row, row["commit"]) for _, row in results.query(plans.UNITS).iterrows()]
    for _, plan in planned[(planned["gains"] != "") & (planned["commits"] != "")].iterrows():
        plays += [(side, plan["commits"]) for side in plans.sides_of(plan)]
    first = {}
    for row, commits in plays:
        for tasks in tasks_of(row):
            first[tasks] = min(times_of(commits)[-1], first.get(tasks, math.inf))
    return first


def is_younger_than_a_row(plan, results, first):
    commits = " ".join(pd.concat(plans.rows_of(plan, results))["commit"])
    return bool(commits) and times_of(commits)[0] < times_of(plan["plan"])[0]


def has_seen_its_tasks(plan, results, first):
    """True if, when it was planned, both sides had been played on all test tasks of it."""
    tasks = []
    for side, rows in zip(plans.sides_of(plan), plans.rows_of(plan, results), strict=True):
        played = [row for _, row in rows.query(plans.UNITS).iterrows()]
        tasks += chain.from_iterable(map(tasks_of, played or [side]))
    return all(first.get(name, math.inf) < times_of(plan["plan"])[0] for name in tasks)


@pytest.fixture(scope="module")
def tables():
    """plans.csv, results.csv, the comparisons that are decided, and when what was played first."""
    planned, results = plans.read()
    bold = plans.table(planned, results)["difference"].str.startswith("**")
    return planned, results, planned[bold], first_plays(planned, results)


@NEEDS_GIT
@pytest.mark.parametrize(
    ("doubt", "family"),
    [
        (is_younger_than_a_row, "three epochs: QLASS"),
        (has_seen_its_tasks, "ScienceWorld: QLASS"),  # by three earlier trainings of both sides
    ],
)
def test_no_difference_is_decided_whose_plan_came_after_a_row_or_after_play_on_its_test_tasks(tables, doubt, family):
    planned, results, decided, first = tables
    assert len(decided) > 25
    assert [plan["family"] for _, plan in decided.iterrows() if doubt(plan, results, first)] == []
    (_, plan), *_ = planned[planned["family"] == family].iterrows()
    assert doubt(plan, results, first)


def test_the_pages_tell_what_git_does_not_show_and_how_many_families_can_decide(capsys):
    plans.main([])
    page = capsys.readouterr().out
    assert re.search(r"209 of the \d+ rows of\s+plans.csv were written in one commit, fd0f923, after", page)
    planned = plans.read()[0].query("planned != ''")
    can_decide = planned.query("shown_first == ''")["family"].nunique()
    results_page = " ".join((plans.FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert f"{can_decide} of {planned['family'].nunique()} families can decide" in results_page
