"""The evaluation of QLASS's authors on ALFWorld (Rafa-zy/QLASS at 6f2cdf4): their prompt, and the figures they print.

    python q_search.py --env experiments.qlass_evaluation:ALFWorld ...    # as in runs/paper.sh release
    python -m experiments.qlass_evaluation RUN/results-*.jsonl            # a file for each episode of a game

The paper's table does not say which of the three figures it has.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from tyro.conf import Positional

from environments.alfworld.env import ALFWorldEnv
from qlass import UserError, records
from qlass.files import warn
from qlass.settings import parse, run_stage
from reporting.result_lines import Result
from reporting.results import METHODS
from reporting.stats import interval


class ALFWorld(ALFWorldEnv):
    """ALFWorld with instruction, a solved example and the task in the first message.

    instruction, example: ETO's alfworld_inst.txt and alfworld_icl.json.
    """

    agreement = ""  # so the first observation follows the instruction in one message

    def __init__(self, instruction: str, example: str, data: str | None = None) -> None:
        super().__init__(data)
        solved = ""
        for number, turn in enumerate(json.loads(Path(example).read_text(encoding="utf-8"))[0]):
            later_observation = number > 0 and number % 2 == 0
            solved += turn["content"] + ("\n\n" if later_observation else "\n")
        text = Path(instruction).read_text(encoding="utf-8-sig")
        shown = f"{text}\n---\nHere is an example.\n\n{solved}\n---\n"
        self._load(self.split_ids("valid_seen")[0])
        if not self.game.old:
            warn("the authors' agent writes `put X in/on Y`, and these games want the newer `move X to Y`")
        self.instruct(f"{shown}Now, it's your turn and here is the task.\n")

    def begin(self, task_id: str) -> str:
        return super().begin(task_id).replace("\n\n", "\n")


def figures(paths: list[Path]) -> Iterator[str]:
    """Rows of a table: which share of the games is won in the first of the files, in two or more, and in any."""
    lines = pd.DataFrame([record | {"file": str(path)} for path in paths for record in records.read(path, Result)])
    if lines.duplicated(["method", "task_id", "file"]).any():
        raise UserError("a file has two searches of one method: name files with one M, one for each episode of a game")
    blocks = dict(zip(lines["task_id"], lines["block"], strict=True))
    yield f"| success [95 %] | games | first | at least two of {len(paths)} | any of {len(paths)} (oracle) |"
    yield "|---|---|---|---|---|"
    for method, rows in lines.groupby("method", sort=False):
        if missing := {*map(str, paths)} - {*rows["file"]}:
            raise UserError(f"{min(missing)}: has no {method}, which another file has")
        won = rows.pivot(index="task_id", columns="file", values="success")[list(map(str, paths))]
        won = won.dropna().astype(float)
        times = won.sum(axis=1)
        shares = [won.iloc[:, 0], times >= 2, times >= 1]
        cells = [format(interval(share.astype(float).to_frame(0).stack(), blocks, rewards=True)) for share in shares]
        yield f"| {METHODS.get(method, method)} | {len(won)} | {' | '.join(cells)} |"


@dataclasses.dataclass(frozen=True)
class Config:
    results: Positional[tuple[Path, ...]]  # result files, one for each episode of a game


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    print("\n".join(figures(list(config.results))))


if __name__ == "__main__":
    run_stage(main)
