"""Numbers of README.md, the results pages and docs/protocols.md, from the files beside them: python -m reporting.pages

    .813<!--shops/qlass-6-->              the reward of a row of cells.csv, as it stands or as .813±.01
    1,844<!--shops/qlass-6:tokens-->      another column of its row of results.csv
    +.096 [.076, .115]<!--shops/agent-->  the difference of a row of plans.csv; without brackets the mean alone
    <!-- rows: shops -->                  the table below has the rows of cells.csv whose names begin with shops/

A difference is bold if it is decided, and has † if it was not planned (`reporting.plans`). A number is found by the
name behind it, so that none stands at a wrong place, and a number that changes is changed on all pages.
"""

import functools
import math
import re

import pandas as pd

from reporting import plans

FOLDER = plans.FOLDER
ROOT = FOLDER.parents[1]
PAGES = (ROOT / "README.md", FOLDER / "README.md", FOLDER / "learners.md", ROOT / "docs/protocols.md")
CONDITION = [*plans.PLACE, "commit", *plans.CONDITION, "seed"]
NUMBER = re.compile(r"(?:\*\*)?[+-]?[\d,]*\.?\d+(±\.\d+)?( \[[^]]*\])?(?:\*\*)?(?: †)?<!--(?P<name>[\w/:.-]+)-->")
TABLE = re.compile(r"(<!-- rows: (?P<name>[\w-]+) -->\n\n)(?:\|.*\n)+")
COLUMNS = {"tokens": "{:,.0f}", "generated": "{:,.0f}", "env_steps": "{:.1f}", "trainings": "{:.0f}"}


def short(number: float) -> str:
    """.813 in place of 0.813."""
    return f"{number:.3f}".replace("0.", ".", 1)


@functools.cache
def cells() -> dict[str, pd.Series]:
    """Rows of results.csv by the names that cells.csv gives them; of a figure of the paper its `value`.

    A row is over all units where cells.csv names no `seed`.
    """
    texts = {"dtype": str, "keep_default_na": False}
    named, results = (pd.read_csv(FOLDER / file, **texts) for file in ("cells.csv", "results.csv"))
    named["seed"] = named["seed"].replace("", "all")
    rows = named.merge(results, "left", CONDITION, validate="many_to_one")
    rows["reward"] = rows["reward"].fillna(rows["value"])
    return {row["id"]: row for _, row in rows.iterrows()}


@functools.cache
def differences() -> dict[str, str]:
    """Differences by the names that plans.csv gives them, such as "**+.096 [.076, .115]**"."""
    planned, results = plans.read()
    texts = plans.table(planned, results)
    named = {}
    for name, text, is_planned in zip(planned["id"], texts["difference"], planned["planned"], strict=True):
        if name:
            text = re.sub(r"(?<=[\[ ])\+", "", text.replace("0.", "."))
            named[name] = text if is_planned else f"{text} †"
    return named


def reward(row: pd.Series, with_interval: bool) -> str:
    text = short(float(row["reward"]))
    if not with_interval:
        return text
    half = (float(row["high"]) - float(row["low"])) / 2
    return text if math.isnan(half) else f"{text}±{half:.2f}".replace("±0", "±")


def number(match: re.Match) -> str:
    """A number with its name, as the files have it. KeyError for a name that they lack."""
    name, _, column = match["name"].partition(":")
    if name in differences():
        text = differences()[name]
        if not match[2]:
            text = re.match(r"\W*[\d.]+", text.strip("*"))[0]
    elif column:
        text = COLUMNS[column].format(float(cells()[name][column]))
    else:
        text = reward(cells()[name], bool(match[1]))
    return f"{text}<!--{match['name']}-->"


def table(match: re.Match) -> str:
    lines = ["| | reward | tokens | steps |", "|---|---|---|---|"]
    for name, row in cells().items():
        if name.startswith(f"{match['name']}/"):
            costs = [COLUMNS[column].format(float(row[column])) for column in ("tokens", "env_steps")]
            lines.append(" | ".join([f"| {row['label']}", reward(row, True), *costs]) + " |")
    return match[1] + "\n".join(lines) + "\n"


def refresh(text: str) -> str:
    return NUMBER.sub(number, TABLE.sub(table, text))


def main() -> None:
    for page in PAGES:
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
