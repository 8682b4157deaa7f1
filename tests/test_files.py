"""JSON Lines, resuming, metadata, the search for inputs, and how mistakes reach the person at the keyboard."""

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import pytest
from fakes import dump
from hypothesis import example, given, settings
from hypothesis import strategies as st

import envs
from qlass import UserError, cli, files
from qlass.files import Resumable, release

GROUPS = [[{"task": f"t{g}", "n": n, "text": "✓é" * n} for n in range(g + 1)] for g in range(3)]


def whole_groups(records: list[dict]) -> int:
    """Group g has g + 1 lines; how many lines belong to groups that are all there."""
    sizes = [1, 3, 6]
    return max([0] + [s for s in sizes if s <= len(records)])


def test_lines_come_back_as_they_were(tmp_path):
    records = [{"a": "✓ é\n\u2028", "b": None}, {"c": [1, 2.5]}]
    files.write_jsonl(tmp_path / "deep" / "x.jsonl", records)
    assert list(files.read_jsonl(tmp_path / "deep" / "x.jsonl")) == records


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}\n{"a": \n', r":2: not valid JSON .*one JSON object a line"),
        ('{"a": 1}\n\n{"a"', r":3: not valid JSON .*truncated"),
        ("[1]\n", r":1: a JSON object is expected, not list"),
        ("5\n", r":1: a JSON object is expected, not int"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, text, says):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"x\.jsonl" + says):
        list(files.read_jsonl(tmp_path / "x.jsonl"))


def test_a_missing_file_and_a_file_of_bytes_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        list(files.read_jsonl(tmp_path / "nowhere"))
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"model\.bin"):
        list(files.read_jsonl(tmp_path / "model.bin"))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    def records():
        yield {"new": 1}
        raise RuntimeError("power cut")

    (tmp_path / "x.jsonl").write_text("old")
    with pytest.raises(RuntimeError):
        files.write_jsonl(tmp_path / "x.jsonl", records())
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("x.jsonl", "old")]


def test_a_file_does_not_take_the_place_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a device"):
        files.write_jsonl(tmp_path / "pipe", [{}])
    assert (tmp_path / "pipe").is_fifo()


def test_a_checkpoint_takes_the_place_of_an_older_one_alone(tmp_path):
    folder = files.checkpoint_folder(tmp_path / "deep" / "sft")
    for text in ("old", "new"):
        with files.replacing_folder(folder) as draft:
            (draft / "config.json").write_text(text)
    with pytest.raises(RuntimeError), files.replacing_folder(folder) as draft:
        (draft / "config.json").write_text("half")
        raise RuntimeError("power cut")
    assert (files.checkpoint_folder(folder) / "config.json").read_text() == "new"
    for other in (tmp_path, folder / "config.json"):  # a folder of other things, a file
        with pytest.raises(UserError, match="name another --out"):
            files.checkpoint_folder(other)
    (tmp_path / "empty").mkdir()
    assert files.checkpoint_folder(tmp_path / "empty") == tmp_path / "empty"


def test_the_folder_at_hand_is_no_checkpoint_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="name another --out"):
        (tmp_path / "thesis.tex").touch()
        files.checkpoint_folder(Path("."))


WHOLE = "".join(map(dump, GROUPS)).encode()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, len(WHOLE)))
@example(len(WHOLE) - 1)
@example(len(dump(GROUPS[0]).encode()))
def test_a_file_cut_at_any_byte_grows_to_the_same_file(cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(WHOLE[:cut])
        file = Resumable(path, whole_groups)
        kept = [1, 3, 6].index(len(file.records)) + 1 if file.records else 0
        assert file.records == list(chain(*GROUPS[:kept]))
        for group in GROUPS[kept:]:
            file.append(group)
        file.close()
        assert list(files.read_jsonl(path)) == list(chain(*GROUPS))


def test_empty_lines_are_no_lines(tmp_path):
    (tmp_path / "x.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n{"a"')
    file = Resumable(tmp_path / "x.jsonl", len)
    file.append([{"a": 3}])
    file.close()
    assert [r["a"] for r in files.read_jsonl(tmp_path / "x.jsonl")] == [1, 2, 3]


def test_resuming_does_not_empty_a_file_of_another_kind(tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# Results\nall is well\n")
    with pytest.raises(UserError, match=r"notes\.md:1"):
        Resumable(notes, len)
    assert notes.read_text() == "# Results\nall is well\n"


def test_metadata_says_how_a_file_came_about(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n")
    files.write_meta(out, argparse.Namespace(out=out, seed=3), [source, None, tmp_path / "gone"], nodes=7)
    meta = json.loads((tmp_path / "out.meta.json").read_text())
    assert meta["arguments"] == {"out": str(out), "seed": 3} and meta["nodes"] == 7
    assert list(meta["inputs"]) == [str(source)] and meta["versions"]["torch"]
    # printf '{}\n' | sha256sum
    assert meta["inputs"][str(source)] == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"


def test_a_folders_hash_depends_on_its_files(tmp_path):
    (tmp_path / "a").write_text("1")
    first = files.sha256(tmp_path)
    (tmp_path / "a").write_text("2")
    assert files.sha256(tmp_path) != first


def test_resuming_needs_the_same_arguments_and_the_same_inputs(tmp_path):
    out, model = tmp_path / "trees.jsonl", tmp_path / "sft"
    model.mkdir()
    (model / "weights").write_text("1")
    args = argparse.Namespace(env="frozenlake", seed=0, depth=3, sft=model, limit=5, M=[2], env_option=[])
    files.same_arguments(out, args)  # nothing there yet
    out.write_text("")
    files.write_meta(out, args, [model])
    changed = argparse.Namespace(**vars(args) | {"limit": 9, "M": [4]})
    files.same_arguments(out, changed, free=["M", "limit"])
    for change, says in (({"depth": 4}, "--depth 3, not 4"), ({"env_option": ["map=4x4"]}, "--env-option")):
        with pytest.raises(UserError, match=says):
            files.same_arguments(out, argparse.Namespace(**vars(args) | change))
    (model / "weights").write_text("22")
    with pytest.raises(UserError, match=r"another .*sft"):
        files.same_arguments(out, args)
    (tmp_path / "trees.meta.json").write_text("[]")
    with pytest.raises(UserError, match="not the metadata of"):
        files.same_arguments(out, args)


def flags(*words: str) -> argparse.Namespace:
    made = cli.parser("A stage.")
    envs.add_arguments(made, list(words))
    made.add_argument("--out", type=Path)
    made.add_argument("--shard")
    return cli.parse(made, list(words))


def test_what_was_named_must_be_there_and_what_was_not_is_made(tmp_path, monkeypatch, capsys):
    args = flags("--seed", "1", "--run", str(tmp_path))
    with pytest.raises(UserError, match="no such file"):
        cli.needed(tmp_path / "named", tmp_path / "default", "bellman", args)
    (tmp_path / "here").write_text("{}\n")
    assert cli.needed(tmp_path / "here", tmp_path / "default", "bellman", args) == tmp_path / "here"
    made = []
    monkeypatch.setattr("bellman.main", made.append)
    assert cli.needed(None, tmp_path / "default", "bellman", args) == tmp_path / "default"
    assert made == [["--env", "webshop", "--run", str(tmp_path), "--seed", "1"]]
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert cli.needed(None, tmp_path / "here", "bellman", args) == tmp_path / "here" and len(made) == 1
    # What was begun with other arguments is not begun again with these: a failed large model never becomes a tiny one.
    (tmp_path / "default.meta.json").write_text(json.dumps({"argv": ["--model", "some/llama"]}))
    with pytest.raises(UserError, match=r"resume it with python bellman\.py --model some/llama"):
        cli.needed(None, tmp_path / "default", "bellman", args)
    (tmp_path / "default.meta.json").write_text(json.dumps({"argv": made[0]}))
    assert cli.needed(None, tmp_path / "default", "bellman", args) and made[1:] == made[:1]
    # Nor is the part that a stopped stage left taken for the whole: it resumes.
    (tmp_path / "default").write_text("{}\n")
    assert cli.needed(None, tmp_path / "default", "bellman", args) and len(made) == 3
    assert "is not complete: making it" in capsys.readouterr().out
    (tmp_path / "default.meta.json").write_text(json.dumps({"argv": made[0], "seconds": 1.0}))
    assert cli.needed(None, tmp_path / "default", "bellman", args) and len(made) == 3
    (tmp_path / "empty").touch()  # by a stage that stopped before its first line
    assert cli.needed(None, tmp_path / "empty", "bellman", args) and len(made) == 4
    args.sft = tmp_path / "x" / ".." / "sft"  # the run's own agent
    assert cli.needed(None, tmp_path / "empty", "bellman", args) and len(made) == 5
    args.sft = tmp_path / "llama"
    with pytest.raises(UserError, match=r"of .*/sft, not of --sft .*/llama: make it first"):
        cli.needed(None, tmp_path / "empty", "bellman", args)


def test_the_arguments_that_stages_share_are_handed_on():
    lake = ["--env", "frozenlake", "--seed", "4", "--map", "4x4", "--env-option", "slippery=true", "--run", "r"]
    shop = ["--webshop-data", "shop", "--human-goals", "--env-option", "seed=3", "--env-option", "page_size=2"]
    for words in (lake, shop):
        first = flags(*words)
        again = flags(*cli.handed_on(first))
        assert files.recorded(again) == files.recorded(first)
    assert flags("--env", "frozenlake").run == Path("runs/frozenlake")
    with pytest.raises(UserError, match="--engine"):  # ALFWorld's
        flags("--engine", "textworld")


def output(tmp_path, *words: str) -> cli.Output:
    args = flags("--out", str(tmp_path / "x.jsonl"), *words)
    return cli.Output(args, len)


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path):
    first = output(tmp_path)
    with pytest.raises(UserError, match=rf"process {os.getpid()} is writing it"):
        output(tmp_path)
    first.finish()
    output(tmp_path).finish()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(cli.__file__).parents[1])!r})
from pathlib import Path
from qlass.files import only_writer
lock = only_writer(Path({str(tmp_path / "x.jsonl")!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    output(tmp_path).finish()


def test_an_output_is_put_in_order_and_overwritten_on_request(tmp_path):
    out = output(tmp_path)
    out.grow([[{"n": 2}], [{"n": 1}]], "lines", 2)
    assert [r["n"] for r in files.read_jsonl(out.path)] == [2, 1]  # as they come, so that a stop loses nothing
    out.finish(lambda r: r["n"], total=2)
    assert [r["n"] for r in files.read_jsonl(out.path)] == [1, 2]
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert meta["total"] == 2 and meta["seconds"] >= 0
    again = output(tmp_path)
    assert again.records == [{"n": 1}, {"n": 2}]
    again.finish()
    anew = output(tmp_path, "--overwrite", "--seed", "1")
    assert not anew.records
    anew.finish()


def test_a_stop_behind_the_last_line_leaves_order_and_figures_to_the_next_call(tmp_path):
    out = output(tmp_path)
    out.grow([[{"n": 2}], [{"n": 1}]], "lines", 2)
    out.close()
    release(out.lock)
    output(tmp_path).finish(lambda r: r["n"], total=2)
    assert [r["n"] for r in files.read_jsonl(tmp_path / "x.jsonl")] == [1, 2]
    meta = (tmp_path / "x.meta.json").read_text()
    assert json.loads(meta)["total"] == 2
    output(tmp_path).finish(lambda r: r["n"], total=3)
    assert (tmp_path / "x.meta.json").read_text() == meta  # of the call that made it


def test_a_file_of_something_else_is_not_emptied(tmp_path):
    notes = tmp_path / "x.jsonl"
    notes.write_text('[{"id": 1}]')
    with pytest.raises(UserError, match="holds something else"):
        output(tmp_path)
    assert notes.read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()


def test_a_call_that_was_stopped_before_its_first_line_is_known_by_its_arguments(tmp_path):
    release(output(tmp_path).lock)
    assert "seconds" not in json.loads((tmp_path / "x.meta.json").read_text())
    assert not cli.is_complete(tmp_path / "x.jsonl")  # the next stage names the command that resumes it
    args = argparse.Namespace(env="frozenlake", run=tmp_path, seed=0, env_flags=[])
    with pytest.raises(UserError, match="begun and is not complete: resume it with"):
        cli.needed(None, tmp_path / "x.jsonl", "build_trees", args)


def test_commands_to_copy_are_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x y.jsonl").touch()
    meta = {"argv": ["--run", "a b", "--limit", "3"], "arguments": {}}
    Path("x y.meta.json").write_text(json.dumps(meta))
    args = argparse.Namespace(env="frozenlake", run=tmp_path, seed=0, env_flags=[])
    with pytest.raises(UserError, match=r"--run 'a b' --limit 3"):
        cli.needed(None, Path("x y.jsonl"), "build_trees", args)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert [record["a"] for record in files.read_jsonl(tmp_path / "x.jsonl")] == [1, 2]


def test_figures_of_a_file_outlive_a_stopped_call_and_not_the_file(tmp_path):
    def call(count: int, stopped: bool = False) -> dict:
        out = output(tmp_path)
        out.known["leaks"] = out.with_earlier("leaks", {"trees": count}, max)
        out.grow([[{"n": len(out.records)}]], "lines", 1)
        if stopped:
            release(out.lock)
        else:
            out.finish(tokens=out.with_earlier("tokens", {"agent": 5}, operator.add, stopped=None))
        meta = json.loads((tmp_path / "x.meta.json").read_text())
        return {name: next(iter(meta[name].values())) for name in ("leaks", "tokens") if name in meta}

    assert call(21) == {"leaks": 21, "tokens": 5}
    assert call(3) == {"leaks": 21, "tokens": 10}
    assert call(2, stopped=True) == {"leaks": 21}
    assert call(0) == {"leaks": 21, "tokens": None}  # what the stopped call computed is not known
    (tmp_path / "x.jsonl").unlink()
    assert call(1) == {"leaks": 1, "tokens": 5}


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path):
    path = tmp_path / "labels.jsonl"
    with files.replacing(path) as out:
        out.write("mine\n")
        code = f"from pathlib import Path; from qlass.files import write_jsonl; write_jsonl(Path({str(path)!r}), [])"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=Path(cli.__file__).parents[1], capture_output=True, text=True)
        assert f"labels.jsonl: process {os.getpid()} is writing it" in done.stderr
    assert path.read_text() == "mine\n" and [p.name for p in tmp_path.iterdir()] == ["labels.jsonl"]


def test_an_input_made_from_what_has_changed_since_is_told(tmp_path, capsys):
    trees, labels = tmp_path / "trees.jsonl", tmp_path / "q_labels.jsonl"
    for path in (trees, labels):
        path.write_text("{}\n")
    args = flags("--run", str(tmp_path))
    files.write_meta(labels, args, [trees], seconds=1)
    cli.needed(None, labels, "bellman", args)
    assert capsys.readouterr().err == ""
    trees.write_text("{}\n{}\n")
    cli.needed(None, labels, "bellman", args)
    told = capsys.readouterr().err
    assert f"{labels} was made from another {trees} than there is now" in told and "--overwrite" in told
    files.write_meta(labels, args, [trees, labels], seconds=1)  # made anew in their own place
    labels.write_text("{}\n\n")
    assert list(files.outdated(labels)) == []
    labels.write_text("{}\n")
    files.write_meta(labels, args, [trees], seconds=1)
    trees.write_text("{}\n{}\n{}\n")
    (tmp_path / "qnet").mkdir()
    files.write_meta(tmp_path / "qnet", args, [labels], seconds=1)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    cli.needed(None, moved / "qnet", "train_qnet", args)  # of labels that are out of date
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {moved / 'q_labels.jsonl'} was made from another {moved / 'trees.jsonl'} than")
    (moved / "q_labels.jsonl").write_text("{}\n{}\n")
    cli.needed(None, moved / "qnet", "train_qnet", args)
    assert f"warning: {moved / 'qnet'} was made from another {moved / 'q_labels.jsonl'}" in capsys.readouterr().err


def test_shards_join_into_the_file_that_one_process_would_have_written(tmp_path):
    tasks = list(range(7))
    for i in (2, 1):
        shard = output(tmp_path, "--shard", f"{i}/2")
        shard.grow(([{"n": n}] for n in cli.my_share(tasks, f"{i}/2")), "lines", 4)
        shard.finish()
    whole = output(tmp_path)
    whole.finish(lambda r: r["n"])
    assert [r["n"] for r in files.read_jsonl(tmp_path / "x.jsonl")] == tasks
    with pytest.raises(UserError, match="begun with --seed 0, not 1"):
        output(tmp_path / "..", "--out", str(tmp_path / "x.jsonl"), "--seed", "1")
    with pytest.raises(UserError, match=r"x\.1-of-2\.jsonl: --overwrite would join it again; delete it"):
        output(tmp_path / "..", "--out", str(tmp_path / "x.jsonl"), "--seed", "1", "--overwrite")
    for i in (1, 2):  # whatever the file is called
        shard = output(tmp_path, "--shard", f"{i}/2", "--out", str(tmp_path / "y.json"))
        shard.grow(([{"n": n}] for n in cli.my_share(tasks, f"{i}/2")), "lines", 4)
        shard.finish()
    assert sorted(r["n"] for r in output(tmp_path, "--out", str(tmp_path / "y.json")).records) == tasks
    for wrong in ("0/2", "3/2", "two", "1/8"):
        with pytest.raises(UserError, match="--shard"):
            cli.my_share(tasks, wrong)


def exits(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.run_stage(main)
    return stop.value.code, capsys.readouterr().err


def test_mistakes_end_in_one_line_and_code_2(capsys):
    def mistake():
        raise UserError("x.jsonl:3: not valid JSON")

    def interrupt():
        raise KeyboardInterrupt

    assert exits(mistake, capsys) == (2, "error: x.jsonl:3: not valid JSON\n")
    assert exits(interrupt, capsys)[0] == 130
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.run_stage(lambda: 1 / 0)


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e999"])
def test_a_number_without_an_end_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="out of range: 0 or more"):
        cli.at_least(0, float)(text)


@pytest.mark.parametrize("argv", [["--env", "chess"], ["--seed", "x"], ["--no-such-flag"]])
def test_a_wrong_flag_is_one_line_too(argv, capsys):
    import bellman

    code, error = exits(lambda: bellman.main(argv), capsys)
    assert code == 2 and error.count("\n") == 1 and argv[-1].strip("-") in error


@pytest.mark.parametrize("begin", ["", "/"])
def test_inputs_are_found_where_they_lie_now(begin, tmp_path, monkeypatch):
    """In a run folder that was renamed each in its own place, not another of the same name; else where they were."""
    monkeypatch.chdir(tmp_path)
    old, new = Path(begin and tmp_path, "old"), tmp_path / "new"
    for folder in ("qnet", "grpo/qnet", "grpo/sft", "sft"):
        (new / folder).mkdir(parents=True)
    made = {"out": str(old / "results.jsonl")}
    assert files.located(made, str(old / "grpo/qnet"), new / "results.jsonl").samefile(new / "grpo/qnet")
    assert files.located(made, str(old / "qnet"), new / "results.jsonl").samefile(new / "qnet")
    other = {"out": str(old / "grpo/qnet")}
    assert files.located(other, str(old / "sft"), new / "grpo/qnet").samefile(new / "sft")
    (new / "grpo/qnet").rmdir()
    assert files.located(made, str(old / "grpo/qnet"), new / "results.jsonl") is None
    elsewhere = Path(begin and tmp_path, "elsewhere/trees.jsonl")
    assert files.located(made, str(elsewhere), new / "results.jsonl") is None
    (new / "trees.jsonl").touch()  # copied beside it since
    assert files.located(made, str(elsewhere), new / "results.jsonl").samefile(new / "trees.jsonl")
    elsewhere.parent.mkdir()
    elsewhere.touch()
    assert files.located(made, str(elsewhere), new / "results.jsonl").samefile(elsewhere)
