"""Models: how they are loaded, trained in little memory, and saved; PEFT's adapters.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: Wx + alpha/rank BAx,
with B = 0 at first. It is merged into W before a checkpoint is saved, and kept in its folder
adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM, utils

from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.fast import parity
from qlass.files import draft_of, read_object
from qlass.server import Server

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}

utils.logging.disable_progress_bar()
utils.logging.set_verbosity_error()  # `check_weights` reads the load report
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # a name that PEFT reads
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns in every layer

# torch asks cuDNN first if a mask is given. It plans anew for each length, and on Blackwell it
# writes wrong texts without a word (pytorch/pytorch#193893).
torch.backends.cuda.enable_cudnn_sdp(False)


def device_and_dtype(device: str | None, precision: str | None = None) -> tuple[Any, torch.dtype]:
    """device: None for this process's GPU or, without any, the CPU. precision: None for bf16 on a
    GPU and float32 on a CPU, of which few have bf16 arithmetic."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.empty(1, device=device or gpu).device
    except (AssertionError, RuntimeError) as error:  # no such device, or torch is without it
        raise UserError(f"--device {device}: {error}".split("\n")[0] + "; leave it out") from None
    return place, PRECISIONS[precision or ("bf16" if place.type == "cuda" else "float32")]


def settle_precision(args: Any) -> None:
    """Set what --precision and --server stand for here: a resumed run must not mix a GPU's numbers
    and a CPU's, nor two models'."""
    if "precision" in args:  # a chat agent has none here
        dtype = device_and_dtype(args.device, args.precision)[1]
        args.precision = next(name for name, value in PRECISIONS.items() if value == dtype)
    if getattr(args, "server", None):
        args.server_model = Server(args.server).model


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
    # A number, as Accelerate compares it with that of weights in few bits.
    options["device_map"] = {"": place.index if place.type == "cuda" else place}
    if load_in:  # NF4 or LLM.int8
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        options["quantization_config"] = hf.BitsAndBytesConfig(
            **{f"load_in_{load_in}": True}, **four
        )
    chat = load_chat(path, rendering or Rendering.load(path))
    with one_line(path), torch.no_grad():
        model = load_weights(path, kind, options).eval()
        ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
        model(input_ids=ids)  # weights that are not those of a quantization_config fail only here
    check_tokens(path, model, chat)
    if not plain:
        parity.check(model, str(path))
    return model, chat


@contextlib.contextmanager
def one_line(path: str | Path) -> Iterator[None]:
    """A UserError for whatever a library raises about a checkpoint that it can't load."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": .")
        raise UserError(f"{path}: can't be loaded ({reason}); is it complete?") from error


def load_weights(path: str | Path, kind: Any, options: dict[str, Any]) -> Any:
    """A model with the weights in `path`, all of them and no others; options of from_pretrained."""
    check_files(Path(path))
    if base := base_of(path):
        agent = load_weights(base, AutoModelForCausalLM, options)
        if getattr(agent, "is_quantized", False):
            raise UserError(f"{path}: an adapter needs its base in full, without --load-in")
        agent = with_adapter(agent, path)  # which names the layers of an agent
        return agent if kind is AutoModelForCausalLM else agent.base_model
    place = source(path)
    if "gguf_file" in place:  # in full width, else it can't be saved, nor get a value head or LoRA
        options = {"quantization_config": hf.GgufConfig(dequantize=True), **options}
    options = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = kind.from_pretrained(**place, **options, use_safetensors=True)
    check_weights(path, model, report)
    for layer in model.modules():  # of 4 bits, packed on a CPU so that no gradient flows through
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    # FP8 and MXFP4 are loaded as full weights, which transformers does not save as such.
    config = hf.AutoConfig.from_pretrained(**place)
    model.stored_in_few_bits = hasattr(config, "quantization_config")
    return model


def check_files(folder: Path) -> None:
    """UserError for a folder with weights of two saves, of which one would be loaded unasked."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", "adapter_config.json")
    files = [file.name for pattern in patterns for file in folder.glob(pattern)]
    if len({name.split("-of-")[-1] for name in files}) > 1:
        raise UserError(f"{folder}: {min(files)} and {max(files)} are of two saves; move one away")


def check_weights(path: str | Path, model: Any, report: dict[str, Any]) -> None:
    """UserError for weights that the model lacks, and for those that it would compute without: of a
    layer that has others, or of one more in a list of layers. The output layer and images may be
    left out; masks and frequencies are computed."""
    outer = re.compile(rf"(base_model\.model\.)?({model.base_model_prefix}\.)?")
    names = [outer.sub("", name, 1) for name, _ in model.named_parameters()]
    layers = tuple(name.rpartition(".")[0] + "." for name in names)
    lists = tuple(re.split(r"(?<=\.)\d+\.", name)[0] for name in names)
    wrong = [f"no weights for {key}" for key in report["missing_keys"]]  # drawn at random
    wrong += [f"{key} has another size in config.json" for key, *_ in report["mismatched_keys"]]
    for key in report["unexpected_keys"]:
        name = outer.sub("", key, 1)
        if name.startswith(layers) or (name.startswith(lists) and name.endswith(".weight")):
            wrong.append(f"config.json has no place for {key}")
    if wrong:
        raise UserError(f"{path}: {min(wrong)}; was it mixed from two, or LoRA not merged?")


def check_tokens(path: str | Path, model: Any, chat: Chat) -> None:
    """UserError if a prompt or a text can have a token that the model has no embedding of."""
    size = len(model.get_input_embeddings().weight)
    template = chat.begin + chat.ask + chat.stop + chat.turn
    for token, i in chat.tokenizer.get_vocab().items():
        if i >= size and (token in template or not chat.controls.fullmatch(token)):
            advice = "give it the tokenizer that its weights were made with"
            raise UserError(f"{path}: no embedding for the token {token!r}; {advice}")


def load_chat(path: str | Path, rendering: Rendering) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold."""
    with one_line(path):
        base = base_of(path) or path
        home = path  # an adapter may have a tokenizer of its own
        if base != path and not utils.hub.has_file(str(path), "tokenizer_config.json"):
            home = base
        config = hf.AutoConfig.from_pretrained(**source(base))
        tokenizer = hf.AutoTokenizer.from_pretrained(**source(home), config=config)
        generation = hf.GenerationConfig.from_model_config(config)
        with contextlib.suppress(OSError):  # not every checkpoint has one
            generation = hf.GenerationConfig.from_pretrained(base)
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


def source(path: str | Path) -> dict[str, Any]:
    """from_pretrained's arguments for a folder, a hub name, or a GGUF file."""
    name, file = "pretrained_model_name_or_path", Path(path)
    safe: Any = {"trust_remote_code": False}  # a stranger's code does not run
    if file.suffix == ".gguf":
        return {name: str(file.parent), "gguf_file": file.name, **safe}
    return {name: str(path), **safe}


# --------------------------------------------------------------------------------------- adapters


def base_of(path: str | Path) -> str | None:
    """The model that a PEFT adapter was trained on, None if `path` is no adapter. A relative path
    may begin at the adapter."""
    file = Path(path).suffix != ".gguf" and utils.find_adapter_config_file(str(path))
    if not file:
        return None
    base = read_object(Path(file))["base_model_name_or_path"] or "(none)"
    for folder in filter(os.path.exists, (base, os.path.join(path, base))):
        return folder
    with one_line(f"{path}: its base model {base}"):
        hf.PretrainedConfig.get_config_dict(base)
    return base


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
    if not hasattr(model.base_model, "merge_and_unload"):
        raise UserError(f"{adapter}: a trained prompt can't become weights: name a LoRA adapter")
    missing, unexpected = peft.set_peft_model_state_dict(model, saved)
    lost = [key for key in missing + unexpected if model.base_model.prefix in key]  # "lora_"
    if lost:
        raise UserError(f"{adapter}: the adapter and its base do not both have {lost[0]}")
    return merged(model).requires_grad_(True)  # PEFT has frozen the base


def merged(adapter: Any) -> Any:
    """PEFT's view of a model -> the model with the updates in its weights."""
    inner, outer = adapter.get_input_embeddings(), adapter.get_output_embeddings()
    updated = hasattr(inner, "base_layer") or hasattr(outer, "base_layer")
    if outer and updated and inner.weight is outer.weight:  # an update of one is not the other's
        layer = getattr(outer, "base_layer", outer)
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    return adapter.merge_and_unload()


# ---------------------------------------------------------------------------- training and saving


def prepare_training(
    model: Any, rank: int | None = None, alpha: int | None = None, checkpointing: bool = False
) -> Any:
    """Prepare an agent's model for training by the flags of `add_memory`, in place. Returns PEFT's
    view of the model, None without LoRA."""
    refuse_qnet(model.name_or_path)
    if getattr(model, "stored_in_few_bits", False):
        advice = "train the model that it was made from, by --load-in 4bit --lora 16"
        raise UserError(f"{model.name_or_path}: saved in few bits, which training loses; {advice}")
    adapter = None
    if rank:
        import peft

        options = {"lora_alpha": alpha or 2 * rank, "target_modules": "all-linear"}
        adapter = peft.get_peft_model(model, peft.LoraConfig(r=rank, **options))  # in float32
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return adapter


def refuse_qnet(path: str | Path) -> None:
    if (Path(path) / "qnet.json").exists():
        raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")


def adamw(rates: list[tuple[nn.Module, float]], name: str = "adamw") -> Any:
    """AdamW of what is trained in each module at its rate, without weight decay (Table 5);
    "adamw8bit": moments in 8 bits."""
    trained = [([p for p in part.parameters() if p.requires_grad], rate) for part, rate in rates]
    groups = [{"params": parameters, "lr": rate} for parameters, rate in trained if parameters]
    optimizer: Any = torch.optim.AdamW
    if name == "adamw8bit":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit
    return optimizer(groups, weight_decay=0.0, betas=(0.9, 0.95))


def full_weights(model: Any, folder: Path, adapter: Any = None, dtype: Any = None) -> Any:
    """A model as it is saved: all bits of the weights, with LoRA's updates, which are also kept in
    folder/adapter, in `dtype`. adapter: PEFT's view of the model, None without updates."""
    if adapter:
        adapter.save_pretrained(folder / "adapter", save_embedding_layers=False)
        if getattr(model, "is_quantized", False):  # a merge would round its weights anew
            base = load_weights(model.name_or_path, type(model), {"dtype": model.dtype})
            model = with_adapter(base.to(model.device), folder / "adapter")
        else:
            model = merged(adapter)
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
        model.save_pretrained(draft)
        chat.save(draft)
        read_back(draft, model)


def read_back(draft: Path, model: Any) -> None:
    """UserError if a checkpoint can't be loaded, before it takes the place of an older one."""
    load_weights(draft, type(model), {"device_map": "meta"})
