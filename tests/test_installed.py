"""What holds where the project is installed (pip install .): commands by name, data in a writable place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_stage_is_packed_and_has_a_command():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = project["tool"]["setuptools"]["py-modules"]
    assert sorted(f"{name}.py" for name in modules) == sorted(path.name for path in ROOT.glob("*.py"))
    commands = project["project"]["scripts"]
    assert {name.removeprefix("qlass-").replace("-", "_") for name in commands} == set(modules) - {"envs"}


def installed(folder: Path) -> Path:
    """Where the project's wheel is installed, without what it depends on."""
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "runs", "generated", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def test_stages_run_from_a_wheel(tmp_path):
    site = installed(tmp_path / "wheel")

    def run(*command):
        environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    played = run(site / "bin" / "qlass-q-search", "--env", "frozenlake", "--method", "expert", "random", "--limit", "2")
    assert "expert: mean reward" in played and (tmp_path / "runs" / "frozenlake" / "results.jsonl").exists()
    run(site / "bin" / "qlass-report", "--run", "runs/frozenlake")
    assert (tmp_path / "runs" / "frozenlake" / "report.html").stat().st_size > 10_000
    run(sys.executable, "-c", "import gymnasium; gymnasium.make('envs:qlass/FrozenLake-v0').reset()")
