"""Pictures as SVG, on a white card, which reads on a light and on a dark page: a tree, an episode, a lake's map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any
from xml.sax.saxutils import escape

from qlass.trees import children_of

INK = "#1f2328"
GREY = "#59636e"
TAKEN = "#2f6fd6"  # the bar of the candidate that was taken
REST = "#c8d7f0"  # the bars of the others
APART = "#b35900"  # a rival's way
GOOD = "#aceebb"
BAD = "#ffcecb"
WHITE = "#ffffff"

# In pixels:
RADIUS = 13  # of a node
COLUMN = 126  # of a tree
ROW = 48
LINE = 21  # of an episode
BAR = 100  # of Q = 1
LETTER = 7.4  # about
CELL = 26  # of a map


# ----------------------------------------------------------------------------------------------------------- shapes


def shade(q: float) -> str:
    """White for 0, blue for 1."""
    red, green, blue = (round(255 - depth * q) for depth in (145, 87, 25))
    return f"rgb({red},{green},{blue})"


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """An SVG element; "_" in a name stands for "-"."""
    look = ""
    for name, value in attributes.items():
        shown = f"{value:g}" if isinstance(value, float) else value
        look += f' {name.replace("_", "-")}="{shown}"'
    return f"<{tag}{look}>{content}</{tag}>"


def text(x: float, y: float, words: str, bold: bool = False, fill: str = INK, middle: bool = False) -> str:
    weight = "bold" if bold else "normal"
    anchor = "middle" if middle else "start"
    look = {"fill": fill, "font_weight": weight, "text_anchor": anchor}
    return element("text", escape(words), x=x, y=y, **look)


def rect(x: float, y: float, width: float, height: float, **look: Any) -> str:
    return element("rect", x=x, y=y, width=width, height=height, **look)


def picture(width: float, height: float, size: int, parts: list[str]) -> str:
    card = rect(0, 0, width, height, rx=8, fill=WHITE)
    content = "\n".join(["", card, *parts, ""])
    look = {
        "xmlns": "http://www.w3.org/2000/svg",
        "width": width,
        "height": height,
        "viewBox": f"0 0 {width:g} {height:g}",
        "font_family": "Helvetica, Arial, sans-serif",
        "font_size": size,
    }
    return element("svg", content, **look) + "\n"


def lake(x: float, y: float, rows: Sequence[str]) -> list[str]:
    """The map of a lake, its cells with their names: holes red, the goal green."""
    colours = {"H": BAD, "G": GOOD}
    parts = []
    for i, row in enumerate(rows):
        for j, kind in enumerate(row):
            left = x + CELL * j
            top = y + CELL * i
            fill = colours.get(kind, WHITE)
            parts.append(rect(left, top, CELL, CELL, fill=fill, stroke=INK))
            parts.append(text(left + CELL / 2, top + 18, f"{i}{j}", middle=True))
    return parts


# ----------------------------------------------------------------------------------------------------------- a tree


def layout(nodes: list[dict]) -> dict[int, tuple[float, float]]:
    """The place (x, y) of each node by its number: a column a depth, a row a leaf, a parent beside its children."""
    children = children_of(nodes)
    leaves = [place for place, below in enumerate(children) if not below]
    rows = {leaf: float(row) for row, leaf in enumerate(leaves)}
    for place in reversed(range(len(nodes))):  # a parent stands before its children
        if below := children[place]:
            rows[place] = (rows[below[0]] + rows[below[-1]]) / 2
    places = {}
    for place, node in enumerate(nodes):
        x = 24 + COLUMN * node["depth"]
        y = 28 + ROW * rows[place]
        places[node["node_id"]] = x, y
    return places


def tree(nodes: list[dict], above: list[str], below: list[str], fills: list[str], rows: Sequence[str] = ()) -> str:
    """Nodes in their colours, words above and below the edge that leads to each, the leaves' rewards; a map's rows."""
    places = layout(nodes)
    edges = []
    marks = []
    for node, over, under, fill in zip(nodes, above, below, fills, strict=True):
        x, y = places[node["node_id"]]
        middle = x - 0.48 * COLUMN
        if node["parent_id"] is not None:
            left, top = places[node["parent_id"]]
            bend = left + COLUMN / 5
            line = f"M{left:g} {top:g} L{bend:g} {y:g} H{x:g}"
            edges.append(element("path", d=line, fill="none", stroke=INK, stroke_width=1.5))
            marks.append(text(middle, y - 5, over, middle=True))
            marks.append(text(middle, y + 19, under, bold=True, middle=True))
        marks.append(element("circle", cx=x, cy=y, r=RADIUS, fill=fill, stroke=INK))
        marks.append(text(x, y + 6, str(node["node_id"]), bold=True, middle=True))
        if node["done"]:
            reward = f"r = {node['reward']:.2g}"
            marks.append(text(x + 54, y + 6, reward, bold=True, middle=True))
    width = max(x for x, _ in places.values()) + 100
    height = max(y for _, y in places.values()) + 32
    parts = [*edges, *marks, *lake(width, 16, rows)]
    return picture(width + (CELL + 4) * len(rows), height, 16, parts)


# ------------------------------------------------------------------------------------------------------- an episode


def move(action: str) -> str:
    """An action without its thought."""
    return action.rpartition("Action: ")[2]


def ending(line: dict) -> str:
    return f"Reward {line['reward']:.2g} after {len(line['steps'])} steps"


def candidates(step: dict, x: float, bar: float, y: float, words: Callable[[str], str]) -> list[str]:
    """A row a candidate, the highest Q first, the one taken dark.

    x: where its words begin; bar: where its bar begins, which is as long as Q.
    """
    parts = []
    for candidate in sorted(step["candidates"], key=lambda candidate: -candidate["q"]):
        taken = candidate["action"] == step["action"]
        q = candidate["q"]
        length = BAR * min(max(q, 0.01), 1.0)
        fill = TAKEN if taken else REST
        parts.append(text(x, y, words(candidate["action"]), taken))
        parts.append(rect(bar, y - 11, length, 13, rx=2, fill=fill))
        parts.append(text(bar + BAR + 6, y, f"{q:.2f}", taken))
        y += LINE
    return parts


def episode(
    line: dict,
    pages: Sequence[str],
    rows: Sequence[str] = (),
    words: Callable[[str], str] = move,
    rival: dict | None = None,
    letters: tuple[int, int] = (14, 8),
) -> str:
    """A line of results, a row per step: the page, then the candidates. Right of it a map's rows, or another result of
    the task: its step of the same number, coloured from where the ways part. letters: of a page's row and of an action.
    """
    wide, long = letters
    choices = 60 + LETTER * wide
    bar = choices + LETTER * long
    right = bar + BAR + 72
    ours = [words(step["action"]) for step in line["steps"]]
    theirs = [words(step["action"]) for step in rival["steps"]] if rival else []
    parts = lake(right, 16, rows)
    title = f"QLASS, M = {line['M']}: candidates and their Q"
    parts.append(text(16, 28, f"Task: {line['task']}", bold=True))
    parts.append(text(16, 62, title, bold=True))
    y = 92
    steps = zip(line["steps"], pages, strict=True)
    for n, (step, page) in enumerate(steps):
        choice = len(step["candidates"]) > 1
        parts.append(text(16, y, f"{n + 1}", fill=INK if choice else GREY))
        if n < len(theirs):
            same = theirs[: n + 1] == ours[: n + 1]
            colour = GREY if same else APART
            parts.append(text(right, y, f"{n + 1}  {theirs[n]}", fill=colour))
        observation = [f"{ours[n]} (all {line['M']} samples)"]
        if choice:
            observation = wrap(page, wide)
            parts += candidates(step, choices, bar, y, words)
        for place, row in enumerate(observation):
            parts.append(text(40, y + LINE * place, row, fill=GREY))
        high = max(len(observation), len(step["candidates"]))
        y += LINE * high + LINE // 3
    parts.append(text(16, y + 6, ending(line), bold=True))
    if rival:
        parts.append(text(right, 62, "The agent alone, greedy", bold=True))
        parts.append(text(right, y + 6, ending(rival), bold=True, fill=APART))
    beside = 240 if rival else (CELL + 4) * len(rows)
    height = y + 24
    return picture(right + beside, height, 14, parts)
