"""Stage 1: behaviour cloning (Eq. 5).

    reads   expert trajectories: --expert FILE (ours or ETO's layout), or played now by the environment's expert
    writes  RUN/expert.jsonl (where it played them), RUN/sft/ (a HuggingFace checkpoint with its tokenizer)

    python sft.py --env webshop                                            # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

The loss is the cross-entropy of the tokens that the agent writes; instruction, observations and padding are context.
`--model tiny` is a Llama of about a million parameters at most, with a tokenizer of its own. Both are trained here, and
it reads with the aids of `tiny.AIDS`. Any other model keeps its tokenizer, its chat template and the paper's rendering.
--observation-loss teaches the tiny model what a pretrained one knows: what follows an action (docs/differences.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import envs
from qlass import UserError, cli, files, loop, models
from qlass.chat import Chat, Rendering, State, react
from qlass.cli import at_least, settle
from qlass.flags import LORA_LR, add_training, check_training
from qlass.loop import Training, micro_batches
from qlass.records import agreed, read_trajectories
from qlass.tiny import AIDS, answers, observation_loss, tiny_model

PAPER = {"epochs": 3, "lr": 1e-5, "batch": 64, "candidates": "free", "micro_tokens": 8192}  # Table 5
TINY = {"epochs": 12, "lr": 3e-3, "batch": 16, "candidates": "valid", "micro_tokens": 2048}
UPDATES = 200  # of the tiny model at least: fewer demonstrations are read more often

# ------------------------------------------------------------------------------------------------- expert trajectories


def demonstrate(env: envs.TextEnv, task_id: str) -> dict:
    """Play the environment's expert through one task: a line of expert.jsonl."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)
    for thought, action in env.expert(task_id):
        observation, reward, terminated, truncated, _ = env.step(action)
        written = State((*state.messages, ("assistant", react(thought, action))), state.task)
        if terminated or truncated:
            break
        state = state.then(react(thought, action), env.message(observation))
    return {
        "task_id": task_id, "env": env.name, "task": state.task, "messages": written.dump(), "reward": float(reward)
    }  # fmt: skip


def collect(env: envs.TextEnv, path: Path, limit: int | None, arguments: dict[str, Any]) -> None:
    """expert.jsonl: the first `limit` training tasks, those that an earlier call played before included.

    arguments: all that they depend on.
    """
    tasks = env.task_ids("train")
    out = files.Output(path, arguments, len)
    todo = tasks[len(out.records) : limit]
    out.grow(([demonstrate(env, task_id)] for task_id in todo), "expert", len(tasks[:limit]), len(out.records))
    out.finish()


def demonstrations(env: envs.TextEnv, path: Path, limit: int | None) -> list[State]:
    """The first `limit` trajectories of a file, actions and answers worded as the environment words them."""
    trajectories = list(itertools.islice(read_trajectories(path), limit))
    if failed := sum(record.get("reward") == 0 for _, record in trajectories):
        print(f"{failed} of {len(trajectories)} demonstrations earned nothing")
    states = [state for state, _ in trajectories]
    return [State(tuple((role, env.in_own_words(text)) for role, text in s.messages), s.task) for s in states]


def opening(state: State) -> tuple[tuple[str, str], ...]:
    """Instruction, OK and first observation, after a system message where there is one."""
    return state.messages[: 3 + (state.messages[0][0] == "system")]


def first_messages(env: envs.TextEnv, states: list[State]) -> dict[str, str]:
    """System message, instruction and agreement that demonstrations share, where they are not the environment's own."""
    own = {"system": env.system, "instruction": env.instruction, "agreement": env.agreement}
    messages = [[text for _, text in opening(state)[:-1]] for state in states if agreed(state.messages)]
    columns = zip(*(texts if len(texts) == 3 else ["", *texts] for texts in messages), strict=True)
    shared = {name: texts[0] for name, texts in zip(own, columns, strict=False) if len(set(texts)) == 1}
    if len(messages) < len(states):
        begin = "begin without an instruction and the agent's OK, which a prompt has at inference"
        print(f"warning: {len(states) - len(messages)} of {len(states)} demonstrations {begin}", file=sys.stderr)
    for name in own:
        if messages and name not in shared:
            print(f"warning: their first {name} differs, so a prompt has the environment's own", file=sys.stderr)
    return {name: text for name, text in shared.items() if text != own[name]}


def hold_out(states: list[State]) -> tuple[list[State], list[State]]:
    """Demonstrations to train on, and those of every twentieth task to validate (at least 16; of under 64, none)."""
    tasks = list(dict.fromkeys(map(opening, states)))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    return [s for s in states if opening(s) not in held_out], [s for s in states if opening(s) in held_out]


# ------------------------------------------------------------------------------------------------- behaviour cloning

Example = list[tuple[int, bool]]  # tokens, and whether the agent wrote them


def tokens_and_mask(chat: Chat, state: State, limit: int) -> Example:
    """A trajectory's tokens, cut at `limit`; the agent wrote Eq. (5)'s a_t, and OK."""
    runs = chat.message_tokens(state)
    messages = state.messages[len(state.messages) - len(runs) :]
    tokens = [(t, role == "assistant") for (role, _), run in zip(messages, runs, strict=True) for t in run]
    return tokens[:limit]


def examples_of(chat: Chat, states: list[State], limit: int, answered: bool = False) -> Iterator[Example]:
    """One example a trajectory or, where an observation says all, one an action; the latter are followed by the next
    observation if `answered`."""
    for state in states:
        length = len(state.messages)
        for n in range(len(opening(state)) + 1, length + 1, 2) if chat.rendering.markov else [length]:
            example = tokens_and_mask(chat, State(state.messages[:n], state.task), limit)
            if answered and n < length:
                example += tokens_and_mask(chat, State(state.messages[: n + 1], state.task), limit)
            if any(wrote for _, wrote in example[1:]):
                yield example


def collate(examples: list[Example], device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, which of them the agent wrote, and which are no padding, (B, T) each.

    Padding is on the right and attention is causal: nothing that counts can see it, so any token will do.
    """
    tokens = pad_sequence([torch.tensor(example) for example in examples], True, -1).to(device)  # (B, T, 2)
    ids, wrote = tokens.unbind(-1)
    return ids.clamp(min=0), wrote == 1, ids >= 0


def predictions(
    model: Any, ids: torch.Tensor, wrote: torch.Tensor, ends: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the model expects after each token: logits (B, K, V), labels (B, K), positions (K,); ids, wrote (B, T).

    The output layer is wide and most tokens are only read, so of the T positions those K are computed that stand before
    a token that the agent wrote, in any row, or (`ends`) where its turn has just ended.
    """
    labels = ids.masked_fill(~wrote, -100)  # instruction, observations and padding are context
    at = (wrote[:, 1:] | wrote[:, :-1] & ends).any(0).nonzero()[:, 0]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=at).logits
    return logits, labels[:, at + 1], at


def sft_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-sum_t log pi(a_t | s_t) over the tokens that have a label: (B, K, V), (B, K) -> ()."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")  # Eq. (5)


def train(
    fit: Training, examples: list[Example], validation: list[Example], micro_tokens: int, answer_weight: float = 0.0
) -> None:
    """Maximise the likelihood of what the expert wrote, given its history; answer_weight: --observation-loss."""
    model = fit.model
    for _ in fit.epochs():
        model.train()
        for batch in fit.batches(examples):
            groups = [collate(group, model.device) for group in micro_batches(batch, len, micro_tokens)]
            n_wrote = sum(int(wrote[:, 1:].sum()) for _, wrote, _ in groups)
            n_answers = sum(int(answers(wrote, real).sum()) for _, wrote, real in groups)
            for ids, wrote, real in fit.share(groups):  # gradient accumulation
                logits, labels, at = predictions(model, ids, wrote, ends=bool(answer_weight))
                loss = sft_loss(logits, labels) / n_wrote
                if answer_weight and n_answers:
                    loss += answer_weight * observation_loss(logits, at, ids, wrote, real) / n_answers
                fit.backward(loss)
            fit.step(tokens=sum(ids.numel() for ids, _, _ in groups))
        fit.end_epoch(validate(model, validation, micro_tokens))


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int) -> float | None:
    """The loss a token, given the expert's own history; None without examples."""
    model.eval()
    loss, n_wrote = 0.0, 0
    for group in micro_batches(examples, len, micro_tokens):
        ids, wrote, _ = collate(group, model.device)
        logits, labels, _ = predictions(model, ids, wrote)
        loss += sft_loss(logits, labels).item()
        n_wrote += int(wrote[:, 1:].sum())
    return loss / n_wrote if examples else None


# --------------------------------------------------------------------------------------------------------------- main


def settings_of(examples: int, batch: int | None) -> dict[str, Any]:
    """The tiny model's settings for so many examples, in batches of `batch` if that is given."""
    batch = batch or min(TINY["batch"], math.ceil(examples / 4))
    return TINY | {"batch": batch, "epochs": max(TINY["epochs"], math.ceil(UPDATES / math.ceil(examples / batch)))}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = cli.parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 3 epochs.")
    envs.add_arguments(flags, argv)
    add = flags.add_argument
    add("--model", default="tiny", help="tiny, a HuggingFace name or path, or a GGUF file (default: %(default)s)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=at_least(1), help="number of trajectories (default: all; tiny: the environment's own)")
    add_training(flags, PAPER, TINY | {"epochs": "12 or more"}, "trajectories")
    add("--max-tokens", type=at_least(2), default=4096, help="longer trajectories are cut (default: %(default)s)")
    add("--candidates", choices=["free", "valid"], help="which actions the policy may write (tiny: valid)")
    add(
        "--observation-loss",
        type=at_least(0, float),
        default=0.0,
        metavar="W",
        help="weight of predicting what follows an action",
    )
    add("--device")
    args = cli.parse(flags, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; leave it out, or name another --model")
    check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    tiny = args.model == "tiny"
    args.n_expert = args.n_expert or (env.demonstrations if tiny else None)
    args.out = files.checkpoint_folder(args.out or args.run / "sft", args.model)
    with loop.processes(args.out, args.device) as process:
        named = args.expert is not None  # else its first messages are the environment's own
        if not named:
            args.expert = args.run / "expert.jsonl"
            if process.is_main_process:
                world = {name: getattr(args, name) for name in ("env", "run", "overwrite", *args.env_flags)}
                collect(env, args.expert, args.n_expert, world)
            process.wait_for_everyone()
        states = demonstrations(env, args.expert, args.n_expert)

        torch.manual_seed(args.seed)
        if tiny:
            model, tokenizer = tiny_model(text for state in states for _, text in state.messages)
            model.to(models.device_and_dtype(args.device)[0])
            chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))
        else:
            kind = transformers.AutoModelForCausalLM
            how = {"train": not args.lora, "plain": True, "precision": args.precision}
            model, chat = models.load_checkpoint(args.model, kind, args.device, args.load_in, **how)
        adapter = models.save_memory(model, args.lora, args.lora_alpha, args.gradient_checkpointing)
        beginning = first_messages(env, states) if named else {}
        chat.rendering = dataclasses.replace(chat.rendering, **beginning)
        limit = min(args.max_tokens, chat.context or args.max_tokens)
        parts = hold_out(states)
        examples, validation = (list(examples_of(chat, part, limit, args.observation_loss > 0)) for part in parts)
        if not examples:
            raise UserError(f"{args.expert}: no action within {limit} tokens (--max-tokens)")
        lost = 0 if chat.rendering.markov else len(states) - len(examples) - len(validation)
        if lost:
            process.print(f"{lost} of {len(states)} demonstrations have no action within {limit} tokens (--max-tokens)")
        if cut := sum(len(example) == limit for example in examples):
            process.print(f"{cut} of {len(examples)} demonstrations are cut after {limit} tokens (--max-tokens)")
        settle(args, settings_of(len(examples), args.batch) if tiny else PAPER | ({"lr": LORA_LR} if args.lora else {}))
        chat.rendering.candidates = args.candidates
        if not loop.begin(vars(args), [args.expert]):
            return
        fit = Training(model, vars(args), [1] * len(examples))
        train(fit, examples, validation, args.micro_tokens, args.observation_loss)
        if process.is_main_process:
            models.save_checkpoint(model, chat, args.out, adapter, fit.dtype)
            figures = fit.figures() | {"trajectories": len(states)}
            files.write_meta(args.out, vars(args), [args.expert], **figures)
            print(f"{args.out}: {len(states)} trajectories, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    cli.run_stage(main)
