"""The report as one HTML page: page.html filled with figures, tables and the trees' data.

Text of an environment may hold anything, `</script>` too. So whatever comes from a file passes `escape` on its way into
the markup, or travels as JSON without a "<" and is put on the page as text; and the page forbids itself the network.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from qlass import records
from qlass.messages import parse_action
from qlass.trees import read_trees
from reporting import figures, tables
from reporting.result_lines import Result
from reporting.results import Group, choices, tables_of, worth
from reporting.tree import TreeLine

CAPTION = (
    "Higher at the same cost is better: where QLASS lies above the search by log-probability its QNet helps, and where "
    "it lies above best-of-N it helps to choose within an episode. The points of a line are in the order of its legend."
)
EPISODE = (
    "Task {task}: of the {n} tasks that QLASS played, one that earns most and of these the one with the most choices. "
    "Shown are its steps whose samples were several actions, with their Q; the action taken is dark."
)
SHOWN = ("Summary", "Results", "What QNet adds", "An episode", "Training")
FOLDED = ("Rules and oracles", "Settings", "Protocol")


def render(sections: Iterable[str], trees: str, inputs: Iterable[Path]) -> str:
    """Fill page.html: each {{name}} is replaced once, so that a {{name}} inside a text stays as it is."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    items = (f"<li><code>{escape(str(path))}</code></li>" for path in inputs)
    parts = {"sections": "".join(sections), "trees": trees, "inputs": "".join(items)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def sections(
    groups: Sequence[Group], runs: Sequence[Path], inputs: Sequence[Path], remarks: Sequence[str]
) -> Iterator[str]:
    """The summary with a figure for each environment, tables, an episode, training, and what is folded."""
    parts = {}
    for title, lines, rows in tables.sections(groups, remarks):
        parts[title] = table(rows) + "".join(map(note, lines))
    for rows in tables_of(groups):
        parts["Summary"] += image(figures.tokens(rows), f"{rows[0].condition.env}. {CAPTION}")
    parts["An episode"] = episode(inputs)
    curves = f"Each update, and the means of epochs, of {', '.join(map(str, runs))}."
    parts["Training"] = image(figures.losses(runs), curves)
    parts["Settings"] = ""
    for file in [run / "settings.toml" for run in runs]:
        if file.exists():
            text = file.read_text(encoding="utf-8")
            parts["Settings"] += f"<p>{escape(str(file))}</p><pre>{escape(text)}</pre>"
    yield from (section(title, parts[title]) for title in SHOWN)
    yield from (fold(title, parts[title]) for title in FOLDED)


def episode(inputs: Iterable[Path]) -> str:
    """A picture of one search of QLASS; "" if none of the files has one that had a choice."""
    lines = [line for path in inputs for line in records.read(path, Result) if line["method"] == "qlass"]
    best = max(lines, key=worth, default={})
    if not choices(best):
        return ""
    n = len({line["task_id"] for line in lines})
    return image(figures.episode(best), EPISODE.format(task=best["task_id"], n=n))


def section(title: str, body: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def image(picture: Figure | None, caption: str) -> str:
    if picture is None:
        return ""
    content = b64encode(figures.content(picture, "svg")).decode()  # within the page, which needs no other file
    shown = f'<img src="data:image/svg+xml;base64,{content}" alt="{escape(caption)}">'
    return f"<figure>{shown}<figcaption>{escape(caption)}</figcaption></figure>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def fold(title: str, body: str) -> str:
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>' if body else ""


def table(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    if rows["environment"].nunique() == 1:  # the figures say it: narrow screens need the place
        rows = rows.drop(columns="environment")
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="wide" tabindex="0">{rows.to_html(index=False, border=0)}</div>'


def thought_and_action(node: dict) -> dict:
    """A node with its action as it is executed, and what stands before it as its thought."""
    text = (node["action"] or "").strip()
    action = parse_action(text)
    thought = text.removesuffix(action).strip().removesuffix("Action:").removeprefix("Thought:")
    return node | {"thought": thought.strip(), "action": action}


def tree_data(path: Path | None) -> str:
    """The trees for the page's viewer as JSON, {"total", "trees"}: at most 60, evenly spread over the file."""
    if path is None:
        return "null"
    trees = list(read_trees(path, TreeLine))
    sample = trees[:: max(1, math.ceil(len(trees) / 60))]
    data = {"total": len(trees), "trees": [list(map(thought_and_action, tree)) for tree in sample]}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
