"""The report: result files -> one HTML page with the figures, tables and a tree viewer, and the tables as text.

    python report.py                                   # runs/webshop: its results*.jsonl and q_labels.jsonl
    python report.py runs/a runs/b "100 demos=runs/c"  # several runs; LABEL=PATH distinguishes equal methods

Reads  results*.jsonl (files, or run folders that hold them), q_labels.jsonl or trees.jsonl for the tree viewer
Writes report.html (self-contained: opens from the disk, without a network), report.md (the tables, printed too) and
       the figures as PNG beside them

Every number is a mean over tasks with its 95 % interval (reporting/stats.py). Methods are compared on the same tasks,
and a difference whose interval contains 0 is called "undecided". A method that looks at the environment's true
reward before it answers is marked "oracle": no agent could do what it does.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING

from qlass import UserError, cli
from qlass.files import is_complete, replacing

if TYPE_CHECKING:
    from reporting.results import Group

DEFAULT_RUN = Path("runs/webshop")
ROWS_NOTE = (
    "Mean over tasks with its 95 % interval, of several seeds over seeds and tasks. “Oracle” marks a method that looks "
    "at the true reward before it answers. Tokens a task are all: prompt computed, generated, scored by QNet."
)
DIFFERENCES_NOTE = (
    "Differences are paired, over the tasks that both methods ran, and “undecided” where the interval covers 0. QLASS "
    "meets the best-of-N nearest in tokens, and the one with as many samples. No correction for so many comparisons."
)
TITLES = {
    "tokens": "Reward against tokens and environment steps (Fig. 3)",
    "labels": "Labels compared (Fig. 4)",
    "frontier": "Train or search: reward against all tokens",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables, figures and an HTML page from result files.")
    add = parser.add_argument
    add("results", nargs="*", help="results*.jsonl or run folders; LABEL=PATH names one (RUN)")
    add("--run", type=Path, help=f"run folder (that of the first result file, or {DEFAULT_RUN})")
    add("--trees", type=Path, help="q_labels.jsonl or trees.jsonl to show (default: the run folder's)")
    add("--out", type=Path, help="the page; its tables go beside it as .md, and the figures (RUN/report.html)")
    add("--expected", type=Path, help="CSV of ranges: says whether the rewards lie within them")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    from reporting import page, tables
    from reporting.results import read_results, result_files

    sources = list(result_files(args.results or [str(args.run or DEFAULT_RUN)]))
    run = args.run or sources[0][1].parent
    groups = read_results(sources)
    out = args.out or run / "report.html"
    if out.suffix != ".html":
        raise UserError(f"{out}: the page is HTML: name it .html")
    trees = args.trees or next((p for p in (run / "q_labels.jsonl", run / "trees.jsonl") if is_complete(p)), None)
    headline = tables.headline(groups) or groups
    rows, differences = tables.results_table(headline)[tables.SHORT], tables.differences_table(headline)
    all_rows, all_differences = tables.results_table(groups), tables.differences_table(groups)
    parts = [tables.markdown(rows), ROWS_NOTE, DIFFERENCES_NOTE, "All results", tables.markdown(all_rows)]
    if len(all_differences):
        parts += ["All paired differences in reward", tables.markdown(all_differences)]
    text = "\n\n".join(parts) + "\n"
    with replacing(out.with_suffix(".md")) as file:
        file.write(text)
    print(text)

    every_row = page.fold("All results", page.table(all_rows))
    every_pair = page.fold("All paired differences in reward", page.table(all_differences))
    first, *others = (page.section(name, TITLES[name], drawn) for name, drawn in draw(groups, out).items())
    results = page.section("results", "Results", page.table(rows), page.note(ROWS_NOTE), every_row)
    paired = [page.table(differences), page.note(DIFFERENCES_NOTE), every_pair]
    sections = [first, results, page.section("differences", "Paired differences in reward", *paired), *others]
    with replacing(out) as file:
        file.write(page.render(sections, page.tree_data(trees), [path for _, path in sources]))
    print(f"{out}, {out.with_suffix('.md')} and the figures beside them")
    for line in expected(groups, args.expected) if args.expected else ():
        print(line)


def draw(groups: list[Group], out: Path) -> dict[str, str]:
    """The figures of each environment, as PNG beside the page and as part of it."""
    from reporting import figures, page

    drawn = dict.fromkeys(TITLES, "")
    for env in dict.fromkeys(group.condition.env for group in groups):
        here = [group for group in groups if group.condition.env == env]
        part = re.sub(r"[^\w-]+", "_", env)  # of a file's name, whatever a result file calls its environment
        for drawing in (figures.tokens, figures.labels, figures.frontier):
            name, figure = drawing.__name__, drawing(here)
            if figure:
                picture = out.with_name(f"{out.stem}_{name}_{part}.png")
                drawn[name] += page.figure(TITLES[name], env, figures.save(figure, picture))
    return drawn


def expected(groups: list[Group], ranges: Path) -> list[str]:
    """A line a figure: "agent .720, expected .70 to .73: ok"."""
    lines = []
    for row in csv.DictReader(ranges.read_text(encoding="utf-8").splitlines()):
        key = row["method"], int(row["M"]), int(row["N"]), row["select"], ""
        for condition, mean in ((group.condition, group.reward.mean) for group in groups):
            if (condition.method, condition.M or 1, condition.N or 1, condition.select or "", condition.label) == key:
                name = "agent" if condition.method == "greedy" else condition
                verdict = "ok" if float(row["low"]) <= round(mean, 2) <= float(row["high"]) else "not as expected"
                reward, low, high = (text.lstrip("0") for text in (f"{mean:.3f}", row["low"], row["high"]))
                lines.append(f"{name} {reward}, expected {low} to {high}: {verdict}")
    return lines


if __name__ == "__main__":
    cli.run_stage(main)
