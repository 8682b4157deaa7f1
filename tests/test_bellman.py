"""Stage 3 against values by hand and against brute force over all paths of random trees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import node, tree_by_hand, write
from hypothesis import given
from hypothesis import strategies as st

import bellman
from experiments import targets
from qlass.files import meta_of, read_jsonl


def values(tree, target):
    labelled = bellman.label(tree, targets.TARGETS[target](tree, 0.9))
    return [(n["q_raw"], n["q"]) for n in labelled]


@pytest.mark.parametrize(("target", "raw"), [
    # Q(2) = 1, Q(3) = .5, Q(1) = .9 max(1, .5), Q(4) = .2, Q(0) = .9 max(.9, .2)
    ("q", [0.81, 0.9, 1.0, 0.5, 0.2]),
    ("avg", [1.7 / 3, 0.75, 1.0, 0.5, 0.2]),
    ("td", [0.9 * (0.675 + 0.2) / 2, 0.9 * (1 + 0.5) / 2, 1.0, 0.5, 0.2]),
    # The first branch made node 1, and none the root, which counts in the min-max as the least.
    ("mc", [0.0, 0.9, 1.0, 0.5, 0.2]),
    ("reward", [0.2, 1.0, 1.0, 0.5, 0.2]),  # the root, of no branch, does not set the scale
])  # fmt: skip
def test_values_by_hand(target, raw):
    """Of each the greatest is 1."""
    lowest = min(raw)
    for labels, value in zip(values(tree_by_hand(), target), raw, strict=True):
        assert labels == pytest.approx((value, (value - lowest) / (1 - lowest)))
    # A demonstration (branch 1) that stops early, on whose way the agent was stopped at its limit.
    cut = [
        node(0, None),
        node(1, 0, branch=1, cut=0.3),
        node(2, 1, branch=1),
        node(3, 0, 0.6, branch=2, done=True),
    ]
    assert targets.reward(cut, 0.9) == [0.0, 0.0, 0.0, 0.6]
    assert targets.mc(cut, 0.9) == [0.0, 0.0, 0.0, 0.6]
    cut[1]["branch"] = 3  # the agent's own, which ended there
    assert targets.reward(cut, 0.9) == [0.0, 0.3, 0.0, 0.6]
    assert targets.mc(cut, 0.9) == [0.0, 0.3, 0.0, 0.6]
    on_the_way = [node(0, None), node(1, 0, 0.3), node(2, 1, 1.0, done=True)]  # counts once and undiscounted
    assert bellman.q_values(on_the_way, 0.5) == pytest.approx([0.4, 0.8, 1.0])
    assert values([node(0, None, 0.7)], target)[0][1] == 0.0  # a root alone


def test_labels_of_imitation_tell_who_the_demonstrator_is():
    """And have no order by reward."""
    tree = tree_by_hand()
    for n in (1, 3):
        tree[n]["expert"] = True
    assert [q for _, q in values(tree, "imitation")] == [0, 1, 0, 1, 0]


def test_a_placebo_has_each_familys_own_values_in_an_order_of_the_runs_seed():
    orders = []
    write("trees.jsonl", tree_by_hand())
    for seed in [*range(12)] * 2:
        targets.main(f"--run . --overwrite --trees trees.jsonl --target placebo --gamma 0.9 --seed {seed}".split())
        q = [node["q_raw"] for node in read_jsonl(Path("q_labels.jsonl"))]
        assert (q[0], {q[1], q[4]}, {q[2], q[3]}) == (pytest.approx(0.81), {0.9, 0.2}, {1.0, 0.5})
        orders.append((q[1] > q[4], q[2] > q[3]))
    assert orders[:12] == orders[12:] and len({*orders}) == 4


@st.composite
def grown_trees(draw):
    """A tree as Alg. 2 grows it: each branch is a chain from a node that has not ended, and its leaf has a reward."""
    tree = [node(0, None)]
    for branch in range(1, draw(st.integers(1, 6)) + 1):
        at = draw(st.sampled_from([n["node_id"] for n in tree if not n["done"]]))
        for _ in range(draw(st.integers(1, 4))):
            tree.append(node(len(tree), at, branch=branch))
            at = len(tree) - 1
        tree[-1] |= {"reward": draw(st.integers(0, 1000)) / 1000, "done": True}
    return tree


def paths_below(tree, start):
    children = [n["node_id"] for n in tree if n["parent_id"] == start]
    return [[tree[start], *path] for c in children for path in paths_below(tree, c)] or [[tree[start]]]


@given(grown_trees(), st.floats(0.05, 1))
def test_all_targets_equal_brute_force(tree, gamma):
    q, average, branch = bellman.q_values(tree, gamma), targets.avg(tree, gamma), targets.reward(tree, gamma)
    for n in tree:
        paths = paths_below(tree, n["node_id"])
        best = max(sum(gamma**t * m["reward"] for t, m in enumerate(path)) for path in paths)
        assert q[n["node_id"]] == pytest.approx(best)  # steps are deterministic: the best a' are on the best path
        assert average[n["node_id"]] == pytest.approx(sum(p[-1]["reward"] for p in paths) / len(paths))
        ends = [m["reward"] for m in tree if m["done"] and m["branch"] == n["branch"]]
        assert branch[n["node_id"]] == (ends[0] if ends else 0.0) or n is tree[0]
    assert branch[0] == min(branch[1:])  # no branch made the root, and every tree here has one


def test_the_command_keeps_every_line_and_adds_q(capsys):
    flat = [n | {"task_id": task, "reward": 0.0} for task in "uv" for n in tree_by_hand()]
    write("trees.jsonl", tree_by_hand() + flat)
    bellman.main(["--run", ".", "--trees", "trees.jsonl", "--gamma", "0.5"])
    labels = Path("q_labels.jsonl")
    written = read_jsonl(labels)
    assert [n.pop("q_raw") for n in written] == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.2, *[0.0] * 10])
    assert not any([n.pop("q") for n in written][5:])  # a flat tree tells nothing apart
    assert written == tree_by_hand() + flat
    assert meta_of(labels)["trees"] == 3
    assert "3 trees, 2 of them with all values equal" in capsys.readouterr().out


def test_the_command_writes_the_target_that_it_names():
    tree, labels = tree_by_hand(), Path("q_labels.jsonl")
    write("trees.jsonl", tree)
    written = []
    for target, values in targets.TARGETS.items():
        targets.main(f"--run . --overwrite --trees trees.jsonl --target {target} --gamma 0.9".split())
        written.append([node["q_raw"] for node in read_jsonl(labels)])
        assert written[-1] == values(tree, 0.9) and meta_of(labels)["recipe"]["target"] == target
    assert len(set(map(tuple, written))) == len(targets.TARGETS)


def test_it_starts_without_torch():
    """And without a run: the files that it is given are enough."""
    Path("torch.py").write_text("1 / 0")
    write("trees.jsonl", tree_by_hand())
    command = [sys.executable, bellman.__file__, "--trees", "trees.jsonl", "--run", "."]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert (done.returncode, done.stdout.count("\n")) == (0, 2), done.stderr
    assert len(Path("q_labels.jsonl").read_text().splitlines()) == 5
