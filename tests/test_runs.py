"""Every command of the scripts in runs/ and of the pages has flags that its stage knows."""

import functools
import importlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template
from types import SimpleNamespace

import pytest

import bellman
import q_search
from qlass.results import protocol

ROOT = Path(__file__).parents[1]
SOURCED = {"common.sh", "table5.sh"}  # by the others
SCRIPTS = sorted(path for path in (ROOT / "runs").rglob("*.sh") if path.name not in SOURCED)
COMMANDS = "bash basename cat date dirname env grep head ls mkdir nproc printf rm sed seq sort tail tee uname wc"


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Run a script of a copy, whose `python` only notes what it is asked for: commands, each [file.py, flag, ...]."""
    root = tmp_path_factory.mktemp("copy")
    bin_, log = root / "bin", root / "log"
    bin_.mkdir()
    for script in (ROOT / "runs").rglob("*.sh"):
        copy = root / script.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, copy)
    for name in COMMANDS.split():  # nothing else can be started, so nothing is installed, fetched or trained
        if path := shutil.which(name):
            (bin_ / name).symlink_to(path)
    # Behind each argument a unit separator, behind each command a record separator.
    note = """{ printf '%s\\037' "$@"; printf '\\036'; } >> "$LOG"\n"""
    launched = "shift 3\n" + note
    for name, text in {"python": note, "python3": note, "torchrun": launched, "cp": "", "mv": ""}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}")
        (bin_ / name).chmod(0o755)

    @functools.cache
    def run(script, *arguments, **variables):
        log.write_text("")
        environment = {"PATH": str(bin_), "LOG": str(log), "HOME": str(root)} | variables
        command = ["bash", root / script, *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{script}: {done.stderr}"
        commands = [line.split("\037")[:-1] for line in log.read_text().split("\036")[:-1]]
        return [command[command[0] == "-m" :] if command else command for command in commands]  # python -m NAME

    return run


@pytest.fixture(autouse=True)
def targets(monkeypatch):
    """Those of experiments/qval/targets.py stay in this test."""
    monkeypatch.setattr("bellman.TARGETS", bellman.TARGETS.copy())


@functools.cache
def parsed(*command):
    """The arguments as the stage of a command reads them."""
    name, *flags = command
    module = importlib.import_module(name.removesuffix(".py"))
    if hasattr(module, "__path__"):  # python -m PACKAGE, or python -m PACKAGE COMMAND
        command_of = flags[:1] == ["search"]
        module = importlib.import_module(f"{name}.{'search' if command_of else '__main__'}")
        flags = flags[command_of:]
    try:
        return sys.modules[module.main.__module__].arguments(flags)
    except SystemExit:
        pytest.fail(f"python {' '.join(command)}: {name} does not know these flags")


def stages(commands):
    """What each stage was asked for: {file: [arguments]}."""
    return {name: [parsed(*c) for c in commands if c[0] == name] for name, *_ in commands}


@pytest.mark.parametrize("script", [str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_every_flag_exists(stage, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    commands = [command for command in stage(script, MODEL="model.gguf") if command and command[0] not in ("-", "-c")]
    assert commands, f"{script} runs no stage"
    for command in commands:
        parsed(*command)


@pytest.mark.parametrize(
    ("script", "depth", "tree_steps"), [("webshop", 3, 5), ("sciworld", 6, 18), ("alfworld", 8, 18)]
)
def test_hyperparameters_of_table_5(stage, script, depth, tree_steps):
    large = {"TRAIN": "torchrun --nproc-per-node 8 --", "FITS": "--gradient-checkpointing"}
    calls = stages(stage(f"runs/paper/{script}.sh", ETO="/eto", **large))
    (sft,), (trees,), (bellman,), (qnet,) = (calls[f"{s}.py"] for s in ("sft", "build_trees", "bellman", "train_qnet"))
    assert (sft.model, sft.epochs, sft.lr, sft.batch) == ("meta-llama/Llama-2-7b-chat-hf", 3, 1e-5, 64)
    assert (sft.max_tokens, str(sft.expert), sft.lora) == (4096, f"/eto/{script}_sft.json", None)
    assert (trees.depth, trees.width, trees.temperature, trees.steps, trees.limit) == (depth, 3, 0.7, tree_steps, 0)
    assert (bellman.gamma, bellman.target) == (0.9, "q")
    assert (qnet.epochs, qnet.lr, qnet.batch, qnet.loss_on, qnet.freeze) == (2, 1e-5, 64, "all", False)
    searches = calls["q_search.py"]
    assert {s.run for s in [sft, trees, bellman, qnet, *searches, *calls["report.py"]]} == {sft.run}
    assert {s.truncate for s in [trees, qnet, *searches]} == {None if script == "webshop" else "oldest"}


@pytest.mark.parametrize(
    ("script", "options", "data", "limits", "M", "N"),
    [
        ("webshop", ["human_goals=true"], {"data", "split_file"}, {"test": 5}, {2, 4, 6}, {2, 4, 6, 8, 10}),
        ("fig4", ["human_goals=true"], {"data", "split_file"}, {"test": 5}, (), ()),
        ("sciworld", [], {"split_file"}, {"test_seen": 40, "test_unseen": 40}, {2}, {2, 4, 6}),
        ("alfworld", [], {"data"}, {"valid_seen": 40, "valid_unseen": 40}, {2}, {2, 4, 6}),
    ],
)
def test_protocols_of_the_paper(stage, script, options, data, limits, M, N):
    calls = stages(stage(f"runs/paper/{script}.sh", ETO="/eto", WEBSHOP="/shop", ALFWORLD_DATA="/games"))
    searches = [*calls["q_search.py"], *calls.get("experiments.compare", [])]
    best_of_n = {f"best_of_n N={n} select={by}" for n in N for by in ("oracle", "q")}
    plans = [map(str, q_search.methods(search)[name]) for search in searches for name in search.method]
    assert {*itertools.chain(*plans)} == {"greedy", *(f"qlass M={m}" for m in M), *best_of_n}
    assert {search.split: search.max_steps for search in searches} == limits
    told = {"version": "0", "options": options, "data": dict.fromkeys(data, "content")}
    told |= {"measure": "reward, 0 to 1; success is 1", "temperature": 0.7, "tokens": "real"}
    for search in searches:
        named = dict(option.split("=") for option in search.env_option)
        search.sft, search.env_files = Path("-"), {name: "content" for name in named if named[name][0] == "/"}
        world = SimpleNamespace(version="0", max_steps=search.max_steps)
        assert protocol(search, world) == told | {"environment": search.env, "max_steps": search.max_steps}
        assert (search.seed, search.limit, search.skip) == (0, 0, 0)


def test_reproduce_runs_every_seed_in_its_folder_and_reports_on_all(stage):
    calls = stages(stage("runs/reproduce.sh", "--seeds", "2"))
    folders = [Path("runs/webshop"), Path("runs/webshop-seed1")]
    assert {(s.run, s.seed) for s in calls["experiments.compare"]} >= set(zip(folders, (0, 1), strict=True))
    runs = [s for name, several in calls.items() for s in several if name != "report.py"]
    assert all(str(s.run).startswith(str(folders[s.seed])) for s in runs)
    assert [Path(run) for run in calls["report.py"][-1].results] == folders


@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))])
def test_stages_know_the_flags_that_pages_name(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    variables = dict(re.findall(r'^    (\w+)="(.*)"$', text, re.M))
    for line in re.findall(r"^ *(?:\w+=\S+ )*python ((?:-m experiments\.|\w+\.py).*)$", text, re.M):
        command = shlex.split(Template(line).safe_substitute(variables), comments=True)
        parsed(*command[command[0] == "-m" :])
