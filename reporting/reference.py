"""Figures of runs/reference_output, from its results.csv and figures.csv: python -m reporting.reference

A line of figures.csv is a line of a figure: its panel's title, which rows of results.csv it shows, and its name, which
tells the M or N of its points from left to right.
"""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, INK, MARKERS, STYLE, WIDTH, curve, log_axis
from reporting.plans import FOLDER
from reporting.stats import Estimate

ROWS = ["environment", "split", "commit", "agent", "method", "select"]
FIRST = [GREY, COLOURS["likeliest"], COLOURS["qlass"], COLOURS["best_of_n"]]
SERIES = [*FIRST, "#cc79a7", "#009e73", "#56b4e9", INK, "#b8a000"]  # of a figure's lines, in the order of figures.csv


def draw(lines: pd.DataFrame, results: pd.DataFrame) -> Figure:
    """Mean reward with its interval against tokens a task, a panel a setting."""
    labels = lines["label"].unique()
    looks = {}
    for label, colour, marker in zip(labels, SERIES, MARKERS, strict=False):
        looks[label] = {"color": colour, "marker": marker, "label": label}
    panels = lines.groupby("title", sort=False)
    figure = Figure(figsize=(0.6 + 2.7 * len(panels), 3.1 + 0.17 * len(labels)), layout="constrained")
    legend = {}
    for axes, (title, part) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for line in part.itertuples():
            place = line.environment, line.split, line.commit, line.agent, line.method, line.select
            points = results.loc[[place]].sort_values("tokens")
            rewards = [Estimate(row.reward, row.low, row.high, n=0) for row in points.itertuples()]
            curve(axes, points["tokens"], rewards, **looks[line.label])
        axes.set_title(title)
        log_axis(axes)
        marks, named = axes.get_legend_handles_labels()
        legend |= zip(named, marks, strict=True)
    figure.axes[0].set_ylabel("mean reward, 95 % interval")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2)
    return figure


def gains(lines: pd.DataFrame, results: pd.DataFrame) -> Figure:
    """QLASS minus its agent, played greedily, against the agent's own reward: a point a shop or a training.

    M is the largest that was played. An agent's name is that of QLASS without its QNet.
    """
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("the agent's own mean reward, greedy")
    axes.set_ylabel("QLASS minus its agent")
    looks = zip(SERIES, MARKERS, strict=False)
    arrangements = lines.groupby("label", sort=False)
    for (label, parts), (colour, marker) in zip(arrangements, looks, strict=False):
        points = []
        for line in parts.itertuples():
            place = line.environment, line.split, line.commit
            search = results.loc[[(*place, line.agent, line.method, line.select)]]
            agent = results.loc[[(*place, line.agent.partition(", QNet")[0], "greedy", "")]]
            search = search[search["M"] == search["M"].max()]
            points.append(search.merge(agent, on="seed"))
        units = pd.concat(points)
        gain = units["reward_x"] - units["reward_y"]
        axes.scatter(units["reward_y"], gain, s=18, color=colour, marker=marker, label=label)
    figure.legend(loc="outside lower center")
    return figure


def main() -> None:
    texts = dict.fromkeys(ROWS, "") | {"seed": ""}
    results = pd.read_csv(FOLDER / "results.csv", dtype=dict.fromkeys(texts, str)).fillna(texts)
    results["method"] = results["method"].str.extract(r"^(judge: [\w-]+|\w+)")  # of MCTS all numbers of simulations
    results = results.set_index(ROWS).sort_index()
    means = results["seed"] == "all"
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        figures = pd.read_csv(FOLDER / "figures.csv").fillna("")
        for name, lines in figures.groupby("figure", sort=False):
            if name == "gains":
                figure = gains(lines, results[~means])
            else:
                figure = draw(lines, results[means])
            figure.savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
