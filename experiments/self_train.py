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

import dataclasses
import json
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

import envs
import sft
from experiments import clone_answers
from q_search import Method, episode
from qlass import UserError, demonstrations, outputs
from qlass.batching import Sample, Score, drive
from qlass.chat import Chat
from qlass.messages import without_thinking
from qlass.pairs import states_of
from qlass.policy import load_agent
from qlass.results import costs_of
from qlass.settings import Sampling, read, run_stage, runtime
from qlass.trees import read_trees
from train_qnet import QNet, scorer

OTHER_LUCK = 1_000_000  # added to the seed: trees were grown on the same tasks, their branches are not sampled again
FIELDS = ("depth", "done", "source", "messages")  # of a tree, that not every one has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    """Sec. 5.2: M = 3, N = 1."""

    stage: ClassVar[str] = "self_train"

    method: Literal["rft", "qlass", "tree", "expert"] = "qlass"  # see above
    name: str = ""  # of the checkpoint RUN/sft-NAME (the method)
    M: Annotated[int, arg(aliases=["-M"])] = 0  # candidates a step (0: qlass 3, rft 1)
    N: Annotated[int, arg(aliases=["-N"])] = 0  # trajectories a task (0: qlass 1, rft 3)
    threshold: float | None = None  # reward that it must reach (rft, tree: 1; others 0, all)
    limit: int = runtime(300)  # training tasks (0: all)
    sft: Path | None = runtime(None)  # checkpoint of the agent (RUN/sft, made if missing)
    qnet: Path | None = runtime(None)  # RUN/qnet, made if missing
    trees: Path | None = runtime(None)  # RUN/trees.jsonl, made if missing
    no_train: bool = runtime(False)  # only write the trajectories: for sft.py --expert FILE, as by torchrun


async def trajectories(env: envs.TextEnv, task_id: str, method: Method, chat: Chat) -> list[dict]:
    """N trajectories of one task as lines of expert.jsonl, whatever they earned; the first has the tokens of all."""
    lines: list[dict] = []
    played = []
    for trial in range(method.N):
        steps = await episode(env, task_id, method, trial, chat.rendering)
        last = steps[-1]
        messages = [*last.state.dump(), {"role": "assistant", "content": last.action}]
        line = {"task_id": task_id, "env": env.name, "task": last.state.task, "messages": messages}
        lines.append(line | {"reward": last.reward, "tokens": {}})
        played.append(steps)
    env.close()
    lines[0]["tokens"] = costs_of(chat, played, method.read_by_qnet)["tokens"]
    return lines


def rollouts(env: envs.TextEnv, tasks: list[str], method: Method, config: Config, inputs: outputs.Inputs) -> list[dict]:
    """Trajectories of the tasks, those of a stopped run included."""
    path = config.run / f"self_train-{config.name}.rollouts.jsonl"
    settings = config.recipe() | env.settings
    del settings["threshold"]  # which chooses among them later
    out = outputs.Output(path, config, settings, inputs, itemgetter("task_id"))
    if todo := out.todo(tasks):
        agent = load_agent(inputs["sft"], dataclasses.replace(config, seed=config.seed + OTHER_LUCK), env)
        models = {Sample: agent.sample}
        if inputs["qnet"]:
            qnet = QNet.from_pretrained(inputs["qnet"], config)
            models[Score] = scorer(qnet, config.plain, config.cache_gb).score

        async def line_of(task: str) -> list[dict]:
            lines = await trajectories(env.fork(), task, method, agent.chat)
            return [{"task_id": task, "trajectories": lines}]

        played = drive(map(line_of, todo), models, config.in_flight or env.side_by_side)
        out.write(played, str(method), len(todo))
    out.finish(tasks)
    return [line for task in tasks for record in out.groups[task] for line in record["trajectories"]]


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


def cloned_lines(checkpoint: Path, env: envs.TextEnv) -> list[dict]:
    """What a checkpoint was cloned from, as lines of expert.jsonl."""
    path, most = demonstrations.demonstrations_of(checkpoint)
    if path is None:
        raise UserError(f"{checkpoint}: the demonstrations that it was cloned from are gone")
    lines = []
    for shown in demonstrations.read(path, env, most):
        line = {"env": env.name, "task": shown.state.task, "messages": shown.state.dump(), "reward": shown.reward}
        line = line if shown.task_id is None else {"task_id": shown.task_id} | line
        lines.append(line if shown.source == "expert" else line | {"source": shown.source})
    return lines


def clone_again(config: Config, sft_folder: Path, expert: Path, n: int) -> None:
    """Train RUN/sft-NAME on the first n trajectories of a file, with the settings that made --sft."""
    meta = outputs.meta_of(sft_folder)
    stage = clone_answers if "observation_loss" in meta["recipe"] else sft
    argv = outputs.shared_flags(config)
    for field in dataclasses.fields(stage.Config):
        value = meta["recipe"].get(field.name)
        if value is not None and field.name not in ("env", "env_option", "seed", "n_expert"):
            argv += [f"--{field.name.replace('_', '-')}", str(value)]
    argv += ["--expert", str(expert), "--n-expert", str(n), "--out", str(config.run / f"sft-{config.name}")]
    stage.main(argv + (["--overwrite"] if config.overwrite else []))


def settings_of(argv: list[str] | None) -> Config:
    config = read(Config, __doc__, argv)
    rft = config.method == "rft"
    if rft and config.M > 1:
        raise UserError(f"-M {config.M}: rft has no QNet to choose among candidates; give -N, trajectories a task")
    threshold = float(config.method in ("rft", "tree")) if config.threshold is None else config.threshold
    # Both sample as many actions.
    M, N = config.M or (1 if rft else 3), config.N or (3 if rft else 1)
    return dataclasses.replace(config, name=config.name or config.method, threshold=threshold, M=M, N=N)


def main(argv: list[str] | None = None) -> None:
    config = settings_of(argv)
    env = envs.from_config(config)
    inputs: outputs.Inputs = {"sft": outputs.find_or_make(config.sft, "sft", "sft", config), "qnet": None, "trees": None}
    if "model" not in outputs.meta_of(inputs["sft"])["recipe"]:
        raise UserError(f"{inputs['sft']}: its metadata do not say how sft.py made it; name an --sft that sft.py made")
    expert = cloned_lines(inputs["sft"], env)
    if config.method in ("tree", "expert"):
        inputs["trees"] = outputs.find_or_make(config.trees, "build_trees", "trees.jsonl", config)
        choose = {"tree": best_branch, "expert": expert_branch}[config.method]
        lines = list(filter(None, map(choose, read_trees(inputs["trees"]))))
    else:
        method = Method("sample", N=config.N)
        if config.method == "qlass":
            inputs["qnet"] = outputs.find_or_make(config.qnet, "train_qnet", "qnet", config)
            method = Method("qlass", "q", config.M, config.N)
        tasks = env.task_ids("train")[::-1]  # those of the trees (build_trees.py --tasks new)
        tasks = tasks[: config.limit] if config.limit else tasks
        lines = rollouts(env, tasks, method, config, inputs)
    new = kept(lines, config.threshold, expert)
    if not new:
        best = max((line["reward"] for line in lines), default=0.0)
        reason = f"none of {len(lines)} trajectories is new and reaches --threshold {config.threshold}"
        raise UserError(f"{reason} (highest reward {best:.3f}): lower it, or play more (--limit 0, -N)")
    merged = config.run / f"self_train-{config.name}.jsonl"
    mean = sum(line["reward"] for line in lines) / max(1, len(lines))
    figures = {"demonstrations": len(expert), "trajectories": len(lines), "kept": len(new), "mean_reward": mean}
    figures["tokens"] = sum(sum(line.get("tokens", {}).values()) for line in lines)  # a tree's are in its own metadata
    agent, text = config.run / f"sft-{config.name}", "".join(map(outputs.dumps, expert + new))
    cloned = agent.exists() and merged.exists() and not (config.no_train or config.overwrite)
    if cloned and merged.read_text(encoding="utf-8") != text:
        reason = f"{agent} was cloned from {merged}, which would change"
        raise UserError(f"{reason}: --overwrite clones it again, another --name keeps both")
    meta = outputs.begin(merged, dataclasses.replace(config, overwrite=True), config.recipe(), inputs)
    outputs.write_json(outputs.meta_path(merged), meta | figures)
    outputs.write_jsonl(merged, expert + new)
    kept_of = f"{len(new)} of {len(lines)} trajectories kept (mean reward {mean:.3f})"
    print(f"{merged}: {kept_of} beside {len(expert)} demonstrations")
    if not config.no_train:
        clone_again(config, inputs["sft"], merged, len(expert) + len(new))


if __name__ == "__main__":
    run_stage(main)
