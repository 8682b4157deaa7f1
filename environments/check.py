"""The rules of docs/environment.md, played in an environment by some twenty steps.

A run plays them as it first uses a class of your own. By themselves:

    python -m environments --env MODULE:CLASS --env-option NAME=VALUE
"""

import itertools
from collections.abc import Iterator
from numbers import Real
from typing import Any

from gymnasium.error import Error
from gymnasium.utils.env_checker import check_env

from qlass import UserError

STEPS = 3


def check(env: Any) -> None:
    """UserError that names the first rule which does not hold. Afterwards the environment is spent."""
    try:
        play_rules(env)
    except (AssertionError, Error) as error:
        raise UserError(f"{env.name}: a rule of docs/environment.md does not hold: {error}") from error


def play_rules(env: Any) -> None:
    """AssertionError that names the first rule which does not hold."""
    for split in ("train", "test"):
        tasks = env.split_ids(split)
        assert tasks == env.split_ids(split), f"split_ids({split!r}): the same tasks in the same order at each call"
        assert len(set(tasks)) == len(tasks) > 0, f"split_ids({split!r}): tasks, each once"
        assert all(isinstance(task, str) for task in tasks), "ids are texts"
    task = env.task_ids("train")[0]
    answer = env.reset(options={"task_id": task})
    assert isinstance(answer, tuple) and len(answer) == 2, "reset returns an observation and info"
    check_page(env, *answer)
    assert answer[1].get("task_id") == task and isinstance(answer[1].get("task"), str), "info has task_id and task"
    assert env.reset(options={"task_id": task})[0] == answer[0], "every play of a task begins alike"
    played = []
    for action in actions_of(env, task):
        before = env.snapshot()
        answer = env.step(action)
        check_step(env, answer)
        played.append((before, action, answer[:4]))
        if answer[2] or answer[3]:
            break
    for before, action, answer in reversed(played):
        env.restore(before)
        if env.side_by_side > 1:
            other = env.fork()
            other.reset(options={"task_id": env.task_ids("train")[-1]})
            other.close()
        assert env.step(action)[:4] == answer, "restore goes back to a snapshot, which neither steps nor forks change"
    check_env(env.fork(), skip_render_check=True)
    env.max_steps = 1
    env.reset(options={"task_id": task})
    assert any(env.step("sing a song")[2:4]), "any text is answered, and the last of max_steps truncates"


def actions_of(env: Any, task_id: str) -> Iterator[str]:
    """The expert's first actions or, without one, any that is valid. The caller steps the environment between two."""
    try:
        for move in itertools.islice(env.expert(task_id), STEPS):
            assert len(move) == 2, "the expert yields (thought, action)"
            assert all(isinstance(part, str) for part in move), "thought and action are texts"
            yield move[1]
    except NotImplementedError:
        for _ in range(STEPS):
            yield env.valid_actions()[0]


def check_step(env: Any, answer: Any) -> None:
    named = "step returns an observation, a reward, terminated, truncated and info"
    assert isinstance(answer, tuple) and len(answer) == 5, named
    observation, reward, terminated, truncated, info = answer
    assert isinstance(reward, Real) and 0 <= reward <= 1, "a reward is a number from 0 to 1"
    assert terminated or truncated or reward == 0, "the last step earns 0 to 1, others 0"
    check_page(env, observation, info)


def check_page(env: Any, observation: Any, info: Any) -> None:
    assert isinstance(observation, str), "an observation is a text"
    assert isinstance(info, dict), "info is a dictionary"
    actions = env.valid_actions()
    assert info.get("valid_actions") == actions, "info has valid_actions"
    assert all(isinstance(action, str) for action in actions), "valid_actions are texts"
    assert len(set(actions)) == len(actions), "valid_actions has each once"
