"""The examples of docs/python.md run as they stand, on random checkpoints and the fake world."""

import math
import re
from pathlib import Path

from fakes import FakeEnv

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_examples_run(agent, value_net, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "webshop"
    folder.mkdir(parents=True)
    (folder / "sft").symlink_to(agent)
    (folder / "qnet").symlink_to(value_net)
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
