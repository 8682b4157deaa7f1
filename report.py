"""The report: result files -> one table with intervals, figures, and one HTML page with a tree viewer.

    python report.py                                   # runs/webshop: its results*.jsonl and q_labels.jsonl
    python report.py runs/a runs/b "100 demos=runs/c"  # several runs; LABEL=PATH distinguishes equal methods

Reads  results*.jsonl (files, or run folders that hold them), beside them qval*/ (experiments/qval) and *.updates.jsonl
       (experiments/learning.py), q_labels.jsonl or trees.jsonl for the tree viewer
Writes report.html (self-contained: opens from the disk, without a network), report.md (the tables, printed too) and
       the figures as PNG beside them

Every number is a mean over tasks with its 95 % interval (qlass/stats.py). Methods are compared on the same tasks,
and a difference whose interval contains 0 is called "undecided". A method that looks at the environment's true
reward before it answers is marked "oracle": no agent could do what it does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from qlass import UserError, cli
from qlass.files import replacing
from qlass.stats import Estimate, kendall, paired_difference, spearman
from reporting import claims, page
from reporting import figures as plots
from reporting.claims import nearest
from reporting.frontier import frontier
from reporting.results import Group, load_row, read_curves, read_results, result_files

PAPER_NOTE = (
    "Paper: Table 2 divided by 100 (Llama-2-7B-Chat; other model, other data; SciWorld and ALFWorld seen / unseen; its "
    "best-of-N picks by the true reward; on WebShop QLASS and best-of-N sample under a language model's paraphrases, "
    "without which the earlier version has .653 and .649). Tokens per task: generated = completion tokens of the "
    "policy, the paper's count; total = prompt computed + generated + scored by QNet."
)
DIFFERENCES = "Paired differences in reward, not corrected for the number of comparisons (the claims are)"
ALIGNMENT_NOTE = (
    "Alignment of step scores with Q on tasks that nothing was trained on (experiments/qval): rho, Spearman per state; "
    "gain, what the candidate with the highest score is worth beyond a random one, over what the best one is."
)
DEFAULT_RUN = Path("runs/webshop")
# -------------------------------------------------------------------------------------------------------------- tables


Table = tuple[list[str], list[list[str]]]  # head, rows


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def results_table(groups: Sequence[Group]) -> Table:
    head = ["environment", "method", "M", "N", "reward [95 %]", "tasks", "seeds (their means)", "success"]
    head += ["zero reward", "generated tokens", "total tokens", "env steps", "paper"]
    rows = []
    for group in groups:
        m = group.condition
        rows.append([m.env, m.name, str(m.M or "–"), str(m.N or "–"), f"{group.reward}", str(group.reward.n)])
        rows[-1] += [group.seeds(), number(group.mean("success"), 3), f"{group.zero_share():.3f}"]
        rows[-1] += [number(group.mean("generated")), number(group.mean("total")), number(group.mean("env_steps"), 1)]
        rows[-1].append(m.paper)
    return head, rows


def types_table(groups: Sequence[Group]) -> Table:
    """Mean reward by type of task, where there are several."""
    kinds = sorted({result.type for group in groups for result in group.results.values()} - {""})
    if len(kinds) < 2:
        return ["environment", "method"], []
    rows = []
    for group in groups:
        rewards = {kind: [r.reward for r in group.results.values() if r.type == kind] for kind in kinds}
        cells = [f"{sum(some) / len(some):.3f} ({len(some)})" if some else "–" for some in rewards.values()]
        rows.append([group.condition.env, f"{group.condition.name} {group.condition.budget}".strip(), *cells])
    return ["environment", "method", *(f"{kind} (episodes)" for kind in kinds)], rows


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Which methods are compared: each with greedy; QLASS with best-of-N; a labelled one with the same unlabelled."""
    for a in groups:
        for label in dict.fromkeys((a.condition.label, "")):  # greedy of the same run where it has one
            greedy = [b for b in groups if b.condition.method == "greedy" and b.condition.label == label]
            if greedy := [b for b in greedy if b.condition.env == a.condition.env]:
                yield a, greedy[0]
                break
        peers = [b for b in groups if b.condition.env == a.condition.env]
        peers = [b for b in peers if b.condition.label in (a.condition.label, "")]
        if a.condition.method == "qlass":
            for oracle in (False, True):
                own = [b for b in peers if (b.condition.method, b.condition.oracle) == ("best_of_n", oracle)]
                own = [b for b in own if b.condition.label == a.condition.label]
                if own and a.mean("total") > 0:  # at equal cost, and at an equal number of samples
                    yield a, nearest(a, own)
                yield from ((a, b) for b in own if (b.condition.N or 1) == (a.condition.M or 1) * (a.condition.N or 1))
        if a.condition.label:
            same = [b for b in peers if (b.condition.method, b.condition.label) == (a.condition.method, "")]
            kind = (a.condition.M, a.condition.N, a.condition.select)
            yield from ((a, b) for b in same if (b.condition.M, b.condition.N, b.condition.select) == kind)


def differences_table(groups: Sequence[Group]) -> Table:
    head = ["environment", "method", "minus", "difference [95 %]", "verdict", "tasks", "total tokens (ratio)"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for a, b in comparisons(groups):
        if a is b:
            continue
        difference = paired_difference(a.values("reward"), b.values("reward"), a.blocks)
        if difference.n == 0:
            continue
        names = [f"{g.condition.name} {g.condition.budget}".strip() for g in (a, b)]
        ratio = f"{a.mean('total') / b.mean('total'):.2f}" if b.mean("total") else "–"
        verdict = "undecided" if difference.covers_zero else "higher" if difference.mean > 0 else "lower"
        key = (a.condition.env, *names)
        rows[key] = [*key, f"{difference:+}", verdict, str(difference.n), ratio]
    return head, list(rows.values())


def calibration_table(groups: Sequence[Group]) -> Table:
    head = ["environment", "method", "scored steps", "Spearman's rho", "Kendall's tau-b"]
    rows = []
    for group in groups:
        q, returns = scored_steps(group)
        if len(q) > 1 and group.condition.method == "qlass" and not group.condition.oracle:
            some = slice(None, None, 1 + len(q) // 5000)  # tau is quadratic
            name = f"{group.condition.name} {group.condition.budget}".strip()
            rho, tau = spearman(q, returns), kendall(q[some], returns[some])
            rows.append([group.condition.env, name, str(len(q)), number(rho, 3), number(tau, 3)])
    return head, rows


def scored_steps(group: Group) -> tuple[list[float], list[float]]:
    """q of each action taken, and the final reward of its episode."""
    pairs = [(q, result.reward) for result in group.results.values() for q in result.q]
    return [q for q, _ in pairs], [reward for _, reward in pairs]


def alignment_table(folders: Iterable[Path]) -> Table:
    """What experiments/qval found out about the scores of these run folders."""
    head = ["points", "labels", "family", "score", "rho per state [95 %]", "states", "top-1", "gain", "global rho"]
    rows = []
    for path in sorted({path for folder in folders for path in folder.glob("qval*/alignment.json")}):
        try:
            record = json.loads(path.read_bytes())  # with NaN, where nothing could be measured
            for labels, found in record["labels"].items():
                for name, f in found.items():
                    figures = [number(f[key], 3) for key in ("top_1", "gain", "overall")]
                    about = [str(record["title"]), labels, str(f["family"]), name]
                    rho = f"{Estimate(**f['rho'])}" if f["states"] else "–"
                    rows.append([*about, rho, str(f["states"]), *figures])
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: not what experiments.qval writes ({error}); run it again, or delete this"
            ) from None
    return head, rows


def markdown(table: Table) -> str:
    head, rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------------- one task, Fig. 5


def cases(groups: Sequence[Group]) -> str:
    """Greedy and QLASS side by side: where QLASS gains most, where it loses most, and an episode with neither."""
    parts = []
    for greedy in (g for g in groups if g.condition.method == "greedy"):
        run = greedy.condition.env, "qlass", greedy.condition.label
        here = [(g, g.condition) for g in groups if not g.condition.oracle]
        guided = [g for g, condition in here if (condition.env, condition.method, condition.label) == run]
        if not guided:
            continue
        best = max(guided, key=lambda g: g.reward.mean)
        any_seed = {task: result for (task, _seed), result in sorted(greedy.results.items())}
        pairs = [(greedy.results.get(key, any_seed.get(key[0])), result) for key, result in best.results.items()]
        pairs = [(a, b) for a, b in pairs if a]
        pairs.sort(key=lambda pair: (pair[0].reward - pair[1].reward, pair[1].task, pair[1].seed))
        kinds = {
            "better": [(a, b) for a, b in pairs if b.reward > a.reward],
            "worse": [(a, b) for a, b in reversed(pairs) if b.reward < a.reward],
            "the same": [(a, b) for a, b in pairs if b.reward == a.reward],
        }
        counts = ", ".join(f"{name} in {len(kind)}" for name, kind in kinds.items())
        names = f"{greedy.condition.env}: QLASS {best.condition.budget} against {greedy.condition.name}"
        shown = "Shown: the largest gain, the largest loss, and one of the rest."
        parts.append(page.paragraph(f"{names}, by episodes: {counts}. {shown}"))
        for name, kind in kinds.items():
            for a, b in kind[:1]:
                title, opened = f"QLASS {name}: task {b.task}", name == "better"
                parts.append(page.case(title, load_row(a), load_row(b), opened))
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------------- main


def file_name(text: str) -> str:
    """Part of a file's name, whatever a result file calls its environment."""
    return re.sub(r"[^\w-]+", "_", text)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables, figures and an HTML page from result files.")
    parser.add_argument("results", nargs="*", help="results*.jsonl or run folders; LABEL=PATH names one (RUN)")
    parser.add_argument("--run", type=Path, help=f"run folder (that of the first result file, or {DEFAULT_RUN})")
    parser.add_argument("--trees", type=Path, help="q_labels.jsonl or trees.jsonl to show (default: the run folder's)")
    parser.add_argument("--max-trees", type=int, default=60, help="trees put into the page (%(default)s)")
    parser.add_argument("--out", type=Path, help="the page; report.md and the figures go beside it (RUN/report.html)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    sources = list(result_files(args.results or [str(args.run or DEFAULT_RUN)]))
    run = args.run or sources[0][1].parent
    groups = read_results(sources)
    out = args.out or run / "report.html"
    if out.suffix != ".html":
        raise UserError(f"{out}: the page is HTML, and its tables go beside it as .md: name the page .html")
    for path, begins in ((out, "<!doctype html"), (out.with_suffix(".md"), "| environment |")):
        if path.exists() and not path.read_bytes().startswith(begins.encode()):
            raise UserError(f"{path}: holds something else, which would be lost: name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    trees = args.trees or next((p for p in (run / "q_labels.jsonl", run / "trees.jsonl") if p.exists()), None)

    results, differences, calibration = results_table(groups), differences_table(groups), calibration_table(groups)
    verdicts, alignment = claims.sentences(groups), alignment_table({path.parent for _, path in sources})
    parts = [markdown(results), PAPER_NOTE, DIFFERENCES, markdown(differences)]
    if (types := types_table(groups))[1]:
        parts += ["Mean reward by type of task", markdown(types)]
    if verdicts:
        parts += ["Claims of the paper", "\n".join(f"- {sentence}" for sentence in verdicts), claims.NOTE]
    if alignment[1]:
        parts += [ALIGNMENT_NOTE, markdown(alignment)]
    text = "\n\n".join(parts) + "\n"
    with replacing(out.with_suffix(".md")) as file:
        file.write(text)
    print(text)

    figures = []
    for env in dict.fromkeys(group.condition.env for group in groups):
        here = [group for group in groups if group.condition.env == env]
        for draw in (plots.tokens, plots.targets, plots.calibration, frontier):
            if figure := draw(here):
                picture = out.with_name(f"{out.stem}_{draw.__name__}_{file_name(env)}.png")
                figures.append((draw.__name__, env, plots.save(figure, picture)))
        files, labels = {result.where[0] for group in here for result in group.results.values()}, {}
        for label, path in sources:
            if path in files:  # a folder of which files are named apart is still one
                labels[path.parent] = label if labels.get(path.parent, label) == label else ""
        if figure := plots.learning(read_curves((label, folder) for folder, label in labels.items())):
            picture = out.with_name(f"{out.stem}_learning_{file_name(env)}.png")
            figures.append(("learning", env, plots.save(figure, picture)))
    for forest in sorted({f for _, path in sources for f in path.parent.glob("qval*/*.png")}):
        figures.append(("calibration", " ".join(forest.parts[-3:-1]) + f", {forest.stem}", page.picture(forest)))
    content = {
        "results": page.table(*results) + page.paragraph(PAPER_NOTE),
        "claims": page.bullets(verdicts) + page.paragraph(claims.NOTE) if verdicts else "",
        "differences": page.table(*differences) + (page.table(*types) if types[1] else ""),
        "calibration": (page.table(*calibration) if calibration[1] else "")
        + (page.paragraph(ALIGNMENT_NOTE) + page.table(*alignment) if alignment[1] else ""),
        "figures": figures,
        "cases": cases(groups),
        "trees": page.tree_data(trees, args.max_trees),
        "inputs": [path for _, path in sources] + [trees] * bool(trees),
    }
    with replacing(out) as file:
        file.write(page.render(content))
    print(f"{out}, {out.with_suffix('.md')} and {len(figures)} figure{'s' * (len(figures) != 1)} beside them")


if __name__ == "__main__":
    cli.run_stage(main)
