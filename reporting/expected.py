"""Whether rewards lie within expected ranges: `python -m reporting --expected FILE`."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlass import UserError
from reporting.results import Group

COLUMNS = {"environment": str, "method": str, "M": int, "N": int, "select": str, "low": float, "high": float}


def read_ranges(path: Path) -> list[dict[str, Any]]:
    """The lines of a CSV with these columns, each about a method in an environment."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
        if not rows:
            raise ValueError("no lines")
        return [{name: kind(row[name]) for name, kind in COLUMNS.items()} for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        reason = f"no table of {','.join(COLUMNS)} ({error!r}); runs/reference_output/expected.csv is one"
        raise UserError(f"{path}: {reason}") from None


def verdicts(groups: Sequence[Group], ranges: Sequence[dict[str, Any]]) -> list[str]:
    """One line per reward and range: "agent .720, expected .70 to .73: ok"; or one that there is none.

    The mean itself is compared, not the rounded one that the line shows.
    """
    lines = []
    for row in ranges:
        *key, low, high = row.values()
        for group in groups:
            c = group.condition
            if not c.label and [c.env, c.method, c.M or 1, c.N or 1, c.select or ""] == key:
                name = "agent" if c.method == "greedy" else str(c)
                mean = group.reward.mean
                expected = f"expected {short(low, 2)} to {short(high, 2)}"
                lines.append(f"{name} {short(mean, 3)}, {expected}: {verdict(mean, low, high)}")
    return lines or ["no range is expected for any of these results"]


def verdict(mean: float, low: float, high: float) -> str:
    if low <= mean <= high:
        return "ok"
    side, distance = ("below", low - mean) if mean < low else ("above", mean - high)
    return f"not as expected, {short(distance, 4)} {side}"


def short(number: float, digits: int) -> str:
    return f"{number:.{digits}f}".lstrip("0")
