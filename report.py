"""The report: result files -> an HTML page with figures, tables and a tree viewer, and its tables.

    python report.py                                   # runs/webshop: its results*.jsonl
    python report.py runs/a runs/b "100 demos=runs/c"  # several runs; LABEL=PATH tells them apart

    reads   results*.jsonl (files, or run folders), q_labels.jsonl or trees.jsonl for the viewer
    writes  report.html (opens from the disk, without a network), report.md and the figures as PNG

Every number is a mean over tasks with its 95 % interval (reporting/stats.py). Methods are compared
on the same tasks, and a difference whose interval contains 0 is called "undecided". A method that
looks at the environment's true reward before it answers is an "oracle": no agent could do that.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from qlass import UserError
from qlass.files import replacing
from qlass.flags import run_stage

DEFAULT_RUN = Path("runs/webshop")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables, figures and a page from result files.")
    add = parser.add_argument
    add("results", nargs="*", help="results*.jsonl or run folders; LABEL=PATH names one (RUN)")
    add("--run", type=Path, help=f"run folder (that of the first result file, or {DEFAULT_RUN})")
    add("--trees", type=Path, help="q_labels.jsonl or trees.jsonl to show (the run folder's)")
    add("--out", type=Path, help="the page; tables and figures go beside it (RUN/report.html)")
    add("--protocol", action="store_true", help="only print what their numbers mean, for a paper")
    add("--expected", type=Path, help="CSV of ranges: says whether the rewards lie within them")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    os.environ.setdefault("HOME", tempfile.gettempdir())  # matplotlib asks for it
    from experiments.frontier import frontier
    from reporting import expected, figures, page, tables
    from reporting.results import protocol, read_results, result_files

    sources = list(result_files(args.results or [str(args.run or DEFAULT_RUN)]))
    if args.protocol:
        protocols = {str(source[1]): protocol(read_results([source])) for source in sources}
        return print(json.dumps(protocols, indent=1, ensure_ascii=False))
    run = args.run or sources[0][1].parent
    out = args.out or run / "report.html"
    if out.suffix != ".html":
        raise UserError(f"{out}: the page is HTML: name it .html")
    warnings: list[str] = []
    groups = read_results(sources, warnings)

    text = tables.text(groups, warnings)
    with replacing(out.with_suffix(".md")) as file:
        file.write(text)
    print(text)
    trees = [path for path in (run / "q_labels.jsonl", run / "trees.jsonl") if path.exists()]
    viewer = page.tree_data(args.trees or next(iter(trees), None))
    pictures = figures.draw(groups, out, (figures.tokens, figures.labels, frontier))
    sections = page.sections(groups, pictures, warnings)
    inputs = [path for _, path in sources]
    with replacing(out) as file:
        file.write(page.render(sections, viewer, inputs))
    print(f"{out}, {out.with_suffix('.md')} and the figures beside them")
    if args.expected:
        print("\n".join(expected.verdicts(groups, expected.read_ranges(args.expected))))


if __name__ == "__main__":
    run_stage(main)
