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
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import envs
from qlass import UserError, cli, files, loop, models
from qlass.chat import PROMPTED, Chat
from qlass.checks import policy_scores, print_ranking, sibling_accuracy
from qlass.cli import at_least, choices, more, parse, settle
from qlass.fast.packing import PackedPairs, pack_pairs, packed_loss, packed_scores
from qlass.fast.token_tree import batches
from qlass.files import checkpoint_folder, only_writer, release, replacing_folder
from qlass.flags import add_prompted, add_training, check_training, rendering_of, warn_of_another_world
from qlass.loop import Training, finish, is_trained
from qlass.policy import Policy
from qlass.qnet import Pair, QNet, pair_loss, pairs_of
from qlass.records import read_trees

# Table 5 and Eq. (11); why the tiny model's loss is on the last token: docs/differences.md
PAPER = {"epochs": 2, "lr": 1e-5, "batch": 64, "loss_on": "all", "max_tokens": 4096, "micro_tokens": 8192}
TINY = {"epochs": 8, "lr": 1e-3, "batch": 64, "loss_on": "last", "max_tokens": 1024, "micro_tokens": 2048}
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on
TAKES = "10 to 15 minutes with the tiny model on two cores"
MEASURED = 50  # trees at most, when training is over

Tree = list[Pair]

# ----------------------------------------------------------------------------------------------------------- training


def within_context(chat: Chat, trees: list[Tree]) -> tuple[list[Tree], int]:
    """The trees without the pairs that the model can't read, and how many these are."""
    readable = [[pair for pair in tree if chat.fits(pair.state, pair.action)] for tree in trees]
    return readable, sum(map(len, trees)) - sum(map(len, readable))


def hold_out(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Every tenth tree, from the first one on, to measure on; the others to train on."""
    held_out, training = trees[::HELD_OUT], [tree for i, tree in enumerate(trees) if i % HELD_OUT]
    tasks = {tree[0].state for tree in training if tree}
    if shared := sum(tree[0].state in tasks for tree in held_out if tree):
        print(f"warning: {shared} of {len(held_out)} held-out trees are of tasks that are trained on", file=sys.stderr)
    return held_out, training or trees


def packed(qnet: QNet, trees: list[Tree], loss_on: str, max_tokens: int, fast: bool = True) -> list[PackedPairs]:
    """The trees' pairs in the order in which they are trained on, as many together as `max_tokens` hold; else each."""
    return [pack for tree in trees for pack in pack_pairs(qnet.chat, tree, loss_on, max_tokens if fast else 1)]


def train(
    fit: Training, packs: list[PackedPairs], held_out: list[Tree], validation: list[PackedPairs], loss_on: str,
    micro_tokens: int, fast: bool = True,
) -> None:  # fmt: skip
    """Regress QNet onto the Q-values of (s, a). validation: the packs of the held-out trees."""
    for _ in fit.epochs():
        for update in fit.updates():  # complete packs
            batch = [packs[i] for i in update]
            pairs = sum(pack.pairs for pack in batch)
            for group in fit.share(list(batches(batch, lambda pack: len(pack.tree), micro_tokens))):
                part = [batch[i] for i in group]
                if not fast:  # Eq. (11)
                    loss = sum(pair_loss(fit.model, pair, loss_on) for pack in part for pair in pack.members)
                else:  # the same at a fraction of the cost
                    loss = packed_loss(fit.model, part)
                fit.backward(loss / pairs, sum(len(pack.tree) for pack in part))
            fit.step()
        figures = ranking(fit.model, held_out, validation, micro_tokens, fast)
        score = -figures["mse"] if len(held_out) >= 5 else None
        fit.validated(score, {f"held_out_{name}": value for name, value in figures.items()})


# --------------------------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: Any, trees: list[Tree], packs: list[PackedPairs], micro_tokens: int, fast: bool = True) -> dict:
    """`sibling_accuracy` of QNet on these trees, given their packs, and the mean square error of its values (Eq. 8)."""
    qnet.eval()
    pairs = [pair for tree in trees for pair in tree]
    values = packed_scores(qnet, packs, micro_tokens) if fast else [qnet.q(p.state, p.action) for p in pairs]
    mse = sum((pair.q - v) ** 2 for pair, v in zip(pairs, values, strict=True)) / max(1, len(pairs))
    scores = {(pair.state, pair.action): v for pair, v in zip(pairs, values, strict=True)}
    return {"mse": mse} | sibling_accuracy(trees, scores)


def beside_policy(qnet: Any, policy: Policy, trees: list[Tree], *ranked: Any) -> dict:
    """`ranking` of QNet, and how well the agent's own log-probability ranks the same siblings."""
    of_policy = sibling_accuracy(trees, policy_scores(policy, trees))
    own = {f"policy_{name}": of_policy[name] for name in ("sibling_accuracy", "own_sibling_accuracy")}
    return ranking(qnet, trees, *ranked) | own


# --------------------------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = cli.parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 2 epochs.")
    envs.add_arguments(flags, argv)
    add, default = flags.add_argument, choices(PAPER, TINY)
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    add("--epochs", type=at_least(1), help=f"at most ({default('epochs')})")
    add("--lr", type=at_least(0, float), help=f"{default('lr')}; with --lora {models.LR}")
    add("--batch", type=at_least(1), help=f"(s, a) pairs an update ({default('batch')})")
    tokens = ["all", "action", "last"]
    add("--loss-on", choices=tokens, help=f"tokens of (s, a) that carry the loss ({default('loss_on')}; Eq. 11: all)")
    add("--readout", choices=["last", "mean"], default="last", help="Q at inference: last action token, or their mean")
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair, as Eq. (11) reads: for models that know no tree mask")
    more(flags, add_training)
    add("--max-tokens", type=at_least(1), help=f"of a packed tree ({default('max_tokens')})")
    add("--micro-tokens", type=at_least(1), help=f"padded tokens in memory at once ({default('micro_tokens')})")
    add("--limit", type=at_least(1), metavar="N", help="number of trees (default: all)")
    more(flags, add_prompted)  # as the trees were grown
    add("--device")
    args = parse(flags, argv)
    if args.lora and args.freeze:
        raise UserError("--lora and --freeze: give one of them")
    if args.plain and loop.divides():
        raise UserError(
            "--plain: makes a pass for each pair, and with FSDP all must make as many: leave one of them out"
        )
    check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    process = loop.start(args.device)
    cli.must_exist(args.labels, args.sft)
    args.labels = cli.needed(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.out = checkpoint_folder(args.out or args.run / "qnet", args.sft or args.run / "sft")
    lock = only_writer(args.out) if process.is_main_process else None

    trees = [pairs_of(tree) for tree in read_trees(args.labels, ["q", "messages"])][: args.limit]
    if not any(trees):
        raise UserError(f"{args.labels}: no trees with actions")

    args.sft = cli.needed(args.sft, args.run / "sft", "sft", args)
    warn_of_another_world(args.sft, args)
    rendering = rendering_of(args.sft, args, PROMPTED)

    def load(load_in: str | None, float32: bool) -> tuple[Any, Any]:
        kind = transformers.AutoModel
        return models.load_checkpoint(
            args.sft, kind, args.device, load_in, float32, args.plain, rendering, args.precision
        )

    def begin() -> tuple[QNet, Any]:
        torch.manual_seed(args.seed)  # here, so that the head is the same whether the agent was there or is new
        qnet = QNet(
            *load(args.load_in, float32=not (args.lora or args.freeze)), readout=args.readout, fast=not args.plain
        )
        if args.freeze:
            qnet.backbone.requires_grad_(False)
        return qnet, models.save_memory(qnet.backbone, args.lora, args.lora_alpha, args.gradient_checkpointing)

    qnet, adapter = begin()
    small = sum(p.numel() for p in qnet.backbone.parameters()) < SMALL
    settle(args, (TINY if small else PAPER) | ({"lr": models.LR} if args.lora else {}))
    if is_trained(vars(args), [args.labels, args.sft]):
        return release(lock)
    readable, left_out = within_context(qnet.chat, trees)
    if left_out:
        cut = "" if qnet.chat.rendering.truncate else "; --truncate oldest cuts them"
        process.print(f"{left_out} pairs are left out: they are beyond the model's context{cut}")
    held_out, training = hold_out(readable)

    def packs_of(part: list[Tree]) -> list[PackedPairs]:
        return packed(qnet, part, args.loss_on, args.max_tokens, fast=not args.plain)

    packs = packs_of(training)
    if not packs:
        raise UserError(f"{args.labels}: no pair of (s, a) to train on")
    process.print(models.memory_of(qnet, args.optim))
    optimizer = models.adamw(qnet.parameters(), args.lr, args.optim)
    fit = Training("qnet", qnet, optimizer, vars(args), [pack.pairs for pack in packs])
    with models.within_memory(), fit.bar:
        train(fit, packs, held_out, packs_of(held_out), args.loss_on, args.micro_tokens, fast=not args.plain)
    qnet, adapter = fit.result((qnet, adapter), begin)
    if not process.is_main_process:
        return

    with replacing_folder(args.out) as folder:
        if adapter:
            qnet.backbone = models.merge(adapter, folder / "adapter", lambda: load(None, float32=False)[0])
        models.cast(qnet.backbone, models.device_and_dtype(args.device, args.precision)[1])  # as q_search.py loads it
        qnet.save_pretrained(folder)
    figures = fit.figures() | {"trees": len(trees), "pairs_left_out": left_out}
    each, once = sum(pack.tokens for pack in packs), sum(len(pack.tree) for pack in packs)
    figures["tokens_pair_by_pair"] = figures["tokens"] // once * each
    files.write_meta(
        args.out, vars(args), [args.labels, args.sft], **figures
    )  # QNet is there; what follows measures it
    print(f"{args.out}: mse {figures['loss']:.4f} after epoch {figures['best_epoch']}, each token once: "
          f"{figures['tokens']:,} of {figures['tokens_pair_by_pair']:,} tokens")  # fmt: skip

    policy = Policy.load(
        args.sft, args.device, args.seed, args.load_in, args.plain, qnet.chat.rendering, args.precision
    )
    for name, part in (("held_out", held_out[:MEASURED]), ("training", training[: len(held_out)][:MEASURED])):
        figures[name] = beside_policy(qnet, policy, part, packs_of(part), args.micro_tokens, not args.plain)
        print_ranking(name, figures[name])
    files.write_meta(args.out, vars(args), [args.labels, args.sft], **figures)
    finish(args.out)
    release(lock)


if __name__ == "__main__":
    cli.run_stage(main)
