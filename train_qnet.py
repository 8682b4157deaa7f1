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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import envs
from qlass import UserError, cli, files, flags, loop, models
from qlass.checks import print_ranking, sibling_accuracy
from qlass.cli import at_least, settle
from qlass.driver import Score
from qlass.loop import Training, micro_batches
from qlass.policy import Policy
from qlass.qnet import Pair, QNet, pair_loss, pairs_of
from qlass.records import read_trees

# Table 5 and Eq. (11); why the tiny model's loss is on the last token: docs/differences.md
PAPER = {"epochs": 2, "lr": 1e-5, "batch": 64, "loss_on": "all", "max_tokens": 4096, "micro_tokens": 8192}
TINY = {"epochs": 8, "lr": 1e-3, "batch": 64, "loss_on": "last", "max_tokens": 1024, "micro_tokens": 2048}
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on

Tree = list[Pair]

# ----------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Pack:
    """Pairs that go through QNet together, and how many tokens that takes; without qlass/fast/ one pair."""

    pairs: Sequence[Pair]
    tokens: int


def packed(qnet: QNet, trees: list[Tree], loss_on: str, max_tokens: int, fast: bool = True) -> list[Pack]:
    """The pairs of each tree, depth first, in packs of at most `max_tokens`; one by one if not `fast`."""
    if fast:
        from qlass.fast.packing import pack_pairs

        return [pack for tree in trees for pack in pack_pairs(qnet.chat, tree, loss_on, max_tokens)]
    chat, pairs = qnet.chat, [pair for tree in trees for pair in tree]
    return [Pack([p], len(chat.prompt(p.state)) + len(chat.action(p.action, p.state.task))) for p in pairs]


def hold_out(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Trees to train on, and every tenth one, from the first on, to validate; a tree alone is both."""
    training = [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    return training or trees, trees[::HELD_OUT]


def train(
    fit: Training, packs: list[Pack], held_out: list[Tree], loss_on: str, micro_tokens: int, fast: bool = True
) -> None:
    """Regress QNet onto the Q-values of (s, a)."""
    if fast:
        from qlass.fast.packing import packed_loss
    qnet = fit.model
    for _ in fit.epochs():
        qnet.train()
        for batch in fit.batches(packs):
            n = sum(len(pack.pairs) for pack in batch)
            for group in fit.share(micro_batches(batch, lambda pack: pack.tokens, micro_tokens if fast else 1)):
                if fast:  # the same at a fraction of the cost
                    loss = packed_loss(qnet, group)
                else:
                    loss = sum(pair_loss(qnet, pair, loss_on) for pack in group for pair in pack.pairs)  # Eq. (11)
                fit.backward(loss / n)
            fit.step(tokens=sum(pack.tokens for pack in batch))
        figures = ranking(qnet, held_out)
        enough = len(held_out) >= 5
        fit.end_epoch(figures["mse"] if enough else None, **{f"held_out_{name}": v for name, v in figures.items()})


# --------------------------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: QNet, trees: list[Tree]) -> dict:
    """The mean square error of QNet's values on these trees (Eq. 8), and how it ranks siblings: `sibling_accuracy`."""
    pairs = [pair for tree in trees for pair in tree]
    values = [q for (q,) in qnet.score([Score(pair.state, (pair.action,)) for pair in pairs])]
    mse = sum((pair.q - v) ** 2 for pair, v in zip(pairs, values, strict=True)) / max(1, len(pairs))
    scores = {(pair.state, pair.action): v for pair, v in zip(pairs, values, strict=True)}
    return {"mse": mse} | sibling_accuracy(trees, scores)


def beside_policy(qnet: QNet, policy: Policy, trees: list[Tree]) -> dict:
    """`ranking` of QNet, and how well the agent's own log-probability ranks the same siblings."""
    pairs = list(dict.fromkeys((pair.state, pair.action) for tree in trees for pair in tree))
    of_policy = sibling_accuracy(trees, dict(zip(pairs, policy.logprobs(pairs), strict=True)))
    own = {f"policy_{name}": of_policy[name] for name in ("sibling_accuracy", "own_sibling_accuracy")}
    return ranking(qnet, trees) | own


# --------------------------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 2 epochs.")
    envs.add_arguments(parser, argv)
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    flags.add_training(parser, PAPER, TINY, "(s, a) pairs")
    tokens = ["all", "action", "last"]
    carry = f"tokens of (s, a) that carry the loss (default: {PAPER['loss_on']}, Eq. 11; tiny: {TINY['loss_on']})"
    add("--loss-on", choices=tokens, help=carry)
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair, as Eq. (11) reads: for models that know no tree mask")
    add("--max-tokens", type=at_least(1), help=f"of a packed tree ({PAPER['max_tokens']}; tiny: {TINY['max_tokens']})")
    add("--limit", type=at_least(1), metavar="N", help="number of trees (default: all)")
    flags.add_prompted(parser)  # as the trees were grown
    add("--device")
    args = cli.parse(parser, argv)
    flags.check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    cli.must_exist(args.sft, args.labels)
    args.sft = cli.needed(args.sft, args.run / "sft", "sft", args)
    args.labels = cli.needed(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.out = files.checkpoint_folder(args.out or args.run / "qnet", args.sft)
    flags.warn_of_another_world(args.sft, args)
    rendering = flags.rendering_of(args.sft, args, flags.PROMPTED)
    with loop.processes(args.out, args.device) as process:
        trees = [pairs_of(tree) for tree in read_trees(args.labels, ["q", "messages"])][: args.limit]
        all_weights = not (args.lora or args.freeze)
        how = {"train": all_weights, "plain": args.plain, "rendering": rendering, "precision": args.precision}
        torch.manual_seed(args.seed)  # here, so that the head is the same whether the agent was there or is new
        backbone, chat = models.load_checkpoint(args.sft, transformers.AutoModel, args.device, args.load_in, **how)
        qnet = QNet(backbone, chat, fast=not args.plain)
        adapter = models.save_memory(backbone, args.lora, args.lora_alpha, args.gradient_checkpointing)
        if args.freeze:
            backbone.requires_grad_(False)
        small = sum(p.numel() for p in backbone.parameters()) < SMALL
        settle(args, (TINY if small else PAPER) | ({"lr": flags.LORA_LR} if args.lora else {}))
        if not loop.begin(vars(args), [args.labels, args.sft]):
            return
        readable = [[pair for pair in tree if chat.fits(pair.state, pair.action)] for tree in trees]
        if left_out := sum(map(len, trees)) - sum(map(len, readable)):
            process.print(f"{left_out} pairs are left out: beyond the model's context (--truncate oldest cuts them)")
        training, held_out = hold_out(readable)
        packs = packed(qnet, training, args.loss_on, args.max_tokens, not args.plain)
        if not packs:
            raise UserError(f"{args.labels}: no pair of (s, a) to train on")
        fit = Training(qnet, vars(args), [len(pack.pairs) for pack in packs])
        train(fit, packs, held_out, args.loss_on, args.micro_tokens, not args.plain)
        if not process.is_main_process:
            return

        with files.draft_of(args.out) as folder:
            qnet.backbone = models.ordinary(qnet.backbone, folder, adapter, fit.dtype)
            qnet.save_pretrained(folder)
        how |= {"train": False, "device": args.device, "load_in": args.load_in}
        policy = Policy.load(args.sft, args.seed, **how)
        figures = fit.figures() | {"trees": len(trees), "pairs_left_out": left_out}
        figures["held_out"] = beside_policy(qnet.eval(), policy, held_out)  # of the best epoch's weights
        files.write_meta(args.out, vars(args), [args.labels, args.sft], **figures)
        print(f"{args.out}: mse {figures['loss']:.4f} after epoch {figures['best_epoch']}")
        print_ranking("held_out", figures["held_out"])


if __name__ == "__main__":
    cli.run_stage(main)
