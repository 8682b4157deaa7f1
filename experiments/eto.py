"""ETO (Song et al. 2024): the agent learns by preference from its own failures.

    reads   RUN/sft/, and the expert's trajectories that it was cloned from (RUN/expert.jsonl), or with --pairs siblings
            RUN/q_labels.jsonl
    writes  RUN/sft-NAME/ (the checkpoint with the best validation reward), RUN/sft-NAME.updates.jsonl (one line per
            batch)

    python -m experiments.eto --env webshop
    python -m experiments.eto --env webshop --pairs siblings --name eto-siblings

    expert      the agent plays demonstrated tasks. Of the expert's trajectory and its own, the one that earns more is
                preferred. Then the trained agent explores again
    siblings    in a state of the exploration trees, the action with the highest q is preferred to each with a lower q

DPO (Rafailov et al. 2023) on what the agent does: on the text of its actions, as published, or, where it acts among
the valid actions, on its choice among them, as in tree_grpo. The reference is the agent that made the pairs: the agent
at the start of the iteration, or, for siblings, RUN/sft. A beginning that two trajectories share is computed once, and
counts for --budget once in each of the --epochs. What was only played does not count for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

import envs
from experiments.decisions import Decision, PackedDecisions
from experiments.learning import batch_of, learn, learner, load, recomputed, room, step
from experiments.self_train import OTHER_LUCK, trajectories
from q_search import Method
from qlass import UserError, loop
from qlass.chat import Chat, Rendering, State, parse_action
from qlass.cli import at_least, must_exist, needed, parse, run_stage
from qlass.driver import Sample, ask, drive
from qlass.files import by_agent, cloned_from, first_observation, known_id, read_trajectories, read_trees
from qlass.policy import Policy
from qlass.qnet import pairs_of

LR = {"webshop": 2e-5, "alfworld": 3e-5}  # of the tiny model, others LR_TINY
LR_TINY = 1e-4
GAP = 0.05  # siblings whose q differ by less are level

Preference = tuple[list[Decision], list[Decision]]  # what is preferred, to what


# --------------------------------------------------------------------------------------------------------- preferences


def decisions(env: envs.TextEnv, rendering: Rendering, task_id: str, played: State) -> list[Decision]:
    """What the agent wrote in a trajectory, after the layout's "OK".

    If it acts among the valid actions, `env` plays it again to know them; an expert's action beyond them joins them.
    """
    wrote = [i for i, (role, _) in enumerate(played.messages) if role == "assistant"][first_observation(played)[0] :]
    found = [Decision(State(played.messages[:i], played.task), played.messages[i][1]) for i in wrote]
    if rendering.candidates == "free":
        return found
    env.reset(options={"task_id": task_id})
    for i, decision in enumerate(found):
        valid = ask(env, decision.state, 1, (), rendering).valid
        found[i] = dataclasses.replace(decision, valid=(*valid, decision.action))
        env.step(parse_action(decision.action))
    env.close()
    return found


def demonstrated(path: Path, env: envs.TextEnv, most: int | None) -> dict[str, dict]:
    """The first `most` demonstrations by task, as lines of expert.jsonl; those of an agent's own left out."""
    found = {}
    for state, record in itertools.islice(read_trajectories(path), most):
        task, reward = known_id(record, env), record.get("reward")
        if by_agent(record):
            continue
        if task is None or reward is None:
            raise UserError(
                f"{path}: a line without task_id or reward, so the agent can't play its task and be compared"
            )
        found[task] = {"task_id": task, "task": state.task, "messages": state.dump(), "reward": reward}
    return found


def failures(
    env: envs.TextEnv, rendering: Rendering, played: Sequence[dict], expert: dict[str, dict]
) -> Iterator[Preference]:
    """Trajectories of one task whose rewards differ: of the expert and of the agent, the better one first."""
    for own in played:
        shown = expert[own["task_id"]]
        if abs(own["reward"] - shown["reward"]) > 1e-6:  # a published file may hold rounded ones
            lines = sorted((own, shown), key=lambda line: -line["reward"])
            states = [State.load(line["messages"], line.get("task", "")) for line in lines]
            better, worse = (decisions(env, rendering, own["task_id"], state) for state in states)
            yield better, worse


def siblings(env: envs.TextEnv, rendering: Rendering, tree: list[dict]) -> Iterator[Preference]:
    """Actions of one state, the best by q against each that is worse."""
    families: dict[State, list] = {}
    for pair in pairs_of(tree):
        families.setdefault(pair.state, []).append(pair)
    for state, family in families.items():
        best = max(family, key=lambda pair: pair.q)
        if worse := [pair.action for pair in family if best.q - pair.q > GAP]:
            chosen = State((*state.messages, ("assistant", best.action)), state.task)
            win = decisions(env, rendering, tree[0]["task_id"], chosen)[-1]
            for action in worse:
                yield [win], [dataclasses.replace(win, action=action, valid=win.valid and (*win.valid, action))]


# ------------------------------------------------------------------------------------------------------------ the loss


def dpo_loss(
    win: torch.Tensor, lose: torch.Tensor, reference_win: torch.Tensor, reference_lose: torch.Tensor, beta: float
) -> torch.Tensor:
    """-log sigmoid(beta (log pi(w) / pi_ref(w) - log pi(l) / pi_ref(l))) of each pair, from log-probabilities (B,)."""
    return -logsigmoid(beta * ((win - reference_win) - (lose - reference_lose)))


def pack_preferences(
    chat: Chat, preferences: Sequence[Preference], most: int
) -> Iterator[tuple[PackedDecisions, list[tuple[int, int, int]]]]:
    """Some pairs as one token tree, and (pair, side, decision) of each step: side 0 is preferred to side 1."""
    tree, steps, known, pairs = PackedDecisions(), [], {}, 0
    for preference in preferences:
        if pairs and len(tree.tree) > most:
            yield tree, steps
            tree, steps, known, pairs = PackedDecisions(), [], {}, 0
        for side, trajectory in enumerate(preference):
            for decision in trajectory:
                if decision not in known:
                    known[decision] = len(known)
                    tree.add(known[decision], decision, chat)
                steps.append((pairs, side, known[decision]))
        pairs += 1
    if pairs:
        yield tree, steps


def trajectory_logprobs(model: Any, tree: PackedDecisions, steps: list[tuple[int, int, int]]) -> torch.Tensor:
    """log pi of the actions of each trajectory, summed; (2, pairs): the preferred ones, the others."""
    logp, _ = tree.logprobs(model)
    pair, side, decision = torch.tensor(steps, device=logp.device).T
    each = logp.new_zeros(int(decision.max()) + 1).index_add(0, torch.tensor(tree.owner, device=logp.device), logp)
    pairs = int(pair.max()) + 1
    return logp.new_zeros(2 * pairs).index_add(0, side * pairs + pair, each[decision]).view(2, pairs)


def train(
    model: Any, reference: Any, optimizer: torch.optim.Optimizer, chat: Chat, preferences: Sequence[Preference],
    updates: int, args: argparse.Namespace,
) -> dict:  # fmt: skip
    """Passes over the pairs. Returns updates, tokens, and of the last pass the mean loss and the share ranked right."""
    tokens = loss_sum = right = 0
    batches = []  # packed, with the reference's log-probabilities, which may be the model's own: it has made no update
    with loop.gathered(model), torch.no_grad():
        for start in range(0, len(preferences), args.batch):
            packs = list(pack_preferences(chat, preferences[start : start + args.batch], room(model)))
            mine = loop.share(packs, loop.divided(model))
            batches.append([(*pack, trajectory_logprobs(reference, *pack), counts) for pack, counts in mine])
    for _ in range(args.epochs):
        loss_sum = right = 0
        for i, batch in enumerate(batches):
            pairs = min(args.batch, len(preferences) - i * args.batch)
            for tree, steps, anchor, counts in batch:
                with recomputed(model):
                    logp = trajectory_logprobs(model, tree, steps)
                    losses = counts * dpo_loss(*logp, *anchor, args.beta)
                    (losses.sum() / pairs).backward()
                loss_sum += losses.sum().item()
                right += counts * int(((logp - anchor)[0] > (logp - anchor)[1]).sum())
                tokens += counts * len(tree.tree)
            updates += 1
            step(optimizer, args.lr, updates)
    n = max(1, len(preferences))
    tokens, loss_sum, right = loop.total(tokens, loss_sum, right)
    return {"updates": updates, "tokens": int(tokens), "loss": round(loss_sum / n, 6), "right": round(right / n, 6)}


# ---------------------------------------------------------------------------------------------------------------- main


def distinct_of(items: Sequence[Any], last: dict, args: argparse.Namespace) -> list[Any]:
    """The next batch of tasks or trees, each once, also where a pass ends in it and the next begins."""
    return list(dict.fromkeys(batch_of(items, args.seed, last["batch"], args.batch_tasks)))


def explored(
    model: Any, chat: Chat, env: envs.TextEnv, expert: dict[str, dict], last: dict, args: argparse.Namespace
) -> tuple[list[Preference], dict]:
    """The agent's sampled trajectories on demonstrated tasks against the expert's, and what they cost and earned."""
    tasks = distinct_of(list(expert), last, args)
    policy = Policy(model, chat, args.seed + OTHER_LUCK * (last["batch"] + 1))
    mine = loop.share(tasks, in_step=False)
    episodes = (trajectories(env.fork(), task, Method("sample"), chat) for task, _ in mine)
    with loop.gathered(model):
        played = [line for (line,) in drive(episodes, {Sample: policy.sample}, env.side_by_side, in_order=True)]
    played = [line for some in itertools.zip_longest(*loop.every(played)) for line in some if line]  # tasks' order
    found = list(failures(env, chat.rendering, played, expert))
    figures = {"reward": round(float(np.mean([line["reward"] for line in played])), 6), "pairs": len(found)}
    figures["played"] = last.get("played", 0) + sum(sum(line["tokens"].values()) for line in played)
    turns = sum(len(line["messages"]) // 2 - 1 for line in played)  # after the layout's "OK"
    figures["env_steps"] = last["env_steps"] + turns
    return found, figures | {"flat": round(1 - len(found) / len(played), 6)}


def compared(
    chat: Chat, env: envs.TextEnv, trees: Sequence[list[dict]], last: dict, args: argparse.Namespace
) -> tuple[list[Preference], dict]:
    """Siblings of some exploration trees, whose steps count when they are first read."""
    drawn = distinct_of(range(len(trees)), last, args)
    found = [pair for i in drawn for pair in siblings(env, chat.rendering, trees[i])]
    fresh = drawn[: max(0, len(trees) - last["batch"] * args.batch_tasks)]
    return found, {"pairs": len(found), "env_steps": last["env_steps"] + sum(len(trees[i]) - 1 for i in fresh)}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = learner(__doc__, "ETO: beta .1, lr 1e-6, 3 epochs.", argv, every=1)
    add = made.add_argument
    add("--pairs", choices=["expert", "siblings"], default="expert", help="what is compared (default: %(default)s)")
    add("--beta", type=at_least(0, float), default=0.1, help="of the DPO loss (default: %(default)s)")
    said = "tasks or trees an iteration (default: %(default)s)"
    add("--batch-tasks", type=at_least(1), default=100, metavar="N", help=said)  # --tasks is ScienceWorld's
    add("--epochs", type=at_least(1), default=3, metavar="N", help="passes over its pairs (default: %(default)s)")
    add("--batch", type=at_least(1), default=16, metavar="N", help="pairs an update (default: %(default)s)")
    add("--lr", type=at_least(0, float), help="1e-6 (--lora: 1e-5); tiny: webshop 2e-5, alfworld 3e-5, others 1e-4")
    add("--expert", type=Path, help="demonstrations (default: those that the agent was cloned from)")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--name", help="of the checkpoint RUN/sft-NAME (default: eto, or eto-siblings)")
    args = parse(made, argv)
    args.name = args.name or ("eto" if args.pairs == "expert" else "eto-siblings")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    must_exist(args.labels)
    # The reference of an iteration's failures is the agent that made them: itself, before its updates.
    model, reference, chat, optimizer = load(args, LR.get(args.env, LR_TINY), copied=args.pairs == "siblings")
    if args.pairs == "expert":
        args.expert, most = (args.expert, None) if args.expert else cloned_from(args.sft)
        args.expert = args.expert or args.run / "expert.jsonl"
        args.n_expert = most  # in the metadata, as sft.py's
        expert = demonstrated(args.expert, env, most)
    else:
        if loop.count() > 1:  # one process makes what is missing
            must_exist(args.labels or args.run / "q_labels.jsonl")
        args.labels = needed(args.labels, args.run / "q_labels.jsonl", "bellman", args)
        trees = list(read_trees(args.labels, ["q", "messages"]))
        if not any(any(siblings(env, Rendering(), tree)) for tree in trees):
            raise UserError(f"{args.labels}: no siblings with different q, so nothing to compare")

    def batch(last: dict) -> dict:
        """The next line of updates.jsonl."""
        if args.pairs == "expert":
            found, figures = explored(model, chat, env, expert, last, args)
        else:
            found, figures = compared(chat, env, trees, last, args)
        trained = train(model, reference, optimizer, chat, found, last["updates"], args)
        trained["tokens"] += last["tokens"]
        return {"batch": last["batch"] + 1, **trained, **figures}

    # A token counts three times in an update, and goes through the reference once for all epochs.
    learn(args, env, model, chat, optimizer, batch, [args.labels, args.expert], passes=3 + 1 / args.epochs)


if __name__ == "__main__":
    run_stage(main)
