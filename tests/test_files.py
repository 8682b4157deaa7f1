"""JSON Lines, resuming, metadata, tasks shared by processes, the search for inputs, mistakes in one line."""

import argparse
import json
import multiprocessing
import tempfile
from itertools import chain
from pathlib import Path

import pytest
import torch
from fakes import dump
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bellman
import envs
from qlass import UserError, cli, files, metadata
from qlass.files import read_jsonl
from qlass.output import Output, read_results, read_trees

GROUPS = [[{"task_id": f"t{g}", "n": n, "text": "tree" * n} for n in range(g + 1)] for g in range(3)]
for _group in GROUPS[1:]:  # the first is a line of no tree
    _group[0]["nodes"] = len(_group)
WHOLE = "".join(map(dump, GROUPS)).encode()


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
            Output(path, {})
        except UserError as error:
            refusals.put(str(error))

    first, refusals = begin(tmp_path), multiprocessing.Queue()
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
        path.with_name("x.meta.json").write_text("{}")
        file = Output(path, {})
        kept = [0, 1, 3, 6].index(len(file.records))
        assert file.records == list(chain(*GROUPS[:kept]))
        for group in GROUPS[kept:]:
            file.append(group)
        file.finish()
        assert path.read_bytes() == WHOLE


def test_a_file_of_another_kind_stays(tmp_path):
    (tmp_path / "x.jsonl").write_text('[{"id": 1}]')
    with pytest.raises(UserError, match="not of this command"):
        begin(tmp_path)
    assert (tmp_path / "x.jsonl").read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()


def flags(*words: str) -> argparse.Namespace:
    parser = cli.parser("A stage.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--precision")
    parser.add_argument("--sft", type=Path)
    return cli.parse(parser, list(words))


def begin(tmp_path: Path, *words: str, **more) -> Output:
    return Output(tmp_path / "x.jsonl", vars(flags(*words)), **more)


def metadata_of(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "x.meta.json").read_text())


def test_an_output_is_put_in_order_and_overwritten_on_request(tmp_path):
    out = begin(tmp_path, identity=lambda line: line["n"], plan=[1, 2])
    out.grow([[{"n": 2}], [{"n": 1}]], "lines", 2)
    assert ids(out.path) == [2, 1]  # as they come, so that a stop loses nothing
    out.finish(total=2)
    assert ids(out.path) == [1, 2]
    assert metadata_of(tmp_path)["total"] == 2 and metadata_of(tmp_path)["seconds"] >= 0
    again = begin(tmp_path)
    assert again.records == [{"n": 1}, {"n": 2}]
    again.finish()
    with pytest.raises(UserError, match="was begun with --seed 0, not 1: --overwrite starts again"):
        begin(tmp_path, "--seed", "1")
    anew = begin(tmp_path, "--overwrite", "--seed", "1")
    assert not anew.records
    anew.finish()


# ---------------------------------------------------------------------------------------------- tasks shared by several


def one_tree(task: str, by: str) -> list[dict]:
    root = {"task_id": task, "node_id": 0, "parent_id": None, "action": None, "observation": "", "reward": 0.0}
    root |= {"done": False, "source": "policy", "by": by}
    return [root | {"nodes": 2}, root | {"node_id": 1, "parent_id": 0}]


def grow(
    tmp_path: Path, monkeypatch, rank: int, world: int, tasks: list[str], *words: str, stop: int | None = None
) -> list[str]:
    """A process that grows its share of the trees, the last one first, or stops after some. Returns what it grew."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    arguments, of = vars(flags(*words)), lambda record: record["task_id"]
    out = Output(tmp_path / "trees.jsonl", arguments, identity=of, plan=tasks)
    finished = {record["task_id"] for record in out.records}
    todo = [task for task in cli.my_share(tasks) if task not in finished][::-1]
    out.grow((one_tree(task, f"{rank}/{world}") for task in todo[:stop]), "trees", len(tasks))
    if stop is None:
        out.finish(tasks=tasks)
    else:
        out.lock.close()
        if out.path.exists():
            with open(out.path, "a") as file:
                file.write('{"task_id": ')
    return todo[:stop]


def stands(tmp_path: Path) -> dict[str, str]:
    """The tasks as a reader gets them, and who grew each tree."""
    return {root["task_id"]: root["by"] for root, _ in read_trees(tmp_path / "trees.jsonl")}


def test_a_file_is_its_parts_whoever_wrote_them(tmp_path, monkeypatch):
    tasks, path = [f"t{n}" for n in range(9)], tmp_path / "trees.jsonl"
    (tmp_path / "trees.best-of-4.jsonl").write_text("no part\n")
    assert not metadata.is_complete(path)
    assert grow(tmp_path, monkeypatch, 1, 3, tasks) == ["t7", "t4", "t1"]
    assert grow(tmp_path, monkeypatch, 0, 3, tasks, stop=1) == ["t6"]
    with pytest.raises(UserError, match=r"trees\.jsonl: is not complete"):
        stands(tmp_path)
    with pytest.raises(UserError, match=r"trees\..-of-3\.jsonl was begun with --seed 0, not 1"):
        grow(tmp_path, monkeypatch, 0, 2, tasks, "--seed", "1")
    assert grow(tmp_path, monkeypatch, 0, 2, tasks) == ["t8", "t2", "t0"]  # another width goes on
    assert not metadata.is_complete(path)
    before = files.sha256(path)
    assert grow(tmp_path, monkeypatch, 1, 2, tasks) == ["t5", "t3"]
    assert metadata.is_complete(path) and files.sha256(path) != before and not path.exists()
    by = {"t0": "0/2", "t1": "1/3", "t2": "0/2", "t3": "1/2", "t4": "1/3", "t5": "1/2", "t6": "0/3", "t7": "1/3"}
    assert list(stands(tmp_path).items()) == [*by.items(), ("t8", "0/2")]  # in order, though one part is unfinished
    assert grow(tmp_path, monkeypatch, 0, 1, tasks) == [] and not path.exists()  # nothing was left to do
    assert metadata.read_meta(path)["tasks"] == tasks
    # More tasks: what stands is not done again, and until all have come the set is not complete.
    more = [*tasks, "t9", "t10", "t11"]
    assert grow(tmp_path, monkeypatch, 0, 2, more) == ["t10"]
    assert not metadata.is_complete(path)
    assert grow(tmp_path, monkeypatch, 0, 1, more) == ["t11", "t9"]
    assert list(stands(tmp_path)) == more
    assert len(grow(tmp_path, monkeypatch, 0, 1, tasks, "--overwrite")) == 9
    assert {path.name for path in tmp_path.glob("trees*")} == {
        "trees.jsonl",
        "trees.meta.json",
        "trees.best-of-4.jsonl",
    }


def test_what_stands_in_two_parts_is_read_once(tmp_path, monkeypatch):
    tasks = ["t0", "t1", "t2", "t3"]
    grow(tmp_path, monkeypatch, 0, 2, tasks)
    for path in (tmp_path / "trees.0-of-2.jsonl", tmp_path / "trees.0-of-2.meta.json"):
        path.rename(tmp_path / path.name.replace("trees", "kept"))
    grow(tmp_path, monkeypatch, 1, 2, tasks)
    grow(tmp_path, monkeypatch, 0, 1, tasks)  # knows nothing of what was kept
    for path in tmp_path.glob("kept*"):
        path.rename(tmp_path / path.name.replace("kept", "trees"))
    assert list(stands(tmp_path)) == tasks
    result = {"task_id": "t0", "env": "fake", "method": "greedy", "reward": 1.0, "tokens": {}}
    for part in ("results.0-of-2.jsonl", "results.1-of-2.jsonl"):
        (tmp_path / part).write_text(dump([result]))
    where = f"{tmp_path}/results.0-of-2.jsonl:1"  # a path that is there
    assert list(read_results(tmp_path / "results.jsonl")) == [(where, result)]


def test_processes_that_can_not_share_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"x\.jsonl: delete it"):
        begin(tmp_path, "--overwrite", identity=repr)
    with pytest.raises(UserError, match=r"trees\.jsonl: missing .* make it first.* python build_trees\.py --env web"):
        cli.find_or_make(None, tmp_path / "trees.jsonl", "build_trees", flags())
    with pytest.raises(UserError, match="no share of 3 tasks"):
        cli.my_share(["a", "b", "c"])


# ------------------------------------------------------------------------------------------------------------ metadata


def test_resuming_needs_the_same_arguments_and_the_same_inputs(tmp_path):
    out, model = tmp_path / "trees.jsonl", tmp_path / "sft"
    model.mkdir()
    (model / "weights").write_text("1")
    arguments = {"env": "frozenlake", "seed": 0, "depth": 3, "sft": model, "limit": 5, "M": [2], "env_option": []}
    metadata.same_arguments(out, arguments)  # nothing there yet
    metadata.write_meta(out, arguments, [model])
    metadata.same_arguments(out, arguments | {"limit": 9, "M": [4]}, free=["M", "limit"])
    for change, says in (({"depth": 4}, "--depth 3, not 4"), ({"env_option": ["map=4x4"]}, "--env-option")):
        with pytest.raises(UserError, match=says):
            metadata.same_arguments(out, arguments | change)
    with pytest.raises(UserError, match=r"begun with --sft .*/sft, not .*/other"):
        metadata.same_arguments(out, arguments | {"sft": tmp_path / "other"})
    metadata.write_meta(out, arguments | {"server": "http://a:1/v1#x"}, [model])
    metadata.same_arguments(out, arguments | {"server": "http://b:2/v1#x"})
    metadata.same_arguments(out, arguments | {"server": None})
    with pytest.raises(UserError, match="begun with --server-model x, not y"):
        metadata.same_arguments(out, arguments | {"server": "http://a:1/v1#y"})
    # A flag that another command has and that was set is a difference too.
    metadata.write_meta(out, arguments | {"paraphrase": 2, "reflect": False}, [model])
    with pytest.raises(UserError, match="begun with --paraphrase 2, not None"):
        metadata.same_arguments(out, arguments)
    (model / "weights").write_text("22")
    with pytest.raises(UserError, match=r"begun with .*/sft, which has changed"):
        metadata.same_arguments(out, arguments)


def test_an_input_is_known_by_what_it_holds(tmp_path):
    run, model = tmp_path / "run", tmp_path / "run" / "sft"
    model.mkdir(parents=True)
    (model / "weights").write_text("1")
    (run / "expert.jsonl").write_text("{}\n")
    arguments = {"env": "frozenlake", "expert": run / "expert.jsonl", "sft": model}
    metadata.write_meta(run / "trees.jsonl", arguments, [model, run / "expert.jsonl"])
    (model / ".DS_Store").write_text("no change")
    metadata.same_arguments(run / "trees.jsonl", arguments)
    moved = run.rename(tmp_path / "moved")
    model.mkdir(parents=True)  # another run under the old name
    (model / "weights").write_text("2")
    assert metadata.input_of(moved / "trees.jsonl", "sft") == moved / "sft"
    there = {name: moved / Path(value).name for name, value in arguments.items() if name != "env"}
    metadata.same_arguments(moved / "trees.jsonl", arguments | there)
    with pytest.raises(UserError, match=r"begun with --sft .*run/sft, not "):
        metadata.same_arguments(moved / "trees.jsonl", arguments | there | {"sft": model.rename(tmp_path / "other")})


def test_metadata_with_flags_of_an_environment_read_as_its_options(tmp_path):
    old = {"env": "webshop", "webshop_data": "shop", "human_goals": True, "split_file": None, "env_option": ["seed=3"]}
    (tmp_path / "sft.meta.json").write_text(json.dumps({"arguments": old}))
    begun = metadata.read_meta(tmp_path / "sft")["arguments"]
    assert begun == {"env": "webshop", "env_option": ["data=shop", "human_goals=true", "seed=3"]}


def test_an_input_made_from_what_has_changed_since_is_told(tmp_path, capsys):
    trees, labels, qnet = tmp_path / "trees.jsonl", tmp_path / "q_labels.jsonl", tmp_path / "qnet"
    for path in (trees, labels):
        path.write_text("{}\n")
    qnet.mkdir()
    args = flags("--run", str(tmp_path))
    metadata.write_meta(labels, vars(args), [trees], seconds=1)
    metadata.write_meta(qnet, vars(args), [labels], seconds=1)
    cli.find_or_make(None, qnet, "train_qnet", args)
    assert capsys.readouterr().err == ""
    trees.write_text("{}\n{}\n")
    cli.find_or_make(None, labels, "bellman", args)
    warning = capsys.readouterr().err
    assert warning == f"warning: {labels} was made from another {trees} than there is now: make it again\n"
    labels.write_text("{}\n{}\n")
    cli.find_or_make(None, qnet, "train_qnet", args)
    warning = capsys.readouterr().err
    assert f"{qnet} was made from another {labels} than there is now" in warning


# ---------------------------------------------------------------------------------------------- inputs, flags, mistakes


def test_what_was_named_must_be_there_and_what_was_not_is_made_or_resumed(tmp_path, monkeypatch, capsys):
    args = flags("--seed", "1", "--run", str(tmp_path / "a b"))
    with pytest.raises(UserError, match="no such file"):
        cli.find_or_make(tmp_path / "named", tmp_path / "default", "bellman", args)
    calls = []
    monkeypatch.setattr("bellman.main", calls.append)
    assert cli.find_or_make(None, tmp_path / "default", "bellman", args) == tmp_path / "default"
    assert calls == [["--env", "webshop", "--run", str(tmp_path / "a b"), "--seed", "1"]]
    (line,) = capsys.readouterr().out.splitlines()
    command = f"python bellman.py --env webshop --run '{tmp_path}/a b' --seed 1"  # to copy
    assert line == f"{tmp_path / 'default'} is missing or not complete: making it with {command}"
    # The part that a stopped stage left is not taken for all of it: the stage resumes it, or says why it can't.
    (tmp_path / "default").write_text("{}\n")
    (tmp_path / "default.meta.json").write_text("{}")
    assert cli.find_or_make(None, tmp_path / "default", "bellman", args) and len(calls) == 2
    (tmp_path / "default.meta.json").write_text(json.dumps({"seconds": 1.0}))
    assert cli.find_or_make(None, tmp_path / "default", "bellman", args) and len(calls) == 2
    # What was begun with other settings is never made by default.
    folder = tmp_path / "a b"
    folder.mkdir()
    for begun, refused in (
        (["--run", str(folder), "--gamma", ".5"], True),
        (["--env", "webshop", "--run", str(folder), "--seed", "1"], False),
    ):
        (folder / "default.meta.json").write_text(json.dumps({"argv": begun}))
        if refused:
            with pytest.raises(UserError, match=r"as it was begun: python bellman\.py --run .* --gamma \.5"):
                cli.find_or_make(None, folder / "default", "bellman", args)
        else:
            assert cli.find_or_make(None, folder / "default", "bellman", args) and len(calls) == 3
    args.sft = tmp_path / "llama"
    with pytest.raises(UserError, match=r"of .*/sft, not of --sft .*/llama: make it first"):
        cli.find_or_make(None, tmp_path / "gone", "bellman", args)


def test_the_arguments_that_stages_share_are_handed_on():
    lake = ["--env", "frozenlake", "--seed", "4", "--env-option", "slippery=true", "--env-option", "map=4x4"]
    lake += ["--run", "r", "--precision", "bf16"]
    shop = ["--env-option", "seed=3", "--env-option", "data=shop", "--env-option", "human_goals=true"]
    for words in (lake, shop):
        first = flags(*words)
        again = flags(*cli.handed_on(first))
        assert metadata.recorded(vars(again)) == metadata.recorded(vars(first))
    assert flags(*lake).env_option == ["map=4x4", "slippery=true"]
    assert flags("--env", "frozenlake").run == Path("runs/frozenlake")


def test_a_run_keeps_its_environment(tmp_path, capsys):
    lake = ["--run", str(tmp_path), "--env", "frozenlake", "--env-option", "map=4x4"]
    args = flags(*lake)
    envs.from_arguments(args)
    metadata.write_meta(tmp_path / "expert.jsonl", vars(args))
    for words in (lake, ["--run", str(tmp_path)]):
        again = flags(*words)
        assert (again.env, again.env_option) == ("frozenlake", ["map=4x4"])
        assert again.env_files == {}
    assert cli.handed_on(again) == ["--run", str(tmp_path), "--seed", "0"]
    for words in (["--env-option", "stray=0"], ["--env-option", "map=8x8"], ["--env", "webshop"]):
        with pytest.raises(UserError, match=r"begun with --env frozenlake .*map=4x4, not with .*another --run"):
            flags("--run", str(tmp_path), *words)
    searched = cli.parse(cli.parser("A search."), ["--run", str(tmp_path), "--env-option", "stray=0"], search=True)
    assert searched.env_option == ["map=4x4", "stray=0"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith("map=4x4, not with --env frozenlake --env-option map=4x4 --env-option stray=0")
    # A new run on an agent of another one: its metadata say the environment.
    (tmp_path / "sft").mkdir()
    metadata.write_meta(tmp_path / "sft", vars(args))
    other = flags("--sft", str(tmp_path / "sft"))
    assert (other.env, other.env_option, other.run) == ("frozenlake", ["map=4x4"], Path("runs/frozenlake"))


def test_the_data_of_the_shell_variable_are_the_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games"))
    assert envs.environment_class("alfworld").default_options() == {"data": str(tmp_path / "games")}


def exits(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.run_stage(main)
    return stop.value.code, capsys.readouterr().err


def test_mistakes_end_in_one_line_and_code_2(capsys):
    def raises(error: BaseException):
        raise error

    assert exits(lambda: raises(UserError("x.jsonl:3: bad")), capsys) == (2, "error: x.jsonl:3: bad\n")
    assert exits(lambda: raises(PermissionError(13, "no", "x")), capsys) == (2, "error: [Errno 13] no: 'x'\n")
    assert exits(lambda: raises(KeyboardInterrupt()), capsys)[0] == 130
    code, error = exits(lambda: raises(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. See")), capsys)
    assert code == 2 and error.startswith("error: out of memory: give ") and "--in-flight" in error
    code, error = exits(lambda: torch.empty(1 << 55), capsys)
    assert code == 2 and "out of memory" in error
    with pytest.raises(RuntimeError, match="else"):
        cli.run_stage(lambda: raises(RuntimeError("something else")))
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.run_stage(lambda: 1 / 0)
    for argv in (["--seed", "x"], ["--gamma", "2"], ["--env-option", "map="]):
        code, error = exits(lambda argv=argv: bellman.main(argv), capsys)
        assert code == 2 and argv[-1] in error


def test_a_copy_of_the_old_input_beside_the_output_is_not_what_is_read(tmp_path):
    """The command reads the path that it names."""
    agent, out = tmp_path / "a" / "sft", tmp_path / "b" / "trees.jsonl"
    for path in (agent, out):
        path.parent.mkdir()
    agent.write_text("old")
    arguments = {"sft": agent, "paraphrase": 0}
    metadata.write_meta(out, arguments, [agent])
    (tmp_path / "b" / "sft").write_text("old")
    metadata.same_arguments(out, arguments)
    with pytest.raises(UserError, match="--paraphrase 0, not None"):  # a flag of another command, set to 0
        metadata.same_arguments(out, {"sft": agent})
    agent.write_text("new")
    with pytest.raises(UserError, match="a/sft, which has changed since"):
        metadata.same_arguments(out, arguments)


def test_what_is_no_object_is_refused_where_it_stands(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, where in (('{"a": 1}\n5\n', r"x\.jsonl:2"), ('[{"a": 1}, "b"]', "record 2")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"{where}: not a JSON object"):
            list(files.records_of(path))


def test_processes_are_numbered(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")  # of an unset variable
    assert files.share() == (0, 1)


def test_the_environment_of_a_run_in_which_nothing_was_done_is_free(tmp_path):
    run = ["--run", str(tmp_path), "--env", "frozenlake"]
    for option in ("map=4x4", "map=8x8"):  # the first call stopped at a mistake
        args = cli.parse(cli.parser("x"), [*run, "--env-option", option])
        envs.from_arguments(args)
    metadata.write_meta(tmp_path / "trees.jsonl", vars(args))
    with pytest.raises(UserError, match="map=8x8, not with"):
        cli.parse(cli.parser("x"), [*run, "--env-option", "map=4x4"])


def test_what_is_outdated_further_up_is_told(tmp_path):
    agent, trees, labels = (tmp_path / name for name in ("sft", "trees.jsonl", "q_labels.jsonl"))
    for source, output in ((agent, trees), (trees, labels)):
        source.write_text("{}\n") if not source.exists() else None
        output.write_text("{}\n")
        metadata.write_meta(output, {}, [source])
    assert not list(metadata.outdated(labels))
    agent.write_text("new")
    assert list(metadata.outdated(labels)) == [(trees, agent)]
    metadata.write_meta(agent, {}, [labels])  # an agent that was trained again on what it had made
    assert list(metadata.outdated(labels)) == [(trees, agent)]
