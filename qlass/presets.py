"""Presets: whose settings a command has where no flag says another, by environment and stage.

tiny    the tiny model's, which are those of the rows in runs/reference_output. They were chosen on
        validation tasks; WebShop's also on 400 tasks of its catalogue, which the test split lacks.
paper   the paper's: Table 5 and Appendix A.2. Most of them are the defaults of the stages'
        Config; here is what depends on the environment.

A preset that fits is taken unasked: the paper's for a pretrained model, else the tiny model's. An
experiment adds its own settings to them when it is loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qlass.outputs import read_json

Stages = dict[str, dict[str, Any]]  # the settings of each stage; "run": of every stage

TINY: dict[str, Stages] = {
    "any": {  # an environment of your own, and what the others do not say
        # Enough demonstrations to learn a task, few enough that the agent still errs.
        "sft": {
            "n_expert": 1350,
            "epochs": 12,
            "lr": 3e-3,
            "batch": 16,
            "micro_tokens": 2048,
            "candidates": "valid",
        },
        "build_trees": {"rollouts": 24, "limit": 250, "tasks": "new"},
        # The last token: why is in docs/differences.md.
        "train_qnet": {
            "epochs": 8,
            "lr": 1e-3,
            "loss_on": "last",
            "max_tokens": 1024,
            "micro_tokens": 2048,
        },
    },
    "webshop": {
        "sft": {"n_expert": 100, "epochs": 34},
        # Many small trees teach QNet more than few large ones of as many rollouts.
        "build_trees": {"depth": 3, "rollouts": 6, "limit": 1000, "temperature": 1.5},
        # With the paper's .9 the ten steps of a careful purchase are worth less than buying the
        # first product at once.
        "bellman": {"gamma": 0.98},
        # Trained to the end, where the learning rate is 0, and with a loss on the order of siblings
        # (runs/reference_output/README.md).
        "train_qnet": {"epochs": 3, "patience": 3, "rank_weight": 4.0},
    },
    "alfworld": {
        # Without the thoughts that repeat what earlier pages said, an aid (docs/differences.md).
        "run": {"env_option": ("thoughts=false",)},
        "sft": {"n_expert": 600},
        "build_trees": {"depth": 8, "rollouts": 6, "limit": 600},
        "bellman": {"gamma": 0.98},
        "train_qnet": {"epochs": 6, "patience": 6},
        "q_search": {"split": "valid_unseen"},
    },
    "sciworld": {
        "run": {"env_option": ("tasks=eto",)},  # the 24 tasks that ETO and the paper have
        # Few demonstrations of long episodes, so small batches.
        "sft": {"n_expert": 300, "epochs": 12, "batch": 4},
        # 300 trees give QNet a thousand pairs of siblings whose q differ.
        "build_trees": {"depth": 6, "rollouts": 6, "limit": 300},
        "train_qnet": {"epochs": 4},
        "q_search": {"split": "test_unseen"},
    },
    "frozenlake": {
        "run": {"env_option": ("map=lakes",)},
        "sft": {"epochs": 100, "patience": 100},
        # Wide, and sampled warm, so that every move from every cell is tried.
        "build_trees": {
            "depth": 6,
            "width": 4,
            "rollouts": 600,
            "steps": 20,
            "prune": "tail",
            "temperature": 1.5,
        },
        # 4,000 pairs are two or three trees.
        "train_qnet": {"batch": 4000, "epochs": 30, "patience": 30},
    },
}

# The paper names no bound of rollouts; WebShop's trees have at most W^(D+1) = 81 leaves. Episodes
# are as long as the environments have them by themselves: 5 steps on WebShop, 18 in trees and 40
# at inference elsewhere.
PAPER: dict[str, Stages] = {
    "any": {},
    "webshop": {"build_trees": {"depth": 3, "rollouts": 1000}},
    "alfworld": {"build_trees": {"depth": 8}, "q_search": {"split": "valid_unseen"}},
    "sciworld": {"build_trees": {"depth": 6}, "q_search": {"split": "test_unseen"}},
}

PRESETS = {"tiny": TINY, "paper": PAPER}
# Updates that start from 0 take larger steps than weights.
LORA: Stages = {"sft": {"lr": 2e-4}, "train_qnet": {"lr": 2e-4}}


def settings(config: Any) -> dict[str, Any]:
    """The preset, and what it says of the fields of a stage's Config, on its environment."""
    preset = config.preset or preset_for(config)
    stages = PRESETS[preset]
    parts = [stages["any"], stages.get(config.env, {})]
    if getattr(config, "lora", None):
        parts.append(LORA)
    fields = {field.name for field in dataclasses.fields(config)}
    values: dict[str, Any] = {}
    for name in ("run", config.stage):
        for part in parts:
            values |= part.get(name, {})
    if getattr(config, "expert", None):
        values.pop("n_expert", None)  # a file is read to its end
    return {n: value for n, value in values.items() if n in fields} | {"preset": preset}


def preset_for(config: Any) -> Any:
    """The paper's for a pretrained model, else the tiny model's."""
    if getattr(config, "model", "tiny") != "tiny":
        return "paper"
    sft = getattr(config, "sft", None) or config.run / "sft"
    file = sft / "policy.json"
    if file.exists():
        return "tiny" if read_json(file)["mark_matches"] else "paper"
    return "paper" if getattr(config, "sft", None) else "tiny"
