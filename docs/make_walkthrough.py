"""The teaching page docs/walkthrough.md and its figures, made from a recorded run and from the code at hand.

    python docs/make_walkthrough.py                                  # make the page again: after a change of the code
    python docs/make_walkthrough.py --record [frozenlake webshop]    # run the scripts again first: after new texts

What models said comes from docs/walkthrough/run.jsonl (record.py and replay.py there). All else is worked out at once
by the project's own functions: trees, labels, Q*, prompts, tokens, episodes, and the lines of code that are shown.
So the page can't disagree with the code, except for what the commands printed when they were recorded;
tests/test_walkthrough.py checks that the committed page is the one made now.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from walkthrough import code
from walkthrough.lake import Lake
from walkthrough.record import record_frozenlake, record_webshop
from walkthrough.replay import RECORDING, Part, small_lake
from walkthrough.shop import Shop
from walkthrough.story import paragraphs

import envs
from qlass import UserError
from qlass.cli import run_stage
from qlass.files import read_jsonl, write_jsonl

HERE = Path(__file__).parent
TEMPLATE, PAGE, FIGURES = HERE / "walkthrough/template.md", HERE / "walkthrough.md", HERE / "walkthrough"
PARTS = ("frozenlake", "webshop")


def render(records: list[dict]) -> dict[Path, str]:
    """The page and its figures. {{lake backup}} in the template is a method of Lake, {{code index ...}} of code.py."""
    stories = {
        "lake": Lake(Part("frozenlake", small_lake(), records)),
        "shop": Shop(Part("webshop", envs.make("webshop"), records)),
    }

    def fill(match: re.Match) -> str:
        who, name, *words = shlex.split(match[1])
        return str(getattr(code if who == "code" else stories[who], name)(*words))

    page = paragraphs(re.sub(r"\{\{(.+?)\}\}", fill, TEMPLATE.read_text(encoding="utf-8")))
    figures = {FIGURES / name: svg for story in stories.values() for name, svg in story.figures.items()}
    return {PAGE: page} | figures


def record(parts: list[str], webshop_run: Path, seed: int) -> None:
    old = list(read_jsonl(RECORDING)) if RECORDING.exists() else []
    new = []
    for part in PARTS:
        if part in parts:
            new += record_frozenlake(seed) if part == "frozenlake" else record_webshop(webshop_run)
        else:
            new += [line for line in old if line["part"] == part]
    write_jsonl(RECORDING, new)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--record", nargs="*", choices=PARTS, metavar="PART", help="record again: frozenlake, webshop (default: both)")
    add("--webshop-run", type=Path, default="runs/webshop", help="a finished WebShop run (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=3,
        help="of the FrozenLake run (default: %(default)s, whose tree and episode show much)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.record is not None:
        record(args.record or list(PARTS), args.webshop_run, args.seed)
    if not RECORDING.exists():
        raise UserError(f"{RECORDING}: no recording; make one with --record")
    files = render(list(read_jsonl(RECORDING)))
    for old in set(FIGURES.glob("*.svg")) - set(files):
        old.unlink()
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
    print(f"{PAGE}: {len(files[PAGE].splitlines())} lines, {len(files) - 1} figures")


if __name__ == "__main__":
    run_stage(main)
