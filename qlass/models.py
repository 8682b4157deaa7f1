"""Models: how a HuggingFace checkpoint is loaded, checked, prepared for training, and saved.

Supported is a causal LM in safetensors that transformers loads without a missing or a left-over
weight, whose chat template writes all turns alike, and that passes `check`. All else is refused in
one line. LoRA is PEFT's; weights in few bits are bitsandbytes'.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from qlass import UserError
from qlass.chat import Chat, Rendering, marks_of
from qlass.device import PRECISIONS, device_and_precision, divide_blocks, in_turn, whole
from qlass.files import atomic, read_json
from qlass.inputs import files_of
from qlass.records import as_user_error
from qlass.settings import Learning, Model

# Kinds of RoPE whose rotation of a key depends on its token's place alone, so that a cached key
# stays as it is when the text grows.
POSITIONS = {"default", "linear", "llama3", "yarn", "proportional"}
SUPPORTED = " (supported: causal LMs in safetensors with a chat template, docs/models.md)"
PROBE = "Thought: 1/2 of $9.50 in a café, 茶!\nAction: click[Buy Now]"

hf.utils.logging.disable_progress_bar()
hf.utils.logging.set_verbosity_error()

# For the whole process: torch asks cuDNN first if a mask is given, and on Blackwell that writes
# wrong texts without a word (pytorch/pytorch#193893). Its other kernels are used.
torch.backends.cuda.enable_cudnn_sdp(False)


# ---------------------------------------------------------------------------------------- loading


def load_model(
    path: Path,
    config: Model,
    train: bool = False,
    kind: Any = hf.AutoModelForCausalLM,
    body: bool = False,
) -> tuple[Any, Chat]:
    """The model in a folder, and its Chat.

    train: in float32, as an AdamW step of 1e-5 is under half a bf16 step of a weight above .005.
    kind: hf.AutoModel for a saved QNet's backbone. body: without the output layer. The processes of
    a training divide the weights, unless these are in few bits.
    """
    if train and config.load_in:
        raise UserError("--load-in: weights in few bits can't be trained; --lora adds others")
    place, precision = device_and_precision(config)
    mesh = None
    if distributed.is_initialized() and not config.load_in:
        mesh = init_device_mesh(place.type, (distributed.get_world_size(),))
    options: dict = {
        "dtype": torch.float32 if train else PRECISIONS[precision],
        "device_map": {"": "cpu" if mesh else place},
        "use_safetensors": True,
        "output_loading_info": True,
        "trust_remote_code": False,
        "return_dict": True,
        "output_attentions": False,
    }
    if config.load_in:
        options["quantization_config"] = hf.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )

    chat = load_chat(path, config)
    with as_user_error(path, SUPPORTED, UserError):
        if (path / "qnet.json").exists() and kind is hf.AutoModelForCausalLM:
            raise UserError("a QNet, which is no agent")
        with in_turn():
            with as_user_error("its weights"):
                model, report = kind.from_pretrained(path, **options)
            model = model.base_model if body else model
            if mesh:
                divide_blocks(model, mesh)
        for problem, keys in report.items():
            if keys:
                raise UserError(f"{problem}: {sorted(map(str, keys))[0]}")
        packs = sum(2 * p.numel() for p in model.parameters() if p.dtype == torch.uint8)
        packed = packs / model.num_parameters()
        if config.load_in and packed < 0.5:  # only what is nn.Linear
            raise UserError(f"--load-in packs {packed:.0%} of its weights, and no MoE's experts")
        model.generation_config = neutral(chat)
        settings = model.config.get_text_config()
        if hasattr(settings, "output_router_logits"):  # they would stand before the logits
            settings.output_router_logits = False
        if hasattr(settings, "rescale_every"):  # RWKV's weights would change in place
            settings.rescale_every = 0
        for layer in model.modules():  # packed for some CPUs, 4 bits let no gradient through
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
        check(model.eval(), chat, getattr(config, "plain", False))
    return model, chat


def load_chat(path: Path, config: Model) -> Chat:
    """A checkpoint's Chat without its weights, which a server may hold."""
    files_of(path)
    with as_user_error(path, SUPPORTED, UserError):
        with as_user_error("its config"):
            settings = hf.AutoConfig.from_pretrained(path, trust_remote_code=False)
        for name in ("transformers_weights", "quantization_config"):  # others', or of few bits
            if getattr(settings, name, None):
                raise UserError(f"its config.json names {name}")
        settings = settings.get_text_config()
        rope = getattr(settings, "rope_parameters", None) or {}
        ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
        if others := {part.get("rope_type", "default") for part in ropes} - POSITIONS:
            raise UserError(f"positions of kind {min(others)}")
        if not (path / "tokenizer.json").exists():  # programs read other files in ways that differ
            raise UserError("no tokenizer.json")
        with as_user_error("its tokenizer"):  # as its file says, which its class may rebuild
            tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(path)
        if (path / "chat_template.jinja").exists():
            template = read_json(path / "tokenizer_config.json").get("chat_template")
            if template not in (None, tokenizer.chat_template):
                raise UserError("chat_template.jinja is not the template of tokenizer_config.json")
        ends = getattr(settings, "eos_token_id", None)
        file = path / "generation_config.json"
        if file.exists():
            ends = read_json(file).get("eos_token_id", ends)
        ends = ends if isinstance(ends, list) else [ends]  # Llama 3 lists two
        context = getattr(settings, "max_position_embeddings", None)
        chat = Chat(tokenizer, Rendering.load(path, config), context, ends)
        with as_user_error("its tokenizer", errors=ValueError):  # a control token of plain text
            tokens = chat.action_tokens(PROBE, "")
            controls = {*marks_of(tokenizer), *tokenizer.all_special_tokens} - {tokenizer.unk_token}
            chat.action_tokens(" ".join(sorted(controls)), "")
        if chat.text([*tokens, chat.stop_id]) != PROBE:
            raise UserError("its tokenizer changes an action")
        return chat


@torch.no_grad()  # not inference_mode: what a model keeps of this must serve its training
def check(model: Any, chat: Chat, plain: bool) -> None:
    """UserError for a tokenizer that has tokens which the model lacks, for a model that is not
    causal, and for one that the fast engine reads otherwise than one sequence at a time."""
    if len(chat.tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError("its tokenizer.json has tokens beyond the model's embeddings")
    tokens = torch.tensor([chat.action_tokens(PROBE, "")], device=model.device)
    with as_user_error("its model class"):
        logits, alone = model(input_ids=tokens)[0], model(input_ids=tokens[:, :1])[0]
    first = alone[0, 0]
    if (logits[0, 0] - first).abs().mean() > 0.1 * first.abs().mean():
        raise UserError("it is not causal: its past changes with what follows")
    if not plain:
        from qlass.fast import parity

        parity.check(model)


# ---------------------------------------------------------------------------- training and saving


def prepare_training(model: Any, config: Learning) -> Any:
    """LoRA's updates and gradient checkpointing, in place. Returns PEFT's view of the model, None
    without LoRA."""
    adapter = None
    if config.lora:
        import peft

        updates = peft.LoraConfig(
            r=config.lora, lora_alpha=2 * config.lora, target_modules="all-linear"
        )
        with as_user_error(model.name_or_path, " (without --lora all weights are trained)"):
            adapter = peft.get_peft_model(model, updates)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return adapter


def refuse_untrained(model: Any, token: int) -> None:
    """UserError for a token that LoRA can't teach to write: its row of the output layer was never
    trained, so it is about 0, or that of other such tokens."""
    weight = whole(model.get_output_embeddings().weight.detach())
    distances = (weight - weight[token]).norm(dim=-1).sort().values
    if min(distances[1], weight[token].norm()) < 1e-2 * weight.norm(dim=-1).median():
        raise UserError(
            f"{model.name_or_path}: the token that ends a turn was never trained, and --lora does"
            " not train it: choose an instruct model"
        )


def adamw(rates: list[tuple[nn.Module, float]], name: str = "adamw") -> Any:
    """AdamW of what is trained in each module at its rate, without weight decay (Table 5);
    "adamw8bit": moments in 8 bits. "peak" of a group is the highest "lr" that it gets."""
    groups: Any = [
        {"params": [p for p in module.parameters() if p.requires_grad], "lr": rate, "peak": rate}
        for module, rate in rates
    ]
    optimizer: Any = torch.optim.AdamW
    if name == "adamw8bit":
        if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
            raise UserError("--optim adamw8bit: processes cannot divide its moments: --optim adamw")
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit
    return optimizer(groups, weight_decay=0.0, betas=(0.9, 0.95))


def full_weights(model: Any, folder: Path, config: Model, adapter: Any = None) -> Any:
    """A model as it is saved: all bits of the weights, with LoRA's updates, which are also kept in
    folder/adapter. adapter: PEFT's view of the model, None without updates."""
    if adapter:
        import peft

        adapter.save_pretrained(folder / "adapter")
        if config.load_in:  # a merge into few bits would round anew
            base = type(model).from_pretrained(model.name_or_path, dtype=model.dtype)
            adapter = peft.PeftModel.from_pretrained(base, folder / "adapter")
        model = adapter.merge_and_unload()
    for p in model.parameters():  # not buffers: rounded rotary frequencies turn late positions
        p.data = p.data.to(PRECISIONS[device_and_precision(config)[1]])
    return model


def neutral(chat: Chat) -> hf.GenerationConfig:
    """A generation config with the ends of texts alone; a request says how they are drawn."""
    ends, pad = sorted(chat.stop_ids), chat.tokenizer.pad_token_id
    return hf.GenerationConfig(eos_token_id=ends, pad_token_id=pad)


def save(model: Any, chat: Chat, folder: Path, config: Model, adapter: Any = None) -> None:
    """A HuggingFace checkpoint with its tokenizer and rendering."""
    with atomic(folder) as draft:
        model = full_weights(model, draft, config, adapter)
        model.generation_config = neutral(chat)
        with as_user_error(folder):
            model.save_pretrained(draft)
            chat.save(draft)
