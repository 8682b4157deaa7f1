"""Outputs, of one writer and one recipe, resumed wherever they were stopped; a run's environment and its inputs."""

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from fakes import WORLD, FakeEnv, dump
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_bellman import node
from tqdm import tqdm

import bellman
import q_search
from qlass import UserError, files, inputs, outputs
from qlass.files import parts_folder, read_jsonl
from qlass.inputs import find_or_make
from qlass.outputs import Output
from qlass.settings import FITS, Run, read_settings, run_stage, workload, write_settings

TASKS = ["t0", "t1", "t2", "t3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Run):
    depth: int = 3
    limit: int | None = workload(None)


def flags(*words: str) -> Stage:
    return read_settings(Stage, "A stage.", words)


def begin(path: Path, *words: str, **inputs: Path | None) -> Output:
    config = flags("--run", str(path.parent), *words)
    return Output(path, config, config.recipe(), inputs, itemgetter("task_id"))


def group(task: str) -> list[dict]:
    return [{"task_id": task, "n": n, "text": "é" * n} for n in range(1 + int(task[1:]))]


WHOLE = "".join(files.dumps(line) for task in TASKS for line in group(task)).encode()
ALONE = (0, 1)


def process(rank: int | str, width: int | str):
    return mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(width))


def grow(path: Path, *words, share: tuple = ALONE, stop: int | None = None, tasks: list = TASKS, **inputs) -> list[str]:
    """What a stage does, by process RANK of WORLD_SIZE, stopped in front of a group. Returns the tasks it did."""
    with process(*share):
        out = begin(path, *words, **inputs)
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
    """A call stops in front of a group or not at all, and then its part may be cut."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run[2]" / "r{a,b}[1]*.jsonl"  # which no pattern finds
        for share, stop, cut in calls:
            grow(path, share=share, stop=stop)
            part = parts_folder(path) / "{}-of-{}.jsonl".format(*share)
            if part.exists():
                os.truncate(part, min(cut, part.stat().st_size))
        grow(path)
        beside = {files.meta_path(path).name, "settings.toml"}
        assert path.read_bytes() == WHOLE and {file.name for file in path.parent.glob("[!.]*")} == {path.name, *beside}
        meta = files.meta_of(path)
        assert meta["tasks"] == TASKS and grow(path) == []
        assert grow(path, tasks=[*TASKS, "t4"]) == ["t4"]  # more tasks: what is there is not done again
        assert path.read_bytes() == WHOLE + "".join(map(files.dumps, group("t4"))).encode()


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        begin(path)
    return str(error.value)


MISTAKES = [
    (UserError("x.jsonl:3: bad"), 2, "error: x.jsonl:3: bad\n"),
    (PermissionError(13, "no", "x"), 2, "error: [Errno 13] no: 'x'\n"),
    (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, "error: No module named 'peft': pip install it\n"),
    (RuntimeError("CUDA out of memory. Tried"), 2, f"error: out of memory: {FITS}\n"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), 2, f"error: out of memory: {FITS}\n"),
    (MemoryError(), 2, f"error: out of memory: {FITS}\n"),
    (KeyboardInterrupt(), 130, "stopped; the same command resumes, without --overwrite\n"),
]


def test_mistakes_end_in_one_line_and_code_2_and_bugs_in_a_traceback(capsys):
    for error, code, says in MISTAKES:
        with pytest.raises(SystemExit) as stop:
            run_stage(mock.Mock(side_effect=error))
        assert stop.value.code == code and capsys.readouterr().err == says
        with tqdm(total=9, initial=4), pytest.raises(SystemExit):
            run_stage(mock.Mock(side_effect=error))
        assert says in re.split("(?<=[\r\n])", capsys.readouterr().err)  # not behind a progress bar
    for bug in (RuntimeError("something else"), ModuleNotFoundError("No module named 'qlass.a'", name="qlass.a")):
        with pytest.raises(type(bug)):
            run_stage(mock.Mock(side_effect=bug))


def test_an_output_has_one_writer(tmp_path):
    path = tmp_path / "x.jsonl"
    held = begin(path)
    with multiprocessing.get_context("fork").Pool(1) as other:
        message = other.apply(refusal, [path])
    held.lock.release()
    assert "x.jsonl: another process is writing it" in message


def test_another_recipe_is_refused_and_runtime_flags_may_differ(tmp_path):
    path, sft, qnet = (tmp_path / name for name in ("x.jsonl", "sft", "qnet"))
    (sft / ".ipynb_checkpoints").mkdir(parents=True)
    (sft / "model.safetensors").write_text("1")
    grow(path, sft=sft, stop=2)
    qnet.write_text("which a method asks for now")
    others = ("README.md", "notes.txt", "trainer_state.json", "consolidated.safetensors")
    for name in (*others, ".ipynb_checkpoints/config.json"):  # which loading does not read
        (sft / name).write_text("no change")
    sft = sft.rename(tmp_path / "moved")  # an input is known by its content
    assert grow(path, "--limit", "9", sft=sft, qnet=qnet) == ["t1", "t0"]  # t3 and t2 are done
    for words, changed, says in (
        (["--depth", "4"], {}, "depth 3, not 4 .*: another --out or --run keeps both"),
        ([], {"qnet": tmp_path / "x.meta.json"}, "another qnet"),
    ):
        with pytest.raises(UserError, match=rf"x\.jsonl was begun with {says}"):
            begin(path, *words, **{"sft": sft, "qnet": qnet} | changed)
    (sft / "model.safetensors").write_text("another")
    with pytest.raises(UserError, match="begun with another sft"):
        begin(path, sft=sft, qnet=qnet)


@pytest.mark.parametrize("metadata", [True, False])
def test_an_input_of_another_environment_is_refused(metadata, tmp_path):
    """By its metadata, or without them by its first line."""
    trees = tmp_path / "a" / "trees.jsonl"
    if metadata:
        grow(trees, "--env", "frozenlake")
    else:
        trees.parent.mkdir()
        trees.write_text(files.dumps({"task_id": "t", "env": "frozenlake"}))
    with pytest.raises(UserError, match=r"trees\.jsonl is of frozenlake, not of webshop: name another --trees"):
        begin(tmp_path / "b" / "q_labels.jsonl", trees=trees)
    begin(tmp_path / "c" / "q_labels.jsonl", "--env", "frozenlake", trees=trees)
    if not metadata:  # the class of --env may have any name
        begin(tmp_path / "d" / "q_labels.jsonl", "--env", "my.worlds:Maze", trees=trees)
        trees.write_text(files.dumps({"task_id": "t", "env": None}))  # as some libraries write what a line lacks
        begin(tmp_path / "e" / "q_labels.jsonl", trees=trees)


def test_another_version_of_the_environment_is_told_also_behind_stages_that_play_nothing(tmp_path, capsys):
    trees, labels, qnet = (tmp_path / name for name in ("trees.jsonl", "q_labels.jsonl", "qnet.jsonl"))
    config = flags("--run", str(tmp_path))
    for output, world, sources in (
        (trees, {"env_version": "0"}, {}),
        (labels, {}, {"trees": trees}),
        (qnet, {}, {"labels": labels}),
    ):
        outputs.begin(output, config, world | {"env": "webshop"}, sources)
        output.write_text("{}")
    assert not capsys.readouterr().err
    for version, told in (("0", ""), ("1", f"{qnet} is of version 0 of webshop, the rest of version 1")):
        outputs.begin(tmp_path / version, config, {"env_version": version}, {"qnet": qnet})
        assert told in capsys.readouterr().err and (told or not capsys.readouterr().err)


def test_the_commit_is_the_codes_own(tmp_path, monkeypatch):
    """And not that of a repository around it, where it was installed."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    for place, commit in (("qlass/outputs.py", True), ("site/qlass/outputs.py", False)):
        (tmp_path / place).parent.mkdir(parents=True)
        monkeypatch.setattr(outputs, "__file__", str(tmp_path / place))
        assert bool(outputs.code_version()) == commit


def test_an_output_of_another_command_stays_even_with_overwrite(tmp_path):
    path = tmp_path / "x.jsonl"
    other = type("Other", (Stage,), {"stage": "other"})
    grow(path)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"x\.jsonl was begun with stage .*, not other"):
            outputs.begin(path, other(run=tmp_path, overwrite=overwrite), {}, {})
    assert path.read_bytes() == WHOLE


def test_overwriting_loses_nothing_before_the_new_output_is_whole(tmp_path):
    """Neither a complete output nor the parts of another one, until there is a first group; then both recipes stay."""
    path, parts, meta = tmp_path / "x.jsonl", tmp_path / "x.jsonl.parts", tmp_path / "x.meta.json"
    grow(path, stop=2)
    begin(path, "--overwrite", "--depth", "4").lock.release()
    assert grow(path) == ["t1", "t0"]  # as if nothing had been
    old = path.read_bytes(), meta.read_bytes()
    begin(path, "--overwrite", "--depth", "4").lock.release()
    assert grow(path) == [] and not parts.exists()
    grow(path, "--overwrite", "--depth", "4", stop=1)
    assert (path.read_bytes(), meta.read_bytes()) == old
    with pytest.raises(UserError, match=r"x\.jsonl was begun with depth 4, not 3 \(.*parts/meta\.json\)"):
        begin(path)
    assert grow(path, "--depth", "4") == ["t2", "t1", "t0"]
    assert path.read_bytes() == WHOLE and files.meta_of(path)["recipe"]["depth"] == 4 and not parts.exists()


def test_an_output_that_is_an_input_is_refused(tmp_path):
    path, link = tmp_path / "x.jsonl", tmp_path / "link"
    grow(path)
    link.symlink_to(path)
    for trees in (path, link):
        with pytest.raises(UserError, match=r"x\.jsonl is an input of this command: name another --out"):
            begin(path, "--overwrite", trees=trees)
    assert path.read_bytes() == WHOLE


def test_a_part_with_an_empty_group_is_done_again(tmp_path):
    path = tmp_path / "x.jsonl"
    grow(path, stop=2)
    part = parts_folder(path) / "0-of-1.jsonl"
    part.write_bytes(part.read_bytes() + b"\n[]\n[[]]\n")
    assert grow(path) == ["t1", "t0"] and path.read_bytes() == WHOLE


def test_a_file_system_without_modes_will_do(tmp_path):
    with mock.patch("pathlib.Path.chmod", side_effect=PermissionError(1, "Operation not permitted")):
        grow(tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("rank", "width", "says"),
    [("x", "1", "invalid literal"), ("0", "two", "invalid literal"), ("3", "3", "are 0 to 2")],
)
def test_a_rank_that_no_process_can_have_is_refused(rank, width, says):
    with process(rank, width), pytest.raises(UserError, match=f"RANK.*{says}"):
        files.rank_and_size()


def test_what_is_no_output_of_this_command_or_can_not_be_shared_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('[{"id": 1}]')
    assert "not of this command" in refusal(path)
    with pytest.raises(UserError, match="not of this command"):
        begin(path, "--overwrite")
    assert path.read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()
    with process(0, 8), pytest.raises(UserError, match="--overwrite is for one process"):
        begin(tmp_path / "new", "--overwrite")


def test_a_file_or_a_checkpoint_is_replaced_as_a_whole(tmp_path):
    file, folder = tmp_path / "x.jsonl", tmp_path / "sft"
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


def test_what_was_named_must_be_there_and_what_was_not_is_made(tmp_path, monkeypatch, capsys):
    config, labels = flags("--seed", "1", "--run", str(tmp_path)), tmp_path / "q_labels.jsonl"
    of_run = ["--env", "webshop", "--seed", "1", "--preset", "tiny"]

    def make(argv: list[str]) -> None:
        assert argv == ["--run", str(tmp_path), *of_run]
        grow(labels, *of_run, trees=tmp_path / "trees.jsonl")

    def find(named: Path | None = None, config: Stage = config) -> str:
        """What is said on the way."""
        assert find_or_make(named, "bellman", "q_labels.jsonl", config) == labels
        return "".join(capsys.readouterr())

    monkeypatch.setattr("bellman.main", make)
    write_settings(config)
    typo = tmp_path.with_name(tmp_path.name + "rnu")  # which begins nothing
    with pytest.raises(UserError, match=r"rnu: no such run; python sft.py --run"):
        find(config=dataclasses.replace(config, run=typo))
    (tmp_path / "trees.jsonl").write_text('{"n": 1}')
    assert "is missing: making it with python bellman.py --run" in find()
    assert not find()
    (tmp_path / "trees.jsonl").write_text('{"n": 2}')
    assert f"{labels} was made from another {tmp_path / 'trees.jsonl'} than there is now: make it again" in find()


def test_a_run_that_came_without_its_trees_makes_no_others(tmp_path):
    config = flags("--run", str(tmp_path))
    write_settings(config)
    (tmp_path / "q_labels.jsonl").touch()
    with pytest.raises(UserError, match=r"trees.jsonl is missing, .* the run came without it"):
        find_or_make(None, "build_trees", "trees.jsonl", config)


@pytest.mark.parametrize(("platform", "memory_mb"), [("linux", 3072), ("darwin", 3)])  # of 1,024 bytes; of one
def test_metadata_have_the_seconds_and_the_peak_memory_of_a_command(platform, memory_mb, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 7_000_000)
    monkeypatch.setattr("qlass.outputs.time", SimpleNamespace(monotonic=iter([10.0, 12.5]).__next__))
    out = begin(tmp_path / "trees.jsonl")
    out.write([group("t0")], "", total=1)
    out.finish(["t0"])
    costs = {"seconds": 2.5, "memory_mb": memory_mb, "gpu_memory_mb": 7}
    assert costs.items() <= files.meta_of(out.path).items()


def test_what_a_command_of_its_own_has_begun_is_not_made_by_another(tmp_path, monkeypatch):
    """Else a later stage would go on with other demonstrations, or with another learning rate, than its user gave."""
    config, path = flags("--run", str(tmp_path)), tmp_path / "sft"
    monkeypatch.setattr("sft.main", mock.Mock(side_effect=lambda argv: grow(path, *argv[2:])))
    begin(path, "--depth", "5").lock.release()  # stopped before its first part
    with pytest.raises(UserError, match=f"sft was begun by a command of its own: .* --run {tmp_path} --depth 5"):
        inputs.make(path, "sft", config)
    files.meta_path(path).unlink()
    with mock.patch("sft.main", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        inputs.make(path, "sft", config)
    inputs.make(path, "sft", config)  # what another stage has begun it goes on with
    assert path.read_bytes() == WHOLE


def test_a_setting_of_the_run_that_has_changed_since_is_told(tmp_path, capsys):
    """Also of what an input was made from; but what a flag has set is another matter."""
    write_settings(flags("--run", str(tmp_path)))
    file, labels, qnet = (tmp_path / name for name in ("settings.toml", "q_labels.jsonl", "qnet.jsonl"))
    trees = tmp_path / "t.jsonl"
    nodes = [node(0, None, env="webshop", nodes=2, rollouts=[]), node(1, 0, 1.0, done=True)]
    trees.write_text(dump(nodes))

    def label(out: Path, *flags: str) -> None:
        bellman.main(["--run", str(tmp_path), "--trees", str(trees), "--out", str(out), *flags])

    label(labels)
    grow(qnet, labels=labels)
    assert not [*inputs.changes(qnet)]
    file.write_text(file.read_text().replace("gamma = 0.98", "gamma = 0.5"))
    assert [*inputs.changes(qnet)] == [f"{labels} was made with gamma 0.98, and {file} says 0.5 now: make it again"]
    assert find_or_make(qnet, "train_qnet", "qnet", flags("--run", str(tmp_path))) == qnet
    assert "gamma 0.98, and" in capsys.readouterr().err
    label(labels, "--overwrite", "--gamma", "0.9")
    assert not [*inputs.changes(labels)]  # a flag went before the file, which has not changed since
    file.unlink()
    assert not [*inputs.changes(labels)]
    other = tmp_path / "other" / "settings.toml"  # another program's
    other.parent.mkdir()
    other.write_text("theme = 1")
    out = other.with_name("x.jsonl")
    label(out)
    assert not [*inputs.changes(out)]


@pytest.mark.parametrize("meta", ["[]", "{", '{"recipe": [1]}', '{"inputs": {"sft": 1}}'])
def test_metadata_of_another_kind_are_named(meta, tmp_path):
    (tmp_path / "x.meta.json").write_text(meta)
    with pytest.raises(UserError, match=r"x\.meta\.json: "):
        files.meta_of(tmp_path / "x.jsonl")


# ----------------------------------------------------------------------- a run: its environment, its data, its inputs


class Filed(FakeEnv):
    task, omniscient = FakeEnv.instruction, True

    def __init__(self, data: str, **options):
        super().__init__(json.loads((Path(data) / "world.json").read_text()), **options)


def test_other_data_and_another_version_are_refused(agent, monkeypatch):
    world = Path("data/world.json")
    world.parent.mkdir()
    world.write_text(json.dumps(WORLD))

    def play(*more: str) -> None:
        run = ["--run", ".", "--preset", "paper", "--sft", str(agent), "--method", "greedy", "--limit", "1"]
        q_search.main([*run, *more])

    play("--env", "test_files:Filed", "--env-option", "data=data")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="begun with env_version 0, not 1"):
        patch.setattr(Filed, "version", "1")
        play()
    world.write_text(json.dumps(WORLD).replace("0.5", "0.75"))
    with pytest.raises(UserError, match=r"results.jsonl was begun with env_files {'data': "):
        play()
