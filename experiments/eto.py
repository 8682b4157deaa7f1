"""ETO (Song et al. 2024): the agent learns by preference from its own failures.

    reads   RUN/sft/ and demonstrations, or with --pairs siblings RUN/q_labels.jsonl
    writes  RUN/sft-NAME/ (by validation the best), RUN/sft-NAME.updates.jsonl (a line a batch), .resume.safetensors

    python -m experiments.eto --env webshop --pairs siblings

    expert      the agent plays demonstrated tasks. Of the expert's trajectory and its own, the one that earns more is
                preferred. Then the trained agent explores again
    siblings    in a state of the exploration trees, the action with the highest q is preferred to each whose q
                is lower by more than .05

DPO (Rafailov et al. 2023) on the text of actions, as published, or on the choice among the valid ones, as in
tree_grpo. The reference is the agent that made the pairs: the agent at the start of the iteration, or, for siblings,
RUN/sft. --budget counts a beginning that two trajectories of a pack share once in each epoch, and not what was only
played.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import PositiveInt
from torch.nn.functional import logsigmoid

import envs
from experiments import learning
from experiments.decisions import Decision, PackedDecisions
from experiments.learning import Learner, batch_of, learn, load
from experiments.self_train import OTHER_LUCK
from q_search import Method
from qlass import UserError
from qlass.batching import ask
from qlass.chat import Chat, Rendering
from qlass.demonstrations import Demonstration, by_task
from qlass.files import Inputs
from qlass.inputs import find_agent, find_or_make
from qlass.messages import State, replay
from qlass.pairs import GAP, families, pairs_of
from qlass.records import Label
from qlass.settings import Number, place, read_settings, run_stage
from qlass.trees import read_trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(learning.Config):
    """Those of ETO's first iteration, but for the number of tasks and of pairs."""

    stage: ClassVar = "eto"

    pairs: Literal["expert", "siblings"] = "expert"  # what is compared
    beta: Number = 0.1  # of the DPO loss
    batch_tasks: PositiveInt = 100  # tasks or trees an iteration
    epochs: PositiveInt = 3  # passes over its pairs
    batch: PositiveInt = 16  # pairs an update
    every: PositiveInt = 1  # iterations a validation
    expert: Path | None = place(None)  # demonstrations (those that the agent was cloned from)
    labels: Path | None = place(None)  # RUN/q_labels.jsonl, made if missing


class Preference(NamedTuple):
    """Actions of two trajectories of a task, or once each in a state: `win` is preferred to `lose`."""

    win: list[Decision]
    lose: list[Decision]


def decisions(env: envs.TextEnv, rendering: Rendering, task_id: str, actions: Sequence[str]) -> list[Decision]:
    """Actions in the states that they are taken in; `env` plays them again. An expert's action joins the valid ones."""
    taken = []
    for move, action in zip(replay(env, task_id, actions), actions, strict=False):  # one move more: behind the last
        valid = ask(env, move.state, 1, (), rendering).valid
        taken.append(Decision(move.state, action, valid and (*valid, action)))
    env.close()
    return taken


def failures(
    env: envs.TextEnv, rendering: Rendering, played: Sequence[dict], expert: dict[str, Demonstration]
) -> Iterator[Preference]:
    """Trajectories of one task whose rewards differ: of the expert and of the agent, the better one first."""
    for line in played:
        task_id = line["task_id"]
        shown = expert[task_id]
        own = Demonstration(task_id, State.from_messages(line["messages"], opening=shown.state.opening))
        gain = line["reward"] - shown.reward
        if abs(gain) > 1e-6:  # a published file may hold rounded ones
            pair = (own, shown) if gain > 0 else (shown, own)
            yield Preference(*(decisions(env, rendering, task_id, side.state.actions) for side in pair))


def siblings(env: envs.TextEnv, rendering: Rendering, tree: list[dict]) -> Iterator[Preference]:
    """Actions of one state, the best by q against each that is worse by more than GAP."""
    for family in families(pairs_of(tree)):
        best = max(family, key=lambda pair: pair.q)
        worse = [pair.action for pair in family if best.q - pair.q > GAP]
        if worse:
            shown = Demonstration(tree[0]["task_id"], best.state.extended(best.action, ""))
            win = decisions(env, rendering, shown.task_id, shown.state.actions)[-1]
            for action in worse:
                valid = win.valid and (*win.valid, action)
                yield Preference([win], [dataclasses.replace(win, action=action, valid=valid)])


def dpo_loss(logp: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """-log sigmoid(beta (log pi(w) / pi_ref(w) - log pi(l) / pi_ref(l))) of each pair; log-probabilities (2, B)."""
    win, lose = logp - reference
    return -logsigmoid(beta * (win - lose))


class PackedPreferences:
    """B preferences as one token tree: what their trajectories share is computed once."""

    def __init__(self) -> None:
        self.choices = PackedDecisions()
        self.numbers: dict[Decision, int] = {}
        self.trajectories: list[list[int]] = []  # of decisions' numbers; 2 i is preferred to 2 i + 1

    def add(self, preference: Preference, chat: Chat) -> None:
        for trajectory in preference:
            for decision in trajectory:
                if decision not in self.numbers:
                    self.choices.add(len(self.numbers), decision, chat)
                    self.numbers[decision] = len(self.numbers)
            self.trajectories.append([self.numbers[decision] for decision in trajectory])

    def logprobs(self, model: Any) -> torch.Tensor:
        """log pi of the actions of each trajectory, summed; (2, B): the preferred ones, the others."""
        logp, _ = self.choices.logprobs(model)
        owner = torch.tensor(self.choices.owner, device=logp.device)
        each = logp.new_zeros(len(self.numbers)).index_add(0, owner, logp)
        return torch.stack([each[numbers].sum() for numbers in self.trajectories]).view(-1, 2).T


def pack_preferences(chat: Chat, preferences: Sequence[Preference], room: int) -> list[PackedPreferences]:
    """Token trees of about `room` tokens, of one preference at least."""
    packs: list[PackedPreferences] = []
    for preference in preferences:
        if not packs or len(packs[-1].choices.tree) > room:
            packs.append(PackedPreferences())
        packs[-1].add(preference, chat)
    return packs


def train(learner: Learner, preferences: list[Preference], updates: int, epochs: int, batch: int, beta: float) -> dict:
    """Passes over the pairs, `batch` of them an update. Returns what it spent, and of the last pass the mean loss and
    the share of pairs that are ranked right."""
    groups = [preferences[i : i + batch] for i in range(0, len(preferences), batch)]
    minibatches = [pack_preferences(learner.chat, group, learner.room) for group in groups]
    with torch.no_grad():  # the reference may be the model itself, before its first update
        references = [[pack.logprobs(learner.reference) for pack in packs] for packs in minibatches]
    learner.model.train()
    for _ in range(epochs):
        loss = right = 0.0
        for group, packs, anchors in zip(groups, minibatches, references, strict=True):
            for pack, reference in zip(packs, anchors, strict=True):
                logp = pack.logprobs(learner.model)
                losses = dpo_loss(logp, reference, beta)
                (losses.sum() / len(group)).backward()
                win, lose = logp - reference
                loss += losses.sum().item()
                right += float((win > lose).sum())
            updates += 1
            learner.step(updates)
    tokens = epochs * sum(len(pack.choices.tree) for packs in minibatches for pack in packs)
    n = max(1, len(preferences))
    return {"updates": updates, "tokens": tokens, "loss": round(loss / n, 6), "right": round(right / n, 6)}


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    name = config.name or ("eto" if config.pairs == "expert" else "eto-siblings")
    config = dataclasses.replace(config, name=name)
    env = envs.from_config(config)
    sft = find_agent(config)
    inputs: Inputs = {"sft": sft}
    # The reference of an iteration's failures is the agent that made them: itself, before its updates.
    learner = load(sft, config, env, copied=config.pairs == "siblings")
    rendering = learner.chat.rendering
    if config.pairs == "expert":
        inputs["expert"], expert = by_task(config.expert, sft, env)
        training_tasks = set(env.task_ids("train"))
        pool = [task for task, best in expert.items() if best.reward is not None and task in training_tasks]
        if not pool:
            lack = "none of its demonstrations has the id and the reward of a training task, which are compared"
            raise UserError(f"{inputs['expert'] or sft}: {lack}: --pairs siblings, or another --expert")
        learned = list(expert)
    else:
        inputs["labels"] = find_or_make(config.labels, "bellman", "q_labels.jsonl", config)
        trees = list(read_trees(inputs["labels"], Label))
        pool = range(len(trees))
        learned = [tree[0]["task_id"] for tree in trees]

    def explored(tasks: list[str], last: dict) -> tuple[list[Preference], dict]:
        """Trajectories of the agent against the expert's, and what they cost and earned."""
        seed = config.seed + OTHER_LUCK * (last["batch"] + 1)
        played = learner.episodes(env, tasks, Method("sample"), seed)
        rewards = [line["reward"] for line in played]
        tokens = sum(sum(line["tokens"].values()) for line in played)
        env_steps = sum(len(line["messages"]) - expert[line["task_id"]].state.opening for line in played) // 2
        figures = {"reward": round(float(np.mean(rewards)), 6), "played": last.get("played", 0) + tokens}
        figures["env_steps"] = last["env_steps"] + env_steps
        return list(failures(env, rendering, played, expert)), figures

    def compared(numbers: list[int], last: dict) -> tuple[list[Preference], dict]:
        """Siblings of some exploration trees, whose steps count when they are first read."""
        fresh = numbers[: max(0, len(trees) - last["batch"] * config.batch_tasks)]
        env_steps = last["env_steps"] + sum(len(trees[i]) - 1 for i in fresh)
        pairs = [pair for i in numbers for pair in siblings(env, rendering, trees[i])]
        return pairs, {"env_steps": env_steps}

    def iteration(last: dict) -> dict:
        drawn = batch_of(pool, config.seed, last["batch"], config.batch_tasks)
        once = list(dict.fromkeys(drawn))  # where two passes meet
        preferences, figures = explored(once, last) if config.pairs == "expert" else compared(once, last)
        spent = train(learner, preferences, last["updates"], config.epochs, config.batch, config.beta)
        spent["tokens"] += last["tokens"]
        return {"batch": last["batch"] + 1, "pairs": len(preferences), **spent, **figures}

    # A token counts three times in an update, and goes through the reference once for all epochs.
    learn(learner, env, iteration, config, 3 + 1 / config.epochs, learned, inputs)


if __name__ == "__main__":
    run_stage(main)
