"""Tree-GRPO (Ji et al. 2025): reinforcement learning whose groups are the branches of trees.

    reads   RUN/sft/ (the behaviour-cloned agent, which is also the reference of the KL penalty)
    writes  RUN/sft-NAME/ (the checkpoint with the best validation reward), RUN/sft-NAME.updates.jsonl (a line a batch),
            RUN/sft-NAME.resume.pt (weights and optimiser, from which a stopped run or a larger --budget continues)

    python -m experiments.tree_grpo --env webshop                        # M = 2 trees, N = 2 draws, L = 1 round
    python -m experiments.tree_grpo --env webshop --rounds 0 -M 4        # chain GRPO at the same nominal budget
    python q_search.py --env webshop --method greedy --sft runs/webshop/sft-tree_grpo --label tree_grpo \\
                       --out runs/webshop/results-tree_grpo.jsonl

A task's leaves are a group, and so are those of each of its trees: how far a trajectory's reward lies above its group's
mean is its advantage, on every action of it. An action above a branching is on several trajectories, whose advantages
add up there: outcome rewards become a signal for steps, without a value network.

Where it differs from the released code (AMAP-ML/Tree-GRPO): chains and trees have the same warm-up (there .5 and .285
of the run); log-probabilities are of the distribution that was sampled from (there top-p .95 against the full softmax);
a group of one has advantage 0 (there its reward); among valid actions the ratio is an action's, not a token's; a large
KL or clipped share does not stop a run, validation does. As there, equal siblings are not merged, and all leaves count.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

import envs
from environments import UserError
from q_search import Method, play
from qlass.chat import Chat, Rendering, State, parse_action, uniforms
from qlass.decisions import Decision, PackedDecisions, pack
from qlass.driver import Sample, ask, drive
from qlass.jsonl import Resumable, checkpoint_folder
from qlass.models import adamw, add_lora, load_checkpoint, save_checkpoint
from qlass.policy import Policy
from qlass.stage import add_arguments, needed, parse_arguments, run_stage, same_arguments, stage_argv, write_meta

LR = {"webshop": 1e-3, "alfworld": 1e-4, "frozenlake": 3e-4}  # of the tiny model; the learning rate decides everything
LR_PRETRAINED, LR_LORA = 1e-6, 1e-5  # the released code's, and what updates from 0 take
TEMPERATURE = 1.0  # at which the trees are sampled, since the ratios are of the model's own distribution
CLIP, DUAL_CLIP = 0.2, 3.0
WARMUP = 4  # updates
MAX_TOKENS = 2048  # of a packed tree
FIGURES = ("reward", "flat", "kl", "entropy", "clipped")  # means of a batch; flat: tasks whose leaves earn the same

# ----------------------------------------------------------------------------------------------------------- rollouts


@dataclass(eq=False)
class Node:
    """A state of a tree and the decisions that led to it; a leaf has the trajectory's reward."""

    state: State
    snapshot: Any
    path: tuple[Decision, ...] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(eq=False)
class Tree:
    nodes: list[Node]  # the root and all that are no leaves
    leaves: list[Node] = field(default_factory=list)

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
            path = (*node.path, Decision(node.state, candidate.text, request.valid))
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
    return {"inter": inter, "intra": intra, "both": [a + b for a, b in zip(inter, intra, strict=True)]}[kind]


def shares(forests: Iterable[list[Tree]], kind: str) -> dict[Decision, tuple[float, float, int]]:
    """Of each decision sum A+, sum A- and the number of the trajectories that pass through it, each as often as made.

    That is all that `dual_clip` needs, so a shared prefix is computed once; equal decisions of siblings are one too.
    """
    found: dict[Decision, tuple[float, float, int]] = {}
    for trees in forests:
        for tree, values in zip(trees, advantages([tree.rewards for tree in trees], kind), strict=True):
            for leaf, a in zip(tree.leaves, values.tolist(), strict=True):
                for decision in leaf.path:
                    up, down, visits = found.get(decision, (0.0, 0.0, 0))
                    found[decision] = up + max(a, 0.0), down + max(-a, 0.0), visits + 1
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


@torch.no_grad()
def prepared(model: Any, reference: Any, chat: Chat, forests: Iterable[list[Tree]], kind: str) -> Minibatch:
    """What is known of some tasks before a batch's first update."""
    found = shares(forests, kind)
    weights = torch.tensor(list(found.values()), device=model.device).T
    packs = pack(chat, list(found), MAX_TOKENS)
    return [(p, torch.stack([*weights[:, p.owner], p.logprobs(model)[0], p.logprobs(reference)[0]])) for p in packs]


def update(model: Any, optimizer: torch.optim.Optimizer, batch: Minibatch, kl: float, bonus: float) -> list[float]:
    """One step on the mean over the choices of all trajectories; the means of KL, entropy and what was clipped."""
    n, figures = sum(float(known[2].sum()) for _, known in batch), torch.zeros(3)
    for p, (up, down, visits, old, reference) in batch:
        logp, entropy = p.logprobs(model)
        (policy_loss(logp, entropy, old, reference, up, down, visits, kl, bonus) / n).backward()
        clipped = ((logp.detach() - old).exp() - 1).abs() > CLIP
        seen = torch.stack([low_variance_kl(logp, reference), entropy, clipped.float()])
        figures += (seen.detach() * visits / n).sum(1).cpu()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return figures.tolist()


def one_batch(
    model: Any, reference: Any, optimizer: torch.optim.Optimizer, chat: Chat, env: envs.TextEnv, tasks: Sequence[str],
    last: dict, lr: float, args: Any,
) -> dict:  # fmt: skip
    """Trees of these tasks and the updates on them: the next line of updates.jsonl, whose budgets are sums."""
    batch, shape = last["batch"] + 1, (args.M, args.draws, args.rounds)
    policy = Policy(model, chat, args.seed)  # a new one: what the last one remembers is of the weights before
    growing = (forest(env.fork(), t, *shape, chat.rendering, ("grpo", batch, i)) for i, t in enumerate(tasks))
    forests = list(drive(growing, {Sample: policy.sample}, env.side_by_side))
    parts = [forests[i : i + args.minibatch] for i in range(0, len(forests), args.minibatch)]
    batches = [prepared(model, reference, chat, part, args.advantage) for part in parts]
    figures = []
    for step, minibatch in enumerate(batches, last["updates"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / WARMUP)  # then constant
        figures.append(update(model, optimizer, minibatch, args.kl, args.entropy))
    rewards = [np.concatenate([tree.rewards for tree in trees]) for trees in forests]
    means = [np.mean([r.mean() for r in rewards]), np.mean([np.ptp(r) < 1e-9 for r in rewards]), *np.mean(figures, 0)]
    return {
        "batch": batch,
        "updates": last["updates"] + len(batches),
        "tokens": last["tokens"] + sum(len(p.tree) for minibatch in batches for p, _ in minibatch),
        "env_steps": last["env_steps"] + sum(tree.env_steps for trees in forests for tree in trees),
        **{name: round(float(mean), 6) for name, mean in zip(FIGURES, means, strict=True)},
    }


def task_order(tasks: Sequence[str], seed: int) -> Iterator[str]:
    """The training tasks in passes, each in an order of its own."""
    for turn in range(1 << 30):
        lots = uniforms(len(tasks), "order", seed, turn)
        yield from (tasks[i] for i in np.argsort(lots))


def validation(model: Any, chat: Chat, env: envs.TextEnv, tasks: Sequence[str]) -> float:
    """Mean reward of the greedy agent."""
    policy = Policy(model, chat)
    played = drive(
        (play(env.fork(), t, Method("greedy"), chat) for t in tasks), {Sample: policy.sample}, env.side_by_side
    )
    return float(np.mean([line["reward"] for line in played]))


def why_stop(lines: Sequence[dict], patience: int = 8) -> str:
    """Why no more should be spent, "" if it should."""
    tested = [line["val"] for line in lines if line["val"] is not None]
    if len(tested) > 2 and max(tested[-2:]) < 0.75 * max(tested):
        return f"validation fell from {max(tested):.3f} to {tested[-1]:.3f}: lower --lr, or raise --kl"
    recent = lines[1:][-patience:]
    if len(recent) == patience and np.mean([line["flat"] for line in recent]) > 0.95:
        if np.mean([line["reward"] for line in recent]) > 0.9:
            return "nearly all trajectories of a task earn the same, and much: nothing is left to learn"
        return "nearly all trajectories of a task earn the same, so nothing is learned: lower --lr, or raise --entropy"
    return ""


# ---------------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Released: M = 2, N = 2, L = 1.")
    add_arguments(parser)
    add = parser.add_argument
    add("-M", type=int, default=2, help="trees a task (default: %(default)s)")
    add("--draws", type=int, default=2, metavar="N", help="branches a tree and round (default: %(default)s)")
    add("--rounds", type=int, default=1, metavar="L", help="rounds (default: %(default)s; 0: chain GRPO)")
    add("--advantage", choices=["both", "inter", "intra"], default="both", help="groups (default: %(default)s)")
    add("--budget", type=float, default=1e6, metavar="N", help="when to stop (default: %(default).0f)")
    add("--budget-in", choices=["tokens", "env_steps"], default="tokens", help="default: tokens, each unique one once")
    add("--tasks", type=int, default=32, metavar="N", help="a batch (default: %(default)s; released: 512)")
    add("--minibatch", type=int, default=16, metavar="N", help="tasks an update (default: %(default)s; released: 64)")
    add("--lr", type=float, help="default: 1e-6; tiny: webshop 1e-3, alfworld 1e-4, others 3e-4")
    add("--kl", type=float, default=1e-3, help="weight of the KL to RUN/sft (default: %(default)s)")
    add("--entropy", type=float, default=1e-3, help="weight of the entropy bonus (default: %(default)s)")
    add("--val", type=int, default=100, metavar="N", help="validation tasks (default: %(default)s; 0: all)")
    add("--every", type=int, default=4, metavar="N", help="batches between validations (default: %(default)s)")
    add("--name", help="of the checkpoint RUN/sft-NAME (default: tree_grpo, or grpo with --rounds 0)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--lora", type=int, metavar="RANK", help="train updates of this rank instead of the weights")
    add("--device")
    args = parse_arguments(parser, argv)
    if args.M * (args.draws * args.rounds + 1) < 2:
        raise UserError(
            f"-M {args.M} --rounds {args.rounds}: one trajectory has nothing to be compared with; raise one"
        )
    args.name = args.name or ("tree_grpo" if args.rounds else "grpo")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    started = time.time()
    env = envs.from_arguments(args)
    args.sft = needed(args.sft, args.run / "sft", "sft", stage_argv(args))
    out = checkpoint_folder(args.run / f"sft-{args.name}")
    log, resume = out.with_name(out.name + ".updates.jsonl"), out.with_name(out.name + ".resume.pt")
    same_arguments(log, args, ["sft", "M", "draws", "rounds", "advantage", "tasks", "minibatch", "lr", "kl", "entropy",
                               "val", "every", "lora"])  # fmt: skip
    write_meta(log, args, [args.sft])

    model, chat = load_checkpoint(args.sft, transformers.AutoModelForCausalLM, args.device, train=not args.lora)
    reference = copy.deepcopy(model).eval()
    small = sum(p.numel() for p in model.parameters()) < 50e6
    lr = args.lr or (LR.get(args.env, 3e-4) if small else LR_LORA if args.lora else LR_PRETRAINED)
    torch.manual_seed(args.seed)
    if args.lora:
        add_lora(model, args.lora)
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), lr)
    saved = torch.load(resume, map_location=model.device) if resume.exists() else {"lines": 0}
    updates = Resumable(log, lambda lines: saved["lines"] if len(lines) >= saved["lines"] else 0)
    lines = updates.records
    if lines:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    tested, order = env.task_ids("val")[: args.val or None], task_order(env.task_ids("train"), args.seed)
    order = itertools.islice(order, max(0, len(lines) - 1) * args.tasks, None)
    last = lines[-1] if lines else {"batch": -1, "updates": 0, "tokens": 0, "env_steps": 0}
    why, bar = "", tqdm(total=int(args.budget), initial=last[args.budget_in], desc=args.name, disable=None)
    while not lines or (last[args.budget_in] < args.budget and not (why := why_stop(lines))):
        if lines:
            drawn = list(itertools.islice(order, args.tasks))
            line = one_batch(model, reference, optimizer, chat, env, drawn, last, lr, args)
        else:  # the agent as it comes
            line = last | {"batch": 0} | dict.fromkeys(FIGURES)
        due = line["batch"] % args.every == 0 or line[args.budget_in] >= args.budget
        line["val"] = round(validation(model, chat, env, tested), 6) if due else None
        updates.append([line])
        lines.append(line)
        bar.update(line[args.budget_in] - last[args.budget_in])
        last = line
        if due:
            if line["val"] > max((x["val"] for x in lines[:-1] if x["val"] is not None), default=-np.inf):
                save_checkpoint(model, chat, out)
            draft = resume.with_suffix(".draft")
            torch.save({"lines": len(lines), "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            draft.replace(resume)
    bar.close()
    updates.close()
    best = max((x for x in lines if x["val"] is not None), key=lambda x: x["val"])
    figures = {"lr": lr, "best": best, "last": last, "stopped": why or None, "seconds": time.time() - started}
    for path in (log, out):
        write_meta(path, args, [args.sft], **figures)
    if why:
        print(f"stopped after batch {last['batch']}: {why}")
    print(f"{out}: validation {lines[0]['val']:.3f} -> {best['val']:.3f} at batch {best['batch']} "
          f"({best['tokens']:,} tokens, {best['env_steps']:,} environment steps)")  # fmt: skip
    print(f"next: python q_search.py --env {args.env} --run {args.run} --sft {out} --label {args.name} --method greedy "
          f"--out {args.run}/results-{args.name}.jsonl")  # fmt: skip


if __name__ == "__main__":
    run_stage(main)
