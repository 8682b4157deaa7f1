"""Models of several kinds: what token trees give against plain sequences, and what is refused."""

import pytest
import torch
import transformers
from fakes import word_chat

from qlass import UserError
from qlass.agent import load_policy
from qlass.batching import Sample
from qlass.fast import cache, parity
from qlass.fast.token_tree import windows_of
from qlass.messages import State
from qlass.optional.foreign import check_cache

SMALL = {  # what makes a config small, where it has such a field
    "vocab_size": 200, "hidden_size": 64, "n_embd": 64, "intermediate_size": 64, "ffn_dim": 64, "num_hidden_layers": 4,
    "n_layer": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "num_local_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 64,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "sliding_window": 64,
}  # fmt: skip
SWA, FULL = "sliding_attention", "full_attention"
MODELS = {  # by model type: what its config needs besides
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 64},  # chunks
    "gemma3_text": {"layer_types": [SWA, FULL] * 2},
    "gemma4_text": {"layer_types": [SWA, FULL] * 2, "num_kv_shared_layers": 2, "global_head_dim": 16},
    "gpt_oss": {"layer_types": [SWA, FULL] * 2},  # experts too
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_heads": 4},
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "expansion_ratio": 2},
}


def tiny(name: str) -> torch.nn.Module:
    kind = type(transformers.AutoConfig.for_model(name))
    known = kind().to_dict()
    torch.manual_seed(0)
    config = kind(**{k: v for k, v in SMALL.items() if k in known} | MODELS.get(name, {}))
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss", "llama4_text", "opt"])
def test_a_mask_without_its_windows_is_found(name, dtype, monkeypatch):
    model = tiny(name).to(dtype)
    model.config.attn_temperature_tuning = False  # for which Llama 4 is refused
    assert [parity.fault(m) for m in (model, model.model)] == [None, None]  # a backbone too, as QNet has
    windows = windows_of(model.config)
    if any(windows.values()):
        monkeypatch.setattr("qlass.fast.token_tree.windows_of", lambda config: dict.fromkeys(windows, 0))
        assert "differ from plain ones" in parity.fault(model)


@pytest.mark.parametrize(("name", "layers"), [("llama", 4), ("gemma4_text", 2)])
def test_keys_and_values_are_measured_in_a_filled_cache(name, layers):
    """Two heads of 16 numbers of 4 bytes. Gemma 4's last two layers read the keys of those before."""
    assert cache.token_bytes(tiny(name)) == layers * 2 * (2 * 16 * 4)


def test_outputs_that_are_not_finite_have_no_plain_way_out():
    model = tiny("llama")
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match=r"not finite(?!.*--plain)"):
        parity.check(model, "agent")


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "bloom", "gpt_neo", "mpt", "llama4_text"])
def test_what_cannot_read_token_trees_is_refused(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    word_chat(temperature=0.8).save(tmp_path)
    with pytest.raises(UserError, match="--plain reads it"):
        load_policy(tmp_path)
    first = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")))
    assert load_policy(tmp_path, plain=True).sample([Sample(first, 2, ("t",), 0.0)])


def test_plain_decoding_is_tried_behind_a_cache(monkeypatch):
    """Bamba takes each token behind its cache for the first of the text, unless it is told the position."""
    model = tiny("bamba")
    check_cache(model, "agent")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda position_ids=None, **inputs: forward(**inputs))
    with pytest.raises(UserError, match="agent: a token read behind a cache gets other logits"):
        check_cache(model, "agent")
