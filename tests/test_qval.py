"""QVAL: points that replay, labels by brute force, statistics by hand, scorers and judges by script."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes import FakeEnv, Script, explore, say
from safetensors.torch import load_file, save_file

import envs
from experiments import child, compare
from experiments.qval import __main__ as qval
from experiments.qval import downstream, metrics, search, targets
from experiments.qval.judges import Judging
from experiments.qval.metrics import RHO
from experiments.qval.points import Point, digest, label, trajectory
from experiments.qval.scorers import SCORERS, Call, Context, Decision, Entry, answer, entry
from qlass import Refused, UserError
from qlass.policy import load_policy
from qlass.batching import Candidate, Sample, drive
from qlass.chat import Rendering
from qlass.fast.decode import FastPolicy
from qlass.outputs import read_jsonl, write_jsonl
from qlass.messages import State, react
from build_trees import tree_records

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


def test_a_trajectory_ends_where_its_expert_does(monkeypatch):
    monkeypatch.setattr(FakeEnv, "expert", lambda self, task_id: iter([("", "right")]))
    env = FakeEnv()
    assert played(trajectory(env, "val0", 0, "expert", 0.0, 2, RENDERING, 0)) == []  # too short to keep one
    assert env.path == ("right",)


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
    return Context(SimpleNamespace(**arguments, judge=None), {"sft": load_policy(agent)})


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
    hinted, told = scored("self_distillation", context), scored("sdpo_gt", context)
    assert hinted != pytest.approx([0.0, 0.0]) and told != pytest.approx(hinted)
    actions = [react("", action) for action in ("left", "right", "up")]
    # The root's actions are worth .405 and .36, the least of the tree; the most is .5. "up" occurs nowhere.
    assert scored("tree_bellman", context, actions) == [pytest.approx(0.045 / 0.14), 0, None]
    assert scored("tree_plain", context, actions) == [1, 0, None]  # the branches' rewards


def test_on_slippery_ice_no_score_foresees_the_slip():
    env = envs.make("frozenlake", map="4x4", slippery=True)
    looks = []
    for task in env.task_ids("all"):
        state = State.first(env, *env.reset(options={"task_id": task}))
        for step in range(6):
            if not env.valid_actions():
                break
            after, _ = Decision(env, state, ["right"], (task, step)).after("right")
            q = compare.ahead(env, state, "right")
            assert q == env.q_star_of("right")
            state, _, _ = state.act(env, "right")
            looks.append(after == state)
    assert 0 < sum(looks) < len(looks) / 2  # by chance: it slips in two of three steps


@pytest.mark.parametrize("first", [{"system": "You walk."}, {"agreement": ""}])
def test_first_messages_of_any_layout_are_left_out(first, context, monkeypatch):
    for name, text in first.items():
        monkeypatch.setattr(FakeEnv, name, text)
    env = FakeEnv()
    state = root(env)
    judge = Judging(context, Decision(env, state, ACTIONS, ()))
    assert sum("stand at start" in text for _, text in judge.talk) == 1
    assert scored("untried", context) == [0.0, 0.0]


class Judge:
    """A judge by script: `reply` gives what it writes to a request, `p` the probabilities of valid answers."""

    def __init__(self, reply=lambda request: "", p=None):
        self.reply, self.p, self.requests = reply, p, []

    def sample(self, requests):
        self.requests += requests
        return [[Candidate(self.reply(request), 1, 0.0)] * request.n for request in requests]

    def valid_logprobs(self, requests):
        self.requests += requests
        with np.errstate(divide="ignore"):
            return [np.log(self.p(request)) for request in requests]


def judged(name, judge, actions=ACTIONS):
    """A score where a judge is asked: its values, and how many answers there are and cannot be read."""
    arguments = {"env": "frozenlake", "server": None, "judge": "small", "run": Path(), "sft": None}
    context = Context(SimpleNamespace(**arguments))
    context.judge = judge
    values = scored(name, context, actions)
    return values, (context.counts["answers"], context.counts["unread"]), context


@pytest.mark.parametrize("name, replies, values, counts", [
    ("direct", ["1: 70", "<think>1: 5</think>2: 20.5"], [70, 20.5], (2, 0)),
    ("direct", ["1: 70 %", "It is good."], [70, None], (2, 1)),
    ("direct", ["1: 170", "1: -3"], [None, None], (2, 2)),  # not of the scale
    ("direct_16", ["1: 30", "1: 40"], [30, 40], (32, 0)),
    ("gvl", ["**1.** 10", "1) 90"], [10, 90], (2, 0)),
    ("sequential", ["1: 60", "no"], [60, None], (2, 1)),
    ("batched", ["1: 60\n2: 40"], [60, 40], (2, 0)),
    ("batched", ["The scores\n2: 40"], [None, 40], (2, 1)),
    ("ranking", ["Ranking: 2, 1"], [-1, 0], (2, 0)),
    ("ranking", ["Not 1, 2 but\nRanking: 1 = 2, as 2 does."], [0, 0], (2, 0)),  # the last one; it may say equal
    ("ranking", ["Ranking: 2, 2"], [None, None], (2, 2)),
])  # fmt: skip
def test_replies_of_a_judge_are_read_and_counted(name, replies, values, counts):
    rest = iter(replies)
    judge = Judge(lambda request: next(rest))
    assert judged(name, judge)[:2] == (values, counts)
    first, last = judge.requests[0].state.messages, judge.requests[-1].state.messages
    assert "you stand at start" in first[0][1]
    assert "1. " + ACTIONS[0] + "\nAfter it the agent would see: Observation: you stand at start left" in first[-1][1]
    assert last[-2] == ("assistant", "1: 60" if name == "sequential" else first[-2][1])  # it knows its own answers


def test_beliefs_of_a_judge_by_hand():
    letters = {"left": np.eye(20)[0] * 0.5 + np.eye(20)[19] * 0.25, "right": np.zeros(20)}  # p of A and T; of none
    grades = Judge(p=lambda request: letters["left" if ACTIONS[0] in request.state.messages[-1][1] else "right"])
    assert judged("verifier", grades)[:2] == ([pytest.approx(2 / 3), None], (2, 1))

    def yes_or_no(request):
        text = request.state.messages[-1][1]
        return np.array([0.3, 0.1] if ACTIONS[0] in text else [0.0, 0.4] if ACTIONS[1] in text else [0.2, 0.2])

    values = [pytest.approx(math.log(0.75) - math.log(0.5)), None]
    assert judged("delta_belief", Judge(p=yes_or_no))[:2] == (values, (3, 1))


HEAD = "So:\n```python\ndef signal_function(state, action, next_state):\n    return "
LENGTH, TURNS = HEAD + "len(action)\n```", HEAD + "next_state.count('left') - state.count('left')\n```"


def test_functions_of_a_judge_by_hand():
    values, counts, context = judged("codegen", Judge(lambda request: LENGTH))
    assert (values, counts) == ([4, 5], (2, 0)) and context.counts["sources"] == [LENGTH[14:-3]]
    several = Judge()
    several.sample = lambda requests: [[Candidate(text, 1, 0.0) for text in (LENGTH, TURNS, "none", HEAD + "\n```")]]
    assert judged("codegen_mean", several)[:2] == ([(4 + 2) / 2, (5 + 0) / 2], (8, 4))  # two have no values

    choices = iter(["Function 2 is.", "the first", "3"])  # of each round; what cannot be read is the first

    def improves(request):
        return next(choices) if "Which function" in request.state.messages[-1][1] else LENGTH

    judge = Judge(improves)
    assert judged("eureka", judge)[:2] == ([4, 5], (3 + 2, 1))
    asked = [request.state.messages[-1][1] for request in judge.requests]
    assert ["Improve on this" in text for text in asked] == [False, False, True, False, True, False]
    assert "Function 4: [4.0, 5.0]" in asked[1] and [request.n for request in judge.requests] == [4, 1] * 3


def test_written_code_runs_in_a_process_of_its_own_and_not_for_long(capfd, monkeypatch):
    source = "def f(x):\n    print(x)\n    while x == 4: pass\n    return 1 / (x - 1) if x - 2 else float('inf')"
    values = child.values("f", source, [(0,), (1,), (2,), (3,), (4,), (5,)], seconds=1)
    assert values == [-1, None, None, 0.5, None, None]
    assert child.values("f", "def f(x): return len(bytes(x))", [(1 << 31,), (3,)]) == [None, 3]  # of memory
    assert child.values("f", "import os\ndef f(x): os._exit(0)", [(0,)]) == child.values("f", "", [(0,)]) == [None]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert child.values("f", "import os\ndef f(): return 'OPENAI_API_KEY' in os.environ", [()]) == [0]
    assert capfd.readouterr() == ("", "")


def test_qvals_published_files_load_as_scores(tmp_path):
    def write(name, values, form="", counts=None):
        config = {"prediction_format": form, "candidate_counts": counts} if form else {}
        record = {"method_name": name, "method_type": "eval", "values": values, "config": config, "metadata": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return str(tmp_path / f"{name}.json")

    ranked = write("ranking_qv", [1.0, 2.0, 3.0, None, None], "ranking_predicted", [3, 2])
    assert qval.read_predictions(ranked) == [[-1, -2, -3], [None, None]]
    assert qval.read_predictions(write("direct_qv", [0.5, None])) == [[0.5], [None]]
    labels = write("gt", [0.9, 0.5, 0.5, 0.0, 1.0, 1.0], "ranking_q_values", [3, 2, 1])
    scores = write("sdpo_qv", [0.1, 0.2, 0.3, 1.0, 2.0], "ranking_scores", [3, 2])
    ranks, others = (line.split(" | ") for line in qval.published(labels, ranked, scores).splitlines()[-2:])
    # On the two states that all files have rho is sqrt(3) / 2 and unknown; -sqrt(3) / 2 and 1.
    assert [*ranks[1:3], ranks[6]] == ["published", "0.866", "0.600"] and others[2].startswith("0.067")


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
    with pytest.raises(UserError, match="--against typo: choose among random"):
        study("--scorers", "random", "--against", "typo")
    study("--overwrite", "--scorers", "random", points="6")
    assert {path.name for path in folder.glob("predictions/*")} == {"random.json", "random.json.meta.json"}


def test_a_state_that_a_server_refuses_has_no_score(study, tmp_path, monkeypatch, capsys):
    calls = []

    async def scores(context, decision):
        calls.append(decision)
        if len(calls) == 1:
            raise Refused("against the rules")
        return [1.0] * len(decision.candidates)

    monkeypatch.setitem(SCORERS, "untried", Entry("control", scores))
    study("--scorers", "untried")
    record = json.loads((tmp_path / "qval" / "predictions" / "untried.json").read_text())
    assert record["values"] == [None, 1.0, 1.0, 1.0, 1.0]
    assert "has no score: against the rules" in capsys.readouterr().err


def test_a_study_of_a_small_lake(study, tmp_path, agent, monkeypatch, capsys):
    names, results = ["random", "step_index", "code", "logprob", "untried"], tmp_path / "results.jsonl"
    monkeypatch.setattr(FastPolicy, "sample", lambda self, requests: [say("right") * r.n for r in requests])
    search = ["search", *LAKE, str(tmp_path), "--sft", str(agent), "-M", "3", "--limit", "5", "--scorer"]
    qval.main([*search, *names])
    assert list(downstream.rewards(results, "frozenlake")) == names
    with pytest.raises(UserError, match="oracle_step"):  # who knows the true values steers no search
        qval.main([*search, "oracle"])
    with pytest.raises(UserError, match="--distinct: this search has no use for it"):
        qval.main([*search, "random", "--distinct"])
    flags = ["--trajectories", "3", "-K", "2", "--references", "exact", "policy", "--sft", str(agent)]
    labels = study(*flags, "--results", str(results), "--scorers", *names, "oracle", points="20")
    assert set(labels) == {"exact", "policy max", "policy mean"}
    assert [labels["exact"][name][RHO]["mean"] for name in ("oracle", "step_index")] == pytest.approx([1, 0])
    assert "| 4 scorers, 5 tasks |" in capsys.readouterr().out  # the step index is of the state alone


def test_a_study_with_a_checkpoint_as_judge(study, tmp_path, agent, capsys):
    names = ["random", "verifier", "delta_belief", "direct", "ranking"]
    flags = ["--judge", str(agent), "--judge-tokens", "4", "--scorers", *names]
    rows = study(*flags)["exact"]
    assert {*rows} == {"random", *(f"{name}=sft" for name in names[1:])}
    record = json.loads((tmp_path / "qval" / "predictions" / "direct=sft.json").read_text())
    answers, unread = (record["metadata"][key] for key in ("answers", "unread"))
    assert answers == sum(map(len, record["metadata"]["candidate_values"])) == unread  # random weights write nonsense
    assert rows["direct=sft"]["unread"] == f"{unread} of {answers}" and rows["verifier=sft"]["unread"] == "–"
    assert rows["verifier=sft"]["coverage"] == 1 and rows["direct=sft"]["coverage"] == 0
    assert f"| {unread} of {answers} |" in capsys.readouterr().out
    with pytest.raises(UserError, match="--judge"):
        study("--scorers", "direct")
    other = shutil.copytree(agent, tmp_path / "other" / "sft")  # another judge of the same name
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    flags[1] = str(other)
    assert study(*flags)["exact"]["verifier=sft"] != rows["verifier=sft"]


def test_td_and_mc_targets_by_hand():
    edges = [(None, 0, 0.0, 0), (0, 1, 0.0, 1), (1, 2, 1.0, 1), (1, 2, 0.0, 2), (0, 1, 0.2, 3)]
    tree = [{"node_id": i, "parent_id": parent, "depth": depth, "reward": reward, "branch": branch, "done": i > 1}
            for i, (parent, depth, reward, branch) in enumerate(edges)]  # fmt: skip
    assert targets.td(tree, 0.5) == pytest.approx([0.5 * (0.25 + 0.2) / 2, 0.5 * (1 + 0) / 2, 1, 0, 0.2])
    assert targets.mc(tree, 0.5)[1:] == [0.5, 1, 0, 0.2]  # the first branch made node 1
