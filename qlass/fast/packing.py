"""The (s, a) pairs of a tree, and how they go through QNet at the cost of their unique tokens (why: train_qnet.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qlass.chat import Chat
from qlass.fast.token_tree import TokenTree, batches, tree_inputs
from qlass.qnet import Pair, loss_tokens


@dataclasses.dataclass(frozen=True)
class PackedPairs:
    """Pairs as one token tree with, for each token, sum_i w_i and sum_i w_i q_i over the pairs through it.

    20 bytes a token, beside the pairs themselves.
    """

    members: tuple[Pair, ...]
    tree: TokenTree
    weight: np.ndarray
    weighted_q: np.ndarray
    constant: float  # the remainder of completing the square, so that losses are equal too
    ends: np.ndarray  # (pairs, 2): the last token of each pair's action, and how many the action has
    tokens: int  # of the pairs one by one

    @property
    def pairs(self) -> int:
        return len(self.members)

    @staticmethod
    def of(tree: TokenTree, members: list[Pair], paths: list[list[int]], prompts: list[int], on: str) -> PackedPairs:
        """From each pair's path through the tree, and how many of its tokens are the prompt's."""
        weight, weighted_q = np.zeros((2, len(tree)))
        for pair, path, n_prompt in zip(members, paths, prompts, strict=True):
            trained = path[loss_tokens(n_prompt, len(path), on)]
            weight[trained] += 1 / len(trained)  # w_i = 1 / n_i
            weighted_q[trained] += pair.q / len(trained)
        return PackedPairs(
            tuple(members), tree.frozen(), weight.astype(np.float32), weighted_q.astype(np.float32),
            constant=sum(p.q * p.q for p in members), tokens=sum(map(len, paths)),
            ends=np.array([(path[-1], len(path) - n) for path, n in zip(paths, prompts, strict=True)], np.int32),
        )  # fmt: skip


def pack_pairs(chat: Chat, pairs: Sequence[Pair], loss_on: str, max_tokens: int) -> Iterator[PackedPairs]:
    """A tree's pairs, depth first, in token trees of at most `max_tokens` each (or of one pair that is longer)."""
    tree, members, paths, prompts = TokenTree(), [], [], []
    for pair in pairs:
        prompt = chat.prompt(pair.state)
        action = chat.action(pair.action, pair.state.task, len(prompt))
        if members and len(tree) + tree.growth([*prompt, *action]) > max_tokens:
            yield PackedPairs.of(tree, members, paths, prompts, loss_on)
            tree, members, paths, prompts = TokenTree(), [], [], []
        members.append(pair)
        paths.append(tree.add([*prompt, *action]))
        prompts.append(len(prompt))
    if members:
        yield PackedPairs.of(tree, members, paths, prompts, loss_on)


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
    return (w * v.square() - 2 * wq * v).sum() + sum(p.constant for p in packs)


@torch.no_grad()
def packed_scores(qnet: Any, packs: Sequence[PackedPairs], budget: int) -> list[float]:
    """Q(s, a) of the packs' pairs in turn, as `QNet.score` reads it, each unique token computed once."""
    scores: list[list[float]] = [[] for _ in packs]
    for group in batches(packs, lambda p: len(p.tree), budget):
        inputs = tree_inputs(qnet.backbone, [packs[i].tree for i in group])
        v = qnet(**inputs, use_cache=False).float().cpu().numpy()
        for row, i in enumerate(group):
            own = v[row, -len(packs[i].tree) :]
            for end, n in packs[i].ends.tolist():
                scores[i].append(float(own[packs[i].tree.above(end)[:n] if qnet.readout == "mean" else end].mean()))
    return [score for some in scores for score in some]
