"""Searches with QNet that need snapshots of the environment at test time, beside QLASS, which needs none.

    python -m experiments.tree_search --env webshop --method lookahead beam mcts particles -M 4 -k 2 -S 4 8 -N 4

    lookahead    the one of M candidates behind which Q promises most, gamma max_a' Q(s', a')
    beam         k states, M candidates each, of which the k of highest Q are stepped
    mcts         S simulations a step by PUCT, then the most visited action: TS-LLM's MCTS-alpha (arXiv 2309.17179) with
                 the exact pi(a | s) as prior, V(s') = max_a' Q(s', a'), and leaves discounted by their depth
    particles    N chains, resampled by exp((V - V_last) / tau): Agentic Monte Carlo (arXiv 2606.05296), without rewards

Flags and result lines are q_search.py's; `player` has S, k, tau, c, gamma. `env_steps` counts all steps and no restore,
`env_steps_replayed` a restore as the steps that lead there, `restores` their number. A search returns the node where it
has ended.
"""

import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import PositiveInt
from tyro.conf import Suppress, arg

import envs
import q_search
from environments.replay import recognise
from experiments import Call, answer
from experiments.compare import Variant
from q_search import Method, Step, distinct_actions
from qlass import UserError, files
from qlass.batching import Backends, Candidate, Sample, Score, ask, finite
from qlass.chat import Chat, Rendering
from qlass.messages import State, parse_action, start, step
from qlass.noise import uniforms
from qlass.results import costs_of, describe
from qlass.settings import Number, read_settings, run_stage, workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config):
    """q_search.py's settings, -N that of particles, and each value of these for the searches that have them. gamma is
    that of the QNet's labels, or .9."""

    method: tuple[Literal["lookahead", "beam", "mcts", "particles"], ...] = workload(())  # one or more
    S: Annotated[tuple[PositiveInt, ...], arg(aliases=["-S"])] = workload((4,))  # simulations a step, of mcts
    k: Annotated[tuple[PositiveInt, ...], arg(aliases=["-k"])] = workload((2,))  # states, of beam
    tau: tuple[Number, ...] = workload((0.1,))  # temperature of resampling
    c: Annotated[tuple[Number, ...], arg(aliases=["-c"])] = workload((1.0,))  # weight of the prior, of mcts
    select: Suppress[str] = workload("q")  # no flag here


@dataclasses.dataclass(eq=False)
class Node:
    """A candidate of the state above it and, once it was stepped, the state that it led to."""

    action: str = ""
    prior: float = 1.0  # pi(a | s)
    q: float = 0.0  # Q(s, a)
    value: float = 0.0  # the mean of what was backed up, at first Q
    visits: int = 0
    state: State | None = None
    path: tuple[Step, ...] = ()  # that led here; nobody reads a reward before all is played
    done: bool = False
    snapshot: Any = None  # leads back to here
    request: Sample | None = None  # for its candidates
    drawn: list[Candidate] = dataclasses.field(default_factory=list)
    children: list["Node"] = dataclasses.field(default_factory=list)

    def promise(self, gamma: float) -> float:
        """Q(s, a) once the next page is seen: gamma max_a' Q(s', a'); at an end Q(s, a) itself."""
        return self.q if self.done else gamma * max(child.q for child in self.children)


class Search:
    """A task's environment, and what was drawn and stepped in it."""

    def __init__(self, env: envs.TextEnv, task_id: str, method: "TreeSearch", rendering: Rendering) -> None:
        self.env, self.task_id = env, task_id
        self.method, self.rendering = method, rendering
        self.expanded: list[Step] = []
        self.env_steps = self.restores = self.replayed = 0
        self.root = self.arrive(Node(state=start(env, task_id)))

    def arrive(self, node: Node, trial: int = 0) -> Node:
        """The environment is in this node. Its draws are those of a trajectory of q_search.py that comes by."""
        self.at = node
        if not node.done:
            key = (self.task_id, trial, len(node.path))
            node.snapshot = self.env.snapshot()
            node.request = ask(self.env, node.state, self.method.M, key, self.rendering, self.method.temperature)
        return node

    async def expand(self, *nodes: Node) -> None:
        """Give nodes their children: the distinct of M draws, with their Q (Alg. 4, lines 5-7)."""
        new = [node for node in nodes if not (node.done or node.children)]
        if not new:
            return
        draws = await Call(self.method.sample, tuple(node.request for node in new))
        candidates = []
        questions = []
        for node, drawn in zip(new, draws, strict=True):
            actions = distinct_actions(self.env, [candidate.text for candidate in drawn])
            candidates.append(actions)
            questions.append(Score(node.state, tuple(actions)))
        values = map(finite, await Call(self.method.score, tuple(questions)))
        for node, drawn, actions, scores in zip(new, draws, candidates, values, strict=True):
            node.drawn = drawn
            node.children = list(map(Node, actions, priors(self.env, drawn, actions), scores, scores))
            self.expanded.append(Step(node.state, drawn, actions, scores, "", "", 0.0))

    def step(self, node: Node, child: Node) -> Node:
        """Step a child of the node that the environment is in. Returns it, arrived."""
        is_valid = recognise(self.env, child.action)
        child.state, reward, child.done = step(self.env, node.state, child.action)
        self.env_steps += 1
        candidates = [other.action for other in node.children]
        values = [other.value for other in node.children]
        arrival = child.state.observation
        taken = Step(node.state, node.drawn, candidates, values, child.action, arrival, reward, is_valid)
        child.path = *node.path, taken
        return self.arrive(child, node.request.key[1])

    def come_to(self, node: Node, copy: bool = True) -> None:
        """Bring the environment to a node or a copy of it, whose random numbers are not the future's."""
        if self.at is not node:
            self.env.restore(node.snapshot)
            self.restores += 1
            self.replayed += len(node.path)
        if copy:
            chance = uniforms(1, "copy", self.method.seed, self.task_id, self.env_steps, self.restores)[0]
            self.env.reseed(int(chance * 2**32))

    def follow(self, node: Node, child: Node) -> Node:
        """A child, which is stepped the first time."""
        if child.state is None:
            self.come_to(node)
            self.step(node, child)
        return child

    def act(self, node: Node, child: Node) -> Node:
        """Take a child in earnest. Its sub-tree is kept if the environment answers what it answered in the search."""
        self.come_to(node, copy=False)
        there = self.step(node, Node(child.action, q=child.q))
        if child.state == there.state:
            there.drawn, there.children = child.drawn, child.children
        return there

    async def lookahead(self, gamma: float) -> Node:
        """One step ahead, where there is a choice."""
        node = self.root
        while not node.done:
            await self.expand(node)
            if len(node.children) > 1:
                await self.expand(*[self.follow(node, child) for child in node.children])
                for child in node.children:
                    child.value = child.promise(gamma)
            node = self.act(node, max(node.children, key=lambda child: child.value))
        return node

    async def beam(self, k: int) -> Node:
        """Level by level the k candidates of highest Q, until k have ended; of these the one of the highest last Q."""
        ended: list[Node] = []
        level = [self.root]
        while level and len(ended) < k:
            await self.expand(*level)
            pool = [(node, child) for node in level for child in node.children]
            pool.sort(key=lambda pair: -pair[1].q)
            children = [self.follow(node, child) for node, child in pool[:k]]
            ended += [child for child in children if child.done]
            level = [child for child in children if not child.done]
        return max(ended, key=lambda node: node.q)

    async def mcts(self, S: int, c: float, gamma: float) -> Node:
        """The most visited action of each step, of equals that of the highest value. The first simulation of a new tree
        expands its root, so that one a step is QLASS."""
        node = self.root
        while not node.done:
            for _ in range(S):
                await self.simulate(node, c, gamma)
            node = self.act(node, max(node.children, key=lambda child: (child.visits, child.value)))
        return node

    async def simulate(self, node: Node, c: float, gamma: float) -> None:
        """Down by PUCT to a node without children, expand it, and back up what it promises, discounted by depth."""
        passed: list[Node] = []
        while node.children:
            bonus = c * math.sqrt(sum(child.visits for child in node.children))
            scores = [child.value + bonus * child.prior / (1 + child.visits) for child in node.children]
            node = self.follow(node, node.children[scores.index(max(scores))])
            passed.append(node)
        await self.expand(node)
        if passed:
            value = node.promise(gamma)
            for node in reversed(passed):
                node.visits += 1
                node.value += (value - node.value) / node.visits
                value *= gamma

    async def particles(self, tau: float, gamma: float) -> Node:
        """N chains with the draws of best-of-N; the highest last Q counts. V is gamma^t Q of the last action. Where
        weights exp((V - V_last) / tau) count as fewer than N / 2, copies of heavy chains replace light ones."""
        n = self.method.N
        chains = [self.arrive(dataclasses.replace(self.root), trial=i) for i in range(n)]
        last = np.zeros(n)
        while any(not chain.done for chain in chains):
            await self.expand(*chains)
            for i, chain in enumerate(chains):
                if not chain.done:
                    self.env.restore(chain.snapshot)  # not counted: in its environment it is there
                    chains[i] = self.step(chain, chain.children[0])
            values = np.array([gamma ** len(chain.path) * chain.q for chain in chains])
            gains = values - last
            weights = np.exp((gains - gains.max()) / max(tau, 1e-6))
            weights /= weights.sum()
            if 1 / (weights**2).sum() < n / 2:
                u = uniforms(1, "resampled", self.method.seed, self.task_id, self.env_steps)[0]
                copies = np.diff(np.floor(n * weights.cumsum() + u), prepend=0).astype(int)
                spare = [i for i in range(n) for _ in range(copies[i] - 1)]
                sources = [i if copies[i] else spare.pop() for i in range(n)]
                chains = [chains[s] if s == i else self.copy(chains[s], i) for i, s in enumerate(sources)]
                last = values[sources]
        return max(chains, key=lambda chain: chain.q)

    def copy(self, node: Node, trial: int) -> Node:
        """A node from which another chain goes on, which has all to replay."""
        if node.done:
            return node
        self.at = None
        self.come_to(node)
        return self.arrive(dataclasses.replace(node), trial)


def priors(env: envs.TextEnv, drawn: Sequence[Candidate], actions: Sequence[str]) -> list[float]:
    """pi(a | s) of each action, all its texts together, as shares; equal ones where a server tells no probability."""
    likely = {candidate.text: math.exp(candidate.logprob) for candidate in drawn}
    mass: dict[str, float] = defaultdict(float)
    for text, p in likely.items():
        mass[env.canonical(parse_action(text))] += p
    shares = [mass[env.canonical(parse_action(action))] for action in actions]
    total = sum(shares)
    return [share / total if total > 0 else 1 / len(shares) for share in shares]


@dataclasses.dataclass(frozen=True)
class TreeSearch(Variant):
    """A method of `Search`, with its settings as (name, value). A draw costs its tokens once, played or not."""

    own: tuple[tuple[str, float], ...] = ()
    sample: Callable[[list], list] | None = None  # the agent
    score: Callable[[list], list] | None = None  # QNet

    @property
    def replays(self) -> bool:
        """Not where the way may lead through a copy of a state, which has other random numbers."""
        return self.name not in ("beam", "particles")

    async def play(self, env: envs.TextEnv, task_id: str, chat: Chat) -> dict:
        search = Search(env, task_id, self, chat.rendering)
        end = await getattr(search, self.name)(**dict(self.own))
        costs = costs_of(chat, [search.expanded], lambda step: step.candidates)
        outcome = describe(end.path, [search.expanded], costs)
        outcome["env_steps"] = search.env_steps
        outcome["env_steps_replayed"] = search.env_steps + search.replayed
        outcome["restores"] = search.restores
        outcome["resets"] = self.N
        return outcome


def plan_of(config: Config, gamma: float, backends: Backends) -> list[TreeSearch]:
    """The methods that the settings name, each with every value of its own settings. gamma: of the QNet's labels."""
    shared = {"sample": backends[Sample], "score": backends[Score], "seed": config.seed}
    grid = {"S": config.S, "k": config.k, "tau": config.tau, "c": config.c, "gamma": (gamma,)}
    plan = []
    for name in config.method:
        names = [setting for setting in inspect.signature(getattr(Search, name)).parameters if setting in grid]
        if name == "particles":
            budgets = [(1, N) for N in config.N or (4,)]
        else:
            budgets = [(M, 1) for M in config.M]
        for (M, N), *values in product(budgets, *map(grid.get, names)):
            own = tuple(zip(names, values, strict=True))
            player = " ".join(f"{setting}={value:g}" for setting, value in own)
            plan.append(TreeSearch(name, M=M, N=N, select="q", player=player, own=own, **shared))
    return plan


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    if not config.method:
        raise UserError("--method: name one or more of lookahead, beam, mcts, particles")
    search = q_search.Search(config)
    search.load([Method("qlass", "q")])
    labels = files.input_of(search.inputs["qnet"], "labels")
    gamma = files.meta_of(labels)["recipe"].get("gamma") if labels else None
    if gamma is None:
        gamma = 0.9
        files.warn("gamma is taken to be .9, as the labels of the QNet and their metadata are not there")
    plan = plan_of(config, gamma, search.backends)
    search.backends = {Call: answer}
    search.play(plan)


if __name__ == "__main__":
    run_stage(main)
