"""Figures of runs/reference_output, from its results.csv: python -m reporting.reference"""

from __future__ import annotations

from collections.abc import Sequence
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
    ("best_of_n", "oracle"): ("best of N by the true reward (oracle)", COLOURS["best_of_n"], "h:"),
    ("lookahead", "q"): ("look-ahead by QNet, M actions", "#009e73", "v-"),
    ("beam", "q"): ("beam of M", "#cc79a7", "P-"),
    ("mcts", "q"): ("MCTS, S simulations a step", "#56b4e9", "X-"),
    ("particles", "q"): ("particles, N of them", INK, "<-"),
}
PRETRAINED = LINES | {
    ("sample", ""): ("agent, one sample", GREY, "s-"),
    ("random", ""): ("a random one of M actions", "#cc79a7", "v-"),
}
RANKING = dict([*LINES.items()][:2]) | {  # and what is added to the agent's name
    ("qlass", "", ", QNet by Eq. 11"): ("QLASS by the QNet of Eq. 11", "#cc79a7", "p:"),
    ("qlass", "", ", QNet with rank weight"): ("QLASS by the QNet with rank weight", COLOURS["qlass"], "s-"),
    ("qlass", "", ", QNet with rank weight, distinct draws"): ("the same, M = 4 that differ", COLOURS["qlass"], "*-"),
    ("best_of_n", "q", ", QNet by Eq. 11"): ("best of N episodes by Eq. 11", "#56b4e9", "h:"),
    ("best_of_n", "q", ", QNet with rank weight"): ("best of N episodes with rank weight", COLOURS["best_of_n"], "D-"),
    ("oracle_step", ""): ("the true value of M actions (oracle)", INK, "v:"),
}
SETTING = ["environment", "split", "commit"]
PANELS = {  # title: environment, split, commit of results.csv, agent
    "ALFWorld, unseen": ("alfworld", "valid_unseen", "208754c", "cloned"),
    "real games, unseen": ("alfworld_real", "valid_unseen", "d871414", "cloned"),
    "with thoughts, unseen": ("alfworld", "valid_unseen, first games", "d11bad8", "cloned with thoughts"),
    "five shops of WebShop": ("webshop", "test, own worlds", "7959f49", "cloned"),
    "three sets of ALFWorld's games": ("alfworld", "valid_unseen, own worlds", "7959f49", "cloned"),
    "five trainings on FrozenLake": ("frozenlake", "lakes2, own worlds", "7959f49", "cloned"),
    "ALFWorld's real games": ("alfworld_real", "valid_unseen, first 30", "a95484b", "SmolLM2-135M"),
    "WebShop's real products": ("webshop_real", "test, first 30", "ed5ba0a", "SmolLM2-135M"),
    "FrozenLake, new starts": ("frozenlake", "lakes, 49 to 118", "a51ce67", "SmolLM2-135M, head alone"),
    "100 tasks of WebShop": ("webshop", "test 400-499", "ed5ba0a", "cloned, small"),
    "100 games of ALFWorld": ("alfworld", "valid_unseen, first 100", "ce66e57", "cloned, small"),
    "118 starts on FrozenLake": ("frozenlake", "lakes", "ece9359", "cloned, small"),
}
FIGURES = {  # file: lines, and the titles of its panels
    "tokens": (RANKING, ("five shops of WebShop", "three sets of ALFWorld's games", "five trainings on FrozenLake")),
    "alfworld": (LINES, ("ALFWorld, unseen", "real games, unseen", "with thoughts, unseen")),
    "smollm2": (PRETRAINED, ("ALFWorld's real games", "WebShop's real products", "FrozenLake, new starts")),
    "searches": (LINES, ("100 tasks of WebShop", "100 games of ALFWorld", "118 starts on FrozenLake")),
}


def draw(results: pd.DataFrame, lines: dict, titles: Sequence[str]) -> Figure:
    """Mean reward with its interval against tokens per task; below it minus the agent's, a dot per seed, if all panels
    have seeds. Marks are M or N, of MCTS its simulations."""
    panels = [results[(results[SETTING] == [*PANELS[title][:3]]).all(axis=1)] for title in titles]
    paired = all((panel["tokens"].notna() & (panel["seed"] != "all")).any() for panel in panels)
    figure = Figure(figsize=(9.3, 6 if paired else 3.7), layout="constrained")
    grid = figure.subplots(1 + paired, len(titles), squeeze=False, height_ratios=(3, 2)[: 1 + paired])
    legend = {}  # by label: not every panel has them all
    for (axes, *below), title, panel in zip(grid.T, titles, panels, strict=True):
        agent = PANELS[title][3]
        nominal = ", nominal" * agent.startswith("cloned")  # the tiny model only chooses among valid actions
        axes.set(title=title, xlabel="all tokens a task" + nominal)
        start = panel[(panel["agent"] == agent) & (panel["name"] == "greedy")].set_index("seed")["reward"]
        panel = panel.assign(gain=panel["reward"] - panel["seed"].map(start)).sort_values("tokens", kind="stable")
        for (method, select, *of), (label, color, style) in lines.items():
            rows = panel[(panel[["name", "select", "agent"]] == [method, select, agent + "".join(of)]).all(axis=1)]
            mean, seeds = rows[rows["seed"] == "all"], rows[rows["seed"] != "all"]
            rewards = [Estimate(row.reward, row.low, row.high, n=0) for row in mean.itertuples()]
            if rewards:
                look = {"color": color, "markersize": 5, "markerfacecolor": "none"}
                curve(axes, mean["tokens"], rewards, mean["mark"], fmt=style, **look)
                legend[label] = axes.containers[-1]
            for differences in below:
                differences.plot(mean["tokens"], mean["gain"], style, **look)
                differences.plot(seeds["tokens"], seeds["gain"], ".", color=color, markersize=3)
    grid[-1, 0].set_ylabel("minus the agent's,\na dot per seed")
    grid[0, 0].set_ylabel("reward, 95 % interval")
    figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main() -> None:
    results = pd.read_csv(FOLDER / "results.csv", dtype={"seed": str}).fillna({"agent": "", "select": ""})
    results[["name", "mark"]] = results["method"].str.extract(r"^(\w+)(?:.*S=(\d+))?")
    results["mark"] = results["mark"].fillna(results[["M", "N"]].max(axis=1).astype(str)).replace("1", "")
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for file, (lines, titles) in FIGURES.items():
            draw(results, lines, titles).savefig(FOLDER / f"{file}.png")


if __name__ == "__main__":
    main()
