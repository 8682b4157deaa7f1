"""Refresh walkthrough.md and compare.md from the code, and pictures from walkthrough/*/*.jsonl: python -m docs.build

<!-- code: q_search.episode -->    the next block is this function, or this module

The lake's lines are of the commands that the page shows, and of

    for file in expert trees q_labels results; do
        grep -E '"task_id": "4x4/(12|03)"' runs/lake/$file.jsonl > docs/walkthrough/lake/$file.jsonl
    done

The shop's are of `make demo`, of a search on the tasks of the trees, and of the first loop for "2761", without `expert`
(its results are in `results-train.jsonl`):

    python q_search.py --env webshop --run runs/demo --split train --limit 1000 --method greedy qlass -M 4 \
        --out runs/demo/results-train.jsonl

The purchase's stand below them, of a task in which two steps have a choice:

    grep '"task_id": "687"' runs/demo/results.jsonl | grep -E '"greedy"|"qlass", "M": 4' \
        >> docs/walkthrough/shop/results.jsonl

docs/report.html is the report of the trained run, by README's command and a second one:

    python q_search.py --run runs/trained --method greedy likeliest qlass best_of_n -M 4 --limit 20
    python -m reporting --run runs/trained && cp runs/trained/report.html docs/
"""

import inspect
import json
import pydoc
import re
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from qlass.messages import parse_action
from reporting import figures, tree

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs/walkthrough.md", ROOT / "docs/walkthrough"
COMPARE = ROOT / "docs/compare.md"


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in (LINES / path).read_text(encoding="utf-8").splitlines()]


def played(part: str, task_id: str) -> dict:
    lines = read(f"{part}/results.jsonl")
    return next(line for line in lines if (line["method"], line["task_id"]) == ("qlass", task_id))


def move(node: dict) -> str:
    """A move on the lake and its cell: "down to 22"."""
    return f"{parse_action(node['action'])} to {re.search(r'cell (.+)', node['observation'])[1].strip('.')}"


def choice(action: str) -> str:
    """A shop's action by the agent's thought, which names the product: "Rovka mounted router, $45"."""
    thought = action.removeprefix("Thought: ").partition("\nAction: ")[0]
    return re.sub(r"^\d+ (\$\d+)\S* (.+)", r"\2, \1", thought)


def pictures() -> dict[str, Figure]:
    """The figures of the pages, by file name."""
    shop = read("shop/q_labels.jsonl")
    return {
        "episode.svg": figures.episode(played("lake", "4x4/03")),
        "purchase.svg": figures.episode(played("shop", "687"), choice),
        "lake_tree.svg": tree.draw(read("lake/trees.jsonl"), move),
        "lake_q.svg": tree.draw(read("lake/q_labels.jsonl"), move),
        "shop_q.svg": tree.draw(shop, lambda node: tree.short(choice(node["action"]).removeprefix("read the "))),
    }


def refresh(page: str) -> str:
    def block(match: re.Match) -> str:
        return f"{match[1]}{textwrap.dedent(inspect.getsource(pydoc.locate(match[2])))}```"

    return re.sub(r"(<!-- code: (.+?) -->\n```python\n).*?```", block, page, flags=re.S)


if __name__ == "__main__":
    for page in (PAGE, COMPARE):
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, picture in pictures().items():
        figures.save(picture, LINES / name)
