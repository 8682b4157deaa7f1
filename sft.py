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
from qlass.cli import at_least, choices, more, parse, settle
from qlass.fast.logits import predictions as predictions_that_count
from qlass.fast.token_tree import batches
from qlass.files import checkpoint_folder, only_writer, release
from qlass.flags import add_training, check_training
from qlass.loop import Training, finish, is_trained
from qlass.records import agreed, read_trajectories
from qlass.tiny import AIDS, observation_loss, tiny_model

PAPER = {"n_expert": None, "epochs": 3, "lr": 1e-5, "batch": 64, "candidates": "free", "micro_tokens": 8192}  # Table 5
TINY = {"epochs": 12, "lr": 3e-3, "batch": 16, "candidates": "valid", "micro_tokens": 2048}
TINY_STEPS = 200  # few demonstrations are repeated until so many updates are made
TAKES = "about two minutes with the tiny model on two cores"

# ------------------------------------------------------------------------------------------------- expert trajectories


def demonstrate(env: envs.TextEnv, task_id: str) -> dict:
    """Play the environment's expert through one task: a line of expert.jsonl."""
    observation, info = env.reset(options={"task_id": task_id})
    state, reward = State.first(env, observation, info), 0.0
    for thought, action in env.expert(task_id):
        observation, reward, terminated, truncated, _ = env.step(action)
        state = state.then(react(thought, action), env.message(observation))
        if terminated or truncated:
            break
    # The last observation answers nothing that a policy could learn from.
    messages = State(state.messages[:-1], state.task).dump()
    return {"task_id": task_id, "env": env.name, "task": state.task, "messages": messages, "reward": float(reward)}


def collect(env: envs.TextEnv, path: Path, limit: int | None, arguments: dict[str, Any], overwrite: bool) -> Path:
    """expert.jsonl: the first `limit` training tasks, those that an earlier call played before included.

    arguments: all that they depend on. overwrite: play them again, but for a file that is another's.
    """
    tasks = env.task_ids("train")
    arguments |= {"out": path, "overwrite": overwrite and files.meta_path(path).exists()}

    def in_order(lines: list[dict]) -> int:
        if [line["task_id"] for line in lines] != tasks[: len(lines)]:
            raise ValueError("other demonstrations (--expert trains on them; delete the file to play them again)")
        return len(lines)

    out = files.Output(path, arguments, in_order)
    todo = tasks[len(out.records) : limit]
    out.grow(([demonstrate(env, task_id)] for task_id in todo), "expert", len(tasks[:limit]), len(out.records))
    out.finish()
    return path


def opening(state: State) -> tuple[tuple[str, str], ...]:
    """Instruction, OK and first observation, behind a system message where there is one."""
    return state.messages[: 3 + (state.messages[0][0] == "system")]


def first_messages(env: envs.TextEnv, states: list[State]) -> dict[str, str]:
    """System message, instruction and agreement that demonstrations share, where they are not the environment's own.

    What differs from one to the other tells the task, as the environment does at inference.
    """
    beginnings = []
    for state in states:
        messages = [content for _, content in state.messages[:3]]
        if agreed(state.messages):
            beginnings.append(messages if state.messages[0][0] == "system" else ["", *messages[:2]])
    own = {"system": env.system, "instruction": env.instruction, "agreement": env.agreement}
    shared = zip(own.items(), zip(*beginnings, strict=True), strict=False)
    return {name: words[0] for (name, ours), words in shared if len(set(words)) == 1 and words[0] != ours}


def tell_what_differs(path: Path, states: list[State]) -> None:
    """A line where only some demonstrations have a system message, or another one: inference begins without."""
    systems = {state.messages[0] if state.messages[0][0] == "system" else None for state in states}
    if len(systems) > 1:
        print(f"warning: {path}: system messages differ, so that at inference the agent gets none", file=sys.stderr)


def in_own_words(env: envs.TextEnv, state: State) -> State:
    """A demonstration as the environment words actions and answers."""
    return State(tuple((role, env.in_own_words(content)) for role, content in state.messages), state.task)


def hold_out(states: list[State]) -> tuple[list[State], list[State]]:
    """Demonstrations to train on, and those of every twentieth task to validate (at least 16; of under 64, none)."""
    tasks = list(dict.fromkeys(map(opening, states)))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    return [s for s in states if opening(s) not in held_out], [s for s in states if opening(s) in held_out]


# ------------------------------------------------------------------------------------------------- behaviour cloning

Example = tuple[list[int], list[bool]]  # tokens, and which of them the agent wrote


def tokens_and_mask(chat: Chat, state: State, limit: int) -> Example:
    """The trajectory's tokens and which of them the agent wrote (Eq. 5's a_t, and OK), cut at `limit`."""
    ids: list[int] = []
    wrote: list[bool] = []
    runs = chat.message_tokens(state)
    for (role, _), run in zip(state.messages[len(state.messages) - len(runs) :], runs, strict=True):
        ids += run
        wrote += [role == "assistant"] * len(run)
    return ids[: chat.context][:limit], wrote[: chat.context][:limit]


def examples_of(chat: Chat, state: State, limit: int, answered: bool = False) -> Iterator[Example]:
    """One example a trajectory or, where an observation says all, one an action; the latter are followed by the next
    observation if `answered`."""
    length = len(state.messages)
    for n in range(len(opening(state)) + 1, length + 1, 2) if chat.rendering.markov else [length]:
        ids, wrote = tokens_and_mask(chat, State(state.messages[:n], state.task), limit)
        if answered and n < length:
            answer, read = tokens_and_mask(chat, State(state.messages[: n + 1], state.task), limit)
            ids, wrote = ids + answer, wrote + read
        if any(wrote[1:]):
            yield ids, wrote


def examples_for(
    chat: Chat, states: list[State], limit: int, answered: bool
) -> tuple[list[Example], list[Example], int]:
    """Examples to train on, to validate on, and how many of the former are cut at `limit` or the model's context."""
    parts = hold_out(states)
    training, validation = ([e for s in part for e in examples_of(chat, s, limit, answered)] for part in parts)
    limit = min(limit, chat.context or limit)
    if not training:
        raise UserError(f"no trajectory holds an action within {limit} tokens (--max-tokens, or the model's context)")
    return training, validation, sum(len(ids) == limit for ids, _ in training)


def collate(examples: list[Example], device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, which of them the agent wrote, and which are no padding, (B, T) each.

    Padding is on the right and attention is causal: nothing that counts can see it, so any token will do.
    """
    ids, wrote = ([torch.tensor(part) for part in parts] for parts in zip(*examples, strict=True))
    ids, wrote = pad_sequence(ids, True, -1).to(device), pad_sequence(wrote, True, False).to(device)
    return ids.clamp(min=0), wrote, ids >= 0


def predictions(
    model: Any, ids: torch.Tensor, labels: torch.Tensor, fast: bool = True, ends: bool = False
) -> tuple[torch.Tensor, ...]:
    """Logits (B, T - 1, V) of what follows each token, their labels (B, T - 1), positions (T - 1,). Tokens (B, T).

    fast: where no row has a label they are left out, but (`ends`) for those behind an action.
    """
    if fast:
        return predictions_that_count(model, ids, labels, ends)
    logits = model(input_ids=ids, use_cache=False).logits
    return logits[:, :-1], labels[:, 1:], torch.arange(ids.shape[1] - 1, device=ids.device)


def sft_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-sum_t log pi(a_t | s_t) over the tokens that have a label: (B, K, V), (B, K) -> ()."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")  # Eq. (5)


def train(
    fit: Training, examples: list[Example], validation: list[Example], micro_tokens: int,
    observation_weight: float = 0.0, fast: bool = True,
) -> None:  # fmt: skip
    """Maximise the likelihood of what the expert wrote, given its history."""
    for _ in fit.epochs():
        for update in fit.updates():
            batch = [examples[i] for i in update]
            n_wrote = sum(sum(wrote[1:]) for _, wrote in batch)
            n_read = sum(wrote[wrote.index(True) :].count(False) for _, wrote in batch)  # behind an action
            for group in fit.share(list(batches(batch, lambda e: len(e[0]), micro_tokens))):  # gradient accumulation
                ids, wrote, real = collate([batch[i] for i in group], fit.model.device)
                labels = ids.masked_fill(~wrote, -100)  # instruction, observations and padding are context
                logits, targets, at = predictions(fit.model, ids, labels, fast, ends=bool(observation_weight))
                loss = sft_loss(logits, targets) / n_wrote
                if observation_weight and n_read:
                    loss += observation_weight * observation_loss(logits, at, ids, wrote, real) / n_read
                fit.backward(loss, ids.numel())
            fit.step()
        figures = validate(fit.model, validation, micro_tokens, fast)
        fit.validated(-figures["held_out_loss"] if figures else None, figures)


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int, fast: bool = True) -> dict:
    """Loss a token, and the share of actions whose every token is the likeliest, given the expert's own history."""
    if not examples:
        return {}
    model.eval()
    loss, tokens, actions, exact = 0.0, 0, 0, 0
    for group in batches(examples, lambda e: len(e[0]), micro_tokens):
        ids, wrote, _ = collate([examples[i] for i in group], model.device)
        labels = ids.masked_fill(~wrote, -100)
        logits, targets, at = predictions(model, ids, labels, fast)
        loss += sft_loss(logits, targets).item()
        tokens += int(wrote[:, 1:].sum())
        wrong = (logits.argmax(-1) != targets) & (targets != -100)
        turn = (wrote[:, 1:] & ~wrote[:, :-1]).cumsum(-1)  # (B, T - 1): which of its row's actions a token belongs to
        actions += int(turn[:, -1].sum())
        for n, row, mistaken in zip(turn[:, -1].tolist(), turn[:, at], wrong, strict=True):
            exact += n - len(set(row[mistaken].tolist()))
    return {"held_out_loss": loss / tokens, "held_out_exact": exact / actions}


# --------------------------------------------------------------------------------------------------------------- main


def to_train(
    name: str, texts: list[str], markov: bool, device: str | None, load_in: str | None = None, float32: bool = False,
    precision: str | None = None,
) -> tuple[Any, Chat]:  # fmt: skip
    """The model before its first update: the tiny one with the words of `texts`, or a checkpoint."""
    if name != "tiny":
        kind = transformers.AutoModelForCausalLM
        return models.load_checkpoint(name, kind, device, load_in, float32, True, precision=precision)
    model, tokenizer = tiny_model(texts)
    return model.to(models.device_and_dtype(device)[0]), Chat(tokenizer, Rendering(**AIDS, markov=markov))


def length(examples: int, batch: int | None, epochs: int | None) -> dict[str, int]:
    """Trajectories an update and epochs: what was asked for, else as suits the tiny model."""
    batch = batch or min(TINY["batch"], math.ceil(examples / 4))
    enough = math.ceil(TINY_STEPS / math.ceil(examples / batch))
    return {"batch": batch, "epochs": epochs or max(TINY["epochs"], enough)}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = cli.parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 3 epochs.")
    envs.add_arguments(flags, argv)
    add, default = flags.add_argument, choices(PAPER, TINY)
    add("--model", default="tiny", help="tiny, a HuggingFace name or path, or a GGUF file (default: %(default)s)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=at_least(1), help="number of trajectories (default: all; tiny: the environment's own)")
    add("--epochs", type=at_least(1), help=f"at most ({default('epochs')}, or what 200 updates take)")
    add("--lr", type=at_least(0, float), help=f"{default('lr')}; with --lora {models.LR}")
    add("--batch", type=at_least(1), help=f"trajectories an update ({default('batch')})")
    add("--max-tokens", type=at_least(2), default=4096, help="longer trajectories are cut (default: %(default)s)")
    add("--micro-tokens", type=at_least(1), help=f"padded tokens in memory at once ({default('micro_tokens')})")
    add("--candidates", choices=["free", "valid"], help=f"which actions the policy may write ({default('candidates')})")
    answer = "weight of predicting the next observation where an action ends (default: %(default)s)"
    add("--observation-loss", type=at_least(0, float), default=0.0, metavar="W", help=answer)
    plain = "all tokens' logits, for models that give no fewer"
    more(flags, add_training, lambda group: group.add_argument("--plain", action="store_true", help=plain))
    add("--device")
    args = parse(flags, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; leave it out, or name another --model")
    check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    tiny = TINY | {"epochs": None, "batch": None, "n_expert": env.demonstrations}  # for the first two see `length`
    settle(args, tiny if args.model == "tiny" else PAPER | ({"lr": models.LR} if args.lora else {}))
    if args.model.startswith((".", "/")) or args.model.endswith(".gguf"):  # no hub name
        cli.must_exist(Path(args.model))
    args.out = checkpoint_folder(args.out or args.run / "sft", args.model)
    process = loop.start(args.device)
    lock = only_writer(args.out) if process.is_main_process else None
    torch.manual_seed(args.seed)

    named = args.expert is not None  # else its environment's own words are the agent's
    with process.main_process_first():
        world = {name: getattr(args, name) for name in ("env", "run", *args.env_flags)}
        overwrite = args.overwrite and process.is_main_process
        args.expert = args.expert or collect(env, args.run / "expert.jsonl", args.n_expert, world, overwrite)
    trajectories = list(itertools.islice(read_trajectories(args.expert), args.n_expert))
    if not trajectories:
        raise UserError(f"{args.expert}: no trajectories")
    states = [in_own_words(env, state) for state, _ in trajectories]
    if reworded := sum(ours != theirs for ours, (theirs, _) in zip(states, trajectories, strict=True)):
        process.print(f"{reworded} of {len(states)} demonstrations are put in this environment's words")
    if is_trained(vars(args), [args.expert]):
        return release(lock)

    def begin() -> tuple[Any, Chat, Any]:
        texts = [content for state in states for _, content in state.messages]
        model, chat = to_train(args.model, texts, env.markov, args.device, args.load_in, not args.lora, args.precision)
        return model, chat, models.save_memory(model, args.lora, args.lora_alpha, args.gradient_checkpointing)

    model, chat, adapter = begin()
    beginning = first_messages(env, states) if named else {}
    tell_what_differs(args.expert, states)
    chat.rendering = dataclasses.replace(chat.rendering, candidates=args.candidates, **beginning)
    examples, validation, cut = examples_for(chat, states, args.max_tokens, args.observation_loss > 0)
    if cut:
        process.print(f"{cut} of {len(examples)} demonstrations are cut (--max-tokens, the model's context)")
    settings = vars(args) | length(len(examples), args.batch, args.epochs)
    process.print(models.memory_of(model, args.optim))
    optimizer = models.adamw(model.parameters(), args.lr, args.optim)
    fit = Training("sft", model, optimizer, settings, [1] * len(examples))
    with models.within_memory(), fit.bar:
        train(fit, examples, validation, args.micro_tokens, args.observation_loss, fast=not args.plain)
    model, _, adapter = fit.result((model, chat, adapter), begin)
    if not process.is_main_process:
        return

    if not adapter:
        models.cast(model, models.device_and_dtype(args.device, args.precision)[1])  # as later stages load it
    models.save_checkpoint(
        model,
        chat,
        args.out,
        adapter,
        lambda: to_train(args.model, [], False, args.device, precision=args.precision)[0],
    )
    rewards = [record["reward"] for _, record in trajectories if record.get("reward") is not None]
    figures = fit.figures() | {"trajectories": len(trajectories), "cut_trajectories": cut}
    figures |= {"expert_reward": sum(rewards) / len(rewards) if rewards else None}
    figures |= {name: settings[name] for name in ("epochs", "batch")}
    files.write_meta(args.out, vars(args), [args.expert], **figures)
    finish(args.out)
    release(lock)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.out}: {size:.2f} M parameters, {len(trajectories)} trajectories, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    cli.run_stage(main)
