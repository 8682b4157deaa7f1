"""Stage 1: behaviour cloning (Eq. 5).

    reads   expert trajectories: --expert FILE (ours or ETO's layout), or played now by the environment's expert
    writes  RUN/expert.jsonl (where it played them), RUN/sft/ (a HuggingFace checkpoint with its tokenizer)

    python sft.py --env webshop                                            # the tiny model, from scratch, on a CPU
    python sft.py --env webshop --model meta-llama/Llama-2-7b-chat-hf --expert webshop_sft.json

The loss is the cross-entropy of the tokens that the agent writes; instruction, observations and padding are context.
`--model tiny` is a Llama of about a million parameters with a tokenizer of its own, both trained here, and reads with
the aids of `chat.Rendering`. Any other model keeps its tokenizer, its chat template and the paper's rendering.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import envs
from environments import UserError
from qlass.chat import MARK, Chat, Rendering, State, mark, react
from qlass.jsonl import Resumable, checkpoint_folder, read_jsonl, replacing_folder
from qlass.models import (
    LR,
    adamw,
    add_lora,
    add_training,
    check_training,
    cosine,
    device_and_dtype,
    load_checkpoint,
    merge,
    mixed_precision,
)
from qlass.stage import add_arguments, parse_arguments, run_stage, same_arguments, write_meta
from qlass.token_tree import batches

TINY = {"n_expert": 1350, "lr": 3e-3, "batch": 16}
TINY_STEPS = 200  # few demonstrations are repeated until so many updates are made
PAPER = {"n_expert": None, "epochs": 3, "lr": 1e-5, "batch": 64}  # Table 5

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
    return {"task_id": task_id, "env": env.name, "task": state.task, "messages": messages, "reward": reward}


def collect(env: envs.TextEnv, args: argparse.Namespace) -> None:
    """expert.jsonl: the first `--n-expert` training tasks, those that an earlier call played before included."""
    tasks = env.task_ids("train")
    same_arguments(args.expert, args, ())
    write_meta(args.expert, args)

    def whole(lines: list[dict]) -> int:
        return len(lines) if [line["task_id"] for line in lines] == tasks[: len(lines)] else 0

    played = Resumable(args.expert, whole)
    for task_id in tqdm(tasks[len(played.records) : args.n_expert], desc="expert", disable=None):
        played.append([demonstrate(env, task_id)])
    played.close()


def read_trajectories(path: Path) -> Iterator[tuple[State, float | None]]:
    """Expert files in our layout or in ETO's and QLASS's: `conversations` of {"from", "value"}, JSON list or JSONL."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        is_list = file.read(100).lstrip().startswith(b"[")
    try:
        records = json.loads(path.read_bytes()) if is_list else read_jsonl(path)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    roles = {"human": "user", "gpt": "assistant"}
    for number, record in enumerate(records, 1):
        try:
            turns = record.get("messages") or [
                {"role": roles.get(turn["from"]), "content": turn["value"]} for turn in record["conversations"]
            ]
            state = State.load(turns, record.get("task", ""))
            in_turns = all(role == ("user", "assistant")[i % 2] for i, (role, _) in enumerate(state.messages))
            sound = in_turns and len(turns) > 1 and all(isinstance(text, str) for _, text in state.messages)
        except (AttributeError, KeyError, TypeError):
            sound = False
        if not sound:
            raise UserError(f"{path}: record {number} is no chat of user and assistant in turns (data/README.md)")
        yield state, record.get("reward")


# ----------------------------------------------------------------------------------------------------- the tiny model


def tiny_model(states: list[State], vocabulary: int = 4096) -> tuple[Any, Any, Rendering]:
    """A small Llama with random weights and a byte-level BPE trained on the demonstrations' own text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    rendering = Rendering(temperature=1.0, max_new_tokens=48, candidates="valid", mark_matches=True, compact=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = (mark(content, s.task) for s in states for _, content in s.messages)
    special = ["<pad>", "<end>", "<user>"]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, min_frequency=2, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    bpe.add_tokens([AddedToken(t, lstrip=True) for t in (MARK, "[SEP]")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<user>' + m.content + '\n' }}"
        "{% else %}{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokenizer, rendering


# ----------------------------------------------------------------------------------------------------------- training


def tokens_and_mask(chat: Chat, state: State, limit: int) -> tuple[list[int], list[bool]]:
    """The trajectory's tokens and which of them the agent wrote (Eq. 5's a_t), cut at `limit` tokens."""
    ids: list[int] = []
    wrote: list[bool] = []
    runs = chat.message_tokens(state)
    for (role, _), run in zip(state.messages[len(state.messages) - len(runs) :], runs, strict=True):
        ids += run
        wrote += [role == "assistant"] * len(run)
    return ids[:limit], wrote[:limit]


def sft_loss(logits: torch.Tensor, ids: torch.Tensor, wrote: torch.Tensor) -> torch.Tensor:
    """Eq. (5): -sum_t log pi(a_t | s_t), summed over the agent's tokens. (B, T, V), (B, T), (B, T) -> ()."""
    targets = ids[:, 1:].masked_fill(~wrote[:, 1:], -100)
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


def train(model: Any, chat: Chat, states: list[State], args: argparse.Namespace) -> dict:
    if chat.rendering.markov:  # each action stands by itself
        states = [State(s.messages[: i + 1], s.task) for s in states for i in range(3, len(s.messages), 2)]
    examples = [e for e in (tokens_and_mask(chat, s, args.max_tokens) for s in states) if any(e[1][1:])]
    if not examples:
        raise UserError(f"no trajectory holds an action within --max-tokens {args.max_tokens}: give it more")
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), args.lr, args.optim)
    order = torch.Generator().manual_seed(args.seed)
    if args.model == "tiny":
        args.batch = min(args.batch, math.ceil(len(examples) / 4))
    per_epoch = math.ceil(len(examples) / args.batch)
    if args.epochs is None:  # the tiny model, if nothing else was asked for
        args.epochs = max(2, math.ceil(TINY_STEPS / per_epoch))
    steps = per_epoch * args.epochs
    step, seen, losses = 0, 0, []
    model.train()
    bar = tqdm(total=steps, desc="sft", disable=None)
    for _ in range(args.epochs):
        shuffled = torch.randperm(len(examples), generator=order).tolist()
        for start in range(0, len(shuffled), args.batch):
            batch = [examples[i] for i in shuffled[start : start + args.batch]]
            n_wrote = sum(sum(wrote[1:]) for _, wrote in batch)
            total = 0.0
            for group in batches(batch, lambda e: len(e[0]), args.micro_tokens):  # gradient accumulation
                width = max(len(batch[i][0]) for i in group)
                ids = torch.full((len(group), width), chat.tokenizer.pad_token_id)
                wrote = torch.zeros((len(group), width), dtype=torch.bool)
                for row, i in enumerate(group):
                    ids[row, : len(batch[i][0])] = torch.tensor(batch[i][0])
                    wrote[row, : len(batch[i][1])] = torch.tensor(batch[i][1])
                ids, wrote = ids.to(model.device), wrote.to(model.device)
                # Padding is on the right and attention is causal: nothing that counts can see it.
                with mixed_precision(model):
                    logits = model(input_ids=ids, use_cache=False).logits
                loss = sft_loss(logits, ids, wrote) / n_wrote
                loss.backward()
                total += loss.item()
                seen += ids.numel()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * cosine(step, steps)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            losses.append(total)
            bar.set_postfix(loss=f"{total:.3f}")
            bar.update()
    return {"steps": step, "tokens": seen, "loss": sum(losses[-10:]) / len(losses[-10:])}


# --------------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Table 5: lr 1e-5, batch 64, 3 epochs.")
    add_arguments(parser)
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, or a HuggingFace name or path (default: %(default)s)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=int, help="number of trajectories (default: all; tiny: 1350)")
    add("--epochs", type=int, help="default: 3; tiny: 2, or what 200 updates take")
    add("--lr", type=float, help="default: 1e-5 (with --lora 2e-4); tiny: 3e-3")
    add("--batch", type=int, help="trajectories a step (default: 64; tiny: 16)")
    add("--max-tokens", type=int, default=4096, help="longer trajectories are cut (default: %(default)s)")
    add("--micro-tokens", type=int, default=8192, help="padded tokens in memory at once (default: %(default)s)")
    add(
        "--candidates",
        choices=["free", "valid"],
        help="which actions the policy may write (default: free; tiny: valid)",
    )
    add_training(parser)
    add("--device")
    args = parse_arguments(parser, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; leave it out, or name another --model")
    check_training(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    started = time.time()
    env = envs.from_arguments(args)
    for name, value in (TINY if args.model == "tiny" else PAPER | ({"lr": LR} if args.lora else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = checkpoint_folder(args.out or args.run / "sft")
    torch.manual_seed(args.seed)

    if args.expert is None:
        args.expert = args.run / "expert.jsonl"
        collect(env, args)
    trajectories = list(read_trajectories(args.expert))[: args.n_expert]
    if not trajectories:
        raise UserError(f"{args.expert}: no trajectories")
    states = [state for state, _ in trajectories]

    if args.model == "tiny":
        model, tokenizer, rendering = tiny_model(states)
        rendering.markov = env.markov
        chat = Chat(tokenizer, rendering)
        model.to(device_and_dtype(args.device)[0])
    else:
        model, chat = load_checkpoint(
            args.model, transformers.AutoModelForCausalLM, args.device, args.load_in, train=not args.lora, plain=True
        )
    if args.lora:
        add_lora(model, args.lora)
    if args.candidates:
        chat.rendering.candidates = args.candidates
    figures = train(model, chat, states, args)
    if args.lora:
        merge(model)
    model.to(device_and_dtype(args.device)[1])  # as later stages load it

    transformers.utils.logging.disable_progress_bar()
    with replacing_folder(args.out) as folder:
        model.save_pretrained(folder)
        chat.tokenizer.save_pretrained(folder)
        chat.rendering.save(folder)
    rewards = [r for _, r in trajectories if r is not None]
    figures["expert_reward"] = sum(rewards) / len(rewards) if rewards else None
    write_meta(args.out, args, [args.expert], trajectories=len(states), seconds=time.time() - started, **figures)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.out}: {parameters:.2f} M parameters, {len(states)} trajectories, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    run_stage(main)
