"""Comparison of rewards with expected ranges: `python -m reporting --expected FILE`."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qlass.records import as_user_error
from reporting.results import Condition, Group

COLUMNS = {
    "environment": str, "method": str, "M": int, "N": int, "select": str, "low": float, "high": float, "tasks": int
}  # fmt: skip


def read_ranges(path: Path) -> pd.DataFrame:
    """The lines of a CSV with these columns, each about a method in an environment."""
    with as_user_error(f"{path}: no table of {','.join(COLUMNS)}"):
        return pd.read_csv(path, dtype=COLUMNS)[[*COLUMNS]].fillna({"select": ""})


def verdicts(groups: Sequence[Group], ranges: pd.DataFrame) -> list[str]:
    """One line per reward and range: "agent, greedy 0.5953, expected 0.57 to 0.66: ok"; or one that there is none."""
    rewards = {group.condition: group.reward for group in groups}
    lines = []
    for row in ranges.itertuples():
        condition = Condition(row.environment, row.method, row.M, row.N, row.select)
        if condition in rewards:
            reward = rewards[condition]
            verdict = "ok" if row.low <= reward.mean <= row.high else "not as expected"
            if reward.n != row.tasks:
                verdict = f"not compared, as this is over {reward.n} tasks, and the range over {row.tasks}"
            lines.append(f"{condition} {reward.mean:.4f}, expected {row.low} to {row.high}: {verdict}")
    return lines or ["no range is expected for any of these results"]
