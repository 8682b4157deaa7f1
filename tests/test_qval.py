"""QVAL: points that replay, labels by brute force, statistics by hand, scorers and judges by script."""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeEnv, Script, run, say, tiny_lm, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from json_server import json_server, started, stopped

import envs
import q_search
from experiments.qval import __main__ as qval
from experiments.qval import code, downstream, judges, labels, metrics, published, report, steering, targets
from experiments.qval.points import Point, distinct, trajectory
from experiments.qval.scorers import SCORERS, Call, Context, answer, available, embeddings, scorer
from qlass import UserError, driver
from qlass.chat import Rendering, State, parse_action, react
from qlass.cli import is_complete
from qlass.driver import Sample, Score, drive
from qlass.files import read_jsonl, read_meta, write_jsonl, write_meta
from qlass.policy import Policy
from qlass.stats import bootstrap, by_task, holm

RENDERING = Rendering()


def root(env, task="val0"):
    observation, info = env.reset(options={"task_id": task})
    return State.first(env, observation, info)


def answered(policy, score=None):
    """An answer to a request or to a list of them."""

    def reply(request):
        if isinstance(request, list):
            return answer(request) if isinstance(request[0], Call) else [reply(r) for r in request]
        if isinstance(request, Call):
            return answer([request])[0]
        return [score(a) for a in request.actions] if isinstance(request, Score) else policy(request)

    return reply


def walked(env, task, number=0, seed=0, **options):
    found, _ = run(trajectory(env, task, number, "random", 0.25, 4, RENDERING, seed, **options), answered(Script({})))
    return found


# --------------------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize("name, options", [
    ("frozenlake", {"map": "random8"}), ("frozenlake", {"map": "8x8", "slippery": True}), ("webshop", {}),
])  # fmt: skip
def test_replay_reproduces_every_hash(name, options):
    env, points = envs.make(name, **options), []
    for task in env.task_ids("test")[:30]:
        points += walked(env, task)
    assert len(points) > 10
    for point in points:
        copy = Point.load(json.loads(json.dumps(point.dump())))
        state = copy.restore(env.fork())
        assert copy == point and state.messages[-1][1] == point.observation
        assert len(set(point.candidates)) == len(point.candidates) <= 4
    stray = Point(**{**points[0].dump(), "hash": "0" * 16})
    with pytest.raises(UserError, match="another state"):
        stray.restore(env)


def test_what_the_actor_takes_is_its_first_draw_and_the_ends_are_dropped():
    world = {"left": {"left": {"left": {"left": {"left": 1.0, "right": 0.0}}}}, "right": 0.0}
    policy = Script({}, otherwise="left right")
    walk = trajectory(FakeEnv(world), "val0", 0, "agent", 0.0, 4, RENDERING, 0)
    points, _ = run(walk, answered(policy))
    assert [len(p.prefix) for p in points] == [1, 2]  # of five turns the first and the last two are left out
    for p in points:
        assert parse_action(p.candidates[p.taken]) == "left"
        assert {parse_action(a) for a in p.prefix} == {"left"}


def test_a_state_is_kept_once_and_no_more_than_wanted():
    env = envs.make("frozenlake", map="random8")
    task = env.task_ids("test")[0]
    lots = [walked(env, task, number) for number in range(40)]
    found = list(distinct(lots, 1000))
    assert 1 < len(found) == len({p.hash for p in found}) < sum(map(len, lots))
    assert len(list(distinct(lots, 3))) == 3


# --------------------------------------------------------------------------------------------------------------- labels


def brute(env, cell, action, left, gamma):
    """The expected return of the best play, by trying everything."""
    value = 0.0
    for probability, successor, reward, terminated in env.lake.P[cell][action]:
        value += probability * reward
        if not terminated and left > 1:
            value += probability * gamma * max(brute(env, successor, a, left - 1, gamma) for a in range(4))
    return value


@pytest.mark.parametrize("slippery", [False, True])
def test_exact_labels_are_value_iteration_within_the_steps_that_are_left(slippery):
    env = envs.make("frozenlake", map="4x4", slippery=slippery, max_steps=4)
    for task in env.task_ids("all"):
        env.reset(options={"task_id": task})
        here = env.snapshot()
        for i, move in enumerate(("left", "down", "right", "up")):
            assert labels.exact(env, move, 0.95) == pytest.approx(brute(env, env.cell, i, 4, 0.95))
        best = max(brute(env, env.cell, i, 3, 0.95) for i in range(4))
        assert labels.exact(env, "dance", 0.95) == pytest.approx(0.95 * best)
        assert env.snapshot()[:3] == here[:3]


@pytest.mark.parametrize("name, options", [("frozenlake", {"map": "4x4"}), ("webshop", {}), ("alfworld", {})])
def test_exact_labels_obey_bellman(name, options):
    """Q(s, a) = gamma max_a' Q(s', a') along the best way, whose last step pays its reward."""
    env = envs.make(name, **options)
    env.reset(options={"task_id": env.task_ids("test")[0]})
    done = False
    while not done:
        values = {action: labels.exact(env, action, 0.95) for action in env.valid_actions()}
        best = max(values, key=values.get)
        _, reward, terminated, truncated, _ = env.step(best)
        done = terminated or truncated
        after = reward if done else 0.95 * max(labels.exact(env, action, 0.95) for action in env.valid_actions())
        assert values[best] == pytest.approx(after)
    assert reward > 0


def rolled_out(policy, *arguments):
    """The returns of labels.rollouts, and its requests in the batches that they share."""
    batches = []

    def sample(requests):
        batches.append(requests)
        return [policy(request) for request in requests]

    (returns,) = drive([labels.rollouts(*arguments)], {Sample: sample})
    return returns, batches


def test_returns_by_hand():
    env, actions = FakeEnv(), [react("hm", a) for a in ("left", "right")]
    # After "left": right, then left (0.5) or right (0.2), two steps later; after "right": left, 0.4 one step later.
    policy = Script({("left",): "right", ("left", "right"): "left right", ("right",): "left"})
    returns, batches = rolled_out(policy, env, root(env), actions, 4, 0.9, ("t",), RENDERING)
    assert [sorted(some) for some in returns] == [pytest.approx(sorted([0.405, 0.162] * 2)), pytest.approx([0.36] * 4)]
    assert [len(batch) for batch in batches] == [8, 4]  # all side by side; those after "right" have ended
    assert len({r.key for batch in batches for r in batch}) == 12  # each with its own luck
    env = FakeEnv(max_steps=2)  # the step limit ends them
    returns, batches = rolled_out(Script({}, otherwise="nowhere"), env, root(env), ["left"], 2, 0.9, (), RENDERING)
    assert returns == [[0.0, 0.0]] and len(batches) == 1


def test_rollouts_on_slippery_ice_have_their_own_luck():
    env = envs.make("frozenlake", map="4x4", slippery=True)
    policy = Script({}, otherwise="right down")
    state = root(env, "slippery-4x4/32")
    (returns,), _ = run(labels.rollouts(env, state, ["right"], 200, 0.95, (), RENDERING), answered(policy))
    assert len(set(returns)) > 2
    root(env, "slippery-4x4/32")
    assert max(returns) > 1.2 * labels.exact(env, "right", 0.95)  # the luckiest beats what the best play can expect


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_the_maximum_of_more_rollouts_is_no_less(returns):
    best = [labels.values([[returns[:k]]], "max")[0][0] for k in range(1, len(returns) + 1)]
    assert best == sorted(best)


def test_on_slippery_ice_the_mean_tends_to_the_exact_value_and_the_maximum_above_it():
    env = envs.make("frozenlake", map="4x4", slippery=True, stray=0)
    (point, *_) = [p for task in env.task_ids("all") for p in walked(env, task)]
    line, _ = run(labels.label(env, point, "expert", 400, 0.9, RENDERING), answered(Script({})))
    assert set(labels.variants("expert", [line["returns"]])) == {"expert max", "expert mean"}
    point.restore(env)
    truth = [labels.exact(env, parse_action(a), 0.9) for a in point.candidates]
    (mean,), (best,) = labels.values([line["returns"]], "mean"), labels.values([line["returns"]], "max")
    assert mean == pytest.approx(truth, abs=0.05) and all(b > 2 * t for b, t in zip(best, truth, strict=True))


def test_the_expert_plays_on_from_any_state():
    env = envs.make("alfworld")
    env.reset(options={"task_id": env.task_ids("test")[0]})
    here = env.snapshot()
    for action in env.valid_actions()[:3]:
        planned, played = labels.exact(env, action, 0.95), labels.expert(env, env.task_id, action, 0.95)
        assert 0 <= played <= planned + 1e-9 and env.snapshot() == here
    with pytest.raises(UserError, match="no exact labels"):
        labels.known("alfworld", "exact")


# ----------------------------------------------------------------------------------------------------------- statistics

STATES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(max_examples=60)
@given(STATES)
def test_oracle_1_reversed_minus_1_constant_0(states):
    tasks, of = list(range(len(states))), [[float(v) for v in some] for some in states]
    found = {
        name: metrics.alignment(tasks, [0] * len(of), [[sign * v for v in some] for some in of], of)
        for name, sign in (("oracle", 1), ("reversed", -1), ("constant", 0))
    }
    n = sum(len(set(some)) > 1 for some in of)
    assert all(a.states == n and a.tied == len(of) - n for a in found.values())
    if n:
        assert [found[k].rho.mean for k in found] == pytest.approx([1, -1, 0])
        assert found["oracle"].gain == found["oracle"].top_1 == 1 and found["constant"].gain == pytest.approx(0)
        assert found["reversed"].top_1 == 0 and found["oracle"].centred == pytest.approx(1)
    else:
        assert math.isnan(found["oracle"].rho.mean)


@settings(max_examples=40)
@given(STATES, st.randoms())
def test_order_of_candidates_and_monotone_transforms_change_nothing(states, random):
    tasks, of = [i % 3 for i in range(len(states))], [[float(v) for v in some] for some in states]
    scores = [[float(random.randint(0, 4)) for _ in some] for some in of]
    orders = [random.sample(range(len(some)), len(some)) for some in of]

    def shuffled(values):
        return [[some[i] for i in order] for some, order in zip(values, orders, strict=True)]

    a = metrics.alignment(tasks, [0] * len(of), scores, of)
    b = metrics.alignment(tasks, [o.index(0) for o in orders], shuffled(scores), shuffled(of))
    c = metrics.alignment(tasks, [0] * len(of), [[math.exp(s) - 7 for s in some] for some in scores], of)
    for name in ("states", "failed_last", "coverage", "top_1", "gain", "overall", "tau", "actor"):
        assert getattr(b, name) == pytest.approx(getattr(a, name), nan_ok=True)
        assert getattr(c, name) == pytest.approx(getattr(a, name), nan_ok=True)
    assert b.rho.mean == pytest.approx(a.rho.mean, nan_ok=True) == pytest.approx(c.rho.mean, nan_ok=True)


def test_alignment_by_hand():
    of = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 1.0], [0.4, 0.0], [0.5, 0.5]]
    scores = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.5, 0.5], [0.9, 0.8], [0.9, 0.1]]
    a = metrics.alignment(["a", "a", "b", "b", "b"], [0] * 5, scores, of)
    assert (a.states, a.tied, a.coverage) == (4, 1, 1.0)
    assert a.rho.mean == pytest.approx(((1 - 1) / 2 + (0 + 1) / 2) / 2)
    assert a.top_1 == pytest.approx((1 + 0 + 0.5 + 1) / 4)  # a tie is split
    assert a.gain == pytest.approx((1 - 1 + 0 + 0.2) / (1 + 1 + 0.5 + 0.2))


def test_failures_are_counted_and_ranked_last():
    of, scores = [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0]], [[None, 1.0, 2.0], [None, 1.0], [None, None]]
    a = metrics.alignment(["a", "b", "c"], [0, 1, 0], scores, of)
    assert (a.states, a.coverage) == (1, 3 / 7)  # the others have one score or none
    assert a.rho.mean == 1 and a.failed_last == pytest.approx((1 + 1 + 0) / 3)
    assert a.top_1 == pytest.approx((1 + 1 + 0.5) / 3)  # no score at all: a blind choice


def test_a_score_of_the_state_alone_is_global_and_nothing_else():
    rng = np.random.default_rng(0)
    of = [[v + 0.01 * x for x in rng.random(4)] for v in range(40)]
    a = metrics.alignment(range(40), [0] * 40, [[float(v)] * 4 for v in range(40)], of)
    assert a.overall > 0.95 and a.actor > 0.99 and a.rho.mean == 0 and a.gain == pytest.approx(0)


def test_ceilings():
    assert metrics.permutation_ceiling(["a"], [[0.0, 0.0, 1.0]]) == pytest.approx(math.sqrt(3) / 2)
    assert metrics.permutation_ceiling(["a"], [[0.0, 0.5, 1.0]]) == pytest.approx(1)
    for untold in ([[0.1] * 4, [0.3] * 4], [[0.1, 0.2] * 4, [0.2, 0.1] * 4]):  # few returns; ties
        assert math.isnan(metrics.label_ceiling(["a"], [untold], "mean"))
    contradicting = [[0.1, 0.4] * 4, [0.3, 0.1] * 4]
    assert metrics.label_ceiling(["a"], [contradicting], "mean") == 0
    assert math.isnan(metrics.label_ceiling(["a"], [contradicting], "max"))  # no sum of its halves
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(400, 4))
    returns = (truth[..., None] + rng.normal(size=(400, 4, 8)) * 2).tolist()
    reached = metrics.mean_of(metrics.per_state(range(400), truth.tolist(), np.mean(returns, -1).tolist()))
    ceiling = metrics.label_ceiling(range(400), returns, "mean")
    assert reached < ceiling < reached + 0.08  # ranks of four candidates lose a little more than the formula knows


def test_holm_and_sign_flips():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert metrics.sign_flip([1.0] * 3) == pytest.approx(2 / 8, abs=0.02)  # all signs alike: two of eight
    assert metrics.sign_flip([0.0, 0.0]) == 1 and metrics.sign_flip([0.1] * 20) < 0.001


def test_the_clustered_bootstrap_covers_the_truth():
    rng, covered, plain = np.random.default_rng(2), 0, 0
    for _ in range(200):
        effects = rng.normal(0.3, 0.4, size=30)  # of tasks; three states each
        rows = {(t, i): effects[t] + rng.normal(0, 0.2) for t, i in itertools.product(range(30), range(3))}
        for name, values in (("tasks", by_task(rows).values()), ("states", rows.values())):
            e = bootstrap(values, resamples=400)
            covered += name == "tasks" and e.low <= 0.3 <= e.high
            plain += name == "states" and e.low <= 0.3 <= e.high
    assert 0.89 <= covered / 200 <= 0.99 and plain / 200 < 0.85  # states of one task are no independent draws


# ---------------------------------------------------------------------------------------------------------------- files


def read(folder, points):
    return report.read_predictions(folder, points, lambda name: {})


def test_predictions_in_qvals_layout_and_back(tmp_path):
    points = [Point(f"t{i}", (), ("Action: a", "Action: b", "Action: c"), i, "o", f"{i:016x}") for i in range(2)]
    values = [[0.5, None, 0.7], [1.0, 1.0, 0.0]]
    report.write_prediction(tmp_path, "mine", points, values, {"family": "code"})
    assert read(tmp_path, points) == ({"mine": values}, {"mine": "code"}, [])
    single, ranking = (json.loads((tmp_path / f"mine{end}.json").read_text()) for end in ("", "_ranking"))
    assert single["values"] == [0.5, 1.0] and single["method_type"] == "eval"  # the actions taken: 0, then 1
    assert ranking["values"] == [2.0, None, 1.0, 1.5, 1.5, 3.0]
    assert ranking["config"]["candidate_counts"] == [3, 3]
    (tmp_path / "mine.json").unlink()
    found, *_ = read(tmp_path, points)
    assert found == {"mine": [[-2.0, None, -1.0], [-1.5, -1.5, -3.0]]}
    del single["metadata"]  # a file with one value a point
    (tmp_path / "theirs.json").write_text(json.dumps(single | {"method_name": "theirs"}))
    assert read(tmp_path, points)[0]["theirs"] == [[0.5, None, None], [None, 1.0, None]]
    with pytest.raises(UserError, match="other points"):
        read(tmp_path, points[:1])
    (tmp_path / "zzz.json").write_text((tmp_path / "theirs.json").read_text())
    with pytest.raises(UserError, match="two files are predictions of 'theirs'"):
        read(tmp_path, points)
    (tmp_path / "zzz.json").write_text(json.dumps(single | {"method_name": "zzz", "config": {"family": "zzz"}}))
    assert read(tmp_path, points)[1]["zzz"] == "judge"
    for damage in ("{", "[]", "{}", '{"method_name": "zzz", "values": ["x"]}', '{"method_name": 1, "values": []}'):
        (tmp_path / "zzz.json").write_text(damage)
        with pytest.raises(UserError, match=r"zzz\.json"):
            read(tmp_path, points)


def test_a_wrong_flag_deletes_nothing(tmp_path):
    (tmp_path / "qval").mkdir()
    (tmp_path / "qval/points.jsonl").write_text("{}")
    with pytest.raises(UserError, match="nosuch"):
        qval.main(["--env", "frozenlake", "--run", str(tmp_path), "--references", "exact", "--actor", "expert",
                   "--overwrite", "--split", "nosuch"])  # fmt: skip
    assert (tmp_path / "qval/points.jsonl").exists()


@pytest.mark.parametrize("stem", ["code", "qnet_like", "ranking"])
def test_a_score_from_a_file_is_not_called_as_another(stem, tmp_path):
    with pytest.raises(UserError, match=f"{stem} is a score's name"):
        qval.main(["--env", "frozenlake", "--run", str(tmp_path), "--code", str(tmp_path / f"{stem}.py")])


# -------------------------------------------------------------------------------------------------------------- scorers


def played(name, context, env, state, candidates, policy=None):
    found, _ = run(scorer(name, context)(env, state, candidates, ("t", 0)), answered(policy))
    return found


def test_controls_and_what_they_know(tmp_path):
    env, context = FakeEnv(), Context("fake", tmp_path, gamma=0.9)
    state, actions = root(env), [react("hm", a) for a in ("left", "right")]
    assert played("oracle", context, env, state, actions) == pytest.approx([0.5 * 0.81, 0.81])
    assert len(set(played("state_value", context, env, state, actions))) == 1
    assert played("step_index", context, env, state, actions) == [0.0, 0.0]
    random = played("random", context, env, state, actions)
    assert played("random", context, env, state, actions[::-1]) == random[::-1] and random[0] != random[1]
    assert env.path == ()
    with pytest.raises(UserError, match="unknown scorer"):
        scorer("wisdom", context)


def test_calls_of_one_function_share_a_batch():
    batches = []

    def double(items):
        batches.append(items)
        return [2 * i for i in items]

    assert answer([Call(double, 1), Call(sum_of, (1, 2)), Call(double, 3)]) == [2, 3, 6]
    assert batches == [[1, 3]]


def sum_of(items):
    return [sum(item) for item in items]


def test_handwritten_code_knows_holes_edges_and_the_goal():
    env = envs.make("frozenlake", map="8x8")
    state = root(env, "8x8/75")  # bottom row: right of it ice, then the goal at 77; the edge below
    values = {move: code.lake(state, f"Action: {move}") for move in ("left", "down", "right", "up")}
    assert values == {"left": -3, "down": -2, "right": -1, "up": -3}
    env = envs.make("frozenlake", map="random8")
    agree = []
    for task in env.task_ids("test")[:20]:
        state = root(env, task)
        truth = [env.q_star_of(move) for move in ("left", "down", "right", "up")]
        agree.append(metrics.rho([code.lake(state, move) for move in ("left", "down", "right", "up")], truth))
    assert np.mean(agree) > 0.6
    assert code.overlap(State((), "a red cotton shirt"), "Action: click[red]") > code.overlap(
        State((), "a red shirt"), "Action: click[blue]"
    )


def test_what_was_tried_where_the_same_was_seen_comes_last():
    turns = [("user", "told"), ("assistant", "OK"), ("user", "a hall"), ("assistant", react("hm", "open door"))]
    state = State((*turns, ("user", "It is locked."), ("assistant", react("", "look")), ("user", "a hall")))
    assert [code.untried(state, react("so", action)) for action in ("open door", "look", "go on")] == [-1, 0, 0]
    again = state.then(react("", "open door"), "a hall")
    assert code.untried(again, react("", "open door")) == -2


def test_handwritten_code_for_the_household():
    env, right = envs.make("alfworld"), []
    for task in env.task_ids("test")[:6]:
        state = root(env, task)
        for thought, action in env.oracle(task):
            actions = env.valid_actions()
            scores = [code.household(state, react("", a)) for a in actions]
            right.append(code.household(state, react("", action)) >= np.quantile(scores, 0.6))
            observation, _, done, _, _ = env.step(action)
            state = state.then(react(thought, action), env.message(observation))
            if done:
                break
    assert np.mean(right) > 0.7


def test_a_score_steers_the_search(context, monkeypatch):
    flags = argparse.Namespace(env="frozenlake", run=context.run, sft=context.sft, seed=0, device=None, scorer=None)
    flags.server, flags.qnet, flags.plain = None, None, False
    answers, loaded = {}, []

    def load(folder: Path, given: argparse.Namespace) -> argparse.Namespace:
        loaded.append((folder, given))
        return argparse.Namespace(score=lambda requests: [[1.0, 2.0] for _ in requests])

    monkeypatch.setattr("experiments.qval.scorers.load_qnet", load)
    found, made_of = steering.steering(flags, answers, lambda: context.policy)
    assert context.run / "trees.jsonl" in made_of
    assert {"random", "code", "logprob", "tree_bellman", "neighbours"} <= set(found)
    assert not {"oracle", "state_value", "step_index"} & set(found)
    assert found["self_distillation"].steps_all and not found["logprob"].steps_all
    env = FakeEnv()
    state, actions = root(env), [react("hm", a) for a in ("left", "right")]
    scores, _ = run(found["logprob"].scores(env, state, actions, ("t", 0)), answered(None))
    assert scores == pytest.approx(context.policy.logprobs([(state, a) for a in actions]))
    flags.scorer = ["qnet"]
    (context.run / "qnet").mkdir(exist_ok=True)
    by_qnet, made_of = steering.steering(flags, answers, lambda: context.policy)
    assert made_of == [context.run / "qnet"]
    by_qnet = by_qnet["qnet"]
    assert run(by_qnet.scores(env, state, actions, ("t", 0)), answered(None))[0] == pytest.approx([1, 2])
    assert loaded == [(context.run / "qnet", flags)]  # as the search loads its own
    flags.qnet = context.run / "qnet-other"
    with pytest.raises(UserError, match="--qnet"):
        steering.steering(flags, answers, None)
    flags.qnet = None
    flags.scorer = ["oracle"]
    with pytest.raises(UserError, match="oracle_step"):
        steering.steering(flags, answers, None)
    flags.scorer, flags.server = ["vote_share", "logprob"], ["http://localhost/v1"]
    with pytest.raises(UserError, match="scorer logprob: --server"):
        steering.steering(flags, answers, None)
    flags.server = None
    monkeypatch.setattr(judges, "load", lambda name, *_: Fake(says=lambda q: "1: 4\n2: 9") if name == "a#b" else None)
    flags.scorer = ["batched=a#b"]
    judge = steering.steering(flags, answers, lambda: context.policy)[0]["batched=small"]
    assert run(judge.scores(env, state, actions, ("t", 0)), lambda call: answers[Call]([call])[0])[0] == pytest.approx(
        [4, 9]
    )


def test_equal_scores_are_taken_at_random_and_missing_ones_last():
    assert steering.decided([1.0, None, 2.0], ("t", 0)) == pytest.approx([1.0, -math.inf, 2.0])
    for scores in ([3.0, 3.0, 1.0], [None, None], [0.0, 0.0]):
        taken = set()
        for step in range(40):
            known = steering.decided(scores, ("t", step))
            assert sum(v == max(known) for v in known) == 1
            taken.add(known.index(max(known)))
        assert taken == {0, 1}


def test_anyones_signal_function(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    env, context = FakeEnv(), Context("fake", tmp_path, code=(file,))
    state, actions = root(env), ["Action: left", "Action: right"]
    for parameters, body, expected in (
        ("state, action, next_state", "len(next_state) - len(state)", [41, 44]),
        ("state, action", "len(action)", [4, 5]),
        ("next_state", "'right' in next_state.split()[-1]", [0, 1]),
        ("state, action", "1 / (action == 'left')", [1, None]),
        ("state, action", "float('nan' if action == 'left' else '-inf')", [None, None]),
    ):
        file.write_text(f"def signal_function({parameters}):\n    return {body}\n")
        got = played("mine", context, env, state, actions)
        if parameters.startswith("state, action, n"):
            assert got[1] - got[0] == 2 * len("right") - 2 * len("left")  # the action and the place
        else:
            assert got == expected
    file.write_text("def signal_function(state, action):\n    while True:\n        pass\n")
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    endless = scorer("mine", context)(env, state, actions, ("t", 0))
    with pytest.raises(UserError, match=r"no answer for 0.2 s"):
        next(drive([endless], {}))
    file.write_text("x = 1")
    with pytest.raises(UserError, match="no signal_function"):
        scorer("mine", context)


@pytest.fixture
def context(tmp_path, agent):
    tree = [
        {"task_id": "t", "node_id": 0, "parent_id": None, "action": None, "observation": "", "reward": 0.0, "nodes": 3,
         "done": False, "branch": 0, "messages": root(FakeEnv()).dump(), "task": "find the purse"},
        {"task_id": "t", "node_id": 1, "parent_id": 0, "action": "Action: left", "observation": "here",
         "reward": 0.0, "done": False, "branch": 1},
        {"task_id": "t", "node_id": 2, "parent_id": 1, "action": "Action: right", "observation": "", "reward": 0.5,
         "done": True, "branch": 1},
    ]  # fmt: skip
    (tmp_path / "trees.jsonl").write_text("".join(json.dumps(node) + "\n" for node in tree))
    return Context("frozenlake", tmp_path, sft=agent, base=agent, gamma=0.9)


def test_the_policys_scores(context):
    env = FakeEnv()
    state, actions = root(env), [react("hm", a) for a in ("left", "right")]
    logp = context.policy.logprobs([(state, a) for a in actions])
    assert played("logprob", context, env, state, actions) == pytest.approx(logp)
    assert played("logprob_token", context, env, state, actions) == pytest.approx([v / 5 for v in logp])
    assert played("log_ratio", context, env, state, actions) == pytest.approx([0.0, 0.0])  # the base is the policy
    p = np.exp(logp) / np.exp(logp).sum()
    assert played("confidence", context, env, state, actions) == pytest.approx([p @ np.log(p)] * 2)
    assert played("self_certainty", context, env, state, actions) == pytest.approx([-np.log(p).mean() - np.log(2)] * 2)
    shares = played("vote_share", context, env, state, [react("", a) for a in ("left", "right", "fly")])
    assert sum(shares) == 1 and shares[2] == 0
    assert played("self_distillation", context, env, state, actions) != pytest.approx([0.0, 0.0])


def test_trees_and_neighbours(context):
    env = FakeEnv()
    state, actions = root(env), ["Action: left", "Action: right"]
    # 0.45 after "left", between the root's 0.405 and the leaf's 0.5; nothing known of "right" is no score.
    assert played("tree_bellman", context, env, state, actions) == [pytest.approx(0.045 / 0.095), None]
    assert played("tree_plain", context, env, state, actions) == [0, None]  # of one branch there is nothing to compare
    near = played("neighbours", context, env, state, actions)
    assert all(0 <= q <= 1 for q in near)
    vectors = embeddings(context.policy, [(state, a) for a in actions] + [(state, "")])
    alone = [embeddings(context.policy, [(state, a)])[0] for a in (*actions, "")]
    assert np.allclose(vectors, alone, atol=1e-5)  # padding changes nothing
    assert all(-1.001 <= v <= 1.001 for v in played("task_cosine", context, env, state, actions))


def test_a_plain_score_is_the_reward_of_the_branch_that_came_first(context, tmp_path):
    tree = list(read_jsonl(tmp_path / "trees.jsonl"))
    tree.append(tree[2] | {"node_id": 3, "action": "Action: left", "reward": 0.1, "branch": 2})
    tree[0]["nodes"] = 4
    (tmp_path / "trees.jsonl").write_text("".join(json.dumps(node) + "\n" for node in tree))
    assert played("tree_plain", context, FakeEnv(), root(FakeEnv()), ["Action: left"]) == [pytest.approx(1)]


def test_a_learned_value_before_and_after(context, monkeypatch):
    class Net:
        def score(self, requests):
            return [[float("right" in a) + 0.1 * len(r.state.messages) for a in r.actions] for r in requests]

    context.nets["qnet"] = Net()
    env = FakeEnv({"left": 0.7, "right": {"left": {"left": 0.0}, "right": 1.0}})
    state, actions = root(env), [react("hm", a) for a in ("left", "right")]
    assert played("qnet", context, env, state, actions) == pytest.approx([0.3, 1.3])
    # "left" ends the episode: its own Q, not its reward of .7.
    assert played("value_gain", context, env, state, actions) == pytest.approx([0.3 - 1.3, 1.5 - 1.3])
    assert "value_gain" not in available(context) and "oracle" in available(context)


# --------------------------------------------------------------------------------------------------------------- judges


class Fake:
    """A judge by script: what it writes to a prompt, and the log-probabilities that it gives to options."""

    def __init__(self, says=None, logp=None, name="small"):
        self.says, self.logp, self.name, self.asked = says, logp, name, []

    def write(self, questions):
        self.asked += questions
        return [self.says(q) for q in questions]

    def choose(self, items):
        self.asked += [q for q, _ in items]
        return [self.logp(q, options) for q, options in items]


def judged(name, tmp_path, env=None, actions=("left", "right"), **script):
    env = env or FakeEnv()
    judge = Fake(**script)
    context = Context("fake", tmp_path, judge=judge)
    return played(name, context, env, root(env), [react("hm", a) for a in actions]), judge


def last(question):
    return question.messages[-1][1]


def test_direct_judges(tmp_path):
    says = lambda q: "I doubt it.\nScore: 20" if "Action: left" in last(q) else "good. Score: 80 or so"  # noqa: E731
    assert judged("direct", tmp_path, says=says)[0] == [20, 80]
    assert judged("direct", tmp_path, says=lambda q: "no idea")[0] == [None, None]
    for said, read in (("Score: -5", -5), ("**Score:** -0.5.", -0.5), ("Score - 5", 5), ("**Score**: 40", 40)):
        assert judged("direct", tmp_path, says=lambda q, said=said: said)[0] == [read, read]
    replies = itertools.cycle(["Score: 10", "Score: 30", "??", "Score: 20"])
    values, judge = judged("direct_16", tmp_path, says=lambda q: next(replies))
    assert values == [20, 20] and len({q.key for q in judge.asked[:16]}) == 16 and judge.asked[0].temperature > 0
    values, judge = judged("batched", tmp_path, says=lambda q: "1: 30\n3: 9\n2. nothing")
    assert values == [30, None] and len(judge.asked) == 1
    for said, read in (("1: -20\n2: 5", [-20, 5]), ("**1**) **-1.5**\n2 = `8`", [-1.5, 8]), ("1:\n2: 20", [None, 20])):
        assert judged("batched", tmp_path, says=lambda q, said=said: said)[0] == read
    values, judge = judged("sequential", tmp_path, says=lambda q: f"Score: {len(q.messages)}")
    assert values == [1, 3]  # the second sees the first one's answer


def test_ranking_needs_a_permutation(tmp_path):
    assert judged("ranking", tmp_path, says=lambda q: "Ranking: 2, 1")[0] == [-1, 0]
    for text in ("Ranking: 2", "Ranking: 2 2", "the second"):
        assert judged("ranking", tmp_path, says=lambda q, text=text: text)[0] == [None, None]
    _, judge = judged("ranking", tmp_path, says=lambda q: "Ranking: 1 > 2")
    assert "you stand at start left" in last(judge.asked[0])  # next states are shown


def test_judges_by_log_probability(tmp_path):
    def logp(question, options):
        top = 19 if "Action: right" in last(question) else 0
        return [0.0 if i == top else -math.inf for i in range(len(options))]

    assert judged("verifier", tmp_path, logp=logp)[0] == [0, 19]
    assert judged("verifier", tmp_path, logp=lambda q, o: None)[0] == [None, None]

    def yes(question, options):
        p = 0.9 if "start right" in last(question) else 0.5
        return [math.log(p), math.log(1 - p)]

    assert judged("delta_belief", tmp_path, logp=yes)[0] == pytest.approx([0, math.log(0.9 / 0.5)])


def test_gvl_finds_the_state_in_the_shuffle(tmp_path):
    env = FakeEnv()

    def says(question):
        lines = [line for line in last(question).splitlines() if line[:1].isdigit()]
        return "\n".join(f"{line.split('.')[0]}: {50 if line.endswith('right') else 5}" for line in lines)

    assert judged("gvl", tmp_path, env, says=says)[0] == [5, 50]


def test_generated_code(tmp_path):
    good = "```python\ndef signal_function(state, action, next_state):\n    return len(action)\n```"
    assert judged("codegen", tmp_path, says=lambda q: good)[0] == [4, 5]
    assert judged("codegen", tmp_path, says=lambda q: "```python\nimport nothing_of_this_name\n```")[0] == [None, None]
    sources = itertools.cycle([good, good.replace("len(action)", "1 / 0"), "no code"])
    assert judged("codegen_16", tmp_path, says=lambda q: next(sources))[0] == [4, 5]
    values, judge = judged("eureka", tmp_path, says=lambda q: "Best: 2" if "judges them best" in last(q) else good)
    assert values == [4, 5] and sum("Improve on this one" in last(q) for q in judge.asked) == 15 * 8


def test_a_chat_server_and_a_checkpoint_answer_alike(tmp_path, monkeypatch):
    bodies = []

    top = [{"token": word, "logprob": logp} for word, logp in ((" Yes", -0.1), ("Yes", -3.0), ("No", -2.4))]
    choice = {"message": {"content": "Score: 7"}, "logprobs": {"content": [{"top_logprobs": top}]}}

    def reply(body):
        bodies.append(body)
        return 200, {"choices": [choice]}

    server = started(json_server(reply, ("small",)))
    judge = judges.load(server.url, None, 0)
    assert judge.name == "small"  # by what the server has
    question = judges.user("how good?", key=("a",))
    assert judge.write([question, question]) == ["Score: 7"] * 2
    assert judge.choose([(question, ("Yes", "No", "Maybe"))]) == [[-0.1, -2.4, -math.inf]]
    assert bodies[0]["model"] == "small" and bodies[0]["seed"] == bodies[1]["seed"] and bodies[-1]["top_logprobs"] == 20
    env = FakeEnv()
    context = Context("fake", tmp_path, judge=judge)
    assert played("direct", context, env, root(env), ["Action: left"]) == [7]
    stopped(server)

    chat = word_chat(max_new_tokens=3)
    judges.Checkpoint(Policy(tiny_lm(chat), chat))
    assert chat.rendering.max_new_tokens == bodies[0]["max_tokens"] == 2048  # not its own: that is an action's
    chat.context = 64
    local = judges.Checkpoint(Policy(tiny_lm(chat), chat))
    assert chat.rendering.max_new_tokens == 32  # the prompt needs room too
    assert len(local.write([question])) == 1
    (logp,) = local.choose([(question, ("left", "right"))])
    assert len(logp) == 2 and all(v < 0 for v in logp)


def test_a_server_with_a_real_model_judges_as_the_checkpoint_does(tmp_path, monkeypatch):
    monkeypatch.setattr(judges, "ROOM", 6)  # as the server's own
    chat = word_chat(max_new_tokens=6, temperature=1.0)
    tiny_lm(chat).save_pretrained(tmp_path / "model")
    chat.save(tmp_path / "model")
    here = judges.load(str(tmp_path / "model"), None, 0)
    assert re.fullmatch(r"model-[0-9a-f]{8}", here.name)
    command = [sys.executable, str(Path(__file__).with_name("chat_server.py")), str(tmp_path / "model")]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as served:
        try:
            there = judges.load(f"http://127.0.0.1:{int(served.stdout.readline())}/v1", None, 0)
            questions = [judges.user(f"walk {word}", key=(word,)) for word in ("left", "right", "this way")]
            assert there.write(questions) == here.write(questions)
            options = ("left", "right", "purse", "Yes")
            (logp,) = there.choose([(questions[0], options)])
            prompt = torch.tensor([here.policy.chat.prompt(State(questions[0].messages))])
            with torch.inference_mode():
                first = here.policy.model(input_ids=prompt).logits[0, -1].log_softmax(-1)
            known = [float(first[chat.tokenizer.convert_tokens_to_ids(word)]) for word in options[:3]]
            top = first.topk(20).values[-1]  # servers name the 20 likeliest
            assert logp == pytest.approx([v if v >= top else -math.inf for v in known] + [-math.inf], abs=1e-4)
            env, context = FakeEnv(), Context("fake", tmp_path, judge=there)
            actions = [react("hm", a) for a in ("left", "right")]
            assert played("direct", context, env, root(env), actions) == [None, None]  # it knows no numbers
        finally:
            served.terminate()


# ---------------------------------------------------------------------------------------------------------------- whole


def test_the_whole_on_a_small_lake(tmp_path, agent, monkeypatch, capsys):
    torch.manual_seed(0)
    flags = ["--env", "frozenlake", "--env-option", "map=random4", "--run", str(tmp_path), "--sft", str(agent),
             "--actor", "random", "--trajectories", "3", "--points", "30", "--references", "exact", "expert", "policy",
             "-K", "2",
             "--scorers", "random", "step_index", "oracle", "code", "logprob", "logprob_token"]  # fmt: skip
    monkeypatch.setattr(Policy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    searched = ["--method", "scorer", "--scorer", "random", "step_index", "code", "logprob", "task_cosine"]
    q_search.main([*flags[:8], *searched, "-M", "3", "--limit", "5"])
    results = tmp_path / "results.jsonl"
    assert list(downstream.rewards(results, "frozenlake")) == searched[3:]
    with pytest.raises(UserError, match="of frozenlake, not of webshop"):
        downstream.rewards(results, "webshop")
    flags += ["task_cosine", "--results", str(results)]
    qval.main(flags)
    shown = capsys.readouterr().out
    folder = tmp_path / "qval"
    record = json.loads((folder / "alignment.json").read_text())
    exact = record["labels"]["exact"]
    assert exact["oracle"]["rho"]["mean"] == pytest.approx(1) and exact["step_index"]["rho"]["mean"] == 0
    assert set(record["labels"]) == {"exact", "expert", "policy max", "policy mean"}
    assert "What rollouts buy" in shown and "Alignment against downstream" in shown
    assert (folder / "forest-exact.png").exists() and json.loads((folder / "labels" / "exact.json").read_text())[
        "method_type"
    ] == "gt"
    before = {path: path.read_bytes() for path in folder.rglob("*.json*") if "meta" not in path.name}
    qval.main(flags)  # what is there is kept
    assert {path: path.read_bytes() for path in before} == before
    path = folder / "predictions" / "logprob.json"
    record = json.loads(path.read_text())
    record["config"]["made_from"]["sft"] = "another agent"
    path.write_text(json.dumps(record | {"method_name": "stale"}))
    qval.main(flags)  # what was made from something else is made anew
    assert json.loads(path.read_text())["method_name"] == "logprob"
    with pytest.raises(UserError, match="--points 30, not 31"):
        qval.main([*flags, "--points", "31"])
    for name, field, broken in (("points", "prefix", None), ("labels-exact", "hash", None),
                                ("labels-exact", "returns", [[]]), ("labels-exact", "returns", [["x"]])):  # fmt: skip
        path = folder / f"{name}.jsonl"
        lines = list(read_jsonl(path))
        changed = {k: v for k, v in (lines[0] | {field: broken}).items() if v is not None}
        write_jsonl(path, [changed, *lines[1:]])
        with pytest.raises(UserError, match=f"{name}.jsonl: has lines that this script did not write"):
            qval.main(flags)
        write_jsonl(path, lines)


def summary(title, order):
    """Five scores, the per-state figure of which is their reward's rank; the global one is the reverse."""
    rows = {}
    for i, name in enumerate("abcde"):
        figures = dict.fromkeys(("failed_last", "top_1", "gain", "centred", "actor"), float(i))
        rho = {"mean": float(i), "low": 0.0, "high": 0.0, "n": 9}
        rows[name] = {"family": "code", "orders": True, "rho": rho, "overall": -float(i), **figures}
    rewards = {name: {f"t{t}": order.index(name) + t / 100 for t in range(6)} for name in order}
    return {"title": title, "labels": {"exact": rows}, "rewards": rewards}


def test_which_metric_predicts_the_reward(tmp_path, capsys):
    good, bad = (downstream.played(summary(order, order)) for order in ("abcde", "edcba"))
    one, other = downstream.correlations([good]), downstream.correlations([good, bad])
    assert (one["rho per state"].mean, one["global"].mean) == pytest.approx((1, -1))
    assert one["rho per state - global"].mean == pytest.approx(2) and one["rho per state"].low == pytest.approx(1)
    assert other["rho per state"].mean == pytest.approx(0) and other["top-1"].n == 5
    blind = summary("x", "abcde")
    blind["labels"]["exact"]["a"]["orders"] = False  # a score of the state alone chooses at random
    assert downstream.played(blind).names == list("bcde")
    blind["labels"]["exact"]["b"]["rho"]["mean"] = math.nan
    assert downstream.played(blind) is None
    folders = []
    for order in ("abcde", "bacde"):
        folders.append(str(tmp_path / order))
        (tmp_path / order).mkdir()
        (tmp_path / order / "alignment.json").write_text(json.dumps(summary(order, order)))
    downstream.main([*folders, "--out", str(tmp_path / "all.md")])
    assert "| rho per state | 1.000 [1.000, 1.000] | 0.900" in capsys.readouterr().out
    assert (tmp_path / "all.png").exists() and "5 scorers" in (tmp_path / "all.md").read_text()
    (tmp_path / "abcde" / "alignment.json").write_text(json.dumps(blind))
    with pytest.raises(UserError, match="--results"):
        downstream.main(folders)
    (tmp_path / "abcde" / "alignment.json").write_text('{"labels": ')
    with pytest.raises(UserError, match="not what experiments"):
        downstream.main(folders)


def test_td_and_mc_targets_by_hand():
    edges = [(None, 0, 0.0, 0), (0, 1, 0.0, 1), (1, 2, 1.0, 1), (1, 2, 0.0, 2), (0, 1, 0.2, 3)]
    tree = [{"node_id": i, "parent_id": parent, "depth": depth, "reward": reward, "branch": branch, "done": i > 1}
            for i, (parent, depth, reward, branch) in enumerate(edges)]  # fmt: skip
    assert targets.td(tree, 0.5) == pytest.approx([0.5 * (0.25 + 0.2) / 2, 0.5 * (1 + 0) / 2, 1, 0, 0.2])
    assert targets.mc(tree, 0.5)[1:] == [0.5, 1, 0, 0.2]  # the first branch made node 1


def test_td_and_mc_labels_are_written_as_carefully_as_bellmans(context):
    def write(*flags, out="q_labels-mc.jsonl", target="mc"):
        targets.main(["--run", str(context.run), "--target", target, "--out", str(context.run / out), *flags])

    write()
    labels = context.run / "q_labels-mc.jsonl"
    assert [node["q_raw"] for node in read_jsonl(labels)] == pytest.approx([0, 0.45, 0.5])
    assert is_complete(labels) and "seconds" in read_meta(labels)
    write()
    with pytest.raises(UserError, match="--target mc, not td"):
        write(target="td")
    with pytest.raises(UserError, match="out of range"):
        write("--gamma", "7")
    write_meta(context.run / "results.jsonl", argparse.Namespace(method="qlass"))
    for out in ("trees.jsonl", "results.jsonl"):
        with pytest.raises(UserError, match="not labels"):
            write(out=out)
    trees = context.run / "trees.jsonl"
    trees.write_text(trees.read_text().replace('"branch"', '"lot"'))
    with pytest.raises(UserError, match="no branch"):
        write("--overwrite")


def test_the_environment_is_stepped_where_the_count_says_so(context):
    """q_search.py counts a step for each candidate that a score has looked behind."""
    program = "```python\ndef signal_function(state, action, next_state):\n    return 1\n```"
    context.judge = Fake(says=lambda q: program, logp=lambda q, options: [0.0] * len(options))
    context.nets["qnet"] = argparse.Namespace(score=lambda requests: [[0.0] * len(r.actions) for r in requests])
    for name in [*available(context), "value_gain", *judges.JUDGES]:
        if name not in steering.KNOWING | {"code"}:
            env = FakeEnv()
            by = steering.following(name, context, lambda: context.policy)
            run(by.scores(env, root(env), [react("hm", a) for a in ("left", "right")], ("t", 0)), answered(None))
            assert bool(env.played) == by.steps_all, name


def test_every_named_scorer_has_a_family():
    assert {family for family, _ in SCORERS.values()} <= set(report.FAMILIES)


def test_published_files_are_read_with_their_failures(tmp_path, capsys):
    def write(name, values, **config):
        (tmp_path / name).write_text(json.dumps({"method_name": name, "values": values, "config": config}))
        return str(tmp_path / name)

    truth = write("gt.json", [float(v) for v in range(10)])
    half = write("half.json", [float(v) if v % 2 else None for v in range(10)])
    published.main([truth, half])
    row = capsys.readouterr().out.splitlines()[2].split(" | ")
    assert row[1:2] == ["0.500"] and row[2].startswith("1.000") and 0 < float(row[3].strip(" |")) < 0.7
    best = write("gt_ranking.json", [1.0, 2.0, 3.0, 2.0, 1.0], candidate_counts=[3, 2])
    wrong = write("ranking.json", [3.0, 2.0, 1.0, None, None], candidate_counts=[3, 2])
    published.main([best, wrong])
    assert "| 0.600 | -1.000 | -0.500 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="other points"):
        published.main([truth, best])
    for values, counts, says in ((["x"], [1], "values can't be"), ([1.0, 2.0], [1, 2], "2 candidates, where its")):
        with pytest.raises(UserError, match=says):
            published.main([best, write("bad.json", values, candidate_counts=counts)])
