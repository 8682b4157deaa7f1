"""Models and their optimisers: loading, precision, and what makes large ones fit in little memory.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: W x + alpha/rank B A x, with B = 0 at
first; the layers are PEFT's. It is merged into W before a checkpoint is saved, so that later stages see an ordinary
one, and kept in its folder adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.files import draft_of

MORE_TOKENS = 64  # that a tokenizer may have and its model not: some are published so (gemma-3-1b-it has one)
NO_CODE = {"use_safetensors": True, "trust_remote_code": False}  # a checkpoint may come from a stranger
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def device_and_dtype(device: str | None, precision: str | None = None) -> tuple[torch.device, torch.dtype]:
    """device: None for the GPU of this process or, without any, the CPU. precision: None for bf16 on a GPU and float32
    on a CPU, of which few have bf16 arithmetic."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # of several processes on a machine, each has its own
    where = torch.empty(1, device=device or (gpu if torch.cuda.is_available() else "cpu")).device
    return where, PRECISIONS[precision or ("bf16" if where.type == "cuda" else "float32")]


# ------------------------------------------------------------------------------------------------------------- loading


def load_checkpoint(
    path: str | Path, kind: Any, device: str | None, load_in: str | None = None, train: bool = False,
    plain: bool = False, rendering: Rendering | None = None, precision: str | None = None,
) -> tuple[Any, Chat]:  # fmt: skip
    """A HuggingFace model of class `kind` (AutoModelForCausalLM, AutoModel) and its Chat; a folder, a hub name, or a
    GGUF file. A PEFT adapter is merged into its base.

    plain: skip the check that it reads a token tree as it reads plain sequences, which qlass/fast/ needs.
    rendering: instead of the folder's.
    To be trained, it is float32: an AdamW step of 1e-5 is less than half a bf16 step of a weight above 0.005.
    """
    if kind is transformers.AutoModelForCausalLM and (Path(path) / "qnet.json").exists():
        raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")
    where, dtype = device_and_dtype(device, precision)
    options = {"dtype": torch.float32 if train else dtype, **quantised(load_in, where)}
    chat = load_chat(path, rendering or Rendering.load(path))
    model = load_weights(path, kind, options)
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(chat.tokenizer) > vocabulary + MORE_TOKENS:
        sizes = f"its tokenizer has {len(chat.tokenizer):,} tokens, its model {vocabulary:,}"
        raise UserError(f"{path}: {sizes}; was the folder mixed from two?")
    model = model if load_in else model.to(where)
    if not plain:
        from qlass.fast import parity

        parity.check(model.eval(), str(path))
    return model, chat


def load_weights(path: str | Path, kind: Any, options: dict[str, Any]) -> Any:
    """A model with all the weights that its config asks for; options: of from_pretrained."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what matters of its load report is checked here
    base = base_of(path)
    if base != path:
        if "quantization_config" in options:
            raise UserError(f"{path}: an adapter merges into weights with all their bits: leave --load-in out")
        agent = transformers.AutoModelForCausalLM  # from there an adapter names its layers
        model = with_adapter(load_weights(base, agent, options), path)
        return model if kind is agent else model.base_model
    folder, file = source(path)
    if file:  # in full width, else it can't be saved, nor get a value head or LoRA
        options = {"quantization_config": transformers.GgufConfig(dequantize=True), **options}
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options, **NO_CODE, **file)
    if report["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"{path}: no weights for {min(report['missing_keys'])}; was the folder mixed from two?")
    return model


def load_chat(path: str | Path, rendering: Rendering) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold."""
    base = base_of(path)
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    own = base == path or transformers.utils.cached_file(str(path), "tokenizer_config.json", **quiet)
    home = path if own else base  # of the tokenizer: an adapter may have one
    names = ("tokenizer*", "*.model", "vocab*")
    if Path(home).is_dir() and not any(any(Path(home).glob(name)) for name in names):
        raise UserError(f"{home}: no tokenizer: name a checkpoint, or copy its base model's tokenizer there")
    folder, file = source(base)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **file)
    place, how = source(home)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, config=config, trust_remote_code=False, **how)
    generation = transformers.GenerationConfig.from_model_config(config)
    with contextlib.suppress(OSError):  # not every checkpoint has one
        generation = transformers.GenerationConfig.from_pretrained(folder)
    ends = generation.eos_token_id  # of a turn: Llama 3 lists two
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return Chat(tokenizer, rendering, context_of(config), ends)


def source(path: str | Path) -> tuple[str, dict[str, str]]:
    """What from_pretrained takes of a folder, a hub name, or a GGUF file."""
    file = Path(path)
    return (str(file.parent), {"gguf_file": file.name}) if file.suffix == ".gguf" else (str(path), {})


def base_of(path: str | Path) -> str | Path:
    """The model that a PEFT adapter was trained on; of any other checkpoint itself."""
    if Path(path).suffix == ".gguf" or not transformers.utils.find_adapter_config_file(str(path)):
        return path
    import peft

    return peft.PeftConfig.from_pretrained(path).base_model_name_or_path


def with_adapter(model: Any, adapter: str | Path) -> Any:
    """The model with a PEFT adapter's updates merged into its weights, and the embeddings of tokens that it adds."""
    import peft

    embeddings = model.get_input_embeddings()
    layer = next(name for name, module in model.named_modules() if module is embeddings)
    for name, weight in peft.load_peft_weights(str(adapter), device="cpu").items():
        if name.endswith(f"{layer}.weight") and len(weight) != embeddings.num_embeddings:
            model.resize_token_embeddings(len(weight), mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")  # they would stay as drawn at random
        model = peft.PeftModel.from_pretrained(model, adapter)
    return model.merge_and_unload().requires_grad_(True)  # PEFT has frozen the base


def context_of(config: Any) -> int | None:
    """How many tokens a model was made for; None: its config does not say, or its past is a state of one size."""
    config = config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in ("longrope", "dynamic"):  # other frequencies beyond it, for what was cached too
        return scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


# -------------------------------------------------------------------------------------------------------------- saving


def save_checkpoint(
    model: Any, chat: Chat, folder: Path, adapter: Any = None, dtype: torch.dtype | None = None
) -> None:
    """A HuggingFace checkpoint with its tokenizer and rendering, of the `ordinary` model."""
    transformers.utils.logging.disable_progress_bar()
    with draft_of(folder) as draft:
        ordinary(model, draft, adapter, dtype).save_pretrained(draft)
        chat.save(draft)


def ordinary(model: Any, folder: Path, adapter: Any = None, dtype: torch.dtype | None = None) -> Any:
    """A model as it is saved: LoRA's updates are kept in folder/adapter as PEFT loads them, and added to the weights,
    which become `dtype`.

    adapter: PEFT's view of the model, None where there are no updates. Weights of 4 or 8 bits would be rounded anew:
    all their bits are loaded.
    """
    if adapter:
        adapter.save_pretrained(folder / "adapter", save_embedding_layers=False)
        if getattr(model, "is_quantized", False):
            base = load_weights(model.name_or_path, type(model), {"dtype": model.dtype}).to(model.device)
            model = with_adapter(base, folder / "adapter")
        else:
            model = adapter.merge_and_unload()
    for p in model.parameters():  # not the buffers: rounded rotary frequencies turn late positions by radians
        p.data = p.data.to(dtype) if dtype and p.is_floating_point() else p.data
    return model


# ------------------------------------------------------------------------------------------------------------ training


def save_memory(
    model: Any, lora: int | None = None, lora_alpha: int | None = None, gradient_checkpointing: bool = False
) -> Any:
    """What the flags of `add_memory` ask for, in place. Returns PEFT's view of the model, None without LoRA.

    LoRA freezes the weights and gives the linear layers, but for the output layer, updates in float32.
    """
    adapter = None
    if lora:
        import peft

        config = peft.LoraConfig(r=lora, lora_alpha=lora_alpha or 2 * lora, target_modules="all-linear")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that PEFT reads
            adapter = peft.get_peft_model(model, config)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return adapter


def quantised(load_in: str | None, where: torch.device) -> dict:
    """from_pretrained's options for weights in 4 bits (NF4) or 8 (LLM.int8), None: as they are."""
    if load_in is None:
        return {}
    if where.type == "cpu":
        raise UserError(f"--load-in {load_in}: needs a GPU; leave it out on a CPU")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=load_in == "4bit", load_in_8bit=load_in == "8bit",
        bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return {"quantization_config": config, "device_map": {"": where.index}}  # by number, as Accelerate compares


def adamw(parameters: Iterable[nn.Parameter], lr: float, name: str = "adamw") -> torch.optim.Optimizer:
    """AdamW of what is trained, without weight decay (Table 5); "adamw8bit" keeps its moments in 8 bits."""
    parameters = [p for p in parameters if p.requires_grad]
    kind = torch.optim.AdamW
    if name == "adamw8bit":
        import bitsandbytes

        kind = bitsandbytes.optim.AdamW8bit
    return kind(parameters, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """A GPU's lack of memory is told with the flags that need less; also a decorator."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = str(error).split(". ")[0]
        raise UserError(f"{why}: give --gradient-checkpointing, --lora 16, or fewer --micro-tokens") from None
