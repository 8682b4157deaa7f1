"""The report as one HTML page: page.html filled with figures, tables and the trees' data.

Text of an environment may hold anything, `</script>` too. So whatever comes from a file passes `escape` on its way into
the markup, or travels as JSON without a "<" and is put on the page as text; and the page forbids itself the network.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from qlass import UserError
from qlass.trees import read_trees
from reporting import tables
from reporting.results import Group

FIGURE = "Reward against cost (Fig. 3 of the paper)"
CAPTION = (
    "Higher at the same cost is better: where QLASS lies above the search by log-probability its QNet helps, and where "
    "it lies above best-of-N it helps to choose within an episode; the points of a line are in the order of its legend."
)
FIELDS = ("observation", "reward", "done", "source", "branch", "expert", "q", "q_raw")  # of a node, for the viewer


def render(sections: Iterable[str], trees: str, inputs: Iterable[Path]) -> str:
    """Fill page.html: each {{name}} is replaced once, so that a {{name}} inside a text stays as it is."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    items = (f"<li><code>{escape(str(path))}</code></li>" for path in inputs)
    parts = {"sections": "".join(sections), "trees": trees, "inputs": "".join(items)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def sections(groups: Sequence[Group], pictures: dict[str, str], warnings: Iterable[str] = ()) -> list[str]:
    """Warnings, the figure, the table of results, the differences, what is folded."""
    (title, differences), *others = ((title, table(rows_of(groups))) for title, rows_of in tables.TABLES.items())
    protocols = "".join(map(note, tables.protocols(groups)))
    folds = [fold(*other) for other in [*others, ("Protocol: what the numbers mean", protocols)]]
    return [
        section("warnings", "Warnings", *map(note, warnings)),
        section("tokens", FIGURE, *(figure(*picture) for picture in pictures.items())),
        section("results", "Results", table(tables.results_table(groups)), *map(note, tables.notes(groups)), *folds),
        section("differences", title, differences and note(tables.DIFFERENCES_NOTE) + differences),
    ]


def section(name: str, title: str, *parts: str) -> str:
    body = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def figure(env: str, svg: str) -> str:
    caption = f"<figcaption><b>{escape(env)}.</b> {escape(CAPTION)}</figcaption>"
    return f'<figure><div role="img" aria-label="{escape(FIGURE)}, {escape(env)}">{svg}</div>{caption}</figure>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def fold(title: str, body: str) -> str:
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>' if body else ""


def table(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    if rows["environment"].nunique() == 1:  # the figures say it: narrow screens need the place
        rows = rows.drop(columns="environment")
    rows = rows.map(
        lambda text: text.replace(", ", ",\u00a0").replace(" [", "\u00a0[")
    )  # an interval stays on one line
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="wide" tabindex="0">{rows.to_html(index=False, border=0)}</div>'


def tree_data(path: Path | None, limit: int = 60) -> str:
    """The trees for the page's viewer as JSON: at most `limit`, evenly spread over the file.

    {"total", "first", "trees": [{"task", "text", "nodes": [{"parent": its place or -1, "action", "thought", ...}]}]}; a
    node comes after its parent. first: the place of the tree that is shown first, in which the agent has ended the most
    branches.
    """
    if path is None:
        return "null"
    trees = list(map(viewer_tree, read_trees(path)))
    if not trees:
        raise UserError(f"{path}: holds no trees; build_trees.py writes them")
    shown = trees[:: max(1, math.ceil(len(trees) / limit))]
    ends = [agent_ends(tree["nodes"]) for tree in shown]
    data = {"total": len(trees), "first": ends.index(max(ends)), "trees": shown}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def agent_ends(nodes: list[dict]) -> int:
    """The number of branches of a tree that the agent has ended, the expert's not counted."""
    inner = {node["parent"] for node in nodes}
    return sum(i not in inner and node["source"] != "expert" for i, node in enumerate(nodes))


def viewer_tree(tree: list[dict]) -> dict:
    places = {node["node_id"]: i for i, node in enumerate(tree)}
    nodes = []
    for node in tree:
        text = node["action"] or ""
        thought, _, action = text.rpartition("Action:")
        shown = {"thought": thought.strip().removeprefix("Thought:").strip(), "action": action.strip()}
        shown["parent"] = places.get(node["parent_id"], -1)
        nodes.append(shown | {name: node.get(name) for name in FIELDS})
    root = tree[0]
    return {"task": root["task_id"], "text": root.get("task") or root["observation"], "nodes": nodes}
