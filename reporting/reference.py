"""Figures of runs/reference_output, from its results.csv and its exploration tree: python -m reporting.reference"""

from __future__ import annotations

import csv
import itertools
import operator
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bellman import children_of
from qlass.chat import parse_action
from qlass.records import read_jsonl
from reporting.figures import COLOURS, GREY, INK, STYLE

FOLDER = Path(__file__).parents[1] / "runs" / "reference_output"
SETTINGS = {  # title of a panel: environment, split, agent, commit
    "WebShop": ("webshop", "test 400-830", "cloned", "208754c"),
    "half of the demonstrations": ("webshop", "test 400-830", "cloned, half of the demonstrations", "83d907e"),
    "real products": ("webshop_real", "test", "cloned", "83d907e"),
    "ALFWorld, unseen": ("alfworld", "valid_unseen", "cloned", "208754c"),
    "real games, unseen": ("alfworld_real", "valid_unseen", "cloned", "d871414"),
    "with thoughts, unseen": ("alfworld", "valid_unseen, first games", "cloned with thoughts", "d11bad8"),
    "FrozenLake": ("frozenlake", "lakes2", "cloned", "208754c"),
}
FIGURES = {
    "tokens": ("WebShop", "ALFWorld, unseen", "FrozenLake"),
    "webshop": ("WebShop", "half of the demonstrations", "real products"),
    "alfworld": ("ALFWorld, unseen", "real games, unseen", "with thoughts, unseen"),
}
LINES = {  # method, select: label, colour, marker and line
    ("greedy", ""): ("agent, greedy", GREY, "o-"),
    ("likeliest", ""): ("search by its log-probability", COLOURS["likeliest"], "^-"),
    ("qlass", ""): ("QLASS, M actions a step", COLOURS["qlass"], "s-"),
    ("best_of_n", "q"): ("best of N episodes by the same QNet", COLOURS["best_of_n"], "D-"),
    ("best_of_n", "oracle"): ("best of N by the true reward (oracle)", COLOURS["best_of_n"], "D:"),
}


def tokens(results: list[dict], settings: tuple[str, ...]) -> Figure:
    """Fig. 3: mean reward with its interval against all tokens a task, a panel a setting."""
    columns = operator.itemgetter("environment", "split", "agent", "commit", "seed", "method", "select")
    figure = Figure(figsize=(3.1 * len(settings), 3.5), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(settings)), settings, strict=True):
        for key, (label, color, style) in LINES.items():
            rows = [row for row in results if columns(row) == (*SETTINGS[title], "all", *key)]
            points = [[float(row[name]) for name in ("tokens", "reward", "low", "high")] for row in rows]
            x, y, low, high = np.array(sorted(points)).T
            look = {"fmt": style, "label": label, "color": color, "markersize": 5, "elinewidth": 0.7, "capsize": 2}
            axes.errorbar(x, y, [y - low, high - y], **look)
        axes.set(title=title, xlabel="all tokens a task")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("reward, 95 % interval")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def tree(nodes: list[dict]) -> Figure:
    """An exploration tree from left to right: q in each node, the action on the edge that leads to it."""
    children = children_of(nodes)
    heights = [0.0] * len(nodes)
    rows = itertools.count()

    def place(i: int) -> float:
        below = [place(child) for child in children[i]]
        heights[i] = sum(below) / len(below) if below else -float(next(rows))
        return heights[i]

    place(0)
    figure = Figure(figsize=(9.3, 0.65 * next(rows)), layout="constrained")
    axes = figure.add_subplot(frame_on=False, xticks=[], yticks=[], xmargin=0.07, ymargin=0.15)
    small = {"ha": "center", "va": "center", "fontsize": 9}
    for node, y in zip(nodes, heights, strict=True):
        x = node["depth"]
        for child in children[node["node_id"]]:
            axes.plot([x, x + 1], [y, heights[child]], color=GREY, zorder=1)
            words = parse_action(nodes[child]["action"])
            axes.text(x + 0.5, (y + heights[child]) / 2, words, bbox={"color": "white", "pad": 1}, **small)
        axes.scatter(x, y, s=480, color=mpl.colormaps["Blues"](0.9 * node["q"]), edgecolor=INK, zorder=2)
        axes.text(x, y, f"{node['q']:.2f}", color="white" if node["q"] > 0.6 else INK, **small)
        if node["done"]:
            axes.text(x + 0.3, y, f"reward {node['reward']:g}", va="center", fontsize=9)
    return figure


def main() -> None:
    results = list(csv.DictReader((FOLDER / "results.csv").read_text(encoding="utf-8").splitlines()))
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for name, settings in FIGURES.items():
            tokens(results, settings).savefig(FOLDER / f"{name}.png")
        tree(list(read_jsonl(FOLDER / "tree.jsonl"))).savefig(FOLDER / "tree.png")


if __name__ == "__main__":
    main()
