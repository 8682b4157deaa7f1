"""Models and their optimisers: loading, precision, schedules, and what makes large ones fit in little memory.

LoRA (Hu et al. 2022) leaves a weight W as it is and learns a low-rank update: W x + alpha/rank B A x, with B = 0 at
first; the layers are PEFT's. It is merged into W before a checkpoint is saved, so that later stages see an ordinary
one, and kept in its folder adapter/ in PEFT's format. With W in 4 bits this is QLoRA (Dettmers et al. 2023); such a W
is written back in full before the merge.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from qlass import UserError, loop
from qlass.chat import Chat, Rendering
from qlass.cli import at_least
from qlass.fast import parity
from qlass.files import replacing_folder
from qlass.flags import add_loading
from qlass.loop import LOGS

MORE_TOKENS = 64  # that a tokenizer may have and its model not: some are published so (gemma-3-1b-it has one)
NO_CODE = {"use_safetensors": True, "trust_remote_code": False}  # a checkpoint may come from a stranger
LR = 2e-4  # if none is given: updates that start from 0 take larger steps than weights


def device_and_dtype(device: str | None) -> tuple[torch.device, torch.dtype]:
    """bf16 on a GPU, float32 on a CPU."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"--device {device}: not here ({str(error).splitlines()[0]})") from None
    return chosen, torch.bfloat16 if chosen.type == "cuda" else torch.float32


def mixed_precision(model: Any) -> torch.autocast:
    """bf16 arithmetic on float32 weights, on a GPU. Few CPUs have it, and a training is to be the same on all."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


def load_tokenizer(path: str | Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_checkpoint(
    path: str | Path, kind: Any, device: str | None, load_in: str | None = None, train: bool = False,
    plain: bool = False, rendering: Rendering | None = None, divide: bool = False,
) -> tuple[Any, Chat]:  # fmt: skip
    """A HuggingFace model of class `kind` (AutoModelForCausalLM, AutoModel) and its Chat; a folder or a hub name.

    plain: it is to read one sequence at a time; else it must give the outputs of plain sequences for a token tree.
    rendering: instead of the folder's. divide: it stays on the CPU, from where several GPUs take their parts.
    To be trained, it is float32: an AdamW step of 1e-5 is less than half a bf16 step of a weight above 0.005.
    """
    if kind is transformers.AutoModelForCausalLM and (Path(path) / "qnet.json").exists():
        raise UserError(f"{path}: a QNet, not an agent; name the folder that sft.py wrote")
    where, dtype = device_and_dtype(device)
    where, dtype = torch.device("cpu") if divide else where, torch.float32 if train else dtype
    options = quantised(load_in, where)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what matters of its load report is checked below
    try:
        model, about = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, **options, **NO_CODE)
        tokenizer, rendering = load_tokenizer(path), rendering or Rendering.load(path)
    except Exception as error:  # tokenizers raises no kind of its own
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path}: not a checkpoint that transformers can load ({why})") from None
    if about["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"{path}: no weights for {min(about['missing_keys'])}; was the folder mixed from two?")
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary + MORE_TOKENS:
        raise UserError(f"{path}: its tokenizer has {len(tokenizer):,} tokens, its model {vocabulary:,}; "
                        "was the folder mixed from two?")  # fmt: skip
    model = model if load_in else model.to(where)
    if not plain:
        parity.check(model.eval(), str(path))
    return model, Chat(tokenizer, rendering, vocabulary, context_of(model.config))


def load_chat(path: str | Path, rendering: Rendering) -> Chat:
    """A checkpoint's Chat without its weights, which a server holds."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        return Chat(load_tokenizer(path), rendering, context=context_of(config))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path}: no tokenizer and config ({why})") from None


def context_of(config: Any) -> int | None:
    """How many tokens a model was made for; None: its config does not say, or its past is a state of one size."""
    config = config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in ("longrope", "dynamic"):  # other frequencies beyond it, for what was cached too
        return scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def save_checkpoint(model: Any, chat: Chat, folder: Path, updates: dict | None = None, base: str = "") -> None:
    """A HuggingFace checkpoint with its tokenizer and rendering; LoRA's updates are merged in a copy.

    updates, base: where they have been merged already, what they were and onto what, to be kept in adapter/.
    """
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        merge(model := copy.deepcopy(model))
    with replacing_folder(folder) as draft:
        model.save_pretrained(draft)
        chat.save(draft)
        if updates:
            save_adapter(model, updates, base, draft / "adapter")


def add_lora(model: Any, rank: int, alpha: int | None = None) -> None:
    """Freeze the model and give its linear layers low-rank updates by PEFT, in float32, which alone are trained."""
    if find_spec("peft") is None:
        raise UserError(f"--lora {rank}: peft is missing: pip install -r requirements.txt")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    # The base model, so that the output layer stays as it is: an agent's and a QNet's updates are of the same layers.
    layers = model.base_model if model.base_model_prefix in model._modules else model
    model.requires_grad_(False)
    try:
        config = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear")
        inject_adapter_in_model(config, layers)
        wrapped = {type(m.get_base_layer()) for m in layers.modules() if isinstance(m, BaseTunerLayer)}
        if others := [kind.__name__ for kind in wrapped if not issubclass(kind, (nn.Linear, Conv1D))]:
            raise ValueError(f"PEFT also updates its {', '.join(others)}")  # experts, routers: `merge` knows no such
    except (TypeError, ValueError) as error:
        raise UserError(f"--lora {rank}: not for this model ({str(error).splitlines()[0]}); leave --lora out") from None
    for p in model.parameters():
        p.data = p.data.float() if p.requires_grad else p.data


@torch.no_grad()
def merge(model: Any) -> dict[str, torch.Tensor]:
    """Write the updates into the weights, which get all their bits back: an ordinary model again. Returns them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    updates = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if ".lora_" in name}
    if getattr(model, "is_quantized", False):
        model.dequantize()
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            linear = module.get_base_layer()
            linear.weight.copy_(linear.weight.float() + module.get_delta_weight("default").float())
            model.set_submodule(name, linear)
    return updates


def save_adapter(model: Any, updates: dict[str, torch.Tensor], base: str | Path, folder: Path) -> None:
    """The updates as `PeftModel.from_pretrained` loads them onto `base`."""
    config = next(m.peft_config["default"] for m in model.modules() if hasattr(m, "peft_config"))
    config.base_model_name_or_path = str(base)
    config.target_modules = {name.split(".")[-4] for name in updates}
    config.save_pretrained(folder)
    weights = {f"base_model.model.{name.replace('.default', '')}": update for name, update in updates.items()}
    save_file(weights, folder / "adapter_model.safetensors")


def quantised(load_in: str | None, where: torch.device) -> dict:
    """from_pretrained's options for weights in 4 bits (NF4) or 8 (LLM.int8), None: as they are."""
    if load_in is None:
        return {}
    needs_bitsandbytes(f"--load-in {load_in}", where)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=load_in == "4bit", load_in_8bit=load_in == "8bit",
        bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return {"quantization_config": config, "device_map": {"": where}}


def adamw(parameters: Iterable[nn.Parameter], lr: float, name: str = "adamw") -> torch.optim.Optimizer:
    """AdamW without weight decay (Table 5); "adamw8bit" keeps its moments in 8 bits."""
    parameters = list(parameters)
    if any(p.dtype == torch.bfloat16 for p in parameters):
        return RoundedAdamW(parameters, lr, (0.9, 0.95))
    kind: Any = torch.optim.AdamW
    if name == "adamw8bit":
        needs_bitsandbytes("--optim adamw8bit", parameters[0].device)
        import bitsandbytes

        kind = bitsandbytes.optim.AdamW8bit
    return kind(parameters, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW for bf16 weights: moments in float32, and updates rounded up or down by chance.

    bf16 has eight bits: a step of 1e-5 from a weight of 0.1 would always be rounded away. Rounded by chance, in
    proportion to how near either neighbour is, it counts in the mean. 12 bytes a weight with its gradient, not 16.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float = 1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p, dtype=torch.float32)}
                    state["v"] = torch.zeros_like(state["m"])
                state["step"] += 1
                m, v, g, p = map(loop.local, (state["m"], state["v"], p.grad.float(), p))
                m.lerp_(g, 1 - beta1)
                v.lerp_(g.square_(), 1 - beta2)
                size = (v / (1 - beta2 ** state["step"])).sqrt_().add_(eps)
                exact = p.float().addcdiv_(m, size, value=-group["lr"] / (1 - beta1 ** state["step"]))
                luck = torch.Generator(p.device).manual_seed(state["step"])  # the same in every process and resumption
                p.copy_(rounded(exact, luck) if p.dtype == torch.bfloat16 else exact)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # casts moments to the weights' dtype
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            p = parameters[i]
            self.state[p] = {k: v.to(p.device) if isinstance(v, torch.Tensor) else v for k, v in saved.items()}


def rounded(x: torch.Tensor, luck: torch.Generator) -> torch.Tensor:
    """float32 to one of its two neighbours in bf16, each as likely as it is near."""
    bits = x.view(torch.int32)
    below = torch.randint(1 << 16, bits.shape, generator=luck, device=bits.device, dtype=bits.dtype)
    bits = bits + below  # bf16 is float32's upper half
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """The weights alone: buffers stay as `from_pretrained` leaves them, since rounded rotary frequencies turn the
    positions of long prompts by radians."""
    for p in model.parameters():
        p.data = p.data.to(dtype) if p.is_floating_point() else p.data


def save_memory(model: Any, args: argparse.Namespace) -> None:
    """--lora, --weights and --gradient-checkpointing."""
    if args.lora:
        add_lora(model, args.lora, args.lora_alpha)
    if args.weights == "bf16":
        cast(model, torch.bfloat16)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})


def layers_of(backbone: Any) -> nn.ModuleList:
    n = backbone.config.get_text_config().num_hidden_layers
    return next(m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == n)


def divide(model: Any, backbone: Any, args: argparse.Namespace, *heads: nn.Module) -> None:
    """--fsdp: leave each process its part of the model."""
    if args.fsdp:
        loop.divide(model, (*layers_of(backbone), *heads), device_and_dtype(args.device)[1] == torch.bfloat16)


def needs_bitsandbytes(flag: str, where: torch.device) -> None:
    missing = [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(f"{flag}: {missing[0]} is missing: pip install -r requirements-gpu.txt")
    if where.type == "cpu":
        raise UserError(f"{flag}: needs a GPU; leave it out on a CPU")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The flags by which all who train a large model take less memory; for `check_training` and `save_memory`."""
    add, names = parser.add_argument, ["adamw", "adamw8bit"]
    add("--lora", type=at_least(1), metavar="RANK", help="train updates of this rank instead of the weights")
    add("--lora-alpha", type=at_least(1), metavar="A", help="the updates' factor is A / RANK (default: twice the rank)")
    add_loading(parser)
    add("--optim", choices=names, default="adamw", metavar="NAME", help="adamw or adamw8bit (default: %(default)s)")
    add("--weights", choices=["float32", "bf16"], default="float32", help="while they are trained (default: float32)")
    said = "keep one layer's activations at a time, compute a third more"
    add("--gradient-checkpointing", action="store_true", help=said)
    add("--fsdp", action="store_true", help="processes (torchrun, accelerate launch) divide the weights and moments")


def add_training(parser: argparse.ArgumentParser) -> None:
    """The flags of a stage that trains a model."""
    add_memory(parser)
    add = parser.add_argument
    said = "epochs without a better validation before it stops (default: 2)"
    add("--patience", type=at_least(1), default=2, help=said)
    add("--log", choices=LOGS, default="jsonl", metavar="NAME", help="jsonl (OUT.log.jsonl), tensorboard or wandb")
    add("--save-every", type=at_least(1), default=50, metavar="N", help="updates between checkpoints (default: 50)")


def check_training(args: argparse.Namespace) -> None:
    if args.lora_alpha and not args.lora:
        raise UserError(f"--lora-alpha {args.lora_alpha}: stands beside --lora RANK; give both")
    if args.weights == "bf16" and args.optim != "adamw":
        raise UserError(f"--weights bf16: --optim {args.optim} would round its updates away; leave one of them out")
    if args.fsdp and (args.load_in or args.optim != "adamw"):
        raise UserError("--fsdp: bitsandbytes' weights and moments can't be divided; leave --load-in and --optim out")
    if args.load_in and args.weights == "bf16":
        raise UserError(f"--load-in {args.load_in}: its weights stay as they are; leave --weights bf16 out")
    if args.load_in and not args.lora:
        raise UserError(f"--load-in {args.load_in}: weights of so few bits can't be trained; give --lora RANK too")
