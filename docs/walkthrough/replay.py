"""What models said in a real run, said again: Algorithms 2 and 4 run here with the recording in the models' place.

An algorithm asks its models by `Sample` and `Score` requests (qlass/driver.py). The recording holds the answers, each
under a digest of the whole request: prompt, number of draws, noise key, valid actions. So trees and episodes come from
the code as it is now, and a prompt that has changed by one letter since finds no answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from tokenizers import Tokenizer

import bellman
import build_trees
import envs
import q_search
from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.driver import Candidate, Sample, Score, drive
from qlass.qnet import pairs_of, qnet_scores

RECORDING = Path(__file__).with_name("run.jsonl")
AGAIN = "record it again: python docs/make_walkthrough.py --record"
LAKE = ["--env", "frozenlake", "--map", "4x4"]
GREEDY, QLASS = q_search.Method("greedy"), q_search.Method("qlass", M=4)
NODE_KEYS = ("node_id", "parent_id", "action", "observation", "reward", "done", "source", "branch", "q_raw", "q")


def digest(thing: Any) -> str:
    return hashlib.blake2b(repr(thing).encode(), digest_size=6).hexdigest()


def name(request: Sample | Score) -> str:
    """A digest of all that an answer depends on."""
    seen = (request.state.messages, request.state.task)
    if isinstance(request, Sample):
        return digest((*seen, request.n, request.key, request.temperature, request.valid))
    return digest((*seen, request.actions))


class Models:
    """In the place of a Policy and a QNet: gives each request the answer that it got, and notes what was asked."""

    def __init__(self, said: dict[str, list]) -> None:
        self.said, self.asked = said, []

    def _answer(self, request: Sample | Score) -> list:
        self.asked.append(request)
        if name(request) not in self.said:
            raise UserError(
                f"{RECORDING.name}: texts, actions or an algorithm have changed since: no model was asked "
                f"{str(request)[:80]}...; {AGAIN}"
            )
        return self.said[name(request)]

    def sample(self, requests: list[Sample]) -> list[list[Candidate]]:
        return [[Candidate(text, 0, 0.0) for text in self._answer(r)] for r in requests]

    def score(self, requests: list[Score]) -> list[list[float]]:
        return [self._answer(r) for r in requests]

    def heard(self) -> dict[str, list]:
        """The answers that were needed, for the recording."""
        return {name(r): self.said[name(r)] for r in self.asked}


@dataclasses.dataclass
class Branch:
    """One branch of Algorithm 2 as it was watched: where it began, what it pushed, and the queue after that."""

    begin: Any
    by: str = "agent"
    pushed: list = dataclasses.field(default_factory=list)
    queue: list = dataclasses.field(default_factory=list)


def grow(
    env: envs.TextEnv, task_id: str, rendering: Rendering, settings: dict, models: Any
) -> tuple[list[dict], list[Branch]]:
    """One tree by Algorithm 2, its lines as build_trees.py writes them, and its branches; nodes by their numbers."""
    branches: list[Branch] = []

    class Queue(deque):
        def __init__(self, nodes: Any) -> None:
            super().__init__(nodes)
            self.popped = self.root = self[0]
            queues.append(self)

        def popleft(self) -> Any:
            self.popped = super().popleft()
            return self.popped

        def extend(self, nodes: Any) -> None:
            branches[-1].pushed = list(nodes)
            super().extend(branches[-1].pushed)
            branches[-1].queue = list(self)

        def extendleft(self, nodes: Any) -> None:
            branches[-1].pushed = list(nodes)[::-1]
            super().extendleft(reversed(branches[-1].pushed))
            branches[-1].queue = list(self)

    queues: list[Queue] = []

    def sample(requests: list[Sample]) -> list[list[Candidate]]:
        if requests[0].key[1] > len(branches):  # the first action of a new branch
            branches.append(Branch(queues[0].popped, queue=list(queues[0])))
        return models.sample(requests)

    def expert(task_id: str) -> Any:
        branches.append(Branch(queues[0].root, "expert", queue=list(queues[0])))
        return type(player).expert(player, task_id)

    player = env.fork()
    player.expert = expert
    shape = (settings["depth"], settings["width"], settings["rollouts"])
    rendering = dataclasses.replace(rendering, temperature=settings.get("temperature") or rendering.temperature)
    with mock.patch.object(build_trees, "deque", Queue):
        tree = build_trees.exploration_tree(player, task_id, rendering, *shape, True, steps=settings["steps"])
        (root,) = drive([tree], {Sample: sample})
    number = {id(node): i for i, node in enumerate(root.walk())}
    numbered = [
        Branch(number[id(b.begin)], b.by, [number[id(n)] for n in b.pushed], [number[id(n)] for n in b.queue])
        for b in branches
    ]
    return build_trees.tree_records(env, task_id, root), numbered


def essence(tree: list[dict]) -> list[tuple]:
    """What must come out of the same answers; lines may gain other fields."""
    return [tuple(node[key] for key in NODE_KEYS) for node in tree]


def play(env: envs.TextEnv, task_id: str, method: q_search.Method, chat: Chat, steps: int, models: Any) -> dict:
    """One episode by Algorithm 4: its line of results.jsonl without what it cost."""
    player = env.fork()
    player.max_steps = steps
    (result,) = drive([q_search.best_of(player, task_id, method, chat)], {Sample: models.sample, Score: models.score})
    steps = [{key: step[key] for key in ("action", "candidates", "observation")} for step in result["steps"]]
    return {"task_id": task_id, "method": method.name, "reward": result["reward"], "steps": steps}


def small_lake() -> envs.TextEnv:
    return envs.from_arguments(build_trees.arguments(LAKE))


def load_chat(record: dict, rendering: dict | None = None) -> Chat:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(record["tokenizer"])),
        pad_token=record["pad"], eos_token=record["end"],
    )  # fmt: skip
    tokenizer.chat_template = record["template"]
    return Chat(tokenizer, Rendering(**(rendering or record["rendering"])))


class Part:
    """One environment's part of the page: a tree, its labels and scores, and two episodes, all made again."""

    def __init__(self, part: str, env: envs.TextEnv, records: list[dict]) -> None:
        def of(kind: str, part: str = part) -> list[dict]:
            found = [r for r in records if (r["part"], r["kind"]) == (part, kind)]
            if not found:
                raise UserError(f"{RECORDING.name}: no {kind} of {part}; {AGAIN}")
            return found

        self.env, (self.run,), (tree,) = env, of("run"), of("tree")
        # Only the lake's own tokenizer is small enough to be kept; what another cuts of the shop's text is not shown.
        self.chat = load_chat(of("tokenizer", "frozenlake")[0], self.run.get("rendering"))
        self.settings = self.run["settings"]
        models = Models(tree["said"])
        lines, self.branches = grow(env, tree["task_id"], self.chat.rendering, self.settings, models)
        self.first_draws = models.said[name(models.asked[0])]
        self.tree = bellman.label(lines, "q", self.settings["gamma"])
        self.same(tree, essence(self.tree))
        self.pairs = pairs_of(self.tree)
        scores = qnet_scores(models, [self.pairs])
        self.scores = [scores[p.state, p.action] for p in self.pairs]  # of nodes 1, 2, ...
        self.episodes, self.drawn = {}, {}
        for record, method in zip(of("episode"), (GREEDY, QLASS), strict=True):
            models = Models(record["said"])
            episode = play(env, record["task_id"], method, self.chat, self.run["steps"], models)
            self.episodes[method.name] = episode
            self.drawn[method.name] = [models.said[name(r)] for r in models.asked if isinstance(r, Sample)]
            self.same(record, episode)

    @staticmethod
    def same(record: dict, outcome: Any) -> None:
        if digest(outcome) != record["outcome"]:
            raise UserError(
                f"{RECORDING.name}: the {record['kind']} of {record['part']} comes out differently now, with the same "
                f"answers of the models; {AGAIN}"
            )
