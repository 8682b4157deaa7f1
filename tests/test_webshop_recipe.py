"""ETO's recipe through the stages: human goals, its split files, its instruction, its file of expert trajectories."""

import json

import build_trees
import envs
import q_search
import sft
from qlass.published import by_task, demonstrate, read

INSTRUCTION = "You are web shopping.\nAn action is search[keywords] or click[value]."


def eto(env, task_id):
    """A trajectory as ETO publishes it."""
    speakers, messages = {"user": "human", "assistant": "gpt"}, demonstrate(env, task_id)["messages"]
    turns = [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]
    return {"id": int(task_id), "conversations": turns}


def test_human_goals_split_files_and_instruction_are_one_recipe(tmp_path, capsys):
    (tmp_path / "instruction.txt").write_text(INSTRUCTION)
    (tmp_path / "splits").mkdir()
    for name, indices in {"train": [0, 3, 5, 3], "test": [1, 2]}.items():
        (tmp_path / "splits" / f"{name}_indices.json").write_text(json.dumps(indices))
    options = {"split_file": str(tmp_path / "splits"), "instruction": str(tmp_path / "instruction.txt")}
    env = envs.make("webshop", human_goals=True, **options)
    assert sorted(env.task_ids("train")) == ["0", "3", "5"] and sorted(env.task_ids("test")) == ["1", "2"]
    assert envs.make("webshop").published_id({"id": 3}) is None  # whose goals are other ones
    assert env.published_id({"id": "webshop_3"}) is None and env.published_id({}) is None
    assert isinstance(env.shop.goals[0]["goal_options"], list), "people name values, not options"
    (tmp_path / "eto.json").write_text(json.dumps([eto(env, task) for task in env.task_ids("train")]))

    expert = read(tmp_path / "eto.json", env)
    assert {demonstration.state.messages[0] for demonstration in expert} == {("user", INSTRUCTION)}
    flags = ["--env", "webshop", "--run", str(tmp_path)]
    for name, value in (options | {"human_goals": "true"}).items():
        flags += ["--env-option", f"{name}={value}"]
    sft.main([*flags, "--expert", str(tmp_path / "eto.json"), "--epochs", "2"])
    build_trees.main([*flags, "--tasks", "cloned", "--rollouts", "2"])
    trees = [json.loads(line) for line in (tmp_path / "trees.jsonl").read_text().splitlines()]
    best = by_task(expert, env)
    for root in (node for node in trees if node["parent_id"] is None):  # tau_0 is the file's, by the number of its goal
        shown = [n["action"] for n in trees if n["task_id"] == root["task_id"] and n["expert"]]
        assert shown == best[root["task_id"]].actions
    q_search.main([*flags, "--method", "greedy", "--max-steps", "4", "--skip", "0"])
    assert "over 2 test tasks" in capsys.readouterr().out
