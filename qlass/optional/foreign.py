"""Checkpoints that other programs made or will read: opened where one needs more than
from_pretrained, so that nothing of it is dropped without a word."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, GgufConfig, ProcessorMixin, utils

from qlass import UserError
from qlass.batching import LogProb
from qlass.chat import Chat
from qlass.files import read_object, warn_once
from qlass.messages import State, react
from qlass.policy import Policy, next_logits

# A GGUF file's tensors that scale the frequencies of positions, by Llama 3.1 and by longrope.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
WAY_OUT = "name the checkpoint that it was made from"


# ------------------------------------------------------------------------------------------ GGUF


def source_of_gguf(file: Path) -> dict[str, Any]:
    """from_pretrained's arguments for a file. UserError for a part of a model, which it would take
    for the whole: llama.cpp knows parts by their names."""
    if re.search(r"-\d+-of-\d+$", file.stem):
        advice = "join them by llama.cpp's llama-gguf-split"
        raise UserError(f"{file}: is one of several files of a model; {advice}")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def load_gguf(place: dict[str, Any], kind: Any, options: dict[str, Any]) -> tuple[Any, dict]:
    """from_pretrained's model and report, in full width: few bits can't be saved, nor get a value
    head or LoRA. UserError if the model would compute something else than the file says."""
    from gguf import GGUFReader

    path = Path(place["pretrained_model_name_or_path"], place["gguf_file"])
    reader = GGUFReader(path)
    refuse_scaled_positions(path, reader)
    options = {"quantization_config": GgufConfig(dequantize=True), **options}
    model, report = kind.from_pretrained(**place, **options)
    refuse_unread_settings(path, reader, model.config)
    return model, report


def settings_of(reader: Any) -> dict[str, Any]:
    """What a GGUF file says of its architecture, as "rope.freq_base" to its value."""
    prefix = reader.fields["general.architecture"].contents() + "."
    settings = {}
    for name, field in reader.fields.items():
        if name.startswith(prefix):
            settings[name.removeprefix(prefix)] = field.contents()
    return settings


def refuse_scaled_positions(path: Path, reader: Any) -> None:
    """UserError for a file with a scaling of positions, which transformers drops."""
    settings = settings_of(reader)
    kind = settings.get("rope.scaling.type", "none")
    factors = [settings.get("rope.scaling.factor", 1), settings.get("rope.scale_linear", 1)]
    tensors = [tensor.name for tensor in reader.tensors if tensor.name in FACTORS]
    if kind != "none" or factors != [1, 1] or tensors:
        raise UserError(f"{path}: its scaling of positions (RoPE) can't be read; {WAY_OUT}")


def refuse_unread_settings(path: Path, reader: Any, config: Any) -> None:
    """UserError for a number that the configuration has nowhere: a default stands in its place."""
    values = [*numbers(config.to_dict())]
    for name, value in settings_of(reader).items():
        if name == "rope.dimension_count" or not isinstance(value, int | float):
            continue
        if not any(math.isclose(value, number, rel_tol=1e-6) for number in values):
            raise UserError(f"{path}: its {name} of {value} can't be read; {WAY_OUT}")


def numbers(settings: dict[str, Any]) -> Iterator[float]:
    """All numbers of a configuration and its parts; a truth value is one."""
    for value in settings.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, int | float):
            yield value


# ------------------------------------------------------- weights, tokens and templates out of place


def is_adapter(path: str | Path) -> bool:
    """Is there a PEFT adapter, which only has the updates of a model's weights?"""
    return Path(path).suffix != ".gguf" and bool(utils.find_adapter_config_file(str(path)))


def refuse_folder(folder: Path) -> None:
    """UserError for a folder from which other weights would be loaded than are meant, or none."""
    if folder.is_absolute() and not folder.exists():  # a relative path may be a hub name
        raise UserError(f"{folder}: no such file or folder")
    adapters = [file.parent for file in folder.glob("*/**/adapter_config.json")]
    if adapters and not is_adapter(folder):
        from qlass.optional import lora

        lora.refuse_unmerged(folder, adapters)
    shards = sorted(file.name for file in folder.glob("model-*-of-*.safetensors"))
    if shards and (folder / "model.safetensors").exists():  # which would be loaded unasked
        problem = f"{shards[0]} and model.safetensors are of two saves; move one away"
        raise UserError(f"{folder}: {problem}")
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        refuse_other_forms(folder)


def refuse_other_weights(path: str | Path, model: Any, report: dict[str, Any]) -> None:
    """UserError for weights that the model lacks, and for those that it would compute without."""
    wrong = [f"no weights for {key}" for key in report["missing_keys"]]  # drawn at random
    wrong += [f"{key} has another size in config.json" for key, *_ in report["mismatched_keys"]]
    unread = unread_weights(model, report["unexpected_keys"])
    wrong += [f"config.json has no place for {key}" for key in unread]
    if wrong:
        raise UserError(f"{path}: {min(wrong)}; was it mixed from two, or LoRA not merged?")


def unread_weights(model: Any, keys: Iterable[str]) -> Iterator[str]:
    """Of keys for which a model has no place, those that it would compute without.

    They belong to a layer that has other weights (an update that is not merged, a scale of few
    bits), or are one layer more in a list of layers. What predicts later tokens, images, the output
    layer, and the scales of a cache in few bits may be left out; masks and frequencies are
    computed.
    """
    outer = re.compile(rf"(base_model\.model\.)?({model.base_model_prefix}\.)?")
    names = [outer.sub("", name, count=1) for name, _ in model.named_parameters()]
    layers = tuple(name.rpartition(".")[0] + "." for name in names)
    lists = tuple(re.split(r"(?<=\.)\d+\.", name)[0] for name in names)
    config = model.config.get_text_config()
    predicts_later = getattr(config, "num_nextn_predict_layers", 0)
    for key in keys:
        name = outer.sub("", key, count=1)
        number = re.search(r"\.(\d+)\.", name)
        if predicts_later and number and int(number[1]) >= config.num_hidden_layers:
            continue
        if name.endswith(("k_scale", "v_scale", "q_scale", "output_scale")):
            continue
        if name.startswith(layers) or (name.startswith(lists) and name.endswith(".weight")):
            yield key


# Weights in other forms, by their files, and how to make safetensors of them.
FORMS = {
    "zero_to_fp32.py": "DeepSpeed's shards, which {0}/zero_to_fp32.py --safe_serialization joins",
    "*/*.distcp": "FSDP's shards: accelerate merge-weights SHARDS OUT",
    "*model*.bin": "pickles, which may run code: from_pretrained and save_pretrained turn them",
    "*.pth": "Meta's own form: name the HuggingFace form of this model",
    "checkpoint-*/*.safetensors": "a folder of checkpoints: name one of them",
}


def refuse_other_forms(folder: Path) -> None:
    """UserError for weights that are no safetensors, where it is known what they are."""
    for pattern, form in FORMS.items():
        if any(folder.glob(pattern)):
            raise UserError(f"{folder}: has no model.safetensors, but {form.format(folder)}")


def refuse_unknown_tokens(path: str | Path, model: Any, chat: Chat) -> None:
    """UserError if a prompt or a text can have a token that the model has no embedding of."""
    size = model.get_input_embeddings().num_embeddings
    template = chat.template
    written = template.begin + template.ask + template.stop + template.turn
    for token, i in chat.tokenizer.get_vocab().items():
        if i >= size and (token in written or not chat.controls.fullmatch(token)):
            advice = "give it the tokenizer that its weights were made with"
            raise UserError(f"{path}: no embedding for the token {token!r}; {advice}")


# What a forward returns, whatever config.json asks for.
OUTPUTS = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}


def settle_outputs(model: Any) -> None:
    """Let a model return its outputs by name, and no more of them than are asked for."""
    for config in (model.config, model.config.get_text_config()):
        for name, value in OUTPUTS.items():
            if hasattr(config, name):
                setattr(config, name, value)


def note_few_bits(model: Any, place: dict[str, Any]) -> None:
    """Keep whether a model was saved in few bits; let gradients through a layer that has some.

    FP8 and MXFP4 are loaded as full weights, which transformers does not save as such.
    """
    config = AutoConfig.from_pretrained(**place)
    model.stored_in_few_bits = hasattr(config, "quantization_config")
    if getattr(model, "is_quantized", False):
        from qlass.optional import lora

        lora.let_gradients_through(model)


def refuse_few_bits(model: Any) -> None:
    """UserError for a model that was saved in few bits, before it is trained."""
    if getattr(model, "stored_in_few_bits", False):
        advice = "train the model that it was made from, by --load-in 4bit --lora 16"
        raise UserError(f"{model.name_or_path}: saved in few bits, which training loses; {advice}")


def context_of(config: Any) -> int | None:
    """How many tokens a model was made for; None: unknown, or its past is a state of one size."""
    config = config.get_text_config()
    length: Any = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # a model may have others for its windows
    trained = rope.get("original_max_position_embeddings") or length
    if rope.get("rope_type") in ("longrope", "dynamic"):  # beyond it cached keys would differ
        return trained
    if rope.get("rope_type") == "yarn":  # added by a model card's advice, and the length left
        return max(length, int(trained * rope["factor"]))
    return length


def ends_of(path: str | Path, config: Any) -> list[int]:
    """The tokens that end a turn, beside the chat template's own."""
    generation = GenerationConfig.from_model_config(config)
    with contextlib.suppress(OSError):  # not every checkpoint has one
        generation = GenerationConfig.from_pretrained(path)
    ends = generation.eos_token_id
    return ends if isinstance(ends, list) else [ends]  # Llama 3 lists two


def template_of_processor(path: str | Path) -> Any:
    """A multimodal model's chat template, which is among the files of its processor; None, with a
    warning, if there is none either."""
    template = None
    if Path(path).suffix != ".gguf":
        processor, _ = ProcessorMixin.get_processor_dict(path)
        template = processor.get("chat_template")
    if not template:
        warn_once(f"{path} has no chat template: its prompts are 'User: ... Assistant: ...'")
    return template


@torch.no_grad()  # not inference_mode: what a model keeps of this must serve its training
def check_cache(model: Any, name: str) -> None:
    """UserError if tokens behind a cache do not get the logits that they get in the whole text."""
    size = model.get_input_embeddings().num_embeddings
    ids = [size * i // 12 for i in range(1, 12)]
    if model.get_output_embeddings() is None:  # a QNet's backbone, which is read without a cache
        model(input_ids=torch.tensor([ids], device=model.device))
        return
    _, past = next_logits(model, ids[:5])
    if not past:
        return
    differences = []
    for end in range(6, 12):
        logits, past = next_logits(model, ids[end - 1 : end], past, end - 1)
        reference, _ = next_logits(model, ids[:end])
        difference = (logits - reference).float().abs().mean()
        differences.append(difference / reference.float().abs().mean())
    # Rounding alone may send a token to other experts, but not most tokens.
    median = float(torch.stack(differences).median())
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    if median > (0.01 if exact else 0.1):
        problem = f"a token read behind a cache gets other logits, by {median:.1%}"
        raise UserError(f"{name}: {problem}: its model class can't write token by token")


# -------------------------------------------------------------------- which checkpoint a server has

# One question for every checkpoint. Its text is long enough that another RoPE reads it otherwise.
INSTRUCTION = (
    "You walk through a house and do what you are asked to. In each turn write a thought, then one "
    'action, as "Thought: ..." and "Action: ...". You can go to a place, open or close it, take a '
    "thing from it, put a thing into it, and look. If nothing happens, the action was not possible."
)
OBSERVATION = (
    "You stand in the middle of a kitchen. Around you are a fridge 1, a sink 1, a stove 2, a table "
    "1, a shelf 3 and a drawer 4. On the table 1 are a red cup 2, a plate 1 and half an apple 5. "
    "Your task is to: put a clean cup into the drawer 4."
)
ACTIONS = (
    react("The cup stands on the table. I take it first.", "take cup 2 from table 1"),
    react("A clean cup is wanted, so I go to the sink.", "go to sink 1"),
    react("", "open drawer 4"),
    react("I do not know where I am.", "look"),
)
MESSAGES = (("user", INSTRUCTION), ("assistant", "OK"), ("user", OBSERVATION))
FIXED = LogProb(State(MESSAGES, "put a clean cup into the drawer 4."), ACTIONS)


def fits(chat: Chat) -> bool:
    """Can FIXED be asked within the model's context?"""
    return all(chat.fits(FIXED.state, action) for action in FIXED.actions)


def fingerprint(
    model: Any, chat: Chat, answer: Callable[[list], list] | None = None
) -> list[float] | None:
    """What a checkpoint answers to FIXED, log pi(a | s) or Q(s, a) of each action; None where it is
    not kept: of a training in few bits, which are not what is saved, and of a short context.

    answer: the `score` of a QNet of which the model is the backbone; None: an agent is asked.
    """
    if getattr(model, "is_quantized", False) or not fits(chat):
        return None
    (values,) = (answer or Policy(model, chat).likelihoods)([FIXED])
    return [round(value, 5) for value in values]


# ------------------------------------------------------------------------------- transformers 4


def write_old_names(folder: Path) -> None:
    """Write into a checkpoint what transformers 4 reads. It would take its own defaults for RoPE's
    settings (rope_theta 10,000), and refuse the tokenizer."""
    config = read_object(folder / "config.json")
    for part in (config, config.get("text_config", {})):
        rope = part.get("rope_parameters") or {}
        if rope and config["model_type"].startswith("gemma3"):  # it has another for its windows
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        if "rope_theta" in rope:
            part["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            part["rope_scaling"] = rope
    write(config, folder / "config.json")
    tokenizer = read_object(folder / "tokenizer_config.json")
    if tokenizer["tokenizer_class"] == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    write(tokenizer, folder / "tokenizer_config.json")


def write(settings: dict[str, Any], file: Path) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
