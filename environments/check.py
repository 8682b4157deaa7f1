"""Play the rules of docs/environment.md in an environment of your own, by some twenty steps.

A run does so as it begins. By itself:

python -m environments.check --env MODULE:CLASS --env-option NAME=VALUE
"""

import itertools

from gymnasium.utils.env_checker import check_env

import envs
from qlass import UserError
from qlass.settings import Run, read, run_stage

STEPS = 3


def check(env: envs.TextEnv) -> None:
    """UserError that names the first rule which does not hold. Afterwards the environment is spent."""
    try:
        play_rules(env)
    except AssertionError as error:
        raise UserError(f"{env.name}: a rule of docs/environment.md does not hold: {error}") from error


def actions_of(env: envs.TextEnv, task_id: str) -> list[str]:
    """The expert's first actions or, without one, any."""
    try:
        return [action for _, action in itertools.islice(env.expert(task_id), STEPS)]
    except NotImplementedError:
        return env.valid_actions()[:1] * STEPS


def play_rules(env: envs.TextEnv) -> None:
    """AssertionError that names the first rule which does not hold."""
    for split in ("train", "test"):
        tasks = env.split_ids(split)
        assert tasks == env.split_ids(split), f"{split}: the same tasks in the same order at each call"
        assert len(set(tasks)) == len(tasks) > 0, f"{split}: tasks, each once"
    check_env(env.fork(), skip_render_check=True)
    task = env.task_ids("train")[0]
    _, info = env.reset(options={"task_id": task})
    assert info["task_id"] == task and isinstance(info["task"], str), "info has task_id and task"
    played = []
    for action in actions_of(env, task):
        before = env.snapshot()
        answer = env.step(action)
        assert isinstance(answer[0], str), "an observation is a text"
        assert 0 <= answer[1] <= 1 and (answer[2] or not answer[1]), "the last step earns 0 to 1, others 0"
        assert answer[4]["valid_actions"] == env.valid_actions(), "info has valid_actions"
        played.append((before, action, answer[:4]))
    for before, action, answer in reversed(played):
        env.restore(before)
        assert env.step(action)[:4] == answer, "restore goes back to a snapshot, which stays as it is"
    env.max_steps = 1
    env.reset(options={"task_id": task})
    assert any(env.step("sing a song")[2:4]), "any text is answered, and the last of max_steps truncates"


def main(argv: list[str] | None = None) -> None:
    env = envs.from_config(read(Run, __doc__, argv))
    check(env)
    print(f"{env.name}: keeps the rules")


if __name__ == "__main__":
    run_stage(main)
