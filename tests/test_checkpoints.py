"""Weights: which are loaded or refused in one line, none runs code; what LoRA and few bits train, save and load."""

import contextlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from fakes import FakeEnv, dump, tiny_lm, word_chat
from safetensors.torch import load_file, save_file
from test_tokens import SMALL, tiny
from test_train_qnet import labelled_tree
from torch import nn

import q_search
import sft
import train_qnet
from qlass import UserError, models
from qlass.agent import load_policy
from qlass.chat import Rendering
from qlass.config import Memory
from qlass.files import warn_once
from qlass.messages import State
from qlass.optional import foreign, lora
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])
LORA = Memory(lora=2)


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


def close(x: Any, y: Any) -> None:
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


LAYER = "model.layers.0."
KEYS = {  # model type: keys that may be left out, and keys that change what it computes
    "gpt2": (["h.0.attn.bias", "transformer.h.0.attn.masked_bias"], ["h.0.attn.c_attn.lora_A.weight"]),
    "gpt_neox": (["gpt_neox.layers.0.attention.bias"], ["gpt_neox.layers.0.attention.dense.weight_scale"]),
    "llama": (["v_head.summary.weight", "mtp.layers.0.mlp.up_proj.weight", f"{LAYER}self_attn.k_proj.k_scale"],
              ["model.layers.4.mlp.up_proj.weight", f"{LAYER}self_attn.k_proj.weight_scale"]),
    "mistral": ([f"{LAYER}self_attn.rotary_emb.inv_freq"], [f"{LAYER}self_attn.q_norm.weight"]),
    "mixtral": (["model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight"],  # predicts a later token
                [f"base_model.model.{LAYER}self_attn.q_proj.lora_B.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", [hf.AutoModelForCausalLM, hf.AutoModel])
@pytest.mark.parametrize("name", KEYS)
def test_a_key_without_a_place_matters_if_its_layer_is_computed(name, kind, tmp_path):
    sound, wrong = KEYS[name]
    config = type(hf.AutoConfig.for_model(name))
    config = config(**{k: v for k, v in SMALL.items() if k in config().to_dict()} | {"eos_token_id": 1})
    config.num_nextn_predict_layers = int(name == "mixtral")
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
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


def test_other_weights_than_those_meant_are_refused(copy):
    shutil.copy(copy / "model.safetensors", copy / "model-00001-of-00001.safetensors")
    refused(copy, "model-00001-of-00001.safetensors and model.safetensors are of two saves")
    (copy / "model-00001-of-00001.safetensors").unlink()
    refused(rewrite(copy, intermediate_size=128), "down_proj.weight has another size in config.json")
    for quantised in ({"quant_method": "awq"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        refused(rewrite(copy, quantization_config=quantised), "can't be loaded")
    for keep in (-100, 5, 0):  # weights, header, all
        cut(copy / "model.safetensors", keep)
        refused(copy, "is it complete?")
    (copy / "model.safetensors").unlink()
    refused(copy, "no file named model.safetensors")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    refused(copy, "Couldn't instantiate the backend tokenizer")
    cut(copy / "config.json", 20)
    refused(copy, "not a valid JSON")
    refused(copy / "nowhere", "no such file or folder")


def test_weights_in_another_form_are_refused_with_the_way_to_ours(tmp_path):
    for file, says in (  # each hides those before it
        ("checkpoint-9/model.safetensors", "a folder of checkpoints: name one"),
        ("consolidated.00.pth", "Meta's own form"),
        ("pytorch_model-00001-of-00002.bin", "pickles, .* save_pretrained"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "accelerate merge-weights"),
        ("zero_to_fp32.py", f"{tmp_path}/zero_to_fp32.py --safe_serialization"),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
        refused(tmp_path, f"has no model.safetensors, but .*{says}")


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
    (["embed_tokens", "lm_head"], 0, None),
    (["embed_tokens"], 3, None),
    ("all-linear", 3, ["embed_tokens", "lm_head"]),
]


@pytest.mark.parametrize(("updated", "rows", "whole"), UPDATES)
def test_a_merge_computes_what_the_adapter_does(tmp_path, agent, updated, rows, whole):
    """Of a base whose output layer has the weights of its embeddings."""
    folder, merged = tmp_path / "lora", tmp_path / "merged"
    expected = adapter(agent, folder, updated, rows, modules_to_save=whole)
    model, chat = models.load_checkpoint(folder, hf.AutoModelForCausalLM)
    models.save_checkpoint(model, chat, merged)
    for loaded in (model, load_policy(merged).model):
        close(loaded(IDS).logits, expected)


def test_an_adapter_of_another_model_or_of_a_prompt_is_refused(tmp_path, agent):
    for layers in (1, 3):
        tiny_lm(CHAT, num_hidden_layers=layers).save_pretrained(tmp_path / "other")
        adapter(tmp_path / "other", tmp_path / "lora", ["q_proj"])
        rewrite(tmp_path / "lora", name="adapter_config.json", base_model_name_or_path=str(agent))
        refused(tmp_path / "lora", rf"do not both have .*layers\.{max(1, layers - 1)}")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(tiny_lm(CHAT), prompt).save_pretrained(tmp_path / "prompt")
    rewrite(tmp_path / "prompt", name="adapter_config.json", base_model_name_or_path=str(agent))
    refused(tmp_path / "prompt", "a trained prompt can't become weights")
    adapter(agent, tmp_path / "bias", ["q_proj"], lora_bias=True)  # its base has none
    refused(tmp_path / "bias", "can't be merged")
    rewrite(tmp_path / "bias", name="adapter_config.json", peft_type="NEWER")
    refused(tmp_path / "bias", r"PEFT can't load the adapter .*NEWER'\)$")


@pytest.mark.parametrize("place", ["lora_adapter", "adapter", "checkpoint-9/adapter"])
def test_an_adapter_below_weights_is_not_passed_over(copy, place):
    """Its name is no sign that the weights have its updates: a note beside our own says so."""
    adapter(copy, copy / place)
    refused(copy, f"its weights lack the adapter {copy / place}")
    models.load_checkpoint(copy / place, hf.AutoModelForCausalLM, plain=True)


@pytest.mark.parametrize("base", ["base", "../base"])
def test_a_relative_base_may_begin_here_or_at_the_adapter(tmp_path, copy, base, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapter(copy, tmp_path / "lora")
    for name in (None, base):
        rewrite(tmp_path / "lora", name="adapter_config.json", base_model_name_or_path=name)
        refused(tmp_path / "lora", f"its base model {re.escape(name or '(none)')}: can't be loaded")
    copy.rename(tmp_path / "base")
    assert Path(lora.base_of(tmp_path / "lora")).samefile(tmp_path / "base")
    cut(tmp_path / "lora" / "adapter_model.safetensors", -50)
    refused(tmp_path / "lora", "is it complete?")


def test_an_adapter_beside_full_weights_is_refused(tmp_path, agent):
    """They are loaded without it, but as its base."""
    model, chat = models.load_checkpoint(agent, hf.AutoModelForCausalLM)
    models.save_checkpoint(model, chat, tmp_path, models.prepare_training(model, LORA))
    models.load_checkpoint(tmp_path, hf.AutoModelForCausalLM)  # with adapter/, which is merged
    adapter(tmp_path, tmp_path)
    adapter(agent, tmp_path / "b")
    rewrite(tmp_path / "b", name="adapter_config.json", base_model_name_or_path=str(tmp_path))
    for folder in (tmp_path, tmp_path / "b"):
        with pytest.raises(UserError, match=r"adapter_config\.json and model\.safetensors"):
            load_policy(folder)


# ------------------------------------------------------------------------------------- LoRA, few bits, and GGUF files

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_numbers_that_bf16_must_not_round_and_kernels_that_must_not_run():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians; cuDNN's attention errs at times."""
    model = models.full_weights(tiny_lm(CHAT), Path(), dtype=torch.bfloat16)
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and {b.dtype for b in rotary} == {torch.float32}
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("bits", [None, "4bit", "8bit"])
def test_updates_of_a_base_go_through_the_stages(tmp_path, fake_world, bits):
    """A checkpoint holds the merged model, in all the bits, and beside it the adapter, which loads as its base too."""
    run = f"--env frozenlake --run {tmp_path}".split()
    if bits:
        pytest.importorskip("bitsandbytes")
        run += ["--load-in", bits]
    tiny_lm(CHAT, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    CHAT.save(tmp_path / "base")
    train = [*run, "--epochs", "3", "--lr", "0.01", "--lora", "2", "--lora-alpha", "3", "--batch", "2"]
    sft.main([*train, "--model", str(tmp_path / "base"), "--n-expert", "3"])
    base, agent = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "sft"))
    assert moved(agent, base) == LINEAR
    adapter = peft.PeftModel.from_pretrained(base, tmp_path / "sft" / "adapter")
    close(adapter(IDS).logits, agent(IDS).logits)
    assert adapter.peft_config["default"].lora_alpha == 3
    model, _ = models.load_checkpoint(tmp_path / "sft" / "adapter", hf.AutoModel, None, train=True)
    close([*model.parameters()], [*agent.model.parameters()])
    assert all(p.requires_grad for p in model.parameters())
    (tmp_path / "q_labels.jsonl").write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    train_qnet.main([*train, "--sft", str(tmp_path / "sft"), "--labels", str(tmp_path / "q_labels.jsonl")])
    net = QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, agent.model) == LINEAR and net.backbone.dtype == torch.float32
    adapter = peft.PeftModel.from_pretrained(agent.model, tmp_path / "qnet" / "adapter")
    close(adapter(IDS).last_hidden_state, net.backbone(IDS).last_hidden_state)
    q_search.main([*run, "--limit", "2"])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 2


def test_updates_on_top_of_updates_have_both_where_they_are_loaded_from(tmp_path, agent):
    """The second adapter's base is the first one, with its own base."""

    def trained(start: Path, out: Path) -> None:
        model, chat = models.load_checkpoint(start, hf.AutoModelForCausalLM, train=True)
        adapter = models.prepare_training(model, SimpleNamespace(lora=2, lora_alpha=None, gradient_checkpointing=False))
        for name, p in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(p, std=0.1)
        models.save_checkpoint(model, chat, out, adapter)

    trained(agent, tmp_path / "one")
    trained(tmp_path / "one" / "adapter", tmp_path / "two")
    whole, again = (
        models.load_checkpoint(tmp_path / name, hf.AutoModelForCausalLM)[0] for name in ("two", "two/adapter")
    )
    close(again(IDS).logits, whole(IDS).logits)


def test_a_checkpoint_is_read_back_before_it_counts(tmp_path, agent, value_net, monkeypatch):
    """Else it would take the place of an older one, but can't be loaded."""
    (policy, net), save = (load_policy(agent), QNet.from_pretrained(value_net)), hf.PreTrainedModel.save_pretrained

    def lossy(model: hf.PreTrainedModel, folder: Path, **options) -> None:
        save(model, folder, **options)
        weights = load_file(folder / "model.safetensors")
        rewrite(folder, {name: weights[name] for name in [*weights][1:]})

    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", lossy)
    out = tmp_path / "out"
    with pytest.raises(UserError, match="no weights for"):
        models.save_checkpoint(policy.model, policy.chat, out)
    with pytest.raises(UserError, match="no weights for"):
        train_qnet.save(net, out, None, torch.float32)
    assert not out.exists()


def test_a_training_that_cannot_train_what_was_asked_says_so(tmp_path, agent, value_net):
    pytest.importorskip("bitsandbytes")
    few, _ = models.load_checkpoint(agent, hf.AutoModelForCausalLM, None, "4bit", plain=True)
    few.save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    few, _ = models.load_checkpoint(tmp_path, hf.AutoModelForCausalLM, None, plain=True)
    with pytest.raises(UserError, match="saved in few bits"):
        models.prepare_training(few, Memory())
    peft.get_peft_model(few, peft.LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "lora")
    with pytest.raises(UserError, match="needs its base in full"):
        load_policy(tmp_path / "lora")
    net, _ = models.load_checkpoint(value_net, hf.AutoModel, None)
    with pytest.raises(UserError, match="a QNet, not an agent"):
        models.prepare_training(net, Memory())
    with pytest.raises(UserError, match="tiny model is trained from scratch"):
        sft.load(sft.Config(lora=8), FakeEnv(), [])


@pytest.mark.parametrize("name", ["mamba2", "llama4_text", "phimoe"])
def test_lora_is_tried_before_a_training(name):
    """By PEFT's refusal, or in the forward of experts that LoRA gives no shape to."""
    with pytest.raises(UserError, match=r"--lora can't train it \((ValueError|AttributeError)") as error:
        models.prepare_training(tiny(name), LORA)
    assert "\n" not in str(error.value)


ROPE = r"its scaling of positions \(RoPE\) can't be read"
GGUF = [  # what a file says besides, and why it is refused
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}, None),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, ROPE),
    ({"llama.rope.scaling.factor": 8.0}, ROPE),
    ({"rope_freqs.weight": np.ones(4, np.float32)}, ROPE),
    ({"llama.logit_scale": 0.0625}, "its logit_scale of 0.0625 can't be read"),
    ({"llama.attention.sliding_window": 77}, "its attention.sliding_window of 77 can't be read"),
]


@pytest.mark.parametrize(("more", "reason"), GGUF)
def test_a_gguf_file_is_read_in_full_width_or_refused(tmp_path, more, reason):
    """As llama.cpp keeps it; few bits could not be saved. What transformers leaves at a default is not passed over."""
    gguf = pytest.importorskip("gguf")
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    sizes = {"vocab_size": len(CHAT.tokenizer), "context_length": 512, "embedding_length": 32, "block_count": 2}
    sizes |= {"feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    sizes["attention.layer_norm_rms_epsilon"] = 1e-5
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, np.ndarray: writer.add_tensor}
    for name, value in ({f"llama.{name}": value for name, value in sizes.items()} | more).items():
        add[type(value)](name, value)
    weights = tiny_lm(CHAT).model.state_dict()
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(f"model.{name}", (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=rf"m\.gguf: {reason}") if reason else contextlib.nullcontext():
        model = models.load_weights(tmp_path / "m.gguf", hf.AutoModelForCausalLM, {})
    if reason:
        return
    assert torch.equal(model.get_input_embeddings().weight, weights["embed_tokens.weight"])
    assert models.prepare_training(model, LORA)
    refused((tmp_path / "m.gguf").rename(tmp_path / "m-00001-of-00003.gguf"), "one of several files of a model; join")


# --------------------------------------------------------------------- settings that are read, and that others read


def test_a_model_returns_what_is_asked_and_not_what_its_config_asks(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    outputs = {f"output_{name}": True for name in ("attentions", "hidden_states", "router_logits")}
    model, _ = models.load_checkpoint(rewrite(tmp_path, return_dict=False, **outputs), hf.AutoModelForCausalLM)
    assert set(model(input_ids=IDS)) == {"logits", "past_key_values"}


SAVED = ("config", "generation_config", "tokenizer_config")


@pytest.mark.parametrize(
    ("kind", "length", "context"),
    [("yarn", 64, 256), ("yarn", 999, 999), ("llama3", 128, 128), ("dynamic", 256, 64), ("default", 128, 128)],
)
def test_the_context_and_what_transformers_4_and_servers_read_of_a_checkpoint(kind, length, context, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 5e5}
    rope |= {} if kind == "default" else {"factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    model = tiny_lm(CHAT, max_position_embeddings=length, rope_parameters=rope)
    assert foreign.context_of(model.config) == context
    model.generation_config.temperature = 0.6  # which is not sampled: transformers refuses to save that
    models.save_checkpoint(model, CHAT, tmp_path / "sft")
    config, generation, tokenizer = (json.loads((tmp_path / "sft" / f"{name}.json").read_text()) for name in SAVED)
    assert config["rope_theta"] == 5e5 and config.get("rope_scaling", {"rope_type": "default"})["rope_type"] == kind
    assert generation["eos_token_id"] == [CHAT.stop_id] and "temperature" not in generation
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    again, _ = models.load_checkpoint(tmp_path / "sft", hf.AutoModelForCausalLM)
    assert again.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_the_template_of_a_processor_is_read_and_a_missing_one_is_told(copy, capsys):
    def prompt() -> list[int]:
        return models.load_chat(copy, Rendering()).prompt(State((("user", "walk"),)))

    warn_once.cache_clear()
    expected, template = prompt(), copy / "chat_template.jinja"
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert prompt() == expected and not capsys.readouterr().err
    (copy / "chat_template.json").unlink()
    assert prompt() != expected and "has no chat template: its prompts are 'User: ..." in capsys.readouterr().err
