"""What the learners beside this file share: flags, a budget, validation, the best checkpoint, early stop, resuming.

A learner improves RUN/sft by `iterate(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent or nothing is gained.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import envs
from q_search import Method, episode
from qlass import UserError, models
from qlass.chat import PROMPTED, Chat, Rendering, uniforms
from qlass.cli import at_least, more, needed, parser, settle
from qlass.driver import Sample, drive
from qlass.files import Output, checkpoint_folder, share, write_meta
from qlass.flags import add_memory, add_prompted, check_training, rendering_of, warn_of_another_world
from qlass.policy import Policy
from train_qnet import SMALL

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
    add("--every", type=at_least(1), default=every, metavar="N", help="batches a validation (default: %(default)s)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    more(flags, add_memory, add_prompted)
    add("--device")
    return flags


# -------------------------------------------------------------------------------------------------------- the learner


class Learner:
    """The agent, its frozen reference, and the optimiser of all that learns."""

    def __init__(
        self, model: Any, reference: Any, chat: Chat, lr: float, optim: str = "adamw", adapter: Any = None,
        base: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        """adapter, base: LoRA's view of the model, and what loads the weights that it is merged into."""
        self.model, self.reference, self.chat, self.adapter, self.base = model, reference, chat, adapter, base
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = models.adamw(self.weights.values(), lr, optim)
        self.rates = [lr]
        # Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again.
        self.room = 512 if model.num_parameters() < SMALL else 4096

    def teach(self, name: str, model: torch.nn.Module, lr: float) -> None:
        """Train another model beside the agent, as a critic, at its own rate."""
        weights = {f"{name}.{key}": p for key, p in model.named_parameters() if p.requires_grad}
        self.weights |= weights
        self.optimizer.add_param_group({"params": list(weights.values())})
        self.rates.append(lr)

    def step(self, number: int) -> None:
        """Update `number`, from 1: each model's gradient clipped; rates rise linearly and then are constant."""
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            if not torch.nn.utils.clip_grad_norm_(group["params"], 1.0).isfinite():
                reason = f"update {number}: the gradient is not finite, so the training has diverged"
                raise UserError(f"{reason}: --overwrite and a lower --lr than {lr:g} start again")
            group["lr"] = lr * min(1.0, number / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validation(self, env: envs.TextEnv, tasks: Sequence[str]) -> float:
        """Mean reward of the greedy agent."""
        episodes = (greedy(env.fork(), task, self.chat.rendering) for task in tasks)
        policy = Policy(self.model, self.chat)
        return sum(drive(episodes, {Sample: policy.sample}, env.side_by_side, in_order=True)) / len(tasks)

    def save(self, folder: Path) -> None:
        """The agent as a checkpoint; LoRA's updates are merged in a copy."""
        models.save_checkpoint(self.model, self.chat, folder, copy.deepcopy(self.adapter), self.base)

    def suspend(self, path: Path, lines: int) -> None:
        """Write weights and moments after so many lines, under this name only when all are there."""
        weights = {name: p.detach() for name, p in self.weights.items()}
        draft = path.with_name(f"{path.name}.draft")
        torch.save({"model": weights, "optimizer": self.optimizer.state_dict(), "lines": lines}, draft)
        os.replace(draft, path)

    def resume(self, path: Path) -> int:
        """Read what `suspend` wrote. Returns its number of lines."""
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)  # runs no code
            for name, p in self.weights.items():
                p.data.copy_(saved["model"][name])
            self.optimizer.load_state_dict(saved["optimizer"])
            return saved["lines"]
        except Exception as error:  # of many kinds: cut short, zeros, another's
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:80]
            raise UserError(f"{path}: can't be read ({reason}): --overwrite starts again") from None


def greedy(env: envs.TextEnv, task_id: str, rendering: Rendering) -> Generator:
    steps = yield from episode(env, task_id, Method("greedy", temperature=0.0), 0, rendering)
    env.close()
    return steps[-1].reward


def load(args: argparse.Namespace, lr: float, copied: bool = True) -> Learner:
    """The beginning of a learner's `main`. The reference is a copy of the agent or, not `copied`, the agent itself.

    Without --lr, `lr` is the tiny model's.
    """
    if share()[1] > 1:
        raise UserError("a learner is one process: unset WORLD_SIZE; --lora and --gradient-checkpointing save memory")
    check_training(args)
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    warn_of_another_world(args.sft, args)
    torch.manual_seed(args.seed)

    def begin(load_in: str | None = None) -> tuple[Any, Chat]:
        kind, rendering = transformers.AutoModelForCausalLM, rendering_of(args.sft, args, PROMPTED)
        return models.load_checkpoint(args.sft, kind, args.device, load_in, train=not args.lora, rendering=rendering)

    model, chat = begin(args.load_in)
    adapter = models.save_memory(model, args.lora, args.lora_alpha, args.gradient_checkpointing)
    without_dropout(model)
    small = model.num_parameters() < SMALL
    settle(args, {"lr": lr if small else LR_LORA if args.lora else LR_PRETRAINED})
    print(models.memory_of(model, args.optim))
    # With LoRA both have the frozen weights, and only its updates, still 0, are copied.
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    reference = copy.deepcopy(model, frozen).requires_grad_(False).eval() if copied else model
    return Learner(model, reference, chat, args.lr, args.optim, adapter, lambda: begin()[0])


def without_dropout(model: torch.nn.Module) -> None:
    """Training mode, in which --gradient-checkpointing works, is to compute the probabilities that were sampled."""
    rates = ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop")
    for module, name in itertools.product(model.modules(), rates):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)


# ---------------------------------------------------------------------------------------------------------- the loop


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0, of passes through all of them, each in an order of its own."""
    if not tasks:
        raise UserError("no tasks to learn from")
    order = (i for turn in itertools.count() for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))
    return [tasks[i] for i in itertools.islice(order, number * size, (number + 1) * size)]


def why_stop(lines: Sequence[dict], unit: str = "tokens", patience: int = 8) -> str:
    """Why no more should be spent, "" if it should."""
    if unit == "env_steps" and len(lines) > 1 and lines[-1][unit] == lines[-2][unit]:
        return "all trees have been read, so no more environment steps can be spent"
    scores = [line["val"] for line in lines if line["val"] is not None]
    if len(scores) > 2 and max(scores[-2:]) < 0.75 * max(scores):
        return f"validation fell from {max(scores):.3f} to {scores[-1]:.3f}: lower --lr"
    recent = lines[1:][-patience:]
    if len(recent) == patience and np.mean([line.get("flat", 0) for line in recent]) > 0.95:
        reward = np.mean([line["reward"] for line in recent])
        advice = "nothing is left to learn" if reward > 0.9 else "begin again with a lower --lr or a higher --entropy"
        return f"nearly all trajectories of a task earn the same: {advice if reward else 'begin with a better agent'}"
    return ""


@models.within_memory()
def learn(
    learner: Learner, env: envs.TextEnv, iterate: Callable[[dict], dict], args: argparse.Namespace,
    inputs: Sequence[Path | None], passes: float,
) -> None:  # fmt: skip
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a
    larger --budget continues. The last batch of a smaller budget has been validated too.

    inputs: what is read besides the agent. passes: how often a token that was spent went forward, for the report; a
    backward pass counts as two. "played" of a line, if it has that: tokens that went forward once.
    """
    unit, budget, inputs = args.budget_in, args.budget, [args.sft, *inputs]
    folder = checkpoint_folder(args.run / f"sft-{args.name}", args.sft)
    log, resume = (folder.with_name(folder.name + ending) for ending in (".updates.jsonl", ".resume.pt"))
    settings = vars(args) | {"out": log}
    tasks = env.task_ids("val")[: args.val or None]
    if not tasks:
        raise UserError(f"{env.name}: no validation tasks here, by which the best checkpoint is chosen")
    saved = learner.resume(resume) if resume.exists() and not args.overwrite else 0

    def complete(logged: list[tuple[str, dict]]) -> int:
        if len(logged) < saved or (len(logged) > 1 and not saved):
            raise UserError(f"{log}: has lost lines, or {resume} is missing: --overwrite starts again")
        return saved

    out = Output(log, settings, complete, inputs, free=["budget", "budget_in"])
    lines = list(out.records)
    if len(lines) > 1 and lines[-2][unit] >= budget:
        spent = f"{lines[-1][unit]:,} {unit} are spent already"
        raise UserError(f"{log}: {spent}: raise --budget, or give another --name")

    def over() -> str:
        return "the budget is spent" if lines[-1][unit] >= budget else why_stop(lines, unit)

    def figures() -> dict:
        best = max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])
        return {"best": best, "last": lines[-1], "passes": passes}

    while not lines or not over():
        line = iterate(lines[-1]) if lines else SPENT
        lines.append(line | {"val": None})
        due = line["batch"] % args.every == 0 or over()
        if due:
            lines[-1]["val"] = round(learner.validation(env, tasks), 6)
            print(f"batch {line['batch']}: {line[unit]:,} {unit}, validation {lines[-1]['val']:.3f}", flush=True)
        out.append(lines[-1:])
        if due and figures()["best"] is lines[-1]:
            learner.save(folder)
            write_meta(folder, settings, inputs, **figures())
        if due:
            learner.suspend(resume, len(lines))
    summary = figures() | {"stopped": None if lines[-1][unit] >= budget else over()}
    out.finish(**summary)
    write_meta(folder, settings, inputs, **summary)
    start, best = lines[0]["val"], summary["best"]
    print(f"batch {lines[-1]['batch']}: {over()}")
    spent = f"{best['tokens']:,} tokens, {best['env_steps']:,} environment steps"
    print(f"{folder}: validation {start:.3f} -> {best['val']:.3f} at batch {best['batch']} ({spent})", flush=True)
