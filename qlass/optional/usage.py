"""What a command prints when it does not run: its --help, a mistake in its flags, an error."""

import contextlib
import io
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

from qlass import UserError

OUT_OF_MEMORY = "out of memory|allocate memory"  # of a GPU or a CPU
FEWER = "--gradient-checkpointing, --lora 16, fewer --micro-tokens, --in-flight or --cache-gb"


def explain(command: Callable[[], Any], doc: str | None) -> None:
    """Print the --help that `command`, a call of tyro.cli, ends with. It begins with the first
    words of `doc`, a module's docstring. UserError, in one line, if the flags are the reason."""
    errors, output = io.StringIO(), io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stderr(errors))
            stack.enter_context(contextlib.redirect_stdout(output))
            stack.enter_context(mock.patch.dict(os.environ, COLUMNS="999"))  # no line is broken
            command()
    except SystemExit as stop:
        if stop.code:
            raise UserError(one_line(errors.getvalue())) from None
    first_words = (doc or "").strip().split("\n\n")[:3]  # what it does, an example, files
    print(*first_words, tidy(output.getvalue()), sep="\n\n")


def one_line(message: str) -> str:
    """What tyro says of a mistake, and the flag that was perhaps meant."""
    rows = [row.strip() for row in message.splitlines()]
    rules = [i for i, row in enumerate(rows) if row.startswith("---")] + [len(rows)]
    reason = rows[rules[0] + 1 : rules[1]]  # between the first and the second rule
    hint = "--help lists the flags"
    if "Perhaps you meant:" in rows:
        meant = rows.index("Perhaps you meant:") + 1
        hint = f"perhaps you meant {rows[meant]}"
    return f"{' '.join(filter(None, reason))} ({hint})"


def tidy(help_text: str) -> str:
    """tyro's list of flags: a paragraph each, with its default where there is one."""
    width = shutil.get_terminal_size().columns
    flags: list[str] = []
    for row in help_text.splitlines():
        if not row.startswith("  "):  # a title, or a rule
            continue
        name, _, text = ("", "", row) if row.startswith("   ") else row.strip().partition("  ")
        if name:
            name = name.partition(", --M")[0].partition(", --N")[0]
            flags.append(f"  {name:26} ")
        flags[-1] += re.sub(r" ?\(default: (None|False|)\)", "", text).strip()
    return "\n".join(textwrap.fill(text, width, subsequent_indent=" " * 29) for text in flags)


def advice(error: Exception) -> str:
    """An error as one line that says what to do; nothing for a bug, which needs its traceback."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}: pip install it"
    if re.search(OUT_OF_MEMORY, text):
        return f"out of memory: give {FEWER}"
    return "" if isinstance(error, RuntimeError) else text
