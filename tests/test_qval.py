"""QVAL: points that replay, labels by brute force, statistics by hand, scorers by script."""

import argparse
import json
import math

import numpy as np
import pandas as pd
import pytest
from fakes import FakeEnv, Script, explore, say

import envs
from build_trees import tree_records
from experiments.qval import __main__ as qval
from experiments.qval import downstream, metrics, search, targets
from experiments.qval.metrics import RHO
from experiments.qval.points import Point, digest, label, trajectory
from experiments.qval.scorers import Call, Context, Decision, answer, entry
from qlass import UserError
from qlass.agent import load_policy
from qlass.batching import Sample, drive
from qlass.chat import Rendering
from qlass.fast.decode import FastPolicy
from qlass.files import read_jsonl, write_jsonl
from qlass.messages import State, react

RENDERING = Rendering()
ACTIONS = [react("hm", action) for action in ("left", "right")]


def series(values, blocks=(), taken=()):
    return metrics.series(values, metrics.index([len(state) for state in values], blocks, taken))


def root(env, task="val0"):
    observation, info = env.reset(options={"task_id": task})
    return State.first(env, observation, info)


def played(generator, policy=None):
    (value,) = drive([generator], {Call: answer, Sample: lambda requests: [policy(r) for r in requests]})
    return value


@pytest.mark.parametrize("name, options", [("frozenlake", {"map": "8x8", "slippery": True}), ("webshop", {})])
def test_replay_reproduces_every_hash(name, options):
    env = envs.make(name, **options)
    walks = [trajectory(env, task, 0, "random", 0.25, 4, RENDERING, 0) for task in env.task_ids("test")[:30]]
    points = [point for walk in walks for point in played(walk)]
    assert len(points) > 10
    for point in points:
        copy = Point(**json.loads(json.dumps(vars(point))))
        assert copy == point and copy.restore(env.fork()).messages[-1][1] == point.observation
        assert len(set(point.candidates)) == len(point.candidates) <= 4
    with pytest.raises(UserError, match="another state"):
        Point(**{**vars(points[0]), "hash": "0" * 16}).restore(env)


def test_returns_by_hand():
    point = Point("val0", (), tuple(ACTIONS), 0, "", digest(root(FakeEnv()).messages[-1][1]))
    # After "left": right, then left (0.5) or right (0.2), two steps later; after "right": left, 0.4 one step later.
    script = Script({("left",): "right", ("left", "right"): "left right", ("right",): "left"})
    keys = []

    def policy(request):
        keys.append(request.key)
        return script(request)

    def returns(i, **limit):
        labels = (label(FakeEnv(**limit), point, i, k, "policy", 0.9, RENDERING) for k in range(4))
        return [played(one, policy) for one in labels]

    assert returns(0) == pytest.approx([0.405, 0.162] * 2) and returns(1) == pytest.approx([0.36] * 4)
    assert len(set(keys)) == len(keys) == 12  # each with random numbers of its own
    assert returns(0, max_steps=1) == [0.0] * 4


def test_alignment_by_hand():
    of = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 1.0], [0.4, 0.0], [0.5, 0.5]]
    scores = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.5, 0.5], [0.9, 0.8], [0.9, 0.1]]
    a = metrics.alignment(series(scores, "aabbb"), series(of, "aabbb"))
    assert (a["states"], a["coverage"]) == (4, 1.0)
    assert a[RHO].mean == pytest.approx(((1 - 1) / 2 + (0 + 1) / 2) / 2) and a[RHO].n == 2  # of blocks
    assert a["top-1"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)  # a tie is split
    assert a["gain"] == pytest.approx((1 - 1 + 0 + 0.2) / (1 + 1 + 0.5 + 0.2))
    assert metrics.alignment(series(of), series(of))["centred"] == pytest.approx(1)
    # Failures are counted, ranked last and left out of a comparison.
    of, scores = [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0]], [[None, 1.0, 2.0], [None, 1.0], [None, None]]
    a = metrics.alignment(series(scores), series(of))
    assert (a["states"], a["coverage"]) == (1, 3 / 7)  # the others have one score or none
    assert a[RHO].mean == 1 and a["failures last"] == pytest.approx((1 + 1 + 0) / 3)
    assert a["top-1"] == pytest.approx((1 + 1 + 0.5) / 3)  # no score at all: a blind choice
    labels, rival = series([[0.0, 0.3, 0.6, 1.0]] * 6), series([[0.9, 0.2, 0.4, 0.6]] * 6)  # wrong about the first
    assert metrics.difference(series([[None, 0.2, 0.4, 0.6]] * 6), rival, labels).mean() == 0


def test_ceilings():
    assert metrics.permutation_ceiling(series([[0.0, 0.0, 1.0]])) == pytest.approx(math.sqrt(3) / 2)
    rng = np.random.default_rng(1)
    truth = series(rng.normal(size=(400, 4)).tolist())
    returns = pd.DataFrame(truth.to_numpy()[:, None] + rng.normal(size=(1600, 8)) * 2, truth.index)
    reached = metrics.per_state(truth, returns.mean(axis=1)).mean()
    assert reached < metrics.label_ceiling(returns) < reached + 0.08  # ranks of four lose more than the formula knows


@pytest.fixture
def context(tmp_path, agent):
    """The agent, and a tree of two branches: left, right, left for 0.5; right, left for 0.4."""
    policy = Script({(): "left right", ("left",): "right"})
    tree = played(explore(FakeEnv(), "train0", RENDERING, 0, 2, 2, False), policy)
    write_jsonl(tmp_path / "trees.jsonl", tree_records(FakeEnv(), "train0", tree))
    arguments = {"env": "frozenlake", "server": None, "gamma": 0.9, "seed": 0, "run": tmp_path, "sft": agent}
    context = Context(argparse.Namespace(**arguments))
    context.cache["sft"] = load_policy(agent)
    return context


def scored(name, context, actions=ACTIONS):
    env = FakeEnv()
    decision = Decision(env, root(env), actions, ("t", 0))
    values = played(entry(name, context).scores(context, decision))
    assert env.path == ()  # it stands where it stood
    return values


def test_what_scores_say(context):
    assert scored("oracle", context) == pytest.approx([0.5 * 0.81, 0.81])
    assert len(set(scored("state_value", context))) == 1 and scored("step_index", context) == [0.0, 0.0]
    logp = context.agent().logprobs([(root(FakeEnv()), a) for a in ACTIONS])
    assert scored("logprob", context) == pytest.approx(logp)
    assert scored("logprob_token", context) == pytest.approx([v / 5 for v in logp])
    shares = scored("vote_share", context, [react("", a) for a in ("left", "right", "fly")])
    assert sum(shares) == 1 and shares[2] == 0
    assert scored("self_distillation", context) != pytest.approx([0.0, 0.0])
    actions = [react("", action) for action in ("left", "right", "up")]
    # The root's actions are worth .405 and .36, the least of the tree; the most is .5. "up" occurs nowhere.
    assert scored("tree_bellman", context, actions) == [pytest.approx(0.045 / 0.14), 0, None]
    assert scored("tree_plain", context, actions) == [1, 0, None]  # the branches' rewards


def test_equal_scores_are_taken_at_random_and_missing_ones_last():
    assert search.decided([1.0, None, 2.0], ("t", 0)) == pytest.approx([1.0, -math.inf, 2.0])
    for scores in ([3.0, 3.0, 1.0], [None, None], [0.0, 0.0]):
        taken = set()
        for step in range(40):
            values = search.decided(scores, ("t", step))
            assert sum(v == max(values) for v in values) == 1
            taken.add(values.index(max(values)))
        assert taken == {0, 1}


LAKE = ["--env", "frozenlake", "--env-option", "map=random4", "--run"]


@pytest.fixture
def study(tmp_path):
    """Run a study of a few states of small lakes; the record of its report, by set of labels and score."""

    def run(*flags, points="5"):
        qval.main([*LAKE, str(tmp_path), "--actor", "random", "--points", points, *flags])
        return json.loads((tmp_path / "qval" / "alignment.json").read_text())["labels"]

    return run


def test_predictions_are_in_qvals_layout_and_of_these_points_alone(study, tmp_path):
    assert {"random", "code", "oracle"} <= set(study()["exact"])  # all that can be
    folder = tmp_path / "qval"
    record = json.loads((folder / "predictions" / "code.json").read_text())
    points = list(read_jsonl(folder / "points.jsonl"))
    values = record["metadata"]["candidate_values"]
    assert record["values"] == [row[point["taken"]] for row, point in zip(values, points, strict=True)]
    assert record["metadata"]["ranking_point_hashes"] == [point["hash"] for point in points]
    study("--overwrite", "--scorers", "random", points="6")
    assert {path.name for path in folder.glob("predictions/*")} == {"random.json", "random.json.meta.json"}


def test_a_study_of_a_small_lake(study, tmp_path, agent, monkeypatch, capsys):
    names, results = ["random", "step_index", "code", "logprob", "untried"], tmp_path / "results.jsonl"
    monkeypatch.setattr(FastPolicy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    search = ["search", *LAKE, str(tmp_path), "--sft", str(agent), "-M", "3", "--limit", "5", "--scorer"]
    qval.main([*search, *names])
    assert list(downstream.rewards(results, "frozenlake")) == names
    with pytest.raises(UserError, match="oracle_step"):  # who knows the true values steers no search
        qval.main([*search, "oracle"])
    flags = ["--trajectories", "3", "-K", "2", "--references", "exact", "policy", "--sft", str(agent)]
    labels = study(*flags, "--results", str(results), "--scorers", *names, "oracle", points="20")
    assert set(labels) == {"exact", "policy max", "policy mean"}
    assert [labels["exact"][name][RHO]["mean"] for name in ("oracle", "step_index")] == pytest.approx([1, 0])
    assert "| 4 scorers, 5 tasks |" in capsys.readouterr().out  # the step index is of the state alone


def test_td_and_mc_targets_by_hand():
    edges = [(None, 0, 0.0, 0), (0, 1, 0.0, 1), (1, 2, 1.0, 1), (1, 2, 0.0, 2), (0, 1, 0.2, 3)]
    tree = [{"node_id": i, "parent_id": parent, "depth": depth, "reward": reward, "branch": branch, "done": i > 1}
            for i, (parent, depth, reward, branch) in enumerate(edges)]  # fmt: skip
    assert targets.td(tree, 0.5) == pytest.approx([0.5 * (0.25 + 0.2) / 2, 0.5 * (1 + 0) / 2, 1, 0, 0.2])
    assert targets.mc(tree, 0.5)[1:] == [0.5, 1, 0, 0.2]  # the first branch made node 1
