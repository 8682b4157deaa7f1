"""What a run is: its environment and data, its inputs wherever it was moved to, checkpoints that are whole."""

import json
import os
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from fakes import WORLD, FakeEnv
from test_files import flags
from transformers import AutoModelForCausalLM

import bellman
import build_trees
import envs
import q_search
from environments import fingerprint
from qlass import UserError, models, runs
from qlass.published import cloned_from
from qlass.runs import input_of, meta_of, need, outdated

LAKE = ["--env", "frozenlake", "--env-option", "map=4x4"]


def wrote(output: Path, *words: str, run: Path | None = None, opens: bool = True, **inputs: Path) -> Path:
    """What a stage does that writes this output into a run."""
    args = flags("--run", str(run or output.parent), *words)
    if opens:
        envs.from_arguments(args)
    recipe = runs.claim(output, args, inputs)
    runs.write_meta(output, args, recipe, inputs)
    output.write_text(output.name)
    return output


# --------------------------------------------------------------------------------------------- the environment of a run


def test_a_run_keeps_its_environment(tmp_path, capsys):
    run = ["--run", str(tmp_path)]
    envs.from_arguments(flags(*run, "--env", "frozenlake", "--env-option", "map=8x8"))  # stopped at a mistake
    wrote(tmp_path / "labels.jsonl", opens=False)  # opened no environment: its default is not the run's
    assert not (tmp_path / "run.json").exists()
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


@pytest.mark.parametrize("name", ["sft", "trees"])
def test_a_new_run_has_the_environment_of_what_it_starts_from(name, tmp_path, capsys, monkeypatch):
    """Also if that is not in its run's folder."""
    monkeypatch.chdir(tmp_path)
    arguments = {"sft": build_trees.arguments, "trees": bellman.arguments}[name]
    source = wrote(tmp_path / "mine" / name, *LAKE, run=tmp_path / "lake")
    args = arguments([f"--{name}", str(source)])
    assert (args.env, args.env_option, args.env_files) == ("frozenlake", ["map=4x4"], {})
    assert args.run == Path("runs/frozenlake") and capsys.readouterr().err == ""
    assert arguments([f"--{name}", str(source), "--env", "webshop"]).env_option == []
    assert (
        f"warning: {source} is of --env frozenlake --env-option map=4x4, not of --env webshop"
        in capsys.readouterr().err
    )


def test_the_flags_that_stages_share_are_handed_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        [*LAKE, "--env-option", "slippery=true", "--seed", "4", "--run", "a b", "--device", "cpu"],
        ["--env-option", "seed=3", "--env-option", "data=shop"],
    ):
        first = flags(*words)
        assert vars(flags(*runs.handed_on(first))) | {"argv": 0} == vars(first) | {"argv": 0}
    assert first.env_option == ["data=shop", "seed=3"]
    # What the environment of a new run reads is known after the stage that was made first.
    args = flags("--run", str(tmp_path / "run"), *LAKE)
    monkeypatch.setattr(build_trees, "main", lambda argv: wrote(tmp_path / "run" / "trees.jsonl", *argv))
    need(None, tmp_path / "run" / "trees.jsonl", "build_trees", args)
    assert args.env_files == {}
    monkeypatch.setenv("ALFWORLD_DATA", "games")
    assert envs.environment_class("alfworld").default_options() == {"data": "games"}


class Filed(FakeEnv):
    """Its world stands in a file of a folder."""

    def __init__(self, data: str, **options):
        super().__init__(json.loads((Path(data) / "world.json").read_text()), **options)


def test_a_class_derived_from_another_has_a_name_of_its_own():
    assert (FakeEnv.name, Filed.name, envs.environment_class("webshop").name) == ("fake", "filed", "webshop")


def test_data_that_are_others_are_known_by_their_content(tmp_path, agent, capsys):
    data, run = tmp_path / "data", ["--run", str(tmp_path / "run"), "--sft", str(agent)]
    data.mkdir()
    (data / "world.json").write_text(json.dumps(WORLD))
    play = [*run, "--method", "greedy", "--limit"]
    q_search.main([*play, "1", "--env", "test_moved:Filed", "--env-option", f"data={data}"])
    assert set(meta_of(tmp_path / "run" / "results.jsonl")["recipe"]["env_files"]) == {"data"}
    os.utime(data / "world.json", (1, 1))  # the same content at another time
    q_search.main([*play, "2"])
    assert "other files" not in capsys.readouterr().err
    (data / "world.json").write_text(json.dumps(WORLD).replace("0.5", "0.7"))  # of the same size
    with pytest.raises(UserError, match=r"results.jsonl was begun with --env-files {'data': "):
        q_search.main([*play, "3"])
    warning = f"warning: {tmp_path}/run was begun with other files than --env-option names now: put them back\n"
    assert warning in capsys.readouterr().err
    q_search.main([*play, "3", "--overwrite"])


def test_a_fingerprint_is_of_names_sizes_and_content(tmp_path):
    def held(name: str = "data[1]", **texts: str) -> str:
        folder = tmp_path / name / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
        return fingerprint(str(tmp_path / name))

    first = held(a="1", b="2" * 99)
    assert first == held("copy", a="1", b="2" * 99) and len(first) == 16
    assert held(a="2") != first and held(a="1") == first
    assert held(b="2" * 50 + "3" + "2" * 48) != first and held(b="2" * 98) != first
    assert held("renamed", a="1", c="2" * 99) != first
    held(b="2" * 99)
    (tmp_path / "data[1]" / ".DS_Store").write_text("no change")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "deep").symlink_to(tmp_path / "copy" / "deep")  # a shop on another disk
    assert held() == held("linked") == first
    held("copy", a="2")
    assert held("linked") != first
    many = {f"f{i}": "x" for i in range(1100)}
    assert held("many", **many) == held("as many", **many) != held("as many", f0="y")


def test_a_gpus_default_precision_is_not_a_cpus(tmp_path, agent, fake_world, monkeypatch):
    argv = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--method", "greedy", "--limit"]
    q_search.main([*argv, "1"])
    monkeypatch.setattr(models, "device_and_dtype", lambda *_: (torch.device("cpu"), torch.bfloat16))
    with pytest.raises(UserError, match="begun with --precision float32, not bf16"):
        q_search.main([*argv, "2"])
    monkeypatch.undo()


# ------------------------------------------------------------------------------------------------- inputs, where they are


def test_inputs_move_with_their_run_and_what_they_became_later_is_told(tmp_path, capsys):
    """A run that got another's old name is not taken for it."""
    for name in ("old", "again"):
        run = tmp_path / "run"
        expert = wrote(run / "expert.jsonl", *LAKE)
        agent = wrote(run / "sft", expert=expert)
        trees = wrote(run / "trees.jsonl", sft=agent, expert=expert)
        labels = wrote(run / "q_labels.jsonl", trees=trees)
        qnet = wrote(run / "qnet", labels=labels, sft=agent)
        if name == "old":
            run.rename(tmp_path / "old")
    for run in (tmp_path / "old", tmp_path / "run"):
        assert cloned_from(run / "sft") == (run / "expert.jsonl", None)
        assert input_of(run / "trees.jsonl", "sft") == run / "sft" and not list(outdated(run / "qnet"))
    args = flags("--run", str(run))
    assert need(None, qnet, "train_qnet", args) == qnet and capsys.readouterr().err == ""
    agent.write_text("new")
    assert set(outdated(qnet)) == {(trees, agent), (qnet, agent)} and len(list(outdated(qnet))) == 2
    need(None, labels, "bellman", args)
    warning = f"warning: {trees} was made from another {agent} than there is now: make it again\n"
    assert capsys.readouterr().err == warning
    (run / "sft.meta.json").unlink()
    agent.unlink()
    wrote(agent, expert=labels).write_text("newer")  # it was trained again on what it had made
    assert list(outdated(labels)) == [(trees, agent)]
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    agent = wrote(tmp_path / "runs" / "sft", *LAKE, expert=labels)
    assert cloned_from(agent)[0].samefile(labels)


# ---------------------------------------------------------------------------------------------- modules and checkpoints


@pytest.mark.parametrize("module", ["envs.py", "envs/__init__.py"])
def test_a_module_of_ones_own_in_the_place_of_ours_is_named(module, tmp_path, monkeypatch, capsys):
    path = tmp_path / module
    monkeypatch.setitem(sys.modules, "envs", type("Module", (), {"__file__": str(path)}))
    with pytest.raises(SystemExit):
        runs.run_stage(lambda: envs.nothing)
    assert capsys.readouterr().err == f"error: {path} hides our module envs: rename it, or start elsewhere\n"


def test_a_folder_that_hides_the_data_or_the_environments_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("data", "environments.webshop"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"--env webshop: .*/data/__init__.py.*does a folder of yours hide one of ours"):
        envs.environment_class("webshop")


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        models.load_checkpoint(path, AutoModelForCausalLM)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path, agent):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty")
    for name, keep in (("weights cut", -100), ("header cut", 5), ("no weights", 0)):
        weights = shutil.copytree(agent, tmp_path / name) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])
        assert "no complete checkpoint?" in refused(weights.parent)
    weights.unlink()
    assert "no file named model.safetensors" in refused(weights.parent)
    (weights.parent / "config.json").write_text('{"model_type"')
    assert "not a valid JSON" in refused(weights.parent)


def test_an_adapter_that_is_no_lora_or_lacks_its_base_is_named(tmp_path, agent):
    def adapter(name: str, config: peft.PeftConfig) -> Path:
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(agent), config).save_pretrained(tmp_path / name)
        return tmp_path / name

    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        prompt = adapter(kind.__name__, kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
        assert "a trained prompt can't become weights" in refused(prompt)
    lora = adapter("lora", peft.LoraConfig(r=2, target_modules="all-linear"))
    settings = json.loads((lora / "adapter_config.json").read_text())
    for base in (str(tmp_path / "gone"), None):
        (lora / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
        assert f"its base model {base or '(none)'} is not there" in refused(lora)
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    weights = lora / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    refused(lora)
