"""LoRA beside the plain model, what is trained and what a checkpoint holds; weights that are refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import chat_tokenizer, dump, tiny_backbone, tiny_config, tiny_lm, training_settings, word_chat
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_train_qnet import labelled_tree
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import q_search
import sft
import train_qnet
from qlass import UserError, models
from qlass.policy import Policy
from qlass.training import Progress, resume_folder
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(model: nn.Module, rank: int = 2) -> nn.Module:
    """PEFT's view of a model with updates that are no longer 0."""
    adapter = models.save_memory(model, rank)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    return adapter


def close(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_attention_is_not_left_to_cudnn():
    """It plans anew for each length, and on Blackwell writes wrong texts."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_an_update_by_hand(tmp_path):
    model, plain = tiny_lm(CHAT), tiny_lm(CHAT)
    adapter = adapted(model, rank=3)
    parts = dict(model.named_parameters())
    a, b = (parts[f"model.layers.0.self_attn.v_proj.lora_{ab}.default.weight"].detach() for ab in "AB")
    assert a.shape == (3, 32) and b.shape == (16, 3) and a.dtype == torch.float32
    merged = models.ordinary(model, tmp_path, adapter)
    at = "model.layers.0.self_attn.v_proj.weight"
    close(dict(merged.named_parameters())[at], dict(plain.named_parameters())[at] + 2.0 * b @ a)
    assert list(merged.state_dict()) == list(plain.state_dict())


def test_weights_of_few_bits_get_all_their_bits_back_before_the_merge(tmp_path):
    """The updates go onto the base itself, and nothing says that it had few bits."""
    pytest.importorskip("bitsandbytes")
    base = tiny_lm(CHAT)
    base.save_pretrained(tmp_path / "base")
    CHAT.save(tmp_path / "base")
    few, _ = models.load_checkpoint(tmp_path / "base", AutoModelForCausalLM, None, "4bit", plain=True)
    models.save_checkpoint(few, CHAT, tmp_path / "saved", adapted(few))
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    saved = Policy.load(tmp_path / "saved").model
    close(saved(IDS).logits, PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter")(IDS).logits)
    assert torch.equal(saved.model.embed_tokens.weight, tiny_lm(CHAT).model.embed_tokens.weight)  # not the rounded ones


# ----------------------------------------------------------------------------------------------------------- the stages


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


def test_the_stages_train_save_and_load_it(tmp_path, agent):
    """A checkpoint holds the merged model, and beside it the adapter, which is loaded as its base with the updates."""
    start = Policy.load(agent).model
    labels, expert = tmp_path / "labels.jsonl", tmp_path / "expert.jsonl"
    labels.write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    chats = [{"messages": [{"role": "user", "content": "walk"}, {"role": "assistant", "content": "Action: left"}]}] * 3
    expert.write_text(dump(chats))
    common = ["--env", "frozenlake", "--run", str(tmp_path), "--epochs", "2", "--lr", "0.01"]
    common += ["--lora", "2", "--lora-alpha", "3"]
    train_qnet.main([*common, "--sft", str(agent), "--labels", str(labels)])
    net = QNet.from_pretrained(tmp_path / "qnet")
    adapter = PeftModel.from_pretrained(AutoModel.from_pretrained(agent), tmp_path / "qnet" / "adapter")
    close(adapter(IDS).last_hidden_state, net.backbone(IDS).last_hidden_state)
    assert moved(net.backbone, start.model) == LINEAR
    torch.manual_seed(0)
    assert not torch.equal(net.head[-1].weight, QNet(tiny_backbone(CHAT), CHAT).head[-1].weight)

    sft.main([*common, "--model", str(agent), "--expert", str(expert)])
    merged, folder = Policy.load(tmp_path / "sft").model, tmp_path / "sft" / "adapter"
    assert moved(merged, start) == LINEAR
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(agent), folder)
    close(adapter(IDS).logits, merged(IDS).logits)
    assert adapter.peft_config["default"].lora_alpha == 3
    for kind, expected in ((AutoModelForCausalLM, merged), (AutoModel, merged.model)):
        model, _ = models.load_checkpoint(folder, kind, None, train=True)
        assert type(model) is type(expected) and all(p.requires_grad for p in model.parameters())
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            close(p, q)
    other = LlamaForCausalLM(tiny_config(len(CHAT.tokenizer), num_hidden_layers=1))
    models.save_memory(other, 2).save_pretrained(tmp_path / "other", save_embedding_layers=False)
    shutil.copy(tmp_path / "other" / "adapter_model.safetensors", folder)
    with pytest.raises(UserWarning, match="missing adapter keys"):  # of the second layer
        Policy.load(folder)


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]])
def test_an_adapter_brings_the_embeddings_of_the_tokens_that_it_adds(tmp_path, agent, saved):
    model = AutoModelForCausalLM.from_pretrained(agent)
    model.resize_token_embeddings(len(CHAT.tokenizer) + 3)
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", modules_to_save=saved))
    adapter.save_pretrained(tmp_path)
    loaded, _ = models.load_checkpoint(tmp_path, AutoModelForCausalLM, None)
    close(loaded(IDS).logits, adapter(IDS).logits)


def test_positions_are_not_rounded_with_the_weights():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians."""
    model = models.ordinary(tiny_lm(CHAT), Path(), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert rotary and {buffer.dtype for buffer in rotary} == {torch.float32}


def test_lora_of_weights_at_random_is_refused():
    with pytest.raises(UserError, match="tiny model is trained from scratch"):
        sft.arguments(["--lora", "8"])


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_base_of_few_bits_goes_through_the_stages(tmp_path, fake_world, bits):
    """Trained from updates alone, stopped and resumed, merged into all the bits, searched in few."""
    pytest.importorskip("bitsandbytes")
    tiny_lm(CHAT, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    CHAT.save(tmp_path / "base")
    run = ["--env", "frozenlake", "--run", str(tmp_path), "--load-in", bits]
    train = [*run, "--epochs", "1", "--lora", "2", "--batch", "2", "--save-every", "1"]
    sft.main([*train, "--model", str(tmp_path / "base"), "--n-expert", "3"])
    labels = tmp_path / "q_labels.jsonl"
    labels.write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    train_qnet.main([*train, "--sft", str(tmp_path / "sft"), "--labels", str(labels)])
    base, net = Policy.load(tmp_path / "sft").model, QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, base.model) == LINEAR and net.backbone.dtype == torch.float32
    q_search.main([*run, "--limit", "2"])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_training_of_few_bits_resumes_from_its_state(tmp_path, bits, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    tiny_lm(CHAT, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    args = training_settings(save_every=1)
    resume_folder(args.out).mkdir()
    logits = []
    for _ in range(2):  # the second begins where the first has stopped
        model, _ = models.load_checkpoint(tmp_path, AutoModelForCausalLM, None, bits, plain=True)
        models.save_memory(model, 2)
        progress = Progress(model, args, [1] * 8)
        if progress.step == 0:
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.data += 0.1
            progress.end_update(1.0, tokens=3)
        logits.append(model(IDS).logits)
    assert progress.step == 1 and torch.equal(*logits)


# ------------------------------------------------------------------------------------ weights that are not those meant


def tampered(tmp_path: Path, agent: Path, more: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    """The agent's folder with more weights in it."""
    folder = tmp_path / "tampered"
    shutil.copytree(agent, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | more, folder / file, metadata={"format": "pt"})
    return folder


LAYER = "model.layers.0.self_attn.q_proj"
STRANGE = {  # keys: are they refused?
    f"{LAYER}.bias": True,
    f"{LAYER}.lora_A.weight": True,
    f"base_model.model.{LAYER}.lora_B.weight": True,
    "model.layers.7.mlp.up_proj.weight": True,
    "v_head.summary.weight": False,
    "model.layers.0.self_attn.rotary_emb.inv_freq": False,
    "lm_head.weight": False,
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
def test_weights_without_a_place_are_refused(tmp_path, agent, name, kind):
    folder = tampered(tmp_path, agent, {name: torch.ones(len(CHAT.tokenizer), 32)})
    if STRANGE[name]:
        with pytest.raises(UserError, match=re.escape(f"has no place for {name}; ")):
            models.load_checkpoint(folder, kind)
    else:
        models.load_checkpoint(folder, kind)


def test_a_folder_with_two_sets_of_weights_is_refused(tmp_path, agent):
    folder = tampered(tmp_path, agent, {}, "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="weights of two saves"):
        Policy.load(folder)
    (folder / "model-00001-of-00001.safetensors").unlink()
    for name, refused in (("adapter", False), ("lora_adapter", True)):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
        if refused:
            with pytest.raises(UserError, match="lora_adapter is not merged"):
                Policy.load(folder)
        else:
            Policy.load(folder)


def test_a_training_that_cannot_train_what_was_asked_says_so(tmp_path, agent, value_net):
    pytest.importorskip("bitsandbytes")
    few, _ = models.load_checkpoint(agent, AutoModelForCausalLM, None, "4bit", plain=True)
    few.save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    few, _ = models.load_checkpoint(tmp_path, AutoModelForCausalLM, None, plain=True)
    with pytest.raises(UserError, match="saved in few bits"):
        models.save_memory(few)
    net, _ = models.load_checkpoint(value_net, AutoModel, None)
    with pytest.raises(UserError, match="a QNet, not an agent"):
        models.save_memory(net)
    with pytest.raises(ValueError, match="empty parameter list"):
        models.adamw(tiny_lm(CHAT).requires_grad_(False), {"": 0.1})


def write_gguf(path: Path) -> np.ndarray:
    """A Llama of two layers with random weights and a tokenizer of bytes, as llama.cpp keeps it; its embeddings."""
    gguf = pytest.importorskip("gguf")
    tokenizer = chat_tokenizer("chatml")
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 512, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64}
    sizes |= {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 8}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(tokenizer.chat_template)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        sizes = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
        sizes |= {"attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in sizes.items()}
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights["token_embd"]


def test_a_gguf_file_is_a_model_like_any_other(tmp_path, fake_world):
    embeddings = write_gguf(tmp_path / "model.gguf")
    model, chat = models.load_checkpoint(tmp_path / "model.gguf", AutoModelForCausalLM, None)
    assert torch.equal(model.get_input_embeddings().weight, torch.from_numpy(embeddings))
    assert not hasattr(model.config, "quantization_config") and chat.stop.endswith("<|im_end|>")
    run = ["--env", "frozenlake", "--run", str(tmp_path), "--epochs", "1", "--lora", "2", "--max-tokens", "300"]
    sft.main([*run, "--model", str(tmp_path / "model.gguf"), "--n-expert", "2"])
    saved = json.loads((tmp_path / "sft" / "config.json").read_text())
    assert "quantization_config" not in saved and Policy.load(tmp_path / "sft").model.num_parameters() > 0


def test_a_folder_without_a_tokenizer_says_what_to_copy(tmp_path, agent):
    shutil.copytree(agent, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="no tokenizer: name a checkpoint, or copy"):
        Policy.load(tmp_path / "bare")
