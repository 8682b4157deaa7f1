"""Stage 2: exploration trees (Section 4.2, Algorithm 2).

    reads   RUN/sft/          the behaviour-cloned agent, and the demonstrations it was cloned from
    writes  RUN/trees.jsonl   one node per line, the root of each tree first

    python build_trees.py --env webshop --depth 3 --width 3

For each training task the agent plays rollouts from the root, then from the nodes of the
demonstration and of rollouts that scored. A node is expanded while it has fewer than W children and
its depth is at most D. A rollout without reward queues nothing or, with --prune tail, its first two
nodes.

The paper grows trees on the tasks that the agent was cloned from (--tasks cloned; with --expert on
those of that file). --tasks new takes training tasks from the end of the list: an agent is cloned
from the tasks at its beginning.

Where the paper leaves a choice:
- The queue gets the expanded node again, with its new branch. Else few nodes would get W children.
- Two actions that the environment executes alike are one child. If all draws repeat old children,
  the rollout follows one of them. If it leaves the old nodes further down, it adds a child there,
  even to a node that has W. At most W + EXTRA_ROLLOUTS rollouts begin at a node.
- A tree gets at most --rollouts rollouts, half of them before the demonstration. Without a bound it
  could take W^(D+1): 19,683 with ALFWorld's depth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import envs
from environments.replay import Turn, play_again, recognise, replay_demonstrations
from qlass import UserError
from qlass.batching import Sample, ask, drive
from qlass.chat import Rendering
from qlass.demonstrations import Demonstration, by_task
from qlass.files import Inputs
from qlass.inputs import find_agent
from qlass.messages import Move, State, parse_action, replay, start, step
from qlass.outputs import Output
from qlass.settings import (
    NonNegativeInt,
    PositiveInt,
    Sampling,
    place,
    read_settings,
    run_stage,
    workload,
)
from qlass.trees import tree_metrics, tree_records


@dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    stage: ClassVar = "build_trees"
    output: ClassVar = "trees.jsonl"

    sft: Path | None = place(None)  # checkpoint of the agent (RUN/sft, made if missing)
    out: Path | None = place(None)  # RUN/trees.jsonl
    depth: NonNegativeInt | None = None  # D (the environment's tree_depth)
    width: PositiveInt  # W
    # cloned: those that the agent was cloned from; new: the last of all training tasks
    tasks: Literal["cloned", "new"]
    rollouts: NonNegativeInt  # at most, per tree (0: no bound)
    steps: PositiveInt | None = None  # step limit of the agent (the environment's tree_steps)
    limit: NonNegativeInt = workload()  # number of tasks (0: all)
    # demonstrations (those that the agent was cloned from)
    expert: Path | None = place(None)
    no_expert: bool = False  # leave out the expert's branch (lines 11-13)
    prune: Literal["branch", "tail"]  # tail: a branch without reward queues 2 nodes


EXTRA_DRAWS = 2  # of a rollout's first action, which is to be a new child
EXTRA_ROLLOUTS = 2  # of a node, beyond W, for those that found no new child

# ----------------------------------------------------------------------------------------- the tree


@dataclass(eq=False)
class Node:
    """N of Algorithm 2: an action, the state that it led to, and its children."""

    state: State
    snapshot: Any  # of the environment in this state
    depth: int = 0
    parent: Node | None = None
    action: str | None = None
    reward: float = 0.0
    done: bool = False  # the environment has ended the episode
    reward_at_limit: float | None = None  # where its own limit stopped the agent
    source: str = "root"  # who took the action first: "policy" or "expert"
    branch: int = 0  # number of the trajectory that created the node
    demonstrated: bool = False  # the demonstration passes here
    rollouts: int = 0  # trajectories of the agent that started here
    children: dict[str, Node] = field(default_factory=dict)  # by Explorer.key

    @property
    def outcome(self) -> float:
        """The reward of a trajectory that ends here."""
        return self.reward if self.reward_at_limit is None else self.reward_at_limit

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.subtree()


# -------------------------------------------------------------------------------------- Algorithm 2


@dataclass
class Explorer:
    """Grows the tree of one task."""

    env: envs.TextEnv
    task_id: str
    rendering: Rendering
    max_depth: int  # D
    width: int = 3  # W
    max_rollouts: float = math.inf
    max_steps: float = math.inf  # of the agent's trajectories; a demonstration may be longer
    prune: str = "branch"
    branches: int = 0  # trajectories so far, the demonstration included
    rewards: list[float] = field(default_factory=list)  # of the agent's rollouts

    async def explore(self, demonstrations: dict[str, Demonstration] | None = None) -> Node:
        """Algorithm 2. Returns the root.

        demonstrations: by task; the environment's expert plays other tasks. None if the tree has no
        expert branch (lines 11 to 13).
        """
        moves = self.demonstrate(demonstrations)  # before the environment's limit is lifted
        state = start(self.env, self.task_id)  # line 1
        self.max_steps = min(self.max_steps, self.env.step_limit() or math.inf)
        self.env.max_steps = None  # self.max_steps stops the agent; `done` is the environment's
        root = Node(state, self.env.snapshot())  # line 2
        queue = deque([root])  # line 3
        bound = self.max_rollouts
        if demonstrations is not None:
            await self.process_queue(queue, bound / 2)  # lines 4-10
            branch = self.add_demonstration(root, moves)  # line 11
            # In front of the queue: at its end, a bound would let few of them come up.
            queue.extendleft(reversed(branch))  # line 12
            bound += 1  # the demonstration is a branch, and no rollout
        await self.process_queue(queue, bound)  # line 13; without a demonstration lines 4-10
        self.env.close()
        return root

    async def process_queue(self, queue: deque[Node], bound: float) -> None:
        """ProcessExpansionQueue, until it is empty or the tree has `bound` branches."""
        while queue and self.branches < bound:  # line 4
            node = queue.popleft()  # line 5: first in, first out
            if self.may_expand(node):  # line 6
                branch = await self.rollout(node)  # lines 7-8
                if branch[-1].outcome:  # line 9: else stop expansion
                    queue.extend(branch)  # line 10; branch[0] is the expanded node
                elif self.prune == "tail":
                    queue.extend(branch[:2])

    def may_expand(self, node: Node) -> bool:
        """Line 6: True unless the episode is over, the node is beyond depth D or at the step limit,
        or it has W children or W + EXTRA_ROLLOUTS rollouts."""
        if node.done or node.depth > self.max_depth or node.depth >= self.max_steps:
            return False
        return len(node.children) < self.width and node.rollouts < self.width + EXTRA_ROLLOUTS

    async def rollout(self, origin: Node) -> list[Node]:
        """The agent plays from a node to the end of the episode, or to its limit of steps. Returns
        the branch, which begins with that node."""
        self.branches += 1
        origin.rollouts += 1
        node, branch = origin, [origin]
        draws = 1 + EXTRA_DRAWS
        while not node.done and node.depth < self.max_steps:
            self.env.restore(node.snapshot)  # child_by() may have returned an old child
            draw_key = (self.task_id, self.branches, node.depth)
            candidates = await ask(self.env, node.state, draws, draw_key, self.rendering)
            actions = [candidate.text for candidate in candidates]
            new = [action for action in actions if self.key(action) not in node.children]
            node = self.child_by(node, new[0] if new else actions[0])
            branch.append(node)
            draws = 1
        if not node.done:
            self.env.restore(node.snapshot)
            node.reward_at_limit = self.env.reward_if_cut()
        self.rewards.append(node.outcome)
        return branch

    def demonstrate(
        self, demonstrations: dict[str, Demonstration] | None
    ) -> list[tuple[Move, Any]]:
        """The moves of the task's demonstration, each with the snapshot after it."""
        if demonstrations is None:
            return []
        own = demonstrations.get(self.task_id)
        moves = replay(self.env, self.task_id, own.state.actions if own else None)
        return [(move, self.env.snapshot()) for move in moves]

    def add_demonstration(self, root: Node, moves: Sequence[tuple[Move, Any]]) -> list[Node]:
        """Merge a demonstration into the tree, from the root on.

        It may be longer than the agent's branches, which end at the agent's limit of steps.
        """
        self.branches += 1
        branch = [root]
        _, *played = moves  # the first is the task's start
        for move, snapshot in played:
            node, key = branch[-1], self.key(move.action)
            if key not in node.children:
                # In the words of the tree, whose older nodes may have other thoughts.
                state = node.state.extended(move.action, move.state.observation)
                self.add(node, move._replace(state=state), snapshot, "expert")
            node.children[key].demonstrated = True
            branch.append(node.children[key])
        if move.reward and not move.done:  # it stops early, as at a limit
            branch[-1].reward, branch[-1].reward_at_limit = 0.0, move.reward
        return branch

    def child_by(self, node: Node, action: str) -> Node:
        """The child that the agent's action leads to. The environment must stand at the node."""
        if self.key(action) not in node.children:
            recognise(self.env, action)
            move = Move(action, *step(self.env, node.state, action))
            self.add(node, move, self.env.snapshot(), "policy")
        return node.children[self.key(action)]

    def add(self, node: Node, move: Move, snapshot: Any, source: str) -> None:
        """Add a child. snapshot: of the environment after the move."""
        action, state, reward, done = move
        node.children[self.key(action)] = Node(
            state,
            snapshot,
            depth=node.depth + 1,
            parent=node,
            action=action,
            reward=reward,
            done=done,
            source=source,
            branch=self.branches,
        )

    def key(self, action: str) -> str:
        """Return the part of an action that distinguishes it from its siblings."""
        return self.env.canonical(parse_action(action))


# --------------------------------------------------------------------------------------------- main


def play_newest_leaf(fork: envs.TextEnv, task_id: str, root: Node) -> None:
    """Play the way to the agent's newest leaf once more: nearly all nodes come from snapshots."""
    leaves = (node for node in root.subtree() if node.source == "policy" and not node.children)
    leaf = max(leaves, key=lambda node: node.branch, default=root)
    turns: list[Turn] = []
    node: Node | None = leaf
    while node:
        reward = leaf.outcome if node is leaf else node.reward
        turns.insert(0, Turn(node.action, node.state.observation, reward, node.done))
        node = node.parent
    play_again(fork, task_id, turns, unlimited=True)


def build(
    config: Config,
    env: envs.TextEnv,
    load: Callable[[], Any],
    demonstrations: dict[str, Demonstration],
    inputs: Inputs,
) -> None:
    """Grow the trees of the tasks that the settings name.

    load: makes the agent, once there is something to do. demonstrations: by task.
    """
    order = env.task_ids("train")
    if config.tasks == "cloned":
        order = [task for task in order if task in demonstrations]
        if not order:
            raise UserError("no training task has a demonstration: give them its task_id")
    else:
        order.reverse()
    tasks = order[: config.limit or None]
    settings = config.recipe() | env.settings
    trees = Output(config.path, config, settings, inputs, itemgetter("task_id"))
    if todo := trees.todo(tasks):
        if demonstrations and not config.no_expert:  # without --expert sft.py has played them
            replay_demonstrations([*demonstrations.values()], env, todo if config.expert else ())
        agent = load()

        async def tree_of(task_id: str) -> list[dict]:
            explorer = Explorer(
                env.fork(),
                task_id,
                agent.chat.rendering,
                max_depth=env.tree_depth if config.depth is None else config.depth,
                width=config.width,
                max_rollouts=config.rollouts or math.inf,
                max_steps=config.steps or env.tree_steps or math.inf,
                prune=config.prune,
            )
            root = await explorer.explore(None if config.no_expert else demonstrations)
            if todo.index(task_id) % env.replay_every == 0:
                play_newest_leaf(env.fork(), task_id, root)
            return tree_records(explorer.env, task_id, root, explorer.rewards)

        groups = drive(map(tree_of, todo), {Sample: agent.sample}, env.side_by_side)
        trees.write(groups, "trees", len(todo))
    counts = tree_metrics(trees.records)
    trees.finish(tasks, **counts)
    print(f"{trees.path}: {counts}")


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    sft = find_agent(config)
    expert: Path | None = None
    demonstrations: dict[str, Demonstration] = {}
    if config.tasks == "cloned" or not config.no_expert:
        expert, demonstrations = by_task(config.expert, sft, env)
    inputs: Inputs = {"sft": sft, "expert": None if config.no_expert else expert}

    def load() -> Any:
        from qlass.agent import load_agent  # not at the top, as --help needs no torch

        return load_agent(sft, config, env)

    build(config, env, load, demonstrations, inputs)


if __name__ == "__main__":
    run_stage(main)
