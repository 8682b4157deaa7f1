"""Stage 5: Q-guided generation (Sec. 4.4, Alg. 4), and other ways to act.

    reads   RUN/sft/ (the agent), RUN/qnet/ (where a method asks for Q)
    writes  RUN/results.jsonl: a line per task and method, each step's candidates with their scores

    python q_search.py --env webshop --method qlass -M 2 -N 1

One loop plays all methods: sample M actions, score them, take the best, step. It plays N episodes,
of which one counts.

    method     M   N   score of a candidate
    greedy     1   1   (temperature 0)
    sample     1   1
    best_of_n  1   N
    random     M   N   a random number
    likeliest  M   N   log pi(a | s) as the agent draws it: search without a QNet
    qlass      M   N   Q(s, a)

-M and -N set M and N of all methods that have them.
Of N episodes --select takes one, by Q or, as the paper does, by the final reward ("oracle").
Nothing else here sees the reward. `python -m reporting.show` shows an episode with its choices, and
`python -m experiments.compare` plays all methods.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import envs
from environments.replay import play_again, recognise, turns_of
from qlass import UserError, outputs, results
from qlass.batching import Backends, Candidate, Sample, Score, ask, drive
from qlass.chat import Chat, Rendering
from qlass.files import Inputs
from qlass.inputs import find_agent, find_or_make
from qlass.messages import State, parse_action, start, step
from qlass.noise import uniforms
from qlass.settings import (
    NonNegativeInt,
    PositiveInt,
    Sampling,
    arg,
    place,
    read_settings,
    run_stage,
    workload,
)

METHODS = {  # what scores the candidates of each
    "greedy": None,
    "sample": None,
    "best_of_n": None,
    "random": "chance",
    "likeliest": "likelihood",
    "qlass": "q",
}
Name: Any = Literal[tuple(METHODS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Sampling):
    """The settings of search. M is the paper's (Table 5), which does not say N; its Algorithm 4
    selects by the final reward."""

    stage: ClassVar = "q_search"
    output: ClassVar = "results.jsonl"
    extends_options: ClassVar = True

    method: tuple[Name, ...] = workload(("qlass",))  # one or more
    # candidates per step
    M: Annotated[tuple[PositiveInt, ...], arg(aliases=["-M"])] = workload((2,))
    # episodes (1; best_of_n: 4)
    N: Annotated[tuple[PositiveInt, ...], arg(aliases=["-N"])] = workload(())
    select: Literal["q", "oracle"] = workload("q")  # which of N episodes counts
    split: str = workload()  # tasks to play
    limit: NonNegativeInt = workload(0)  # number of tasks (0: all)
    skip: NonNegativeInt = workload(0)  # leave out the first tasks
    sft: Path | None = place(None)  # the agent's checkpoint (RUN/sft, made if missing)
    qnet: str | None = place(None)  # folder, or URL#MODEL of a server (RUN/qnet)
    out: Path | None = place(None)  # RUN/results.jsonl; its lines are not played again
    label: str | None = None  # a variant's name, kept in each line
    max_steps: PositiveInt | None = None  # step limit of an episode (the environment's)


# ------------------------------------------------------------------------------------- an episode


@dataclasses.dataclass(frozen=True)
class Step:
    """Lines 5 to 9 of Algorithm 4."""

    state: State  # s_t
    samples: Sequence[Candidate]  # of the agent: M, or more where a method draws again
    candidates: list[str]  # the distinct actions among them, M at most
    scores: list[float]  # of the candidates; nan where nothing scores them
    action: str  # the one taken
    observation: str  # what it led to
    reward: float
    is_valid: bool = True  # the environment acts on it


Episode = list[Step]

# -------------------------------------------------------------------------------------- the methods


@dataclasses.dataclass(frozen=True)
class Method:
    """Each step draws M candidates and takes the one with the highest score. `select` picks one of
    N episodes."""

    name: str
    by: str | None = None  # what scores candidates: "q", "likelihood", "chance"
    M: int = 1
    N: int = 1
    select: str | None = None  # "q", "oracle"; None: the first episode
    temperature: float | None = None  # None: --temperature, or the checkpoint's own
    seed: int = 0  # of chance

    replays: ClassVar[bool] = True  # its actions lead to the same in an episode of their own

    async def play(self, env: envs.TextEnv, task_id: str, chat: Chat) -> dict:
        """Algorithm 4. Returns the outcome, as a result line tells it."""
        episodes = [  # lines 1-2
            await episode(env, task_id, self, trial, chat.rendering) for trial in range(self.N)
        ]
        best = await choose_episode(episodes, self.select)  # line 11
        return self.outcome(chat, best, episodes)

    def outcome(self, chat: Chat, best: Episode, episodes: list[Episode]) -> dict:
        """Return the fields of a result line; `best` is the episode that counts."""
        return results.describe(best, episodes, results.costs_of(chat, episodes, self.read_by_qnet))

    async def draw(
        self, env: envs.TextEnv, state: State, key: tuple, rendering: Rendering
    ) -> list[Candidate]:
        """M samples of the agent."""
        return await ask(env, state, self.M, key, rendering, self.temperature)

    async def scores(
        self, state: State, actions: list[str], samples: Sequence[Candidate], key: tuple
    ) -> list[float]:
        """The score of each distinct action of step `key` (task, episode, step)."""
        if self.by == "q":
            return await Score(state, tuple(actions))  # Q(s, a), by QNet
        if self.by == "likelihood":  # log pi(a | s) of its first sample
            logprobs = {sample.text: sample.logprob for sample in reversed(samples)}
            return [logprobs[action] for action in actions]
        if self.by == "chance":
            return list(uniforms(len(actions), "random", self.seed, *key))
        return [math.nan] * len(actions)  # null in the file: the first is taken

    @property
    def needs_q(self) -> bool:
        return "q" in (self.by, self.select)

    def settings(self) -> dict:
        """The fields of a result line that tell methods apart. One without a value is empty text:
        readers of tables expect one type of a field."""
        select = self.select or ""
        return {"method": self.name, "M": self.M, "N": self.N, "select": select, "player": ""}

    def read_by_qnet(self, step: Step) -> list[str]:
        """The actions of a step whose tokens QNet has read."""
        if self.by == "q":
            return step.candidates
        return [step.action] if self.select == "q" else []

    def __str__(self) -> str:
        fields = {"M": self.M, "N": self.N, "select": self.select}
        shown = [f"{name}={value}" for name, value in fields.items() if value not in (1, None)]
        return " ".join([self.name, *shown])


def methods_of(name: str, config: Config) -> list[Method]:
    """The methods of a name, with every -M and -N that it has."""
    if name == "greedy":
        return [Method("greedy", temperature=0.0)]
    by = METHODS[name]
    Ms = config.M if by else (1,)  # one action needs no score
    Ns = config.N or ((4,) if name == "best_of_n" else (1,))
    if name == "sample":
        Ns = (1,)
    return [
        Method(name, by, m, n, config.select if n > 1 else None, seed=config.seed)
        for m, n in product(Ms, Ns)
    ]


# -------------------------------------------------------------------------------------- Algorithm 4


async def episode(
    env: envs.TextEnv, task_id: str, method: Method, trial: int, rendering: Rendering
) -> Episode:
    """One episode (lines 3-10)."""
    state = start(env, task_id)  # line 3
    steps: Episode = []
    done = False
    while not done:  # line 4
        key = (task_id, trial, len(steps))  # the same for all methods: paired differences
        samples = await method.draw(env, state, key, rendering)  # lines 5-6
        actions = distinct_actions(env, [sample.text for sample in samples])
        candidates = actions[: method.M]  # a method may draw more
        scores = await method.scores(state, candidates, samples, key)  # line 7: Q(s, a)
        action = candidates[scores.index(max(scores))]  # line 8: argmax_a Q(s, a)
        is_valid = recognise(env, action)
        after, reward, done = step(env, state, action)  # line 9
        answer = after.observation
        steps.append(Step(state, samples, candidates, scores, action, answer, reward, is_valid))
        state = after  # line 10
    return steps


def distinct_actions(env: envs.TextEnv, actions: Iterable[str]) -> list[str]:
    """The first of each group of actions that are the same to the environment."""
    first: dict[str, str] = {}
    for action in actions:
        first.setdefault(env.canonical(parse_action(action)), action)
    return list(first.values())


async def choose_episode(episodes: list[Episode], by: str | None) -> Episode:
    """The episode that counts (line 11)."""
    if by is None:
        return episodes[0]
    ends = [steps[-1] for steps in episodes]
    if by == "q":  # the last action's Q speaks for the episode
        values = [(await Score(end.state, (end.action,)))[0] for end in ends]
    else:
        values = [end.reward for end in ends]
    return episodes[results.first_of_best(values)]


# --------------------------------------------------------------------------------------------- main


class Search:
    """The tasks of a command, and the models that play them."""

    def __init__(self, config: Config) -> None:
        self.config, self.env = config, envs.from_config(config)
        self.env.max_steps = config.max_steps or self.env.max_steps
        self.tasks = self.env.task_ids(config.split)[config.skip :][: config.limit or None]
        self.chat: Any = None  # the agent's; None if only the environment's own players play
        self.backends: Backends = {}  # by the type of request that they answer
        self.inputs: Inputs = {}  # the folders that results are made from

    def load(self, plan: Sequence[Any]) -> None:
        """Load the agent and, if a method of the plan needs it, the QNet."""
        config = self.config
        if config.server and any(method.by == "likelihood" for method in plan):
            raise UserError("--method likeliest: a server does not tell the pi(a | s) of its draws")
        sft = self.inputs["sft"] = find_agent(config)
        settings = config.recipe() | self.env.settings
        outputs.recipe_of(config.path, config, settings, self.inputs)  # before a QNet is made
        if any(method.needs_q for method in plan):
            scorer, self.inputs["qnet"] = load_scorer(config)
            self.backends[Score] = scorer.score
        from qlass.agent import load_agent  # not at the top, as --help needs no torch

        agent = load_agent(sft, config, self.env)
        self.chat, self.backends[Sample] = agent.chat, agent.sample

    def play(self, plan: Sequence[Any]) -> None:
        """Play the tasks by each method of the plan, and write a line for each.

        A method needs `settings()` (the fields that identify it), `str()`, and `play(env, task_id,
        chat)`, a coroutine that returns the outcome. Of its new tasks the first five (of a slow
        simulator the first) and one in fifty are played again, from the actions of the episode that
        counts, unless its `replays` is false.
        """
        config, env = self.config, self.env
        settings = config.recipe() | env.settings
        out = outputs.Output(config.path, config, settings, self.inputs, results.identity)
        self.clock = time.monotonic()
        planned: list[tuple] = []
        for method in plan:
            fields = self.fields(method)
            keys = [results.identity(fields | {"task_id": task_id}) for task_id in self.tasks]
            planned += keys
            todo = out.todo(keys)
            plays = (
                self.play_task(method, task_id, n * env.replay_every < 5 or n % 50 == 0)
                for n, (task_id, *_) in enumerate(todo)
            )
            out.write(drive(plays, self.backends, env.side_by_side), str(method), len(todo))
            rewards = [out.groups[key][0]["reward"] for key in keys if key in out.groups]
            mean = sum(rewards) / max(1, len(rewards))
            print(f"{method}: mean reward {mean:.3f} over {len(rewards)} {config.split} tasks")
        out.finish(planned, protocol=results.protocol(env, self.chat))

    def fields(self, method: Any) -> dict:
        """The fields of a result line that are the same for all tasks."""
        label = self.config.label or ""
        shared = {"env": self.env.name, "split": self.config.split, "label": label}
        return shared | method.settings()

    async def play_task(self, method: Any, task_id: str, again: bool) -> list[dict]:
        """Play a task: its line of results.jsonl. again: also from the actions, to compare."""
        fork = self.env.fork()
        outcome = await method.play(fork, task_id, self.chat)
        fork.close()
        kind, block = self.env.task_type(task_id), self.env.block(task_id)
        line = {"task_id": task_id, "type": kind, "block": block} | self.fields(method)
        line |= {"seed": self.config.seed} | outcome
        # Since the line before: the seconds of a method's lines add up to its play.
        before, self.clock = self.clock, time.monotonic()
        line["seconds"] = round(self.clock - before, 3)
        if again and method.replays:
            play_again(self.env.fork(), task_id, turns_of(outcome))
            self.clock = time.monotonic()
        return [line]


def load_scorer(config: Config) -> tuple[Any, Path]:
    """Return an object whose `score` answers Score requests, and the folder of its QNet."""
    if config.qnet and "://" in config.qnet:
        from qlass.agent import served

        qnet = served().ServedQNet(config.qnet, config)
        return qnet, qnet.folder
    named = Path(config.qnet) if config.qnet else None
    folder = find_or_make(named, "train_qnet", "qnet", config)
    from train_qnet import QNet, scorer

    return scorer(QNet.from_pretrained(folder, config), config.plain, config.cache_gb), folder


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    plan = [method for name in config.method for method in methods_of(name, config)]
    for method in plan:
        if method.N > 1 and method.name != "best_of_n":
            print(f"{method}: {method.N} episodes of each task, as -N is of all methods")
    search = Search(config)
    search.load(plan)
    search.play(plan)


if __name__ == "__main__":
    run_stage(main)
