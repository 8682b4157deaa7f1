"""Refreshes walkthrough.md and compare.md from the code and from walkthrough/*/*.jsonl: python -m docs.build

<!-- code: q_search.episode -->         the next block is this function
| [sft.py](sft.py) | stage 1 | 290 |    the number is of the file's lines, or of a folder's

The lake's lines are of the commands that the page shows, and of

    for file in expert trees q_labels results; do
        grep -E '"task_id": "4x4/(12|03)"' runs/lake/$file.jsonl > docs/walkthrough/lake/$file.jsonl
    done

The purchase's are of `make demo`, of a task in which three steps have a choice:

    grep '"task_id": "3407"' runs/demo/results.jsonl | grep -E '"greedy"|"qlass", "M": 4' \
        >> docs/walkthrough/shop/results.jsonl

The shop's others are of a search on the last 420 training tasks, and of the first loop for "2033", without `expert`:

    python q_search.py --env webshop --run runs/demo --split train --skip 2670 --limit 0 --method greedy qlass -M 4 \
        --out runs/demo/results-train.jsonl
"""

from __future__ import annotations

import inspect
import json
import pydoc
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from reporting import svg
from reporting.tree import short

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs/walkthrough.md", ROOT / "docs/walkthrough"
COMPARE = ROOT / "docs/compare.md"
DEEPEST = 7  # of the shop's tree
PURCHASE = "3407"  # a test task of the shop
MAP = ("FFFF", "FHFH", "FFFH", "HFFG")


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in (LINES / path).read_text(encoding="utf-8").splitlines()]


def played(part: str, task_id: str, method: str = "qlass") -> dict:
    lines = read(f"{part}/results.jsonl")
    return next(line for line in lines if (line["method"], line["task_id"]) == (method, task_id))


def cell(observation: str) -> str:
    return re.search(r"cell (\d+)", observation)[1]


def choice(action: str) -> str:
    """A shop's action by the agent's thought, which names the product: "Rovka mounted router, $45"."""
    thought = action.removeprefix("Thought: ").partition("\nAction: ")[0]
    return re.sub(r"^\d+ (\$\d+)\S* (.+)", r"\2, \1", thought)


def content(page: str, task: str) -> str:
    """The words that distinguish a page of a shop: no buttons, no names of products by letters and digits."""
    shared = (
        r"Observation:\n.*|[A-Z]\d{3}|< Prev|Next >|Back to Search|Buy Now|Description|Features|Reviews|Rating.*|Page.*"
    )
    parts = [part for part in page.split(" [SEP] ") if part != task and not re.fullmatch(shared, part)]
    return " · ".join(parts)


def episodes() -> dict[str, str]:
    """File name -> SVG, of an episode."""
    walk = played("lake", "4x4/03")
    cells = ["At cell 03.", *(step["observation"] for step in walk["steps"][:-1])]
    purchase, greedy = (played("shop", PURCHASE, method) for method in ("qlass", "greedy"))
    pages = ["Search", *(content(step["observation"], purchase["task"]) for step in purchase["steps"][:-1])]
    return {
        "episode.svg": svg.episode(walk, cells, rows=MAP),
        "purchase.svg": svg.episode(purchase, pages, words=choice, rival=greedy, letters=(44, 30)),
    }


def trees() -> dict[str, str]:
    """File name -> SVG, of a tree."""
    lake = read("lake/q_labels.jsonl")
    shop = [node for node in read("shop/q_labels.jsonl") if node["depth"] <= DEEPEST]
    moves = ["", *(f"{svg.move(node['action'])} to {cell(node['observation'])}" for node in lake[1:])]
    clicks = ["", *(short(choice(node["action"]).removeprefix("read the ")) for node in shop[1:])]
    ends = [(svg.GOOD if node["reward"] else svg.BAD) if node["done"] else svg.WHITE for node in lake]
    branches = ["", *(f"branch {node['branch']}" for node in lake[1:])]

    def by(name: str, tree: list[dict], words: list[str], rows: Sequence[str] = ()) -> str:
        fills = [svg.shade(node["q"]) for node in tree]
        return svg.tree(tree, words, ["", *(f"{node[name]:.2f}" for node in tree[1:])], fills, rows)

    return {
        "lake_tree.svg": svg.tree(lake, moves, branches, ends, MAP),
        "lake_q.svg": by("q", lake, moves, MAP),
        "shop_q.svg": by("q_raw", shop, clicks),
    }


def refresh(page: str) -> str:
    def block(match: re.Match) -> str:
        return f"{match[1]}{textwrap.dedent(inspect.getsource(pydoc.locate(match[2])))}```"

    return re.sub(r"(<!-- code: (.+?) -->\n```python\n).*?```", block, page, flags=re.S)


if __name__ == "__main__":
    for page in (PAGE, COMPARE):
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, picture in (episodes() | trees()).items():
        (LINES / name).write_text(picture, encoding="utf-8")
