"""Figures of runs/reference_output, from its results.csv: python -m reporting.reference"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, INK, STYLE, curve
from reporting.stats import Estimate

FOLDER = Path(__file__).parents[1] / "runs" / "reference_output"
LINES = {  # method, select: label, colour, marker and line
    ("greedy", ""): ("agent, greedy", GREY, "o-"),
    ("likeliest", ""): ("search by its log-probability", COLOURS["likeliest"], "^-"),
    ("qlass", ""): ("QLASS, M actions a step", COLOURS["qlass"], "s-"),
    ("best_of_n", "q"): ("best of N episodes by the same QNet", COLOURS["best_of_n"], "D-"),
    ("best_of_n", "oracle"): ("best of N by the true reward (oracle)", COLOURS["best_of_n"], "D:"),
}
SEARCHES = LINES | {
    ("lookahead", "q"): ("look-ahead by QNet", "#009e73", "v-"),
    ("beam", "q"): ("beam", "#cc79a7", "P-"),
    ("mcts", "q"): ("MCTS, S simulations a step", "#56b4e9", "X-"),
    ("particles", "q"): ("particles", INK, "<-"),
}
PRETRAINED = LINES | {
    ("sample", ""): ("agent, one sample", GREY, "D-"),
    ("random", ""): ("a random one of M actions", "#cc79a7", "v-"),
}
OLD, NEW = ", QNet by Eq. 11", ", QNet with rank weight"
RANKING = {  # and what is added to the agent's name
    ("greedy", "", ""): ("agent, greedy", GREY, "o-"),
    ("likeliest", "", ""): ("search by its log-probability", COLOURS["likeliest"], "^-"),
    ("qlass", "", OLD): ("QLASS by the QNet of Eq. 11", "#cc79a7", "s:"),
    ("qlass", "", NEW): ("QLASS by the QNet with rank weight", COLOURS["qlass"], "s-"),
    ("qlass", "", NEW + ", distinct draws"): ("the same, M = 4 that differ", COLOURS["qlass"], "*-"),
    ("best_of_n", "q", OLD): ("best of N episodes by Eq. 11", "#56b4e9", "D:"),
    ("best_of_n", "q", NEW): ("best of N episodes with rank weight", COLOURS["best_of_n"], "D-"),
    ("oracle_step", "", ""): ("the true value of M actions (oracle)", INK, "v:"),
}
PANELS = {  # title: environment, split, agent, commit of results.csv
    "WebShop": ("webshop", "test 400-830", "cloned", "208754c"),
    "half of the demonstrations": ("webshop", "test 400-830", "cloned, half of the demonstrations", "83d907e"),
    "real products": ("webshop_real", "test", "cloned", "83d907e"),
    "ALFWorld, unseen": ("alfworld", "valid_unseen", "cloned", "208754c"),
    "real games, unseen": ("alfworld_real", "valid_unseen", "cloned", "d871414"),
    "with thoughts, unseen": ("alfworld", "valid_unseen, first games", "cloned with thoughts", "d11bad8"),
    "FrozenLake": ("frozenlake", "lakes2", "cloned", "208754c"),
    "WebShop's worlds": ("webshop", "test, own worlds", "cloned", "7959f49"),
    "ALFWorld's worlds": ("alfworld", "valid_unseen, own worlds", "cloned", "7959f49"),
    "FrozenLake, five trainings": ("frozenlake", "lakes2, own worlds", "cloned", "7959f49"),
    "ALFWorld's real games": ("alfworld_real", "valid_unseen, first 30", "SmolLM2-135M", "a95484b"),
    "WebShop's real products": ("webshop_real", "test, first 30", "SmolLM2-135M", "ed5ba0a"),
    "FrozenLake, new starts": ("frozenlake", "lakes, 49 to 118", "SmolLM2-135M, head alone", "a51ce67"),
}
FIGURES = {  # file: lines, and the titles of its panels
    "tokens": (LINES, ("WebShop", "ALFWorld, unseen", "FrozenLake")),
    "webshop": (LINES, ("WebShop", "half of the demonstrations", "real products")),
    "alfworld": (LINES, ("ALFWorld, unseen", "real games, unseen", "with thoughts, unseen")),
    "ranking": (RANKING, ("WebShop's worlds", "ALFWorld's worlds", "FrozenLake, five trainings")),
    "smollm2": (PRETRAINED, ("ALFWorld's real games", "WebShop's real products", "FrozenLake, new starts")),
}
SMALL = {  # file: environment, split, agent, commit; all searches, against tokens and against environment steps
    "searches_webshop": ("webshop", "test 400-499", "cloned, small", "ed5ba0a"),
    "searches_alfworld": ("alfworld", "valid_unseen, first 100", "cloned, small", "ce66e57"),
    "searches_frozenlake": ("frozenlake", "lakes", "cloned, small", "ece9359"),
}
COLUMNS = ["environment", "split", "agent", "commit", "seed"]
COSTS = {"tokens": "all tokens a task", "env_steps": "environment steps a task"}


def draw(results: pd.DataFrame, lines: dict, panels: list[tuple], height: float, share: bool) -> Figure:
    """Mean reward with its interval against a cost per task; panels: (title, setting, cost)."""
    figure = Figure(figsize=(9.3, height), layout="constrained")
    legend = {}  # by label: not every panel has them all
    for axes, (title, setting, cost) in zip(figure.subplots(1, len(panels), sharey=share), panels, strict=True):
        env, split, agent, commit = setting
        for (method, select, *of), (label, color, style) in lines.items():
            key = [env, split, agent + "".join(of), commit, "all"]
            here = results[(results[COLUMNS] == key).all(axis=1)].sort_values(cost, kind="stable")
            rows = here[(here["method"].str.partition(":")[0] == method) & (here["select"].fillna("") == select)]
            rewards = [Estimate(row.reward, row.low, row.high, n=0) for row in rows.itertuples()]
            if rewards:
                look = {"color": color, "markersize": 5, "markerfacecolor": "none" if select == "oracle" else color}
                curve(axes, rows[cost], rewards, fmt=style, label=label, **look)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.25)
        axes.set(title=title, xlabel=COSTS[cost])
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.axes[0].set_ylabel("reward, 95 % interval")
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main() -> None:
    results = pd.read_csv(FOLDER / "results.csv", dtype={"seed": str})
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for name, (lines, titles) in FIGURES.items():
            figure = draw(results, lines, [(title, PANELS[title], "tokens") for title in titles], 3.5, share=False)
            for axes in figure.axes:
                axes.locator_params(axis="x", nbins=5)
            figure.savefig(FOLDER / f"{name}.png")
        for name, setting in SMALL.items():
            figure = draw(results, SEARCHES, [("", setting, cost) for cost in COSTS], 4.2, share=True)
            figure.axes[0].set_ylim(top=min(1.05, figure.axes[0].get_ylim()[1]))
            figure.savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
