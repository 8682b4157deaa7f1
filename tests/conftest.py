"""One CPU thread for every test: models are tiny, and the machine may be shared. Fixtures that several stages use."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: the promises on equal files are for float32
from pathlib import Path

import pytest
import torch
from fakes import FakeEnv, over, save_agent, tiny_backbone, without_seconds, word_chat
from hypothesis import settings

import build_trees
from data import make_alfworld
from qlass.files import read_jsonl, warn
from qlass.inputs import hash_of
from train_qnet import QNet

torch.set_num_threads(1)
settings.register_profile("same everywhere", derandomize=True, deadline=None)  # a shared machine has slow moments
settings.load_profile("same everywhere")
# The games are the bundled ones, git is not that of a hook that runs the tests, and the fake servers are here.
for name in ["ALFWORLD_DATA", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"]:
    os.environ.pop(name, None)
    os.environ.pop(name.lower(), None)
os.environ |= {"MPLBACKEND": "agg", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test stands in a folder of its own, and is warned anew."""
    monkeypatch.chdir(tmp_path)
    warn.cache_clear()
    hash_of.cache_clear()  # a path, or a time of whole seconds, may come again


@pytest.fixture
def fake_world(monkeypatch):
    """The scripts play the fake world, whatever --env says."""

    def from_config(config):
        env = FakeEnv()
        env.side_by_side = getattr(config, "in_flight", None) or env.side_by_side
        env.settings = {"env": config.env, "env_option": [], "env_files": {}, "env_version": env.version}
        return env

    monkeypatch.setattr("envs.from_config", from_config)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return make_alfworld.write(tmp_path_factory.mktemp("made") / "games", seed=3, train=150)


@pytest.fixture(scope="session")
def agent(tmp_path_factory):
    return save_agent(tmp_path_factory.mktemp("agent") / "sft", candidates="valid", temperature=1.0)


@pytest.fixture(scope="session")
def value_net(tmp_path_factory):
    """A checkpoint of a QNet with random weights that knows these words too."""
    folder = tmp_path_factory.mktemp("value") / "qnet"
    folder.mkdir()
    chat = word_chat(candidates="valid", temperature=1.0)
    QNet(tiny_backbone(chat, 3), chat, hidden=16).save_pretrained(folder)
    return folder


@pytest.fixture
def build(agent, fake_world):
    """Runs build_trees.py with this agent on four new tasks; its lines."""

    def command(flags="", out="trees.jsonl"):
        usual = f"--env frozenlake --run . --preset paper --sft {agent} --out {out} --tasks new --limit 4"
        build_trees.main(over(usual, flags))
        return read_jsonl(Path(out))

    return command


@pytest.fixture
def search(request, tmp_path, agent, value_net, fake_world):
    """Runs the test's `stage` with these checkpoints; its lines without their seconds."""

    def command(flags, out="results.jsonl"):
        usual = f"--env frozenlake --run . --preset paper --sft {agent} --qnet {value_net} --out {out} --limit 3"
        request.module.stage.main(over(usual, flags))
        return without_seconds(tmp_path / out)

    return command
