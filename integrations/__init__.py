"""Doors to other tools: the engines and agents of this project behind the interfaces that those tools expect."""

from typing import Any

from qlass import UserError


class LeftOut(UserError, AttributeError):
    """`hasattr` is false of such a name, and a script that uses it ends with one line."""


def left_out(*arguments: Any) -> Any:
    """The `__getattr__` of a class or a module that lacks public names of its original (docs/engines.md)."""
    name, kind = arguments[-1], LeftOut if len(arguments) > 1 else UserError  # import would hide the former
    raise AttributeError(name) if name.startswith("_") else kind(f"{name} is left out: see docs/engines.md")
