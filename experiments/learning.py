"""What the learners beside this file share: a budget, validation, the best checkpoint, early stopping, resuming.

A learner improves RUN/sft by `iterate(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
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
from typing import Any, TypeVar

import accelerate
import numpy as np
import torch
import transformers
from accelerate.utils import gather_object
from transformers.modeling_layers import GradientCheckpointingLayer

import envs
from q_search import Method, episode
from qlass import UserError, models
from qlass.chat import PROMPTED, Chat, Rendering, uniforms
from qlass.cli import Output, at_least, handed_on, more, must_exist, needed, parser, progress, settle
from qlass.driver import Sample, drive
from qlass.files import checkpoint_folder, write_meta
from qlass.flags import add_prompted, rendering_of, warn_of_another_world
from qlass.loop import read_state, write_state
from qlass.policy import Policy
from train_qnet import SMALL

T = TypeVar("T")

WARMUP = 4  # updates
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5
SPENT = {"batch": 0, "updates": 0, "tokens": 0, "env_steps": 0}  # the first line: the agent as it comes


def learner_parser(doc: str, epilog: str, argv: list[str] | None, every: int) -> argparse.ArgumentParser:
    """A parser with the flags that all learners have."""
    flags = parser(doc, epilog)
    envs.add_arguments(flags, argv)
    add = flags.add_argument
    add("--budget", type=at_least(0, float), default=1e6, metavar="N", help="what to spend (default: %(default).0f)")
    add("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--val", type=at_least(0), default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    text = "batches between validations (default: %(default)s)"
    add("--every", type=at_least(1), default=every, metavar="N", help=text)
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    more(flags, models.add_memory, add_prompted)
    add("--device")
    return flags


class Learner:
    """The agent, its frozen reference, and its optimiser.

    With several processes (torchrun, accelerate launch) each has the whole model and its share of the work; gradients
    are summed.
    """

    def __init__(self, model: Any, reference: Any, chat: Chat, lr: float, optim: str = "adamw") -> None:
        self.model, self.reference, self.chat, self.lr = model, reference, chat, lr
        self.accelerator = start()
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = models.adamw(self.weights.values(), lr, optim)
        # Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again.
        self.room = 512 if model.num_parameters() < SMALL else 4096

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Every n-th of the items: what this one of n processes works on."""
        return items[self.accelerator.process_index :: self.accelerator.num_processes]

    def gather(self, results: Sequence[T]) -> list[T]:
        """The results of all processes, of `share`'s items in their order."""
        shares = gather_object([results])
        return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]

    def total(self, *values: float) -> list[float]:
        """Sums over the processes."""
        return self.accelerator.reduce(torch.tensor(values, dtype=torch.float64), "sum").tolist()

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """With --gradient-checkpointing, layers forget their activations and compute them again for backward.

        They do so in training mode alone. Only they are put into it, not what they consist of, and nothing is dropped.
        """
        layers = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = layer.gradient_checkpointing
            if isinstance(getattr(layer, "dropout", None), float):  # OPT's
                layer.dropout = 0.0
        yield
        for layer in layers:
            layer.training = False

    def step(self, number: int) -> None:
        """Update `number`, from 1: gradients summed and clipped; the rate rises linearly and then is constant."""
        for p in self.weights.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = self.accelerator.reduce(p.grad, "sum")
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        if not norm.isfinite():
            raise UserError(
                f"update {number}: the gradient is not finite, so the training has diverged: --overwrite and a lower "
                f"--lr than {self.lr:g} start again"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, number / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validation(self, env: envs.TextEnv, tasks: Sequence[str]) -> float:
        """Mean reward of the greedy agent."""
        episodes = (greedy(env.fork(), task, self.chat.rendering) for task in self.share(tasks))
        policy = Policy(self.model, self.chat)
        rewards = drive(episodes, {Sample: policy.sample}, env.side_by_side, in_order=True)
        return sum(self.gather(list(rewards))) / len(tasks)


def start() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=not torch.cuda.is_available())


def load(args: argparse.Namespace, lr: float, copied: bool = True) -> Learner:
    """The beginning of a learner's `main`: the agent, with a copy or (not `copied`) itself as reference.

    Without --lr, `lr` is the tiny model's.
    """
    models.check_training(args)
    if start().num_processes > 1:  # one process makes what is missing
        must_exist(args.sft or args.run / "sft")
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    warn_of_another_world(args.sft, args)
    torch.manual_seed(args.seed)
    rendering = rendering_of(args.sft, args, PROMPTED)
    model, chat = models.load_checkpoint(
        args.sft, transformers.AutoModelForCausalLM, args.device, args.load_in, train=not args.lora, rendering=rendering
    )
    models.save_memory(model, args)
    model.eval()
    # With LoRA both have the frozen weights, and only its updates, still 0, are copied.
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    reference = copy.deepcopy(model, frozen).requires_grad_(False) if copied else model
    small = model.num_parameters() < SMALL
    settle(args, {"lr": lr if small else LR_LORA if args.lora else LR_PRETRAINED})
    return Learner(model, reference, chat, args.lr, args.optim)


def greedy(env: envs.TextEnv, task_id: str, rendering: Rendering) -> Generator:
    trajectory = yield from episode(env, task_id, Method("greedy"), 0, rendering)
    env.close()
    return trajectory.reward


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0, of passes through all of them, each in an order of its own."""
    if not tasks:
        raise UserError("no tasks to learn from")
    order = (i for turn in itertools.count() for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))
    return [tasks[i] for i in itertools.islice(order, number * size, (number + 1) * size)]


def why_stop(lines: Sequence[dict], budget_in: str = "tokens", patience: int = 8) -> str:
    """Why no more should be spent, "" if it should."""
    if budget_in == "env_steps" and len(lines) > 1 and lines[-1]["env_steps"] == lines[-2]["env_steps"]:
        return "all trees have been read, so no more environment steps can be spent"
    scores = [line["val"] for line in lines if line["val"] is not None]
    if len(scores) > 2 and max(scores[-2:]) < 0.75 * max(scores):
        return f"validation fell from {max(scores):.3f} to {scores[-1]:.3f}: lower --lr"
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
    learner: Learner,
    env: envs.TextEnv,
    iterate: Callable[[dict], dict],
    args: argparse.Namespace,
    inputs: Sequence[Path | None],
    passes: float,
) -> None:
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a
    larger --budget continues. The last batch of a smaller budget has been validated too.

    inputs: what it reads besides the agent. passes: how often a token that was spent went forward, for the report; a
    backward pass counts as two. "played" of a line, if it has that: tokens of trajectories, which went forward once.
    """
    folder = checkpoint_folder(args.run / f"sft-{args.name}", args.sft)
    args.out, resume = folder.with_name(folder.name + ".updates.jsonl"), folder.with_name(folder.name + ".resume.pt")
    inputs = [args.sft, *inputs]
    tasks = env.task_ids("val")[: args.val or None]
    if not tasks:
        raise UserError(f"{args.env}: no validation tasks here, by which the best checkpoint is chosen")
    saved = {"lines": 0}
    if resume.exists() and not args.overwrite:
        saved = read_state(resume, ["lines", "model", "optimizer"])

    def complete(lines: list[dict]) -> int:
        if len(lines) > 1 and not saved["lines"]:
            raise UserError(f"{resume}: missing, so {args.out} can't be continued: --overwrite starts it again")
        if 0 < len(lines) < saved["lines"]:
            raise UserError(f"{args.out}: has lost lines that {resume} knows of: --overwrite starts it again")
        return saved["lines"] if lines else 0

    first = learner.accelerator.is_main_process  # which alone writes
    out = Output(args, complete, inputs, free=["budget", "budget_in"]) if first else None
    lines: list[dict] = accelerate.utils.broadcast_object_list([out and out.records])[0]
    if len(lines) > 1 and lines[-2][args.budget_in] >= args.budget:
        spent = f"{lines[-1][args.budget_in]:,} {args.budget_in} are spent already"
        raise UserError(f"{args.out}: {spent}: raise --budget, or give another --name")
    if lines:
        learner.model.load_state_dict(saved["model"], strict=False)
        learner.optimizer.load_state_dict(saved["optimizer"])

    def over() -> bool:
        return lines[-1][args.budget_in] >= args.budget or bool(why_stop(lines, args.budget_in))

    def batches() -> Iterator[dict]:
        while not lines or not over():
            yield iterate(lines[-1]) if lines else SPENT

    def best() -> dict:
        return max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])

    for line in progress(batches(), f"{args.name}, batches"):
        lines.append(line | {"val": None})
        due = line["batch"] % args.every == 0 or over()
        if due:
            lines[-1]["val"] = round(learner.validation(env, tasks), 6)
        if first:
            out.append(lines[-1:])
        if first and due:
            if best() is lines[-1]:
                models.save_checkpoint(learner.model, learner.chat, folder)
                write_meta(folder, args, inputs, best=lines[-1], last=lines[-1], passes=passes)
            weights = {name: p.detach() for name, p in learner.weights.items()}
            state = {"model": weights, "optimizer": learner.optimizer.state_dict(), "lines": len(lines)}
            write_state(resume, state)
    if not first:
        return
    why = "" if lines[-1][args.budget_in] >= args.budget else why_stop(lines, args.budget_in)
    figures = {"best": best(), "last": lines[-1], "passes": passes, "stopped": why or None}
    out.finish(**figures)
    write_meta(folder, args, inputs, **figures)
    print(f"stopped after batch {lines[-1]['batch']}: {why}" if why else "the budget is spent")
    print(
        f"{folder}: validation {lines[0]['val']:.3f} -> {best()['val']:.3f} at batch {best()['batch']} "
        f"({best()['tokens']:,} tokens, {best()['env_steps']:,} environment steps)"
    )
    print(
        f"next: python q_search.py {shlex.join(handed_on(args))} --sft {folder} --label {args.name} "
        f"--method greedy --out {args.run}/results-{args.name}.jsonl",
        flush=True,
    )
