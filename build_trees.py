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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import envs
from qlass import UserError
from qlass.batching import Sample, ask, drive
from qlass.chat import Chat, Rendering, State, parse_action, react
from qlass.cli import at_least, my_share, needed, parse, parser, run_stage
from qlass.files import SAMPLING_FREE, Output, cloned_from
from qlass.flags import add_sampling, load_agent
from qlass.records import actions_by_task, complete_trees

# D is each environment's `tree_depth` (App. A.2: 3 WebShop, 6 ScienceWorld, 8 ALFWorld); W and the bound are ours.
DEFAULTS = {"width": 3, "rollouts": 24, "limit": 250}
RETRIES = 2  # further draws and further rollouts for a node whose new child turned out to be an old one


# -------------------------------------------------------------------------------------------------------- Algorithm 2


@dataclass(eq=False)
class Node:
    """N of Alg. 2: the action N.a, the state N.s that it led to, its depth N.t, its children N.C."""

    state: State
    observation: str
    snapshot: Any
    t: int = 0
    parent: Node | None = None
    action: str | None = None
    reward: float = 0.0
    done: bool = False
    cut: bool = False  # by the agent's step limit, and so done
    source: str = "root"  # who acted first: "policy" or "expert"
    branch: int = 0  # the trajectory that made the node
    expert: bool = False  # on the expert's way, whoever came there first
    rollouts: int = 0
    children: dict[str, Node] = field(default_factory=dict)  # by parse_action

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(reversed(node.children.values()))


@dataclass
class Tree:
    """What the parts of Alg. 2 share: the tree's environment and task, its limits, and how far it has grown."""

    env: envs.TextEnv
    task_id: str
    rendering: Rendering
    depth: int  # D
    width: int = DEFAULTS["width"]  # W
    steps: float = math.inf  # limit of the agent's trajectories; a demonstration has the environment's own
    prune: str = "branch"
    branches: int = 0  # trajectories so far, the demonstration too

    def __post_init__(self) -> None:  # the agent explores nothing beyond its own step limit
        self.depth = min(self.depth, self.steps - 1)


def exploration_tree(tree: Tree, bound: float = math.inf, expert: dict | None = None) -> Generator:
    """Alg. 2. Yields Sample requests, returns the root U.

    bound: rollouts at most. expert: demonstrations (the actions of tau_0, by task or by first observation), of other
    tasks the environment's expert plays; None: no expert branch, and no second pass.
    """
    observation, info = tree.env.reset(options={"task_id": tree.task_id})
    root = Node(State.first(tree.env, observation, info), observation, tree.env.snapshot())  # lines 1-2
    queue = deque([root])  # line 3
    yield from process_queue(tree, queue, bound if expert is None else bound / 2)  # lines 4-10
    if expert is not None:  # the bound leaves as much for the second pass
        branch = replay(tree, root, expert.get(tree.task_id) or expert.get(observation.strip()))  # line 11
        # In front of the queue: at its end, the bound on rollouts would never let them come up.
        queue.extendleft(node for node in reversed(branch) if node.t <= tree.depth and not node.done)  # line 12
        yield from process_queue(tree, queue, bound + 1)  # line 13; the expert branch was no rollout
    tree.env.close()
    return root


def process_queue(tree: Tree, queue: deque[Node], bound: float) -> Generator:
    """ProcessExpansionQueue: Alg. 2, lines 4-10."""
    while queue and tree.branches < bound:  # line 4
        node = queue.popleft()  # line 5: first in, first out
        if node.t <= tree.depth and len(node.children) < tree.width and node.rollouts < tree.width + RETRIES:  # line 6
            node.rollouts += 1
            branch = yield from rollout(tree, node)  # lines 7-8
            if branch[-1].reward == 0:  # line 9: stop expansion
                branch = branch[:2] if tree.prune == "tail" else []
            queue.extend(n for n in branch if n.t <= tree.depth and not n.done)  # line 10


def rollout(tree: Tree, node: Node) -> Generator:
    """A trajectory of the agent from N.s, as the branch of nodes from N to its leaf."""
    tree.branches += 1
    branch = [node]
    while not (node.done or node.t == tree.steps):  # a demonstration may have gone on beyond the limit
        tree.env.restore(node.snapshot)
        first = len(branch) == 1  # here a new child is wanted; from there on the agent plays as it would
        key = (tree.task_id, tree.branches, node.t)  # of the noise
        drawn = yield ask(tree.env, node.state, 1 + RETRIES * first, key, tree.rendering)
        actions = [candidate.text for candidate in drawn]
        new = [action for action in actions if parse_action(action) not in node.children]
        node = step(tree, node, new[0] if first and new else actions[0], "policy")
        branch.append(node)
    return branch


def replay(tree: Tree, root: Node, actions: Sequence[str] | None) -> list[Node]:
    """tau_0, merged at the root: a demonstration, to its end. None: the environment's expert plays, to its limit."""
    tree.branches += 1
    limit = tree.env.max_steps
    longer = isinstance(limit, int) and len(actions or ()) > limit  # than the agent's episodes
    if longer:
        tree.env.max_steps = len(actions)
    tree.env.reset(options={"task_id": tree.task_id})
    branch = [root]
    played = (react(thought, action) for thought, action in tree.env.expert(tree.task_id))
    for action in actions or played:
        node = step(tree, branch[-1], action, "expert")
        node.expert = True
        tree.env.restore(node.snapshot)
        branch.append(node)
        if node.done and not node.cut:
            break
    if longer:
        tree.env.max_steps = limit
    for node in branch[:-1]:  # beyond the agent's limit the demonstration went on: these are no leaves
        if node.cut:
            node.reward, node.done, node.cut = 0.0, False, False
    return branch


def step(tree: Tree, node: Node, action: str, source: str) -> Node:
    """The child of a node, where the environment stands, by this action: the one that is there, or a new one."""
    key = parse_action(action)
    if key not in node.children:
        observation, reward, terminated, truncated, _ = tree.env.step(key)
        observation = tree.env.message(observation)
        child = Node(
            node.state.then(action, observation), observation, tree.env.snapshot(), node.t + 1, node, action,
            float(reward), terminated or truncated, source=source, branch=tree.branches,
        )  # fmt: skip
        if source == "policy" and child.t == tree.steps and not child.done:
            child.reward, child.done, child.cut = tree.env.reward_if_cut(), True, True
        node.children[key] = child
    return node.children[key]


# ------------------------------------------------------------------------------------------------------------ the file


def tree_lines(tree: Tree, chat: Chat, bound: float, expert: dict | None) -> Generator:
    """A task's tree as lines of trees.jsonl. With --truncate the root counts the prompts without their oldest turns."""
    root = yield from exploration_tree(tree, bound, expert)
    records = tree_records(tree.env, tree.task_id, root)
    if chat.rendering.truncate:
        read = [n for n in root.walk() if any(child.source == "policy" for child in n.children.values())]
        records[0]["cut_prompts"] = sum(chat.is_cut(n.state) for n in read)
    return records


WRITTEN = ("action", "observation", "reward", "done", "source", "branch", "expert")  # of a node


def tree_records(env: envs.TextEnv, task_id: str, root: Node) -> list[dict]:
    """A tree as lines of trees.jsonl, parents before children; the root carries the prompt and the number of nodes."""
    nodes = list(root.walk())
    number = {id(node): i for i, node in enumerate(nodes)}
    records = []
    for i, node in enumerate(nodes):
        parent = number[id(node.parent)] if node.parent else None
        place = {"task_id": task_id, "node_id": i, "parent_id": parent, "depth": node.t}
        records.append(place | {name: getattr(node, name) for name in WRITTEN})
    records[0] |= {"env": env.name, "task": root.state.task, "messages": root.state.dump(), "nodes": len(nodes)}
    return records


def figures_of(records: list[dict], recorded: dict[str, float]) -> dict[str, Any]:
    """For the metadata: trees, nodes, the agent's leaves and their mean reward, demonstrations, and those that failed:
    they earned nothing, or another reward than is `recorded` of them, by task or by first observation."""
    roots = {r["task_id"]: r for r in records if r["parent_id"] is None}
    leaves = [r["reward"] for r in records if r["done"] and r["source"] == "policy"]
    ends = {r["task_id"]: r["reward"] for r in records if r["expert"]}  # of each demonstration its last node
    failed = 0
    for task, reward in ends.items():
        expected = recorded.get(task, recorded.get(roots[task]["observation"].strip(), reward))
        failed += not reward or abs(expected - reward) > 1e-3
    mean = sum(leaves) / max(1, len(leaves))
    figures = {"trees": len(roots), "nodes": len(records), "leaves": len(leaves), "mean_leaf_reward": mean}
    return figures | {"demonstrations": len(ends), "failed_demonstrations": failed}


# --------------------------------------------------------------------------------------------------------------- main


def tell_matches(env: envs.TextEnv, tasks: list[str], expert: dict[str, list[str]], file: Path, named: bool) -> None:
    """Say for how many of the tasks a file has demonstrations; UserError if for none and it was named."""
    begins = {task: env.reset(options={"task_id": task})[0].strip() for task in tasks if task not in expert}
    matches = sum(begins.get(task, task) in expert for task in tasks)
    if named and not matches:
        raise UserError(f"{file}: none of its {len(expert)} demonstrations is of a task here: --no-expert does without")
    print(f"{file}: demonstrations of {matches} of {len(tasks)} tasks; the environment's expert plays any others")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, epilog="App. A.2: D = 3 on WebShop.")
    envs.add_arguments(flags, argv)
    add = flags.add_argument
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--out", type=Path, help="default: RUN/trees.jsonl")
    add("--depth", type=at_least(0), help="D (default: 3 WebShop, 6 ScienceWorld, 8 ALFWorld and FrozenLake)")
    add("--width", type=at_least(1), default=DEFAULTS["width"], help="W (default: %(default)s)")
    add("--rollouts", type=at_least(0), default=DEFAULTS["rollouts"], help="trajectories a tree at most (24; 0: any)")
    add("--steps", type=at_least(1), help="step limit of the agent (default: the environment's own for trees)")
    add("--limit", type=at_least(0), default=DEFAULTS["limit"], help="training tasks (default: %(default)s; 0: all)")
    add("--temperature", type=at_least(0, float), help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--expert", type=Path, help="demonstrations for the expert branch (default: those the agent was cloned from)")
    add("--no-expert", action="store_true", help="leave out the expert branch (lines 11-13)")
    line_9 = "a branch without reward queues nothing (branch, line 9), or the expanded node and its first (tail)"
    add("--prune", choices=["branch", "tail"], default="branch", help=line_9)
    add("--device")
    add_sampling(flags)
    return parse(flags, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.depth = env.tree_depth if args.depth is None else args.depth
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    args.out = args.out or args.run / "trees.jsonl"
    steps = args.steps or env.tree_steps
    if isinstance(env.max_steps, int):  # else there is no limit, or each task has its own
        steps = min(steps, env.max_steps)
    if args.steps and steps < args.steps:
        print(f"--steps {args.steps}: episodes end after {steps} here (--env-option max_steps=N)")
    settings = {"depth": args.depth, "width": args.width, "steps": steps, "prune": args.prune}

    # From the far end of the training list: where there are more tasks than demonstrations, the agent gets new ones.
    tasks = env.task_ids("train")[::-1][: args.limit or None]
    file, most = (args.expert, None) if args.expert else cloned_from(args.sft)
    expert, rewards = actions_by_task(file, env, most) if file and not args.no_expert else ({}, {})
    by_id = expert.keys() & set(env.task_ids("train"))  # an agent's own demonstrations are mostly of other tasks
    if file and not args.no_expert and (args.expert or not by_id):
        tell_matches(env, tasks, expert, file, bool(args.expert))
    args.expert = file

    trees = Output(args.out, vars(args), complete_trees, [args.sft, file], SAMPLING_FREE, lambda node: node["task_id"])
    finished = {record["task_id"] for record in trees.records}
    share = my_share(tasks)
    todo = [task_id for task_id in share if task_id not in finished]
    tokens = None  # what another process or an earlier call computed, before a stop, is not known
    if todo:
        policy = load_agent(args, env)
        explored = (Tree(env.fork(), task_id, policy.chat.rendering, **settings) for task_id in todo)
        demonstrated = None if args.no_expert else expert
        growing = (tree_lines(tree, policy.chat, args.rollouts or math.inf, demonstrated) for tree in explored)
        grown = drive(growing, {Sample: policy.sample}, args.in_flight or env.side_by_side)
        trees.grow(grown, "trees", len(share), len(share) - len(todo))
        tokens = policy.computed if len(todo) == len(tasks) else None
    figures = figures_of(trees.records, rewards)
    rank = {task: n for n, task in enumerate(tasks)}
    trees.finish(lambda record: rank.get(record["task_id"], len(rank)), **figures, tokens=tokens)
    leaves = f"mean reward of the agent's {figures['leaves']} leaves {figures['mean_leaf_reward']:.3f}"
    print(f"{trees.path}: {figures['trees']} trees, {figures['nodes']} nodes, {leaves}")
    if failed := figures["failed_demonstrations"]:
        print(f"{failed} demonstrations earned nothing here, or another reward than recorded: are they of these tasks?")


if __name__ == "__main__":
    run_stage(main)
