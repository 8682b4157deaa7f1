"""Episodes played once more from their actions: in a fork, from the task's start, without a snapshot.

Trees and results rely on `restore` and `fork`, which each environment writes itself, and demonstrations come from
anywhere. Here they meet an episode that relies on nothing.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qlass import UserError
from qlass.demonstrations import Demonstration
from qlass.environment import TextEnv
from qlass.files import warn
from qlass.messages import parse_action, replay, start, step

FIRST = 20  # of an agent's actions, among which the environment should know one


class Turn(NamedTuple):
    """An action (None: the task's start), the message that it led to, its reward, and whether the episode was over.

    An episode whose last turn is not over was stopped there.
    """

    action: str | None
    page: str
    reward: float = 0.0
    done: bool = False

    def __str__(self) -> str:
        return f"{self.page} [reward {self.reward:.9g}, end: {self.done}]"


def turns_of(outcome: dict) -> list[Turn]:
    """The turns of a line of results.jsonl, of which the last ended the episode."""
    *turns, last = (Turn(step["action"], step["observation"]) for step in outcome["steps"])
    return [*turns, last._replace(reward=outcome["reward"], done=True)]


def play_again(fork: TextEnv, task_id: str, turns: Sequence[Turn], unlimited: bool = False) -> None:
    """Play an episode once more. UserError if it goes otherwise. The fork is closed.

    unlimited: without the environment's limit of steps, as in a tree, which has its own.
    """
    state, reward, done = start(fork, task_id), 0.0, False
    fork.forget()
    if unlimited:
        fork.max_steps = None
    for turn in turns:
        if turn.action is not None:
            state, reward, done = step(fork, state, turn.action)
        if turn is turns[-1] and not done:
            reward = fork.reward_if_cut()
        answer = Turn(turn.action, state.observation, reward, done)
        if str(answer) != str(turn):
            words = "its start" if turn.action is None else repr(parse_action(turn.action)[:60])
            raise UserError(
                f"{fork.name}: task {task_id}: {words} leads in an episode of its own to"
                f" {difference(str(answer), str(turn))}: what follows on restore, or in a fork, must be the same"
                " (docs/environment.md)"
            )
    fork.close()


def difference(answer: str, expected: str) -> str:
    """Show 60 letters of both texts, from shortly before the first that differs."""
    begin = max(0, len(os.path.commonprefix([answer, expected])) - 30)  # noqa: RUF071
    return f"{answer[begin:][:60]!r} in place of {expected[begin:][:60]!r}"


def refuse_openings(expert: list[Demonstration], env: TextEnv) -> None:
    """UserError unless demonstrations begin with one instruction and agreement or, where there is no agreement, are of
    training tasks and begin as these do: an agent is asked in the words in which it was cloned."""
    first = expert[0].state
    train = set() if first.opening else {*env.split_ids("train")}
    fork = env.fork()
    fork.agreement = ""
    for number, demonstration in enumerate(expert, 1):
        begin = demonstration.state.messages[: first.opening or 1]
        expected = first.messages[: first.opening]
        if demonstration.task_id in train:
            expected = start(fork, str(demonstration.task_id)).messages
        if begin != expected:
            words = difference(*("\n".join(text for _, text in messages) for messages in (begin, expected)))
            raise UserError(
                f"demonstration {number} begins with {words}: all must begin with one instruction and agreement, and"
                f" the goal stands after them (or, by task_id, as {env.name} begins the task)"
            )
    fork.close()


def replay_demonstrations(expert: Sequence[Demonstration], env: TextEnv, tasks: Iterable[str | None]) -> None:
    """Play the demonstrations of these tasks once more, if they are training tasks.

    A warning for each kind of difference counts the demonstrations, and has the first. UserError if none of all
    demonstrations earns anything.
    """
    tasks = {*tasks} & {*env.split_ids("train")}
    fork = env.fork()
    examples: dict[str, list[str]] = {}
    rewards = []
    for demonstration in expert:
        reward = demonstration.reward
        if demonstration.task_id in tasks:
            reward, problems = compare(demonstration, fork)
            for kind, words in problems.items():
                examples.setdefault(kind, []).append(f"task {demonstration.task_id}: {words}")
        rewards.append(reward)
    fork.close()
    played = sum(demonstration.task_id in tasks for demonstration in expert)
    for kind, lines in examples.items():
        share = f"{len(lines)} of {played} demonstrations that were played"
        warn(f"{kind} in {share} (python -m reporting.demonstration). The first: {lines[0]}")
    if not any(reward is None or reward > 0 for reward in rewards):
        raise UserError(f"none of {len(expert)} demonstrations earns anything (python -m reporting.demonstration)")


def compare(demonstration: Demonstration, fork: TextEnv) -> tuple[float, dict[str, str]]:
    """Play a demonstration. Returns its reward, and the first example of each kind of difference."""
    state, recorded = demonstration.state, demonstration.reward
    fork.agreement = "OK" if state.opening else ""  # without one the first message holds the instruction too
    problems: dict[str, str] = {}
    valid, reward = False, 0.0
    moves = replay(fork, str(demonstration.task_id), state.actions)
    for action, page, move in zip(state.actions, state.observations, moves, strict=False):  # each move leads to a page
        if not move.action:  # the task's start
            fork.forget()
        answer = move.state.observation + (" [the end]" if move.done else "")
        if answer != page:
            problems.setdefault("other pages than recorded", difference(answer, page))
        valid = valid or fork.knows(parse_action(action))
        reward = move.reward
    for move in moves:  # the one of the last action
        reward = move.reward
    if recorded is not None and abs(reward - recorded) >= 0.01:
        problems["another reward than recorded"] = f"{reward:g} in place of {recorded:g}"
    if not valid:
        problems = {f"no action that {fork.name} knows": repr(parse_action(state.actions[0])[:60])}
    return reward, problems


def recognise(env: TextEnv, action: str) -> bool:
    """True if the environment knows an agent's action here. A warning if it knows none of the agent's first ones."""
    valid = env.knows(parse_action(action))
    env.known_actions[valid] += 1
    if env.known_actions == {False: FIRST}:
        warn(f"{env.name} knows none of the agent's first {FIRST} actions, such as {parse_action(action)[:60]!r}")
    return valid
