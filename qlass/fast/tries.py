"""Tries of valid actions: where their token sequences part, and their probabilities from the scores there."""

from __future__ import annotations

import numpy as np

from qlass.fast.token_tree import TokenTree


class Trie:
    """The token sequences of the valid actions: where they part, and their probabilities from the scores there.

    tails[a]: the tokens of action a up to the last place where another action may follow instead.
    branches: (a, t, token) of each token that has siblings; a is the first action whose token t it is.
    forks[b]: the number of the place where branch b begins. through[a]: the branches that action a passes.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        tree = TokenTree()
        paths = [tree.add(ids) for ids in texts]
        children = np.bincount(np.array(tree.parent) + 1)
        self.branches: list[tuple[int, int, int]] = []
        self.tails: list[list[int]] = []
        self.through: list[list[int]] = []
        number: dict[int, int] = {}
        for a, path in enumerate(paths):
            parting = [t for t, token in enumerate(path) if children[tree.parent[token] + 1] > 1]
            self.tails.append(texts[a][: parting[-1]] if parting else [])
            for t in parting:
                if path[t] not in number:
                    number[path[t]] = len(self.branches)
                    self.branches.append((a, t, texts[a][t]))
            self.through.append([number[path[t]] for t in parting])
        self.forks = np.unique([tree.parent[token] for token in number], return_inverse=True)[1]

    def logprobs(self, scores: np.ndarray) -> np.ndarray:
        """log p of each action, from the score of each branch among its siblings."""
        scores, at = scores.astype(np.float64), self.forks
        top = np.full(at.max() + 1, -np.inf)
        np.maximum.at(top, at, scores)
        total = np.zeros(len(top))
        np.add.at(total, at, np.exp(scores - top[at]))
        conditional = scores - top[at] - np.log(total[at])
        return np.array([conditional[through].sum() for through in self.through])
