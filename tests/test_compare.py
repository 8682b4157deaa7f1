"""All methods side by side: the environment's players, oracles, the plan of `all`, wordings on the command line."""

import math

import pytest
from fakes import FakeEnv, Script, run, word_chat

import envs
from experiments import compare as stage
from experiments.compare import Oracle, Player
from experiments.lookup import look_up
from experiments.paraphrase import RULES
from q_search import Method
from qlass import UserError
from qlass.batching import Sample, Score
from qlass.messages import State, parse_action

LOOK = Oracle("oracle_lookahead", "q", M=2, looks=True)


@pytest.mark.parametrize(("method", "q", "way", "reward", "scored"), [
    (Oracle("oracle_step", "truth", M=2, looks=True), None, "right right right", 1.0, 0),
    # A look ahead sees rewards but no values: from R, left ends the episode with .4; right counts by its q.
    (LOOK, 0.3, "right left", 0.4, 3 + 6 + 8 + 2 * 2 * 5),
    (LOOK, 0.41, "right right right", 1.0, 26 + 3 * 2 * 5),
])  # fmt: skip
def test_oracles_step_each_candidate(method, q, way, reward, scored):
    env, script = FakeEnv(), Script({}, "left right")

    def answer(request):
        if isinstance(request, Sample):
            return script(request)
        return [q if parse_action(action) == "right" else 0.0 for action in request.actions]

    record, _ = run(method.play(env, "test0", word_chat()), answer)
    path = [parse_action(step["action"]) for step in record["steps"]]
    assert (path, record["reward"]) == (way.split(), reward)
    assert record["env_steps"] == len(env.played) == 3 * len(path)  # two looks and a step
    assert record["tokens"]["scored"] == scored and record["tokens"]["generated"] == 6 * len(path)


def test_a_belief_is_the_mean_of_the_worlds_drawn(monkeypatch):
    def imagine(env, *key):
        other = env.fork()
        other.world = {"left": 0.6 * (key[-1] < 2), "right": 0.0}
        return other

    monkeypatch.setattr(stage, "imagine", imagine)
    env, actions = FakeEnv(), ["Action: left", "Action: right"]
    state = State.first(env, *env.reset(options={"task_id": "test0"}))
    belief = Oracle("oracle_belief", "truth", M=2, drawn=3, env=env)
    assert run(belief.scores(state, actions, ("test0", 0, 0)), None)[0] == pytest.approx([0.4, 0.0])
    with pytest.raises(UserError, match="oracle_belief: fake draws no worlds that agree"):
        plan("--method", "oracle_belief")


@pytest.mark.parametrize(("turns", "scores"), [
    ("", [2, 1]),  # both are new
    ("left:a", [2, 1]),  # a page that is new begins again
    ("left:a left:a", [-math.inf, 1]),
    ("left:a left:b right:a left:b", [-math.inf, -math.inf]),
])  # fmt: skip
def test_untried_candidates_come_first(turns, scores):
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "start")))
    for turn in turns.split():
        action, page = turn.split(":")
        state = state.then(f"Action: {action}", page)
    (method,) = plan("--method", "untried_qlass", "-M", "2")
    found, _ = run(method.scores(state, ["Action: left", "Thought: hm Action: right"], ()), lambda request: [2, 1])
    assert found == (scores if math.isfinite(max(scores)) else [2, 1]) and str(method) == "qlass:untried first M=2"


def plan(*argv: str) -> list[Method]:
    return stage.plan_of(FakeEnv(), stage.settings_of(["--env", "frozenlake", *argv]))


def test_all_is_the_comparison_of_all_methods(monkeypatch):
    everything = plan()
    assert [m.M for m in everything if m.name == "qlass"] == [2, 4, 6]
    best_of_n = {(m.N, m.select) for m in everything if m.name == "best_of_n"}
    assert best_of_n == {(n, select) for n in (2, 4, 6) for select in ("q", "oracle")}
    assert {"expert", "greedy", "sample", "random", "likeliest", "oracle_step"} < {m.name for m in everything}
    assert list(map(str, plan("--method", "all", "qlass", "-M", "2"))) == list(map(str, plan("-M", "2")))  # each once
    monkeypatch.setattr(FakeEnv, "omniscient", True)  # its expert knows more than the pages
    assert plan("--method", "expert", "oracle") == [Player("oracle")]


def test_every_method_leaves_a_line_for_each_task(search, capsys):
    records = search("--method", "all", "oracle_lookahead", "-M", "2", "3", "--split", "val", "--label", "x")
    assert len(records) == 17 * 3 and {r["task_id"] for r in records} == {"val0", "val1", "val2"}
    assert {(r["env"], r["split"], r["label"], r["seed"]) for r in records} == {("fake", "val", "x", 0)}
    fields = "task_id type block env split label method M N select player seed task"  # as data/README.md has them
    fields += " reward success n_steps unknown_actions tokens env_steps resets steps"
    assert list(records[0]) == fields.split()
    played = {(r["player"] or r["method"], r["M"], r["N"], r["select"], r["task_id"]): r for r in records}
    assert len(played) == len(records)
    for task in ("val0", "val1", "val2"):
        for player, reward, steps in (("expert", 1, 3), ("oracle", 1, 3), ("always left", 0, 2)):
            record = played[player, 1, 1, None, task]
            assert (record["reward"], record["n_steps"], record["env_steps"]) == (reward, steps, steps)
    assert capsys.readouterr().out.count("mean reward") == 17


@pytest.mark.parametrize("order", [("expert", "greedy"), ("greedy", "expert")])
def test_players_share_a_file_with_the_agent(search, order):
    for name in order:
        records = search("--method", name)
    assert {record["method"] for record in records} == set(order)


def test_paraphrased_candidates(search, monkeypatch):
    asked = []
    with pytest.raises(UserError, match="--paraphrase: there are no rules for fake"):
        search("--method", "likeliest", "-M", "3", "--paraphrase", "0")
    monkeypatch.setattr(FakeEnv, "instruction", "walk find the purse")  # whose words are changed
    monkeypatch.setitem(RULES, "fake", lambda task, n: asked.append(n) or f"{'the ' * n}{task}")
    lines = search("--method", "likeliest", "-M", "3", "--paraphrase", "0")
    assert {line["label"] for line in lines} == {"paraphrased"}
    assert set(asked) == {0, 1, 2}  # each of the M under its own wording


def test_a_look_up_knows_the_mean_q_of_a_move_and_of_an_unseen_one_the_mean_of_all():
    env = envs.make("frozenlake", map="lakes")
    nodes = [("root", None, None), ("right", 0, 0.5), ("down", 0, 0.9), ("right", 1, 0.1)]
    tree = [
        {"node_id": i, "parent_id": parent, "observation": "you", "action": f"Action: {move}", "q": q}
        for i, (move, parent, q) in enumerate(nodes)
    ]
    state = State((("user", "i"), ("assistant", "OK"), ("user", "you")))
    (scores,) = look_up([tree], env)([Score(state, ("Action: right", "Thought: hm\nAction: down", "Action: up"))])
    assert scores == pytest.approx([0.3, 0.9, 0.5])
