import pytest

import envs
from bellman import label
from experiments import bench
from qlass.policy import Policy
from qlass.qnet import QNet, pairs_of


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop", max_steps=3)


@pytest.mark.parametrize(("candidates", "n"), [("free", 2), ("valid", 1)])
def test_both_ways_grow_the_same_trees(shop, candidates, n):
    model, chat = bench.random_agent(shop, candidates)
    chat.rendering.max_new_tokens = 4
    tasks = shop.task_ids("train")[:n]
    plain = bench.grow(shop, tasks, Policy(model, chat, fast=False), 1)
    assert bench.grow(shop, tasks, Policy(model, chat)) == plain
    assert any(node["source"] == "policy" and node["depth"] == 3 for tree in plain for node in tree)


def test_both_ways_train_alike(shop):
    model, chat = bench.random_agent(shop, "valid")
    trees = bench.grow(shop, shop.task_ids("train")[:3], Policy(model, chat))  # more than one pack
    for tree in trees:
        for node, reward in zip(tree, [0.1, 0.7, 0.3] * len(tree), strict=False):
            node["reward"] = reward
    net, pairs = QNet(model.model, chat).train(), [pair for tree in trees for pair in pairs_of(label(tree, "q", 0.9))]
    epochs = []
    for epoch in (bench.plain_epoch, bench.packed_epoch):
        net.zero_grad()
        epochs.append((*epoch(net, pairs), [p.grad.clone() for p in net.parameters()]))
    (plain, plain_tokens, plain_grads), (ours, tokens, grads) = epochs
    assert ours == pytest.approx(plain, rel=1e-4) and 1024 < tokens < plain_tokens / 2
    for a, b in zip(plain_grads, grads, strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-3


def test_ratios():
    assert bench.Figure("", 50, 20_000, "steps/s").ratio == 400 and bench.Figure("", 8, 2, "s").ratio == 4
