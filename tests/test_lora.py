"""LoRA beside the plain model, what is trained and what a checkpoint holds; flags that need a GPU say so."""

import sys

import pytest
import torch
from fakes import dump, tiny_backbone, tiny_lm, word_chat
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import q_search
import sft
import train_qnet
from environments import UserError
from qlass import models as lora
from qlass.policy import Policy
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def adapted(rank: int = 2, learnt: bool = True) -> nn.Module:
    model = tiny_lm(CHAT)
    lora.add_lora(model, rank)
    for module in model.modules():
        if learnt and isinstance(module, lora.LoRA):
            nn.init.normal_(module.b)
    return model


@pytest.mark.parametrize("rank", [1, 4])
def test_at_first_it_is_the_plain_model(rank):
    assert torch.equal(adapted(rank, learnt=False)(IDS).logits, tiny_lm(CHAT)(IDS).logits)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_merged_is_unmerged(rank, n_in, n_out, seed):
    torch.manual_seed(seed)
    layer, x = lora.LoRA(nn.Linear(n_in, n_out), rank), torch.randn(3, n_in)
    nn.init.normal_(layer.b)
    by_hand = x @ (layer.linear.weight + 2.0 * layer.b @ layer.a).T + layer.linear.bias
    torch.testing.assert_close(layer(x), by_hand, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.merged()(x), by_hand, atol=1e-5, rtol=1e-4)


def test_a_merged_model_is_an_ordinary_one_that_says_the_same():
    model, plain = adapted(), tiny_lm(CHAT)
    before = model(IDS).logits
    lora.merge(model)
    torch.testing.assert_close(model(IDS).logits, before, atol=1e-5, rtol=0)
    assert (before - plain(IDS).logits).abs().max() > 1e-2
    assert list(model.state_dict()) == list(plain.state_dict())


def test_only_the_updates_of_the_attention_are_trained():
    model = adapted()
    names = {name.split(".self_attn.")[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {f"{projection}.{ab}" for projection in lora.PROJECTIONS for ab in "ab"}
    with pytest.raises(UserError, match="--lora 3: the model has no q_proj"):
        lora.add_lora(nn.Sequential(nn.Linear(2, 2)), 3)


@pytest.fixture
def labels(tmp_path):
    from test_train_qnet import labelled_tree

    (tmp_path / "labels.jsonl").write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    return tmp_path / "labels.jsonl"


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


def test_the_stages_train_save_and_load_it(tmp_path, agent, labels):
    start = Policy.load(agent).model
    common = ["--env", "frozenlake", "--run", str(tmp_path), "--lora", "2", "--epochs", "2", "--lr", "0.01"]
    train_qnet.main([*common, "--sft", str(agent), "--labels", str(labels)])
    net = QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, start.model) == set(lora.PROJECTIONS)
    torch.manual_seed(0)
    assert not torch.equal(net.head[-1].weight, QNet(tiny_backbone(CHAT), CHAT).head[-1].weight)
    chats = [{"messages": [{"role": "user", "content": "walk"}, {"role": "assistant", "content": "Action: left"}]}] * 3
    (tmp_path / "expert.jsonl").write_text(dump(chats))
    sft.main([*common, "--model", str(agent), "--expert", str(tmp_path / "expert.jsonl")])
    assert moved(Policy.load(tmp_path / "sft").model, start) == set(lora.PROJECTIONS)


@pytest.mark.parametrize(
    ("stage", "flags", "says"),
    [
        (sft, ["--lora", "8"], "tiny model is trained from scratch"),
        (sft, ["--load-in", "4bit", "--model", "x"], "give --lora RANK too"),
        (train_qnet, ["--lora", "0"], "a rank is 1 or more"),
        (train_qnet, ["--lora", "8", "--freeze"], "one of them"),
        (train_qnet, ["--load-in", "8bit"], "give --lora RANK too"),
    ],
)
def test_flags_that_do_not_go_together(stage, flags, says):
    with pytest.raises(UserError, match=says):
        stage.arguments(flags)


def test_what_needs_a_gpu_says_so(tmp_path, agent, labels, monkeypatch):
    search = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--load-in", "4bit"]
    train = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--labels", str(labels)]
    calls = [
        lambda: q_search.main([*search, "--method", "greedy"]),
        lambda: train_qnet.main([*train, "--optim", "adamw8bit"]),
    ]
    for call in calls:
        monkeypatch.setattr(lora, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"bitsandbytes is missing: pip install -r requirements-gpu\.txt"):
            call()
        monkeypatch.setattr(lora, "find_spec", lambda name: sys)
        with pytest.raises(UserError, match=r"needs a GPU; leave it out on a CPU"):
            call()
