"""Files are data: none that the stages read can run code, and the program itself has no way to."""

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from test_training import arguments, fit, stopped

from qlass.models import load_chat
from qlass.policy import Policy

ROOT = Path(__file__).parents[1]
SOURCES = [
    path for folder in (".", "qlass", "environments", "reporting", "experiments", "data")
    for path in sorted((ROOT / folder).glob("*.py" if folder == "." else "**/*.py")) if "generated" not in path.parts
]  # fmt: skip
MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_here_runs_what_it_reads(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            assert not {name.split(".")[0] for name in names} & MODULES
        if isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "os.system", "os.popen", "compile", "__import__"}, name
            if name == "torch.load":
                assert ast.literal_eval(given["weights_only"]) is True
            for flag in ("trust_remote_code", "shell", "allow_pickle"):
                assert flag not in given or ast.literal_eval(given[flag]) is False, (name, flag)


class Bomb:
    """What unpickles makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickled_checkpoint_is_refused_and_not_run(tmp_path, agent):
    folder, struck = tmp_path / "sft", tmp_path / "struck"
    shutil.copytree(agent, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.embed_tokens.weight": Bomb(struck)}))
    with pytest.raises(OSError, match="safetensors"):
        Policy.load(folder)
    assert not struck.exists()


@pytest.mark.parametrize("load", [Policy.load, lambda folder: load_chat(folder, None)])
def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path, agent, load):
    folder, struck = tmp_path / "sft", tmp_path / "struck"
    shutil.copytree(agent, folder)
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(struck)!r})\nclass A:\n    pass\n")
    config = json.loads((folder / "config.json").read_text())
    maps = {name: "evil.A" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": maps}))
    with pytest.raises(ValueError, match="custom code"):
        load(folder)
    assert not struck.exists()


def test_a_state_of_a_training_is_read_and_not_run(tmp_path):
    settings, struck = arguments(tmp_path), tmp_path / "struck"
    torch.save({"weights": Bomb(struck)}, stopped(settings))
    with pytest.raises(pickle.UnpicklingError):
        fit(settings, [1.0] * 6)
    assert not struck.exists()
