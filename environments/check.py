"""The rules of docs/environment.md, played in an environment by whole episodes.

A run plays them as it first uses a class of your own. By themselves:

    python -m environments MODULE:CLASS --env-option NAME=VALUE
"""

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gymnasium.error import Error
from gymnasium.utils.env_checker import check_env

from qlass import UserError
from qlass.environment import TextEnv
from qlass.messages import parse_action, react

STEPS = 100  # of an episode that has no limit
RULE = "what follows on restore, or in a fork, is answered as in an episode of its own"


def check(env: TextEnv) -> None:
    """UserError that names the first rule which does not hold. Afterwards the episode at hand is over."""
    if not __debug__:
        raise UserError("python -O (PYTHONOPTIMIZE) leaves out Gymnasium's checks and ours: run without it")
    limit = env.max_steps
    try:
        steps, seconds = play_rules(env)
        episode = f"its first episode has {steps} steps: 1,000 such episodes take {seconds / 0.06:.2g} minutes"
        print(f"{env.name}: keeps the rules; {episode}, without a model", flush=True)
    except (AssertionError, Error) as error:
        raise UserError(f"{env.name}: a rule of docs/environment.md does not hold: {error}") from error
    finally:
        env.max_steps = limit


def play_rules(env: TextEnv) -> tuple[int, float]:
    """AssertionError that names the first rule which does not hold. Returns the steps and seconds of an episode."""
    for split in ("train", "test"):
        tasks = env.split_ids(split)
        assert all(isinstance(task, str) for task in tasks), "split_ids gives texts"
        once = len(set(tasks)) == len(tasks) > 0
        assert once and tasks == env.split_ids(split), "split_ids gives tasks, each once, the same at each call"
    task, *_, other = env.task_ids("train") * 2
    name, (_, elsewhere) = env.name, begin(env, other)
    page, info = begin(env, task)
    check_page(env, page, info)
    named = info.get("task_id") == task and isinstance(info.get("task"), str)
    assert named, "info has task_id and task, both texts"
    instruction = env.instruction if elsewhere["task"] == info["task"] else ""  # a task that all share may stand there
    sentence, read = (" ".join(text.lower().split()) for text in (info["task"], instruction + page))
    assert page.strip() and sentence, "info's task and the first observation are not empty"
    assert sentence in read, "info's task stands in the first observation or, if all tasks have it, in the instruction"

    env.max_steps = env.max_steps or STEPS
    snapshots: list = []
    began = time.perf_counter()
    episode = list(play(env, expert(env, task), snapshots))
    seconds = time.perf_counter() - began
    used = [name for name in vars(env) if callable(getattr(type(env), name, None))]
    kept = (env.steps, env.name, getattr(env, "settings", None)) == (len(episode), name, {})
    assert kept and not used, (
        f"names of the base class are its own: steps, name, settings, {used or 'methods'}; super().__init__() sets them"
    )
    env.max_steps = len(episode) + 1  # which tells whether the number of steps is restored too
    for n in range(8):  # two branches from each of four states, from the last to the first
        i = (7 - n) // 2 * (len(episode) - 1) // 3
        try:
            begin(env, other)
            env.restore(snapshots[i])
            if env.side_by_side > 1:
                visitor = env.fork()
                begin(visitor, other)
                visitor.close()
            branch = [*episode[:i], *play(env, others_of(env, n), [])]
            fork = env.fork()
            fork.max_steps = env.max_steps if n else None  # as in trees
            assert begin(fork, task)[0] == page, "every play of a task begins alike"
            for action, answer in branch:
                again = fork.step(action)[:4]
                assert again == answer or (answer[3] and not n), f"{RULE}: {action!r}"
            fork.close()
        except AssertionError:
            raise
        except Exception as error:  # such as EOFError where a fork's close has ended what others use
            raise AssertionError(f"{RULE}: {error!r}") from error
    check_env(env, skip_render_check=True, skip_close_check=True)
    env.max_steps = 1
    begin(env, task)
    assert any(env.step("sing a song")[2:4]), "any text is answered, and the last of max_steps truncates"
    return len(episode), seconds


def begin(env: TextEnv, task: str) -> tuple[str, dict]:
    return env.reset(options={"task_id": task})


def play(env: TextEnv, actions: Iterable[str], snapshots: list) -> Iterator[tuple[str, tuple]]:
    """Play to the end of the episode, or of the actions. Yields each action, and its answer but for info. snapshots:
    gets the one before each step."""
    for action in itertools.islice(actions, env.step_limit()):
        snapshots.append(env.snapshot())
        observation, reward, *ends, info = env.step(action)
        assert 0 <= reward <= 1, "a reward is a number from 0 to 1"
        assert any(ends) or reward == 0, "the last step earns 0 to 1, others 0"
        check_page(env, observation, info)
        yield action, (observation, reward, *ends)
        if any(ends):
            assert env.step(action)[1:4] == (0, *ends), "a step after the end pays 0, and the end stays"
            break


def expert(env: TextEnv, task: str) -> Iterator[str]:
    """The actions of the expert or, if there is none, others. The caller steps the environment between two."""
    try:
        moves = env.expert(task)
    except UserError:
        yield from others_of(env)
        return
    move = None
    for move in moves:
        assert list(map(type, move)) == [str, str], "the expert yields two texts, (thought, action)"
        offered = [*map(tuple, env.candidates())]
        assert env.omniscient or not offered or tuple(move) in offered, f"candidates() has the expert's {move}"
        check_action(*move)
        yield move[1]
    assert move, "the expert yields at least one (thought, action)"


def others_of(env: TextEnv, seed: int = 0) -> Iterator[str]:
    """Valid actions by chance, without end; if none are listed, some texts. Every second state is restored from its own
    snapshot, as those of a tree are."""
    rng = random.Random(seed)
    for n in itertools.count():
        if n % 2:
            env.restore(env.snapshot())
        yield rng.choice(env.valid_actions() or ["look", "1"])


def check_action(thought: str, action: str) -> None:
    same = parse_action(react(thought, action)) == action
    assert same, f"an action is read as it was written, without blanks around it or a line 'Action:': {action!r}"


def check_page(env: TextEnv, observation: Any, info: Any) -> None:
    assert isinstance(observation, str), "an observation is a text"
    assert observation == observation.encode(errors="ignore").decode(), "an observation holds whole letters"
    actions = env.valid_actions()
    assert isinstance(actions, list | tuple), "valid_actions is a list"
    assert info.get("valid_actions") == actions, "info has valid_actions"
    assert len(set(actions)) == len(actions), "valid_actions has each once"
    for action in actions:
        assert isinstance(action, str), "valid_actions are texts"
        check_action("", action)
