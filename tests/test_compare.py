"""All methods side by side: the environment's players, oracles, the plan of `all`, wordings on the command line."""

import math

import pytest
from fakes import FakeEnv, Script, actions_of, refused, run, talk, word_chat

from experiments import compare as stage
from experiments import paraphrase
from experiments.compare import Oracle, Player
from qlass.batching import Sample

LOOK = Oracle("oracle_lookahead", "q", M=2, looks=True)


@pytest.mark.parametrize(
    ("method", "q", "way", "reward", "scored"),
    [
        (Oracle("oracle_step", "truth", M=2, looks=True), None, "right right right", 1.0, 0),
        # A look ahead sees rewards but no values: from R, left ends the episode with .4; right counts by its q.
        (LOOK, 0.3, "right left", 0.4, 3 + 6 + 8 + 2 * 2 * 5),
        (LOOK, 0.41, "right right right", 1.0, 26 + 3 * 2 * 5),
    ],
)
def test_oracles_step_each_candidate(method, q, way, reward, scored):
    env, script = FakeEnv(), Script({}, "left right")

    def answer(request):
        if isinstance(request, Sample):
            return script(request)
        return [q * ("right" in action) for action in request.actions]

    record, _ = run(method.play(env, "test0", word_chat()), answer)
    path = actions_of(record)
    assert (" ".join(path), record["reward"]) == (way, reward)
    assert record["env_steps"] == len(env.played) == 3 * len(path)  # two looks and a step
    assert (record["tokens"]["scored"], record["tokens"]["generated"]) == (scored, 6 * len(path))


@pytest.mark.parametrize(
    ("turns", "scores"),
    [
        ("", [2, 1]),  # both are new
        ("left:a left:a", [-math.inf, 1]),
        ("left:a left:b right:a left:b", [2, 1]),  # none is untried
    ],
)
def test_untried_candidates_come_first(turns, scores):
    state = talk("walk", "OK", "start")
    for action, page in (turn.split(":") for turn in turns.split()):
        state = state.extended(f"Action: {action}", page)
    (method,) = plan("--method untried_qlass -M 2")
    actions = ["Action: left", "Thought: hm Action: right"]
    found, _ = run(method.scores(state, actions, [], ()), lambda request: [2, 1])
    assert found == scores and str(method) == "qlass:untried first M=2"


def plan(flags):
    return stage.plan_of(FakeEnv(), stage.settings_of(f"--env frozenlake {flags}".split()))


def test_all_is_the_comparison_of_all_methods(monkeypatch):
    assert list(map(str, plan("--method all qlass -M 2"))) == list(map(str, plan("-M 2")))  # each once
    assert {"best_of_n N=3 select=q", "qlass M=2 N=3 select=q"} <= {*map(str, plan("-M 2 -N 3"))}
    monkeypatch.setattr(FakeEnv, "omniscient", True)  # its expert knows more than the pages
    assert plan("--method expert oracle") == [Player("oracle")]
    for name in ("expert", "rules"):  # as a class of one's own may
        monkeypatch.delattr(FakeEnv, name)
    assert not {"oracle", "expert"} & {str(method) for method in plan("-M 2")}
    with refused("^--method rule: fake has no rules that play it$"):
        plan("--method rule")


def test_every_method_leaves_a_line_for_each_task(search, capsys):
    records = search("--method all oracle_lookahead -M 2 3 --split val --label x")
    assert {(r["env"], r["split"], r["label"], r["seed"]) for r in records} == {("fake", "val", "x", 0)}
    played = {(r["player"] or r["method"], r["M"], r["N"], r["select"], r["task_id"]): r for r in records}
    assert len(played) == len(records) == 17 * 3 and {key[-1] for key in played} == {"val0", "val1", "val2"}
    for player, reward, steps in (("expert", 1, 3), ("oracle", 1, 3), ("always left", 0, 2)):
        record = played[player, 1, 1, "", "val0"]
        assert (record["reward"], record["n_steps"], record["env_steps"]) == (reward, steps, steps)
    assert capsys.readouterr().out.count("mean reward") == 17


def test_each_candidate_has_its_own_wording_if_a_server_words_the_task(search, monkeypatch):
    asked = []

    def by_server(url, timeout):
        return lambda task, index: asked.append((url, index)) or f"{'the ' * index}{task}"

    monkeypatch.setattr(paraphrase, "by_server", by_server)
    monkeypatch.setattr(FakeEnv, "instruction", "walk find the purse")  # whose words are changed
    lines = search("--method likeliest expert -M 3 --paraphrase-server URL")
    assert {line["label"] for line in lines} == {"paraphrased"}
    assert asked == [("URL", index) for index in range(3)]  # each once for all tasks, which say the same
