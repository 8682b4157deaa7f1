"""Figures of runs/reference_output, from its results.csv and figures.csv: python -m reporting.reference

A line of figures.csv is a line of a figure: its panel's title, which rows of results.csv it shows, and its name, which
tells the M or N of its points from left to right.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, INK, MARKERS, STYLE, WIDTH, curve, log_axis
from reporting.stats import Estimate

FOLDER = Path(__file__).parents[1] / "runs" / "reference_output"
ROWS = ["environment", "split", "commit", "agent", "method", "select"]
FIRST = [GREY, COLOURS["likeliest"], COLOURS["qlass"], COLOURS["best_of_n"]]
SERIES = [*FIRST, "#cc79a7", "#009e73", "#56b4e9", INK, "#b8a000"]  # of a figure's lines, in the order of figures.csv


def draw(lines: pd.DataFrame, results: pd.DataFrame) -> Figure:
    """Mean reward with its interval against tokens a task, a panel a setting."""
    places = {label: place for place, label in enumerate(lines["label"].unique())}
    titles = lines["title"].unique()
    size = 0.6 + 2.7 * len(titles), 3.1 + 0.17 * len(places)  # inches
    figure = Figure(figsize=size, layout="constrained")
    panels = dict(zip(titles, figure.subplots(1, len(titles)), strict=True))
    legend = {}
    for line in lines.to_dict("records"):
        wanted = [line[name] for name in ROWS]
        points = results[(results[ROWS] == wanted).all(axis=1)].sort_values("tokens")
        rewards = [Estimate(row.reward, row.low, row.high, n=0) for row in points.itertuples()]
        axes, place = panels[line["title"]], places[line["label"]]
        marker = MARKERS[place % len(MARKERS)]
        curve(axes, points["tokens"], rewards, color=SERIES[place], marker=marker)
        legend[line["label"]] = axes.containers[-1]
    for title, axes in panels.items():
        axes.set_title(title)
        log_axis(axes, "tokens a task")
    panels[titles[0]].set_ylabel("mean reward, 95 % interval")
    figure.legend([legend[label] for label in places], places, loc="outside lower center", ncols=2)
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
    for (label, parts), (colour, marker) in zip(lines.groupby("label", sort=False), looks, strict=False):
        points = []
        for line in parts.itertuples():
            place = [line.environment, line.split, line.commit]
            here = results[(results[ROWS[:3]] == place).all(axis=1)]
            search = here[(here["agent"] == line.agent) & (here["method"] == line.method)]
            search = search[search["M"] == search["M"].max()]
            agent = here[here["agent"] == line.agent.partition(", QNet")[0]]
            points.append(search.merge(agent[agent["method"] == "greedy"], on="seed"))
        units = pd.concat(points)
        axes.scatter(
            units["reward_y"],
            units["reward_x"] - units["reward_y"],
            s=18,
            color=colour,
            marker=marker,
            label=label,
        )

    figure.legend(loc="outside lower center")
    return figure


def main() -> None:
    texts = dict.fromkeys(ROWS, "") | {"seed": ""}
    results = pd.read_csv(FOLDER / "results.csv", dtype=dict.fromkeys(texts, str)).fillna(texts)
    results["method"] = results["method"].str.extract(r"^(\w+)")  # of MCTS all numbers of simulations
    means = results["seed"] == "all"
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        figures = pd.read_csv(FOLDER / "figures.csv").fillna("")
        for name, lines in figures.groupby("figure", sort=False):
            figure = gains(lines, results[~means]) if name == "gains" else draw(lines, results[means])
            figure.savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
