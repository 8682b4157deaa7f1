"""What the learners beside this file share: a budget, validation, the best checkpoint, early stopping, resuming.

A learner improves RUN/sft by `one_batch(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent or nothing is gained.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

import envs
from q_search import Method, play
from qlass.chat import Chat, uniforms
from qlass.driver import Sample, drive
from qlass.jsonl import Resumable, checkpoint_folder
from qlass.models import adamw, add_lora, load_checkpoint, save_checkpoint
from qlass.policy import Policy
from qlass.stage import add_arguments, needed, same_arguments, stage_argv, write_meta

WARMUP = 4  # updates
SMALL = 50e6  # parameters
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5
SPENT = {"batch": -1, "updates": 0, "tokens": 0, "env_steps": 0}  # before the first line


def add_learning(parser: argparse.ArgumentParser, every: int) -> None:
    add_arguments(parser)
    add = parser.add_argument
    add("--budget", type=float, default=1e6, metavar="N", help="when to stop (default: %(default).0f)")
    add("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--val", type=int, default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    add("--every", type=int, default=every, metavar="N", help="batches between validations (default: %(default)s)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--lora", type=int, metavar="RANK", help="train updates of this rank instead of the weights")
    add("--device")


def load(args: argparse.Namespace, lr: float) -> tuple[Any, Chat, torch.optim.Optimizer, float]:
    """The agent, its optimiser and its learning rate: --lr, else `lr` for the tiny model."""
    args.sft = needed(args.sft, args.run / "sft", "sft", stage_argv(args))
    model, chat = load_checkpoint(args.sft, transformers.AutoModelForCausalLM, args.device, train=not args.lora)
    small = model.num_parameters() < SMALL
    torch.manual_seed(args.seed)
    if args.lora:
        add_lora(model, args.lora)
    lr = args.lr or (lr if small else LR_LORA if args.lora else LR_PRETRAINED)
    return model.eval(), chat, adamw((p for p in model.parameters() if p.requires_grad), lr), lr


def room(model: Any) -> int:
    """Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed twice."""
    return 1024 if model.num_parameters() < SMALL else 8192


def step(optimizer: torch.optim.Optimizer, lr: float, number: int) -> None:
    """One update, the `number`-th from 1: gradients clipped, the rate rises linearly and then is constant."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, number / WARMUP)
    optimizer.step()
    optimizer.zero_grad()


def task_order(tasks: Sequence[Any], seed: int) -> Iterator[Any]:
    """Tasks in passes, each in an order of its own."""
    for turn in itertools.count():
        yield from (tasks[i] for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0."""
    return list(itertools.islice(task_order(tasks, seed), number * size, (number + 1) * size))


def validation(model: Any, chat: Chat, env: envs.TextEnv, tasks: Iterable[str]) -> float:
    """Mean reward of the greedy agent."""
    greedy, policy = Method("greedy"), Policy(model, chat)
    played = drive((play(env.fork(), t, greedy, chat) for t in tasks), {Sample: policy.sample}, env.side_by_side)
    return float(np.mean([line["reward"] for line in played]))


def why_stop(lines: Sequence[dict], patience: int = 8) -> str:
    """Why no more should be spent, "" if it should."""
    tested = [line["val"] for line in lines if line["val"] is not None]
    if len(tested) > 2 and max(tested[-2:]) < 0.75 * max(tested):
        return f"validation fell from {max(tested):.3f} to {tested[-1]:.3f}: lower --lr"
    recent = lines[1:][-patience:]
    if len(recent) == patience and np.mean([line.get("flat", 0) for line in recent]) > 0.95:
        if np.mean([line["reward"] for line in recent]) > 0.9:
            return "nearly all trajectories of a task earn the same, and much: nothing is left to learn"
        return "nearly all trajectories of a task earn the same, so nothing is learned: lower --lr, or raise --entropy"
    return ""


def learn(
    args: argparse.Namespace, env: envs.TextEnv, model: Any, chat: Chat, optimizer: torch.optim.Optimizer,
    one_batch: Callable[[dict], dict], names: Sequence[str],
) -> None:  # fmt: skip
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a

    larger --budget continues. `names`: the learner's own arguments, which may not change then.
    """
    started = time.time()
    out = checkpoint_folder(args.run / f"sft-{args.name}")
    log, resume = out.with_name(out.name + ".updates.jsonl"), out.with_name(out.name + ".resume.pt")
    same_arguments(log, args, ["sft", "val", "every", "lora", "lr", *names])
    write_meta(log, args, [args.sft])
    saved = torch.load(resume, map_location=model.device) if resume.exists() else {"lines": 0}
    updates = Resumable(log, lambda lines: saved["lines"] if len(lines) >= saved["lines"] else 0)
    lines = updates.records
    if lines:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    tested = env.task_ids("val")[: args.val or None]
    last, why = (lines or [SPENT])[-1], ""
    bar = tqdm(total=int(args.budget), initial=last[args.budget_in], desc=args.name, disable=None)
    while not lines or (last[args.budget_in] < args.budget and not (why := why_stop(lines))):
        line = one_batch(last) if lines else SPENT | {"batch": 0}  # the first line: the agent as it comes
        due = line["batch"] % args.every == 0 or line[args.budget_in] >= args.budget
        line["val"] = round(validation(model, chat, env, tested), 6) if due else None
        updates.append([line])
        lines.append(line)
        bar.update(line[args.budget_in] - last[args.budget_in])
        last = line
        if due:
            if line["val"] > max((x["val"] for x in lines[:-1] if x["val"] is not None), default=-np.inf):
                save_checkpoint(model, chat, out)
            draft = resume.with_suffix(".draft")
            torch.save({"lines": len(lines), "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            draft.replace(resume)
    bar.close()
    updates.close()
    best = max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])
    for path in (log, out):
        write_meta(path, args, [args.sft], best=best, last=last, stopped=why or None, seconds=time.time() - started)
    print(f"stopped after batch {last['batch']}: {why}\n" if why else "", end="")
    print(f"{out}: validation {lines[0]['val']:.3f} -> {best['val']:.3f} at batch {best['batch']} "
          f"({best['tokens']:,} tokens, {best['env_steps']:,} environment steps)")  # fmt: skip
    print(f"next: python q_search.py --env {args.env} --run {args.run} --sft {out} --label {args.name} --method greedy "
          f"--out {args.run}/results-{args.name}.jsonl")  # fmt: skip
