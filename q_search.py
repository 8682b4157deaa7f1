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
    scorer           -M    by --scorer, of experiments/qval; ties at random. The scorer's own tokens are not counted
    rule, expert, oracle   the environment's own players: a rule without learning; the demonstrator; an all-knowing one

Only methods named oracle, and --select oracle (the paper's "best of N by final reward"), see the environment's reward.
With --paraphrase, each candidate is sampled under its own wording of the task (App. A.3.2, qlass/paraphrase.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
import time
from collections.abc import Callable, Generator
from itertools import product
from pathlib import Path

import envs
from qlass import UserError, costs
from qlass.chat import PROMPTED, Chat, Rendering, State, parse_action, react, uniforms
from qlass.checks import leaked, learned_from
from qlass.cli import Output, at_least, more, must_exist, my_share, needed, parse, parser, run_stage
from qlass.driver import Candidate, Likelihood, Sample, Score, ask, drive
from qlass.files import SAMPLING_FREE, complete_results, identity
from qlass.models import add_loading
from qlass.oracles import Scores, by_q_or_reward, by_true_value
from qlass.paraphrase import Paraphrased, Server, add_paraphrases, by_rules
from qlass.policy import add_sampling, load_agent, rendering_of
from qlass.qnet import QNet

PAPER = {"M": 2, "N": 1}  # App. A.2
COMPARED = [2, 4, 6]  # M and N of `--method all`
PLAYERS = ("rule", "expert", "oracle")  # the environment's own

# ------------------------------------------------------------------------------------------------ scoring M candidates


@dataclasses.dataclass(frozen=True)
class Scorer:
    """What orders the distinct candidates of a state, in which `env` stands."""

    scores: Callable[[envs.TextEnv, State, list[str], tuple], Scores]
    uses_q: bool = False
    steps_all: bool = False  # it looks at the next state of each


def by_q(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """Q(s, a)."""
    return (yield Score(state, tuple(candidates)))


def at_random(seed: int) -> Callable[..., Scores]:
    def scores(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
        yield from ()
        return list(uniforms(len(candidates), "random", seed, *key))

    return scores


def by_likelihood(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """log pi(a | s) as if written freely, also where it was drawn among the valid actions."""
    return (yield Likelihood(state, tuple(candidates)))


def alike(env: envs.TextEnv, state: State, candidates: list[str], key: tuple) -> Scores:
    """No opinion: the first candidate is taken."""
    yield from ()
    return [math.nan] * len(candidates)


SCORERS = {
    "random": Scorer(at_random(0)),
    "likeliest": Scorer(by_likelihood),
    "qlass": Scorer(by_q, uses_q=True),
    "oracle_step": Scorer(by_true_value, steps_all=True),
    "oracle_lookahead": Scorer(by_q_or_reward, uses_q=True, steps_all=True),
}

# ------------------------------------------------------------------------------------------------------- Algorithm 4


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the policies compared: -M candidates a step, -N trajectories; `select` says which trajectory counts."""

    name: str
    M: int = 1
    N: int = 1
    select: str | None = None
    player: str | None = None  # of the environment, or --scorer, by its name
    by: Scorer | None = None  # what --scorer names

    @property
    def scorer(self) -> Scorer:
        return self.by or SCORERS.get(self.name) or Scorer(alike)

    def scored(self, step: Step) -> list[str]:
        """The actions of a step that QNet reads: the candidates, or of a trajectory that it judges the one taken."""
        return step.candidates if self.scorer.uses_q else [step.action] if self.select == "q" else []

    def __str__(self) -> str:
        parts = {"M": self.M, "N": self.N, "select": self.select}
        said = (f"{k}={v}" for k, v in parts.items() if v not in (1, None))
        return " ".join([self.name, *said, *([self.player] if self.player else [])])


@dataclasses.dataclass(frozen=True)
class Step:
    """s_t, the M draws, the distinct ones among them with their scores, and the action taken with its answer."""

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
    started, (observation, info) = time.time(), env.reset(options={"task_id": task_id})
    state, steps, reward, done = State.first(env, observation, info), [], 0.0, False  # Alg. 4, line 3
    temperature = 0.0 if method.name == "greedy" else None  # None: the checkpoint's own
    while not done:  # Alg. 4, line 4
        key = (task_id, trial, len(steps))  # not the method: all have the same luck
        drawn = yield ask(env, state, method.M, key, rendering, temperature)  # Alg. 4, lines 5-6: a ~ pi(a | s)
        candidates = distinct([candidate.text for candidate in drawn])
        scores = yield from method.scorer.scores(env, state, candidates, key)  # Alg. 4, line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # Alg. 4, line 8: argmax_a
        observation, reward, terminated, truncated, _ = env.step(parse_action(action))  # Alg. 4, line 9
        steps.append(Step(state, drawn, candidates, scores, action, env.message(observation)))
        state, done = state.then(action, env.message(observation)), terminated or truncated  # Alg. 4, line 10
    return Trajectory(steps, float(reward), time.time() - started)


def distinct(actions: list[str]) -> list[str]:
    """The first of each group of actions that are the same to the environment."""
    first: dict[str, str] = {}
    for action in actions:
        first.setdefault(parse_action(action), action)
    return list(first.values())


def best_of(env: envs.TextEnv, task_id: str, method: Method, chat: Chat, sampled: dict | None = None) -> Generator:
    """N trajectories, of which one counts (Alg. 4, lines 1-2 and 11). Returns most of a line of results.jsonl."""
    known: dict = sampled if sampled is not None and method.name in ("sample", "best_of_n") else {}
    for trial in range(method.N):  # Alg. 4, lines 1-2
        if (task_id, trial) not in known:
            known[task_id, trial] = yield from episode(env, task_id, method, trial, chat.rendering)
    env.close()
    trials = [known[task_id, trial] for trial in range(method.N)]
    started = time.time() - sum(trial.seconds for trial in trials)
    best = trials[0]  # Alg. 4, line 11
    if method.select == "oracle":
        best = max(trials, key=lambda trial: trial.reward)
    elif method.select == "q":  # the last action's value speaks for the trajectory
        values = yield [Score(trial.steps[-1].state, (trial.steps[-1].action,)) for trial in trials]
        best = trials[values.index(max(values))]
    return costs.line(chat, trials, best, method.scored, method.scorer.steps_all, time.time() - started)


def played(env: envs.TextEnv, task_id: str, method: Method) -> dict:
    """An episode of one of the environment's own players, as a line of results.jsonl."""
    started, steps, reward = time.time(), [], 0.0
    _, info = env.reset(options={"task_id": task_id})
    for thought, action in env.rules()[method.player]() if method.player else getattr(env, method.name)(task_id):
        observation, reward, terminated, truncated, _ = env.step(action)
        steps.append({"action": react(thought, action), "observation": env.message(observation), "candidates": []})
        if terminated or truncated:
            break
    env.close()
    return costs.result(info["task"], float(reward), steps, costs.NONE, len(steps), 1, time.time() - started)


# --------------------------------------------------------------------------------------------------------------- main


def methods(args: argparse.Namespace, env: envs.TextEnv, scorers: dict[str, Scorer]) -> list[Method]:
    """What the flags ask for. `all` is the comparison at M = N, so that equal numbers of actions are sampled."""
    chosen, rules = [], [Method("rule", player=name) for name in env.rules()]
    if "rule" in args.method and not rules:
        raise UserError(f"--method rule: {env.name} has no rules that play it")
    demonstrator = Method("oracle" if env.omniscient else "expert")  # one who knows more than the pages is an oracle
    for name in args.method:
        if name == "all":
            chosen += [Method("oracle"), demonstrator, *rules, Method("greedy"), Method("sample")]
            some = (Method("best_of_n", N=n, select=select) for select in ("q", "oracle") for n in args.M)
            chosen += [Method("random", M=max(args.M)), *some]
            chosen += [Method("likeliest", M=m) for m in args.M if not args.server]
            chosen += [Method("qlass", M=m) for m in args.M]
            if type(env).optimal_value is not envs.TextEnv.optimal_value:
                chosen.append(Method("oracle_step", M=max(args.M)))
        elif name == "best_of_n":
            chosen += [Method(name, N=n, select=args.select) for n in args.N or [4]]
        elif name in (*SCORERS, "scorer"):
            some = product(scorers.items() if name == "scorer" else [(None, None)], args.M, args.N or [1])
            chosen += [Method(name, m, n, args.select if n > 1 else None, *score) for score, m, n in some]
        else:
            chosen += {"rule": rules, "expert": [demonstrator]}.get(name, [Method(name)])
    by_seed = {"random": Scorer(at_random(args.seed))}
    return [dataclasses.replace(m, by=by_seed.get(m.name, m.by)) for m in dict.fromkeys(chosen)]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, epilog="App. A.2: M = 2 and N = 1 on WebShop.")
    envs.add_arguments(made, argv)
    add = made.add_argument
    names = ["all", "greedy", "sample", "best_of_n", *SCORERS, "scorer", *PLAYERS]
    add("--method", nargs="+", default=["qlass"], choices=names, metavar="NAME", help=", ".join(names))
    add("-M", nargs="+", type=at_least(1), help=f"candidates a step (default: {PAPER['M']}; with all: 2 4 6)")
    add("-N", nargs="+", type=at_least(1), help=f"trajectories (default: {PAPER['N']}; best_of_n: 4; all: M's)")
    add("--select", choices=["q", "oracle"], default="q", help="which of N counts (default: %(default)s; all: both)")
    add("--split", default="test", help="tasks to play (default: %(default)s)")
    add("--limit", type=at_least(0), default=400, metavar="N", help="tasks (default: %(default)s; 0: all)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave out the first N tasks, say those played before")
    add("--shard", metavar="I/N", help="play every N-th task from the I-th on; without it, shards are joined")
    add("--sft", type=Path, help="the agent's checkpoint (default: RUN/sft, made if missing)")
    add("--qnet", type=Path, help="default: RUN/qnet, made if missing")
    add("--readout", choices=["last", "mean"], help="how an action's values become one (default: QNet's)")
    add("--out", type=Path, help="default: RUN/results.jsonl; lines that it has are not played again")
    add("--label", help="a variant's name, kept in each line")
    add("--temperature", type=at_least(0, float), metavar="T", help="default: the checkpoint's own (0.7; tiny: 1)")
    add("--max-steps", type=at_least(1), metavar="N", help="step limit (default: the environment's)")
    add("--device")
    said = "what --method scorer searches with: scores of experiments/qval, JUDGE=URL#MODEL (default: all but judges)"
    more(made, lambda made: made.add_argument("--scorer", nargs="+", metavar="NAME", help=said))
    more(made, add_paraphrases, add_loading, add_sampling)
    args = parse(made, argv)
    if args.scorer and "scorer" not in args.method:
        raise UserError("--scorer needs --method scorer")
    args.M = args.M or (COMPARED if "all" in args.method else [PAPER["M"]])
    args.out = args.out or args.run / "results.jsonl"
    if args.paraphrase is not None or args.paraphrase_server:
        args.paraphrase, args.label = args.paraphrase or 0, args.label or "paraphrased"
    return args


def load_qnet(folder: Path, args: argparse.Namespace) -> QNet:
    """A QNet as the flags say (`add_loading`, `add_sampling`); --readout is this script's own."""
    how = args.device, getattr(args, "readout", None), args.load_in, args.plain, rendering_of(folder, args, PROMPTED)
    return QNet.from_pretrained(folder, *how, budget=args.decode_tokens, cache_gb=args.cache_gb)


def prepared(args: argparse.Namespace, env: envs.TextEnv) -> tuple:
    """The methods asked for, what answers their requests, agent and QNet where they need one, the files of --scorer."""
    answers, scorers, made_of, policy, qnet = {}, {}, [], None, None
    if "scorer" in args.method:
        from experiments.qval.steering import steering

        scorers, made_of = steering(args, answers, lambda: policy)
    plan = methods(args, env, scorers)
    if any(method.scorer.uses_q or method.select == "q" for method in plan):
        args.qnet = needed(args.qnet, args.run / "qnet", "train_qnet", args)
        qnet = load_qnet(args.qnet, args)
        answers[Score] = qnet.score
    if any(method.name not in PLAYERS for method in plan):
        args.sft = needed(args.sft, args.run / "sft", "sft", args)
        policy = load_agent(args)
        answers[Sample] = policy.sample
        if args.server and any(method.name == "likeliest" for method in plan):
            raise UserError("--method likeliest: a server does not tell the log-probability of a text: leave one out")
        if not args.server:
            answers[Likelihood] = policy.likelihoods
    return plan, answers, policy, qnet, made_of


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env = envs.from_arguments(args, **({"max_steps": args.max_steps} if args.max_steps else {}))
    must_exist(args.sft, args.qnet)
    tasks = env.task_ids(args.split)[args.skip :][: args.limit or None]
    if not tasks:
        raise UserError(f"{args.env}: no tasks in --split {args.split}, --skip {args.skip}")
    mine = my_share(tasks, args.shard)
    plan, answers, policy, qnet, made_of = prepared(args, env)
    # The file is of one agent and one QNet, also where the methods of this call need none.
    args.sft, args.qnet = args.sft or args.run / "sft", args.qnet or args.run / "qnet"
    free = ("method", "M", "N", "select", "split", "skip", "scorer", *SAMPLING_FREE)  # each line says its own
    out = Output(args, complete_results, [args.sft, args.qnet, *made_of], free, identity)
    finished = {identity(record): record for record in out.records}
    sources = {"demonstrations": args.sft if policy else None, "trees": args.qnet if qnet else None}
    leaks = {name: leaked(env, tasks, learned_from(path, args), name) if path else 0 for name, path in sources.items()}
    out.known["leaks"] = out.with_earlier("leaks", leaks, max)
    sampled: dict[tuple[str, int], Trajectory] = {}  # by the agent alone, of a task and trial
    for method in plan:
        about = {"env": env.name, "split": args.split, "label": args.label, "method": method.name, "M": method.M}
        about |= {"N": method.N, "select": method.select, "player": method.player, "seed": args.seed}
        lines = {t: {"task_id": t, "type": env.task_type(t), "block": env.block(t)} | about for t in mine}
        todo = [t for t in lines if identity(lines[t]) not in finished]
        if args.paraphrase is not None and policy:
            paraphraser = Server(args.paraphrase_server) if args.paraphrase_server else by_rules(env)
            answers[Sample] = Paraphrased(policy.sample, paraphraser, args.paraphrase or method.M * method.N)
            sampled.clear()  # the wordings are the method's own

        def play(task_id: str, method: Method = method, lines: dict = lines) -> Generator:
            if method.name in PLAYERS:
                return [lines[task_id] | played(env.fork(), task_id, method)]
            return [lines[task_id] | (yield from best_of(env.fork(), task_id, method, policy.chat, sampled))]

        rows = drive(map(play, todo), answers, args.in_flight or env.side_by_side)
        out.grow(rows, str(method), len(lines), len(lines) - len(todo))
        finished |= {identity(record): record for record in out.records}
        rows = [finished[identity(line)] for line in lines.values()]
        reward, cut = sum(r["reward"] for r in rows) / len(rows), sum(r.get("cut_prompts", 0) for r in rows)
        said = f"; {cut} prompts lost their oldest turns" if cut else ""
        print(f"{method}: mean reward {reward:.3f} over {len(rows)} {args.split} tasks{said}", flush=True)
    place = {kind: n for n, kind in enumerate(dict.fromkeys(identity(record)[1:] for record in out.records))}
    rank = {task: n for n, task in enumerate(env.task_ids(args.split))}
    computed = {"policy": policy.computed if policy else 0, "qnet": qnet.reader.computed if qnet else 0}
    computed = out.with_earlier("computed_tokens", computed, operator.add, stopped=None)
    out.finish(lambda r: (place[identity(r)[1:]], rank.get(r["task_id"], 0)), computed_tokens=computed)


if __name__ == "__main__":
    run_stage(main)
