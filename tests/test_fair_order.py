"""The order of tasks: demonstrations are a prefix of train, trees a suffix, `--limit` a prefix of any split."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import envs


def bound(share: float, types: int) -> float:
    """How far a prefix may be from `share` of its length, in tasks; any stretch, twice as far.

    Type t's tasks stand at (i + 1/2) / n_t, so n_t * x of them, rounded, lie below x. The lengths of the T types' parts
    add up to k, whence x = k / n within T / (2 n).
    """
    return 0.5 + share * types / 2 + 1e-9


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_every_stretch_holds_each_type_by_its_share(sizes, data):
    tasks = [f"{kind}/{i}" for kind, size in enumerate(sizes) for i in range(size)]
    order = envs.fair_order(data.draw(st.permutations(tasks)), lambda task: task.split("/")[0])
    assert sorted(order) == sorted(tasks)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(tasks))] * 2)))
    for first, times in ((0, 1), (start, 2)):  # a prefix, any stretch
        found = Counter(task.split("/")[0] for task in order[first:end])
        for kind, size in enumerate(sizes):
            share = size / len(tasks)
            assert abs(found[str(kind)] - share * (end - first)) <= times * bound(share, len(sizes))


@given(st.sets(st.text("abc/", min_size=1, max_size=6), max_size=30), st.randoms())
def test_the_order_is_the_ids_alone(tasks, rng):
    shuffled = sorted(tasks)
    rng.shuffle(shuffled)
    order = envs.fair_order(shuffled, lambda task: task[0])
    assert order == envs.fair_order(sorted(tasks), lambda task: task[0])
    assert [t for t in order if t[0] == "a"] == envs.fair_order([t for t in order if t[0] == "a"], lambda task: "")


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake"])
def test_the_splits_of_an_environment_are_in_this_order(name):
    env = envs.make(name)
    for split in ("train", "val", "test"):
        tasks = env.task_ids(split)
        assert tasks == envs.fair_order(env.split_ids(split), env.task_type) and len(set(tasks)) == len(tasks)
