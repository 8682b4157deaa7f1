"""FrozenLake: its exact Q*, its tasks, its texts."""

import pytest
from fakes import refused
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

import envs
from environments.frozenlake import lake as frozenlake


@pytest.mark.parametrize("steps", [1, 4, None])  # that are left; None: any number
@pytest.mark.parametrize("task", ["4x4/00", "slippery-4x4/00"])
def test_q_star_solves_the_bellman_equation_of_gymnasiums_table(task, steps):
    lake = frozenlake.load(task)
    q = frozenlake.q_star(lake, 0.9, steps)
    after = frozenlake.q_star(lake, 0.9, steps and steps - 1)
    for state in range(16):
        for action in range(4):
            backup = 0.0
            for probability, to, reward, done in lake.P[state][action]:
                backup += probability * (reward + 0.9 * (not done) * after[to].max())
            assert q[state, action] == pytest.approx(backup, abs=1e-10)
    assert q[14].argmax() == (1 if "slippery" in task else 2)  # from below no slip can end in the hole beside it


@pytest.mark.parametrize(("layout", "sizes", "lakes"), [("8x8", (22, 11, 20), 1), ("lakes2", (118, 59, 117), 24)])
def test_tasks_are_all_cells_that_reach_the_goal_once(layout, sizes, lakes):
    """The sizes are those of a search from the goals."""
    env = envs.make("frozenlake", map=layout)
    splits = [env.task_ids(split) for split in ("train", "val", "test")]
    assert sorted(task for split in splits for task in split) == sorted({*env.task_ids("all")})
    assert tuple(map(len, splits)) == sizes
    assert len({task.rpartition("/")[0] for task in splits[0]}) == lakes  # every one is known from training


@pytest.mark.parametrize("layout", ["8x8", "lakes2", "random8"])
def test_the_expert_walks_a_shortest_path(layout):
    env = envs.make("frozenlake", map=layout, stray=0)
    for task in env.task_ids("test")[:20]:
        env.reset(options={"task_id": task})
        value, reward = env.optimal_value(), 0.0
        for _, action in env.expert(task):
            assert 0.9 * env.q_star_of(action) == pytest.approx(env.optimal_value())
            _, reward, terminated, _, info = env.step(action)
        assert terminated and reward == 1.0 and info["valid_actions"] == []
        assert value == pytest.approx(0.9**env.steps)


def test_texts_rewards_and_limits():
    env = envs.make("frozenlake", map="4x4", max_steps=3)
    observation, info = env.reset(options={"task_id": "4x4/22"})
    assert observation == "At cell 22." and env.instruction.endswith("The map:\nFFFF\nFHFH\nFFFH\nHFFG")
    assert env.picture(observation).splitlines() == ["F F F F", "F H F H", "F F @ H", "H F F G"]
    assert info["valid_actions"] == ["left", "down", "right", "up"]
    assert env.q_star_of("jump") == pytest.approx(0.9 * 0.9) and env.q_star_of("right") == 0.0
    start, invalid = env.snapshot(), "Invalid action: choose left, down, right or up. At cell 22."
    for answers in (
        {"Down ": ("At cell 32.", 0.0, False, False), "right": ("You reached the goal at cell 33.", 1.0, True, False)},
        {"right": ("You fell into a hole at cell 23.", 0.0, True, False)},
        {"dance": (invalid, 0.0, False, False), "": (invalid, 0.0, False, False), "go": (invalid, 0.0, False, True)},
    ):
        env.restore(start)
        assert {action: env.step(action)[:4] for action in answers} == answers
    for task in ("4x4/50", "4x4/11", "lakes/99/00"):  # beyond the map, a hole, no such lake
        with refused("frozenlake"):
            env.reset(options={"task_id": task})


def test_a_lake_is_named_by_its_number_and_a_random_map_is_shown():
    env = envs.make("frozenlake", map="lakes")
    assert env.reset(options={"task_id": "lakes/7/00"})[0] == "At cell 00 of lake 7."
    assert env.instruction.endswith("\n".join(generate_random_map(4, seed=7)).replace("S", "F"))
    observation, _ = envs.make("frozenlake", map="random4").reset(options={"task_id": "random4/15"})
    *rows, around = observation.splitlines()
    assert rows == [" ".join(row.replace("S", "F")) for row in generate_random_map(4, seed=15)]
    assert around.endswith("Around you: left the edge, down ice, right a hole, up the edge.")
