"""What the learners beside this file share: a budget, validation, the best checkpoint, early stopping, resuming.

A learner improves RUN/sft by `one_batch(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent or nothing is gained.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import envs
from q_search import Method, episode
from qlass import UserError, loop, models
from qlass.chat import PROMPTED, Chat, Rendering, uniforms
from qlass.cli import at_least, handed_on, more, must_exist, needed, parser, settle
from qlass.driver import Sample, drive
from qlass.fast.token_tree import like_a_tree
from qlass.files import Output, checkpoint_folder, progress, write_meta
from qlass.flags import add_prompted, rendering_of, warn_of_another_world
from qlass.loop import read_state, write_state
from qlass.memory import check_memory, estimate
from qlass.policy import Policy
from sft import sft_loss
from train_qnet import SMALL

WARMUP = 4  # updates
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5
SPENT = {"batch": -1, "updates": 0, "tokens": 0, "env_steps": 0}  # before the first line


def learner(doc: str, epilog: str, argv: list[str] | None, every: int) -> argparse.ArgumentParser:
    """A parser with the flags that all learners have."""
    made = parser(doc, epilog)
    envs.add_arguments(made, argv)
    add = made.add_argument
    add("--budget", type=at_least(0, float), default=1e6, metavar="N", help="what to spend (default: %(default).0f)")
    add("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--val", type=at_least(0), default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    said = "batches between validations (default: %(default)s)"
    add("--every", type=at_least(1), default=every, metavar="N", help=said)
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    more(made, models.add_memory, add_prompted)
    add("--device")
    return made


def load(args: argparse.Namespace, lr: float, copied: bool = True) -> tuple[Any, Any, Chat, torch.optim.Optimizer]:
    """The agent, its reference, a copy unless that is to be the agent itself, its chat and its optimiser.

    Without --lr, `lr` is the tiny model's.
    """
    models.check_training(args)
    args.fsdp = loop.start(args.fsdp)
    if loop.count() > 1:  # one process makes what is missing
        must_exist(args.sft or args.run / "sft")
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    warn_of_another_world(args.sft, args)
    torch.manual_seed(args.seed)
    with loop.in_turn(args.fsdp):
        model, chat = to_train(args)
        frozen = {} if args.fsdp else {id(p): p for p in model.parameters() if not p.requires_grad}
        # With LoRA both have the frozen weights, and only its updates, still 0, are copied.
        reference = copy.deepcopy(model, frozen).requires_grad_(False) if copied else model
        if args.fsdp and copied:  # each process goes through its own sequences, so each needs the whole of it
            where, dtype = models.device_and_dtype(args.device)
            models.cast(reference.to(where), dtype)
        models.divide(model, model.base_model, args)
    small = model.num_parameters() < SMALL
    settle(args, {"lr": lr if small else LR_LORA if args.lora else LR_PRETRAINED})
    largest = 5 * room(model)  # a first prompt and four times as much (decisions.pack_decisions)
    packed = argparse.Namespace(**vars(args), micro_tokens=largest)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        """Of all tokens; an update has the logits of the agent's alone."""
        return sft_loss(model(**like_a_tree(model, ids), use_cache=False).logits, ids)

    beside = reference if copied else None
    check_memory(estimate(model, model.base_model, loss_of, packed, largest, beside), model.device)
    return model, reference, chat, models.adamw(loop.trained(model).values(), args.lr, args.optim)


def to_train(args: argparse.Namespace) -> tuple[Any, Chat]:
    """The agent before its first update."""
    float32 = not args.lora and args.weights != "bf16"  # all weights are trained
    model, chat = models.load_checkpoint(
        args.sft, transformers.AutoModelForCausalLM, args.device, args.load_in, train=float32, divide=args.fsdp,
        rendering=rendering_of(args.sft, args, PROMPTED),
    )  # fmt: skip
    models.save_memory(model, args)
    return model.eval(), chat


@contextlib.contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """With --gradient-checkpointing, layers forget their activations and compute them again for backward.

    They do so in training mode alone. Only they are put into it, not what they consist of, and nothing is dropped out.
    """
    layers = [layer for layer in models.layers_of(model.base_model) if getattr(layer, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
        if isinstance(getattr(layer, "dropout", None), float):  # OPT's
            layer.dropout = 0.0
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def room(model: Any) -> int:
    """Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again."""
    return 512 if model.num_parameters() < SMALL else 4096


def step(optimizer: torch.optim.Optimizer, lr: float, number: int) -> None:
    """One update, the `number`-th from 1: gradients clipped, the rate rises linearly and then is constant."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loop.sum_gradients(parameters)
    try:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        said = f"update {number}: the gradient is not finite, so the training has diverged"
        raise UserError(f"{said}: --overwrite and a lower --lr than {lr:g} start again") from None
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, number / WARMUP)
    optimizer.step()
    optimizer.zero_grad()


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0, of passes through all of them, each in an order of its own."""
    if not tasks:
        raise UserError("no tasks to learn from")
    order = (i for turn in itertools.count() for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))
    return [tasks[i] for i in itertools.islice(order, number * size, (number + 1) * size)]


def greedy(env: envs.TextEnv, task_id: str, rendering: Rendering) -> Generator:
    played = yield from episode(env, task_id, Method("greedy"), 0, rendering)
    env.close()
    return played.reward


def validation(model: Any, chat: Chat, env: envs.TextEnv, tasks: Sequence[str]) -> float:
    """Mean reward of the greedy agent."""
    episodes = (greedy(env.fork(), task, chat.rendering) for task, _ in loop.share(tasks, in_step=False))
    with loop.gathered(model):
        reward = sum(drive(episodes, {Sample: Policy(model, chat).sample}, env.side_by_side, in_order=True))
    return loop.total(reward)[0] / len(tasks)


def why_stop(lines: Sequence[dict], budget_in: str = "tokens", patience: int = 8) -> str:
    """Why no more should be spent, "" if it should."""
    if budget_in == "env_steps" and len(lines) > 1 and lines[-1]["env_steps"] == lines[-2]["env_steps"]:
        return "all trees have been read, so no more environment steps can be spent"
    tested = [line["val"] for line in lines if line["val"] is not None]
    if len(tested) > 2 and max(tested[-2:]) < 0.75 * max(tested):
        return f"validation fell from {max(tested):.3f} to {tested[-1]:.3f}: lower --lr"
    recent = lines[1:][-patience:]
    if len(recent) == patience and np.mean([line.get("flat", 0) for line in recent]) > 0.95:
        if np.mean([line["reward"] for line in recent]) > 0.9:
            return "nearly all trajectories of a task earn the same high reward: nothing is left to learn"
        if not any(line["reward"] for line in recent):
            return "no trajectory earns anything, so there is nothing to learn from: begin with a better agent"
        return (
            "nearly all trajectories of a task earn the same, so nothing is learned: begin again with a lower --lr, "
            "tree_grpo also with a higher --entropy"
        )
    return ""


def learn(
    args: argparse.Namespace, env: envs.TextEnv, model: Any, chat: Chat, optimizer: torch.optim.Optimizer,
    one_batch: Callable[[dict], dict], inputs: Sequence[Path | None], passes: float,
) -> None:  # fmt: skip
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a
    larger --budget continues. The last batch of a smaller budget has been validated too.

    inputs: what it reads besides the agent. passes: how often a token that was spent went forward, for the report; a
    backward pass counts as two. "played" of a line, if it has that: tokens of trajectories, which went forward once.
    """
    folder = checkpoint_folder(args.run / f"sft-{args.name}", args.sft)
    args.out, resume = folder.with_name(folder.name + ".updates.jsonl"), folder.with_name(folder.name + ".resume.pt")
    saved = {"lines": 0}
    if resume.exists() and not args.overwrite:
        saved = read_state(resume, ["lines", "model", "optimizer"])

    def complete(lines: list[dict]) -> int:
        if len(lines) > 1 and not saved["lines"]:
            raise UserError(f"{resume}: missing, so {args.out} can't be continued: --overwrite starts it again")
        if 0 < len(lines) < saved["lines"]:
            raise UserError(f"{args.out}: has lost lines that {resume} knows of: --overwrite starts it again")
        return saved["lines"] if lines else 0

    tested = env.task_ids("val")[: args.val or None]
    if not tested:
        raise UserError(f"{args.env}: no validation tasks here, by which the best checkpoint is chosen")
    out, why = None, ""
    if loop.first():
        out = Output(args.out, vars(args), complete, [args.sft, *inputs], free=["budget", "budget_in", "fsdp"])
    lines = list(loop.same(out and out.records))
    if len(lines) > 1 and lines[-2][args.budget_in] >= args.budget:
        spent = f"{lines[-1][args.budget_in]:,} {args.budget_in} are spent already"
        raise UserError(f"{args.out}: {spent}: raise --budget, or give another --name")
    if lines:
        loop.set_weights(model, saved["model"])
        loop.set_moments(optimizer, saved["optimizer"])

    def batches() -> Iterator[dict]:
        nonlocal why
        while not lines or (lines[-1][args.budget_in] < args.budget and not (why := why_stop(lines, args.budget_in))):
            yield one_batch(lines[-1]) if lines else SPENT | {"batch": 0}  # the first line: the agent as it comes

    for line in progress(batches(), f"{args.name}, batches"):
        lines.append(line | {"val": None})
        ends = line[args.budget_in] >= args.budget or why_stop(lines, args.budget_in)
        due = line["batch"] % args.every == 0 or ends
        line = lines[-1] = line | {"val": round(validation(model, chat, env, tested), 6) if due else None}
        if out:
            out.append([line])
        if due:
            if line["val"] > max((x["val"] for x in lines[:-1] if x["val"] is not None), default=-np.inf):
                whole = loop.undivided(model, lambda: to_train(args)[0])
                if out:
                    models.save_checkpoint(whole, chat, folder)
                    write_meta(folder, vars(args), [args.sft, *inputs], best=line, last=line, passes=passes)
            state = {"model": loop.trained(model), "optimizer": optimizer.state_dict(), "lines": len(lines)}
            write_state(resume, state)
    best, last = max((line for line in lines if line["val"] is not None), key=lambda line: line["val"]), lines[-1]
    figures = {"best": best, "last": last, "passes": passes, "stopped": why or None}
    if out:
        out.finish(**figures)
        write_meta(folder, vars(args), [args.sft, *inputs], **figures)
    loop.say(f"stopped after batch {last['batch']}: {why}" if why else "the budget is spent")
    loop.say(f"{folder}: validation {lines[0]['val']:.3f} -> {best['val']:.3f} at batch {best['batch']} "
          f"({best['tokens']:,} tokens, {best['env_steps']:,} environment steps)")  # fmt: skip
    loop.say(f"next: python q_search.py {shlex.join(handed_on(args))} --sft {folder} --label {args.name} "
          f"--method greedy --out {args.run}/results-{args.name}.jsonl")  # fmt: skip
