"""Self-training: the agent learns from its own trajectories on the training tasks (Sec. 5.2, Fig. 4).

    reads   RUN/sft/ and what it was trained on; --method qlass: RUN/qnet/; --method tree: RUN/trees.jsonl
    writes  RUN/self_train-NAME.rollouts.jsonl (all trajectories), RUN/self_train-NAME.jsonl (demonstrations and the
            trajectories that were kept, in expert.jsonl's layout), RUN/sft-NAME/ (the checkpoint trained on them)

    python -m experiments.self_train --env webshop --method qlass --qnet runs/webshop/qnet-avg --name target-avg

    rft     -N sampled trajectories per task, no QNet (rejection-sampling fine-tuning, Yuan et al. 2023)
    qlass   -N trajectories per task, each action the best of -M by QNet (Alg. 4); one QNet for each process reward
    tree    in each exploration tree, the best branch that the agent ended, which may begin with the expert's steps
    expert  in each exploration tree, the demonstration: the agent of all that QNet has seen of the expert

rft and tree keep the trajectories whose true reward reaches --threshold: on training tasks the reward may be used.
qlass keeps all that are new, as the paper does, or with --threshold those that reach it. The model starts from where
RUN/sft started, not from RUN/sft, and is trained in the same way on more data.
"""

import argparse
import json
from collections.abc import Callable, Generator, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import envs
import sft
from q_search import Method, episode
from qlass import UserError, published, runs
from qlass.agent import load_agent
from qlass.batching import Sample, Score, drive
from qlass.chat import Chat
from qlass.files import read_trees
from qlass.flags import Parser, add_sampling, at_least, run_stage
from qlass.messages import without_thinking
from qlass.models import settle_precision
from qlass.results import costs_of
from train_qnet import load_qnet, states_of

OTHER_LUCK = 1_000_000  # added to the seed: trees were grown on the same tasks, their branches are not sampled again
FIELDS = ("depth", "done", "source", "messages")  # of a tree, that not every one has
CHOSEN = ("epochs", "batch", "precision")  # what RUN/sft's training has chosen where no flag said it


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


def rollouts(env: envs.TextEnv, tasks: list[str], method: Method, args: argparse.Namespace) -> list[dict]:
    """Trajectories of the tasks, those of a stopped run included."""
    settle_precision(args)
    path, later = args.run / f"self_train-{args.name}.rollouts.jsonl", ["threshold", "limit"]
    settings = argparse.Namespace(**vars(args) | {"free": [*args.free, *later]})
    out = runs.Output(path, settings, itemgetter("task_id"), sft=args.sft, qnet=args.qnet)
    if todo := out.missing(tasks):
        agent = load_agent(argparse.Namespace(**vars(args) | {"seed": args.seed + OTHER_LUCK}), env)
        models = {Sample: agent.sample} | ({Score: load_qnet(args.qnet, args).score} if args.qnet else {})

        def line_of(task: str) -> Generator:
            lines = yield from trajectories(env.fork(), task, method, agent.chat)
            return [{"task_id": task, "trajectories": lines}]

        played = drive(map(line_of, todo), models, args.in_flight or env.side_by_side)
        out.grow(played, str(method), len(todo))
    out.finish(tasks)
    by_task = {line["task_id"]: line["trajectories"] for line in out.records}
    return [line for task in tasks for line in by_task[task]]


def best_branch(tree: list[dict]) -> dict | None:
    """Of the branches that the agent ended that of the highest reward, of equals the shortest, as in expert.jsonl."""
    leaves = [node for node in tree if node["done"] and node["source"] == "policy"]
    return branch(tree, leaves, lambda node: (node["reward"], -node["depth"]))


def expert_branch(tree: list[dict]) -> dict | None:
    """The demonstration in a tree."""
    return branch(tree, [node for node in tree if node.get("expert")], itemgetter("depth"))


def branch(tree: list[dict], nodes: list[dict], worth: Callable[[dict], Any]) -> dict | None:
    """From the root to the node that is worth most, as in expert.jsonl; None if there is no node."""
    if not nodes:
        return None
    leaf = max(nodes, key=worth)
    messages = [*states_of(tree)[leaf["parent_id"]].dump(), {"role": "assistant", "content": leaf["action"]}]
    origin = {key: tree[0].get(key, "") for key in ("task_id", "env", "task")}
    return origin | {"messages": messages, "reward": leaf["reward"]}


def kept(lines: Iterable[dict], threshold: float, expert: Iterable[dict]) -> list[dict]:
    """The distinct trajectories that earned enough and are not the expert's; "source" tells them from those."""
    new = {json.dumps(line["messages"]): line for line in lines if line["reward"] >= threshold - 1e-9}
    for line in expert:
        new.pop(json.dumps(line["messages"]), None)
    lines = [{name: line[name] for name in line if name != "tokens"} for line in new.values() if speaks(line)]
    return [line | {"source": "policy"} for line in lines]


def speaks(line: dict) -> bool:
    """Whether no reply is empty, and no thought of one is cut: sft.py takes no such demonstrations."""
    replies = (turn["content"] for turn in line["messages"] if turn["role"] == "assistant")
    return all(without_thinking(reply).strip() for reply in replies)


def demonstrations(checkpoint: Path, env: envs.TextEnv) -> list[dict]:
    """What a checkpoint was cloned from, as lines of expert.jsonl."""
    path, most = published.cloned_from(checkpoint)
    if path is None:
        raise UserError(f"{checkpoint}: the demonstrations that it was cloned from are gone")
    lines = []
    for shown in published.read(path, env, most):
        line = {"env": env.name, "task": shown.state.task, "messages": shown.state.dump(), "reward": shown.reward}
        line = line if shown.task_id is None else {"task_id": shown.task_id} | line
        lines.append(line if shown.source == "expert" else line | {"source": shown.source})
    return lines


def clone_again(args: argparse.Namespace, expert: Path, n: int) -> None:
    """Train RUN/sft-NAME on the first n trajectories of a file, by the command that made --sft."""
    meta, out = runs.meta_of(args.sft), args.run / f"sft-{args.name}"
    same = [flag for flag in meta["argv"] if flag != "--overwrite"] + runs.handed_on(args)  # the last one counts
    for name in CHOSEN:
        same += [f"--{name}", str(meta["recipe"][name])]
    other = ["--expert", str(expert), "--n-expert", str(n), "--out", str(out)]
    sft.main([*same, *other, *["--overwrite"] * args.overwrite])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = Parser(__doc__, epilog="Sec. 5.2: M = 3, N = 1.")
    add = flags.add_argument
    add("--method", choices=["rft", "qlass", "tree", "expert"], default="qlass", help="default: %(default)s")
    add("--name", help="of the checkpoint RUN/sft-NAME (default: the method)")
    add("-M", type=at_least(1), help="candidates a step (default: qlass 3, rft 1)")
    add("-N", type=at_least(1), help="trajectories a task (default: qlass 1, rft 3: both sample as many actions)")
    add("--threshold", type=at_least(0, float), help="reward that it must reach (default: rft, tree 1; others 0, all)")
    add("--limit", type=at_least(0), default=300, metavar="N", help="training tasks (default: %(default)s; 0: all)")
    add("--temperature", type=at_least(0, float), help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--trees", type=Path, help="default: RUN/trees.jsonl, made if missing")
    text = "only write the trajectories: for sft.py --expert FILE --out RUN/sft-NAME, as by torchrun"
    flags.free("--no-train", action="store_true", help=text)
    add_sampling(flags)
    args = runs.parse(flags, argv)
    rft = args.method == "rft"
    if rft and (args.M or 1) > 1:
        raise UserError(f"-M {args.M}: rft has no QNet to choose among candidates; give -N, trajectories a task")
    args.name = args.name or args.method
    args.threshold = float(args.method in ("rft", "tree")) if args.threshold is None else args.threshold
    args.M, args.N = args.M or (1 if rft else 3), args.N or (3 if rft else 1)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.sft = runs.need(args.sft, args.run / "sft", "sft", args)
    if "model" not in runs.meta_of(args.sft)["recipe"]:
        raise UserError(f"{args.sft}: its metadata do not say how sft.py made it; name an --sft that sft.py made")
    expert = demonstrations(args.sft, env)
    if args.method in ("tree", "expert"):
        args.trees, args.qnet = runs.need(args.trees, args.run / "trees.jsonl", "build_trees", args), None
        choose = {"tree": best_branch, "expert": expert_branch}[args.method]
        lines = list(filter(None, map(choose, read_trees(args.trees, FIELDS))))
    else:
        args.trees, guided = None, args.method == "qlass"
        args.qnet = runs.need(args.qnet, args.run / "qnet", "train_qnet", args) if guided else None
        tasks = env.task_ids("train")[::-1][: args.limit or None]  # those of the trees (build_trees.py)
        method = Method("qlass", "q", args.M, args.N) if guided else Method("sample", N=args.N)
        lines = rollouts(env, tasks, method, args)
    new = kept(lines, args.threshold, expert)
    if not new:
        best = max((line["reward"] for line in lines), default=0.0)
        reason = f"none of {len(lines)} trajectories is new and reaches --threshold {args.threshold}"
        raise UserError(f"{reason} (highest reward {best:.3f}): lower it, or play more (--limit 0, -N)")
    merged = args.run / f"self_train-{args.name}.jsonl"
    inputs = {"sft": args.sft, "qnet": args.qnet, "trees": args.trees}
    mean = sum(line["reward"] for line in lines) / max(1, len(lines))
    figures = {"demonstrations": len(expert), "trajectories": len(lines), "kept": len(new), "mean_reward": mean}
    figures["tokens"] = sum(sum(line.get("tokens", {}).values()) for line in lines)  # a tree's are in its own metadata
    runs.write_at_once(merged, args, expert + new, inputs, **figures)
    kept_of = f"{len(new)} of {len(lines)} trajectories kept (mean reward {mean:.3f})"
    print(f"{merged}: {kept_of} beside {len(expert)} demonstrations")
    if not args.no_train:
        clone_again(args, merged, len(expert) + len(new))


if __name__ == "__main__":
    run_stage(main)
