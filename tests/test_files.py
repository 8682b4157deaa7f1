"""Outputs: resumed wherever they were stopped, by one writer and one recipe; files replaced as a whole; mistakes."""

import argparse
import errno
import functools
import multiprocessing
import os
import tempfile
from operator import itemgetter
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import bellman
from qlass import UserError, files, runs
from qlass.files import read_jsonl
from qlass.flags import Parser
from qlass.runs import Output, need, parts_of

TASKS = ["t0", "t1", "t2", "t3"]


def flags(*words: str) -> argparse.Namespace:
    parser = Parser("A stage.")
    for name in ("--out", "--sft", "--qnet"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--depth", type=int, default=3)
    parser.free("--limit", type=int)
    parser.free("--device")
    return runs.parse(parser, list(words))


def begin(path: Path, *words: str, **inputs: Path) -> Output:
    return Output(path, flags("--run", str(path.parent), *words), itemgetter("task_id"), **inputs)


def group(task: str) -> list[dict]:
    return [{"task_id": task, "n": n, "text": "é" * n} for n in range(1 + int(task[1:]))]


WHOLE = "".join(files.dumps(line) for task in TASKS for line in group(task)).encode()
ALONE = (0, 1)


def process(rank: int, width: int):
    return mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(width))


def grow(path: Path, *words, share: tuple = ALONE, stop: int | None = None, tasks: list = TASKS, **inputs) -> list[str]:
    """What a stage does, by process RANK of WORLD_SIZE, stopped in front of a group. Returns the tasks it did."""
    with process(*share):
        out = begin(path, *words, **inputs)
        todo = out.missing(runs.my_share(tasks))[::-1][:stop]  # as they come, the last one first
        if todo:
            out.grow(map(group, todo), "groups", len(tasks))
        if stop is None:
            out.finish(tasks, tasks=tasks)
        out.lock.close()
        return todo


CALLS = st.tuples(st.sampled_from([ALONE, (0, 2), (1, 2), (2, 3)]), st.none() | st.integers(0, 3), st.integers(0, 400))


@given(st.lists(CALLS, max_size=5))
@example([(ALONE, 3, len(WHOLE) - 1)])
def test_stopped_at_any_byte_at_any_width_it_becomes_the_same_file(calls):
    """A call stops in front of a group or not at all, and then its part may be cut."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run[2]" / "r{a,b}[1]*.jsonl"  # which no pattern finds
        for share, stop, cut in calls:
            grow(path, share=share, stop=stop)
            part = parts_of(path) / "{}-of-{}.jsonl".format(*share)
            if part.exists():
                os.truncate(part, min(cut, part.stat().st_size))
        grow(path)
        assert path.read_bytes() == WHOLE and len(list(path.parent.glob("[!.]*"))) == 2  # it and its metadata
        meta = runs.meta_of(path)
        assert meta["tasks"] == TASKS and (meta["seconds"] or calls) and grow(path) == []
        assert grow(path, tasks=[*TASKS, "t4"]) == ["t4"]  # more tasks: what is there is not done again
        assert path.read_bytes() == WHOLE + "".join(map(files.dumps, group("t4"))).encode()
        assert runs.meta_of(path)["seconds"] is None  # of two calls


def test_a_part_that_goes_while_it_is_read_is_in_the_file(tmp_path):
    """Another process gives the file its name behind the listing of its parts."""
    path, glob = tmp_path / "x.jsonl", Path.glob
    grow(path, share=(0, 2))
    with process(1, 2), begin(path).lock:
        mine = begin(path)
        mine.grow(map(group, ["t3", "t1"]), "groups", 4)
        late = [sorted(glob(parts_of(path), "*")), grow(path)][:1]
        with mock.patch.object(Path, "glob", side_effect=late):
            mine.finish(TASKS)
    assert path.read_bytes() == WHOLE and len(mine.records) == 10


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        begin(path)
    return str(error.value)


def test_an_output_has_one_writer(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    with begin(path).lock, multiprocessing.get_context("fork").Pool(1) as other:
        message = other.apply(refusal, [path])
    assert "x.jsonl: another process is writing it" in message and ".x.jsonl.lock" in message
    for error in (OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")):
        with mock.patch.object(files.FileLock, "acquire", side_effect=error):
            begin(path)
        warning = capsys.readouterr().err
        assert "x.jsonl can't be locked" in warning and "no second process" in warning


def test_another_recipe_is_refused_and_free_flags_may_differ(tmp_path):
    path, sft, qnet = (tmp_path / name for name in ("x.jsonl", "sft", "qnet"))
    sft.mkdir()
    (sft / "weights").write_text("1")
    grow(path, sft=sft, qnet=qnet, stop=2)
    qnet.write_text("which a method asks for now")
    for name in (".DS_Store", "README.md"):
        (sft / name).write_text("no change")
    sft = sft.rename(tmp_path / "moved")  # an input is known by its content
    grow(path, "--limit", "9", "--device", "cpu", sft=sft, qnet=qnet)
    for words, inputs, says in (
        (["--depth", "4"], {}, "--depth 3, not 4: --overwrite starts again"),
        (["--seed", "1"], {}, "--seed 0, not 1"),
        (["--env-option", "data=x"], {}, r"--env-option \[\], not \['data=x'\]"),
        ([], {"qnet": tmp_path / "gone"}, "--qnet .*/gone, which has changed or is another"),
        ([], {"sft": qnet}, "--sft .*/qnet, which has changed or is another"),
    ):
        with pytest.raises(UserError, match=rf"x\.jsonl was begun with {says}"):
            begin(path, *words, **{"sft": sft, "qnet": qnet} | inputs)
    (sft / "weights").write_text("2")
    with pytest.raises(UserError, match=r"--sft .*/moved, which has changed"):
        begin(path, sft=sft, qnet=qnet)


@pytest.mark.parametrize("stop", range(4))
def test_an_overwrite_that_was_stopped_leaves_nothing_that_is_refused(stop, tmp_path):
    for share in ((0, 2), (1, 2)):  # the last of which gives it its name
        assert not (tmp_path / "x.jsonl").exists()
        grow(tmp_path / "x.jsonl", share=share)
    stops = [mock.DEFAULT] * stop + [KeyboardInterrupt]
    with mock.patch.object(files, "discard", wraps=files.discard, side_effect=stops), pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "x.jsonl", "--overwrite")
    grow(tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_bytes() == WHOLE


def test_what_is_no_output_of_this_command_or_can_not_be_shared_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('[{"id": 1}]')
    assert "not of this command, which leaves a .meta.json beside it: move it, or name" in refusal(path)
    assert path.read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()
    assert "a folder" in refusal(tmp_path)
    with process(0, 8):
        with pytest.raises(UserError, match="several processes with --overwrite: delete it"):
            begin(tmp_path / "new", "--overwrite")
        with pytest.raises(UserError, match=r"missing or not complete: make it first, by one process.* --env webshop"):
            need(None, tmp_path / "trees.jsonl", "build_trees", flags())
        with pytest.raises(UserError, match="no share of 4 tasks"):
            runs.my_share(TASKS)
    with mock.patch.dict(os.environ, WORLD_SIZE=""):  # of an unset variable
        assert files.share() == ALONE


@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_a_checkpoint_is_replaced_as_a_whole_and_a_link_stays(link, tmp_path):
    file, folder, disk = tmp_path / "x.jsonl", tmp_path / "sft", tmp_path / "disk"
    (disk / "empty").mkdir(parents=True)
    if link:
        file.symlink_to(disk / "x.jsonl")
        folder.symlink_to(disk / "empty")
    lines = [{"a": "✓ é\n\u2028", "b": None}, {"task_id": "007", "more": [1, 2.5]}]
    for text in ("old", "new"):
        files.write_jsonl(file, lines[text == "old" :])
        with files.draft_of(files.checkpoint_folder(folder)) as draft:
            draft.mkdir()
            (draft / "config.json").write_text(text)
    for path in (file, folder):
        with pytest.raises(RuntimeError), files.draft_of(path) as draft:
            draft.write_text("half")
            raise RuntimeError("power cut")
    assert list(read_jsonl(file)) == lines and (folder / "config.json").read_text() == "new"
    assert (file.is_symlink(), folder.is_symlink()) == (link, link)
    files.discard(folder)  # --overwrite
    assert folder.is_symlink() == link and not folder.exists()
    with pytest.raises(UserError, match="something else than a checkpoint"):
        files.checkpoint_folder(tmp_path)


def test_what_was_named_must_be_there_and_what_was_not_is_made_or_resumed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a b"
    args, labels, calls = flags("--seed", "1", "--run", str(folder)), folder / "q_labels.jsonl", []
    monkeypatch.setattr("bellman.main", calls.append)
    with pytest.raises(UserError, match="no such file"):
        need(tmp_path / "named", labels, "bellman", args)
    assert need(None, labels, "bellman", args) == labels
    command = f"python bellman.py --env webshop --run '{folder}' --seed 1"  # to copy
    assert capsys.readouterr().out == f"{labels} is missing or not complete: making it with {command}\n"
    assert calls == [["--env", "webshop", "--run", str(folder), "--seed", "1"]]
    folder.mkdir()
    assert need(None, labels, "bellman", args) and len(calls) == 2  # a call that was stopped
    args.sft = tmp_path / "llama"
    with pytest.raises(UserError, match=r"make it first, .*from the --sft that is meant"):
        need(None, folder / "gone", "bellman", args)
    labels.write_text("{}\n")  # to be there is to be complete
    assert need(None, labels, "bellman", args) and len(calls) == 2


MISTAKES = [
    (UserError("x.jsonl:3: bad"), 2, "error: x.jsonl:3: bad\n"),
    (PermissionError(13, "no", "x"), 2, "error: x: no\n"),
    (ModuleNotFoundError("No module named 'x'"), 2, "error: No module named 'x': pip install it\n"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), 2, "error: out of memory: give --gradient"),
    (KeyboardInterrupt(), 130, "stopped; the same command, without --overwrite, resumes"),
]


def test_mistakes_end_in_one_line_and_code_2_and_bugs_in_a_traceback(capsys):
    cases = [(mock.Mock(side_effect=error), code, says) for error, code, says in MISTAKES]
    for argv in ("--seed x", "--seed -1", "--gamma 2", "--gamma nan", "--env-option map="):
        cases.append((functools.partial(bellman.main, argv.split()), 2, argv.split()[1]))
    for main, code, says in cases:
        with pytest.raises(SystemExit) as stop:
            runs.run_stage(main)
        error = capsys.readouterr().err
        assert stop.value.code == code and says in error.splitlines(keepends=True)[-1]
    for bug in (RuntimeError("something else"), ZeroDivisionError()):
        with pytest.raises(type(bug)):
            runs.run_stage(mock.Mock(side_effect=bug))
