"""OpenEnv's own client, several at once, on the real server."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_server import engine, installed

import envs


def through(client, moves, **task):
    """What a client sees of an episode."""
    begun = client.reset(**task)
    seen = [(begun.observation["text"], begun.observation["instruction"])]
    for move in moves:
        result = client.step({"action": move})
        seen.append((result.observation["text"], result.reward, result.done))
    return seen


@pytest.mark.slow
@pytest.mark.skipif(not installed("openenv"), reason="needs requirements-integrations.txt")
def test_clients_play_what_the_environment_plays(tmp_path):
    from openenv import GenericEnvClient

    env = envs.make("alfworld")
    tasks = env.task_ids("train")[:8]
    expected, plans = [], []
    for task_id in tasks:
        text, _ = env.reset(options={"task_id": task_id})
        expected.append([(text, env.instruction)])
        plans.append([])
        for _, move in env.expert(task_id):
            text, reward, terminated, truncated, _ = env.step(move)
            expected[-1].append((text, reward, terminated or truncated))
            plans[-1].append(move)
            if terminated or truncated:
                break
    command = [sys.executable, "-m", "integrations.openenv", "--env", "alfworld", "--run", str(tmp_path / "run")]
    with engine(command, tmp_path / "log") as url:
        base = url.removesuffix("/v1")

        def episode(index: int) -> list:
            with GenericEnvClient(base_url=base).sync() as client:
                by_id = through(client, plans[index], task_id=tasks[index])
                assert by_id == through(client, plans[index], split="train", index=index)
                assert client.state()["task_id"] == tasks[index]
                with pytest.raises(Exception, match="the episode is over"):
                    client.step({"action": "look"})
                with pytest.raises(Exception, match="reset takes seed, task_id, split and index, not task"):
                    client.reset(task=tasks[index])
                return by_id

        with ThreadPoolExecutor(8) as pool:  # sessions side by side
            assert list(pool.map(episode, range(8))) == expected
        with GenericEnvClient(base_url=base).sync() as client:
            assert client.reset(seed=3).observation["text"] == client.reset(seed=3).observation["text"]
