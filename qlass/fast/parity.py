"""Compare a model's outputs for packed sequences with those for each by itself, as it is loaded.

Token trees ask of a model that it places tokens by `position_ids` and looks where a 4-D mask lets
it. Most do. A model that carries a state from token to token, or that counts columns (ALiBi), would
be silently wrong: it is refused, and `--plain` reads its sequences one at a time. docs/models.md
names the kinds that differ."""

import functools
from typing import Any

import torch
from torch import Tensor

from qlass import UserError
from qlass.fast.cache import PromptCache, Question, Tokens
from qlass.records import as_user_error

WINDOW = 4  # tokens; as small as the families below, so that these test the windows too
# Of attention windows that are not in the mask that a model is given, and larger than the sequences
# below; the last one of Llama 4.
HIDDEN = (
    "window_size",
    "attention_window_size",
    "attention_window",
    "local_attention",
    "attention_chunk_size",
)
EXACT = 1e-3  # of the outputs' mean size, in float32
ROUGH = 0.1  # in fewer bits; rounding alone makes .02
PLAIN = "; --plain reads it one sequence at a time"


@torch.no_grad()  # not inference_mode: what a model keeps of this must serve its training
def check(model: Any) -> None:
    """UserError where token trees, after a prompt cache or without, would give other outputs than
    plain sequences, or these are not finite."""
    config = model.config.get_text_config()
    if name := next((name for name in HIDDEN if getattr(config, name, None)), None):
        raise UserError(f"its attention has windows of its own ({name}){PLAIN}")
    exact = model.dtype == torch.float32 and not getattr(model.config, "_is_quantized", False)
    window = getattr(config, "sliding_window", None)
    try:
        if window:
            config.sliding_window = WINDOW
        sequences = tokens_of(model)
        plain = []
        for ids in sequences:
            one = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
            plain.append(outputs(model, one, torch.arange(len(ids)))[0])
        if not all(rows.isfinite().all() for rows in plain):
            damage = "its weights are damaged, or overflow (try --precision float32)"
            raise UserError(f"its outputs are not finite: {damage}")
        shares = differences(model, sequences, plain)
    finally:
        if window:
            config.sliding_window = window
    # Rounding alone can send a token to other experts or, with weights of few bits, over a step:
    # most sequences count.
    share = float(shares.max() if exact else shares.median())
    if share > (EXACT if exact else ROUGH):
        problem = f"the outputs of token trees differ from plain ones by {share:.1%}"
        raise UserError(problem + PLAIN)


# Sequences with common beginnings, of different lengths and deeper than a window. The letter they
# begin with is all that those of one token tree must share, so these are two trees, of which the
# smaller one is padded.
SEQUENCES = (
    "abcdefghijkl",
    "abcdefghmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz",
    "abcdxyzefg",
    "abcdefghijqr",
    "bcdefghi",
    "bcdefabcabd",
)


def tokens_of(model: Any) -> list[Tokens]:
    """The sequences as tokens from all over the vocabulary, none of them at its ends, where control
    tokens are."""
    size = model.get_input_embeddings().num_embeddings
    first, width = size // 8, size * 3 // 4
    return [[first + (ord(c) - ord("a")) * width // 26 for c in sequence] for sequence in SEQUENCES]


def outputs(model: Any, inputs: dict, columns: Tensor) -> Tensor:
    """Logits (B, columns, V) or, of a model without a head, hidden states (B, columns, D), of the
    columns asked for. UserError for what its class says to a token tree after a prompt cache."""
    head = model.get_output_embeddings() is not None
    more = {"logits_to_keep": columns} if head else {}
    with as_user_error("its model class reads no token trees after a prompt cache", PLAIN):
        out = model(**inputs, **more)
    past = inputs.get("past_key_values")
    if past is not None and not past.get_seq_length():
        raise UserError(f"its model class keeps nothing in a prompt cache{PLAIN}")
    return (out.logits if head else out.last_hidden_state[:, columns]).float()


def differences(model: Any, sequences: list[Tokens], plain: list[Tensor]) -> Tensor:
    """Measure how far outputs of token trees are from plain ones, as a share of their mean size.

    Beginnings are read one after the other, a step deeper each: first without anything in the
    cache, then after what it has kept of those before. What follows a beginning in its sequence
    stands for the actions."""
    cache = PromptCache(model, functools.partial(outputs, model), 1 << 14)
    cache.MIN_FILL = 0  # trees of all sizes side by side
    shares = []
    for turns, end in ((1, 1), (3, 4)):
        questions = []
        for ids in sequences:
            messages = [ids[:1], ids[1:2], ids[2:4]]
            questions.append(Question(messages[:turns], [ids[end:], ids[end : end + 1]]))
        for number, ours, paths in cache.read(questions):
            for path in paths:
                theirs = plain[number][end - 1 : end - 1 + len(path)]
                size = theirs.abs().mean().clamp(min=1e-9)
                shares.append((ours[path] - theirs).abs().mean() / size)
    return torch.stack(shares)
