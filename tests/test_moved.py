"""A run that moved, was fed anew, or goes on elsewhere; outputs that are links, folders, or can't be locked."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from fakes import WORLD, FakeEnv, dump
from test_bad_input import checkpoint
from transformers import AutoModelForCausalLM

import build_trees
import envs
import q_search
from environments import fingerprint
from qlass import UserError, cli, files, metadata, models
from qlass.output import Output
from qlass.published import learned_tasks


class Filed(FakeEnv):
    """Its world stands in a file of a folder."""

    def __init__(self, data: str, **options):
        super().__init__(json.loads((Path(data) / "world.json").read_text()), **options)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "world.json").write_text(json.dumps(WORLD))
    return folder


def played(tmp_path: Path, agent: Path, *words: str) -> dict:
    argv = ["--env", "test_moved:Filed", "--env-option", f"data={tmp_path / 'data'}", "--run", str(tmp_path / "run")]
    q_search.main([*argv, "--sft", str(agent), "--method", "greedy", *words])
    return json.loads((tmp_path / "run" / "results.meta.json").read_text())


# ------------------------------------------------------------------------------------------------- data that are others


def test_a_data_folder_that_was_refilled_is_known_by_its_content(tmp_path, data, agent, capsys):
    assert set(played(tmp_path, agent, "--limit", "2")["arguments"]["env_files"]) == {"data"}
    copy = shutil.copytree(data, tmp_path / "copy")
    shutil.rmtree(data)
    copy.rename(data)
    os.utime(data / "world.json", (1, 1))  # the same content at another time
    capsys.readouterr()
    played(tmp_path, agent, "--limit", "3")
    assert "other files" not in capsys.readouterr().err
    (data / "world.json").write_text(json.dumps(WORLD).replace("0.5", "0.7"))  # of the same size
    with pytest.raises(UserError, match=r"results.jsonl was begun with other files than --env-option names now"):
        played(tmp_path, agent, "--limit", "4")
    warning = f"warning: {tmp_path}/run was begun with other files than --env-option names now: put them back\n"
    assert warning in capsys.readouterr().err
    played(tmp_path, agent, "--limit", "4", "--overwrite")
    argv = ["--run", str(tmp_path / "run"), "--sft", str(agent), "--limit", "1"]
    build_trees.main(argv)
    (data / "more.json").write_text("{}")
    with pytest.raises(UserError, match=r"trees.jsonl was begun with other files"):
        build_trees.main(argv)


def test_an_agent_of_other_data_is_told_and_its_tasks_are_not_known(tmp_path, data, agent, capsys):
    """The ids that it learned are of other tasks."""
    options = {"env": "test_moved:Filed", "env_option": [f"data={data}"]}
    trained = {"env_files": {"data": fingerprint(str(data))}}
    for name, (data_then, known) in {"same": (trained, 1), "other": ({"env_files": {"data": "x"}}, None)}.items():
        shutil.copytree(agent, tmp_path / name)
        meta = {"arguments": options | data_then, "tasks": ["test0"]}
        (tmp_path / f"{name}.meta.json").write_text(json.dumps(meta))
        run = ["--run", str(tmp_path / f"run-{name}"), "--env", options["env"], "--env-option", f"data={data}"]
        q_search.main([*run, "--sft", str(tmp_path / name), "--method", "greedy"])
        leaks = json.loads((tmp_path / f"run-{name}" / "results.meta.json").read_text())["leaks"]
        assert leaks["demonstrations"] == known
        told = f"{name} was trained with other files, not with --env test_moved:Filed" in capsys.readouterr().err
        assert told == (known is None)
        assert learned_tasks(["a"], tmp_path / name, options | trained) == (["a", "test0"] if known else None)


def test_a_fingerprint_is_of_names_sizes_and_content(tmp_path):
    def held(name: str = "data[1]", **texts: str) -> str:
        folder = tmp_path / name / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
        return fingerprint(str(tmp_path / name))

    first = held(a="1", b="2" * 99)
    assert first == held("copy", a="1", b="2" * 99) and len(first) == 16
    assert held(a="2") != first and held(a="1") == first
    assert held(b="2" * 50 + "3" + "2" * 48) != first and held(b="2" * 98) != first
    assert held("renamed", a="1", c="2" * 99) != first
    held(b="2" * 99)
    (tmp_path / "data[1]" / ".DS_Store").write_text("no change")
    assert held() == first
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "deep").symlink_to(tmp_path / "copy" / "deep")  # a shop on another disk
    assert held("linked") == first
    held("copy", a="2")
    assert held("linked") != first
    assert fingerprint(str(tmp_path / "copy" / "deep" / "a")) != fingerprint(str(tmp_path / "data[1]" / "deep" / "a"))
    many = {f"f{i}": "x" for i in range(1100)}
    assert held("many", **many) == held("as many", **many) != held("as many", f0="y")


def test_a_class_derived_from_another_has_a_name_of_its_own():
    class Mine(FakeEnv):
        pass

    assert (FakeEnv.name, Mine.name, Filed.name) == ("fake", "mine", "filed")
    assert envs.environment_class("webshop").name == "webshop"


def test_a_renamed_run_whose_name_is_used_again_has_its_own_demonstrations(tmp_path):
    """Found by content: neither the leak count nor tau_0 is of the other run."""

    def run_of(task: str) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "expert.jsonl").write_text(dump([{"task_id": task}]))
        cloned = checkpoint(folder / "sft")
        (cloned / "config.json").write_text(task)
        arguments = {"env": "shop", "env_option": [], "expert": folder / "expert.jsonl"}
        metadata.write_meta(cloned, arguments, [folder / "expert.jsonl"], tasks=[task])
        metadata.write_meta(folder / "trees.jsonl", {"sft": cloned}, [cloned])
        return folder

    renamed = run_of("a").rename(tmp_path / "renamed")
    again = run_of("b")
    for folder, task in ((renamed, "a"), (again, "b")):
        assert metadata.cloned_from(folder / "sft") == (folder / "expert.jsonl", None)
        assert metadata.input_of(folder / "trees.jsonl", "sft") == folder / "sft"
        assert learned_tasks([], folder / "sft", {"env": "shop", "env_option": []}) == [task]
        assert not metadata.changed_inputs(folder / "sft")


# -------------------------------------------------------------------------------------- other versions, other precision


def test_other_versions_are_told_and_all_that_took_part_are_kept(tmp_path, monkeypatch, capsys):
    def grow(n: int, **arguments) -> dict:
        out = Output(tmp_path / "x.jsonl", {"seed": 0, **arguments}, identity=lambda line: line["n"], plan=range(n))
        done = {record["n"] for record in out.records}
        out.grow(([{"n": i}] for i in range(n) if i not in done), "lines", n)
        out.finish()
        return json.loads((tmp_path / "x.meta.json").read_text())

    for n, torch_version in enumerate(("2.9", "2.9", "2.13", "2.14"), 1):
        here = {"torch": torch_version, "numpy": "2.1"}
        monkeypatch.setattr(metadata, "versions", lambda here=here: here)
        meta = grow(n)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "x.jsonl was begun with torch 2.9, which here is another" in warnings[0]
    assert meta["versions"]["torch"] == "2.14"
    assert [earlier["torch"] for earlier in meta["earlier_versions"]] == ["2.9", "2.13"]
    assert "earlier_versions" not in grow(5, overwrite=True)


def test_a_gpus_default_precision_is_not_a_cpus(tmp_path, data, agent, monkeypatch):
    meta = played(tmp_path, agent, "--limit", "1")
    assert meta["arguments"]["precision"] == "float32"
    monkeypatch.setattr(models, "device_and_dtype", lambda *_: (torch.device("cpu"), torch.bfloat16))
    with pytest.raises(UserError, match="begun with --precision float32, not bf16"):
        played(tmp_path, agent, "--limit", "2")
    monkeypatch.undo()
    played(tmp_path, agent, "--limit", "2", "--precision", "float32")  # as it is on a GPU
    meta["arguments"]["precision"] = None  # of a file that does not tell it
    (tmp_path / "run" / "results.meta.json").write_text(json.dumps(meta))
    played(tmp_path, agent, "--limit", "3")


# ----------------------------------------------------------------------------------------------------- names of outputs


def test_what_can_not_be_an_output_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder: a file is written here: give it a name with .jsonl"):
        Output(tmp_path / "folder", {})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"results: a file is written here: give it a name with .jsonl"):
        Output(tmp_path / "results", {}, identity=repr)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["r[1]*.jsonl", "r{a,b}?.jsonl", "r[!x].jsonl"])
def test_an_output_may_be_named_as_a_pattern(name, tmp_path, monkeypatch):
    path = tmp_path / "run[2]" / name
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        out = Output(path, {}, identity=lambda line: line["n"], plan=[0, 1])
        out.append([{"n": int(rank)}])
        out.finish()
    assert len(files.files_of(path)) == 2 and metadata.is_complete(path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    again = Output(path, {}, identity=lambda line: line["n"], plan=[0, 1])
    assert len(again.records) == 2
    again.finish()


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "empty").mkdir()
    for name in ("empty", "missing"):
        link = tmp_path / name
        link.symlink_to(disk / name)
        for text in ("1", "22"):
            with files.draft_of(files.checkpoint_folder(link)) as draft:
                draft.mkdir()
                (draft / "config.json").write_text(text)
            assert link.is_symlink() and (disk / name / "config.json").read_text() == text
        files.discard(link)  # --overwrite
        assert link.is_symlink() and not (disk / name).exists()
    (tmp_path / "x.jsonl").symlink_to(disk / "x.jsonl")
    files.write_jsonl(tmp_path / "x.jsonl", [{"n": 1}])
    assert (disk / "x.jsonl").read_text() == '{"n": 1}\n' and (tmp_path / "x.jsonl").is_symlink()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_told(error, tmp_path, monkeypatch, capsys):
    def fails(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(files.FileLock, "acquire", fails)
    out = Output(tmp_path / "x.jsonl", {})
    out.append([{"n": 1}])
    out.finish()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "x.jsonl can't be locked" in warning and "no second process" in warning


def test_the_message_of_a_lock_says_where_it_is(tmp_path, monkeypatch):
    def fails(self, *args, **kwargs):
        raise files.Timeout(self.lock_file)

    monkeypatch.setattr(files.FileLock, "acquire", fails)
    with pytest.raises(
        UserError, match=r"another process is writing it; .*, on any machine, delete .*/\.x\.jsonl\.lock"
    ):
        Output(tmp_path / "x.jsonl", {})


# ---------------------------------------------------------------------------------------------- modules and checkpoints


@pytest.mark.parametrize("module", ["envs.py", "envs/__init__.py"])
def test_a_module_of_ones_own_in_the_place_of_ours_is_named(module, tmp_path, monkeypatch, capsys):
    path = tmp_path / module
    monkeypatch.setitem(sys.modules, "envs", type("Module", (), {"__file__": str(path)}))
    with pytest.raises(SystemExit):
        cli.run_stage(lambda: envs.nothing)
    assert capsys.readouterr().err == f"error: {path} hides our module envs: rename it, or start elsewhere\n"


def test_a_folder_that_hides_the_data_or_the_environments_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("data", "environments.webshop"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"--env webshop: .*/data/__init__.py.*does a folder of yours hide one of ours"):
        envs.environment_class("webshop")


def adapter(folder: Path, base: Path, config: peft.PeftConfig) -> Path:
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        models.load_checkpoint(path, AutoModelForCausalLM)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path, agent):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty")
    for name, keep in (("weights cut", -100), ("header cut", 5), ("no weights", 0)):
        folder = shutil.copytree(agent, tmp_path / name)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])
        assert "no complete checkpoint?" in refused(folder)
    (folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refused(folder)
    (folder / "config.json").write_text('{"model_type"')
    assert "not a valid JSON" in refused(folder)


def test_an_adapter_that_is_no_lora_or_lacks_its_base_is_named(tmp_path, agent):
    soft = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    for name, config in (("soft", soft), ("prefix", prefix)):
        assert "a trained prompt can't become weights" in refused(adapter(tmp_path / name, agent, config))
    lora = adapter(tmp_path / "lora", agent, peft.LoraConfig(r=2, target_modules="all-linear"))
    settings = json.loads((lora / "adapter_config.json").read_text())
    for base in (str(tmp_path / "gone"), None):
        (lora / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
        assert f"its base model {base or '(none)'} is not there" in refused(lora)
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    weights = lora / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    refused(lora)
