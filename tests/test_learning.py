"""The learners as scripts: they learn a written world, keep the best checkpoint, and go on where they were stopped."""

import math
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fakes import FakeEnv, over, refused, save_agent, settings_of, talk, tiny_lm, word_chat, write
from safetensors.torch import load_file, save_file

from experiments import eto, ppo, tree_grpo
from experiments.learning import Learner, batch_of, trainable
from qlass import demonstrations
from qlass.agent import load_policy
from qlass.fast.decode import FastPolicy
from qlass.files import read_jsonl, write_jsonl
from qlass.settings import Sampling

GROUPS = "--batch-tasks 8 --minibatch 4 --every 2"
FLAGS = {
    tree_grpo: GROUPS,
    ppo: f"{GROUPS} --warm-up 0",
    eto: "--expert expert.jsonl --batch-tasks 4 --every 2",
}


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    """An agent of random weights that does not play well by luck: greedy earns .4."""
    return save_agent(tmp_path_factory.mktemp("beginner") / "sft", seed=1, candidates="valid", temperature=1.0)


@pytest.fixture
def train(fake_world, beginner):
    """Trains in a folder of that name; returns the lines of updates.jsonl."""
    env = FakeEnv(name="frozenlake")  # as the command names it
    expert = [demonstrations.demonstrate(env, task) for task in env.task_ids("train")]
    write("expert.jsonl", expert)

    def start(learner, folder, budget, flags="", sft=beginner):
        usual = f"--env frozenlake --preset paper --val 2 --lr 0.003 {FLAGS[learner]} --budget-in env_steps"
        learner.main(over(f"{usual} --sft {sft} --run {folder} --name x --budget {budget}", flags))
        return read_jsonl(Path(folder, "sft-x.updates.jsonl"))

    return start


def contents(folder):
    return [Path(folder, name).read_bytes() for name in ("sft-x.updates.jsonl", "sft-x/model.safetensors")]


@pytest.mark.parametrize(("learner", "budget", "lr"), [(tree_grpo, 2000, 0.02), (ppo, 2000, 0.01), (eto, 300, 0.003)])
def test_it_learns_the_best_leaf_of_a_written_world(train, learner, budget, lr):
    lines = train(learner, "run", budget, f"--lr {lr} --seed 1")
    assert lines[0]["val"] < 1 and max(line["val"] or 0 for line in lines) == 1.0
    assert lines[1]["reward"] < 0.6 < 0.9 < lines[-1]["reward"]
    for figure in ("batch", "updates", "tokens", "env_steps"):  # sums so far
        values = [line[figure] for line in lines]
        assert values == sorted(values) and values[0] == 0 < values[1]


@pytest.mark.parametrize("learner", FLAGS)
def test_a_stopped_run_ends_where_an_unbroken_one_does(train, monkeypatch, learner):
    budget = 60 if learner is eto else 300
    flags = "--lr 0.0003" if learner is eto else ""
    train(learner, "one", budget, flags)
    step, calls = Learner.step, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 7:  # in a batch, between two validations
            raise KeyboardInterrupt
        step(*args)

    monkeypatch.setattr(Learner, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        train(learner, "again", budget, flags)
    train(learner, "again", budget, flags)
    assert contents("again") == contents("one")
    for spent, lr, says in ((budget, "--lr 0.5", "begun with lr"), (20, "", "are spent: raise --budget")):
        with refused(says):  # the best agent so far may have cost more
            train(learner, "again", spent, lr or flags)


def test_the_best_checkpoint_is_kept_also_if_it_gets_worse(train, monkeypatch):
    weights = []

    def validation(learner, *_):  # best after the first batch
        weights.append(learner.model.get_input_embeddings().weight.clone())
        return {1: 0.1, 2: 0.6}.get(len(weights), 0.5)

    monkeypatch.setattr(Learner, "validation", validation)
    assert [line["val"] for line in train(tree_grpo, "run", 400, "--every 1")[:3]] == [0.1, 0.6, 0.5]
    saved = load_policy(Path("run/sft-x"), Sampling()).model.get_input_embeddings().weight
    assert [torch.equal(saved, other) for other in weights[:3]] == [False, True, False]


def test_no_random_number_is_used_twice_and_each_seed_has_its_own(train, monkeypatch):
    requests, sample = [], FastPolicy.sample
    monkeypatch.setattr(FastPolicy, "sample", lambda self, batch: requests.extend(batch) or sample(self, batch))
    first, second = set(), set()
    for seed, keys in (("0", first), ("1", second)):
        requests.clear()
        train(tree_grpo, seed, 300, f"--seed {seed}")
        drawn = [request.key for request in requests if request.temperature]  # validation is greedy
        keys.update(drawn)
        assert len(keys) == len(drawn) > 50
    assert not first & second


def test_a_stop_while_the_first_state_is_written_loses_nothing(train):
    train(tree_grpo, "one", 50)
    with patch.object(Learner, "suspend", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(tree_grpo, "again", 50)
    train(tree_grpo, "again", 50)
    assert contents("again") == contents("one")
    with patch.object(Learner, "validation", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(tree_grpo, "again", 50, "--overwrite --seed 1")
    assert contents("again") == contents("one")  # until there are new ones


def test_a_state_that_lacks_a_weight_is_refused(train):
    train(tree_grpo, "run", 50)
    file = Path("run/sft-x.resume.safetensors")
    tensors = load_file(file)
    del tensors["0 "]
    save_file(tensors, file, {"lines": "[]"})
    with refused("can't be read: --overwrite starts again"):
        train(tree_grpo, "run", 99)


def test_without_its_state_a_learner_that_is_done_is_done_and_another_is_refused(train):
    last = train(tree_grpo, "run", 50)[-1]
    Path("run/sft-x.resume.safetensors").unlink()
    assert train(tree_grpo, "run", 50)[-1] == last
    with refused("is missing, so x can't go on: --overwrite starts again"):
        train(tree_grpo, "run", 9999)


def test_without_its_agent_a_learner_does_not_go_on(train):
    train(tree_grpo, "run", 50)
    shutil.rmtree("run/sft-x")
    with refused(r"sft-x: is missing, and .*resume.safetensors is not: --overwrite starts"):
        train(tree_grpo, "run", 50)


def test_a_stop_between_state_and_log_costs_no_line(train):
    lines = train(tree_grpo, "run", 50)
    write_jsonl(Path("run/sft-x.updates.jsonl"), lines[:1])
    assert train(tree_grpo, "run", 50) == lines


def test_what_cannot_be_learned_from_is_refused(train, monkeypatch):
    with refused("^no tasks to learn from$"):
        batch_of([], 0, 0, 4)
    monkeypatch.setattr(FakeEnv, "split_ids", lambda env, split: ["train0"] * (split == "train"))
    with refused("no validation tasks here, by which the best checkpoint is chosen"):
        train(tree_grpo, "run", 50)


def test_a_gradient_that_is_not_finite_ends_the_training():
    learner = Learner(tiny_lm(word_chat()), None, word_chat(), 0.5)
    for weight in learner.model.parameters():
        weight.grad = torch.full_like(weight, math.inf)
    with refused("^update 3: the gradient is not finite, so .*: --overwrite and a lower rate than 0.5 start again$"):
        learner.step(3)


def test_an_agent_learns_without_dropout():
    """What is trained are the probabilities by which it was drawn."""
    folder = save_agent(Path("agent"), options={"attention_dropout": 0.9})
    model, chat, _ = trainable(folder, settings_of(tree_grpo, "--preset paper"))
    ids = torch.tensor([chat.prompt(talk("find the purse", opening=0))])
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("flags", ["", "--lora 2", "--gradient-checkpointing"])
def test_free_text_and_lora_updates_train_too(train, flags):
    free = save_agent(Path("free-agent"), max_new_tokens=6)
    last = train(tree_grpo, "free", 50, f"--entropy 0.1 {flags}", sft=free)[-1]
    assert last["updates"] == 2 * last["batch"] >= 2
    assert last["entropy"] > 0 and last["kl"] > 0  # words at random earn nothing: the bonus moves it
    saved = load_policy(Path("free/sft-x"), Sampling()).model.state_dict()
    assert saved.keys() == tiny_lm(word_chat()).state_dict().keys()  # merged
