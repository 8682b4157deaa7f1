"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer; with --lora its updates, too)

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

QNet is the agent's own language model with a value head. In the paper it is regressed at every
token of (s, a) onto that pair's Q-value (--loss-on all). The presets of the tiny model regress the
last token alone, from which it learns more (docs/differences.md).

The readable form of the loss is `family_loss`; --plain trains with it, pair by pair. By default
the pairs of a tree, which begin alike, are packed so that what they share goes through the backbone
once a pack, at a fraction of the cost and with the same loss (qlass/fast/packing.py).

Held-out trees (of one task in ten) show whether QNet ranks *siblings*, the actions of one state, as
search compares them at each step. --rank-weight adds a loss on their differences.
"""

from __future__ import annotations

from qlass import UserError  # first: it tells a missing package in one line

# isort: split
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import AutoModel

from qlass import device, files, models
from qlass.batching import Score
from qlass.chat import Chat
from qlass.inputs import find_agent, find_or_make
from qlass.messages import State
from qlass.pairs import Pack, Pair, families, hold_out_trees, ranking, read_pairs
from qlass.policy import QUESTION
from qlass.records import ValueHead, as_user_error
from qlass.settings import (
    ActionLength,
    Learning,
    Number,
    place,
    read_settings,
    run_stage,
)
from qlass.training import Training

MIN_HELD_OUT = 5  # fewer trees do not choose the epoch


@dataclass(frozen=True, kw_only=True)
class Config(Learning, ActionLength):
    stage: ClassVar = "train_qnet"
    output: ClassVar = "qnet"

    sft: Path | None = place(None)  # checkpoint that the backbone starts from (RUN/sft)
    labels: Path | None = place(None)  # RUN/q_labels.jsonl, made if missing
    out: Path | None = place(None)  # RUN/qnet
    batch: PositiveInt  # pairs of an update, which ends with the pack that reaches it
    loss_on: Literal["all", "last"]  # tokens of (s, a) that carry the loss (Eq. 11: all)
    rank_weight: Number  # of a loss on siblings' differences (0: none, as in the paper)
    hidden: PositiveInt  # width of the value head's two hidden layers (App. A.2)
    head_lr: Number | None = None  # learning rate of the value head (--lr)
    plain: bool = False  # pair by pair: for models that read no token tree
    max_tokens: PositiveInt  # of a pack; longer siblings are a pack by themselves


# -------------------------------------------------------------------------------------- the network


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and a value head on each token."""

    def __init__(self, backbone: Any, chat: Chat, hidden: int = 1024) -> None:
        super().__init__()
        self.backbone, self.chat = backbone, chat
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Sequential(  # Eq. (10); App. A.2: two hidden layers, ReLU
            nn.Linear(size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        ).to(backbone.device)

    def forward(self, at: Any = ..., **inputs: Any) -> torch.Tensor:
        """The value V of each token, (B, T), or of those that an index of (B, T) picks: on a tiny
        model the head costs more than the backbone. inputs: the backbone's."""
        return self.apply_head(self.backbone(**inputs).last_hidden_state[at])  # Eq. (9): h_1 .. h_T

    def apply_head(self, states: torch.Tensor) -> torch.Tensor:
        """Eq. (10): V of hidden states (..., D), (...)."""
        with torch.autocast(states.device.type, enabled=False):  # in bf16 siblings would tie
            return self.head(states.to(next(self.head.parameters()).dtype)).squeeze(-1)

    def values(self, state: State, action: str) -> torch.Tensor:
        """V of each token of (s, a), (T,)."""
        tokens = torch.tensor([self.chat.pair(state, action)], device=self.backbone.device)
        return self(input_ids=tokens, use_cache=False)[0].float()

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions: the value at the action's last token."""
        self.eval()
        return [[float(self.values(r.state, a)[-1]) for a in r.actions] for r in requests]

    def save_pretrained(self, folder: Path) -> None:
        """Backbone and tokenizer as HuggingFace has them, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file(self.head.state_dict(), folder / "head.safetensors")
        (folder / "qnet.json").write_text(json.dumps({"hidden": self.head[0].out_features}))

    @classmethod
    def from_pretrained(cls, folder: Path, config: ActionLength = ActionLength()) -> QNet:
        """The QNet in a folder. config: a stage's settings."""
        head = files.read_json(folder / "qnet.json", ValueHead)  # which an agent's folder lacks
        qnet = cls(*models.load_model(folder, config, kind=AutoModel), head["hidden"])
        with as_user_error(folder / "head.safetensors"):
            qnet.head.load_state_dict(load_file(folder / "head.safetensors"))
        return qnet.eval()


def scorer(qnet: QNet, plain: bool = False, cache_gb: float | None = None) -> Any:
    """Return an object whose `score` answers Score requests: QNet itself, pair by pair (plain), or
    a FastQNet with a prompt cache of cache_gb. Make a new one when the weights change."""
    if plain:
        return qnet
    from qlass.fast.score import FastQNet

    return FastQNet(qnet, cache_gb)


# ----------------------------------------------------------------------------------------- training


def family_loss(
    qnet: QNet, family: Sequence[Pair], loss_on: str = "all", rank_weight: float = 0.0
) -> torch.Tensor:
    """The sum over pairs of Eq. (11), 1/n sum_j (V_j - q)^2 over the n tokens that `loss_on` says,
    plus rank_weight times a loss on the differences of siblings, ().

    For the k siblings of a state, with the error e(a) = V(s, a) - q(s, a) at the last token of a,

        sum_a e(a)^2 = k mean(e)^2 + sum_a (e(a) - mean(e))^2.

    Most of the error is in the first term, but only the second one can change the siblings' order.
    The rank weight adds it (runs/reference_output/README.md).

    family: a pair alone or, where a rank weight compares them, all siblings of a state.
    """
    losses, last = [], []
    for pair in family:
        errors = qnet.values(pair.state, pair.action) - pair.q  # (T,)
        last.append(errors[-1])
        if loss_on == "last":
            errors = errors[-1:]
        losses.append(errors.square().mean())
    e = torch.stack(last)
    return torch.stack(losses).sum() + rank_weight * (e - e.mean()).square().sum()


def packs_of(chat: Chat, tree: list[Pair], config: Config) -> list[Pack]:
    """Cut a tree into the packs that an epoch shuffles. With --plain a pack is one pair or, with a
    rank weight, which needs siblings together, one family. Otherwise it holds as many of these as
    fit in --max-tokens."""
    together = families(tree) if config.rank_weight else [[pair] for pair in tree]
    if config.plain:
        return [Pack([f], sum(len(chat.pair(p.state, p.action)) for p in f)) for f in together]
    from qlass.fast.packing import pack_pairs

    return list(pack_pairs(chat, together, config.loss_on, config.max_tokens))


def pack_loss(qnet: QNet, packs: Sequence[Pack], config: Config) -> torch.Tensor:
    """The sum of `family_loss` over the families of all packs, ()."""
    if not config.plain:
        from qlass.fast.packing import packed_loss  # the same, at a fraction of the cost

        return packed_loss(qnet, packs, config.rank_weight)
    losses = [
        family_loss(qnet, family, config.loss_on, config.rank_weight)
        for pack in packs
        for family in pack.families
    ]
    return torch.stack(losses).sum()


Loss = Callable[[QNet, list[Pack], Any], torch.Tensor]


def train(
    qnet: QNet,
    trees: list[list[Pair]],
    held_out: list[list[Pair]],
    config: Config,
    training: Training,
    loss_of: Loss = pack_loss,
) -> None:
    """Regress QNet onto the Q-values of (s, a)."""
    bar = tqdm(trees, "packs of trees", mininterval=0.5)
    packs = [pack for tree in bar for pack in packs_of(qnet.chat, tree, config)]
    head_lr = config.lr if config.head_lr is None else config.head_lr
    optimizer = models.adamw([(qnet.backbone, config.lr), (qnet.head, head_lr)], config.optim)
    training.resume(qnet, optimizer, sizes=list(map(len, packs)))
    budget = 1 if config.plain else config.micro_tokens  # of 1 token: each pack alone
    for epoch in training.epochs_left():
        qnet.train()
        for update in training.updates_left(epoch):
            batch = [packs[i] for i in update]
            n = sum(map(len, batch))
            loss = 0.0
            for portion, weight in training.portions(batch, attrgetter("tokens"), budget):
                with device.autocast(config):
                    micro_loss = loss_of(qnet, portion, config) / n  # Eq. (11), per pair
                (weight * micro_loss).backward()  # gradients accumulate
                loss += weight * micro_loss.item()
            loss = training.sum_gradients(loss)  # of all processes
            training.clip_gradients(loss)
            training.set_rate()
            optimizer.step()
            optimizer.zero_grad()
            training.end_update(loss, tokens=sum(pack.tokens for pack in batch))
        with device.autocast(config):
            # A cache of 2 GB, beside the moments of a training.
            ranks = ranking(scorer(qnet.eval(), config.plain, cache_gb=2.0).score, held_out)
        # With a rank weight, where siblings can be compared, the error within states chooses the
        # epoch, else the whole error.
        by = "within_mse" if config.rank_weight and ranks["sibling_pairs"] else "mse"
        training.end_epoch(ranks[by] if len(held_out) >= MIN_HELD_OUT else None, held_out=ranks)
    training.save_state("last")  # so that no update is lost if the checkpoint fills the disk


# --------------------------------------------------------------------------------------------- main


def new_qnet(sft: Path, config: Config) -> QNet:
    """A QNet of the agent's weights and a new head."""
    torch.manual_seed(config.seed)  # here: the agent may have been trained in this process just now
    qnet = QNet(*models.load_model(sft, config, train=not config.lora, body=True), config.hidden)
    mesh = getattr(next(qnet.backbone.parameters()), "device_mesh", None)  # of divided weights
    if mesh and not config.lora:  # their gradients are clipped together
        device.divide(qnet.head, mesh)
    return qnet


def fingerprint(qnet: QNet, tree: list[Pair]) -> list[float]:
    """Values that other weights would not give: of the fixed question, and of ten pairs."""
    probes = [Score(pair.state, (pair.action,)) for pair in tree[:10]]
    return [q for values in qnet.score([QUESTION, *probes]) for q in values]


def save(qnet: QNet, folder: Path, config: Config, adapter: Any, tree: list[Pair]) -> list[float]:
    """Write the files of RUN/qnet/. Returns the fingerprint of what is read of them."""
    qnet.backbone = models.full_weights(qnet.backbone, folder, config, adapter)
    folder.mkdir(exist_ok=True)
    qnet.save_pretrained(folder)
    config = replace(config, load_in=None)
    return fingerprint(QNet.from_pretrained(folder, config), tree)


def learn(config: Config, loss_of: Loss = pack_loss) -> None:
    """Train a QNet on labels. loss_of: a function, by its name in the recipe: the sum of a loss
    over the pairs of some packs, (); docs/own_loss.py has another one."""
    labels = find_or_make(config.labels, "bellman", "q_labels.jsonl", config)
    sft = find_agent(config)
    if config.plain and config.rank_weight and files.rank_and_size()[1] > 1:
        raise UserError("--plain with --rank-weight: processes would not keep step: use one")
    device.join(config)
    settings = {"loss": loss_of.__name__}
    training = Training(config.path, config, settings, {"labels": labels, "sft": sft})
    if training.complete:
        return
    qnet = new_qnet(sft, config)
    tasks, trees = read_pairs(labels)
    training_set, held_out = hold_out_trees(trees)
    adapter = models.prepare_training(qnet.backbone, config)
    train(qnet, training_set, held_out, config, training, loss_of)
    training.load_best()
    ranks = training.best["held_out"]
    training.finish(
        lambda folder: save(qnet, folder, config, adapter, trees[0]),
        fingerprint(qnet, trees[0]),
        tasks=tasks,
        trees=len(trees),
        held_out=ranks,
    )
    if device.is_first():
        n = training.best_epoch
        print(f"{training.out}: {len(trees)} trees, after epoch {n} on held-out ones {ranks}")


def main(argv: list[str] | None = None) -> None:
    learn(read_settings(Config, __doc__, argv))


if __name__ == "__main__":
    run_stage(main)
