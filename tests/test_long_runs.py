"""Memory stays flat over thousands of episodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "episodes"),
    [("webshop", 2000), ("alfworld", 2000), ("frozenlake", 2000), ("sciworld", 240)],  # seconds each
)
def test_memory_is_flat_over_many_episodes(name, episodes):
    """Once they have all been played: the other three times take no more."""
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    command = [sys.executable, str(Path(__file__).with_name("long_run.py")), name, str(episodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    held = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, MB after each {episodes // 8} of {episodes} episodes: {held}")
    assert held[-1] < held[1] * 1.03 + 5
