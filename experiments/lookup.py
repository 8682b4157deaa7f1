"""The trees themselves as a QNet: a candidate's score is the q that its state and action have there.

    reads   RUN/sft/, RUN/q_labels.jsonl
    writes  RUN/results-lookup.jsonl

    python -m experiments.lookup --env frozenlake -M 4

It shows what QNet adds where test tasks meet the states of the trees, as on FrozenLake's lakes. A state is known by its
last observation: the environment must be Markov. What the trees do not hold has the mean of all q.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

import envs
import q_search
from experiments.compare import refuse_unused
from qlass import UserError
from qlass.batching import Score
from qlass.messages import State, parse_action
from qlass.outputs import find_or_make
from qlass.records import Label
from qlass.settings import read, run_stage, runtime
from qlass.trees import read_trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(q_search.Config):
    out: Path | None = runtime(None)  # RUN/results-lookup.jsonl; its lines are not played again
    labels: Path | None = runtime(None)  # RUN/q_labels.jsonl, made if missing


class LookUp(q_search.Method):
    """QLASS by what the trees hold, for which no model reads a token."""

    async def scores(self, state: State, actions: list[str], key: tuple) -> list[float]:
        return await Score(state, tuple(actions))


def look_up(trees: Iterable[list[dict]], env: envs.TextEnv) -> Callable[[list[Score]], list[list[float]]]:
    """Answers Score requests by the mean q of all nodes of that observation and action."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def key(observation: str, action: str) -> tuple[str, str]:
        return observation.removeprefix(env.prefix).strip(), env.canonical(parse_action(action))

    for tree in trees:
        seen = {node["node_id"]: node["observation"] for node in tree}
        for node in tree[1:]:
            values[key(seen[node["parent_id"]], node["action"])].append(node["q"])
    means = {pair: fmean(q) for pair, q in values.items()}
    other = fmean(q for qs in values.values() for q in qs)
    return lambda requests: [[means.get(key(r.state.observation, a), other) for a in r.actions] for r in requests]


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    refuse_unused(config, "method", "N", "select", "distinct")
    config = dataclasses.replace(config, out=config.out or config.run / "results-lookup.jsonl")
    env, tasks = q_search.environment(config)
    if not env.markov:
        raise UserError(f"{env.name}: its observations do not tell the state, so that nothing can be looked up")
    labels = find_or_make(config.labels, "bellman", "q_labels.jsonl", config)
    chat, models, inputs = q_search.load(config, env, with_q=False)
    models[Score] = look_up(read_trees(labels, Label), env)
    plan = [LookUp("lookup", "trees", M) for M in config.M]
    q_search.evaluate(config, env, tasks, plan, chat, models, inputs | {"labels": labels})


if __name__ == "__main__":
    run_stage(main)
