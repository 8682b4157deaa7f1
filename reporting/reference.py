"""Figures of runs/reference_output, from its results.csv and figures.csv: python -m reporting.reference

A line of figures.csv is a line of a figure: its panel's title, which rows of results.csv it shows, and its name, which
tells the M or N of its points from left to right.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from reporting.figures import COLOURS, GREY, INK, MARKERS, STYLE, curve, log_axis
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


def main() -> None:
    texts = dict.fromkeys(ROWS, "") | {"seed": ""}
    results = pd.read_csv(FOLDER / "results.csv", dtype=dict.fromkeys(texts, str)).fillna(texts)
    results = results[results["seed"] == "all"].copy()
    results["method"] = results["method"].str.extract(r"^(\w+)")  # of MCTS all numbers of simulations
    with mpl.rc_context(STYLE | {"savefig.dpi": 120}):
        figures = pd.read_csv(FOLDER / "figures.csv").fillna("")
        for name, lines in figures.groupby("figure", sort=False):
            draw(lines, results).savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
