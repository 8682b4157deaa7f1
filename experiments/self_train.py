"""Self-training: the agent learns from its own trajectories on the training tasks (Sec. 5.2, Fig. 4).

    reads   RUN/sft/ and what it was trained on; --method qlass: RUN/qnet/; --method tree: RUN/trees.jsonl
    writes  RUN/self_train-NAME.rollouts.jsonl (all trajectories), RUN/self_train-NAME.jsonl (demonstrations and the
            trajectories that were kept, in expert.jsonl's layout), RUN/sft-NAME/ (the checkpoint trained on them)

    python -m experiments.self_train --env webshop --method rft
    python -m experiments.self_train --env webshop --method qlass --qnet runs/webshop/qnet-avg --name target-avg

    rft     -N sampled trajectories per task, no QNet (rejection-sampling fine-tuning, Yuan et al. 2023)
    qlass   -N trajectories per task, each action the best of -M by QNet (Alg. 4); one QNet for each process reward
    tree    in each exploration tree, the best branch that the agent ended, which may begin with the expert's steps

rft and tree keep the trajectories whose true reward reaches --threshold: on training tasks the reward may be used.
qlass keeps all that are new, as the paper does, or with --threshold those that reach it. The model starts from where
RUN/sft started, not from RUN/sft, and is trained in the same way on more data.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import envs
import sft
from q_search import Method, by_q, episode
from qlass import UserError, files, metadata
from qlass.batching import Sample, Score, drive
from qlass.chat import Chat
from qlass.cli import add_sampling, at_least, find_or_make, handed_on, parse, parser, run_stage
from qlass.messages import State, without_thinking
from qlass.models import settle_precision
from qlass.output import Output, read_trees
from qlass.policy import load_agent
from qlass.published import read_trajectories, written
from qlass.results import costs_of
from train_qnet import load_qnet, states_of

OTHER_LUCK = 1_000_000  # added to the seed: trees were grown on the same tasks, their branches are not sampled again
FIELDS = ("depth", "done", "source", "messages")  # of a tree, that not every one has
AGAIN = ("epochs", "batch", "patience", "lr", "max_tokens", "micro_tokens", "candidates", "optim", "observation_loss",
         "lora", "lora_alpha", "precision", "load_in")  # flags of RUN/sft's training that are given again  # fmt: skip


def trajectories(env: envs.TextEnv, task_id: str, method: Method, chat: Chat) -> Generator:
    """N trajectories of one task as lines of expert.jsonl, whatever they earned; the first has the tokens of all."""
    lines: list[dict] = []
    played = []
    for trial in range(method.N):
        steps = yield from episode(env, task_id, method, trial, chat.rendering)
        last = steps[-1]
        messages = [*last.state.dump(), {"role": "assistant", "content": last.action}]
        line = {"task_id": task_id, "env": env.name, "task": last.state.task, "messages": messages}
        lines.append(line | {"reward": last.reward, "tokens": {}})
        played.append(steps)
    env.close()
    lines[0]["tokens"] = costs_of(chat, played, method.read_by_qnet)["tokens"]
    return lines


def rollouts(
    env: envs.TextEnv, tasks: list[str], method: Method, agent: Callable[[], tuple[Chat, dict]], out: Output, width: int
) -> list[dict]:
    """Trajectories of the tasks, those of a stopped run included. `agent` loads what answers requests, if need be."""
    finished = {line["task_id"] for line in out.records}
    todo = [task for task in tasks if task not in finished]
    if todo:
        chat, answers = agent()

        def line_of(task: str) -> Generator:
            lines = yield from trajectories(env.fork(), task, method, chat)
            return [{"task_id": task, "trajectories": lines}]

        played = drive(map(line_of, todo), answers, width)
        out.grow(played, str(method), len(tasks), len(tasks) - len(todo))
    out.finish()
    by_task = {line["task_id"]: line["trajectories"] for line in out.records}
    return [line for task in tasks for line in by_task[task]]


def best_branch(tree: list[dict]) -> dict | None:
    """Of the branches that the agent ended that of the highest reward, of equals the shortest, as in expert.jsonl."""
    leaves = [node for node in tree if node["done"] and node["source"] == "policy"]
    if not leaves:
        return None
    leaf = max(leaves, key=lambda node: (node["reward"], -node["depth"]))
    messages = [*states_of(tree)[leaf["parent_id"]].dump(), {"role": "assistant", "content": leaf["action"]}]
    origin = {key: tree[0].get(key, "") for key in ("task_id", "env", "task")}
    return origin | {"messages": messages, "reward": leaf["reward"]}


def kept(lines: Iterable[dict], threshold: float, expert: Iterable[dict]) -> list[dict]:
    """The distinct trajectories that earned enough and are not the expert's; "source" tells them from those.

    None holds an empty reply, or one whose thought was cut: sft.py takes no such demonstrations.
    """
    shown = {json.dumps(line["messages"]) for line in expert}
    good = {json.dumps(line["messages"]): line for line in lines if line["reward"] >= threshold - 1e-9}
    new = [line for text, line in good.items() if text not in shown]
    new = [line for line in new if all(without_thinking(text).strip() for text in replies(line))]
    fields = ("task_id", "env", "task", "messages", "reward")
    return [{key: line[key] for key in fields} | {"source": "policy"} for line in new]


def replies(line: dict) -> list[str]:
    return written(State.load(line["messages"], "").messages)


def demonstrations(checkpoint: Path, env: str) -> list[dict]:
    """What a checkpoint was cloned from, as lines of expert.jsonl, each with what tells its task."""
    path, most = metadata.cloned_from(checkpoint)
    if path is None:
        raise UserError(f"{checkpoint}: the demonstrations that it was cloned from are gone")
    lines = []
    for state, record in itertools.islice(read_trajectories(path), most):
        task = {key: record[key] for key in ("task_id",) if key in record}  # first, as there
        fields = {"env": env, "task": state.task, "messages": state.dump(), "reward": record.get("reward")}
        lines.append(task | fields | {key: record[key] for key in ("id", "game_file", "source") if key in record})
    return lines


def training_flags(record: dict[str, Any]) -> list[str]:
    """The flags that RUN/sft was trained with, and the epochs and batch that the tiny model chose then."""
    flags = [f"--{name.replace('_', '-')}={record[name]}" for name in AGAIN if record.get(name) is not None]
    return flags + ["--gradient-checkpointing"] * bool(record.get("gradient_checkpointing"))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, epilog="Sec. 5.2: M = 3, N = 1.")
    add = flags.add_argument
    add("--method", choices=["rft", "qlass", "tree"], default="qlass", help="default: %(default)s")
    add("--name", help="of the checkpoint RUN/sft-NAME (default: the method)")
    add("-M", type=at_least(1), help="candidates a step (default: qlass 3, rft 1)")
    add("-N", type=at_least(1), help="trajectories a task (default: qlass 1, rft 3: both sample as many actions)")
    add("--threshold", type=at_least(0, float), help="reward that it must reach (default: qlass 0, all; others 1)")
    add("--limit", type=at_least(0), default=300, metavar="N", help="training tasks (default: %(default)s; 0: all)")
    add("--temperature", type=at_least(0, float), help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--trees", type=Path, help="default: RUN/trees.jsonl, made if missing")
    text = "only write the trajectories: for sft.py --expert FILE --out RUN/sft-NAME, as by torchrun"
    add("--no-train", action="store_true", help=text)
    add("--device")
    add_sampling(flags)
    args = parse(flags, argv)
    rft = args.method == "rft"
    if rft and (args.M or 1) > 1:
        raise UserError(f"-M {args.M}: rft has no QNet to choose among candidates; give -N, trajectories a task")
    args.name = args.name or args.method
    args.threshold = float(args.method != "qlass") if args.threshold is None else args.threshold
    args.M, args.N = args.M or (1 if rft else 3), args.N or (3 if rft else 1)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    started = time.time()
    env = envs.from_arguments(args)
    args.sft = find_or_make(args.sft, args.run / "sft", "sft", args)
    record = metadata.read_meta(args.sft)["arguments"]
    if "model" not in record:
        raise UserError(f"{args.sft}: its metadata do not say how sft.py made it; name an --sft that sft.py made")
    expert = demonstrations(args.sft, env.name)

    def agent() -> tuple[Chat, dict]:
        policy = load_agent(argparse.Namespace(**vars(args) | {"seed": args.seed + OTHER_LUCK}), env)
        return policy.chat, {Sample: policy.sample} | ({Score: load_qnet(args.qnet, args).score} if args.qnet else {})

    if args.method == "tree":
        args.trees, args.qnet = find_or_make(args.trees, args.run / "trees.jsonl", "build_trees", args), None
        lines = list(filter(None, map(best_branch, read_trees(args.trees, FIELDS))))
    else:
        args.qnet = find_or_make(args.qnet, args.run / "qnet", "train_qnet", args) if args.method == "qlass" else None
        tasks = env.task_ids("train")[::-1][: args.limit or None]  # those of the trees (build_trees.py)
        path = args.run / f"self_train-{args.name}.rollouts.jsonl"
        free = ["threshold", "no_train", "plain"]
        settle_precision(args)
        settings = vars(args) | {"out": path}
        out = Output(path, settings, [args.sft, args.qnet], free)
        method = Method("qlass", by_q, args.M, args.N) if args.qnet else Method("sample", N=args.N)
        lines = rollouts(env, tasks, method, agent, out, args.in_flight or env.side_by_side)
    new = kept(lines, args.threshold, expert)
    if not new:
        best = max((line["reward"] for line in lines), default=0.0)
        reason = f"none of {len(lines)} trajectories is new and reaches --threshold {args.threshold}"
        raise UserError(f"{reason} (highest reward {best:.3f}): lower it, or play more (--limit 0, -N)")
    merged, out = args.run / f"self_train-{args.name}.jsonl", args.run / f"sft-{args.name}"
    files.write_jsonl(merged, expert + new)
    mean = sum(line["reward"] for line in lines) / max(1, len(lines))
    figures = {"demonstrations": len(expert), "trajectories": len(lines), "kept": len(new), "mean_reward": mean}
    figures["tokens"] = sum(sum(line.get("tokens", {}).values()) for line in lines)  # a tree's are in its own metadata
    metadata.write_meta(merged, vars(args), [args.sft, args.qnet, args.trees], **figures, seconds=time.time() - started)
    kept_of = f"{len(new)} of {len(lines)} trajectories kept (mean reward {mean:.3f})"
    print(f"{merged}: {kept_of} beside {len(expert)} demonstrations")
    if args.no_train:
        return
    flags = training_flags(record) + ["--device", args.device] * bool(args.device) + ["--overwrite"] * args.overwrite
    flags += ["--model", record["model"], "--expert", str(merged), "--n-expert", str(len(expert) + len(new))]
    sft.main([*handed_on(args), *flags, "--out", str(out)])


if __name__ == "__main__":
    run_stage(main)
