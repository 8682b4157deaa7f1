"""A tree as a picture: its nodes by depth, the action above each edge, below it the node's q or who played it.

python -m reporting.tree --run runs/demo --task 2033     # of q_labels.jsonl, or without it of trees.jsonl

reads   RUN/q_labels.jsonl or RUN/trees.jsonl, or the file that --trees names
writes  RUN/tree_TASK.svg, which every browser opens; blue is a high q, green a reward, red an end without one
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from textwrap import shorten

from qlass import UserError
from qlass.messages import parse_action
from qlass.outputs import atomic
from qlass.settings import parse, run_stage
from qlass.trees import read_trees
from reporting import svg

LETTERS = 14  # of an action, at most: what fits above an edge


@dataclasses.dataclass(frozen=True)
class Config:
    run: Path = Path("runs/webshop")  # whose trees are read where none are named
    trees: Path | None = None  # q_labels.jsonl or trees.jsonl
    task: str = ""  # whose tree (the first one in which a state has two actions)
    out: Path | None = None  # the picture (RUN/tree_TASK.svg)


def branches(tree: list[dict]) -> bool:
    parents = [node["parent_id"] for node in tree]
    return len(set(parents)) < len(parents)


def short(action: str) -> str:
    """An action in LETTERS letters, cut at a blank if there is one."""
    cut = shorten(action, LETTERS, placeholder="…")
    return cut if cut != "…" else action[: LETTERS - 1] + "…"


def picture(tree: list[dict]) -> str:
    """The SVG of a tree, labelled or not."""
    actions = ["", *(short(parse_action(node["action"])) for node in tree[1:])]
    if "q" in tree[0]:
        below = ["", *(f"{node['q']:.2f}" for node in tree[1:])]
        return svg.tree(tree, actions, below, [svg.shade(node["q"]) for node in tree])
    ends = [(svg.GOOD if node["reward"] else svg.BAD) if node["done"] else svg.WHITE for node in tree]
    return svg.tree(tree, actions, ["", *(node.get("source", "") for node in tree[1:])], ends)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    here = [config.run / name for name in ("q_labels.jsonl", "trees.jsonl")]
    path = config.trees or next((file for file in here if file.exists()), here[1])
    tasks: list[str] = []
    for tree in read_trees(path, ["depth", "done"]):
        tasks.append(str(tree[0]["task_id"]))
        if config.task == tasks[-1] or (not config.task and branches(tree)):
            break
    else:
        wanted = f"tree of task {config.task}" if config.task else "tree with a branch"
        raise UserError(f"{path}: no {wanted}; its tasks are {', '.join(tasks[:5])}, ...")
    out = config.out or path.with_name(f"tree_{re.sub('[^a-zA-Z0-9_.-]', '-', tasks[-1])}.svg")
    with atomic(out) as file:
        file.write(picture(tree))
    print(f"{out}: the {len(tree)} nodes of task {tasks[-1]}")


if __name__ == "__main__":
    run_stage(main)
