"""The tasks of published protocols: files that any program reads, and that --env-option split_file= plays."""

import hashlib
import json
import tarfile

import pytest
from fakes import ROOT, SHARED, recorded, refused, write

import envs
from environments import protocols

FILES = ROOT / "data/protocols"
ORIGINALS = [name for name in protocols.PROTOCOLS if name.startswith("alfworld") and "bundled" not in name]


def read(name):
    return json.loads((FILES / f"{name}.json").read_text())


def test_there_is_a_file_of_each_protocol_and_its_hash_can_be_computed_without_this_code():
    assert {file.stem for file in FILES.iterdir()} == set(protocols.PROTOCOLS)
    for name in protocols.PROTOCOLS:
        content = read(name)
        text = "".join(f"{task}\n" for task in sorted(map(str, content["ids"])))
        assert content["sha256"] == hashlib.sha256(text.encode()).hexdigest()[:16]
        assert content["n"] == len(set(content["ids"])) and content["name"] == name


@pytest.mark.parametrize("name", sorted({*protocols.PROTOCOLS} - {*ORIGINALS}))
def test_a_file_is_what_its_command_writes(name, capsys):
    protocols.main([name])
    assert json.loads(capsys.readouterr().out) == read(name)


@recorded
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_file_of_alfworlds_games_is_what_its_command_writes(name, tmp_path):
    folder = f"json_2.1.1/{protocols.PROTOCOLS[name][1]}/"
    with tarfile.open(SHARED.parent / "alfworld" / "games_old_grammar.tar.xz") as archive:
        archive.extractall(tmp_path, (m for m in archive if m.name.startswith(folder)), filter="data")
    assert protocols.protocol(name, tmp_path) == read(name)


@recorded
def test_the_page_has_the_hash_of_etos_goals():
    page = (ROOT / "docs/protocols.md").read_text()
    assert f"`{protocols.digest(json.loads((SHARED / 'test_indices.json').read_text()))}`" in page


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("webshop-bundled", {}),
        ("alfworld-bundled-seen", {}),
        pytest.param("webshop-small-500", {"data": SHARED}, marks=recorded),
    ],
)
def test_an_environment_plays_the_tasks_of_a_file(name, options):
    content = read(name)
    env = envs.make(content["env"], split_file=FILES / f"{name}.json", **options)
    assert sorted(env.task_ids("test")) == sorted(map(str, content["ids"]))
    task = env.task_ids("test")[0]
    assert env.reset(options={"task_id": task})[1]["task_id"] == task


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": [1, 2]}, "its ids are not those of its sha256"),
        ({"ids": ["a"], "sha256": protocols.digest(["a"])}, "a JSON list of integers is expected"),
    ],
)
def test_a_file_that_has_changed_is_refused(change, says):
    write("mine.json", [read("webshop-500") | change])
    with refused(rf"^mine\.json: .*{says}"):
        envs.make("webshop", split_file="mine.json")


def test_a_folder_without_a_split_is_refused(tmp_path):
    with refused("no NAME_indices.json in this folder"):
        envs.make("webshop", split_file=tmp_path)


def test_games_that_are_not_in_the_data_are_refused(made):
    env = envs.make("alfworld", data=made, split_file=FILES / "alfworld-unseen.json")
    with refused(r"alfworld-unseen\.json: .* has no game valid_unseen/.*: take the games it is"):
        env.task_ids("test")
    assert env.task_ids("val")  # other splits stay


def test_a_split_of_other_games_than_the_files_is_refused():
    env = envs.make("alfworld", split_file=FILES / "alfworld-seen.json")
    with refused(r"^alfworld: split_file has no valid_unseen: --split names test$"):
        env.task_ids("valid_unseen")
