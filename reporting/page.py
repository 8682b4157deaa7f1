"""The report as one HTML page: page.html filled with figures, tables, episodes side by side and the trees' data.

Text of an environment may hold anything, `</script>` too. So whatever comes from a file passes `escape` on its way into
the markup, or travels as JSON without a "<" and is put on the page as text; and the page forbids itself the network.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from qlass import files
from qlass.records import read_results, read_trees
from reporting.results import Group, scored_candidates, split_react
from reporting.tables import Table


def render(sections: Iterable[str], trees: str, inputs: Iterable[Path]) -> str:
    """Fill page.html: each {{name}} is replaced once, so that a {{name}} inside a text stays as it is."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    items = (f"<li><code>{escape(str(path))}</code>{provenance(path)}</li>" for path in inputs)
    parts = {"sections": "".join(sections), "trees": trees, "inputs": "".join(items)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def provenance(path: Path) -> str:
    """Commit and time from the metadata beside a file, where there is some."""
    record = files.read_meta(path)
    return escape(f", commit {record.get('commit')}, written {record.get('written')}") if record else ""


def section(name: str, title: str, *parts: str) -> str:
    body = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def figure(title: str, env: str, svg: str) -> str:
    caption = f"<figcaption>{escape(env)}</figcaption>"
    return f'<figure role="img" aria-label="{escape(f"{title}, {env}")}">{svg}{caption}</figure>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def fold(title: str, body: str) -> str:
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>' if body else ""


def table(rows: Table) -> str:
    if not rows:
        return ""
    if len({row["environment"] for row in rows}) == 1:  # the figures say it: narrow screens need the place
        rows = [{name: cell for name, cell in row.items() if name != "environment"} for row in rows]
    numeric = {name for name in rows[0] if all(re.match(r"[-+–\d]", row[name]) for row in rows)}
    kind = {name: ' class="number"' if name in numeric else "" for name in rows[0]}
    head = "".join(f"<th{kind[name]}>{escape(name)}</th>" for name in rows[0])
    body = ("".join(f"<td{kind[name]}>{escape(cell)}</td>" for name, cell in row.items()) for row in rows)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


# ---------------------------------------------------------------------------------------------------- one task, Fig. 5


def cases(groups: Sequence[Group]) -> str:
    """Greedy and QLASS side by side: where QLASS gains most, where it loses most, and an episode with neither."""
    parts = []
    for greedy in (g for g in groups if g.condition.method == "greedy"):
        run = greedy.condition.env, "qlass", greedy.condition.label, False
        guided = [
            g for g in groups if (g.condition.env, g.condition.method, g.condition.label, g.condition.oracle) == run
        ]
        if not guided:
            continue
        best = max(guided, key=lambda group: group.reward.mean)
        pairs = best.episodes.merge(greedy.episodes, on=["task", "seed"], suffixes=("", "_greedy"))
        gains = (pairs["reward"] - pairs["reward_greedy"]).sort_values(kind="stable")
        kinds = {"better": gains[gains > 0][::-1], "worse": gains[gains < 0], "the same": gains[gains == 0]}
        counts = ", ".join(f"{kind} in {len(some)}" for kind, some in kinds.items())
        shown = "Shown: the largest gain, the largest loss, and one of the rest."
        parts.append(note(f"{best.condition.env}: {best.condition} against {greedy.condition}: {counts}. {shown}"))
        for kind, some in kinds.items():
            for _, pair in pairs.loc[some.index[:1]].iterrows():
                sides = load(pair["file_greedy"], pair["line_greedy"]), load(pair["file"], pair["line"])
                parts.append(case(f"QLASS {kind}: task {pair['task']}", *sides, opened=kind == "better"))
    return "".join(parts)


def load(path: Path, line: int) -> dict:
    return next(itertools.islice(read_results(path), line - 1, None))


def case(title: str, greedy: dict, guided: dict, opened: bool) -> str:
    """Two episodes of one task side by side, each step with its candidates and their q."""
    columns = "".join(episode(name, row) for name, row in (("SFT greedy", greedy), ("QLASS", guided)))
    task = note(guided["task"]) if guided.get("task") else ""
    start = "<details class=case open>" if opened else "<details class=case>"
    return f'{start}<summary>{escape(title)}</summary>{task}<div class="pair">{columns}</div></details>'


def episode(name: str, row: dict) -> str:
    steps = "".join(step(s) for s in row.get("steps") or [])
    return f"<div><h3>{escape(name)}: reward {row['reward']:.3f}</h3><ol>{steps}</ol></div>"


def step(record: dict) -> str:
    thought, action = split_react(record["action"])
    thought = record.get("thought") or thought
    thought = f'<p class="thought">{escape(thought)}</p>' if thought else ""
    scored, taken = scored_candidates(record)
    items = "".join(
        f'<li{" class=taken" if c is taken else ""} title="{escape(c["action"])}">{chip(c["q"])} '
        f"<code>{escape(split_react(c['action'])[1])}</code></li>"
        for c in scored
    )
    candidates = f'<ul class="candidates" aria-label="candidates with q">{items}</ul>' if items else ""
    answer = escape(record.get("observation") or "")
    return (
        f"<li>{thought}<code class=action>{escape(action)}</code>{candidates}"
        f"<details><summary>observation</summary><pre>{answer}</pre></details></li>"
    )


def chip(q: float) -> str:
    """A number on its colour; page.html paints every `.q` by its data-q."""
    return f'<span class="q" data-q="{q:.4f}">{q:.2f}</span>'


# --------------------------------------------------------------------------------------------------------- the viewer

FIELDS = ["parent", "action", "thought", "observation", "reward", "done", "source", "branch", "expert", "q", "q_raw"]
TEXTS = {"action", "thought", "observation", "source"}


def tree_data(path: Path | None, limit: int) -> str:
    """The trees for the page's viewer as JSON: at most `limit`, evenly spread over the file.

    {"total", "fields", "texts": [...], "trees": [{"task", "text", "nodes": [[value of each field]]}]}; texts are stored
    once and named by their place in "texts", since the pages of a shop recur. A node comes after its parent.
    """
    if path is None:
        return "null"
    total = sum(1 for _ in read_trees(path))
    shown = {int((i + 0.5) * total / limit) for i in range(limit)} if limit < total else set(range(total))
    texts: dict[str, int] = {}
    trees = [viewer_tree(tree, texts) for i, tree in enumerate(read_trees(path)) if i in shown]
    data = {"total": total, "fields": FIELDS, "texts": list(texts), "trees": trees}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def viewer_tree(tree: list[dict], texts: dict[str, int]) -> dict:
    places = {node["node_id"]: i for i, node in enumerate(tree)}
    nodes = []
    for node in tree:
        thought, action = split_react(node["action"])
        values = {**node, "parent": places.get(node["parent_id"], -1), "thought": thought, "action": action}
        record = [values.get(name) for name in FIELDS]
        for i, name in enumerate(FIELDS):
            if name in TEXTS and record[i] is not None:
                record[i] = texts.setdefault(record[i], len(texts))
            elif isinstance(record[i], float):
                record[i] = round(record[i], 4) if math.isfinite(record[i]) else None
        nodes.append(record)
    root = tree[0]
    text = root.get("task") or (root.get("messages") or [{"content": root.get("observation") or ""}])[-1]["content"]
    return {"task": str(root["task_id"]), "text": text, "nodes": nodes}
