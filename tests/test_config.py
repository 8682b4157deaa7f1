"""Settings: flags, bounds, presets, and what a run hands on."""

import dataclasses
import importlib
import json
import typing
from pathlib import Path

import pytest
from fakes import settings_of

import bellman
import build_trees
import q_search
import sft
import train_qnet
from integrations import chat_agent
from qlass import UserError, presets
from qlass.config import Run, bounds_in, flag
from qlass.runs import recipe_of

STAGES = [sft, build_trees, bellman, train_qnet, q_search]
NAMES = ("compare", "eto", "lookup", "ppo", "retry", "self_train", "tree_grpo", "tree_search")
MODULES = [*STAGES, *(importlib.import_module(f"experiments.{name}") for name in NAMES)]
MISTAKES = [
    (q_search, ["--methd", "qlass"], "--methd.*perhaps you meant --method"),
    (q_search, ["-M", "2", "0"], "-M 0: 1 or more is expected"),
    (q_search, ["-M", "2", "x"], "Error parsing -M"),
    (build_trees, ["--top-p", "1.5"], "--top-p 1.5: 0.01 to 1 is expected"),
    (bellman, ["--gamma", "nan"], "--gamma nan: 0 to 1 is expected"),
    (train_qnet, ["--lora", "0"], "--lora 0: 1 or more is expected"),
    (train_qnet, ["--load-in", "4bit", "--freeze"], "weights in few bits can't be trained; --lora"),
]


@pytest.mark.parametrize(("stage", "flags", "says"), MISTAKES)
def test_a_mistake_is_one_line(stage, flags, says, capsys):
    with pytest.raises(UserError, match=says) as error:
        settings_of(stage, *flags)
    assert "\n" not in str(error.value) and capsys.readouterr() == ("", "")


def test_flags_of_every_kind():
    flags = ["-M", "2", "4", "--show", "--env-option", "b=2", "--env-option", "b=3"]
    config = settings_of(q_search, "--method", "greedy", "qlass", *flags)
    assert (config.method, config.M, config.N, config.show) == (("greedy", "qlass"), (2, 4), (), True)
    assert config.env_option == ("b=3",)  # of two of a name the last one
    assert settings_of(sft, "--env", "my.worlds:Maze").run == Path("runs/maze")
    home = settings_of(q_search, "--run=~/run", "--env-option", "data=~/shop", "--stop", "a~b")
    assert (home.run, home.stop) == (Path.home() / "run", ("a~b",))
    assert home.env_option == (f"data={Path.home()}/shop",)
    trees = settings_of(build_trees, "--width", "2", "--limit", "9", "--device", "cpu")
    recipe = recipe_of(trees.recipe(), {})  # without what changes no byte
    assert recipe["width"] == 2 and not {"limit", "device", "run", "argv", "preset", "overwrite", "out"} & recipe.keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_command_tells_of_itself_on_a_page_and_its_settings_stay(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        settings_of(module, "--help")
    page = capsys.readouterr().out.splitlines()
    assert page[0] == module.__doc__.split("\n")[0]
    (options,) = [number for number, row in enumerate(page) if "--env-option of webshop: data, goals" in row]
    assert options <= 60 and (module not in STAGES or max(map(len, page)) <= 100)
    flags = {flag(field.name) for field in dataclasses.fields(module.Config)} - {"--argv"}
    assert flags <= {word.strip(",") for line in page for word in line.split()}


VALUES = [  # which the published rows have
    ("webshop", sft, {"n_expert": 100, "epochs": 0, "lr": 3e-3, "batch": 16, "candidates": "valid"}),
    ("webshop", build_trees, {"depth": 3, "rollouts": 6, "limit": 1000, "temperature": 1.5, "tasks": "new"}),
    ("webshop", bellman, {"gamma": 0.98}),
    ("webshop", train_qnet, {"epochs": 3, "patience": 3, "rank_weight": 4.0, "loss_on": "last", "max_tokens": 1024}),
    ("webshop", q_search, {"skip": 400, "limit": 0, "split": "test", "M": (2,)}),
    ("webshop", chat_agent, {"skip": 400, "limit": 0, "split": "test"}),  # the same tasks
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


def test_every_setting_of_a_preset_is_one_of_its_stage_within_bounds():
    kinds = {"run": Run} | {module.Config.stage: module.Config for module in reversed(MODULES)}
    for stages in [*presets.TINY.values(), *presets.PAPER.values(), presets.LORA]:
        for stage, settings in stages.items():
            hints = typing.get_type_hints(kinds.get(stage, q_search.Config), include_extras=True)  # as qval
            for name, value in settings.items():
                assert all(bounds.low <= value <= bounds.high for bounds in bounds_in(hints[name]))


def test_a_pretrained_model_has_the_papers_settings(agent):
    config = settings_of(sft, "--model", "meta-llama/Llama-2-7b-chat-hf")
    assert (config.preset, config.epochs, config.lr, config.batch) == ("paper", 3, 1e-5, 64)
    assert settings_of(sft, "--model", "m.gguf", "--lora", "16").lr == 2e-4
    assert settings_of(sft, "--model", "m.gguf", "--preset", "tiny").lr == 3e-3
    trees = settings_of(build_trees, "--sft", str(agent))  # a checkpoint without the tiny model's aids
    assert (trees.preset, trees.rollouts, trees.tasks, trees.depth) == ("paper", 1000, "cloned", 3)


def test_a_run_has_one_environment_seed_and_preset(tmp_path, capsys):
    begun = {"env": "frozenlake", "env_option": ["map=4x4"], "env_files": {}, "seed": 4, "preset": "paper"}
    (tmp_path / "run.json").write_text(json.dumps(begun))
    run = ["--run", str(tmp_path)]
    for flags in ([], ["--env", "frozenlake"], ["--env-option", "map=4x4"]):
        config = settings_of(build_trees, *run, *flags)
        assert (config.env, config.env_option, config.seed) == ("frozenlake", ("map=4x4",), 4)
        assert (config.preset, config.rollouts) == ("paper", 64)
    assert settings_of(build_trees, *run, "--seed", "5", "--preset", "tiny").rollouts == 600
    for flags in (["--env", "webshop"], ["--env-option", "map=8x8"], ["--env-option", "slippery=true"]):
        with pytest.raises(UserError, match=rf"{tmp_path} is of frozenlake map=4x4, not of .*: leave the flags out"):
            settings_of(build_trees, *run, *flags)
    assert settings_of(q_search, *run, "--env", "webshop").env_option == ()  # a search may play elsewhere
    assert f"warning: {tmp_path} is of frozenlake map=4x4, not of webshop: its agent plays" in capsys.readouterr().err
    assert settings_of(q_search, *run, "--env-option", "stray=0").env_option == ("map=4x4", "stray=0")
    for named in (["--run="], ["--run", ""]):  # "--run $RUN" without such a variable
        with pytest.raises(UserError, match="--run names no folder"):
            settings_of(sft, *named)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(UserError, match=r"run\.json: not a JSON object, but a list"):
        settings_of(sft, *run)
    (tmp_path / "run.json").write_text(json.dumps(begun | {"preset": "tiny"}))
    assert settings_of(sft, *run, "--model", "m.gguf").lr == 3e-3  # and not the paper's 1e-5
    assert f"warning: {tmp_path} was begun with the preset tiny" in capsys.readouterr().err
