"""What pages, docstrings, messages and shell scripts name is there: flags, files, modules and their functions."""

import argparse
import ast
import contextlib
import importlib
import re
import runpy
import typing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from qlass.config import flag

ROOT = Path(__file__).parents[1]
PROGRAMS = [path for place in ("*.py", "experiments/**/*.py", "integrations/*.py") for path in ROOT.glob(place)]
DATA = sorted(ROOT.glob("data/*.py"))  # which need no package, so they read their flags by argparse
OTHERS = "qlass/**/*.py environments/**/*.py reporting/*.py docs/*.py Makefile README.md docs/*.md data/*.md"
OTHERS += " reporting/page.html runs/*.sh runs/paper/* runs/reference_output/*.md"
# Of other programs and of runs/*.sh; files of ETO and of a run.
FLAGS = "abbrev always block-size check cov die-on-broken-pipe dirty dist dtype exclude fix"
FLAGS += " gpu-memory-utilization hf-overrides host port line-length local-dir logdir max-num-batched-tokens"
FLAGS += " maxprocesses merge no-deps no-enable-chunked-prefill nproc-per-node num_processes safe_serialization seeds"
FLAGS += " nnodes node-rank master-addr master-port head num-cpus"
ELSEWHERE = r"venv|pytest|.*_inst\.txt|.*(report|downstream|gpu_check)\.md|.*\.meta"
ELSEWHERE += r"|vocab\.txt|merges\.txt|zero_to_fp32\.py|RUN/tree_TASK\.svg"


@cache
def flags() -> dict[str, set[str]]:
    """All that the programs have, and the values that a flag may have; none: any."""
    known: dict[str, set[str]] = {name: set() for name in FLAGS.split()}

    def note(parser: argparse.ArgumentParser, *_) -> None:
        for action in parser._actions:
            for name in action.option_strings:
                known.setdefault(name.strip("-"), set()).update(action.choices or ())

    for path in DATA:
        with (
            mock.patch("sys.argv", [path.name, "--help"]),
            mock.patch("argparse.ArgumentParser.print_help", note),
            contextlib.suppress(SystemExit),
        ):
            runpy.run_path(str(path), run_name="__main__")
    for path in [*PROGRAMS, *ROOT.glob("reporting/*.py"), ROOT / "environments/check.py"]:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            hints = typing.get_type_hints(module.Config) if hasattr(module, "Config") else {}
            for name, hint in hints.items():
                known.setdefault(flag(name).strip("-"), set()).update(choices_of(hint))
    return known | {"help": set()}


def choices_of(hint: Any) -> set:
    """The values in a type: of tuple[Literal["q", "oracle"], ...] these two."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return set().union(*map(choices_of, typing.get_args(hint)))


def words_of(path):
    """A page; of code the strings, which are docstrings and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n".join(str(node.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return re.sub(r"<style>.*?</style>", "", text, flags=re.S)


PAGES = [path for place in OTHERS.split() for path in ROOT.glob(place)]


@pytest.mark.parametrize("path", [*PROGRAMS, *DATA, *PAGES], ids=str)
def test_what_is_named_is_there(path):
    text = words_of(path)
    unknown = [name for name in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text) if name not in flags()]
    for name, value in re.findall(r"`[^`\n]*--([a-z][\w-]*\w)[ =](\w+)[^`\n]*`", text):
        if (choices := flags().get(name)) and value not in choices:
            unknown.append(f"{name} {value}")
    for name in re.findall(r"(?<![\w/.*{}$\"-])\w[\w/.-]*\.(?:py|sh|md|txt|csv|png|svg)\b(?!\.)", text):
        there = any((folder / name).exists() for folder in (ROOT, ROOT / "runs", path.parent))
        if not (there or any(ROOT.glob(f"[a-z]*/**/{name}")) or re.fullmatch(ELSEWHERE, name)):
            unknown.append(name)
    modules = [name for name in re.findall(r"(?<=python -m )[a-z][\w.]*\w", text) if not re.fullmatch(ELSEWHERE, name)]
    unknown += [name for name in modules if not find_spec(name)]
    for module, name in re.findall(r"(?<=`)(?:qlass\.)?(\w+)\.([a-z]\w+)(?=[`(])", text):
        place = module if (ROOT / f"{module}.py").exists() else f"qlass.{module}"
        if not name.startswith(("py", "md", "json")) and find_spec(place):
            unknown += [] if hasattr(importlib.import_module(place), name) else [f"{module}.{name}"]
    assert not unknown
