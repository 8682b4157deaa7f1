"""Stage 2: exploration trees (Section 4.2, Algorithm 2).

    python build_trees.py --env webshop --depth 3 --width 3

    reads   RUN/sft/          the behaviour-cloned agent, and the demonstrations it was cloned from
    writes  RUN/trees.jsonl   one node per line, the root of each tree first

For each training task the agent plays rollouts from the root, then from the nodes of branches that
scored. A node is expanded while it has fewer than W children and its depth is at most D. A
branch without reward queues nothing, not even the node that it began at (--prune tail: that node,
and the branch's first one).

The paper grows trees on the tasks that the agent was cloned from (--tasks cloned); --tasks new are
other training tasks.

Where the paper leaves a choice:
- The expanded node joins its new branch in the queue. Otherwise no node would get W children.
- Two actions that the environment executes alike are one child. If all draws repeat old children,
  the rollout follows one of them. If it leaves the old nodes further down, it adds a child there,
  even to a node that has W. At most W + EXTRA_ROLLOUTS rollouts begin at a node.
- A tree gets at most --rollouts rollouts, half of them before the demonstration. Without a bound it
  could take W^(D+1): 19,683 with ALFWorld's depth.
"""

from __future__ import annotations

# qlass comes first: it says in one line which packages are missing.
from qlass import Refused, published  # isort: skip

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import envs
from qlass.agent import load_agent, settled
from qlass.batching import Candidate, Sample, ask, drive
from qlass.chat import Rendering
from qlass.config import Natural, Positive, Sampling, free, read, run_stage
from qlass.files import warn
from qlass.messages import State, parse_action, replay
from qlass.published import Demonstration
from qlass.runs import Inputs, Output, find_or_make, recipe_of
from qlass.trees import tree_metrics, tree_records


@dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    """The paper's (Appendix A.2), which does not say W and the bounds."""

    stage: ClassVar[str] = "build_trees"

    sft: Path | None = free(None)  # checkpoint of the agent (RUN/sft, made if missing)
    out: Path | None = free(None)  # RUN/trees.jsonl
    depth: Natural | None = None  # D (3 WebShop, 6 ScienceWorld, 8 ALFWorld)
    width: Positive = 3  # W
    tasks: Literal["cloned", "new"] = "cloned"  # those that the agent was cloned from, or others
    rollouts: Natural = 64  # at most, per tree (0: no bound)
    steps: Positive | None = None  # step limit of the agent (the environment's)
    limit: Natural = free(0)  # number of tasks (0: all)
    expert: Path | None = free(None)  # demonstrations (those that the agent was cloned from)
    no_expert: bool = False  # leave out the expert's branch (lines 11-13)
    prune: Literal["branch", "tail"] = "branch"  # tail: a branch without reward queues 2 nodes


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
    cut: float | None = None  # what the agent earned at its limit, where the demonstration goes on
    source: str = "root"  # who acted first: "policy" or "expert"; of the root nobody
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
    width: int = 3  # W
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
        root = self.root()  # lines 1-2
        queue = deque([root])  # line 3
        if demonstrations is None:
            yield from self.process_queue(queue, self.max_rollouts)  # lines 4-10
        else:
            before_expert = self.max_rollouts / 2
            yield from self.process_queue(queue, before_expert)  # lines 4-10
            tau = demonstrations.get(self.task_id)
            branch = self.add_demonstration(root, tau.actions if tau else None)  # line 11
            # In front of the queue: at its end, the bound would never let them come up.
            queue.extendleft(reversed(branch))  # line 12
            with_expert = self.max_rollouts + 1  # the demonstration is a branch, and no rollout
            yield from self.process_queue(queue, with_expert)  # line 13
        self.env.close()
        return root

    def root(self) -> Node:
        observation, info = self.env.reset(options={"task_id": self.task_id})
        state = State.first(self.env, observation, info)
        return Node(state, observation, self.env.snapshot())

    def process_queue(
        self, queue: deque[Node], bound: float
    ) -> Generator[Sample, list[Candidate], None]:
        """ProcessExpansionQueue, until the tree has `bound` branches."""
        while queue and self.branches < bound:  # line 4
            node = queue.popleft()  # line 5: first in, first out
            if self.may_expand(node):  # line 6
                branch = yield from self.rollout(node)  # lines 7-8
                end = branch[-1]
                if end.reward or end.cut:  # line 9: else stop expansion
                    queue.extend(branch)  # line 10; branch[0] is the expanded node
                elif self.prune == "tail":
                    queue.extend(branch[:2])

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
            self.env.restore(node.snapshot)  # step() may have returned an old child
            noise = (self.task_id, self.branches, node.depth)
            candidates = yield ask(self.env, node.state, draws, noise, self.rendering)
            actions = [candidate.text for candidate in candidates]
            new = [action for action in actions if self.key(action) not in node.children]
            node = self.step(node, new[0] if new else actions[0])
            branch.append(node)
            draws = 1
        if not node.done and node.cut is None:  # its limit, where the demonstration goes on
            self.env.restore(node.snapshot)
            node.cut = self.env.outcome(self.env.reward_if_cut(), done=True)
        return branch

    def add_demonstration(self, root: Node, actions: Sequence[str] | None) -> list[Node]:
        """tau_0, merged into the tree at its root. None: the environment's expert plays.

        It may be longer than the agent's episodes: an end that only their limit made is taken back.
        """
        self.branches += 1
        node = root
        branch = [root]
        snapshot = root.snapshot  # of the demonstration at `node`, which no limit has ended
        moves = replay(self.env, self.task_id, actions)
        next(moves)  # the root
        for action, state, reward, done in moves:
            if node.done:  # the agent came here too, and its limit ended the episode
                node.cut = node.reward
                node.reward = 0.0
                node.done = False
                node.snapshot = snapshot
            snapshot = self.env.snapshot()
            if self.key(action) not in node.children:
                # In the words of the tree, where an older node may have another thought.
                after = node.state.then(action, state.observation)
                self.add(node, action, after, reward, done, "expert")
            node = node.children[self.key(action)]
            node.expert = True
            branch.append(node)
        return branch

    def step(self, node: Node, action: str) -> Node:
        """The child that the agent's action leads to. The environment must stand at the node."""
        if self.key(action) in node.children:
            return node.children[self.key(action)]
        state, reward, done = node.state.act(self.env, action)
        child = self.add(node, action, state, reward, done, "policy")
        if child.depth == self.max_steps and not done:
            child.reward, child.done = self.env.outcome(self.env.reward_if_cut(), done=True), True
        return child

    def add(
        self, node: Node, action: str, state: State, reward: float, done: bool, source: str
    ) -> Node:
        """A new child, in the state that the environment is in."""
        snapshot, depth = self.env.snapshot(), node.depth + 1
        child = Node(state, state.observation, snapshot, depth, node, action, reward, done)
        child.source, child.branch = source, self.branches
        node.children[self.key(action)] = child
        return child

    def key(self, action: str) -> str:
        """What tells siblings apart."""
        return self.env.canonical(parse_action(action))


# --------------------------------------------------------------------------------------------- main


def explorers_of(
    config: Config, env: envs.TextEnv, rendering: Rendering, depth: int, tasks: list[str]
) -> Iterator[Explorer]:
    """An Explorer for each task."""
    steps = config.steps or env.tree_steps
    if isinstance(env.max_steps, int):  # else there is none, or each task has its own ("eto")
        steps = min(steps, env.max_steps)
    rollouts = config.rollouts or math.inf
    for task_id in tasks:
        explorer = Explorer(env.fork(), task_id, rendering, depth, config.width, rollouts, steps)
        explorer.prune = config.prune
        yield explorer


def grow(
    explorer: Explorer, demonstrations: dict[str, Demonstration] | None
) -> Generator[Sample, list[Candidate], list[dict]]:
    """The lines of a task's tree; of a task that a server refuses its root, which says why."""
    try:
        root = yield from explorer.explore(demonstrations)
    except Refused as error:
        (record,) = tree_records(explorer.env, explorer.task_id, explorer.root())
        explorer.env.close()
        return [record | {"refused": str(error)}]
    return tree_records(explorer.env, explorer.task_id, root)


def tell(path: Path, counts: dict[str, Any]) -> None:
    mean = f"mean reward {counts['mean_leaf_reward']:.3f} of {counts['leaves']} leaves of the agent"
    print(f"{path}: {counts['trees']} trees, {counts['nodes']} nodes, {mean}")
    if refused := counts["refused_tasks"]:
        warn(f"{refused} of these tasks are refused: their trees are their roots alone")
    if failed := counts["failed_demonstrations"]:
        print(f"{failed} demonstrations earned nothing, or not what is recorded: of other tasks?")


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    env = envs.from_config(config)
    sft = find_or_make(config.sft, "sft", "sft", config)
    depth = env.tree_depth if config.depth is None else config.depth
    if config.tasks == "cloned":
        order = published.cloned_tasks(env, config.expert, sft)
    else:  # from the far end of the list, where the agent has seen the fewest demonstrations
        order = env.task_ids("train")[::-1]
    tasks = order[: config.limit] if config.limit else order
    inputs: Inputs = {"sft": sft, "expert": None}
    demonstrations = None
    if not config.no_expert:
        named = config.expert
        inputs["expert"], demonstrations = published.demonstrations_for(env, tasks, named, sft)
    recipe = recipe_of(config.recipe() | env.settings | settled(config) | {"depth": depth}, inputs)
    path = config.out or config.run / "trees.jsonl"
    trees = Output(path, config, recipe, inputs, itemgetter("task_id"))
    todo = trees.todo(tasks)
    tokens = None  # unknown if an earlier call or another process made some of the trees
    if todo:
        agent = load_agent(sft, config, env)
        explorers = explorers_of(config, env, agent.chat.rendering, depth, todo)
        growing = (grow(explorer, demonstrations) for explorer in explorers)
        groups = drive(growing, {Sample: agent.sample}, config.in_flight or env.side_by_side)
        trees.grow(groups, "trees", len(todo))
        tokens = agent.computed if len(todo) == len(tasks) else None
    trees.read()
    records = trees.records
    counts = tree_metrics(records) | published.failures(records, demonstrations or {})
    grown = {*tasks, *trees.groups}  # more than --limit, if it was larger
    planned = [task for task in order if task in grown]
    trees.finish(planned, tasks=planned, **counts, tokens=tokens)
    tell(path, counts)


if __name__ == "__main__":
    run_stage(main)
