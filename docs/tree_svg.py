"""A tree as an SVG picture, from left to right: a column a depth, a row a leaf, a parent midway beside its children."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, RADIUS, COLUMN, ROW = "#1f2328", 13, 126, 48


def layout(tree: list[dict]) -> dict[int, tuple[float, float]]:
    """The place (x, y) of each node by its number, in pixels."""
    below = {node["node_id"]: [n["node_id"] for n in tree if n["parent_id"] == node["node_id"]] for node in tree}
    rows = {leaf: float(row) for row, leaf in enumerate(n for n in below if not below[n])}
    for node, children in reversed(below.items()):  # a parent stands before its children
        if children:
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
    return {n["node_id"]: (24 + COLUMN * n["depth"], 28 + ROW * rows[n["node_id"]]) for n in tree}


def text(x: float, y: float, words: str, weight: str = "normal") -> str:
    place = f'x="{x:g}" y="{y:g}" fill="{INK}" text-anchor="middle" font-weight="{weight}"'
    return f"<text {place}>{escape(words)}</text>"


def draw(tree: list[dict], above: list[str], below: list[str], fills: list[str]) -> str:
    """The nodes in their colours, the words `above` and `below` the edge that leads to each, and the leaves' rewards,
    on a white card, which reads on a light and on a dark page."""
    places, edges, nodes = layout(tree), [], []
    for node, over, under, fill in zip(tree, above, below, fills, strict=True):
        x, y = places[node["node_id"]]
        if node["parent_id"] is not None:
            left, top = places[node["parent_id"]]
            bend, turn = left + 0.12 * COLUMN, left + 0.22 * COLUMN
            curve = f"M{left:g} {top:g} C{bend:g} {top:g} {bend:g} {y:g} {turn:g} {y:g} L{x:g} {y:g}"
            edges.append(f'<path d="{curve}" fill="none" stroke="{INK}" stroke-width="1.5"/>')
        nodes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS}" fill="{fill}" stroke="{INK}"/>')
        nodes.append(text(x, y + 6, str(node["node_id"]), "bold"))
        nodes += [text(x - 0.48 * COLUMN, y - 5, over), text(x - 0.48 * COLUMN, y + 19, under, "bold")]
        if node["done"]:
            nodes.append(text(x + 54, y + 6, f"r = {node['reward']:.2g}", "bold"))
    width, height = (max(place[i] for place in places.values()) + margin for i, margin in ((0, 100), (1, 32)))
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" font-size="16">'
    return "\n".join([start, '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>', *edges, *nodes, "</svg>\n"])
