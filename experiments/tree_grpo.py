"""Tree-GRPO (Ji et al. 2025): reinforcement learning whose groups are the branches of trees.

    reads   RUN/sft/ (the cloned agent, which is also the reference of the KL penalty)
    writes  RUN/sft-NAME/ (by validation the best), RUN/sft-NAME.updates.jsonl (a line a batch), .resume.safetensors

    python -m experiments.tree_grpo --env webshop                        # M = 2 trees, N = 2 draws, L = 1 round
    python -m experiments.tree_grpo --env webshop --rounds 0 -M 4        # chain GRPO at the same nominal budget
    python -m experiments.tree_grpo --env webshop --rounds 0 -M 4 --advantage states --name gigpo

A task's trajectories are a group, and so are those of each of its trees. A trajectory's advantage is how many standard
deviations its reward lies above its group's mean, summed over both groups. An action above a branching learns from each
trajectory through it: outcome rewards become a signal for steps, without a value network. --advantage states is GiGPO
(Feng et al. 2025), whose second groups are the visits to an equal observation, each worth the reward discounted by the
steps to it; --normalise mean leaves out the division, as its release does on WebShop (docs/differences.md).
"""

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import NonNegativeInt, PositiveInt
from tyro.conf import arg

import envs
from experiments import learning
from experiments.decisions import Decision, PackedDecisions, pack_decisions
from experiments.learning import Learner, batch_of, learn, load
from qlass import UserError
from qlass.batching import ask
from qlass.chat import Rendering
from qlass.inputs import find_agent
from qlass.messages import State, start, step
from qlass.noise import uniforms
from qlass.settings import Number, read_settings, run_stage

TEMPERATURE = 1.0  # at which the trees are sampled, since the ratios are of the model's own distribution
CLIP, DUAL_CLIP = 0.2, 3.0
PASSES = 6  # a token: the rollout, the old agent, the reference, and an update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(learning.Config):
    """The settings of a batch and of `policy_loss`."""

    batch_tasks: PositiveInt = 32  # tasks a batch (released: 512)
    minibatch: PositiveInt = 16  # tasks an update (released: 64)
    kl: Number = 1e-3  # weight of the KL to --sft
    entropy: Number = 1e-3  # weight of the entropy bonus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Update):
    """Released: M = 2, N = 2, L = 1."""

    stage: ClassVar = "tree_grpo"

    M: Annotated[PositiveInt, arg(aliases=["-M"])] = 2  # trees a task
    draws: PositiveInt = 2  # N, branches a tree and round
    rounds: NonNegativeInt = 1  # L (0: chain GRPO)
    advantage: Literal["both", "inter", "intra", "states"] = "both"  # whose groups
    discount: Number = 0.95  # of states, a step
    normalise: Literal["mean-std", "mean"] = "mean-std"  # a group


# ------------------------------------------------------------------------------------------------------------- rollout


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The path to a leaf of a tree. Trajectories of a tree share the decisions above their branching."""

    decisions: tuple[Decision, ...]
    reward: float
    tree: int = 0


Group = Sequence[Trajectory]  # of one task, tree by tree


async def forest(env: envs.TextEnv, task_id: str, M: int, N: int, L: int, rendering: Rendering, key: tuple) -> Group:
    """M chains, then L rounds in which each tree grows N more: M (N L + 1) leaves. `key` names the noise."""
    root = start(env, task_id), env.snapshot(), ()
    nodes = [[root] for _ in range(M)]  # of each tree the root and what is no leaf: state, snapshot, decisions
    leaves: list[Trajectory] = []

    async def chain(tree: int, node: tuple[State, Any, tuple[Decision, ...]]) -> None:
        """The agent plays from a node of a tree to the end."""
        state, snapshot, decisions = node
        name = (*key, task_id, len(leaves))
        env.restore(snapshot)
        env.reseed(zlib.crc32(repr(name).encode()))  # else siblings would slip on the same ice
        done = False
        while not done:
            request = ask(env, state, 1, (*name, len(decisions)), rendering, TEMPERATURE)
            (candidate,) = await request
            decisions = (*decisions, Decision(state, candidate.text, request.valid, candidate.ids))
            state, reward, done = step(env, state, candidate.text)
            if not done:
                nodes[tree].append((state, env.snapshot(), decisions))
        leaves.append(Trajectory(decisions, reward, tree))

    for tree in range(M):
        await chain(tree, root)
    for turn in range(L):
        # With replacement, and all of a round before any is grown.
        draws = [(tree, u) for tree in range(M) for u in uniforms(N, "draw", *key, task_id, turn, tree)]
        starts = [(tree, nodes[tree][int(u * len(nodes[tree]))]) for tree, u in draws]
        for tree, node in starts:
            await chain(tree, node)
    env.close()
    return sorted(leaves, key=lambda leaf: leaf.tree)


def env_steps(group: Group) -> int:
    """A step above a branching was made once: trajectories hold the same decision there."""
    return len({id(decision) for trajectory in group for decision in trajectory.decisions})


# ---------------------------------------------------------------------------------------------------------- advantages


def normalised(values: Sequence[float], groups: Sequence[Any], std: bool = True) -> np.ndarray:
    """(x - mean) / (std + 1e-6) within each group, unbiased std; 0 where a group is flat, or of one."""
    x = pd.Series(values, dtype=float)
    members = x.groupby(list(groups))
    A = x - members.transform("mean")
    return (A / (members.transform("std") + 1e-6) if std else A).fillna(0.0).to_numpy()


def advantages(group: Group, kind: str = "both", discount: float = 1.0, std: bool = True) -> list[np.ndarray]:
    """A of each decision: the reward normalised among the trajectories of the task, plus among those of its tree."""
    rewards = [trajectory.reward for trajectory in group]
    lengths = [len(trajectory.decisions) for trajectory in group]
    inter = normalised(rewards, [0] * len(rewards), std)
    intra = normalised(rewards, [trajectory.tree for trajectory in group], std)
    outcome = {"inter": inter, "intra": intra, "both": inter + intra, "states": inter}[kind]
    A = np.repeat(outcome, lengths)
    if kind == "states":
        pages = [decision.state.observation for trajectory in group for decision in trajectory.decisions]
        returns = [discount ** np.arange(n)[::-1] * reward for reward, n in zip(rewards, lengths, strict=True)]
        A += normalised(np.concatenate(returns), pages, std)
    return np.split(A, np.cumsum(lengths)[:-1])


# ----------------------------------------------------------------------------------------------------- loss and update


@dataclasses.dataclass
class Batch:
    """Choices (C,) in one token tree, and what the loss reads besides the agent's log pi."""

    choices: PackedDecisions
    positive: torch.Tensor  # sum of A > 0 over the trajectories through the choice
    negative: torch.Tensor  # sum of -A > 0
    visits: torch.Tensor  # how many trajectories these are
    old: torch.Tensor  # log pi of the agent that drew the trees
    reference: torch.Tensor  # log pi of the cloned agent


def dual_clip(ratio: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """The PPO loss of a choice, max(-A r, -A clip(r, 1 - e, 1 + e)), at most -c A where A < 0, summed over its A.

    It is linear in A on either side of 0: the advantages above 0 sum to `positive`, those below to -`negative`.
    """
    return negative * ratio.clamp(1 - CLIP, DUAL_CLIP) - positive * ratio.clamp(max=1 + CLIP)


def low_variance_kl(logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(pi || reference) at what pi drew: e^d - d - 1 with d = log reference - log pi."""
    d = (reference - logp).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(max=10)


def policy_loss(logp: torch.Tensor, entropy: torch.Tensor, batch: Batch, kl: float, bonus: float) -> torch.Tensor:
    """The sum over choices and trajectories of dual_clip(r, A) + kl KL(pi || reference) - bonus H(pi)."""
    ratio = (logp - batch.old).clamp(-20, 20).exp()  # r = pi(a | s) / pi_old(a | s)
    regularisers = kl * low_variance_kl(logp, batch.reference) - bonus * entropy
    return (dual_clip(ratio, batch.positive, batch.negative) + batch.visits * regularisers).sum()


def by_decision(groups: Sequence[Group], A: Sequence[list[np.ndarray]]) -> list[tuple[Decision, list[float]]]:
    """The decisions of each task, and A in each trajectory through them; equal decisions of siblings are one."""
    tasks: list[dict[Decision, list[float]]] = [defaultdict(list) for _ in groups]
    for task, group, of_group in zip(tasks, groups, A, strict=True):
        for trajectory, steps in zip(group, of_group, strict=True):
            for decision, a in zip(trajectory.decisions, steps, strict=True):
                task[decision].append(a)
    return [item for task in tasks for item in task.items()]


@torch.no_grad()
def batches(learner: Learner, groups: Sequence[Group], A: Sequence[list[np.ndarray]]) -> list[Batch]:
    """The choices of these tasks' trajectories in packs, given the `advantages` of each task. `dual_clip` needs no more
    than sums over the trajectories through a choice, so a shared prefix is computed once."""
    decisions, visits = zip(*by_decision(groups, A), strict=True)
    sums = [[sum(max(a, 0) for a in steps), sum(max(-a, 0) for a in steps), len(steps)] for steps in visits]
    rows = torch.tensor(sums, dtype=torch.float32, device=learner.model.device)
    packs = pack_decisions(learner.chat, decisions, learner.room)
    models = learner.model, learner.reference
    return [Batch(pack, *rows[pack.owner].T, *(pack.logprobs(model)[0] for model in models)) for pack in packs]


def update(learner: Learner, minibatch: list[Batch], kl: float, bonus: float, number: int) -> torch.Tensor:
    """An update on the mean loss over the choices of all trajectories. Returns their mean KL, entropy and share of
    ratios beyond 1 ± CLIP, and the number of tokens: (4,)."""
    n = sum(float(batch.visits.sum()) for batch in minibatch)
    figures = torch.zeros(4)
    learner.model.train()
    for batch in minibatch:
        logp, entropy = batch.choices.logprobs(learner.model)
        (policy_loss(logp, entropy, batch, kl, bonus) / n).backward()
        clipped = ((logp - batch.old).exp() - 1).abs() > CLIP
        means = torch.stack([low_variance_kl(logp, batch.reference), entropy, clipped.float()]).detach()
        figures += torch.tensor([*(means * batch.visits / n).sum(1), len(batch.choices.tree)])
    learner.step(number)
    return figures


# --------------------------------------------------------------------------------------------------------- a batch


def play(learner: Learner, env: envs.TextEnv, last: dict, config: Update, *shape: int) -> list[Group]:
    """The trajectories of the next batch's tasks, of forests of `shape` M, N, L, by the agent as it is now."""
    rendering = learner.chat.rendering
    tasks = batch_of(env.task_ids("train"), config.seed, last["batch"], config.batch_tasks)
    key = ("grpo", config.seed, last["batch"] + 1)
    growing = (forest(env.fork(), task, *shape, rendering, (*key, i)) for i, task in enumerate(tasks))
    return learner.drive(growing, env, config.seed)


def line_of(last: dict, groups: list[Group], figures: Sequence[torch.Tensor]) -> dict:
    """The next line of updates.jsonl, from what `update` returned for each minibatch."""
    rewards = np.array([[trajectory.reward for trajectory in group] for group in groups])
    flat = np.ptp(rewards, axis=1) < 1e-9  # tasks whose trajectories earn the same
    kl, entropy, clipped, _ = np.mean([f.tolist() for f in figures], axis=0)
    means = {"reward": rewards.mean(), "flat": flat.mean(), "kl": kl, "entropy": entropy, "clipped": clipped}
    return {
        "batch": last["batch"] + 1,
        "updates": last["updates"] + len(figures),
        "tokens": last["tokens"] + int(sum(f[3] for f in figures)),
        "env_steps": last["env_steps"] + sum(map(env_steps, groups)),
        **{name: round(float(mean), 6) for name, mean in means.items()},
    }


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    if not config.rounds and (config.M == 1 or config.advantage == "intra"):
        raise UserError("--rounds 0: a group of one trajectory has nothing to be compared with")
    config = dataclasses.replace(config, name=config.name or ("tree_grpo" if config.rounds else "grpo"))
    env = envs.from_config(config)
    sft = find_agent(config)
    learner = load(sft, config, env)

    def iteration(last: dict) -> dict:
        groups = play(learner, env, last, config, config.M, config.draws, config.rounds)
        A = [advantages(group, config.advantage, config.discount, config.normalise == "mean-std") for group in groups]
        parts = [slice(i, i + config.minibatch) for i in range(0, len(groups), config.minibatch)]
        minibatches = [batches(learner, groups[part], A[part]) for part in parts]  # before the first update
        numbered = enumerate(minibatches, last["updates"] + 1)
        return line_of(last, groups, [update(learner, b, config.kl, config.entropy, number) for number, b in numbered])

    learn(learner, env, iteration, config, PASSES, env.task_ids("train"), {"sft": sft})


if __name__ == "__main__":
    run_stage(main)
