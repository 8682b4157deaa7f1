"""Doors to other tools: the engines and agents of this project behind the interfaces that those tools expect."""

from typing import Any

from qlass import UserError


class LeftOut(UserError, AttributeError):
    """`hasattr` is false of such a name, and a script that uses it ends with one line."""


def leave_out(names: str) -> Any:
    """The `__getattr__` of a class or module that lacks these public names of its original (docs/engines.md)."""

    def __getattr__(*arguments: Any) -> Any:
        name, kind = arguments[-1], LeftOut if len(arguments) > 1 else UserError  # import would hide the former
        raise kind(f"{name} is left out: see docs/engines.md") if name in names.split() else AttributeError(name)

    return __getattr__
