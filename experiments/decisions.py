"""log pi(a | s) of many decisions, with its gradient; each token of a tree is computed once.

Trajectories with a common past share their beginnings, so their decisions go through the model as token trees.
A decision consists of *choices*. Among the valid actions the action is one choice, sampled by its conditional
probability. In free text each token is a choice, including the token that ends the turn.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qlass.chat import Chat
from qlass.fast.token_tree import TokenTree, tree_inputs
from qlass.fast.tries import Trie
from qlass.messages import State


def mixed_precision(model: Any) -> torch.autocast:
    """bf16 arithmetic on float32 weights, on a GPU. Few CPUs have it, and a training is to be the same on all."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


@dataclasses.dataclass(frozen=True)
class Decision:
    """An action in a state, one of `valid`, or free text where that is empty: of the tokens `ids` that were sampled."""

    state: State
    action: str
    valid: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def forced(self) -> bool:
        """The only valid action, so no choice: it would dilute every mean."""
        return len(set(self.valid)) == 1

    def tokens(self, chat: Chat) -> list[int]:
        return list(self.ids) or chat.action_tokens(self.action, self.state.task)


class PackedDecisions:
    """Decisions as one token tree, and where in it their probabilities are read: a place (choice, before, id) is a
    token that may follow the token `before` of the tree."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self.owner: list[int] = []  # of each choice: the number of its decision
        self.ends: list[int] = []  # of each choice: the last token of its prompt
        self.tokens: list[tuple[int, int, int]] = []  # places of free text
        self.branches: list[tuple[int, int, int]] = []  # places where valid actions part
        self.options: list[tuple[int, bool]] = []  # of each valid action: its choice, and whether it was taken
        self.ways: list[tuple[int, int]] = []  # (option, branch on the way to it)

    def add(self, number: int, decision: Decision, chat: Chat) -> None:
        if decision.forced:
            return
        last = self.tree.add(chat.prompt(decision.state))[-1]
        choices = 1
        if decision.valid:
            self._add_valid(decision, last, chat)
        else:
            ids = decision.tokens(chat)
            before = [last, *self.tree.add(ids[:-1], last)]
            for i, token in enumerate(ids):
                self.tokens.append((len(self.owner) + i, before[i], token))
            choices = len(ids)
        self.owner += [number] * choices
        self.ends += [last] * choices

    def _add_valid(self, decision: Decision, last: int, chat: Chat) -> None:
        """The valid actions behind the token `last` of the tree."""
        choice = len(self.owner)
        texts = list(dict.fromkeys(decision.valid))
        trie = Trie([chat.action_tokens(text, decision.state.task) for text in texts])
        before = [[last, *self.tree.add(tail, last)] for tail in trie.tails]
        for text, through in zip(texts, trie.through, strict=True):
            option = len(self.options)
            self.ways += [(option, len(self.branches) + branch) for branch in through]
            self.options.append((choice, text == decision.action))
        for action, depth, token in trie.branches:
            self.branches.append((choice, before[action][depth], token))

    def logprobs(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi of each choice as it was made, and the entropy of its distribution; (C,) and (C,), float32."""
        places = torch.tensor([*self.tokens, *self.branches], device=model.device)
        columns, row = places[:, 1].unique(return_inverse=True)
        with mixed_precision(model):
            inputs = tree_inputs(model, [self.tree])
            logits = model(**inputs, use_cache=False, logits_to_keep=columns).logits[0].float()  # (P, V)

        n = len(self.tokens)  # branches stand behind
        choice, _, ids = places.T
        logp, entropy = logits.new_zeros(2, len(self.owner))

        if self.tokens:
            every = logits[row[:n]].log_softmax(-1)
            taken = every.gather(-1, ids[:n, None])[:, 0]
            logp = logp.index_add(0, choice[:n], taken)
            entropy = entropy.index_add(0, choice[:n], -(every.exp() * every).sum(-1))

        if self.options:
            branches = places[n:]
            option_logp = self._option_logprobs(logits[row[n:], ids[n:]], branches[:, :2])
            of, was_taken = torch.tensor(self.options, device=model.device).T
            logp = logp.index_add(0, of, was_taken * option_logp)
            entropy = entropy.index_add(0, of, -option_logp.exp() * option_logp)
        return logp, entropy

    def _option_logprobs(self, score: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """log pi of each valid action: the product, on the way to it, of each branch's probability among those of its
        fork. score: the logit of each branch, (B,). place: its choice and the token before it, (B, 2)."""
        forks, fork = place.unique(dim=0, return_inverse=True)
        top = score.new_full((len(forks),), -torch.inf)
        top = top.scatter_reduce(0, fork, score.detach(), "amax")

        total = score.new_zeros(len(forks))
        total = total.index_add(0, fork, (score - top[fork]).exp())
        conditional = score - (top + total.log())[fork]
        way, branch = torch.tensor(self.ways, device=score.device).T
        return score.new_zeros(len(self.options)).index_add(0, way, conditional[branch])


def pack_decisions(chat: Chat, decisions: Sequence[Decision], room: int) -> Iterator[PackedDecisions]:
    """Token trees in the order given, each of its first decision and about `room` tokens more; up to four times as many
    where a decision shares most of its prompt, which a new tree would compute again."""
    pack = PackedDecisions()
    first = 0
    for number, decision in enumerate(decisions):
        ids = chat.prompt(decision.state) + decision.tokens(chat)
        growth = pack.tree.growth(ids)
        most = room if 2 * growth > len(ids) else 4 * room
        if pack.owner and len(pack.tree) + growth - first > most:
            yield pack
            pack = PackedDecisions()
        if not pack.owner:
            first = len(ids)
        pack.add(number, decision, chat)
    if pack.owner:
        yield pack
