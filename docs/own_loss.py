"""A loss of your own for QNet: Huber's, which counts a large error less than its square does.

python -m docs.own_loss --run runs/demo --delta 0.2 --out runs/demo/qnet-huber    # of the same labels
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.nn.functional import huber_loss

import train_qnet
from qlass.fast.packing import packed_values
from qlass.pairs import Pack
from qlass.settings import Number, read_settings, run_stage
from train_qnet import QNet


@dataclass(frozen=True, kw_only=True)
class Config(train_qnet.Config):
    delta: Number = 0.2  # errors beyond it count linearly; in the recipe, as every setting is


def huber(qnet: QNet, packs: Sequence[Pack], config: Config) -> torch.Tensor:
    """The sum over all pairs of the packs, of the mean over a pair's tokens that carry the loss, ()."""
    pairs = list(chain(*(family for pack in packs for family in pack.families)))
    if config.plain:  # V of all tokens of (s, a), pair by pair
        values = [qnet.values(pair.state, pair.action) for pair in pairs]
        values = [v[-1:] for v in values] if config.loss_on == "last" else values
    else:  # the same, each token of a tree computed once
        values = list(packed_values(qnet, packs, config.loss_on))
    losses = []
    for pair, v in zip(pairs, values, strict=True):
        losses.append(huber_loss(v, torch.full_like(v, pair.q), delta=config.delta))
    return torch.stack(losses).sum()


def main(argv: list[str] | None = None) -> None:
    train_qnet.learn(read_settings(Config, __doc__, argv), huber)


if __name__ == "__main__":
    run_stage(main)
