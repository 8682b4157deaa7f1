"""Retry: trials of a task until one is good enough; with --server Reflexion (arXiv 2303.11366), a plan between two.

    python -m experiments.retry --env webshop -N 4 --stop oracle 0.9

--stop oracle ends at the first trial of reward 1; --stop 0.9 where QNet's value of the last action is that high. The
best trial counts, by the same judge. Best-of-N is played beside, with the same trials but for the plans: a chat model,
named by --server, plays and writes them, and the last three stand below the instruction.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import q_search
from q_search import Method, episode
from qlass import costs
from qlass.chat import State
from qlass.cli import run_stage
from qlass.driver import Score
from qlass.server import Endpoint

ASK = "\n\nThis attempt has failed. Write in a few sentences what to do otherwise in the next one, and nothing else."
PLANS = "\nYour plans after attempts at this task that failed:\n"


class Reflect(NamedTuple):
    state: State  # of a trial that failed; its last message ends with ASK


def retry(stop: float, reflect: bool, env: Any, task_id: str, method: Method, chat: Any, shared: dict) -> Generator:
    """A task, as `Method.search` has it: at most N trials, until one is worth `stop` by its reward or by QNet."""
    trials, values, questions, plans = [], [], [], []
    instruction = env.instruction
    for number in range(method.N):
        played = {} if plans else shared
        if (task_id, number) not in played:
            played[task_id, number] = yield from episode(env, task_id, method, number, chat.rendering)
        trials.append(played[task_id, number])
        end = trials[-1][-1]
        values.append((yield Score(end.state, (end.action,)))[0] if method.select == "q" else end.reward)
        if values[-1] >= stop:
            break
        if reflect and number + 1 < method.N:
            questions.append(end.state.then(end.action, end.observation + ASK))
            plans.append((yield Reflect(questions[-1])))
            env.instruct(instruction + PLANS + "\n".join(plans[-3:]))
    outcome = costs.outcome(chat, method, trials[values.index(max(values))], trials)
    outcome["tokens"]["prompt"] += sum(len(chat.message_tokens(question)[-1]) for question in questions)
    outcome["tokens"]["generated"] += sum(len(chat.action(plan, "")) for plan in plans)
    return outcome


def planned(stops: list[str], Ns: list[int], reflect: bool) -> list[Method]:
    """Retry, and best-of-N beside it."""
    plan = []
    for N, stop in product(Ns, stops):
        select, value = ("oracle", 1 - 1e-9) if stop == "oracle" else ("q", float(stop))
        name = f"{'reflexion' if reflect else 'retry'}:stop={stop}"
        plan += [Method(name, 1, N, select, search=partial(retry, value, reflect)), Method("best_of_n", 1, N, select)]
    return list(dict.fromkeys(plan))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser("python -m experiments.retry", description=__doc__.split("\n")[0])
    flags.epilog = "further flags: those of q_search.py; -N 4 by default"
    flags.add_argument("--stop", nargs="+", default=["oracle"], help="oracle, or a value of QNet's (default: oracle)")
    own, rest = flags.parse_known_args(argv)
    return argparse.Namespace(**vars(q_search.arguments(rest)) | vars(own))


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    chat = Endpoint(args.server).chat if args.server else None
    answers = {Reflect: lambda requests: [chat(request.state.messages) for request in requests]}
    q_search.main(args.argv, answers, planned=lambda env, names, Ms, Ns, *_: planned(args.stop, Ns or [4], bool(chat)))


if __name__ == "__main__":
    run_stage(main)
