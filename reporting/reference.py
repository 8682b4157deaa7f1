"""Figures of runs/reference_output, from its results.csv: python -m reporting.reference"""

from __future__ import annotations

import csv
import operator
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, STYLE, curve
from reporting.stats import Estimate

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
            rows.sort(key=lambda row: float(row["tokens"]))
            rewards = [Estimate(*(float(row[name]) for name in ("reward", "low", "high")), n=0) for row in rows]
            x = [float(row["tokens"]) for row in rows]
            curve(axes, x, rewards, fmt=style, label=label, color=color, markersize=5)
        axes.set(title=title, xlabel="all tokens a task")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("reward, 95 % interval")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main() -> None:
    results = list(csv.DictReader((FOLDER / "results.csv").read_text(encoding="utf-8").splitlines()))
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for name, settings in FIGURES.items():
            tokens(results, settings).savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
