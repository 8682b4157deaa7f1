"""Stage 1: behaviour cloning (Sec. 4.1, Eq. 5).

    reads   expert trajectories: --expert FILE, or those that the environment's expert plays now
    writes  RUN/expert.jsonl if it played them, RUN/sft/ (a HuggingFace checkpoint, tokenizer too)

    python sft.py --env webshop                       # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

The loss is the cross-entropy of the tokens that the agent writes. Instruction, observations and
padding are context. `--model tiny` is a Llama of a million parameters with a tokenizer of its own,
which reads with the aids of qlass/tiny.py. Any other model keeps its tokenizer and its chat
template, and writes free text, "Thought: ... Action: ...", as in the paper.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import envs
from qlass import UserError, cli, files, metadata, models, published, training
from qlass.chat import Chat, Rendering
from qlass.messages import State, react
from qlass.output import Output
from qlass.tiny import AIDS, answers, observation_loss, tiny_model
from qlass.training import Progress, cosine, micro_batches

PAPER: dict[str, Any] = {"epochs": 3, "lr": 1e-5, "batch": 64}  # Table 5
PAPER |= {"micro_tokens": 8192, "candidates": "free"}
TINY: dict[str, Any] = {"epochs": 12, "lr": 3e-3, "batch": 16}
TINY |= {"micro_tokens": 2048, "candidates": "valid"}
UPDATES = 200  # at least, of the tiny model: few demonstrations get more epochs

# ------------------------------------------------------------------------------ expert trajectories


def demonstrate(env: envs.TextEnv, task_id: str) -> dict:
    """Play the environment's expert through one task: a line of expert.jsonl."""
    observation, info = env.reset(options={"task_id": task_id})
    state = first = State.first(env, observation, info)
    for thought, move in env.expert(task_id):
        state, reward, done = state.act(env, react(thought, move))
        if done:
            break
    if state is first:
        raise UserError(f"{env.name}: its expert does nothing in task {task_id}")
    messages = state.dump()[:-1]  # up to the last action
    line = {"task_id": task_id, "env": env.name, "task": state.task, "messages": messages}
    return line | {"reward": reward}


def collect(env: envs.TextEnv, args: argparse.Namespace) -> None:
    """Write what is missing of expert.jsonl: the first --n-expert training tasks."""
    settings = ("env", "env_option", "env_files", "run", "overwrite")  # that it depends on
    out = Output(args.expert, {name: getattr(args, name) for name in settings})
    tasks, done = env.task_ids("train")[: args.n_expert], len(out.records)
    lines = ([demonstrate(env, task_id)] for task_id in tasks[done:])
    out.grow(lines, "expert", len(tasks), done)
    out.finish()


def hold_out(states: list[State]) -> tuple[list[State], list[State]]:
    """Demonstrations to train on, and those of 5 % of the tasks to validate.

    At least 16 tasks are held out; of fewer than 64, none.
    """
    tasks = list(dict.fromkeys(published.opening(state) for state in states))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    learned = [state for state in states if published.opening(state) not in held_out]
    return learned, [state for state in states if published.opening(state) in held_out]


Example = list[tuple[int, bool]]  # tokens, and whether the agent wrote them


def tokens_and_mask(chat: Chat, state: State, limit: int) -> Example:
    """A trajectory's tokens, cut at `limit`; the agent wrote Eq. (5)'s a_t, and OK."""
    runs = chat.message_tokens(state)
    messages = state.messages[len(state.messages) - len(runs) :]
    example: Example = []
    for (role, _), run in zip(messages, runs, strict=True):
        example += [(token, role == "assistant") for token in run]
    return example[:limit]


def examples_of(
    chat: Chat, states: list[State], limit: int, answered: bool = False
) -> Iterator[Example]:
    """One example per trajectory; in a Markov environment, one per action.

    answered: an action's example ends with the observation that follows it.
    """
    for state in states:
        length = len(state.messages)
        for n in chat.aids.example_ends(state.messages):
            example = tokens_and_mask(chat, State(state.messages[:n], state.task), limit)
            if answered and n < length:
                following = State(state.messages[: n + 1], state.task)
                example = (example + tokens_and_mask(chat, following, limit))[:limit]
            if any(wrote for _, wrote in example[1:]):
                yield example


# -------------------------------------------------------------------------------- behaviour cloning


def collate(examples: list[Example], device: Any) -> tuple[torch.Tensor, ...]:
    """Tokens, which of them the agent wrote, and which are no padding, (B, T) each.

    Padding is on the right and attention is causal, so no real token sees it.
    """
    rows = [torch.tensor(example) for example in examples]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)  # (B, T, 2)
    ids, wrote = tokens.unbind(-1)
    return ids.clamp(min=0), wrote == 1, ids >= 0


def predictions(
    model: Any, ids: torch.Tensor, wrote: torch.Tensor, ends: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (B, K, V) where a label follows, labels (B, K), positions (K,); ids, wrote (B, T).

    The output layer is wide and most tokens are only read. So of the T positions K are computed:
    those before a token that the agent wrote in any row, and with `ends` those where its turn ends.
    """
    labels = ids.masked_fill(~wrote, -100)  # instruction, observations and padding are context
    needed = wrote[:, 1:]
    if ends:
        needed = needed | wrote[:, :-1]
    at = needed.any(0).nonzero()[:, 0]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=at).logits
    return logits, labels[:, at + 1], at


def sft_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-sum_t log pi(a_t | s_t) over the tokens that have a label: (B, K, V), (B, K) -> ()."""
    rows = logits.flatten(0, 1).float()
    return cross_entropy(rows, labels.flatten(), ignore_index=-100, reduction="sum")  # Eq. (5)


def train(agent: Any, examples: list[Example], validation: list[Example], args: Any) -> dict:
    """Maximise the likelihood of what the expert wrote, given its history. Returns figures."""
    progress = Progress(agent, args, [1] * len(examples))
    accelerator, model, optimizer = progress.accelerator, progress.model, progress.optimizer
    while not progress.finished:
        model.train()
        for update in progress.updates():
            batch = [examples[i] for i in update]
            micro = micro_batches(batch, len, args.micro_tokens)
            groups = [collate(group, model.device) for group in micro]
            n_wrote = sum(int(wrote[:, 1:].sum()) for _, wrote, _ in groups)
            n_answers = sum(int(answers(wrote, real).sum()) for _, wrote, real in groups)
            loss = 0.0
            for (ids, wrote, real), weight in progress.share(groups):  # gradient accumulation
                logits, labels, at = predictions(model, ids, wrote, ends=args.observation_loss > 0)
                part = sft_loss(logits, labels) / n_wrote
                if args.observation_loss and n_answers:
                    answer_loss = observation_loss(logits, at, ids, wrote, real)
                    part += args.observation_loss * answer_loss / n_answers
                accelerator.backward(weight * part)
                loss += part.item() if weight else 0.0
            progress.average_gradients()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss = progress.total(loss, norm)
            for parameters in optimizer.param_groups:
                parameters["lr"] = args.lr * cosine(progress.step, progress.steps)
            optimizer.step()
            optimizer.zero_grad()
            progress.end_update(loss, tokens=sum(ids.numel() for ids, _, _ in groups))
        progress.end_epoch(validate(model, validation, args.micro_tokens))
    return progress.end()


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int) -> float | None:
    """The loss per token, given the expert's own history; None without examples."""
    model.eval()
    loss, n_wrote = 0.0, 0
    for group in micro_batches(examples, len, micro_tokens):
        ids, wrote, _ = collate(group, model.device)
        logits, labels, _ = predictions(model, ids, wrote)
        loss += sft_loss(logits, labels).item()
        n_wrote += int(wrote[:, 1:].sum())
    return loss / n_wrote if examples else None


# --------------------------------------------------------------------------------------------- main


def read(env: envs.TextEnv, args: argparse.Namespace, process: Any) -> tuple[list[State], dict]:
    """The demonstrations to clone, and the first messages that they share: {} for the environment's
    own expert, who plays what is missing of RUN/expert.jsonl."""
    if args.model == "tiny":
        args.n_expert = args.n_expert or env.demonstrations
    named = args.expert is not None
    args.expert = args.expert or args.run / "expert.jsonl"
    if process.is_main_process and not named:
        collect(env, args)
    process.wait_for_everyone()
    states = published.demonstrations(env, args.expert, args.n_expert)
    return states, published.first_messages(env, states) if named else {}


def load(args: argparse.Namespace, env: envs.TextEnv, states: list[State]) -> tuple:
    """The model that is to be cloned, its chat, and PEFT's view of LoRA's updates (None: none)."""
    torch.manual_seed(args.seed)
    if args.model == "tiny":
        model, tokenizer = tiny_model(text for state in states for _, text in state.messages)
        model.to(models.device_and_dtype(args.device)[0])
        chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))
    else:
        loading = args.model, AutoModelForCausalLM, args.device, args.load_in
        options = {"train": not args.lora, "plain": True, "precision": args.precision}
        model, chat = models.load_checkpoint(*loading, **options)
    memory = args.lora, args.lora_alpha, args.gradient_checkpointing
    return model, chat, models.save_memory(model, *memory)


def tokenize(
    chat: Chat, states: list[State], args: argparse.Namespace, process: Any
) -> tuple[list[Example], list[Example]]:
    """The examples to train on and to validate. Says how many --max-tokens leaves out or cuts."""
    limit = min(args.max_tokens, chat.context)
    examples, validation = (
        list(examples_of(chat, part, limit, args.observation_loss > 0)) for part in hold_out(states)
    )
    if not examples:
        raise UserError(f"{args.expert}: no action within {limit} tokens (--max-tokens)")
    lost = len(states) - len(examples) - len(validation)
    cut = len([example for example in examples if len(example) == limit])
    if (lost or cut) and not chat.rendering.markov:
        facts = f"{lost} have no action within {limit} tokens, {cut} are cut there"
        process.print(f"of {len(states)} demonstrations {facts} (--max-tokens)")
    return examples, validation


def settings_of(args: argparse.Namespace, examples: int) -> dict[str, Any]:
    """What no flag has set: the paper's, or the tiny model's for so many examples."""
    if args.model != "tiny":
        return PAPER | ({"lr": cli.LORA_LR} if args.lora else {})
    batch = args.batch or min(TINY["batch"], math.ceil(examples / 4))
    epochs = max(TINY["epochs"], math.ceil(UPDATES / math.ceil(examples / batch)))
    return TINY | {"batch": batch, "epochs": epochs}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    tiny = cli.as_flags(TINY)
    epilog = f"Defaults: {cli.as_flags(PAPER)}; of the tiny model {tiny}."
    parser = cli.parser(__doc__, epilog=epilog)
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, a HuggingFace name or path, or a GGUF file (tiny)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=cli.at_least(1), metavar="N", help="trajectories (all; tiny: fewer)")
    cli.add_training(parser, "trajectories")
    add("--max-tokens", type=cli.at_least(2), default=4096, metavar="N", help="cut there (4096)")
    add("--candidates", choices=["free", "valid"], help="what the agent may write (tiny: valid)")
    weight = "weight of predicting what follows an action (0)"
    add("--observation-loss", type=cli.at_least(0, float), default=0.0, metavar="W", help=weight)
    add("--device")
    args = cli.parse(parser, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; name another --model")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.out = files.checkpoint_folder(args.out or args.run / "sft", args.model)
    with training.processes(args.out, args.device) as process:
        states, first = read(env, args, process)
        model, chat, adapter = load(args, env, states)
        chat.rendering = dataclasses.replace(chat.rendering, **first)
        examples, validation = tokenize(chat, states, args, process)
        cli.settle(args, settings_of(args, len(examples)))
        chat.rendering.candidates = args.candidates
        if not training.begin(args, [args.expert]):
            return
        figures = train(model, examples, validation, args)
        if process.is_main_process:
            dtype = models.PRECISIONS[args.precision]
            models.save_checkpoint(model, chat, args.out, adapter, dtype)
            tasks = published.tasks_of(args.expert, env, args.n_expert)
            figures["tasks"] = published.learned_tasks(tasks, args.model, vars(args))
            figures["trajectories"] = len(states)
            metadata.write_meta(args.out, vars(args), [args.expert], **figures)
            print(f"{args.out}: {len(states)} trajectories, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    cli.run_stage(main)
