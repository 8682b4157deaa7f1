"""Planned comparisons: Holm by hand, the rival at equal tokens, families, git's pages, and the page that shows all."""

import pandas as pd
import pytest
from fakes import dump
from scipy import stats

from experiments import plans
from qlass import UserError

PLACE = {"environment": "lake", "split": "test", "agent": "a", "M": "1"}


def rows(method: str, rewards: tuple, tokens: int, N: str = "1", select: str = "") -> list[dict]:
    seeds = {"1": rewards[0], "2": rewards[1], "3": rewards[2], "all": sum(rewards) / 3}
    fields = PLACE | {"method": method, "N": N, "select": select, "tokens": tokens}
    return [fields | {"seed": seed, "reward": reward} for seed, reward in seeds.items()]


def plan(family: str, method: str, minus: str, N: str = "1", select: str = "") -> dict:
    side = PLACE | {"method": method, "N": "1", "select": ""}
    other = {"minus_agent": "a", "minus_method": minus, "minus_M": "1", "minus_N": N, "minus_select": select}
    optional = dict.fromkeys(["minus_split", "seeds", "commits", "gains", "stated", "stated_p", "source"], "")
    return {"family": family, "unit": "lake", "planned": "3", "changes": ""} | side | other | optional


RESULTS = pd.DataFrame([
    *rows("qlass", (0.5, 0.6, 0.7), 100),
    *rows("greedy", (0.4, 0.4, 0.4), 10),
    *rows("best_of_n", (0.9, 0.9, 0.9), 90, "2", "q"),  # good, but not with as many tokens
    *rows("best_of_n", (0.6, 0.6, 0.6), 110, "4", "q"),
    *rows("best_of_n", (0.8, 0.8, 0.8), 220, "8", "q"),  # better, but not the cheapest
])  # fmt: skip


def test_a_table_and_holms_p_by_hand():
    planned = [("f", "qlass", "greedy"), ("f", "qlass", "best_of_n", "equal", "q"), ("g", "sample", "greedy")]
    table = plans.table(pd.DataFrame([plan(*fields) for fields in planned]), RESULTS)
    first, second, third = table.to_dict("records")
    assert first["difference [95 %]"].startswith("+0.200 [") and first["above"] == "3/3"
    assert (second["difference [95 %]"][:6], second["tokens"]) == ("+0.000", "100/110")
    assert "N=4" in second["comparison"]
    assert third["difference [95 %]"] == "not played" and third["p"] == ""
    (going_on,) = plans.table(pd.DataFrame([plan(*planned[0]) | {"planned": "4"}]), RESULTS).to_dict("records")
    assert going_on["difference [95 %]"] == first["difference [95 %]"] and "p" not in going_on
    p = stats.ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue
    assert (float(first["p"]), float(first["over all"])) == pytest.approx((p, 2 * p), abs=2e-4)
    assert plans.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x .01, then 2 x .03, and no less
    with pytest.raises(UserError, match="three worlds or trainings or more"):
        plans.over_units([0.1, 0.2])


def test_what_only_a_page_of_git_has():
    seeds = {"seeds": "1 2 3"}
    of_units = plan("f", "qlass", "mcts") | seeds | {"gains": "+.100 +.200 +.300", "stated": "+.2 [-.1, .5]"}
    mean_alone = plan("g", "qlass", "mcts") | seeds | {"stated": "+.046", "stated_p": "1"}
    not_planned = plan("h", "qlass", "greedy") | seeds | {"planned": ""}
    first, second, third = plans.table(pd.DataFrame([of_units, mean_alone, not_planned]), RESULTS).to_dict("records")
    # Of both intervals the wider one counts: half of .6 is 4.303 standard errors.
    wider = 2 * stats.t(2).sf(0.2 / (0.3 / stats.t(2).ppf(0.975)))
    assert wider > stats.ttest_1samp([0.1, 0.2, 0.3], 0.0).pvalue
    assert (float(first["p"]), float(first["over all"])) == pytest.approx((wider, 2 * wider), abs=2e-4)
    assert first["difference [95 %]"].startswith("+0.200 [") and first["above"] == "3/3"
    assert (second["difference [95 %]"], second["p"], second["above"]) == ("+0.046 ‡", "1.0000", "")
    assert third["comparison"].endswith("†") and third["p"] and not third["over all"]  # it counts for nobody else


def test_what_is_decided():
    gains = {"seeds": "1 2 3", "gains": "+.100 +.101 +.102"}
    planned = plan("f", "qlass", "mcts") | gains
    undecided_by_the_page = planned | {"family": "g", "stated_p": ".07"}
    not_planned = planned | {"family": "h", "planned": ""}
    table = plans.table(pd.DataFrame([planned, undecided_by_the_page, not_planned]), RESULTS)
    assert table["difference [95 %]"].str.startswith("**").tolist() == [True, False, False]


def test_a_plan_names_seeds_and_commits():
    first = RESULTS.assign(commit="old")
    second = RESULTS.assign(commit="new", reward=RESULTS["reward"] + 0.1 * (RESULTS["method"] == "qlass"))
    both = pd.concat([first, second])
    with pytest.raises(UserError, match="two rows of one unit"):
        plans.table(pd.DataFrame([plan("f", "qlass", "greedy")]), both)
    new = plan("f", "qlass", "greedy") | {"commits": "new", "seeds": "1 3"}
    (row,) = plans.table(pd.DataFrame([new]), both).to_dict("records")
    assert (row["difference [95 %]"], row["above"]) == ("+0.300", "2/2")


def test_rows_of_run_folders(tmp_path):
    turns = [("left", "wall"), ("right", "ice"), ("left", "ice"), ("left", "wall"), ("left", "wall")]  # two are repeats
    steps = [
        {"action": f"Thought: {n}\nAction: {action}", "observation": page} for n, (action, page) in enumerate(turns)
    ]
    line = {"task_id": "a", "env": "lake", "method": "qlass", "M": 2, "player": "untried first", "steps": steps}
    for unit, reward in (("4", 0.2), ("5", 0.4), ("6", 0.9)):
        (tmp_path / f"run-{unit}").mkdir()
        played = dump([line | {"reward": reward, "tokens": {"prompt": 7}}])
        (tmp_path / f"run-{unit}" / "results.jsonl").write_text(played)
    table = plans.unit_rows(sorted(tmp_path.iterdir())).set_index("seed")
    assert list(table.index) == ["all", "4", "5", "6"] and set(table["method"]) == {"qlass: untried first"}
    assert table.loc["all", ["reward", "tokens", "env_steps", "repeated", "trainings"]].tolist() == [0.5, 7, 5, 0.4, 3]
    assert table["reward"].tolist()[1:] == [0.2, 0.4, 0.9] and table["low"].isna().tolist() == [False, True, True, True]


def test_the_page_is_what_the_script_prints(capsys):
    plans.main([])
    assert capsys.readouterr().out in (plans.FOLDER / "plans.md").read_text(encoding="utf-8")
