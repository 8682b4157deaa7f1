"""Gymnasium's interface, word by word: make, make_vec, autoreset, seeds, options, splits."""

import itertools
import warnings

import gymnasium
import numpy as np
import pytest
from fakes import refused

import envs

gymnasium.register("Own-v0", "envs:make", kwargs={"name": "docs.switches:Switches"})
IDS = ["envs:qlass/FrozenLake-v0", "envs:qlass/WebShop-v0", "envs:qlass/ALFWorld-v0", "Own-v0"]


def sequence(env, seed):
    """The tasks of six episodes after a seed."""
    return [env.reset(seed=seed if i == 0 else None)[1]["task_id"] for i in range(6)]


@pytest.mark.parametrize("name", IDS)
def test_a_split_that_make_names_holds_and_seeds_begin_a_sequence_of_tasks(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Gymnasium's checks
        for split in ("train", "test"):
            env = gymnasium.make(name, split=split)
            played = {seed: sequence(env, seed) for seed in range(20)}
            assert set(itertools.chain(*played.values())) <= set(env.unwrapped.task_ids(split))
            assert len(set(map(tuple, played.values()))) == 20
            assert played[3] == sequence(gymnasium.make(name, split=split), 3) == sequence(env.unwrapped.fork(), 3)
        env.unwrapped.reset(seed=3)  # a task that is named leaves the next draw where it was
        env.unwrapped.reset(options={"task_id": env.unwrapped.task_ids("train")[0]})
        assert env.reset()[1]["task_id"] == played[3][1]
    assert gymnasium.make(name).unwrapped.split == "train"
    with refused("nowhere"):
        gymnasium.make(name, split="nowhere").reset()


def test_environments_side_by_side_play_their_split_through_autoreset():
    name = IDS[0]
    options = {"shared_memory": False}  # in which texts of any letters do not fit
    both = gymnasium.make_vec(name, 2, split="test", max_steps=2, vectorization_mode="async", vector_kwargs=options)
    _, info = both.reset(seed=7)
    tasks = [info["task_id"]]
    for _ in range(5):
        both.step(["sing", "sing"])
        truncated = both.step(["sing", "sing"])[3]
        assert truncated.all()
        texts, *_, info = both.step(["sing", "sing"])  # which begins the next task
        tasks.append(info["task_id"])
        assert all(type(text) is str and text for text in texts)
    both.close()
    alone = gymnasium.make(name, split="test")
    assert np.array(tasks).T.tolist() == [sequence(alone, seed) for seed in (7, 8)]


def test_a_drawn_task_has_luck_of_its_own_and_a_named_one_always_the_same():
    env = envs.make("frozenlake", map="4x4", slippery=True)
    named = {"task_id": env.task_ids("train")[0]}
    luck = [(env.reset(options=named), env.np_random.random())[1] for _ in range(2)]
    assert luck[0] == luck[1]
    drawn = [(env.reset(seed=seed), env.np_random.random())[1] for seed in (5, None, None, 5, None)]
    assert drawn[:2] == drawn[3:] and len(set(drawn)) == 3
