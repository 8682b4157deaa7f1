"""Alignment: returns and correlations by hand, and what the oracle itself scores."""

import json
import math

import pytest
from fakes import FakeEnv, Script, dump, run, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from experiments import align
from experiments.align import alignment, families, monte_carlo, tree_families, walk
from qlass.chat import Rendering, State, parse_action, react
from qlass.driver import Score
from reporting.results import read_results

RENDERING = Rendering()


def root(env):
    observation, info = env.reset(options={"task_id": "val0"})
    return State.first(env, observation, info)


def answered(policy, score=None):
    """An answer to a request or to a list of them."""

    def answer(request):
        if isinstance(request, list):
            return [answer(r) for r in request]
        return [score(a) for a in request.actions] if isinstance(request, Score) else policy(request)

    return answer


def test_returns_by_hand():
    env = FakeEnv()
    actions = [react("hm", a) for a in ("left", "right")]
    state = root(env)
    # After "left": right, then left (0.5) or right (0.2), two steps later; after "right": left, 0.4 one step later.
    policy = Script({("left",): "right", ("left", "right"): "left right", ("right",): "left"})
    returns, requests = run(monte_carlo(env, state, actions, 4, 0.9, ("t",), RENDERING), answered(policy))
    assert returns == pytest.approx([0.9**2 * (0.5 + 0.2) / 2, 0.9 * 0.4])
    assert [len(batch) for batch in requests] == [8, 4]  # all rollouts side by side; those after "right" have ended
    assert len({r.key for batch in requests for r in batch}) == 12  # each with its own luck


def test_an_action_that_ends_the_episode_is_worth_its_reward():
    env = FakeEnv({"left": 0.7, "right": {"left": 1.0}})
    returns, _ = run(monte_carlo(env, root(env), ["left", "right"], 3, 0.5, (), RENDERING), answered(Script({})))
    assert returns == [pytest.approx(0.7), 0.5]


def test_the_step_limit_ends_rollouts():
    env = FakeEnv(max_steps=2)
    (value,), requests = run(
        monte_carlo(env, root(env), ["left"], 2, 0.9, (), RENDERING), answered(Script({}, otherwise="nowhere"))
    )
    assert value == 0.0 and len(requests) == 1


def test_the_episode_goes_on_with_the_agents_own_action():
    env = FakeEnv()
    policy = Script({(): "right left", ("right",): "right", ("right", "right"): "right"})
    result, _ = run(walk(env, "val0", 2, 1, 1.0, RENDERING), answered(policy, lambda a: float("left" in a)))
    assert [parse_action(step["action"]) for step in result["steps"]] == ["right", "right", "right"]
    assert result["reward"] == 1.0
    first = result["steps"][0]["candidates"]
    assert [(parse_action(c["action"]), c["q"]) for c in first] == [("right", 0.0), ("left", 1.0)]
    assert all("q_star" not in c for c in first)
    everything, _ = run(walk(FakeEnv(), "val0", 0, 1, 1.0, RENDERING), answered(Script({}), lambda a: 0.0))
    assert {parse_action(c["action"]) for c in everything["steps"][0]["candidates"]} == {"left", "right"}


def test_frozenlake_knows_the_exact_value():
    env = envs.make("frozenlake", map="4x4")
    task = env.task_ids("val")[0]

    def policy(request):
        return Script({}, otherwise="right down")(request)

    result, _ = run(walk(env, task, 0, 1, 0.9, RENDERING), answered(policy, lambda a: 0.0))
    env.reset(options={"task_id": task})
    for c in result["steps"][0]["candidates"]:
        assert c["q_star"] == env.q_star_of(parse_action(c["action"]), 0.9)
    (first, *_) = families([{"task_id": task} | result], "q_star")
    assert first[2] == [c["q_star"] for c in result["steps"][0]["candidates"]]


def test_alignment_by_hand():
    states = [
        ("a", [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]),  # in order: rho = tau = 1, gain 1 of 1
        ("a", [0.3, 0.2, 0.1], [1.0, 2.0, 3.0]),  # reversed: -1, gain -1 of 1
        ("b", [0.5, 0.5], [0.0, 1.0]),  # undecided counts as 0; the first is taken: -0.5 of 0.5
        ("b", [0.9, 0.8], [0.4, 0.0]),  # 1, 0.2 of 0.2
        ("b", [0.9, 0.1], [0.5, 0.5]),  # nothing to tell apart
    ]
    found = alignment(states)
    assert (found["pairs"], found["states"]) == (12, 4)
    assert found["rho per state"] == found["tau per state"] == pytest.approx(((1 - 1) / 2 + (0 + 1) / 2) / 2)
    assert found["gain"] == pytest.approx((1 - 1 - 0.5 + 0.2) / (1 + 1 + 0.5 + 0.2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=8))
def test_the_oracle_gains_all_and_its_opposite_is_its_mirror(targets):
    right = alignment([(str(i), [float(x) for x in t], [float(x) for x in t]) for i, t in enumerate(targets)])
    wrong = alignment([(str(i), [-float(x) for x in t], [float(x) for x in t]) for i, t in enumerate(targets)])
    if right["states"]:
        assert right["gain"] == pytest.approx(1) and right["rho per state"] == pytest.approx(1)
        assert wrong["rho per state"] == pytest.approx(-1) and wrong["gain"] < 0
    else:
        assert math.isnan(right["gain"]) and math.isnan(right["rho per state"])


def test_trees_give_families_of_siblings():
    nodes = [(0, None, None, 1.0), (1, 0, "left", 0.2), (2, 0, "right", 0.9), (3, 2, "left", 0.4)]
    tree = [
        {"task_id": "t", "node_id": i, "parent_id": p, "action": a, "observation": "o", "q": q} for i, p, a, q in nodes
    ]
    tree[0]["messages"] = [{"role": "user", "content": "start"}]

    class QNet:
        def score(self, requests):
            return [[float(len(a)) for a in r.actions] for r in requests]

    assert tree_families(QNet(), [tree]) == [("t", [4.0, 5.0], [0.2, 0.9]), ("t", [4.0], [0.4])]


def test_main_writes_lines_that_the_report_reads(tmp_path, monkeypatch, capsys):
    env, policy = FakeEnv(tasks=3), Script({(): "left right"}, otherwise="left")

    class Model:
        chat, label = word_chat(), None

        @classmethod
        def load(cls, *_):
            return cls()

        from_pretrained = load

        def sample(self, requests):
            return [policy(r) for r in requests]

        def score(self, requests):
            return [[float("right" in a) for a in r.actions] for r in requests]

    common = {
        "task_id": "t",
        "observation": "",
        "reward": 0.0,
        "done": False,
        "source": "root",
        "branch": 0,
        "depth": 0,
    }
    tree = [
        common | {"node_id": 0, "parent_id": None, "action": None, "nodes": 2, "messages": [], "q": 1.0, "env": "fake"},
        common | {"node_id": 1, "parent_id": 0, "action": "left", "q": 0.5},
    ]
    (tmp_path / "q_labels.jsonl").write_text(dump(tree))
    for name in ("sft", "qnet"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(envs, "from_arguments", lambda args: env)
    monkeypatch.setattr(align, "Policy", Model)
    monkeypatch.setattr(align, "QNet", Model)
    align.main(["--run", str(tmp_path), "-M", "2", "-K", "2", "--limit", "2"])
    (group,) = read_results([("", tmp_path / "align.jsonl")])
    assert len(group.results) == 2 and all(r.q for r in group.results.values())
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["target", "monte_carlo", "tree"]
    figures = json.loads((tmp_path / "align.meta.json").read_text())["alignment"]
    assert figures["monte_carlo"]["states"] > 0 and figures["tree"]["pairs"] == 1
