"""Refreshes docs/walkthrough.md and README.md from the code and from docs/walkthrough/*/*.jsonl: python -m docs.build

<!-- code: rollout -->         the next block is this function or class of the stages or of qlass/; where several
                               have the name, its file stands before it: q_search.py episode
<!-- rows: lake_backup -->     the rows of the next table, below its head, by the function of that name here
[`rollout`](../any/file.py)    the link leads to the file where the function is

The lake's lines are of the five commands that the page shows, and of

    for file in expert trees q_labels results; do
        grep -E '"task_id": "4x4/(12|03)"' runs/lake/$file.jsonl > docs/walkthrough/lake/$file.jsonl
    done

The shop's are of `make demo`, a search on the last 420 training tasks, and the same loop for "2033", without `expert`:

    python q_search.py --env webshop --run runs/demo --split train --skip 2670 --limit 0 --method greedy qlass -M 4 \
        --out runs/demo/results-train.jsonl
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import envs
from docs import episode_svg
from docs.tree_svg import draw

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES, README = ROOT / "docs/walkthrough.md", ROOT / "docs/walkthrough", ROOT / "README.md"
GAMMA, DEEPEST = 0.9, 7  # of the lake's labels; of the shop's picture


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in (LINES / path).read_text(encoding="utf-8").splitlines()]


def steps(part: str, method: str) -> list[dict]:
    return next(line["steps"] for line in read(f"{part}/results.jsonl") if line["method"] == method)


def number(x: float) -> str:
    return f"{round(x, 4):g}"


def move(action: str) -> str:
    return action.rpartition("Action: ")[2]


def cell(observation: str) -> str:
    return re.search(r"cell (\d+)", observation)[1]


def exact(here: str, move: str) -> float:
    """Q*(s, a) by the lake's transition table."""
    env = envs.make("frozenlake", map="4x4", max_steps=None)
    env.reset(options={"task_id": f"4x4/{here}"})
    return env.q_star_of(move, GAMMA)


def click(action: str) -> str:
    """A shop's action in two or three words: of a product its brand and price."""
    thought, _, command = action.removeprefix("Thought: ").rpartition("\nAction: ")
    words = thought.split()
    return "search" if command.startswith("search") else f"{words[2]} {words[1]}" if "$" in thought else thought


def lake_backup() -> Iterator[tuple]:
    """Eq. (7) by hand, of nodes where ways part and of their children, beside bellman.py's value and the exact one."""
    tree = read("lake/q_labels.jsonl")
    families = Counter(node["parent_id"] for node in tree)
    for node in reversed(tree):
        if max(families[node["parent_id"]], families[node["node_id"]]) < 2:
            continue
        below = [number(child["q_raw"]) for child in tree if child["parent_id"] == node["node_id"]]
        best = f"max({', '.join(below)})" if len(below) > 1 else "".join(below)
        hand = f"{node['reward']:g} + {GAMMA} × {best}" if below else f"{node['reward']:g}, a leaf"
        where, truth = "the root", ""
        if node["action"]:
            where = f"{move(node['action'])} to {cell(node['observation'])}"
            truth = number(exact(cell(tree[node["parent_id"]]["observation"]), move(node["action"])))
        yield str(node["node_id"]), where, hand, number(node["q_raw"]), truth


READING = {
    "docs/walkthrough.md": "all of it on one small lake, by hand",
    "sft.py": "stage 1, cloning: Eq. 5",
    "build_trees.py": "stage 2, exploration: Alg. 2",
    "bellman.py": "stage 3, backup: Eq. 7, Alg. 3",
    "train_qnet.py": "stage 4, QNet: Eq. 8 to 11",
    "q_search.py": "stage 5, search: Alg. 4",
    "envs.py": "the interface of environments",
    "qlass/*.py": "what the stages share",
    "qlass/fast/*.py": "the same answers faster; off with `--plain`",
    "docs/differences.md": "paper, released code, here",
}


def reading_order() -> Iterator[tuple]:
    for name, what in READING.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob(name))
        yield f"[{name.removesuffix('*.py')}]({name.removesuffix('/*.py')})", what, f"{lines:,}"


ROWS = {function.__name__: function for function in (lake_backup, reading_order)}


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    lake = read("lake/q_labels.jsonl")
    shop = [node for node in read("shop/q_labels.jsonl") if node["depth"] <= DEEPEST]
    moves = ["", *(f"{move(node['action'])} to {cell(node['observation'])}" for node in lake[1:])]
    clicks = ["", *(click(node["action"]).removeprefix("read the ") for node in shop[1:])]
    ends = [("#aceebb" if node["reward"] else "#ffcecb") if node["done"] else "#ffffff" for node in lake]
    branches = ["", *(f"branch {node['branch']}" for node in lake[1:])]

    def by_q(tree: list[dict], words: list[str]) -> str:  # white for 0, blue for 1
        rgb = [[round(255 + (deep - 255) * node["q"]) for deep in (110, 168, 230)] for node in tree]
        fills = [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in rgb]
        return draw(tree, words, ["", *(f"{node['q']:.2f}" for node in tree[1:])], fills)

    grown = draw(lake, moves, branches, ends)
    played = steps("lake", "qlass")
    cells = ["03", *(cell(step["observation"]) for step in played[:-1])]
    titles = [f"step {n}, cell {here}" for n, here in enumerate(cells, 1)]
    episode = episode_svg.draw(played, titles, move, "The goal: reward 1 after 8 steps.")
    return {
        "episode.svg": episode,
        "lake_tree.svg": grown,
        "lake_q.svg": by_q(lake, moves),
        "shop_q.svg": by_q(shop, clicks),
    }


def find(name: str) -> tuple[str, str]:
    """File and text of a function or class of the stages or of qlass/."""
    *where, name = name.split()
    places = []
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("qlass/**/*.py")]):
        source, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(source)) if where in ([], [file]) else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                places.append((file, textwrap.dedent("\n".join(lines))))
    if len(places) != 1:
        files = ", ".join(file for file, _ in places) or "no file"
        raise SystemExit(f"docs/walkthrough.md: {name} is in {files}: name it so that one function is meant")
    return places[0]


def refresh(page: str) -> str:
    code, table = r"(<!-- code: (.+?) -->\n```python\n).*?\n```", r"(<!-- rows: (\w+) -->\n\|.*\n\|.*\n)(?:\|.*\n)*"
    page = re.sub(code, lambda match: f"{match[1]}{find(match[2])[1]}\n```", page, flags=re.S)
    page = re.sub(r"\[`(\w+)`\]\(\.\./[\w/]+\.py\)", lambda match: f"[`{match[1]}`](../{find(match[1])[0]})", page)
    return re.sub(table, lambda match: match[1] + "".join(f"| {' | '.join(row)} |\n" for row in ROWS[match[2]]()), page)


if __name__ == "__main__":
    for page in (PAGE, README):
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, picture in pictures().items():
        (LINES / name).write_text(picture, encoding="utf-8")
