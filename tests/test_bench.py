"""Both ways of the benchmark, plain and fast, on a real environment and a model with random weights."""

import pytest

import envs
from experiments import bench
from qlass.fast.decode import FastPolicy
from qlass.policy import Policy


@pytest.mark.parametrize(("candidates", "n"), [("free", 2), ("valid", 1)])
def test_both_ways_grow_the_same_trees(candidates, n):
    shop = envs.make("webshop", max_steps=3)
    model, chat = bench.random_agent(shop, candidates)
    chat.rendering.max_new_tokens = 4
    tasks = shop.task_ids("train")[:n]
    plain = bench.grow(shop, tasks, Policy(model, chat), 1)
    assert bench.grow(shop, tasks, FastPolicy(model, chat)) == plain
    assert any(node["source"] == "policy" and node["depth"] == 3 for tree in plain for node in tree)
