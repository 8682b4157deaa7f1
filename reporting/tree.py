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
from qlass.files import atomic
from qlass.messages import parse_action
from qlass.settings import parse, run_stage
from qlass.trees import read_trees
from reporting import svg

LETTERS = 12  # of an action, at most: what fits above an edge


@dataclasses.dataclass(frozen=True)
class Config:
    run: Path = Path("runs/webshop")  # whose trees are read where none are named
    trees: Path | None = None  # q_labels.jsonl or trees.jsonl
    task: str = ""  # whose tree (the first one)
    out: Path | None = None  # the picture (RUN/tree_TASK.svg)


def short(action: str) -> str:
    """An action in LETTERS letters, cut at a blank if there is one."""
    cut = shorten(action, LETTERS, placeholder="…")
    return cut if cut != "…" else action[: LETTERS - 1] + "…"


def picture(tree: list[dict]) -> str:
    """The SVG of a tree, labelled or not."""
    above, below, fills = [""], [""], []
    for node in tree:
        end = svg.GOOD if node["reward"] else svg.BAD
        unlabelled = end if node["done"] else svg.WHITE
        fills.append(svg.shade(node["q"]) if "q" in node else unlabelled)
    for node in tree[1:]:
        above.append(short(parse_action(node["action"])))
        below.append(f"{node['q']:.2f}" if "q" in node else node["source"])
    return svg.tree(tree, above, below, fills)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    here = [config.run / name for name in ("q_labels.jsonl", "trees.jsonl")]
    path = config.trees or next((file for file in here if file.exists()), here[1])
    trees = {tree[0]["task_id"]: tree for tree in read_trees(path)}
    task = config.task or next(iter(trees), "")
    if task not in trees:
        raise UserError(f"{path}: no tree of task {task}; its tasks are {', '.join([*trees][:5])}, ...")
    out = config.out or path.with_name(f"tree_{re.sub('[^a-zA-Z0-9_.-]', '-', task)}.svg")
    with atomic(out) as draft:
        draft.write_text(picture(trees[task]), encoding="utf-8")
    print(f"{out}: the {len(trees[task])} nodes of task {task}")


if __name__ == "__main__":
    run_stage(main)
