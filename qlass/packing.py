"""The (s, a) pairs of a tree, and how they go through QNet at the cost of their unique tokens.

The pairs of a tree share their beginnings, and the loss of Eq. (11) is a square: sum_i w_i (v - q_i)^2 is
(sum w_i) (v - mean q)^2 plus a constant. So a tree goes through the backbone once, each token with a weight and a mean
target, and gives the loss and the gradient of its pairs one by one (`train_qnet.pair_loss`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qlass.chat import Chat, State
from qlass.token_tree import TokenTree, packed, windows_of


@dataclasses.dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float


def pairs_of(tree: list[dict]) -> list[Pair]:
    """All (s, a, q) of a labelled tree, depth first."""
    states = {tree[0]["node_id"]: State.load(tree[0]["messages"], tree[0].get("task", ""))}
    pairs = []
    for node in tree[1:]:
        state = states[node["parent_id"]]
        states[node["node_id"]] = state.then(node["action"], node["observation"])
        pairs.append(Pair(state, node["action"], node["q"]))
    return pairs


def loss_tokens(prompt: Sequence[int], action: Sequence[int], loss_on: str) -> slice:
    """Which tokens of (s, a) carry the loss: all (Eq. 11), the action's, or its last."""
    n = len(prompt) + len(action)
    return slice({"all": 0, "action": len(prompt), "last": n - 1}[loss_on], n)


@dataclasses.dataclass
class PackedPairs:
    """Pairs as one token tree with, for each token, sum_i w_i and sum_i w_i q_i over the pairs through it."""

    tree: TokenTree = dataclasses.field(default_factory=TokenTree)
    weight: list[float] = dataclasses.field(default_factory=list)
    weighted_q: list[float] = dataclasses.field(default_factory=list)
    constant: float = 0.0  # what the squares' completion leaves over, so that losses are equal too
    pairs: int = 0
    tokens: int = 0  # of the pairs one by one

    def add(self, prompt: list[int], action: list[int], q: float, loss_on: str) -> None:
        path = self.tree.add([*prompt, *action])
        grow = len(self.tree) - len(self.weight)
        self.weight += [0.0] * grow
        self.weighted_q += [0.0] * grow
        trained = path[loss_tokens(prompt, action, loss_on)]
        for token in trained:  # w_i = 1 / n_i
            self.weight[token] += 1 / len(trained)
            self.weighted_q[token] += q / len(trained)
        self.constant += q * q
        self.pairs += 1
        self.tokens += len(path)


def pack(chat: Chat, pairs: Sequence[Pair], loss_on: str, max_tokens: int) -> Iterator[PackedPairs]:
    """A tree's pairs, depth first, in token trees of at most `max_tokens` each (or of one pair that is longer)."""
    current = PackedPairs()
    for pair in pairs:
        prompt, action = chat.prompt(pair.state), chat.action(pair.action, pair.state.task)
        if current.pairs and len(current.tree) + current.tree.growth([*prompt, *action]) > max_tokens:
            yield current
            current = PackedPairs()
        current.add(prompt, action, pair.q, loss_on)
    if current.pairs:
        yield current


def packed_loss(qnet: Any, packs: Sequence[PackedPairs]) -> torch.Tensor:
    """The sum of `pair_loss` over all pairs of the packs, each unique token computed once."""
    backbone = qnet.backbone
    inputs = packed([p.tree for p in packs], qnet.chat.tokenizer.pad_token_id, backbone.device, backbone.dtype,
                    windows=windows_of(backbone.config))  # fmt: skip
    weight, weighted_q = torch.zeros(2, *inputs["input_ids"].shape)
    for row, p in enumerate(packs):  # padded on the left, as the ids are
        weight[row, -len(p.tree) :] = torch.tensor(p.weight)
        weighted_q[row, -len(p.tree) :] = torch.tensor(p.weighted_q)
    at = weight > 0
    v = qnet(at=at.to(backbone.device), **inputs, use_cache=False).float()
    w, wq = weight[at].to(v.device), weighted_q[at].to(v.device)
    # sum_i w_i (v - q_i)^2 = W v^2 - 2 v sum_i w_i q_i + sum_i w_i q_i^2, the last of which sums to sum_i q_i^2
    return (w * v.square() - 2 * wq * v).sum() + sum(p.constant for p in packs)
