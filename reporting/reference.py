"""Figures of runs/reference_output, from its results.csv: python -m reporting.reference"""

from __future__ import annotations

import csv
import operator
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, INK, STYLE, curve
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
    "ALFWorld's real games": ("alfworld_real", "valid_unseen, first 30", "SmolLM2-135M", "a95484b"),
    "WebShop's real products": ("webshop_real", "test, first 30", "SmolLM2-135M", "ed5ba0a"),
    "FrozenLake, new starts": ("frozenlake", "lakes, 49 to 118", "SmolLM2-135M, head alone", "a51ce67"),
}
LINES = {  # method, select: label, colour, marker and line
    ("greedy", ""): ("agent, greedy", GREY, "o-"),
    ("likeliest", ""): ("search by its log-probability", COLOURS["likeliest"], "^-"),
    ("qlass", ""): ("QLASS, M actions a step", COLOURS["qlass"], "s-"),
    ("best_of_n", "q"): ("best of N episodes by the same QNet", COLOURS["best_of_n"], "D-"),
    ("best_of_n", "oracle"): ("best of N by the true reward (oracle)", COLOURS["best_of_n"], "D:"),
}


SEARCHES = LINES | {  # beside them, on a page of their own
    ("lookahead", "q"): ("look-ahead by QNet", "#009e73", "v-"),
    ("beam", "q"): ("beam", "#cc79a7", "P-"),
    ("mcts", "q"): ("MCTS, S simulations a step", "#56b4e9", "X-"),
    ("particles", "q"): ("particles", INK, "<-"),
}
PRETRAINED = LINES | {
    ("sample", ""): ("agent, one sample", GREY, "D-"),
    ("random", ""): ("a random one of M actions", "#cc79a7", "v-"),
}
FIGURES = {  # file: lines, and the titles of its panels
    "tokens": (LINES, ("WebShop", "ALFWorld, unseen", "FrozenLake")),
    "webshop": (LINES, ("WebShop", "half of the demonstrations", "real products")),
    "alfworld": (LINES, ("ALFWorld, unseen", "real games, unseen", "with thoughts, unseen")),
    "smollm2": (PRETRAINED, ("ALFWorld's real games", "WebShop's real products", "FrozenLake, new starts")),
}
BESIDE_STEPS = {  # file: lines, and environment, split, agent, commit
    "searches_webshop": (SEARCHES, ("webshop", "test 400-499", "cloned, small", "ed5ba0a")),
    "searches_alfworld": (SEARCHES, ("alfworld", "valid_unseen, first 100", "cloned, small", "ce66e57")),
    "searches_frozenlake": (SEARCHES, ("frozenlake", "lakes", "cloned, small", "ece9359")),
}


def panel(axes: Axes, results: list[dict], setting: tuple[str, ...], lines: dict, cost: str) -> None:
    """Mean reward with its interval against a cost a task, a line a method."""
    columns = operator.itemgetter("environment", "split", "agent", "commit", "seed", "select")
    for (method, select), (label, color, style) in lines.items():
        rows = [row for row in results if columns(row) == (*setting, "all", select)]
        rows = [row for row in rows if row["method"].partition(":")[0] == method]
        rows.sort(key=lambda row: float(row[cost]))
        rewards = [Estimate(*(float(row[name]) for name in ("reward", "low", "high")), n=0) for row in rows]
        if rows:
            look = {"color": color, "markersize": 5, "markerfacecolor": "none" if select == "oracle" else color}
            curve(axes, [float(row[cost]) for row in rows], rewards, fmt=style, label=label, **look)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)


def tokens(results: list[dict], lines: dict, titles: tuple[str, ...]) -> Figure:
    """Fig. 3: mean reward against all tokens a task, a panel a setting."""
    figure = Figure(figsize=(3.1 * len(titles), 3.5), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles)), titles, strict=True):
        panel(axes, results, SETTINGS[title], lines, "tokens")
        axes.set(title=title, xlabel="all tokens a task")
        axes.locator_params(axis="x", nbins=5)
    return with_legend(figure)


def beside_steps(results: list[dict], lines: dict, setting: tuple[str, ...]) -> Figure:
    """Mean reward against tokens, and against environment steps."""
    figure = Figure(figsize=(9.3, 4.2), layout="constrained")
    costs = {"tokens": "all tokens a task", "env_steps": "environment steps a task"}
    for axes, (cost, label) in zip(figure.subplots(1, 2, sharey=True), costs.items(), strict=True):
        panel(axes, results, setting, lines, cost)
        axes.set(xlabel=label)
    figure.axes[0].set_ylim(top=min(1.05, figure.axes[0].get_ylim()[1]))
    return with_legend(figure)


def with_legend(figure: Figure) -> Figure:
    figure.axes[0].set_ylabel("reward, 95 % interval")
    lines = {}  # by label: not every panel has them all
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main() -> None:
    results = list(csv.DictReader((FOLDER / "results.csv").read_text(encoding="utf-8").splitlines()))
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for name, (lines, titles) in FIGURES.items():
            tokens(results, lines, titles).savefig(FOLDER / f"{name}.png")
        for name, (lines, setting) in BESIDE_STEPS.items():
            beside_steps(results, lines, setting).savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
