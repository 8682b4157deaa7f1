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
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import envs
from qlass import UserError, files, flags, models, published, runs, training
from qlass.chat import Chat, Rendering
from qlass.messages import State, react
from qlass.published import Demonstration
from qlass.tiny import AIDS, tiny_model
from qlass.training import Training, cosine, micro_batches

PAPER: dict[str, Any] = dict(  # Table 5
    epochs=3, lr=1e-5, batch=64, micro_tokens=8192, candidates="free"
)
TINY: dict[str, Any] = dict(epochs=12, lr=3e-3, batch=16, micro_tokens=2048, candidates="valid")
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
    settings = runs.only(args, "env", "env_option", "env_files", "env_version")
    out = runs.Output(args.expert, settings, itemgetter("task_id"), alone=True)
    tasks = env.task_ids("train")[: args.n_expert and max(args.n_expert, len(out.groups))]
    todo = out.missing(tasks)
    out.grow(([demonstrate(env, task_id)] for task_id in todo), "expert", len(todo))
    out.finish(tasks)


def hold_out(expert: list[Demonstration]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and those of 5 % of the tasks to validate.

    At least 16 tasks are held out; of fewer than 64, none.
    """
    tasks = list(dict.fromkeys(demonstration.observation for demonstration in expert))
    n = max(16, len(tasks) // 20) if len(tasks) >= 64 else 0
    held_out = {tasks[i * len(tasks) // n] for i in range(n)}
    learned = [tau for tau in expert if tau.observation not in held_out]
    return learned, [tau for tau in expert if tau.observation in held_out]


@dataclasses.dataclass
class Example:
    """Tokens to read, and targets: (the position that predicts, the token, its weight)."""

    ids: list[int]
    targets: list[tuple[int, int, float]]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> float:
        return sum(weight for *_, weight in self.targets)


def example_of(
    chat: Chat, state: State, limit: int, answer: list[int], answer_weight: float
) -> Example:
    """A trajectory, cut at `limit` tokens; answer: the tokens of what follows its last action.

    Each token that the agent wrote, Eq. (5)'s a_t and OK, is predicted by the token before it. With
    an answer weight, all tokens of the environment's answer are predicted by the action's last one,
    whatever their order.
    """
    ids: list[int] = []
    targets = []
    # User and agent take turns, as a system message is in the first list.
    for turn, tokens in enumerate([*chat.message_tokens(state), answer]):
        if turn % 2:
            targets += [(len(ids) - 1 + i, token, 1.0) for i, token in enumerate(tokens)]
        elif answer_weight and turn >= chat.stays(state):
            targets += [(len(ids) - 1, token, answer_weight) for token in tokens]
        ids += tokens
    return Example(ids[:limit], [target for target in targets if target[0] < limit - 1])


def examples_of(
    chat: Chat, expert: list[Demonstration], limit: int, answer_weight: float = 0.0
) -> Iterator[Example]:
    """One example per trajectory; in a Markov environment, one per action."""
    for state in (demonstration.state for demonstration in expert):
        for n in chat.aids.example_ends(state.messages):
            answer = []
            if answer_weight and n < len(state.messages):
                answer = chat.message_tokens(State(state.messages[: n + 1], state.task))[-1]
            until = State(state.messages[:n], state.task)
            example = example_of(chat, until, limit, answer, answer_weight)
            if example.targets:
                yield example


# -------------------------------------------------------------------------------- behaviour cloning


def sft_loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """-sum w log pi(x | what stands before it) over the targets x, which with weights of 1 is Eq.
    (5)'s -sum_t log pi(a_t | s_t).

    The output layer is wide and most tokens are only read. So of the T positions K are computed,
    those that predict in any row: logits are (B, K, V), of which the N targets take a row each.
    """
    ids = [torch.tensor(example.ids) for example in examples]
    tokens = pad_sequence(ids, batch_first=True).to(model.device)  # (B, T); no token sees padding
    targets = [(row, *target) for row, example in enumerate(examples) for target in example.targets]
    rows, positions, labels, weights = map(torch.tensor, zip(*targets, strict=True))
    positions, k = positions.unique(return_inverse=True)
    kept = positions.to(model.device)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
    assert logits.shape[1] == len(kept), "the model does not know logits_to_keep"
    losses = cross_entropy(logits[rows, k].float(), labels.to(model.device), reduction="none")
    return (weights.to(model.device) * losses).sum()


def train(model: Any, examples: list[Example], validation: list[Example], args: Any) -> dict:
    """Maximise the likelihood of what the expert wrote, given its history. Returns figures."""
    trainer = Training(model, args, [1] * len(examples), [(model, args.lr)])
    for update, last in trainer.updates():
        model.train()
        batch = [examples[i] for i in update]
        n = sum(example.weight for example in batch)
        loss = 0.0
        for group in trainer.share(micro_batches(batch, len, args.micro_tokens)):
            part = sft_loss(model, group) / n  # Eq. (5), per token
            part.backward()  # gradients accumulate
            loss += part.item()
        loss = trainer.reduce(loss)
        for parameters in trainer.optimizer.param_groups:
            parameters["lr"] = args.lr * cosine(trainer.step, trainer.starts[-1])
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.end_update(loss, tokens=sum(map(len, batch)), last=last)
        if last:
            trainer.end_epoch(validate(model, validation, args.micro_tokens))
    return trainer.finish()


@torch.no_grad()
def validate(model: Any, examples: list[Example], micro_tokens: int) -> float | None:
    """The loss per token, given the expert's own history; None without examples."""
    model.eval()
    groups = micro_batches(examples, len, micro_tokens)
    losses = [sft_loss(model, group).item() for group in groups]
    return sum(losses) / sum(example.weight for example in examples) if examples else None


# --------------------------------------------------------------------------------------------- main


def load(args: argparse.Namespace, env: envs.TextEnv, expert: list[Demonstration]) -> tuple:
    """The model that is to be cloned, its chat, and PEFT's view of LoRA's updates (None: none)."""
    torch.manual_seed(args.seed)
    if args.model == "tiny":
        texts = (text for demonstration in expert for _, text in demonstration.state.messages)
        model, tokenizer = tiny_model(texts)
        model.to(models.device_and_dtype(args.device)[0])
        chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))
    else:
        loading = args.model, AutoModelForCausalLM, args.device, args.load_in
        options = {"train": not args.lora, "plain": True, "precision": args.precision}
        model, chat = models.load_checkpoint(*loading, **options)
    memory = args.lora, args.lora_alpha, args.gradient_checkpointing
    return model, chat, models.prepare_training(model, *memory)


def tokenize(
    chat: Chat, expert: list[Demonstration], args: argparse.Namespace, process: Any
) -> tuple[list[Example], list[Example]]:
    """The examples to train on and to validate. Says how many --max-tokens leaves out or cuts."""
    limit = min(args.max_tokens, chat.context)
    learned, held_out = hold_out(expert)
    examples = list(examples_of(chat, learned, limit, args.observation_loss))
    validation = list(examples_of(chat, held_out, limit))
    if not examples:
        raise UserError(f"{args.expert}: no action within {limit} tokens (--max-tokens)")
    lost = len(expert) - len(examples) - len(validation)
    cut = len([example for example in examples if len(example) == limit])
    if (lost or cut) and not chat.rendering.markov:
        facts = f"{lost} have no action within {limit} tokens, {cut} are cut there"
        process.print(f"of {len(expert)} demonstrations {facts} (--max-tokens)")
    return examples, validation


def defaults(args: argparse.Namespace, examples: int) -> dict[str, Any]:
    """What no flag has set: the paper's, or the tiny model's for so many examples."""
    if args.model != "tiny":
        return PAPER | ({"lr": flags.LORA_LR} if args.lora else {})
    batch = args.batch or min(TINY["batch"], math.ceil(examples / 4))
    epochs = max(TINY["epochs"], math.ceil(UPDATES / math.ceil(examples / batch)))
    return TINY | {"batch": batch, "epochs": epochs}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.Parser(__doc__, flags.defaults_text(PAPER, TINY, "the tiny model"))
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, a HuggingFace name or path, or a GGUF file (tiny)")
    add("--expert", type=Path, help="trajectories (default: the environment's expert plays them)")
    add("--out", type=Path, help="checkpoint folder (default: RUN/sft)")
    add("--n-expert", type=flags.positive, metavar="N", help="trajectories (all; tiny: fewer)")
    flags.add_training(parser, "trajectories")
    add("--max-tokens", type=flags.at_least(2), default=4096, metavar="N", help="cut there (4096)")
    add("--candidates", choices=["free", "valid"], help="what the agent may write (tiny: valid)")
    weight = "weight of the environment's answers in the loss (0)"
    add("--observation-loss", type=flags.real, default=0.0, metavar="W", help=weight)
    args = runs.parse(parser, argv)
    if args.lora and args.model == "tiny":
        raise UserError("--lora: the tiny model is trained from scratch; name another --model")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.out = files.checkpoint_folder(args.out or args.run / "sft", args.model)
    if args.model == "tiny":
        args.n_expert = args.n_expert or env.demonstrations
    with training.processes(args) as process:
        played = args.expert is None
        if played:
            args.expert = args.run / "expert.jsonl"
            if process.is_main_process:
                collect(env, args)
            process.wait_for_everyone()
        expert = published.read(args.expert, env, args.n_expert)
        model, chat, adapter = load(args, env, expert)
        first = {} if played else published.first_messages(env, expert)
        if env.agreement != "OK":  # which a prompt has by default
            first = {"agreement": env.agreement, **first}
        for name, text in first.items():
            setattr(chat.rendering, name, text)
        examples, validation = tokenize(chat, expert, args, process)
        flags.fill_defaults(args, defaults(args, len(examples)))
        chat.rendering.candidates = args.candidates
        recipe = training.begin(args, expert=args.expert)
        if recipe is None:
            return
        figures = train(model, examples, validation, args) | {"trajectories": len(expert)}
        if process.is_main_process:
            dtype = models.PRECISIONS[args.precision]
            tasks = (demonstration.task_id for demonstration in expert)
            figures["tasks"] = published.learned_tasks(tasks, args.model, args)
            runs.write_meta(args.out, args, recipe, {"expert": args.expert}, **figures)
            models.save_checkpoint(model, chat, args.out, adapter, dtype)
            print(f"{args.out}: {len(expert)} trajectories, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    flags.run_stage(main)
