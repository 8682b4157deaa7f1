"""Demonstrations: played by the environment's expert, or read from people's files into one layout.

ETO, QLASS and AgentGym publish `conversations` of {"from", "value"}, as a JSON list or as JSON
Lines, perhaps with a `system` text; ours are `messages`. data/README.md shows a line of each.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from environments import WHERE
from environments.rules import splits_of
from qlass import UserError
from qlass.files import records_of, warn, warn_once
from qlass.messages import BEGINS, ENDS, State, replay, without_thinking
from qlass.runs import Output, input_of, meta_of, recipe_of

ROLES = {"human": "user", "gpt": "assistant"}  # theirs and ours
FIRST = {"system": "system", "instruction": "user", "agreement": "assistant"}  # whose first text
TURN = ("role", "from", "content", "value")  # fields of a turn that are read
# Values of other fields that change nothing: they say nothing, or that the turn counts.
AS_IT_IS: tuple = (None, "", [], {}, 1)
CHECK = "thoughts too (python -m reporting.demonstration shows one)"
AGREES = r"(?i)\W*(ok(ay)?|sure|yes|understood|i (understand|will)|got it|certainly|all ?right)\b"


@dataclass(frozen=True)
class Demonstration:
    """A trajectory up to its last action, in the environment's words."""

    task_id: str | None  # None: only its words tell the task
    state: State
    reward: float | None = None
    source: str = "expert"  # "policy": self-training has added a trajectory of the agent's

    def texts(self, speaker: str) -> list[str]:
        return [text for role, text in self.state.messages if role == speaker]

    @property
    def agreed(self) -> int:
        """1 if the agent's first words, "OK" or AgentGym's sentence, are no action yet; else 0."""
        first, *later = self.texts("assistant") or [""]
        if re.search("Thought:|Action:", first) or len(self.texts("user")) < 2:
            return 0
        return int(bool(re.match(AGREES, first)) or any("Action:" in text for text in later))

    @property
    def actions(self) -> list[str]:
        """What the agent wrote after it agreed."""
        return self.texts("assistant")[self.agreed :]

    @property
    def observation(self) -> str:
        """The first one."""
        return self.texts("user")[self.agreed].strip()


def demonstrate(env: Any, task_id: str) -> dict:
    """Play the environment's expert through one task: a line of expert.jsonl."""
    *before, end = replay(env, task_id)
    if not before:
        raise UserError(f"{env.name}: its expert does nothing in task {task_id}")
    state = end.state
    messages = state.dump()[:-1]  # up to the last action
    line = {"task_id": task_id, "env": env.name, "task": state.task, "messages": messages}
    return line | {"reward": end.reward}


def collect(env: Any, path: Path, config: Any) -> None:
    """Write what is missing of a file of demonstrations: the first --n-expert training tasks."""
    recipe = recipe_of(env.settings, {})
    out = Output(path, config, recipe, {}, itemgetter("task_id"), alone=True)
    tasks = env.task_ids("train")
    if config.n_expert:
        n = max(config.n_expert, len(out.groups))  # a file that has more keeps them
        tasks = tasks[:n]
    todo = out.missing(tasks)
    out.grow(([demonstrate(env, task_id)] for task_id in todo), "expert", len(todo))
    out.finish(tasks)


def read(path: Path, env: Any, most: int | None = None) -> list[Demonstration]:
    """The first `most` demonstrations of a file. UserError names FILE:LINE of a bad one."""
    if not path.exists():
        raise UserError(f"{path}: no such file {WHERE}")
    expert = []
    for where, record in itertools.islice(records_of(path), most):
        try:
            expert.append(demonstration(record, env))
        except UserError as error:
            raise UserError(f"{where}: no demonstration: {error} (see data/README.md)") from None
    if not expert:
        raise UserError(f"{path}: holds no demonstration")
    ids = set().union(*splits_of(env).values())
    strangers = sorted({tau.task_id for tau in expert if tau.task_id} - ids)
    if strangers:  # under these ids nothing is found again
        number = f"{len(strangers)}, e.g. {strangers[0]!r}"
        warn(f"{path} has task ids that no split of {env.name} has ({number})")
    if failed := len([tau for tau in expert if tau.reward == 0]):
        warn(f"{path}: {failed} of {len(expert)} demonstrations earned nothing")
    if not any("Action:" in text for tau in expert for text in tau.actions):
        warn(f'{path}: no message has "Action:", so each is an action as a whole, {CHECK}')
    return expert


def demonstration(record: dict, env: Any) -> Demonstration:
    """UserError for a record that can't be cloned and replayed."""
    if record.get("messages") and record.get("conversations"):
        raise UserError("it has messages and conversations: leave one")
    turns = record.get("messages") or record.get("conversations") or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError("messages are no list of objects with role and content")
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    messages = list(map(message, turns))
    messages = messages if messages[:1] == system else system + messages
    state = State.load(messages, record.get("task") or "")
    words = tuple((role, env.in_own_words(text)) for role, text in state.messages)
    task_id = record.get("task_id")
    task_id = env.published_id(record) if task_id is None else task_id
    fields = {name: record[name] for name in ("reward", "source") if name in record}
    read = Demonstration(task_id, State(words, state.task), **fields)
    for text in read.actions or [""]:
        if not without_thinking(text).strip():
            raise UserError(f"the assistant writes {text!r:.40}, which is no action")
    answers = [turn for turn in turns if message(turn)["role"] == "assistant"]
    for turn in answers[read.agreed :]:  # AgentGym says of the agreement that it has no loss
        refuse_marks(turn)
    return read


def refuse_marks(turn: dict) -> None:
    """UserError for a turn that is not to be cloned. Warns of what else it has that is not read."""
    for name, value in turn.items():
        if name in TURN or value in AS_IT_IS:
            continue
        if value == 0:
            advice = "all that the assistant writes is cloned: take the demonstration out"
            raise UserError(f"{name} of a turn is {value}, but {advice}")
        warn_once(f"{name} of the assistant's turns is not read")


def refuse_second_thoughts(expert: list[Demonstration], chat: Any) -> None:
    """UserError for a thought that would be cloned behind one that the chat template has ended."""
    if ENDS.search(chat.template.ask):
        for text in itertools.chain(*(demonstration.actions for demonstration in expert)):
            if mark := BEGINS.search(text):
                ask = chat.template.ask.strip()
                problem = f"a demonstration's {mark[0]} would be cloned behind {ask!r}"
                raise UserError(f"{problem}, which the chat template writes: take it out of them")


def message(turn: dict) -> dict:
    """A turn as {"role", "content"}."""
    if turn.get("tool_calls") or turn.get("function_call"):
        raise UserError("a turn acts by a tool call: write the action into its content, as text")
    role = turn.get("role") or turn.get("from")
    return {"role": ROLES.get(str(role), role), "content": turn.get("content", turn.get("value"))}


def first_messages(env: Any, expert: list[Demonstration]) -> dict[str, str]:
    """System message, instruction and agreement that all demonstrations share, but `env` has not.

    Warns of demonstrations whose first messages a prompt will not have.
    """
    agreed = [tau for tau in expert if tau.agreed]
    if others := len(expert) - len(agreed):
        lack = "begin without an instruction and the agent's OK, which a prompt has at inference"
        warn(f"{others} of {len(expert)} demonstrations {lack}")
    shared = {}
    for name, role in FIRST.items():
        texts = {(tau.texts(role) or [""])[0] for tau in agreed}
        if len(texts) > 1:
            warn(f"their first {name} differs, so a prompt has the environment's own")
        elif texts - {getattr(env, name)}:
            shared[name] = texts.pop()
    return shared


def cloned_from(checkpoint: Path) -> tuple[Path | None, int | None]:
    """The demonstrations that a checkpoint, or the one it was trained from, was cloned from: their
    file (None: there is none), and how many of them were given (None: all)."""
    if start := input_of(checkpoint, "sft"):
        return cloned_from(start)
    return input_of(checkpoint, "expert"), meta_of(checkpoint)["recipe"].get("n_expert")


def by_task(expert: list[Demonstration], env: Any) -> dict[str, Demonstration]:
    """The best demonstration of each task, of equals the first, by the task's id or, without one,
    by its first observation if no other task begins with that."""
    groups: dict[str, list[Demonstration]] = {}
    for tau in expert:
        if tau.source != "policy":
            groups.setdefault(tau.task_id or tau.observation, []).append(tau)
    if not env.unique_tasks:
        groups = {key: taus for key, taus in groups.items() if len(taus) == 1 or taus[0].task_id}
    return {key: max(taus, key=lambda tau: tau.reward or 0) for key, taus in groups.items()}


def first_observation(env: Any, task_id: str) -> str:
    """As of a Demonstration of the task."""
    return State.first(env, *env.reset(options={"task_id": task_id})).observation.strip()


def find_tasks(best: dict[str, Demonstration], env: Any, tasks: list[str]) -> None:
    """Add, for each of the tasks that lacks one, the demonstration that begins with its words."""
    begins = {t: first_observation(env, t) for t in tasks if t not in best}
    best.update({task: best[begin] for task, begin in begins.items() if begin in best})


def cloned_tasks(env: Any, named: Path | None, sft: Path) -> list[str]:
    """The training tasks of the demonstrations, those of the named file or those that the agent
    was cloned from, in the order of env.task_ids. UserError if they are gone, or of other tasks."""
    file, most = (named, None) if named else cloned_from(sft)
    if file is None:
        reason = "its demonstrations are not at hand"
        raise UserError(f"{sft}: {reason}: --expert names them, --tasks new does without")
    order = env.task_ids("train")
    best = by_task(read(file, env, most), env)
    if not set(best) <= set(order):  # else each demonstration has its task's id
        find_tasks(best, env, order)
    cloned = [task for task in order if task in best]
    if not cloned:
        raise UserError(f"{file}: demonstrations of no training task: --tasks new does without")
    return cloned


def demonstrations_for(
    env: Any, tasks: list[str], named: Path | None, sft: Path
) -> tuple[Path | None, dict[str, Demonstration]]:
    """The file of demonstrations, the named one or that which the agent was cloned from, and those
    that it has of these tasks. The environment's expert plays the others."""
    file, most = (named, None) if named else cloned_from(sft)
    if file is None:
        warn(f"{sft}: its demonstrations are not at hand, so the environment's expert plays")
        return None, {}
    best = by_task(read(file, env, most), env)
    ids = {tau.task_id for tau in best.values()}
    if named or None in ids or (ids and ids.isdisjoint(env.task_ids("train"))):
        find_tasks(best, env, tasks)
        matches = len(best.keys() & set(tasks))
        facts = f"{file}: demonstrations of {matches} of {len(tasks)} tasks"
        if named and not matches:
            raise UserError(f"{facts}: --no-expert does without")
        print(f"{facts}; the environment's expert plays others")
    return file, best


def failures(records: list[dict], demonstrations: dict[str, Demonstration]) -> dict[str, int]:
    """How many demonstrations trees hold, and how many earned 0, or not what is recorded."""
    ends = {n["task_id"]: n["reward"] for n in records if n["expert"]}  # the last node counts
    recorded = {task: tau.reward for task, tau in demonstrations.items() if tau.reward is not None}
    failed = [t for t, r in ends.items() if r == 0 or abs(recorded.get(t, r) - r) > 1e-3]
    return {"demonstrations": len(ends), "failed_demonstrations": len(failed)}
