"""Stage 1: behaviour cloning (Sec. 4.1, Eq. 5).

    python sft.py --env webshop                       # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

    reads   expert trajectories: --expert FILE, or those that the environment's expert plays now
    writes  RUN/expert.jsonl if it played them, RUN/sft/ (a HuggingFace checkpoint, tokenizer too)

The loss is the cross-entropy of the tokens that the agent writes. Instruction, observations and
padding are context. `--model tiny` is a Llama of a million parameters with a tokenizer of its own,
which reads with the aids of qlass/tiny.py. Any other model keeps its tokenizer and its chat
template, and writes free text, "Thought: ... Action: ...", as in the paper.
"""

from __future__ import annotations

# qlass comes first: it says in one line which packages are missing.
from qlass import UserError, files, leaks, models, processes, published, runs  # isort: skip

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import envs
from qlass.agent import loading, settled
from qlass.chat import Chat, Rendering
from qlass.config import Bounds, Natural, Positive, Training, free, read, run_stage
from qlass.messages import State
from qlass.published import Demonstration
from qlass.tiny import AIDS, tiny_model
from qlass.training import TrainingLog, autocast, begin, clip, cosine, micro_batches, updates_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Training):
    """The defaults are the paper's (Table 5)."""

    stage: ClassVar[str] = "sft"

    model: str = "tiny"  # tiny, a HuggingFace name or folder, or a GGUF file
    expert: Path | None = free(None)  # trajectories (the environment's expert plays them)
    n_expert: Positive | None = None  # the first so many of them (all)
    out: Path | None = free(None)  # checkpoint folder (RUN/sft)
    epochs: Natural = 3  # at most (0: 12, and with few trajectories more, in smaller batches)
    max_tokens: Annotated[int, Bounds(2)] = 4096  # where a trajectory is cut
    candidates: Literal["free", "valid"] = "free"  # what the agent may write


# ------------------------------------------------------------------------- examples to learn from


def hold_out(expert: list[Demonstration]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and those of 5 % of the tasks to validate.

    At least 16 tasks are held out; of fewer than 64, none.
    """
    tasks = list(dict.fromkeys(demonstration.observation for demonstration in expert))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    learned = [tau for tau in expert if tau.observation not in held_out]
    return learned, [tau for tau in expert if tau.observation in held_out]


NO_TARGET = -100  # the label of a token that the agent reads and does not write


@dataclasses.dataclass
class Example:
    """A trajectory's tokens (T,), and their labels (T,): the same where the agent wrote them, else
    NO_TARGET."""

    ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """How many tokens the agent wrote."""
        return len(self.labels) - self.labels.count(NO_TARGET)


def example_of(chat: Chat, state: State, limit: int) -> Example:
    """A trajectory, cut at `limit` tokens. Its targets are Eq. (5)'s a_t, and the first OK."""
    ids: list[int] = []
    labels: list[int] = []
    # User and agent take turns, as a system message is in the first list.
    for turn, tokens in enumerate(chat.message_tokens(state)):
        agent_writes = turn % 2 == 1
        ids += tokens
        labels += tokens if agent_writes else [NO_TARGET] * len(tokens)
    return Example(ids[:limit], labels[:limit])


def examples_of(chat: Chat, expert: list[Demonstration], limit: int) -> Iterator[Example]:
    """One example per trajectory; in a Markov environment, one per action."""
    for demonstration in expert:
        state = demonstration.state
        for n in chat.aids.example_ends(state.messages):
            example = example_of(chat, State(state.messages[:n], state.task), limit)
            if example.targets:
                yield example


# -------------------------------------------------------------------------------- behaviour cloning


def sft_loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """Eq. (5): -sum_t log pi(a_t | s_t) in nats, of each token given what stands before it; ().

    The output layer is wide, and most tokens are only read. So logits are computed at K of the
    T - 1 positions: those at which some row predicts a token that the agent wrote. Rows are padded
    on the right, where a causal model needs no mask.
    """
    device = model.device
    ids = pad_sequence([torch.tensor(e.ids) for e in examples], batch_first=True)  # (B, T)
    labels = [torch.tensor(e.labels) for e in examples]
    targets = pad_sequence(labels, batch_first=True, padding_value=NO_TARGET)[:, 1:].to(device)
    kept = (targets != NO_TARGET).any(dim=0).nonzero()[:, 0]  # (K,)
    logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=kept).logits
    assert logits.shape[1] == len(kept), "the model does not know logits_to_keep"
    targets = targets[:, kept]  # (B, K)
    written = targets != NO_TARGET
    return cross_entropy(logits[written].float(), targets[written], reduction="sum")


def train(
    model: Any,
    examples: list[Example],
    validation: list[Example],
    config: Config,
    out: Path,
    dtype: torch.dtype,
    loss_of: Callable[[Any, list[Any]], torch.Tensor] = sft_loss,
) -> dict[str, Any]:
    """Maximise the likelihood of what the expert wrote, given its history. Returns figures."""
    epochs, batch_size = schedule(config, len(examples))
    optimizer = models.adamw([(model, config.lr)], config.optim)
    sizes = [1] * len(examples)
    order = [updates_of(sizes, batch_size, config.seed, epoch) for epoch in range(epochs)]
    log = TrainingLog(out, model, optimizer, order, config)  # where a stopped training was
    for epoch in log.epochs_left():
        model.train()
        for update in log.updates_left(epoch):
            batch = [examples[i] for i in update]
            n = sum(example.targets for example in batch)
            loss = 0.0
            for portion in processes.mine(micro_batches(batch, len, config.micro_tokens)):
                with autocast(model, dtype):
                    part = loss_of(model, portion) / n  # Eq. (5), per token
                part.backward()  # gradients accumulate
                loss += part.item()
            loss = processes.summed(model, loss)
            clip(model, loss, log.step, config.lr)
            for param_group in optimizer.param_groups:
                param_group["lr"] = param_group["peak"] * cosine(log.step, log.steps)
            optimizer.step()
            optimizer.zero_grad()
            log.end_update(loss, tokens=sum(map(len, batch)))
        log.save("last.pt")  # an epoch whose validation fails is not trained again
        with autocast(model, dtype):
            log.end_epoch(validate(model, validation, config.micro_tokens))
    return log.finish() | {"epochs": epochs, "batch": batch_size}


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int) -> float | None:
    """Eq. (5) per token that the agent writes, in nats, given the expert's own history; None
    without examples."""
    model.eval()
    if not examples:
        return None
    portions = micro_batches(examples, len, micro_tokens)
    losses = [sft_loss(model, portion).item() for portion in portions]
    return sum(losses) / sum(example.targets for example in examples)


def schedule(config: Config, examples: int) -> tuple[int, int]:
    """Epochs and examples per update. With --epochs 0 few examples make at least 200 updates."""
    if config.epochs:
        return config.epochs, config.batch
    batch = min(config.batch, math.ceil(examples / 4))
    updates = math.ceil(examples / batch)  # of an epoch
    return max(12, math.ceil(200 / updates)), batch


# --------------------------------------------------------------------------------------------- main


def load(config: Config, env: envs.TextEnv, expert: list[Demonstration]) -> tuple[Any, Chat, Any]:
    """The model that is to be cloned, its chat, and PEFT's view of LoRA's updates (None: none)."""
    torch.manual_seed(config.seed)
    if config.model == "tiny":
        if config.lora:
            raise UserError("--lora: the tiny model is trained from scratch; name another --model")
        texts = (text for demonstration in expert for _, text in demonstration.state.messages)
        model, tokenizer = tiny_model(texts)
        model.to(models.device_and_precision(config.device)[0])
        chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))
    else:
        options = loading(Path(config.model), config) | {"train": not config.lora, "plain": True}
        model, chat = models.load_checkpoint(config.model, AutoModelForCausalLM, **options)
    published.refuse_second_thoughts(expert, chat)
    chat.rendering.candidates = config.candidates
    # Prompts at inference begin as these demonstrations do, whatever the checkpoint began with.
    chat.rendering.system = chat.rendering.instruction = None
    chat.rendering.agreement = None if env.agreement == "OK" else env.agreement
    if config.expert:
        for name, text in published.first_messages(env, expert).items():
            setattr(chat.rendering, name, text)
    return model, chat, models.prepare_training(model, config)


def tokenize(
    chat: Chat, expert: list[Demonstration], config: Config, training_examples: Callable
) -> tuple[list[Any], list[Example]]:
    """The examples to train on and to validate. Says how many --max-tokens leaves out or cuts."""
    limit = int(min(config.max_tokens, chat.context))
    learned, held_out = hold_out(expert)
    examples = list(training_examples(chat, learned, limit))
    validation = list(examples_of(chat, held_out, limit))
    if not examples:
        raise UserError(f"no demonstration has an action within {limit} tokens (--max-tokens)")
    lost = len(expert) - len(examples) - len(validation)
    cut = len([example for example in [*examples, *validation] if len(example) == limit])
    if (lost or cut) and not chat.rendering.markov:
        facts = f"{lost} have no action within {limit} tokens, {cut} reach it and are cut there"
        print(f"of {len(expert)} demonstrations {facts} (--max-tokens)")
    return examples, validation


def learned_from(
    model: Any, chat: Chat, expert: list[Demonstration], config: Config, env: envs.TextEnv
) -> dict[str, Any]:
    """For the metadata: what the model has learned from, and what it answers to a fixed text."""
    from qlass.optional import foreign

    tasks = ((tau.task_id, tau.observation) for tau in expert)
    learned = leaks.learned_tasks(tasks, config.model, env)
    fingerprint = foreign.fingerprint(model, chat)
    return {"trajectories": len(expert), **learned, "fingerprint": fingerprint}


def clone(
    config: Config,
    training_examples: Callable[..., Iterator[Any]] = examples_of,
    loss_of: Callable[[Any, list[Any]], torch.Tensor] = sft_loss,
) -> None:
    """The stage. Examples to train on and their loss may be of another kind."""
    env = envs.from_config(config)
    out = files.checkpoint_folder(config.out or config.run / "sft", config.model)
    with processes.together(out, config.device) as first:
        path = config.expert or config.run / "expert.jsonl"
        facts = settled(config)
        settings = config.recipe() | env.settings | facts
        if config.expert is None and first:
            if not config.overwrite:  # refused before demonstrations are added to a file in use
                runs.claim(out, runs.meta_of(out)["recipe"] | settings, overwrite=False)
            published.collect(env, path, config)
        processes.wait()
        expert = published.read(path, env, config.n_expert)
        model, chat, adapter = load(config, env, expert)
        examples, validation = tokenize(chat, expert, config, training_examples)
        dtype = models.PRECISIONS[facts["precision"]]
        inputs: runs.Inputs = {"expert": path}
        recipe = runs.recipe_of(settings, inputs)
        if not begin(out, config, recipe, inputs, first):
            return
        figures = train(model, examples, validation, config, out, dtype, loss_of)
        if first:
            figures |= learned_from(model, chat, expert, config, env)
            runs.write_meta(out, config, recipe, inputs, **figures)
            models.save_checkpoint(model, chat, out, adapter, dtype)
            files.discard(runs.states_of(out))
            print(f"{out}: {len(expert)} trajectories, loss {figures['loss']:.3f}")


def main(argv: list[str] | None = None) -> None:
    clone(read(Config, __doc__, argv))


if __name__ == "__main__":
    run_stage(main)
