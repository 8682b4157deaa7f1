"""What scripts and pages name is there: commands with flags that their stage knows, files, headings."""

import ast
import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from string import Template

import pytest
from fakes import ROOT

import q_search
from environments import environment_class
from qlass import settings

SCRIPTS = sorted(path.name for path in (ROOT / "runs").glob("*.sh") if path.name != "common.sh")
JUDGES = ["beside", "others", "free", "pilot", "halves", "longer", "alone"]
VARIANTS = {  # arguments with which a script takes another path
    "paper.sh": ["table3", "table4", "fig4", "release", "gpu_check"],  # the environments: see below
    "cloned.sh": ["161", "--one-epoch 171", "--by-heart 100 101"],
    "judges.sh": ["181", *(f"--{mode} 197" for mode in JUDGES)],
    "demo.sh": ["", "--perfect", "--check"],
    "reproduce.sh": ["frozenlake --seeds 2", "webshop_real --seeds 1"],
    "ranking.sh": ["webshop --seeds 1"],
    "tree_grpo.sh": ["webshop --seeds 1"],
    "smollm2.sh": ["webshop"],
    "qval.sh": ["webshop"],
    "shops.sh": ["21"],
    "equal_experience.sh": ["121"],
    "half.sh": ["131"],
    "games.sh": ["41"],
}
CALLS = [(script, arguments) for script in SCRIPTS for arguments in VARIANTS.get(script, [""])]
COMMANDS = "bash basename cat date dirname env getconf grep head ls mkdir mv printf rm sed sleep tail tee uname wc"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "runs/reference_output").glob("*.md")),
]


FLOORS = [{"qlass"}, {"environments", "data"}, {"envs"}, {"sft", "build_trees", "bellman", "train_qnet", "q_search"},
          {"integrations", "reporting"}, {"experiments"}]  # fmt: skip


def imported_by(file):
    """The rooms that a file imports."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(str(node.module))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_no_room_imports_one_above_it(floor):
    above = set().union(*FLOORS[floor + 1 :])
    for room in FLOORS[floor]:
        files = [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")]
        assert files and not {(file.name, other) for file in files for other in imported_by(file) & above}


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Run a script of a copy, whose `python` only notes what it is asked for: commands, each [file.py, flag, ...]."""
    root = tmp_path_factory.mktemp("copy")
    bin_ = root / "bin"
    bin_.mkdir()
    shutil.copytree(ROOT / "runs", root / "runs", ignore=lambda _, names: {n for n in names if not n.endswith(".sh")})
    (root / "runs/trained").mkdir()
    shutil.copy(ROOT / "runs/trained/settings.toml", root / "runs/trained")
    for name in COMMANDS.split():  # nothing else can be started, so nothing is installed, fetched or trained
        if path := shutil.which(name):
            (bin_ / name).symlink_to(path)
    # A unit separator behind each argument; a line is one write, as two processes write at once.
    note = """[ "$2" != torch.distributed.run ] || shift 5
line=$(printf '%s\\037' "$@")
printf '%s\\n' "$line" >> "$LOG"
[ "$1" != "$FAILS" ]
"""
    for name, text in {"python": note, "cp": ""}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}")
        (bin_ / name).chmod(0o755)

    @functools.cache
    def run(script, arguments="", **variables):
        log = Path(tempfile.mkstemp(dir=root)[1])  # of its own: another process of an earlier script may still write
        environment = {"PATH": str(bin_), "LOG": str(log), "HOME": str(root), "OMP_NUM_THREADS": "1"}
        command = ["bash", root / "runs" / script, *arguments.split()]
        done = subprocess.run(
            command, cwd=root, env=environment | variables, capture_output=True, text=True, timeout=300
        )
        commands = [line.split("\037")[:-1] for line in log.read_text().splitlines()]
        return done, [command[command[0] == "-m" :] for command in commands if command[0] != "-c"]

    return run


@pytest.fixture
def stages(called):
    """What each stage of a script was asked for: {file: [settings]}."""

    def of(script, arguments="", **variables):
        done, commands = called(script, arguments, **variables)
        assert done.returncode == 0, f"{script} {arguments}: {done.stderr}"
        calls = {name: [] for name, *_ in commands}
        for command in commands:
            calls[command[0]].append(parsed(*command))
        return calls

    return of


def parsed(*command):
    """The settings as the module of a command reads them; a run has begun behind its first stage."""
    name, *flags = command
    module = importlib.import_module(name.removesuffix(".py"))
    if hasattr(module, "__path__"):  # python -m PACKAGE
        module = importlib.import_module(f"{name}.__main__")
    config = getattr(module, "Config", None) or module.q_search.Config
    if not issubclass(config, settings.Run):
        return settings.parse(config, module.__doc__, flags)
    read = settings.read_settings(config, module.__doc__, flags)
    if read.stage == "sft" and not read.file.exists():
        settings.write_settings(read)
    return read


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_stage_that_fails_is_the_last_one(called, processes):
    done, commands = called("cloned.sh", "161", PROCESSES=processes, FAILS="build_trees.py")
    assert done.returncode == 1
    begun = [name for name, *_ in commands]  # the first process may end the script before the second has begun
    assert begun[0] == "sft.py" and set(begun[1:]) == {"build_trees.py"} and len(begun) <= 1 + int(processes)


@pytest.mark.parametrize(("script", "arguments"), CALLS)
def test_every_flag_of_every_script_exists(stages, script, arguments):
    assert stages(script, arguments, MODEL="folder")


OF_HUNDRED = ["shops.sh 21", "equal_experience.sh 121", "ranking.sh webshop", "reproduce.sh webshop", "tree_search.sh"]


@pytest.mark.parametrize("call", [*OF_HUNDRED, "tree_grpo.sh webshop", "qval.sh webshop"])
def test_scripts_of_older_rows_do_not_follow_the_preset_of_webshop(stages, call):
    """Most rows of WebShop are of 100 demonstrations, the preset is of 1,000; their run folders differ, too."""
    calls = stages(*call.split(maxsplit=1))
    agent, trees = calls["sft.py"][0], calls["build_trees.py"][0]
    assert (agent.n_expert, agent.epochs, trees.tasks, trees.temperature) == (100, 34, "new", 1.5)
    plays = [config for configs in calls.values() for config in configs if isinstance(config, q_search.Config)]
    assert {config.temperature for config in plays} == {1.0}
    assert agent.run != settings.default_run("webshop")
    assert settings.default_run("openenv:https://NAME.hf.space") == Path("runs/name.hf.space")  # not /name.hf.space


@pytest.mark.parametrize(("kind", "epochs"), [("halves", 3), ("mixed", 3), ("noisy", 1)])
def test_each_kind_of_demonstrators_has_agents_and_labels_of_its_own(kind, epochs, stages):
    calls = stages("judges.sh", "--halves 197", KIND=kind)
    assert {config.kind for config in calls["experiments.demonstrators"] if config.split == "train"} == {kind}
    agents = {config.out.name: config.epochs for config in calls["sft.py"] if config.out}
    assert [config.epochs for config in calls["sft.py"] if not config.out] == [epochs]
    assert agents["sft-tree"] == epochs and agents["sft-best"] == -(-5 * epochs // 2)
    assert agents.get("sft-three") == (3 if kind == "noisy" else None)
    assert ("all" in [config.loss_on for config in calls["train_qnet.py"]]) == (kind == "halves")
    plays = [config for config in calls["q_search.py"] if config.split == "test"]
    assert plays and all(kind in config.label for config in plays)


def test_the_demo_grows_trees_in_four_processes_at_most(stages):
    for processes, most in (("9", 4), ("3", 3)):
        calls = stages("demo.sh", PROCESSES=processes)
        assert len(calls["build_trees.py"]) == len(calls["experiments.compare"]) == most


@pytest.mark.parametrize(("call", "demo"), [("cloned.sh --one-epoch 171", "--perfect"), ("judges.sh --halves 197", "")])
def test_the_demos_have_the_settings_of_the_rows(call, demo, stages, called, tmp_path):
    shop, calls = stages(*call.split(maxsplit=1)), stages("demo.sh", demo)
    called("demo.sh", demo, RUN=str(tmp_path / "run"), SEED="3")
    names = {
        "sft.py": "epochs",
        "build_trees.py": "tasks limit rollouts prune temperature",
        "q_search.py": "temperature",
    }
    for stage in names:
        by_hand = parsed(stage, "--run", str(tmp_path / "run"))  # a command of the demo's run, without its script
        row, shown = ([getattr(config, name) for name in names[stage].split()] for config in (shop[stage][0], by_hand))
        assert row == shown and by_hand.seed == (0 if demo else 3)  # a preset is written by the first stage
    assert (calls["sft.py"][0].n_expert, "experiments.demonstrators" in calls) == (
        (1000, False) if demo else (None, True)
    )


@pytest.mark.parametrize(
    ("there", "demo", "says"),
    [
        ("expert.meta.json", "", "has perfect demonstrators"),
        ("halves.meta.json", "--perfect", "has demonstrators who err"),
        ("halves.meta.json expert.meta.json", "", ""),  # a second sft.py by hand has made expert.jsonl
    ],
)
def test_a_demo_does_not_go_on_in_a_run_of_the_other_demonstrators(there, demo, says, called, tmp_path):
    for name in there.split():
        (tmp_path / name).touch()
    done, commands = called("demo.sh", demo, RUN=str(tmp_path))
    assert (done.returncode, bool(commands)) == ((2, False) if says else (0, True)) and says in done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, "common.sh"])
def test_scripts_are_for_bash_3_2_which_macos_has(script):
    """An empty array is an error there under `set -u`; the other words came with bash 4, or are Linux's."""
    text = (ROOT / "runs" / script).read_text(encoding="utf-8")
    assert script == "common.sh" or "\nset -eo pipefail\n" in text
    code = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    newer = r"(declare|local|typeset) -[Agn]|mapfile|readarray|coproc|\[-1\]|\$\{\w+(,,|\^\^|@)|&>>|\|&|\bnproc\b"
    assert not re.search(rf"{newer}|=~ [^ ]*\([^ ]*\|", code)


def has(config, **values):
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("script", "depth", "tree_steps", "splits", "M", "N", "max_steps"),
    [
        ("webshop", 3, 5, {"test"}, (2, 4, 6), (2, 4, 6, 8, 10), 5),
        ("sciworld", 6, 18, {"test_seen", "test_unseen"}, (2,), (2, 4, 6), 40),
        ("alfworld", 8, 18, {"valid_seen", "valid_unseen"}, (2,), (2, 4, 6), 40),
    ],
)
def test_hyperparameters_of_table_5_and_protocols_of_the_paper(
    stages, script, depth, tree_steps, splits, M, N, max_steps
):
    calls = stages("paper.sh", script, ETO="/eto", GPUS="8")
    (sft,), (bellman,), (qnet,) = (calls[f"{stage}.py"] for stage in ("sft", "bellman", "train_qnet"))
    trees, *others = calls["build_trees.py"]
    assert others == [trees] * 7 and len(calls["q_search.py"]) == 3 * 8 * len(splits)  # a GPU each
    has(sft, model="meta-llama/Llama-2-7b-chat-hf", epochs=3, lr=1e-5, batch=64, max_tokens=4096, lora=None)
    has(sft, expert=Path(f"/eto/{script}_sft.json"))
    has(trees, depth=depth, width=3, steps=None, limit=0, tasks="cloned", temperature=None)  # the checkpoint's: .7
    world = environment_class(script)
    assert (world.tree_steps, world.max_steps) == (tree_steps, max_steps)
    has(bellman, gamma=0.9)
    has(qnet, epochs=2, lr=1e-5, batch=64, loss_on="all", rank_weight=0, lora=None, max_tokens=4096)
    assert {search.split for search in calls["q_search.py"]} == splits
    for search in calls["q_search.py"]:
        has(search, run=sft.run, temperature=None)
        best_of_n = search.method == ("best_of_n",)
        assert best_of_n or search.method == ("greedy", "qlass")
        has(search, seed=0, limit=0, skip=0, max_steps=None, **({"N": N} if best_of_n else {"M": M, "N": (1,)}))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_stages_know_the_flags_that_pages_name(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    variables = dict(re.findall(r'^    (\w+)="(.*)"$', text, re.M))
    for line in re.findall(r"^ *(?:\w+=\S+ )*python ((?:-m (?:docs|\w+\.\w+|reporting)|\w+\.py).*)$", text, re.M):
        command = shlex.split(Template(line).safe_substitute(variables), comments=True)
        parsed(*command[command[0] == "-m" :])
    for body in re.findall("--body '(.*?)'", text, re.DOTALL):
        json.loads(body)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_scripts_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target, _, heading in re.findall(r"\]\(((?!http)[^)#\s]*)(#([^)\s]*))?\)", text):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not heading or heading in headings(path), f"{target}#{heading}"
    for name in re.findall(r"bash runs/(\w+\.sh)", text):
        assert name in SCRIPTS


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_installs_into_an_environment_that_is_there_and_empties_none(tmp_path):
    """Another checkout's, linked, and older than requirements.txt; without one a new one is made."""
    (tmp_path / "other/bin").mkdir(parents=True)
    (tmp_path / "other/kept").touch()
    (tmp_path / "linked").symlink_to("other")
    log = tmp_path / "log"
    python = "#!/bin/sh\n" + f'echo "$0 $*" >> {log}\n' + '[ "$2" != venv ] || mkdir -p "$3/bin"\n'
    for name in ("python3", "other/bin/python", "other/bin/pip"):
        (tmp_path / name).write_text(python)
        (tmp_path / name).chmod(0o755)
    make = ["make", "-k", "-C", str(ROOT), "install", f"PYTHON={tmp_path}/python3"]
    subprocess.run([*make, f"VENV={tmp_path}/linked"], check=True, capture_output=True)
    calls = log.read_text()
    assert "-r requirements.txt" in calls and "-m venv" not in calls
    assert (tmp_path / "other/kept").exists() and (tmp_path / "other/.installed").exists()
    subprocess.run([*make, f"VENV={tmp_path}/new"], capture_output=True)  # stops, as the new one has no pip
    assert f"python3 -m venv {tmp_path}/new\n" in log.read_text()


def test_ci_runs_the_commands_of_readme():
    workflow = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    commands = re.findall(r"^    (python .*?)(?: {2,}#.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(commands) == 2 and all(f"      - run: {command}\n" in workflow for command in commands)


def test_my_run_names_each_script():
    rows = re.findall(r"^\| `(\w+\.sh)", (ROOT / "docs/files.md").read_text(encoding="utf-8"), re.M)
    assert set(rows) == set(SCRIPTS)


def headings(page):
    """The anchors that GitHub gives a page's headings, and those that it names."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    own = re.findall(r'<a id="([^"]+)">', text)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles} | set(own)
