"""QVAL: points that replay, labels by brute force, statistics by hand, scorers and judges by script."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes import FakeEnv, Script, explore, over, refused, say, settings_of

import envs
from experiments import Call, answer, judges
from experiments.qval import __main__ as qval
from experiments.qval import metrics
from experiments.qval.points import Point, digest, labelled, trajectory
from experiments.qval.scorers import Context, Decision, entries
from qlass.agent import load_policy
from qlass.batching import Candidate, LogProb, Sample, drive
from qlass.chat import Rendering
from qlass.fast.decode import FastPolicy
from qlass.files import read_jsonl, write_jsonl
from qlass.messages import react, start
from qlass.trees import tree_records

RENDERING = Rendering()
GAMMA = 0.95
ACTIONS = [react("hm", action) for action in ("left", "right")]


def series(values, blocks=()):
    """Values of states; without blocks each state is one of its own."""
    points = []
    for i, state in enumerate(values):
        block = blocks[i] if blocks else str(i)
        points.append(SimpleNamespace(block=block, candidates=state, taken=0))
    return metrics.series(values, metrics.index(points))


def root(env, task="val0"):
    return start(env, task)


def played(player, policy=None, agent=None):
    models = {Call: answer, Sample: lambda requests: [policy(r) for r in requests]}
    if agent:
        models |= {Sample: agent.sample, LogProb: agent.likelihoods}
    (value,) = drive([player], models)
    return value


@pytest.mark.parametrize("name, options", [("frozenlake", {"map": "8x8", "slippery": True}), ("webshop", {})])
def test_replay_reproduces_every_hash(name, options):
    env, points, rng = envs.make(name, **options), [], np.random.default_rng(0)

    def policy(request):
        return [say(rng.choice(env.valid_actions()))[0] for _ in range(request.n)]

    for task in env.task_ids("test")[:30]:
        points += played(trajectory(env, task, 0, 0, RENDERING), policy)
    assert len(points) > 10
    for point in points:
        copy = Point(**json.loads(json.dumps(vars(point))))
        assert copy == point
        assert copy.restore(env.fork()).observation == point.observation
        assert len(set(point.candidates)) == len(point.candidates) <= 4
    with refused("another state"):
        Point(**vars(points[0]) | {"hash": "0" * 16}).restore(env)


def test_returns_by_hand():
    point = Point("val0", [], ACTIONS, 0, "", digest(root(FakeEnv()).observation))
    # After "left": right, then left (0.5) or right (0.2), two steps later; after "right": left, 0.4 one step later.
    script = Script({("left",): "right", ("left", "right"): "left right", ("right",): "left"})
    keys = []

    def policy(request):
        keys.append(request.key)
        return script(request)

    left, right = played(labelled(FakeEnv(), point, "policy", 4, RENDERING), policy)["returns"]
    assert left == pytest.approx([0.5 * GAMMA**2, 0.2 * GAMMA**2] * 2, abs=1e-6)
    assert right == pytest.approx([0.4 * GAMMA] * 4)
    assert len(set(keys)) == len(keys) == 12  # each with random numbers of its own
    cut = played(labelled(FakeEnv(max_steps=1), point, "policy", 4, RENDERING), policy)
    assert cut["returns"] == [[0.0] * 4] * 2


def test_alignment_by_hand():
    of = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 1.0], [0.4, 0.0], [0.5, 0.5]]
    scores = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.5, 0.5], [0.9, 0.8], [0.9, 0.1]]
    a = metrics.alignment(series(scores, "aabbb"), series(of, "aabbb"))
    assert (a["states"], a["coverage"]) == (4, 1.0)
    assert a["rho"] == pytest.approx(((1 - 1) / 2 + (0 + 1) / 2) / 2)  # of blocks
    assert a["top-1"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)  # a tie is split
    # The ranks of the first actions, which were taken: of their labels and of their scores.
    assert a["actor"] == pytest.approx(np.corrcoef([4.5, 4.5, 1, 2, 3], [1, 2, 3, 4.5, 4.5])[0, 1])


def test_failures_are_counted_and_left_out_of_a_comparison():
    of, scores = [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0]], [[None, 1.0, 2.0], [None, 1.0], [None, None]]
    a = metrics.alignment(series(scores), series(of))
    assert (a["states"], a["coverage"]) == (1, 3 / 7)  # the others have one score or none
    assert a["rho"] == 1
    assert a["top-1"] == pytest.approx((1 + 1 + 0.5) / 3)  # no score at all: a blind choice
    labels, rival = series([[0.0, 0.3, 0.6, 1.0]] * 6), series([[0.9, 0.2, 0.4, 0.6]] * 6)  # wrong about the first
    assert metrics.difference(series([[None, 0.2, 0.4, 0.6]] * 6), rival, labels).mean() == 0


@pytest.fixture
def context(agent):
    """The agent, and a tree of two branches: left, right, left for 0.5; right, left for 0.4."""
    policy = Script({(): "left right", ("left",): "right"})
    tree = played(explore(FakeEnv(), "train0", RENDERING, 0, 2, 2, False), policy)
    write_jsonl(Path("trees.jsonl"), tree_records(FakeEnv(), "train0", tree, []))
    context = Context(settings_of(judges, f"--env frozenlake --run . --sft {agent} --plain"))
    context.agent = load_policy(agent, context.config)
    return context


def scored(name, context, actions=ACTIONS):
    """A score's values at the root of the fake world, and the counts of a judge's answers."""
    env = FakeEnv()
    decision = Decision(env, root(env), actions, ("t", 0))
    (entry,) = entries(context, [name]).values()
    values = played(entry.scores(context, decision), agent=vars(context).get("agent"))
    assert env.path == ()  # it stands where it stood
    return values, (decision.counts["answers"], decision.counts["unread"])


def test_what_scores_say(context):
    def values(name, actions=ACTIONS):
        return scored(name, context, actions)[0]

    assert values("oracle") == pytest.approx([0.5 * GAMMA**2, GAMMA**2])
    assert values("untried") == [0.0, 0.0]
    (logp,) = context.agent.likelihoods([LogProb(root(FakeEnv()), ACTIONS)])
    assert values("logprob") == pytest.approx(logp)
    assert values("logprob_token") == pytest.approx([v / 5 for v in logp])
    shares = values("vote_share", [react("", action) for action in ("left", "right", "fly")])
    assert sum(shares) == 1
    assert shares[2] == 0
    hinted, told = values("self_distillation"), values("sdpo_gt")
    assert hinted != pytest.approx([0.0, 0.0])
    assert told != pytest.approx(hinted)
    actions = [react("", action) for action in ("left", "right", "up")]
    # The root's right is worth .4 GAMMA, the least of the tree; the most is .5. "up" occurs nowhere.
    least = 0.4 * GAMMA
    assert values("tree_bellman", actions) == [pytest.approx((0.5 * GAMMA**2 - least) / (0.5 - least)), 0, None]
    assert values("tree_plain", actions) == [1, 0, None]  # the branches' rewards


def judged(name, sample=None, valid_logprobs=None):
    """A judge's score: its values, and how many answers there are and cannot be read."""
    context = Context(SimpleNamespace(env="frozenlake", seed=0, run=Path(), sft=None), "small")
    context.judge = SimpleNamespace(sample=sample, valid_logprobs=valid_logprobs)
    return scored(name, context)


@pytest.mark.parametrize("name, replies, values, counts", [
    ("direct", ["1: 70", "<think>1: 5</think>2: 20.5"], [70, 20.5], (2, 0)),
    ("direct", ["1: 170", "1: -3"], [None, None], (2, 2)),  # not of the scale
    ("direct", ["85.5", "1. 70.5"], [None, 70.5], (2, 1)),  # a point within a number is no sign behind its index
    ("direct", ["1: .5", "1: 1,000"], [None, None], (2, 2)),
    ("batched", ["1: 50\n2: 40\n1: 170"], [None, 40], (2, 1)),  # the last one counts
    ("direct_16", ["1: 30", "1: 40"], [30, 40], (32, 0)),
    ("sequential", ["1: 60", "no"], [60, None], (2, 1)),
    ("batched", ["The scores\n2: 40"], [None, 40], (2, 1)),
    ("ranking", ["Not 1, 2 but\nRanking: 1 = 2, as 2 does."], [0, 0], (2, 0)),  # the last one; it may say equal
])  # fmt: skip
def test_replies_of_a_judge_are_read_and_counted(name, replies, values, counts):
    rest, asked = iter(replies), []

    def sample(requests):
        asked.extend(requests)
        return [[Candidate(next(rest), 1, 0.0)] * request.n for request in requests]

    assert judged(name, sample) == (values, counts)
    first, last = asked[0].state.messages, asked[-1].state.messages
    assert "you stand at start" in first[0][1]
    assert "1. " + ACTIONS[0] + "\nAfter it the agent would see: Observation: you stand at start left" in first[-1][1]
    assert last[-2] == ("assistant", "1: 60" if name == "sequential" else first[-2][1])  # it knows its own answers


@pytest.mark.parametrize("name, left, right, asked, values, counts", [
    # The probabilities of A and T, which are 100 and 0; of none.
    ("verifier", [0.5, *[0] * 18, 0.25], [0] * 20, None, [2 / 3, None], (2, 1)),
    # Those of Yes and No after each action, and before.
    ("delta_belief", [0.3, 0.1], [0, 0.4], [0.2, 0.2], [math.log(0.75) - math.log(0.5), None], (3, 1)),
])  # fmt: skip
def test_beliefs_of_a_judge_by_hand(name, left, right, asked, values, counts):
    def valid_logprobs(requests):
        texts = [request.state.observation for request in requests]
        p = [left if ACTIONS[0] in text else right if ACTIONS[1] in text else asked for text in texts]
        with np.errstate(divide="ignore"):
            return np.log(p)

    assert judged(name, valid_logprobs=valid_logprobs) == (pytest.approx(values), counts)


LAKE = "--env frozenlake --env-option map=random4 --run . --preset paper"


@pytest.fixture
def study(agent):
    """Run a study of a few states of small lakes; the rows of its tables, by set of labels and score."""

    def run(flags=""):
        qval.main(over(f"{LAKE} --sft {agent} --points 5", flags))
        return pd.read_csv("qval/alignment.csv", index_col=["labels", "scorer"])

    return run


def test_a_study_is_of_its_points_and_has_all_scores_that_can_be(study):
    assert {"random", "code", "oracle"} <= set(study().loc["exact"].index)
    points, scores = (read_jsonl(Path("qval", name)) for name in ("points.jsonl", "scores-code.jsonl"))
    assert [line["hash"] for line in scores] == [point["hash"] for point in points]
    with refused("points 5, not 6"):
        study("--points 6")


def test_scores_steer_a_search_whose_rewards_a_study_predicts(study, agent, monkeypatch, capsys):
    names = "random code logprob untried"
    monkeypatch.setattr(FastPolicy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    judges.main(f"{LAKE} --sft {agent} --limit 5 -M 3 --judge {names} self_distillation".split())
    line = read_jsonl(Path("results-judges.jsonl"))[-1]
    assert line["player"] == "self_distillation" and line["env_steps"] > line["n_steps"]  # it steps each candidate
    flags = "--trajectories 3 -K 2 --references exact policy --results results-judges.jsonl --points 20"
    rows = study(f"{flags} --scorers {names} oracle")
    assert {*rows.index.get_level_values("labels")} == {"exact", "policy max", "policy mean"}
    assert rows.loc["exact"].loc["oracle", "rho"] == pytest.approx(1)
    assert "Over 4 scores:" in capsys.readouterr().out


def test_a_study_with_a_checkpoint_as_judge(study, agent):
    names = "verifier delta_belief direct ranking"
    rows = study(f"--judge {agent} --judge-tokens 4 --scorers {names}").loc["exact"]
    assert {*rows.index} == {"random", *names.split()}
    assert rows["coverage"][["direct", "verifier"]].tolist() == [0, 1]  # random weights write nonsense
