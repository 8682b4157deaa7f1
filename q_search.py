"""Stage 5: Q-guided generation (Sec. 4.4, Alg. 4), and the policies that it is compared with.

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: one line per task and method, with each step's candidates and their q

    python q_search.py --env webshop --method qlass -M 2 -N 1
    python q_search.py --env webshop --method all --skip 400 --limit 0    # the comparison of all methods

One loop plays all agents: sample M actions, score them, take the best, step; N times over; keep one trajectory.

    method           M     score of a candidate                         which of N trajectories
    greedy           1     (temperature 0)
    sample           1
    random           -M    a random number
    likeliest        -M    the agent's own log pi(a | s), of the whole text: search without a QNet
    qlass            -M    Q (Alg. 4)                                   --select q | oracle
    best_of_n        1                                                  --select q | oracle
    oracle_step      -M    the true value of the next state             an oracle: see TextEnv.optimal_value
    oracle_lookahead -M    Q, but the true reward where the candidate   an oracle: what the authors' released code does
                           ends the episode
    rule, expert, oracle   the environment's own players: a rule without learning; the expert; an all-knowing one

Only methods named oracle, and --select oracle (the paper's "best of N by final reward"), see the environment's reward.
With --paraphrase, each candidate is sampled under its own wording of the task (App. A.3.2, qlass/paraphrase.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import envs
from qlass import UserError, costs
from qlass.chat import Rendering, State, parse_action, react, uniforms
from qlass.checks import leaks
from qlass.cli import at_least, more, must_exist, my_share, needed, parse, parser, run_stage
from qlass.driver import Candidate, Likelihood, Sample, Score, ask, drive
from qlass.files import SAMPLING_FREE, Output
from qlass.flags import add_loading, add_sampling, load_agent, load_qnet
from qlass.oracles import Scores, by_q_or_reward, by_true_value
from qlass.paraphrase import add_paraphrases, rewording
from qlass.records import complete_results, identity

PAPER = {"M": 2, "N": 1}  # App. A.2
COMPARED = [2, 4, 6]  # M and N of `--method all`
PLAYERS = ("rule", "expert", "oracle")  # the environment's own

# ------------------------------------------------------------------------------------------------------- Algorithm 4


@dataclasses.dataclass(frozen=True)
class Method:
    """A policy: M candidates a step, N trajectories; `select` says which trajectory counts."""

    name: str
    M: int = 1
    N: int = 1
    select: str | None = None  # "q", "oracle"; None: the first
    player: str | None = None  # which of the environment's rules, or of the scorers of experiments/qval
    temperature: float | None = None  # None: the checkpoint's own
    search: Callable[..., Generator] | None = None  # a loop of its own, which plays a task as `play` does

    @property
    def score(self) -> Callable[..., Scores]:
        return SCORERS.get(f"{self.name}:{self.player}" if self.player else self.name, first_drawn)

    def __str__(self) -> str:
        settings = {"M": self.M, "N": self.N, "select": self.select}
        parts = [f"{name}={value}" for name, value in settings.items() if value not in (1, None)]
        return " ".join([self.name, *parts, *([self.player] if self.player else [])])


@dataclasses.dataclass(frozen=True)
class Step:
    """s_t, the M draws, the distinct candidates among them with their scores, the action taken and its answer."""

    state: State
    drawn: list[Candidate]
    candidates: list[str]
    scores: list[float]
    action: str
    observation: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
    steps: list[Step]
    reward: float
    seconds: float


def episode(env: envs.TextEnv, task_id: str, method: Method, trial: int, rendering: Rendering) -> Generator:
    """One trajectory (Alg. 4, lines 3-10). Yields requests, returns a Trajectory."""
    started = time.time()
    observation, info = env.reset(options={"task_id": task_id})
    state = State.first(env, observation, info)  # Alg. 4, line 3
    steps: list[Step] = []
    reward, done = 0.0, False
    while not done:  # Alg. 4, line 4
        key = (task_id, trial, len(steps))  # without the method: every method gets the same random numbers
        drawn = yield ask(env, state, method.M, key, rendering, method.temperature)  # lines 5-6: a ~ pi(a | s)
        candidates = distinct(candidate.text for candidate in drawn)
        scores = yield from method.score(env, state, candidates, key)  # line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # line 8: argmax_a Q(s, a)
        observation, reward, terminated, truncated, _ = env.step(parse_action(action))  # line 9
        observation = env.message(observation)
        steps.append(Step(state, drawn, candidates, scores, action, observation))
        state = state.then(action, observation)  # line 10
        done = terminated or truncated
    return Trajectory(steps, float(reward), time.time() - started)


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
    for trial in range(method.N):  # Alg. 4, lines 1-2
        if (task_id, trial) not in played:
            played[task_id, trial] = yield from episode(env, task_id, method, trial, rendering)
    trials = [played[task_id, trial] for trial in range(method.N)]
    if method.select == "q":  # line 11; the last action's Q speaks for the trajectory
        values = yield [Score(trial.steps[-1].state, (trial.steps[-1].action,)) for trial in trials]
    elif method.select == "oracle":
        values = [trial.reward for trial in trials]
    else:
        values = [0.0]
    return trials[values.index(max(values))], trials


# ------------------------------------------------------------------------------------------ scores of the M candidates


def by_q(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Q(s, a)."""
    return (yield Score(state, tuple(candidates)))


def by_likelihood(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """log pi(a | s) as if written freely, also where it was drawn among the valid actions."""
    return (yield Likelihood(state, tuple(candidates)))


def by_chance(seed: int) -> Callable[..., Scores]:
    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        yield from ()
        return list(uniforms(len(candidates), "random", seed, *key))

    return scores


def first_drawn(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """No opinion: the first candidate is taken."""
    yield from ()
    return [math.nan] * len(candidates)


SCORERS: dict[str, Callable[..., Scores]] = {  # by method; experiments/qval adds "scorer:NAME"
    "random": by_chance(0),
    "likeliest": by_likelihood,
    "qlass": by_q,
    "oracle_step": by_true_value,
    "oracle_lookahead": by_q_or_reward,
}
READ_Q = {by_q, by_q_or_reward}  # scorers that QNet answers
STEP_EACH = {by_true_value, by_q_or_reward}  # scorers that step every candidate, which costs environment steps


def read_by_qnet(method: Method, step: Step) -> list[str]:
    """The actions of a step that QNet reads: all candidates or, of a trajectory that it judges, the one taken."""
    if method.score in READ_Q:
        return step.candidates
    return [step.action] if method.select == "q" else []


# ------------------------------------------------------------------------------------------------- playing the methods


def play(env: envs.TextEnv, task_id: str, method: Method, chat: Any, shared: dict) -> Generator:
    """One task by one method: most of a line of results.jsonl."""
    if method.name in PLAYERS:
        fields = by_player(env, task_id, method)
    elif method.search:
        fields = yield from method.search(env, task_id, method, chat, shared)
    else:
        best, trials = yield from best_of(env, task_id, method, chat.rendering, shared)
        fields = costs.line(chat, trials, best, lambda step: read_by_qnet(method, step), method.score in STEP_EACH)
    env.close()
    return fields


def by_player(env: envs.TextEnv, task_id: str, method: Method) -> dict:
    """An episode of one of the environment's own players."""
    started = time.time()
    _, info = env.reset(options={"task_id": task_id})
    reward, steps = 0.0, []
    player = env.rules()[method.player]() if method.player else getattr(env, method.name)(task_id)
    for thought, action in player:
        observation, reward, terminated, truncated, _ = env.step(action)
        steps.append({"action": react(thought, action), "observation": env.message(observation), "candidates": []})
        if terminated or truncated:
            break
    return costs.result(info["task"], float(reward), steps, costs.NONE, len(steps), 1, time.time() - started)


def search(
    env: envs.TextEnv, tasks: list[str], plan: list[Method], answers: dict, chat: Any, out: Output, fields: dict,
    side_by_side: int, reword: Callable[[Method], Callable] | None = None,
) -> None:  # fmt: skip
    """Play the methods of a plan on the tasks, a line of `out` for each; lines that it has are not played again.

    fields: what every line says (split, label, seed). reword(method): what answers Sample with wordings of the method's
    own (qlass/paraphrase.py).
    """
    finished = {identity(record): record for record in out.records}
    shared: dict[tuple[str, int], Trajectory] = {}
    for method in plan:
        settings = {"env": env.name, "split": fields["split"], "label": fields["label"], "method": method.name}
        settings |= {"M": method.M, "N": method.N, "select": method.select, "player": method.player}
        settings["seed"] = fields["seed"]
        lines = {t: {"task_id": t, "type": env.task_type(t), "block": env.block(t), **settings} for t in tasks}
        todo = [t for t in tasks if identity(lines[t]) not in finished]
        if reword:
            answers[Sample] = reword(method)
            shared.clear()

        def line(task_id: str, method: Method = method, lines: dict = lines) -> Generator:
            return [lines[task_id] | (yield from play(env.fork(), task_id, method, chat, shared))]

        out.grow(drive(map(line, todo), answers, side_by_side), str(method), len(lines), len(lines) - len(todo))
        finished |= {identity(record): record for record in out.records}
        records = [finished[identity(line)] for line in lines.values()]
        reward = sum(record["reward"] for record in records) / len(records)
        cut = sum(record.get("cut_prompts", 0) for record in records)
        note = f"; {cut} prompts lost their oldest turns" if cut else ""
        print(f"{method}: mean reward {reward:.3f} over {len(records)} {fields['split']} tasks{note}", flush=True)


def in_order(records: list[dict], tasks: list[str]) -> Callable[[dict], tuple]:
    """Sorts results: methods as they were first played, tasks as in the split."""
    place = {kind: n for n, kind in enumerate(dict.fromkeys(identity(record)[1:] for record in records))}
    rank = {task: n for n, task in enumerate(tasks)}
    return lambda record: (place[identity(record)[1:]], rank.get(record["task_id"], 0))


# --------------------------------------------------------------------------------------------------------------- main


def plan_of(
    env: envs.TextEnv, names: list[str], Ms: list[int], Ns: list[int] | None, select: str, server: bool
) -> list[Method]:
    """The methods that the flags name. `all` is the comparison at M = N, so that equal numbers of actions are drawn."""
    rules = [Method("rule", player=name) for name in env.rules()]
    if "rule" in names and not rules:
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    expert = Method("oracle" if env.omniscient else "expert")  # one who knows more than the pages is an oracle
    greedy = Method("greedy", temperature=0.0)
    plan: list[Method] = []
    for name in names:
        if name == "all":
            plan += [Method("oracle"), expert, *rules, greedy, Method("sample"), Method("random", M=max(Ms))]
            plan += [Method("best_of_n", N=n, select=by) for by in ("q", "oracle") for n in Ms]
            plan += [Method("likeliest", M=m) for m in Ms if not server]
            plan += [Method("qlass", M=m) for m in Ms]
            if type(env).optimal_value is not envs.TextEnv.optimal_value:
                plan.append(Method("oracle_step", M=max(Ms)))
        elif name == "best_of_n":
            plan += [Method(name, N=n, select=select) for n in Ns or [4]]
        elif name in SCORERS:  # "scorer:NAME", of experiments/qval: both are told in a line
            method, _, scorer = name.partition(":")
            plan += [Method(method, m, n, select if n > 1 else None, scorer or None) for m in Ms for n in Ns or [1]]
        else:
            plan += {"rule": rules, "expert": [expert], "greedy": [greedy]}.get(name, [Method(name)])
    return list(dict.fromkeys(plan))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, epilog="App. A.2: M = 2 and N = 1 on WebShop.")
    envs.add_arguments(flags, argv)
    add = flags.add_argument
    names = ["all", "greedy", "sample", "best_of_n", *SCORERS, *PLAYERS]
    add("--method", nargs="+", default=["qlass"], choices=names, metavar="NAME", help=", ".join(names))
    add("-M", nargs="+", type=at_least(1), help=f"candidates a step (default: {PAPER['M']}; with all: 2 4 6)")
    add("-N", nargs="+", type=at_least(1), help=f"trajectories (default: {PAPER['N']}; best_of_n: 4; all: M's)")
    add("--select", choices=["q", "oracle"], default="q", help="which of N counts (default: %(default)s; all: both)")
    add("--split", default="test", help="tasks to play (default: %(default)s)")
    add("--limit", type=at_least(0), default=400, metavar="N", help="tasks (default: %(default)s; 0: all)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave out the first N tasks, say those played before")
    add("--sft", type=Path, help="the agent's checkpoint (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--readout", choices=["last", "mean"], help="how an action's values become one (default: QNet's)")
    add("--out", type=Path, help="default: RUN/results.jsonl; lines that it has are not played again")
    add("--label", help="a variant's name, kept in each line")
    add("--temperature", type=at_least(0, float), metavar="T", help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--max-steps", type=at_least(1), metavar="N", help="step limit (default: the environment's)")
    add("--device")
    more(flags, add_paraphrases, add_loading, add_sampling)
    args = parse(flags, argv)
    args.M = args.M or (COMPARED if "all" in args.method else [PAPER["M"]])
    args.out = args.out or args.run / "results.jsonl"
    if args.paraphrase is not None or args.paraphrase_server:
        args.paraphrase = args.paraphrase or 0
        args.label = args.label or "paraphrased"
    return args


def main(
    argv: list[str] | None = None, answers: dict | None = None, inputs: Sequence[Path] = (),
    planned: Callable[..., list[Method]] = plan_of,
) -> None:  # fmt: skip
    """answers, inputs: what else answers requests, and the files that those were made from. planned: as `plan_of`."""
    args = arguments(argv)
    env = envs.from_arguments(args, **({"max_steps": args.max_steps} if args.max_steps else {}))
    must_exist(args.sft, args.qnet)
    tasks = env.task_ids(args.split)[args.skip :][: args.limit or None]
    if not tasks:
        raise UserError(f"{args.env}: no tasks in --split {args.split}, --skip {args.skip}")
    SCORERS["random"] = by_chance(args.seed)
    plan = planned(env, args.method, args.M, args.N, args.select, bool(args.server))

    answers = {} if answers is None else answers
    policy = qnet = None
    if any(method.score in READ_Q or method.select == "q" for method in plan):
        args.qnet = needed(args.qnet, args.run / "qnet", "train_qnet", args)
        qnet = load_qnet(args.qnet, args)
        answers[Score] = qnet.score
    if any(method.name not in PLAYERS for method in plan):
        args.sft = needed(args.sft, args.run / "sft", "sft", args)
        policy = load_agent(args, env)
        answers |= {Sample: policy.sample, Likelihood: policy.likelihoods}
    reword = rewording(policy, env, args.paraphrase, args.paraphrase_server)

    # The file is of one agent and one QNet, also where the methods of this call need none.
    args.sft, args.qnet = args.sft or args.run / "sft", args.qnet or args.run / "qnet"
    free = ("method", "M", "N", "select", "split", "skip", *SAMPLING_FREE)  # each line says its own
    out = Output(args.out, vars(args), complete_results, [args.sft, args.qnet, *inputs], free, identity)
    begun = bool(out.records)
    learned = {"demonstrations": args.sft if policy else None, "trees": args.qnet if qnet else None}
    out.figures["leaks"] = leaks(env, tasks, learned, vars(args), out.earlier.get("leaks", {}))
    fields = {"split": args.split, "label": args.label, "seed": args.seed}
    search(env, my_share(tasks), plan, answers, policy and policy.chat, out, fields,
           args.in_flight or env.side_by_side, reword)  # fmt: skip

    out.join()
    # Of one call that wrote all: what another process or an earlier call computed is not known.
    computed = {"policy": policy.computed if policy else 0, "qnet": qnet.computed if qnet else 0}
    computed = None if begun or out.world > 1 else computed
    out.finish(in_order(out.records, env.task_ids(args.split)), computed_tokens=computed)


if __name__ == "__main__":
    run_stage(main)
