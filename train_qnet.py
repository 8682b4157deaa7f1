"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer)

QNet is the agent's own language model with a value head. It is regressed at *every* token of
(s, a) onto that pair's Q-value (the tiny model's only at the last one: docs/differences.md).

The readable form of the loss is `family_loss`; --plain trains with it, pair by pair. By default
the pairs of a tree, which begin alike, are packed so that each token goes through the backbone
once, at a fraction of the cost and with the same loss (qlass/fast/packing.py).

Held-out trees (of one task in ten) show whether QNet ranks *siblings*, the actions of one state:
search compares nothing else. --rank-weight adds a loss on their differences.
"""

from __future__ import annotations

# qlass comes first: it says in one line which packages are missing.
from qlass import UserError, agent, files, models, processes, runs  # isort: skip

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from qlass.batching import Score, finite
from qlass.chat import Chat
from qlass.config import Positive, Prompt, Real, Training, begun_with, free, read, run_stage
from qlass.messages import State
from qlass.pairs import Pair, Pairs, families, hold_out, ranking, read_pairs
from qlass.training import TrainingLog, autocast, begin, clip, cosine, micro_batches, updates_of


@dataclass(frozen=True, kw_only=True)
class Config(Training, Prompt):
    """The defaults are the paper's (Table 5 and Eq. 11)."""

    stage: ClassVar[str] = "train_qnet"

    sft: Path | None = free(None)  # checkpoint that the backbone starts from (RUN/sft)
    labels: Path | None = free(None)  # RUN/q_labels.jsonl, made if missing
    out: Path | None = free(None)  # RUN/qnet
    epochs: Positive = 2  # at most
    loss_on: Literal["all", "last"] = "all"  # tokens of (s, a) that carry the loss (Eq. 11: all)
    rank_weight: Real = 0.0  # of a loss on siblings' differences (0: none, as in the paper)
    head_lr: Real | None = None  # learning rate of the value head (--lr)
    freeze: bool = False  # train the head alone
    plain: bool = False  # pair by pair: for models that read no token tree
    max_tokens: Positive = 4096  # of a packed tree
    limit: Positive | None = None  # number of trees (all)


MIN_HELD_OUT = 5  # fewer trees do not choose the epoch

# -------------------------------------------------------------------------------------- the network


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and a value head on each token."""

    def __init__(self, backbone: Any, chat: Chat, hidden: int = 1024) -> None:
        super().__init__()
        self.backbone, self.chat = backbone, chat
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Sequential(  # Eq. (10); App. A.2: two hidden layers of 1024, ReLU
            nn.Linear(size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        ).to(backbone.device)

    def forward(self, mask: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
        """Values V of tokens, (B, T), or (N,) of the N tokens of a mask (B, T); inputs: the
        backbone's."""
        hidden = self.backbone(**inputs).last_hidden_state  # Eq. (9): h_1 .. h_T, (B, T, D)
        if mask is not None:  # the head costs a tiny model more than its backbone
            hidden = hidden[mask]
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 siblings would tie
            return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)  # Eq. (10)

    def values(self, state: State, action: str) -> torch.Tensor:
        """V of each token of (s, a), (T,)."""
        prompt = self.chat.prompt(state)
        ids = prompt + self.chat.action(action, state.task, len(prompt))
        tokens = torch.tensor([ids], device=self.backbone.device)
        return self(input_ids=tokens, use_cache=False)[0].float()

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions: the value at the action's last token."""
        self.eval()
        scores = [[float(self.values(r.state, a)[-1]) for a in r.actions] for r in requests]
        return finite(scores)

    def save_pretrained(self, folder: Path) -> None:
        """Backbone and tokenizer as HuggingFace has them, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file(self.head.state_dict(), folder / "head.safetensors")
        settings = {"hidden": self.head[0].out_features}
        (folder / "qnet.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> QNet:
        """options: of `load_checkpoint`."""
        settings = files.read_object(Path(folder) / "qnet.json")  # which an agent's folder lacks
        backbone, chat = models.load_checkpoint(folder, AutoModel, **options)
        qnet = cls(backbone, chat, settings["hidden"])
        head = Path(folder) / "head.safetensors"
        try:
            qnet.head.load_state_dict(load_file(head))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{head}: can't be read ({str(error).splitlines()[0]})") from None
        return qnet.eval()


def scorer(qnet: QNet, plain: bool = False, cache_gb: float | None = None) -> Any:
    """What answers Score requests while the weights stay: QNet pair by pair, or its fast twin.

    cache_gb: room for what the latter has read.
    """
    if plain:
        return qnet
    from qlass.fast.score import FastQNet

    return FastQNet(qnet, cache_gb)


def load_qnet(folder: Path, config: Any) -> Any:
    """The `scorer` of a saved QNet, as the settings of a later stage say."""
    qnet = QNet.from_pretrained(folder, **agent.loading(folder, config))
    return scorer(qnet, config.plain, config.cache_gb)


# ----------------------------------------------------------------------------------------- training


def family_loss(
    qnet: QNet, family: Sequence[Pair], loss_on: str = "all", rank_weight: float = 0.0
) -> torch.Tensor:
    """Eq. (11) of each pair: 1/n sum_j (V_j - q)^2 over the n tokens that `loss_on` says, (); and
    rank_weight times a loss on the differences of siblings.

    For the k siblings of a state, with the error e(a) = V(s, a) - q(s, a) at the last token of a,

        sum_a e(a)^2 = k mean(e)^2 + sum_a (e(a) - mean(e))^2.

    Most of the error is in the first term, but only the second one can change the siblings' order:
    that is what the rank weight counts again (runs/reference_output/README.md).
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


@dataclass(frozen=True)
class Group:
    """What an epoch shuffles: pairs whose loss is computed at once. It is one pair or, with a rank
    weight, which needs siblings together, a family; qlass/fast packs more of a tree into one.

    tokens: without padding; what its pairs share counts once.
    """

    pairs: Sequence[Pair]
    tokens: int


def group_of(chat: Chat, family: Pairs) -> Group:
    """A pair alone, or a family, as a group."""
    prompt = chat.prompt(family[0].state)
    beginnings: set[tuple[int, ...]] = set()
    for pair in family:
        action = chat.action(pair.action, pair.state.task, len(prompt))
        beginnings.update(tuple(action[:n]) for n in range(1, len(action) + 1))
    return Group(family, len(prompt) + len(beginnings))


def groups_of(chat: Chat, trees: list[Pairs], config: Config) -> list[Any]:
    """The groups of all trees: `Group` with --plain, else `PackedPairs` of qlass/fast."""
    groups: list[Any] = []
    for tree in trees:
        together = families(tree) if config.rank_weight else [[pair] for pair in tree]
        if config.plain:
            groups += [group_of(chat, family) for family in together]
        else:
            from qlass.fast.packing import pack_pairs

            groups += pack_pairs(chat, together, config.loss_on, config.max_tokens)
    return groups


def loss_of(qnet: QNet, groups: Sequence[Any], config: Config) -> torch.Tensor:
    """The sum of `family_loss` over the groups, ()."""
    if config.plain:
        settings = config.loss_on, config.rank_weight
        return torch.stack([family_loss(qnet, group.pairs, *settings) for group in groups]).sum()
    from qlass.fast.packing import packed_loss  # the same, at a fraction of the cost

    return packed_loss(qnet, groups, config.rank_weight)


def train(
    qnet: QNet,
    trees: list[Pairs],
    held_out: list[Pairs],
    config: Config,
    out: Path,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Regress QNet onto the Q-values of (s, a). Returns figures for the metadata."""
    groups = groups_of(qnet.chat, trees, config)
    head_lr = config.lr if config.head_lr is None else config.head_lr
    optimizer = models.adamw([(qnet.backbone, config.lr), (qnet.head, head_lr)], config.optim)
    sizes = [len(group.pairs) for group in groups]
    order = [updates_of(sizes, config.batch, config.seed, epoch) for epoch in range(config.epochs)]
    log = TrainingLog(out, qnet, optimizer, order, config)  # where a stopped training was
    budget = 1 if config.plain else config.micro_tokens  # plain: one group at a time
    if log.step == 0:
        _ = evaluate(qnet, held_out, config, dtype)  # what can't run fails before an epoch
    for epoch in log.epochs_left():
        qnet.train()
        for update in log.updates_left(epoch):
            batch = [groups[i] for i in update]
            n = sum(len(group.pairs) for group in batch)
            loss = 0.0
            for portion in processes.mine(micro_batches(batch, lambda g: g.tokens, budget)):
                with autocast(qnet, dtype):
                    part = loss_of(qnet, portion, config) / n  # Eq. (11), per pair
                part.backward()  # gradients accumulate
                loss += part.item()
            loss = processes.summed(qnet, loss)
            clip(qnet, loss, log.step, config.lr)
            for param_group in optimizer.param_groups:
                param_group["lr"] = param_group["peak"] * cosine(log.step, log.steps)
            optimizer.step()
            optimizer.zero_grad()
            log.end_update(loss, tokens=sum(group.tokens for group in batch))
        log.save("last.pt")  # an epoch whose ranking fails is not trained again
        ranks = evaluate(qnet, held_out, config, dtype)
        log.end_epoch(watched(ranks, held_out, config), held_out=ranks)
    return log.finish()


def evaluate(
    qnet: QNet, held_out: list[Pairs], config: Config, dtype: torch.dtype
) -> dict[str, Any]:
    """The `ranking` of held-out trees by the weights at hand."""
    with autocast(qnet, dtype):
        reader = scorer(qnet.eval(), config.plain, cache_gb=2.0)  # beside a training's moments
        return ranking(reader.score, held_out)


def watched(ranks: dict[str, Any], held_out: list[Pairs], config: Config) -> float | None:
    """The error that chooses the epoch: with a rank weight that within states, else all of it."""
    if len(held_out) < MIN_HELD_OUT:
        return None
    return ranks["within_mse" if config.rank_weight and ranks["sibling_pairs"] else "mse"]


# --------------------------------------------------------------------------------------------- main


def load(sft: Path, config: Config) -> tuple[QNet, Any]:
    """A QNet of the agent's weights and a new head, and PEFT's view of LoRA's updates (or None)."""
    torch.manual_seed(config.seed)  # here: the agent may have been trained in this process just now
    all_weights = not (config.lora or config.freeze)
    options = agent.loading(sft, config)
    backbone, chat = models.load_checkpoint(sft, AutoModel, train=all_weights, **options)
    qnet = QNet(backbone, chat)
    adapter = models.prepare_training(backbone, config)
    if config.freeze:
        backbone.requires_grad_(False)
    return qnet, adapter


def save(qnet: QNet, out: Path, adapter: Any, dtype: torch.dtype) -> None:
    """Write RUN/qnet/, whole or not at all; UserError if it can't be loaded again."""
    with files.draft_of(out) as folder:
        qnet.backbone = models.full_weights(qnet.backbone, folder, adapter, dtype)
        qnet.save_pretrained(folder)
        models.read_back(folder, qnet.backbone)


def tell(out: Path, figures: dict[str, Any], ranks: dict[str, Any]) -> None:
    errors = f"training loss {figures['loss']:.4f}, held-out mse {ranks['mse']:.4f}"
    print(f"{out}: {figures['trees']} trees, {errors} after epoch {figures['best_epoch']}")
    if ranks["sibling_pairs"]:
        right = f"{ranks['sibling_accuracy']:.3f} of {ranks['sibling_pairs']}"
        print(f"  held-out sibling pairs ranked right {right} (chance .5)")


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    labels = runs.find_or_make(config.labels, "bellman", "q_labels.jsonl", config)
    sft = runs.find_or_make(config.sft, "sft", "sft", config)
    out = files.checkpoint_folder(config.out or config.run / "qnet", sft)
    inputs: runs.Inputs = {"labels": labels, "sft": sft}
    with processes.together(out, config.device) as first:
        qnet, adapter = load(sft, config)
        trees, counts = read_pairs(labels, qnet.chat, config.limit)
        learned, held_out = hold_out(trees, counts["tasks"])
        if not any(learned):
            raise UserError(f"{labels}: no pair of (s, a) to train on")
        facts = agent.settled(config)
        dtype = models.PRECISIONS[facts["precision"]]
        world = {"env_files": begun_with(config.run).get("env_files")}  # as a search compares them
        recipe = runs.recipe_of(config.recipe() | world | facts, inputs)
        if not begin(out, config, recipe, inputs, first):
            return
        figures = train(qnet, learned, held_out, config, out, dtype)
        if first:
            from qlass.optional import foreign

            ranks = figures["curve"][figures["best_epoch"] - 1]["held_out"]
            figures["fingerprint"] = foreign.fingerprint(qnet.backbone, qnet.chat, qnet.score)
            runs.write_meta(out, config, recipe, inputs, **figures, **counts, held_out=ranks)
            save(qnet, out, adapter, dtype)
            files.discard(runs.states_of(out))
            tell(out, figures | counts, ranks)


if __name__ == "__main__":
    run_stage(main)
