"""Models and their optimisers: loading, precision, saving. LoRA and few bits are in lora.py."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, utils

from qlass import UserError, lora
from qlass.chat import Chat, Rendering
from qlass.files import draft_of

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}

utils.logging.disable_progress_bar()
utils.logging.set_verbosity_error()  # `check_weights` reads the load report
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns in every layer

# torch asks cuDNN first where a mask is given. It plans anew for each length, at each token of a
# text, and on Blackwell it writes wrong texts without a word (pytorch/pytorch#193893).
torch.backends.cuda.enable_cudnn_sdp(False)


def device_and_dtype(device: str | None, precision: str | None = None) -> tuple[Any, torch.dtype]:
    """device: None for this process's GPU or, without any, the CPU. precision: None for bf16 on a
    GPU and float32 on a CPU, of which few have bf16 arithmetic."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.empty(1, device=device or gpu).device
    except (AssertionError, RuntimeError) as error:  # no such device, or torch is without it
        reason = str(error).split("\n")[0]
        raise UserError(f"--device {device}: {reason}: leave it out for your own") from None
    return place, PRECISIONS[precision or ("bf16" if place.type == "cuda" else "float32")]


def settle_precision(args: Any) -> None:
    """Set what --precision stands for here: a resumed run must not mix a GPU's and a CPU's."""
    if not getattr(args, "server", None):
        dtype = device_and_dtype(args.device, args.precision)[1]
        args.precision = next(name for name, value in PRECISIONS.items() if value == dtype)


# --------------------------------------------------------------------------------------- loading


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
    plain: skip the check that it reads token trees, which qlass/fast/ needs.
    """
    if kind is AutoModelForCausalLM:
        refuse_qnet(path)
    place, dtype = device_and_dtype(device, precision)
    options: dict[str, Any] = {"dtype": torch.float32 if train else dtype}
    if load_in:
        options |= lora.few_bits(load_in, place)
    try:
        chat = load_chat(path, rendering or Rendering.load(path))
        model = load_weights(path, kind, options)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"{path}: no complete checkpoint? It can't be loaded: {reason}") from error
    model = model if load_in else model.to(place)
    if not plain:
        from qlass.fast import parity

        parity.check(model.eval(), str(path))
    return model, chat


def load_weights(path: str | Path, kind: Any, options: dict[str, Any]) -> Any:
    """A model with the weights in `path`, all of them and no others; options of from_pretrained."""
    if is_adapter(path):
        if "quantization_config" in options:
            raise UserError(f"{path}: an adapter needs its base in full: leave --load-in out")
        agent = load_weights(lora.base_of(path), AutoModelForCausalLM, options)
        agent = lora.with_adapter(agent, path)  # which names the layers of an agent
        return agent if kind is AutoModelForCausalLM else agent.base_model
    check_files(Path(path))
    name, gguf = source(path)
    if gguf:  # in full width, else it can't be saved, nor get a value head or LoRA
        options = {"quantization_config": hf.GgufConfig(dequantize=True), **options}
    safe = {"use_safetensors": True, "trust_remote_code": False}  # a stranger's code does not run
    options = {**options, **gguf, **safe, "output_loading_info": True}
    model, report = kind.from_pretrained(name, **options)
    check_weights(path, model, report)
    if getattr(model, "is_quantized", False):
        lora.unpack(model)
    return model


def check_files(folder: Path) -> None:
    """UserError for a folder with two sets of weights, of which transformers takes one unasked."""
    files = [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")]
    if len({file.name.split("-of-")[-1] for file in files}) > 1:
        raise UserError(
            f"{folder}: has the weights of two saves; remove the older model*.safetensors"
        )
    for config in folder.glob("*/adapter_config.json"):
        if config.parent.name != "adapter":  # where `ordinary` keeps what it has merged
            problem = f"{config.parent} is not merged into its weights"
            raise UserError(f"{folder}: {problem}; name that folder, or remove it")


def check_weights(path: str | Path, model: Any, report: dict[str, Any]) -> None:
    """UserError for weights that the model lacks, and for those it has no place for."""
    if missing := report["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"{path}: no weights for {min(missing)}; was the folder mixed from two?")
    unknown = {key for key in report["unexpected_keys"] if not key.startswith("v_head.")}  # TRL's
    if unknown:
        with torch.device("meta"):  # a backbone leaves out the output layer
            unknown -= AutoModelForCausalLM.from_config(model.config).state_dict().keys()
    if unknown:
        problem = f"its config.json has no place for {min(unknown)}"
        raise UserError(f"{path}: {problem}; merge LoRA's weights, or correct the config")


def load_chat(path: str | Path, rendering: Rendering) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold."""
    base = home = path
    if is_adapter(path):  # which may have a tokenizer of its own
        base = lora.base_of(path)
        home = path if utils.hub.has_file(str(path), "tokenizer_config.json") else base
    files = " ".join(file.name for file in Path(home).glob("*"))  # of a hub name: none
    if files and not re.search(r"\b(tokenizer|vocab)|\.model\b", files):
        problem = "no tokenizer: name a checkpoint, or copy its base model's tokenizer there"
        raise UserError(f"{home}: {problem}")
    name, options = source(base)
    options["trust_remote_code"] = False
    config = hf.AutoConfig.from_pretrained(name, **options)
    tokenizer = hf.AutoTokenizer.from_pretrained(source(home)[0], config=config, **options)
    generation = hf.GenerationConfig.from_model_config(config)
    with contextlib.suppress(OSError):  # not every checkpoint has one
        generation = hf.GenerationConfig.from_pretrained(name)
    ends = generation.eos_token_id  # of a turn
    ends = ends if isinstance(ends, list) else [ends]  # Llama 3 lists two
    return Chat(tokenizer, rendering, context_of(config), ends)


def context_of(config: Any) -> int | None:
    """How many tokens a model was made for; None: unknown, or its past is a state of one size."""
    config = config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in ("longrope", "dynamic"):  # beyond it cached keys would differ
        return scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def source(path: str | Path) -> tuple[str, dict[str, Any]]:
    """from_pretrained's name and options for a folder, a hub name, or a GGUF file."""
    file = Path(path)
    if file.suffix == ".gguf":
        return str(file.parent), {"gguf_file": file.name}
    return str(path), {}


def is_adapter(path: str | Path) -> bool:
    """Whether a folder or a hub name holds updates of PEFT's alone, without the weights."""
    gguf = Path(path).suffix == ".gguf"
    return not gguf and utils.find_adapter_config_file(str(path)) is not None


# ---------------------------------------------------------------------------- training and saving


def save_memory(
    model: Any, rank: int | None = None, alpha: int | None = None, checkpointing: bool = False
) -> Any:
    """Prepare an agent's model for training by the flags of `add_memory`, in place.

    Returns PEFT's view of the model, None without LoRA.
    """
    refuse_qnet(model.name_or_path)
    if getattr(model, "is_quantized", False) and model.hf_quantizer.pre_quantized:
        problem = "saved in few bits, which can't be trained; name the model it was made from"
        raise UserError(f"{model.name_or_path}: {problem}, and --load-in 4bit --lora 16")
    adapter = lora.with_updates(model, rank, alpha) if rank else None
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return adapter


def refuse_qnet(path: str | Path) -> None:
    if (Path(path) / "qnet.json").exists():
        raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")


def adamw(model: nn.Module, rates: Mapping[str, float], name: str = "adamw") -> Any:
    """AdamW of what is trained, without weight decay (Table 5); "adamw8bit": moments in 8 bits.

    rates: a parameter group for each beginning of names, of which the last that fits counts.
    """
    groups: dict[str, list[nn.Parameter]] = {start: [] for start in rates}
    for name_of, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[[start for start in rates if name_of.startswith(start)][-1]].append(parameter)
    trained = [{"params": group, "lr": rates[start]} for start, group in groups.items() if group]
    optimizer: Any = torch.optim.AdamW
    if name == "adamw8bit":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit
    return optimizer(trained, weight_decay=0.0, betas=(0.9, 0.95))


def ordinary(model: Any, folder: Path, adapter: Any = None, dtype: Any = None) -> Any:
    """A model as it is saved: LoRA's updates are kept in folder/adapter as PEFT loads them, and
    added to the weights, which become `dtype`.

    adapter: PEFT's view of the model, None without updates. A merge would round weights of 4 or 8
    bits anew, so all their bits are loaded.
    """
    if adapter:
        adapter.save_pretrained(folder / "adapter", save_embedding_layers=False)
        if getattr(model, "is_quantized", False):
            base = load_weights(model.name_or_path, type(model), {"dtype": model.dtype})
            model = lora.with_adapter(base.to(model.device), folder / "adapter")
        else:
            model = adapter.merge_and_unload()
    for p in model.parameters():  # not buffers: rounded rotary frequencies turn late positions
        if dtype and p.is_floating_point():
            p.data = p.data.to(dtype)
    return model


def save_checkpoint(
    model: Any, chat: Chat, folder: Path, adapter: Any = None, dtype: Any = None
) -> None:
    """A HuggingFace checkpoint with its tokenizer and rendering, of the `ordinary` model."""
    with draft_of(folder) as draft:
        ordinary(model, draft, adapter, dtype).save_pretrained(draft)
        chat.save(draft)
