"""Models: how a HuggingFace checkpoint is loaded, prepared for training, and saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM, utils

from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.config import Memory
from qlass.files import draft_of, one_line

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}

utils.logging.disable_progress_bar()
utils.logging.set_verbosity_error()  # `refuse_other_weights` reads the load report

# torch asks cuDNN first if a mask is given. It plans anew for each length, and on Blackwell it
# writes wrong texts without a word (pytorch/pytorch#193893).
torch.backends.cuda.enable_cudnn_sdp(False)


def device_and_precision(device: str | None, precision: str | None = None) -> tuple[Any, str]:
    """device: None for this process's GPU or, without any, the CPU. precision: None for bf16 on a
    GPU and float32 on a CPU, of which few have bf16 arithmetic."""
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        place = torch.empty(1, device=device or "cpu").device
    except (AssertionError, RuntimeError) as error:  # no such device, or torch is without it
        reason = str(error).split("\n")[0]
        raise UserError(f"--device {device}: {reason}; leave it out") from None
    return place, precision or ("bf16" if place.type == "cuda" else "float32")


# ---------------------------------------------------------------------------------------- loading


def load_checkpoint(
    path: str | Path,
    kind: Any,
    device: str | None = None,
    load_in: str | None = None,
    train: bool = False,
    plain: bool = False,
    rendering: Rendering | None = None,
    precision: str | None = None,
) -> tuple[Any, Chat]:
    """A HuggingFace model of class `kind` (AutoModelForCausalLM, AutoModel) and its Chat.

    path: a folder, a hub name, or a GGUF file. A PEFT adapter is merged into its base.
    train: in float32, as an AdamW step of 1e-5 is under half a bf16 step of a weight above .005.
    plain: check how it reads one sequence, in place of how it reads the token trees of qlass/fast/.
    """
    from qlass.optional import foreign

    if kind is AutoModelForCausalLM:
        refuse_qnet(path)
    foreign.refuse_folder(Path(path))
    place, precision = device_and_precision(device, precision)
    options: dict[str, Any] = {"dtype": torch.float32 if train else PRECISIONS[precision]}
    # A number, as Accelerate compares it with that of weights in few bits.
    options["device_map"] = {"": place.index if place.type == "cuda" else place}
    if load_in:
        from qlass.optional import lora

        options["quantization_config"] = lora.few_bits(load_in)
    chat = load_chat(path, rendering or Rendering.load(path))
    with one_line(path):
        model = load_weights(path, kind, options).eval()
        foreign.refuse_unknown_tokens(path, model, chat)
        if plain:
            foreign.check_cache(model, str(path))
        else:
            from qlass.fast import parity

            parity.check(model, str(path))
    return model, chat


def source(path: str | Path) -> dict[str, Any]:
    """from_pretrained's arguments for a folder, a hub name, or a GGUF file."""
    options: dict[str, Any] = {"trust_remote_code": False}  # a stranger's code does not run
    if Path(path).suffix == ".gguf":
        from qlass.optional import foreign

        return options | foreign.source_of_gguf(Path(path))
    return options | {"pretrained_model_name_or_path": str(path)}


def load_weights(path: str | Path, kind: Any, options: dict[str, Any]) -> Any:
    """A model with the weights in `path`, all of them and no others; options of from_pretrained."""
    from qlass.optional import foreign

    if foreign.is_adapter(path):
        from qlass.optional import lora

        base = load_weights(lora.base_of(path), AutoModelForCausalLM, options)
        model = lora.with_adapter(base, path)
        model = model if kind is AutoModelForCausalLM else model.base_model
        model.name_or_path = str(path)  # the start of an adapter that is trained on top of this
        return model
    place = source(path)
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    if "gguf_file" in place:
        model, report = foreign.load_gguf(place, kind, options)
    else:
        model, report = kind.from_pretrained(**place, **options, use_safetensors=True)
        foreign.note_few_bits(model, place)
    foreign.refuse_other_weights(path, model, report)
    foreign.settle_outputs(model)
    return model


def refuse_qnet(path: str | Path) -> None:
    if (Path(path) / "qnet.json").exists():
        raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")


def load_chat(path: str | Path, rendering: Rendering, tokenizer_at: Any = None) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold. tokenizer_at: where its
    tokenizer is, if it is elsewhere."""
    from qlass.optional import foreign

    if foreign.is_adapter(path):
        from qlass.optional import lora

        own = utils.hub.has_file(str(path), "tokenizer_config.json")
        return load_chat(lora.base_of(path), rendering, path if own else None)
    tokenizer_at = tokenizer_at or path
    with one_line(path):
        config = hf.AutoConfig.from_pretrained(**source(path))
        tokenizer = hf.AutoTokenizer.from_pretrained(**source(tokenizer_at), config=config)
        if not tokenizer.chat_template:
            tokenizer.chat_template = foreign.template_of_processor(tokenizer_at)
        ends = foreign.ends_of(path, config)
        return Chat(tokenizer, rendering, foreign.context_of(config), ends)


# ---------------------------------------------------------------------------- training and saving


def prepare_training(model: Any, config: Memory) -> Any:
    """Prepare an agent's model for training, in place: LoRA's updates, gradient checkpointing.
    Returns PEFT's view of the model, None without LoRA."""
    from qlass.optional import foreign

    refuse_qnet(model.name_or_path)
    foreign.refuse_few_bits(model)
    adapter = None
    if config.lora:
        from qlass.optional import lora

        adapter = lora.attach(model, config.lora, config.lora_alpha)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return adapter


def adamw(rates: list[tuple[nn.Module, float]], name: str = "adamw") -> Any:
    """AdamW of what is trained in each module at its rate, without weight decay (Table 5);
    "adamw8bit": moments in 8 bits. A group's "peak" keeps its rate, from which "lr" falls."""
    groups = []
    for module, rate in rates:
        trained = [p for p in module.parameters() if p.requires_grad]
        if trained:
            groups.append({"params": trained, "lr": rate, "peak": rate})
    optimizer: Any = torch.optim.AdamW
    if name == "adamw8bit":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit
    return optimizer(groups, weight_decay=0.0, betas=(0.9, 0.95))


def full_weights(model: Any, folder: Path, adapter: Any = None, dtype: Any = None) -> Any:
    """A model as it is saved: all bits of the weights, with LoRA's updates, which are also kept in
    folder/adapter, in `dtype`. adapter: PEFT's view of the model, None without updates."""
    if adapter:
        from qlass.optional import lora

        model = lora.with_updates(model, adapter, folder / "adapter", load_weights)
    for p in model.parameters():  # not buffers: rounded rotary frequencies turn late positions
        if dtype and p.is_floating_point():
            p.data = p.data.to(dtype)
    return model


def save_checkpoint(
    model: Any, chat: Chat, folder: Path, adapter: Any = None, dtype: Any = None
) -> None:
    """A HuggingFace checkpoint with its tokenizer and rendering, of the `full_weights` model."""
    with draft_of(folder) as draft:
        model = full_weights(model, draft, adapter, dtype)
        # Not the base's: a setting that is not used there makes transformers refuse to save.
        ends, pad = sorted(chat.stop_ids), chat.tokenizer.pad_token_id
        model.generation_config = hf.GenerationConfig(eos_token_id=ends, pad_token_id=pad)
        model.save_pretrained(draft)
        chat.save(draft)
        read_back(draft, model)


def read_back(draft: Path, model: Any) -> None:
    """UserError if a checkpoint can't be loaded, before it takes the place of an older one."""
    from qlass.optional import foreign

    foreign.write_old_names(draft)
    load_weights(draft, type(model), {"device_map": "meta"})
