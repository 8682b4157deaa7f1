"""Self-training: which trajectories are made, which are kept, and in which file stage 1 finds them."""

from pathlib import Path

import pytest
from fakes import FakeEnv, Script, node, over, run, talk, word_chat, write

from experiments import self_train
from experiments.self_train import best_branch, expert_branch, kept
from q_search import Method
from qlass import demonstrations
from qlass.files import meta_of, read_jsonl, write_json
from qlass.inputs import sha256
from qlass.messages import parse_action


def tree(*nodes):
    messages = [{"role": "user", "content": "start"}]
    root = node(0, None, env="fake", task="find", nodes=1 + len(nodes), messages=messages, source="root")
    return [root, *({"source": "policy"} | other for other in nodes)]


def test_best_branch_by_hand():
    expert, fair = node(1, 0, 1.0, done=True, source="expert"), node(3, 2, 0.6, done=True, depth=2)
    longer = [node(4, 0, depth=1), node(5, 4, depth=2), node(6, 5, 0.6, done=True, depth=3)]
    (line,) = best_branch(tree(expert, node(2, 0, depth=1), fair, *longer))
    assert [m["content"] for m in line.pop("messages")] == ["start", "Action: 2", "saw 2", "Action: 3"]
    assert line == {"task_id": "t", "env": "fake", "task": "find", "reward": 0.6}
    # The agent continues from the expert's node: its own branch all the same.
    own = node(2, 1, 0.6, done=True, depth=2)
    assert best_branch(tree(node(1, 0, source="expert"), own))[0]["reward"] == 0.6
    assert best_branch(tree(expert)) == []
    (shown,) = kept(expert_branch(tree(expert | {"expert": True})), 0.0, [])
    assert shown["source"] == "expert"


def line(text, reward):
    messages = talk("s", text).dump()
    return {"task_id": "t", "env": "fake", "task": "", "messages": messages, "reward": reward, "tokens": {}}


def test_kept_are_new_distinct_and_good():
    lines = [line("a", 1.0), line("a", 1.0), line("b", 0.8), line("c", 0.79), line("known", 1.0)]
    lines += [line("", 1.0), line("<think>Action: a, but", 1.0)]  # which no agent is cloned from
    chosen = kept(lines, 0.8, [line("known", 1.0)])
    assert [c["messages"][1]["content"] for c in chosen] == ["a", "b"]
    assert chosen[0]["source"] == "policy" and "source" not in line("known", 1.0)  # so it is no tree's demonstration


def test_trajectories_are_whole_chats_with_their_reward():
    policy = Script({(): "left right", ("right",): "left right", ("right", "right"): "right"})
    lines, requests = run(self_train.trajectories(FakeEnv(), "train0", Method("sample", N=3), word_chat()), policy)
    walks = [tuple(parse_action(m["content"]) for m in line["messages"][3::2]) for line in lines]
    assert walks == [("left", "left"), ("right", "left"), ("left", "left")]
    assert [line["reward"] for line in lines] == [0.0, 0.4, 0.0]
    assert len({r.key for r in requests}) == len(requests)


@pytest.fixture
def stage(fake_world, agent, value_net, monkeypatch):
    """Self-training of an agent that was cloned from two of three demonstrations; the file that it leaves."""
    monkeypatch.setattr(FakeEnv, "rules", lambda self: {})
    Path("sft").symlink_to(agent)
    Path("qnet").symlink_to(value_net)
    messages = talk("walk", "Action: go").dump()
    expert = [{"messages": messages, "task": "", "reward": 1.0, "task_id": f"mine{i}"} for i in range(3)]
    write("expert.jsonl", expert)
    recipe = {"model": "tiny", "n_expert": 2, "expert": sha256(Path("expert.jsonl"))}
    write_json(Path("sft.meta.json"), {"recipe": recipe, "inputs": {"expert": "expert.jsonl"}})

    def start(method, flags=""):
        self_train.main(over(f"--env frozenlake --run . --method {method} --threshold 0", flags))
        return read_jsonl(Path(f"self_train-{method}.jsonl"))

    return start


def test_new_trajectories_stand_behind_the_demonstrations_that_the_agent_was_cloned_from(stage, capsys):
    merged = stage("qlass", "-N 2")
    assert [line["task_id"] for line in merged[:2]] == ["mine0", "mine1"]  # n_expert
    read = demonstrations.read(Path("self_train-qlass.jsonl"), FakeEnv())
    assert [line.source for line in read] == ["expert"] * 2 + ["policy"] * (len(merged) - 2)
    played = read_jsonl(Path("self_train-qlass.rollouts.jsonl"))
    assert [len(record["trajectories"]) for record in played] == [2] * 6
    assert len(merged) - 2 == meta_of(Path("self_train-qlass.jsonl"))["kept"]
    assert "--expert self_train-qlass.jsonl --out sft-qlass" in capsys.readouterr().out


def test_a_second_call_plays_nothing_and_another_threshold_chooses_anew(stage, monkeypatch):
    merged = stage("rft")
    monkeypatch.setattr(self_train, "load_agent", lambda *_: 1 / 0)
    assert stage("rft") == merged
    best = max(line["reward"] for line in merged[2:])
    assert {line["reward"] for line in stage("rft", f"--threshold {best}")[2:]} == {best}
