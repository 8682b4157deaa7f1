"""LoRA, PEFT's adapters and weights of few bits: what --lora, --load-in and such checkpoints need.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: Wx + alpha/rank BAx,
with B = 0 at first. It is merged into W before a checkpoint is saved, and kept in its folder
adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import utils

from qlass import UserError
from qlass.fast import parity

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # a name that PEFT reads


def few_bits(load_in: str, place: torch.device) -> dict[str, Any]:
    """from_pretrained's options for weights in 4 bits (NF4) or 8 (LLM.int8)."""
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = hf.BitsAndBytesConfig(**{f"load_in_{load_in}": True}, **four)
    device = "cpu" if place.type == "cpu" else place.index  # a number, as Accelerate compares
    return {"quantization_config": config, "device_map": {"": device}}


def with_updates(model: Any, rank: int, alpha: int | None) -> Any:
    """PEFT's view of a model: frozen, but updates in float32 of all linear layers but the last."""
    import peft

    options = {"lora_alpha": alpha or 2 * rank, "target_modules": "all-linear"}
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, **options))


def base_of(path: str | Path) -> str | None:
    """The model that a PEFT adapter was trained on, None if `path` is no adapter. A relative path
    may begin at the adapter."""
    if Path(path).suffix == ".gguf" or not utils.find_adapter_config_file(str(path)):
        return None
    import peft

    config = peft.PeftConfig.from_pretrained(path)
    if config.is_prompt_learning:
        raise UserError(f"{path}: a trained prompt can't become weights: name a LoRA adapter")
    base = config.base_model_name_or_path or "(none)"
    for folder in filter(os.path.exists, (base, os.path.join(path, base))):
        return folder
    with contextlib.suppress(OSError):  # neither of them is on the hub
        if utils.find_adapter_config_file(base) or hf.PretrainedConfig.get_config_dict(base):
            return base
    raise UserError(f"{path}: its base model {base} is not there, and can't be read on the hub")


def digest(adapter: Path) -> str:
    """Of an adapter's weights. It stands in the config.json of the weights with these updates."""
    files = sorted(adapter.glob("adapter_model.*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def with_adapter(model: Any, adapter: str | Path) -> Any:
    """The model with a PEFT adapter merged into it, and the embeddings of tokens that it adds."""
    import peft

    embeddings = model.get_input_embeddings()
    layer = next(name for name, module in model.named_modules() if module is embeddings)
    saved = peft.load_peft_weights(str(adapter), device="cpu")
    for name, weight in saved.items():
        if name.endswith(f"{layer}.weight"):
            model.resize_token_embeddings(len(weight), mean_resizing=False)
    model = peft.PeftModel.from_pretrained(model, adapter)
    missing, unexpected = peft.set_peft_model_state_dict(model, saved)
    lost = [key for key in missing + unexpected if model.base_model.prefix in key]  # "lora_"
    if lost:
        raise UserError(f"{adapter}: the adapter and its base do not both have {lost[0]}")
    return merged(model, adapter).requires_grad_(True)  # PEFT has frozen the base


def merged(adapter: Any, name: str | Path) -> Any:
    """PEFT's view of a model -> the model with the updates in its weights. UserError if it computes
    something else."""
    inner, outer = adapter.get_input_embeddings(), adapter.get_output_embeddings()
    updated = hasattr(inner, "base_layer") or hasattr(outer, "base_layer")
    if outer and updated and inner.weight is outer.weight:  # an update of one is not the other's
        layer = getattr(outer, "base_layer", outer)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        adapter.config.tie_word_embeddings = False
    before = outputs(adapter.eval())
    model = adapter.merge_and_unload()
    error = parity.relative([*zip(outputs(model), before, strict=True)]).median()
    if not error < (parity.EXACT if model.dtype == torch.float32 else parity.ROUGH):
        raise UserError(f"{name}: the adapter can't be merged: the outputs differ by {error:.1%}")
    return model


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    """What a model computes of a few tokens from all over its vocabulary but the ends, (T, D)."""
    size = len(model.get_input_embeddings().weight)
    ids = torch.arange(size // 8, size * 7 // 8, max(1, size // 16), device=model.device)
    return model(input_ids=ids[None])[0][0].float()
