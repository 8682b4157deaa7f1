"""QVAL: points that replay, labels by brute force, statistics by hand, scorers and judges by script."""

import argparse
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import FakeEnv, Script, run, say, tiny_lm, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from json_server import json_server, started, stopped

import envs
import q_search
from experiments.qval import __main__ as qval
from experiments.qval import code, downstream, judges, labels, metrics, published, report, search, targets
from experiments.qval.points import Point, distinct, trajectory
from experiments.qval.scorers import SCORERS, Call, Context, answer, available, embeddings, scorer
from qlass import UserError, driver
from qlass.chat import Rendering, State, parse_action, react
from qlass.cli import is_complete
from qlass.driver import Sample, drive
from qlass.files import read_jsonl, read_meta, write_jsonl
from qlass.policy import Policy

RENDERING = Rendering()


def series(values, blocks=(), taken=()):
    return metrics.series(values, metrics.index([len(state) for state in values], blocks, taken))


ACTIONS = [react("hm", action) for action in ("left", "right")]


def root(env, task="val0"):
    observation, info = env.reset(options={"task_id": task})
    return State.first(env, observation, info)


def answered(policy=None):
    """An answer to a request or to a list of them."""

    def reply(request):
        if isinstance(request, list):
            return answer(request) if isinstance(request[0], Call) else [reply(r) for r in request]
        return answer([request])[0] if isinstance(request, Call) else policy(request)

    return reply


def walked(env, task, number=0):
    walk = trajectory(env, task, number, "random", 0.25, 4, RENDERING, 0)
    return run(walk, answered())[0]


# --------------------------------------------------------------------------------------------------- points and labels


@pytest.mark.parametrize("name, options", [
    ("frozenlake", {"map": "random8"}), ("frozenlake", {"map": "8x8", "slippery": True}), ("webshop", {}),
])  # fmt: skip
def test_replay_reproduces_every_hash(name, options):
    env, points = envs.make(name, **options), []
    for task in env.task_ids("test")[:30]:
        points += walked(env, task)
    assert len(points) > 10
    for point in points:
        copy = Point.load(json.loads(json.dumps(vars(point))))
        state = copy.restore(env.fork())
        assert copy == point and state.messages[-1][1] == point.observation
        assert len(set(point.candidates)) == len(point.candidates) <= 4
    with pytest.raises(UserError, match="another state"):
        Point(**{**vars(points[0]), "hash": "0" * 16}).restore(env)


def test_what_the_actor_takes_is_its_first_draw_and_the_ends_are_dropped():
    world = {"left": {"left": {"left": {"left": {"left": 1.0, "right": 0.0}}}}, "right": 0.0}
    walk = trajectory(FakeEnv(world), "val0", 0, "agent", 0.0, 4, RENDERING, 0)
    points, _ = run(walk, answered(Script({}, otherwise="left right")))
    assert [len(p.prefix) for p in points] == [1, 2]  # of five turns the first and the last two are left out
    for p in points:
        assert parse_action(p.candidates[p.taken]) == "left"
        assert {parse_action(a) for a in p.prefix} == {"left"}


def test_a_state_is_kept_once_and_no_more_than_wanted():
    env = envs.make("frozenlake", map="random8")
    walks = [walked(env, env.task_ids("test")[0], number) for number in range(40)]
    points = list(distinct(walks, 1000))
    assert 1 < len(points) == len({p.hash for p in points}) < sum(map(len, walks))
    assert len(list(distinct(walks, 3))) == 3


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
        start = env.snapshot()
        for i, move in enumerate(("left", "down", "right", "up")):
            assert labels.exact(env, move, 0.95) == pytest.approx(brute(env, env.cell, i, 4, 0.95))
        best = max(brute(env, env.cell, i, 3, 0.95) for i in range(4))
        assert labels.exact(env, "dance", 0.95) == pytest.approx(0.95 * best)
        assert env.snapshot()[:3] == start[:3]


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
    env = FakeEnv()
    # After "left": right, then left (0.5) or right (0.2), two steps later; after "right": left, 0.4 one step later.
    policy = Script({("left",): "right", ("left", "right"): "left right", ("right",): "left"})
    returns, batches = rolled_out(policy, env, root(env), ACTIONS, 4, 0.9, ("t",), RENDERING)
    assert [sorted(row) for row in returns] == [pytest.approx(sorted([0.405, 0.162] * 2)), pytest.approx([0.36] * 4)]
    assert [len(batch) for batch in batches] == [8, 4]  # all side by side; those after "right" have ended
    assert len({r.key for batch in batches for r in batch}) == 12  # each with random numbers of its own
    env = FakeEnv(max_steps=2)  # the step limit ends them
    returns, batches = rolled_out(Script({}, otherwise="nowhere"), env, root(env), ["left"], 2, 0.9, (), RENDERING)
    assert returns == [[0.0, 0.0]] and len(batches) == 1


def test_on_slippery_ice_every_rollout_slips_its_own_way():
    env = envs.make("frozenlake", map="4x4", slippery=True, stray=0)
    policy = Script({}, otherwise="right down")
    state = root(env, "slippery-4x4/32")
    (returns,), _ = run(labels.rollouts(env, state, ["right"], 200, 0.95, (), RENDERING), answered(policy))
    assert len(set(returns)) > 2
    root(env, "slippery-4x4/32")
    assert max(returns) > 1.2 * labels.exact(env, "right", 0.95)  # the luckiest beats what the best play can expect
    # The mean of the expert's returns tends to the exact value, and their maximum above it.
    (point, *_) = [p for task in env.task_ids("all") for p in walked(env, task)]
    line, _ = run(labels.label(env, point, "expert", 400, 0.9, RENDERING), answered())
    values = labels.variants("expert", pd.DataFrame(line["returns"]))
    point.restore(env)
    truth = [labels.exact(env, parse_action(a), 0.9) for a in point.candidates]
    assert values["expert mean"].tolist() == pytest.approx(truth, abs=0.05)
    assert (values["expert max"] > 2 * np.array(truth)).all()


def test_the_expert_plays_on_from_any_state():
    env = envs.make("alfworld")
    env.reset(options={"task_id": env.task_ids("test")[0]})
    start = env.snapshot()
    for action in env.valid_actions()[:3]:
        planned, played = labels.exact(env, action, 0.95), labels.expert(env, env.task_id, action, 0.95)
        assert 0 <= played <= planned + 1e-9 and env.snapshot() == start
    with pytest.raises(UserError, match="no exact labels"):
        labels.check("alfworld", "exact")


# ----------------------------------------------------------------------------------------------------------- statistics

STATES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(max_examples=60)
@given(STATES)
def test_oracle_1_reversed_minus_1_constant_0(states):
    of = series(states)
    oracle, reverse, constant = (metrics.alignment(sign * of, of) for sign in (1, -1, 0))
    n = sum(len(set(state)) > 1 for state in states)
    assert all(a["states"] == n and a["tied"] == len(states) - n for a in (oracle, reverse, constant))
    if n:
        assert [a["rho"].mean for a in (oracle, reverse, constant)] == pytest.approx([1, -1, 0])
        assert oracle["gain"] == oracle["top_1"] == 1 and constant["gain"] == pytest.approx(0)
        assert reverse["top_1"] == 0 and oracle["centred"] == pytest.approx(1)
    else:
        assert math.isnan(oracle["rho"].mean)


@settings(max_examples=40)
@given(STATES, st.randoms())
def test_order_of_candidates_and_monotone_transforms_change_nothing(states, random):
    blocks = [str(i % 3) for i in range(len(states))]
    scores = [[random.randint(0, 4) for _ in state] for state in states]
    orders = [random.sample(range(len(state)), len(state)) for state in states]

    def aligned(*nested, taken, form=lambda score: score):
        scores, of = (series(values, blocks, taken) for values in nested)
        a = metrics.alignment(form(scores), of)
        figures = ("states", "failed_last", "coverage", "top_1", "gain", "overall", "tau", "actor")
        return pytest.approx([a["rho"].mean, *(a[name] for name in figures)], nan_ok=True)

    shuffled = ([[row[i] for i in order] for row, order in zip(v, orders, strict=True)] for v in (scores, states))
    first = aligned(scores, states, taken=[0] * len(states))
    assert aligned(*shuffled, taken=[order.index(0) for order in orders]).expected == first
    assert aligned(scores, states, taken=[0] * len(states), form=lambda s: np.exp(s) - 7).expected == first


def test_alignment_by_hand():
    of = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 1.0], [0.4, 0.0], [0.5, 0.5]]
    scores = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.5, 0.5], [0.9, 0.8], [0.9, 0.1]]
    a = metrics.alignment(series(scores, "aabbb"), series(of, "aabbb"))
    assert (a["states"], a["tied"], a["coverage"]) == (4, 1, 1.0)
    assert a["rho"].mean == pytest.approx(((1 - 1) / 2 + (0 + 1) / 2) / 2)
    assert a["top_1"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)  # a tie is split
    assert a["gain"] == pytest.approx((1 - 1 + 0 + 0.2) / (1 + 1 + 0.5 + 0.2))


def test_failures_are_counted_and_ranked_last():
    of, scores = [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0]], [[None, 1.0, 2.0], [None, 1.0], [None, None]]
    a = metrics.alignment(series(scores), series(of))
    assert (a["states"], a["coverage"]) == (1, 3 / 7)  # the others have one score or none
    assert a["rho"].mean == 1 and a["failed_last"] == pytest.approx((1 + 1 + 0) / 3)
    assert a["top_1"] == pytest.approx((1 + 1 + 0.5) / 3)  # no score at all: a blind choice


def test_a_score_of_the_state_alone_is_global_and_nothing_else():
    rng = np.random.default_rng(0)
    of = series([[v + 0.01 * x for x in rng.random(4)] for v in range(40)], taken=[0] * 40)
    a = metrics.alignment(series([[v] * 4 for v in range(40)], taken=[0] * 40), of)
    assert a["overall"] > 0.95 and a["actor"] > 0.99 and a["rho"].mean == 0 and a["gain"] == pytest.approx(0)


def test_ceilings():
    assert metrics.permutation_ceiling(series([[0.0, 0.0, 1.0]])) == pytest.approx(math.sqrt(3) / 2)
    assert metrics.permutation_ceiling(series([[0.0, 0.5, 1.0]])) == pytest.approx(1)

    def ceiling(returns):
        index = series([[0] * len(state) for state in returns]).index
        return metrics.label_ceiling(pd.DataFrame([row for state in returns for row in state], index))

    for untold in ([[0.1] * 4, [0.3] * 4], [[0.1, 0.2] * 4, [0.2, 0.1] * 4]):  # few returns; ties
        assert math.isnan(ceiling([untold]))
    assert ceiling([[[0.1, 0.4] * 4, [0.3, 0.1] * 4]]) == 0
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(400, 4))
    returns = truth[..., None] + rng.normal(size=(400, 4, 8)) * 2
    reached = metrics.per_state(series(truth.tolist()), series(returns.mean(-1).tolist())).mean()
    assert (
        reached < ceiling(returns.tolist()) < reached + 0.08
    )  # ranks of four lose a little more than the formula knows


def test_sign_flips():
    assert metrics.sign_flip(pd.Series([1.0] * 3)) == pytest.approx(2 / 8)  # all signs alike: two of eight
    assert metrics.sign_flip(pd.Series([0.0, 0.0])) == 1 and metrics.sign_flip(pd.Series([0.1] * 20)) < 0.001


# ---------------------------------------------------------------------------------------------------------------- files


def test_predictions_in_qvals_layout_and_back(tmp_path):
    points = [Point(f"t{i}", (), ("Action: a", "Action: b", "Action: c"), i, "o", f"{i:016x}") for i in range(2)]
    values = [[0.5, None, 0.7], [1.0, 1.0, 0.0]]

    def read(points=points):
        return published.read_folder(tmp_path, points, lambda name: {})

    published.write(tmp_path, "mine", points, values, {"family": "code"})
    assert read() == ({"mine": ("code", values)}, [])
    single, ranking = (json.loads((tmp_path / f"mine{end}.json").read_text()) for end in ("", "_ranking"))
    assert single["values"] == [0.5, 1.0] and single["method_type"] == "eval"  # the actions taken: 0, then 1
    assert ranking["values"] == [2.0, None, 1.0, 1.5, 1.5, 3.0]
    assert ranking["config"]["candidate_counts"] == [3, 3]
    (tmp_path / "mine.json").unlink()
    assert read()[0] == {"mine": ("code", [[-2.0, None, -1.0], [-1.5, -1.5, -3.0]])}
    del single["metadata"]  # a file with one value a point
    (tmp_path / "theirs.json").write_text(json.dumps(single | {"method_name": "theirs"}))
    assert read()[0]["theirs"][1] == [[0.5, None, None], [None, 1.0, None]]
    with pytest.raises(UserError, match="other points"):
        read(points[:1])
    (tmp_path / "zzz.json").write_text((tmp_path / "theirs.json").read_text())
    with pytest.raises(UserError, match="two files are predictions of 'theirs'"):
        read()
    for damage in ("{", "[]", "{}", '{"method_name": "zzz", "values": ["x"]}', '{"method_name": 1, "values": []}'):
        (tmp_path / "zzz.json").write_text(damage)
        with pytest.raises(UserError, match=r"zzz\.json"):
            read()


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


# -------------------------------------------------------------------------------------------------------------- scorers


def context_of(run, judge=None, code=(), **cache):
    args = argparse.Namespace(env="frozenlake", run=run, sft=None, base=None, code=code, gamma=0.9, seed=0)
    return Context(args, judge, cache)


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
    write_jsonl(tmp_path / "trees.jsonl", tree)
    policy = Policy.load(agent)
    context = context_of(tmp_path, sft=policy, base=policy)
    context.args.sft = agent
    return context


def scored(name, context, actions=ACTIONS, env=None, policy=None):
    env = env or FakeEnv()
    return run(scorer(name, context)(env, root(env), actions, ("t", 0)), answered(policy))[0]


def test_controls_and_what_they_know(tmp_path):
    env, context = FakeEnv(), context_of(tmp_path)
    assert scored("oracle", context, env=env) == pytest.approx([0.5 * 0.81, 0.81])
    assert len(set(scored("state_value", context))) == 1 and scored("step_index", context) == [0.0, 0.0]
    random = scored("random", context)
    assert scored("random", context, ACTIONS[::-1]) == random[::-1] and random[0] != random[1]
    assert env.path == ()
    with pytest.raises(UserError, match="unknown scorer"):
        scorer("wisdom", context)
    assert {entry.family for entry in SCORERS.values()} <= set(report.FAMILIES)


def test_calls_of_one_function_share_a_batch():
    assert answer([Call(sorted, 3), Call(list, 7), Call(sorted, 1)]) == [1, 7, 3]  # sorted has seen [3, 1]


def test_handwritten_code_knows_holes_edges_and_the_goal():
    moves = ("left", "down", "right", "up")
    state = root(envs.make("frozenlake", map="8x8"), "8x8/75")  # right of it ice, then the goal at 77; the edge below
    assert [code.lake(state, f"Action: {move}") for move in moves] == [-3, -2, -1, -3]
    env = envs.make("frozenlake", map="random8")
    states = [root(env, task) for task in env.task_ids("test")[:20]]
    truth = [[env.q_star_of(move) for move in moves] for task in env.task_ids("test")[:20] if root(env, task)]
    scores = [[code.lake(state, move) for move in moves] for state in states]
    assert metrics.per_state(series(scores), series(truth)).mean() > 0.6
    words = State((), "a red cotton shirt")
    assert code.overlap(words, "Action: click[red]") > code.overlap(words, "Action: click[blue]")


def test_handwritten_code_for_the_household():
    env, right = envs.make("alfworld"), []
    for task in env.task_ids("test")[:6]:
        state = root(env, task)
        for thought, action in env.oracle(task):
            scores = [code.household(state, react("", a)) for a in env.valid_actions()]
            right.append(code.household(state, react("", action)) >= np.quantile(scores, 0.6))
            observation, _, done, _, _ = env.step(action)
            state = state.then(react(thought, action), env.message(observation))
            if done:
                break
    assert np.mean(right) > 0.7


def test_what_was_tried_where_the_same_was_seen_comes_last():
    turns = [("user", "told"), ("assistant", "OK"), ("user", "a hall"), ("assistant", react("hm", "open door"))]
    state = State((*turns, ("user", "It is locked."), ("assistant", react("", "look")), ("user", "a hall")))
    assert [code.untried(state, react("so", action)) for action in ("open door", "look", "go on")] == [-1, 0, 0]
    again = state.then(react("", "open door"), "a hall")
    assert code.untried(again, react("", "open door")) == -2


@pytest.mark.parametrize("parameters, body, expected", [
    ("state, action, next_state", "len(next_state) - len(state) - 2 * len(action)", [44, 44]),
    ("state, action", "len(action)", [4, 5]),
    ("next_state", "'right' in next_state.split()[-1]", [0, 1]),
    ("state, action", "1 / (action == 'left')", [1, None]),
    ("state, action", "float('nan' if action == 'left' else '-inf')", [None, None]),
])  # fmt: skip
def test_anyones_signal_function(parameters, body, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def signal_function({parameters}):\n    return {body}\n")
    assert scored("mine", context_of(tmp_path, code=[str(file)]), ["Action: left", "Action: right"]) == expected


def test_a_signal_function_that_hangs_or_is_missing(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("def signal_function(state, action):\n    while True:\n        pass\n")
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    env = FakeEnv()
    endless = scorer("mine", context_of(tmp_path, code=[str(file)]))(env, root(env), ACTIONS, ("t", 0))
    with pytest.raises(UserError, match=r"no answer for 0.2 s"):
        next(drive([endless], {}))
    file.write_text("x = 1")
    with pytest.raises(UserError, match="no signal_function"):
        scored("mine", context_of(tmp_path, code=[str(file)]))


def test_the_policys_scores(context):
    state = root(FakeEnv())
    logp = context.agent().logprobs([(state, a) for a in ACTIONS])
    assert scored("logprob", context) == pytest.approx(logp)
    assert scored("logprob_token", context) == pytest.approx([v / 5 for v in logp])
    assert scored("log_ratio", context) == pytest.approx([0.0, 0.0])  # the base is the policy
    p = np.exp(logp) / np.exp(logp).sum()
    assert scored("confidence", context) == pytest.approx([p @ np.log(p)] * 2)
    assert scored("self_certainty", context) == pytest.approx([-np.log(p).mean() - np.log(2)] * 2)
    shares = scored("vote_share", context, [react("", a) for a in ("left", "right", "fly")])
    assert sum(shares) == 1 and shares[2] == 0
    assert scored("self_distillation", context) != pytest.approx([0.0, 0.0])


def test_trees_and_neighbours(context):
    actions, state = ["Action: left", "Action: right"], root(FakeEnv())
    # 0.45 after "left", between the root's 0.405 and the leaf's 0.5; "right" occurs nowhere.
    assert scored("tree_bellman", context, actions) == [pytest.approx(0.045 / 0.095), None]
    assert scored("tree_plain", context, actions) == [0, None]  # of one branch there is nothing to compare
    assert all(0 <= q <= 1 for q in scored("neighbours", context, actions))
    vectors = embeddings(context.agent(), [(state, a) for a in (*actions, "")])
    alone = [embeddings(context.agent(), [(state, a)])[0] for a in (*actions, "")]
    assert np.allclose(vectors, alone, atol=1e-5)  # padding changes nothing
    assert all(-1.001 <= v <= 1.001 for v in scored("task_cosine", context, actions))
    tree = list(read_jsonl(context.path("trees")))  # a plain score is the reward of the branch that came first
    tree.append(tree[2] | {"node_id": 3, "action": "Action: left", "reward": 0.1, "branch": 2})
    tree[0]["nodes"] = 4
    write_jsonl(context.path("trees"), tree)
    context.cache.clear()
    assert scored("tree_plain", context, ["Action: left"]) == [pytest.approx(1)]


def test_a_learned_value_before_and_after(context):
    class Net:
        def score(self, requests):
            return [[float("right" in a) + 0.1 * len(r.state.messages) for a in r.actions] for r in requests]

    context.cache["qnet"] = Net()
    assert "value_gain" not in available(context) and {"oracle", "logprob", "neighbours"} <= set(available(context))
    (context.args.run / "qnet").mkdir()
    (context.args.run / "qnet" / "qnet.json").touch()
    assert {"qnet", "value_gain"} <= set(available(context))
    env = FakeEnv({"left": 0.7, "right": {"left": {"left": 0.0}, "right": 1.0}})
    assert scored("qnet", context, env=env) == pytest.approx([0.3, 1.3])
    # "left" ends the episode: its own Q, not its reward of .7.
    assert scored("value_gain", context, env=env) == pytest.approx([0.3 - 1.3, 1.5 - 1.3])


# --------------------------------------------------------------------------------------------------------------- search


def test_scores_are_entered_into_search(context, monkeypatch):
    flags = argparse.Namespace(**vars(context.args) | {"server": None, "qnet": None, "plain": False, "device": None})
    monkeypatch.setattr(q_search, "SCORERS", {})
    answers = {Call: answer, Sample: context.agent().sample}
    methods, paths = search.register([], flags, answers)
    assert context.path("trees") in paths
    assert {"scorer:random", "scorer:code", "scorer:logprob", "scorer:tree_bellman"} <= set(methods)
    assert not {"scorer:oracle", "scorer:state_value", "scorer:step_index"} & set(methods)
    env = FakeEnv()

    def steered(method):
        return run(q_search.SCORERS[method](env, root(env), ACTIONS, ("t", 0)), answered())[0]

    assert steered("scorer:logprob") == pytest.approx(context.agent().logprobs([(root(env), a) for a in ACTIONS]))
    (context.args.run / "qnet").mkdir()
    (context.args.run / "qnet" / "qnet.json").touch()
    loaded = []

    def load(folder, args):
        loaded.append((folder, args))
        return argparse.Namespace(score=lambda requests: [[1.0, 2.0] for _ in requests])

    monkeypatch.setattr("experiments.qval.scorers.load_qnet", load)
    assert search.register(["qnet"], flags, answers) == (["scorer:qnet"], [context.args.run / "qnet"])
    assert steered("scorer:qnet") == pytest.approx([1, 2])
    assert loaded == [(context.args.run / "qnet", flags)]  # as the search loads its own
    judge = Fake(says=lambda q: "1: 4\n2: 9")
    monkeypatch.setattr(judges, "load", lambda name, *_: judge if name == "a#b" else None)
    assert search.register(["batched=a#b"], flags, answers)[0] == ["scorer:batched=small"]
    assert steered("scorer:batched=small") == pytest.approx([4, 9])
    for names, change, says in (
        (["oracle"], {}, "oracle_step"), (["qnet"], {"qnet": Path("qnet-other")}, "--qnet"),
        (["vote_share", "logprob"], {"server": "http://localhost/v1"}, "scorer logprob: --server"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            search.register(names, argparse.Namespace(**vars(flags) | change), answers)


def test_equal_scores_are_taken_at_random_and_missing_ones_last():
    assert search.decided([1.0, None, 2.0], ("t", 0)) == pytest.approx([1.0, -math.inf, 2.0])
    for scores in ([3.0, 3.0, 1.0], [None, None], [0.0, 0.0]):
        taken = set()
        for step in range(40):
            values = search.decided(scores, ("t", step))
            assert sum(v == max(values) for v in values) == 1
            taken.add(values.index(max(values)))
        assert taken == {0, 1}


def test_the_environment_is_stepped_where_the_count_says_so(context):
    """q_search.py counts a step for each candidate that a score has looked behind."""
    program = "```python\ndef signal_function(state, action, next_state):\n    return 1\n```"
    context.judge = Fake(says=lambda q: program, logp=lambda q, options: [0.0] * len(options))
    context.cache["qnet"] = argparse.Namespace(score=lambda requests: [[0.0] * len(r.actions) for r in requests])
    for name in {*available(context), "value_gain", *judges.JUDGES} - search.KNOWING - {"code"}:
        env = FakeEnv()
        scored(name, context, env=env)
        assert bool(env.played) == (name in search.PEEKING), name


# --------------------------------------------------------------------------------------------------------------- judges


class Fake:
    """A judge by script: what it writes to a prompt, and the log-probabilities that it gives to options."""

    def __init__(self, says=None, logp=None, name="small"):
        self.says, self.logp, self.name, self.questions = says, logp, name, []

    def write(self, questions):
        self.questions += questions
        return [self.says(q) for q in questions]

    def choose(self, choices):
        return [self.logp(q, options) for q, options in choices]


def judged(name, tmp_path, **script):
    judge = Fake(**script)
    return scored(name, context_of(tmp_path, judge)), judge


def last(question):
    return question.messages[-1][1]


@pytest.mark.parametrize("name, reply, values", [
    ("direct", "no idea", [None, None]), ("direct", "Score: -5", [-5, -5]), ("direct", "**Score:** -0.5.", [-0.5] * 2),
    ("direct", "Score - 5", [5, 5]), ("direct", "good. **Score**: 40 or so", [40, 40]),
    ("batched", "1: 30\n3: 9\n2. nothing", [30, None]), ("batched", "1: -20\n2: 5", [-20, 5]),
    ("batched", "**1**) **-1.5**\n2 = `8`", [-1.5, 8]), ("batched", "1:\n2: 20", [None, 20]),
    ("ranking", "Ranking: 2, 1", [-1, 0]), ("ranking", "Ranking: 2", [None, None]),
    ("ranking", "Ranking: 2 2", [None, None]), ("ranking", "the second", [None, None]),
])  # fmt: skip
def test_answers_of_judges_are_read(name, reply, values, tmp_path):
    got, judge = judged(name, tmp_path, says=lambda q: reply)
    assert got == values and len(judge.questions) == (2 if name == "direct" else 1)
    assert ("you stand at start left" in last(judge.questions[0])) == (name == "ranking")  # next states are shown


def test_judges_of_several_answers(tmp_path):
    replies = itertools.cycle(["Score: 10", "Score: 30", "??", "Score: 20"])
    values, judge = judged("direct_16", tmp_path, says=lambda q: next(replies))
    assert values == [20, 20] and len({q.key for q in judge.questions[:16]}) == 16
    assert judge.questions[0].temperature > 0
    values, _ = judged("sequential", tmp_path, says=lambda q: f"Score: {len(q.messages)}")
    assert values == [1, 3]  # the second sees the first one's answer

    def progress(question):
        lines = [line for line in last(question).splitlines() if line[:1].isdigit()]
        return "\n".join(f"{line.split('.')[0]}: {50 if line.endswith('right') else 5}" for line in lines)

    assert judged("gvl", tmp_path, says=progress)[0] == [5, 50]  # the next state is found in the shuffle


def test_judges_by_log_probability(tmp_path):
    def grade(question, options):
        top = 19 if "Action: right" in last(question) else 0
        return [0.0 if i == top else -math.inf for i in range(len(options))]

    assert judged("verifier", tmp_path, logp=grade)[0] == [0, 19]
    assert judged("verifier", tmp_path, logp=lambda q, o: None)[0] == [None, None]

    def yes(question, options):
        p = 0.9 if "start right" in last(question) else 0.5
        return [math.log(p), math.log(1 - p)]

    assert judged("delta_belief", tmp_path, logp=yes)[0] == pytest.approx([0, math.log(0.9 / 0.5)])
    assert judged("delta_belief", tmp_path, logp=lambda q, o: None)[0] == [None, None]


def test_generated_code(tmp_path):
    good = "```python\ndef signal_function(state, action, next_state):\n    return len(action)\n```"
    assert judged("codegen", tmp_path, says=lambda q: good)[0] == [4, 5]
    assert judged("codegen", tmp_path, says=lambda q: "```python\nimport nothing_of_this_name\n```")[0] == [None, None]
    sources = itertools.cycle([good, good.replace("len(action)", "1 / 0"), "no code"])
    assert judged("codegen_16", tmp_path, says=lambda q: next(sources))[0] == [4, 5]
    values, judge = judged("eureka", tmp_path, says=lambda q: "Best: 2" if "judges them best" in last(q) else good)
    assert values == [4, 5] and sum("Improve on this one" in last(q) for q in judge.questions) == 15 * 8


def test_a_chat_server_and_a_checkpoint_answer_alike(tmp_path):
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
    assert scored("direct", context_of(tmp_path, judge)) == [7, 7]
    stopped(server)
    for context, room in ((None, 2048), (64, 32)):  # not the checkpoint's own: that is an action's
        chat = word_chat(max_new_tokens=3)
        chat.context = context
        local = judges.Checkpoint(Policy(tiny_lm(chat), chat))
        assert chat.rendering.max_new_tokens == room
    assert len(local.write([question])) == 1
    (logp,) = local.choose([(question, ("left", "right"))])
    assert len(logp) == 2 and all(v < 0 for v in logp)


# -------------------------------------------------------------------------------------------------------------- a study


def test_a_study_of_a_small_lake(tmp_path, agent, monkeypatch, capsys):
    common = ["--env", "frozenlake", "--env-option", "map=random4", "--run", str(tmp_path), "--sft", str(agent)]
    names = ["random", "step_index", "code", "logprob", "task_cosine"]
    monkeypatch.setattr(Policy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    qval.main(["search", *common, "--scorer", *names, "-M", "3", "--limit", "5"])
    results = tmp_path / "results.jsonl"
    assert list(downstream.rewards(results, "frozenlake")) == names
    with pytest.raises(UserError, match="of frozenlake, not of webshop"):
        downstream.rewards(results, "webshop")
    with pytest.raises(UserError, match="--method: search follows"):
        qval.main(["search", *common, "--method", "greedy"])
    flags = [*common, "--actor", "random", "--trajectories", "3", "--points", "30", "-K", "2", "--results"]
    flags += [str(results), "--references", "exact", "expert", "policy"]
    flags += ["--scorers", *names, "oracle", "logprob_token"]
    qval.main(flags)
    shown = capsys.readouterr().out
    folder = tmp_path / "qval"
    record = json.loads((folder / "alignment.json").read_text())
    exact = record["labels"]["exact"]
    assert exact["oracle"]["rho"]["mean"] == pytest.approx(1) and exact["step_index"]["rho"]["mean"] == 0
    assert set(record["labels"]) == {"exact", "expert", "policy max", "policy mean"}
    assert "What rollouts buy" in shown and "Alignment against downstream" in shown
    assert (folder / "forest-exact.png").exists()
    assert json.loads((folder / "labels" / "exact.json").read_text())["method_type"] == "gt"
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
    assert list(downstream.played(blind).rewards.index) == list("bcde")
    blind["labels"]["exact"]["b"]["rho"]["mean"] = math.nan
    assert downstream.played(blind) is None
    folders = [tmp_path / "abcde", tmp_path / "bacde"]
    for folder in folders:
        folder.mkdir()
        (folder / "alignment.json").write_text(json.dumps(summary(folder.name, folder.name)))
    flags = [*map(str, folders), "--out", str(tmp_path / "all.md")]
    downstream.main(flags)
    assert "| rho per state | 1.000 [1.000, 1.000] | 0.900" in capsys.readouterr().out
    assert "5 scorers" in (tmp_path / "all.md").read_text()
    for text, says in ((json.dumps(blind), "--results"), ('{"labels": ', "not what experiments")):
        (folders[0] / "alignment.json").write_text(text)
        with pytest.raises(UserError, match=says):
            downstream.main(flags)


# -------------------------------------------------------------------------------------------------------------- targets


def test_td_and_mc_targets_by_hand():
    edges = [(None, 0, 0.0, 0), (0, 1, 0.0, 1), (1, 2, 1.0, 1), (1, 2, 0.0, 2), (0, 1, 0.2, 3)]
    tree = [{"node_id": i, "parent_id": parent, "depth": depth, "reward": reward, "branch": branch, "done": i > 1}
            for i, (parent, depth, reward, branch) in enumerate(edges)]  # fmt: skip
    assert targets.td(tree, 0.5) == pytest.approx([0.5 * (0.25 + 0.2) / 2, 0.5 * (1 + 0) / 2, 1, 0, 0.2])
    assert targets.mc(tree, 0.5)[1:] == [0.5, 1, 0, 0.2]  # the first branch made node 1


def test_td_and_mc_labels_are_written_as_bellmans_are(context):
    folder = context.args.run
    flags = ["--run", str(folder), "--out", str(folder / "q_labels-mc.jsonl"), "--target"]
    targets.main([*flags, "mc"])
    path = folder / "q_labels-mc.jsonl"
    assert [node["q_raw"] for node in read_jsonl(path)] == pytest.approx([0, 0.45, 0.5])
    assert is_complete(path) and "seconds" in read_meta(path)
    with pytest.raises(UserError, match="--target mc, not td"):
        targets.main([*flags, "td"])
    trees = folder / "trees.jsonl"
    trees.write_text(trees.read_text().replace('"branch"', '"lot"'))
    with pytest.raises(UserError, match="no branch"):
        targets.main([*flags, "mc", "--overwrite"])
