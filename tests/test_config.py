"""Settings: flags, bounds, presets, and what a run hands on."""

import dataclasses
import importlib
import json
import shutil
import tomllib
from pathlib import Path

import pytest
from fakes import settings_of

import bellman
import build_trees
import q_search
import sft
import train_qnet
from environments import environment_class, options_of
from qlass import UserError, settings
from qlass.device import device_and_precision
from qlass.inputs import find_agent
from qlass.settings import PRESETS
from qlass.tiny import AIDS

STAGES = [sft, build_trees, bellman, train_qnet, q_search]
NAMES = ("compare", "eto", "ppo", "retry", "self_train", "tree_grpo", "tree_search")
MODULES = [*STAGES, *(importlib.import_module(f"experiments.{name}") for name in NAMES)]


@pytest.mark.parametrize(
    ("stage", "flags"), [(q_search, ["-M", "0"]), (bellman, ["--gamma", "1.5"]), (sft, ["--lr", "inf"])]
)
def test_a_number_that_no_stage_can_work_with_is_refused(stage, flags):
    with pytest.raises(UserError, match="Input should be "):
        settings_of(stage, *flags)


def test_a_run_has_its_environments_name_and_a_recipe_no_runtime_flags():
    assert settings_of(sft, "--env", "my.worlds:Maze").run == Path("runs/maze")
    recipe = settings_of(build_trees, "--width", "2", "--limit", "9", "--plain").recipe()
    assert recipe["width"] == 2 and not {"limit", "plain", "run", "preset", "overwrite", "out"} & recipe.keys()


def test_a_device_without_bf16_takes_float32(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for supported, precision in (False, "float32"), (True, "bf16"):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, supported=supported: supported)
        assert device_and_precision(settings_of(build_trees))[1] == precision


@pytest.mark.parametrize("module", STAGES, ids=lambda module: module.__name__)
def test_help_begins_with_what_is_read_and_written(module, capsys):
    with pytest.raises(SystemExit):
        settings_of(module, "--help")
    page = capsys.readouterr().out
    assert module.__doc__.split("\n")[0] in page
    assert page.index("reads  ") < page.index("writes  ") < page.index(f"python {module.__name__}.py")
    plain = " ".join(page.split())
    assert page.count("\n") < 66 and "default: None" not in plain and "(all) (default" not in plain


@pytest.mark.parametrize(("env", "limit"), [("webshop", 1000), ("alfworld", 600), ("my.worlds:Maze", 250)])
def test_the_tiny_model_has_settings_for_each_environment(env, limit):
    config = settings_of(build_trees, "--env", env)
    assert (config.preset, config.limit) == ("tiny", limit)


def test_a_pretrained_model_has_the_papers_settings():
    config = settings_of(sft, "--model", "meta-llama/Llama-2-7b-chat-hf")
    assert (config.preset, config.epochs, config.lr, config.batch) == ("paper", 3, 1e-5, 64)
    assert settings_of(sft, "--model", "org/m", "--lora", "16").lr == 2e-4
    assert settings_of(sft).n_expert == 1000 and settings_of(sft, "--expert", "mine.jsonl").n_expert is None
    trees = settings_of(build_trees, "--preset", "paper")
    assert (trees.preset, trees.rollouts, trees.tasks, trees.depth) == ("paper", 1000, "cloned", 3)


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*/*.toml")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_number_stands_in_the_presets_or_in_a_class_and_not_in_both(file):
    """But for what the first flags of a run say."""
    tables = tomllib.loads(file.read_text("utf-8"))
    assert tables["run"]["env"] in (file.stem, "MODULE:CLASS")
    assert (tables["sft"]["model"] == "tiny") == (file.parent.name == "tiny")
    if file.stem != "any":
        options_of(environment_class(file.stem), tables["run"]["env_option"])  # a UserError for an unknown one
    for module in MODULES:
        table = tables["run"] | tables.get(module.Config.stage, {})
        fields = {field.name: field.default for field in dataclasses.fields(module.Config)}
        assert table.keys() - {"with_lora"} <= fields.keys()
        if module in STAGES:
            config = settings_of(module, "--env", tables["run"]["env"], "--preset", file.parent.name)  # none is missing
            twice = {name for name in table.keys() & fields.keys() if fields[name] not in (None, dataclasses.MISSING)}
            assert twice <= {"env", "env_option", "seed", "model"} and config.preset == file.parent.name


def test_the_file_of_a_run_has_the_numbers_that_run(tmp_path, capsys):
    """A flag goes before the file, the file before the preset; --help shows what applies."""
    run = ["--run", "."]
    settings.write_settings(settings_of(sft, *run, "--model", "org/m", "--seed", "4", "--env-option", 'name=a\\"b'))
    file = tmp_path / "settings.toml"
    config = settings_of(sft, *run)  # stopped before its first state, it goes on with its own model
    assert (config.model, config.seed, config.env_option) == ("org/m", 4, ('name=a\\"b',))
    file.write_text(file.read_text().replace("epochs = 3", "epochs = 7").replace("lr = 1e-5", "lr = 1e-4"))
    assert settings_of(sft, *run).epochs == 7 and settings_of(sft, *run, "--epochs", "8").epochs == 8
    capsys.readouterr()
    with pytest.raises(SystemExit):
        settings_of(sft, *run, "--batch", "5", "--help")
    page = " ".join(capsys.readouterr().out.split())
    assert "(default: 7)" in page and "(default: 0.0001)" in page and "(default: org/m)" in page
    for old, new, says in (
        ("epochs = 7", "epoch = 7", "settings.toml: .*epoch: Unexpected keyword"),
        ("epochs = 7", "epochs = 0", "settings.toml: epochs: Input should be greater than 0"),
        (file.read_text(), "", "settings.toml has not the settings of a run: 'run'"),
    ):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=says):
            settings_of(sft, *run)
        file.write_text(text)


@pytest.mark.parametrize("own", ["tiny", "org/m"])
def test_a_run_is_of_one_kind_of_model(own, agent):
    run = ["--run", "run"]
    settings.write_settings(settings_of(sft, *run, "--model", own))
    other, preset = ("org/m", "paper") if own == "tiny" else ("tiny", "tiny")
    for flags in (["--model", other], ["--preset", preset]):
        with pytest.raises(UserError, match=f"{' '.join(flags)}: .*run is a run of --preset .*: name another"):
            settings_of(sft, *run, *flags)
    with pytest.raises(UserError, match="--model org/m: runs/webshop is a run of --preset tiny"):
        settings_of(sft, "--model", "org/m", "--preset", "tiny")
    config = settings_of(build_trees, *run, "--sft", str(agent))
    if own == "tiny":
        with pytest.raises(UserError, match=r"--sft .* is a run of --preset tiny"):
            find_agent(config.sft, config)
    else:
        assert find_agent(config.sft, config) == agent


def test_the_tiny_models_folder_is_no_model_to_begin_with(agent, tmp_path):
    """Its tokens and its aids are of the tiny presets; a policy.json may leave out what it is to be by default."""
    folder = shutil.copytree(agent, tmp_path / "model")
    for policy, tiny in ((AIDS, True), ({"temperature": 0.5}, False), ({}, False)):
        (folder / "policy.json").write_text(json.dumps(policy))
        config = settings_of(sft, "--run", "run", "--model", str(folder))
        if tiny:
            with pytest.raises(UserError, match="model: a tiny model, which is trained from scratch: --model tiny"):
                sft.start_of(config)
        else:
            assert sft.start_of(config) == folder and find_agent(folder, config) == folder


def test_options_of_an_environment_add_up():
    options = ("--env-option", "a=1", "--seed", "1", "--env-option=b=2")
    assert settings_of(build_trees, *options).env_option == ("a=1", "b=2")
    for option, together in (("map=4x4", ("map=4x4",)), ("slippery=true", ("map=lakes", "slippery=true"))):
        assert settings_of(build_trees, "--env", "frozenlake", "--env-option", option).env_option == together
    assert settings_of(q_search, "-M", "2", "4", "-N", "6").M == (2, 4)
    for twice in (["-M", "2", "4", "-M", "6"], ["--temperature=1", "--temperature", "1"]):
        with pytest.raises(UserError, match=f"{twice[0][:3]}.* stands twice"):
            settings_of(q_search, *twice)


def test_a_run_has_one_environment_and_seed(tmp_path):
    run = ["--run", "."]
    begun = settings_of(build_trees, *run, "--env", "frozenlake", "--env-option", "map=4x4", "--seed", "4")
    settings.write_settings(begun)
    for flags in ([], ["--env", "frozenlake"], ["--env-option", "map=4x4"]):
        config = settings_of(build_trees, *run, *flags)
        assert (config.env, config.env_option, config.seed) == ("frozenlake", ("map=4x4",), 4)
        assert (config.preset, config.rollouts) == ("tiny", 600)
    assert settings_of(build_trees, *run, "--seed", "5").seed == 5
    for flags in (["--env", "webshop"], ["--env-option", "slippery=true"]):
        with pytest.raises(UserError, match=r"is of frozenlake map=4x4, as are its files: name another --run"):
            settings_of(build_trees, *run, *flags)
    assert settings_of(q_search, *run, "--env-option", "stray=0").env_option == ("map=4x4", "stray=0")
    (tmp_path / "settings.toml").rename(tmp_path / "run.json")
    with pytest.raises(UserError, match=r"of another version of this code: give another --run"):
        settings_of(build_trees, *run)
