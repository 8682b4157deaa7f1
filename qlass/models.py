"""Models: how they are loaded, trained in little memory, and saved; PEFT's adapters.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: Wx + alpha/rank BAx,
with B = 0 at first. It is merged into W before a checkpoint is saved, and kept in its folder
adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import hashlib
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
from qlass.files import draft_of
from qlass.messages import State
from qlass.server import Server

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
NAME = "pretrained_model_name_or_path"

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
    if load_in:
        options |= few_bits(load_in, place)
    chat = load_chat(path, rendering or Rendering.load(path))
    with one_line(path):
        model = load_weights(path, kind, options).eval()
        model = model if load_in else model.to(place)
        outputs(model)  # weights that are not those of a quantization_config fail only here
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
        raise UserError(f"{path}: no complete checkpoint? It can't be loaded ({reason})") from error


def load_weights(path: str | Path, kind: Any, options: dict[str, Any], alone: bool = True) -> Any:
    """A model with the weights in `path`, all of them and no others; options of from_pretrained.
    alone: it is not the base of an adapter, which may be in the same folder."""
    check_files(Path(path), alone)
    if base := base_of(path):
        agent = load_weights(base, AutoModelForCausalLM, options, alone=False)
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


def check_files(folder: Path, alone: bool) -> None:
    """UserError for a folder of whose weights transformers or PEFT would take a part unasked."""
    files = [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")]
    if len({file.name.split("-of-")[-1] for file in files}) > 1:
        raise UserError(f"{folder}: weights of two saves; remove the older model*.safetensors")
    files += folder.glob("pytorch_model*.bin")
    below = folder.rglob if alone else folder.glob
    for config in below("adapter_config.json") if files else ():
        adapter, above = config.parent, config.parents[1] / "config.json"
        if not above.exists() or digest(adapter) not in above.read_text("utf-8"):
            raise UserError(f"{folder}: {adapter} is not merged into its weights; move one away")


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
    size, tokenizer = len(model.get_input_embeddings().weight), chat.tokenizer
    controls = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = set(tokenizer.get_vocab().values()) - controls  # which only a template writes
    ids.update(*chat.message_tokens(State((("user", "a"), ("assistant", "b"), ("user", "c")))))
    if (highest := max(ids)) >= size:
        problem = f"no embedding for the token {tokenizer.convert_ids_to_tokens(highest)!r}"
        raise UserError(f"{path}: {problem}; give it the tokenizer that its weights were made with")


def load_chat(path: str | Path, rendering: Rendering) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold."""
    with one_line(path):
        base = home = base_of(path) or path
        if base != path and utils.hub.has_file(str(path), "tokenizer_config.json"):
            home = path  # an adapter may have a tokenizer of its own
        files = " ".join(file.name for file in Path(home).glob("*"))  # of a hub name: none
        if files and not re.search(r"\b(tokenizer|vocab)|\.model\b", files):
            raise UserError(f"{home}: no tokenizer: name a checkpoint, or copy its base model's")
        config = hf.AutoConfig.from_pretrained(**source(base))
        tokenizer = hf.AutoTokenizer.from_pretrained(**source(home), config=config)
        generation = hf.GenerationConfig.from_model_config(config)
        with contextlib.suppress(OSError):  # not every checkpoint has one
            generation = hf.GenerationConfig.from_pretrained(source(base)[NAME])
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
    file, place = Path(path), {NAME: str(path)}
    if file.suffix == ".gguf":
        place = {NAME: str(file.parent), "gguf_file": file.name}
    return {**place, "trust_remote_code": False}  # a stranger's code does not run


def few_bits(load_in: str, place: torch.device) -> dict[str, Any]:
    """from_pretrained's options for weights in 4 bits (NF4) or 8 (LLM.int8)."""
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = hf.BitsAndBytesConfig(**{f"load_in_{load_in}": True}, **four)
    device = "cpu" if place.type == "cpu" else place.index  # a number, as Accelerate compares
    return {"quantization_config": config, "device_map": {"": device}}


# --------------------------------------------------------------------------------------- adapters


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
    groups = []
    for module, rate in rates:
        trained = [p for p in module.parameters() if p.requires_grad]
        groups += [{"params": trained, "lr": rate}] if trained else []
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
            model = merged(adapter, folder)
        model.config.merged_adapter = digest(folder / "adapter")
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
