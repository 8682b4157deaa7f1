"""bellman.py with two more targets, for value nets that train_qnet.py trains in the same way as QNet.

    python -m experiments.qval.targets --run runs/frozenlake --target td --out runs/frozenlake/q_labels-td.jsonl
    python train_qnet.py --run runs/frozenlake --labels runs/frozenlake/q_labels-td.jsonl --out runs/frozenlake/qnet-td

td   r + gamma times the mean of the children: where TD(0) settles on the tree's transitions, if each is as frequent
     as its siblings. Eq. (7) has the maximum in place of the mean
mc   the discounted reward of the branch that made the node: the sample that a Monte-Carlo value net regresses on
"""

import dataclasses
from typing import Literal

import bellman
from bellman import TARGETS
from qlass.settings import read, run_stage
from qlass.trees import children_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(bellman.Config):
    target: Literal["td", "mc"] = "td"  # type: ignore[assignment]  # see above


def td(tree: list[dict], gamma: float) -> list[float]:
    q = [node["reward"] for node in tree]
    for i, children in reversed(list(enumerate(children_of(tree)))):
        if children:
            q[i] += gamma * sum(q[child] for child in children) / len(children)
    return q


def mc(tree: list[dict], gamma: float) -> list[float]:
    """A branch is a chain of new nodes: one child of each, at most, is of its own branch."""
    q = [node["reward"] * node["done"] for node in tree]
    for i, children in reversed(list(enumerate(children_of(tree)))):
        q[i] += gamma * sum(q[child] for child in children if tree[child]["branch"] == tree[i]["branch"])
    return q


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    TARGETS.update(td=td, mc=mc)
    bellman.write_labels(config)


if __name__ == "__main__":
    run_stage(main)
