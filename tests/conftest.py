"""One CPU thread for every test: models are tiny, and the machine may be shared. Fixtures that several stages use."""

import os

import pytest
import torch
from fakes import FakeEnv, save_agent, tiny_backbone, word_chat
from hypothesis import settings

from train_qnet import QNet

torch.set_num_threads(1)
settings.register_profile("same everywhere", derandomize=True, deadline=None)  # a shared machine has slow moments
settings.load_profile("same everywhere")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the promises on equal files are for float32


@pytest.fixture
def fake_world(monkeypatch):
    """The scripts play the fake world, whatever --env says."""
    monkeypatch.setattr("envs.from_arguments", lambda args, **options: FakeEnv(**options))


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
