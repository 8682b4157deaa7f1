"""Does a model give for packed sequences what it gives for each by itself? Asked of every model as it is loaded.

Token trees ask of a model that it places tokens by `position_ids` and looks where a 4-D mask lets it. Most do. A model
that carries a state from token to token, or that counts columns (ALiBi), would be silently wrong: it is refused, and
`--plain` reads its sequences one at a time. docs/scale.md names the kinds that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qlass import UserError
from qlass.fast.cache import PromptCache
from qlass.fast.token_tree import TokenTree, tree_inputs

WINDOW = 4  # tokens; as small as the families below, so that these test the windows too
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
    if name := hidden_window(model.config):  # larger than the sequences below
        return f"its attention has windows of its own ({name})"
    quantised = getattr(model, "is_quantized", False)
    most = EXACT if model.dtype == torch.float32 and not quantised else ROUGH
    # Rounding alone can send a token to other experts or, with weights of few bits, over a step: most sequences count.
    experts = any("experts" in name for name in model.config.get_text_config().to_dict())
    by_median = most == ROUGH and (quantised or experts)
    with small_windows(model.config):
        families = tokens_of(model)
        alone = [[plain(model, ids) for ids in family] for family in families]
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


def hidden_window(config: Any) -> str | None:
    """An attention window that is not in the mask that a model is given, by its name in the config."""
    names = ("window_size", "attention_window_size", "attention_window", "local_attention")
    return next((name for name in names if getattr(config.get_text_config(), name, None)), None)


@contextlib.contextmanager
def small_windows(config: Any) -> Iterator[None]:
    """Attention windows of a few tokens, so that a few tokens suffice to see whether they are right."""
    config, before = config.get_text_config(), {}
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            before[name] = getattr(config, name)
            setattr(config, name, WINDOW)
    try:
        yield
    finally:
        for name, size in before.items():
            setattr(config, name, size)


# Sequences with common beginnings, of different lengths and deeper than a window: two families, so that one is padded.
FAMILIES = (
    ("abcdefghijkl", "abcdefghmnop", "abcdxyzefg", "abcdefghijqr"),
    ("abcdefg", "abcabcabd"),
)


def tokens_of(model: Any) -> list[list[list[int]]]:
    """The families as tokens from all over the vocabulary, none of them at its ends, where control tokens are."""
    size = model.get_input_embeddings().num_embeddings
    return [[[size // 8 + (ord(c) - ord("a")) * (size * 3 // 4) // 26 for c in s] for s in f] for f in FAMILIES]


def outputs(model: Any, inputs: dict, columns: torch.Tensor | None = None) -> torch.Tensor:
    """Logits or, of a model without a head, hidden states, of the columns asked for."""
    headed = model.get_output_embeddings() is not None
    out = model(**inputs, **({"logits_to_keep": columns} if headed and columns is not None else {}))
    if headed:
        return out.logits.float()
    return (out.last_hidden_state if columns is None else out.last_hidden_state[:, columns]).float()


def plain(model: Any, ids: list[int]) -> torch.Tensor:
    return outputs(model, {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False})[0]


Families = list[list[list[int]]]
Alone = list[list[torch.Tensor]]  # outputs of each sequence by itself


def tree_difference(model: Any, families: Families, alone: Alone) -> torch.Tensor:
    """How far a packed batch's outputs are from each plain sequence's, as a share of their mean size."""
    trees, paths = [], []
    for family in families:
        trees.append(TokenTree())
        paths.append([trees[-1].add(ids) for ids in family])
    inputs = tree_inputs(model, trees)
    out, pairs = outputs(model, {**inputs, "use_cache": False}), []
    for row, tree, places, expected in zip(out, trees, paths, alone, strict=True):
        row = row[len(row) - len(tree) :]
        pairs += [(row[path], rows) for path, rows in zip(places, expected, strict=True)]
    return relative(pairs)


def cache_difference(model: Any, families: Families, alone: Alone) -> torch.Tensor:
    """The same of beginnings read one after the other, a step deeper each, behind what is remembered of those before.

    What follows a beginning in its sequence stands for the actions.
    """
    cache, pairs = PromptCache(), []
    sequences = [ids for family in families for ids in family]
    expected = [rows for family in alone for rows in family]
    for turns in (1, 3):
        states = [[ids[:3], ids[3:4], ids[4:6]][:turns] for ids in sequences]
        ends = [sum(map(len, state)) for state in states]
        tails = [[ids[end : end + 3], ids[end : end + 1]] for ids, end in zip(sequences, ends, strict=True)]
        for i, out, last, paths in cache.read(
            lambda inputs, columns: outputs(model, inputs, columns), model, 1 << 14, states, tails
        ):
            pairs += [(out[[last, *path]], expected[i][ends[i] - 1 : ends[i] + len(path)]) for path in paths]
    return relative(pairs)


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    sizes = [(ours - theirs).abs().mean() / theirs.abs().mean().clamp(min=1e-9) for ours, theirs in pairs]
    return torch.stack(sizes)
