"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer)

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

QNet is the agent's own language model with a value head. It is regressed at *every* token of
(s, a) onto that pair's Q-value (the tiny model's only at the last one: docs/differences.md).

The readable form of the loss is `family_loss`; --plain trains with it, pair by pair. By default the
pairs of a tree, which begin alike, are packed so that each token goes through the backbone once, at
a fraction of the cost and with the same loss (qlass/fast/packing.py).

Held-out trees (one in ten) show whether QNet ranks *siblings*, the actions of one state: search
compares nothing else. --rank-weight adds a loss on their differences.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from qlass import UserError, agent, files, flags, models, runs, training
from qlass.batching import Score
from qlass.chat import Chat
from qlass.fast.packing import pack_pairs, packed_loss
from qlass.fast.score import FastQNet, finite
from qlass.flags import positive, real
from qlass.messages import State
from qlass.training import Training, cosine, micro_batches

PAPER: dict[str, Any] = dict(  # Table 5 and Eq. (11)
    epochs=2, lr=1e-5, batch=64, loss_on="all", max_tokens=4096, micro_tokens=8192
)
TINY: dict[str, Any] = dict(  # why the last token: docs/differences.md
    epochs=8, lr=1e-3, batch=64, loss_on="last", max_tokens=1024, micro_tokens=2048
)
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on
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
        return finite([[float(self.values(r.state, a)[-1]) for a in r.actions] for r in requests])

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


def scorer(qnet: QNet, plain: bool = False, cache_gb: float | None = None) -> QNet | FastQNet:
    """What answers Score requests while the weights stay: QNet pair by pair, or its fast twin.

    cache_gb: room for what the latter has read.
    """
    return qnet if plain else FastQNet(qnet, cache_gb)


def load_qnet(folder: Path, args: argparse.Namespace) -> QNet | FastQNet:
    """The QNet in a folder, loaded as the flags of a stage say, with the agent's prompts."""
    qnet = QNet.from_pretrained(folder, **agent.loading(folder, args))
    return scorer(qnet, args.plain, args.cache_gb)


# ------------------------------------------------------------------------------ what it learns from


@dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float


Pairs = list[Pair]  # of one tree, depth first; or of one state


def states_of(tree: list[dict]) -> dict[int, State]:
    """The state of each node by node_id: the root's messages, then actions and their answers."""
    root = tree[0]
    states = {root["node_id"]: State.load(root["messages"], root.get("task") or "")}
    for node in tree[1:]:
        parent = states[node["parent_id"]]
        states[node["node_id"]] = parent.then(node["action"], node["observation"])
    return states


def pairs_of(tree: list[dict]) -> Pairs:
    """All (s, a, q) of a labelled tree, depth first: a node's action in its parent's state."""
    states = states_of(tree)
    return [Pair(states[node["parent_id"]], node["action"], node["q"]) for node in tree[1:]]


def families(pairs: Pairs) -> list[Pairs]:
    """The pairs of a tree by state: siblings together, in the order of the first of them."""
    siblings: dict[State, Pairs] = {}
    for pair in pairs:
        siblings.setdefault(pair.state, []).append(pair)
    return list(siblings.values())


def hold_out(trees: list[Pairs]) -> tuple[list[Pairs], list[Pairs]]:
    """Trees to train on, and every tenth, from the first on, to validate; a tree alone is both."""
    learned = [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    return learned or trees, trees[::HELD_OUT]


# ----------------------------------------------------------------------------------------- training

LOSS_FROM = {"all": 0, "last": -1}  # the first token of (s, a) that carries the loss (Eq. 11: all)


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
        errors = qnet.values(pair.state, pair.action) - pair.q
        losses.append(errors[LOSS_FROM[loss_on] :].square().mean())
        last.append(errors[-1])
    e = torch.stack(last)
    return torch.stack(losses).sum() + rank_weight * (e - e.mean()).square().sum()


def train(qnet: QNet, trees: list[Pairs], held_out: list[Pairs], args: argparse.Namespace) -> dict:
    """Regress QNet onto the Q-values of (s, a). Returns figures for the metadata."""
    weight = args.rank_weight
    # A pack is pairs as one token tree; with --plain one pair, or with a rank weight one family.
    max_tokens, micro_tokens = (1, 1) if args.plain else (args.max_tokens, args.micro_tokens)
    packs: list[Any] = []
    for tree in trees:
        together = families(tree) if weight else [[pair] for pair in tree]
        packs += pack_pairs(qnet.chat, together, LOSS_FROM[args.loss_on], max_tokens)
    rates = [(qnet.backbone, args.lr), (qnet.head, args.head_lr or args.lr)]
    trainer = Training(qnet, args, [len(pack.pairs) for pack in packs], rates)
    for update, last in trainer.updates():
        qnet.train()
        batch = [packs[i] for i in update]
        n = sum(len(pack.pairs) for pack in batch)
        loss = 0.0
        for group in trainer.share(micro_batches(batch, lambda pack: len(pack.tree), micro_tokens)):
            if args.plain:
                losses = [family_loss(qnet, pack.pairs, args.loss_on, weight) for pack in group]
                part = torch.stack(losses).sum()
            else:  # the same, at a fraction of the cost
                part = packed_loss(qnet, group, weight)
            part = part / n  # Eq. (11), per pair
            part.backward()  # gradients accumulate
            loss += part.item()
        loss = trainer.reduce(loss)
        for parameters, rate in zip(trainer.optimizer.param_groups, trainer.rates, strict=True):
            parameters["lr"] = rate * cosine(trainer.step, trainer.starts[-1])
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.end_update(loss, tokens=sum(len(pack.tree) for pack in batch), last=last)
        if last:
            ranks = ranking(qnet.eval(), held_out, args.plain)
            watched = ranks["within_mse" if weight and ranks["sibling_pairs"] else "mse"]
            validation = watched if len(held_out) >= MIN_HELD_OUT else None
            trainer.end_epoch(validation, held_out=ranks)
    return trainer.finish()


# ---------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: QNet, trees: list[Pairs], plain: bool = False) -> dict[str, Any]:
    """On these trees, of Q: the mean square error (Eq. 8), the part of it within states, and
    `sibling_accuracy`."""
    pairs = list(itertools.chain(*trees))
    reader = scorer(qnet, plain, cache_gb=2.0)  # beside a training's moments
    values = reader.score([Score(p.state, (p.action,)) for p in pairs])
    scores = {(p.state, p.action): v for p, (v,) in zip(pairs, values, strict=True)}
    square = within = 0.0
    for family in itertools.chain(*map(families, trees)):
        errors = [scores[p.state, p.action] - p.q for p in family]
        mean = sum(errors) / len(errors)
        square += sum(e**2 for e in errors)
        within += sum((e - mean) ** 2 for e in errors)
    n = max(1, len(pairs))
    return {"mse": square / n, "within_mse": within / n} | sibling_accuracy(trees, scores)


def sibling_accuracy(trees: list[Pairs], scores: dict, gap: float = 0.05) -> dict[str, Any]:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores agree.

    Chance is .5.
    """
    right = []
    for family in itertools.chain(*map(families, trees)):
        for a, b in itertools.combinations(family, 2):
            if abs(a.q - b.q) > gap:
                difference = scores[a.state, a.action] - scores[b.state, b.action]
                right.append(0.5 if difference == 0 else float((difference > 0) == (a.q > b.q)))
    accuracy = sum(right) / len(right) if right else None
    return {"sibling_accuracy": accuracy, "sibling_pairs": len(right)}


# --------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.Parser(__doc__, flags.defaults_text(PAPER, TINY, "models below 50 M parameters"))
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    flags.add_training(parser, "(s, a) pairs")
    carry = "tokens that carry the loss: all (Eq. 11) or last"
    add("--loss-on", choices=LOSS_FROM, metavar="WHICH", help=carry)
    text = "B times more loss on the differences of siblings (0: the paper)"
    add("--rank-weight", type=real, default=0.0, metavar="B", help=text)
    add("--head-lr", type=real, metavar="LR", help="of the value head (--lr)")
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair: for models that read no token tree")
    add("--max-tokens", type=positive, metavar="N", help="of a packed tree")
    add("--limit", type=positive, metavar="N", help="number of trees (default: all)")
    flags.add_prompt(parser)  # as the trees were grown
    return runs.parse(parser, argv)


def load(args: argparse.Namespace) -> tuple[QNet, Any]:
    """A QNet of the agent's weights and a new head, and PEFT's view of LoRA's updates (or None)."""
    torch.manual_seed(args.seed)  # here: the agent may have been trained in this process just now
    all_weights = not (args.lora or args.freeze)
    options = agent.loading(args.sft, args)
    backbone, chat = models.load_checkpoint(args.sft, AutoModel, train=all_weights, **options)
    qnet = QNet(backbone, chat)
    memory = args.lora, args.lora_alpha, args.gradient_checkpointing
    adapter = models.prepare_training(backbone, *memory)
    if args.freeze:
        backbone.requires_grad_(False)
    settings = TINY if sum(p.numel() for p in backbone.parameters()) < SMALL else PAPER
    flags.fill_defaults(args, settings | ({"lr": flags.LORA_LR} if args.lora else {}))
    return qnet, adapter


def save(qnet: QNet, args: argparse.Namespace, adapter: Any) -> None:
    dtype = models.PRECISIONS[args.precision]
    with files.draft_of(args.out) as folder:
        qnet.backbone = models.full_weights(qnet.backbone, folder, adapter, dtype)
        qnet.save_pretrained(folder)
        models.read_back(folder, qnet.backbone)


def read(args: argparse.Namespace, chat: Chat, process: Any) -> tuple[list[Pairs], dict[str, Any]]:
    """Of each labelled tree the pairs that the model can read; figures for the metadata."""
    tasks, trees, left_out = [], [], 0
    labelled = files.read_trees(args.labels, ["q", "messages"])
    for tree in itertools.islice(labelled, args.limit):
        try:
            pairs = pairs_of(tree)
        except UserError as error:
            name = f"the tree of task {tree[0]['task_id']}"
            raise UserError(f"{args.labels}: {name}: {error}") from None
        tasks.append(tree[0]["task_id"])
        trees.append([pair for pair in pairs if chat.fits(pair.state, pair.action)])
        left_out += len(pairs) - len(trees[-1])
    if left_out:
        why = "beyond the model's context (--truncate oldest cuts them)"
        process.print(f"{left_out} pairs are left out: {why}")
    return trees, {"trees": len(trees), "pairs_left_out": left_out, "tasks": tasks}


def tell(out: Path, figures: dict[str, Any], ranks: dict[str, Any]) -> None:
    errors = f"training loss {figures['loss']:.4f}, held-out mse {ranks['mse']:.4f}"
    print(f"{out}: {figures['trees']} trees, {errors} after epoch {figures['best_epoch']}")
    if ranks["sibling_pairs"]:
        right = f"{ranks['sibling_accuracy']:.3f} of {ranks['sibling_pairs']}"
        print(f"  held-out sibling pairs ranked right {right} (chance .5)")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.labels = runs.need(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.sft = runs.need(args.sft, args.run / "sft", "sft", args)
    args.out = files.checkpoint_folder(args.out or args.run / "qnet", args.sft)
    inputs = {"labels": args.labels, "sft": args.sft}
    with training.processes(args) as process:
        qnet, adapter = load(args)
        trees, counts = read(args, qnet.chat, process)
        learned, held_out = hold_out(trees)
        if not any(learned):
            raise UserError(f"{args.labels}: no pair of (s, a) to train on")
        recipe = training.begin(args, **inputs)
        if recipe is None:
            return
        figures = train(qnet, learned, held_out, args) | counts
        if process.is_main_process:
            ranks = figures["curve"][figures["best_epoch"] - 1]["held_out"]
            runs.write_meta(args.out, args, recipe, inputs, **figures, held_out=ranks)
            save(qnet, args, adapter)
            tell(args.out, figures, ranks)


if __name__ == "__main__":
    flags.run_stage(main)
