"""Searches with QNet that need snapshots of the environment at test time, beside QLASS, which needs none.

    python -m experiments.tree_search --env webshop --method lookahead beam mcts particles -M 4 -k 2 -S 4 8 -N 4

    lookahead    the one of M candidates behind which Q promises most, gamma max_a' Q(s', a')
    beam         k states, M candidates each, of which the k of highest Q are stepped
    mcts         S simulations a step by PUCT, then the most visited action: TS-LLM's MCTS-alpha (arXiv 2309.17179) with
                 the exact pi(a | s) as prior, V(s') = max_a' Q(s', a'), and leaves discounted by their depth
    oracle_mcts  an end is worth its true reward: an oracle (LATS's search, arXiv 2310.04406, without its language)
    particles    N chains, resampled by exp((V - V_last) / tau): Agentic Monte Carlo (arXiv 2606.05296), without rewards

Flags and result lines are q_search.py's; `player` has S, k, tau, c, gamma. `env_steps` counts all steps and no restore,
`env_steps_replayed` a restore as the steps that lead there. A search returns the place where it has ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import time
from collections.abc import Generator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import envs
import q_search
from q_search import Method, Step, distinct
from qlass import UserError, costs
from qlass.chat import Rendering, State, parse_action, uniforms
from qlass.cli import at_least, run_stage
from qlass.driver import Candidate, Sample, Score, ask
from qlass.files import input_of, read_meta


@dataclasses.dataclass(eq=False)
class Edge:
    """A candidate: pi(a | s), Q(s, a), the mean of what was backed up (at first Q), and the place that it leads to."""

    action: str
    prior: float
    q: float
    value: float
    visits: int = 0
    child: Place | None = None

    def promise(self, gamma: float) -> float:
        """Q(s, a) once the next page is seen: gamma max_a' Q(s', a'); at an end Q(s, a) itself."""
        return self.q if self.child.done else gamma * max(edge.q for edge in self.child.edges)


@dataclasses.dataclass(eq=False)
class Place:
    """A state that was reached, and the snapshot that leads back to it."""

    state: State
    path: tuple[Step, ...] = ()  # that led here; an oracle alone reads a reward before all is played
    q: float = 0.0  # Q(s, a) of its last action
    done: bool = False
    snapshot: Any = None
    request: Sample | None = None  # for its candidates
    drawn: list[Candidate] = dataclasses.field(default_factory=list)
    edges: list[Edge] = dataclasses.field(default_factory=list)


class Search:
    """A task's environment, and what was drawn and stepped in it."""

    def __init__(self, env: envs.TextEnv, task_id: str, method: Method, rendering: Rendering) -> None:
        self.env, self.task_id, self.method, self.rendering = env, task_id, method, rendering
        self.expanded: list[Step] = []
        self.env_steps = self.restores = self.replayed = 0
        observation, info = env.reset(options={"task_id": task_id})
        self.root = self.arrive(Place(State.first(env, observation, info)))

    def arrive(self, place: Place, trial: int = 0) -> Place:
        """The environment is in this place. Its draws are those of a trajectory of q_search.py that comes by."""
        self.at = place
        if not place.done:
            place.snapshot, key = self.env.snapshot(), (self.task_id, trial, len(place.path))
            place.request = ask(self.env, place.state, self.method.M, key, self.rendering, self.method.temperature)
        return place

    def expand(self, *places: Place) -> Generator:
        """Give places their edges: the distinct of M draws, with their Q (Alg. 4, lines 5-7)."""
        places = [place for place in places if not (place.done or place.edges)]
        if places:
            draws = yield [place.request for place in places]
            candidates = [distinct(candidate.text for candidate in drawn) for drawn in draws]
            values = yield [Score(place.state, tuple(c)) for place, c in zip(places, candidates, strict=True)]
            for place, drawn, actions, scores in zip(places, draws, candidates, values, strict=True):
                place.drawn = drawn
                place.edges = list(map(Edge, actions, priors(drawn, actions), scores, scores))
                self.expanded.append(Step(place.state, drawn, actions, scores, "", "", 0.0))

    def step(self, place: Place, edge: Edge) -> Place:
        """Step an edge of the place that the environment is in."""
        observation, reward, terminated, truncated, _ = self.env.step(parse_action(edge.action))
        self.env_steps += 1
        observation = self.env.message(observation)
        candidates, values = [e.action for e in place.edges], [e.value for e in place.edges]
        step = Step(place.state, place.drawn, candidates, values, edge.action, observation, reward)
        after = place.state.then(edge.action, observation)
        return self.arrive(Place(after, (*place.path, step), edge.q, terminated or truncated), place.request.key[1])

    def come_to(self, place: Place, copy: bool = True) -> None:
        """Bring the environment to a place or a copy of it, whose random numbers are not the future's."""
        if self.at is not place:
            self.env.restore(place.snapshot)
            self.restores += 1
            self.replayed += len(place.path)
        if copy:
            chance = uniforms(1, "copy", self.task_id, self.env_steps, self.restores)[0]
            self.env.reseed(int(chance * 2**32))

    def follow(self, place: Place, edge: Edge) -> Place:
        """The place behind an edge, which is stepped the first time."""
        if edge.child is None:
            self.come_to(place)
            edge.child = self.step(place, edge)
        return edge.child

    def act(self, place: Place, edge: Edge) -> Place:
        """Take an edge in earnest. The sub-tree is kept if the environment answers what it answered in the search."""
        self.come_to(place, copy=False)
        there = self.step(place, edge)
        if edge.child and edge.child.state == there.state:
            there.drawn, there.edges = edge.child.drawn, edge.child.edges
        return there

    def lookahead(self, gamma: float) -> Generator:
        """One step ahead, where there is a choice."""
        place = self.root
        while not place.done:
            yield from self.expand(place)
            if len(place.edges) > 1:
                yield from self.expand(*[self.follow(place, edge) for edge in place.edges])
                for edge in place.edges:
                    edge.value = edge.promise(gamma)
            place = self.act(place, max(place.edges, key=lambda edge: edge.value))
        return place

    def beam(self, k: int) -> Generator:
        """Level by level the k edges of highest Q, until k have ended; of these the one of the highest last Q."""
        ended, level = [], [self.root]
        while level and len(ended) < k:
            yield from self.expand(*level)
            pool = sorted(((place, edge) for place in level for edge in place.edges), key=lambda pair: -pair[1].q)
            children = [self.follow(place, edge) for place, edge in pool[:k]]
            ended += [child for child in children if child.done]
            level = [child for child in children if not child.done]
        return max(ended, key=lambda place: place.q)

    def mcts(self, S: int, c: float, gamma: float, truth: bool = False) -> Generator:
        """The most visited action of each step, of equals that of the highest value. The first simulation of a new tree
        expands its root, so that one a step is QLASS."""
        place = self.root
        while not place.done:
            for _ in range(S):
                yield from self.simulate(place, c, gamma, truth)
            place = self.act(place, max(place.edges, key=lambda edge: (edge.visits, edge.value)))
        return place

    def oracle_mcts(self, S: int, c: float, gamma: float) -> Generator:
        return self.mcts(S, c, gamma, truth=True)

    def simulate(self, place: Place, c: float, gamma: float, truth: bool) -> Generator:
        """Down by PUCT to a place without edges, expand it, and back up what it promises, discounted by depth."""
        path: list[Edge] = []
        while place.edges:
            bonus = c * math.sqrt(sum(edge.visits for edge in place.edges))
            path.append(max(place.edges, key=lambda e, bonus=bonus: e.value + bonus * e.prior / (1 + e.visits)))
            place = self.follow(place, path[-1])
        yield from self.expand(place)
        if path:
            value = place.path[-1].reward if truth and place.done else path[-1].promise(gamma)
            for edge in reversed(path):
                edge.visits += 1
                edge.value += (value - edge.value) / edge.visits
                value *= gamma

    def particles(self, tau: float, gamma: float) -> Generator:
        """N chains with the draws of best-of-N; the highest last Q counts. V is gamma^t Q of the last action. Where
        weights exp((V - V_last) / tau) count as fewer than N / 2, copies of heavy chains replace light ones."""
        n = self.method.N
        chains = [self.arrive(dataclasses.replace(self.root), trial=i) for i in range(n)]
        last = np.zeros(n)
        while any(not chain.done for chain in chains):
            yield from self.expand(*chains)
            for i, chain in enumerate(chains):
                if not chain.done:
                    self.env.restore(chain.snapshot)  # not counted: in its environment it is there
                    chains[i] = self.step(chain, chain.edges[0])
            values = np.array([gamma ** len(chain.path) * chain.q for chain in chains])
            weights = np.exp((values - last - (values - last).max()) / tau)
            weights /= weights.sum()
            if 1 / (weights**2).sum() < n / 2:
                u = uniforms(1, "resampled", self.task_id, self.env_steps)[0]
                copies = np.diff(np.floor(n * weights.cumsum() + u), prepend=0).astype(int)
                spare = [i for i in range(n) for _ in range(copies[i] - 1)]
                sources = [i if copies[i] else spare.pop() for i in range(n)]
                chains = [chains[s] if s == i else self.copy(chains[s], i) for i, s in enumerate(sources)]
                last = values[sources]
        return max(chains, key=lambda chain: chain.q)

    def copy(self, place: Place, trial: int) -> Place:
        """A place from which another chain goes on, which has all to replay."""
        if place.done:
            return place
        self.at = None
        self.come_to(place)
        return self.arrive(dataclasses.replace(place), trial)


def priors(drawn: Sequence[Candidate], actions: Sequence[str]) -> list[float]:
    """pi(a | s) of each action, all its texts together, as shares; equal ones where a server tells no probability."""
    likely = {candidate.text: math.exp(candidate.logprob) for candidate in drawn}
    mass = [sum(p for text, p in likely.items() if parse_action(text) == parse_action(a)) for a in actions]
    return [m / sum(mass) if sum(mass) > 0 else 1 / len(mass) for m in mass]


NAMES = ("lookahead", "beam", "mcts", "oracle_mcts", "particles")


def play(settings: dict, env: envs.TextEnv, task_id: str, method: Method, chat: Any, shared: dict) -> Generator:
    """A task, as `Method.search` has it. Every draw costs its tokens once, whether it was played or not."""
    search, started = Search(env, task_id, method, chat.rendering), time.time()
    end = yield from getattr(search, method.kind)(**settings)
    outcome = costs.outcome(chat, Method("qlass"), end.path, [search.expanded], time.time() - started)
    steps = {"env_steps": search.env_steps, "env_steps_replayed": search.env_steps + search.replayed}
    return outcome | steps | {"restores": search.restores, "resets": method.N}


def planned(names: Sequence[str], grid: dict[str, list], Ms: Sequence[int], Ns: Sequence[int]) -> list[Method]:
    """The methods of these names, each with every value that the grid has for its settings."""
    plan = []
    for name in names:
        own = [setting for setting in inspect.signature(getattr(Search, name)).parameters if setting in grid]
        budgets = [(1, N) for N in Ns] if name == "particles" else [(M, 1) for M in Ms]
        for (M, N), *values in product(budgets, *map(grid.get, own)):
            settings = dict(zip(own, values, strict=True))
            full_name = f"{name}:" + " ".join(f"{setting}={value:g}" for setting, value in settings.items())
            plan.append(Method(full_name, M, N, "q", search=partial(play, settings)))
    return plan


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser("python -m experiments.tree_search", description=__doc__.split("\n")[0])
    flags.epilog = "further flags: those of q_search.py; -N is that of particles (4)"
    add = flags.add_argument
    add("--method", nargs="+", required=True, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    add("-S", nargs="+", type=at_least(1), default=[4], help="simulations a step, of mcts (4)")
    add("-k", nargs="+", type=at_least(1), default=[2], help="states, of beam (2)")
    add("--tau", nargs="+", type=at_least(1e-6, float), default=[0.1], help="temperature of resampling (0.1)")
    add("-c", nargs="+", type=at_least(0, float), default=[1.0], help="weight of the prior, of mcts (1)")
    add("--gamma", nargs="+", type=at_least(0, float, 1), help="default: that of the QNet's labels, or .9")
    own, rest = flags.parse_known_args(argv)
    return argparse.Namespace(**vars(q_search.arguments(rest)) | vars(own))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.paraphrase is not None:
        raise UserError("--paraphrase: only q_search.py counts what wordings cost; leave it out")
    labels = input_of(args.qnet or args.run / "qnet", "labels") or args.run
    grid = vars(args) | {"gamma": args.gamma or [read_meta(labels).get("arguments", {}).get("gamma", 0.9)]}
    q_search.main(args.argv, planned=lambda env, names, Ms, Ns, *_: planned(args.method, grid, Ms, Ns or [4]))


if __name__ == "__main__":
    run_stage(main)
