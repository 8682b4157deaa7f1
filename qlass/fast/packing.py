"""The (s, a) pairs of a tree, and how they go through QNet at the cost of their unique tokens.

The pairs of a tree begin alike, so the backbone reads a *pack*, a tree or a part of one, as one
sequence in which each shared token stands once. If n_i tokens of pair i carry the loss, each has
the weight w_i = 1/n_i there. A token of value v that several pairs i share adds

    sum_i w_i (v - q_i)^2 = w v^2 - 2 v sum_i w_i q_i + constant,    w = sum_i w_i.

So w and sum_i w_i q_i of each token give the loss and the gradients of the pairs one by one.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlass.chat import Chat
from qlass.fast.attention import Block, blocks
from qlass.fast.token_tree import TokenTree, tree_inputs
from qlass.pairs import Pack, Pair


@dataclasses.dataclass(frozen=True, eq=False)
class TreePack(Pack):
    """Pairs as one token tree with, for each token, sum_i w_i and sum_i w_i q_i over the pairs
    through it.

    Of P pairs in a tree of T tokens: both sums (2, T), and last (P,), the place of each pair's last
    token. 20 bytes a token, beside the pairs themselves."""

    tree: TokenTree
    sums: np.ndarray
    last: np.ndarray

    @property
    def pairs(self) -> Iterator[Pair]:
        return itertools.chain(*self.families)


def pack_pairs(
    chat: Chat, families: Sequence[list[Pair]], loss_on: str, max_tokens: int
) -> Iterator[TreePack]:
    """Pack a tree's pairs in token trees of at most `max_tokens` each, or of one longer family.

    families: pairs that stay together. loss_on: "all" tokens of (s, a), or the "last".
    """
    tree = TokenTree()
    together: list[list[Pair]] = []
    paths: list[list[int]] = []  # of each pair: its tokens' places in the tree
    for family in families:
        texts = [chat.pair(pair.state, pair.action) for pair in family]
        size = len(tree)
        places = list(map(tree.add, texts))
        if together and len(tree) > max_tokens:
            tree.cut(size)
            yield pack(tree, together, paths, loss_on)
            tree, together, paths = TokenTree(), [], []
            places = list(map(tree.add, texts))
        together.append(family)
        paths += places
    if together:
        yield pack(tree, together, paths, loss_on)


def pack(
    tree: TokenTree, families: list[list[Pair]], paths: list[list[int]], loss_on: str
) -> TreePack:
    sums = np.zeros((2, len(tree)))
    for pair, path in zip(itertools.chain(*families), paths, strict=True):
        trained = path[-1:] if loss_on == "last" else path
        sums[:, trained] += np.array([[1], [pair.q]]) / len(trained)  # w_i = 1 / n_i
    last = np.array([path[-1] for path in paths])
    tree.close()
    return TreePack(families, len(tree), tree, sums.astype(np.float32), last)


def token_values(qnet: Any, packs: Sequence[Any]) -> tuple[Tensor, ...]:
    """V, sum_i w_i and sum_i w_i q_i, (N,), of the packs' N tokens that carry the loss, each
    computed once. Then the place of each token of the batch in these, (B, T). A row is a pack,
    padded on the left."""
    inputs = tree_inputs(qnet.backbone, [p.tree for p in packs])
    sums = torch.zeros(2, *inputs["input_ids"].shape)
    for row, p in enumerate(packs):  # padded on the left, as the ids are
        sums[:, row, -len(p.tree) :] = torch.from_numpy(p.sums)
    trained = sums[0] > 0
    if qnet.backbone.device.type == "cpu":
        inputs["blocks"] = blocks_of(packs, trained.shape[1])
    v = qnet(trained.to(qnet.backbone.device), **inputs, use_cache=False).float()
    place = trained.flatten().cumsum(0).view_as(trained) - 1
    return v, *sums[:, trained].to(v.device), place


def packed_values(qnet: Any, packs: Sequence[Any], loss_on: str) -> Iterator[Tensor]:
    """V of the n tokens that carry the loss, (n,), for each pair of the packs."""
    v, *_, place = token_values(qnet, packs)
    for row, p in enumerate(packs):
        sees = p.tree.attention()
        for last in p.last:
            path = np.array([last]) if loss_on == "last" else sees[last].nonzero()[0]
            yield v[place[row, path - len(p.tree)]]


def packed_loss(qnet: Any, packs: Sequence[Any], rank_weight: float = 0.0) -> Tensor:
    """The sum of `family_loss` over all families of the packs, ()."""
    v, w, wq, place = token_values(qnet, packs)
    # The constant, sum_i w_i q_i^2 of each token, sums to sum_i q_i^2.
    constant = sum(sum(pair.q * pair.q for pair in p.pairs) for p in packs)
    loss = (w * v.square() - 2 * wq * v).sum() + constant
    if rank_weight:
        loss = loss + rank_weight * within_states(v, place, packs)
    return loss


def blocks_of(packs: Sequence[TreePack], width: int) -> tuple[list[Block], list[Block]]:
    """Blocks of all tokens of a batch of this width, and of those that carry the loss."""
    every: list[Block] = []
    trained: list[Block] = []
    for row, p in enumerate(packs, 1):
        sees = p.tree.attention()
        start = row * width - len(p.tree)
        every += blocks(sees, np.arange(len(p.tree)), start)
        trained += blocks(sees, np.flatnonzero(p.sums[0]), start)
    return every, trained


def within_states(v: Tensor, place: Tensor, packs: Sequence[TreePack]) -> Tensor:
    """sum_a (e(a) - mean(e))^2 over each family, e(a) the error at an action's last token, (). That
    token always carries the loss. v, place: of `token_values`."""
    last = torch.cat([place[row, p.last - len(p.tree)] for row, p in enumerate(packs)])
    q = torch.tensor([pair.q for p in packs for pair in p.pairs], device=v.device)
    e = v[last.to(v.device)] - q
    sizes = torch.tensor([len(family) for p in packs for family in p.families], device=v.device)
    family = torch.repeat_interleave(sizes)  # siblings stand side by side
    mean = torch.zeros_like(sizes, dtype=e.dtype).index_add(0, family, e) / sizes
    return (e - mean[family]).square().sum()
