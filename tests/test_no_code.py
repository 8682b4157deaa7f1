"""Files are data: none that the stages read can run code."""

import json
import os
import pickle
import shutil

import pytest

from qlass import UserError
from qlass.agent import load_policy
from qlass.models import load_chat


class Bomb(str):
    """Who unpickles it makes a folder of this name."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


@pytest.fixture
def copy(tmp_path, agent):
    """A checkpoint to spoil, and the folder that its code would make."""
    return shutil.copytree(agent, tmp_path / "sft"), tmp_path / "struck"


def test_a_pickled_checkpoint_is_refused_and_not_run(copy):
    folder, struck = copy
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.embed_tokens.weight": Bomb(struck)}))
    with pytest.raises(UserError, match="safetensors"):
        load_policy(folder)
    assert not struck.exists()


@pytest.mark.parametrize("load", [load_policy, lambda folder: load_chat(folder, None)])
def test_code_that_comes_with_a_checkpoint_is_not_run(copy, load):
    folder, struck = copy
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(struck)!r})\nclass A:\n    pass\n")
    config = json.loads((folder / "config.json").read_text())
    maps = {name: "evil.A" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": maps}))
    with pytest.raises((UserError, ValueError), match="custom code"):
        load(folder)
    assert not struck.exists()
