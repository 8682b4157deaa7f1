"""Stage 2: exploration trees (Sec. 4.2, Alg. 2).

    reads   RUN/sft/ (the behaviour-cloned agent)
    writes  RUN/trees.jsonl: one node per line, a tree's lines together, the root first

    python build_trees.py --env webshop --depth 3 --width 3

For each training task the agent plays trajectories from the root, then from the nodes of branches that scored, until
every node up to depth D has W children. A state is the path from the root, so no text is stored twice. A stopped run
resumes with the first tree that is not complete.

Where Alg. 2 leaves a choice: the popped node belongs to its new branch (else it would never reach width W); an action
equal to an existing child's is that child, so that only what differs becomes new nodes; a node is expanded at most
W + RETRIES times, a tree at most --rollouts times (without this bound up to W^(D+1), 19,683 with ALFWorld's depth).
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import envs
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, react
from qlass.cli import Output, at_least, more, must_exist, my_share, needed, parse, parser, run_stage
from qlass.driver import Sample, ask, drive
from qlass.files import KINDS, SAMPLING_FREE, actions_by_task, cloned_from, wrong
from qlass.models import add_loading
from qlass.policy import add_sampling, load_agent

# App. A.2: D = 3 on WebShop, 6 on ScienceWorld, 8 on ALFWorld (each environment's `tree_depth`). W = 3 and the bound on
# the rollouts are ours: an unbounded tree takes up to W^(D+1).
DEFAULTS = {"width": 3, "rollouts": 24, "limit": 250}
TAKES = "about two minutes with the tiny model on two cores"
RETRIES = 2  # further draws and further rollouts for a node whose new child turned out to be a known one


@dataclass(eq=False)
class TreeNode:
    """N of Alg. 2: the action N.a, the state N.s that it led to, its depth N.t, its children N.C."""

    state: State
    observation: str
    snapshot: Any
    t: int = 0
    parent: TreeNode | None = None
    action: str | None = None
    reward: float = 0.0
    done: bool = False
    cut: bool = False  # by the step limit, and so done
    source: str = "root"
    branch: int = 0
    expert: bool = False  # on the expert's way, whoever came there first
    rollouts: int = 0
    children: dict[str, TreeNode] = field(default_factory=dict)  # by parse_action

    def walk(self) -> Iterator[TreeNode]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(reversed(node.children.values()))


def exploration_tree(
    env: envs.TextEnv, task_id: str, rendering: Rendering, depth: int, width: int, rollouts: int, with_expert: bool,
    prune: str = "branch", demonstrations: dict[str, list[str]] | None = None, steps: int | None = None,
) -> Generator[Sample, list, TreeNode]:  # fmt: skip
    """Alg. 2. Yields Sample requests, returns the root U.

    steps: limit of the agent's trajectories; None: the environment's own, which a demonstration keeps in any case.
    demonstrations: the actions of tau_0, by task or by first observation; other tasks' the environment's expert plays.
    """
    observation, info = env.reset(options={"task_id": task_id})
    root = TreeNode(State.first(env, observation, info), observation, env.snapshot())  # lines 1-2
    whole, steps = env.max_steps, steps or env.max_steps
    env.max_steps = steps
    if isinstance(steps, int):  # behind the limit, where a demonstration may lead, the agent has nothing to explore
        depth = min(depth, steps - 1)
    queue = deque([root])  # line 3
    branches = 0

    def child(node: TreeNode, action: str, source: str) -> TreeNode:
        """The child of `node`, where `env` stands, by this action: the one that is there, or what a step makes."""
        key = parse_action(action)
        if key not in node.children:
            observation, reward, terminated, truncated, _ = env.step(key)
            message = env.message(observation)
            node.children[key] = TreeNode(
                node.state.then(action, message), message, env.snapshot(), node.t + 1, node, action,
                float(reward), bool(terminated or truncated), bool(truncated and not terminated), source, branches,
            )  # fmt: skip
        return node.children[key]

    def rollout(node: TreeNode) -> Generator[Sample, list, list[TreeNode]]:
        """A trajectory from N.s, as the branch of nodes from N to its leaf."""
        branch = [node]
        while not (branch[-1].done or branch[-1].t == steps):  # a demonstration may have gone on there
            node = branch[-1]
            env.restore(node.snapshot)
            # A new child is wanted where the branch begins; from there on the agent plays as it would.
            draws = 1 + RETRIES if len(branch) == 1 else 1
            candidates = yield ask(env, node.state, draws, (task_id, branches, node.t), rendering)
            texts = [candidate.text for candidate in candidates]
            fresh = (text for text in texts if parse_action(text) not in node.children)
            branch.append(child(node, next(fresh, texts[0]) if len(branch) == 1 else texts[0], "policy"))
        return branch

    def expand(bound: float) -> Generator[Sample, list, None]:
        nonlocal branches
        while queue and branches < bound:  # line 4
            node = queue.popleft()  # line 5: first in, first out
            if node.t <= depth and len(node.children) < width and node.rollouts < width + RETRIES:  # line 6
                node.rollouts += 1
                branches += 1
                branch = yield from rollout(node)  # lines 7-8
                if branch[-1].reward == 0:  # line 9: stop expansion
                    branch = branch[:2] if prune == "tail" else []
                queue.extend(n for n in branch if n.t <= depth and not n.done)  # line 10

    def expert_branch() -> list[TreeNode]:
        """tau_0, merged at the root: the demonstration, to the environment's own limit."""
        branch, known = [root], demonstrations or {}
        env.max_steps = whole
        env.reset(options={"task_id": task_id})
        played = (react(thought, action) for thought, action in env.expert(task_id))
        for action in known.get(task_id) or known.get(root.observation.strip()) or played:
            made, key = branch[-1].children, parse_action(action)
            if key in made and made[key].cut and steps != whole:
                del made[key]  # where the agent's limit was, a demonstration goes on
            branch.append(child(branch[-1], action, "expert"))
            branch[-1].expert = True
            env.restore(branch[-1].snapshot)
            if branch[-1].done:
                break
        env.max_steps = steps
        return branch

    bound = rollouts or math.inf
    yield from expand(bound / 2 if with_expert else bound)  # the bound leaves as much for the second pass
    if with_expert:
        branches += 1
        branch = expert_branch()  # line 11
        # In front: behind what the first pass left, a bound on the rollouts would never let them come up.
        queue.extendleft(n for n in reversed(branch) if n.t <= depth and not n.done)  # line 12
        yield from expand(bound + 1)  # line 13; the expert branch was no rollout
    env.close()
    return root


def tree_records(env: envs.TextEnv, task_id: str, root: TreeNode) -> list[dict]:
    """A tree as lines of trees.jsonl, parents before children; the root carries the prompt and the number of nodes."""
    nodes = list(root.walk())
    number = {id(node): i for i, node in enumerate(nodes)}
    records = [
        {
            "task_id": task_id, "node_id": number[id(n)], "parent_id": number[id(n.parent)] if n.parent else None,
            "depth": n.t, "action": n.action, "observation": n.observation, "reward": n.reward, "done": n.done,
            "source": n.source, "branch": n.branch, "expert": n.expert,
        }
        for n in nodes
    ]  # fmt: skip
    records[0] |= {"env": env.name, "task": root.state.task, "messages": root.state.dump(), "nodes": len(nodes)}
    return records


FIELDS = ("task_id", "node_id", "reward", "done", "source")


def complete_trees(records: list[dict]) -> int:
    """How many of these lines belong to trees that are all there."""
    complete = 0
    while complete < len(records) and complete + records[complete]["nodes"] <= len(records):
        tree = records[complete : complete + records[complete]["nodes"]]
        if not tree or any(wrong(node, KINDS, FIELDS) for node in tree):
            raise ValueError(f"the tree of task {records[complete].get('task_id')} is damaged")
        complete += len(tree)
    return complete


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, epilog="App. A.2: D = 3 on WebShop.")
    envs.add_arguments(made, argv)
    add = made.add_argument
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--out", type=Path, help="default: RUN/trees.jsonl")
    add("--depth", type=at_least(0), help="D (default: 3 WebShop, 6 ScienceWorld, 8 ALFWorld and FrozenLake)")
    add("--width", type=at_least(1), default=DEFAULTS["width"], help="W (default: %(default)s)")
    said = "trajectories a tree at most (default: %(default)s; 0, the paper: any)"
    add("--rollouts", type=at_least(0), default=DEFAULTS["rollouts"], help=said)
    add("--steps", type=at_least(1), help="step limit of the agent's trajectories (default: the environment's)")
    said = "number of training tasks (default: %(default)s; 0: all)"
    add("--limit", type=at_least(0), default=DEFAULTS["limit"], metavar="N", help=said)
    add("--shard", metavar="I/N", help="grow every N-th tree from the I-th on; without it, shards are joined")
    add("--temperature", type=at_least(0, float), help="default: the checkpoint's own (0.7; tiny: 1)")
    said = "demonstrations of the expert branch (default: those that the agent was cloned from)"
    add("--expert", type=Path, metavar="FILE", help=said)
    add("--no-expert", action="store_true", help="leave out the expert branch (lines 11-13)")
    said = "a branch without reward queues nothing (branch, line 9), or its first new node alone (tail)"
    add("--prune", choices=["branch", "tail"], default="branch", help=said)
    add("--device")
    more(made, add_loading, add_sampling)
    return parse(made, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.depth = env.tree_depth if args.depth is None else args.depth
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    args.out = args.out or args.run / "trees.jsonl"
    must_exist(args.expert)
    args.expert, shown = (args.expert, None) if args.expert else cloned_from(args.sft)

    # From the far end of the training list: where there are more tasks than demonstrations, the agent gets new ones.
    tasks = env.task_ids("train")[::-1][: args.limit or None]
    if not tasks:
        raise UserError(f"{args.env}: no training tasks")
    trees = Output(args, complete_trees, [args.sft, args.expert], SAMPLING_FREE, about=lambda line: line["task_id"])
    finished = {record["task_id"] for record in trees.records}
    limits = [n for n in (args.steps, env.tree_steps, env.max_steps) if isinstance(n, int)]
    if not limits:
        raise UserError(f"{env.name}: its trees have no limit of steps: give --steps, or tree_steps to its class")
    steps = args.steps or min(limits)
    demonstrations = actions_by_task(args.expert, env, shown) if args.expert else {}
    mine = my_share(tasks, args.shard)
    if todo := [t for t in mine if t not in finished]:
        policy = load_agent(args)
        rendering = policy.chat.rendering

        def explore(task_id: str) -> Generator:
            root = yield from exploration_tree(
                env.fork(), task_id, rendering, args.depth, args.width, args.rollouts, not args.no_expert, args.prune,
                demonstrations, steps,
            )  # fmt: skip
            records = tree_records(env, task_id, root)
            if rendering.truncate:
                records[0]["cut_prompts"] = sum(policy.chat.is_cut(n.state) for n in root.walk() if n.children)
            return records

        grown = drive(map(explore, todo), {Sample: policy.sample}, args.in_flight or env.side_by_side)
        trees.grow(grown, "trees", len(mine), len(mine) - len(todo))
    leaves = [r["reward"] for r in trees.records if r["done"] and r["source"] == "policy"]
    n_trees = len({r["task_id"] for r in trees.records})
    figures = {"trees": n_trees, "nodes": len(trees.records), "leaves": len(leaves)}
    figures["mean_leaf_reward"] = sum(leaves) / max(1, len(leaves))
    if cut := sum(r.get("cut_prompts", 0) for r in trees.records):
        figures["cut_prompts"] = cut
        print(f"{cut} prompts lost their oldest turns")
    rank = {task: n for n, task in enumerate(tasks)}
    # What an earlier call computed, before a stop, is not known.
    figures["tokens"] = policy.computed if len(todo) == len(mine) else None
    trees.finish(lambda r: rank.get(r["task_id"], len(rank)), **figures)
    print(
        f"{trees.path}: {n_trees} trees, {len(trees.records)} nodes, "
        f"mean reward of the agent's {len(leaves)} leaves {figures['mean_leaf_reward']:.3f}"
    )


if __name__ == "__main__":
    run_stage(main)
