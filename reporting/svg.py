"""Pictures as SVG, on a white card, which reads on a light and on a dark page: a tree, an episode, a lake's map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten, wrap
from xml.sax.saxutils import escape

INK, GREY, TAKEN, REST, APART = "#1f2328", "#59636e", "#2f6fd6", "#c8d7f0", "#b35900"
GOOD, BAD, WHITE = "#aceebb", "#ffcecb", "#ffffff"
RADIUS, COLUMN, ROW = 13, 126, 48  # of a tree, in pixels
LINE, BAR, CELL = 21, 84, 26  # of an episode and of a map


def shade(q: float) -> str:
    """White for 0, blue for 1."""
    return "#{:02x}{:02x}{:02x}".format(*(round(255 - depth * q) for depth in (145, 87, 25)))


def text(x: float, y: float, words: str, weight: str = "normal", fill: str = INK, anchor: str = "start") -> str:
    look = f'fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {look}/>'


def picture(width: float, height: float, size: int, parts: list[str]) -> str:
    shape = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    font = f'font-family="Helvetica, Arial, sans-serif" font-size="{size}"'
    card = rect(0, 0, width, height, f'rx="8" fill="{WHITE}"')
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {shape} {font}>', card, *parts, "</svg>\n"])


def lake(x: float, y: float, rows: Sequence[str]) -> list[str]:
    """The map of a lake, its cells with their names: holes red, the goal green."""
    parts = []
    for i, row in enumerate(rows):
        for j, kind in enumerate(row):
            left, top, fill = x + CELL * j, y + CELL * i, {"H": BAD, "G": GOOD}.get(kind, WHITE)
            parts.append(rect(left, top, CELL, CELL, f'fill="{fill}" stroke="{INK}"'))
            parts.append(text(left + CELL / 2, top + 18, f"{i}{j}", anchor="middle"))
    return parts


def layout(nodes: list[dict]) -> dict[int, tuple[float, float]]:
    """The place (x, y) of each node by its number: a column a depth, a row a leaf, a parent beside its children."""
    below = {node["node_id"]: [n["node_id"] for n in nodes if n["parent_id"] == node["node_id"]] for node in nodes}
    rows = {leaf: float(row) for row, leaf in enumerate(n for n in below if not below[n])}
    for node, children in reversed(below.items()):  # a parent stands before its children
        if children:
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
    return {n["node_id"]: (24 + COLUMN * n["depth"], 28 + ROW * rows[n["node_id"]]) for n in nodes}


def tree(nodes: list[dict], above: list[str], below: list[str], fills: list[str], rows: Sequence[str] = ()) -> str:
    """Nodes in their colours, words above and below the edge that leads to each, the leaves' rewards; a map's rows."""
    places, edges, marks = layout(nodes), [], []
    for node, over, under, fill in zip(nodes, above, below, fills, strict=True):
        x, y = places[node["node_id"]]
        if node["parent_id"] is not None:
            left, top = places[node["parent_id"]]
            bend, turn = left + 0.12 * COLUMN, left + 0.22 * COLUMN
            curve = f"M{left:g} {top:g} C{bend:g} {top:g} {bend:g} {y:g} {turn:g} {y:g} L{x:g} {y:g}"
            edges.append(f'<path d="{curve}" fill="none" stroke="{INK}" stroke-width="1.5"/>')
        marks.append(f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS}" fill="{fill}" stroke="{INK}"/>')
        marks.append(text(x, y + 6, str(node["node_id"]), "bold", anchor="middle"))
        marks.append(text(x - 0.48 * COLUMN, y - 5, over, anchor="middle"))
        marks.append(text(x - 0.48 * COLUMN, y + 19, under, "bold", anchor="middle"))
        if node["done"]:
            marks.append(text(x + 54, y + 6, f"r = {node['reward']:.2g}", "bold", anchor="middle"))
    width, height = (max(place[i] for place in places.values()) + margin for i, margin in ((0, 100), (1, 32)))
    return picture(width + (CELL + 4) * len(rows), height, 16, [*edges, *marks, *lake(width, 16, rows)])


def episode(line: dict, pages: list[str], columns: int = 4, width: int = 186, rows: Sequence[str] = ()) -> str:
    """Of a line of results a card per step: the page, then the candidates, the highest Q first, the one taken dark."""
    parts, y = [text(16, 28, f"Task: {line['task']}", "bold"), *lake(16 + width * columns, 16, rows)], 58
    cards = list(enumerate(zip(line["steps"], pages, strict=True)))
    for first in range(0, len(cards), columns):
        below = []
        for n, (step, page) in cards[first : first + columns]:
            x, level = 16 + width * (n - first), y
            for words in wrap(f"step {n + 1}: {page}", width // 7):
                parts.append(text(x, level, words, fill=GREY))
                level += LINE
            for candidate in sorted(step["candidates"], key=lambda c: -c["q"]):
                weight, fill = ("bold", TAKEN) if candidate["action"] == step["action"] else ("normal", REST)
                action = shorten(candidate["action"].rpartition("Action: ")[2], width // 13, placeholder=" …")
                length, right = BAR * min(max(candidate["q"], 0.01), 1.0), x + width - 56
                parts.append(text(x, level, action, weight))
                parts.append(rect(right - BAR, level - 11, length, 13, f'rx="2" fill="{fill}"'))
                parts.append(text(right + 6, level, f"{candidate['q']:.2f}", weight))
                level += LINE
            below.append(level + LINE)
        y = max(below)
    parts.append(text(16, y, f"Reward {line['reward']:g} after {len(cards)} steps", "bold"))
    return picture(16 + width * columns + (CELL + 4) * len(rows), y + 14, 14, parts)


def versus(line: dict, rival: dict, pages: list[str], words: Callable[[str], str], titles: Sequence[str]) -> str:
    """Two results of one task, a row per step.

    Left a step of `line`: where there was a choice the page and the candidates, the highest Q first, the one taken
    dark. Right the rival's step of the same number, coloured from where the ways part.
    """
    split, width = 640, 956
    parts = [text(16, 28, f"Task: {line['task']}", "bold"), text(16, 62, titles[0], "bold")]
    parts.append(text(split, 62, titles[1], "bold"))
    theirs = [words(step["action"]) for step in rival["steps"]]
    y, same = 92, True
    for n, (step, page) in enumerate(zip(line["steps"], pages, strict=True)):
        ranked = sorted(step["candidates"], key=lambda candidate: -candidate["q"])
        taken = words(step["action"])
        if n < len(theirs):
            same = same and theirs[n] == taken
            colour = GREY if same else APART
            parts += [text(split, y, f"{n + 1}", fill=colour), text(split + 24, y, theirs[n], fill=colour)]
        elif n == len(theirs):
            parts.append(text(split, y, ending(rival), "bold", APART))
        parts.append(text(16, y, f"{n + 1}", fill=GREY if len(ranked) == 1 else INK))
        if len(ranked) == 1:
            parts.append(text(40, y, f"{taken} (all {line['M']} samples)", fill=GREY))
        else:
            for row in wrap(page, 84):
                parts.append(text(40, y, row, fill=GREY))
                y += LINE
        for candidate in ranked if len(ranked) > 1 else ():
            weight, fill = ("bold", TAKEN) if candidate["action"] == step["action"] else ("normal", REST)
            parts.append(text(40, y, words(candidate["action"]), weight))
            length = BAR * min(max(candidate["q"], 0.01), 1.0)
            parts.append(rect(split - 240, y - 11, 2 * length, 13, f'rx="2" fill="{fill}"'))
            parts.append(text(split - 62, y, f"{candidate['q']:.2f}", weight))
            y += LINE
        y += LINE if len(ranked) == 1 else LINE // 2
    parts.append(text(16, y + 6, ending(line), "bold"))
    parts.append(f'<path d="M{split - 16} 48 V{y + 6}" stroke="{REST}"/>')
    return picture(width, y + 24, 14, parts)


def ending(line: dict) -> str:
    return f"Reward {line['reward']:.2g} after {len(line['steps'])} steps"
