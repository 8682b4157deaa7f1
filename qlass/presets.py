"""Presets: whose settings a command has where no flag says another (qlass/presets.toml).

A preset that fits is taken unasked: the paper's for a pretrained model, else the tiny model's.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from qlass.files import read_json

PRESETS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def settings(config: Any) -> tuple[str, dict[str, Any]]:
    """The preset's name, and what it says of the fields of a stage's Config, on its environment."""
    preset = config.preset or preset_for(config)
    tables = [PRESETS[preset]["any"], PRESETS[preset].get(config.env, {})]
    if getattr(config, "lora", None):
        tables.append(PRESETS["lora"])
    values: dict[str, Any] = {}
    for stage in ("run", config.stage):
        for table in tables:
            values |= table.get(stage, {})
    if getattr(config, "expert", None):
        values.pop("n_expert", None)  # a file is read to its end
    if "env_option" in values:
        values["env_option"] = tuple(values["env_option"])
    fields = {field.name for field in dataclasses.fields(config)}
    return preset, {name: value for name, value in values.items() if name in fields}


def preset_for(config: Any) -> Any:
    """The paper's for a pretrained model, else the tiny model's."""
    if getattr(config, "model", "tiny") != "tiny":
        return "paper"
    named = getattr(config, "sft", None)
    file = (named or config.run / "sft") / "policy.json"
    tiny = read_json(file)["mark_matches"] if file.exists() else not named
    return "tiny" if tiny else "paper"
