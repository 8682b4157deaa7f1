"""The (s, a) pairs of a tree, and how they go through QNet at the cost of their unique tokens (why: train_qnet.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qlass.chat import Chat
from qlass.fast.token_tree import TokenTree, tree_inputs


@dataclasses.dataclass(frozen=True)
class PackedPairs:
    """Pairs as one token tree with, for each token, sum_i w_i and sum_i w_i q_i over the pairs through it.

    20 bytes a token, beside the pairs themselves.
    """

    pairs: tuple[Any, ...]  # train_qnet.Pair
    tree: TokenTree
    weight: np.ndarray
    weighted_q: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.tree)


def pack_pairs(
    chat: Chat, pairs: Sequence[Any], loss_tokens: Callable[[int, int], slice], max_tokens: int
) -> Iterator[PackedPairs]:
    """A tree's pairs, depth first, in token trees of at most `max_tokens` each (or of one pair that is longer).

    loss_tokens(n_prompt, n): which of the n tokens of (s, a) carry the loss.
    """
    tree, members, weights = TokenTree(), [], []

    def pack() -> PackedPairs:
        weight, weighted_q = np.zeros((2, len(tree)))
        for pair, trained in zip(members, weights, strict=True):
            weight[trained] += 1 / len(trained)  # w_i = 1 / n_i
            weighted_q[trained] += pair.q / len(trained)
        return PackedPairs(tuple(members), tree.frozen(), weight.astype(np.float32), weighted_q.astype(np.float32))

    for pair in pairs:
        prompt = chat.prompt(pair.state)
        ids = [*prompt, *chat.action(pair.action, pair.state.task, len(prompt))]
        if members and len(tree) + tree.growth(ids) > max_tokens:
            yield pack()
            tree, members, weights = TokenTree(), [], []
        members.append(pair)
        weights.append(tree.add(ids)[loss_tokens(len(prompt), len(ids))])
    if members:
        yield pack()


def packed_loss(qnet: Any, packs: Sequence[PackedPairs]) -> torch.Tensor:
    """The sum of `pair_loss` over all pairs of the packs, each unique token computed once."""
    inputs = tree_inputs(qnet.backbone, [p.tree for p in packs])
    weight, weighted_q = torch.zeros(2, *inputs["input_ids"].shape)
    for row, p in enumerate(packs):  # padded on the left, as the ids are
        weight[row, -len(p.tree) :] = torch.from_numpy(p.weight)
        weighted_q[row, -len(p.tree) :] = torch.from_numpy(p.weighted_q)
    at = weight > 0
    v = qnet(at=at.to(qnet.backbone.device), **inputs, use_cache=False).float()
    w, wq = weight[at].to(v.device), weighted_q[at].to(v.device)
    # sum_i w_i (v - q_i)^2 = W v^2 - 2 v sum_i w_i q_i + sum_i w_i q_i^2, the last of which sums to sum_i q_i^2
    return (w * v.square() - 2 * wq * v).sum() + sum(sum(pair.q * pair.q for pair in p.pairs) for p in packs)
