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

import torch
import transformers

import envs
from qlass import UserError, cli, files, loop, models
from qlass.chat import PROMPTED
from qlass.checks import policy_scores, print_ranking, sibling_accuracy
from qlass.cli import at_least, choices, more, parse, parser, settle
from qlass.fast.packing import PackedPairs, pack_pairs, packed_loss, packed_scores
from qlass.fast.token_tree import batches, like_a_tree
from qlass.files import checkpoint_folder, only_writer, read_trees, release, replacing_folder
from qlass.flags import add_prompted, rendering_of, warn_of_another_world
from qlass.loop import Training, finish, is_trained
from qlass.memory import check_memory, estimate
from qlass.policy import Policy
from qlass.qnet import Pair, QNet, pair_loss, pairs_of

# Table 5 and Eq. (11); why the tiny model's loss is on the last token: docs/differences.md
PAPER = {"epochs": 2, "lr": 1e-5, "batch": 64, "loss_on": "all", "max_tokens": 4096, "micro_tokens": 8192}
TINY = {"epochs": 8, "lr": 1e-3, "batch": 64, "loss_on": "last", "max_tokens": 1024, "micro_tokens": 2048}
SMALL = 50_000_000  # parameters, below which the settings are TINY's
HELD_OUT = 10  # every tenth tree is not trained on
TAKES = "10 to 15 minutes with the tiny model on two cores"
MEASURED = 50  # trees at most, when training is over


# ----------------------------------------------------------------------------------------------------------- training


def packed_trees(qnet: QNet, trees: list[list[Pair]], args: argparse.Namespace) -> list[PackedPairs]:
    """The trees' pairs as the loss reads them, in order; with --plain each by itself."""
    room = 1 if args.plain else args.max_tokens
    return [p for tree in trees for p in pack_pairs(qnet.chat, tree, args.loss_on, room)]


def train(qnet: QNet, trees: list[list[Pair]], held_out: list[list[Pair]], args: argparse.Namespace) -> dict:
    packs, validation = packed_trees(qnet, trees, args), packed_trees(qnet, held_out, args)
    longest = max(len(p.tree) for p in packs)
    memory = estimate(
        qnet, qnet.backbone, lambda ids: qnet(**like_a_tree(qnet.backbone, ids), use_cache=False), args, longest
    )
    check_memory(memory, qnet.backbone.device)
    optimizer = models.adamw((p for p in qnet.parameters() if p.requires_grad), args.lr, args.optim)
    data = (values for p in packs for values in (p.tree.ids, p.weighted_q))
    fit = Training("qnet", qnet, optimizer, args, [p.pairs for p in packs], data)
    for _ in fit.epochs():
        for update in fit.updates():  # complete packs
            batch = [packs[i] for i in update]
            pairs = sum(p.pairs for p in batch)
            for group in fit.share(batches(batch, lambda p: len(p.tree), args.micro_tokens)):
                some = [batch[i] for i in group]
                with models.mixed_precision(qnet.backbone):
                    if args.plain:
                        loss = sum(pair_loss(qnet, pair, args.loss_on) for p in some for pair in p.members)
                    else:  # the same at a fraction of the cost
                        loss = packed_loss(qnet, some)
                fit.backward(loss / pairs, sum(len(p.tree) for p in some))
            fit.step()
        figures = ranking(qnet, held_out, validation, args)
        fit.validated(-figures["mse"] if len(held_out) >= 5 else None, {f"held_out_{k}": v for k, v in figures.items()})
    figures, each, once = fit.figures(), sum(p.tokens for p in packs), sum(len(p.tree) for p in packs)
    return figures | {"tokens_pair_by_pair": figures["tokens"] // once * each}


# --------------------------------------------------------------------------------------------- can it rank siblings?


def ranking(qnet: QNet, trees: list[list[Pair]], packs: list[PackedPairs], args: argparse.Namespace) -> dict:
    """`sibling_accuracy` of QNet on these trees, given their packs, and the mean square error of its values."""
    qnet.eval()
    pairs = [p for tree in trees for p in tree]
    with models.mixed_precision(qnet.backbone):
        values = (
            [qnet.q(p.state, p.action) for p in pairs] if args.plain else packed_scores(qnet, packs, args.micro_tokens)
        )
    mse = sum((p.q - v) ** 2 for p, v in zip(pairs, values, strict=True)) / max(1, len(pairs))
    return {"mse": mse} | sibling_accuracy(trees, {(p.state, p.action): v for p, v in zip(pairs, values, strict=True)})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 2 epochs.")
    envs.add_arguments(made, argv)
    add, said = made.add_argument, choices(PAPER, TINY)
    add("--sft", type=Path, help="checkpoint that the backbone starts from (default: RUN/sft)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/qnet")
    add("--epochs", type=at_least(1), help=f"at most ({said('epochs')})")
    add("--lr", type=at_least(0, float), help=f"{said('lr')}; with --lora {models.LR}")
    add("--batch", type=at_least(1), help=f"(s, a) pairs an update ({said('batch')})")
    tokens = ["all", "action", "last"]
    add("--loss-on", choices=tokens, help=f"tokens of (s, a) that carry the loss ({said('loss_on')}; Eq. 11: all)")
    add("--readout", choices=["last", "mean"], default="last", help="Q at inference: last action token, or their mean")
    add("--freeze", action="store_true", help="train the head alone")
    add("--plain", action="store_true", help="pair by pair, as Eq. (11) reads: for models that know no tree mask")
    more(made, models.add_training)
    add("--max-tokens", type=at_least(1), help=f"of a packed tree ({said('max_tokens')})")
    add("--micro-tokens", type=at_least(1), help=f"padded tokens in memory at once ({said('micro_tokens')})")
    add("--limit", type=at_least(1), metavar="N", help="number of trees (default: all)")
    more(made, add_prompted)  # as the trees were grown
    add("--device")
    args = parse(made, argv)
    if args.lora and args.freeze:
        raise UserError("--lora and --freeze: give one of them")
    if args.plain and args.fsdp:
        raise UserError("--plain: makes a pass for each pair, and with --fsdp all must make as many: give one of them")
    models.check_training(args)
    return args


def to_train(args: argparse.Namespace) -> QNet:
    """QNet before its first update. What no flag has set is as suits its size."""
    torch.manual_seed(args.seed)  # here, so that the head is the same whether the agent was there or has just been made
    float32 = not (args.lora or args.freeze or args.weights == "bf16")  # all weights are trained
    backbone, chat = models.load_checkpoint(
        args.sft, transformers.AutoModel, args.device, args.load_in, float32, args.plain,
        rendering_of(args.sft, args, PROMPTED), args.fsdp,
    )  # fmt: skip
    qnet = QNet(backbone, chat, readout=args.readout)
    small = sum(p.numel() for p in backbone.parameters()) < SMALL
    settle(args, (TINY if small else PAPER) | ({"lr": models.LR} if args.lora else {}))
    if args.freeze:
        backbone.requires_grad_(False)
    models.save_memory(backbone, args)
    return qnet


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.fsdp = loop.start(args.fsdp)
    cli.must_exist(args.labels, args.sft)
    if loop.count() > 1:  # one process makes what is missing
        cli.must_exist(args.labels or args.run / "q_labels.jsonl", args.sft or args.run / "sft")
    args.labels = cli.needed(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.out = checkpoint_folder(args.out or args.run / "qnet", args.sft or args.run / "sft")
    lock = only_writer(args.out) if loop.first() else None

    trees = [pairs_of(tree) for tree in read_trees(args.labels, ["q", "messages"])][: args.limit]
    if not any(trees):
        raise UserError(f"{args.labels}: no trees with actions")
    held_out, training = trees[::HELD_OUT], [t for i, t in enumerate(trees) if i % HELD_OUT] or trees
    trained_on = {t[0].state for t in training if t}
    if both := sum(t[0].state in trained_on for t in held_out if t) * (training is not trees):
        print(f"warning: {both} of {len(held_out)} held-out trees are of tasks that are trained on", file=sys.stderr)

    args.sft = cli.needed(args.sft, args.run / "sft", "sft", args)
    warn_of_another_world(args.sft, args)
    with loop.in_turn(args.fsdp):
        qnet = to_train(args)
        models.divide(qnet, qnet.backbone, args, qnet.head)
    if is_trained(args, [args.labels, args.sft]):
        return release(lock)
    figures = train(qnet, training, held_out, args)
    qnet = loop.undivided(qnet, lambda: to_train(args))
    if not loop.first():
        return
    updates = models.merge(qnet.backbone) if args.lora else {}
    where, dtype = models.device_and_dtype(args.device)
    models.cast(qnet.to(where).backbone, dtype)  # as q_search.py loads it
    with replacing_folder(args.out) as folder:
        qnet.save_pretrained(folder)
        if updates:
            models.save_adapter(qnet.backbone, updates, args.sft, folder / "adapter")
    about = {"trees": len(trees), **figures}
    files.write_meta(args.out, vars(args), [args.labels, args.sft], **about)

    policy = Policy.load(args.sft, args.device, args.seed, args.load_in, args.plain, qnet.chat.rendering)
    for name, some in (("held_out", held_out[:MEASURED]), ("training", training[: len(held_out)][:MEASURED])):
        about[name] = ranking(qnet, some, packed_trees(qnet, some, args), args)
        of_policy = sibling_accuracy(some, policy_scores(policy, some))
        about[name] |= {f"policy_{key}": of_policy[key] for key in ("sibling_accuracy", "own_sibling_accuracy")}
    files.write_meta(args.out, vars(args), [args.labels, args.sft], **about)
    finish(args.out)
    release(lock)
    print(f"{args.out}: mse {figures['loss']:.4f} after epoch {figures['best_epoch']}, each token once: "
          f"{figures['tokens']:,} of {figures['tokens_pair_by_pair']:,} tokens")  # fmt: skip
    for name in ("held_out", "training"):
        print_ranking(name, about[name])


if __name__ == "__main__":
    cli.run_stage(main)
