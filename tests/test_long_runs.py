"""Memory stays flat over thousands of episodes.

python tests/test_long_runs.py ENV EPISODES plays random ones, the same four times over, and prints the megabytes that
this process and all that it started hold by and by.
"""

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import envs

OPTIONS = {"sciworld": {"simulators": 1}, "alfworld": {"max_steps": 12}}
ROOMS = ("kitchen", "workshop", "greenhouse", "hallway", "outside")


def megabytes() -> float:
    pids, held = [os.getpid()], 0
    for pid in pids:
        held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
    return round(held / 1e6, 1)


def play(env: envs.TextEnv, task: str, rng: random.Random) -> None:
    env.reset(options={"task_id": task})
    here, over, steps = env.snapshot(), False, 0
    while not over and steps < 20:
        steps += 1
        if env.name == "sciworld":  # to ask it for all valid actions takes as long as a hundred steps
            action = rng.choice(["look around", "inventory", "wait1", *(f"teleport to {room}" for room in ROOMS)])
            over = steps == 4
        else:
            action = rng.choice([*env.valid_actions(), "what?"])
        _, _, terminated, truncated, _ = env.step(action)
        over = over or terminated or truncated
    env.restore(here)
    if env.name == "sciworld" and rng.random() < 0.05:
        env.candidates()
    env.close()


def main(name: str, episodes: int) -> None:
    env, held = envs.make(name, **OPTIONS.get(name, {})), []
    tasks = env.task_ids("all")
    for n in range(episodes):
        if n % (episodes // 4) == 0 and name == "sciworld":
            env.pool.answers.clear()  # the simulator is to be asked again
        rng = random.Random(n % (episodes // 4))
        play(env.fork(), rng.choice(tasks), rng)
        if (n + 1) % (episodes // 8) == 0:
            gc.collect()
            held.append(megabytes())
    print(json.dumps(held))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "episodes"),
    [("webshop", 2000), ("alfworld", 2000), ("frozenlake", 2000), ("sciworld", 240)],  # seconds each
)
def test_memory_is_flat_over_many_episodes(name, episodes):
    """Once they have all been played: the other three times take no more."""
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    command = [sys.executable, __file__, name, str(episodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    held = json.loads(done.stdout.splitlines()[-1])
    assert held[-1] < held[1] * 1.03 + 5, held


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
