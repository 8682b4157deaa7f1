"""Figures of runs/reference_output, from its results.csv and figures.csv: python -m reporting.reference"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from reporting.figures import COLOURS, GREY, INK, STYLE, curve, place_marks
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
    ("qlass", "", ", QNet with rank weight, distinct draws"): ("QLASS, M = 4 that differ", COLOURS["qlass"], "*-"),
    ("best_of_n", "q", ", QNet by Eq. 11"): ("best of N episodes by Eq. 11", "#56b4e9", "h:"),
    ("best_of_n", "q", ", QNet with rank weight"): ("best of N episodes with rank weight", COLOURS["best_of_n"], "D-"),
    ("oracle_step", ""): ("the true value of M actions (oracle)", INK, "v:"),
}
SIZES = {  # method, what is added to the agent's name: label, colour, marker and line
    ("best_of_n", ", QNet with rank weight"): ("best of 6 episodes with rank weight", COLOURS["best_of_n"], "D-"),
    ("oracle_step", ""): ("the true value of 6 actions (oracle)", INK, "v:"),
    ("qlass", ", QNet with rank weight"): ("QLASS by the QNet with rank weight", COLOURS["qlass"], "s-"),
    ("qlass", ", QNet by Eq. 11"): ("QLASS by the QNet of Eq. 11", "#cc79a7", "p:"),
    ("likeliest", ""): ("search by its log-probability", COLOURS["likeliest"], "^-"),
    ("greedy", ""): ("agent, greedy", GREY, "o-"),
}
SETTING = ["environment", "split", "commit"]
FIGURES = {"tokens": RANKING, "alfworld": LINES, "smollm2": PRETRAINED, "searches": LINES}  # panels: figures.csv


def draw(results: pd.DataFrame, lines: dict, settings: pd.DataFrame) -> Figure:
    """Mean reward with its interval against tokens per task; below it minus the agent's, a dot per seed, if all panels
    have seeds. Marks are M or N, of MCTS its simulations."""
    panels = [results[(results[SETTING] == setting).all(axis=1)] for setting in settings[SETTING].to_numpy()]
    paired = all((panel["tokens"].notna() & (panel["seed"] != "all")).any() for panel in panels)
    figure = Figure(figsize=(9.3, 6 if paired else 3.7), layout="constrained")
    grid = figure.subplots(1 + paired, len(panels), squeeze=False, height_ratios=(3, 2)[: 1 + paired])
    legend = {}  # by label: not every panel has them all
    titles = settings["title"], settings["agent"]
    for (axes, *below), panel, title, agent in zip(grid.T, panels, *titles, strict=True):
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
    place_marks(figure)
    return figure


def draw_sizes(results: pd.DataFrame) -> Figure:
    """The same demonstrations for agent, trees and QNet: rewards by their number, and what QLASS adds in each shop."""
    rows = results[results["split"] == "test, equal data"]
    name = rows["agent"].str.extract(r"cloned from (\d+)(.*)")
    rows = rows.assign(size=name[0].astype(int), net=name[1]).sort_values("size", kind="stable")
    figure = Figure(figsize=(9.3, 3.9), layout="constrained")
    rewards, gains = figure.subplots(1, 2)
    for (method, net), (label, color, style) in SIZES.items():
        of = rows[(rows["name"] == method) & (rows["net"] == net)]
        mean = of[of["seed"] == "all"]
        estimates = [Estimate(row.reward, row.low, row.high, n=0) for row in mean.itertuples()]
        if estimates:
            curve(rewards, mean["size"], estimates, fmt=style, color=color, label=label, markersize=5)
    shops = rows[rows["seed"] != "all"].set_index(["size", "seed"])
    qlass = shops[(shops["name"] == "qlass") & (shops["net"] == ", QNet with rank weight")]["reward"]
    for rival, shift in (("greedy", 0.95), ("likeliest", 1.05)):
        label, color, style = SIZES[rival, ""]
        gain = (qlass - shops[shops["name"] == rival]["reward"]).dropna()
        for size, values in gain.groupby(level="size"):
            low, high = ttest_1samp(values, 0).confidence_interval()
            spread = [[values.mean() - low], [high - values.mean()]]
            look = {"color": color, "capsize": 2, "elinewidth": 0.7, "markerfacecolor": "none"}
            gains.errorbar([size * shift], [values.mean()], spread, fmt=style, label=f"minus {label}", **look)
        gains.plot(gain.index.get_level_values("size") * shift, gain, ".", color=color, markersize=3)
    gains.axhline(0, color=INK, linewidth=0.7)
    for axes, title in ((rewards, "reward, 95 % interval"), (gains, "QLASS with rank weight adds, a dot per shop")):
        sizes = sorted(set(rows["size"]))
        axes.set(title=title, xlabel="demonstrations, of agent, trees and QNet", xscale="log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    handles, labels = rewards.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    named = dict(zip(*reversed(gains.get_legend_handles_labels()), strict=True))  # each label once
    gains.legend([*named.values()], [*named], fontsize=9)
    return figure


def main() -> None:
    results = pd.read_csv(FOLDER / "results.csv", dtype={"seed": str}).fillna({"agent": "", "select": ""})
    results[["name", "mark"]] = results["method"].str.extract(r"^(\w+)(?:.*S=(\d+))?")
    results["mark"] = results["mark"].fillna(results[["M", "N"]].max(axis=1).astype(str)).replace("1", "")
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        for file, settings in pd.read_csv(FOLDER / "figures.csv").groupby("figure"):
            draw(results, FIGURES[file], settings).savefig(FOLDER / f"{file}.png")
        draw_sizes(results).savefig(FOLDER / "equal_data.png")


if __name__ == "__main__":
    main()
