"""What the learners beside this file share: flags, a budget, validation, the best checkpoint, resuming.

A learner improves RUN/sft by `iterate(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent, or until PATIENCE
batches spend nothing.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import envs
from experiments import drive_in_order
from experiments.self_train import trajectories
from q_search import Method
from qlass import UserError, flags, models, runs
from qlass.agent import begin_as_cloned
from qlass.batching import Sample
from qlass.chat import Chat, Rendering
from qlass.fast.decode import FastPolicy
from qlass.files import checkpoint_folder, draft_of, locked, write_jsonl
from qlass.flags import Parser, at_least
from qlass.messages import uniforms
from qlass.published import learned_tasks
from train_qnet import SMALL

WARMUP = 4  # updates
PATIENCE = 8  # batches that spend nothing: all trees were read, or no two trajectories differ
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5
GREEDY = Method("greedy", temperature=0.0)
SPENT = {"batch": 0, "updates": 0, "tokens": 0, "env_steps": 0}  # the first line: the agent as it comes


def learner_parser(doc: str, epilog: str, every: int) -> Parser:
    """A parser with the flags that all learners have."""
    learner = Parser(doc, epilog)
    add, free = learner.add_argument, learner.free
    free("--budget", type=at_least(0, float), default=1e6, metavar="N", help="what to spend (default: %(default).0f)")
    free("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--val", type=at_least(0), default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    add("--every", type=at_least(1), default=every, metavar="N", help="batches a validation (default: %(default)s)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    flags.add_memory(learner)
    flags.add_prompt(learner)
    return learner


class Learner:
    """The agent, its frozen reference, PEFT's view of LoRA's updates, and the optimiser of all that learns."""

    def __init__(self, model: Any, reference: Any, chat: Chat, lr: float, optim: str = "adamw", adapter: Any = None):
        self.model, self.reference, self.chat, self.adapter = model, reference, chat, adapter
        self.optimizer = models.adamw([(model, lr)], optim)
        self.optimizer.param_groups[0]["peak"] = lr
        # Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again.
        self.room = 512 if model.num_parameters() < SMALL else 4096

    def step(self, number: int) -> None:
        """Update `number`, from 1: each model's gradient clipped; rates rise linearly and then are constant."""
        for group in self.optimizer.param_groups:
            if not torch.nn.utils.clip_grad_norm_(group["params"], 1.0).isfinite():
                reason = f"update {number}: the gradient is not finite, so the training has diverged"
                raise UserError(f"{reason}: --overwrite and a lower --lr than {group['peak']:g} start again")
            group["lr"] = group["peak"] * min(1.0, number / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drive(self, generators: Iterable[Generator], env: envs.TextEnv, seed: int, chat: Chat) -> list[Any]:
        """What these return, whose samples the agent draws as it is now."""
        policy = FastPolicy(self.model, chat, seed)  # a new one: the last one remembers the weights before
        return list(drive_in_order(generators, {Sample: policy.sample}, env.side_by_side))

    def episodes(self, env: envs.TextEnv, tasks: Sequence[str], method: Method, seed: int = 0) -> list[dict]:
        """The agent's trajectories, one per task, as lines of expert.jsonl."""
        playing = (trajectories(env.fork(), task, method, self.chat) for task in tasks)
        return [line for (line,) in self.drive(playing, env, seed, self.chat)]

    def validation(self, env: envs.TextEnv, tasks: Sequence[str]) -> float:
        """Mean reward of the greedy agent."""
        return sum(line["reward"] for line in self.episodes(env, tasks, GREEDY)) / len(tasks)

    def save(self, folder: Path) -> None:
        """Write the agent as a checkpoint; LoRA's updates are merged in a copy."""
        models.save_checkpoint(self.model, self.chat, folder, copy.deepcopy(self.adapter))

    def weights(self) -> list[torch.Tensor]:
        return [p.data for group in self.optimizer.param_groups for p in group["params"]]

    def suspend(self, path: Path, lines: list[dict]) -> None:
        """Write weights, moments and the lines so far."""
        state = {"weights": self.weights(), "moments": self.optimizer.state_dict(), "lines": lines}
        with draft_of(path) as draft:
            torch.save(state, draft)

    def resume(self, path: Path) -> list[dict]:
        """Read what `suspend` wrote. Returns the lines."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        for own, saved in zip(self.weights(), state["weights"], strict=True):
            own.copy_(saved)
        self.optimizer.load_state_dict(state["moments"])
        return state["lines"]


def load(args: argparse.Namespace, env: envs.TextEnv, rates: dict[str, float], copied: bool = True) -> Learner:
    """The agent, which is to play `env`. The reference is a copy, or itself. rates: the tiny model's, without --lr."""
    args.sft = runs.need(args.sft, args.run / "sft", "sft", args)
    args.precision = None
    models.settle_precision(args)
    torch.manual_seed(args.seed)
    model, chat, adapter = trainable(args, AutoModelForCausalLM)
    begin_as_cloned(env, chat.rendering, args)
    small = model.num_parameters() < SMALL
    lr = rates.get(args.env, rates["others"]) if small else LR_LORA if args.lora else LR_PRETRAINED
    flags.fill_defaults(args, {"lr": lr})
    # With LoRA both have the frozen weights, and only its updates, still 0, are copied.
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    reference = copy.deepcopy(model, frozen).requires_grad_(False).eval() if copied else model
    return Learner(model, reference, chat, args.lr, args.optim, adapter)


def trainable(args: argparse.Namespace, kind: Any) -> tuple[Any, Chat, Any]:
    """--sft as a model of class `kind` that trains as the flags ask, its Chat, and PEFT's view of LoRA's updates."""
    how = {"train": not args.lora, "rendering": Rendering.load(args.sft, args, ["max_new_tokens", "truncate"])}
    model, chat = models.load_checkpoint(args.sft, kind, args.device, args.load_in, **how)
    adapter = models.prepare_training(model, args.lora, args.lora_alpha, args.gradient_checkpointing)
    # Training mode, in which --gradient-checkpointing works, is to compute the probabilities that were sampled.
    rates = ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop")
    for module, name in itertools.product(model.modules(), rates):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)
    return model, chat, adapter


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0, of passes through all of them, each in an order of its own."""
    if not tasks:
        raise UserError("no tasks to learn from")
    order = (i for turn in itertools.count() for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))
    return [tasks[i] for i in itertools.islice(order, number * size, (number + 1) * size)]


def learn(
    learner: Learner, env: envs.TextEnv, iterate: Callable[[dict], dict], args: argparse.Namespace,
    passes: float, learned: Iterable[str | None], **inputs: Path | None,
) -> None:  # fmt: skip
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.pt, from which a stopped run or a
    larger --budget continues. All are of the last validation; the last batch of a smaller budget has one too.

    passes: how often a token that was spent went forward, a backward pass counted as two; "played" of a line are tokens
    that went forward once. learned: tasks that are played or read. inputs: what is read besides the agent.
    """
    folder = checkpoint_folder(args.run / f"sft-{args.name}", args.sft)
    log, state = (folder.with_name(folder.name + ending) for ending in (".updates.jsonl", ".resume.pt"))
    unit, lines = args.budget_in, []
    known, inputs = learned_tasks(learned, args.sft, args), {"sft": args.sft, **inputs}
    tasks = env.task_ids("val")[: args.val or None]
    if not tasks:
        raise UserError(f"{env.name}: no validation tasks here, by which the best checkpoint is chosen")

    def over() -> bool:
        stalled = len(lines) > PATIENCE and lines[-1][unit] == lines[-1 - PATIENCE][unit]
        return lines[-1][unit] >= args.budget or stalled

    def best() -> dict:
        return max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])

    with locked(folder):
        recipe = runs.claim(folder, args, inputs)
        for old in (state, log) if args.overwrite else ():
            old.unlink(missing_ok=True)
        if state.exists():
            lines = learner.resume(state)
        elif log.exists():  # else the agent as it comes would replace the best one
            raise UserError(f"{state}: is missing, so {args.name} can't go on: --overwrite starts again")
        else:
            runs.write_meta(folder, args, recipe, inputs)  # first, since a folder without is not ours
        if len(lines) > 1 and lines[-2][unit] >= args.budget:  # its best agent may have cost more
            raise UserError(f"{folder}: {lines[-1][unit]:,} {unit} are spent: raise --budget, or give another --name")
        while not lines or not over():
            line = (iterate(lines[-1]) if lines else SPENT) | {"val": None}
            lines.append(line)
            if line["batch"] % args.every == 0 or over():
                line["val"] = round(learner.validation(env, tasks), 6)
                print(f"batch {line['batch']}: {line[unit]:,} {unit}, validation {line['val']:.3f}", flush=True)
                if best() is line:
                    learner.save(folder)
                figures = {"best": best(), "last": line, "passes": passes, "tasks": known, "budget": args.budget}
                runs.write_meta(folder, args, recipe, inputs, **figures)
                write_jsonl(log, lines)
                learner.suspend(state, lines)
    gain = f"validation {lines[0]['val']:.3f} -> {best()['val']:.3f} at batch {best()['batch']}"
    print(f"{folder}: {gain}, {lines[-1][unit]:,} of {args.budget:,.0f} {unit} spent", flush=True)
