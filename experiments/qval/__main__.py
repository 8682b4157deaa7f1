"""Is a step score aligned with Q? Every score that the project knows against reference labels, without training.

    reads   RUN/sft/, and what the scorers ask for: RUN/qnet*/, RUN/trees.jsonl
    writes  RUN/qval/: points.jsonl, labels-REFERENCE.jsonl, predictions/NAME.json, report.md, forest-*.png

    python -m experiments.qval --env frozenlake --env-option map=random8
    python -m experiments.qval search --env frozenlake -M 6    # every score steers the search

This is the test of QVAL (Hernandez-Gutierrez et al.), which asks whether a score orders the actions of a state as their
true value does. Files that are there already are kept. With --results of `search` the report also says which figure of
alignment predicts the reward; experiments.qval.downstream does so over several environments. QVAL's image methods (VIP,
LIV, VLM-RM, ...) are out of scope: these environments are text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

import envs
from experiments.qval import downstream, judges, labels, metrics, published, report, search
from experiments.qval.points import Point, distinct, trajectory
from experiments.qval.scorers import (
    SCORERS,
    Call,
    Context,
    Scorer,
    answer,
    available,
    entry,
    need_no_weights,
    scorer,
    sources,
)
from qlass import UserError
from qlass.chat import Rendering
from qlass.cli import at_least, more, must_exist, needed, parse, parser, run_stage
from qlass.driver import Sample, drive
from qlass.files import progress, same_arguments, write_jsonl, write_meta
from qlass.flags import add_loading, add_sampling, begin_as_cloned
from qlass.records import read_jsonl


def arguments(argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["search"]:
        return search.arguments(argv[1:])
    flags = parser(__doc__)
    envs.add_arguments(flags, argv)
    add = flags.add_argument
    add("--points", type=at_least(1), default=200, metavar="N", help="states (default: %(default)s)")
    add("--split", default="test", help="tasks that they are from (default: %(default)s)")
    add("--trajectories", type=at_least(1), default=1, metavar="N", help="a task (default: %(default)s)")
    actors, share = ["agent", "expert", "random"], at_least(0, float, below=1)
    add("--actor", choices=actors, default="agent", help="behaviour policy (default: %(default)s)")
    add("--epsilon", type=share, default=0.25, help="its share of uniform valid actions (default: %(default)s)")
    add("--candidates", type=at_least(1), default=4, metavar="N", help="actions a state (default: %(default)s)")
    add("--references", nargs="+", metavar="NAME", help="exact, planner, expert, policy (default: all but policy)")
    add("-K", type=at_least(1), default=32, help="rollouts of the reference policy (default: %(default)s)")
    add("--gamma", type=share, default=0.95, help="discount of the labels (%(default)s, QVAL)")
    add("--scorers", nargs="+", metavar="NAME", help="default: all whose inputs are there")
    add("--against", default="random", metavar="NAME", help="the scorer that others are compared with (%(default)s)")
    add("--code", nargs="+", default=[], metavar="FILE.py", help="files with a signal_function")
    add("--judge", metavar="URL#MODEL|DIR", help="language model of the judges: a chat server, or a HuggingFace model")
    add("--results", type=Path, metavar="FILE", help="of `search`: rewards to predict")
    add("--sft", type=Path, help="the agent (default: RUN/sft, made if missing)")
    add("--base", type=Path, help="checkpoint for log_ratio (default: RUN/base, if there)")
    add("--out", type=Path, metavar="DIR", help="default: RUN/qval")
    add("--device")
    more(flags, add_loading, add_sampling)
    args = parse(flags, argv)
    args.references = args.references or [r for r in labels.references(args.env) if r != "policy"] or ["policy"]
    for reference in args.references:
        labels.check(args.env, reference)
    for name in (Path(path).stem for path in args.code):
        if name in SCORERS or name.startswith("qnet"):
            raise UserError(f"--code: {name} is a score's name already: rename the file")
    if args.judge and not any(name.partition("=")[0] in judges.JUDGES for name in args.scorers or ()):
        raise UserError(f"--judge: say with --scorers what it judges: {', '.join(judges.JUDGES)}")
    return args


def start_again(folder: Path) -> None:
    """Delete what this script writes; predictions from elsewhere, which do not say what they are made from, stay."""
    figures = [f"{name}.{kind}" for name in ("forest-*", "rollouts", "downstream") for kind in ("png", "svg")]
    for pattern in ("points.*", "labels-*", "labels/*.json", "report.md*", "alignment.json", *figures):
        for path in folder.glob(pattern):
            path.unlink()
    for path in folder.glob("predictions/*.json"):
        if "made_from" in published.read(path)["config"]:
            path.unlink()


def kept(path: Path, args: argparse.Namespace, names: Iterable[str], records: Iterable[dict], total: int,
         load: Callable) -> list:  # fmt: skip
    """The lines of a file, written first if it is not there. names: the flags that it depends on."""
    names = ("env", "run", "seed", *args.env_flags, *names)
    if path.exists():
        same_arguments(path, {name: getattr(args, name) for name in names})
    else:
        started = time.process_time()
        write_jsonl(path, list(progress(records, path.stem, total)))
        write_meta(path, vars(args), [args.sft], cpu_seconds=time.process_time() - started)
    try:
        return [load(record) for record in read_jsonl(path)]
    except (KeyError, TypeError, ValueError):
        again = "delete it, or start the study again with --overwrite"
        raise UserError(f"{path}: has lines that this script did not write; {again}") from None


def collected(args: argparse.Namespace, env: envs.TextEnv, driven: Callable, rendering: Rendering) -> list[Point]:
    """points.jsonl: the states that the behaviour policy visits."""
    walks = (
        trajectory(env.fork(), task, number, args.actor, args.epsilon, args.candidates, rendering, args.seed)
        for number in range(args.trajectories) for task in env.task_ids(args.split)
    )  # fmt: skip
    flags = ["points", "split", "trajectories", "actor", "epsilon", "candidates", *["sft"] * (args.actor == "agent")]
    records = (vars(point) for point in distinct(driven(walks), args.points))
    points = kept(args.out / "points.jsonl", args, flags, records, args.points, Point.load)
    if not points:
        raise UserError(f"{args.env}: no trajectory of --split {args.split} is longer than three turns")
    return points


def labelled(args: argparse.Namespace, env: envs.TextEnv, driven: Callable, rendering: Rendering, reference: str,
             study: report.Study) -> pd.DataFrame:  # fmt: skip
    """labels-REFERENCE.jsonl and, in QVAL's layout, labels/: the returns of each candidate (candidates, K)."""
    points, path = study.points, args.out / f"labels-{reference}.jsonl"
    lines = driven(labels.label(env.fork(), p, reference, args.K, args.gamma, rendering) for p in points)
    flags = ["gamma", *["K"] * labels.drawn(reference, points[0].task_id), *["sft"] * (reference == "policy")]
    records = kept(path, args, flags, lines, len(points), labels.load)
    if [point for point, _ in records] != [point.hash for point in points]:
        raise UserError(f"{path}: labels of other points; delete it, or start the study again with --overwrite")
    returns = pd.DataFrame([row for _, state in records for row in state], study.index)
    config = {"reference": reference, "rollouts": returns.shape[1], "discount_factor": args.gamma}
    for name, values in labels.variants(reference, returns).items():
        nested = [state.tolist() for _, state in values.groupby("state")]
        published.write(args.out / "labels", name.replace(" ", "-"), points, nested, config, "gt")
    return returns


def predict(env: envs.TextEnv, point: Point, score: Scorer) -> Generator[Any, Any, list[float | None]]:
    """A score's values of a point's candidates."""
    state = point.restore(env)
    values = yield from score(env, state, list(point.candidates), (point.task_id, "score", point.hash))
    env.close()
    return [None if value is None else float(value) for value in values]


def scored(name: str, context: Context, env: envs.TextEnv, driven: Callable, points: list[Point]) -> None:
    """predictions/NAME.json, if there is none that is made from what there is now."""
    args, made_from = context.args, sources(name, context)
    folder = args.out / "predictions"
    path = folder / f"{name}.json"
    if path.exists() and published.is_current(published.read(path), made_from):
        return
    score, started = scorer(name, context), time.process_time()
    values = list(progress(driven(predict(env.fork(), point, score) for point in points), name, len(points)))
    config = {"family": entry(name, context).family, "discount_factor": args.gamma, "judge": args.judge}
    config |= {"made_from": made_from, "cpu_seconds": round(time.process_time() - started, 2)}
    published.write(folder, name, points, values, config)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["search"]:
        return search.main(argv[1:])
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.out = args.out or args.run / "qval"
    must_exist(args.results)
    if args.actor == "agent" or "policy" in args.references:
        args.sft = needed(args.sft, args.run / "sft", "sft", args)
    context = Context(args, judges.load(args.judge, args.device, args.seed, args.plain) if args.judge else None)
    names = [judges.full_name(name, context.judge) for name in args.scorers or available(context)]
    if args.server:
        need_no_weights(names, context)
    rendering = context.agent().chat.rendering if args.sft else Rendering()
    begin_as_cloned(env, rendering, args)
    answers = {Sample: lambda requests: context.agent().sample(requests), Call: answer}

    def driven(generators: Iterable[Generator]) -> Iterable[Any]:
        return drive(generators, answers, env.side_by_side, in_order=True)

    if args.overwrite and env.task_ids(args.split):  # a wrong split is told before anything is lost
        start_again(args.out)
    study = report.Study(collected(args, env, driven, rendering), args.against)
    for reference in args.references:
        study.returns[reference] = labelled(args, env, driven, rendering, reference, study)
    for name in names:
        scored(name, context, env, driven, study.points)
    predictions, study.stale = published.read_folder(
        args.out / "predictions", study.points, lambda name: sources(name, context)
    )
    for name, (family, values) in predictions.items():
        study.scores[name] = metrics.series(values, study.index)
        study.families[name] = family if family in report.FAMILIES else "judge"
    title = " ".join([args.env, *args.env_option, f"({args.split}, {args.actor}, epsilon {args.epsilon})"])
    print(report.write(study, args.out, title, downstream.rewards(args.results, env.name) if args.results else {}))
    write_meta(args.out / "report.md", vars(args), [args.sft])


if __name__ == "__main__":
    run_stage(main)
