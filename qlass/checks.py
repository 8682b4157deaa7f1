"""Were the tasks that are played also learned from?

A published split may overlap (WebShop's do, in 21 tasks), so what is found is a warning and a figure, no refusal. What
is not known is said too: None is not 0.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import TextEnv
from qlass.chat import State
from qlass.files import input_of, is_text, known_id, lineage, openings, records_of
from qlass.policy import Policy
from qlass.qnet import Pair
from qlass.stats import spearman

# -------------------------------------------------------------------------------------------------------------- leaks

TRIED = 100  # training tasks, by whose words it is seen whether demonstrations without ids are of this environment


@dataclass(frozen=True)
class Learned:
    """The files that an agent or a QNet was trained on, with how many of their trajectories or trees (None: all)."""

    files: list[tuple[Path, int | None]]
    played: bool  # it also learned from playing the training tasks itself


def learned_from(checkpoint: Path, args: argparse.Namespace) -> Learned | str:
    """What a checkpoint and those it was trained from have learned from; text: why that is not known."""
    files: list[tuple[Path, int | None]] = []
    played = False
    for folder, made in lineage(checkpoint):
        if not made:
            return f"{folder.name} has no metadata"
        if any(made.get(name) != getattr(args, name) for name in ("env", *args.env_flags)):
            return f"{folder.name} is of another environment, whose ids mean other tasks"
        for name, most in (("labels", "limit"), ("expert", "n_expert")):
            if is_text(made.get(name)):
                path = input_of(folder, name)
                if not path or not path.is_file():
                    return "the file is gone"
                files.append((path, made.get(most)))
        played |= "rounds" in made  # of experiments.tree_grpo
        if is_text(made.get("labels")) and "budget_in" not in made:  # a QNet: its backbone is the agent's matter
            break
    return Learned(files, played) if files else "the file is gone"


def leaked(env: TextEnv, tasks: Iterable[str], learned: Learned | str, source: str) -> int | None:
    """How many of the tasks played are about what was learned from, the same task or product; a line where any are.

    Demonstrations without ids (ETO's of WebShop) are known by their words: a task's first observation or, where that
    has other words too, its instruction. None, with a line, where nothing is known.
    """
    tasks, n = list(tasks), None
    if isinstance(learned, Learned):
        player, ids, texts = env.fork(), set(env.task_ids("train") if learned.played else ()), []
        for path, most in learned.files:
            records = (record for _, record in records_of(path) if record.get("parent_id") is None)  # trees: the root
            known = [known_id(record, env) for record in itertools.islice(records, most)]
            texts += [words(text) for text in openings(path, most)] if None in known else []
            ids |= set(known) - {None}
        subjects = {env.subject(str(task)) for task in ids}
        n = sum(env.subject(task) in subjects or told(player, task, texts) for task in tasks)
        if texts and not n and not any(told(player, task, texts) for task in env.task_ids("train")[:TRIED]):
            names = ", ".join(path.name for path, _ in learned.files)
            n, learned = None, f"{names}: no task ids, and none of the texts is of a task known here"
        player.close()
    if n is None:
        print(f"warning: whether tasks played are also in the {source} is not known: {learned}", file=sys.stderr)
    elif n:
        print(f"warning: {n} of {len(tasks)} tasks played are also in the {source}", file=sys.stderr)
    return n


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def told(env: TextEnv, task: str, texts: list[str]) -> bool:
    """Whether one of these texts tells a player the task."""
    if not texts:
        return False
    observation, info = env.reset(options={"task_id": task})
    if any(words(observation) in text for text in texts):
        return True
    return env.unique_tasks and any(words(info["task"]) in text for text in texts)


# -------------------------------------------------------------------------------------------------------------- ranking


def sibling_accuracy(trees: list[list[Pair]], scores: dict[tuple[State, str], float], gap: float = 0.05) -> dict:
    """Of the sibling pairs whose q differ by more than `gap`, the share whose scores stand in the same order.

    Chance is .5. `sibling_gap`: how far apart the scores put such pairs, of what q does; near 0 a net ignores the
    action. `own_...`: of pairs without a node of the demonstrator's, since search compares draws of the agent.
    `spearman` is the global rank correlation, which a net that only knows V(s) can reach too.
    """
    flat = [(p.q, scores[p.state, p.action]) for tree in trees for p in tree]
    rank = float(spearman(*zip(*flat, strict=True))) if len(flat) > 2 else math.nan  # also where all are equal
    figures: dict[str, Any] = {"spearman": rank if math.isfinite(rank) else None}
    for of, some in (("sibling", trees), ("own_sibling", [[p for p in tree if p.own] for tree in trees])):
        right, total, apart, labelled = 0.0, 0, 0.0, 0.0
        for tree in some:
            siblings: dict[State, list[Pair]] = {}
            for p in tree:
                siblings.setdefault(p.state, []).append(p)
            for a, b in itertools.chain(*(itertools.combinations(family, 2) for family in siblings.values())):
                if abs(a.q - b.q) > gap:
                    x, y = scores[a.state, a.action], scores[b.state, b.action]
                    right += 0.5 if x == y else float((x > y) == (a.q > b.q))
                    total, apart, labelled = total + 1, apart + abs(x - y), labelled + abs(a.q - b.q)
        share = (right / total, apart / labelled) if total else (None, None)
        figures |= {f"{of}_accuracy": share[0], f"{of}_pairs": total, f"{of}_gap": share[1]}
    return figures


def policy_scores(policy: Policy, trees: list[list[Pair]]) -> dict[tuple[State, str], float]:
    """log pi(a | s): the baseline that a QNet has to beat."""
    pairs = list(dict.fromkeys((p.state, p.action) for tree in trees for p in tree))
    return dict(zip(pairs, policy.logprobs(pairs), strict=True))


def print_ranking(trees: str, figures: dict) -> None:
    """`sibling_accuracy` in words, with the policy's beside it."""
    f = figures
    if f["sibling_pairs"]:
        print(f"  {trees} trees: sibling pairs ranked right {f['sibling_accuracy']:.3f} of {f['sibling_pairs']} "
              f"(chance .5, policy's log-probability {f['policy_sibling_accuracy']:.3f}), "
              f"{f['sibling_gap']:.2f} times as far apart as their q, "
              f"Spearman {'undefined' if f['spearman'] is None else round(f['spearman'], 3)}")  # fmt: skip
    if 0 < f["own_sibling_pairs"] < f["sibling_pairs"]:
        print(f"    without the demonstrator's nodes {f['own_sibling_accuracy']:.3f} of {f['own_sibling_pairs']} "
              f"({f['policy_own_sibling_accuracy']:.3f})")  # fmt: skip
