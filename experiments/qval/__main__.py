"""Is a step score aligned with Q? Every score that the project knows against reference labels, without training.

    reads   RUN/sft/, and what the scorers ask for: RUN/qnet*/, RUN/trees.jsonl
    writes  RUN/qval/: points.jsonl, labels-REFERENCE.jsonl, predictions/NAME.json, report.md, forest-*.png

    python -m experiments.qval --env frozenlake --env-option map=random8

This is the test of QVAL (Hernandez-Gutierrez et al.), which asks whether a score orders the actions of a state as their
true value does. Files that are there already are kept. With --results of `q_search.py --method scorer`, where every
score steers the search, the report also says which figure of alignment predicts the reward; experiments.qval.downstream
does so over several environments. QVAL's image methods (VIP, LIV, VLM-RM, ...) are out of scope: these environments are
text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import envs
from experiments.qval import downstream, judges, labels, report
from experiments.qval.points import Point, distinct, trajectory
from experiments.qval.scorers import SCORERS, Call, Context, Scorer, answer, available, family, need_no_weights, scorer
from experiments.qval.steering import made_of
from qlass import UserError
from qlass.chat import Rendering
from qlass.cli import at_least, more, must_exist, needed, parse, parser, run_stage
from qlass.driver import Sample, drive
from qlass.files import progress, read_jsonl, read_meta, same_arguments, sha256, write_jsonl, write_meta
from qlass.flags import add_loading, add_sampling


def predict(env: envs.TextEnv, point: Point, score: Scorer) -> Generator[Any, Any, list[float | None]]:
    """A scorer's values of a point's candidates."""
    state = point.restore(env)
    here = env.snapshot()
    values = yield from score(env, state, list(point.candidates), (point.task_id, "score", point.hash))
    env.restore(here)
    env.close()
    return [None if value is None else float(value) for value in values]


def sources(name: str, context: Context) -> dict[str, str]:
    """{what a scorer is made of: its hash, of a judge its model}; where that has changed, it is scored again."""
    if family(name, context) == "judge":
        return {"judge": name.partition("=")[2]}
    return {path.name: sha256(path) for path in made_of(name, context)}


def start_again(folder: Path) -> None:
    """Delete what this script writes; predictions from elsewhere, which do not say what they are made from, stay."""
    figures = [f"{name}.{kind}" for name in ("forest-*", "rollouts", "downstream") for kind in ("png", "svg")]
    for pattern in ("points.*", "labels-*", "labels/*.json", "report.md*", "alignment.json", *figures):
        for path in folder.glob(pattern):
            path.unlink()
    for path in folder.glob("predictions/*.json"):
        if "made_from" in report.config_of(path):
            path.unlink()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    envs.add_arguments(made, argv)
    add = made.add_argument
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
    add("--results", type=Path, metavar="FILE", help="of q_search.py --method scorer: rewards to predict")
    add("--sft", type=Path, help="the agent (default: RUN/sft, made if missing)")
    add("--base", type=Path, help="checkpoint for log_ratio (default: RUN/base, if there)")
    add("--out", type=Path, metavar="DIR", help="default: RUN/qval")
    add("--device")
    more(made, add_loading, add_sampling)
    args = parse(made, argv)
    args.references = args.references or [r for r in labels.references(args.env) if r != "policy"] or ["policy"]
    for reference in args.references:
        labels.known(args.env, reference)
    for stem in (Path(file).stem for file in args.code):
        if stem in {*SCORERS, *judges.JUDGES} or stem.startswith("qnet"):
            raise UserError(f"--code: {stem} is a score's name already: rename the file")
    if args.judge and not any(name.partition("=")[0] in judges.JUDGES for name in args.scorers or ()):
        raise UserError(f"--judge: say with --scorers what it judges: {', '.join(judges.JUDGES)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.out = args.out or args.run / "qval"
    must_exist(args.results)
    if args.actor == "agent" or "policy" in args.references:
        args.sft = needed(args.sft, args.run / "sft", "sft", args)
    judge = judges.load(args.judge, args.device, args.seed, args.plain) if args.judge else None
    context = Context(
        args.env, args.run, args.sft, args.base, judge, tuple(map(Path, args.code)), args.gamma, args.seed, args.device,
        args,
    )  # fmt: skip
    if args.server:
        need_no_weights(args.scorers or available(context), context)
    rendering = context.policy.chat.rendering if args.sft else Rendering()
    answers = {Sample: lambda requests: context.policy.sample(requests), Call: answer}

    if args.overwrite and env.task_ids(args.split):  # a wrong split is told before anything is lost
        start_again(args.out)

    def timed(path: Path, records: Any, total: int, load: Callable, *names: str) -> list:
        """Write what `records` yields to `path`, with how long it took, or keep what is there; then load each line."""
        depends = ("env", "run", "seed", *args.env_flags, *names)
        if path.exists():
            same_arguments(path, {name: getattr(args, name) for name in depends})
        else:
            started = time.process_time()
            made = list(progress(records(), path.stem, total))
            write_jsonl(path, made)
            write_meta(path, vars(args), [args.sft], cpu_seconds=time.process_time() - started)
        try:
            return [load(record) for record in read_jsonl(path)]
        except (KeyError, TypeError, ValueError):
            again = "delete it, or start the study again with --overwrite"
            raise UserError(f"{path}: has lines that this script did not write; {again}") from None

    def collect() -> Any:
        lots = [(task, number) for number in range(args.trajectories) for task in env.task_ids(args.split)]
        walks = (
            trajectory(env.fork(), task, number, args.actor, args.epsilon, args.candidates, rendering, args.seed)
            for task, number in lots
        )
        return (point.dump() for point in distinct(drive(walks, answers, env.side_by_side, in_order=True), args.points))

    about = ("points", "split", "trajectories", "actor", "epsilon", "candidates", *["sft"] * (args.actor == "agent"))
    points = timed(args.out / "points.jsonl", collect, args.points, Point.load, *about)
    if not points:
        raise UserError(f"{args.env}: no trajectory of --split {args.split} is longer than three turns")

    returns, spent = {}, {}
    for reference in args.references:

        def lines(reference: str = reference) -> Any:
            made = (labels.label(env.fork(), p, reference, args.K, args.gamma, rendering) for p in points)
            return drive(made, answers, env.side_by_side, in_order=True)

        path = args.out / f"labels-{reference}.jsonl"
        about = ("gamma", *["K"] * labels.drawn(reference, points[0].task_id), *["sft"] * (reference == "policy"))
        found = timed(path, lines, len(points), labels.load, *about)
        if [point for point, _ in found] != [p.hash for p in points]:
            raise UserError(f"{path}: labels of other points; delete it, or start the study again with --overwrite")
        returns[reference] = [some for _, some in found]
        spent[reference] = read_meta(path).get("cpu_seconds", float("nan"))
        for name, how in labels.variants(reference, returns[reference]).items():
            config = {"reference": reference, "rollouts": len(returns[reference][0][0]), "discount_factor": args.gamma}
            values = labels.values(returns[reference], how)
            report.write_prediction(args.out / "labels", name.replace(" ", "-"), points, values, config, "gt")

    wanted = [judges.full_name(name, judge) for name in args.scorers or available(context)]
    folder = args.out / "predictions"
    for name in wanted:
        made_from = sources(name, context)
        if not report.made_from(folder / f"{name}.json", made_from):
            score, started = scorer(name, context), time.process_time()
            made = (predict(env.fork(), p, score) for p in points)
            made = progress(drive(made, answers, env.side_by_side, in_order=True), name, len(points))
            config = {"family": family(name, context), "discount_factor": args.gamma, "judge": args.judge}
            config["made_from"] = made_from
            values = list(made)
            config["cpu_seconds"] = round(time.process_time() - started, 2)
            report.write_prediction(folder, name, points, values, config)
    predictions, families, stale = report.read_predictions(folder, points, lambda name: sources(name, context))

    study = report.Study(points, returns, predictions, families, args.against, spent, stale)
    title = " ".join([args.env, *args.env_option, f"({args.split}, {args.actor}, epsilon {args.epsilon})"])
    print(report.write(study, args.out, title, downstream.rewards(args.results, env.name) if args.results else {}))
    write_meta(args.out / "report.md", vars(args), [args.sft])


if __name__ == "__main__":
    run_stage(main)
