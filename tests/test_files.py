"""Outputs: of one writer, whole or absent, resumed wherever they were stopped; how a command ends."""

import dataclasses
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from fakes import FakeEnv, refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from qlass import UserError, demonstrations, files, outputs
from qlass.files import meta_path, parts_folder, read_jsonl, write_json
from qlass.inputs import changes, find_or_make, fingerprint, hash_of
from qlass.outputs import Output
from qlass.settings import FITS, Run, read_settings, run_stage, workload, write_settings

TASKS = ["t0", "t1", "t2", "t3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Run):
    depth: int = 3
    limit: int | None = workload(None)


def flags(text):
    return read_settings(Stage, "A stage.", shlex.split(text))


def begin(path, more=""):
    config = flags(f"--run '{path.parent}' {more}")
    return Output(path, config, config.recipe(), {}, itemgetter("task_id"))


def group(task):
    return [{"task_id": task, "n": n, "text": "é" * n} for n in range(1 + int(task[1:]))]


WHOLE = "".join(files.dumps(line) for task in TASKS for line in group(task)).encode()
ALONE = (0, 1)


def process(rank, width):
    return mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(width))


def grow(path, more="", share=ALONE, stop=None, tasks=TASKS):
    """What a stage does, by process RANK of WORLD_SIZE, stopped in front of a group. Returns the tasks it did."""
    with process(*share):
        out = begin(path, more)
        todo = out.todo(tasks)[::-1][:stop]  # as they come, the last one first
        out.write(map(group, todo), "groups", len(todo))
        if stop is None:
            out.finish(tasks, tasks=tasks)
        out.lock.release()
        return todo


CALLS = st.tuples(st.sampled_from([ALONE, (0, 2), (1, 2), (2, 3)]), st.none() | st.integers(0, 3), st.integers(0, 400))


@settings(max_examples=40)
@given(st.lists(CALLS, max_size=5))
@example([(ALONE, 3, len(WHOLE) - 1)])
def test_stopped_at_any_byte_at_any_width_it_becomes_the_same_file(calls):
    """A call stops in front of a group or not at all, and then its part may be cut, and end with groups of nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run[2]" / "r{a,b}[1]*.jsonl"  # which no pattern finds
        for share, stop, cut in calls:
            grow(path, share=share, stop=stop)
            part = parts_folder(path) / "{}-of-{}.jsonl".format(*share)
            if part.exists():
                part.write_bytes(part.read_bytes()[:cut] + b"\n[]\n[[]]\n")
        grow(path)
        beside = {files.meta_path(path).name, "settings.toml"}
        assert path.read_bytes() == WHOLE and {file.name for file in path.parent.glob("[!.]*")} == {path.name, *beside}
        meta = files.meta_of(path)
        assert meta["tasks"] == TASKS and grow(path) == []
        assert grow(path, tasks=[*TASKS, "t4"]) == ["t4"]  # more tasks: what is there is not done again
        assert path.read_bytes() == WHOLE + "".join(map(files.dumps, group("t4"))).encode()


def test_processes_of_other_settings_are_refused_before_there_is_a_group():
    with process(0, 2):
        begin(Path("x.jsonl")).lock.release()
    with process(1, 2), refused("begun with depth 3, not 4"):
        begin(Path("x.jsonl"), "--depth 4")


def test_processes_that_train_again_share_the_demonstrations_that_were_played(capsys):
    def collect(more, most, share=ALONE):
        config = flags(f"--run . {more}")
        with process(*share):
            return list(files.read_jsonl(demonstrations.collect(FakeEnv(), config, most)))

    first = collect("", most=1)
    assert collect("--overwrite", most=1, share=(1, 2)) == first
    assert "expert.jsonl: grows" not in capsys.readouterr().err
    assert collect("", most=2)[:1] == first
    assert "expert.jsonl: grows, so that what was made from it counts as" in capsys.readouterr().err


MISTAKES = [
    (UserError("x.jsonl:3: bad"), 2, "error: x.jsonl:3: bad\n"),
    (PermissionError(13, "no", "x"), 2, "error: [Errno 13] no: 'x'\n"),
    (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "error: No module named 'peft': pip install it\n"),
    (RuntimeError("CUDA out of memory. Tried"), 2, f"error: out of memory: {FITS}\n"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), 2, f"error: out of memory: {FITS}\n"),
    (MemoryError(), 2, f"error: out of memory: {FITS}\n"),
    (
        KeyboardInterrupt(),
        130,
        "stopped; the same command resumes (without --overwrite, once a part of its output is there)\n",
    ),
]


def test_mistakes_end_in_one_line_and_code_2_and_bugs_in_a_traceback(capsys):
    for error, code, says in MISTAKES:
        with pytest.raises(SystemExit) as stop:
            run_stage(mock.Mock(side_effect=error))
        assert stop.value.code == code and capsys.readouterr().err == says
        with tqdm(total=9, initial=4), pytest.raises(SystemExit):
            run_stage(mock.Mock(side_effect=error))
        assert says in re.split("(?<=[\r\n])|(?<=\x1b\\[A)", capsys.readouterr().err)  # not behind a progress bar
    for bug in (RuntimeError("something else"), ModuleNotFoundError("No module named 'qlass.a'", name="qlass.a")):
        with pytest.raises(type(bug)):
            run_stage(mock.Mock(side_effect=bug))


def write_too(path):
    with refused("x.jsonl: another process is writing it"):
        begin(path)


def test_an_output_has_one_writer():
    path = Path("x.jsonl")
    held = begin(path)
    with multiprocessing.get_context("fork").Pool(1) as other:
        other.apply(write_too, [path])
    held.lock.release()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_the_codes_own(monkeypatch):
    """And not that of a repository around it, where it was installed."""
    commit = "git -c user.name=a -c user.email=a@b -c commit.gpgsign=false commit -q --allow-empty -m one"
    subprocess.run(["bash", "-c", f"git init -q && {commit} && mkdir -p qlass site/qlass"], check=True)
    for place, own in (("qlass", True), ("site/qlass", False)):
        monkeypatch.setattr(outputs, "__file__", f"{place}/outputs.py")
        assert bool(outputs.code_version()) == own


def test_overwriting_loses_nothing_before_the_new_output_is_whole():
    """Neither a complete output nor the parts of another one, until there is a first group; then both recipes stay."""
    path, parts, meta = Path("x.jsonl"), Path("x.jsonl.parts"), Path("x.meta.json")
    grow(path, stop=2)
    begin(path, "--overwrite --depth 4").lock.release()
    assert grow(path) == ["t1", "t0"]  # as if nothing had been
    old = path.read_bytes(), meta.read_bytes()
    begin(path, "--overwrite --depth 4").lock.release()
    assert grow(path) == [] and not parts.exists()
    grow(path, "--overwrite --depth 4", stop=1)
    assert (path.read_bytes(), meta.read_bytes()) == old
    assert grow(path, "--depth 4") == ["t2", "t1", "t0"]
    assert path.read_bytes() == WHOLE and files.meta_of(path)["recipe"]["depth"] == 4 and not parts.exists()


def test_a_stop_while_old_parts_are_removed_leaves_none_without_its_recipe():
    path = Path("x.jsonl")
    grow(path)
    grow(path, "--overwrite --depth 4", stop=2)
    with mock.patch.object(outputs, "write_json", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        grow(path, "--overwrite --depth 5", stop=1)
    with refused("begun with depth 4, not 3"):
        grow(path)


def test_a_folder_is_the_runs_own_however_it_is_named():
    config = flags("--run run")
    Output(Path("run/x.jsonl").absolute(), config, config.recipe(), {}, itemgetter("task_id")).lock.release()
    assert config.file.exists()


def test_a_file_system_without_modes_will_do():
    with mock.patch("pathlib.Path.chmod", side_effect=PermissionError(1, "Operation not permitted")):
        grow(Path("x.jsonl"))
    assert Path("x.jsonl").read_bytes() == WHOLE


def test_a_file_or_a_checkpoint_is_replaced_as_a_whole():
    file, folder = Path("x.jsonl"), Path("sft")
    lines = [{"a": "✓ é\n\u2028", "b": None}, {"task_id": "007", "more": [1, 2.5]}]
    files.write_jsonl(file, lines)
    for text in ("old", "new"):
        with files.atomic(folder) as draft:
            draft.mkdir()
            (draft / "config.json").write_text(text)
            (draft / "config.json").chmod(0o600)  # as safetensors does: colleagues read what the folder's mode says
    assert (folder / "config.json").stat().st_mode & 0o777 == folder.stat().st_mode & 0o666
    for path in (file, folder):
        with pytest.raises(RuntimeError), files.atomic(path) as draft:
            draft.write_text("half")
            raise RuntimeError("power cut")
    assert read_jsonl(file) == lines and (folder / "config.json").read_text() == "new"


def test_what_was_not_named_is_made_by_the_flags_of_the_run(monkeypatch, capsys):
    """A second command goes on with what was stopped, and a third one finds it."""
    config, labels = flags("--seed 1 --run ."), Path("q_labels.jsonl")
    write_settings(config)
    of_run = ["--run", ".", "--env", "webshop", "--seed", "1", "--preset", "tiny"]
    for stop, told in ((1, True), (None, True), (None, False)):
        make = mock.Mock(side_effect=lambda argv, stop=stop: grow(labels, " ".join(argv[2:]), stop=stop))
        monkeypatch.setattr("bellman.main", make)
        assert find_or_make(None, "bellman", "q_labels.jsonl", config) == labels
        assert [call.args[0] for call in make.call_args_list] == [of_run] * told
        assert ("is missing: making it with python bellman.py --run" in capsys.readouterr().out) == told
    assert labels.read_bytes() == WHOLE


def test_what_was_being_made_goes_on_where_the_run_was_moved(monkeypatch):
    old, new = Path("old"), Path("new")
    write_settings(flags(f"--run {old}"))
    make = mock.Mock(side_effect=lambda argv: grow(Path(argv[1]) / "q_labels.jsonl", " ".join(argv[2:]), stop=1))
    monkeypatch.setattr("bellman.main", make)
    find_or_make(None, "bellman", "q_labels.jsonl", flags(f"--run {old}"))
    old.rename(new)
    for _ in range(2):
        find_or_make(None, "bellman", "q_labels.jsonl", flags(f"--run {new}"))
    assert make.call_count == 3


def test_data_may_be_moved_and_what_changed_in_it_is_told():
    """A model may be, too: refusals.md."""
    old, new, out = Path("old"), Path("new"), Path("sft")
    old.mkdir()
    (old / "config.json").write_text("one")
    write_settings(flags("--run . --env-option data=new"))
    recipe = {"stage": "sft", "env_option": [], "env_files": {"data": fingerprint(old)}}
    write_json(meta_path(out), {"recipe": recipe, "settings": {"env_option": ["data=old"]}, "inputs": {}})
    old.rename(new)
    assert not list(changes(out))
    (new / "config.json").write_text("other")
    hash_of.cache_clear()
    (told,) = changes(out)
    assert told.startswith("sft was made with env_option ")


@pytest.mark.parametrize(("platform", "memory_mb"), [("linux", 3072), ("darwin", 3)])  # of 1,024 bytes; of one
def test_metadata_have_the_seconds_and_the_peak_memory_of_a_command(platform, memory_mb, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", [0, 7_000_000].__getitem__)  # of its own card alone
    monkeypatch.setattr("qlass.outputs.time", SimpleNamespace(monotonic=iter([10.0, 12.5]).__next__))
    out = begin(Path("trees.jsonl"))
    out.write([group("t0")], "", total=1)
    out.finish(["t0"])
    costs = {"seconds": 2.5, "memory_mb": memory_mb, "gpu_memory_mb": 7}
    assert costs.items() <= files.meta_of(out.path).items()
