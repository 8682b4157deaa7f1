"""Is a step score aligned with Q? Every score that the project knows against reference labels, without training.

    reads   RUN/sft/, and what the scorers ask for: RUN/qnet*/, RUN/trees.jsonl
    writes  RUN/qval/: points.jsonl, labels-REFERENCE.jsonl, scores-NAME.jsonl, report.md, alignment.csv

    python -m experiments.qval --env frozenlake --env-option map=random8

A stopped study goes on, but one that was begun with --overwrite begins anew: name another --out.

This is the test of QVAL (Hernandez-Gutierrez et al.), which asks whether a score orders the actions of a state as their
true value does. With --results of experiments.judges, where scores steer a search, the report also says which figure of
alignment predicts the reward.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
from pydantic import PositiveInt
from tyro.conf import arg

import envs
from experiments import Call, answer, drive_in_order
from experiments.qval import judges as judges  # whose scores join the others
from experiments.qval import metrics, report
from experiments.qval.points import EXACT, Point, distinct, labelled, trajectory
from experiments.qval.scorers import Context, Judge, entries, scored
from qlass import UserError, files, outputs
from qlass.agent import set_first_messages
from qlass.batching import Backends, LogProb, Sample, drive
from qlass.chat import FLAGS, Rendering
from qlass.files import Inputs
from qlass.inputs import find_agent
from qlass.settings import place, read_settings, run_stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Judge):
    stage: ClassVar = "qval"
    extends_options: ClassVar = True

    points: PositiveInt = 200  # states
    split: str = "test"  # tasks that they are from
    trajectories: PositiveInt = 1  # of a task
    references: tuple[Literal["exact", "policy"], ...] = ()  # whose values are labels (exact, where it is known)
    K: Annotated[PositiveInt, arg(aliases=["-K"])] = 32  # rollouts of the reference policy
    scorers: tuple[str, ...] = ()  # beside `random` (all whose inputs are there)
    results: Path | None = place(None)  # of experiments.judges: rewards to predict
    sft: Path | None = place(None)  # the agent (RUN/sft, made if missing)
    out: Path | None = place(None)  # RUN/qval


@dataclasses.dataclass
class Study:
    """Makes the files of a study, each if it is not there."""

    config: Config
    folder: Path
    env: envs.TextEnv
    backends: Backends
    rendering: Rendering

    def settings(self, *flags: str) -> dict[str, Any]:
        """The recipe of a file beside its inputs: these flags, and how the agent samples."""
        return {name: getattr(self.config, name) for name in ("seed", *FLAGS, *flags)} | self.env.settings

    def points(self) -> list[Point]:
        """points.jsonl: the states that the behaviour policy visits."""
        config, path = self.config, self.folder / "points.jsonl"
        settings = self.settings("points", "split", "trajectories")
        meta = outputs.begin(path, config, settings, {"sft": config.sft})
        if config.overwrite or not path.exists():
            walks = itertools.product(range(config.trajectories), self.env.task_ids(config.split))
            players = (trajectory(self.env.fork(), task, n, config.seed, self.rendering) for n, task in walks)
            points = distinct(drive_in_order(players, self.backends, self.env.side_by_side))
            outputs.publish(path, map(vars, itertools.islice(points, config.points)), meta)
        return [Point(**record) for record in files.read_jsonl(path)]

    def lines(self, name: str, points: list[Point], make: Callable, flags: list[str], inputs: Inputs) -> list[dict]:
        """The lines of a file that has one a point. make: a point's line. flags, inputs: what the file depends on."""

        async def line(point: Point) -> list[dict]:
            env = self.env.fork()
            record = await make(env, point)
            env.close()
            return [{"task_id": point.task_id, "hash": point.hash} | record]

        inputs = {"points": self.folder / "points.jsonl"} | inputs
        path, settings = self.folder / f"{name}.jsonl", self.settings(*flags)
        out = outputs.Output(path, self.config, settings, inputs, itemgetter("task_id", "hash"))
        point_of = {point.key: point for point in points}
        todo = out.todo([*point_of])
        players = (line(point_of[key]) for key in todo)
        out.write(drive(players, self.backends, self.env.side_by_side), name, len(todo))
        out.finish([*point_of])
        return [out.groups[key][0] for key in point_of]


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    references = config.references or ("exact" if config.env in EXACT else "policy",)
    env = envs.from_config(config)
    if files.rank_and_size()[1] > 1:
        raise UserError("a study is for one process")
    rewards = report.rewards_of(config.results, env.name) if config.results else None
    config = dataclasses.replace(config, sft=find_agent(config))
    context = Context(config, config.judge)
    scorers = entries(context, config.scorers and ("random", *config.scorers))
    backends: Backends = {Call: answer, Sample: context.agent.sample, LogProb: context.agent.likelihoods}
    rendering = context.agent.chat.rendering
    set_first_messages(env, rendering, config)
    study = Study(config, config.out or config.run / "qval", env, backends, rendering)

    points = study.points()
    index = metrics.index(points)
    returns = {}
    for name in references:
        flags, inputs = (["K"], {"sft": config.sft}) if name == "policy" else ([], {})
        make = partial(labelled, reference=name, K=config.K, rendering=rendering)
        records = study.lines(f"labels-{name}", points, make, flags, inputs)
        returns[name] = pd.DataFrame([row for record in records for row in record["returns"]], index)
    scores, about = pd.DataFrame(index=index), {}
    for name, entry in scorers.items():
        inputs = {need: path for need, path in context.inputs.items() if need in entry.needs}
        flags = ["judge"] if "judge" in entry.needs else []
        make = partial(scored, entry=entry, context=context)
        records = study.lines(f"scores-{name}", points, make, flags, inputs)
        scores[name] = metrics.series([record["values"] for record in records], index)
        answers, unread = (sum(record.get(count, 0) for record in records) for count in ("answers", "unread"))
        about[name] = {"family": entry.family, "unread": f"{unread:,} of {answers:,}" if unread else "–"}
    table = pd.DataFrame.from_dict(about, orient="index")
    text, rows = report.report(scores, table, returns, rewards)
    (study.folder / "report.md").write_text(text, encoding="utf-8")
    rows.to_csv(study.folder / "alignment.csv")
    print(text)


if __name__ == "__main__":
    run_stage(main)
