"""Self-training: the agent learns from its own trajectories on the training tasks (Sec. 5.2, Fig. 4).

    reads   RUN/sft/ and what it was trained on; --method qlass: RUN/qnet/; --method tree: RUN/trees.jsonl
    writes  RUN/self_train-NAME.rollouts.jsonl (all trajectories), RUN/self_train-NAME.jsonl (demonstrations and the
            trajectories that were kept, in expert.jsonl's layout, to be cloned by sft.py --expert), which each
            command of this --name replaces

    python -m experiments.self_train --env webshop --method qlass --qnet runs/webshop/qnet-avg --name target-avg

    rft     -N sampled trajectories per task, no QNet (rejection-sampling fine-tuning, Yuan et al. 2023)
    qlass   -N trajectories per task, each action the best of -M by QNet (Alg. 4); one QNet for each process reward
    tree    in each exploration tree, the best branch that the agent ended, which may begin with the expert's steps
    expert  in each exploration tree, the demonstration: cloning from all that QNet saw

rft and tree keep the trajectories whose true reward reaches --threshold: on training tasks the reward may be used.
qlass keeps all that are new, as the paper does, or with --threshold those that reach it. The new agent starts from
where RUN/sft started, not from RUN/sft, and is to be trained in the same way on more data.
"""

import dataclasses
import json
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt
from tyro.conf import arg

import envs
from q_search import Method, episode
from qlass import UserError, demonstrations, files, outputs
from qlass.agent import load_agent
from qlass.batching import Sample, Score, drive
from qlass.chat import Chat
from qlass.files import Inputs
from qlass.inputs import find_agent, find_or_make
from qlass.messages import without_thinking
from qlass.outputs import Output
from qlass.pairs import states_of
from qlass.results import costs_of
from qlass.settings import Number, Sampling, place, read_settings, run_stage, workload
from qlass.trees import read_trees
from train_qnet import QNet, scorer

OTHER_LUCK = 1_000_000  # added to the seed: where trees grew on the same tasks their branches are not sampled again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    """Sec. 5.2: M = 3, N = 1."""

    stage: ClassVar = "self_train"

    method: Literal["rft", "qlass", "tree", "expert"] = "qlass"  # see above
    name: str = ""  # of the files (the method)
    M: Annotated[PositiveInt, arg(aliases=["-M"])] = 3  # candidates a step, of qlass
    N: Annotated[PositiveInt | None, arg(aliases=["-N"])] = None  # trajectories a task (qlass 1, rft 3: equal samples)
    threshold: Number | None = None  # reward that it must reach (rft, tree: 1; qlass 0, all)
    limit: NonNegativeInt = workload(300)  # training tasks (0: all)
    sft: Path | None = place(None)  # checkpoint of the agent (RUN/sft, made if missing)
    qnet: Path | None = place(None)  # RUN/qnet, made if missing
    trees: Path | None = place(None)  # RUN/trees.jsonl, made if missing


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


def rollouts(env: envs.TextEnv, tasks: list[str], method: Method, config: Config, inputs: Inputs) -> list[dict]:
    """Trajectories of the tasks, those of a stopped run included."""
    path = config.run / f"self_train-{config.name}.rollouts.jsonl"
    settings = config.recipe() | env.settings
    del settings["threshold"]  # which chooses among them later
    out = Output(path, config, settings, inputs, itemgetter("task_id"))
    if todo := out.todo(tasks):
        agent = load_agent(inputs["sft"], dataclasses.replace(config, seed=config.seed + OTHER_LUCK), env)
        models = {Sample: agent.sample}
        if inputs["qnet"]:
            qnet = QNet.from_pretrained(inputs["qnet"], config)
            models[Score] = scorer(qnet, config.plain, config.cache_gb).score

        async def group_of(task: str) -> list[dict]:
            lines = await trajectories(env.fork(), task, method, agent.chat)
            return [{"task_id": task, "trajectories": lines}]

        played = drive(map(group_of, todo), models, env.side_by_side)
        out.write(played, str(method), len(todo))
    out.finish(tasks)
    lines = []
    for task in tasks:
        for record in out.groups[task]:
            lines += record["trajectories"]
    return lines


def best_branch(tree: list[dict]) -> list[dict]:
    """The branch with the highest reward that the agent ended, of equals the shortest; [] if it ended none."""
    ends = [node for node in tree if node["done"] and node["source"] == "policy"]
    ends.sort(key=lambda node: (-node["reward"], node["depth"]))
    return [branch_to(tree, node) for node in ends[:1]]


def expert_branch(tree: list[dict]) -> list[dict]:
    """The demonstration in a tree; [] if there is none."""
    return [branch_to(tree, node) | {"source": "expert"} for node in tree if node["expert"]][-1:]


def branch_to(tree: list[dict], leaf: dict) -> dict:
    """The branch from the root to this node, as a line of expert.jsonl."""
    before = states_of(tree)[leaf["parent_id"]]
    messages = [*before.dump(), {"role": "assistant", "content": leaf["action"]}]
    origin = {key: tree[0].get(key, "") for key in ("task_id", "env", "task")}
    return origin | {"messages": messages, "reward": leaf["reward"]}


def kept(lines: Iterable[dict], threshold: float, expert: Iterable[dict]) -> list[dict]:
    """The distinct trajectories that earned enough and are not among `expert`; "source" tells whose they are."""
    new = {json.dumps(line["messages"]): line for line in lines if line["reward"] >= threshold - 1e-9}
    for line in expert:
        new.pop(json.dumps(line["messages"]), None)
    trajectories = []
    for line in filter(speaks, new.values()):
        fields = {name: line[name] for name in line if name != "tokens"}
        trajectories.append(fields | {"source": line.get("source", "policy")})
    return trajectories


def speaks(line: dict) -> bool:
    """True if no reply is empty, and no thought of one is cut."""
    replies = (turn["content"] for turn in line["messages"] if turn["role"] == "assistant")
    return all(without_thinking(reply).strip() for reply in replies)


def cloned_lines(checkpoint: Path, env: envs.TextEnv) -> list[dict]:
    """Demonstrations that a checkpoint was cloned from, as lines of expert.jsonl."""
    path, most = demonstrations.demonstrations_of(checkpoint)
    if path is None:
        raise UserError(f"{checkpoint}: the demonstrations that it was cloned from are gone")
    lines = []
    for shown in demonstrations.read(path, env, most):
        line = {} if shown.task_id is None else {"task_id": shown.task_id}
        line |= {"env": env.name, "task": shown.state.task, "messages": shown.state.dump(), "reward": shown.reward}
        if shown.source != "expert":
            line["source"] = shown.source
        lines.append(line)
    return lines


def settings_of(argv: list[str] | None) -> Config:
    config = read_settings(Config, __doc__, argv)
    threshold = config.threshold
    if threshold is None:
        threshold = float(config.method in ("rft", "tree"))
    N = config.N or (3 if config.method == "rft" else 1)
    return dataclasses.replace(config, name=config.name or config.method, threshold=threshold, N=N)


def gather(config: Config, env: envs.TextEnv, inputs: Inputs) -> list[dict]:
    """All trajectories that the method has, as lines of expert.jsonl. `inputs` gets what they are made from."""
    if config.method in ("tree", "expert"):
        inputs["trees"] = find_or_make(config.trees, "build_trees", "trees.jsonl", config)
        choose = best_branch if config.method == "tree" else expert_branch
        return list(chain.from_iterable(map(choose, read_trees(inputs["trees"]))))
    method = Method("sample", N=config.N)
    if config.method == "qlass":
        inputs["qnet"] = find_or_make(config.qnet, "train_qnet", "qnet", config)
        method = Method("qlass", "q", config.M, config.N)
    tasks = env.task_ids("train")[::-1]  # from the far end, as build_trees.py --tasks new
    return rollouts(env, tasks[: config.limit or None], method, config, inputs)


def main(argv: list[str] | None = None) -> None:
    config = settings_of(argv)
    env = envs.from_config(config)
    if files.rank_and_size()[1] > 1:
        raise UserError("self-training is for one process")
    sft = find_agent(config)
    expert = cloned_lines(sft, env)
    inputs: Inputs = {"sft": sft, "qnet": None, "trees": None}
    lines = gather(config, env, inputs)
    new = kept(lines, config.threshold, expert)
    if not new:
        best = max((line["reward"] for line in lines), default=0.0)
        reason = f"none of {len(lines)} trajectories is new and reaches --threshold {config.threshold}"
        raise UserError(f"{reason} (highest reward {best:.3f}): lower it, or play more (--limit 0, -N)")
    merged = config.run / f"self_train-{config.name}.jsonl"
    mean = sum(line["reward"] for line in lines) / len(lines)
    figures = {"demonstrations": len(expert), "trajectories": len(lines), "kept": len(new), "mean_reward": mean}
    figures["tokens"] = sum(sum(line.get("tokens", {}).values()) for line in lines)  # 0 of trees, which count none
    meta = outputs.begin(merged, dataclasses.replace(config, overwrite=True), config.recipe(), inputs)
    outputs.publish(merged, expert + new, meta | figures)
    kept_of = f"{len(new)} of {len(lines)} trajectories kept (mean reward {mean:.3f})"
    print(f"{merged}: {kept_of} beside {len(expert)} demonstrations")
    named = f"--run {config.run} --expert {merged} --out {config.run / f'sft-{config.name}'}"
    print(f"clone them, with the other flags that {sft} had: python sft.py {named}")


if __name__ == "__main__":
    run_stage(main)
