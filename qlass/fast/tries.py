"""Tries of valid actions: where their token sequences part, and their probabilities from the scores
there."""

from collections import Counter

import numpy as np

from qlass.fast.token_tree import TokenTree

# (a, t, token) of a token that has siblings: token t of action a, the first action that has it.
Branch = tuple[int, int, int]


class Trie:
    """The token sequences of the valid actions: where they part, and their probabilities from the
    scores there.

    tails[a]: the tokens of action a up to the last place where another action may follow instead.
    through[a]: the numbers of the branches that action a passes. forks[b]: the number of the place
    where branch b begins."""

    def __init__(self, texts: list[list[int]]) -> None:
        tree = TokenTree()
        paths = [tree.add(ids) for ids in texts]
        children = Counter(tree.parent)

        self.branches: list[Branch] = []
        self.tails: list[list[int]] = []
        self.through: list[list[int]] = []
        number: dict[int, int] = {}  # of the branch that is a token of the tree
        for action, (ids, path) in enumerate(zip(texts, paths, strict=True)):
            parting = [t for t, place in enumerate(path) if children[tree.parent[place]] > 1]
            for t in parting:
                if path[t] not in number:
                    number[path[t]] = len(self.branches)
                    self.branches.append((action, t, ids[t]))
            self.through.append([number[path[t]] for t in parting])
            self.tails.append(ids[: parting[-1]] if parting else [])
        self.forks = np.unique([tree.parent[place] for place in number], return_inverse=True)[1]

    def logprobs(self, scores: np.ndarray) -> np.ndarray:
        """log p of each action, from the score of each branch among its siblings."""
        scores = scores.astype(np.float64)
        top = np.full(self.forks.max() + 1, -np.inf)
        np.maximum.at(top, self.forks, scores)
        shifted = scores - top[self.forks]
        total = np.zeros(len(top))
        np.add.at(total, self.forks, np.exp(shifted))
        conditional = shifted - np.log(total)[self.forks]
        return np.array([conditional[branches].sum() for branches in self.through])
