"""JSON Lines, resuming, metadata, tasks shared by processes, the search for inputs, mistakes in one line."""

import argparse
import json
import multiprocessing
import tempfile
from itertools import chain
from pathlib import Path

import pytest
from fakes import dump
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bellman
import envs
from qlass import UserError, cli, files
from qlass.files import Output, Resumable
from qlass.records import read_jsonl

GROUPS = [[{"task": f"t{g}", "n": n, "text": "✓é" * n} for n in range(g + 1)] for g in range(3)]
WHOLE = "".join(map(dump, GROUPS)).encode()


def whole_groups(lines: list[tuple[str, dict]]) -> int:
    """Group g has g + 1 lines; how many lines belong to groups that are all there."""
    sizes = [1, 3, 6]
    return max([0] + [s for s in sizes if s <= len(lines)])


def ids(path: Path) -> list[int]:
    return [record["n"] for record in read_jsonl(path)]


# ---------------------------------------------------------------------------------------------------- reading, writing


def test_lines_come_back_as_they_were_unknown_fields_and_ids_too(tmp_path):
    records = [{"a": "✓ é\n\u2028", "b": None}, {"task_id": "007", "more": [1, 2.5]}]
    files.write_jsonl(tmp_path / "deep" / "x.jsonl", records)
    assert list(read_jsonl(tmp_path / "deep" / "x.jsonl")) == records
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')  # a byte order mark is no text
    assert [record["a"] for record in read_jsonl(tmp_path / "x.jsonl")] == [1, 2]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    def records():
        yield {"new": 1}
        raise RuntimeError("power cut")

    (tmp_path / "x.jsonl").write_text("old")
    with pytest.raises(RuntimeError):
        files.write_jsonl(tmp_path / "x.jsonl", records())
    assert (tmp_path / "x.jsonl").read_text() == "old"


def test_an_output_has_one_writer(tmp_path):
    def write(path: Path, refusals: multiprocessing.Queue) -> None:
        try:
            Output(path, {}, len)
        except UserError as error:
            refusals.put(str(error))

    first, refusals = output(tmp_path), multiprocessing.Queue()
    second = multiprocessing.get_context("fork").Process(target=write, args=(first.path, refusals))
    second.start()
    assert "x.jsonl: another process is writing it" in refusals.get(timeout=20)
    second.join()
    first.finish()


def test_a_checkpoint_takes_the_place_of_an_older_one_alone(tmp_path):
    folder = files.checkpoint_folder(tmp_path / "deep" / "sft")
    for text in ("old", "new"):
        with files.draft_of(folder) as draft:
            draft.mkdir()
            (draft / "config.json").write_text(text)
    with pytest.raises(RuntimeError), files.draft_of(folder) as draft:
        draft.mkdir()
        (draft / "config.json").write_text("half")
        raise RuntimeError("power cut")
    assert (files.checkpoint_folder(folder) / "config.json").read_text() == "new"
    with pytest.raises(UserError, match="something else than a checkpoint"):
        files.checkpoint_folder(tmp_path)


# ------------------------------------------------------------------------------------------------------------ resuming


@settings(max_examples=80, deadline=None)
@given(st.integers(0, len(WHOLE)))
@example(len(WHOLE) - 1)
def test_a_file_cut_at_any_byte_grows_to_the_same_file(cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(WHOLE[:cut])
        file = Resumable(path, whole_groups)
        kept = [1, 3, 6].index(len(file.records)) + 1 if file.records else 0
        assert file.records == list(chain(*GROUPS[:kept]))
        for group in GROUPS[kept:]:
            file.append(group)
        file.file.close()
        assert list(read_jsonl(path)) == list(chain(*GROUPS))


def test_a_file_of_another_kind_stays(tmp_path):
    (tmp_path / "x.jsonl").write_text('[{"id": 1}]')
    with pytest.raises(UserError, match="not of this command"):
        output(tmp_path)
    assert (tmp_path / "x.jsonl").read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()


def flags(*words: str) -> argparse.Namespace:
    parser = cli.parser("A stage.")
    envs.add_arguments(parser, list(words))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--precision")
    return cli.parse(parser, list(words))


def output(tmp_path: Path, *words: str, **more) -> Output:
    return Output(tmp_path / "x.jsonl", vars(flags(*words)), len, **more)


def metadata(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "x.meta.json").read_text())


def test_an_output_is_put_in_order_and_overwritten_on_request(tmp_path):
    out = output(tmp_path)
    out.grow([[{"n": 2}], [{"n": 1}]], "lines", 2)
    assert ids(out.path) == [2, 1]  # as they come, so that a stop loses nothing
    out.finish(lambda r: r["n"], total=2)
    assert ids(out.path) == [1, 2]
    assert metadata(tmp_path)["total"] == 2 and metadata(tmp_path)["seconds"] >= 0
    again = output(tmp_path)
    assert again.records == [{"n": 1}, {"n": 2}]
    again.finish()
    with pytest.raises(UserError, match="was begun with --seed 0, not 1: --overwrite starts again"):
        output(tmp_path, "--seed", "1")
    anew = output(tmp_path, "--overwrite", "--seed", "1")
    assert not anew.records
    anew.finish()


# ---------------------------------------------------------------------------------------------- tasks shared by several


def by_rank(tmp_path: Path, monkeypatch, rank: int, world: int, tasks: list[int], *words: str, stop=99) -> Output:
    """A process that does its share of the tasks, or stops after some of them."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    out = output(tmp_path, *words, identity=lambda record: record["n"])
    finished = {record["n"] for record in out.records}
    todo = [n for n in (cli.my_share(tasks) if tasks else []) if n not in finished]
    out.grow(([{"n": n, "by": f"{rank}/{world}"}] for n in todo[:stop]), "lines", len(tasks))
    if stop < len(todo):
        out.file.close()
        out.lock.close()
        return out
    out.finish(lambda record: record["n"], lines=len(out.records))
    return out


def test_parts_of_a_stopped_run_are_taken_over_by_any_number_of_processes(tmp_path, monkeypatch):
    tasks = list(range(9))
    (tmp_path / "x.best-of-4.jsonl").write_text("no part\n")
    by_rank(tmp_path, monkeypatch, 0, 3, tasks, stop=1)
    by_rank(tmp_path, monkeypatch, 1, 3, tasks)
    with pytest.raises(UserError, match=r"x\..-of-3\.jsonl was begun with --seed 0, not 1"):
        by_rank(tmp_path, monkeypatch, 0, 2, tasks, "--seed", "1")
    by_rank(tmp_path, monkeypatch, 0, 2, tasks, stop=1)
    out = by_rank(tmp_path, monkeypatch, 0, 1, tasks)
    assert ids(out.path) == tasks and {path.name for path in tmp_path.glob("x*")} == {
        "x.jsonl",
        "x.meta.json",
        "x.best-of-4.jsonl",
    }
    who = {record["n"]: record["by"] for record in out.records}
    assert [who[n] for n in (0, 1, 4, 7, 2, 3)] == ["0/3", "1/3", "1/3", "1/3", "0/2", "0/1"]
    for rank in (0, 1):  # more tasks: what the output has is not done again
        assert len(ids(by_rank(tmp_path, monkeypatch, rank, 2, list(range(12))).path)) < 3
    assert ids(by_rank(tmp_path, monkeypatch, 0, 1, []).path) == list(range(12))
    assert by_rank(tmp_path, monkeypatch, 0, 1, tasks, "--overwrite").records[0]["by"] == "0/1"


def test_processes_that_can_not_share_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"x\.jsonl: delete it"):
        output(tmp_path, "--overwrite", identity=repr)
    with pytest.raises(UserError, match=r"trees\.jsonl: make it first.* python build_trees\.py --env web"):
        cli.needed(None, tmp_path / "trees.jsonl", "build_trees", flags())
    (tmp_path / "trees.1-of-8.jsonl").touch()
    with pytest.raises(UserError, match="the command that wrote its parts"):  # a part is not all of it
        cli.needed(None, tmp_path / "trees.jsonl", "build_trees", flags())
    with pytest.raises(UserError, match="no more than the 3 tasks"):
        cli.my_share(["a", "b", "c"])


# ------------------------------------------------------------------------------------------------------------ metadata


def test_resuming_needs_the_same_arguments_and_the_same_inputs(tmp_path):
    out, model = tmp_path / "trees.jsonl", tmp_path / "sft"
    model.mkdir()
    (model / "weights").write_text("1")
    arguments = {"env": "frozenlake", "seed": 0, "depth": 3, "sft": model, "limit": 5, "M": [2], "env_option": []}
    files.same_arguments(out, arguments)  # nothing there yet
    files.write_meta(out, arguments, [model])
    files.same_arguments(out, arguments | {"limit": 9, "M": [4]}, free=["M", "limit"])
    for change, says in (({"depth": 4}, "--depth 3, not 4"), ({"env_option": ["map=4x4"]}, "--env-option")):
        with pytest.raises(UserError, match=says):
            files.same_arguments(out, arguments | change)
    with pytest.raises(UserError, match=r"begun with --sft .*/sft, not .*/other"):
        files.same_arguments(out, arguments | {"sft": tmp_path / "other"})
    files.write_meta(out, arguments | {"server": "http://a:1/v1#x"}, [model])
    files.same_arguments(out, arguments | {"server": "http://b:2/v1#x"}, files.SAMPLING_FREE)
    files.same_arguments(out, arguments | {"server": None}, files.SAMPLING_FREE)
    with pytest.raises(UserError, match="begun with --server-model x, not y"):
        files.same_arguments(out, arguments | {"server": "http://a:1/v1#y"}, files.SAMPLING_FREE)
    (model / "weights").write_text("22")
    with pytest.raises(UserError, match=r"begun with .*/sft, which has changed"):
        files.same_arguments(out, arguments)


def test_an_input_made_from_what_has_changed_since_is_told(tmp_path, capsys):
    trees, labels, qnet = tmp_path / "trees.jsonl", tmp_path / "q_labels.jsonl", tmp_path / "qnet"
    for path in (trees, labels):
        path.write_text("{}\n")
    qnet.mkdir()
    args = flags("--run", str(tmp_path))
    files.write_meta(labels, vars(args), [trees], seconds=1)
    files.write_meta(qnet, vars(args), [labels], seconds=1)
    cli.needed(None, qnet, "train_qnet", args)
    assert capsys.readouterr().err == ""
    trees.write_text("{}\n{}\n")
    cli.needed(None, qnet, "train_qnet", args)  # of labels that are out of date
    warning = capsys.readouterr().err
    assert warning == f"warning: {labels} was made from another {trees} than there is now: make it again\n"
    labels.write_text("{}\n{}\n")
    cli.needed(None, qnet, "train_qnet", args)
    warning = capsys.readouterr().err
    assert f"{qnet} was made from another {labels} than there is now" in warning


# ---------------------------------------------------------------------------------------------- inputs, flags, mistakes


def test_what_was_named_must_be_there_and_what_was_not_is_made_or_resumed(tmp_path, monkeypatch, capsys):
    args = flags("--seed", "1", "--run", str(tmp_path / "a b"))
    with pytest.raises(UserError, match="no such file"):
        cli.needed(tmp_path / "named", tmp_path / "default", "bellman", args)
    calls = []
    monkeypatch.setattr("bellman.main", calls.append)
    assert cli.needed(None, tmp_path / "default", "bellman", args) == tmp_path / "default"
    assert calls == [["--env", "webshop", "--run", str(tmp_path / "a b"), "--seed", "1"]]
    (line,) = capsys.readouterr().out.splitlines()
    command = f"python bellman.py --env webshop --run '{tmp_path}/a b' --seed 1"  # to copy
    assert line == f"{tmp_path / 'default'} is missing: making it with {command}"
    # The part that a stopped stage left is not taken for all of it: the stage resumes it, or says why it can't.
    (tmp_path / "default").write_text("{}\n")
    (tmp_path / "default.meta.json").write_text("{}")
    assert cli.needed(None, tmp_path / "default", "bellman", args) and len(calls) == 2
    assert "is not complete: making it" in capsys.readouterr().out
    (tmp_path / "default.meta.json").write_text(json.dumps({"seconds": 1.0}))
    assert cli.needed(None, tmp_path / "default", "bellman", args) and len(calls) == 2
    args.sft = tmp_path / "llama"
    with pytest.raises(UserError, match=r"of .*/sft, not of --sft .*/llama: make it first"):
        cli.needed(None, tmp_path / "gone", "bellman", args)


def test_the_arguments_that_stages_share_are_handed_on():
    lake = [
        "--env",
        "frozenlake",
        "--seed",
        "4",
        "--map",
        "4x4",
        "--env-option",
        "slippery=true",
        "--run",
        "r",
        "--precision",
        "bf16",
    ]
    shop = ["--webshop-data", "shop", "--human-goals", "--env-option", "seed=3", "--env-option", "page_size=2"]
    for words in (lake, shop):
        first = flags(*words)
        again = flags(*cli.handed_on(first))
        assert files.recorded(vars(again)) == files.recorded(vars(first))
    assert flags("--env", "frozenlake").run == Path("runs/frozenlake")


def exits(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.run_stage(main)
    return stop.value.code, capsys.readouterr().err


def test_mistakes_end_in_one_line_and_code_2(capsys):
    def raises(error: BaseException):
        raise error

    assert exits(lambda: raises(UserError("x.jsonl:3: bad")), capsys) == (2, "error: x.jsonl:3: bad\n")
    assert exits(lambda: raises(PermissionError(13, "no", "x")), capsys) == (2, "error: x: no\n")
    assert exits(lambda: raises(KeyboardInterrupt()), capsys)[0] == 130
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.run_stage(lambda: 1 / 0)
    for argv in (["--seed", "x"], ["--gamma", "2"], ["--engine", "textworld"]):  # the last is ALFWorld's
        code, error = exits(lambda argv=argv: bellman.main(argv), capsys)
        assert code == 2 and argv[-1] in error
