"""The report's statistics against closed forms, coverage of the truth, and hand-computed numbers."""

import math

import numpy as np
import pandas as pd
import pytest

from reporting.stats import bootstrap, crossed, interval, paired_difference


def series(values):  # by task and seed
    return pd.Series(values, dtype=float)


def in_blocks(values, size):
    """`size` tasks of each value, which vary together, and the block of each."""
    tasks = {(f"{block}-{i}", 0): value for block, value in enumerate(values) for i in range(size)}
    return series(tasks), {task: task.partition("-")[0] for task, _ in tasks}


def ends(estimate):
    return estimate.low, estimate.high


def test_bootstrap_of_a_coin_is_the_binomial():
    # The resampled mean of 50 zeros and 50 ones is Binomial(100, 1/2) / 100, with 95 % between .40 and .60.
    estimate = bootstrap([0] * 50 + [1] * 50)
    assert (estimate.mean, estimate.n) == (0.5, 100)
    assert ends(estimate) == pytest.approx((0.40, 0.60), abs=0.011)


def test_of_one_task_there_is_no_interval_and_of_none_no_difference():
    estimate = bootstrap([0.7])
    assert estimate.mean == 0.7
    assert math.isnan(estimate.low)
    assert estimate.covers_zero
    assert bootstrap([]).n == 0
    assert paired_difference(series({("a", 0): 1}), series({("b", 0): 1})).n == 0


def test_an_interval_of_successes_alone_is_wilsons():
    # Of n successes from 1 - z^2 / (n + z^2) = n / (n + z^2) on, z^2 = 3.8415.
    for n in (3, 10, 400):
        estimate = interval(series({(task, 0): 1 for task in range(n)}), rewards=True)
        assert ends(estimate) == pytest.approx((n / (n + 3.8415), 1), abs=1e-4)


def test_an_interval_of_graded_rewards_by_hand():
    graded = {(task, seed): 0.5 for task in range(3) for seed in range(2)}  # .5 of the .438 of all that were seen
    estimate = interval(series(graded), rewards=True)
    assert (estimate.mean, *ends(estimate)) == pytest.approx((0.5, 0.2193, 0.7807), abs=1e-4)
    three = series({(task, seed): (seed + task) / 6 for task in range(4) for seed in range(3)})
    assert interval(three).low < 0 == interval(three, rewards=True).low
    many, _ = in_blocks([0.3, 0.9], 200)
    assert interval(many, rewards=True) == interval(many)


@pytest.mark.parametrize(("n", "size"), [(3, 1), (10, 3)])
@pytest.mark.parametrize(
    ("values", "p"), [((0, 1), (0.1, 0.9)), ((0, 0.5, 1), (0.1, 0.2, 0.7)), ((0.1, 1), (0.05, 0.95))]
)
def test_intervals_of_few_rewards_hold_the_truth(n, size, values, p):
    """Simulated: n blocks of `size` tasks that vary together. The bootstrap alone holds it in .16 to .9 of cases."""
    rng, truth, held = np.random.default_rng(n), np.dot(values, p), 0
    for _ in range(100):
        estimate = interval(*in_blocks(rng.choice(values, n, p=p), size), rewards=True)
        held += estimate.low - 1e-9 <= truth <= estimate.high + 1e-9
    assert held >= 90


@pytest.mark.parametrize("values", [[[0, 0], [1, 1], [2, 2]], [[0, 1, 2]] * 3])
def test_where_seeds_or_tasks_alone_differ_the_interval_is_students(values):
    half = 4.302653 * 1 / math.sqrt(3)  # of three values with standard deviation 1
    estimate = crossed(np.array(values, float))
    assert ends(estimate) == pytest.approx((1 - half, 1 + half), abs=1e-4)
    assert estimate.p == pytest.approx(1 - math.sqrt(3) / math.sqrt(2 + 3), abs=1e-4)  # t = sqrt(3)


def test_three_seeds_that_agree_by_chance_decide_nothing():
    """Without a difference, p is below a small threshold no more often than it says."""
    rng = np.random.default_rng(6)
    estimates = []
    for _ in range(1000):
        seeds, tasks = rng.normal(0, 0.03, (3, 1)), rng.normal(0, 0.1, 100)
        estimates.append(crossed(seeds + tasks + rng.normal(0, 0.3, (3, 100))))
    for p in (0.05, 0.0033):
        assert np.mean([estimate.p < p for estimate in estimates]) <= p
    assert np.mean([estimate.low <= 0 <= estimate.high for estimate in estimates]) >= 0.92


def test_blocks_are_sampled_not_their_tasks():
    """Ten tasks of a block that all go the same way are no more evidence than one."""
    outcome = [0.0, 1.0, 1.0, 0.0, 1.0]
    tasks, blocks = in_blocks(outcome, 10)
    by_block, by_task, alone = interval(tasks, blocks), interval(tasks), bootstrap(outcome)
    assert (*ends(by_block), by_block.p) == pytest.approx((*ends(alone), alone.p))
    assert by_block.n == by_task.n == 50
    assert by_block.high - by_block.low > 2 * (by_task.high - by_task.low)


def test_a_task_of_no_block_is_one_of_its_own():
    values = {("a1", 0): 1.0, ("a2", 0): 1.0, ("a3", 0): 0.0, ("b", 0): 0.0}
    estimate = interval(series(values), {"a1": "a", "a2": "a", "a3": "a"})  # .5 -+ (2 - 1.5) / 2
    assert (estimate.mean, *ends(estimate)) == pytest.approx((0.5, 0.25, 0.75))


def test_paired_difference_by_hand():
    a = series({("t1", 0): 1.0, ("t2", 0): 0.5, ("t3", 0): 0.5, ("t4", 0): 1.0})
    b = series({("t1", 0): 0.5, ("t2", 0): 0.5, ("t3", 0): 0.5, ("t5", 0): 0.0})
    difference = paired_difference(a, b)  # t1: .5, t2: 0, t3: 0; t4 and t5 have no partner
    # All differences are >= 0, and with probability (2/3)^3 = .30 a resample misses t1: the interval reaches 0.
    assert (difference.mean, difference.n, difference.low) == (pytest.approx(1 / 6), 3, 0)
    assert difference.covers_zero


def test_shared_seeds_are_paired_else_those_in_the_same_place():
    a = series({("t", 4): 1.0, ("t", 6): 0.0, ("u", 4): 1.0, ("u", 6): 1.0})
    shared, others = series({("t", 6): 0, ("u", 6): 0}), series({("t", 7): 0.5, ("u", 7): 0})
    assert paired_difference(a, shared).mean == pytest.approx(0.5)  # t: 0 - 0, u: 1 - 0; by place t would be 1 - 0
    assert paired_difference(a, others).mean == pytest.approx(0.75)  # t: 1 - .5, u: 1 - 0
    one, other = [("t", 4), ("u", 4), ("v", 4), ("t", 6)], [("t", 7), ("t", 8), ("u", 8), ("v", 8)]  # t alone has pairs
    assert paired_difference(series(dict.fromkeys(one, 1)), series(dict.fromkeys(other, 0.5))).mean == 0.5


@pytest.mark.parametrize(("n", "undecided"), [(2, True), (5, True), (6, False)])
def test_tasks_that_all_agree_decide_no_more_than_a_sign_test(n, undecided):
    a, b = (series({(task, seed): r for task in range(n) for seed in range(2)}) for r in (0.6, 0.5))
    one, _ = in_blocks([0.6] * n, 1)
    for difference in (paired_difference(a, b), interval(one - 0.5), crossed(np.full((2, n), 0.1))):
        assert difference.covers_zero == undecided
        assert difference.p == 2.0 ** (1 - n)
