"""Other targets of a QNet than Eq. (7): process rewards of Section 5.2 (Fig. 4), by --target.

They discount nothing. A tree is the list of its nodes, parents before children; a target gives one
value per node.
"""

from __future__ import annotations

from qlass.trees import children_of


def average_rewards(tree: list[dict], gamma: float) -> list[float]:
    """The mean of the final rewards below a node (Math-Shepherd's soft estimate, Section 5.2)."""
    children = children_of(tree)
    total = []
    leaves = []
    for node, below in zip(tree, children, strict=True):
        total.append(node.get("cut", node["reward"]))
        leaves.append(int("cut" in node or not below))
    for i in reversed(range(len(tree))):
        total[i] += sum(total[child] for child in children[i])
        leaves[i] += sum(leaves[child] for child in children[i])
    return [rewards / n for rewards, n in zip(total, leaves, strict=True)]


def branch_rewards(tree: list[dict], gamma: float) -> list[float]:
    """The final reward of the branch that made the node; 0 if the demonstration stops early."""
    final = {}
    goes_on = {(node["parent_id"], node["branch"]) for node in tree}
    for node in tree:
        cut = "cut" in node and (node["node_id"], node["branch"]) not in goes_on
        if node["done"] or cut:
            final[node["branch"]] = node.get("cut", node["reward"])
    rewards = [final.get(node["branch"], 0.0) for node in tree[1:]]
    return [min(rewards, default=0.0), *rewards]  # no branch made the root: the lowest


TARGETS = {"avg": average_rewards, "reward": branch_rewards}
