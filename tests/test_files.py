"""Outputs: resumed wherever they were stopped, by one writer and one recipe; files replaced as a whole; mistakes."""

import argparse
import errno
import json
import multiprocessing
import os
import tempfile
from operator import itemgetter
from pathlib import Path
from unittest import mock

import pytest
import torch
from fakes import dump
from hypothesis import example, given
from hypothesis import strategies as st

import bellman
from qlass import UserError, files, runs
from qlass.files import read_jsonl
from qlass.flags import Parser
from qlass.runs import Output, meta_of, need, parts_of

TASKS = ["t0", "t1", "t2", "t3"]


def flags(*words: str) -> argparse.Namespace:
    parser = Parser("A stage.")
    for name in ("--out", "--sft", "--qnet"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--depth", type=int, default=3)
    parser.free("--limit", type=int)
    parser.free("--device")
    return runs.parse(parser, list(words))


def begin(folder: Path, *words: str, **inputs: Path) -> Output:
    return Output(folder / "x.jsonl", flags("--run", str(folder), *words), itemgetter("task_id"), **inputs)


def lines(task: str) -> list[dict]:
    return [{"task_id": task, "n": n, "text": "é" * n} for n in range(1 + int(task[1:]))]


WHOLE = "".join(json.dumps(line, ensure_ascii=False) + "\n" for task in TASKS for line in lines(task)).encode()
ALONE = (0, 1)


def grow(
    folder: Path, *words: str, share: tuple = ALONE, stop: int | None = None, tasks: list = TASKS, **inputs
) -> list[str]:
    """What a stage does, by process RANK of WORLD_SIZE, stopped in front of a group. Returns the tasks it did."""
    with mock.patch.dict(os.environ, dict(zip(("RANK", "WORLD_SIZE"), map(str, share), strict=True))):
        out = begin(folder, *words, **inputs)
        todo = out.missing(runs.my_share(tasks))[::-1][:stop]  # as they come, the last one first
        if todo:
            out.grow(map(lines, todo), "groups", len(tasks))
        if stop is None:
            out.finish(tasks, tasks=tasks)
        out.lock.close()
        return todo


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("[!.]*")}


# ------------------------------------------------------------------------------------------------------------ resuming

CALLS = st.tuples(st.sampled_from([ALONE, (0, 2), (1, 2), (2, 3)]), st.none() | st.integers(0, 3), st.integers(0, 400))


@given(st.lists(CALLS, max_size=5))
@example([(ALONE, 3, len(WHOLE) - 1)])
@example([((1, 2), None, 400), ((0, 2), None, 400)])
def test_stopped_at_any_byte_at_any_width_it_becomes_the_same_file(calls):
    """A call stops in front of a group or not at all, and then its part may be cut."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for share, stop, cut in calls:
            grow(folder, share=share, stop=stop)
            part = parts_of(folder / "x.jsonl") / "{}-of-{}.jsonl".format(*share)
            if part.exists():
                os.truncate(part, min(cut, part.stat().st_size))
        grow(folder)
        assert (folder / "x.jsonl").read_bytes() == WHOLE and names(folder) == {"x.jsonl", "x.meta.json"}
        assert meta_of(folder / "x.jsonl")["tasks"] == TASKS and grow(folder) == []


def test_processes_do_what_others_have_left_and_the_last_one_gives_the_file_its_name(tmp_path, capsys):
    assert grow(tmp_path, share=(1, 3), tasks=TASKS) == ["t1"]
    assert grow(tmp_path, share=(0, 3), stop=1) == ["t3"]
    assert grow(tmp_path, share=(0, 2)) == ["t2", "t0"] and not parts_of(tmp_path / "x.jsonl").exists()
    assert (tmp_path / "x.jsonl").read_bytes() == WHOLE
    assert "3 of 4 are left to other processes" in capsys.readouterr().out
    assert grow(tmp_path, tasks=[*TASKS, "t5", "t6"]) == ["t6", "t5"]  # more tasks: what is there is not done again
    assert [r["task_id"] for r in read_jsonl(tmp_path / "x.jsonl") if r["n"] == 0] == [*TASKS, "t5", "t6"]
    assert len(grow(tmp_path, "--overwrite", "--seed", "1")) == 4


def test_a_part_that_goes_while_it_is_read_is_in_the_file(tmp_path, monkeypatch):
    """Another process has just given the file its name."""
    grow(tmp_path, share=(0, 2))
    with mock.patch.dict(os.environ, RANK="1", WORLD_SIZE="2"):
        mine = begin(tmp_path)
        mine.grow(map(lines, ["t3", "t1"]), "groups", 4)
        glob = Path.glob

        def late(path: Path, pattern: str) -> list[Path]:
            found = list(glob(path, pattern))
            monkeypatch.undo()
            grow(tmp_path)
            return found

        monkeypatch.setattr(Path, "glob", late)
        mine.finish(TASKS)
    assert (tmp_path / "x.jsonl").read_bytes() == WHOLE and len(mine.records) == 10


def test_an_output_has_one_writer(tmp_path):
    def write(path: Path, refusals: multiprocessing.Queue) -> None:
        try:
            begin(path)
        except UserError as error:
            refusals.put(str(error))

    first, refusals = begin(tmp_path), multiprocessing.Queue()
    second = multiprocessing.get_context("fork").Process(target=write, args=(tmp_path, refusals))
    second.start()
    message = refusals.get(timeout=20)
    assert "x.jsonl: another process is writing it" in message and ".x.jsonl.lock" in message
    second.join()
    first.lock.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_told(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files.FileLock, "acquire", mock.Mock(side_effect=error))
    grow(tmp_path)
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "x.jsonl can't be locked" in warning and "no second process" in warning


# ---------------------------------------------------------------------------------------------------------- the recipe


def test_another_recipe_is_refused_and_free_flags_may_differ(tmp_path):
    model = tmp_path / "sft"
    model.mkdir()
    (model / "weights").write_text("1")
    grow(tmp_path, sft=model, qnet=tmp_path / "qnet", stop=2)
    (model / ".DS_Store").write_text("no change")
    (model / files.CARD).write_text("nor is the card")
    (tmp_path / "qnet").write_text("which a method asks for now")
    copy = {"sft": model.rename(tmp_path / "moved"), "qnet": tmp_path / "qnet"}
    grow(tmp_path, "--limit", "9", "--device", "cpu", **copy)  # an input is known by its content
    for words, inputs, says in (
        (["--depth", "4"], copy, "--depth 3, not 4: --overwrite starts again"),
        (["--seed", "1"], copy, "--seed 0, not 1"),
        (["--env-option", "data=x"], copy, r"--env-option \[\], not \['data=x'\]"),
        ([], copy | {"qnet": tmp_path / "gone"}, "--qnet .*/gone, which has changed or is another"),
        ([], copy | {"sft": tmp_path / "qnet"}, "--sft .*/qnet, which has changed or is another"),
    ):
        with pytest.raises(UserError, match=f"x.jsonl was begun with {says}"):
            begin(tmp_path, *words, **inputs)
    (copy["sft"] / "weights").write_text("2")
    with pytest.raises(UserError, match="--sft .*/moved, which has changed"):
        begin(tmp_path, **copy)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_an_overwrite_that_was_stopped_leaves_nothing_that_is_refused(stop, tmp_path, monkeypatch):
    grow(tmp_path)
    discard, calls = files.discard, []

    def stopping(path: Path) -> None:
        discard(path)
        calls.append(path)
        if len(calls) == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "discard", stopping)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, "--overwrite")
    monkeypatch.undo()
    begin(tmp_path).lock.close()
    grow(tmp_path)
    assert (tmp_path / "x.jsonl").read_bytes() == WHOLE


def test_what_is_no_output_of_this_command_or_can_not_be_shared_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('[{"id": 1}]')
    with pytest.raises(UserError, match="not of this command.*: move it, or name it as an input"):
        begin(tmp_path)
    assert (tmp_path / "x.jsonl").read_text() == '[{"id": 1}]' and names(tmp_path) == {"x.jsonl"}
    (tmp_path / "x.jsonl").unlink()
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(UserError, match="a folder"):
        begin(tmp_path)
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="8"):
        with pytest.raises(UserError, match="several processes with --overwrite: delete it"):
            begin(tmp_path / "new", "--overwrite")
        with pytest.raises(UserError, match=r"missing or not complete: make it first, by one process.* --env webshop"):
            need(None, tmp_path / "trees.jsonl", "build_trees", flags())
        with pytest.raises(UserError, match="no share of 4 tasks"):
            runs.my_share(TASKS)
    with mock.patch.dict(os.environ, WORLD_SIZE=""):  # of an unset variable
        assert files.share() == ALONE


@pytest.mark.parametrize("name", ["r[1]*.jsonl", "r{a,b}?.jsonl", "results"])
def test_any_name_is_an_outputs(name, tmp_path):
    for share in ((0, 2), (1, 2)):
        with mock.patch.dict(os.environ, RANK=str(share[0]), WORLD_SIZE="2"):
            out = Output(tmp_path / "run[2]" / name, flags(), itemgetter("n"))
            out.grow([[{"n": share[0]}]], "lines", 2)
            out.finish([0, 1])
    assert [line["n"] for line in read_jsonl(out.path)] == [0, 1]


# ------------------------------------------------------------------------------------------------- files and checkpoints


def test_lines_come_back_as_they_were_unknown_fields_and_ids_too(tmp_path):
    records = [{"a": "✓ é\n\u2028", "b": None}, {"task_id": "007", "more": [1, 2.5]}]
    files.write_jsonl(tmp_path / "deep" / "x.jsonl", records)
    assert list(read_jsonl(tmp_path / "deep" / "x.jsonl")) == records
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')  # a byte order mark is no text
    assert [record["a"] for record in read_jsonl(tmp_path / "x.jsonl")] == [1, 2]


@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_a_checkpoint_is_replaced_as_a_whole_and_a_link_stays(link, tmp_path):
    file, folder, disk = tmp_path / "x.jsonl", tmp_path / "sft", tmp_path / "disk"
    (disk / "empty").mkdir(parents=True)
    if link:
        file.symlink_to(disk / "x.jsonl")
        folder.symlink_to(disk / "empty")
    for text in ("old", "new", "half"):
        with mock.patch.object(files, "dumps", side_effect=RuntimeError("power cut") if text == "half" else str):
            try:
                files.write_jsonl(file, [text])
                with files.draft_of(files.checkpoint_folder(folder)) as draft:
                    draft.mkdir()
                    (draft / "config.json").write_text(files.dumps(text))
            except RuntimeError:
                assert text == "half"
    assert file.read_text() == (folder / "config.json").read_text() == "new"
    assert (file.is_symlink(), folder.is_symlink()) == (link, link)
    files.discard(folder)  # --overwrite
    assert folder.is_symlink() == link and not folder.exists()
    with pytest.raises(UserError, match="something else than a checkpoint"):
        files.checkpoint_folder(tmp_path)


# ------------------------------------------------------------------------------------------------------ inputs, mistakes


def test_what_was_named_must_be_there_and_what_was_not_is_made_or_resumed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a b"
    args, labels = flags("--seed", "1", "--run", str(folder)), folder / "q_labels.jsonl"
    with pytest.raises(UserError, match="no such file"):
        need(tmp_path / "named", labels, "bellman", args)
    calls = []
    monkeypatch.setattr("bellman.main", calls.append)
    assert need(None, labels, "bellman", args) == labels
    command = f"python bellman.py --env webshop --run '{folder}' --seed 1"  # to copy
    announced = f"{labels} is missing or not complete: making it with {command}\n"
    assert capsys.readouterr().out == announced
    assert calls == [["--env", "webshop", "--run", str(folder), "--seed", "1"]]
    folder.mkdir()
    begun = {"recipe": {"gamma": 0.9}, "argv": calls[0]}  # a stopped stage is resumed as it was begun
    (folder / "q_labels.meta.json").write_text(json.dumps(begun))
    assert need(None, labels, "bellman", args) and len(calls) == 2
    (folder / "q_labels.meta.json").write_text(json.dumps(begun | {"argv": ["--run", str(folder), "--gamma", ".5"]}))
    with pytest.raises(UserError, match=r"as it was begun.*: python bellman\.py --run .* --gamma \.5"):
        need(None, labels, "bellman", args)
    args.sft = tmp_path / "llama"
    with pytest.raises(UserError, match=r"make it first, .*from the --sft that is meant"):
        need(None, folder / "gone", "bellman", args)
    labels.write_text("{}\n")  # to be there is to be complete
    assert need(None, labels, "bellman", args) and len(calls) == 2


def exits(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        runs.run_stage(main)
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("x.jsonl:3: bad"), 2, "error: x.jsonl:3: bad\n"),
        (PermissionError(13, "no", "x"), 2, "error: x: no\n"),
        (ModuleNotFoundError("No module named 'x'"), 2, "error: No module named 'x': pip install it\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), 2, "error: out of memory: give --gradient"),
        (KeyboardInterrupt(), 130, "\nstopped; the same command, without --overwrite, resumes"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(error, code, says, capsys):
    ended, line = exits(mock.Mock(side_effect=error), capsys)
    assert ended == code and line.startswith(says) and line.strip().count("\n") == 0


def test_bugs_keep_their_traceback_and_flags_are_checked(capsys):
    for bug in (RuntimeError("something else"), ZeroDivisionError()):
        with pytest.raises(type(bug)):
            runs.run_stage(mock.Mock(side_effect=bug))
    assert exits(lambda: torch.empty(1 << 55), capsys)[0] == 2
    for argv in (["--seed", "x"], ["--seed", "-1"], ["--gamma", "2"], ["--gamma", "nan"], ["--env-option", "map="]):
        code, error = exits(lambda argv=argv: bellman.main(argv), capsys)
        assert code == 2 and argv[-1] in error
