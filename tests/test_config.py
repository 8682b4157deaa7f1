"""Settings: flags, bounds, presets, and what a run hands on."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
from fakes import settings_of

import bellman
import build_trees
import q_search
import sft
import train_qnet
from qlass import UserError, presets
from qlass.settings import Run

STAGES = [sft, build_trees, bellman, train_qnet, q_search]
NAMES = ("compare", "eto", "ppo", "retry", "self_train", "tree_grpo", "tree_search")
MODULES = [*STAGES, *(importlib.import_module(f"experiments.{name}") for name in NAMES)]


@pytest.mark.parametrize(
    ("stage", "flags"), [(q_search, ["-M", "0"]), (bellman, ["--gamma", "nan"]), (sft, ["--lr", "inf"])]
)
def test_a_number_that_no_stage_can_work_with_is_refused(stage, flags):
    with pytest.raises(UserError, match="Input should be "):
        settings_of(stage, *flags)


def test_a_run_has_its_environments_name_and_a_recipe_no_runtime_flags():
    assert settings_of(sft, "--env", "my.worlds:Maze").run == Path("runs/maze")
    recipe = settings_of(build_trees, "--width", "2", "--limit", "9", "--device", "cpu").recipe()
    assert recipe["width"] == 2 and not {"limit", "device", "run", "preset", "overwrite", "out"} & recipe.keys()


def test_a_device_without_what_is_needed_is_refused_and_one_without_bf16_takes_float32(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch sees no GPU"):
        settings_of(build_trees, "--device", "cuda").recipe()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device in ("mps", "cuda:1", "gpu"):
        with pytest.raises(SystemExit):
            settings_of(build_trees, "--device", device)
    for supported, precision in (False, "float32"), (True, "bf16"):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, supported=supported: supported)
        assert settings_of(build_trees).recipe()["precision"] == precision
    assert capsys.readouterr().err.count("this GPU computes no bf16") == 1


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_help_begins_with_what_is_read_and_written(module, capsys):
    with pytest.raises(SystemExit):
        settings_of(module, "--help")
    page = capsys.readouterr().out
    assert module.__doc__.split("\n")[0] in page
    if module in STAGES:
        assert page.index("reads  ") < page.index("writes  ") < page.index(f"python {module.__name__}.py")


VALUES = [  # which the published rows have
    ("webshop", sft, {"n_expert": 100, "epochs": 34, "lr": 3e-3, "batch": 16, "candidates": "valid"}),
    ("webshop", build_trees, {"depth": 3, "rollouts": 6, "limit": 1000, "temperature": 1.5, "tasks": "new"}),
    ("webshop", bellman, {"gamma": 0.98}),
    ("webshop", train_qnet, {"epochs": 3, "patience": 3, "rank_weight": 4.0, "loss_on": "last", "max_tokens": 1024}),
    ("webshop", q_search, {"skip": 0, "limit": 0, "split": "test", "M": (2,)}),  # no preset hides tasks
    ("alfworld", build_trees, {"depth": 8, "rollouts": 6, "limit": 600, "env_option": ("thoughts=false",)}),
    ("alfworld", train_qnet, {"epochs": 6, "patience": 6, "rank_weight": 0.0}),
    ("sciworld", sft, {"n_expert": 300, "epochs": 12, "batch": 4, "env_option": ("tasks=eto",)}),
    ("frozenlake", build_trees, {"width": 4, "rollouts": 600, "prune": "tail", "temperature": 1.5}),
    ("my.worlds:Maze", build_trees, {"rollouts": 24, "limit": 250}),
]


@pytest.mark.parametrize(("env", "stage", "values"), VALUES)
def test_the_tiny_models_settings(env, stage, values):
    config = settings_of(stage, "--env", env)
    assert config.preset == "tiny" and {name: getattr(config, name) for name in values} == values
    for name in values.keys() & {"rollouts", "lr", "patience"}:
        assert getattr(settings_of(stage, "--env", env, f"--{name}", "2"), name) == 2  # a flag says otherwise


def test_a_pretrained_model_has_the_papers_settings(agent):
    config = settings_of(sft, "--model", "meta-llama/Llama-2-7b-chat-hf")
    assert (config.preset, config.epochs, config.lr, config.batch) == ("paper", 3, 1e-5, 64)
    assert settings_of(sft, "--model", "m.gguf", "--lora", "16").lr == 2e-4
    assert settings_of(sft, "--model", "m.gguf", "--preset", "tiny").lr == 3e-3
    assert settings_of(sft).n_expert == 100 and settings_of(sft, "--expert", "mine.jsonl").n_expert is None
    trees = settings_of(build_trees, "--sft", str(agent))  # a checkpoint without the tiny model's aids
    assert (trees.preset, trees.rollouts, trees.tasks, trees.depth) == ("paper", 1000, "cloned", 3)


def test_every_setting_of_a_preset_is_one_of_its_stage():
    kinds = {"run": Run} | {module.Config.stage: module.Config for module in reversed(MODULES)}
    tables = presets.PRESETS
    for stages in [*tables["tiny"].values(), *tables["paper"].values(), tables["lora"]]:
        for stage, settings in stages.items():
            fields = {field.name for field in dataclasses.fields(kinds.get(stage, q_search.Config))}  # as qval
            assert settings.keys() <= fields


def test_a_run_has_one_environment_seed_and_preset(tmp_path):
    begun = {"env": "frozenlake", "env_option": ["map=4x4"], "seed": 4, "preset": "paper", "layout": 2}
    (tmp_path / "run.json").write_text(json.dumps(begun))
    run = ["--run", str(tmp_path)]
    for flags in ([], ["--env", "frozenlake"], ["--env-option", "map=4x4"]):
        config = settings_of(build_trees, *run, *flags)
        assert (config.env, config.env_option, config.seed) == ("frozenlake", ("map=4x4",), 4)
        assert (config.preset, config.rollouts) == ("paper", 64)
    assert settings_of(build_trees, *run, "--seed", "5", "--preset", "tiny").rollouts == 600
    for flags in (["--env", "webshop"], ["--env-option", "slippery=true"]):
        with pytest.raises(UserError, match=rf"{tmp_path} is of frozenlake map=4x4: name another --run"):
            settings_of(build_trees, *run, *flags)
    with pytest.raises(UserError, match="name another --run"):
        settings_of(q_search, *run, "--env", "webshop")
    assert settings_of(q_search, *run, "--env-option", "stray=0").env_option == ("map=4x4", "stray=0")
    (tmp_path / "run.json").write_text(json.dumps({"env": "frozenlake"}))
    with pytest.raises(UserError, match=r"run\.json: of another version of this code"):
        settings_of(build_trees, *run)
