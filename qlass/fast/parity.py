"""Does a model give for packed sequences what it gives for each by itself? Asked of every model as it is loaded.

Token trees ask of a model that it places tokens by `position_ids` and looks where a 4-D mask lets it. Most do. A model
that carries a state from token to token, or that counts columns (ALiBi), would be silently wrong: it is refused, and
`--plain` reads its sequences one at a time. docs/scale.md names the kinds that differ.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from qlass import UserError
from qlass.fast.cache import PromptCache
from qlass.fast.token_tree import TokenTree, tree_inputs

WINDOW = 4  # tokens; as small as the families below, so that these test the windows too
# Of attention windows that are not in the mask that a model is given, and larger than the sequences below.
HIDDEN = ("window_size", "attention_window_size", "attention_window", "local_attention")
EXACT = 1e-3  # of the outputs' mean size, in float32
ROUGH = 0.1  # in fewer bits; rounding alone makes .02
NOT_FINITE = "its outputs are not finite: its weights are damaged, or overflow (try --precision float32)"


def check(model: Any, name: str) -> None:
    """UserError where token trees would give other outputs than plain sequences, or these are not finite."""
    if wrong := fault(model):
        advice = "" if wrong == NOT_FINITE else "; --plain reads it one sequence at a time"
        raise UserError(f"{name}: {wrong}{advice}")


@torch.no_grad()  # not inference_mode: what a model keeps of this must serve its training
def fault(model: Any) -> str | None:
    """What a model does wrong with token trees, with and without a prompt cache; None: nothing."""
    config = model.config.get_text_config()
    if name := next((name for name in HIDDEN if getattr(config, name, None)), None):
        return f"its attention has windows of its own ({name})"
    quantised = getattr(model, "is_quantized", False)
    most = EXACT if model.dtype == torch.float32 and not quantised else ROUGH
    # Rounding alone can send a token to other experts or, with weights of few bits, over a step: most sequences count.
    experts = any("experts" in name for name in config.to_dict())
    by_median = most == ROUGH and (quantised or experts)
    names = ("sliding_window", "attention_chunk_size")
    windows = {name: size for name in names if (size := getattr(config, name, None))}
    try:
        for name in windows:
            setattr(config, name, WINDOW)
        families = tokens_of(model)
        inputs = [[{"input_ids": torch.tensor([ids], device=model.device)} for ids in family] for family in families]
        alone = [[outputs(model, {**one, "use_cache": False})[0] for one in family] for family in inputs]
        if not all(rows.isfinite().all() for family in alone for rows in family):
            return NOT_FINITE
        for tried, difference in (("a token tree", tree_difference), ("a prompt cache", cache_difference)):
            try:
                sizes = difference(model, families, alone)
            except Exception as error:  # whatever a model of any kind says to such inputs
                return f"its model class takes no {tried[2:]} ({error!r:.150})"
            size = float(sizes.median() if by_median else sizes.max())
            if size > most:
                return f"the outputs of {tried} differ from plain ones by {size:.1%}"
        return None
    finally:
        for name, size in windows.items():
            setattr(config, name, size)


# Sequences with common beginnings, of different lengths and deeper than a window: two families, so that one is padded.
FAMILIES = (("abcdefghijkl", "abcdefghmnop", "abcdxyzefg", "abcdefghijqr"), ("abcdefg", "abcabcabd"))


def tokens_of(model: Any) -> list[list[list[int]]]:
    """The families as tokens from all over the vocabulary, none of them at its ends, where control tokens are."""
    size = model.get_input_embeddings().num_embeddings
    return [[[size // 8 + (ord(c) - ord("a")) * (size * 3 // 4) // 26 for c in s] for s in f] for f in FAMILIES]


def outputs(model: Any, inputs: dict, columns: torch.Tensor | None = None) -> torch.Tensor:
    """Logits or, of a model without a head, hidden states, of the columns asked for."""
    if model.get_output_embeddings() is not None:
        return model(**inputs, **({} if columns is None else {"logits_to_keep": columns})).logits.float()
    hidden = model(**inputs).last_hidden_state
    return (hidden if columns is None else hidden[:, columns]).float()


Families = list[list[list[int]]]
Alone = list[list[torch.Tensor]]  # outputs of each sequence by itself


def tree_difference(model: Any, families: Families, alone: Alone) -> torch.Tensor:
    """How far a packed batch's outputs are from each plain sequence's, as a share of their mean size."""
    trees = [TokenTree() for _ in families]
    paths = [[tree.add(ids) for ids in family] for tree, family in zip(trees, families, strict=True)]
    out, pairs = outputs(model, {**tree_inputs(model, trees), "use_cache": False}), []
    for row, tree, places, expected in zip(out, trees, paths, alone, strict=True):
        row = row[len(row) - len(tree) :]
        pairs += [(row[path], rows) for path, rows in zip(places, expected, strict=True)]
    return relative(pairs)


def cache_difference(model: Any, families: Families, alone: Alone) -> torch.Tensor:
    """The same of beginnings read one after the other, a step deeper each, behind what is remembered of those before.

    What follows a beginning in its sequence stands for the actions.
    """
    cache, pairs, forward = PromptCache(), [], functools.partial(outputs, model)
    sequences, expected = [*itertools.chain(*families)], [*itertools.chain(*alone)]
    for turns, end in ((1, 3), (3, 6)):
        states = [[ids[:3], ids[3:4], ids[4:6]][:turns] for ids in sequences]
        tails = [[ids[end : end + 3], ids[end : end + 1]] for ids in sequences]
        for i, out, last, paths in cache.read(forward, model, 1 << 14, states, tails):
            pairs += [(out[[last, *path]], expected[i][end - 1 : end + len(path)]) for path in paths]
    return relative(pairs)


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    sizes = [(ours - theirs).abs().mean() / theirs.abs().mean().clamp(min=1e-9) for ours, theirs in pairs]
    return torch.stack(sizes)
