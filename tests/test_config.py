"""Settings: flags, bounds, presets, and what a run hands on."""

import ast
import dataclasses
import importlib
import re
import tomllib
from pathlib import Path

import pytest
from fakes import ROOT, settings_of

import bellman
import build_trees
import q_search
import sft
import train_qnet
from environments import environment_class, options_of
from qlass import settings
from qlass.device import device_and_precision
from qlass.settings import PRESETS

STAGES = [sft, build_trees, bellman, train_qnet, q_search]
NAMES = ("compare", "eto", "ppo", "retry", "self_train", "tree_grpo", "tree_search")
MODULES = [*STAGES, *(importlib.import_module(f"experiments.{name}") for name in NAMES)]


SETTINGS = [  # the flags of a command, and what they make of its settings
    # A run has the name of its environment.
    (sft, "--env my.worlds:Maze", {"run": Path("runs/maze")}),
    # The tiny model has settings for each environment.
    (build_trees, "--env webshop", {"preset": "tiny", "limit": 1000}),
    (build_trees, "--env alfworld", {"preset": "tiny", "limit": 600}),
    (build_trees, "--env my.worlds:Maze", {"preset": "tiny", "limit": 250}),
    # A pretrained model has the paper's, and LoRA a rate of its own.
    (sft, "--model meta-llama/Llama-2-7b-chat-hf", {"preset": "paper", "epochs": 3, "lr": 1e-5, "batch": 64}),
    (sft, "--model org/m --lora 16", {"lr": 2e-4}),
    (build_trees, "--preset paper", {"preset": "paper", "rollouts": 1000, "tasks": "cloned", "depth": 3}),
    # A file of demonstrations is read to its end.
    (sft, "", {"n_expert": 1000}),
    (sft, "--expert mine.jsonl", {"n_expert": None}),
    # Options of an environment add up, also to those of its preset; M and N are several numbers.
    (build_trees, "--env-option a=1 --seed 1 --env-option=b=2", {"env_option": ("a=1", "b=2")}),
    (build_trees, "--env frozenlake --env-option map=4x4", {"env_option": ("map=4x4",)}),
    (build_trees, "--env frozenlake --env-option slippery=true", {"env_option": ("map=lakes", "slippery=true")}),
    (q_search, "-M 2 4 -N 6", {"M": (2, 4), "N": (6,)}),
]
LAKE = {"env": "frozenlake", "env_option": ("map=4x4",), "seed": 4, "preset": "tiny", "rollouts": 600}
OF_A_RUN = [  # the same in a run that is begun
    (build_trees, "", LAKE),
    (build_trees, "--env frozenlake", LAKE),
    (build_trees, "--env-option map=4x4", LAKE),
    (build_trees, "--seed 5", LAKE | {"seed": 5}),
    (q_search, "--env-option stray=0", {"env_option": ("map=4x4", "stray=0")}),
]


def test_lora_in_the_file_of_a_run_has_a_rate_of_its_own(tmp_path):
    text = (PRESETS / "paper" / "any.toml").read_text()
    (tmp_path / "settings.toml").write_text(text.replace("[sft]", "[sft]\nlora = 16"))
    assert settings_of(sft, f"--run {tmp_path}").lr == 2e-4


@pytest.mark.parametrize(("stage", "flags", "expected"), SETTINGS)
def test_flags_choose_the_preset_and_go_before_it(stage, flags, expected):
    assert expected.items() <= vars(settings_of(stage, flags)).items()


@pytest.mark.parametrize(("stage", "flags", "expected"), OF_A_RUN)
def test_a_run_has_one_environment_and_seed(stage, flags, expected):
    settings.write_settings(settings_of(build_trees, "--run . --env frozenlake --env-option map=4x4 --seed 4"))
    assert expected.items() <= vars(settings_of(stage, f"--run . {flags}")).items()


def test_a_recipe_has_no_runtime_flags():
    recipe = settings_of(build_trees, "--width 2 --limit 9 --plain").recipe()
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


def test_no_row_of_a_table_stands_at_the_margin_where_help_would_join_it_to_the_next():
    commands = [file for file in ROOT.glob("*/*.py") if "run_stage(main)" in file.read_text(encoding="utf-8")]
    assert len(commands) > 20
    for file in commands:
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False)
        assert not re.search(r"^\w[\w,. ]*? {2,}\S", doc.partition("\n")[2], re.M), file


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
            config = settings_of(module, f"--env {tables['run']['env']} --preset {file.parent.name}")  # none is missing
            twice = {name for name in table.keys() & fields.keys() if fields[name] not in (None, dataclasses.MISSING)}
            assert twice <= {"env", "env_option", "seed", "model"} and config.preset == file.parent.name


def test_the_file_of_a_run_has_the_numbers_that_run(tmp_path, capsys):
    """A flag goes before the file, the file before the preset; --help shows what applies."""
    run = "--run ."
    settings.write_settings(settings_of(sft, rf"{run} --model org/m --seed 4 --env-option 'name=a\"b'"))
    file = tmp_path / "settings.toml"
    config = settings_of(sft, run)  # stopped before its first state, it goes on with its own model
    assert (config.model, config.seed, config.env_option) == ("org/m", 4, ('name=a\\"b',))
    file.write_text(file.read_text().replace("epochs = 3", "epochs = 7").replace("lr = 1e-5", "lr = 1e-4"))
    assert settings_of(sft, run).epochs == 7 and settings_of(sft, f"{run} --epochs 8").epochs == 8
    capsys.readouterr()
    with pytest.raises(SystemExit):
        settings_of(sft, f"{run} --batch 5 --help")
    page = " ".join(capsys.readouterr().out.split())
    assert "(default: 7)" in page and "(default: 0.0001)" in page and "(default: org/m)" in page
