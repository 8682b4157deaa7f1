"""What scripts, pages, docstrings and messages name is there: commands with flags that their stage knows, files."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import typing
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import SimpleNamespace
from unittest import mock

import pytest
from tyro import MISSING

import envs
from experiments import compare
from q_search import methods_of
from qlass import settings
from qlass.chat import Rendering
from qlass.results import protocol

ROOT = Path(__file__).parents[1]
SOURCED = {"common.sh", "table5.sh"}  # by the others
ARGUMENTS = {"runs/equal_data.sh": ["100"]}  # of scripts that do nothing without
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
    launched = "shift 2\n" + note
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


def parsed(*command):
    """The settings as the module of a command reads them; a run has begun behind its first stage."""
    name, *flags = command
    module = importlib.import_module(name.removesuffix(".py"))
    if hasattr(module, "__path__"):  # python -m PACKAGE, or python -m PACKAGE search
        searches = flags[:1] == ["search"]
        module = importlib.import_module(f"{name}.{'search' if searches else '__main__'}")
        flags = flags[searches:]
    if not issubclass(module.Config, settings.Run):
        required = any(field.default is dataclasses.MISSING for field in dataclasses.fields(module.Config))
        return config.parse(module.Config, flags, MISSING if required else None)
    read = settings.read(module.Config, module.__doc__, flags)
    if read.stage == "sft" and not (read.run / "run.json").exists():
        read.run.mkdir(parents=True, exist_ok=True)
        shared = {name: getattr(read, name) for name in ("env", "env_option", "seed", "preset")}
        (read.run / "run.json").write_text(json.dumps(shared))
    return read


def stages(commands):
    """What each stage was asked for: {file: [settings]}."""
    asked = {name: [] for name, *_ in commands}
    for name, *flags in commands:
        asked[name].append(parsed(name, *flags))
    return asked


@pytest.mark.parametrize("script", [str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_every_flag_exists(stage, script):
    Path("model.gguf").touch()
    asked = stage(script, *ARGUMENTS.get(script, []), MODEL="model.gguf")
    commands = [command for command in asked if command and command[0] not in ("-", "-c")]
    assert commands, f"{script} runs no stage"
    for command in commands:
        parsed(*command)


@pytest.mark.parametrize(
    ("script", "depth", "tree_steps"), [("webshop", 3, 5), ("sciworld", 6, 18), ("alfworld", 8, 18)]
)
def test_hyperparameters_of_table_5(stage, script, depth, tree_steps):
    large = {"TRAIN": "torchrun --nproc-per-node 8", "FITS": "--gradient-checkpointing"}
    calls = stages(stage(f"runs/paper/{script}.sh", ETO="/eto", **large))
    (sft,), (trees,), (bellman,), (qnet,) = (calls[f"{s}.py"] for s in ("sft", "build_trees", "bellman", "train_qnet"))
    assert (sft.model, sft.epochs, sft.lr, sft.batch) == ("meta-llama/Llama-2-7b-chat-hf", 3, 1e-5, 64)
    assert (sft.max_tokens, str(sft.expert), sft.lora) == (4096, f"/eto/{script}_sft.json", None)
    assert (trees.depth, trees.width, trees.steps, trees.limit, trees.tasks) == (depth, 3, None, 0, "cloned")
    assert envs.environment_class(script).tree_steps == tree_steps
    assert (bellman.gamma, bellman.target) == (0.9, "q")
    assert (qnet.epochs, qnet.lr, qnet.batch, qnet.loss_on, qnet.rank_weight) == (2, 1e-5, 64, "all", 0)
    assert not (qnet.freeze or qnet.lora) and qnet.max_tokens == 4096
    searches = calls["q_search.py"]
    assert {s.temperature for s in [trees, *searches]} == {None} and Rendering().temperature == 0.7
    assert {s.run for s in [sft, trees, bellman, qnet, *searches, *calls["reporting"]]} == {sft.run}
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
    places = {"ETO": "/eto", "WEBSHOP": "/shop", "ALFWORLD_DATA": "/games"}
    for command in stage("runs/paper/webshop.sh", **places)[:1] if script == "fig4" else ():
        parsed(*command)  # the run that it goes on with
    calls = stages(stage(f"runs/paper/{script}.sh", **places))
    plans = [map(str, methods_of(name, search)) for search in calls["q_search.py"] for name in search.method]
    searches = [*calls["q_search.py"], *calls.get("experiments.compare", [])]
    for search in calls.get("experiments.compare", []):
        plans.append(map(str, compare.plan_of(None, search)))
    best_of_n = {f"best_of_n N={n} select={by}" for n in N for by in ("oracle", "q")}
    assert {*itertools.chain(*plans)} == {"greedy", *(f"qlass M={m}" for m in M), *best_of_n}
    told = {"version": "0", "options": options, "data": dict.fromkeys(data, "content")}
    told |= {"measure": "reward, 0 to 1; success is 1", "temperature": 0.7, "tokens": "real"}
    for search in searches:
        named = dict(option.split("=") for option in search.env_option)
        files = {name: "content" for name in named if named[name][0] == "/"}
        steps = search.max_steps or envs.environment_class(search.env).max_steps
        settings = {"env_option": search.env_option, "env_files": files}
        world = SimpleNamespace(version="0", max_steps=steps, settings=settings)
        own = {"environment": search.env, "max_steps": limits[search.split]}
        assert protocol(search, world, Path("-")) == told | own
        assert (search.seed, search.limit, search.skip) == (0, 0, 0)
    assert {search.split for search in searches} == limits.keys()


def test_reproduce_runs_every_seed_in_its_folder_and_reports_on_all(stage):
    calls = stages(stage("runs/reproduce.sh", "--seeds", "2"))
    folders = [Path("runs/webshop"), Path("runs/webshop-seed1")]
    assert {(s.run, s.seed) for s in calls["experiments.compare"]} >= set(zip(folders, (0, 1), strict=True))
    runs = [s for name, several in calls.items() for s in several if name != "reporting"]
    assert all(str(s.run).startswith(str(folders[s.seed])) for s in runs)
    assert [Path(run) for run in calls["reporting"][-1].results] == folders


@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))])
def test_stages_know_the_flags_that_pages_name(page):
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    variables = dict(re.findall(r'^    (\w+)="(.*)"$', text, re.M))
    for line in re.findall(r"^ *(?:\w+=\S+ )*python ((?:-m experiments\.|\w+\.py).*)$", text, re.M):
        command = shlex.split(Template(line).safe_substitute(variables), comments=True)
        parsed(*command[command[0] == "-m" :])


PROGRAMS = [path for place in ("*.py", "experiments/**/*.py", "integrations/*.py") for path in ROOT.glob(place)]
DATA = sorted(ROOT.glob("data/*.py"))  # which need no package, so they read their flags by argparse
OTHERS = "qlass/**/*.py environments/**/*.py reporting/*.py docs/*.py Makefile README.md docs/*.md data/*.md"
OTHERS += " reporting/page.html runs/*.sh runs/paper/* runs/reference_output/*.md"
# Of other programs and of runs/*.sh; files of ETO and of a run.
FLAGS = "abbrev always block-size check cov die-on-broken-pipe dirty dist dtype exclude fix"
FLAGS += " gpu-memory-utilization hf-overrides host port line-length local-dir logdir max-num-batched-tokens"
FLAGS += " maxprocesses merge no-deps no-enable-chunked-prefill nproc-per-node num_processes safe_serialization seeds"
FLAGS += " nnodes node-rank master-addr master-port head num-cpus"
ELSEWHERE = r"venv|pytest|.*_inst\.txt|.*(report|downstream|gpu_check)\.md|.*\.meta"
ELSEWHERE += r"|vocab\.txt|merges\.txt|zero_to_fp32\.py|RUN/tree_TASK\.svg"


@functools.cache
def flags() -> dict[str, set[str]]:
    """All that the programs have, and the values that a flag may have; none: any."""
    known: dict[str, set[str]] = {name: set() for name in FLAGS.split()}

    def note(parser: argparse.ArgumentParser, *_) -> None:
        for action in parser._actions:
            for name in action.option_strings:
                known.setdefault(name.strip("-"), set()).update(action.choices or ())

    for path in DATA:
        with (
            mock.patch("sys.argv", [path.name, "--help"]),
            mock.patch("argparse.ArgumentParser.print_help", note),
            contextlib.suppress(SystemExit),
        ):
            runpy.run_path(str(path), run_name="__main__")
    for path in [*PROGRAMS, *ROOT.glob("reporting/*.py"), ROOT / "environments/check.py"]:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            hints = typing.get_type_hints(module.Config) if hasattr(module, "Config") else {}
            for name, hint in hints.items():
                known.setdefault(config.flag(name).strip("-"), set()).update(choices_of(hint))
    return known | {"help": set()}


def choices_of(hint: typing.Any) -> set:
    """The values in a type: of tuple[Literal["q", "oracle"], ...] these two."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return set().union(*map(choices_of, typing.get_args(hint)))


def words_of(path):
    """A page; of code the strings, which are docstrings and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n".join(str(node.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return re.sub(r"<style>.*?</style>", "", text, flags=re.S)


PAGES = [path for place in OTHERS.split() for path in ROOT.glob(place)]


@pytest.mark.parametrize("path", [*PROGRAMS, *DATA, *PAGES], ids=str)
def test_what_pages_docstrings_messages_and_scripts_name_is_there(path):
    text = words_of(path)
    unknown = [name for name in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text) if name not in flags()]
    for name, value in re.findall(r"`[^`\n]*--([a-z][\w-]*\w)[ =](\w+)[^`\n]*`", text):
        if (choices := flags().get(name)) and value not in choices:
            unknown.append(f"{name} {value}")
    for name in re.findall(r"(?<![\w/.*{}$\"-])\w[\w/.-]*\.(?:py|sh|md|txt|csv|png|svg)\b(?!\.)", text):
        there = any((folder / name).exists() for folder in (ROOT, ROOT / "runs", path.parent))
        if not (there or any(ROOT.glob(f"[a-z]*/**/{name}")) or re.fullmatch(ELSEWHERE, name)):
            unknown.append(name)
    modules = [name for name in re.findall(r"(?<=python -m )[a-z][\w.]*\w", text) if not re.fullmatch(ELSEWHERE, name)]
    unknown += [name for name in modules if not find_spec(name)]
    for module, name in re.findall(r"(?<=`)(?:qlass\.)?(\w+)\.([a-z]\w+)(?=[`(])", text):
        place = module if (ROOT / f"{module}.py").exists() else f"qlass.{module}"
        if not name.startswith(("py", "md", "json")) and find_spec(place):
            unknown += [] if hasattr(importlib.import_module(place), name) else [f"{module}.{name}"]
    assert not unknown
