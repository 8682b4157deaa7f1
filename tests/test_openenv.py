"""OpenEnv's own client, several at once, on the real server."""

import importlib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import served

import envs
from docs.switches import Switches
from qlass import UserError

AROUND = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}  # a test stands in a folder of its own


@pytest.mark.slow
def test_clients_play_what_the_environment_plays(tmp_path):
    pytest.importorskip("openenv", reason="pip install -r requirements-integrations.txt")
    from openenv import GenericEnvClient

    env, expected = envs.make("alfworld"), []
    for task_id in env.task_ids("train")[:8]:
        text, _ = env.reset(options={"task_id": task_id})
        expected.append([(task_id, text, env.instruction)])
        expected[-1] += [(move, *env.step(move)[:3]) for _, move in env.expert(task_id)]
    command = [sys.executable, "-m", "integrations.openenv", "--env", "alfworld", "--run", str(tmp_path / "run")]
    with served(command, tmp_path / "log", **AROUND) as url:

        def episode(index: int) -> list:
            with GenericEnvClient(base_url=url).sync() as client:
                begun = client.reset(split="train", index=index).observation
                seen = [(client.state()["task_id"], begun["text"], begun["instruction"])]
                for move, *_ in expected[index][1:]:
                    result = client.step({"action": move})
                    seen.append((move, result.observation["text"], result.reward, result.done))
                with pytest.raises(Exception, match="the episode is over"):
                    client.step({"action": "look"})
                return seen

        with ThreadPoolExecutor(8) as pool:  # sessions side by side
            assert list(pool.map(episode, range(8))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alfworld", "webshop"])
def test_a_tree_grows_by_snapshots_from_another_process(tmp_path, name):
    """The page's example, until it has 200 forks: each page is what its path leads to here."""
    pytest.importorskip("openenv", reason="pip install -r requirements-integrations.txt")
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from openenv .*?)```", page, re.S)
    command = [sys.executable, "-m", "integrations.openenv", "--env", name, "--run", str(tmp_path / "run")]
    names = {}
    with served(command, tmp_path / "log", **AROUND) as url:
        exec(example.replace("http://localhost:8000", url), names)
    tree, env = names["tree"], envs.make(name)
    assert len(tree) > 200
    for node in tree[1:]:
        path = [node]
        while path[0]["parent"]:
            path.insert(0, tree[path[0]["parent"]])
        env.reset(options={"task_id": env.task_ids("train")[0]})
        for step in path:
            text, reward, terminated, _, info = env.step(step["action"])
        expected = {"text": text, "reward": reward, "done": terminated, "valid_actions": info["valid_actions"]}
        assert {field: node[field] for field in expected} == expected


@pytest.fixture
def sessions(monkeypatch):
    """The server's door without OpenEnv: a function that opens a session, as the server does for each request."""
    pydantic = pytest.importorskip("pydantic")
    factory = {"create_app": lambda factory, *_, **__: factory, "Environment": type("Environment", (), {})}
    kinds = {name: pydantic.create_model(name, __config__={"extra": "allow"}) for name in ("Action", "State")}
    kinds["Observation"] = pydantic.create_model("Observation", reward=(float | None, None), done=(bool, False))
    server = type(sys)("openenv.core.env_server")
    vars(server).update(factory | kinds)
    for name, module in {"uvicorn": server, "openenv": server, "openenv.core": server, server.__name__: server}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "integrations.openenv", raising=False)
    door = importlib.import_module("integrations.openenv")
    door.HELD = 3
    monkeypatch.delitem(sys.modules, "integrations.openenv")
    return lambda env: door.application(env)


def test_a_session_trains_unless_a_request_asks_for_another_split_and_draws_by_its_seed(sessions):
    session, other = (sessions(Switches())() for _ in range(2))
    for asked, split in ({}, "train"), ({"split": "test"}, "test"), ({"index": 2}, "train"), ({}, "train"):
        session.reset(**asked)
        assert session.game.info["task_id"] in Switches().task_ids(split)
    with pytest.raises(UserError, match="not task"):
        session.reset(task="red")

    def drawn(door, **asked):
        door.reset(**asked)
        return door.game.info["task_id"]

    for seed in range(20):
        tasks = [[drawn(door, seed=seed), drawn(door), drawn(door)] for door in (session, other)]
        assert tasks[0] == tasks[1] and len(set(tasks[0])) > 1


def test_a_reset_of_another_request_ends_no_episode(sessions):
    env = Switches()
    env.side_by_side = 1
    begin = sessions(env)
    first, other = begin(), begin()
    first.reset(task_id="red")
    with pytest.raises(UserError, match="1 episodes are open"):
        other.reset()
    other.close()
    first.close()
    assert begin().reset(task_id="red").text.startswith("Task: switch on red")


def test_snapshots_fork_and_are_bounded_and_freed(sessions):
    begin = sessions(Switches())
    first, fork = begin(), begin()
    first.reset(task_id="red")
    before = first.state.snapshot
    after = first.step(SimpleNamespace(action="switch red"))
    ids = [first.state.snapshot for _ in range(3)]
    with pytest.raises(UserError, match=f"no snapshot {before}: a session holds its last 3, until it closes"):
        fork.reset(snapshot=before)
    assert fork.reset(snapshot=ids[0]) == after and fork.state.step_count == 1
    assert fork.step(SimpleNamespace(action="done")).reward == 1.0 and not first.game.over
    assert first.reset(snapshot=fork.state.snapshot).done
    first.close()
    with pytest.raises(UserError, match="no snapshot"):
        fork.reset(snapshot=ids[0])
