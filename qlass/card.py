"""The model card of a QNet, README.md in its folder, as HuggingFace shows it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlass.files import CARD
from qlass.runs import meta_of

TEXT = """---
library_name: transformers
tags: [qlass]
---
# QNet of QLASS (arXiv 2502.02584): Q(s, a) is the value at the last token

- Base: {base}
- Data: {trees} exploration trees in {world}
- Settings: lr={lr}, batch={batch}, loss_on={loss_on}, rank_weight={rank_weight}, seed={seed}
- Epoch: {best_epoch} of {epochs}
- Held-out siblings ranked right: {accuracy} of {sibling_pairs} (chance .5)
- Licence: those of the base and of the data, which data/README.md tells
"""


def write_card(args: argparse.Namespace, figures: dict[str, Any], ranks: dict[str, Any]) -> None:
    """What a QNet was trained from and how well it ranks, without paths of this machine."""
    base = Path(meta_of(args.sft)["recipe"].get("model", args.sft))  # before its cloning
    facts = vars(args) | figures | ranks
    facts["base"] = base.name if base.is_absolute() else base
    facts["world"] = " ".join([args.env, *(o for o in args.env_option if "/" not in o)])
    accuracy = ranks["sibling_accuracy"]
    facts["accuracy"] = "none" if accuracy is None else f"{accuracy:.3f}"
    (args.out / CARD).write_text(TEXT.format(**facts), encoding="utf-8")
