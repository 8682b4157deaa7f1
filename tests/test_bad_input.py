"""Bad input: one line that says where, what and how to fix it; no traceback, no hang, nothing overwritten."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
from fakes import FakeEnv, dump

import bellman
import build_trees
import q_search
from experiments import compare
from qlass import UserError
from qlass.cli import leaks
from qlass.metadata import cloned_from
from qlass.output import read_results, read_trees
from qlass.published import actions_by_task, learned_tasks, read_trajectories, tasks_of


def node(i: int, parent: int | None, **more) -> dict:
    goal = {"role": "user", "content": "go"}
    first = {"messages": [goal], "task": "", "env": "fake", "action": None} if parent is None else {"action": f"go {i}"}
    fields = {"task_id": "a", "node_id": i, "parent_id": parent, "observation": "here", "reward": 0.0, "done": False}
    return fields | {"source": "policy", "branch": 0, "depth": 0, "q": 0.5, "q_raw": 0.5} | first | more


def tree(*nodes: dict) -> str:
    return dump([nodes[0] | {"nodes": len(nodes)}, *nodes[1:]])


CHAT = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Action: left"}]


def chat(*turns: dict | list | str, **more) -> str:
    """A demonstration of CHAT's user and these turns."""
    return dump([{"messages": [CHAT[0], *turns], **more}])


def turn(content, role: str = "assistant", **more) -> dict:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "go", "arguments": "left"}}]
THEIRS = [{"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": "Action: left"}]}] * 2
READERS = {
    "expert.jsonl": lambda path: list(read_trajectories(path)),
    "trees.jsonl": lambda path: bellman.main(["--trees", str(path), "--out", str(path.with_name("made.jsonl"))]),
    "q_labels.jsonl": lambda path: list(read_trees(path, ["q", "messages"])),
    "results.jsonl": lambda path: list(read_results(path)),
}
ROOT, LEAF = node(0, None), node(1, 0, reward=1.0, done=True)
RESULT = {"task_id": "a", "env": "fake", "method": "greedy", "reward": 1.0, "tokens": {"prompt": 1}}
BAD = {
    "trees.jsonl": [
        ("", "holds no trees"),
        (tree(ROOT, LEAF)[:-20], ":2: not valid JSON"),
        (tree(ROOT, LEAF).splitlines()[0] + "\n", "1 of 2 nodes; run build_trees.py again"),
        (tree(ROOT, LEAF | {"reward": float("nan")}), ":2: not valid JSON (NaN is not a number)"),
        (tree(ROOT, LEAF | {"reward": "1"}), ":2: reward can't be '1'"),
        ("\n" + tree(ROOT, LEAF, LEAF), ":4: node 1 of task a stands before its parent"),
        (tree(ROOT, LEAF | {"task_id": "b"}), ":2: node 1 of task b stands before its parent"),
        (dump([RESULT]), ":1: no node_id; is this a trees.jsonl"),
    ],
    "q_labels.jsonl": [
        (
            tree({k: v for k, v in ROOT.items() if k != "q"}, LEAF),
            ":1: no q; is this a q_labels.jsonl, which bellman.py writes?",
        ),
        (tree(ROOT | {"messages": CHAT[::-1]}, LEAF), ":1: messages are no chat"),
        (tree(ROOT | {"messages": "go"}, LEAF), ":1: messages are no chat"),
    ],
    "expert.jsonl": [
        ('[{"conversations": ', "not valid JSON"),
        ('[{"conversations": [{"from": "human", "value": null}]}]', "record 1: no chat"),
        (dump([{"messages": CHAT}, {"messages": CHAT[::-1]}]), ":2: no chat of user and assistant"),
        (dump([ROOT]), ":1: no chat of user and assistant"),  # a tree
        (" \n", "holds no demonstration"),
        ("[]", "holds no demonstration"),
        ("messages,reward\ngo,1\n", "neither JSON nor JSON Lines in UTF-8: of a table, pandas'"),
        ("PAR1\x15\x04", "neither JSON nor JSON Lines"),
        (json.dumps([CHAT, CHAT]), "record 1: not a JSON object, but a list"),
        (dump([{"data": CHAT}]), ":1: no chat of user and assistant in turns: no turns"),
        (dump([{"messages": []}]), "no turns"),
        (dump([{"messages": json.dumps(CHAT)}]), "no list of turns (json.loads reads JSON text)"),
        (dump([{"messages": {"role": ["user"], "content": ["go"]}}]), "no list of turns"),
        (dump([{"messages": [CHAT, CHAT]}]), "turn 1 is no object with role and content"),
        (chat(json.dumps(CHAT[1])), "turn 2 is no object with role and content"),
        (chat(CHAT[1], CHAT[1]), "turn 3 is of 'assistant', not of user"),
        (chat(CHAT[0], CHAT[1]), "turn 2 is of 'user', not of assistant"),
        (chat(CHAT[1], turn("here", "tool")), "turn 3 is of 'tool', not of user"),
        (chat(CHAT[1], turn("here", "function")), "turn 3 is of 'function', not of user"),
        (chat(CHAT[1], turn("be brief", "system")), "turn 3 is of 'system', not of user"),
        (chat({"content": "Action: left"}), "turn 2 is of None, not of assistant"),
        (chat(turn("Action: left", ["assistant"])), "turn 2 is of ['assistant'], not of assistant"),
        (chat(turn("", tool_calls=CALL)), "turn 2 acts by a tool call: write the action into its content"),
        (chat(turn(None, tool_calls=CALL)), "turn 2 acts by a tool call"),
        (chat(turn("I go left.", function_call={"name": "go"})), "turn 2 acts by a tool call"),
        (chat(turn([{"type": "text", "text": "Action: left"}])), "the content of turn 2 is [{'type': 'text',"),
        (chat(turn(None)), "the content of turn 2 is None, which is no text"),
        (chat(turn("")), "the assistant writes '', which is no action"),
        (chat(turn(" \n")), "which is no action"),
        (chat(turn("<think>\nAction: left, but")), "which is no action"),
        (chat(turn("</think>\n\n")), "which is no action"),
        (chat(), "the assistant does nothing"),
        (chat(turn("OK"), turn("you stand", "user")), "the assistant does nothing"),
        (dump([{"messages": [turn("be brief", "system"), CHAT[0]]}]), "the assistant does nothing"),
        (dump([{"messages": [turn("be brief", "system")]}]), "no turns"),
        (dump([{"messages": [turn("be brief", "system"), *CHAT], "system": "Be long."}]), "two system messages"),
        (dump([{"messages": CHAT, "system": ["be brief"]}]), "system is no text"),
        (dump([{"messages": CHAT, "conversations": CHAT}]), "it has messages and conversations: leave one"),
        (chat(CHAT[1], task=3), "task is no text"),
        (chat(CHAT[1], reward="1"), "reward can't be '1'"),
        (chat(CHAT[1]) + chat(turn("\ud83d left")), ":2: not valid JSON ('utf-8' codec can't encode"),
        ("[" * 200_000, "not valid JSON"),
        ('{"messages": [], "messages": []}', ":1: not valid JSON (messages stands twice in an object)"),
        ('[{"messages": [{"role": "user", "content": "a", "content": "b"}]}]', "content stands twice in an object"),
    ],
    "results.jsonl": [
        (dump([RESULT, RESULT | {"reward": float("nan")}]), ":2: not valid JSON (NaN is not a number)"),
        (dump([RESULT, RESULT | {"reward": None}]), ":2: reward can't be None"),
    ],
}


@pytest.mark.parametrize(("name", "content", "says"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_bad_file_is_named_with_its_line_and_its_fault(name, content, says, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(name) + ".*" + re.escape(says)):
        READERS[name](tmp_path / name)


def test_a_system_message_may_come_first(tmp_path):
    path = tmp_path / "expert.jsonl"
    path.write_text(dump([{"messages": [{"role": "system", "content": "be brief"}, *CHAT], "task_id": "a"}]))
    ((state, _),) = read_trajectories(path)
    assert [role for role, _ in state.messages] == ["system", "user", "assistant"]
    theirs = [{"from": r, "value": c} for r, c in (("system", "be brief"), ("human", "go"), ("gpt", "Action: left"))]
    path.write_text(json.dumps([{"conversations": theirs}]))
    ((again, _),) = read_trajectories(path)
    assert again.messages == state.messages and actions_by_task(path, FakeEnv())[0] == {"go": ["Action: left"]}


def test_what_is_well_defined_is_read(tmp_path):
    path = tmp_path / "expert.jsonl"
    whole = "\ud83d\ude00 left"
    turns = [turn("be brief", "system"), turn("", "user"), turn("<think>Action: up</think>left"), turn("here", "user")]
    path.write_bytes(b"\xef\xbb\xbf" + dump([{"messages": turns, "system": "be brief"}]).encode())
    ((state, _),) = read_trajectories(path)
    assert state.dump() == turns  # it ends with the user; an observation may be empty
    path.write_text(dump([{"messages": [CHAT[0], turn(whole, tool_calls=[])], "reward": None, "task": None}]))
    ((state, _),) = read_trajectories(path)
    assert state.messages[1] == ("assistant", "\U0001f600 left") and state.task == ""


def test_short_actions_are_no_agreement(tmp_path):
    """A world whose actions are bare words."""
    path = tmp_path / "expert.jsonl"
    for first, acts in (("left", ["left", "right"]), ("OK", ["right"]), ("okay.", ["right"])):
        turns = [CHAT[0], turn(first), turn("here", "user"), turn("right"), turn("there", "user")]
        path.write_text(dump([{"messages": turns, "task_id": "a"}]))
        assert actions_by_task(path, FakeEnv())[0] == {"a": acts}


def test_an_output_of_another_stage_is_not_written_to(tmp_path, agent):
    (tmp_path / "mine.jsonl").write_text(dump([RESULT]))
    (tmp_path / "mine.meta.json").write_text('{"arguments": {"method": ["greedy"]}}')
    argv = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--out", str(tmp_path / "mine.jsonl")]
    with pytest.raises(UserError, match=r"mine\.jsonl was begun with --method"):
        build_trees.main(argv)
    assert (tmp_path / "mine.jsonl").read_text() == dump([RESULT])


@pytest.mark.parametrize(
    ("meta", "n", "warning"),
    [
        ({"tasks": ["test0", "test3", "a"]}, 2, "2 of 6 tasks played are also in the demonstrations"),
        ({"inputs": {}}, None, "does not tell"),
        ({"arguments": {"env": "webshop", "env_option": []}, "tasks": ["test0"]}, None, "does not tell"),
        (None, None, "does not tell"),
    ],
)
def test_tasks_that_were_learned_from_are_counted_or_not_known(meta, n, warning, tmp_path, agent, fake_world, capsys):
    """Never a silent 0."""
    shutil.copytree(agent, tmp_path / "sft")
    if meta:
        arguments = {"env": "frozenlake", "env_option": []}
        (tmp_path / "sft.meta.json").write_text(json.dumps({"arguments": arguments} | meta))
    argv = ["--env", "frozenlake", "--run", str(tmp_path), "--method"]
    q_search.main([*argv, "greedy"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "also in the demonstrations" in line]
    assert line.startswith("warning: ") and warning in line
    compare.main([*argv, "rule"])  # a rule has learned nothing, but greedy's lines are still there
    leaks = json.loads((tmp_path / "results.meta.json").read_text())["leaks"]
    assert leaks == {"demonstrations": n, "trees": 0}


class Shop:
    """Tasks of three products."""

    published_id = staticmethod(lambda record: None)
    subject = staticmethod({"1": "mug", "2": "mug", "3": "shirt"}.get)

    def task_ids(self, split: str) -> list[str]:
        return ["1", "2"]


def test_what_was_learned_from_are_the_first_tasks_of_a_file_if_it_has_ids(tmp_path):
    path = tmp_path / "learned.jsonl"
    path.write_text(dump([{"task_id": 0, "messages": CHAT}, {"task_id": "2", "messages": CHAT}]))
    assert tasks_of(path, Shop()) == {"0", "2"} and tasks_of(path, Shop(), 1) == {"0"}
    path.write_text(dump(THEIRS))
    assert tasks_of(path, Shop()) == {None}


def checkpoint(path: Path, tasks=None, **arguments) -> Path:
    """A folder with metadata of the stage that trained it."""
    path.with_name(f"{path.name}.meta.json").write_text(
        json.dumps({"arguments": {"env": "shop", "env_option": []} | arguments, "tasks": tasks})
    )
    path.mkdir()
    return path


def test_an_agent_trained_from_a_cloned_one_has_its_demonstrations(tmp_path):
    expert = tmp_path / "expert.jsonl"
    expert.write_text("")
    cloned = checkpoint(tmp_path / "sft", expert=str(expert))
    # ETO may compare with the demonstrations of another file: the agent was not cloned from those.
    eto = checkpoint(tmp_path / "eto", sft=str(cloned), expert=str(tmp_path / "other.jsonl"), budget_in="tokens")
    assert cloned_from(checkpoint(tmp_path / "grpo", sft=str(eto))) == (expert, None)
    assert cloned_from(checkpoint(tmp_path / "few", expert=str(expert), n_expert=3)) == (expert, 3)
    assert cloned_from(checkpoint(tmp_path / "circle", sft=str(tmp_path / "circle"))) == (None, None)


def test_tasks_of_one_subject_count_and_a_start_has_learned_too(tmp_path):
    def leaked(name: str, tasks: list[str] | None, **trained) -> int | None:
        results = [{"task_id": task, "tokens": {"generated": 1}} for task in "137"]
        folder = checkpoint(tmp_path / name, tasks, **trained)
        args = argparse.Namespace(env="shop", env_option=[], sft=folder, qnet=tmp_path / "qnet")
        return leaks(Shop(), results, args)["demonstrations"]

    assert leaked("sft", ["3"]) == leaked("alike", ["2"]) == 1  # 2 is the product of task 1
    assert leaked("both", ["2", "3"]) == 2 and leaked("none", []) == 0
    assert leaked("old", None) is None and leaked("other", ["3"], env="lake") is None
    assert leaked("options", ["3"], env_option=["seed=1"]) is None
    here = {"env": "shop", "env_option": []}
    assert learned_tasks(["2"], tmp_path / "sft", here) == ["2", "3"]  # cloned from a cloned agent
    assert learned_tasks(["2"], "meta-llama/Llama-2-7b-chat-hf", here) == ["2"]
    assert learned_tasks(["2"], tmp_path / "other", here) == ["2"]
    for unknown in ("old", "options"):
        assert learned_tasks(["2"], tmp_path / unknown, here) is None
    assert learned_tasks(["2", None], tmp_path / "sft", here) is None
