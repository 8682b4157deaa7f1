"""Folders of weights: none runs code; which are loaded, which are refused in one line; what is saved can be loaded."""

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
from fakes import tiny_lm, word_chat
from safetensors.torch import load_file, save_file
from test_parity import SMALL

from qlass import UserError, models
from qlass.agent import load_policy

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def folder_of(name: str, folder: Path, **more) -> Path:
    """A random checkpoint of a model type."""
    config = type(hf.AutoConfig.for_model(name))
    known = config().to_dict()
    config = config(**{k: v for k, v in SMALL.items() if k in known} | {"eos_token_id": 1} | more)
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    CHAT.save(folder)
    return folder


def rewrite(folder: Path, weights: dict | None = None, name: str = "config.json", **settings) -> Path:
    """The folder with other weights, or with more in a file of settings."""
    if weights:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | settings))
    return folder


def refused(path: Path, reason: str, kind=hf.AutoModelForCausalLM) -> None:
    with pytest.raises(UserError, match=reason) as error:
        models.load_checkpoint(path, kind, plain=True)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


LOCAL = {"attention_types": [[["global", "local"], 2]], "num_heads": 4}
H, LAYER = "transformer.h.0.", "model.layers.0."
KEYS = {  # model type: more of its config, keys that may be left out, and keys that change what it computes
    "gpt2": ({}, ["h.0.attn.bias", f"{H}attn.masked_bias"], ["h.0.attn.c_attn.lora_A.weight"]),
    "gpt_neo": (LOCAL, [f"{H}attn.attention.bias", f"{H}attn.attention.masked_bias"], [f"{H}mlp.c_fc.lora_A"]),
    "gptj": ({"rotary_dim": 4}, [f"{H}attn.bias", f"{H}attn.masked_bias"], [f"{H}attn.q_proj.bias"]),
    "falcon": ({}, [f"{H}self_attention.rotary.inv_freq"], [f"{H}mlp.dense_4h_to_h.bias"]),
    "gpt_neox": ({}, ["gpt_neox.layers.0.attention.bias"], ["gpt_neox.layers.0.attention.dense.weight_scale"]),
    "llama": ({}, ["v_head.summary.weight", "mtp.layers.0.mlp.up_proj.weight"], ["model.layers.4.mlp.up_proj.weight"]),
    "mistral": ({}, [f"{LAYER}self_attn.rotary_emb.inv_freq"], [f"{LAYER}self_attn.q_norm.weight"]),
    "mixtral": ({}, [], [f"base_model.model.{LAYER}self_attn.q_proj.lora_B.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", [hf.AutoModelForCausalLM, hf.AutoModel])
@pytest.mark.parametrize("name", KEYS)
def test_a_key_without_a_place_matters_if_its_layer_is_computed(name, kind, tmp_path):
    more, sound, wrong = KEYS[name]
    weights = load_file(folder_of(name, tmp_path, **more) / "model.safetensors")
    rewrite(tmp_path, weights | {key: torch.ones(2) for key in sound})
    model, chat = models.load_checkpoint(tmp_path, kind, plain=True)  # a backbone without embed_out or lm_head
    models.save_checkpoint(model, chat, tmp_path / "again")
    models.load_checkpoint(tmp_path / "again", kind, plain=True)
    for key in wrong:
        rewrite(tmp_path, weights | {key: torch.ones(2)})
        refused(tmp_path, f"no place for {re.escape(key)}; ", kind)


def cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


@pytest.fixture
def copy(tmp_path, agent):
    """A checkpoint to spoil."""
    return shutil.copytree(agent, tmp_path / "sft")


def test_other_weights_than_those_meant_are_refused(copy, tmp_path):
    shutil.copy(copy / "model.safetensors", copy / "model-00001-of-00001.safetensors")
    refused(copy, "weights of two saves")
    (copy / "model-00001-of-00001.safetensors").unlink()
    refused(rewrite(copy, intermediate_size=128), "down_proj.weight has another size in config.json")
    for quantised in ({"quant_method": "awq"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        refused(rewrite(copy, quantization_config=quantised), "It can't be loaded")
    for keep in (-100, 5, 0):  # weights, header, all
        cut(copy / "model.safetensors", keep)
        refused(copy, "no complete checkpoint?")
    (copy / "model.safetensors").unlink()
    refused(copy, "no file named model.safetensors")
    cut(copy / "config.json", 20)
    refused(copy, "not a valid JSON")
    refused(tmp_path / "none", "")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    refused(copy, "no tokenizer: name a checkpoint, or copy")


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
    rewrite(copy, model_type="evil", auto_map=maps)
    for load in (load_policy, lambda folder: models.load_chat(folder, None)):
        with pytest.raises(UserError, match="custom code"):
            load(copy)
    assert not struck.exists()


@pytest.mark.parametrize(
    ("word", "special", "sound"), [("[PAD]", True, True), ("<user>", True, False), ("z", False, False)]
)
def test_a_token_beyond_the_embeddings_is_refused_if_it_can_be_read(word, special, sound, copy):
    """A text has no control tokens: Gemma 3's of images are beyond the embeddings of its smallest model."""
    chat = word_chat()
    chat.tokenizer.add_tokens([f"{word}!"], special_tokens=special)
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(word, f"{word}!")
    chat.save(copy)
    if sound:
        models.load_checkpoint(copy, hf.AutoModelForCausalLM)
    else:
        refused(copy, f"no embedding for the token '{word}!'")


def adapter(base: Path, folder: Path, updated: str | list = "all-linear", rows: int = 0, **options) -> torch.Tensor:
    """Save an adapter whose updates are not 0, of a base with more rows of embeddings; what it gives."""
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(CHAT.tokenizer) + rows)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=updated, **options)).eval()
    torch.manual_seed(0)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained(folder)
    return model(IDS).logits


UPDATES = [  # layers with updates, rows that are added to the embeddings, what is trained as a whole
    (["q_proj", "lm_head"], 0, None),
    (["embed_tokens"], 0, None),
    (["embed_tokens", "lm_head"], 0, None),
    ("all-linear", 3, None),
    ("all-linear", 3, ["embed_tokens", "lm_head"]),
]


@pytest.mark.parametrize(("updated", "rows", "whole"), UPDATES)
def test_a_merge_computes_what_the_adapter_does(tmp_path, agent, updated, rows, whole, monkeypatch):
    """Of a base whose output layer has the weights of its embeddings."""
    folder, merged = tmp_path / "lora", tmp_path / "merged"
    expected = adapter(agent, folder, updated, rows, modules_to_save=whole)
    model, chat = models.load_checkpoint(folder, hf.AutoModelForCausalLM)
    models.save_checkpoint(model, chat, merged)
    for loaded in (model, load_policy(merged).model):
        torch.testing.assert_close(loaded(IDS).logits, expected, atol=1e-4, rtol=1e-4)
    for layer in ("Linear", "Embedding"):  # a merge that adds something else
        monkeypatch.setattr(f"peft.tuners.lora.layer.{layer}.get_delta_weight", lambda *_: torch.tensor(0.1))
    refused(folder, "can't be merged: the outputs differ by")


def test_an_adapter_of_another_model_is_refused(tmp_path, agent):
    for layers in (1, 3):
        tiny_lm(CHAT, num_hidden_layers=layers).save_pretrained(tmp_path / "other")
        adapter(tmp_path / "other", tmp_path / "lora", ["q_proj"])
        rewrite(tmp_path / "lora", name="adapter_config.json", base_model_name_or_path=str(agent))
        refused(tmp_path / "lora", rf"do not both have .*layers\.{max(1, layers - 1)}")


@pytest.mark.parametrize("base", ["base", "../base"])
def test_a_relative_base_may_begin_here_or_at_the_adapter(tmp_path, copy, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapter(copy, tmp_path / "lora")
    for name in (None, base):
        rewrite(tmp_path / "lora", name="adapter_config.json", base_model_name_or_path=name)
        refused(tmp_path / "lora", f"its base model {re.escape(name or '(none)')} is not there")
    copy.rename(tmp_path / "base")
    assert Path(models.base_of(tmp_path / "lora")).samefile(tmp_path / "base")
    cut(tmp_path / "lora" / "adapter_model.safetensors", -50)
    refused(tmp_path / "lora", "no complete checkpoint?")


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_trained_prompt_is_refused(kind, tmp_path, agent):
    model = hf.AutoModelForCausalLM.from_pretrained(agent)
    peft.get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).save_pretrained(tmp_path)
    refused(tmp_path, "a trained prompt can't become weights")


@pytest.mark.parametrize("place", [".", "adapter", "a/checkpoint-5"])
def test_an_adapter_beside_full_weights_is_refused(tmp_path, agent, place):
    """They are loaded without it, but as its base."""
    model, chat = models.load_checkpoint(agent, hf.AutoModelForCausalLM)
    models.save_checkpoint(model, chat, tmp_path, models.save_memory(model, 2))
    models.load_checkpoint(tmp_path, hf.AutoModelForCausalLM)  # with adapter/, which is merged
    adapter(tmp_path, tmp_path / place)
    if place == ".":
        adapter(agent, tmp_path / "b")
        rewrite(tmp_path / "b", name="adapter_config.json", base_model_name_or_path=str(tmp_path))
        with pytest.raises(UserError, match="is not merged into its weights"):
            load_policy(tmp_path / "b")
        shutil.rmtree(tmp_path / "b")
    else:
        models.load_checkpoint(tmp_path / place, hf.AutoModelForCausalLM)
    refused(tmp_path, f"{re.escape(str(tmp_path / place))} is not merged into its weights")
