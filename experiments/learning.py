"""What the learners beside this file share: flags, a budget, validation, the best checkpoint, early stop, resuming.

A learner improves RUN/sft by `iterate(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent or nothing is gained.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import envs
from experiments.self_train import trajectories
from q_search import Method
from qlass import UserError, flags, models
from qlass.chat import Chat, uniforms
from qlass.cli import at_least, more, needed, parser, settle
from qlass.driver import Sample, drive
from qlass.files import checkpoint_folder, locked, same_arguments, share, write_jsonl, write_meta
from qlass.loop import opened, write_state
from qlass.policy import Policy
from train_qnet import SMALL

WARMUP = 4  # updates
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5
GREEDY = Method("greedy", temperature=0.0)
SPENT = {"batch": 0, "updates": 0, "tokens": 0, "env_steps": 0}  # the first line: the agent as it comes


def learner_parser(doc: str, epilog: str, argv: list[str] | None, every: int) -> argparse.ArgumentParser:
    """A parser with the flags that all learners have."""
    learner = parser(doc, epilog)
    envs.add_arguments(learner, argv)
    add = learner.add_argument
    add("--budget", type=at_least(0, float), default=1e6, metavar="N", help="what to spend (default: %(default).0f)")
    add("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--val", type=at_least(0), default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    add("--every", type=at_least(1), default=every, metavar="N", help="batches a validation (default: %(default)s)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    more(learner, flags.add_memory, flags.add_prompted)
    add("--device")
    return learner


# -------------------------------------------------------------------------------------------------------- the learner


class Learner:
    """The agent, its frozen reference, and the optimiser of all that learns."""

    def __init__(
        self, model: Any, reference: Any, chat: Chat, lr: float, optim: str = "adamw", save: Any = None
    ) -> None:
        """save(folder): write the agent as a checkpoint."""
        self.model, self.reference, self.chat, self.save = model, reference, chat, save
        self.optimizer = models.adamw(model.parameters(), lr, optim)
        self.optimizer.param_groups[0]["peak"] = lr
        # Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again.
        self.room = 512 if model.num_parameters() < SMALL else 4096

    def teach(self, model: torch.nn.Module, lr: float) -> None:
        """Train another model beside the agent, as a critic, at its own rate."""
        weights = [p for p in model.parameters() if p.requires_grad]
        self.optimizer.add_param_group({"params": weights, "peak": lr})

    def step(self, number: int) -> None:
        """Update `number`, from 1: each model's gradient clipped; rates rise linearly and then are constant."""
        for group in self.optimizer.param_groups:
            if not torch.nn.utils.clip_grad_norm_(group["params"], 1.0).isfinite():
                reason = f"update {number}: the gradient is not finite, so the training has diverged"
                raise UserError(f"{reason}: --overwrite and a lower --lr than {group['peak']:g} start again")
            group["lr"] = group["peak"] * min(1.0, number / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validation(self, env: envs.TextEnv, tasks: Sequence[str]) -> float:
        """Mean reward of the greedy agent."""
        episodes = (trajectories(env.fork(), task, GREEDY, self.chat) for task in tasks)
        policy = Policy(self.model, self.chat)
        played = drive(episodes, {Sample: policy.sample}, env.side_by_side, in_order=True)
        return sum(line["reward"] for (line,) in played) / len(tasks)

    def weights(self) -> list[torch.Tensor]:
        return [p.data for group in self.optimizer.param_groups for p in group["params"]]

    def suspend(self, path: Path, lines: list[dict]) -> None:
        """Write weights, moments and the lines so far."""
        state = {"weights": self.weights(), "moments": self.optimizer.state_dict(), "lines": lines}
        write_state(path, state)

    def resume(self, path: Path) -> list[dict]:
        """Read what `suspend` wrote. Returns the lines."""
        with opened(path) as state:
            for own, saved in zip(self.weights(), state["weights"], strict=True):
                own.copy_(saved)
            self.optimizer.load_state_dict(state["moments"])
            return state["lines"]


def load(args: argparse.Namespace, env: envs.TextEnv, lr: float, copied: bool = True) -> Learner:
    """The agent, which is to play `env`. The reference is a copy of it or, not `copied`, the agent itself.

    Without --lr, `lr` is the tiny model's.
    """
    if share()[1] > 1:
        raise UserError("a learner is one process: unset WORLD_SIZE; --lora and --gradient-checkpointing save memory")
    flags.check_training(args)
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    flags.warn_of_another_world(args.sft, args)
    torch.manual_seed(args.seed)
    model, chat, adapter = trainable(args, AutoModelForCausalLM)
    flags.begin_as_cloned(env, chat.rendering, args)
    small = model.num_parameters() < SMALL
    settle(args, {"lr": lr if small else LR_LORA if args.lora else LR_PRETRAINED})
    print(models.memory_of(model, args.optim))
    # With LoRA both have the frozen weights, and only its updates, still 0, are copied.
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    reference = copy.deepcopy(model, frozen).requires_grad_(False).eval() if copied else model

    def save(folder: Path) -> None:
        """LoRA's updates are merged in a copy."""
        models.save_checkpoint(model, chat, folder, copy.deepcopy(adapter))

    return Learner(model, reference, chat, args.lr, args.optim, save)


def trainable(args: argparse.Namespace, kind: Any) -> tuple[Any, Chat, Any]:
    """--sft as a model of class `kind` that trains as the flags ask, its Chat, and PEFT's view of LoRA's updates."""
    how = {"train": not args.lora, "rendering": flags.rendering_of(args.sft, args, flags.PROMPTED)}
    model, chat = models.load_checkpoint(args.sft, kind, args.device, args.load_in, **how)
    adapter = models.save_memory(model, args.lora, args.lora_alpha, args.gradient_checkpointing)
    # Training mode, in which --gradient-checkpointing works, is to compute the probabilities that were sampled.
    rates = ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop")
    for module, name in itertools.product(model.modules(), rates):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)
    return model, chat, adapter


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
        return f"nearly all trajectories of a task earn the same, on average {reward:.3f}, so nothing can be learned"
    return ""


@models.within_memory()
def learn(
    learner: Learner, env: envs.TextEnv, iterate: Callable[[dict], dict], args: argparse.Namespace,
    inputs: Sequence[Path | None], passes: float,
) -> None:  # fmt: skip
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a
    larger --budget continues. All are of the last validation; the last batch of a smaller budget has one too.

    inputs: what is read besides the agent. passes: how often a token that was spent went forward, for the report; a
    backward pass counts as two. "played" of a line, if it has that: tokens that went forward once.
    """
    folder = checkpoint_folder(args.run / f"sft-{args.name}", args.sft)
    log, state = (folder.with_name(folder.name + ending) for ending in (".updates.jsonl", ".resume.pt"))
    unit, lines = args.budget_in, []
    tasks = env.task_ids("val")[: args.val or None]
    if not tasks:
        raise UserError(f"{env.name}: no validation tasks here, by which the best checkpoint is chosen")

    def over() -> str:
        return "the budget is spent" if lines[-1][unit] >= args.budget else why_stop(lines, unit)

    def best() -> dict:
        return max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])

    def describe(**figures: Any) -> None:
        write_meta(folder, vars(args), [args.sft, *inputs], best=best(), last=lines[-1], passes=passes, **figures)

    with locked(folder):
        if args.overwrite:
            state.unlink(missing_ok=True)
            log.unlink(missing_ok=True)
        elif state.exists():
            same_arguments(folder, vars(args), ["budget", "budget_in"])
            lines = learner.resume(state)
        elif log.exists():
            raise UserError(f"{log}: {state}, from which it would continue, is missing: --overwrite starts again")
        if len(lines) > 1 and lines[-2][unit] >= args.budget:
            spent = f"{lines[-1][unit]:,} {unit} are spent already"
            raise UserError(f"{log}: {spent}: raise --budget, or give another --name")
        while not lines or not over():
            line = (iterate(lines[-1]) if lines else SPENT) | {"val": None}
            lines.append(line)
            if line["batch"] % args.every == 0 or over():
                line["val"] = round(learner.validation(env, tasks), 6)
                print(f"batch {line['batch']}: {line[unit]:,} {unit}, validation {line['val']:.3f}", flush=True)
                if best() is line:
                    learner.save(folder)
                    describe()
                write_jsonl(log, lines)
                learner.suspend(state, lines)
        describe(stopped=None if lines[-1][unit] >= args.budget else over())
    print(f"batch {lines[-1]['batch']}: {over()}")
    spent = f"{best()['tokens']:,} tokens, {best()['env_steps']:,} environment steps"
    gain = f"validation {lines[0]['val']:.3f} -> {best()['val']:.3f} at batch {best()['batch']}"
    print(f"{folder}: {gain} ({spent})", flush=True)
