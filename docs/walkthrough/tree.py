"""A tree as an SVG figure, from left to right: a column a depth, a row a leaf, parents midway beside their children."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from xml.sax.saxutils import escape

from bellman import children_of

RADIUS, INK, FAINT = 11, "#1f2328", "#6e7781"


@dataclasses.dataclass(frozen=True)
class Look:
    """How a node is drawn: `inside` its circle, `above` and `below` the edge that leads to it, `beside` a leaf."""

    inside: str = ""
    above: str = ""
    below: str = ""
    beside: str = ""
    fill: str = "#ffffff"
    strong: bool = False  # drawn in ink, else fainter


def layout(tree: list[dict]) -> list[tuple[int, float]]:
    """(column, row) of each node: leaves take one row after the other, a parent the middle of its children's."""
    children, rows, free = children_of(tree), [0.0] * len(tree), 0

    def place(i: int) -> None:
        nonlocal free
        for child in children[i]:
            place(child)
        if children[i]:
            rows[i] = (rows[children[i][0]] + rows[children[i][-1]]) / 2
        else:
            rows[i], free = float(free), free + 1

    place(0)
    return [(node["depth"], row) for node, row in zip(tree, rows, strict=True)]


def text(x: float, y: float, words: str, color: str, anchor: str = "middle", size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    halo = ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if anchor != "middle" else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}"{weight}{halo}>'
        f"{escape(words)}</text>"
    )


def luminance(color: str) -> float:
    return sum(w * int(color[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) / 255


def svg(
    tree: list[dict], looks: Sequence[Look | None], title: str, legend: Sequence[tuple[str, str]], dx: int, dy: int
) -> str:
    """The nodes that have a look, at the places that they have in the whole tree. `legend`: (colour, words)."""
    places = layout(tree)
    position = {node["node_id"]: i for i, node in enumerate(tree)}
    width = 2 * RADIUS + 20 + dx * max(column for column, _ in places) + 56
    height = 34 + dy * (1 + max(row for _, row in places)) + 20
    at = [(RADIUS + 10 + dx * column, 34 + dy * (row + 0.5)) for column, row in places]
    edges, nodes = [], []
    for i, (node, look) in enumerate(zip(tree, looks, strict=True)):
        if look is None:
            continue
        x, y = at[i]
        ink = INK if look.strong else FAINT
        if node["parent_id"] is not None:
            fx, fy = at[position[node["parent_id"]]]
            bend = fx + (x - fx) * 0.3
            edges.append(
                f'<path d="M{fx:g} {fy:g} C{bend:g} {fy:g} {fx:g} {y:g} {fx + (x - fx) * 0.35:g} {y:g} L{x:g} {y:g}" '
                f'fill="none" stroke="{ink}" stroke-width="{2 if look.strong else 1}"/>'
            )
        nodes.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS}" fill="{look.fill}" stroke="{ink}" '
            f'stroke-width="{2 if look.strong else 1}"/>'
        )
        inner = "#ffffff" if luminance(look.fill) < 0.5 else ink
        nodes.append(text(x, y + 4, look.inside, inner, size=11, bold=look.strong))
        nodes.append(text(x - RADIUS - 4, y - 5, look.above, ink, "end"))
        nodes.append(text(x - RADIUS - 4, y + 14, look.below, ink, "end", bold=True))
        nodes.append(text(x + RADIUS + 5, y + 4, look.beside, ink, "start", bold=look.strong))
    key, x = [], 10.0
    for color, words in legend:
        key.append(f'<circle cx="{x + 6:g}" cy="16" r="6" fill="{color}" stroke="{FAINT}"/>')
        key.append(text(x + 17, 20, words, INK, "start"))
        x += 34 + 6.6 * len(words)
    width = max(width, x)
    body = "\n".join(part for part in [*key, *edges, *nodes] if "></text>" not in part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def shade(q: float) -> str:
    """White for 0, deep blue for 1."""
    return "#" + "".join(f"{round(255 + (deep - 255) * min(1.0, max(0.0, q))):02x}" for deep in (26, 83, 150))
