"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer)

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

QNet is the agent's own language model with a value head. It is regressed at *every* token of
(s, a) onto that pair's Q-value (the tiny model's only at the last one: docs/differences.md).

The readable form of the loss is `family_loss`; --plain trains with it, pair by pair. But the pairs
of a tree begin alike, so the backbone reads a *pack*, a tree or a part of one, as one sequence in
which each shared token stands once (qlass/fast/packing.py). If n_i tokens of pair i carry the loss,
each has the weight w_i = 1/n_i there. A token of value v that several pairs i share adds

    sum_i w_i (v - q_i)^2 = w v^2 - 2 v sum_i w_i q_i + constant,    w = sum_i w_i.

So w and sum_i w_i q_i of each token give the loss and gradients of the pairs one by one, at a
fraction of the cost.

Held-out trees (one in ten) show whether QNet ranks *siblings*, the actions of one state. For the k
siblings of a state, with the error e(a) = V(s, a) - q(s, a) at the last token of a,

    sum_a e(a)^2 = k mean(e)^2 + sum_a (e(a) - mean(e))^2.

Most of the error is in the first term, but only the second sum can change the siblings' order.
--rank-weight B adds B times the second sum to the loss, and early stopping then watches that sum on
held-out trees. Search, which compares siblings alone, gains (runs/reference_output/ranking.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from qlass import UserError, cli, files, metadata, models, policy, training
from qlass.batching import Score
from qlass.card import write_card
from qlass.chat import Chat
from qlass.cli import at_least
from qlass.fast.packing import pack_pairs, packed_loss
from qlass.fast.score import FastQNet
from qlass.messages import State
from qlass.output import read_trees
from qlass.policy import Policy
from qlass.training import Progress, cosine, micro_batches

# Table 5 and Eq. (11); why the tiny model's loss is on the last token: docs/differences.md
PAPER: dict[str, Any] = {"epochs": 2, "lr": 1e-5, "batch": 64, "loss_on": "all"}
PAPER |= {"max_tokens": 4096, "micro_tokens": 8192}
TINY: dict[str, Any] = {"epochs": 8, "lr": 1e-3, "batch": 64, "loss_on": "last"}
TINY |= {"max_tokens": 1024, "micro_tokens": 2048}
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on
MIN_HELD_OUT = 5  # fewer trees do not choose the epoch

# -------------------------------------------------------------------------------------- the network


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and a value head on each token."""

    def __init__(
        self,
        backbone: Any,
        chat: Chat,
        hidden: int = 1024,
        plain: bool = False,
        cache_gb: float | None = None,
    ) -> None:
        """plain: score one (s, a) at a time. cache_gb: room of qlass/fast/ for what it has read."""
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
        self.plain, self.cache_gb = plain, cache_gb
        self.fast: Any = None

    def forward(self, at: Any = None, **inputs: Any) -> torch.Tensor:
        """Values V of tokens, (B, T), or of those that `at` selects; inputs: the backbone's."""
        hidden = self.backbone(**inputs).last_hidden_state  # Eq. (9): h_1 .. h_T, (B, T, D)
        if at is not None:  # the head costs a tiny model more than its backbone
            hidden = hidden[at]
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 siblings would tie
            return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)  # Eq. (10)

    def values(self, state: State, action: str) -> torch.Tensor:
        """V of each token of (s, a), (T,)."""
        prompt = self.chat.prompt(state)
        ids = prompt + self.chat.action(action, state.task, len(prompt))
        tokens = torch.tensor([ids], device=self.backbone.device)
        return self(input_ids=tokens, use_cache=False)[0].float()

    @torch.inference_mode()
    def q(self, state: State, action: str) -> float:
        """Q(s, a): the value at the action's last token."""
        return float(self.values(state, action)[-1])

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions."""
        if self.training:
            self.eval()
        if self.fast:
            scores = self.fast.score(requests)
        else:
            scores = [[self.q(r.state, action) for action in r.actions] for r in requests]
        if not all(map(math.isfinite, itertools.chain(*scores))):
            raise UserError("QNet's values are not finite, so its training has diverged")
        return scores

    def train(self, mode: bool = True) -> QNet:
        """Switch modes. Training changes the weights, so evaluation begins with an empty cache."""
        self.fast = None
        if not (mode or self.plain):
            self.fast = FastQNet(self, self.cache_gb)
        return super().train(mode)

    @property
    def _no_split_modules(self) -> Any:
        """What FSDP divides, layer by layer."""
        return self.backbone._no_split_modules

    def save_pretrained(self, folder: Path) -> None:
        """Backbone and tokenizer as HuggingFace has them, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file(self.head.state_dict(), folder / "head.safetensors")
        settings = {"hidden": self.head[0].out_features, "readout": "last"}
        (folder / "qnet.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, plain: bool = False, cache_gb: float | None = None, **options: Any
    ) -> QNet:
        """options: device, load_in, rendering, precision of `load_checkpoint`."""
        settings = files.read_object(Path(folder) / "qnet.json")  # which an agent's folder lacks
        if settings["readout"] != "last":
            raise UserError(f"{folder}: its Q is the mean of the action's values, not the last one")
        backbone, chat = models.load_checkpoint(folder, AutoModel, plain=plain, **options)
        qnet = cls(backbone, chat, settings["hidden"], plain, cache_gb)
        head = Path(folder) / "head.safetensors"
        try:
            qnet.head.load_state_dict(load_file(head))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{head}: can't be read ({str(error).splitlines()[0]})") from None
        return qnet.eval()


def load_qnet(folder: Path, args: argparse.Namespace) -> QNet:
    """The QNet in a folder, loaded as the flags of a stage say, with the agent's prompts."""
    options = policy.loading(folder, args, policy.PROMPTED)
    return QNet.from_pretrained(folder, cache_gb=args.cache_gb, **options)


# ------------------------------------------------------------------------------ what it learns from


@dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float
    own: bool = True  # the agent acted so first, not the expert


Tree = list[Pair]


def states_of(tree: list[dict]) -> dict[int, State]:
    """The state of each node by node_id: the root's messages, then actions and their answers."""
    root = tree[0]
    states = {root["node_id"]: State.load(root["messages"], root.get("task") or "")}
    for node in tree[1:]:
        parent = states[node["parent_id"]]
        states[node["node_id"]] = parent.then(node["action"], node["observation"])
    return states


def pairs_of(tree: list[dict]) -> Tree:
    """All (s, a, q) of a labelled tree, depth first: a node's action in its parent's state."""
    states = states_of(tree)
    pairs = []
    for node in tree[1:]:
        own = node.get("source") != "expert"
        pairs.append(Pair(states[node["parent_id"]], node["action"], node["q"], own))
    return pairs


def families(tree: Tree) -> list[Tree]:
    """The pairs of a tree by state: siblings together, in the order of the first of them."""
    of: dict[State, Tree] = {}
    for pair in tree:
        of.setdefault(pair.state, []).append(pair)
    return list(of.values())


def hold_out(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Trees to train on, and every tenth, from the first on, to validate; a tree alone is both."""
    learned = [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    return learned or trees, trees[::HELD_OUT]


# ----------------------------------------------------------------------------------------- training

LOSS_FROM = {"all": 0, "last": -1}  # the first token of (s, a) that carries the loss (Eq. 11: all)


def family_loss(
    qnet: QNet, family: Tree, loss_on: str = "all", rank_weight: float = 0.0
) -> torch.Tensor:
    """Eq. (11) of each pair: 1/n sum_j (V_j - q)^2 over the n tokens that `loss_on` says; and, if
    they are siblings, rank_weight sum_a (e(a) - mean(e))^2 of their last tokens, ()."""
    losses, last = [], []
    for pair in family:
        errors = qnet.values(pair.state, pair.action) - pair.q
        losses.append(errors[LOSS_FROM[loss_on] :].square().mean())
        last.append(errors[-1])
    e = torch.stack(last)
    return torch.stack(losses).sum() + rank_weight * (e - e.mean()).square().sum()


def train(qnet: QNet, trees: list[Tree], held_out: list[Tree], args: argparse.Namespace) -> dict:
    """Regress QNet onto the Q-values of (s, a). Returns figures for the metadata."""
    rank_weight = args.rank_weight
    packs: list[Any] = []
    for tree in trees:
        together = families(tree) if rank_weight else [[pair] for pair in tree]  # not to be split
        room = 1 if qnet.plain else args.max_tokens  # 1: each family is a pack of its own
        packs += pack_pairs(qnet.chat, together, LOSS_FROM[args.loss_on], room)
    rates = {"head.": args.head_lr} if args.head_lr else {}
    progress = Progress(qnet, args, [len(pack.pairs) for pack in packs], rates)
    accelerator, model, optimizer = progress.accelerator, progress.model, progress.optimizer
    while not progress.finished:
        model.train()
        for update in progress.updates():
            batch = [packs[i] for i in update]
            n_pairs = sum(len(pack.pairs) for pack in batch)
            room = 1 if qnet.plain else args.micro_tokens
            groups = micro_batches(batch, lambda pack: pack.tokens, room)
            loss = 0.0
            for group, weight in progress.share(groups):  # gradient accumulation
                if qnet.plain:
                    (pack,) = group
                    part = family_loss(model, list(pack.pairs), args.loss_on, rank_weight)
                else:  # the same, at a fraction of the cost
                    part = packed_loss(model, group, rank_weight)
                part = part / n_pairs  # Eq. (11)
                accelerator.backward(weight * part)
                loss += part.item() if weight else 0.0
            progress.average_gradients()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss = progress.total(loss, norm)
            for parameters, rate in zip(optimizer.param_groups, progress.rates, strict=True):
                parameters["lr"] = rate * cosine(progress.step, progress.steps)
            optimizer.step()
            optimizer.zero_grad()
            progress.end_update(loss, tokens=sum(pack.tokens for pack in batch))
        figures = ranking(model, held_out)
        watched = figures["within_mse" if rank_weight else "mse"]
        validation = watched if len(held_out) >= MIN_HELD_OUT else None
        progress.end_epoch(validation, **{f"held_out_{name}": v for name, v in figures.items()})
    return progress.end()


# ---------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: QNet, trees: list[Tree]) -> dict[str, Any]:
    """On these trees, of Q: the mean square error (Eq. 8), the part of it within states, and
    `sibling_accuracy`."""
    pairs = list(itertools.chain(*trees))
    values = qnet.score([Score(p.state, (p.action,)) for p in pairs])
    scores = {(p.state, p.action): q for p, (q,) in zip(pairs, values, strict=True)}
    within = 0.0
    for family in itertools.chain(*map(families, trees)):
        errors = [scores[p.state, p.action] - p.q for p in family]
        mean = sum(errors) / len(errors)
        within += sum((e - mean) ** 2 for e in errors)
    square, n = sum((p.q - scores[p.state, p.action]) ** 2 for p in pairs), max(1, len(pairs))
    return {"mse": square / n, "within_mse": within / n} | sibling_accuracy(trees, scores)


def policy_ranking(policy: Policy, trees: list[Tree]) -> dict[str, Any]:
    """How well the agent's own log-probability ranks the same siblings."""
    pairs = list(dict.fromkeys((p.state, p.action) for p in itertools.chain(*trees)))
    scores = dict(zip(pairs, policy.logprobs(pairs), strict=True))
    figures = sibling_accuracy(trees, scores)
    return {
        f"policy_{name}": figures[name] for name in ("sibling_accuracy", "own_sibling_accuracy")
    }


def sibling_accuracy(
    trees: list[Tree], scores: dict[tuple[State, str], float], gap: float = 0.05
) -> dict[str, Any]:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores agree.

    Chance is .5. `own_...`: of pairs without a node of the expert's, since the search compares
    draws of the agent.
    """
    right: dict[str, list[float]] = {"sibling": [], "own_sibling": []}
    for family in itertools.chain(*map(families, trees)):
        for a, b in itertools.combinations(family, 2):
            if abs(a.q - b.q) <= gap:
                continue
            difference = scores[a.state, a.action] - scores[b.state, b.action]
            agrees = 0.5 if difference == 0 else float((difference > 0) == (a.q > b.q))
            right["sibling"].append(agrees)
            if a.own and b.own:
                right["own_sibling"].append(agrees)
    figures: dict[str, Any] = {}
    for name, counts in right.items():
        figures[f"{name}_accuracy"] = sum(counts) / len(counts) if counts else None
        figures[f"{name}_pairs"] = len(counts)
    return figures


# --------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    tiny = cli.as_flags(TINY)
    epilog = f"Defaults: {cli.as_flags(PAPER)}; of the tiny model {tiny}."
    parser = cli.parser(__doc__, epilog=epilog)
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    cli.add_training(parser, "(s, a) pairs")
    carry = "tokens that carry the loss: all (Eq. 11) or last"
    add("--loss-on", choices=LOSS_FROM, metavar="WHICH", help=carry)
    text = "B times more loss on the differences of siblings (0: the paper)"
    add("--rank-weight", type=at_least(0, float), default=0.0, metavar="B", help=text)
    add("--head-lr", type=at_least(0, float), metavar="LR", help="of the value head (--lr)")
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair: for models that read no token tree")
    add("--max-tokens", type=at_least(1), metavar="N", help="of a packed tree")
    add("--limit", type=at_least(1), metavar="N", help="number of trees (default: all)")
    cli.add_prompt(parser)  # as the trees were grown
    add("--device")
    return cli.parse(parser, argv)


def load(args: argparse.Namespace) -> tuple[QNet, Any]:
    """A QNet of the agent's weights and a new head, and PEFT's view of LoRA's updates (or None)."""
    torch.manual_seed(args.seed)  # here: the agent may have been trained in this process just now
    all_weights = not (args.lora or args.freeze)
    options = policy.loading(args.sft, args)
    backbone, chat = models.load_checkpoint(args.sft, AutoModel, train=all_weights, **options)
    qnet = QNet(backbone, chat, plain=args.plain)
    memory = args.lora, args.lora_alpha, args.gradient_checkpointing
    adapter = models.save_memory(backbone, *memory)
    if args.freeze:
        backbone.requires_grad_(False)
    small = sum(p.numel() for p in backbone.parameters()) < SMALL
    cli.settle(args, (TINY if small else PAPER) | ({"lr": cli.LORA_LR} if args.lora else {}))
    return qnet, adapter


def save(qnet: QNet, args: argparse.Namespace, adapter: Any) -> None:
    dtype = models.PRECISIONS[args.precision]
    with files.draft_of(args.out) as folder:
        qnet.backbone = models.ordinary(qnet.backbone, folder, adapter, dtype)
        qnet.save_pretrained(folder)


def read(args: argparse.Namespace, chat: Chat, process: Any) -> tuple[list[Tree], dict[str, Any]]:
    """Of each labelled tree the pairs that the model can read; figures for the metadata."""
    tasks, trees, left_out = [], [], 0
    labelled = read_trees(args.labels, ["q", "messages"])
    for tree in itertools.islice(labelled, args.limit):
        pairs = pairs_of(tree)
        tasks.append(tree[0]["task_id"])
        trees.append([pair for pair in pairs if chat.fits(pair.state, pair.action)])
        left_out += len(pairs) - len(trees[-1])
    if left_out:
        why = "beyond the model's context (--truncate oldest cuts them)"
        process.print(f"{left_out} pairs are left out: {why}")
    return trees, {"trees": len(trees), "pairs_left_out": left_out, "tasks": tasks}


def measure(qnet: QNet, held_out: list[Tree], figures: dict, args: argparse.Namespace) -> dict:
    """How well the best epoch's QNet ranked held-out siblings, and how well the agent does."""
    best, start = figures["curve"][figures["best_epoch"] - 1], "held_out_"
    ranks = {name.removeprefix(start): v for name, v in best.items() if name.startswith(start)}
    qnet.cpu()  # a GPU that trained one of them may not hold both
    agent = Policy.load(args.sft, args.seed, **policy.loading(args.sft, args))
    return ranks | policy_ranking(agent, held_out)


def tell(out: Path, figures: dict[str, Any], ranks: dict[str, Any]) -> None:
    errors = f"training loss {figures['loss']:.4f}, held-out mse {ranks['mse']:.4f}"
    print(f"{out}: {figures['trees']} trees, {errors} after epoch {figures['best_epoch']}")
    if ranks["sibling_pairs"]:
        right = f"{ranks['sibling_accuracy']:.3f} of {ranks['sibling_pairs']}"
        own = f"the agent's log-probability {ranks['policy_sibling_accuracy']:.3f}"
        print(f"  held-out sibling pairs ranked right {right} (chance .5, {own})")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.labels = cli.find_or_make(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.sft = cli.find_or_make(args.sft, args.run / "sft", "sft", args)
    args.out = files.checkpoint_folder(args.out or args.run / "qnet", args.sft)
    cli.warn_of_another_world(args.sft, args)
    inputs = [args.labels, args.sft]
    with training.processes(args.out, args.device) as process:
        qnet, adapter = load(args)
        trees, counts = read(args, qnet.chat, process)
        learned, held_out = hold_out(trees)
        if not any(learned):
            raise UserError(f"{args.labels}: no pair of (s, a) to train on")
        if not training.begin(args, inputs):
            return
        figures = train(qnet, learned, held_out, args) | counts
        if process.is_main_process:
            save(qnet, args, adapter)
            ranks = measure(qnet, held_out, figures, args)
            write_card(args, figures, ranks)
            metadata.write_meta(args.out, vars(args), inputs, **figures, held_out=ranks)
            tell(args.out, figures, ranks)


if __name__ == "__main__":
    cli.run_stage(main)
