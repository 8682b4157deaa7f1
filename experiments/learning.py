"""The parts that the learners beside this file share: flags, a budget, validation, the best checkpoint, resuming.

A learner improves RUN/sft by `iterate(last)`, which makes the next line of RUN/sft-NAME.updates.jsonl from the last
one: what was spent so far, and figures of the batch. `learn` calls it until the budget is spent, or until PATIENCE
batches spend nothing.
"""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from safetensors import safe_open
from safetensors.torch import save_file

import envs
from experiments import drive_in_order
from experiments.self_train import trajectories
from q_search import Method
from qlass import UserError, files, models, outputs
from qlass.agent import set_first_messages
from qlass.batching import Sample
from qlass.chat import Chat
from qlass.fast.decode import FastPolicy
from qlass.files import Inputs, atomic, lock, meta_of, meta_path, write_json, write_jsonl
from qlass.noise import uniforms
from qlass.policy import Policy
from qlass.records import as_user_error
from qlass.settings import ActionLength, Number, place, workload
from qlass.training import restore

WARMUP = 4  # updates
PATIENCE = 8  # batches that spend nothing: all trees were read, or no two trajectories differ
SMALL = 50_000_000  # parameters
GREEDY = Method("greedy", temperature=0.0)
SPENT = {"batch": 0, "updates": 0, "tokens": 0, "env_steps": 0}  # the first line: the agent as it comes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ActionLength):
    """The settings that all learners have."""

    name: str = ""  # of the checkpoint RUN/sft-NAME
    sft: Path | None = place(None)  # checkpoint of the agent (RUN/sft, made if missing)
    lr: Number = 1e-6  # learning rate, after a few updates of warm-up
    lora: PositiveInt | None = None  # train updates of this rank alone
    gradient_checkpointing: bool = workload(False)  # less memory, a third more time
    budget: Number = workload(1e6)  # what to spend
    budget_in: Literal["tokens", "env_steps"] = workload("tokens")  # a token counts once in each pack
    val: NonNegativeInt = 100  # validation tasks (0: all)
    every: PositiveInt = 4  # batches a validation


class Learner:
    """The agent, its frozen reference, PEFT's view of LoRA's updates, and the optimiser of all that learns."""

    def __init__(self, model: Any, reference: Any, chat: Chat, lr: float, adapter: Any = None):
        self.model, self.reference, self.chat, self.adapter = model, reference, chat, adapter
        self.optimizer = models.adamw([(model, lr)])
        # Tokens of a packed tree: of a small model attention is what costs, of a large one what is computed again.
        self.room = 512 if model.num_parameters() < SMALL else 4096

    def step(self, number: int) -> None:
        """Update `number`, from 1: each model's gradient clipped; rates rise linearly and then are constant."""
        for group in self.optimizer.param_groups:
            if not torch.nn.utils.clip_grad_norm_(group["params"], 1.0).isfinite():
                reason = f"update {number}: the gradient is not finite, so the training has diverged"
                raise UserError(f"{reason}: --overwrite and a lower rate than {group['peak']:g} start again")
            group["lr"] = group["peak"] * min(1.0, number / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drive(self, players: Iterable[Coroutine], env: envs.TextEnv, seed: int) -> list[Any]:
        """Run the players and return their results; the agent samples with its weights of now."""
        self.model.eval()  # in training with --gradient-checkpointing it fills no cache
        policy = FastPolicy(self.model, self.chat, seed)  # a new one: the last one remembers the weights before
        return list(drive_in_order(players, {Sample: policy.sample}, env.side_by_side))

    def episodes(self, env: envs.TextEnv, tasks: Sequence[str], method: Method, seed: int = 0) -> list[dict]:
        """The agent's trajectories, one per task, as lines of expert.jsonl."""
        playing = (trajectories(env.fork(), task, method, self.chat) for task in tasks)
        return [line for (line,) in self.drive(playing, env, seed)]

    def validation(self, env: envs.TextEnv, tasks: Sequence[str]) -> float:
        """Mean reward of the greedy agent."""
        return sum(line["reward"] for line in self.episodes(env, tasks, GREEDY)) / len(tasks)

    def save(self, folder: Path, config: Config) -> None:
        """Write the agent as a checkpoint, all bits of its weights; LoRA's updates are merged in a copy."""
        if self.adapter:
            models.save(self.model, self.chat, folder, config, copy.deepcopy(self.adapter))
        else:
            models.save(self.model, self.chat, folder, dataclasses.replace(config, precision="float32"))

    @property
    def weights(self) -> dict[str, torch.nn.Parameter]:
        """All that learns, by its number in a fixed order."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return {str(i): weight for i, weight in enumerate(weights)}

    def suspend(self, path: Path, lines: list[dict]) -> None:
        """Write weights and moments by their numbers, and the lines so far."""
        state = {}
        for number, weight in self.weights.items():
            for kind, tensor in {"": weight, **self.optimizer.state[weight]}.items():
                state[f"{number} {kind}"] = tensor.detach()
        with atomic(path) as draft:
            save_file(state, draft, {"lines": json.dumps(lines)})

    def resume(self, path: Path) -> list[dict]:
        """Read what `suspend` wrote. Returns the lines."""
        with as_user_error(f"{path} can't be read: --overwrite starts again"):
            state = safe_open(path, "pt")
            restore(state, self.weights, self.optimizer)
            return json.loads(state.metadata()["lines"])


def load(sft: Path, config: Config, env: envs.TextEnv, copied: bool = True) -> Learner:
    """The agent, which is to play `env`. The reference is a copy, or itself."""
    torch.manual_seed(config.seed)
    model, chat, adapter = trainable(sft, config)
    set_first_messages(env, chat.rendering, config)
    reference = model
    if copied:  # with LoRA both have the frozen weights, and only its updates, still 0, are copied
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        reference = copy.deepcopy(model, frozen).requires_grad_(False).eval()
    return Learner(model, reference, chat, config.lr, adapter)


def trainable(sft: Path, config: Config) -> tuple[Any, Chat, Any]:
    """The agent's model, which trains as the settings ask, its Chat, and PEFT's view of LoRA's updates."""
    model, chat = models.load_model(sft, config, train=not config.lora)
    adapter = models.prepare_training(model, config)
    for module in model.modules():  # a training is to compute the probabilities that were sampled
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model, chat, adapter


def batch_of(tasks: Sequence[Any], seed: int, number: int, size: int) -> list[Any]:
    """The tasks of batch `number`, from 0, of passes through all of them, each in an order of its own."""
    if not tasks:
        raise UserError("no tasks to learn from")
    order = (i for turn in itertools.count() for i in np.argsort(uniforms(len(tasks), "order", seed, turn)))
    return [tasks[i] for i in itertools.islice(order, number * size, (number + 1) * size)]


def learn(
    learner: Learner,
    env: envs.TextEnv,
    iterate: Callable[[dict], dict],
    config: Config,
    passes: float,
    learned: Iterable[str],
    inputs: Inputs,
) -> None:
    """Writes RUN/sft-NAME/ (by validation the best), its .updates.jsonl, and .resume.safetensors, from which a stopped
    run or a larger --budget continues. All are of the last validation; the last batch of a smaller budget has one too.

    passes: how often a token that was spent went forward without gradient checkpointing, a backward pass counted as
    two; "played" of a line are tokens that went forward once. learned: tasks that are played or read. inputs: the agent
    "sft", and what else is read.
    """
    folder = config.run / f"sft-{config.name}"
    log = folder.with_name(folder.name + ".updates.jsonl")
    state = folder.with_name(folder.name + ".resume.safetensors")
    unit = config.budget_in
    tasks = env.task_ids("val")[: config.val or None]
    if not tasks:
        raise UserError(f"{env.name}: no validation tasks here, by which the best checkpoint is chosen")
    provenance = {"tasks": sorted({*learned, *meta_of(inputs["sft"]).get("tasks", [])})}
    lines: list[dict] = []

    def over() -> bool:
        stalled = len(lines) > PATIENCE and lines[-1][unit] == lines[-1 - PATIENCE][unit]
        return lines[-1][unit] >= config.budget or stalled

    def best() -> dict:
        return max((line for line in lines if line["val"] is not None), key=lambda line: line["val"])

    with lock(folder):
        meta = outputs.begin(folder, config, config.recipe() | env.settings, inputs)
        mark = meta.get("fingerprint")  # of the best agent so far
        if state.exists() and not config.overwrite:
            if not folder.exists():
                raise UserError(f"{folder}: is missing, and {state} is not: --overwrite starts again")
            lines = learner.resume(state)
            write_jsonl(log, lines)  # a stop may have come between the two
        elif log.exists() and not config.overwrite:
            lines = files.read_jsonl(log)
            if not over():  # the agent as it comes would replace the best one
                raise UserError(f"{state}: is missing, so {config.name} can't go on: --overwrite starts again")
        if len(lines) > 1 and lines[-2][unit] >= config.budget:  # its best agent may have cost more
            raise UserError(f"{folder}: {lines[-1][unit]:,} {unit} are spent: raise --budget, or give another --name")
        while not lines or not over():
            line = (iterate(lines[-1]) if lines else SPENT) | {"val": None}
            lines.append(line)
            if line["batch"] % config.every == 0 or over():
                line["val"] = round(learner.validation(env, tasks), 6)
                print(f"batch {line['batch']}: {line[unit]:,} {unit}, validation {line['val']:.3f}", flush=True)
                if best() is line:
                    if len(lines) == 1:  # with --overwrite the old ones stay until here
                        files.remove(state)
                        files.remove(log)
                    learner.save(folder, config)
                    mark = Policy(learner.model, learner.chat).fingerprint()
                figures = {"best": best(), "last": line, "passes": passes, "budget": config.budget} | provenance
                write_json(meta_path(folder), meta | figures | {"fingerprint": mark})
                learner.suspend(state, lines)
                write_jsonl(log, lines)
    gain = f"validation {lines[0]['val']:.3f} -> {best()['val']:.3f} at batch {best()['batch']}"
    print(f"{folder}: {gain}, {lines[-1][unit]:,} of {config.budget:,.0f} {unit} spent", flush=True)
