"""Stage 1: behaviour cloning (Eq. 5).

    reads   expert trajectories: --expert FILE (ours or ETO's layout), or played now by the environment's expert
    writes  RUN/expert.jsonl (where it played them), RUN/sft/ (a HuggingFace checkpoint with its tokenizer)

    python sft.py --env webshop                                            # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

The loss is the cross-entropy of the tokens that the agent writes; instruction, observations and padding are context.
`--model tiny` is a Llama of about a million parameters at most, with a tokenizer of its own. Both are trained here, and
it reads with the aids of `chat.Rendering`. Any other model keeps its tokenizer, its chat template and the paper's
rendering.
--observation-loss teaches the tiny model what a pretrained one knows: what follows an action (docs/differences.md).
"""

from __future__ import annotations

import argparse
import copy
import math
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
from qlass.cli import at_least, choices, more, parse, parser, settle
from qlass.driver import in_time
from qlass.fast.token_tree import batches
from qlass.files import checkpoint_folder, only_writer, read_trajectories, release
from qlass.loop import Training, finish, is_trained
from qlass.memory import check_memory, estimate
from qlass.tiny import AIDS, observation_loss, tiny_model

PAPER = {"n_expert": None, "epochs": 3, "lr": 1e-5, "batch": 64, "candidates": "free", "micro_tokens": 8192}  # Table 5
TINY = {"epochs": 12, "lr": 3e-3, "batch": 16, "candidates": "valid", "micro_tokens": 2048}
TINY_STEPS = 200  # few demonstrations are repeated until so many updates are made
TAKES = "about two minutes with the tiny model on two cores"

# ------------------------------------------------------------------------------------------------- expert trajectories


@in_time()
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


def collect(env: envs.TextEnv, args: argparse.Namespace) -> Path:
    """expert.jsonl: the first `--n-expert` training tasks, those that an earlier call played before included."""
    tasks = env.task_ids("train")
    about = {name: getattr(args, name) for name in ("env", "run", *args.env_flags)}  # all that they depend on
    path = args.run / "expert.jsonl"
    again = args.overwrite and loop.first() and files.meta_path(path).exists()  # a file of another's is kept
    asked = about | {"out": path, "overwrite": again}

    def in_order(lines: list[dict]) -> int:
        if [line["task_id"] for line in lines] != tasks[: len(lines)]:
            raise ValueError("other demonstrations (--expert trains on them; delete the file to play them again)")
        return len(lines)

    out = files.Output(path, asked, in_order)
    todo = tasks[len(out.records) : args.n_expert]
    out.grow(([demonstrate(env, task_id)] for task_id in todo), "expert", len(tasks[: args.n_expert]), len(out.records))
    out.finish()
    return out.path


# ----------------------------------------------------------------------------------------------------------- training


def tokens_and_mask(chat: Chat, state: State, limit: int) -> tuple[list[int], list[bool]]:
    """The trajectory's tokens and which of them the agent wrote (Eq. 5's a_t, and OK), cut at `limit`."""
    ids: list[int] = []
    wrote: list[bool] = []
    runs = chat.message_tokens(state)
    for (role, _), run in zip(state.messages[len(state.messages) - len(runs) :], runs, strict=True):
        ids += run
        wrote += [role == "assistant"] * len(run)
    return ids[: chat.context][:limit], wrote[: chat.context][:limit]


def columns(wrote: torch.Tensor, ends: bool = False) -> torch.Tensor:
    """The K positions whose prediction counts (the output layer is wide): those before a token that the agent wrote in
    some row and, with `ends`, those where its turn has just ended. (B, T) -> (K,)."""
    return (wrote[:, 1:] | wrote[:, :-1] & ends).any(0).nonzero()[:, 0]


def predictions(model: Any, ids: torch.Tensor, wrote: torch.Tensor, ends: bool = False) -> tuple[torch.Tensor, ...]:
    """Logits (B, K, V) at `columns` and their targets (B, K), -100 where the agent did not write. Tokens (B, T)."""
    targets, kept = ids[:, 1:].masked_fill(~wrote[:, 1:], -100), columns(wrote, ends)
    return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits, targets[:, kept]


def sft_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Eq. (5): -sum_t log pi(a_t | s_t), summed over the agent's tokens. (B, K, V), (B, K) -> ()."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


def hold_out(states: list[State]) -> tuple[list[State], list[State]]:
    """Demonstrations to train on, and those of every twentieth task to validate (at least 16; of under 64, none)."""
    tasks = list(dict.fromkeys(map(opening, states)))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held = {tasks[i * len(tasks) // n] for i in range(n)}
    return [s for s in states if opening(s) not in held], [s for s in states if opening(s) in held]


def opening(state: State) -> tuple[tuple[str, str], ...]:
    """Instruction, OK and first observation, behind a system message where there is one."""
    return state.messages[: 3 + (state.messages[0][0] == "system")]


Example = tuple[list[int], list[bool]]


def examples_of(chat: Chat, state: State, args: argparse.Namespace) -> Iterator[Example]:
    """One example a trajectory or, where an observation says all, one an action; the latter are followed by the next
    observation with --observation-loss."""
    length = len(state.messages)
    for n in range(len(opening(state)) + 1, length + 1, 2) if chat.rendering.markov else [length]:
        shown = [n, n + 1] if args.observation_loss and n < length else [n]
        parts = [tokens_and_mask(chat, State(state.messages[:i], state.task), args.max_tokens) for i in shown]
        ids, wrote = ([x for part in some for x in part] for some in zip(*parts, strict=True))
        if any(wrote[1:]):
            yield ids, wrote


def collate(examples: list[Example], pad_id: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and which of them the agent wrote, (B, T) each.

    Padding is on the right and attention is causal: nothing that counts can see it.
    """
    ids, wrote = ([torch.tensor(part) for part in parts] for parts in zip(*examples, strict=True))
    return pad_sequence(ids, True, pad_id).to(device), pad_sequence(wrote, True, False).to(device)


def train(model: Any, chat: Chat, states: list[State], args: argparse.Namespace) -> dict:
    training, held_out = hold_out(states)
    examples, validation = ([e for s in some for e in examples_of(chat, s, args)] for some in (training, held_out))
    limit = min(args.max_tokens, chat.context or args.max_tokens)
    if not examples:
        raise UserError(f"no trajectory holds an action within {limit} tokens (--max-tokens, or the model's context)")
    if cut := sum(len(ids) == limit for ids, _ in examples):
        print(f"{cut} of {len(examples)} demonstrations are cut at {limit} tokens (--max-tokens, the model's context)")
    if args.batch is None:  # the tiny model, if nothing else was asked for
        args.batch = min(TINY["batch"], math.ceil(len(examples) / 4))
    if args.epochs is None:  # likewise
        args.epochs = max(TINY["epochs"], math.ceil(TINY_STEPS / math.ceil(len(examples) / args.batch)))

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return sft_loss(*predictions(model, ids, torch.ones_like(ids, dtype=torch.bool)))

    check_memory(estimate(model, model.base_model, loss_of, args, max(len(ids) for ids, _ in examples)), model.device)
    optimizer = models.adamw((p for p in model.parameters() if p.requires_grad), args.lr, args.optim)
    pad_id = chat.tokenizer.pad_token_id
    fit = Training("sft", model, optimizer, args, [1] * len(examples), (ids for ids, _ in examples))
    for _ in fit.epochs():
        for update in fit.updates():
            batch = [examples[i] for i in update]
            n_wrote = sum(sum(wrote[1:]) for _, wrote in batch)
            n_read = sum(wrote[wrote.index(True) :].count(False) for _, wrote in batch)  # behind an action
            for group in fit.share(batches(batch, lambda e: len(e[0]), args.micro_tokens)):  # gradient accumulation
                ids, wrote = collate([batch[i] for i in group], pad_id, model.device)
                with models.mixed_precision(model):
                    logits, targets = predictions(model, ids, wrote, bool(args.observation_loss))
                    loss = sft_loss(logits, targets) / n_wrote
                    if args.observation_loss and n_read:
                        answers = observation_loss(logits, columns(wrote, True), ids, wrote, pad_id)
                        loss += args.observation_loss * answers / n_read
                fit.backward(loss, ids.numel())
            fit.step()
        figures = validate(model, chat, validation, args)
        fit.validated(-figures["held_out_loss"] if figures else None, figures)
    return fit.figures() | ({"cut_trajectories": cut} if cut else {})


@torch.no_grad()
def validate(model: Any, chat: Chat, examples: list[Example], args: argparse.Namespace) -> dict:
    """Loss a token, and the share of actions whose every token is the likeliest, given the expert's own history."""
    if not examples:
        return {}
    model.eval()
    loss, tokens, actions, exact = 0.0, 0, 0, 0
    for group in batches(examples, lambda e: len(e[0]), args.micro_tokens):
        ids, wrote = collate([examples[i] for i in group], chat.tokenizer.pad_token_id, model.device)
        with models.mixed_precision(model):
            logits, targets = predictions(model, ids, wrote)
        loss += sft_loss(logits, targets).item()
        wrong = (logits.argmax(-1) != targets) & (targets != -100)
        tokens += int(wrote[:, 1:].sum())
        turn = (wrote[:, 1:] & ~wrote[:, :-1]).cumsum(-1)  # (B, T - 1): which of its row's actions a token belongs to
        turn = turn[:, wrote[:, 1:].any(0)]  # (B, K)
        actions += int(turn[:, -1].sum())
        exact += sum(n - len(set(t[w].tolist())) for n, t, w in zip(turn[:, -1].tolist(), turn, wrong, strict=True))
    return {"held_out_loss": loss / tokens, "held_out_exact": exact / actions}


# --------------------------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, epilog="Table 5: lr 1e-5, batch 64, 3 epochs.")
    envs.add_arguments(made, argv)
    add, said = made.add_argument, choices(PAPER, TINY)
    add("--model", default="tiny", help="tiny, or a HuggingFace name or path (default: %(default)s)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=at_least(1), help="number of trajectories (default: all; tiny: the environment's own)")
    add("--epochs", type=at_least(1), help=f"at most ({said('epochs')}, or what 200 updates take)")
    add("--lr", type=at_least(0, float), help=f"{said('lr')}; with --lora {models.LR}")
    add("--batch", type=at_least(1), help=f"trajectories an update ({said('batch')})")
    add("--max-tokens", type=at_least(2), default=4096, help="longer trajectories are cut (default: %(default)s)")
    add("--micro-tokens", type=at_least(1), help=f"padded tokens in memory at once ({said('micro_tokens')})")
    add("--candidates", choices=["free", "valid"], help=f"which actions the policy may write ({said('candidates')})")
    answer = "weight of predicting the next observation where an action ends (default: %(default)s)"
    add("--observation-loss", type=at_least(0, float), default=0.0, metavar="W", help=answer)
    more(made, models.add_training)
    add("--device")
    args = parse(made, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; leave it out, or name another --model")
    models.check_training(args)
    return args


def to_train(args: argparse.Namespace, states: list[State], markov: bool) -> tuple[Any, Chat]:
    """The model before its first update."""
    if args.model == "tiny":
        model, tokenizer = tiny_model(content for state in states for _, content in state.messages)
        chat = Chat(tokenizer, Rendering(**AIDS, markov=markov))
        model.to("cpu" if args.fsdp else models.device_and_dtype(args.device)[0])
    else:
        float32 = not args.lora and args.weights != "bf16"  # all weights are trained
        model, chat = models.load_checkpoint(
            args.model, transformers.AutoModelForCausalLM, args.device, args.load_in, train=float32, plain=True,
            divide=args.fsdp,
        )  # fmt: skip
    models.save_memory(model, args)
    return model, chat


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    tiny = TINY | {"epochs": None, "batch": None, "n_expert": env.demonstrations}  # `train` settles the first two
    settle(args, tiny if args.model == "tiny" else PAPER | ({"lr": models.LR} if args.lora else {}))
    args.out = checkpoint_folder(args.out or args.run / "sft", args.model)
    args.fsdp = loop.start(args.fsdp)
    lock = only_writer(args.out) if loop.first() else None
    torch.manual_seed(args.seed)

    with loop.in_turn():
        args.expert = args.expert or collect(env, args)
    trajectories = list(read_trajectories(args.expert))[: args.n_expert]
    if not trajectories:
        raise UserError(f"{args.expert}: no trajectories")
    states = [state for state, _ in trajectories]

    if is_trained(args, [args.expert]):
        return release(lock)
    asked = copy.copy(args)  # `train` settles the rest
    with loop.in_turn(args.fsdp):
        model, chat = to_train(args, states, env.markov)
        models.divide(model, model.base_model, args)
    chat.rendering.candidates = args.candidates
    figures = train(model, chat, states, args)
    model = loop.undivided(model, lambda: to_train(args, states, env.markov)[0])
    if not loop.first():
        return
    updates = models.merge(model) if args.lora else {}
    model.to(models.device_and_dtype(args.device)[1])  # as later stages load it

    transformers.utils.logging.disable_progress_bar()
    models.save_checkpoint(model, chat, args.out, updates, args.model)
    rewards = [record["reward"] for _, record in trajectories if record.get("reward") is not None]
    figures["expert_reward"] = sum(rewards) / len(rewards) if rewards else None
    figures |= {"trajectories": len(states), "epochs": args.epochs, "batch": args.batch}
    files.write_meta(args.out, vars(asked), [args.expert], **figures)
    finish(args.out)
    release(lock)
    size, loss = model.num_parameters() / 1e6, figures["loss"]
    print(f"{args.out}: {size:.2f} M parameters, {len(states)} trajectories, loss {loss:.3f}")


if __name__ == "__main__":
    cli.run_stage(main)
