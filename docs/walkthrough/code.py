"""The code as the page shows it: functions by their names, and every line that is marked as a line of the paper."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

from qlass import UserError

ROOT = Path(__file__).parents[2]
STAGES = (
    "sft.py",
    "build_trees.py",
    "bellman.py",
    "train_qnet.py",
    "q_search.py",
    "qlass/chat.py",
    "qlass/fast/packing.py",
)


def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def excerpt(file: str, path: str) -> str:
    """A function, class or method by its dotted path, or the first `while` in it: "episode.while"; with a link."""
    node: ast.AST = ast.parse(source(file))
    for name in path.split("."):
        inner = ast.walk(node)
        kinds = (ast.While,) if name == "while" else (ast.FunctionDef, ast.ClassDef)
        found = [n for n in inner if isinstance(n, kinds) and (name == "while" or n.name == name)]
        if not found:
            raise UserError(f"{file}: no {path} any more; name what docs/walkthrough/template.md is to show instead")
        node = found[0]
    first, last = node.lineno, node.end_lineno
    lines = source(file).splitlines()[first - 1 : last]
    link = f"[`{file}`, lines {first}-{last}](../{file}#L{first}-L{last})"
    return f"{link}\n\n```python\n{textwrap.dedent(chr(10).join(lines))}\n```"


# ------------------------------------------------------------------------------------------- marks: lines of the paper


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in the code that says which line of which algorithm, or which equation, it is."""

    of: str  # "Alg. 2", "Eq. 7"
    lines: tuple[int, ...]  # of the algorithm; empty where the mark gives words instead of numbers
    words: str  # what the mark says beside
    file: str
    lineno: int
    code: str


def remarks(file: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of every comment, and of every docstring of a function or class at its first line."""
    content = source(file)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
            yield node.lineno, " ".join(docstring.split())


NUMBERED = re.compile(r"(?:Alg\. (?P<of>\d), )?\blines? (?P<first>\d+)(?:-(?P<last>\d+))?(?: and (?P<more>\d+))?")
IN_WORDS = re.compile(
    r"(?:(?P<what>\w+) of )?Alg\. (?P<of>\d)(?:, (?P<where>last lines?))?: (?P<words>.+?)(?:[;.] .*|\.?$)"
)
EQUATION = re.compile(r"Eq\. \(?(\d+)\)?")


def marks(file: str) -> list[Mark]:
    """All marks of a file. `# line 4` alone is of the algorithm that the file's own docstring names first."""
    named = re.search(r"Alg\. (\d)", ast.get_docstring(ast.parse(source(file))) or "")
    lines, found = source(file).splitlines(), []
    for lineno, words in sorted(remarks(file)):
        code = re.sub(r"\s+#.*", "", lines[lineno - 1]).strip()
        for match in EQUATION.finditer(words):
            found.append(Mark(f"Eq. {match[1]}", (), "", file, lineno, code))
        numbered = NUMBERED.search(words)
        if numbered and (numbered["of"] or named):
            first, last = int(numbered["first"]), int(numbered["last"] or numbered["first"])
            more = [int(numbered["more"])] if numbered["more"] else []
            rest = words[numbered.end() :].lstrip(":; ") if words.startswith(numbered[0]) else ""
            of = f"Alg. {numbered['of'] or named[1]}"
            found.append(Mark(of, (*range(first, last + 1), *more), rest, file, lineno, code))
        elif match := IN_WORDS.search(words):
            about = ": ".join(filter(None, (match["where"] or match["what"], match["words"])))
            found.append(Mark(f"Alg. {match['of']}", (), about, file, lineno, code))
    return found


def numbers(lines: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for n in lines:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def index(of: str) -> str:
    """A table of every place that is marked as `of` ("Alg. 2", or "Eq." for all equations)."""
    found = [m for file in STAGES for m in marks(file) if m.of == of or (of == "Eq." and m.of.startswith("Eq."))]
    if of == "Eq.":
        found = list(dict.fromkeys(found))
        found.sort(key=lambda m: int(m.of.split()[1]))
    else:
        found.sort(key=lambda m: (m.lines, -len(m.lines), m.lineno))
    rows = []
    for m in found:
        name = m.of if of == "Eq." else numbers(m.lines) or m.words
        code = re.sub(r"^(def \w+)\(.*", r"\1(...)", m.code).replace("|", "\\|")
        rows.append(f"| {name} | [{m.file}:{m.lineno}](../{m.file}#L{m.lineno}) | `{code}` |")
    head = "equation" if of == "Eq." else "line"
    return "\n".join([f"| {head} | where | the line itself |", "|---|---|---|", *rows])
