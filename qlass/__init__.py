"""The library of the stages."""

import sys
from types import TracebackType


class UserError(Exception):
    """A mistake that its message says how to fix: a script prints it and ends with code 2."""


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for what may end a script while its modules load: Ctrl-C, and a missing package."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and "." not in str(error.name):
        way = "pip install it"
        if sys.prefix == sys.base_prefix:
            way = "source .venv/bin/activate, or pip install -r requirements.txt"
        print(f"error: {error}: {way}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = show
