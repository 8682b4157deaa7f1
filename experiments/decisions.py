"""log pi(a | s) of many decisions, with its gradient; each unique token is computed once.

Trajectories with a common past share their beginnings, so their decisions go through the model as token trees.
A decision consists of *choices*. Among the valid actions the action is one choice, sampled by its conditional
probability. In free text each token is a choice, including the token that ends the turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qlass.chat import Chat, State
from qlass.fast.token_tree import TokenTree, tree_inputs
from qlass.fast.tries import Trie
from qlass.models import mixed_precision


@dataclasses.dataclass(frozen=True)
class Decision:
    """An action in a state, one of `valid`, or free text where that is empty: of the tokens `ids` that were sampled."""

    state: State
    action: str
    valid: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()

    def tokens(self, chat: Chat) -> list[int]:
        return list(self.ids) or chat.action(self.action, self.state.task)


@dataclasses.dataclass
class PackedDecisions:
    """Decisions as one token tree, and where in it their probabilities are read. An index a token, fork, option, ..."""

    tree: TokenTree = dataclasses.field(default_factory=TokenTree)
    owner: list[int] = dataclasses.field(default_factory=list)  # of each choice: the number of its decision
    free: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # (choice, token before it, its id)
    edges: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # (fork, token before it, its id)
    ways: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (option, edge on the way to it)
    options: list[tuple[int, bool]] = dataclasses.field(default_factory=list)  # (choice, is it the one taken?)
    forks: int = 0

    def add(self, number: int, decision: Decision, chat: Chat) -> None:
        state, texts = decision.state, list(dict.fromkeys(decision.valid))
        if len(texts) == 1:  # forced, so no choice: it would dilute every mean
            return
        last = self.tree.add(chat.prompt(state))[-1]
        if not decision.valid:
            ids = decision.tokens(chat)
            before = [last, *self.tree.add(ids[:-1], last)]
            self.free += [(len(self.owner) + i, *where) for i, where in enumerate(zip(before, ids, strict=True))]
            self.owner += [number] * len(ids)
            return
        trie = Trie([chat.action(text, state.task) for text in texts])
        before = [[last, *self.tree.add(tail, last)] for tail in trie.tails]
        for text, through in zip(texts, trie.through, strict=True):
            self.ways += [(len(self.options), len(self.edges) + branch) for branch in through]
            self.options.append((len(self.owner), text == decision.action))
        forks = trie.forks.tolist()
        self.edges += [(self.forks + f, before[a][t], i) for f, (a, t, i) in zip(forks, trie.branches, strict=True)]
        self.forks += len(set(forks))
        self.owner.append(number)

    def logprobs(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi of each choice as it was made, and the entropy of its distribution; (C,) and (C,), float32."""
        device = model.device
        at = sorted({token for _, token, _ in (*self.free, *self.edges)})
        row = {token: i for i, token in enumerate(at)}
        inputs = tree_inputs(model, [self.tree])
        where = torch.tensor(at, dtype=torch.long, device=device)
        with mixed_precision(model):
            logits = model(**inputs, use_cache=False, logits_to_keep=where).logits[0].float()  # (P, V)

        def columns(rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.long, device=device).reshape(-1, width).T

        logp, entropy = logits.new_zeros(2, len(self.owner))
        if self.free:
            choice, before, ids = columns([(c, row[token], i) for c, token, i in self.free], 3)
            full = logits[before].log_softmax(-1)
            logp = logp.index_add(0, choice, full.gather(-1, ids[:, None])[:, 0])
            entropy = entropy.index_add(0, choice, -(full.exp() * full).sum(-1))
        if self.options:
            # Of each token its probability among its siblings; of each option the product on the way to it.
            fork, before, ids = columns([(f, row[token], i) for f, token, i in self.edges], 3)
            score = logits[before, ids]
            top = score.new_full((self.forks,), -torch.inf).scatter_reduce(0, fork, score.detach(), "amax")
            total = score.new_zeros(self.forks).index_add(0, fork, (score - top[fork]).exp())
            conditional = score - (top + total.log())[fork]
            option, edge = columns(self.ways, 2)
            option_logp = score.new_zeros(len(self.options)).index_add(0, option, conditional[edge])
            choice, taken = columns(self.options, 2)
            logp = logp.index_add(0, choice, taken * option_logp)
            entropy = entropy.index_add(0, choice, -option_logp.exp() * option_logp)
        return logp, entropy


def pack_decisions(chat: Chat, decisions: Sequence[Decision], room: int) -> Iterator[PackedDecisions]:
    """Token trees in the order given, each of its first decision and about `room` tokens more.

    Up to four times as many, where a decision shares most of its prompt: in a new tree that would be computed again.
    """
    current, first = PackedDecisions(), 0
    for number, decision in enumerate(decisions):
        ids = chat.prompt(decision.state) + decision.tokens(chat)
        growth = current.tree.growth(ids)
        most = room if 2 * growth > len(ids) else 4 * room
        if current.owner and len(current.tree) + growth - first > most:
            yield current
            current = PackedDecisions()
        if not current.owner:
            first = len(ids)
        current.add(number, decision, chat)
    if current.owner:
        yield current
