"""Self-training: which trajectories are made, which are kept, and what stage 1 is then asked to do."""

import json
from types import SimpleNamespace

import pytest
from fakes import FakeEnv, Script, dump, run, settings_of, word_chat
from test_bellman import node

import sft
from experiments import self_train
from experiments.self_train import best_branch, kept
from q_search import Method
from qlass import Refused, UserError
from qlass.outputs import read_jsonl
from qlass.messages import State, parse_action


def tree(*nodes):
    messages = [{"role": "user", "content": "start"}]
    root = node(0, None, env="fake", task="find", nodes=1 + len(nodes), messages=messages, source="root")
    return [root, *({"source": "policy"} | other for other in nodes)]


def test_best_branch_by_hand():
    expert, fair = node(1, 0, 1.0, done=True, source="expert"), node(3, 2, 0.6, done=True, depth=2)
    longer = [node(4, 0, depth=1), node(5, 4, depth=2), node(6, 5, 0.6, done=True, depth=3)]
    line = best_branch(tree(expert, node(2, 0, depth=1), fair, *longer))
    assert [m["content"] for m in line["messages"]] == ["start", "Action: 2", "saw 2", "Action: 3"]
    assert (line["task_id"], line["env"], line["task"], line["reward"]) == ("t", "fake", "find", 0.6)
    # The agent continues from the expert's node: its own branch all the same.
    assert best_branch(tree(node(2, 0, source="expert"), fair))["reward"] == 0.6


def line(text, reward):
    messages = [{"role": "user", "content": "s"}, {"role": "assistant", "content": text}]
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
    assert [tuple(parse_action(m["content"]) for m in line["messages"][3::2]) for line in lines] == [
        ("left", "left"), ("right", "left"), ("left", "left")]  # fmt: skip
    assert [line["reward"] for line in lines] == [0.0, 0.4, 0.0]
    first = len(word_chat().prompt(State.load(lines[0]["messages"][:3], lines[0]["task"])))
    assert first < lines[0]["tokens"]["prompt"] < 3 * first  # what they begin with is read once
    assert len({r.key for r in requests}) == len(requests)


@pytest.fixture
def stage(tmp_path, fake_world, monkeypatch):
    """A run folder with an SFT checkpoint of two demonstrations, models by script; it returns what sft.main got."""
    policy, messages = Script({}, "right left"), State((("user", "walk"), ("assistant", "OK"))).dump()

    def sample(requests):
        start.sampled += requests
        return [Refused("against the rules") if r.key[0] in start.refused else policy(r) for r in requests]

    def score(requests):
        return [[float("right" in action) for action in r.actions] for r in requests]

    def load(path, config, env=None):
        start.loaded.append((path, config.seed))
        return SimpleNamespace(chat=word_chat(), sample=sample, score=score)

    def start(*argv):
        start.sampled, start.loaded, start.calls = [], [], []
        self_train.main(["--run", str(tmp_path), "--threshold", "0", *argv])
        return start.calls[-1]

    start.refused = ()
    expert = [{"messages": messages, "task": "", "reward": 1, "task_id": f"mine{i}"} for i in range(3)]
    (tmp_path / "expert.jsonl").write_text(dump(expert))
    for name in ("sft", "qnet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")  # an empty folder waits for a checkpoint, and is none
    recipe = {"model": "tiny", "n_expert": 2, "epochs": 0, "precision": "float32"}
    argv = ["--lr", "0.5", "--patience", "5", "--max-tokens", "99", "--micro-tokens", "11", "--overwrite"]
    meta = {"recipe": recipe, "inputs": {"expert": "expert.jsonl"}, "argv": argv, "epochs": 7, "batch": 3}
    (tmp_path / "sft.meta.json").write_text(json.dumps(meta))
    monkeypatch.setattr(self_train, "load_agent", load)
    monkeypatch.setattr(self_train, "load_qnet", load)
    monkeypatch.setattr(sft, "main", lambda argv: start.calls.append(settings_of(sft, *argv)))
    return start


def test_q_guided_trajectories_are_merged_and_trained_on(stage, tmp_path):
    flags = stage("--method", "qlass", "--name", "target-q")
    merged = list(read_jsonl(tmp_path / "self_train-target-q.jsonl"))
    # Two demonstrations (n_expert), and the one best walk, which is the same text in all six tasks.
    assert [line["task_id"] for line in merged[:2]] == ["mine0", "mine1"]
    assert [line.get("source") for line in merged] == [None, None, "policy"]
    assert [parse_action(m["content"]) for m in merged[2]["messages"][3::2]] == ["right", "right", "right"]
    assert len(list(read_jsonl(tmp_path / "self_train-target-q.rollouts.jsonl"))) == 6
    assert {r.n for r in stage.sampled} == {3}  # M = 3
    (agent, luck), (qnet, seed) = stage.loaded
    assert (agent, qnet) == (tmp_path / "sft", tmp_path / "qnet") and luck != seed
    assert (flags.expert, flags.out) == (tmp_path / "self_train-target-q.jsonl", tmp_path / "sft-target-q")
    # As it was trained before, in the flags of then and in what was chosen: a method may not win by longer training.
    assert (flags.model, flags.n_expert, flags.overwrite) == ("tiny", 3, False)
    again = {"lr": 0.5, "patience": 5, "max_tokens": 99, "micro_tokens": 11, "epochs": 7, "batch": 3}
    assert {name: getattr(flags, name) for name in again} == again


def test_a_task_that_a_server_refuses_has_no_trajectory(stage, tmp_path, capsys):
    stage.refused = ("train1",)
    stage("--method", "rft")
    lines = {line["task_id"]: line["trajectories"] for line in read_jsonl(tmp_path / "self_train-rft.rollouts.jsonl")}
    assert [task for task in lines if not lines[task]] == ["train1"] and len(lines) == 6
    assert "train1 has no trajectory: against the rules" in capsys.readouterr().err


def test_rejection_sampling_plays_once_and_the_trees_best_branches_not_at_all(stage, tmp_path):
    for sampled in ({1}, set()):
        flags = stage("--method", "rft", "-N", "2")
        assert flags.expert == tmp_path / "self_train-rft.jsonl"
        assert {r.n for r in stage.sampled} == sampled and len(stage.loaded) <= 1
    (tmp_path / "sft-rft").mkdir()
    merged = tmp_path / "self_train-rft.jsonl"
    stage("--method", "rft", "-N", "2")  # the same again
    merged.write_text(before := merged.read_text() + "{}\n")
    with pytest.raises(UserError, match=r"sft-rft was cloned from .*, which would change: --overwrite"):
        stage("--method", "rft", "-N", "2")
    assert merged.read_text() == before
    (tmp_path / "trees.jsonl").write_text(dump(tree(node(1, 0, 1.0, done=True))))
    stage("--method", "tree")
    assert [line["task_id"] for line in read_jsonl(tmp_path / "self_train-tree.jsonl")] == ["mine0", "mine1", "t"]
    assert not stage.loaded
