"""The examples of docs/python.md run as they stand, on random checkpoints and the fake world."""

import math
import re
from pathlib import Path

import torch
import transformers
from fakes import FakeEnv

from qlass.chat import Chat, Rendering
from qlass.qnet import QNet

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_examples_run(agent, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(agent)
    backbone = transformers.AutoModel.from_pretrained(agent)
    folder = tmp_path / "runs" / "webshop"
    (folder / "qnet").mkdir(parents=True)
    (folder / "sft").symlink_to(agent)
    QNet(backbone, Chat(tokenizer, Rendering.load(agent)), hidden=8).save_pretrained(folder / "qnet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("envs.make", lambda name: FakeEnv())
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(example, names)
    assert re.fullmatch(r"task test0: reward \d\.\d{3} after \d+ steps\n", capsys.readouterr().out)
    assert names["done"] and names["env"].steps > 0
    assert names["action"] == names["actions"][max(range(len(names["q"])), key=names["q"].__getitem__)]
    [values] = names["q_values"]
    assert len(values) == 2 and all(map(math.isfinite, values))
