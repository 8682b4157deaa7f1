"""The report as one HTML page: page.html filled with tables, figures, episodes side by side and the trees' data.

Text of an environment may hold anything, `</script>` too. So whatever comes from a file passes `escape` on its way into
the markup, or travels as JSON without a "<" and is put on the page as text; and the page forbids itself the network.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from qlass import files
from reporting.results import scored_candidates, split_react

TITLES = {
    "tokens": "Score against tokens (the paper's Fig. 3)",
    "targets": "Process rewards compared (the paper's Fig. 4)",
    "calibration": "Calibration of QNet",
    "learning": "Learning by reward and by preference",
    "frontier": "Train or search: reward against all tokens, of training and of playing so many tasks; a line from "
    "greedy over QLASS with more and more candidates, hollow with the QNet of the cloned agent's trees; bars are the "
    "rewards' intervals",
}


def render(content: dict) -> str:
    """Fill page.html: each {{name}} is replaced once, so that a {{name}} inside a text stays as it is."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    figures = {name: "" for name in TITLES}
    for name, env, svg in content["figures"]:
        title = escape(f"{TITLES[name]}, {env}")
        caption = f"<figcaption>{escape(env)}</figcaption>"
        figures[name] += f'<figure role="img" aria-label="{title}">{svg}{caption}</figure>'
    parts = {
        "results": content["results"],
        "claims": section("claims", "Claims of the paper", content["claims"]),
        "differences": content["differences"],
        "tokens": section("tokens", TITLES["tokens"], figures["tokens"]),
        "targets": section("targets", TITLES["targets"], figures["targets"]),
        "calibration": section("calibration", TITLES["calibration"], figures["calibration"] + content["calibration"]),
        "learning": section("learning", TITLES["learning"], figures["learning"] + figures["frontier"]),
        "cases": section("steps", "One task, step by step (the paper's Fig. 5)", content["cases"]),
        "trees": content["trees"],
        "inputs": "".join(f"<li><code>{escape(str(path))}</code>{provenance(path)}</li>" for path in content["inputs"]),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def provenance(path: Path) -> str:
    """Commit and time from the metadata beside a file, where there is some."""
    record = files.read_meta(path)
    return escape(f", commit {record.get('commit')}, written {record.get('written')}") if record else ""


def picture(path: Path) -> str:
    """A file's picture as part of the page; as pixels, for an SVG of unknown origin can hold a script."""
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def paragraph(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def bullets(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [bool(rows) and all(re.match(r"[-+–\d]", row[i]) for row in rows) for i in range(len(head))]
    kind = [' class="number"' if n else "" for n in numeric]
    top = "".join(f"<th{k}>{escape(c)}</th>" for k, c in zip(kind, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kind, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def case(title: str, greedy: dict, guided: dict, opened: bool) -> str:
    """Two episodes of one task side by side, each step with its candidates and their q."""
    columns = "".join(episode(name, row) for name, row in (("SFT greedy", greedy), ("QLASS", guided)))
    task = paragraph(guided["task"]) if guided.get("task") else ""
    start = "<details class=case open>" if opened else "<details class=case>"
    return f'{start}<summary>{escape(title)}</summary>{task}<div class="pair">{columns}</div></details>'


def episode(name: str, row: dict) -> str:
    steps = "".join(step(s) for s in row.get("steps") or [])
    budget = ", ".join(f"{key} = {row[key]}" for key in ("M", "N") if (row.get(key) or 1) > 1)
    head = f"{escape(name)}{f' ({budget})' if budget else ''}: reward {row['reward']:.3f}"
    return f"<div><h3>{head}</h3><ol>{steps}</ol></div>"


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


FIELDS = ["parent", "action", "thought", "observation", "reward", "done", "source", "branch", "expert", "q", "q_raw"]
TEXTS = {"action", "thought", "observation", "source"}


def tree_data(path: Path | None, limit: int) -> str:
    """The trees for the page's viewer as JSON: at most `limit`, evenly spread over the file.

    {"total", "fields", "texts": [...], "trees": [{"task", "text", "nodes": [[value of each field]]}]}; texts are stored
    once and named by their place in "texts", since the pages of a shop recur. A node comes after its parent.
    """
    if path is None:
        return "null"
    total = sum(1 for _ in files.read_trees(path))
    shown = {int((i + 0.5) * total / limit) for i in range(limit)} if limit < total else set(range(total))
    texts: dict[str, int] = {}
    trees = [viewer_tree(tree, texts) for i, tree in enumerate(files.read_trees(path)) if i in shown]
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
