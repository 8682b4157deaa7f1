"""An input that is missing, and that no flag named: the earlier stage makes it."""

import importlib
import shlex
from pathlib import Path

from qlass import UserError
from qlass.config import Run, begun_with, flag
from qlass.files import share


def make(output: Path, stage: str, config: Run, begun: list[str]) -> None:
    """Run an earlier stage: as it was begun, or with the settings that all stages share.

    begun: the flags of a call that began the output; empty if there was none.
    """
    argv = [word for word in begun if word != "--overwrite"]
    argv = [*argv, "--run", str(config.run)] if argv else handed_on(config)
    problem = f"{output} is missing or not complete"
    named = any(word.partition("=")[0] == "--run" for word in config.argv)
    if named and not config.run.exists():  # a typo would train for minutes
        raise UserError(f"{config.run}: no such run: python sft.py --run {config.run} begins it")
    command = f"python {stage}.py {shlex.join(argv)}"
    sft = getattr(config, "sft", None)
    other_agent = sft and stage != "sft" and sft.resolve() != (config.run / "sft").resolve()
    if other_agent or share()[1] > 1:
        reason = "make it first, by one process and from the --sft that is meant"
        raise UserError(f"{problem}: {reason}: {command}")
    print(f"{problem}: making it with {command}", flush=True)
    config.run.mkdir(parents=True, exist_ok=True)
    importlib.import_module(stage).main(argv)


def handed_on(config: Run) -> list[str]:
    """The flags that all stages of a run share; the environment's only of a new run."""
    argv = ["--run", str(config.run), "--seed", str(config.seed)]
    if not begun_with(config.run):
        argv += ["--env", config.env]
        for option in config.env_option:
            argv += ["--env-option", option]
    for name in ("preset", "device", "precision"):
        value = getattr(config, name, None)
        argv += [] if value is None else [flag(name), value]
    return argv
