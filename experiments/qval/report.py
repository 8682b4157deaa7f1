"""Points, labels and predictions of a folder -> tables (report.md), figures, and alignment.json for the HTML report.

Predictions are kept in QVAL's own layout: NAME.json holds a value for each point's taken action, NAME_ranking.json the
ranks of all candidates. Such files written by QVAL's tools are read too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from experiments.qval import downstream, metrics
from experiments.qval import labels as reference_labels
from experiments.qval.metrics import Alignment, alignment, as_ranks
from experiments.qval.points import Point
from qlass import UserError
from qlass.files import is_number, is_text, maybe, read_object, replacing, wrong
from qlass.stats import Estimate, bootstrap, by_task, holm, spearman
from reporting.figures import SERIES, STYLE, save

FAMILIES = downstream.FAMILIES
KINDS = {  # of a file of predictions
    "method_name": is_text, "values": lambda v: isinstance(v, list) and all(map(maybe(is_number), v)),
    "config": maybe(lambda v: isinstance(v, dict)), "metadata": maybe(lambda v: isinstance(v, dict)),
}  # fmt: skip
NOTE = (
    "rho: Spearman per state, mean of the tasks' means, 95 % over tasks (those of one product or lake count as one). "
    "tied: states whose labels are all equal, or with one candidate; no rho there. minus {against}: the difference in "
    "rho on the states that both have, p by sign flips over tasks, Holm. failures last: rho with candidates without a "
    "score ranked last. centred: global Spearman of scores and labels without their state's mean. global, tau: "
    "Spearman and Kendall over all (s, a); actor, actor tau: over the actions taken, QVAL's published figure. top-1, "
    "gain: of the highest score, ties in expectation."
)

# -------------------------------------------------------------------------------------------------- QVAL's file layout


def write_prediction(
    folder: Path, name: str, points: Sequence[Point], values: metrics.Values, config: dict, kind: str = "eval"
) -> None:
    """values: of each point's candidates. The file of one value a point carries them all in its metadata."""
    counts = [len(some) for some in values]
    about = {"ranking_point_hashes": [point.hash for point in points], "num_ranking_points": len(points),
             "total_candidates": sum(counts)}  # fmt: skip
    taken = [some[point.taken] for some, point in zip(values, points, strict=True)]
    single = {"method_name": name, "method_type": kind, "values": taken, "config": config}
    single["metadata"] = {**about, "candidate_values": [list(some) for some in values]}
    ranking = {"method_name": name, "method_type": kind, "values": [rank for some in values for rank in as_ranks(some)]}
    ranking["config"] = {**config, "prediction_format": "ranking_predicted", "candidate_counts": counts}
    ranking["metadata"] = about
    for file, record in ((f"{name}.json", single), (f"{name}_ranking.json", ranking)):
        with replacing(folder / file) as out:
            json.dump(record, out, indent=1)


def read_prediction(path: Path, points: Sequence[Point]) -> tuple[str, dict, list[list[float | None]]]:
    """Name, config and the values of each point's candidates, from our file or from one of QVAL's own.

    A file with one value a point knows the actions taken alone.
    """
    record = read_object(path)
    if mistake := wrong(record, KINDS, ["method_name", "values"]):
        raise UserError(f"{path}: {mistake}; delete it, or name another --out")
    values, config, metadata = record["values"], record.get("config") or {}, record.get("metadata") or {}
    if "candidate_values" in metadata:
        found = metadata["candidate_values"]
    elif counts := config.get("candidate_counts"):
        found = by_point(values, counts)
    else:
        found = [[v if i == p.taken else None for i in range(len(p.candidates))]
                 for v, p in zip(values, points, strict=False)]  # fmt: skip
    hashes = metadata.get("ranking_point_hashes", [p.hash for p in points])
    sizes = [len(p.candidates) for p in points]
    if [len(some) for some in found] != sizes or hashes != [p.hash for p in points]:
        raise UserError(f"{path}: predictions for other points; delete it, or name another --out")
    return record["method_name"], config, found


def by_point(ranking: Sequence[float | None], counts: Sequence[int]) -> list[list[float | None]]:
    """A ranking's places by point, their sign turned: the best is the highest, as of any score."""
    if sum(counts) != len(ranking):
        raise UserError(f"a ranking of {len(ranking)} candidates, where its candidate_counts add up to {sum(counts)}")
    turned = [None if place is None else -place for place in ranking]
    return [turned[a:b] for a, b in itertools.pairwise(np.cumsum([0, *counts]))]


def made_from(path: Path, sources: dict[str, str]) -> bool:
    """Whether there is a prediction from these very sources; one from elsewhere says nothing of its own."""
    if not path.exists():
        return False
    return config_of(path).get("made_from", sources) == sources


def config_of(path: Path) -> dict:
    return read_object(path).get("config") or {}


def read_predictions(
    folder: Path, points: Sequence[Point], sources: Callable[[str], dict[str, str]]
) -> tuple[dict[str, list], dict[str, str], list[str]]:
    """{name: values} and {name: family} of what is there; a ranking counts where it stands alone.

    sources(name): what a score would be made from now. The names of those made from something else come last.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    names = {stem: stem.removesuffix("_ranking") for stem in files}
    alone = {name: files[stem] for stem, name in names.items() if name == stem or name not in files}
    stale = [name for name, path in alone.items() if not made_from(path, sources(name))]
    read = [read_prediction(path, points) for name, path in alone.items() if name not in stale]
    called = [name for name, *_ in read]
    if twice := [name for name in called if called.count(name) > 1]:
        raise UserError(f"{folder}: two files are predictions of {twice[0]!r}: rename one's method_name, or delete it")
    families = {name: family if (family := config.get("family")) in FAMILIES else "judge" for name, config, _ in read}
    return {name: some for name, _, some in read}, families, stale


# --------------------------------------------------------------------------------------------------------------- tables


@dataclasses.dataclass
class Study:
    """All that was found out about some points."""

    points: list[Point]
    returns: dict[str, list[list[list[float]]]]  # reference: of each point's candidates
    predictions: dict[str, list[list[float | None]]]
    families: dict[str, str]
    against: str = "random"
    spent: dict[str, float] = dataclasses.field(default_factory=dict)  # reference: CPU seconds of its labels
    stale: Sequence[str] = ()  # scores that are left out

    @property
    def blocks(self) -> list[str]:
        """Of each point its task, or the tasks that vary together with it (TextEnv.block)."""
        return [point.block or point.task_id for point in self.points]

    def orders(self, name: str) -> bool:
        """Whether a score differs within any state; one that does not chooses at random."""
        return any(len(set(scores)) > 1 for scores in self.predictions[name])

    def actor(self, name: str, values: list[float]) -> float:
        """Global Spearman of the scores of the actions taken with one value a state."""
        taken = [some[point.taken] for some, point in zip(self.predictions[name], self.points, strict=True)]
        return metrics.correlation(spearman, [(s, v) for s, v in zip(taken, values, strict=True) if s is not None])

    def labels(self) -> dict[str, list[list[float]]]:
        return {
            name: reference_labels.values(returns, how)
            for reference, returns in self.returns.items()
            for name, how in reference_labels.variants(reference, returns).items()
        }

    def alignments(self, labels: list[list[float]]) -> dict[str, Alignment]:
        """Best first within a family, families in their order."""
        taken = [point.taken for point in self.points]
        found = {name: alignment(self.blocks, taken, some, labels) for name, some in self.predictions.items()}
        place = list(FAMILIES)
        return dict(sorted(found.items(), key=lambda f: (place.index(self.families[f[0]]), -nan_last(f[1].rho.mean))))

    def differences(self, labels: list[list[float]]) -> dict[str, tuple[Estimate, float]]:
        """In per-state rho to `against` on the candidates that both have scored, with its p, Holm over all."""
        base, found = self.predictions.get(self.against), {}
        for name, scores in self.predictions.items():
            if base is None or name == self.against:
                continue
            pairs = [  # each score beside the other's, without those that one of them lacks
                [(None, None) if None in pair else pair for pair in zip(*state, strict=True)]
                for state in zip(scores, base, strict=True)
            ]
            sides = ([[pair[i] for pair in state] for state in pairs] for i in (0, 1))
            ours, theirs = (metrics.per_state(self.blocks, side, labels) for side in sides)
            if both := ours.keys() & theirs.keys():
                found[name] = list(by_task({k: ours[k] - theirs[k] for k in both}).values())
        p = holm([metrics.sign_flip(values) for values in found.values()])
        return {name: (bootstrap(values), q) for (name, values), q in zip(found.items(), p, strict=True)}


def nan_last(value: float) -> float:
    return -2.0 if math.isnan(value) else value


def cell(value: float) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def table(study: Study, name: str, labels: list[list[float]], found: dict[str, Alignment]) -> str:
    beyond = study.differences(labels)
    head = f"family|scorer|rho per state [95 %]|minus {study.against} [95 %]|p|states|failures last|coverage|top-1|gain"
    head += "|centred|global|tau|actor|actor tau"
    rows = []
    for scorer, a in found.items():
        difference, p = beyond.get(scorer, (None, math.nan))
        more = f"{difference:+}" if difference else "–"
        row = [study.families[scorer], scorer, f"{a.rho}" if a.states else "–", more, cell(p), str(a.states)]
        figures = (a.failed_last, a.coverage, a.top_1, a.gain, a.centred, a.overall, a.tau, a.actor, a.actor_tau)
        rows.append(row + [cell(value) for value in figures])
    reference = name.split()[0]
    how = reference_labels.variants(reference, study.returns[reference])[name]
    tied, alone = sum(not metrics.ordered(of) for of in labels), sum(len(of) < 2 for of in labels)
    exact = reference in reference_labels.EXACT
    noise = 1.0 if exact else metrics.label_ceiling(study.blocks, study.returns[reference], how)
    ties = metrics.permutation_ceiling(study.blocks, labels)
    tasks = len({point.task_id for point in study.points})
    told = (
        f"### Labels: {name}\n\n{len(labels)} states of {tasks} tasks, {tied} tied ({alone} with one "
        f"candidate). Ceilings per state: {cell(noise)} for the labels' noise, {cell(ties)} for a ranking without ties."
    )
    lines = [head.split("|"), ["---"] * (head.count("|") + 1), *rows]
    return told + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def references_table(study: Study, found: dict[str, dict[str, Alignment]]) -> str:
    """How far two sets of labels agree, and whether they order the scorers alike."""
    labels = study.labels()
    names = list(labels)
    order = {n: [nan_last(found[n][scorer].rho.mean) for scorer in sorted(found[n])] for n in names}
    lines = ["| labels | and | global | per state that the second orders | order of the scorers |"]
    lines.append("|---|---|---|---|---|")
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            flat = [[v for some in labels[n] for v in some] for n in (a, b)]
            per = metrics.mean_of(metrics.per_state(study.blocks, labels[a], labels[b]))
            cells = (spearman(*flat), per, spearman(order[a], order[b]))
            lines.append(f"| {a} | {b} | " + " | ".join(map(cell, cells)) + " |")
    for name in names:  # QVAL's V targets: what the state is worth, whatever was done there
        v = list(map(max, labels[name]))
        of_v = [nan_last(study.actor(scorer, v)) for scorer in sorted(found[name])]
        of_q = [nan_last(found[name][scorer].actor) for scorer in sorted(found[name])]
        lines.append(f"| {name} | its V(s), over the actions taken | – | – | {cell(spearman(of_q, of_v))} |")
    return "\n".join(lines)


def rollouts(study: Study) -> tuple[str, list[tuple[str, int, str, Alignment]]]:
    """Labels from the first K rollouts against the exact ones: what K buys, for the maximum and for the mean."""
    truth = next((r for r in reference_labels.EXACT if r in study.returns), "")
    drawn = {r: returns for r, returns in study.returns.items() if len(reference_labels.variants(r, returns)) > 1}
    found = []
    exact = study.labels().get(truth)
    taken = [point.taken for point in study.points]
    for reference, returns in drawn.items() if exact else ():
        most = min(len(some) for state in returns for some in state)
        for k in [2**i for i in range(most.bit_length()) if 2**i <= most]:
            first = [[some[:k] for some in state] for state in returns]
            for how in ("max", "mean"):
                values = reference_labels.values(first, how)
                found.append((reference, k, how, alignment(study.blocks, taken, values, exact)))
    return truth, found


def rollouts_table(truth: str, found: list[tuple[str, int, str, Alignment]]) -> str:
    head = f"| reference | K | of the returns | rho per state with {truth} [95 %] | global | top-1 |"
    lines = [f"| {reference} | {k} | {how} | {a.rho} | {cell(a.overall)} | {cell(a.top_1)} |"
             for reference, k, how, a in found]  # fmt: skip
    return "\n".join([head, "|---" * 6 + "|", *lines]) if lines else ""


# -------------------------------------------------------------------------------------------------------------- figures


def forest(study: Study, found: dict[str, Alignment]) -> Figure:
    """rho per state with its interval, and the global one beside it."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 1 + 0.27 * len(found)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        for y, (name, a) in enumerate(reversed(found.items())):
            colour = FAMILIES[study.families[name]]
            if not math.isnan(a.rho.mean):
                spread = [[a.rho.mean - a.rho.low], [a.rho.high - a.rho.mean]]
                left.errorbar(a.rho.mean, y, xerr=np.nan_to_num(spread), fmt="o", color=colour)
            else:
                left.text(0.02, y, "no state with two scores", va="center", fontsize=8, color="#8c8c8c")
            right.plot(a.overall, a.rho.mean, "o", color=colour)
        left.set_yticks(range(len(found)), [f"{name} ({study.families[name]})" for name in reversed(found)])
        left.axvline(0, color="#8c8c8c", linewidth=0.8)
        left.set_xlabel("Spearman per state")
        right.set_xlabel("global Spearman")
        right.set_ylabel("per state")
        right.axline((0, 0), slope=1, color="#8c8c8c", linewidth=0.8)
    return figure


def by_rollouts(truth: str, found: list[tuple[str, int, str, Alignment]]) -> Figure:
    """rho of labels against K: their maximum in full lines, their mean in broken ones."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.6), layout="constrained")
        axes = figure.subplots()
        for n, reference in enumerate(dict.fromkeys(r for r, *_ in found)):
            for how, line in (("max", "-"), ("mean", "--")):
                here = [(k, a.rho) for r, k, h, a in found if (r, h) == (reference, how)]
                ks = [k for k, _ in here]
                axes.fill_between(ks, [e.low for _, e in here], [e.high for _, e in here], color=SERIES[n], alpha=0.15)
                axes.plot(ks, [e.mean for _, e in here], line, marker="o", color=SERIES[n], label=f"{reference}, {how}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, ks)
        axes.set_xlabel("K rollouts")
        axes.set_ylabel(f"Spearman per state with {truth}")
        axes.legend()
    return figure


# ---------------------------------------------------------------------------------------------------------------- whole


def write(study: Study, folder: Path, title: str, rewards: dict[str, dict[str, float]]) -> str:
    """report.md, the figures and alignment.json in `folder`; returns the report."""
    parts, record = [f"## {title}", NOTE.format(against=study.against)], {}
    if study.spent:
        parts.append("CPU seconds of the labels: " + ", ".join(f"{n} {s:.2f}" for n, s in study.spent.items()) + ".")
    if study.stale:
        names = ", ".join(study.stale)
        parts.append(f"Left out, as made from something else than there is now, or than this call names: {names}.")
    all_labels = study.labels()
    every = {name: study.alignments(labels) for name, labels in all_labels.items()}
    for name, found in every.items():
        parts.append(table(study, name, all_labels[name], found))
        record[name] = {scorer: {"family": study.families[scorer], "orders": study.orders(scorer),
                                 **dataclasses.asdict(a)}
                        for scorer, a in found.items()}  # fmt: skip
        draw(forest(study, found), folder / f"forest-{name.replace(' ', '-')}.png")
    summary = {"title": title, "labels": record, "rewards": rewards}
    with replacing(folder / "alignment.json") as out:
        json.dump(summary, out, indent=1)
    truth, by_k = rollouts(study)
    if by_k:
        draw(by_rollouts(truth, by_k), folder / "rollouts.png")
    played = downstream.played(summary)
    if played:
        draw(downstream.figure([played]), folder / "downstream.png")
    for heading, text in (
        ("References", references_table(study, every)),
        ("What rollouts buy", rollouts_table(truth, by_k)),
        ("Alignment against downstream reward", downstream.table([played]) if played else ""),
    ):
        parts += [f"### {heading}\n\n{text}"] if text else []
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def draw(figure: Figure, path: Path) -> None:
    path.with_suffix(".svg").write_text(save(figure, path), encoding="utf-8")
