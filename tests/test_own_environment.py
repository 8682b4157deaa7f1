"""The example of docs/environment.md, an environment in one file, goes through all five stages."""

from gymnasium.utils.env_checker import check_env

import build_trees
import envs
import q_search
import sft
import train_qnet
from docs.switches import Switches
from qlass.jsonl import read_jsonl

FLAG = "docs.switches:Switches"


def test_it_is_a_gymnasium_environment_that_can_be_restored():
    env = envs.make(FLAG)
    check_env(env, skip_render_check=True)
    env.reset(options={"task_id": "blue-red"})
    env.step("switch red")
    half = env.snapshot()
    assert env.step("done")[1:3] == (0.5, True)
    env.restore(half)
    env.step("switch blue")
    assert env.step("done")[1] == 1.0
    splits = [set(env.task_ids(split)) for split in ("train", "val", "test")]
    assert set.union(*splits) == set(env.task_ids("all")) and sum(map(len, splits)) == len(env.task_ids("all"))


def test_one_command_takes_it_through_all_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sft.TINY_STEPS", 10)
    monkeypatch.setitem(sft.TINY, "epochs", 2)
    monkeypatch.setitem(train_qnet.TINY, "epochs", 1)
    monkeypatch.setitem(build_trees.DEFAULTS, "limit", 4)
    q_search.main(["--env", FLAG, "--run", str(tmp_path), "--method", "all", "-M", "2", "--limit", "3"])
    made = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert len(made) == 4  # QNet, labels, trees, agent
    rewards = {(r["method"], r["task_id"]): r["reward"] for r in read_jsonl(tmp_path / "results.jsonl")}
    assert all(reward == 1 for (method, _), reward in rewards.items() if method in ("expert", "oracle"))
    assert {"greedy", "qlass", "best_of_n"} <= {method for method, _ in rewards}
    assert isinstance(envs.make(FLAG), Switches)
