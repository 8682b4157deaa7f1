"""Retry on a written world: when it stops, what it costs, and where a reflection goes."""

import pytest
from fakes import FakeEnv, path_of, run, say, word_chat

from experiments import retry
from experiments.retry import Reflect, Retry, Trials
from q_search import Method
from qlass.batching import Sample, Score
from qlass.files import read_jsonl
from qlass.messages import parse_action
from qlass.results import environment_tokens

CHAT = word_chat()
TRIALS = ["left left", "right left", "right right right", "left right left"]  # rewards 0, .4, 1, .5
Q = [0.3, 0.8, 0.7, 0.1]  # what QNet thinks of them


def answer(request):
    if isinstance(request, Sample):
        return say(TRIALS[request.key[1]].split()[request.key[2]])
    if isinstance(request, Score):
        path = " ".join((*path_of(request.state), parse_action(request.actions[0])))
        return [Q[TRIALS.index(path)]]
    return "plan after " + " ".join(path_of(request.state))


def play(select, stop, N=4, reflect=False, trials=None):
    method = Retry("retry", N=N, select=select, stop=stop, reflect=reflect)
    return run((trials or Trials(CHAT)).play(FakeEnv(), "test0", method), answer)


@pytest.mark.parametrize(
    ("select", "stop", "N", "trials", "reward"),
    [
        ("oracle", 1 - 1e-9, 4, 3, 1.0),  # it sees that the third is right
        ("oracle", 1 - 1e-9, 2, 2, 0.4),  # none is: the best of them
        ("q", 0.75, 4, 2, 0.4),  # QNet stops too early
        ("q", 0.9, 4, 4, 0.4),  # never, so QNet's choice of all
    ],
)
def test_when_it_stops_and_what_counts(select, stop, N, trials, reward):
    record, requests = play(select, stop, N)
    assert (record["resets"], record["reward"]) == (trials, reward)
    assert (record["tokens"]["scored"] > 0) == any(isinstance(r, Score) for r in requests) == (select == "q")
    assert record["tokens"]["generated"] == 3 * record["env_steps"] == 3 * sum(len(t.split()) for t in TRIALS[:trials])


def test_trials_are_those_of_best_of_n():
    trials = Trials(CHAT)
    expected, _ = run(trials.play(FakeEnv(), "test0", Method("best_of_n", N=4, select="q")), answer)
    record, requests = play("q", 0.9, trials=trials)
    assert all(isinstance(request, Score) for request in requests)  # what was sampled for one serves the other
    assert record == expected


def test_a_plan_stands_in_the_next_prompt_and_costs_its_tokens():
    record, requests = play("oracle", 1 - 1e-9, reflect=True)
    trials = [r.state for r in requests if isinstance(r, Sample)]
    first = {r.key[1]: r.state.messages[0][1] for r in requests if isinstance(r, Sample)}
    assert first[0] == "walk"
    assert first[1] == "walk" + retry.PLANS + "plan after left left"
    assert first[2] == first[1] + "\nplan after right left"
    reflections = [r for r in requests if isinstance(r, Reflect)]
    assert len(reflections) == 2 and reflections[0].state.messages[-1][1].endswith(retry.ASK)
    assert record["tokens"]["generated"] > play("oracle", 1 - 1e-9)[0]["tokens"]["generated"]
    asks = [len(CHAT.message_tokens(r.state)[-1]) for r in reflections]  # what comes before is in the cache
    read = environment_tokens(CHAT, ([s] for s in trials if len(s.messages) == 3))
    read += sum(len(CHAT.message_tokens(s)[-1]) for s in trials if len(s.messages) > 3)
    assert record["tokens"]["prompt"] == sum(asks) + read


def test_the_command_line(tmp_path, agent, fake_world):
    retry.main(["--run", str(tmp_path), "--sft", str(agent), "-N", "2", "--limit", "2"])
    records = list(read_jsonl(tmp_path / "results.jsonl"))
    assert {(r["method"], r["player"]) for r in records} == {("retry", "stop=oracle"), ("best_of_n", None)}
    assert all(r["select"] == "oracle" and r["resets"] <= 2 for r in records) and len(records) == 4
