"""What a run is: its environment and data, its inputs wherever it was moved to."""

import json
import os
import sys
from pathlib import Path

import pytest
from fakes import WORLD, FakeEnv
from test_files import flags

import bellman
import build_trees
import envs
import q_search
import train_qnet
from environments import fingerprint
from qlass import UserError, runs
from qlass.published import cloned_from
from qlass.runs import input_of, need, outdated

LAKE = ["--env", "frozenlake", "--env-option", "map=4x4"]


def wrote(output: Path, *words: str, run: Path | None = None, opens: bool = True, **inputs: Path) -> Path:
    """What a stage does that writes this output into a run."""
    args = flags("--run", str(run or output.parent), *words)
    if opens:
        envs.from_arguments(args)
    runs.write_meta(output, args, runs.claim(output, args, inputs), inputs)
    output.write_text(output.name)
    return output


def test_a_run_keeps_its_environment(tmp_path, capsys):
    run = ["--run", str(tmp_path)]
    envs.from_arguments(flags(*run, "--env", "frozenlake", "--env-option", "map=8x8"))  # stopped at a mistake
    wrote(tmp_path / "labels.jsonl", opens=False)  # opened no environment: its default is not the run's
    wrote(tmp_path / "expert.jsonl", *LAKE, "--seed", "4")
    for words in (run, [*run, *LAKE]):
        again = flags(*words)
        assert (again.env, again.env_option, again.env_files, again.seed) == ("frozenlake", ["map=4x4"], {}, 4)
    assert runs.handed_on(again) == [*run, "--seed", "4"]
    for words in (["--env-option", "stray=0"], ["--env-option", "map=8x8"], ["--env", "webshop"]):
        with pytest.raises(UserError, match=f"{tmp_path} is of --env frozenlake --env-option map=4x4, not of "):
            flags(*run, *words)
    assert q_search.arguments([*run, "--env-option", "stray=0"]).env_option == ["map=4x4", "stray=0"]  # a search may
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith("not of --env frozenlake --env-option map=4x4 --env-option stray=0")


STARTS = [("sft", build_trees), ("trees", bellman), ("labels", train_qnet), ("qnet", q_search)]


@pytest.mark.parametrize(("name", "stage"), STARTS)
def test_a_new_run_has_the_environment_of_what_it_starts_from(name, stage, tmp_path, capsys, monkeypatch):
    """Also if that is not in its run's folder."""
    monkeypatch.chdir(tmp_path)
    source = wrote(tmp_path / "mine" / name, *LAKE, run=tmp_path / "lake")
    args = stage.arguments([f"--{name}", str(source)])
    assert (args.env, args.env_option, args.env_files) == ("frozenlake", ["map=4x4"], {})
    assert args.run == Path("runs/frozenlake") and capsys.readouterr().err == ""
    assert stage.arguments([f"--{name}", str(source), "--env", "webshop"]).env_option == []
    assert f"{source} is of --env frozenlake --env-option map=4x4, not of --env webshop" in capsys.readouterr().err


def test_the_flags_that_stages_share_are_handed_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALFWORLD_DATA", "games")
    assert envs.environment_class("alfworld").default_options() == {"data": "games"}
    lake = [*LAKE, "--env-option", "slippery=true", "--seed", "4", "--run", "a b", "--device", "cpu"]
    for words in (lake, ["--env-option", "seed=3", "--env-option", "data=shop"]):
        first = flags(*words)
        assert vars(flags(*runs.handed_on(first))) | {"argv": 0} == vars(first) | {"argv": 0}
    # What the environment of a new run reads is known after the stage that was made first.
    args, trees = flags("--run", "new", *LAKE), tmp_path / "new" / "trees.jsonl"
    monkeypatch.setattr(build_trees, "main", lambda argv: wrote(trees, *argv))
    assert need(None, trees, "build_trees", args) == trees and args.env_files == {}


class Filed(FakeEnv):
    def __init__(self, data: str, **options):
        super().__init__(json.loads((Path(data) / "world.json").read_text()), **options)


def test_other_data_and_another_precision_are_refused(tmp_path, agent, capsys, monkeypatch):
    world = tmp_path / "data" / "world.json"
    world.parent.mkdir()
    world.write_text(json.dumps(WORLD))
    play = ["--run", str(tmp_path), "--sft", str(agent), "--method", "greedy", "--limit"]
    q_search.main([*play, "1", "--env", "test_moved:Filed", "--env-option", f"data={world.parent}"])
    line = json.loads((tmp_path / "results.jsonl").read_text())
    assert line["env"] == "filed"  # a class has a name of its own, not of the one that it is derived from
    os.utime(world, (1, 1))  # the same content at another time
    q_search.main([*play, "2"])
    assert "other files" not in capsys.readouterr().err
    with pytest.raises(UserError, match="begun with --precision float32, not bf16"):  # as on a GPU
        q_search.main([*play, "3", "--precision", "bf16"])
    world.write_text(json.dumps(WORLD).replace("0.5", "0.7"))  # of the same size
    with pytest.raises(UserError, match=r"results.jsonl was begun with --env-files {'data': "):
        q_search.main([*play, "3"])
    assert f"{tmp_path} was begun with other files than --env-option names now: put them" in capsys.readouterr().err
    q_search.main([*play, "3", "--overwrite"])


def test_a_fingerprint_is_of_names_sizes_and_content(tmp_path):
    def held(name: str = "data[1]", **texts: str) -> str:
        for file, text in texts.items():
            (tmp_path / name / "deep").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "deep" / file).write_text(text)
        return fingerprint(str(tmp_path / name))

    whole = {"a": "1", "b": "2" * 99, ".DS_Store": "no change"}
    first = held(**whole)
    for change in ({"a": "2"}, {"b": "2" * 50 + "3" + "2" * 48}, {"b": "2" * 98}):
        assert held(**change) != first == held(**whole)
    assert held("copy", a="1", b="2" * 99) == first != held("renamed", a="1", c="2" * 99)
    (tmp_path / "link").symlink_to(tmp_path / "copy")  # a shop on another disk
    many = {f"f{i}": "x" for i in range(1100)}
    assert held("link") == first and held("many", **many) == held("alike", **many) != held("alike", f0="y")


def test_inputs_move_with_their_run_and_what_changed_later_is_told(tmp_path, capsys):
    """A run that got another's old name is not taken for it; both are behind a link, and an input is elsewhere."""
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    run, mine = tmp_path / "runs" / "run", tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    for folder in (run.with_name("old"), run):
        expert = wrote(run / "expert.jsonl", *LAKE)
        agent = wrote(run / "sft", expert=expert)
        trees = wrote(run / "trees.jsonl", sft=agent, expert=mine)
        labels = wrote(run / "q_labels.jsonl", trees=trees)
        qnet = wrote(run / "qnet", labels=labels, sft=agent)
        run.rename(folder)
    for folder in (run.with_name("old"), run):
        assert cloned_from(folder / "sft") == (folder / "expert.jsonl", None) and not list(outdated(folder / "qnet"))
        assert input_of(folder / "trees.jsonl", "expert").samefile(mine)
    args = flags("--run", str(run))
    assert need(None, qnet, "train_qnet", args) == qnet and capsys.readouterr().err == ""
    agent.write_text("new")
    assert sorted(outdated(qnet)) == [(qnet, agent), (trees, agent)]
    need(None, labels, "bellman", args)
    warning = f"warning: {trees} was made from another {agent} than there is now: make it again\n"
    assert capsys.readouterr().err == warning
    wrote(agent, "--overwrite", expert=labels).write_text("newer")  # it was trained again on what it had made
    assert list(outdated(labels)) == [(trees, agent)]


def test_a_module_or_a_folder_of_ones_own_that_hides_ours_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("data", "environments.webshop"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"--env webshop: .*/data/__init__.py.*does a folder of yours hide one of ours"):
        envs.environment_class("webshop")
    monkeypatch.setitem(sys.modules, "envs", type("Module", (), {"__file__": str(tmp_path / "envs.py")}))
    with pytest.raises(SystemExit):
        runs.run_stage(lambda: None)
    assert f"error: {tmp_path}/envs.py hides our module envs: rename it" in capsys.readouterr().err
