"""Stage 5: Q-guided generation (Sec. 4.4, Alg. 4), and the policies that it is compared with.

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: one line per task and method, with each step's candidates and their q

    python q_search.py --env webshop --method qlass -M 2 -N 1
    python q_search.py --env webshop --method all --skip 400 --limit 0    # the comparison of all methods

One loop plays all agents: sample M actions, score them, take the best, step; N times over; keep one trajectory.

    method           M     N    score of a candidate
    greedy           1     1    (temperature 0)
    sample           1     1
    best_of_n        1     -N
    random           -M    -N   a random number
    likeliest        -M    -N   the agent's own log pi(a | s), of the whole text: search without a QNet
    qlass            -M    -N   Q (Alg. 4)
    oracle_step      -M    -N   the true value of the next state (TextEnv.optimal_value)
    oracle_lookahead -M    -N   Q, but the true reward where the candidate ends the episode, as the released code has it
    rule, expert, oracle        the environment's own players: a rule without learning; the expert; an all-knowing one

Of N trajectories --select takes one, by Q or, as the paper does, by the final reward. Only --select oracle and methods
named oracle see the environment's reward.
With --paraphrase, each candidate is sampled under its own wording of the task (App. A.3.2, qlass/paraphrase.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import envs
from qlass import UserError, costs
from qlass.chat import Rendering, State, parse_action, uniforms
from qlass.cli import add_sampling, at_least, find_or_make, leaks, must_exist, my_share, parse, parser, run_stage
from qlass.driver import Likelihood, Sample, Score, Step, ask, drive, follow
from qlass.files import SAMPLING_FREE, Output, identity
from qlass.oracles import Scores, by_q_or_reward, by_true_value
from qlass.paraphrase import add_paraphrases, paraphrased
from qlass.policy import load_agent, load_qnet

PAPER = {"M": 2, "N": 1}  # App. A.2
COMPARED = [2, 4, 6]  # M and N of `--method all`
PLAYERS = ("rule", "expert", "oracle")  # the environment's own

# ------------------------------------------------------------------------------------------------------- Algorithm 4


@dataclasses.dataclass(frozen=True)
class Method:
    """A policy: M candidates a step, of which its score takes one; N trajectories, of which `select` takes one."""

    name: str  # "NAME:WHICH" where there are several: of the environment's rules, of the scores of experiments/qval
    M: int = 1
    N: int = 1
    select: str | None = None  # "q", "oracle"; None: the first
    temperature: float | None = None  # None: the checkpoint's own
    search: Callable[..., Generator] | None = None  # a loop of its own, which plays a task as `play` does

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def score(self) -> Callable[..., Scores]:
        return SCORERS.get(self.name, first_drawn)

    def read_by_qnet(self, step: Step) -> list[str]:
        """The actions of a step that QNet reads: all candidates or, of a trajectory that it judges, the one taken."""
        if self.score in READ_Q:
            return step.candidates
        return [step.action] if self.select == "q" else []

    def env_steps(self, step: Step) -> int:
        return 1 + len(step.candidates) * (self.score in STEP_EACH)

    def __str__(self) -> str:
        settings = {"M": self.M, "N": self.N, "select": self.select}
        return " ".join([self.name, *(f"{name}={value}" for name, value in settings.items() if value not in (1, None))])


def episode(env: envs.TextEnv, task_id: str, method: Method, trial: int, rendering: Rendering) -> Generator:
    """One trajectory (Alg. 4, lines 3-10). Yields requests, which models answer; returns the steps."""
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)  # line 3
    steps: list[Step] = []
    done = False
    while not done:  # line 4
        key = (task_id, trial, len(steps))  # of the noise; every method gets the same, so that differences are paired
        drawn = yield ask(env, state, method.M, key, rendering, method.temperature)  # lines 5-6: a ~ pi(a | s)
        candidates = distinct(candidate.text for candidate in drawn)
        scores = yield from method.score(env, state, candidates, key)  # line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # line 8: argmax_a Q(s, a)
        observation, reward, terminated, truncated, _ = env.step(parse_action(action))  # line 9
        observation = env.message(observation)
        steps.append(Step(state, drawn, candidates, scores, action, observation, float(reward)))
        state = state.then(action, observation)  # line 10
        done = terminated or truncated
    return steps


def distinct(actions: Iterable[str]) -> list[str]:
    """The first of each group of actions that are the same to the environment."""
    first: dict[str, str] = {}
    for action in actions:
        first.setdefault(parse_action(action), action)
    return list(first.values())


def best_of(env: envs.TextEnv, task_id: str, method: Method, rendering: Rendering, shared: dict) -> Generator:
    """N trajectories, of which one counts (Alg. 4, lines 1-2 and 11). Returns the one, and all.

    shared: {(task, trial): trajectory} of the agent alone, which `sample` and best-of-N have in common.
    """
    played = shared if method.name in ("sample", "best_of_n") else {}
    for trial in range(method.N):  # lines 1-2
        if (task_id, trial) not in played:
            played[task_id, trial] = yield from episode(env, task_id, method, trial, rendering)
    trajectories = [played[task_id, trial] for trial in range(method.N)]
    values = [0.0]
    if method.select == "q":  # line 11; the last action's Q speaks for the trajectory
        values = yield [Score(steps[-1].state, (steps[-1].action,)) for steps in trajectories]
    elif method.select == "oracle":
        values = [steps[-1].reward for steps in trajectories]
    return trajectories[values.index(max(values))], trajectories


# ------------------------------------------------------------------------------------------ scores of the M candidates


def by_q(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Q(s, a)."""
    return (yield Score(state, tuple(candidates)))


def by_likelihood(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """log pi(a | s) as if written freely, also where it was drawn among the valid actions."""
    return (yield Likelihood(state, tuple(candidates)))


def by_chance(seed: int, env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    yield from ()
    return list(uniforms(len(candidates), "random", seed, *key))


def first_drawn(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """No opinion, null in the file: of equal scores the first is taken, and so of NaNs."""
    yield from ()
    return [math.nan] * len(candidates)


SCORERS: dict[str, Callable[..., Scores]] = {  # by method; experiments/qval adds "scorer:NAME"
    "random": partial(by_chance, 0),  # main puts the run's seed in
    "likeliest": by_likelihood,
    "qlass": by_q,
    "oracle_step": by_true_value,
    "oracle_lookahead": by_q_or_reward,
}
READ_Q = {by_q, by_q_or_reward}  # scorers that QNet answers
STEP_EACH = {by_true_value, by_q_or_reward}  # scorers that step every candidate, which costs environment steps


# ------------------------------------------------------------------------------------------------- playing the methods


def play(env: envs.TextEnv, task_id: str, method: Method, chat: Any, shared: dict) -> Generator:
    """One task by one method: the outcome, as a line of results.jsonl tells it."""
    started = time.time()
    if method.search:
        outcome = yield from method.search(env, task_id, method, chat, shared)
    elif method.kind in PLAYERS:
        steps = follow(env, task_id, method.name)
        outcome = costs.outcome(chat, method, steps, [steps])
    else:
        best, trajectories = yield from best_of(env, task_id, method, chat.rendering, shared)
        outcome = costs.outcome(chat, method, best, trajectories)
    env.close()
    return {"task_id": task_id} | outcome | {"seconds": round(time.time() - started, 3)}


def line_of(env: envs.TextEnv, task_id: str, method: Method, fields: dict) -> dict:
    """What a line of results.jsonl says besides the outcome."""
    player = method.name.partition(":")[2] or None
    line = {"task_id": task_id, "type": env.task_type(task_id), "block": env.block(task_id), "env": env.name}
    line |= {"split": fields["split"], "label": fields["label"], "method": method.kind}
    return line | {"M": method.M, "N": method.N, "select": method.select, "player": player, "seed": fields["seed"]}


def search(
    env: envs.TextEnv, tasks: list[str], plan: list[Method], answers: dict, chat: Any, out: Output, fields: dict,
    side_by_side: int,
) -> None:  # fmt: skip
    """Play the methods of a plan on the tasks, a line of `out` for each; lines that it has are not played again.

    fields: what every line says (split, label, seed).
    """
    shared: dict[tuple[str, int], list[Step]] = {}
    for method in plan:
        lines = {task: line_of(env, task, method, fields) for task in tasks}
        finished = {identity(record) for record in out.records}
        todo = [task_id for task_id, line in lines.items() if identity(line) not in finished]
        played = drive((play(env.fork(), t, method, chat, shared) for t in todo), answers, side_by_side)
        grown = ([lines[outcome["task_id"]] | outcome] for outcome in played)
        out.grow(grown, str(method), len(tasks), len(tasks) - len(todo))

        wanted = {identity(line) for line in lines.values()}
        rewards = [record["reward"] for record in out.records if identity(record) in wanted]
        print(f"{method}: mean reward {sum(rewards) / len(rewards):.3f} over {len(rewards)} {fields['split']} tasks")


# --------------------------------------------------------------------------------------------------------------- main


def plan_of(
    env: envs.TextEnv, names: list[str], Ms: list[int], Ns: list[int] | None, select: str, server: bool
) -> list[Method]:
    """The methods that the flags name. `all` is the comparison at M = N, so that equal numbers of actions are drawn."""
    plans = {name: [Method(name, m, n, select if n > 1 else None) for m in Ms for n in Ns or [1]] for name in SCORERS}
    plans |= {
        "oracle": [Method("oracle")],
        "expert": [Method("oracle" if env.omniscient else "expert")],  # who knows more than the pages is an oracle
        "rule": [Method(f"rule:{name}") for name in env.rules()],
        "greedy": [Method("greedy", temperature=0.0)],
        "sample": [Method("sample")],
        "best_of_n": [Method("best_of_n", N=n, select=select) for n in Ns or [4]],
    }
    if "rule" in names and not plans["rule"]:
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    everything = [method for name in ("oracle", "expert", "rule", "greedy", "sample") for method in plans[name]]
    everything.append(Method("random", M=max(Ms)))
    everything += [Method("best_of_n", N=n, select=by) for by in ("q", "oracle") for n in Ms]
    everything += [Method("likeliest", M=m) for m in Ms if not server]  # which tells no log-probability
    everything += [Method("qlass", M=m) for m in Ms]
    if type(env).optimal_value is not envs.TextEnv.optimal_value:
        everything.append(Method("oracle_step", M=max(Ms)))
    plans["all"] = everything
    return list(dict.fromkeys(method for name in names for method in plans[name]))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, epilog="App. A.2: M = 2 and N = 1 on WebShop.")
    add = flags.add_argument
    names = ["all", "greedy", "sample", "best_of_n", *SCORERS, *PLAYERS]
    about = "listed in the docstring; all: each of them (default: qlass)"
    add("--method", nargs="+", default=["qlass"], choices=names, metavar="NAME", help=about)
    add("-M", nargs="+", type=at_least(1), help=f"candidates a step (default: {PAPER['M']}; with all: 2 4 6)")
    add("-N", nargs="+", type=at_least(1), help=f"trajectories (default: {PAPER['N']}; best_of_n: 4; all: M's)")
    add("--select", choices=["q", "oracle"], default="q", help="which of N counts (default: %(default)s; all: both)")
    add("--split", default="test", help="tasks to play (default: %(default)s)")
    add("--limit", type=at_least(0), default=400, metavar="N", help="tasks (default: %(default)s; 0: all)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave out the first N tasks, say those played before")
    add("--sft", type=Path, help="the agent's checkpoint (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--out", type=Path, help="default: RUN/results.jsonl; lines that it has are not played again")
    add("--label", help="a variant's name, kept in each line")
    add("--temperature", type=at_least(0, float), metavar="T", help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--max-steps", type=at_least(1), metavar="N", help="step limit (default: the environment's)")
    add("--device")
    add_paraphrases(flags)
    add_sampling(flags)
    args = parse(flags, argv, search=True)
    args.M = args.M or (COMPARED if "all" in args.method else [PAPER["M"]])
    args.out = args.out or args.run / "results.jsonl"
    if args.paraphrase is not None or args.paraphrase_server:
        args.label = args.label or "paraphrased"
    return args


def main(
    argv: list[str] | None = None, answers: dict | None = None, inputs: Sequence[Path] = (),
    planned: Callable[..., list[Method]] = plan_of,
) -> None:  # fmt: skip
    """answers, inputs: what else answers requests, and the files that those were made from. planned: as `plan_of`."""
    args = arguments(argv)
    must_exist(args.sft, args.qnet)
    env = envs.from_arguments(args, **({"max_steps": args.max_steps} if args.max_steps else {}))
    every_task = env.task_ids(args.split)
    tasks = every_task[args.skip :][: args.limit or None]
    if not tasks:
        raise UserError(f"{args.env}: no tasks in --split {args.split}, --skip {args.skip}")
    SCORERS["random"] = partial(by_chance, args.seed)
    plan = planned(env, args.method, args.M, args.N, args.select, bool(args.server))

    chat = None
    answers = {} if answers is None else answers
    if any(method.score in READ_Q or method.select == "q" for method in plan):
        args.qnet = find_or_make(args.qnet, args.run / "qnet", "train_qnet", args)
        answers[Score] = load_qnet(args.qnet, args).score
    if any(method.kind not in PLAYERS for method in plan):
        args.sft = find_or_make(args.sft, args.run / "sft", "sft", args)
        policy = load_agent(args, env)
        chat = policy.chat
        answers[Sample] = paraphrased(policy.sample, env, args.paraphrase, args.paraphrase_server)
        answers[Likelihood] = policy.likelihoods

    # The file is of one agent and one QNet, also where the methods of this call need none.
    args.sft, args.qnet = args.sft or args.run / "sft", args.qnet or args.run / "qnet"
    free = ("method", "M", "N", "select", "split", "skip", *SAMPLING_FREE)  # each line says its own
    fields = {"split": args.split, "label": args.label, "seed": args.seed}
    lines = [identity(line_of(env, task, method, fields)) for method in plan for task in tasks]
    out = Output(args.out, vars(args), len, [args.sft, args.qnet, *inputs], free, identity, lines)
    search(env, my_share(tasks), plan, answers, chat, out, fields, args.in_flight or env.side_by_side)

    methods = list(dict.fromkeys(identity(line)[1:] for line in out.records))  # as they were first played
    rank = {task_id: n for n, task_id in enumerate(every_task)}
    leaked = leaks(env, out.records, args)
    out.finish(lambda line: (methods.index(identity(line)[1:]), rank.get(line["task_id"], 0)), leaks=leaked)


if __name__ == "__main__":
    run_stage(main)
