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
from experiments.qval import downstream, judges, labels, metrics, published, report, search, targets
from experiments.qval.points import Point, trajectory
from experiments.qval.scorers import SCORERS, Call, Context, answer, embeddings, scorer
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, react
from qlass.driver import Sample, drive
from qlass.files import write_jsonl
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


@pytest.mark.parametrize("name, options", [("frozenlake", {"map": "8x8", "slippery": True}), ("webshop", {})])
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


# ----------------------------------------------------------------------------------------------------------- statistics

STATES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(max_examples=25)
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


@settings(max_examples=15)
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
    with pytest.raises(UserError, match="other points"):
        read(points[:1])
    for damage in ("{", "[]", '{"method_name": "zzz", "values": ["x"]}'):
        (tmp_path / "zzz.json").write_text(damage)
        with pytest.raises(UserError, match=r"zzz\.json"):
            read()


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


@pytest.mark.parametrize("parameters, body, expected", [
    ("state, action, next_state", "len(next_state) - len(state) - 2 * len(action)", [44, 44]),
    ("state, action", "1 / (action == 'left')", [1, None]),
    ("state, action", "float('nan' if action == 'left' else '-inf')", [None, None]),
])  # fmt: skip
def test_anyones_signal_function(parameters, body, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def signal_function({parameters}):\n    return {body}\n")
    assert scored("mine", context_of(tmp_path, code=[str(file)]), ["Action: left", "Action: right"]) == expected


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


# --------------------------------------------------------------------------------------------------------------- search


def test_scores_are_entered_into_search(context, monkeypatch):
    flags = argparse.Namespace(**vars(context.args) | {"server": None, "qnet": None, "plain": False, "device": None})
    monkeypatch.setattr(q_search, "SCORERS", {})
    answers = {Call: answer, Sample: context.agent().sample}
    methods, paths = search.register([], flags, answers)
    assert context.path("trees") in paths
    assert {"scorer:random", "scorer:logprob", "scorer:tree_bellman"} <= set(methods)
    assert not {"scorer:oracle", "scorer:state_value", "scorer:step_index"} & set(methods)
    env = FakeEnv()
    steered, _ = run(q_search.SCORERS["scorer:logprob"](env, root(env), ACTIONS, ("t", 0)), answered())
    assert steered == pytest.approx(context.agent().logprobs([(root(env), a) for a in ACTIONS]))
    for names, change, says in (
        (["oracle"], {}, "oracle_step"),
        (["qnet"], {"qnet": Path("qnet-other")}, "--qnet"),
        (["vote_share", "logprob"], {"server": "http://localhost/v1"}, "scorer logprob: --server"),
    ):
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
    values, _ = judged("sequential", tmp_path, says=lambda q: f"Score: {len(q.messages)}")
    assert values == [1, 3]  # the second sees the first one's answer
    program = "```python\ndef signal_function(state, action, next_state):\n    return len(action)\n```"
    assert judged("codegen", tmp_path, says=lambda q: program)[0] == [4, 5]
    assert judged("codegen", tmp_path, says=lambda q: "```python\nimport nothing_of_this_name\n```")[0] == [None, None]


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


def test_a_chat_server_and_a_checkpoint_answer_alike(tmp_path):
    bodies = []
    top = [{"token": word, "logprob": logp} for word, logp in ((" Yes", -0.1), ("Yes", -3.0), ("No", -2.4))]
    choice = {"message": {"content": "Score: 7"}, "logprobs": {"content": [{"top_logprobs": top}]}}

    def reply(body):
        bodies.append(body)
        return 200, {"choices": [choice]}

    server = started(json_server(reply, ("small",)))
    judge = judges.load(server.url, None, 0)
    question = judges.user("how good?", key=("a",))
    assert judge.write([question, question]) == ["Score: 7"] * 2
    assert judge.choose([(question, ("Yes", "No", "Maybe"))]) == [[-0.1, -2.4, -math.inf]]
    assert bodies[0]["model"] == "small" and bodies[0]["seed"] == bodies[1]["seed"] and bodies[-1]["top_logprobs"] == 20
    assert scored("direct", context_of(tmp_path, judge)) == [7, 7]
    stopped(server)
    chat = word_chat(max_new_tokens=3)
    local = judges.Checkpoint(Policy(tiny_lm(chat), chat))
    assert chat.rendering.max_new_tokens == 2048  # not the checkpoint's own: that is an action's
    assert len(local.write([question])) == 1
    (logp,) = local.choose([(question, ("left", "right"))])
    assert len(logp) == 2 and all(v < 0 for v in logp)


# -------------------------------------------------------------------------------------------------------------- a study


def test_a_study_of_a_small_lake(tmp_path, agent, monkeypatch, capsys):
    common = ["--env", "frozenlake", "--env-option", "map=random4", "--run", str(tmp_path), "--sft", str(agent)]
    names, results = ["random", "step_index", "code", "logprob", "task_cosine"], tmp_path / "results.jsonl"
    monkeypatch.setattr(Policy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    qval.main(["search", *common, "--scorer", *names, "-M", "3", "--limit", "5"])
    assert list(downstream.rewards(results, "frozenlake")) == names
    with pytest.raises(UserError, match="of frozenlake, not of webshop"):
        downstream.rewards(results, "webshop")
    flags = [*common, "--actor", "random", "--trajectories", "3", "--points", "20", "-K", "2", "--results"]
    flags += [str(results), "--references", "exact", "policy"]
    flags += ["--scorers", *names, "oracle"]
    qval.main(flags)
    shown, folder = capsys.readouterr().out, tmp_path / "qval"
    record = json.loads((folder / "alignment.json").read_text())
    exact = record["labels"]["exact"]
    assert exact["oracle"]["rho"]["mean"] == pytest.approx(1) and exact["step_index"]["rho"]["mean"] == 0
    assert set(record["labels"]) == {"exact", "policy max", "policy mean"}
    assert "What rollouts buy" in shown and "Alignment against downstream" in shown
    assert (folder / "forest-exact.png").exists()
    assert json.loads((folder / "labels" / "exact.json").read_text())["method_type"] == "gt"
    with pytest.raises(UserError, match="--points 20, not 31"):
        qval.main([*flags, "--points", "31"])


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
    for order in ("abcde", "bacde"):
        (tmp_path / order).mkdir()
        (tmp_path / order / "alignment.json").write_text(json.dumps(summary(order, order)))
    downstream.main([str(tmp_path / "abcde"), str(tmp_path / "bacde"), "--out", str(tmp_path / "all.md")])
    assert "| rho per state | 1.000 [1.000, 1.000] | 0.900" in capsys.readouterr().out
    assert "5 scorers" in (tmp_path / "all.md").read_text()


# -------------------------------------------------------------------------------------------------------------- targets


def test_td_and_mc_targets_by_hand():
    edges = [(None, 0, 0.0, 0), (0, 1, 0.0, 1), (1, 2, 1.0, 1), (1, 2, 0.0, 2), (0, 1, 0.2, 3)]
    tree = [{"node_id": i, "parent_id": parent, "depth": depth, "reward": reward, "branch": branch, "done": i > 1}
            for i, (parent, depth, reward, branch) in enumerate(edges)]  # fmt: skip
    assert targets.td(tree, 0.5) == pytest.approx([0.5 * (0.25 + 0.2) / 2, 0.5 * (1 + 0) / 2, 1, 0, 0.2])
    assert targets.mc(tree, 0.5)[1:] == [0.5, 1, 0, 0.2]  # the first branch made node 1
