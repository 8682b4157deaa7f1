"""Which causal LMs of the installed transformers read token trees, tried with tiny random checkpoints.

    python docs/make_models.py          # writes docs/models.md

Each is tried as `qlass.fast.parity` tries a model that is loaded. Its plain form is compared, token by token, with its
outputs for the whole sequence at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from qlass.fast import parity
from qlass.fast.token_tree import windows_of

PAGE = Path(__file__).parent / "models.md"

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # model type: (what it is known by, what its config needs besides)
    "llama": ("Llama 1 to 3, Vicuna, TinyLlama, SmolLM 1 and 2", {}),
    "llama4_text": ("Llama 4", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 64}),
    "mistral": ("Mistral 7B v0.1", {}),
    "mistral ": ("Mistral 7B v0.2 on", {"sliding_window": None}),
    "ministral": ("Ministral", {"layer_types": [SWA, FULL] * 2}),
    "mixtral": ("Mixtral", {"sliding_window": None}),
    "qwen2": ("Qwen 2 and 2.5, QwQ", {}),
    "qwen2 ": ("Qwen 2 with a window", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen 2 MoE", {"shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_moe": ("Qwen 3 MoE", {}),
    "qwen3_next": ("Qwen 3 Next", LINEAR),
    "qwen3_5_text": ("Qwen 3.5", LINEAR),
    "smollm3": ("SmolLM 3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {"layer_types": [SWA, FULL] * 2}),
    "gemma3_text": ("Gemma 3", {"layer_types": [SWA, FULL] * 2}),
    "gemma4_text": ("Gemma 4", {"layer_types": [SWA, FULL] * 2, "num_global_key_value_heads": 2, "global_head_dim": 16,
                                "vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 16}),
    "phi": ("Phi 1 and 2", {}),
    "phi3": ("Phi 3, Phi 4 mini", {}),
    "phimoe": ("Phi 3.5 MoE", {}),
    "opt": ("OPT", {}),
    "gpt2": ("GPT-2", {}),
    "gpt_neo": ("GPT-Neo", {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_heads": 4}),
    "gptj": ("GPT-J", {"rotary_dim": 8}),
    "gpt_neox": ("Pythia, GPT-NeoX", {}),
    "gpt_bigcode": ("StarCoder", {}),
    "starcoder2": ("StarCoder 2", {}),
    "gpt_oss": ("gpt-oss", {"layer_types": [SWA, FULL] * 2}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B, Command A", {"layer_types": [SWA, FULL] * 2}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {"layer_types": [SWA, FULL] * 2}),
    "olmoe": ("OLMoE", {}),
    "granite": ("Granite", {}),
    "granitemoe": ("Granite MoE", {}),
    "granitemoehybrid": ("Granite 4 hybrid", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                         "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2}),
    "glm4": ("GLM 4", {}),
    "exaone4": ("EXAONE 4", {"layer_types": [SWA, FULL] * 2}),
    "stablelm": ("StableLM 2", {}),
    "falcon": ("Falcon", {"alibi": False, "head_dim": "its own"}),
    "falcon ": ("Falcon with ALiBi", {"alibi": True, "head_dim": "its own"}),
    "falcon_h1": ("Falcon H1", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16}),
    "deepseek_v2": ("DeepSeek V2", MLA),
    "deepseek_v3": ("DeepSeek V3 and R1", MLA),
    "ernie4_5": ("ERNIE 4.5", {}),
    "hunyuan_v1_dense": ("Hunyuan", {}),
    "seed_oss": ("Seed-OSS", {}),
    "bitnet": ("BitNet", {}),
    "lfm2": ("LFM 2", {"layer_types": ["conv", FULL] * 2}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba 2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4}),
    "jamba": ("Jamba", {"num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2,
                        "attn_layer_offset": 1}),
    "recurrent_gemma": ("RecurrentGemma", {"lru_width": 64}),
    "rwkv": ("RWKV", {"attention_hidden_size": 64}),
    "bloom": ("BLOOM", {}),
    "mpt": ("MPT", {}),
}  # fmt: skip


def tiny(name: str) -> Any:
    """A random checkpoint of this model type, in evaluation mode."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    kind = type(transformers.AutoConfig.for_model(name.strip()))
    known = kind().to_dict()
    small = {k: v for k, v in SMALL.items() if k in known} | MODELS[name][1]
    config = kind(**{k: v for k, v in small.items() if v != "its own"})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@torch.inference_mode()
def plain_difference(model: Any) -> float:
    """Outputs token by token, as `--plain` samples, against those of the sequence at once."""
    pairs = []
    for family in parity.tokens_of(model):
        for ids in family:
            whole, rows, past, fresh = parity.plain(model, ids), [], None, ids[:3]
            for t in range(3, len(ids) + 1):
                inputs = {"input_ids": torch.tensor([fresh]), "use_cache": True}
                out = model(**inputs, **({} if past is None else {"past_key_values": past}))
                rows.append(out.logits[0, -1])
                past = out.get("past_key_values")
                fresh = ids[t : t + 1] if past is not None else ids[: t + 1]
            pairs.append((torch.stack(rows), whole[2:]))
    return float(parity.relative(pairs).max())


def row(name: str) -> tuple[str, str, str, str, str]:
    """(known by, model type, its layers, token trees, plain)."""
    model = tiny(name)
    config = model.config.get_text_config()
    kinds = {SWA: "window", "chunked_attention": "chunks", FULL: "full", "full": "full"}
    layers = ", ".join(sorted({kinds.get(k, k.replace("_", " ")) for k in windows_of(config)}))
    wrong, plain = parity.fault(model), plain_difference(model)
    reason = parity.reason(config)
    trees = "yes" if wrong is None else f"no: {reason}" if reason else f"no: {wrong}"
    return MODELS[name][0], name.strip(), layers, trees, "yes" if plain < 1e-3 else f"no ({plain:.0%})"


def page() -> str:
    rows = [row(name) for name in MODELS]
    head = ("models", "model type", "layers", "token trees", "--plain")
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return INTRODUCTION.format(version=transformers.__version__) + "\n".join(lines) + "\n"


INTRODUCTION = """# Which models work

Any causal language model of transformers, by hub name or folder: `sft.py --model NAME`.

*Token trees* are the fast way: what states and actions share goes through the model once, whether QNet is trained,
actions are scored or log-probabilities are computed. Each model is checked when it is loaded: a few packed sequences
must give the same outputs as the plain ones, with a prompt cache and without. A model that fails is refused with the
reason. With `--plain` the stages read its sequences one at a time: the same results, more slowly; Tree-GRPO and ETO
have no such way. Attention windows are part of the tree's mask. `--lora` is refused for mixtures of experts, whose
updates could not be merged into ordinary weights.

The table is made by `python docs/make_models.py` with transformers {version} and tiny random checkpoints.

"""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(os.path.relpath(PAGE))
