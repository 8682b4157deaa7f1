"""Checkpoints: none can run code, and what is not whole is named."""

import json
import os
import pickle
import shutil
from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM

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


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    return str(error.value)


def cut(file: Path, keep: int) -> Path:
    file.write_bytes(file.read_bytes()[:keep])
    return file.parent


def test_a_checkpoint_that_is_not_whole_is_named(copy, tmp_path):
    folder, _ = copy
    for keep in (-100, 5, 0):  # weights, header, all
        assert "no complete checkpoint?" in refused(cut(folder / "model.safetensors", keep))
    (folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refused(folder)
    assert "not a valid JSON" in refused(cut(folder / "config.json", 20))
    refused(tmp_path)  # without any of these


def test_an_adapter_that_is_no_lora_or_lacks_its_base_is_named(tmp_path, agent):
    def adapter(kind: type, **options) -> Path:
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(agent), kind(task_type="CAUSAL_LM", **options))
        model.save_pretrained(tmp_path / kind.__name__)
        return tmp_path / kind.__name__

    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        assert "a trained prompt can't become weights" in refused(adapter(kind, num_virtual_tokens=4))
    lora = adapter(peft.LoraConfig, r=2, target_modules="all-linear")
    settings = (lora / "adapter_config.json").read_text()
    refused(cut(lora / "adapter_model.safetensors", -50))
    for base in (str(tmp_path / "gone"), None):
        (lora / "adapter_config.json").write_text(settings.replace(json.dumps(str(agent)), json.dumps(base)))
        assert f"its base model {base or '(none)'} is not there" in refused(lora)
