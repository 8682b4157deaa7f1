"""The report: statistics against known cases, tables against hand-computed numbers, a page that is whole and safe."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import report
from qlass import UserError
from qlass.stats import bootstrap, by_task, crossed, interval, kendall, paired_difference, spearman, t_distribution
from reporting import figures, results
from reporting.frontier import frontier, pareto, training_tokens
from reporting.results import read_curves

HERE = Path(__file__).parent
RESULTS, TREES = HERE / "recordings/report_results.jsonl", HERE / "recordings/report_trees.jsonl"
numbers = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=12)


# ---------------------------------------------------------------------------------------------------------- statistics


def test_bootstrap_of_a_coin_is_the_binomial():
    # The resampled mean of 50 zeros and 50 ones is Binomial(100, 1/2) / 100, with 95 % between .40 and .60.
    estimate = bootstrap([0] * 50 + [1] * 50)
    assert (estimate.mean, estimate.n) == (0.5, 100)
    assert (estimate.low, estimate.high) == pytest.approx((0.40, 0.60), abs=0.011)


def test_bootstrap_agrees_with_the_normal_interval_on_a_large_sample():
    sample = np.random.default_rng(1).normal(3, 2, 2000)
    estimate, half = bootstrap(sample), 1.96 * sample.std() / math.sqrt(2000)
    assert (estimate.low, estimate.high) == pytest.approx((sample.mean() - half, sample.mean() + half), abs=0.05 * half)


def test_bootstrap_covers_the_true_mean_nineteen_times_in_twenty():
    rng = np.random.default_rng(2)
    intervals = [bootstrap(rng.normal(1, 1, 60), resamples=2000) for _ in range(400)]
    coverage = sum(e.low <= 1 <= e.high for e in intervals) / 400
    assert 0.90 <= coverage <= 0.975  # .94 is expected of a percentile interval of 60, and 400 trials sway it by .012


@settings(max_examples=40, deadline=None)
@given(numbers, st.randoms(use_true_random=False))
def test_bootstrap_does_not_depend_on_order_and_moves_with_the_sample(values, random):
    shuffled = random.sample(values, len(values))
    estimate, moved = bootstrap(values, 200), bootstrap([v + 5 for v in values], 200)
    assert bootstrap(shuffled, 200) == estimate
    assert min(values) - 1e-9 <= estimate.low <= estimate.high <= max(values) + 1e-9
    assert (moved.low, moved.high) == pytest.approx((estimate.low + 5, estimate.high + 5))


def test_one_task_has_no_interval_and_shows_no_difference():
    estimate = bootstrap([0.7])
    assert estimate.mean == 0.7 and math.isnan(estimate.low) and estimate.covers_zero
    assert bootstrap([]).n == 0


def test_students_t_in_closed_form():
    for freedom, below in ((1, lambda t: 2 / math.pi * math.atan(t)), (2, lambda t: t / math.sqrt(2 + t * t))):
        t, within = t_distribution(freedom)
        assert [np.interp(x, t, within) for x in (0.3, 1, 4.3)] == pytest.approx(
            [below(x) for x in (0.3, 1, 4.3)], abs=1e-6
        )


def test_where_seeds_or_tasks_alone_differ_the_interval_is_students():
    half = 4.302653 * 1 / math.sqrt(3)  # of three values with standard deviation 1
    for values in ([[0, 0], [1, 1], [2, 2]], [[0, 1, 2]] * 3):
        estimate = crossed(np.array(values, float))
        assert (estimate.low, estimate.high) == pytest.approx((1 - half, 1 + half), abs=1e-4)
        assert estimate.p == pytest.approx(1 - math.sqrt(3) / math.sqrt(2 + 3), abs=1e-4)  # t = sqrt(3)
    assert crossed(np.full((3, 4), 0.5)).low == 0.5 == crossed(np.full((3, 4), 0.5)).high


def test_three_seeds_that_agree_by_chance_decide_nothing():
    """Without a difference, p is below a small threshold no more often than it says: Holm looks that far out."""
    rng, n = np.random.default_rng(6), 1000
    trials = (rng.normal(0, 0.03, (3, 1)) + rng.normal(0, 0.1, 100) + rng.normal(0, 0.3, (3, 100)) for _ in range(n))
    p = np.array([crossed(trial).p for trial in trials])
    assert (p < 0.05).mean() <= 0.05 and (p < 0.0033).mean() <= 0.0033


def test_blocks_are_sampled_not_their_tasks():
    """Ten tasks of a block that all go the same way are no more evidence than one."""
    outcome = dict(enumerate([0.0, 1.0, 1.0, 0.0, 1.0]))
    tasks = {(f"{block}-{i}", 0): value for block, value in outcome.items() for i in range(10)}
    blocks = {task: task[0] for task, _ in tasks}
    by_block, by_task = interval(tasks, blocks), interval(tasks)
    alone = bootstrap(outcome.values())
    assert (by_block.low, by_block.high, by_block.p) == pytest.approx((alone.low, alone.high, alone.p))
    assert by_block.n == by_task.n == 50 and by_block.high - by_block.low > 2 * (by_task.high - by_task.low)
    seeds = {(task, seed): value + 0.1 * seed for (task, _), value in tasks.items() for seed in range(3)}
    crossed_blocks = crossed(np.array([[value + 0.1 * seed for value in outcome.values()] for seed in range(3)]))
    found = interval(seeds, blocks)
    assert (found.low, found.high) == pytest.approx((crossed_blocks.low, crossed_blocks.high))


def test_the_mean_is_of_tasks_whatever_the_sizes_of_their_blocks():
    values = {("a1", 0): 1.0, ("a2", 0): 1.0, ("a3", 0): 0.0, ("b1", 0): 0.0}
    found = interval(values, {"a1": "a", "a2": "a", "a3": "a", "b1": "b"})
    assert found.mean == pytest.approx(0.5) and (found.low, found.high) == pytest.approx(
        (0.25, 0.75)
    )  # .5 -+ (2 - 1.5) / 2
    same = interval(dict.fromkeys(values, 0.7), {"a1": "a", "a2": "a", "a3": "a"})
    assert (same.low, same.high) == pytest.approx((0.7, 0.7))


def test_one_block_has_the_mean_of_all_seeds_and_no_interval():
    found = interval({("a", 0): 0.0, ("b", 0): 0.2, ("a", 1): 1.0, ("b", 1): 1.2}, {"a": "x", "b": "x"})
    assert found.mean == pytest.approx(0.6) and math.isnan(found.low) and found.n == 2
    assert interval({("a", seed): float(seed) for seed in range(3)}).mean == pytest.approx(1.0)


def test_seeds_of_a_player_that_no_training_changes_are_one():
    once = {(task, 0): float(task % 3 == 0) for task in range(30)}
    assert interval({(task, seed): value for (task, _), value in once.items() for seed in range(3)}) == interval(once)


@pytest.mark.parametrize(("between", "at_least"), [(0.0, 0.93), (0.05, 0.88), (0.2, 0.92)])
def test_the_interval_of_three_seeds_covers_the_truth(between, at_least):
    rng, n = np.random.default_rng(4), 200
    trials = (rng.normal(0, between, (3, 1)) + rng.normal(0, 0.1, 60) + rng.normal(0, 0.3, (3, 60)) for _ in range(n))
    assert sum(e.low <= 0 <= e.high for e in map(crossed, trials)) / n >= at_least


def test_a_seed_that_lacks_a_task_takes_the_task_out_of_the_interval_not_the_seeds():
    values = {(task, seed): 0.1 * task + seed + 0.2 * (task == seed) for task in range(4) for seed in range(3)}
    without = {key: value for key, value in values.items() if key != (3, 1)}
    assert interval(without) == interval({key: value for key, value in values.items() if key[0] < 3})
    assert interval(without).n == 3


def test_all_of_a_row_is_of_the_tasks_that_all_seeds_have_played():
    def result(task: int, seed: int, reward: float) -> results.Result:
        return results.Result(
            f"t{task}", "", f"t{task}", seed, reward, float(reward == 1), 9, 10 * task, 3, [], (Path(), 1, 0)
        )

    group = results.Group(results.Condition("fake", "greedy", 1, 1, None, ""))
    for task, seed, reward in [(1, 0, 1), (2, 0, 0), (3, 0, 1), (4, 0, 1), (1, 1, 1), (2, 1, 1)]:
        group.results[f"t{task}", seed] = result(task, seed, reward)
    assert (group.reward.mean, group.reward.n) == (0.75, 2) and group.seeds() == "2 (0.500–1.000)"
    assert (group.mean("success"), group.mean("total"), group.zero_share()) == (0.75, 15, 0.25)
    del group.results["t1", 1], group.row, group.reward  # one task in common is no sample: all count
    assert group.reward.n == 4 and group.seeds() == "2 (0.750–1.000)"


def test_paired_difference_by_hand():
    a = {("t1", 0): 1.0, ("t2", 0): 0.5, ("t3", 0): 0.5, ("t4", 0): 1.0}
    b = {("t1", 0): 0.5, ("t2", 0): 0.5, ("t3", 0): 0.5, ("t5", 0): 0.0}
    difference = paired_difference(a, b)  # t1: .5, t2: 0, t3: 0; t4 and t5 have no partner
    assert (difference.mean, difference.n) == (pytest.approx(1 / 6), 3)
    # All differences are >= 0, and with probability (2/3)^3 = .30 a resample misses t1: the interval reaches 0.
    assert difference.low == 0 and difference.covers_zero


@pytest.mark.parametrize(("n", "undecided"), [(2, True), (5, True), (6, False)])
def test_tasks_that_all_agree_decide_no_more_than_a_sign_test(n, undecided):
    a, b = ({(task, seed): value for task in range(n) for seed in range(2)} for value in (0.6, 0.5))
    one = {key: value for key, value in a.items() if key[1] == 0}
    for difference in (paired_difference(a, b), paired_difference(one, b), crossed(np.full((2, n), 0.1))):
        assert difference.covers_zero == undecided and difference.p == 2.0 ** (1 - n)


def test_pairing_removes_what_is_common_to_both():
    rng = np.random.default_rng(3)
    hard = rng.uniform(0, 1, 100)
    a = {(i, 0): hard[i] + 0.05 + 0.01 * rng.normal() for i in range(100)}
    b = {(i, 0): hard[i] for i in range(100)}
    assert not paired_difference(a, b).covers_zero
    assert bootstrap(a.values()).low < bootstrap(b.values()).high  # unpaired, the two cannot be told apart


def test_shared_seeds_are_paired_else_each_has_its_own_mean():
    a = {("t", 0): 1.0, ("t", 1): 0.0, ("u", 0): 1.0}
    assert paired_difference(a, {("t", 1): 0.0, ("u", 0): 0.0}).mean == pytest.approx(0.5)  # t: 0 - 0, u: 1 - 0
    assert paired_difference(a, {("t", 7): 0.0, ("u", 7): 0.0}).mean == pytest.approx(0.75)  # t: .5 - 0, u: 1 - 0
    assert by_task(a) == {"t": 0.5, "u": 1.0}


def test_rank_correlations_by_hand():
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)  # 5 pairs agree, 1 does not
    # Ties: x has ranks 0, 1.5, 1.5, 3. Of 6 pairs x ties one, and the others agree with y: 5 / sqrt(5 * 6).
    assert kendall([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(30))
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1], [1, 2])) and math.isnan(kendall([1, 1], [1, 2]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=15))
def test_rank_correlations_see_order_alone(pairs):
    x, y = zip(*pairs, strict=True)
    for correlation in (spearman, kendall):
        value = correlation(x, y)
        if not math.isnan(value):
            assert -1 - 1e-9 <= value <= 1 + 1e-9
            assert correlation(np.exp(x), y) == pytest.approx(value) == -correlation(np.negative(x), y)


# -------------------------------------------------------------------------------------------------------------- tables


def test_only_a_report_is_replaced_by_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(RESULTS, run / "results.jsonl")
    (tmp_path / "notes.md").write_text("my notes")
    for out, says in ((run / "results.jsonl", "name the page .html"), (tmp_path / "notes.html", "holds something")):
        with pytest.raises(UserError, match=says):
            report.main([str(run), "--out", str(out)])
    assert (run / "results.jsonl").read_text() == RESULTS.read_text()
    assert (tmp_path / "notes.md").read_text() == "my notes"
    for _ in range(2):
        report.main([str(run), "--out", str(tmp_path / "mine.html")])


def groups_of(*arguments: object) -> dict[str, results.Group]:
    groups = results.read_results(results.result_files(map(str, arguments)))
    return {f"{g.condition.name} {g.condition.budget}".strip(): g for g in groups}


def test_the_table_by_hand():
    head, rows = report.results_table(list(groups_of(RESULTS).values()))
    table = {row[1]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(table) == [
        "SFT greedy", "best-of-N, picked by QNet", "best-of-N, picked by true reward (oracle)", "QLASS",
    ]  # fmt: skip
    greedy, qlass = table["SFT greedy"], table["QLASS"]
    # Rewards 0, .5, 1, .5 of greedy; QLASS .5, .5, 1, 1 with seed 0 and .5, 1, 1, 0 with seed 1.
    assert greedy["reward [95 %]"].startswith("0.500 [") and qlass["reward [95 %]"].startswith("0.688 [")
    assert (greedy["success"], qlass["success"]) == ("0.250", "0.500")
    assert (greedy["zero reward"], qlass["zero reward"]) == ("0.250", "0.125")
    assert (qlass["tasks"], qlass["seeds (their means)"], qlass["M"], qlass["N"]) == ("4", "2 (0.625–0.750)", "2", "1")
    # Tokens: 100 prompt, 20 (seed 0) and 24 (seed 1) generated, 30 scored.
    assert (qlass["generated tokens"], qlass["total tokens"]) == ("22", "152")
    assert table["best-of-N, picked by QNet"]["reward [95 %]"] == "0.500 [0.500, 0.500]"
    assert [row["paper"] for row in table.values()] == ["0.631", "–", "0.679", "0.703"]


def test_the_differences_by_hand():
    head, rows = report.differences_table(list(groups_of(RESULTS).values()))
    table = {tuple(row[1:3]): dict(zip(head, row, strict=True)) for row in rows}
    # Seed 0 is shared: .5, 0, 0, .5. The resampled mean is Binomial(4, 1/2) / 8, whose 95 % are 0 to .5.
    assert table["QLASS M=2", "SFT greedy"]["difference [95 %]"] == "+0.250 [+0.000, +0.500]"
    assert table["QLASS M=2", "SFT greedy"]["verdict"] == "undecided"
    oracle = "best-of-N, picked by true reward (oracle) N=2"
    assert table[oracle, "SFT greedy"]["verdict"] == "undecided"  # of four tasks, whatever they say
    assert table["QLASS M=2", oracle]["difference [95 %]"].startswith("-0.250")
    assert table["QLASS M=2", "best-of-N, picked by QNet N=2"]["total tokens (ratio)"] == "1.09"  # 152 / 140
    assert ("SFT greedy", "SFT greedy") not in table


def test_qlass_meets_the_best_of_n_of_its_cost_and_of_its_samples(tmp_path):
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for row in [r for r in lines if r["method"] == "best_of_n" and r["select"] == "q"]:
        for n, generated in ((3, 32), (8, 999)):  # with 152 tokens a task, the one of 132 + 20 is nearest to QLASS
            lines.append(row | {"N": n, "tokens": row["tokens"] | {"generated": generated}})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    _, rows = report.differences_table(list(groups_of(tmp_path).values()))
    rivals = [row[2] for row in rows if row[1] == "QLASS M=2" and "QNet" in row[2]]
    assert rivals == ["best-of-N, picked by QNet N=3", "best-of-N, picked by QNet N=2"]


def test_a_label_tells_runs_apart_and_names_the_process_reward(tmp_path):
    (tmp_path / "results_avg.jsonl").write_text(RESULTS.read_text())
    groups = groups_of(RESULTS, f"target avg={tmp_path}")
    assert {"QLASS M=2", "QLASS [target avg] M=2", "SFT greedy [target avg]"} <= groups.keys()
    targets = {name: group.condition.target for name, group in groups.items()}
    assert (targets["QLASS M=2"], targets["QLASS [target avg] M=2"], targets["SFT greedy"]) == ("q", "avg", None)
    _, rows = report.differences_table(list(groups.values()))
    assert ["QLASS [target avg] M=2", "QLASS M=2", "+0.000 [+0.000, +0.000]", "undecided"] in [r[1:5] for r in rows]
    assert ["QLASS [target avg] M=2", "SFT greedy [target avg]"] in [row[1:3] for row in rows]


@pytest.mark.parametrize(
    ("method", "select", "n", "oracle"),
    [
        ("qlass", "q", 4, False),
        ("qlass", "oracle", 1, False),
        ("qlass", "oracle", 4, True),
        ("oracle_step", None, 1, True),
    ],
)
def test_what_looks_at_the_true_reward_is_called_oracle(method, select, n, oracle):
    named = results.Condition("webshop", method, 2, n, select, "")
    assert named.oracle == oracle == ("oracle" in named.name)


def test_only_what_qnet_says_is_calibrated(tmp_path):
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    searched = [row for row in rows if row["method"] == "qlass"]
    others = [row | {"method": name} for row in searched for name in ("random", "likeliest", "oracle_lookahead")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in searched + others))
    _, table = report.calibration_table(list(groups_of(tmp_path / "results.jsonl").values()))
    assert [row[1] for row in table] == ["QLASS M=2"]


def test_calibration_reads_the_q_of_the_action_taken():
    group = groups_of(RESULTS)["QLASS M=2"]
    q, returns = report.scored_steps(group)
    assert sorted(zip(q, returns, strict=True)) == [
        (0.25, 0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.5), (0.75, 1), (0.75, 1), (1, 1), (1, 1),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- malformed input


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"task_id": "a", "env": "web', "not valid JSON"),
        ("[1, 2]", "a JSON object is expected"),
        ('{"env": "webshop", "method": "greedy", "reward": 1, "tokens": {}}', "task_id"),
        ('{"task_id": "a", "env": "webshop", "method": "greedy", "reward": NaN, "tokens": {}}', "NaN is not a number"),
        ('{"task_id": "a", "env": "webshop", "method": "greedy", "reward": 1, "tokens": 7}', "tokens"),
        ('{"task_id": "a", "env": "e", "method": "m", "reward": 1, "tokens": {"prompt": "x"}}', "tokens can"),
        ('{"task_id": "a", "env": "e", "method": "m", "reward": 1, "tokens": {}, "steps": [{}]}', "steps can"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, told):
    path = tmp_path / "results.jsonl"
    lines = RESULTS.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}:3: .*{told}"):
        groups_of(path)


def test_a_last_line_cut_short_is_skipped_with_a_warning(tmp_path, capsys):
    text = RESULTS.read_text()
    (tmp_path / "results.jsonl").write_text(text[:-40])
    groups = groups_of(tmp_path)
    assert len(groups["best-of-N, picked by true reward (oracle) N=2"].results) == 3
    assert re.search(r"warning: .*results.jsonl:20: .*cut short", capsys.readouterr().err)


def test_two_results_of_the_same_task_must_agree(tmp_path):
    lines = RESULTS.read_text().splitlines()
    other = json.dumps(json.loads(lines[0]) | {"reward": 0.75})
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")
    assert len(groups_of(tmp_path)["SFT greedy"].results) == 4
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, other]) + "\n")
    with pytest.raises(UserError, match=r"results.jsonl:1 and .*results.jsonl:21: two different results"):
        groups_of(tmp_path)


# ----------------------------------------------------------------------------------------------- what one row may hold


def run_folder(folder: Path, seed: int = 0, sft: str = "a", qnet: str = "b", tasks: str = "xy", **asked) -> str:
    """Results of greedy and qlass with metadata as the stages write them; asked: {stage_flag: value}."""

    def meta(name: str, inputs: dict[str, str], **arguments) -> None:
        mine = {k.removeprefix(f"{name}_"): v for k, v in asked.items() if k.startswith(f"{name}_")}
        arguments |= {"seed": seed, "run": str(folder), "out": f"{folder}/{name}"} | mine
        record = {"arguments": arguments, "inputs": {f"{folder}/{k}": v for k, v in inputs.items()}}
        (folder / f"{name}.meta.json").write_text(json.dumps(record))

    folder.mkdir()
    for name in ("sft", "qnet"):
        (folder / name).mkdir()
    meta("sft", {}, epochs=12)
    meta("qnet", {"sft": sft}, epochs=8, sft=f"{folder}/sft", limit=None)
    meta("results", {"sft": sft, "qnet": qnet}, sft=f"{folder}/sft", qnet=f"{folder}/qnet", map=None, method=["all"])
    rows = [
        {"task_id": t, "env": "lake", "method": m, "M": n, "N": 1, "seed": seed, "reward": 1, "tokens": {"prompt": 1}}
        for t in tasks for m, n in (("greedy", 1), ("qlass", 2), ("rule", 1))
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def pooled(*folders: str) -> dict[str, int]:
    groups = results.read_results(results.result_files(folders))
    return {group.condition.name: len(group.results) for group in groups}


def test_seeds_of_one_pipeline_are_pooled_wherever_they_lie(tmp_path):
    last = ["random", "code"]  # --scorer of the last call: each line says its own
    folders = [run_folder(tmp_path / f"seed{n}", n, f"a{n}", f"b{n}", results_scorer=last[:n]) for n in range(3)]
    assert set(pooled(*folders).values()) == {6}
    (tmp_path / "seed1").rename(tmp_path / "moved")
    folders[1] = str(tmp_path / "moved")
    assert set(pooled(*folders).values()) == {6}


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({}, {"sft": "other", "tasks": "z"}, "SFT greedy with different --sft .* of one seed"),
        ({}, {"qnet": "other", "tasks": "z"}, "QLASS with different --qnet .* of one seed"),
        ({}, {"seed": 1, "sft_epochs": 3}, "SFT greedy with different --epochs of sft .12, 3"),
        ({}, {"seed": 1, "qnet_limit": 5}, "QLASS with different --limit of qnet .None, 5"),
        ({}, {"seed": 1, "results_map": "8x8"}, "rule with different --map .None, 8x8"),
        ({"results_temperature": 1.0}, {"seed": 1, "results_temperature": 0.5}, "greedy with different --temperature"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_not_pooled(tmp_path, one, other, says):
    first, second = run_folder(tmp_path / "one", **one), run_folder(tmp_path / "two", **other)
    with pytest.raises(UserError) as error:
        pooled(first, second)
    said = str(error.value)
    assert re.search(says, said) and "\n" not in said, said
    assert said.startswith(f"{first}/results.jsonl and {second}/results.jsonl: ")
    assert len(pooled(first, f"other={second}")) == 6  # labels tell them apart


def test_two_seeds_of_one_training_are_told(tmp_path, capsys):
    first, second = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", seed=1, qnet="other")
    assert pooled(first, second)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "SFT greedy is of one model under two --seed, so not two trainings" in told
    pooled(*(run_folder(tmp_path / f"seed{n}", n, sft=f"a{n}", qnet=f"b{n}") for n in range(2)))
    assert capsys.readouterr().err == ""


def test_without_metadata_it_is_told_that_nothing_is_known(tmp_path, capsys):
    folders = [run_folder(tmp_path / f"seed{n}", n, sft=f"a{n}", qnet=f"b{n}") for n in range(2)]
    (tmp_path / "seed1" / "results.meta.json").unlink()
    assert set(pooled(*folders).values()) == {4}
    assert re.fullmatch(r"warning: .*seed1/results.jsonl: no metadata beside it.*\n", capsys.readouterr().err)


def test_mistakes_end_in_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(HERE.parent / "report.py"), str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error:") and done.stderr.count("\n") == 1 and "no such file" in done.stderr
    with pytest.raises(UserError, match=r"no results\*\.jsonl"):
        report.main([str(tmp_path)])
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(UserError, match="no result"):
        report.main([str(tmp_path)])
    with pytest.raises(UserError, match=r"page\.md: the page is HTML"):
        report.main([str(RESULTS), "--out", str(tmp_path / "page.md")])


# ------------------------------------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    """Every start tag with its attributes, the open elements at the end, and the text of the data element."""

    VOID = frozenset({"meta", "input", "br", "path", "use", "rect", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.data, self.texts = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.tags and self.tags[-1][1].get("id") == "data" and self.open[-1] == "script":
            self.data += data
        else:
            self.texts.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for copy in range(3):  # enough scored steps for the calibration figure, and another process reward for Fig. 4
        for row in lines[4:12]:
            task = {"task_id": f"test_{copy}_{row['task_id']}"}
            lines += [row | task, row | task | {"label": "target avg"}]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    report.main(["--run", str(folder), "--trees", str(TREES), "--max-trees", "2"])
    return folder


def test_the_page_holds_everything_and_stays_by_itself(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert {"results", "differences", "tokens", "targets", "calibration", "steps", "trees", "inputs"} <= set(ids)
    assert sum(tag == "svg" for tag, _ in page.tags) == 3
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(//" not in text
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#")
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in page.tags)
    words = " ".join(page.texts)
    assert all(said in words for said in ("0.703", "where the interval covers 0", "search[red mug]"))
    assert "◀ taken" in text
    assert len(list(made.glob("*.png"))) == 3 and all(p.read_bytes()[1:4] == b"PNG" for p in made.glob("*.png"))
    assert report.PAPER_NOTE in (made / "report.md").read_text(encoding="utf-8")


def test_text_of_an_environment_stays_text(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == 2 and "alert(1)" not in "".join(page.texts)
    assert "Page 1 [SEP] B01 [SEP] Red Mug </script><b>&" in page.texts  # an observation in Fig. 5
    assert not any(tag == "b" for tag, _ in page.tags)


EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><b>{{trees}}"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_in_a_browser_text_of_a_model_or_an_environment_runs_nothing(tmp_path):
    """Every text of a result and of a tree is a script; the viewer, itself a script, has run and shows them."""
    step = {"action": EVIL, "observation": EVIL, "thought": EVIL, "candidates": [{"action": EVIL, "q": 0.5}]}
    row = {"task_id": EVIL, "env": f"lake {EVIL}", "task": EVIL, "type": EVIL, "label": EVIL, "steps": [step],
           "method": "greedy", "reward": 1.0, "tokens": {"prompt": 1}}  # fmt: skip
    others = [{"method": "qlass", "M": 2}, {"player": EVIL, "method": "rule"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row | more) + "\n" for more in ({}, *others)))
    node = {"task_id": EVIL, "node_id": 0, "parent_id": None, "action": None, "observation": EVIL, "reward": 0.0}
    node |= {"task": EVIL, "messages": [{"role": "user", "content": EVIL}], "nodes": 2, "source": EVIL, "q": 0.1}
    child = {"node_id": 1, "parent_id": 0, "action": EVIL, "nodes": 2, "done": True}
    (tmp_path / "q_labels.jsonl").write_text(json.dumps(node) + "\n" + json.dumps(node | child) + "\n")
    (tmp_path / "results.meta.json").write_text(json.dumps({"commit": EVIL, "written": EVIL}))
    report.main(["--run", str(tmp_path)])
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path}/c",
    ]
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run([BROWSER, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]
    written, shown = Page((tmp_path / "report.html").read_text(encoding="utf-8")), Page(done.stdout)
    assert title != "taken"
    for tag, attributes in shown.tags:
        assert tag != "b" and "onerror" not in attributes
    assert sum(tag == "script" for tag, _ in shown.tags) == sum(tag == "script" for tag, _ in written.tags)
    assert " ".join(shown.texts).count(EVIL) > " ".join(written.texts).count(EVIL) > 0  # the viewer shows the tree


def test_the_viewer_gets_the_trees_as_they_are(made):
    data = json.loads(Page((made / "report.html").read_text(encoding="utf-8")).data)
    nodes = [json.loads(line) for line in TREES.read_text().splitlines()]
    assert data["total"] == 3 and [tree["task"] for tree in data["trees"]] == ["train_0", "train_2"]
    first = [dict(zip(data["fields"], values, strict=True)) for values in data["trees"][0]["nodes"]]
    assert [node["parent"] for node in first] == [-1, 0, 1, 2, 1, 4]
    assert [node["q"] for node in first] == [node["q"] for node in nodes[:6]]
    for node, line in zip(first, nodes, strict=False):
        assert data["texts"][node["observation"]] == line["observation"]
    assert data["texts"][first[4]["action"]] == "click[b02]" and data["texts"][first[4]["thought"]] == "It is redder."
    assert first[1]["observation"] == first[4]["observation"]  # a page that recurs is stored once
    assert [node["expert"] for node in first] == [line.get("expert") for line in nodes[:6]]
    assert data["trees"][1]["text"] == "i need a blue mug {{results}}"


def test_the_same_results_in_any_order_make_the_same_report(made, tmp_path):
    lines = (made / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    report.main(["--run", str(tmp_path), "--trees", str(TREES), "--max-trees", "2"])
    assert (tmp_path / "report.md").read_bytes() == (made / "report.md").read_bytes()
    again, first = ((f / "report.html").read_text().replace(str(f), "RUN") for f in (tmp_path, made))
    assert again == first


def test_results_alone_make_a_page(tmp_path):
    greedy = [line for line in RESULTS.read_text().splitlines() if '"greedy"' in line]
    (tmp_path / "results.jsonl").write_text(greedy[0] + "\n")
    report.main([str(tmp_path / "results.jsonl")])
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.data == "null" and page.open == []


def test_learning_curves_stand_beside_the_results(tmp_path):
    (tmp_path / "results.jsonl").write_text(RESULTS.read_text().splitlines()[0] + "\n")
    spent = [{"tokens": 10 * i, "env_steps": i, "val": None if i == 1 else 0.5 + i / 10} for i in range(3)]
    for name in ("tree_grpo", "eto"):
        (tmp_path / f"sft-{name}.updates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spent))
    curves = read_curves([("", tmp_path), ("", tmp_path / "nowhere")])
    assert curves == {"eto": [spent], "tree_grpo": [spent]}
    assert read_curves([("half", tmp_path)]) == {"eto, half": [spent], "tree_grpo, half": [spent]}
    with open(tmp_path / "sft-eto.updates.jsonl", "a") as file:
        file.write('{"tokens": 30, "en')  # a stop
    assert read_curves([("", tmp_path)]) == curves
    for axes, cost in zip(figures.learning(curves).axes, ("tokens", "env_steps"), strict=True):
        assert [line.get_label() for line in axes.lines] == ["eto", "tree_grpo"]
        assert [list(line.get_xdata()) for line in axes.lines] == [[0, spent[2][cost]]] * 2  # where it was validated
        assert list(axes.lines[0].get_ydata()) == [0.5, 0.7]
    (alone,) = figures.learning({"tree_grpo": [spent]}).axes[0].lines  # looks the same wherever it is drawn
    assert alone.get_color() == axes.lines[1].get_color() != axes.lines[0].get_color()
    assert len({look["color"] for look in figures.looks(["cloned", "mine", "yours"]).values()}) == 3
    report.main([str(tmp_path / "results.jsonl")])
    assert (tmp_path / "report_learning_webshop.png").exists()
    assert 'id="learning"' in (tmp_path / "report.html").read_text()


def test_what_an_agent_cost_is_in_the_metadata_behind_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    greedy, searched = (next(r for r in rows if r["method"] == m) for m in ("greedy", "qlass"))
    files = {
        "results": [greedy, searched],
        "results-rl": [greedy | {"label": "rl", "reward": 0.9}],
        "results-rl-old": [searched | {"label": "rl, old QNet"}],
        "results-again": [greedy | {"label": "again"}],
        "results-guided": [greedy | {"label": "guided"}],
        "results-both": [greedy | {"label": "both"}],
        "results-foreign": [searched | {"label": "foreign QNet"}],
    }
    for name, lines in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metas = {
        "results": {"arguments": {"sft": "sft", "qnet": "qnet"}}, "sft": {},
        "results-rl": {"arguments": {"sft": "sft-rl"}}, "sft-rl": {"last": {"tokens": 1000}, "passes": 6},
        "results-rl-old": {"arguments": {"sft": "sft-rl", "qnet": "qnet"}},
        "results-again": {"arguments": {"sft": "sft-again"}},
        "sft-again": {"tokens": 50, "arguments": {"expert": "kept.jsonl"}},
        "kept": {"kept": 3, "tokens": 5, "arguments": {"trees": "trees.jsonl"}},
        "qnet": {"tokens": 100, "arguments": {"labels": "q.jsonl"}}, "q": {"arguments": {"trees": "trees.jsonl"}},
        "trees": {"tokens": 7},
        "results-guided": {"arguments": {"sft": "sft-guided"}},  # cloned again from what QNet guided
        "sft-guided": {"tokens": 50, "arguments": {"expert": "guided.jsonl"}},
        "guided": {"kept": 3, "tokens": 5, "arguments": {"sft": "sft", "qnet": "qnet"}},
        "results-both": {"arguments": {"sft": "sft-both"}},  # reinforcement learning behind it
        "sft-both": {"last": {"tokens": 10, "played": 1}, "passes": 6, "arguments": {"sft": "sft-guided"}},
        "results-foreign": {"arguments": {"sft": "sft", "qnet": "downloaded"}},
    }  # fmt: skip
    for name, meta in metas.items():
        Path(f"{name}.meta.json").write_text(json.dumps(meta))
    groups = results.read_results([("", Path(f"{name}.jsonl")) for name in files])
    cost = {(g.condition.method, g.condition.label): training_tokens(g) for g in groups}
    assert math.isnan(cost.pop(("qlass", "foreign QNet")))
    for name in ("sft-rl", "qnet", "q.jsonl", "trees.jsonl"):
        Path(name).touch()
    monkeypatch.chdir(tmp_path.parent)  # a report of another folder
    moved = results.read_results([("", tmp_path / "results-rl-old.jsonl")])
    assert [training_tokens(group) for group in moved] == [6307]
    monkeypatch.chdir(tmp_path)
    assert cost == {("greedy", ""): 0, ("qlass", ""): 307, ("greedy", "rl"): 6000, ("qlass", "rl, old QNet"): 6307,
                    ("greedy", "again"): 162, ("greedy", "guided"): 462, ("greedy", "both"): 523}  # fmt: skip
    (first, *_) = frontier(groups).axes
    assert first.get_title(loc="left") == "100 tasks"
    drawn = {line.get_label(): (len(line.get_xdata()), line.get_markerfacecolor()) for line in first.lines[:-1]}
    assert set(drawn) == {"cloned", "rl", "again", "guided", "both"}  # those that are not searched are points
    assert drawn["rl"] == (2, "white") and drawn["cloned"][1] != "white" and drawn["again"][0] == 1
    picked = results.Group(results.Condition("webshop", "best_of_n", 1, 4, "q", ""), groups[0].results)
    assert [line.get_linestyle() for line in frontier([*groups, picked]).axes[0].lines].count(":") == 1
    rl = next(g for g in groups if (g.condition.method, g.condition.label) == ("greedy", "rl"))
    stopped = results.Group(dataclasses.replace(rl.condition, label="rl, equal steps"), rl.results)
    lines = frontier([*groups, stopped]).axes[0].lines
    (large,) = [line for line in lines if line.get_label() == "rl"]
    (small,) = [line for line in lines if line.get_color() == large.get_color() and line is not large]
    assert small.get_markersize() < large.get_markersize() and small.get_marker() == large.get_marker()
    assert frontier([g for g in groups if not g.condition.label]) is None
    Path("trees.meta.json").write_text('{"tokens": null}')  # resumed: what they cost in all is not known
    assert math.isnan(training_tokens(next(g for g in groups if g.condition.method == "qlass")))
    assert frontier([g for g in groups if g.condition.label in ("", "rl", "rl, old QNet")]) is None
    assert pareto([(3, 0.5), (1, 0.2), (2, 0.1), (1, 0.3), (4, 0.5)]) == [(1, 0.3), (3, 0.5)]


def test_runs_that_share_no_seed_differ_as_their_trainings_do():
    """Two sides of three trainings: the interval covers the truth, which one over tasks alone would not."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        sides = []
        for first in (0, 3):
            seeds = 0.05 * rng.normal(size=3)
            sides.append({(t, first + s): seeds[s] + 0.1 * rng.normal() for t in range(100) for s in range(3)})
        estimate = paired_difference(*sides)
        covered += estimate.low <= 0 <= estimate.high
    assert 0.9 < covered / 200 <= 1
    one = paired_difference({("a", 0): 1.0, ("b", 0): 0.0}, {(task, s): 0.5 for task in "ab" for s in (1, 2)})
    assert one.mean == 0 and one.n == 2  # of one training a side: over tasks
