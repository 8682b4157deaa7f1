"""LoRA, PEFT's adapters and weights in few bits: opened by --lora, --load-in or an adapter's path.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: Wx + alpha/rank BAx,
with B = 0 at first. It is merged into W before a checkpoint is saved, and kept in its folder
adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import utils

from qlass import UserError
from qlass.files import one_line, read_object

MERGED = "MERGED"  # a file in an adapter's folder: the weights in the folder above have its updates

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # a name that PEFT reads
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns in every layer


# --------------------------------------------------------------------------------------- few bits


def few_bits(load_in: str) -> Any:
    """from_pretrained's quantization_config for --load-in: NF4 for 4bit, LLM.int8 for 8bit."""
    if load_in == "8bit":
        return hf.BitsAndBytesConfig(load_in_8bit=True)
    options: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return hf.BitsAndBytesConfig(load_in_4bit=True, **options)


def let_gradients_through(model: Any) -> None:
    """bitsandbytes packs a layer of 4 bits on some CPUs so that no gradient flows through it."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


# --------------------------------------------------------------------------------------- training


def attach(model: Any, rank: int, alpha: int | None) -> Any:
    """Add updates of this rank to all linear layers, in place. Returns PEFT's view of the model.

    UserError if they can't be trained: not every model takes updates, or lets gradients through.
    """
    import peft

    options: Any = {"lora_alpha": alpha or 2 * rank, "target_modules": "all-linear"}
    try:
        adapter = peft.get_peft_model(model, peft.LoraConfig(r=rank, **options))  # in float32
        try_gradients(model)
    except Exception as error:  # whatever a library or a model class says to it
        raise UserError(f"{model.name_or_path}: --lora can't train it ({said(error)})") from error
    return adapter


def said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def try_gradients(model: Any) -> None:
    """One forward and backward of a few tokens. ValueError if no gradient arrives anywhere."""
    ids = torch.arange(1, 9, device=model.device)[None]
    outputs = model(input_ids=ids, use_cache=False)[0].float()
    weights = torch.arange(outputs.shape[-1], device=outputs.device)  # no norm cancels them
    (outputs * weights).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    if not any(gradient.any() for gradient in gradients):
        raise ValueError("no gradient arrives")


def with_updates(model: Any, adapter: Any, folder: Path, load: Callable) -> Any:
    """The model with its updates, in all bits of its weights. adapter: PEFT's view of it.

    The updates are also saved in `folder`, which stands in that of the weights they go into.
    load: `models.load_weights`, for a base that is here in few bits.
    """
    adapter.save_pretrained(folder, save_embedding_layers=False)
    (folder / MERGED).write_text("The weights in the folder above have these updates already.\n")
    if not getattr(model, "is_quantized", False):
        return merged(adapter)
    # A merge into few bits would round anew.
    base = load(model.name_or_path, type(model), {"dtype": model.dtype})
    return with_adapter(base.to(model.device), folder)


def merged(adapter: Any) -> Any:
    """PEFT's view of a model -> the model with the updates in its weights."""
    inner, outer = adapter.get_input_embeddings(), adapter.get_output_embeddings()
    updated = hasattr(inner, "base_layer") or hasattr(outer, "base_layer")
    if outer and updated and inner.weight is outer.weight:  # an update of one is not the other's
        layer = getattr(outer, "base_layer", outer)
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    return adapter.merge_and_unload()


# --------------------------------------------------------------------------- an adapter as a start


def base_of(path: str | Path) -> str:
    """The model that a PEFT adapter was trained on. A relative path may begin at the adapter."""
    file = utils.find_adapter_config_file(str(path))
    base = read_object(Path(file))["base_model_name_or_path"] or "(none)"
    if list(Path(path).glob("model*.safetensors")):
        problem = "adapter_config.json and model.safetensors are of two saves; move one away"
        raise UserError(f"{path}: {problem}")
    for folder in (base, os.path.join(path, base)):
        if os.path.exists(folder):
            return folder
    with one_line(f"{path}: its base model {base}"):
        hf.PretrainedConfig.get_config_dict(base)
    return base


def refuse_unmerged(path: str | Path, adapters: list[Path]) -> None:
    """UserError for an adapter below weights, which would be loaded without its updates."""
    for adapter in adapters:
        if not (adapter / MERGED).exists():
            raise UserError(f"{path}: its weights lack the adapter {adapter}: name that instead")


def with_adapter(model: Any, adapter: str | Path) -> Any:
    """The agent with a PEFT adapter merged into it, and the embeddings of tokens that it adds."""
    import peft

    if getattr(model, "is_quantized", False):
        raise UserError(f"{adapter}: an adapter needs its base in full, without --load-in")
    embeddings = model.get_input_embeddings()
    layer = next(name for name, module in model.named_modules() if module is embeddings)
    saved = peft.load_peft_weights(str(adapter), device="cpu")
    for name, weight in saved.items():  # it has all rows if tokens were added
        if f".{layer}." in name and name.endswith("weight") and "lora_" not in name:
            model.resize_token_embeddings(len(weight), mean_resizing=False)
    try:
        model = peft.PeftModel.from_pretrained(model, adapter)
    except Exception as error:  # of a kind that this PEFT does not know
        raise UserError(f"{adapter}: PEFT can't load the adapter ({said(error)})") from error
    if not hasattr(model.base_model, "merge_and_unload"):
        raise UserError(f"{adapter}: a trained prompt can't become weights: name a LoRA adapter")
    missing, unexpected = peft.set_peft_model_state_dict(model, saved)
    lost = [key for key in missing + unexpected if model.base_model.prefix in key]  # "lora_"
    if lost:
        raise UserError(f"{adapter}: the adapter and its base do not both have {lost[0]}")
    try:
        model = merged(model)
    except Exception as error:  # not every kind of update can be merged
        raise UserError(f"{adapter}: the adapter can't be merged ({said(error)})") from error
    return model.requires_grad_(True)  # PEFT has frozen the base
