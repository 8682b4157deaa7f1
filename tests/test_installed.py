"""What holds where the project is installed (pip install .): every stage is there, data in a writable place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_stages_run_from_a_wheel(tmp_path):
    site = tmp_path / "site"

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ignored = shutil.ignore_patterns(".*", "tests", "docs", "runs", "generated", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    run("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), "./source")
    assert {path.name for path in site.glob("*.py")} == {path.name for path in ROOT.glob("*.py")}
    played = run("-m", "experiments.compare", "--env", "frozenlake", "--method", "expert", "rule", "--limit", "2")
    assert "expert: mean reward" in played and (tmp_path / "runs" / "frozenlake" / "results.jsonl").exists()
    run("-m", "reporting", "--run", "runs/frozenlake")
    run("-c", "import gymnasium; gymnasium.make('envs:qlass/FrozenLake-v0').reset()")
