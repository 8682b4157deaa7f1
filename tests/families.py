"""Tiny random checkpoints of causal LMs of transformers, by model type: one or two of each kind of attention."""

import warnings
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {  # what makes a config small, where it has such a field
    "vocab_size": 200, "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 64, "ffn_dim": 64,
    "n_inner": 64, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "n_positions": 512, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "word_embed_proj_dim": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 64,
}  # fmt: skip
SWA, FULL = "sliding_attention", "full_attention"
MLA = {
    "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 1,
    "v_head_dim": 16, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "layer_types": ["linear_attention", FULL] * 2,
          "shared_expert_intermediate_size": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # model type: what its config needs besides
    "llama": {},
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 64},
    "mistral": {},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "gemma3_text": {"layer_types": [SWA, FULL] * 2},
    "gemma4_text": {"layer_types": [SWA, FULL] * 2, "num_global_key_value_heads": 2, "global_head_dim": 16,
                    "vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 16},
    "opt": {},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_heads": 4},
    "gpt_oss": {"layer_types": [SWA, FULL] * 2},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                         "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2},
    "falcon": {"alibi": False, "head_dim": "its own"},
    "falcon ": {"alibi": True, "head_dim": "its own"},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    "deepseek_v3": MLA,
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2,
              "attn_layer_offset": 1},
    "recurrent_gemma": {"lru_width": 64},
    "rwkv": {"attention_hidden_size": 64},
    "bloom": {},
    "mpt": {},
}  # fmt: skip


def tiny(name: str) -> Any:
    """A random checkpoint of this model type, in evaluation mode."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    kind = type(transformers.AutoConfig.for_model(name.strip()))
    known = kind().to_dict()
    small = {k: v for k, v in SMALL.items() if k in known} | MODELS[name]
    config = kind(**{k: v for k, v in small.items() if v != "its own"})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()
