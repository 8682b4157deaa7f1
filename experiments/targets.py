"""bellman.py with other targets than Eq. (7), for value nets that train_qnet.py trains in the same way as QNet.

    python -m experiments.targets --run runs/frozenlake --target td --out runs/frozenlake/q_labels-td.jsonl
    python train_qnet.py --run runs/frozenlake --labels runs/frozenlake/q_labels-td.jsonl --out runs/frozenlake/qnet-td

    td            r + gamma times the mean of the children: where TD(0) settles on the tree's transitions, if each is
                  as frequent as its siblings
    mc            the discounted reward of the branch that made the node, on which a Monte-Carlo value net regresses
    avg, reward   the process rewards beside Eq. (7) in Section 5.2 of the paper (Fig. 4)
    imitation     1 on the demonstration's nodes, else 0: who is the demonstrator, and no reward
    placebo       Eq. (7)'s values, permuted among the children of a node by --seed: the order of siblings is chance

Eq. (7) has the maximum in place of td's mean.
"""

import dataclasses
from functools import partial
from typing import Literal

import bellman
from qlass.noise import uniforms
from qlass.settings import read_settings, run_stage
from qlass.trees import children_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(bellman.Config):
    # q: Eq. (7), as bellman.py; see above
    target: Literal["q", "td", "mc", "avg", "reward", "imitation", "placebo"] = "q"


def td(tree: list[dict], gamma: float) -> list[float]:
    q = [node["reward"] for node in tree]
    for i, children in reversed(list(enumerate(children_of(tree)))):
        if children:
            q[i] += gamma * sum(q[child] for child in children) / len(children)
    return q


def mc(tree: list[dict], gamma: float) -> list[float]:
    """A branch is a chain of new nodes: one child of each, at most, is of its own branch."""
    own = ends(tree)
    q = [own.get(i, 0.0) for i in range(len(tree))]
    for i, children in reversed(list(enumerate(children_of(tree)))):
        q[i] += gamma * sum(q[child] for child in children if tree[child]["branch"] == tree[i]["branch"])
    return q


def ends(tree: list[dict]) -> dict[int, float]:
    """What a branch earned at the node where it ended, be it that a demonstration goes on there."""
    goes_on = {(node["parent_id"], node["branch"]) for node in tree}
    rewards = {}
    for i, node in enumerate(tree):
        if node["done"] or ("cut" in node and (node["node_id"], node["branch"]) not in goes_on):
            rewards[i] = node.get("cut", node["reward"])
    return rewards


def avg(tree: list[dict], gamma: float) -> list[float]:
    """The mean of the final rewards below a node (Math-Shepherd's soft estimate)."""
    children = children_of(tree)
    total = [node.get("cut", node["reward"]) for node in tree]
    leaves = []
    for node, below in zip(tree, children, strict=True):
        leaves.append(int("cut" in node or not below))
    for i in reversed(range(len(tree))):  # from the leaves to the root
        for child in children[i]:
            leaves[i] += leaves[child]
        total[i] += sum(total[child] for child in children[i])
    return [rewards / n for rewards, n in zip(total, leaves, strict=True)]


def reward(tree: list[dict], gamma: float) -> list[float]:
    """The final reward of the branch that made the node; 0 if the demonstration stops early."""
    final = {tree[i]["branch"]: reward for i, reward in ends(tree).items()}
    rewards = [final.get(node["branch"], 0.0) for node in tree[1:]]
    lowest = min(rewards, default=0.0)  # the root's, which no branch made
    return [lowest, *rewards]


def imitation(tree: list[dict], gamma: float) -> list[float]:
    return [float(node["expert"]) for node in tree]


def placebo(tree: list[dict], gamma: float, seed: int = 0) -> list[float]:
    q = bellman.q_values(tree, gamma)
    permuted = list(q)
    for parent, children in enumerate(children_of(tree)):
        order = uniforms(len(children), seed, "placebo", tree[0]["task_id"], parent).argsort()
        for child, place in zip(children, order, strict=True):
            permuted[child] = q[children[place]]
    return permuted


TARGETS = {
    "q": bellman.q_values,
    "td": td,
    "mc": mc,
    "avg": avg,
    "reward": reward,
    "imitation": imitation,
    "placebo": placebo,
}


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    values = TARGETS[config.target]
    bellman.write_labels(config, partial(placebo, seed=config.seed) if values is placebo else values)


if __name__ == "__main__":
    run_stage(main)
