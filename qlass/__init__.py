"""What the stages share."""

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("torch", "transformers", "tokenizers", "gymnasium", "filelock", "tyro", "tqdm")


class UserError(Exception):
    """A mistake that its message says how to fix; scripts print that line and exit with code 2."""


class Refused(UserError):
    """A question that a model's server will never answer, whatever it answers to others."""


def check_packages() -> None:
    """End a script with one line if this Python has not what it needs. Each imports this first."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing and sys.version_info >= (3, 10):
        return
    lack = f"has no {', '.join(missing)}" if missing else "is older than 3.10"
    root = Path(__file__).parents[1]
    activate = "source .venv/bin/activate"
    way_out = activate if (root / ".venv").exists() else "pip install -r requirements.txt"
    print(f"error: {sys.executable} {lack}: {way_out}, in {root}", file=sys.stderr)
    sys.exit(2)


SCRIPT = Path(sys.argv[0]).resolve()
if SCRIPT.suffix == ".py" and SCRIPT.parent == Path(__file__).resolve().parents[1]:
    check_packages()
