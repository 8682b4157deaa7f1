"""The model card of a QNet, README.md in its folder, as HuggingFace shows it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlass.files import CARD
from qlass.metadata import read_meta

HEAD = """---
library_name: transformers
tags: [qlass]
---
# QNet of QLASS (arXiv 2502.02584): Q(s, a) is the value at the last token

"""


def write_card(args: argparse.Namespace, figures: dict[str, Any], ranks: dict[str, Any]) -> None:
    """What a QNet was trained from and how well it ranks, without paths of this machine."""
    base = Path(read_meta(args.sft)["arguments"].get("model", args.sft))  # before its cloning
    world = [args.env, *(option for option in args.env_option if "/" not in option)]
    chosen = [f"{n}={getattr(args, n)}" for n in ("lr", "batch", "loss_on", "rank_weight", "seed")]
    accuracy = "none" if ranks["sibling_pairs"] == 0 else f"{ranks['sibling_accuracy']:.3f}"
    facts = {
        "Base": base.name if base.is_absolute() else str(base),
        "Data": f"{figures['trees']} exploration trees in {' '.join(world)}",
        "Settings": f"{', '.join(chosen)}, epoch {figures['best_epoch']} of {args.epochs}",
        "Held-out siblings ranked right": f"{accuracy} of {ranks['sibling_pairs']} (chance .5)",
        "Licence": "those of the base and of the data, which data/README.md tells",
    }
    lines = [f"- {name}: {text}\n" for name, text in facts.items()]
    (args.out / CARD).write_text(HEAD + "".join(lines), encoding="utf-8")
