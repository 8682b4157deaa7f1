"""Retry: trials of a task until one is good enough; with --server Reflexion (arXiv 2303.11366), a plan between two.

    python -m experiments.retry --env webshop -N 4 --stop oracle 0.9

--stop oracle ends at the first trial of reward 1; --stop 0.9 where QNet's value of the last action is that high. The
best trial counts, by the same judge. Best-of-N is played beside, with the same trials but for the plans: a chat model,
named by --server, plays and writes them, and the last three stand below the instruction.
"""

import argparse
import dataclasses
from collections.abc import Generator
from itertools import product
from typing import Any, NamedTuple

import envs
import q_search
from experiments.compare import Variant, parser, with_search
from q_search import Method, Player, episode
from qlass import results
from qlass.batching import Score
from qlass.flags import run_stage
from qlass.messages import State
from qlass.server import Server

ASK = "\n\nThis attempt has failed. Write in a few sentences what to do otherwise in the next one, and nothing else."
PLANS = "\nYour plans after attempts at this task that failed:\n"


class Reflect(NamedTuple):
    state: State  # of a trial that failed; its last message ends with ASK


@dataclasses.dataclass(frozen=True)
class Retry(Variant):
    stop: float = 1 - 1e-9  # the value at which it stops
    reflect: bool = False


class Trials(Player):
    """Plays best-of-N and, with the same trials, what stops early."""

    def play(self, env: envs.TextEnv, task_id: str, method: Method) -> Generator[Any, Any, dict]:
        """Of `Retry` at most N trials, until one is worth `stop` by its reward or by QNet."""
        if not isinstance(method, Retry):
            return (yield from super().play(env, task_id, method))
        trials, values, questions, plans = [], [], [], []
        instruction = env.instruction
        for number in range(method.N):
            again = plans and episode(env, task_id, method, number, self.chat.rendering)
            trials.append((yield from again or self.shared_episode(env, task_id, method, number)))
            end = trials[-1][-1]
            values.append((yield Score(end.state, (end.action,)))[0] if method.select == "q" else end.reward)
            if values[-1] >= method.stop:
                break
            if method.reflect and number + 1 < method.N:
                questions.append(end.state.then(end.action, end.observation + ASK))
                plans.append((yield Reflect(questions[-1])))
                env.instruct(instruction + PLANS + "\n".join(plans[-3:]))
        outcome = self.outcome(method, trials[values.index(max(values))], trials)
        outcome["tokens"]["prompt"] += sum(len(self.chat.message_tokens(question)[-1]) for question in questions)
        outcome["tokens"]["generated"] += sum(len(self.chat.action(plan, "")) for plan in plans)
        return outcome


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = parser("retry", __doc__, "; -N 4 by default")
    text = "oracle, or a value of QNet's (default: oracle)"
    flags.add_argument("--stop", nargs="+", default=["oracle"], dest="until", help=text)
    return with_search(flags, argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    env, tasks = q_search.environment(args)
    ask = Server(args.server).chat if args.server else None
    plan: list[Method] = []
    for N, stop in product(args.N or [4], args.until):
        select, value = ("oracle", Retry.stop) if stop == "oracle" else ("q", float(stop))
        how = {"N": N, "select": select}
        plan += [Retry("reflexion" if ask else "retry", **how, player=f"stop={stop}", stop=value, reflect=bool(ask))]
        plan += [Method("best_of_n", **how)]
    chat, models = q_search.load(args, env, with_q=any(method.needs_q for method in plan))
    models[Reflect] = lambda requests: [ask(request.state.messages).text for request in requests]
    results.play(args, env, tasks, list(dict.fromkeys(plan)), Trials(chat).play, models)


if __name__ == "__main__":
    run_stage(main)
