"""Comparison of rewards with expected ranges: `python -m reporting --expected FILE`."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qlass import UserError
from reporting.results import Group

COLUMNS = {"environment": str, "method": str, "M": int, "N": int, "select": str, "low": float, "high": float}


def read_ranges(path: Path) -> pd.DataFrame:
    """The lines of a CSV with these columns, each about a method in an environment."""
    try:
        return pd.read_csv(path, dtype=COLUMNS)[[*COLUMNS]].fillna({"select": ""})
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: no table of {','.join(COLUMNS)} ({error})") from None


def verdicts(groups: Sequence[Group], ranges: pd.DataFrame) -> list[str]:
    """One line per reward and range: "agent .720, expected .70 to .73: ok"; or one that there is none.

    The mean itself is compared, not the rounded one that the line shows.
    """
    lines = []
    for row in ranges.itertuples():
        for group in groups:
            c = group.condition
            condition = (c.env, c.method, c.M or 1, c.N or 1, c.select or "")
            if not c.label and condition == (row.environment, row.method, row.M, row.N, row.select):
                name = "agent" if c.method == "greedy" else str(c)
                mean, expected = group.reward.mean, f"expected {short(row.low, 2)} to {short(row.high, 2)}"
                lines.append(f"{name} {short(mean, 3)}, {expected}: {verdict(mean, row.low, row.high)}")
    return lines or ["no range is expected for any of these results"]


def verdict(mean: float, low: float, high: float) -> str:
    if low <= mean <= high:
        return "ok"
    side, distance = ("below", low - mean) if mean < low else ("above", mean - high)
    return f"not as expected, {short(distance, 4)} {side}"


def short(number: float, digits: int) -> str:
    return f"{number:.{digits}f}".lstrip("0")
