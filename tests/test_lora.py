"""LoRA beside the plain model, what is trained and what a checkpoint holds; flags that need a GPU say so."""

import sys

import pytest
import torch
from fakes import dump, tiny_backbone, tiny_lm, word_chat
from families import tiny
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import q_search
import sft
import train_qnet
from qlass import UserError, models
from qlass.policy import Policy
from qlass.qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(rank: int = 2, learnt: bool = True) -> nn.Module:
    model = tiny_lm(CHAT)
    models.add_lora(model, rank)
    for name, p in model.named_parameters():
        if learnt and "lora_B" in name:
            nn.init.normal_(p)
    return model


@pytest.mark.parametrize("rank", [1, 4])
def test_at_first_it_is_the_plain_model(rank):
    assert torch.equal(adapted(rank, learnt=False)(IDS).logits, tiny_lm(CHAT)(IDS).logits)


def test_an_update_by_hand():
    model, plain = adapted(rank=3), tiny_lm(CHAT)
    parts = dict(model.named_parameters())
    a, b = (parts[f"model.layers.0.self_attn.v_proj.lora_{ab}.default.weight"] for ab in "AB")
    assert a.shape == (3, 32) and b.shape == (16, 3) and a.dtype == torch.float32
    models.merge(model)
    at = "model.layers.0.self_attn.v_proj.weight"
    torch.testing.assert_close(dict(model.named_parameters())[at], dict(plain.named_parameters())[at] + 2.0 * b @ a)


def test_experts_are_refused_before_anything_is_trained():
    """PEFT would update them too, in a form that can't be merged into the weights."""
    with pytest.raises(UserError, match=r"--lora 2: not for this model .*Experts"):
        models.add_lora(tiny("mixtral"), 2)


def test_a_merged_model_is_an_ordinary_one_that_says_the_same():
    model, plain = adapted(), tiny_lm(CHAT)
    before = model(IDS).logits
    models.merge(model)
    torch.testing.assert_close(model(IDS).logits, before, atol=1e-5, rtol=1e-5)
    assert (before - plain(IDS).logits).abs().max() > 1e-2
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_checkpoint_holds_the_merged_model_and_training_continues(tmp_path):
    model = adapted()
    before = model(IDS).logits
    models.save_checkpoint(model, CHAT, tmp_path / "saved")
    torch.testing.assert_close(Policy.load(tmp_path / "saved").model(IDS).logits, before, atol=1e-5, rtol=1e-5)
    assert any(p.requires_grad for p in model.parameters()) and torch.equal(model(IDS).logits, before)


def test_only_the_updates_are_trained():
    trained = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == LINEAR and all(".lora_" in name for name in trained)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox", "qwen3"])
def test_any_architecture_has_its_linear_layers_updated_and_merged(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, word_embed_proj_dim=32)).eval()
    plain = model(IDS).logits
    models.add_lora(model, 2)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    updated = model(IDS).logits
    models.merge(model)
    torch.testing.assert_close(model(IDS).logits, updated, atol=1e-4, rtol=1e-4)
    assert (updated - plain).abs().max() > 1e-3


@pytest.fixture
def labels(tmp_path):
    from test_train_qnet import labelled_tree

    (tmp_path / "labels.jsonl").write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    return tmp_path / "labels.jsonl"


def assert_same(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


def test_the_stages_train_save_and_load_it(tmp_path, agent, labels):
    start = Policy.load(agent).model
    common = [
        "--env",
        "frozenlake",
        "--run",
        str(tmp_path),
        "--lora",
        "2",
        "--lora-alpha",
        "3",
        "--epochs",
        "2",
        "--lr",
        "0.01",
    ]
    train_qnet.main([*common, "--sft", str(agent), "--labels", str(labels)])
    net = QNet.from_pretrained(tmp_path / "qnet")
    adapted = PeftModel.from_pretrained(AutoModel.from_pretrained(agent), tmp_path / "qnet" / "adapter")
    assert_same(adapted(IDS).last_hidden_state, net.backbone(IDS).last_hidden_state)
    assert moved(net.backbone, start.model) == LINEAR
    torch.manual_seed(0)
    assert not torch.equal(net.head[-1].weight, QNet(tiny_backbone(CHAT), CHAT).head[-1].weight)
    chats = [{"messages": [{"role": "user", "content": "walk"}, {"role": "assistant", "content": "Action: left"}]}] * 3
    (tmp_path / "expert.jsonl").write_text(dump(chats))
    sft.main([*common, "--model", str(agent), "--expert", str(tmp_path / "expert.jsonl")])
    merged = Policy.load(tmp_path / "sft").model
    assert moved(merged, start) == LINEAR
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(agent), tmp_path / "sft" / "adapter")
    assert_same(adapted(IDS).logits, merged(IDS).logits)
    assert adapted.peft_config["default"].lora_alpha == 3


@pytest.mark.parametrize(
    ("stage", "flags", "says"),
    [
        (sft, ["--lora", "8"], "tiny model is trained from scratch"),
        (sft, ["--load-in", "4bit", "--model", "x"], "give --lora RANK too"),
        (train_qnet, ["--lora", "0"], "--lora: 0 is out of range: 1 or more"),
        (train_qnet, ["--lora-alpha", "8"], "beside --lora RANK"),
        (train_qnet, ["--fsdp", "--lora", "8", "--load-in", "4bit"], "can't be divided"),
        (train_qnet, ["--lora", "8", "--freeze"], "one of them"),
        (train_qnet, ["--plain", "--fsdp"], "one of them"),
        (train_qnet, ["--load-in", "8bit"], "give --lora RANK too"),
        (train_qnet, ["--load-in", "8bit", "--lora", "8", "--weights", "bf16"], "leave --weights bf16 out"),
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
        monkeypatch.setattr(models, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"bitsandbytes is missing: pip install -r requirements-gpu\.txt"):
            call()
        monkeypatch.setattr(models, "find_spec", lambda name: sys)
        with pytest.raises(UserError, match=r"needs a GPU; leave it out on a CPU"):
            call()


def test_without_peft_lora_says_so(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"peft is missing: pip install -r requirements\.txt"):
        models.add_lora(tiny_lm(CHAT), 2)
