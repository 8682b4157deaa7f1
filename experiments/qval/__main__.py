"""Is a step score aligned with Q? Every score that the project knows against reference labels, without training.

    reads   RUN/sft/, and what the scorers ask for: RUN/qnet*/, RUN/trees.jsonl
    writes  RUN/qval/: points.jsonl, labels-REFERENCE.jsonl, predictions/NAME.json, report.md, alignment.json

    python -m experiments.qval --env frozenlake --env-option map=random8
    python -m experiments.qval search --env frozenlake -M 6    # every score steers the search

This is the test of QVAL (Hernandez-Gutierrez et al.), which asks whether a score orders the actions of a state as their
true value does. Files that are there already are kept. With --results of `search` the report also says which figure of
alignment predicts the reward; experiments.qval.downstream does so over several environments.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

import envs
from experiments import drive_in_order
from experiments.qval import downstream, metrics, report, search
from experiments.qval.points import REFERENCES, Point, distinct, drawn, label, trajectory
from experiments.qval.scorers import Call, Context, Decision, Entry, answer, available, entry, inputs
from qlass import UserError, files, runs
from qlass.agent import begin_as_cloned
from qlass.batching import Sample
from qlass.chat import Rendering
from qlass.flags import Parser, add_sampling, at_least, run_stage


def arguments(argv: list[str]) -> argparse.Namespace:
    flags = Parser(__doc__)
    add = flags.add_argument
    add("--points", type=at_least(1), default=200, metavar="N", help="states (default: %(default)s)")
    add("--split", default="test", help="tasks that they are from (default: %(default)s)")
    add("--trajectories", type=at_least(1), default=1, metavar="N", help="a task (default: %(default)s)")
    actors, share = ["agent", "expert", "random"], at_least(0, float, most=1)
    add("--actor", choices=actors, default="agent", help="behaviour policy (default: %(default)s)")
    add("--epsilon", type=share, default=0.25, help="its share of uniform valid actions (default: %(default)s)")
    add("--candidates", type=at_least(1), default=4, metavar="N", help="actions a state (default: %(default)s)")
    add("--references", nargs="+", metavar="NAME", help="exact, planner, expert, policy (default: all but policy)")
    add("-K", type=at_least(1), default=32, help="rollouts of the reference policy (default: %(default)s)")
    add("--gamma", type=share, default=0.95, help="discount of the labels (%(default)s, QVAL)")
    add("--scorers", nargs="+", metavar="NAME", help="default: all whose inputs are there")
    add("--against", default="random", metavar="NAME", help="the scorer that others are compared with (%(default)s)")
    add("--results", type=Path, metavar="FILE", help="of `search`: rewards to predict")
    add("--sft", type=Path, help="the agent (default: RUN/sft, made if missing)")
    add("--out", type=Path, metavar="DIR", help="default: RUN/qval")
    add_sampling(flags)
    args = runs.parse(flags, argv, search=True)
    args.out = args.out or args.run / "qval"
    there = REFERENCES.get(args.env, ("policy",))
    args.references = args.references or [name for name in there if name != "policy"] or ["policy"]
    for name in set(args.references) - {*there}:
        raise UserError(f"{args.env}: no {name} labels; choose among {', '.join(there)}")
    return args


@dataclasses.dataclass
class Run:
    """Makes the files of a study, each if it is not there."""

    args: argparse.Namespace
    env: envs.TextEnv
    context: Context
    rendering: Rendering

    def driven(self, generators: Iterable[Generator], what: str, n: int) -> Iterator[Any]:
        """What n generators return, in their order."""
        answers = {Sample: lambda requests: self.context.agent().sample(requests), Call: answer}
        return iter(tqdm(drive_in_order(generators, answers, self.env.side_by_side), what, n))

    def kept(self, name: str, lines: Iterable[dict], flags: Iterable[str], **inputs: Path | None) -> list[dict]:
        """The lines of a file, made first if it is not there. flags, inputs: what it depends on."""
        path, settings = self.args.out / name, runs.only(self.args, *runs.SHARED, *flags)
        recipe = runs.claim(path, settings, inputs)
        if not path.exists():
            runs.write_meta(path, settings, recipe, inputs)
            files.write_jsonl(path, lines)
        return list(files.read_jsonl(path))

    def points(self) -> list[Point]:
        """points.jsonl: the states that the behaviour policy visits."""
        args, tasks = self.args, self.env.task_ids(self.args.split)
        actor = args.actor, args.epsilon, args.candidates, self.rendering, args.seed
        walks = (trajectory(self.env.fork(), task, n, *actor) for n in range(args.trajectories) for task in tasks)
        points = distinct(self.driven(walks, "trajectories", args.trajectories * len(tasks)))
        lines = map(vars, itertools.islice(points, args.points))
        flags = ["points", "split", "trajectories", "actor", "epsilon", "candidates"]
        records = self.kept("points.jsonl", lines, flags, **{"sft": args.sft} if args.actor == "agent" else {})
        if not records:
            raise UserError(f"{args.env}: no trajectory of --split {args.split} is longer than three turns")
        return [Point(**record) for record in records]

    def returns(self, reference: str, points: list[Point]) -> list[list[float]]:
        """labels-REFERENCE.jsonl: the returns of each candidate, (candidates, K)."""
        args, repeated = self.args, drawn(reference, points[0].task_id)
        K = args.K if repeated else 1
        places = [(point, i, k) for point in points for i in range(len(point.candidates)) for k in range(K)]
        labels = (label(self.env.fork(), *place, reference, args.gamma, self.rendering) for place in places)
        returns = self.driven(labels, reference, len(places))

        def line(point: Point) -> dict:
            rows = [list(itertools.islice(returns, K)) for _ in point.candidates]
            return {"task_id": point.task_id, "hash": point.hash, "returns": rows}

        inputs = {"points": args.out / "points.jsonl"} | ({"sft": args.sft} if reference == "policy" else {})
        flags = ["gamma"] + ["K"] * repeated
        records = self.kept(f"labels-{reference}.jsonl", map(line, points), flags, **inputs)
        return [row for record in records for row in record["returns"]]

    def values(self, name: str, chosen: Entry, points: list[Point]) -> list[list[float | None]]:
        """predictions/NAME.json, in QVAL's layout: what a score gives to the actions taken and, as metadata, to all."""
        path = self.args.out / "predictions" / f"{name}.json"
        if not path.exists() or any(runs.outdated(path)):
            sources = {"points": self.args.out / "points.jsonl", **inputs(chosen, self.context)}
            recipe = runs.claim(path, argparse.Namespace(**vars(self.args) | {"overwrite": True}), sources)
            lines = (predict(self.env.fork(), point, chosen, self.context) for point in points)
            values = list(self.driven(lines, name, len(points)))
            taken = [candidates[point.taken] for candidates, point in zip(values, points, strict=True)]
            metadata = {"ranking_point_hashes": [point.hash for point in points], "candidate_values": values}
            record = {"method_name": name, "method_type": "eval", "values": taken, "config": {}, "metadata": metadata}
            with files.replacing(path) as out:
                json.dump(record, out, indent=1)
            runs.write_meta(path, self.args, recipe, sources)
        return files.read_object(path)["metadata"]["candidate_values"]


def predict(env: envs.TextEnv, point: Point, chosen: Entry, context: Context) -> Generator[Any, Any, list]:
    """A score's values of a point's candidates."""
    decision = Decision(env, point.restore(env), point.candidates, (point.task_id, "score", point.hash))
    values = yield from chosen.scores(context, decision)
    env.close()
    return [None if value is None else float(value) for value in values]


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["search"]:
        return search.main(argv[1:])
    args = arguments(argv)
    env = envs.from_arguments(args)
    if args.actor == "agent" or "policy" in args.references:
        args.sft = runs.need(args.sft, args.run / "sft", "sft", args)
    context = Context(args)
    chosen = {name: entry(name, context) for name in args.scorers or available(context)}
    rendering = context.agent().chat.rendering if args.sft else Rendering()
    begin_as_cloned(env, rendering, args)
    run = Run(args, env, context, rendering)
    study = report.Study(run.points(), args.against)
    if args.overwrite:
        files.discard(args.out / "predictions")
    for reference in args.references:
        study.returns[reference] = pd.DataFrame(run.returns(reference, study.points), study.index)
    for name, score in chosen.items():
        study.families[name] = score.family
        study.scores[name] = metrics.series(run.values(name, score, study.points), study.index)
    title = " ".join([args.env, *args.env_option, f"({args.split}, {args.actor}, epsilon {args.epsilon})"])
    print(report.write(study, args.out, title, downstream.rewards(args.results, env.name) if args.results else {}))


if __name__ == "__main__":
    run_stage(main)
