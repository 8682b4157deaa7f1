"""A tree as a picture: its nodes by depth, the action above each edge, below it the node's q or its branch.

    python -m reporting.tree --run runs/demo --task 2761     # of q_labels.jsonl, or without it of trees.jsonl

    reads   RUN/q_labels.jsonl or RUN/trees.jsonl, or the file that --trees names
    writes  tree_TASK.svg beside it, which every browser opens

Blue is a high q, green a reward, red an end without one.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import fill, shorten
from typing import NotRequired

import matplotlib as mpl
from matplotlib.figure import Figure
from pydantic import FiniteFloat

from qlass import UserError
from qlass.messages import parse_action
from qlass.records import Node, Reward
from qlass.settings import parse, run_stage
from qlass.trees import children_of, read_trees
from reporting.figures import INK, STYLE, save

LETTERS = 13  # of an action, at most: what fits above an edge
GOOD, BAD = "#aceebb", "#ffcecb"


class TreeLine(Node):
    """A line of q_labels.jsonl or of trees.jsonl."""

    q: NotRequired[Reward]
    q_raw: NotRequired[FiniteFloat]


@dataclasses.dataclass(frozen=True)
class Config:
    run: Path = Path("runs/webshop")  # whose trees are read where none are named
    trees: Path | None = None  # q_labels.jsonl or trees.jsonl
    task: str = ""  # whose tree (the largest one)
    out: Path | None = None  # the picture (tree_TASK.svg beside the trees)


def short(action: str) -> str:
    """An action in LETTERS letters, cut at a blank if there is one."""
    cut = shorten(action, LETTERS, placeholder="…")
    return cut if cut != "…" else action[: LETTERS - 1] + "…"


def words_of(node: dict) -> str:
    return short(parse_action(node["action"]))


def label_of(node: dict) -> str:
    if "q" in node:
        return f"{node['q']:.2f}"
    return f"branch {node['branch']}" if node["source"] == "policy" else node["source"]


def colour_of(node: dict) -> str | tuple[float, ...]:
    if "q" in node:
        return mpl.colormaps["Blues"](0.55 * node["q"])  # dark numbers stay legible on it
    end = GOOD if node["reward"] else BAD
    return end if node["done"] else "white"


@mpl.rc_context(STYLE)
def draw(nodes: list[dict], words: Callable[[dict], str] = words_of) -> Figure:
    """The nodes of a tree, labelled or not: a column a depth, a row a leaf, a parent beside its children."""
    children = children_of(nodes)
    leaves = [place for place, below in enumerate(children) if not below]
    rows = {leaf: float(row) for row, leaf in enumerate(leaves)}
    for place in reversed(range(len(nodes))):  # a parent stands before its children
        if below := children[place]:
            rows[place] = (rows[below[0]] + rows[below[-1]]) / 2
    deepest = max(node["depth"] for node in nodes)
    figure = Figure(figsize=(1.2 * deepest + 1.2, 0.5 * len(leaves) + 0.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.2, deepest + 0.8), ylim=(len(leaves) - 0.5, -0.8))
    axes.axis("off")
    axes.set_title(fill(nodes[0].get("task", ""), 18 * (deepest + 1)), loc="left")
    for place, node in enumerate(nodes):
        x, y = node["depth"], rows[place]
        axes.scatter(x, y, s=250, color=[colour_of(node)], edgecolors=INK, zorder=2)
        axes.text(x, y, str(node["node_id"]), ha="center", va="center", weight="bold")
        if node["done"]:
            axes.text(x + 0.2, y, f"r = {node['reward']:.2g}", va="center", weight="bold")
        for child in children[place]:
            row = rows[child]
            axes.plot([x, x + 0.2, x + 1], [y, row, row], color=INK, linewidth=1, zorder=1)
            axes.text(x + 0.54, row - 0.07, words(nodes[child]), ha="center")
            axes.text(x + 0.54, row + 0.07, label_of(nodes[child]), ha="center", va="top", weight="bold")
    return figure


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    here = [config.run / name for name in ("q_labels.jsonl", "trees.jsonl")]
    path = config.trees or next((file for file in here if file.exists()), here[1])
    trees = {tree[0]["task_id"]: tree for tree in read_trees(path, TreeLine)}
    task = config.task or max(trees, key=lambda task: len(trees[task]))
    if task not in trees:
        raise UserError(f"{path}: no tree of task {task}; its tasks are {', '.join([*trees][:5])}, ...")
    out = config.out or path.with_name(f"tree_{re.sub('[^a-zA-Z0-9_.-]', '-', task)}.svg")
    save(draw(trees[task]), out)
    print(f"{out}: the {len(trees[task])} nodes of task {task}")


if __name__ == "__main__":
    run_stage(main)
