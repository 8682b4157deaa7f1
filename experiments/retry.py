"""Retry: trials of a task until one is good enough.

    python -m experiments.retry --env webshop -N 4 --stop oracle 0.9

--stop oracle ends at the first trial of reward 1; --stop 0.9 where QNet's value of the last action is that high. The
best trial counts, by the same judge. Best-of-N, which makes all N, is played beside with the same trials. (Reflexion,
arXiv 2303.11366, also writes a plan after a trial that failed, which takes a model that can.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from functools import partial
from itertools import product
from typing import Any

import q_search
from q_search import Method, episode
from qlass import costs
from qlass.cli import run_stage
from qlass.driver import Score


def retry(stop: float, env: Any, task_id: str, method: Method, chat: Any, shared: dict) -> Generator:
    """A task, as `Method.search` has it: at most N trials, until one is worth `stop` by its reward or by QNet."""
    trials, values, started = [], [], time.time()
    for number in range(method.N):
        if (task_id, number) not in shared:
            shared[task_id, number] = yield from episode(env, task_id, method, number, chat.rendering)
        trials.append(shared[task_id, number])
        end = trials[-1][-1]
        values.append((yield Score(end.state, (end.action,)))[0] if method.select == "q" else end.reward)
        if values[-1] >= stop:
            break
    return costs.outcome(chat, method, trials[values.index(max(values))], trials, time.time() - started)


def planned(stops: list[str], Ns: list[int]) -> list[Method]:
    """Retry, and best-of-N beside it."""
    plan = []
    for N, stop in product(Ns, stops):
        select, value = ("oracle", 1 - 1e-9) if stop == "oracle" else ("q", float(stop))
        plan.append(Method(f"retry:stop={stop}", 1, N, select, search=partial(retry, value)))
        plan.append(Method("best_of_n", 1, N, select))
    return list(dict.fromkeys(plan))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser("python -m experiments.retry", description=__doc__.split("\n")[0])
    flags.epilog = "further flags: those of q_search.py; -N 4 by default"
    flags.add_argument("--stop", nargs="+", default=["oracle"], help="oracle, or a value of QNet's (default: oracle)")
    own, rest = flags.parse_known_args(argv)
    return argparse.Namespace(**vars(q_search.arguments(rest)) | vars(own))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    q_search.main(args.argv, planned=lambda env, names, Ms, Ns, *_: planned(args.stop, Ns or [4]))


if __name__ == "__main__":
    run_stage(main)
