"""Stage 2: exploration trees (Section 4.2, Algorithm 2).

    reads   RUN/sft/          the behaviour-cloned agent, and the demonstrations it was cloned from
    writes  RUN/trees.jsonl   one node per line, the root of each tree first

    python build_trees.py --env webshop --depth 3 --width 3

For each training task the agent plays rollouts from the root, then from the nodes of branches that
scored. A node is expanded while it has fewer than W children and its depth is at most D. A
branch without reward queues nothing, not even the node that it began at.

The paper grows trees on the tasks that the agent was cloned from (--tasks cloned). The default is
other tasks.

Where the paper leaves a choice:
- The expanded node joins its new branch in the queue. Otherwise no node would get W children.
- Two actions that the environment executes alike are one child. If all draws repeat old children,
  the rollout follows one of them. If it leaves the old nodes further down, it adds a child there,
  even to a node that has W. At most W + EXTRA_ROLLOUTS rollouts begin at a node.
- A tree gets at most --rollouts rollouts, half of them before the demonstration. Without a bound it
  could take W^(D+1): 19,683 with ALFWorld's depth.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import envs
from qlass import published
from qlass.agent import load_agent
from qlass.batching import Candidate, Sample, ask, drive
from qlass.chat import Rendering
from qlass.flags import Parser, add_sampling, natural, positive, real, run_stage
from qlass.messages import State, parse_action, react
from qlass.models import settle_precision
from qlass.published import Demonstration
from qlass.runs import Output, need, parse

# D is each environment's `tree_depth` (Appendix A.2). The paper does not say W and the bound.
DEFAULTS = {"width": 3, "rollouts": 24, "limit": 250}
EXTRA_DRAWS = 2  # of a rollout's first action, which is to be a new child
EXTRA_ROLLOUTS = 2  # of a node, beyond W, for those that found no new child

# ----------------------------------------------------------------------------------------- the tree


@dataclass(eq=False)
class Node:
    """N of Algorithm 2: an action, the state that it led to, and its children."""

    state: State
    observation: str
    snapshot: Any  # of the environment in this state
    depth: int = 0
    parent: Node | None = None
    action: str | None = None
    reward: float = 0.0
    done: bool = False
    cut: float | None = None  # the agent's reward, if its limit ended an episode the expert goes on
    source: str = "root"  # who acted first: "policy" or "expert"
    branch: int = 0  # number of the trajectory that created the node
    expert: bool = False  # the demonstration passes here
    rollouts: int = 0  # trajectories of the agent that started here
    children: dict[str, Node] = field(default_factory=dict)  # by Explorer.key

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))


# -------------------------------------------------------------------------------------- Algorithm 2


@dataclass
class Explorer:
    """Grows the tree of one task. Its generators yield `Sample` requests and get candidates."""

    env: envs.TextEnv
    task_id: str
    rendering: Rendering
    max_depth: int  # D
    width: int = DEFAULTS["width"]  # W
    max_rollouts: float = math.inf
    max_steps: float = math.inf  # of the agent's trajectories; a demonstration may be longer
    prune: str = "branch"
    branches: int = 0  # trajectories so far, the demonstration included

    def explore(
        self, demonstrations: dict[str, Demonstration] | None = None
    ) -> Generator[Sample, list[Candidate], Node]:
        """Algorithm 2. Returns the root.

        demonstrations: tau_0 by task; the environment's expert plays other tasks. None: no expert
        branch (lines 11 to 13).
        """
        observation, info = self.env.reset(options={"task_id": self.task_id})
        state = State.first(self.env, observation, info)
        root = Node(state, observation, self.env.snapshot())  # lines 1-2
        queue = deque([root])  # line 3
        bound = self.max_rollouts if demonstrations is None else self.max_rollouts / 2
        yield from self.process_queue(queue, bound)  # lines 4-10
        if demonstrations is not None:
            tau = demonstrations.get(self.task_id)
            branch = self.replay(root, tau.actions if tau else None)  # line 11
            # In front of the queue: at its end, the bound would never let them come up.
            queue.extendleft(reversed(branch))  # line 12
            # The demonstration is a branch, but no rollout.
            yield from self.process_queue(queue, self.max_rollouts + 1)  # line 13
        self.env.close()
        return root

    def process_queue(
        self, queue: deque[Node], bound: float
    ) -> Generator[Sample, list[Candidate], None]:
        """ProcessExpansionQueue, until the tree has `bound` branches."""
        while queue and self.branches < bound:  # line 4
            node = queue.popleft()  # line 5: first in, first out
            if self.may_expand(node):  # line 6
                branch = yield from self.rollout(node)  # lines 7-8
                if not (branch[-1].reward or branch[-1].cut):  # line 9: stop expansion
                    branch = branch[:2] if self.prune == "tail" else []
                queue.extend(branch)  # line 10; branch[0] is the expanded node

    def may_expand(self, node: Node) -> bool:
        """Line 6, and whether the agent may act here and has not too often found no new child."""
        if node.done or node.depth > self.max_depth or node.depth >= self.max_steps:
            return False
        return len(node.children) < self.width and node.rollouts < self.width + EXTRA_ROLLOUTS

    def rollout(self, node: Node) -> Generator[Sample, list[Candidate], list[Node]]:
        """The agent plays from a node to the end of the episode. Returns the branch, node first."""
        self.branches += 1
        node.rollouts += 1
        branch = [node]
        draws = 1 + EXTRA_DRAWS
        while not node.done and node.depth < self.max_steps:
            self.env.restore(node.snapshot)  # an old child was entered without a step
            noise = (self.task_id, self.branches, node.depth)
            candidates = yield ask(self.env, node.state, draws, noise, self.rendering)
            actions = [candidate.text for candidate in candidates]
            new = [action for action in actions if self.key(action) not in node.children]
            node = self.step(node, new[0] if new else actions[0], "policy")
            branch.append(node)
            draws = 1
        return branch

    def replay(self, root: Node, actions: Sequence[str] | None) -> list[Node]:
        """tau_0, merged into the tree at its root. None: the environment's expert plays."""
        self.branches += 1
        limit = self.env.max_steps
        if actions and isinstance(limit, int):  # it may be longer than the agent's episodes
            self.env.max_steps = max(limit, len(actions))
        self.env.reset(options={"task_id": self.task_id})
        expert = (react(thought, move) for thought, move in self.env.expert(self.task_id))
        node = root
        branch = [root]
        for action in actions or expert:
            if node.done and not self.reopen(node):
                break
            node = self.step(node, action, "expert")
            node.expert = True
            self.env.restore(node.snapshot)
            branch.append(node)
            if node.done and not self.at_limit(node):
                break
        self.env.max_steps = limit
        return branch

    def at_limit(self, node: Node) -> bool:
        return node.source == "policy" and node.depth == self.max_steps

    def reopen(self, node: Node) -> bool:
        """Take the last action again, without the limit. Whether the episode goes on: then its end
        is taken back, for the demonstration."""
        assert node.parent and node.action
        self.env.restore(node.parent.snapshot)
        *_, done = node.parent.state.act(self.env, node.action)  # without the limit
        if not done:
            node.cut, node.reward, node.done = node.reward, 0.0, False
            node.snapshot = self.env.snapshot()
        return not done

    def step(self, node: Node, action: str, source: str) -> Node:
        """The child that an action leads to. The environment must stand at the node."""
        key = self.key(action)
        if key in node.children:
            return node.children[key]
        state, reward, done = node.state.act(self.env, action)
        snapshot, depth = self.env.snapshot(), node.depth + 1
        child = Node(state, state.observation, snapshot, depth, node, action, reward, done)
        child.source, child.branch = source, self.branches
        if self.at_limit(child) and not child.done:
            child.reward, child.done = self.env.outcome(self.env.reward_if_cut(), done=True), True
        node.children[key] = child
        return child

    def key(self, action: str) -> str:
        """What tells siblings apart."""
        return self.env.canonical(parse_action(action))


# ----------------------------------------------------------------------------------------- the file

SAVED = ("depth", "action", "observation", "reward", "done", "source", "branch", "expert")


def tree_records(env: envs.TextEnv, task_id: str, root: Node) -> list[dict]:
    """A tree as lines of trees.jsonl. The root has the prompt and the number of nodes."""
    nodes = list(root.subtree())
    number: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
    records = []
    for i, node in enumerate(nodes):
        record = {"task_id": task_id, "node_id": i, "parent_id": number.get(node.parent)}
        records.append(record | {name: getattr(node, name) for name in SAVED})
        if node.cut is not None:
            records[-1]["cut"] = node.cut
    records[0] |= {"env": env.name, "task": root.state.task}
    records[0] |= {"messages": root.state.dump(), "nodes": len(nodes)}
    return records


def metrics(records: list[dict]) -> dict[str, Any]:
    """For the metadata: counts, and the mean reward of the agent's leaves."""
    leaves = [n for n in records if (n["done"] or "cut" in n) and n["source"] == "policy"]
    rewards = [node.get("cut", node["reward"]) for node in leaves]
    return {
        "trees": len({node["task_id"] for node in records}),
        "nodes": len(records),
        "leaves": len(rewards),
        "mean_leaf_reward": sum(rewards) / max(1, len(rewards)),
    }


# --------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--out", type=Path, help="default: RUN/trees.jsonl")
    add("--depth", type=natural, help="D (3 WebShop, 6 ScienceWorld, 8 ALFWorld, FrozenLake)")
    add("--width", type=positive, default=DEFAULTS["width"], help="W (%(default)s)")
    which = "training tasks that the agent was cloned from, or, new, from the far end of the list"
    add("--tasks", choices=["new", "cloned"], default="new", help=which)
    bound = "at most, per tree (24; 0: any)"
    add("--rollouts", type=natural, default=DEFAULTS["rollouts"], help=bound)
    add("--steps", type=positive, help="step limit of the agent (default: the environment's)")
    parser.free("--limit", type=natural, default=DEFAULTS["limit"], help="tasks (250; 0: all)")
    add("--temperature", type=real, help="default: the checkpoint's (0.7; tiny: 1)")
    add("--expert", type=Path, help="demonstrations (default: those the agent was cloned from)")
    add("--no-expert", action="store_true", help="leave out the expert branch (lines 11-13)")
    line_9 = "a branch without reward queues nothing or, tail, its first 2 nodes"
    add("--prune", choices=["branch", "tail"], default="branch", help=line_9)
    add_sampling(parser)
    return parse(parser, argv)


def grow(
    env: envs.TextEnv, agent: Any, demonstrations: dict | None, args: Any, task_id: str
) -> Generator[Sample, list[Candidate], list[dict]]:
    """The lines of a task's tree."""
    limits = args.steps or env.tree_steps, env.max_steps  # which may be None, or a task's ("eto")
    explorer = Explorer(
        env.fork(),
        task_id,
        agent.chat.rendering,
        max_depth=args.depth,
        width=args.width,
        max_rollouts=args.rollouts or math.inf,
        max_steps=min(limit for limit in limits if isinstance(limit, int)),
        prune=args.prune,
    )
    root = yield from explorer.explore(demonstrations)
    return tree_records(env, task_id, root)


def tell(path: Path, counts: dict[str, Any]) -> None:
    mean = f"mean reward {counts['mean_leaf_reward']:.3f} of {counts['leaves']} leaves of the agent"
    print(f"{path}: {counts['trees']} trees, {counts['nodes']} nodes, {mean}")
    if failed := counts["failed_demonstrations"]:
        print(f"{failed} demonstrations earned nothing, or not what is recorded: of other tasks?")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    args.sft = need(args.sft, args.run / "sft", "sft", args)
    args.out = args.out or args.run / "trees.jsonl"
    args.depth = env.tree_depth if args.depth is None else args.depth
    # From the far end of the list, where the agent has seen the fewest demonstrations.
    order = env.task_ids("train")[::-1]
    if args.tasks == "cloned":
        order = published.cloned_tasks(env, args.sft)
    tasks = order[: args.limit or None]
    demonstrations = published.demonstrations_for(env, tasks, args)
    settle_precision(args)
    trees = Output(args.out, args, itemgetter("task_id"), sft=args.sft, expert=args.expert)
    todo = trees.todo(tasks)
    tokens = None  # unknown if an earlier call or another process made some of the trees
    if todo:
        agent = load_agent(args, env)
        growing = map(partial(grow, env, agent, demonstrations, args), todo)
        groups = drive(growing, {Sample: agent.sample}, args.in_flight or env.side_by_side)
        trees.grow(groups, "trees", len(todo))
        tokens = agent.computed if len(todo) == len(tasks) else None
    trees.read()
    records = trees.records
    counts = metrics(records) | published.failures(records, demonstrations or {})
    grown = {*tasks, *trees.groups}  # more than --limit, if it was larger
    planned = [task for task in order if task in grown]
    trees.finish(planned, tasks=planned, **counts, tokens=tokens)
    tell(trees.path, counts)


if __name__ == "__main__":
    run_stage(main)
