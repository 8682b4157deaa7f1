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
from qlass.messages import parse_action
from qlass.trees import read_trees
from reporting import tables
from reporting.figures import Pictures
from reporting.results import Group

TITLES = {
    "tokens": "Reward against tokens and environment steps (Fig. 3)",
    "labels": "Labels compared (Fig. 4)",
    "frontier": "Train or search: reward against all tokens",
}
BRANCHES = 3  # that the agent has ended in the tree that is shown first, if there is such a tree
FIELDS = ("observation", "reward", "done", "source", "branch", "expert", "q", "q_raw")  # of a node, for the viewer


def render(sections: Iterable[str], trees: str, inputs: Iterable[Path]) -> str:
    """Fill page.html: each {{name}} is replaced once, so that a {{name}} inside a text stays as it is."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    items = (f"<li><code>{escape(str(path))}</code></li>" for path in inputs)
    parts = {"sections": "".join(sections), "trees": trees, "inputs": "".join(items)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def sections(groups: Sequence[Group], pictures: Pictures, warnings: Iterable[str] = ()) -> list[str]:
    """Warnings, the first figure, the tables, the other figures."""
    rows = tables.headline(groups)
    *folds, last = [fold(title, table(rows_of(groups))) for title, rows_of in tables.TABLES.items()]
    notes = tables.notes(rows)
    protocols = fold("Protocol: what the numbers mean", "".join(map(note, tables.protocols(groups))))
    results = [table(tables.headline_table(rows)), *map(note, notes), protocols, *folds]
    differences = [table(tables.differences_table(rows)), note(tables.DIFFERENCES_NOTE), last]
    parts = [section("results", "Results", *results)]
    parts += [section("differences", "Paired differences in reward", *differences)]
    for name, title in TITLES.items():
        drawings = [figure(title, env, *svgs) for env, svgs in pictures[name].items()]
        parts.insert(0 if name == "tokens" else len(parts), section(name, title, *drawings))
    return [section("warnings", "Warnings", *map(note, warnings)), *parts]


def section(name: str, title: str, *parts: str) -> str:
    body = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def figure(title: str, env: str, wide: str, narrow: str) -> str:
    """A figure in two widths, of which the page shows the one that fits the screen."""
    caption = f"<figcaption>{escape(env)}</figcaption>"
    drawings = f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'
    return f'<figure role="img" aria-label="{escape(f"{title}, {env}")}">{drawings}{caption}</figure>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def fold(title: str, body: str) -> str:
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>' if body else ""


def table(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    if rows["environment"].nunique() == 1:  # the figures say it: narrow screens need the place
        rows = rows.drop(columns="environment")
    rows = rows.map(lambda text: text.replace(", ", ",\u00a0"))  # an interval stays on one line
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="wide" tabindex="0">{rows.to_html(index=False, border=0)}</div>'


def tree_data(path: Path | None, limit: int = 60) -> str:
    """The trees for the page's viewer as JSON: at most `limit`, evenly spread over the file.

    {"total", "first", "trees": [{"task", "text", "nodes": [{"parent": its place or -1, "action", "thought", ...}]}]}; a
    node comes after its parent. first: the place of the tree that is shown first, in which the agent has ended several
    branches.
    """
    if path is None:
        return "null"
    trees = list(map(viewer_tree, read_trees(path)))
    if not trees:
        raise UserError(f"{path}: holds no trees; build_trees.py writes them")
    shown = trees[:: max(1, math.ceil(len(trees) / limit))]
    ends = [agent_ends(tree["nodes"]) for tree in shown]
    first = next((i for i, n in enumerate(ends) if n >= BRANCHES), ends.index(max(ends)))
    data = {"total": len(trees), "first": first, "trees": shown}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def agent_ends(nodes: list[dict]) -> int:
    """How many branches of a tree the agent has ended, the expert's not counted."""
    inner = {node["parent"] for node in nodes}
    return sum(i not in inner and node["source"] != "expert" for i, node in enumerate(nodes))


def viewer_tree(tree: list[dict]) -> dict:
    places = {node["node_id"]: i for i, node in enumerate(tree)}
    nodes = []
    for node in tree:
        text = node["action"] or ""
        action = parse_action(text)
        thought = text.strip().removesuffix(action).rstrip().removesuffix("Action:")
        shown = {"thought": thought.removeprefix("Thought:").strip(), "action": action}
        shown["parent"] = places.get(node["parent_id"], -1)
        nodes.append(shown | {name: node.get(name) for name in FIELDS})
    root = tree[0]
    return {"task": str(root["task_id"]), "text": root.get("task") or root["observation"], "nodes": nodes}
