"""Stage 4: the Q-network (Sec. 4.3, Eq. 8-11).

    reads   RUN/sft/ (the backbone's first weights), RUN/q_labels.jsonl
    writes  RUN/qnet/ (backbone, value head, tokenizer)

    python train_qnet.py --sft runs/webshop/sft --labels runs/webshop/q_labels.jsonl

QNet is the agent's own language model with a value head, regressed at *every* token of (s, a) onto that pair's Q-value.
The pairs of a tree share their beginnings, and the loss is a square: sum_i w_i (v - q_i)^2 is (sum w_i) (v - mean q)^2
plus a constant. So a tree goes through the backbone once, each token with a weight and a mean target, and gives the
gradient of its pairs one by one (`pair_loss`, the readable form that the tests hold it to) at a fraction of the cost.

Held-out trees (one in ten) tell whether QNet can rank *siblings*, which is all that search asks of it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

from environments import UserError
from qlass.chat import Chat, State
from qlass.driver import Score
from qlass.jsonl import checkpoint_folder, read_trees, replacing_folder
from qlass.models import (
    LR,
    adamw,
    add_lora,
    add_training,
    check_training,
    cosine,
    device_and_dtype,
    load_checkpoint,
    merge,
    mixed_precision,
)
from qlass.packing import Pair, loss_tokens, pack, packed_loss, pairs_of
from qlass.policy import Policy
from qlass.prompt_cache import reader
from qlass.stage import add_arguments, must_exist, needed, parse_arguments, run_stage, stage_argv, write_meta
from qlass.stats import spearman
from qlass.token_tree import batches

HELD_OUT = slice(None, None, 10)  # every tenth tree is not trained on


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and an MLP on each token's hidden state (Eq. 8)."""

    def __init__(self, backbone: Any, chat: Chat, hidden: int = 1024, readout: str = "last") -> None:
        super().__init__()
        self.backbone, self.chat, self.readout = backbone, chat, readout
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Sequential(  # App. A.2: two hidden layers of 1024, ReLU
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        ).to(backbone.device)  # fmt: skip
        self.reader, self.budget = reader(backbone), 16_384
        self.computed = 0  # tokens put through the net for scores, padding included
        self._known: dict[tuple[State, str], float] = {}

    def forward(self, at: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
        """Values (B, L) of the tokens of `inputs` (ids, positions, mask as from `tokens.packed`), or, flat, of those
        that `at` (B, L) marks: the head costs a tiny model more than its backbone."""
        hidden = self.backbone(**inputs).last_hidden_state
        hidden = hidden if at is None else hidden[at]
        return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)

    def train(self, mode: bool = True) -> QNet:
        """Training changes the weights: what was computed with the old ones is forgotten."""
        self.reader, self._known = reader(self.backbone), {}
        return super().train(mode)

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions: the value at the action's last token, or their mean."""
        if self.training:
            self.eval()
        fresh: dict[State, dict[str, None]] = {}
        for r in requests:
            for action in r.actions:
                if (r.state, action) not in self._known:
                    fresh.setdefault(r.state, {})[action] = None
        states = list(fresh)
        tails = [[self.chat.action(a, s.task) for a in fresh[s]] for s in states]

        def values(inputs: dict, columns: torch.Tensor) -> torch.Tensor:
            self.computed += inputs["input_ids"].numel()
            return self(**inputs)[:, columns].float()

        prompts, pad_id = [self.chat.prompt_tokens(s) for s in states], self.chat.tokenizer.pad_token_id
        for n, out, _, paths in self.reader.read(values, self.backbone, pad_id, self.budget, prompts, tails):
            v = out.cpu().numpy()
            for action, at in zip(fresh[states[n]], paths, strict=True):
                self._known[states[n], action] = float(v[at[-1]] if self.readout == "last" else v[at].mean())
        return [[self._known[r.state, action] for action in r.actions] for r in requests]

    def save_pretrained(self, folder: Path) -> None:
        """The backbone by HuggingFace's save_pretrained, tokenizer and rendering, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.tokenizer.save_pretrained(folder)
        self.chat.rendering.save(folder)
        save_file({k: v.contiguous() for k, v in self.head.state_dict().items()}, folder / "head.safetensors")
        about = {"hidden": self.head[0].out_features, "readout": self.readout}
        (folder / "qnet.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: str | None = None, readout: str | None = None, load_in: str | None = None,
        plain: bool = False,
    ) -> QNet:  # fmt: skip
        folder = Path(folder)
        if not (folder / "qnet.json").exists():
            raise UserError(f"{folder}: not a QNet (no qnet.json); train_qnet.py writes one")
        backbone, chat = load_checkpoint(folder, transformers.AutoModel, device, load_in, plain=plain)
        try:
            about = json.loads((folder / "qnet.json").read_text(encoding="utf-8"))
            qnet = cls(backbone, chat, about["hidden"], readout or about["readout"])
            qnet.head.load_state_dict(load_file(folder / "head.safetensors"))
        except (KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
            wrong = str(error).splitlines()[0]
            raise UserError(f"{folder}: no value head that fits its backbone ({wrong}); mixed from two?") from None
        return qnet.to(backbone.device).eval()


# ------------------------------------------------------------------------------------------------------- the targets


def pair_loss(qnet: QNet, pair: Pair, loss_on: str = "all") -> torch.Tensor:
    """Eq. (11) for one pair: 1/n sum_j (V_j - q)^2 over the n tokens of (s, a)."""
    prompt, action = qnet.chat.prompt(pair.state), qnet.chat.action(pair.action, pair.state.task)
    values = qnet(input_ids=torch.tensor([[*prompt, *action]], device=qnet.backbone.device))[0]
    return (values[loss_tokens(prompt, action, loss_on)].float() - pair.q).square().mean()


# ----------------------------------------------------------------------------------------------------------- training


def train(qnet: QNet, trees: list[list[Pair]], args: argparse.Namespace) -> dict:
    packs = [p for tree in trees for p in pack(qnet.chat, tree, args.loss_on, args.max_tokens)]
    parameters = [p for p in qnet.parameters() if p.requires_grad]
    optimizer = adamw(parameters, args.lr, args.optim)
    order = torch.Generator().manual_seed(args.seed)
    plan: list[list[int]] = []  # packs of each update: at least `batch` pairs
    for _ in range(args.epochs):
        update: list[int] = []
        for i in torch.randperm(len(packs), generator=order).tolist():
            update.append(i)
            if sum(packs[j].pairs for j in update) >= args.batch:
                plan.append(update)
                update = []
        if update:
            plan.append(update)
    qnet.train()
    losses = []
    bar = tqdm(plan, desc="qnet", disable=None)
    for step, update in enumerate(bar):
        pairs, total = sum(packs[i].pairs for i in update), 0.0
        for group in batches([packs[i] for i in update], lambda p: len(p.tree), args.micro_tokens):
            with mixed_precision(qnet.backbone):
                loss = packed_loss(qnet, [packs[update[g]] for g in group]) / pairs
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * cosine(step, len(plan))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        bar.set_postfix(mse=f"{total:.4f}")
    computed, plain = sum(len(p.tree) for p in packs), sum(p.tokens for p in packs)
    last = losses[-max(1, len(losses) // 10) :]
    return {"updates": len(plan), "tokens": computed * args.epochs, "tokens_pair_by_pair": plain * args.epochs,
            "mse": sum(last) / len(last)}  # fmt: skip


# --------------------------------------------------------------------------------------------- can it rank siblings?


def sibling_accuracy(trees: list[list[Pair]], scores: dict[tuple[State, str], float], gap: float = 0.05) -> dict:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores stand in the same order.

    Chance is .5. `spearman` is the global rank correlation, which a net that only knows V(s) can reach too.
    """
    right, total = 0.0, 0
    flat = [(p.q, scores[p.state, p.action]) for tree in trees for p in tree if (p.state, p.action) in scores]
    for tree in trees:
        siblings: dict[State, list[Pair]] = {}
        for p in tree:
            siblings.setdefault(p.state, []).append(p)
        for family in siblings.values():
            for i, a in enumerate(family):
                for b in family[:i]:
                    if abs(a.q - b.q) > gap:
                        x, y = scores[a.state, a.action], scores[b.state, b.action]
                        right += 0.5 if x == y else float((x > y) == (a.q > b.q))
                        total += 1
    return {
        "sibling_accuracy": right / total if total else None,
        "sibling_pairs": total,
        "spearman": float(spearman(*zip(*flat, strict=True))) if len(flat) > 2 else None,
    }


def qnet_scores(qnet: QNet, trees: list[list[Pair]]) -> dict[tuple[State, str], float]:
    pairs = list(dict.fromkeys((p.state, p.action) for tree in trees for p in tree))
    return dict(zip(pairs, (s[0] for s in qnet.score([Score(s, (a,)) for s, a in pairs])), strict=True))


def policy_scores(policy: Policy, trees: list[list[Pair]]) -> dict[tuple[State, str], float]:
    """log pi(a | s): the baseline that a QNet has to beat."""
    pairs = list(dict.fromkeys((p.state, p.action) for tree in trees for p in tree))
    return dict(zip(pairs, policy.logprobs(pairs), strict=True))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Table 5: lr 1e-5, batch 64, 2 epochs.")
    add_arguments(parser)
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    add("--epochs", type=int, default=2, help="default: %(default)s")
    add("--lr", type=float, help="default: 1e-5 (with --lora 2e-4); below 50 M parameters 1e-3")
    add("--batch", type=int, default=64, help="(s, a) pairs an update (default: %(default)s)")
    add("--loss-on", choices=["all", "action", "last"], default="all", help="tokens with the loss (Eq. 11: all)")
    add("--readout", choices=["last", "mean"], default="last", help="Q at inference: last action token, or their mean")
    add("--freeze", action="store_true", help="train the head alone")
    add_training(parser)
    add("--max-tokens", type=int, help="of a packed tree (default: 4096; below 50 M parameters 1024)")
    add("--micro-tokens", type=int, default=8192, help="padded tokens in memory at once (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="number of trees (default: all)")
    add("--device")
    args = parse_arguments(parser, argv)
    if args.lora and args.freeze:
        raise UserError("--lora and --freeze: give one of them")
    check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    started = time.time()
    must_exist(args.labels, args.sft)
    args.labels = needed(args.labels, args.run / "q_labels.jsonl", "bellman", stage_argv(args))
    args.out = checkpoint_folder(args.out or args.run / "qnet")

    trees = []
    for tree in read_trees(args.labels):
        if "q" not in tree[0]:
            raise UserError(f"{args.labels}: no q-values; run bellman.py on it and name its output")
        trees.append(pairs_of(tree))
    trees = trees[: args.limit]
    if not trees:
        raise UserError(f"{args.labels}: no trees")
    held_out, training = trees[HELD_OUT], [t for i, t in enumerate(trees) if i % 10] or trees

    args.sft = needed(args.sft, args.run / "sft", "sft", stage_argv(args))
    torch.manual_seed(args.seed)  # here, so that the head is the same whether the agent was there or has just been made
    backbone, chat = load_checkpoint(
        args.sft, transformers.AutoModel, args.device, args.load_in, train=not (args.lora or args.freeze)
    )
    qnet = QNet(backbone, chat, readout=args.readout)
    small = sum(p.numel() for p in backbone.parameters()) < 50e6
    args.lr = args.lr or (1e-3 if small else LR if args.lora else 1e-5)
    args.max_tokens = args.max_tokens or (1024 if small else 4096)
    backbone.requires_grad_(not args.freeze)
    if args.lora:
        add_lora(backbone, args.lora)
    figures = train(qnet, training, args)

    policy = Policy.load(args.sft, args.device, args.seed, args.load_in)
    for name, some in (("held_out", held_out), ("training", training[: len(held_out)])):
        figures[name] = sibling_accuracy(some, qnet_scores(qnet, some))
        figures[name]["policy_sibling_accuracy"] = sibling_accuracy(some, policy_scores(policy, some))[
            "sibling_accuracy"
        ]

    if args.lora:
        merge(backbone)
    backbone.to(device_and_dtype(args.device)[1])  # as q_search.py loads it
    with replacing_folder(args.out) as folder:
        qnet.save_pretrained(folder)
    write_meta(args.out, args, [args.labels, args.sft], trees=len(trees), seconds=time.time() - started, **figures)
    print(f"{args.out}: mse {figures['mse']:.4f}, each token once: {figures['tokens']:,} of "
          f"{figures['tokens_pair_by_pair']:,} tokens")  # fmt: skip
    for name in ("held_out", "training"):
        f = figures[name]
        if f["sibling_pairs"]:
            print(f"  {name} trees: sibling pairs ranked right {f['sibling_accuracy']:.3f} of {f['sibling_pairs']} "
                  f"(chance .5, policy's log-probability {f['policy_sibling_accuracy']:.3f}), "
                  f"Spearman {f['spearman']:.3f}")  # fmt: skip


if __name__ == "__main__":
    run_stage(main)
