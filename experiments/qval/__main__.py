"""Is a step score aligned with Q? Every score that the project knows against reference labels, without training.

    reads   RUN/sft/, and what the scorers ask for: RUN/qnet*/, RUN/trees.jsonl
    writes  RUN/qval/: points.jsonl, labels-REFERENCE.jsonl, predictions/NAME.json, report.md, alignment.json

    python -m experiments.qval --env frozenlake --env-option map=random8
    python -m experiments.qval search --env frozenlake -M 6    # every score steers the search
    python -m experiments.qval published LABELS.json FILE.json ...    # QVAL's own predictions by its own labels

This is the test of QVAL (Hernandez-Gutierrez et al.), which asks whether a score orders the actions of a state as their
true value does. Files that are there already are kept. With --results of `search` the report also says which figure of
alignment predicts the reward; experiments.qval.downstream does so over several environments.
"""

import dataclasses
import itertools
import sys
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
from tqdm import tqdm
from tyro.conf import arg

import envs
from experiments import drive_in_order
from experiments.qval import downstream, metrics, report, search
from experiments.qval.points import REFERENCES, Point, distinct, drawn, label, trajectory
from experiments.qval.scorers import Call, Context, Decision, Entry, Judge, answer, available, entry, inputs
from qlass import UserError, outputs
from qlass.batching import Sample
from qlass.chat import FLAGS, Rendering
from qlass.policy import set_first_messages
from qlass.settings import read, run_stage, runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Judge):
    stage: ClassVar[str] = "qval"
    plays_elsewhere: ClassVar[bool] = True

    points: int = 200  # states
    split: str = "test"  # tasks that they are from
    trajectories: int = 1  # of a task
    actor: Literal["agent", "expert", "random"] = "agent"  # behaviour policy
    epsilon: float = 0.25  # its share of uniform valid actions
    candidates: int = 4  # actions of a state
    references: tuple[str, ...] = ()  # exact, planner, expert, policy (all but policy)
    K: Annotated[int, arg(aliases=["-K"])] = 32  # rollouts of the reference policy
    gamma: float = 0.95  # discount of the labels, as QVAL has it
    scorers: tuple[str, ...] = ()  # all whose inputs are there
    against: str = "random"  # the scorer that others are compared with
    results: Path | None = runtime(None)  # of `search`: rewards to predict
    sft: Path | None = runtime(None)  # the agent (RUN/sft, made if missing)
    out: Path = runtime(Path("RUN/qval"))


def settings_of(argv: list[str]) -> Config:
    config = read(Config, __doc__, argv)
    there = REFERENCES.get(config.env, ("policy",))
    references = config.references or tuple(name for name in there if name != "policy") or ("policy",)
    for name in set(references) - {*there}:
        raise UserError(f"{config.env}: no {name} labels; choose among {', '.join(there)}")
    out = config.run / "qval" if config.out == Config.out else config.out
    return dataclasses.replace(config, references=references, out=out)


@dataclasses.dataclass
class Study:
    """Makes the files of a study, each if it is not there."""

    config: Config
    env: envs.TextEnv
    context: Context
    rendering: Rendering

    def driven(self, players: Iterable[Coroutine], what: str, n: int) -> Iterator[Any]:
        """What n players return, in their order."""
        answers = {Sample: lambda requests: self.context.agent().sample(requests), Call: answer}
        return iter(tqdm(drive_in_order(players, answers, self.env.side_by_side), what, n))

    def kept(self, name: str, lines: Iterable[dict], flags: Iterable[str], **inputs: Path | None) -> list[dict]:
        """The lines of a file, made first if it is not there. flags, inputs: what it depends on."""
        path = self.config.out / name
        flags = ["seed", *flags, *(FLAGS if "sft" in inputs else ())]  # how the agent samples
        settings = {flag: getattr(self.config, flag) for flag in flags} | self.env.settings
        outputs.begin(path, self.config, settings, inputs)
        if not path.exists():
            outputs.write_jsonl(path, lines)
        return list(outputs.read_jsonl(path))

    def points(self) -> list[Point]:
        """points.jsonl: the states that the behaviour policy visits."""
        args, tasks = self.config, self.env.task_ids(self.config.split)
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
        args, repeated = self.config, drawn(reference, points[0].task_id)
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

    def values(self, name: str, chosen: Entry, points: list[Point]) -> dict[str, Any]:
        """predictions/NAME.json, in QVAL's layout: what a score gives to the actions taken. Returns its metadata, which
        has the values of all candidates and, of a judge, how many answers there are and how many cannot be read."""
        path = self.config.out / "predictions" / f"{name}.json"
        sources = {"points": self.config.out / "points.jsonl", **inputs(chosen, self.context)}
        recipe, before = self.config.recipe(), outputs.meta_of(path)["recipe"]
        needed = [name for name in chosen.needs if name not in sources]
        another = any(before.get(name) != recipe.get(name) for name in (*needed, *FLAGS))
        if not path.exists() or another or outputs.changed_inputs(path):
            again = dataclasses.replace(self.config, overwrite=True)
            outputs.begin(path, again, recipe | self.env.settings, sources)
            self.context.counts.clear()
            lines = (predict(self.env.fork(), point, chosen, self.context) for point in points)
            values = list(self.driven(lines, name, len(points)))
            taken = [candidates[point.taken] for candidates, point in zip(values, points, strict=True)]
            metadata = {"ranking_point_hashes": [point.hash for point in points], "candidate_values": values}
            metadata |= self.context.counts  # of a judge's answers
            record = {"method_name": name, "method_type": "eval", "values": taken, "config": {}, "metadata": metadata}
            outputs.write_json(path, record)
        return outputs.read_json(path)["metadata"]


async def predict(env: envs.TextEnv, point: Point, chosen: Entry, context: Context) -> list:
    """A score's values of a point's candidates."""
    decision = Decision(env, point.restore(env), point.candidates, (point.task_id, "score", point.hash))
    values = await chosen.scores(context, decision)
    env.close()
    return [None if value is None else float(value) for value in values]


def read_predictions(path: str) -> list[list[float | None]]:
    """A file in QVAL's layout: the values of each point's candidates, of a ranking minus their places."""
    record = outputs.read_json(Path(path))
    if missing := {"config", "values"} - record.keys():
        raise UserError(f"{path}: no {missing.pop()}; is this one of QVAL's files of predictions?")
    counts = record["config"].get("candidate_counts") or [1] * len(record["values"])
    sign = -1 if record["config"].get("prediction_format") == "ranking_predicted" else 1
    values = iter([value if value is None else sign * value for value in record["values"]])
    return [list(itertools.islice(values, n)) for n in counts]


def published(*named: str) -> str:
    """The table of QVAL's own files of predictions by its labels, on the points that all of them have."""
    if len(named) < 2:
        raise UserError("qval published: name QVAL's file of labels, and one or more of predictions")
    labels, *paths = named
    rows = {Path(path).stem: read_predictions(path) for path in (labels, *paths)}
    n = min(map(len, rows.values()))
    points = [Point(str(i), [], [""] * len(row), 0, "", "") for i, row in enumerate(read_predictions(labels)[:n])]
    study = report.Study(points, against=Path(paths[0]).stem)
    values = {name: metrics.series(row[:n], study.index) for name, row in rows.items()}
    study.returns["published"] = values.pop(Path(labels).stem).to_frame(0)
    study.scores, study.families = values, dict.fromkeys(values, "published")
    label = study.labels()["published"]
    return report.table(study, "published", label, report.alignments(study, label))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["search"]:
        return search.main(argv[1:])
    if argv[:1] == ["published"]:
        return print(published(*argv[1:]))
    config = settings_of(argv)
    env = envs.from_config(config)
    if config.actor == "agent" or "policy" in config.references:
        config = dataclasses.replace(config, sft=outputs.find_or_make(config.sft, "sft", "sft", config))
    context = Context(config)
    chosen = {context.title(name): entry(name, context) for name in config.scorers or available(context)}
    if config.against != Config.against and config.against not in chosen:
        raise UserError(f"--against {config.against}: choose among {', '.join(chosen)}")
    rendering = context.agent().chat.rendering if config.sft else Rendering()
    set_first_messages(env, rendering, config)
    run = Study(config, env, context, rendering)
    study = report.Study(run.points(), config.against)
    if config.overwrite:
        outputs.remove(config.out / "predictions")
    for reference in config.references:
        study.returns[reference] = pd.DataFrame(run.returns(reference, study.points), study.index)
    for name, score in chosen.items():
        study.families[name] = score.family
        metadata = run.values(name, score, study.points)
        study.scores[name] = metrics.series(metadata["candidate_values"], study.index)
        if unread := metadata.get("unread"):
            study.unread[name] = f"{unread:,} of {metadata['answers']:,}"
    title = " ".join([config.env, *config.env_option, f"({config.split}, {config.actor}, epsilon {config.epsilon})"])
    print(
        report.write(study, config.out, title, downstream.rewards(config.results, env.name) if config.results else {})
    )


if __name__ == "__main__":
    run_stage(main)
