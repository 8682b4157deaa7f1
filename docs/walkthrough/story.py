"""What both parts of the page tell alike, and how text, tables and boxes are set in Markdown."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from walkthrough.replay import Part
from walkthrough.tree import Look, shade, svg

from bellman import children_of
from qlass.checks import sibling_accuracy

DEEPEST = 8  # that a figure shows
QS = [(shade(0.0), "q = 0"), (shade(0.5), "0.5"), (shade(1.0), "1")]


def number(x: float, digits: int = 4) -> str:
    """At most so many decimals, and no more than needed."""
    return f"{round(x, digits):g}"


def times(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def listed(words: Iterable[object]) -> str:
    words = [str(word) for word in words]
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def cut(text: str, length: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 4].rstrip() + " ..."


def written(action: str) -> str:
    """A turn of the agent in one line of a table."""
    return f"`{action.replace(chr(10), ' / ')}`"


def wrapped(text: str, width: int = 112) -> str:
    """Each line of a text in lines of at most `width` characters."""
    return "\n".join("\n".join(textwrap.wrap(line, width)) for line in text.strip().split("\n"))


def boxed(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def paragraphs(page: str) -> str:
    """Running text in lines of at most 120 characters; boxes, tables, pictures and headings stay as they are."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.M | re.S)
    for i in range(0, len(parts), 2):
        blocks = parts[i].split("\n\n")
        parts[i] = "\n\n".join(
            textwrap.fill(b, 120, break_long_words=False, break_on_hyphens=False) if re.match(r"[^|#>!\s]", b) else b
            for b in blocks
        )
    return "".join(parts)


class Story:
    """One environment's fragments; a {{name word ...}} of the template is a call of one of these methods."""

    name, row = "", 34  # row: pixels from leaf to leaf in a figure

    def __init__(self, part: Part) -> None:
        self.part, self.tree, self.run = part, part.tree, part.run
        self.children = children_of(part.tree)
        self.figures: dict[str, str] = {}  # file name -> SVG

    def move(self, i: int) -> str:
        """A node's action in a word or two."""
        raise NotImplementedError

    def value(self, *names: str) -> object:
        """An entry of the recorded `run` line: {{shop value tally tasks}}."""
        found = self.run
        for name in names:
            found = found[name]
        return found

    def provenance(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.run["versions"].items())
        about = f"seed {self.run['seed']}, {self.run['written'][:10]}, commit `{self.run['commit'][:10]}`"
        return f"{about}, Python {self.run['python']}, {versions}"

    def task(self) -> str:
        return self.tree[0]["task_id"]

    def nodes(self) -> int:
        return len(self.tree)

    def messages(self) -> str:
        """The root's messages, each behind its role."""
        lines = []
        for message in self.tree[0]["messages"]:
            text = wrapped(message["content"], 100).split("\n")
            lines += [f"{message['role'] * (i == 0):11}{line}".rstrip() for i, line in enumerate(text)]
        return boxed("\n".join(lines))

    def seen(self, i: int) -> str:
        """What the environment answered a node's action, without the words that introduce it."""
        return self.tree[i]["observation"].removeprefix(self.part.env.prefix)

    def rollout(self) -> str:
        rows = []
        for i, node in enumerate(self.tree):
            if i and node["branch"] == 1:
                rows.append((i, written(node["action"]), cut(self.seen(i), 100), number(node["reward"])))
        return table(["node", "the agent writes", "the environment answers", "r"], rows)

    def figure(self, name: str, looks: Sequence[Look | None], title: str, legend: Sequence[tuple[str, str]]) -> str:
        file, deepest = f"{self.name}_{name}.svg", max(node["depth"] for node in self.tree)
        shown = [i for i, node in enumerate(self.tree) if node["depth"] <= DEEPEST]
        looks = [looks[i] for i in shown]
        if deepest > DEEPEST:
            title += f", to depth {DEEPEST} of {deepest}"
            looks = [
                look and dataclasses.replace(look, beside=look.beside or "…" * (self.tree[i]["depth"] == DEEPEST))
                for i, look in zip(shown, looks, strict=True)
            ]
        dx = min(150, max(112, 800 // min(deepest, DEEPEST)))  # room for "right to 33, goal"
        self.figures[file] = svg([self.tree[i] for i in shown], looks, title, legend, dx, self.row)
        return f"![{title}](walkthrough/{file})"

    def q_figure(self) -> str:
        looks = []
        for i, node in enumerate(self.tree):
            beside = f"r = {number(node['reward'], 2)}" if node["done"] else ""
            below = number(node["q"], 2) if i and not node["done"] else ""
            looks.append(Look(str(i), self.move(i), below, beside, shade(node["q"]), strong=True))
        return self.figure("q", looks, "The tree with its Q-values: the darker a node, the higher its q", QS)

    def families(self) -> list[list[int]]:
        """Nodes with the same parent, where there are several."""
        return [children for children in self.children if len(children) > 1]

    def score(self, i: int) -> float:
        return self.part.scores[i - 1]  # the root is no action

    def ranked(self) -> str:
        """How many siblings of the tree QNet puts in the tree's order, and the worst pair that it does not."""
        scores = {(pair.state, pair.action): s for pair, s in zip(self.part.pairs, self.part.scores, strict=True)}
        found = sibling_accuracy([self.part.pairs], scores)
        if not (pairs := found["sibling_pairs"]):
            return "In this tree no siblings differ in q by more than .05."
        text = (
            f"Pairs of siblings whose q differ by more than .05: {pairs}. QNet has "
            f"{number(found['sibling_accuracy'] * pairs)} of them in the right order."
        )
        wrong = [
            (self.tree[a]["q"] - self.tree[b]["q"], a, b)
            for family in self.families()
            for a, b in itertools.permutations(family, 2)
            if self.tree[a]["q"] - self.tree[b]["q"] > 0.05 and self.score(a) < self.score(b)
        ]
        if not wrong:
            return text
        _, a, b = max(wrong)
        return (
            f"{text} The worst mistake: node {b} (“{self.move(b)}”) gets {number(self.score(b))}, its sibling {a} "
            f"(“{self.move(a)}”) {number(self.score(a))}, where the tree has {number(self.tree[b]['q'])} and "
            f"{number(self.tree[a]['q'])}."
        )

    def rewards(self) -> str:
        greedy, qlass = (number(self.part.episodes[method]["reward"], 2) for method in ("greedy", "qlass"))
        return f"the greedy agent gets {greedy}, QLASS {qlass}"

    def gain(self) -> float:
        return self.part.episodes["qlass"]["reward"] - self.part.episodes["greedy"]["reward"]
