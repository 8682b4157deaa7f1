"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer)

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

QNet is the agent's own language model with a value head, regressed at *every* token of (s, a) onto that pair's Q-value
(the tiny model's only at the last one: docs/differences.md).

The pairs of a tree share their beginnings, and the loss is a square: sum_i w_i (v - q_i)^2 is (sum w_i) (v - mean q)^2
plus a constant. So a tree goes through the backbone once, each token with a weight and a mean target, and gives the
gradient of its pairs one by one (`pair_loss`, the readable form that the tests hold it to) at a fraction of the cost.

Held-out trees (one in ten) show whether QNet can rank *siblings*, which is all that search asks of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from qlass import UserError, cli, files, models, policy, training
from qlass.batching import Score
from qlass.chat import Chat, State
from qlass.cli import at_least, settle
from qlass.files import read_object, read_trees
from qlass.policy import Policy
from qlass.training import Progress, average_gradients, cosine, micro_batches, prepare, share

# Table 5 and Eq. (11); why the tiny model's loss is on the last token: docs/differences.md
PAPER = {
    "epochs": 2,
    "lr": 1e-5,
    "batch": 64,
    "loss_on": "all",
    "max_tokens": 4096,
    "micro_tokens": 8192,
}
TINY = {
    "epochs": 8,
    "lr": 1e-3,
    "batch": 64,
    "loss_on": "last",
    "max_tokens": 1024,
    "micro_tokens": 2048,
}
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on

# -------------------------------------------------------------------------------------------------------- the network


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and a value head on the hidden state of each token."""

    def __init__(
        self, backbone: Any, chat: Chat, hidden: int = 1024, plain: bool = False, **room: Any
    ) -> None:
        """plain: score one (s, a) at a time. room: `budget` (tokens of a batch) and `cache_gb` of the fast way."""
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
        self.plain, self.room = plain, room
        self.fast: Any = None
        self.tokens_read = 0

    def forward(self, at: Any = None, **inputs: Any) -> torch.Tensor:
        """Values V of tokens: (B, L) of all of `inputs` (ids, mask, positions: (B, L)), or those that `at` selects."""
        hidden = self.backbone(**inputs).last_hidden_state  # Eq. (9): h_1 .. h_L, (B, L, D)
        hidden = (
            hidden if at is None else hidden[at]
        )  # the head costs a tiny model more than its backbone
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 siblings would tie
            return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)  # Eq. (10)

    def values(self, state: State, action: str) -> tuple[torch.Tensor, int]:
        """V of each token of (s, a), (L,), and how many of them are the prompt's."""
        prompt = self.chat.prompt(state)
        ids = self.chat.action(action, state.task, len(prompt))
        tokens = torch.tensor([[*prompt, *ids]], device=self.backbone.device)
        self.tokens_read += tokens.numel()
        return self(input_ids=tokens, use_cache=False)[0].float(), len(prompt)

    @torch.inference_mode()
    def q(self, state: State, action: str) -> float:
        """Q(s, a): the value at the action's last token."""
        return float(self.values(state, action)[0][-1])

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions."""
        if self.training:
            self.eval()
        scores = (
            self.fast.score(requests)
            if self.fast
            else [[self.q(r.state, a) for a in r.actions] for r in requests]
        )
        if not all(math.isfinite(q) for values in scores for q in values):
            raise UserError(
                "QNet's values are not finite, so they rank nothing: its training has diverged"
            )
        return scores

    @property
    def computed(self) -> int:
        """Tokens put through the model to score, padding aside."""
        return self.fast.cache.computed if self.fast else self.tokens_read

    def train(self, mode: bool = True) -> QNet:
        """Switch modes. Training changes the weights, so evaluation gets a new fast scorer, whose cache is empty."""
        self.fast = None
        if not (mode or self.plain):
            from qlass.fast.score import FastQNet

            self.fast = FastQNet(self, **self.room)
        return super().train(mode)

    @property
    def _no_split_modules(self) -> Any:
        """What FSDP divides, layer by layer."""
        return self.backbone._no_split_modules

    def save_pretrained(self, folder: Path) -> None:
        """The backbone by HuggingFace's save_pretrained, tokenizer and rendering, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file(
            {k: v.contiguous() for k, v in self.head.state_dict().items()},
            folder / "head.safetensors",
        )
        settings = {"hidden": self.head[0].out_features, "readout": "last"}
        (folder / "qnet.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str | None = None,
        plain: bool = False,
        budget: int = 16_384,
        cache_gb: float | None = None,
        **loading: Any,
    ) -> QNet:
        """loading: load_in, rendering and precision, of `models.load_checkpoint`."""
        folder = Path(folder)
        settings = read_object(folder / "qnet.json")
        if settings["readout"] != "last":
            raise UserError(
                f"{folder}: its Q is the mean of an action's values; here it is the last one"
            )
        backbone, chat = models.load_checkpoint(
            folder, transformers.AutoModel, device, plain=plain, **loading
        )
        qnet = cls(backbone, chat, settings["hidden"], plain, budget=budget, cache_gb=cache_gb)
        qnet.head.load_state_dict(load_file(folder / "head.safetensors"))
        return qnet.to(backbone.device).eval()


# ------------------------------------------------------------------------------------------------ what it learns from


@dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float
    own: bool = True  # its node is the agent's; else the expert's, who was the first to act so


Tree = list[Pair]


def states_of(tree: list[dict]) -> dict:
    """The state of each node, by node_id: its messages are those of the root and, on the way, actions and answers."""
    root = tree[0]
    states = {root["node_id"]: State.load(root["messages"], root.get("task") or "")}
    for node in tree[1:]:
        states[node["node_id"]] = states[node["parent_id"]].then(
            node["action"], node["observation"]
        )
    return states


def pairs_of(tree: list[dict]) -> Tree:
    """All (s, a, q) of a labelled tree, depth first: a node's own action in its parent's state."""
    states = states_of(tree)
    return [
        Pair(states[n["parent_id"]], n["action"], n["q"], n.get("source") != "expert")
        for n in tree[1:]
    ]


def hold_out(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Trees to train on, and every tenth one, from the first on, to validate; a tree alone is both."""
    learned = [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    return learned or trees, trees[::HELD_OUT]


@dataclass(frozen=True)
class Pack:
    """Pairs that go through QNet together, and how many tokens that takes; with --plain one pair."""

    pairs: Sequence[Pair]
    tokens: int


def packed(qnet: QNet, trees: list[Tree], loss_on: str, max_tokens: int) -> list[Pack]:
    """The pairs of each tree, depth first, in packs of at most `max_tokens`; with --plain one by one."""
    chat, packs = qnet.chat, []
    for tree in trees:
        if qnet.plain:
            packs += [
                Pack([p], len(chat.prompt(p.state)) + len(chat.action(p.action, p.state.task)))
                for p in tree
            ]
        else:
            from qlass.fast.packing import pack_pairs

            packs += pack_pairs(
                chat, tree, lambda n_prompt, n: loss_tokens(n_prompt, n, loss_on), max_tokens
            )
    return packs


# ----------------------------------------------------------------------------------------------------------- training


def loss_tokens(n_prompt: int, n: int, loss_on: str = "all") -> slice:
    """Which of the n tokens of (s, a) carry the loss: all (Eq. 11), the action's, or its last."""
    return slice({"all": 0, "action": n_prompt, "last": n - 1}[loss_on], n)


def pair_loss(qnet: QNet, pair: Pair, loss_on: str = "all") -> torch.Tensor:
    """Eq. (11) for one pair: 1/n sum_j (V_j - q)^2 over the n tokens of (s, a), or those that `loss_on` says."""
    values, n_prompt = qnet.values(pair.state, pair.action)
    return (values[loss_tokens(n_prompt, len(values), loss_on)] - pair.q).square().mean()


def packs_loss(qnet: QNet, packs: Sequence[Any], loss_on: str) -> torch.Tensor:
    """Eq. (11) summed over the pairs of some packs, ()."""
    if qnet.plain:
        return sum(pair_loss(qnet, pair, loss_on) for pack in packs for pair in pack.pairs)
    from qlass.fast.packing import packed_loss  # the same at a fraction of the cost

    return packed_loss(qnet, packs)


def train(qnet: QNet, packs: list[Pack], held_out: list[Tree], args: argparse.Namespace) -> dict:
    """Regress QNet onto the Q-values of (s, a). Returns figures for the metadata."""
    prepared = prepare(qnet, args)
    accelerator, model, optimizer = prepared
    progress = Progress(args, [len(pack.pairs) for pack in packs], prepared)
    micro_tokens = 1 if qnet.plain else args.micro_tokens
    while not progress.finished:
        model.train()
        for update in progress.updates():
            batch = [packs[i] for i in update]
            n_pairs = sum(len(pack.pairs) for pack in batch)
            groups = micro_batches(batch, lambda pack: pack.tokens, micro_tokens)
            loss = 0.0
            for group, weight in share(accelerator, groups):  # gradient accumulation
                part = packs_loss(model, group, args.loss_on) / n_pairs
                accelerator.backward(weight * part)
                loss += part.item() if weight else 0.0
            average_gradients(accelerator, model)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss = progress.total(loss, norm)
            for parameters in optimizer.param_groups:
                parameters["lr"] = args.lr * cosine(progress.step, progress.steps)
            optimizer.step()
            optimizer.zero_grad()
            progress.end_update(loss, tokens=sum(pack.tokens for pack in batch))
        figures = ranking(model, held_out)
        enough = len(held_out) >= 5
        progress.end_epoch(
            figures["mse"] if enough else None,
            **{f"held_out_{name}": v for name, v in figures.items()},
        )
    return progress.end(qnet)


# ------------------------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: QNet, trees: list[Tree]) -> dict:
    """The mean square error of QNet's values on these trees (Eq. 8), and how it ranks siblings: `sibling_accuracy`."""
    pairs = [pair for tree in trees for pair in tree]
    values = [q for (q,) in qnet.score([Score(pair.state, (pair.action,)) for pair in pairs])]
    mse = sum((pair.q - v) ** 2 for pair, v in zip(pairs, values, strict=True)) / max(1, len(pairs))
    scores = {(pair.state, pair.action): v for pair, v in zip(pairs, values, strict=True)}
    return {"mse": mse} | sibling_accuracy(trees, scores)


def sibling_accuracy(
    trees: list[Tree], scores: dict[tuple[State, str], float], gap: float = 0.05
) -> dict:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores stand in the same order.

    Chance is .5. `own_...`: of pairs without a node of the expert's, since search compares draws of the agent.
    `spearman` is the rank correlation of all pairs, which a net that only knows V(s) can reach too.
    """
    from scipy.stats import spearmanr

    pairs = [pair for tree in trees for pair in tree]
    columns = [pair.q for pair in pairs], [scores[pair.state, pair.action] for pair in pairs]
    varied = all(len(set(column)) > 1 for column in columns)  # a constant has no ranks
    figures: dict[str, Any] = {"spearman": float(spearmanr(*columns).statistic) if varied else None}
    for name, own in (("sibling", False), ("own_sibling", True)):
        right = []
        for tree in trees:
            families: dict[State, Tree] = {}
            for pair in tree:
                if pair.own or not own:
                    families.setdefault(pair.state, []).append(pair)
            for family in families.values():
                right += [
                    in_order(a, b, scores)
                    for a, b in itertools.combinations(family, 2)
                    if abs(a.q - b.q) > gap
                ]
        figures |= {
            f"{name}_accuracy": sum(right) / len(right) if right else None,
            f"{name}_pairs": len(right),
        }
    return figures


def in_order(a: Pair, b: Pair, scores: dict[tuple[State, str], float]) -> float:
    """1 if two siblings' scores stand in the order of their q, 0 if in the other one, .5 if they are equal."""
    difference = scores[a.state, a.action] - scores[b.state, b.action]
    return 0.5 if difference == 0 else float((difference > 0) == (a.q > b.q))


def beside_policy(qnet: QNet, policy: Policy, trees: list[Tree]) -> dict:
    """`ranking` of QNet, and how well the agent's own log-probability ranks the same siblings."""
    pairs = list(dict.fromkeys((pair.state, pair.action) for tree in trees for pair in tree))
    of_policy = sibling_accuracy(trees, dict(zip(pairs, policy.logprobs(pairs), strict=True)))
    own = {
        f"policy_{name}": of_policy[name] for name in ("sibling_accuracy", "own_sibling_accuracy")
    }
    return ranking(qnet, trees) | own


def print_ranking(figures: dict) -> None:
    for kind, of in (("sibling", ""), ("own_sibling", " without the expert's nodes")):
        if figures[f"{kind}_pairs"]:
            right = (
                f"ranked right{of} {figures[f'{kind}_accuracy']:.3f} of {figures[f'{kind}_pairs']}"
            )
            policy = f"policy's log-probability {figures[f'policy_{kind}_accuracy']:.3f}"
            print(f"  held_out trees: sibling pairs {right} (chance .5, {policy})")


# --------------------------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 2 epochs.")
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    cli.add_training(parser, PAPER, TINY, "(s, a) pairs")
    carry = "tokens that carry the loss: all (Eq. 11; tiny: last), action or last"
    add("--loss-on", choices=["all", "action", "last"], metavar="WHICH", help=carry)
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair: for models that read no token tree")
    add("--max-tokens", type=at_least(1), metavar="N", help="of a packed tree (4096; tiny: 1024)")
    add("--limit", type=at_least(1), metavar="N", help="number of trees (default: all)")
    cli.add_prompt(parser)  # as the trees were grown
    add("--device")
    args = cli.parse(parser, argv)
    cli.check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    cli.must_exist(args.sft, args.labels)
    args.sft = cli.find_or_make(args.sft, args.run / "sft", "sft", args)
    args.labels = cli.find_or_make(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.out = files.checkpoint_folder(args.out or args.run / "qnet", args.sft)
    cli.warn_of_another_world(args.sft, args)
    rendering = policy.rendering_of(args.sft, args, policy.PROMPTED)
    loading = {
        "device": args.device,
        "load_in": args.load_in,
        "precision": args.precision,
        "rendering": rendering,
    }
    with training.processes(args.out, args.device) as process:
        nodes = list(itertools.islice(read_trees(args.labels, ["q", "messages"]), args.limit))
        trees = [pairs_of(tree) for tree in nodes]
        all_weights = not (args.lora or args.freeze)
        torch.manual_seed(
            args.seed
        )  # here, so that the head is the same whether the agent was there or is new
        kind = transformers.AutoModel
        backbone, chat = models.load_checkpoint(
            args.sft, kind, train=all_weights, plain=args.plain, **loading
        )
        qnet = QNet(backbone, chat, plain=args.plain)
        adapter = models.save_memory(
            backbone, args.lora, args.lora_alpha, args.gradient_checkpointing
        )
        if args.freeze:
            backbone.requires_grad_(False)
        small = sum(p.numel() for p in backbone.parameters()) < SMALL
        settle(args, (TINY if small else PAPER) | ({"lr": cli.LORA_LR} if args.lora else {}))
        if not training.begin(args, [args.labels, args.sft]):
            return
        readable = [[pair for pair in tree if chat.fits(pair.state, pair.action)] for tree in trees]
        if left_out := sum(map(len, trees)) - sum(map(len, readable)):
            process.print(
                f"{left_out} pairs are left out: beyond the model's context (--truncate oldest cuts them)"
            )
        learned, held_out = hold_out(readable)
        packs = packed(qnet, learned, args.loss_on, args.max_tokens)
        if not packs:
            raise UserError(f"{args.labels}: no pair of (s, a) to train on")
        figures = train(qnet, packs, held_out, args) | {
            "trees": len(trees),
            "pairs_left_out": left_out,
        }
        if not process.is_main_process:
            return

        with files.draft_of(args.out) as folder:
            dtype = models.device_and_dtype(args.device, args.precision)[1]
            qnet.backbone = models.ordinary(qnet.backbone, folder, adapter, dtype)
            qnet.save_pretrained(folder)
        agent = Policy.load(args.sft, seed=args.seed, plain=args.plain, **loading)
        figures["tasks"] = [tree[0]["task_id"] for tree in nodes]
        figures["held_out"] = beside_policy(
            qnet.eval(), agent, held_out
        )  # of the best epoch's weights
        files.write_meta(args.out, vars(args), [args.labels, args.sft], **figures)
        print(f"{args.out}: mse {figures['loss']:.4f} after epoch {figures['best_epoch']}")
        print_ranking(figures["held_out"])


if __name__ == "__main__":
    cli.run_stage(main)
