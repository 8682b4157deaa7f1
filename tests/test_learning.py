"""The learners as scripts: they learn a written world, keep the best checkpoint, and go on where they were stopped."""

import pytest
import torch
from fakes import FakeEnv, dump, save_agent, tiny_lm, word_chat

import sft
from experiments import eto, ppo, tree_grpo
from experiments.learning import Learner
from qlass import UserError
from qlass.agent import load_policy
from qlass.fast.decode import FastPolicy
from qlass.files import read_jsonl

FLAGS = {
    tree_grpo: ["--batch-tasks", "8", "--minibatch", "4", "--every", "2"],
    ppo: ["--batch-tasks", "8", "--minibatch", "4", "--every", "2", "--warm-up", "0"],
    eto: ["--batch-tasks", "4", "--every", "2"],
}


@pytest.fixture
def train(fake_world, agent, tmp_path):
    """Trains in a folder of that name; returns the lines of updates.jsonl."""
    env = FakeEnv()
    expert = dump([sft.demonstrate(env, task) for task in env.task_ids("train")])

    def start(learner, folder, budget, *flags, sft=agent):
        run = tmp_path / folder
        run.mkdir(exist_ok=True)
        (run / "expert.jsonl").write_text(expert)
        argv = ["--env", "frozenlake", "--val", "2", "--lr", "0.003", "--budget-in", "env_steps", *FLAGS[learner]]
        learner.main([*argv, "--sft", str(sft), "--run", str(run), "--name", "x", "--budget", str(budget), *flags])
        return list(read_jsonl(run / "sft-x.updates.jsonl"))

    return start


@pytest.fixture
def requests(monkeypatch):
    """What is asked of a policy."""
    asked, sample = [], FastPolicy.sample
    monkeypatch.setattr(FastPolicy, "sample", lambda self, batch: asked.extend(batch) or sample(self, batch))
    return asked


def contents(folder):
    return [(folder / name).read_bytes() for name in ("sft-x.updates.jsonl", "sft-x/model.safetensors")]


@pytest.mark.parametrize(("learner", "budget", "lr"), [(tree_grpo, 2000, 0.02), (ppo, 2000, 0.01), (eto, 300, 0.003)])
def test_it_learns_the_best_leaf_of_a_written_world(train, learner, budget, lr):
    lines = train(learner, "run", budget, "--lr", str(lr), "--seed", "1")
    assert lines[0]["val"] < 1 and max(line["val"] or 0 for line in lines) == 1.0
    assert lines[1]["reward"] < 0.6 < 0.9 < lines[-1]["reward"]
    for figure in ("batch", "updates", "tokens", "env_steps"):  # sums so far
        values = [line[figure] for line in lines]
        assert values == sorted(values) and values[0] == 0 < values[1]
    if learner is ppo:
        assert max(line["explained"] for line in lines[1:]) > 0.3
    if learner is tree_grpo:
        assert lines[-1]["entropy"] < lines[1]["entropy"] and lines[-1]["kl"] > 0.5


def test_a_critic_wants_labels_of_its_own_target(train, tmp_path):
    labels = tmp_path / "q_labels.jsonl"
    (tmp_path / "q_labels.meta.json").write_text('{"recipe": {"target": "q"}}')
    with pytest.raises(UserError, match=r"not of `bellman\.py --target avg`"):
        train(ppo, "run", 60, "--labels", str(labels))


def test_an_overwrite_that_is_stopped_at_once_leaves_nothing_of_the_old_run(train, monkeypatch):
    train(tree_grpo, "run", 60)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Learner, "suspend", lambda *_: 1 / 0)
        train(tree_grpo, "run", 60, "--overwrite")
    with pytest.raises(UserError, match="is missing, so x can't go on: --overwrite"):
        train(tree_grpo, "run", 60)


@pytest.mark.parametrize("learner", FLAGS)
def test_a_stopped_run_ends_where_an_unbroken_one_does(train, tmp_path, monkeypatch, learner):
    budget = 60 if learner is eto else 300
    flags = ["--lr", "0.0003"] if learner is eto else []
    train(learner, "one", budget, *flags)
    step, calls = Learner.step, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 7:  # in a batch, between two validations
            raise KeyboardInterrupt
        step(*args)

    monkeypatch.setattr(Learner, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        train(learner, "again", budget, *flags)
    train(learner, "again", budget, *flags)
    assert contents(tmp_path / "again") == contents(tmp_path / "one")
    done = len(calls)
    train(learner, "again", budget, *flags)
    assert len(calls) == done > 8  # nothing is left to do
    with pytest.raises(UserError, match=r"begun with --lr"):
        train(learner, "again", budget, "--lr", "0.5")
    with pytest.raises(UserError, match="are spent: raise --budget"):  # its best agent may have cost more
        train(learner, "again", 20, *flags)


def test_the_best_checkpoint_is_kept_also_if_it_gets_worse(train, tmp_path, monkeypatch):
    states = []

    def validation(learner, *_):  # best after the first batch
        states.append({name: w.clone() for name, w in learner.model.state_dict().items()})
        return {1: 0.1, 2: 0.6}.get(len(states), 0.5)

    monkeypatch.setattr(Learner, "validation", validation)
    assert [line["val"] for line in train(tree_grpo, "run", 400, "--every", "1")[:3]] == [0.1, 0.6, 0.5]
    kept = load_policy(tmp_path / "run" / "sft-x").model.state_dict()
    assert all(torch.equal(w, states[1][name]) for name, w in kept.items())


def test_no_random_number_is_used_twice_and_each_seed_has_its_own(train, requests, tmp_path, monkeypatch):
    keys = []
    for seed in ("0", "1"):
        requests.clear()
        train(tree_grpo, seed, 300, "--seed", seed)
        keys.append([request.key for request in requests if request.temperature])  # validation is greedy
    first, second = keys
    assert len(set(first)) == len(first) > 50 and not set(first) & set(second)
    monkeypatch.setattr(FakeEnv, "side_by_side", 3)
    train(tree_grpo, "narrow", 300)
    assert contents(tmp_path / "narrow") == contents(tmp_path / "0") != contents(tmp_path / "1")


@pytest.mark.parametrize("flags", [[], ["--lora", "2"]])
def test_free_text_and_lora_updates_train_too(train, tmp_path, flags):
    lines = []
    for name, top_p in (("free", 1.0), ("likeliest", 0.01)):
        free = save_agent(tmp_path / name, max_new_tokens=6, top_p=top_p)
        lines.append(train(tree_grpo, f"run-{name}", 50, "--entropy", "0.1", *flags, sft=free))
    # The ratios are of the full distribution, so the trees are drawn from it too, whatever the agent's top_p.
    assert lines[0] == lines[1] and lines[0][-1]["updates"] == 2 * lines[0][-1]["batch"] >= 2
    assert lines[0][-1]["entropy"] > 0 and lines[0][-1]["kl"] > 0  # words at random earn nothing: the bonus moves it
    saved = load_policy(tmp_path / "run-free" / "sft-x").model.state_dict()
    assert saved.keys() == tiny_lm(word_chat()).state_dict().keys()  # merged


@pytest.mark.parametrize("learner", FLAGS)
def test_the_environment_begins_as_the_agent_was_cloned(train, requests, tmp_path, learner):
    cloned = save_agent(tmp_path / "sft", candidates="valid", instruction="find the purse this way")
    train(learner, "run", 1, sft=cloned)
    assert {request.state.messages[0] for request in requests} == {("user", "find the purse this way")}


def test_a_group_of_one_is_refused(train):
    for flags in (["-M", "1"], ["-M", "4", "--advantage", "intra"]):
        with pytest.raises(UserError, match="one trajectory"):
            train(tree_grpo, "run", 100, "--rounds", "0", *flags)


def test_a_gradient_that_is_not_finite_ends_the_training():
    chat = word_chat()
    learner = Learner(tiny_lm(chat), None, chat, 1e-3)
    (learner.model(input_ids=torch.tensor([[5, 6]])).logits.sum() * torch.nan).backward()
    with pytest.raises(UserError, match="the training has diverged"):
        learner.step(1)
