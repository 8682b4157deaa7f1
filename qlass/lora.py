"""LoRA, PEFT's adapters and weights of few bits: what --lora, --load-in and such checkpoints need.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: Wx + alpha/rank BAx,
with B = 0 at first; the layers are PEFT's. It is merged into W before a checkpoint is saved, so
later stages see an ordinary one, and kept in its folder adapter/ in PEFT's format. With W in 4 bits
this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from qlass import UserError

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # a name that PEFT reads


def with_updates(model: Any, rank: int, alpha: int | None) -> Any:
    """Freeze the weights, and give the linear layers but the output layer updates in float32.

    Returns PEFT's view of the model. alpha: 2 * rank if None.
    """
    import peft

    alpha = alpha or 2 * rank
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    return peft.get_peft_model(model, config)


# --------------------------------------------------------------------------------------- adapters


def base_of(adapter: str | Path) -> str:
    """The model that a PEFT adapter was trained on."""
    import peft

    config = peft.PeftConfig.from_pretrained(adapter)
    base = config.base_model_name_or_path
    if config.is_prompt_learning:
        raise UserError(f"{adapter}: a trained prompt can't become weights: name a LoRA adapter")
    if not base or (os.path.isabs(base) and not os.path.exists(base)):
        raise UserError(f"{adapter}: its base model {base} is not there (adapter_config.json)")
    return base


def with_adapter(model: Any, adapter: str | Path) -> Any:
    """The model with a PEFT adapter merged into it, and the embeddings of tokens that it adds."""
    import peft

    embeddings = model.get_input_embeddings()
    layer = next(name for name, module in model.named_modules() if module is embeddings)
    for name, weight in peft.load_peft_weights(str(adapter), device="cpu").items():
        if name.endswith(f"{layer}.weight"):
            model.resize_token_embeddings(len(weight), mean_resizing=False)
    with warnings.catch_warnings():  # missing keys would stay as drawn at random
        warnings.filterwarnings("error", message=".*missing adapter keys")
        model = peft.PeftModel.from_pretrained(model, adapter)
    return model.merge_and_unload().requires_grad_(True)  # PEFT has frozen the base


# ---------------------------------------------------------------------------------------- few bits


def few_bits(load_in: str, place: torch.device) -> dict[str, Any]:
    """from_pretrained's options for weights in 4 bits (NF4) or 8 (LLM.int8)."""
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = hf.BitsAndBytesConfig(**{f"load_in_{load_in}": True}, **four)
    device = "cpu" if place.type == "cpu" else place.index  # a number, as Accelerate compares
    return {"quantization_config": config, "device_map": {"": device}}


def unpack(model: Any) -> None:
    """Weights of 4 bits are packed for a CPU's inference, through which no gradient flows."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
