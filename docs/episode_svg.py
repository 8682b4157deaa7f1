"""An episode as an SVG picture: a card for each step, its candidates with their Q-values as bars, one of them taken."""

from __future__ import annotations

from collections.abc import Callable
from xml.sax.saxutils import escape

INK, GREY, TAKEN, REST = "#1f2328", "#59636e", "#2f6fd6", "#c8d7f0"
CARDS, WIDTH, ROW, LABEL, BAR = 4, 186, 22, 46, 84  # cards in a line; pixels


def text(x: float, y: float, words: str, fill: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-weight="{weight}">{escape(words)}</text>'


def card(x: float, y: float, title: str, step: dict, word: Callable[[str], str]) -> list[str]:
    """The candidates of a step, the one of the highest Q first."""
    parts = [text(x, y, title, GREY)]
    for row, candidate in enumerate(sorted(step["candidates"], key=lambda c: -c["q"]), 1):
        taken, level = candidate["action"] == step["action"], y + ROW * row
        length = BAR * min(max(candidate["q"], 0.01), 1.0)
        fill, weight = (TAKEN, "bold") if taken else (REST, "normal")
        parts.append(text(x, level, word(candidate["action"]), weight=weight))
        parts.append(f'<rect x="{x + LABEL}" y="{level - 11}" width="{length:.1f}" height="13" rx="2" fill="{fill}"/>')
        parts.append(text(x + LABEL + BAR + 6, level, f"{candidate['q']:.2f}", weight=weight))
    return parts


def draw(steps: list[dict], titles: list[str], word: Callable[[str], str], end: str) -> str:
    """The steps of an episode in lines of cards on a white card, which reads on a light and on a dark page."""
    tall = ROW * (2 + max(len(step["candidates"]) for step in steps))
    parts = []
    for i, (step, title) in enumerate(zip(steps, titles, strict=True)):
        parts += card(16 + WIDTH * (i % CARDS), 28 + tall * (i // CARDS), title, step, word)
    width, height = 16 + WIDTH * CARDS, 36 + tall * -(-len(steps) // CARDS)
    parts.append(text(16, height - 14, end, weight="bold"))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" font-size="14">'
    return "\n".join([start, '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>', *parts, "</svg>\n"])
