"""LoRA beside the plain model, few bits and GGUF files: what is trained, what a checkpoint holds, and how it ends."""

from pathlib import Path

import pytest
import torch
from fakes import chat_tokenizer, dump, tiny_lm, word_chat
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_train_qnet import labelled_tree
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import q_search
import sft
import train_qnet
from qlass import UserError, models
from qlass.agent import load_policy
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def close(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_an_update_by_hand(tmp_path):
    model, plain = tiny_lm(CHAT), tiny_lm(CHAT)
    adapter = models.save_memory(model, rank=3)
    parts = dict(model.named_parameters())
    a, b = (parts[f"model.layers.0.self_attn.v_proj.lora_{ab}.default.weight"].detach() for ab in "AB")
    assert a.shape == (3, 32) and b.shape == (16, 3) and a.dtype == torch.float32
    nn.init.normal_(b)
    merged = models.ordinary(model, tmp_path, adapter)
    at = "model.layers.0.self_attn.v_proj.weight"
    close(dict(merged.named_parameters())[at], dict(plain.named_parameters())[at] + 2.0 * b @ a)
    assert list(merged.state_dict()) == list(plain.state_dict())


def test_numbers_that_bf16_must_not_round_and_kernels_that_must_not_run():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians; cuDNN's attention errs at times."""
    model = models.ordinary(tiny_lm(CHAT), Path(), dtype=torch.bfloat16)
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and {b.dtype for b in rotary} == {torch.float32}
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def moved(net: nn.Module, start: nn.Module) -> set[str]:
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


@pytest.fixture
def learned_from(tmp_path):
    """The options of both stages that name what they learn from."""
    labels, expert = tmp_path / "q_labels.jsonl", tmp_path / "chats.jsonl"
    labels.write_text(dump(labelled_tree("train0") + labelled_tree("train1")))
    chat = {"messages": [{"role": "user", "content": "walk"}, {"role": "assistant", "content": "Action: left"}]}
    expert.write_text(dump([chat] * 3))
    return {sft: ["--expert", str(expert)], train_qnet: ["--labels", str(labels)]}


def test_the_stages_train_save_and_load_it(tmp_path, agent, learned_from):
    """A checkpoint holds the merged model, and beside it the adapter, which is loaded as its base with the updates."""
    start = load_policy(agent).model
    common = f"--env frozenlake --run {tmp_path} --epochs 2 --lr 0.01 --lora 2 --lora-alpha 3".split()
    train_qnet.main([*common, "--sft", str(agent), *learned_from[train_qnet]])
    net = QNet.from_pretrained(tmp_path / "qnet")
    adapter = PeftModel.from_pretrained(AutoModel.from_pretrained(agent), tmp_path / "qnet" / "adapter")
    close(adapter(IDS).last_hidden_state, net.backbone(IDS).last_hidden_state)
    assert moved(net.backbone, start.model) == LINEAR
    sft.main([*common, "--model", str(agent), *learned_from[sft]])
    merged, folder = load_policy(tmp_path / "sft").model, tmp_path / "sft" / "adapter"
    assert moved(merged, start) == LINEAR
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(agent), folder)
    close(adapter(IDS).logits, merged(IDS).logits)
    assert adapter.peft_config["default"].lora_alpha == 3
    for kind, expected in ((AutoModelForCausalLM, merged), (AutoModel, merged.model)):
        model, _ = models.load_checkpoint(folder, kind, None, train=True)
        assert type(model) is type(expected) and all(p.requires_grad for p in model.parameters())
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            close(p, q)


@pytest.mark.parametrize("stage", [sft, train_qnet])
def test_a_checkpoint_is_read_back_before_it_counts(stage, tmp_path, agent, learned_from, monkeypatch):
    """Else the states are gone, and the folder is complete but can't be loaded."""
    save, out = PreTrainedModel.save_pretrained, tmp_path / "out"

    def lossy(model: PreTrainedModel, folder: Path, **options) -> None:
        save(model, folder, **options)
        weights = load_file(folder / "model.safetensors")
        save_file({name: weights[name] for name in [*weights][1:]}, folder / "model.safetensors", {"format": "pt"})

    argv = f"--env frozenlake --run {tmp_path} --epochs 1 --out {out}".split() + learned_from[stage]
    argv += ["--model" if stage is sft else "--sft", str(agent)]
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no weights for"):
        patch.setattr(PreTrainedModel, "save_pretrained", lossy)
        stage.main(argv)
    assert not out.exists() and [*tmp_path.glob("out.partial/state-*")]
    stage.main(argv)
    assert {sft: load_policy, train_qnet: QNet.from_pretrained}[stage](out)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_base_of_few_bits_goes_through_the_stages(tmp_path, fake_world, bits, learned_from):
    """Trained from updates alone, merged into all the bits, searched in few."""
    pytest.importorskip("bitsandbytes")
    tiny_lm(CHAT, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    CHAT.save(tmp_path / "base")
    run = f"--env frozenlake --run {tmp_path} --load-in {bits}".split()
    train = [*run, "--epochs", "3", "--lora", "2", "--batch", "2"]
    sft.main([*train, "--model", str(tmp_path / "base"), "--n-expert", "3"])
    base, agent = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "sft"))
    assert moved(agent, base) == LINEAR
    close(agent(IDS).logits, PeftModel.from_pretrained(base, tmp_path / "sft" / "adapter")(IDS).logits)
    train_qnet.main([*train, "--sft", str(tmp_path / "sft"), *learned_from[train_qnet]])
    net = QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, agent.model) == LINEAR and net.backbone.dtype == torch.float32
    q_search.main([*run, "--limit", "2"])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 2


def test_a_training_that_cannot_train_what_was_asked_says_so(tmp_path, agent, value_net):
    pytest.importorskip("bitsandbytes")
    few, _ = models.load_checkpoint(agent, AutoModelForCausalLM, None, "4bit", plain=True)
    few.save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    few, _ = models.load_checkpoint(tmp_path, AutoModelForCausalLM, None, plain=True)
    with pytest.raises(UserError, match="saved in few bits"):
        models.save_memory(few)
    get_peft_model(few, LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "lora")
    with pytest.raises(UserError, match="needs its base in full"):
        load_policy(tmp_path / "lora")
    net, _ = models.load_checkpoint(value_net, AutoModel, None)
    with pytest.raises(UserError, match="a QNet, not an agent"):
        models.save_memory(net)
    with pytest.raises(UserError, match="tiny model is trained from scratch"):
        sft.arguments(["--lora", "8"])


def test_a_gguf_file_is_a_model_in_full_width(tmp_path):
    """As llama.cpp keeps it; few bits could not be saved."""
    gguf = pytest.importorskip("gguf")
    tokenizer, path = chat_tokenizer("chatml"), tmp_path / "model.gguf"
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), gguf.GGUFWriter(path, "llama")
    for field, value in {
        **{"context_length": 512, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64},
        **{"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 8},
        **{"vocab_size": len(tokens), "tokenizer_model": "gpt2", "token_list": tokens, "token_merges": ["a b"]},
        **{"eos_token_id": tokens.index("<|im_end|>"), "chat_template": tokenizer.chat_template},
        "token_types": [3 if token.startswith("<|") else 1 for token in tokens],
    }.items():
        getattr(writer, f"add_{field}")(value)
    weights = tiny_lm(CHAT, vocab_size=len(tokens)).model.state_dict()
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(f"model.{name}", (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model, chat = models.load_checkpoint(path, AutoModelForCausalLM, None)
    assert torch.equal(model.get_input_embeddings().weight, weights["embed_tokens.weight"])
    models.save_checkpoint(model, chat, tmp_path / "saved", models.save_memory(model, rank=2))
    assert load_policy(tmp_path / "saved").chat.stop.endswith("<|im_end|>")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
