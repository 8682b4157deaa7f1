"""The commands of refusals.md, as a user types them, and what they say: warnings, and a line that refuses."""

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from qlass.files import warn
from qlass.inputs import hash_of
from qlass.settings import run_stage

PAGE = Path(__file__).with_name("refusals.md").read_text(encoding="utf-8")
CASES = dict(re.findall(r"^# (.*)\n((?:[^#`\n].*\n)+)", PAGE, re.M))  # a title, and its commands with what they say
GIVEN = re.findall(r"^==> (.*) <==\n((?:{.*\n)+)", PAGE, re.M)
EDIT = 'set -e; edit() { text=$(<"$1"); [[ $text == *"$2"* ]]; text=${text/"$2"/$3}; printf "%s\n" "$text" > "$1"; }; '
QVAL = "experiments.qval.__main__"
OUTPUTS = {"model.safetensors", "head.safetensors", "trees.jsonl", "q_labels.jsonl", "results.jsonl"}


@pytest.fixture
def given(agent, value_net, fake_world):
    """The folder that the page describes."""
    shutil.copytree(agent, "agent")
    shutil.copytree(value_net, "qnet")
    for name, lines in GIVEN:
        Path(name).write_text(lines)
    shutil.copy("trees.jsonl", "q_labels.jsonl")


def files():
    """What a refusal must leave as it is: all but logs, demonstrations that were played, and parts."""
    visible = [path for path in Path().rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in visible if not re.search(r"/\.|\.parts/|/expert\.|\.log\.", str(path))}


def play(command, patch):
    """Run a command: its exit code and what it says. Stages and experiments run in this process."""
    script = re.fullmatch(r"((?:\w+=\S+ )*)python (?:-m )?(\S+?)(?:\.py)?( .*)?", command)
    if not script:
        return subprocess.run(["bash", "-c", EDIT + command]).returncode, ""
    variables, name, flags = script.groups()
    for variable in variables.split():
        patch.setenv(*variable.split("="))
    said, code = [], 0
    patch.setattr("tqdm.tqdm.write", lambda text, file: said.append(text + "\n"))
    patch.setattr("builtins.input", lambda *_: "y")
    warn.cache_clear()
    hash_of.cache_clear()
    module = importlib.import_module({"reporting": "reporting.__main__", "experiments.qval": QVAL}.get(name, name))
    try:
        run_stage(lambda: module.main(shlex.split(flags or "")))
    except SystemExit as stop:
        code = stop.code
    return code, "".join(said)


@pytest.mark.parametrize("title", CASES)
def test_what_a_command_says(title, given, monkeypatch):
    """A refusal is one line, the last one, and no output changes."""
    for command, lines in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", CASES[title], re.M):
        before = files()
        with monkeypatch.context() as patch:
            code, said = play(command, patch)
        assert re.fullmatch(re.escape(lines).replace(r"\.\.\.", ".*"), said), said
        assert code == (2 if "error: " in lines else 0)
        if code:
            after = files()
            assert before.items() <= after.items()
            assert not OUTPUTS & {path.name for path in after.keys() - before.keys()}
