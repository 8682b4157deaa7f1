"""Inference: Q-guided generation (Sec. 4.4, Alg. 4) and the policies that it is compared with.

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: one line a task and method, with each step's candidates and their q

    python q_search.py --env webshop --method qlass -M 2 -N 1
    python q_search.py --env webshop --method all            # the comparison table of the README

One loop plays them all: draw M actions, let a chooser take one, step; N times over; keep one trajectory.

    method          M      chooser                                      of N trajectories
    greedy          1      (temperature 0)
    sample          1
    random          -M     any of the distinct candidates
    qlass           -M     the highest Q (Alg. 4)                       --select q | oracle
    best_of_n       1                                                   --select q | oracle
    oracle_step     -M     the highest true value of the next state     an oracle: the ceiling of any QNet
    oracle_lookahead -M    the highest Q, but a candidate whose step    an oracle: what the authors' released code does
                           ends the episode counts by its true reward
    expert          the environment's demonstrator

Only methods named oracle, and --select oracle (the paper's "best of N by final reward"), see the environment's reward.
With --paraphrase, each candidate of any method is drawn under its own wording of the task (App. A.3.2, paraphrase.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tqdm import tqdm

import envs
from environments import UserError
from environments.webshop.paraphrase import Reword, Server, by_rules, reword
from qlass.chat import Chat, State, action_key, parse_action, react, uniforms
from qlass.driver import Candidate, Sample, Score, ask, drive
from qlass.jsonl import Resumable
from qlass.models import add_loading
from qlass.policy import Policy
from qlass.stage import (
    add_arguments,
    must_exist,
    needed,
    parse_arguments,
    run_stage,
    same_arguments,
    stage_argv,
    write_meta,
)
from train_qnet import QNet


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to act: how one of M candidates is chosen, and which of N trajectories counts."""

    name: str
    M: int = 1
    N: int = 1
    select: str | None = None


# ------------------------------------------------------------------------------------------------ choosing one of M
# A chooser gets the environment in state s and the distinct candidates, and returns a score for each; the highest is
# taken, the first among equals.

Chooser = Generator[Any, Any, list[float]]


def by_q(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Chooser:
    """Q(s, a) of each (Alg. 4, line 7)."""
    return (yield Score(state, tuple(candidates)))


def at_random(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Chooser:
    return list(uniforms(len(candidates), "random", *key))
    yield


def by_true_value(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Chooser:
    """The best that can still be reached after each: with these candidates no QNet can do better."""
    return look_ahead(env, candidates, [None] * len(candidates))
    yield


def by_q_or_reward(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Chooser:
    """Q, but the true reward where a candidate's step ends the episode."""
    return look_ahead(env, candidates, (yield Score(state, tuple(candidates))))


def look_ahead(env: envs.TextEnv, candidates: list[str], otherwise: list[float | None]) -> list[float]:
    """Step each candidate in the real environment: its reward if that ends the episode, else what is given."""
    scores, here = [], env.snapshot()
    for action, score in zip(candidates, otherwise, strict=True):
        _, reward, terminated, truncated, _ = env.step(parse_action(action))
        ended = terminated or truncated
        scores.append(reward if ended else env.optimal_value() if score is None else score)
        env.restore(here)
    return scores


CHOOSERS: dict[str, Callable[..., Chooser]] = {
    "random": at_random,
    "qlass": by_q,
    "oracle_step": by_true_value,
    "oracle_lookahead": by_q_or_reward,
}

# ------------------------------------------------------------------------------------------------------- Algorithm 4


def draw(
    env: envs.TextEnv, state: State, worded: list[str], key: tuple, chat: Chat, temperature: float | None
) -> Generator[Any, Any, list[Candidate]]:
    """a ~ pi(a | s) once for each wording of the task."""
    requests = [
        ask(env, reword(state, w), n, key if w == state.task else (*key, w), chat.rendering, temperature)
        for w, n in Counter(worded).items()
    ]
    if len(requests) == 1:
        return (yield requests[0])
    return [candidate for answer in (yield requests) for candidate in answer]


def episode(env: envs.TextEnv, task_id: str, method: Method, trial: int, chat: Chat, wordings: int = 1) -> Generator:
    """One trajectory (Alg. 4, lines 3-10). Yields requests, returns the trajectory with what it cost.

    Candidate k of trial n is drawn under wording n M + k of the task, modulo their number; 0 is the original.
    """
    chooser = CHOOSERS.get(method.name)
    observation, info = env.reset(options={"task_id": task_id})
    state, reward, done = State.first(env, observation, info), 0.0, False  # Alg. 4, line 3
    worded = [state.task] * method.M
    if wordings > 1:
        worded = yield [Reword(state.task, (trial * method.M + k) % wordings) for k in range(method.M)]
    steps, read, generated, scored, env_steps = [], 0, 0, 0, 0
    while not done:  # Alg. 4, line 4
        key = (task_id, trial, len(steps))  # not the method: all draw with the same luck
        temperature = 0.0 if method.name == "greedy" else None
        drawn = yield from draw(env, state, worded, key, chat, temperature)  # Alg. 4, lines 5-6
        first: dict[str, str] = {}
        for c in drawn:
            first.setdefault(action_key(c.text), c.text)
        distinct = list(first.values())
        scores = (yield from chooser(env, state, distinct, key)) if chooser else [None]  # Alg. 4, line 7
        action = distinct[max(range(len(scores)), key=scores.__getitem__)]  # Alg. 4, line 8: argmax_a Q(s, a)
        heard = chat.message_tokens(state)[::2]  # every token once: what came before left its keys
        read += sum(map(len, heard[-1:] if steps else heard))
        generated += sum(c.tokens for c in drawn)
        scored += sum(len(chat.action(a, state.task)) for a in distinct) if chooser in (by_q, by_q_or_reward) else 0
        env_steps += 1 + (len(distinct) if chooser in (by_true_value, by_q_or_reward) else 0)

        observation, reward, terminated, truncated, _ = env.step(parse_action(action))  # Alg. 4, lines 9-10
        done, last = terminated or truncated, (state, action)
        state = state.then(action, env.message(observation))
        listed = [{"action": a, "q": None if q is None else round(float(q), 4)}
                  for a, q in zip(distinct, scores, strict=False)]  # fmt: skip
        steps.append({"action": action, "candidates": listed, "observation": env.message(observation)})
    # Under each further wording a model reads the environment's words again, and the actions, written under one alone.
    again = [chat.message_tokens(reword(last[0], w)) for w in dict.fromkeys(worded)][1:]
    prompt = read + sum(len(run) for others in again for run in others)
    return {
        "reward": float(reward), "steps": steps, "last": last, "env_steps": env_steps,
        "tokens": {"prompt": prompt, "generated": generated, "scored": scored + read if scored else 0},
    }  # fmt: skip


def play(env: envs.TextEnv, task_id: str, method: Method, chat: Chat, wordings: int = 1) -> Generator:
    """N trajectories, of which one counts (Alg. 4, lines 1-2 and 11). Returns most of a line of results.jsonl."""
    started, trials = time.time(), []
    for trial in range(method.N):  # Alg. 4, lines 1-2
        trials.append((yield from episode(env, task_id, method, trial, chat, wordings)))
    env.close()
    best = trials[0]  # Alg. 4, line 11
    if method.select == "oracle":
        best = max(trials, key=lambda t: t["reward"])
    elif method.select == "q":
        for t in trials:  # the last action's value speaks for the trajectory
            t["q"] = (yield Score(t["last"][0], (t["last"][1],)))[0]
            t["tokens"]["scored"] = t["tokens"]["scored"] or len(chat.prompt(t["last"][0])) + len(
                chat.action(t["last"][1], t["last"][0].task)
            )
        best = max(trials, key=lambda t: t["q"])
    return {
        "reward": best["reward"], "success": best["reward"] > 1 - 1e-9, "n_steps": len(best["steps"]),
        "tokens": {kind: sum(t["tokens"][kind] for t in trials) for kind in best["tokens"]},
        "env_steps": sum(t["env_steps"] for t in trials), "resets": method.N,
        "seconds": round(time.time() - started, 3), "steps": best["steps"],
    }  # fmt: skip


def demonstration(env: envs.TextEnv, task_id: str) -> dict:
    """The environment's expert, as a line of results.jsonl."""
    started, steps, reward = time.time(), [], 0.0
    env.reset(options={"task_id": task_id})
    for thought, action in env.expert(task_id):
        observation, reward, terminated, truncated, _ = env.step(action)
        steps.append({"action": react(thought, action), "candidates": [], "observation": env.message(observation)})
        if terminated or truncated:
            break
    env.close()
    return {
        "reward": float(reward), "success": reward > 1 - 1e-9, "n_steps": len(steps),
        "tokens": {"prompt": 0, "generated": 0, "scored": 0}, "env_steps": len(steps), "resets": 1,
        "seconds": round(time.time() - started, 3), "steps": steps,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- main


def methods(args: argparse.Namespace) -> list[Method]:
    """What the flags ask for. `all` is the comparison at M = N, so that equal numbers of actions are drawn."""
    chosen = []
    for name in args.method:
        if name == "all":
            chosen += [Method("expert"), Method("greedy"), Method("sample"), Method("random", M=max(args.M))]
            chosen += [Method("best_of_n", N=n, select=select) for select in ("q", "oracle") for n in args.M]
            chosen += [Method("qlass", M=m) for m in args.M] + [Method("oracle_step", M=max(args.M))]
        elif name == "best_of_n":
            chosen += [Method(name, N=n, select=args.select) for n in args.N or [4]]
        elif name in CHOOSERS:
            chosen += [Method(name, m, n, args.select if n > 1 else None) for m in args.M for n in args.N or [1]]
        else:
            chosen.append(Method(name))
    return chosen


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="App. A.2: M = 2 and N = 1 on WebShop.")
    add_arguments(parser)
    add = parser.add_argument
    names = ["all", "expert", "greedy", "sample", "best_of_n", *CHOOSERS]
    add("--method", nargs="+", default=["qlass"], choices=names, metavar="NAME", help=f"{', '.join(names)}")
    add("-M", nargs="+", type=int, help="candidates a step (default: 2; with all: 2 4 6)")
    add("-N", nargs="+", type=int, help="trajectories a task (default: 1; best_of_n: 4)")
    add("--select", choices=["q", "oracle"], default="q", help="which of N trajectories counts (default: %(default)s)")
    add("--split", default="test", help="tasks to play (default: %(default)s)")
    add("--limit", type=int, default=400, metavar="N", help="number of tasks (default: %(default)s; 0: all)")
    add("--sft", type=Path, help="the agent's checkpoint (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--readout", choices=["last", "mean"], help="how QNet's values of an action become one (default: its own)")
    add("--out", type=Path, help="default: RUN/results.jsonl; lines that it has are not played again")
    add("--label", help="a variant's name, kept in each line")
    add(
        "--paraphrase",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="draw each candidate under its own wording of the task, of N (default: off; without N: all different)",
    )
    add("--paraphrase-server", metavar="URL[#MODEL]", help="wordings by an OpenAI-compatible server, not by our rules")
    add("--temperature", type=float, metavar="T", help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--max-steps", type=int, metavar="N", help="step limit (default: 5 WebShop, 40 others; bundled WebShop 9)")
    add_loading(parser)
    add("--device")
    args = parse_arguments(parser, argv)
    args.M = args.M or ([2, 4, 6] if "all" in args.method else [2])
    if args.paraphrase_server and args.paraphrase is None:
        args.paraphrase = 0
    if args.paraphrase is not None:
        if args.env != "webshop":
            raise UserError(f"--paraphrase: for webshop (App. A.3.2), not for {args.env}; leave it out")
        args.label = args.label or "paraphrased"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    started = time.time()
    env = envs.from_arguments(args, **({"max_steps": args.max_steps} if args.max_steps else {}))
    args.out = args.out or args.run / "results.jsonl"
    plan = methods(args)
    must_exist(args.sft, args.qnet)
    answers: dict = {}
    chat = policy = qnet = None
    if any(CHOOSERS.get(m.name) in (by_q, by_q_or_reward) or m.select == "q" for m in plan):
        args.qnet = needed(args.qnet, args.run / "qnet", "train_qnet", stage_argv(args))
        qnet = QNet.from_pretrained(args.qnet, args.device, args.readout, args.load_in)
        answers[Score] = qnet.score
    if any(m.name != "expert" for m in plan):
        args.sft = needed(args.sft, args.run / "sft", "sft", stage_argv(args))
        policy = Policy.load(args.sft, args.device, args.seed, args.load_in)
        chat, answers[Sample] = policy.chat, policy.sample
        if args.temperature is not None:
            chat.rendering.temperature = args.temperature
    # The file is of one agent and one QNet, also where the methods of this call need none.
    args.sft, args.qnet = args.sft or args.run / "sft", args.qnet or args.run / "qnet"
    answers[Reword] = paraphraser = Server(args.paraphrase_server) if args.paraphrase_server else by_rules
    same_arguments(args.out, args, ["sft", "qnet", "readout", "temperature", "max_steps", "label", "paraphrase",
                                    "paraphrase_server", "load_in"])  # fmt: skip

    tasks = env.task_ids(args.split)[: args.limit or None]
    if not tasks:
        raise UserError(f"{args.env}: no tasks in --split {args.split}")
    results = Resumable(args.out, lambda records: len([r["method"] for r in records]))
    identity = ("task_id", "split", "method", "M", "N", "select")
    finished = {tuple(r[k] for k in identity): r for r in results.records}
    write_meta(args.out, args, [args.sft, args.qnet])
    for method in plan:
        about = {"env": env.name, "split": args.split, "label": args.label, "method": method.name}
        about |= {"M": method.M, "N": method.N, "select": method.select}
        lines = {t: {"task_id": t} | about | {"seed": args.seed} for t in tasks}
        todo = [t for t in tasks if tuple(lines[t][k] for k in identity) not in finished]
        name = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(method).items() if k != "name" and v not in (1, None))
        name = f"{method.name} {name}".strip()

        def player(task_id: str, method: Method = method) -> Generator:
            if method.name == "expert":
                return demonstration(env.fork(), task_id)
                yield
            wordings = 1 if args.paraphrase is None else args.paraphrase or method.M * method.N
            return (yield from play(env.fork(), task_id, method, chat, wordings))

        bar = tqdm(total=len(todo), desc=name, disable=None)
        for task_id, record in zip(todo, drive(map(player, todo), answers, env.side_by_side), strict=True):
            results.append([line := lines[task_id] | record])
            finished[tuple(line[k] for k in identity)] = line
            bar.update()
        bar.close()
        rewards = [finished[tuple(lines[t][k] for k in identity)]["reward"] for t in tasks]
        print(
            f"{name}: mean reward {sum(rewards) / len(rewards):.3f} over {len(rewards)} {args.split} tasks", flush=True
        )
    results.close()
    computed = {"policy": policy and policy.computed, "qnet": qnet and qnet.computed,
                "paraphrase_server": getattr(paraphraser, "tokens", 0)}  # fmt: skip
    write_meta(args.out, args, [args.sft, args.qnet], computed_tokens=computed, seconds=time.time() - started)


if __name__ == "__main__":
    run_stage(main)
