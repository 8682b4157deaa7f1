"""Does QNet know which action is better? Its alignment on held-out states, all in all and among siblings.

    reads   RUN/sft/, RUN/qnet/, RUN/q_labels.jsonl
    writes  RUN/align.jsonl: a line a task as in results.jsonl, each candidate with its q, monte_carlo (and q_star)

    python -m experiments.align --env webshop -M 4 -K 8

The agent plays tasks that nothing was trained on and draws M candidates in each state. QNet's q is compared with

    monte_carlo   the mean discounted reward of K rollouts of the agent after each candidate, from a snapshot
    q_star        the exact Q*(s, a), where the environment knows it (FrozenLake)
    tree          the labels of the trees that train_qnet.py held out

Search compares siblings only, so the columns that count for it are those per state: Spearman's rho and Kendall's tau-b
in the states whose candidates differ in the target (means of tasks' means), and the gain: what the candidate with the
highest q is worth beyond a random one, over what the best one is (1: never wrong, 0: no better than chance).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
from tqdm import tqdm

import envs
from qlass.chat import Rendering, State, action_key, parse_action, react
from qlass.driver import Sample, Score, ask, drive
from qlass.jsonl import read_trees, write_jsonl
from qlass.packing import pairs_of
from qlass.policy import Policy
from qlass.stage import needed, parse, parser, run_stage, write_meta
from qlass.stats import bootstrap, by_task, kendall, spearman
from train_qnet import HELD_OUT, QNet, qnet_scores

Family = tuple[str, list[float], list[float]]  # task; q and target of the candidates of one of its states


def monte_carlo(
    env: envs.TextEnv, state: State, actions: list[str], rollouts: int, gamma: float, key: tuple, rendering: Rendering
) -> Generator[list[Sample], list, list[float]]:
    """For each action the mean of gamma^t r over rollouts of the agent that begin with it (t = 0: it ends the episode).

    All rollouts advance side by side. The environment is left wherever the last of them ended.
    """
    here, returns = env.snapshot(), np.zeros((len(actions), rollouts))
    alive = [(i, k, state, here) for i in range(len(actions)) for k in range(rollouts)]
    texts, t = [actions[i] for i, *_ in alive], 0
    while alive:
        going = []
        for (i, k, s, snapshot), text in zip(alive, texts, strict=True):
            env.restore(snapshot)
            observation, reward, terminated, truncated, _ = env.step(parse_action(text))
            if terminated or truncated:
                returns[i, k] = gamma**t * reward
            else:
                going.append((i, k, s.then(text, env.message(observation)), env.snapshot()))
        alive, t, requests = going, t + 1, []
        for i, k, s, snapshot in alive:
            env.restore(snapshot)
            requests.append(ask(env, s, 1, (*key, i, k, t), rendering))
        texts = [answer[0].text for answer in (yield requests)] if requests else []
    return [float(value) for value in returns.mean(1)]


def walk(env: envs.TextEnv, task_id: str, M: int, K: int, gamma: float, rendering: Rendering) -> Generator:
    """One episode of the agent; in each state M candidates (0: all that are valid) with their q and targets.

    Returns most of a line of results.jsonl.
    """
    observation, info = env.reset(options={"task_id": task_id})
    state, reward, done, steps, started = State.first(env, observation, info), 0.0, False, [], time.time()
    while not done:
        key = (task_id, "align", len(steps))
        drawn = [c.text for c in (yield ask(env, state, M or 1, key, rendering))]
        drawn += [] if M else [react(*c) for c in env.candidates()]
        actions = list({action_key(text): text for text in reversed(drawn)}.values())[::-1]
        candidates = [{"action": a, "q": q} for a, q in zip(actions, (yield Score(state, tuple(actions))), strict=True)]
        here = env.snapshot()
        if hasattr(env, "q_star_of"):
            for c in candidates:
                c["q_star"] = env.q_star_of(parse_action(c["action"]), gamma)
        returns = yield from monte_carlo(env, state, actions, K, gamma, key, rendering)
        candidates = [c | {"monte_carlo": value} for c, value in zip(candidates, returns, strict=True)]
        env.restore(here)
        observation, reward, terminated, truncated, _ = env.step(parse_action(actions[0]))  # what the agent would do
        done, state = terminated or truncated, state.then(actions[0], env.message(observation))
        steps.append({"action": actions[0], "candidates": candidates, "observation": env.message(observation)})
    env.close()
    return {"reward": float(reward), "n_steps": len(steps), "tokens": {}, "steps": steps,
            "seconds": round(time.time() - started, 3)}  # fmt: skip


def families(lines: list[dict], target: str) -> list[Family]:
    """The states of result lines, as their candidates' q and `target`."""
    states = [(line["task_id"], step["candidates"]) for line in lines for step in line["steps"]]
    return [(task, [c["q"] for c in some], [c[target] for c in some]) for task, some in states if target in some[0]]


def tree_families(qnet: QNet, trees: list[list[dict]]) -> list[Family]:
    found: dict[tuple[str, State], tuple[list[float], list[float]]] = {}
    for tree in trees:
        pairs = pairs_of(tree)
        scores = qnet_scores(qnet, [pairs])
        for p in pairs:
            q, target = found.setdefault((tree[0]["task_id"], p.state), ([], []))
            q.append(scores[p.state, p.action])
            target.append(p.q)
    return [(task, *values) for (task, _), values in found.items()]


def alignment(states: list[Family]) -> dict:
    """Rank correlations over all (s, a), then per state: means over states, with the interval over tasks, and gain."""
    q, target = (np.concatenate([family[i] for family in states]) for i in (1, 2))
    thin = slice(None, None, 1 + len(q) // 5000)  # tau is quadratic
    rho, tau, won, possible = {}, {}, 0.0, 0.0
    for i, (task, *family) in enumerate(states):
        of_q, of_target = family
        if len(set(of_target)) > 1:
            rho[task, i] = float(np.nan_to_num(spearman(of_q, of_target)))  # equal q: no order
            tau[task, i] = float(np.nan_to_num(kendall(of_q, of_target)))
            won += of_target[int(np.argmax(of_q))] - np.mean(of_target)
            possible += max(of_target) - np.mean(of_target)
    per_state = bootstrap(by_task(rho).values())
    return {"pairs": len(q), "rho": spearman(q, target), "tau": kendall(q[thin], target[thin]), "states": len(rho),
            "rho per state": per_state.mean, "95 % over tasks": f"[{per_state.low:.2f}, {per_state.high:.2f}]",
            "tau per state": bootstrap(by_task(tau).values()).mean,
            "gain": won / possible if possible else float("nan")}  # fmt: skip


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    envs.add_arguments(made, argv)
    add = made.add_argument
    add("-M", type=int, default=4, help="candidates a state (default: %(default)s; 0: all valid ones)")
    add("-K", type=int, default=8, help="rollouts after each (default: %(default)s)")
    add("--gamma", type=float, default=0.9, help="discount of the returns (default: %(default)s)")
    add("--split", default="val", help="tasks to play (default: %(default)s)")
    add("--limit", type=int, default=30, metavar="N", help="number of tasks (default: %(default)s; 0: all)")
    add("--sft", type=Path, help="checkpoint of the agent (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--labels", type=Path, help="default: RUN/q_labels.jsonl, made if missing")
    add("--out", type=Path, help="default: RUN/align.jsonl")
    add("--label", help="name of the QNet, kept in each line")
    add("--device")
    return parse(made, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    started = time.time()
    env = envs.from_arguments(args)
    args.out = args.out or args.run / "align.jsonl"
    args.sft = needed(args.sft, args.run / "sft", "sft", args)
    args.labels = needed(args.labels, args.run / "q_labels.jsonl", "bellman", args)
    args.qnet = needed(args.qnet, args.run / "qnet", "train_qnet", args)
    policy, qnet = Policy.load(args.sft, args.device, args.seed), QNet.from_pretrained(args.qnet, args.device)

    tasks = env.task_ids(args.split)[: args.limit or None]
    about = {"env": env.name, "split": args.split, "label": args.label, "method": "align", "M": args.M, "N": 1}
    walks = (walk(env.fork(), t, args.M, args.K, args.gamma, policy.chat.rendering) for t in tasks)
    played = drive(walks, {Sample: policy.sample, Score: qnet.score}, env.side_by_side)
    played = tqdm(played, desc="align", total=len(tasks), disable=None)
    lines = [{"task_id": t} | about | {"seed": args.seed} | record for t, record in zip(tasks, played, strict=True)]
    write_jsonl(args.out, lines)

    states = {target: families(lines, target) for target in ("monte_carlo", "q_star")}
    states["tree"] = tree_families(qnet, list(read_trees(args.labels))[HELD_OUT])
    found = {target: alignment(some) for target, some in states.items() if some}
    inputs = [args.sft, args.qnet, args.labels]
    write_meta(args.out, args, inputs, alignment=found, seconds=time.time() - started)
    print("  ".join(f"{name:>15}" for name in ("target", *found["monte_carlo"])))
    for target, figures in found.items():
        print("  ".join(f"{c:>15.3f}" if isinstance(c, float) else f"{c:>15}" for c in (target, *figures.values())))


if __name__ == "__main__":
    run_stage(main)
