"""Retry: trials of a task until one is good enough; with --server Reflexion (arXiv 2303.11366), a plan between two.

    python -m experiments.retry --env webshop -N 4 --until oracle 0.9

--until oracle ends at the first trial of reward 1; --until 0.9 where QNet's value of the last action is that high. The
best trial counts, by the same judge. Best-of-N is played beside, with the same trials but for the plans: a chat model,
named by --server, plays and writes them, and the last three stand below the instruction.
"""

import dataclasses
from itertools import product

from tyro.conf import Suppress

import envs
import q_search
from experiments.compare import Variant
from integrations.servers import Remote, Server
from q_search import Episode, Method, episode
from qlass import UserError, results
from qlass.batching import Request, Score
from qlass.chat import Chat
from qlass.messages import State
from qlass.settings import read_settings, run_stage, workload

ASK = "\n\nThis attempt has failed. Write in a few sentences what to do otherwise in the next one, and nothing else."
PLANS = "\nYour plans after attempts at this task that failed:\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config):
    until: tuple[str, ...] = workload(("oracle",))  # oracle, or values of QNet's, at which it stops
    method: Suppress[tuple[str, ...]] = workload(())  # these three are no flags here
    M: Suppress[tuple[int, ...]] = workload(())
    select: Suppress[str] = workload("q")


@dataclasses.dataclass(frozen=True)
class Reflect(Request[str]):
    state: State  # of a trial that failed; its last message ends with ASK


@dataclasses.dataclass(frozen=True)
class Retry(Variant):
    """At most N trials, until one is worth `stop` by its reward or by QNet."""

    stop: float = 1 - 1e-9
    reflect: bool = False  # write a plan between two trials

    async def play(self, env: envs.TextEnv, task_id: str, chat: Chat) -> dict:
        trials: list[Episode] = []
        values: list[float] = []
        questions: list[State] = []
        plans: list[str] = []
        for number in range(self.N):
            trial = await episode(env, task_id, self, number, chat.rendering)
            trials.append(trial)
            end = trial[-1]
            value = end.reward
            if self.select == "q":
                (value,) = await Score(end.state, (end.action,))
            values.append(value)
            if value >= self.stop:
                break
            if self.reflect and number + 1 < self.N:
                if not plans:
                    instruction = env.instruction  # some environments complete it as a task begins
                questions.append(end.state.extended(end.action, end.observation + ASK))
                plans.append(await Reflect(questions[-1]))
                env.instruct(instruction + PLANS + "\n".join(plans[-3:]))
        outcome = self.outcome(chat, trials[results.first_of_best(values)], trials)
        outcome["tokens"]["prompt"] += sum(len(chat.message_tokens(question)[-1]) for question in questions)
        outcome["tokens"]["generated"] += sum(len(chat.action_tokens(plan, "")) for plan in plans)
        return outcome


def plan_of(config: Config) -> list[Method]:
    """Retry, or with a server reflexion, and best-of-N beside it."""
    plan: list[Method] = []
    for N, stop in product(config.N or (4,), config.until):
        try:
            select, value = ("oracle", Retry.stop) if stop == "oracle" else ("q", float(stop))
        except ValueError:
            raise UserError(f"--until {stop}: oracle, or a value of QNet's, is expected") from None
        budget = {"N": N, "select": select}
        name = "reflexion" if config.server else "retry"
        plan.append(Retry(name, **budget, player=f"stop={stop}", stop=value, reflect=bool(config.server)))
        plan.append(Method("best_of_n", **budget))
    return list(dict.fromkeys(plan))


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    search = q_search.Search(config)
    plan = plan_of(config)
    search.load(plan)
    if config.server:
        server = Server(config.server, config.in_flight, config.timeout)
        search.backends[Reflect] = Remote(lambda request: server.text(request.state.messages))
    search.play(plan)


if __name__ == "__main__":
    run_stage(main)
