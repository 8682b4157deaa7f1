"""Weights: which are loaded or refused in one line, none runs code; what LoRA and few bits train, save and load."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from fakes import dump, tiny_lm, word_chat
from safetensors.torch import load_file, save_file
from test_train_qnet import labelled_tree
from torch import nn

import q_search
import sft
import train_qnet
from qlass import UserError, models
from qlass.settings import Sampling
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])
SETTINGS = Sampling(plain=True)


def rewrite(folder: Path, **settings) -> Path:
    """The folder with more in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def refused(path: Path, reason: str, kind=hf.AutoModelForCausalLM) -> None:
    with pytest.raises(UserError, match=reason) as error:
        models.load(path, SETTINGS, kind=kind)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    assert str(error.value).endswith(f"({models.SUPPORTED})")


def close(x, y) -> None:
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.fixture
def copy(tmp_path, agent):
    """A checkpoint to spoil."""
    return shutil.copytree(agent, tmp_path / "sft")


def test_other_weights_than_those_meant_are_refused(copy, agent):
    file = copy / "model.safetensors"
    weights = load_file(file)
    for spoilt, says in (
        ({name: w for name, w in weights.items() if name != "model.norm.weight"}, "missing_keys: model.norm.weight"),
        (weights | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2)}, "unexpected_keys: .*lora_A"),
        (weights | {"model.norm.weight": weights["model.norm.weight"] * float("nan")}, "finite"),
    ):
        save_file(spoilt, file, metadata={"format": "pt"})
        if "finite" in says:
            with pytest.raises(UserError, match=says):
                models.load(copy, Sampling())
        else:
            refused(copy, says)
    save_file(weights, file, metadata={"format": "pt"})
    refused(rewrite(copy, intermediate_size=128), "size")
    shutil.copy(agent / "config.json", copy)
    file.write_bytes(file.read_bytes()[:-100])
    refused(copy, "")
    file.unlink()
    refused(copy, "no file named model.safetensors")
    refused(copy / "nowhere", "")


def test_an_adapter_beside_weights_a_qnet_and_a_tokenizer_that_changes_an_action_are_refused(copy, value_net, tmp_path):
    refused(value_net, "a QNet, which is no agent")
    models.load(value_net, SETTINGS, kind=hf.AutoModel)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(copy, "its tokenizer changes an action")
    base = hf.AutoModelForCausalLM.from_pretrained(copy)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "lora")
    for file in (tmp_path / "lora").glob("adapter_*"):
        shutil.copy(file, copy)
    refused(copy, "adapter")


class Bomb(str):
    """Who unpickles it makes a folder of this name."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


def test_code_that_comes_with_a_checkpoint_is_not_run(copy, tmp_path):
    struck, weights = tmp_path / "struck", copy / "model.safetensors"
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"model.embed_tokens.weight": Bomb(struck)}))
    kept = weights.rename(tmp_path / "kept")
    refused(copy, "safetensors")
    kept.rename(weights)
    (copy / "evil.py").write_text(f"import os; os.mkdir({str(struck)!r})\nclass A:\n    pass\n")
    maps = {name: "evil.A" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
    refused(rewrite(copy, model_type="evil", auto_map=maps), re.escape("custom code"))
    assert not struck.exists()


def test_numbers_that_bf16_must_not_round_and_kernels_that_must_not_run():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians; cuDNN's attention errs at times."""
    model = models.full_weights(tiny_lm(CHAT), Path(), Sampling(precision="bf16"))
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and {b.dtype for b in rotary} == {torch.float32}
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("bits", [None, "4bit", "8bit"])
def test_updates_of_a_base_go_through_the_stages(tmp_path, fake_world, bits):
    """A checkpoint holds the merged model, in all the bits, and beside it the adapter."""
    run = f"--env frozenlake --run {tmp_path}".split()
    if bits:
        pytest.importorskip("bitsandbytes")
        run += ["--load-in", bits]
    tiny_lm(CHAT, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    CHAT.save(tmp_path / "base")
    train = [*run, "--epochs", "3", "--lr", "0.01", "--lora", "2", "--batch", "2"]
    sft.main([*train, "--model", str(tmp_path / "base"), "--n-expert", "3"])
    base, agent = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "sft"))
    assert moved(agent, base) == LINEAR
    adapter = peft.PeftModel.from_pretrained(base, tmp_path / "sft" / "adapter")
    close(adapter(IDS).logits, agent(IDS).logits)
    (tmp_path / "q_labels.jsonl").write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    train_qnet.main([*train, "--sft", str(tmp_path / "sft"), "--labels", str(tmp_path / "q_labels.jsonl")])
    net = QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, agent.model) == LINEAR and net.backbone.dtype == torch.float32
    q_search.main([*run, "--limit", "2"])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 2


def test_weights_in_few_bits_are_not_trained(agent):
    with pytest.raises(UserError, match="weights in few bits can't be trained"):
        models.prepare_training(tiny_lm(CHAT), train_qnet.Config(load_in="4bit"))
