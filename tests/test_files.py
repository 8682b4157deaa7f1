"""Outputs, of one writer and one recipe, resumed wherever they were stopped; a run's environment and its inputs."""

import dataclasses
import errno
import functools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fakes import WORLD, FakeEnv
from hypothesis import example, given
from hypothesis import strategies as st

import bellman
import build_trees
import envs
import q_search
import sft
from environments import code_of, fingerprint
from qlass import UserError, files, results, runs
from qlass.config import Run, free, read, run_stage
from qlass.files import parts_of, read_jsonl
from qlass.optional.missing import handed_on
from qlass.published import cloned_from
from qlass.runs import Output, find_or_make, input_of, outdated, recipe_of

TASKS = ["t0", "t1", "t2", "t3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Run):
    depth: int = 3
    limit: int | None = free(None)
    device: str | None = free(None)


def flags(*words: str) -> Stage:
    return read(Stage, "A stage.", words)


def begin(path: Path, *words: str, **inputs: Path | None) -> Output:
    config = flags("--run", str(path.parent), *words)
    return Output(path, config, recipe_of(config.recipe(), inputs), inputs, itemgetter("task_id"))


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
        todo = out.todo(tasks)[::-1][:stop]  # as they come, the last one first
        if todo:
            out.grow(map(group, todo), "groups", len(todo))
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


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        begin(path)
    return str(error.value)


def test_an_output_has_one_writer(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    with begin(path).lock, multiprocessing.get_context("fork").Pool(1) as other:
        message = other.apply(refusal, [path])
    assert "x.jsonl: another process is writing it" in message and ".x.jsonl.lock" in message
    with mock.patch.object(files.FileLock, "acquire", side_effect=OSError(errno.ENOLCK, "No locks available")):
        begin(path)
    assert "x.jsonl can't be locked" in capsys.readouterr().err


def test_another_recipe_is_refused_and_free_flags_may_differ(tmp_path):
    path, sft, qnet = (tmp_path / name for name in ("x.jsonl", "sft", "qnet"))
    sft.mkdir()
    (sft / "model.safetensors").write_text("1")
    grow(path, sft=sft, expert=None, stop=2)
    qnet.write_text("which a method asks for now")
    (sft / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    grow(path, "--overwrite", sft=sft, expert=None, stop=2)
    for name in ("README.md", "desktop.ini", "notes.txt", "optimizer.pt"):  # which loading does not read
        (sft / name).write_text("no change")
    (sft / "chat_template.jinja").write_bytes(b"{{ messages }}\n")
    sft = sft.rename(tmp_path / "moved")  # an input is known by its content
    grow(path, "--limit", "9", "--device", "cpu", sft=sft, expert=None, qnet=qnet)
    for words, inputs, says in (
        (["--depth", "4"], {}, "--depth 3, not 4: --overwrite starts again"),
        (["--env-option", "data=x"], {}, r"--env-option \[\], not \['data=x'\]"),
        ([], {"qnet": tmp_path / "x.meta.json"}, "--qnet that has changed or is another"),
        ([], {"expert": tmp_path / "x.meta.json"}, "--expert that has changed or is another"),  # there was none
    ):
        with pytest.raises(UserError, match=rf"x\.jsonl was begun with {says}"):
            begin(path, *words, **{"sft": sft, "qnet": qnet} | inputs)
    (sft / "model.safetensors").write_text("2")
    with pytest.raises(UserError, match="--sft that has changed"):
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
    with pytest.raises(UserError, match="not of this command"):
        begin(path, "--overwrite")
    assert path.read_text() == '[{"id": 1}]' and not (tmp_path / "x.meta.json").exists()
    assert "a folder" in refusal(tmp_path)
    grow(tmp_path / "y.jsonl", share=(0, 2))
    (tmp_path / "y.meta.json").unlink()
    assert "not of this command" in refusal(tmp_path / "y.jsonl")  # nobody knows what made its part
    with process(0, 8):
        with pytest.raises(UserError, match="several processes with --overwrite: delete it"):
            begin(tmp_path / "new", "--overwrite")
        with pytest.raises(UserError, match=r"missing or not complete: make it first, by one process.* --env webshop"):
            find_or_make(None, "build_trees", "trees.jsonl", flags("--run", str(tmp_path)))
        with pytest.raises(UserError, match="no share of 4 tasks"):
            begin(tmp_path / "new").todo(TASKS)


@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_a_checkpoint_is_replaced_as_a_whole_and_a_link_stays(link, tmp_path, monkeypatch):
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
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
        with files.draft_of(file):
            raise RuntimeError("unexpected pos 576 vs 534")  # as torch says
    assert list(read_jsonl(file)) == lines and (folder / "config.json").read_text() == "new"
    assert (file.is_symlink(), folder.is_symlink()) == (link, link)
    files.discard(folder)  # --overwrite
    assert folder.is_symlink() == link and not folder.exists()
    with pytest.raises(UserError, match="something else than a checkpoint"):
        files.checkpoint_folder(tmp_path)


def test_what_was_named_must_be_there_and_what_was_not_is_made_or_resumed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a b"
    config, labels, calls = flags("--seed", "1", "--run", str(folder)), folder / "q_labels.jsonl", []
    monkeypatch.setattr("bellman.main", calls.append)
    asked = "bellman", "q_labels.jsonl", config
    for named, says in ((tmp_path / "named", "no such file"), (tmp_path, "a folder or"), (None, "no such run")):
        with pytest.raises(UserError, match=says):  # the last may be a typo
            find_or_make(named, *asked)
    find_or_make(None, *asked[:2], flags())
    assert Path("runs/webshop").exists() and calls.pop()[:2] == ["--run", "runs/webshop"]
    folder.mkdir()
    capsys.readouterr()
    assert find_or_make(None, *asked) == labels
    command = f"python bellman.py --run '{folder}' --seed 1 --env webshop --preset tiny"  # to copy
    assert capsys.readouterr().out == f"{labels} is missing or not complete: making it with {command}\n"
    assert calls == [["--run", str(folder), "--seed", "1", "--env", "webshop", "--preset", "tiny"]]
    assert find_or_make(None, *asked) and len(calls) == 2  # a call that was stopped
    other = q_search.Config(run=folder, sft=tmp_path / "llama")
    with pytest.raises(UserError, match=r"make it first, .*from the --sft that is meant"):
        find_or_make(None, "bellman", "gone", other)
    labels.write_text("{}\n")  # to be there is to be complete
    assert find_or_make(None, *asked) and len(calls) == 2


MISTAKES = [
    (UserError("x.jsonl:3: bad"), 2, "error: x.jsonl:3: bad\n"),
    (PermissionError(13, "no", "x"), 2, "error: x: no\n"),
    (ModuleNotFoundError("No module named 'x'"), 2, "error: No module named 'x': pip install it\n"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), 2, "error: out of memory: give --gradient"),
    (KeyboardInterrupt(), 130, "stopped; the same command, without --overwrite, resumes"),
]


def test_mistakes_end_in_one_line_and_code_2_and_bugs_in_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = [(mock.Mock(side_effect=error), code, says) for error, code, says in MISTAKES]
    commands = [(bellman, argv) for argv in ("--seed x", "--seed -1", "--gamma nan", "--env-option map=")]
    commands += [(sft, "--env chess"), (sft, "--model ./none"), (q_search, "--env frozenlake --split exam")]
    commands += [(build_trees, "--env frozenlake --sft checkpoint")]
    cases += [(functools.partial(stage.main, argv.split()), 2, argv.split()[-1]) for stage, argv in commands]
    for main, code, says in cases:
        with pytest.raises(SystemExit) as stop:
            run_stage(main)
        error = capsys.readouterr().err
        assert stop.value.code == code and says in error.splitlines(keepends=True)[-1]
    with pytest.raises(RuntimeError):
        run_stage(mock.Mock(side_effect=RuntimeError("something else")))


# ----------------------------------------------------------------------- a run: its environment, its data, its inputs

LAKE = ["--env", "frozenlake", "--env-option", "map=4x4"]


def wrote(output: Path, *words: str, opens: bool = True, **inputs: Path) -> Path:
    """What a stage does that writes this output into a run."""
    config = flags("--run", str(output.parent), *words)
    settings = config.recipe() | (envs.from_config(config).settings if opens else {})
    runs.write_meta(output, config, runs.claim(output, recipe_of(settings, inputs), config.overwrite), inputs)
    output.write_text(output.name)
    return output


def test_a_run_keeps_the_environment_of_its_first_output(tmp_path):
    envs.from_config(flags("--run", str(tmp_path), "--env", "frozenlake"))  # stopped at a mistake
    wrote(tmp_path / "labels.jsonl", opens=False)  # opened no environment: its default is not the run's
    assert flags("--run", str(tmp_path)).env == "webshop"
    wrote(tmp_path / "expert.jsonl", *LAKE, "--seed", "4")
    again = flags("--run", str(tmp_path))
    assert (again.env, again.env_option, again.seed) == ("frozenlake", ("map=4x4",), 4)
    assert handed_on(again) == ["--run", str(tmp_path), "--seed", "4", "--preset", "tiny"]


def test_no_output_takes_the_place_of_a_folder(tmp_path):
    (tmp_path / "out" / "thesis").mkdir(parents=True)
    config = flags("--run", str(tmp_path), "--overwrite")
    for write in (runs.write_at_once, lambda path, *_: begin(path, "--overwrite")):
        with pytest.raises(UserError, match="out: a folder or a device, not a file"):
            write(tmp_path / "out", config, [], {})
    assert (tmp_path / "out" / "thesis").exists()


def test_the_flags_that_stages_share_are_handed_on():
    lake = [*LAKE, "--env-option", "slippery=true", "--seed", "4", "--run", "a b", "--device", "cpu"]
    for words in (lake, ["--env-option", "seed=3", "--env-option", "data=shop"]):
        first = flags(*words)
        assert dataclasses.replace(flags(*handed_on(first)), argv=first.argv) == first


class Filed(FakeEnv):
    def __init__(self, data: str, **options):
        super().__init__(json.loads((Path(data) / "world.json").read_text()), **options)


def test_other_data_and_another_precision_are_refused(tmp_path, agent, capsys, monkeypatch):
    world = tmp_path / "data" / "world.json"
    world.parent.mkdir()
    world.write_text(json.dumps(WORLD))
    play = ["--run", str(tmp_path), "--sft", str(agent), "--method", "greedy", "--limit"]
    q_search.main([*play, "1", "--env", "test_files:Filed", "--env-option", f"data={world.parent}"])
    line = json.loads((tmp_path / "results.jsonl").read_text())
    assert line["env"] == "filed"  # a class has a name of its own, not of the one that it is derived from
    os.utime(world, (1, 1))  # the same content at another time
    q_search.main([*play, "2"])
    assert "other files" not in capsys.readouterr().err
    q_search.main([*play, "2"])
    assert capsys.readouterr().out.endswith(": all of this was played before; --overwrite empties it first\n")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"expert.jsonl changed: .*: make it and each"):
        patch.setattr(results, "outdated", lambda path: [(path, "expert.jsonl")])
        q_search.main([*play, "2"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the environment's version 0, not 1"):
        patch.setattr(Filed, "version", "1")
        q_search.main([*play, "3"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the environment's code that has changed"):
        patch.setattr(envs, "code_of", lambda kind: "0" * 64)
        q_search.main([*play, "3"])
    with pytest.raises(UserError, match="begun with --precision float32, not bf16"):  # as on a GPU
        q_search.main([*play, "3", "--precision", "bf16"])
    world.write_text(json.dumps(WORLD).replace("0.5", "0.7"))  # of the same size
    with pytest.raises(UserError, match=r"results.jsonl was begun with the environment's files {'data': "):
        q_search.main([*play, "3"])
    assert f"{tmp_path} was begun with other files than --env-option names now: put them" in capsys.readouterr().err
    q_search.main([*play, "3", "--overwrite"])


ENV = """
from envs import TextEnv
from .rules import PAY
class Own(TextEnv):
    def late(self):
        import {0}.deep.more
"""


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("file", "changed"),
    [("own.py", True), ("rules.py", True), ("deep/more.py", True), ("other.py", False), ("data.txt", False)],
)
def test_the_code_of_a_class_is_part_of_its_recipe(file, changed, packed, tmp_path, monkeypatch):
    """Of its module and what that imports of its own, also later and in turn."""
    name = f"{tmp_path.name}_{packed}".replace("-", "_")
    folder = tmp_path / name if packed else tmp_path
    texts = {"own.py": ENV.format(name if packed else ""), "rules.py": "PAY = 1", "deep/more.py": "import numpy"}
    for place, text in {**texts, "__init__.py": "", "deep/__init__.py": "", "other.py": "", "data.txt": ""}.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text if packed else text.replace(" .", " "))
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("own", "rules", "deep"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    kind = envs.environment_class(f"{name}.own:Own" if packed else "own:Own")
    before = code_of(kind)
    (folder / file).write_bytes((folder / file).read_bytes().replace(b"\n", b"\r\n"))
    assert code_of(kind) == before and len(before) == 64
    with open(folder / file, "a") as more:
        more.write("\n# other rules\n")
    assert (code_of(kind) != before) == changed


def test_a_fingerprint_is_of_names_sizes_and_content(tmp_path):
    def held(name: str = "data[1]", **texts: str) -> str:
        for file, text in texts.items():
            (tmp_path / name / "deep").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "deep" / file).write_text(text)
        return fingerprint(str(tmp_path / name))

    whole = {"a": "1", "b": "2" * 99, ".DS_Store": "no change"}
    first = held(**whole)
    for change in ({"a": "2"}, {"b": "2" * 50 + "3" + "2" * 48}, {"b": "2" * 98}):
        assert held(**change) != first == held(**whole)
    assert held("copy", a="1", b="2" * 99) == first != held("renamed", a="1", c="2" * 99)
    (tmp_path / "link").symlink_to(tmp_path / "copy")  # a shop on another disk
    assert held("link") == first


def test_inputs_move_with_their_run_and_what_changed_later_is_told(tmp_path, capsys):
    """A run that got another's old name is not taken for it; both are behind a link, and an input is elsewhere."""
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    run, mine = tmp_path / "runs" / "run", tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    for folder in (run.with_name("old"), run):
        expert = wrote(run / "expert.jsonl", *LAKE)
        agent = wrote(run / "sft", expert=expert)
        trees = wrote(run / "trees.jsonl", sft=agent, expert=mine)
        labels = wrote(run / "q_labels.jsonl", trees=trees)
        qnet = wrote(run / "qnet", labels=labels, sft=agent)
        run.rename(folder)
    for folder in (run.with_name("old"), run):
        assert cloned_from(folder / "sft") == (folder / "expert.jsonl", None) and not list(outdated(folder / "qnet"))
        assert input_of(folder / "trees.jsonl", "expert").samefile(mine)
    config = flags("--run", str(run))
    capsys.readouterr()
    assert find_or_make(None, "train_qnet", "qnet", config) == qnet and capsys.readouterr().err == ""
    agent.write_text("new")
    assert sorted(outdated(qnet)) == [(qnet, agent), (trees, agent)]
    find_or_make(None, "bellman", "q_labels.jsonl", config)
    warning = f"warning: {trees} was made from another {agent} than there is now: {runs.AGAIN}\n"
    assert capsys.readouterr().err == warning
    wrote(agent, "--overwrite", expert=labels).write_text("newer")  # it was trained again on what it had made
    assert list(outdated(labels)) == [(trees, agent)]


def test_a_folder_of_ones_own_that_hides_ours_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("data", "environments.webshop"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"--env webshop: .*/data/__init__.py.*of yours named as one of ours"):
        envs.environment_class("webshop")


def test_a_stopped_stage_goes_on_as_it_was_begun(tmp_path, monkeypatch):
    trees, asked = tmp_path / "trees.jsonl", []
    wrote(trees, *LAKE, "--depth", "2", "--limit", "1000", "--overwrite").unlink()
    monkeypatch.setattr(build_trees, "main", lambda argv: asked.extend(argv) or trees.touch())
    find_or_make(None, "build_trees", "trees.jsonl", flags("--run", str(tmp_path)))
    assert asked[-6:] == ["--depth", "2", "--limit", "1000", "--run", str(tmp_path)]
    assert "--overwrite" not in asked
