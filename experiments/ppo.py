"""Turn-level PPO (Schulman et al. 2017): a learned value of states in place of the groups of GRPO.

    reads   RUN/sft/, RUN/q_labels-avg.jsonl (trees by `experiments.targets --target avg`, made if missing)
    writes  RUN/sft-NAME/, and beside it .updates.jsonl and .resume.safetensors, as experiments/tree_grpo.py does

    python -m experiments.ppo --env webshop

A turn is one decision, and the advantage is the generalised one over turns, whatever was read in between. (In ETO's
release, behind Table 2's row, it passes through the tokens of observations: with pages of 60 tokens the first of three
turns gets .0003 of the outcome.) A state with one valid action is no turn. An episode cut by the step limit earned what
the environment pays then, and nothing is expected after it.

The critic is a QNet that reads the last token of the prompt, before the agent acts. It begins with the mean final
reward below states of the first trees, as many --warm-up packs hold. Neither the trees' steps nor the tokens of this
warm-up (in "played") count for a budget. Then it learns the returns A + V beside the agent, whose loss is Tree-GRPO's.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

import envs
from experiments import targets
from experiments.decisions import mixed_precision, pack_decisions
from experiments.learning import Learner, learn, load, trainable
from experiments.tree_grpo import Batch, Group, Update, batches, by_decision, line_of, play, update
from qlass import UserError
from qlass.chat import Chat
from qlass.fast.token_tree import TokenTree, tree_inputs
from qlass.files import Inputs, meta_of
from qlass.inputs import find_agent, find_or_make
from qlass.messages import State
from qlass.pairs import states_of
from qlass.records import Label
from qlass.settings import Number, place, read_settings, run_stage
from qlass.trees import read_trees
from train_qnet import QNet

VALUE_CLIP = 0.2  # how far an update may move V
PASSES = 10  # a token: Tree-GRPO's 6; the critic before the update, and its update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Update):
    """A discount of .99 and a lambda of .95 over turns."""

    stage: ClassVar = "ppo"

    name: str = "ppo"  # of the checkpoint RUN/sft-NAME
    chains: PositiveInt = 4  # trajectories a task
    gamma: Number = 0.99  # discount a turn
    lam: Number = 0.95  # lambda of the advantage
    critic_lr: Number = 1e-5  # learning rate of the critic, which is faster than the agent
    warm_up: NonNegativeInt = 200  # the critic's first updates, at most
    labels: Path | None = place(None)  # of `experiments.targets --target avg` (RUN/q_labels-avg.jsonl)


def gae(values: Sequence[float], reward: float, gamma: float, lam: float) -> np.ndarray:
    """A of each turn (T,), of a trajectory through states of these values (T,) that earns `reward` by its last turn.

    A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V(s_{t+1}) - V(s_t), and V = 0 after the end.
    """
    V = np.array([*values, 0.0])
    A = gamma * V[1:] - V[:-1]  # d_t
    A[-1:] += reward
    for t in reversed(range(len(A) - 1)):
        A[t] += gamma * lam * A[t + 1]
    return A


def advantages(group: Group, values: dict[State, float], gamma: float, lam: float) -> list[np.ndarray]:
    """A of each decision of each trajectory; nan where it was forced."""
    A = []
    for trajectory in group:
        steps = np.full(len(trajectory.decisions), np.nan)
        turns = [t for t, decision in enumerate(trajectory.decisions) if not decision.forced]
        V = [values[trajectory.decisions[t].state] for t in turns]
        steps[turns] = gae(V, trajectory.reward, gamma, lam)
        A.append(steps)
    return A


def whitened(A: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The advantages of all turns of a batch, shifted and scaled to mean 0 and standard deviation 1."""
    turns = np.concatenate([steps for group in A for steps in group])
    mean = np.nanmean(turns)
    std = np.nanstd(turns) + 1e-6
    return [[np.nan_to_num((steps - mean) / std) for steps in group] for group in A]


def state_values(critic: QNet, tree: TokenTree, ends: torch.Tensor) -> torch.Tensor:
    """V(s) (K,) of prompts in a token tree, at their last tokens (K,)."""
    places, row = ends.to(critic.backbone.device).unique(return_inverse=True)
    where = torch.zeros(1, len(tree), dtype=torch.bool, device=places.device)
    where[0, places] = True
    with mixed_precision(critic.backbone):
        return critic(where, **tree_inputs(critic.backbone, [tree]), use_cache=False).float()[row]


@torch.no_grad()
def values_of(critic: QNet, chat: Chat, groups: Sequence[Group], room: int) -> dict[State, float]:
    """V of each state in which there was a choice."""
    trajectories = itertools.chain(*groups)
    decisions = list(dict.fromkeys(decision for trajectory in trajectories for decision in trajectory.decisions))
    values = {}
    for pack in pack_decisions(chat, decisions, room):
        V = state_values(critic, pack.tree, torch.tensor(pack.ends)).tolist()
        for number, v in zip(pack.owner, V, strict=True):
            values[decisions[number].state] = v
    return values


def value_loss(V: torch.Tensor, old: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the larger of (V - G)^2 and (clip(V, V_old +- .2) - G)^2; (K,)."""
    clipped = old + (V - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return torch.maximum((V - target).square(), (clipped - target).square()) / 2


Visits = list[tuple[float, float]]  # (V, A + V) of a decision's state, for each trajectory through it


def returns(groups: Sequence[Group], A: Sequence[list[np.ndarray]], values: dict[State, float]) -> list[Visits]:
    """Those of each decision, numbered as in `batches`."""
    visits = []
    for decision, steps in by_decision(groups, A):
        v = values.get(decision.state, 0.0)
        visits.append([(v, a + v) for a in steps])
    return visits


def criticise(critic: QNet, minibatch: list[Batch], visits: list[Visits]) -> None:
    """Leave the gradient of the mean value loss over the turns of all trajectories in the critic."""
    rows = []  # of each batch: the last token of a turn's prompt, V and G
    for batch in minibatch:
        ends = dict(zip(batch.choices.owner, batch.choices.ends, strict=True))  # one a turn
        rows.append([(end, *visit) for number, end in ends.items() for visit in visits[number]])
    n = sum(map(len, rows))
    for batch, own in zip(minibatch, rows, strict=True):
        end, old, target = torch.tensor(own, device=critic.backbone.device).T
        V = state_values(critic, batch.choices.tree, end.long())
        (value_loss(V, old, target).sum() / n).backward()


def labelled_states(chat: Chat, labels: Path, room: int) -> Iterator[tuple[TokenTree, dict[int, list[float]]]]:
    """The states of exploration trees in which something was done, in token trees of about `room` tokens; the mean
    final rewards below them by the last token of their prompts. A state without memory comes again."""
    tree, rewards = TokenTree(), defaultdict(list)
    for nodes in read_trees(labels, Label):
        states = states_of(nodes)
        parents = {node["parent_id"] for node in nodes[1:]}
        for node in nodes:
            if len(tree) > room:
                yield tree, rewards
                tree, rewards = TokenTree(), defaultdict(list)
            if node["node_id"] in parents:
                end = tree.add(chat.prompt(states[node["node_id"]]))[-1]
                rewards[end].append(node["q_raw"])
    if rewards:
        yield tree, rewards


def warm_up(learner: Learner, critic: QNet, labels: Path, updates: int) -> int:
    """Regress V(s) onto the mean final reward below s. Returns the number of tokens, a backward pass counted as two."""
    tokens = 0
    packs = labelled_states(learner.chat, labels, 2 * learner.room)
    for number, (tree, rewards) in enumerate(itertools.islice(packs, updates), 1):
        V = state_values(critic, tree, torch.tensor(list(rewards)))
        means = V.new_tensor([np.mean(values) for values in rewards.values()])
        (V - means).square().mean().backward()
        learner.step(number)
        tokens += 3 * len(tree)
    return tokens


def mean_rewards(config: Config) -> Path:
    """The file of labels that `warm_up` reads, made if missing."""
    labels = config.labels or config.run / "q_labels-avg.jsonl"
    if meta_of(labels)["recipe"].get("target", "avg") != "avg":
        raise UserError(f"{labels}: not of `experiments.targets --target avg`, whose q_raw the critic learns first")
    if not labels.exists():
        find_or_make(None, "build_trees", "trees.jsonl", config)
        targets.main(["--run", str(config.run), "--target", "avg", "--out", str(labels)])
    return labels


def load_critic(sft: Path, learner: Learner, config: Config) -> QNet:
    """A QNet on the cloned agent's backbone, which learns beside the agent."""
    model, chat, _ = trainable(sft, config)
    critic = QNet(model.base_model, chat).train()
    weights = [p for p in critic.parameters() if p.requires_grad]
    learner.optimizer.add_param_group({"params": weights, "peak": config.critic_lr})
    return critic


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    sft = find_agent(config)
    learner = load(sft, config, env)
    critic = load_critic(sft, learner, config)
    inputs: Inputs = {"sft": sft}
    if config.warm_up:
        inputs["labels"] = mean_rewards(config)

    def iteration(last: dict) -> dict:
        spent = 0
        if config.warm_up and not last["batch"]:
            spent = warm_up(learner, critic, inputs["labels"], config.warm_up)
        groups = play(learner, env, last, config, config.chains, 0, 0)
        values = values_of(critic, learner.chat, groups, learner.room)
        A = [advantages(group, values, config.gamma, config.lam) for group in groups]
        white = whitened(A)
        parts = [slice(i, i + config.minibatch) for i in range(0, len(groups), config.minibatch)]
        minibatches = [batches(learner, groups[part], white[part]) for part in parts]  # before the first update
        figures = []
        every = []  # (V, G) of all minibatches
        for number, (part, minibatch) in enumerate(zip(parts, minibatches, strict=True), last["updates"] + 1):
            visits = returns(groups[part], A[part], values)
            every += itertools.chain(*visits)
            criticise(critic, minibatch, visits)
            figures.append(update(learner, minibatch, config.kl, config.entropy, number))
        V, G = np.array(every).T
        explained = 1 - np.nanvar(G - V) / (np.nanvar(G) + 1e-9)  # variance of the returns
        own = {"explained": round(float(explained), 6), "played": last.get("played", 0) + spent}
        return line_of(last, groups, figures) | own

    learn(learner, env, iteration, config, PASSES, env.task_ids("train"), inputs)


if __name__ == "__main__":
    run_stage(main)
