"""Stage 1: behaviour cloning (Sec. 4.1, Eq. 5).

    reads   expert trajectories: --expert FILE, or those that the environment's expert plays now
    writes  RUN/expert.jsonl if it played them, RUN/sft/ (a HuggingFace checkpoint, tokenizer too)

    python sft.py --env webshop                       # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

The loss is the cross-entropy of the assistant's tokens, which the expert wrote. Instruction and
observations are context. `--model tiny` is a Llama of 0.7 M parameters with a tokenizer of its
own, which reads with the aids of qlass/tiny.py. Any other model keeps its tokenizer and its chat
template. As in the paper it writes free text, "Thought: ... Action: ...", or, with --candidates
valid, chooses among the actions that the environment lists.
"""

from qlass import UserError  # first: it tells a missing package in one line

# isort: split
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import envs
from environments import replay
from qlass import demonstrations, device, models, outputs, tiny
from qlass.chat import Chat, Rendering
from qlass.demonstrations import Demonstration
from qlass.files import warn
from qlass.inputs import checkpoint
from qlass.messages import State
from qlass.policy import Policy
from qlass.settings import Learning, place, read_settings, run_stage, workload
from qlass.training import Training, micro_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Learning):
    stage: ClassVar = "sft"
    output: ClassVar = "sft"

    model: str = place("tiny")  # tiny, or a HuggingFace name or folder
    expert: Path | None = place(None)  # trajectories (the environment's expert plays them)
    n_expert: PositiveInt | None = None  # only so many trajectories, the first ones
    out: Path | None = place(None)  # checkpoint folder (RUN/sft)
    max_tokens: PositiveInt  # where a trajectory is cut
    candidates: Literal["free", "valid"]  # what the agent may write
    layers: PositiveInt = 3  # of the tiny model
    heads: PositiveInt = 2  # of attention in the tiny model, of 64 numbers each
    plain: bool = workload(False)  # no check that the fast engine can read this model


# ------------------------------------------------------------------------- examples to learn from


def hold_out_tasks(expert: list[Demonstration]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and those of 5 % of the tasks to validate.

    At least 16 tasks are held out; of fewer than 64, none. A task is recognised by its first
    observation, as the files of others have no task_id.
    """
    of_task = [(line.state.observations[0].strip(), line) for line in expert]
    tasks = list(dict(of_task))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    training_set = [line for task, line in of_task if task not in held_out]
    return training_set, [line for task, line in of_task if task in held_out]


def check_demonstrations(expert: list[Demonstration], chat: Chat, max_tokens: int) -> None:
    """UserError for a demonstration that an agent cannot learn. A warning counts those of which
    `max_tokens` cut later actions.

    Refused are answers with a control token, which the agent would learn as letters, answers that
    their tokens do not give back (a stop text cuts them, or the tokenizer changes letters), and a
    first action that is cut.
    """
    lost = 0
    for number, demonstration in enumerate(expert, 1):
        state = demonstration.state
        for _, text in state.messages[1::2]:
            if match := chat.controls.search(text):
                raise UserError(f"demonstration {number}: remove {match[0]!r} from its answers")
            round_trip = chat.text(chat.action_tokens(text, state.task))
            if round_trip != text.strip():
                raise UserError(
                    f"demonstration {number}: the answer {text.strip()!r} comes back from its"
                    f" tokens as {round_trip!r}: change the text, --model, or `stop` in its"
                    " policy.json"
                )
        length = sum(map(len, chat.message_tokens(state.prefix(state.opening + 2))))
        if length > max_tokens:
            raise UserError(
                f"demonstration {number}: its first action ends at token {length:,}, and"
                f" {max_tokens:,} are read (--max-tokens, or the model's context)"
            )
        ends = chat.aids.example_ends(state)
        lengths = [sum(map(len, chat.message_tokens(state.prefix(n)))) for n in ends]
        lost += max(lengths) > max_tokens
    if lost:
        share = f"{lost} of {len(expert)} demonstrations"
        warn(f"actions beyond {max_tokens:,} tokens are lost in {share}")


NO_TARGET = -100  # the label of a token that the agent reads and does not write


@dataclasses.dataclass
class Example:
    """A trajectory's tokens (T,), and their labels (T,): the same for the assistant's, else
    NO_TARGET."""

    ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """The number of the assistant's tokens."""
        return len(self.labels) - self.labels.count(NO_TARGET)


def longest_answer(example: Example) -> int:
    """The number of tokens in its longest answer."""
    runs = itertools.groupby(example.labels, lambda label: label != NO_TARGET)
    return max(len(list(run)) for written, run in runs if written)


def example_of(chat: Chat, state: State, max_tokens: int) -> Example:
    """A trajectory, cut at `max_tokens`. Its targets are Eq. (5)'s a_t, and the agreement."""
    ids: list[int] = []
    labels: list[int] = []
    for turn, tokens in enumerate(chat.message_tokens(state)):  # user and agent take turns
        agent_writes = turn % 2 == 1
        ids += tokens
        labels += tokens if agent_writes else [NO_TARGET] * len(tokens)
    return Example(ids[:max_tokens], labels[:max_tokens])


def examples_of(chat: Chat, expert: list[Demonstration], max_tokens: int) -> Iterator[Example]:
    """One example per trajectory; of an agent that reads the last observation alone, one per
    action."""
    for demonstration in expert:
        state = demonstration.state
        for n in chat.aids.example_ends(state):
            example = example_of(chat, state.prefix(n), max_tokens)
            if example.targets:
                yield example


# -------------------------------------------------------------------------------- behaviour cloning


def sft_loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """Eq. (5): -sum_t log pi(a_t | s_t) in nats, of each token given what stands before it; ().

    The output layer is wide, and most tokens are only read. So logits are computed at K of the
    T - 1 positions: those at which some row predicts a token of the assistant. Rows are padded
    on the right, where a causal model needs no mask.
    """
    ids = pad_sequence([torch.tensor(e.ids) for e in examples], batch_first=True)  # (B, T)
    labels = [torch.tensor(e.labels) for e in examples]
    targets = pad_sequence(labels, batch_first=True, padding_value=NO_TARGET)[:, 1:]
    targets = targets.to(model.device)
    kept = (targets != NO_TARGET).any(dim=0).nonzero()[:, 0]  # (K,)
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits
    targets = targets[:, kept]  # (B, K)
    written = targets != NO_TARGET
    return cross_entropy(logits[written].float(), targets[written], reduction="sum")


def train(
    model: Any,
    examples: list[Example],
    validation: list[Example],
    config: Config,
    training: Training,
    loss_of: Callable[[Any, list[Any]], torch.Tensor] = sft_loss,
) -> None:
    """Maximise the likelihood of what the expert wrote, given its history."""
    optimizer = models.adamw([(model, config.lr)], config.optim)
    training.resume(model, optimizer, sizes=[1] * len(examples))
    for epoch in training.epochs_left():
        model.train()
        for update in training.updates_left(epoch):
            batch = [examples[i] for i in update]
            n = sum(example.targets for example in batch)
            loss = 0.0
            for portion, weight in training.portions(batch, len, config.micro_tokens):
                with device.autocast(config):
                    micro_loss = loss_of(model, portion) / n  # Eq. (5), per token
                (weight * micro_loss).backward()  # gradients accumulate
                loss += weight * micro_loss.item()
            loss = training.sum_gradients(loss)  # of all processes
            training.clip_gradients(loss)
            training.set_rate()
            optimizer.step()
            optimizer.zero_grad()
            training.end_update(loss, tokens=sum(map(len, batch)))
        with device.autocast(config):
            training.end_epoch(validate(model, validation, config.micro_tokens))
    training.save_state("last")  # so that no update is lost if the checkpoint fills the disk


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int) -> float | None:
    """Eq. (5) per token of the assistant, in nats, given the expert's own history; None
    without examples."""
    model.eval()
    if not examples:
        return None
    portions = micro_batches(examples, len, micro_tokens)
    losses = [sft_loss(model, portion).item() for portion in portions]
    return sum(losses) / sum(example.targets for example in examples)


# --------------------------------------------------------------------------------------------- main


def start_of(config: Config) -> Path | None:
    """The folder of the model to train. None: the tiny one, from scratch."""
    if config.model == "tiny":
        if config.lora or config.load_in:
            raise UserError("--lora, --load-in: the tiny model is trained whole, in all bits")
        return None
    start = checkpoint(config.model)
    if Rendering.load(start).mark_matches:
        raise UserError(f"{start}: a tiny model, which is trained from scratch: --model tiny")
    return start


def model_and_chat(
    config: Config, env: envs.TextEnv, expert: list[Demonstration], start: Path | None
) -> tuple[Any, Chat]:
    """The model to train, and its chat. start: its folder; None: the tiny one, from scratch."""
    torch.manual_seed(config.seed)
    if start is None:
        if not all(demonstration.state.task for demonstration in expert):
            warn("demonstrations without their task_id (or `task`) show the tiny model no goal")
        texts = (text for demonstration in expert for _, text in demonstration.state.messages)
        model, tokenizer = tiny.tiny_model(texts, config.layers, config.heads)
        model.to(models.device_and_precision(config)[0])
        context = model.config.max_position_embeddings
        chat = Chat(tokenizer, Rendering(**tiny.AIDS, markov=env.markov), context)
    else:
        model, chat = models.load_model(start, config, train=not config.lora)
    chat.rendering.candidates = config.candidates
    # Prompts at inference begin as these demonstrations do.
    first = expert[0].state
    if not first.opening:  # the task stands in the first message
        chat.rendering.instruction, chat.rendering.agreement = None, ""
    else:
        (_, instruction), (_, chat.rendering.agreement) = first.messages[:2]
        chat.rendering.instruction = instruction if config.expert else None
    return model, chat


def clone(
    config: Config,
    make_examples: Callable[..., Iterator[Any]] = examples_of,
    loss_of: Callable[[Any, list[Any]], torch.Tensor] = sft_loss,
) -> None:
    """Train an agent on demonstrations. make_examples, loss_of: the examples of another loss, and
    that loss. Eq. (5) validates the agent whatever the loss."""
    env = envs.from_config(config)
    device.join(config)
    start = start_of(config)
    settings = env.settings | {"loss": loss_of.__name__}
    outputs.recipe_of(config.path, config, config.recipe() | settings, {})  # before others are made
    path = config.expert or demonstrations.collect(env, config, config.n_expert)
    device.wait()
    expert = demonstrations.read(path, env, config.n_expert)
    training = Training(config.path, config, settings, {"expert": path, "model": start})
    if training.complete:
        return
    if config.expert:
        replay.refuse_openings(expert, env)
    every = 1 if config.expert else env.replay_every
    replay.replay_demonstrations(expert, env, (line.task_id for line in expert[::every]))
    model, chat = model_and_chat(config, env, expert, start)
    max_tokens = int(min(config.max_tokens, chat.context))
    check_demonstrations(expert, chat, max_tokens)
    training_set, held_out = hold_out_tasks(expert)
    if config.candidates == "free":  # in play no answer is cut that was learned
        longest = max(map(longest_answer, examples_of(chat, training_set, max_tokens)))
        chat.rendering.max_new_tokens = max(chat.rendering.max_new_tokens, longest)
    if config.lora:
        models.refuse_untrained(model, chat.stop_id)
    adapter = models.prepare_training(model, config)
    examples = list(make_examples(chat, training_set, max_tokens))
    validation = list(examples_of(chat, held_out, max_tokens))
    train(model, examples, validation, config, training, loss_of)
    training.load_best()

    def save(folder: Path) -> list[float]:
        models.save(model, chat, folder, config, adapter)
        all_bits = dataclasses.replace(config, load_in=None)
        return Policy(*models.load_model(folder, all_bits)).fingerprint()

    tasks = sorted({line.task_id for line in expert if line.task_id})
    figures = training.finish(save, Policy(model, chat).fingerprint(), tasks=tasks)
    if device.is_first():
        print(f"{training.out}: {len(expert)} trajectories, loss {figures['loss']:.3f}")


def main(argv: list[str] | None = None) -> None:
    clone(read_settings(Config, __doc__, argv))


if __name__ == "__main__":
    run_stage(main)
