"""Weights: which are loaded or refused in one line, none runs code; what LoRA and few bits train, save and load."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import torch
import transformers as hf
from fakes import chat_tokenizer, labelled_tree, refused, settings_of, talk, tiny, tiny_lm, word_chat, write
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

import q_search
import sft
import train_qnet
from qlass import models
from qlass.agent import load_policy
from qlass.batching import Sample
from qlass.chat import Chat, Rendering
from qlass.files import meta_of, parts_folder, write_json
from qlass.inputs import checkpoint, sha256
from qlass.policy import QUESTION, Policy
from qlass.settings import Sampling
from train_qnet import QNet

CHAT = word_chat()
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def save(model, folder, chat=CHAT):
    model.save_pretrained(folder)
    chat.save(folder)


def close(x, y):
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.fixture
def copy(tmp_path, agent):
    """A checkpoint to spoil."""
    return shutil.copytree(agent, tmp_path / "sft")


# --------------------------------------------------------------------------------- what is not supported is not read


def rewrite(file, **settings):
    """More in a file of settings."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def reweighed(change):
    """Other weights in a checkpoint's file."""

    def spoil(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def encoder(folder):
    """A BERT, whose every token sees those behind it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.5
    hf.BertLMHeadModel(hf.BertConfig(vocab_size=len(CHAT.tokenizer), **sizes)).save_pretrained(folder)


def in_shards(folder, name):
    """Its weights in two files of such names, and an index; returns the second."""
    weights, index = load_file(folder / "model.safetensors"), {}
    for i in range(2):
        own, shard = sorted(weights)[i::2], name.format(i)
        save_file({n: weights[n] for n in own}, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(own, shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    (folder / "model.safetensors").unlink()
    return folder / shard


NORM = "model.norm.weight"
FOREIGN = {  # beside those of refusals.md
    "a weight is missing": (reweighed(lambda weights: weights.pop(NORM)), f"missing_keys: {NORM}"),
    "weights that are no numbers": (
        reweighed(lambda weights: weights[NORM].fill_(float("nan"))),
        "its outputs are not finite(?!.*--plain)",
    ),
    "an encoder": (encoder, "it is not causal|outputs of token trees differ"),
    "an encoder, plainly": (encoder, "it is not causal"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_checkpoint_is_refused_in_one_line(copy, name):
    """None may load and be wrong."""
    models.load_model(copy, Sampling())
    spoil, reason = FOREIGN[name]
    spoil(copy)
    with refused(f"^{copy}: .*({reason})"):
        models.load_model(copy, Sampling(plain="plain" in name))


CLASSES = [("llama-2", "LlamaTokenizer"), ("chatml", "GPT2Tokenizer"), ("chatml", "Qwen2Tokenizer")]


@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_a_tokenizer_is_read_as_its_own_file_says(tmp_path, name, kind):
    """Not as its class would build one: transformers' LlamaTokenizer prepends no space, GPT-2's cuts otherwise."""
    tokenizer = chat_tokenizer(name)
    if name == "chatml":  # digits in threes, of which "123456" has 23, and 34 where it is whole
        core = tokenizer.backend_tokenizer
        threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([threes, bytewise])
        core.model = BPE(core.get_vocab() | {"34": len(tokenizer), "23": len(tokenizer) + 1}, [("3", "4"), ("2", "3")])
    chat = Chat(tokenizer, Rendering())
    save(tiny_lm(chat), tmp_path, chat)
    rewrite(tmp_path / "tokenizer_config.json", tokenizer_class=kind, legacy=False)
    text = "<s>[INST] The cat's b123456 cost $2023.50"
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    by_class = hf.AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    read = models.load_chat(tmp_path, Sampling())
    assert read.tokenizer.encode(text, add_special_tokens=False) == own != by_class
    read.save(tmp_path / "again")
    again = Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    assert again.encode(text, add_special_tokens=False).ids == own


@pytest.mark.parametrize(("name", "plain"), [("mixtral", False), ("mixtral", True), ("rwkv", True)])
def test_a_checkpoint_gives_its_logits_alone_and_keeps_its_weights(tmp_path, name, plain):
    """Mixtral's router logits would stand before them, and attention would be refused after a training; RWKV would
    divide the weights of later layers, in place."""
    config = Sampling(plain=plain)
    save(tiny(name), tmp_path)
    before = models.load_model(tmp_path, config)[0](IDS).logits
    rewrite(tmp_path / "config.json", output_router_logits=True, output_attentions=True, return_dict=False)
    model, chat = models.load_model(tmp_path, config)
    close(model(IDS).logits, before)
    models.save(model, chat, tmp_path / "again", config)
    close(models.load_model(tmp_path / "again", config)[0](IDS).logits, before)


@pytest.mark.parametrize("word", ["!", "Z"])
def test_padding_by_a_plain_word_is_refused(word, tmp_path):
    tokenizer = chat_tokenizer("chatml")
    tokenizer.pad_token = word
    chat = Chat(tokenizer, Rendering())
    save(tiny_lm(chat), tmp_path, chat)
    with refused(f"its tokenizer: Can't sanitize '{word}'"):
        models.load_chat(tmp_path, Sampling())


def test_a_model_that_takes_no_updates_names_the_way_without():
    with refused(r"incompatible with Mamba.*\(without --lora all weights are trained\)"):
        models.prepare_training(tiny("mamba2"), settings_of(sft, "--model mamba --lora 2"))


def test_a_bug_of_ours_keeps_its_traceback(copy, monkeypatch):
    for place in ("tokens_of", "differences"):
        with monkeypatch.context() as patch:
            patch.setattr(f"qlass.fast.parity.{place}", lambda *_: [1].undefined)
            with pytest.raises(AttributeError):
                models.load_model(copy, Sampling())


def test_the_context_and_the_ends_of_a_turn_are_the_checkpoints(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny_lm(CHAT, max_position_embeddings=256, rope_parameters=yarn)
    save(model, tmp_path)
    for ends, stops in ([0, 1], {0, 1}), (1, {1}):
        write("generation_config.json", [{"eos_token_id": ends, "top_k": -1}])
        _, chat = models.load_model(tmp_path, Sampling())
        assert chat.context == 256 and chat.stop_ids == stops


def test_how_a_checkpoint_would_be_sampled_elsewhere_changes_nothing(copy):
    """As by Qwen 2.5's generation_config.json, which only says how a turn ends."""
    state = talk("walk", "OK", "you stand")

    def drawn():
        (candidates,) = load_policy(copy, Sampling(plain=True)).sample([Sample(state, 6, ("t",), 1.0)])
        return candidates

    before = drawn()
    penalties = {"repetition_penalty": 3.0, "min_new_tokens": 9, "top_k": 2, "top_p": 0.5, "suppress_tokens": [5, 6, 7]}
    rewrite(copy / "generation_config.json", do_sample=True, **penalties)
    assert drawn() == before


@pytest.mark.parametrize("name", ["model-0000{}-of-00002", "ft-model-0000{}-of-00002", "hf_{}_0"])
def test_the_files_of_weights_are_those_of_the_index(copy, name):
    """torchtune's and others' names: other weights are another checkpoint."""
    before = models.load_model(copy, Sampling())[0](IDS).logits
    last = in_shards(copy, f"{name}.safetensors")
    close(models.load_model(copy, Sampling())[0](IDS).logits, before)
    old = sha256(copy)
    (copy / "tokenizer copy.json").write_text("{}")  # of a file manager: not read
    assert sha256(copy) == old
    save_file({n: w + 1 for n, w in load_file(last).items()}, last, metadata={"format": "pt"})
    assert sha256(copy) != old


def test_only_what_is_loaded_is_downloaded(copy, monkeypatch):
    """Of a repository with its weights in several forms."""
    in_shards(copy, "ft-model-0000{}-of-00002.safetensors")
    loaded = [file.name for file in copy.iterdir()]
    others = ["consolidated.safetensors", "original/tokenizer.model", "onnx/config.json", "pytorch_model.bin"]
    patterns = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **asked: patterns.update(asked) or copy)
    assert checkpoint("org/model") == copy
    assert [*filter_repo_objects([*loaded, *others], **patterns)] == loaded


def test_a_name_that_is_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("away")))
    with refused("^org/model: no such folder, and not on the hub: away$"):
        checkpoint("org/model")


# ------------------------------------------------------------------------------------------------- LoRA, and few bits


def test_numbers_that_bf16_must_not_round_and_kernels_that_must_not_run():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians; cuDNN's attention errs at times."""
    model = models.full_weights(tiny_lm(CHAT), Path(), Sampling(precision="bf16"))
    rotary = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in rotary} == {torch.float32}
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def moved(net, start):
    """The layers whose weights are others than at the start."""
    before = dict(start.named_parameters())
    return {name.split(".")[-2] for name, p in net.named_parameters() if not torch.equal(p, before[name])}


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("bits", [None, "4bit"])
def test_updates_of_a_base_go_through_the_stages(tmp_path, fake_world, bits):
    """A checkpoint holds the merged model, in all the bits, and beside it the adapter."""
    run = f"--env frozenlake --run {tmp_path}"
    if bits:
        pytest.importorskip("bitsandbytes")
        run += f" --load-in {bits}"
    save(tiny_lm(CHAT, hidden_size=64, intermediate_size=128), tmp_path / "base")
    train = f"{run} --epochs 3 --lr 0.01 --lora 2 --batch 2"
    sft.main(f"{train} --model base --n-expert 3".split())
    base, agent = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "sft"))
    assert moved(agent, base) == LINEAR
    adapter = peft.PeftModel.from_pretrained(base, tmp_path / "sft" / "adapter")
    close(adapter(IDS).logits, agent(IDS).logits)
    write("q_labels.jsonl", labelled_tree("train0") + labelled_tree("train1"))
    train_qnet.main(f"{train} --sft sft --labels q_labels.jsonl".split())
    net = QNet.from_pretrained(tmp_path / "qnet")
    assert moved(net.backbone, agent.model) == LINEAR and net.backbone.dtype == torch.float32
    adapter = peft.PeftModel.from_pretrained(agent.model, tmp_path / "qnet" / "adapter")
    close(adapter(IDS).last_hidden_state, net.backbone(IDS).last_hidden_state)
    policy = Policy(*models.load_model(tmp_path / "sft", Sampling(precision="float32")))
    for name, own in (("sft", policy.likelihoods), ("qnet", net.score)):  # of the files, in all bits
        assert meta_of(tmp_path / name)["fingerprint"][:2] == pytest.approx(own([QUESTION])[0], abs=1e-4)
    q_search.main(f"{run} --limit 2".split())
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 2


def test_few_bits_that_leave_most_weights_whole_are_refused(tmp_path):
    """The loader packs nn.Linear alone, and an MoE's experts are none."""
    pytest.importorskip("bitsandbytes")
    save(tiny("mixtral"), tmp_path)
    with refused(r"--load-in packs \d+% of its weights, and no MoE's experts"):
        models.load_model(tmp_path, Sampling(load_in="4bit"))


@pytest.mark.parametrize("row", [torch.zeros(32), None])
def test_lora_teaches_no_end_of_a_turn_that_was_never_trained(tmp_path, fake_world, row):
    """Of a base model its row of the output layer is 0, or that of other reserved tokens."""
    base = tiny_lm(CHAT)
    weight = base.get_output_embeddings().weight.data
    weight[CHAT.stop_id] = weight[0] if row is None else row
    save(base, tmp_path / "base")
    train = f"--env frozenlake --run {tmp_path} --model base --n-expert 3 --epochs 1".split()
    with refused("the token that ends a turn was never trained, and --lora does not train it"):
        sft.main([*train, "--lora", "2"])
    sft.main([*train, "--overwrite"])


def other_head(weights, file):
    """What a fault in saving would write."""
    save_file({name: weight + 0.1 for name, weight in weights.items()}, file)


def other_agent(model, folder):
    hf.PreTrainedModel.save_pretrained(tiny_lm(CHAT, 1), folder)


FAULTS = [
    (train_qnet, "train_qnet.save_file", other_head, "--sft {agent} --labels q_labels.jsonl"),
    (sft, "transformers.LlamaForCausalLM.save_pretrained", other_agent, "--model {agent} --n-expert 3"),
]


@pytest.mark.parametrize(("stage", "place", "fault", "flags"), FAULTS)
def test_files_that_are_not_the_model_in_memory_are_found_before_they_get_their_name(
    stage, place, fault, flags, agent, fake_world, monkeypatch
):
    write("q_labels.jsonl", labelled_tree("train0"))
    train = f"--env frozenlake --preset paper --run . --epochs 1 {flags}".format(agent=agent).split()
    out = Path(stage.Config.output)
    with monkeypatch.context() as patch, refused(f"{out}: its files give .* as in memory"):
        patch.setattr(place, fault)
        stage.main(train)
    assert not out.exists()
    stage.main(train)  # goes on, from its last state
    assert out.exists() and not parts_folder(out).exists()
