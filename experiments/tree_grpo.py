"""Tree-GRPO (Ji et al. 2025): reinforcement learning whose groups are the branches of trees.

    reads   RUN/sft/ (the behaviour-cloned agent, which is also the reference of the KL penalty)
    writes  RUN/sft-NAME/ (the checkpoint with the best validation reward), RUN/sft-NAME.updates.jsonl (one line per
            batch), RUN/sft-NAME.resume.pt (weights and optimiser, for resuming a stopped run or with a larger --budget)

    python -m experiments.tree_grpo --env webshop                        # M = 2 trees, N = 2 draws, L = 1 round
    python -m experiments.tree_grpo --env webshop --rounds 0 -M 4        # chain GRPO at the same nominal budget
    python q_search.py --env webshop --method greedy --sft runs/webshop/sft-tree_grpo --label tree_grpo \\
                       --out runs/webshop/results-tree_grpo.jsonl

A task's leaves are a group, and so are the leaves of each of its trees. A trajectory's advantage is how many standard
deviations its reward lies above its group's mean, summed over both groups, and every action on it gets that advantage.
An action above a branching is on several trajectories and learns from each: outcome rewards become a signal for steps,
without a value network.

How this differs from the released code (AMAP-ML/Tree-GRPO), which is meant by "there": chains and trees have the same
warm-up (there .5 and .285 of the run); log-probabilities are of the distribution that was sampled from (there top-p .95
against the full softmax); a group of one has advantage 0 (there its reward); among valid actions the ratio is an
action's, not a token's; validation keeps the best checkpoint (there the last). As there, equal siblings are not merged
and all leaves count.
--advantage states replaces the groups of a tree's leaves by groups of visits to an equal observation (GiGPO, Feng et
al. 2025).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import torch

import envs
from experiments.decisions import Decision, PackedDecisions, pack_decisions
from experiments.learning import batch_of, learn, learner, load, recomputed, room, step
from qlass import UserError, loop
from qlass.chat import Chat, Rendering, State, parse_action, uniforms
from qlass.cli import at_least, parse, run_stage
from qlass.driver import Sample, ask, drive
from qlass.policy import Policy

LR = {"alfworld": 1e-4}  # of the tiny model, others LR_TINY; the learning rate decides everything
LR_TINY = 3e-4
TEMPERATURE = 1.0  # at which the trees are sampled, since the ratios are of the model's own distribution
CLIP, DUAL_CLIP = 0.2, 3.0
PASSES = 6  # a token: the rollout, the old agent, the reference, and an update
FIGURES = ("reward", "flat", "kl", "entropy", "clipped")  # means of a batch; flat: tasks whose leaves earn the same

# ----------------------------------------------------------------------------------------------------------- rollouts


@dataclasses.dataclass(eq=False)
class Node:
    """A state of a tree and the decisions that led to it; a leaf has the trajectory's reward."""

    state: State
    snapshot: Any
    path: tuple[Decision, ...] = ()
    reward: float = 0.0
    done: bool = False


@dataclasses.dataclass(eq=False)
class Tree:
    nodes: list[Node]  # the root and all that are no leaves
    leaves: list[Node] = dataclasses.field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [leaf.reward for leaf in self.leaves]

    @property
    def env_steps(self) -> int:
        """One a node but the root: what lies above a branching is not played again."""
        return len(self.nodes) + len(self.leaves) - 1


def forest(
    env: envs.TextEnv, task_id: str, M: int, N: int, L: int, rendering: Rendering, key: tuple
) -> Generator[Sample, list, list[Tree]]:
    """M chains, then L rounds in which each tree grows N more: M (N L + 1) leaves. `key` names the noise."""
    observation, info = env.reset(options={"task_id": task_id})
    root = Node(State.first(env, observation, info), env.snapshot())
    trees, chains = [Tree([root]) for _ in range(M)], 0

    def chain(tree: Tree, node: Node) -> Generator[Sample, list, None]:
        """The agent plays from a node to the end."""
        nonlocal chains
        here, chains = (*key, task_id, chains), chains + 1
        env.restore(node.snapshot)
        env.reseed(zlib.crc32(repr(here).encode()))  # or siblings would share their luck
        while not node.done:
            request = ask(env, node.state, 1, (*here, len(node.path)), rendering, TEMPERATURE)
            (candidate,) = yield request
            observation, reward, terminated, truncated, _ = env.step(parse_action(candidate.text))
            path = (*node.path, Decision(node.state, candidate.text, request.valid, candidate.ids))
            state = node.state.then(candidate.text, env.message(observation))
            node = Node(state, env.snapshot(), path, float(reward), terminated or truncated)
            (tree.leaves if node.done else tree.nodes).append(node)

    for tree in trees:
        yield from chain(tree, root)
    for turn in range(L):
        # With replacement, and all of a round before any is grown.
        luck = [uniforms(N, "draw", *key, task_id, turn, i) for i in range(M)]
        drawn = [(t, t.nodes[int(u * len(t.nodes))]) for t, us in zip(trees, luck, strict=True) for u in us]
        for tree, node in drawn:
            yield from chain(tree, node)
    env.close()
    return trees


# --------------------------------------------------------------------------------------------- advantages and the loss


def normalised(rewards: Sequence[float]) -> np.ndarray:
    """(R - mean) / (std + 1e-6), unbiased std; 0 in a flat group, and in a group of one, which compares nothing."""
    r = np.asarray(rewards, dtype=float)
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6) if len(r) > 1 else np.zeros(1)


def advantages(rewards: list[list[float]], kind: str = "both") -> list[np.ndarray]:
    """A = A_inter + A_intra of each leaf, from the rewards of the task's trees: among all leaves, in its own tree."""
    inter = np.split(normalised(np.concatenate(rewards)), np.cumsum([len(tree) for tree in rewards])[:-1])
    intra = [normalised(tree) for tree in rewards]
    both = [a + b for a, b in zip(inter, intra, strict=True)]
    return {"inter": inter, "intra": intra, "both": both, "states": inter}[kind]


def step_advantages(leaves: Sequence[Node]) -> list[np.ndarray]:
    """Like GiGPO's second term, of each step of each leaf: its reward among those of all steps from an equal message.

    GiGPO discounts the reward by the steps that are left; here it is the leaf's own.
    """
    visits: dict[str, list[tuple[int, int]]] = {}
    for i, leaf in enumerate(leaves):
        for t, decision in enumerate(leaf.path):
            visits.setdefault(decision.state.messages[-1][1], []).append((i, t))
    found = [np.zeros(len(leaf.path)) for leaf in leaves]
    for group in visits.values():
        for (i, t), a in zip(group, normalised([leaves[i].reward for i, _ in group]), strict=True):
            found[i][t] = a
    return found


Shares = dict[Decision, tuple[float, float, int]]


def shares(forests: Iterable[list[Tree]], kind: str) -> Shares:
    """Of each decision sum A+, sum A- and the number of the trajectories that pass through it, each as often as made.

    That is all that `dual_clip` needs, so a shared prefix is computed once; equal decisions of siblings are one too.
    """
    found: Shares = {}
    for trees in forests:
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        values = np.concatenate(advantages([tree.rewards for tree in trees], kind))
        extra = step_advantages(leaves) if kind == "states" else [np.zeros(len(leaf.path)) for leaf in leaves]
        for leaf, a, more in zip(leaves, values, extra, strict=True):
            for decision, each in zip(leaf.path, (a + more).tolist(), strict=True):
                up, down, visits = found.get(decision, (0.0, 0.0, 0))
                found[decision] = up + max(each, 0.0), down + max(-each, 0.0), visits + 1
    return found


def dual_clip(ratio: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The PPO loss of a choice, summed over advantages A_i of which the positive sum to `up`, the negative to -`down`.

    max(-A r, -A clip(r, 1 - e, 1 + e)), at most -c A where A < 0: linear in A on either side of 0, so the sum is
    -up min(r, 1 + e) + down min(max(r, 1 - e), c).
    """
    return down * ratio.clamp(1 - CLIP, DUAL_CLIP) - up * ratio.clamp(max=1 + CLIP)


def low_variance_kl(logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(pi || reference) at what pi drew: e^d - d - 1 with d = log reference - log pi."""
    d = (reference - logp).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(max=10)


def policy_loss(
    logp: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor,
    up: torch.Tensor, down: torch.Tensor, visits: torch.Tensor, kl: float, bonus: float,
) -> torch.Tensor:  # fmt: skip
    """The sum over choices and trajectories through them; all (C,)."""
    ratio = (logp - old).clamp(-20, 20).exp()
    return (dual_clip(ratio, up, down) + visits * (kl * low_variance_kl(logp, reference) - bonus * entropy)).sum()


# ------------------------------------------------------------------------------------------------------------ training


Minibatch = list[tuple[PackedDecisions, torch.Tensor]]  # trees packed; (5, C): up, down, visits, old, reference


@dataclasses.dataclass
class Grown:
    """What an update needs of a task's trees, which processes exchange."""

    shares: Shares
    rewards: np.ndarray
    env_steps: int

    @classmethod
    def of(cls, trees: list[Tree], kind: str) -> Grown:
        rewards = np.concatenate([tree.rewards for tree in trees])
        return cls(shares([trees], kind), rewards, sum(tree.env_steps for tree in trees))


@torch.no_grad()
def prepared(model: Any, reference: Any, chat: Chat, some: Iterable[Shares]) -> tuple[Minibatch, int]:
    """Some tasks' choices, packed, with their weights, old and reference log-probabilities: this process's packs.

    Returns these and the number of tokens of all packs.
    """
    decisions, weights = [d for found in some for d in found], [w for found in some for w in found.values()]
    packs, weights = list(pack_decisions(chat, decisions, room(model))), torch.tensor(weights, device=model.device)
    batch = []
    for p, counts in loop.share(packs, loop.divided(model)):
        known = p.logprobs(model)[0], p.logprobs(reference)[0]
        batch.append((p, torch.stack([*(weights[p.owner] * counts).T, *known])))
    return batch, sum(len(p.tree) for p in packs)


def gradients(model: Any, batch: Minibatch, kl: float, bonus: float) -> list[float]:
    """Backward through the mean loss over the choices of all trajectories. Returns mean KL, entropy, clipped share."""
    (n,), figures = loop.total(sum(float(known[2].sum()) for _, known in batch)), torch.zeros(3)
    for p, (up, down, visits, old, reference) in batch:
        with recomputed(model):
            logp, entropy = p.logprobs(model)
            (policy_loss(logp, entropy, old, reference, up, down, visits, kl, bonus) / n).backward()
        clipped = ((logp.detach() - old).exp() - 1).abs() > CLIP
        seen = torch.stack([low_variance_kl(logp, reference), entropy, clipped.float()])
        figures += (seen.detach() * visits / n).sum(1).cpu()
    return loop.total(*figures.tolist())


def one_batch(
    model: Any, reference: Any, optimizer: torch.optim.Optimizer, chat: Chat, env: envs.TextEnv, last: dict,
    args: argparse.Namespace,
) -> dict:  # fmt: skip
    """Trees of some tasks and the updates on them: the next line of updates.jsonl."""
    tasks = batch_of(env.task_ids("train"), args.seed, last["batch"], args.batch_tasks)
    batch, shape = last["batch"] + 1, (args.M, args.draws, args.rounds)
    policy = Policy(model, chat, args.seed)  # a new one: what the last one remembers is of the weights before
    mine = [i for i, _ in loop.share(range(len(tasks)), in_step=False)]
    growing = (forest(env.fork(), tasks[i], *shape, chat.rendering, ("grpo", args.seed, batch, i)) for i in mine)
    with loop.gathered(model):
        played = drive(growing, {Sample: policy.sample}, env.side_by_side, in_order=True)
        here = {i: Grown.of(trees, args.advantage) for i, trees in zip(mine, played, strict=True)}
        by_task = {i: one for some in loop.every(here) for i, one in some.items()}
        grown = [by_task[i] for i in range(len(tasks))]
        parts = [[one.shares for one in grown[i : i + args.minibatch]] for i in range(0, len(tasks), args.minibatch)]
        batches = [prepared(model, reference, chat, part) for part in parts]
    del policy, growing, played  # what the agent has read need not stay in memory during the updates
    figures = []
    for number, (minibatch, _) in enumerate(batches, last["updates"] + 1):
        figures.append(gradients(model, minibatch, args.kl, args.entropy))
        step(optimizer, args.lr, number)
    reward = np.mean([one.rewards.mean() for one in grown])
    flat = np.mean([np.ptp(one.rewards) < 1e-9 for one in grown])
    return {
        "batch": batch,
        "updates": last["updates"] + len(batches),
        "tokens": last["tokens"] + sum(tokens for _, tokens in batches),
        "env_steps": last["env_steps"] + sum(one.env_steps for one in grown),
        **{k: round(float(v), 6) for k, v in zip(FIGURES, [reward, flat, *np.mean(figures, 0)], strict=True)},
    }


# ---------------------------------------------------------------------------------------------------------------- main


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = learner(__doc__, "Released: M = 2, N = 2, L = 1.", argv, every=4)
    add = made.add_argument
    add("-M", type=at_least(1), default=2, help="trees a task (default: %(default)s)")
    add("--draws", type=at_least(1), default=2, metavar="N", help="branches a tree and round (default: %(default)s)")
    add("--rounds", type=at_least(0), default=1, metavar="L", help="rounds (default: %(default)s; 0: chain GRPO)")
    kinds = ["both", "inter", "intra", "states"]
    add("--advantage", choices=kinds, default="both", help="inter, intra, both (default), or states: as GiGPO's")
    said = "tasks a batch (default: %(default)s; released: 512)"
    add("--batch-tasks", type=at_least(1), default=32, metavar="N", help=said)  # --tasks is ScienceWorld's
    said = "tasks an update (default: %(default)s; released: 64)"
    add("--minibatch", type=at_least(1), default=16, metavar="N", help=said)
    add("--lr", type=at_least(0, float), help="default: 1e-6 (--lora: 1e-5); tiny: alfworld 1e-4, others 3e-4")
    add("--kl", type=at_least(0, float), default=1e-3, help="weight of the KL to --sft (default: %(default)s)")
    add("--entropy", type=at_least(0, float), default=1e-3, help="weight of the entropy bonus (default: %(default)s)")
    add("--name", help="of the checkpoint RUN/sft-NAME (default: tree_grpo, or grpo with --rounds 0)")
    args = parse(made, argv)
    if args.M * (args.draws * args.rounds + 1) < 2:
        raise UserError(f"-M {args.M} --rounds {args.rounds}: one trajectory has nothing to be compared with")
    if args.advantage == "intra" and not args.rounds:
        raise UserError("--advantage intra --rounds 0: trees of one trajectory compare nothing; leave one of them out")
    args.name = args.name or ("tree_grpo" if args.rounds else "grpo")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args)
    model, reference, chat, optimizer = load(args, LR.get(args.env, LR_TINY))
    untruncated = copy.copy(chat)  # trees are of the distribution that the log-probabilities are of
    untruncated.rendering = dataclasses.replace(chat.rendering, top_p=1.0, top_k=0)

    def batch(last: dict) -> dict:
        return one_batch(model, reference, optimizer, untruncated, env, last, args)

    learn(args, env, model, chat, optimizer, batch, [], PASSES)


if __name__ == "__main__":
    run_stage(main)
