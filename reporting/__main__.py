"""The report: result files -> an HTML page with a summary, figures, tables and a tree viewer.

    python -m reporting                                   # runs/webshop: its results*.jsonl
    python -m reporting runs/a runs/b "100 demos=runs/c"  # several runs; LABEL=PATH tells them apart

    reads   results*.jsonl (files, or run folders), q_labels.jsonl or trees.jsonl for the viewer
    writes  report.html, which opens from the disk and without a network, and its tables as report.md

Every number is a mean over tasks with its 95 % interval (reporting/stats.py). Methods are compared
on the same tasks. A difference is called "unclear" if its interval contains 0, or if p, which with
one seed is never below a sign test's, is .05 or more.
"""

import dataclasses
from itertools import chain
from pathlib import Path

from tyro.conf import Positional

from qlass import UserError
from qlass.files import write_text
from qlass.inputs import changes
from qlass.settings import parse, run_stage

TREES = ("q_labels.jsonl", "trees.jsonl")  # of a run, for the viewer: the first that there is


@dataclasses.dataclass(frozen=True)
class Config:
    results: Positional[tuple[str, ...]] = ()  # results*.jsonl or run folders; LABEL=PATH names one
    run: Path = Path("runs/webshop")  # whose results are read where none are named
    trees: Path | None = None  # q_labels.jsonl or trees.jsonl to show (the first run folder's)
    out: Path | None = None  # the page; its tables go beside it (report.html of the first run folder)
    expected: Path | None = None  # CSV of ranges: says whether the rewards lie within them


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    from reporting import expected, page, tables
    from reporting.results import read_results, result_files

    sources = list(result_files(config.results or [str(config.run)]))
    inputs = [path for _, path in sources]
    runs = list(dict.fromkeys(path.parent for path in inputs))
    out = config.out or runs[0] / "report.html"
    if out.suffix != ".html":
        raise UserError(f"{out}: the page is HTML: name it .html")
    trees = config.trees or next((path for path in map(runs[0].joinpath, TREES) if path.exists()), None)
    files = [*inputs, trees] if trees else inputs
    warnings = list(dict.fromkeys(chain.from_iterable(map(changes, files))))
    groups = read_results(sources, warnings)
    verdicts = expected.verdicts(groups, expected.read_ranges(config.expected)) if config.expected else []

    remarks = [*verdicts, *map("Warning: {}".format, warnings)]

    text = tables.text(groups, remarks)
    print(text, flush=True)  # before anything is written: the folder may be read-only
    write_text(out.with_suffix(".md"), text)
    sections = page.sections(groups, runs, inputs, remarks)
    write_text(out, page.render(sections, page.tree_data(trees), inputs))
    print("\n".join([f"{out} and {out.with_suffix('.md')}", *verdicts]))


if __name__ == "__main__":
    run_stage(main)
