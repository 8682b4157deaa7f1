"""Bad input: one line that says where, what and how to fix it; never a silent number."""

import json
import re
from pathlib import Path

import pytest
from fakes import FakeEnv, dump, node

import bellman
from qlass import UserError
from qlass.demonstrations import demonstrations_of, read
from qlass.pairs import read_pairs
from reporting.expected import read_ranges
from reporting.results import lines_of


def tree(*nodes: dict) -> str:
    return dump([nodes[0] | {"nodes": len(nodes)}, *nodes[1:]])


def turn(content, role: str = "assistant", **more) -> dict:
    return {"role": role, "content": content, **more}


def chat(*turns: dict | list | str, **more) -> str:
    """A demonstration of a user's turn and these."""
    return dump([{"messages": [turn("go", "user"), *turns], **more}])


LEFT = turn("Action: left")
CHAT = [turn("go", "user"), LEFT]
RESULT = {"task_id": "a", "env": "lake", "method": "greedy", "reward": 1, "tokens": {"prompt": 1}}
ROOT = node(0, None, messages=CHAT[:1], task="", env="fake", action=None, source="policy", q=0.5, q_raw=0.5)
LEAF = node(1, 0, 1.0, done=True, source="policy", q=0.5, q_raw=0.5)
OTHER = [line | {"task_id": "u"} for line in (ROOT, LEAF)]
NO_NODE = [("reward", 50), ("depth", 1.5), ("cut", float("nan"))]
NO_RESULT = [("seed", "a"), ("reward", None), ("tokens", {"prompt": "many"}), ("steps", ["left"])]
READERS = {
    "expert.jsonl": lambda path: read(path, FakeEnv()),
    "trees.jsonl": lambda path: bellman.main(["--trees", str(path), "--run", str(path.parent / "run")]),
    "q_labels.jsonl": lambda path: read_pairs(path),
    "results.jsonl": lambda path: list(lines_of(path)),
    "ranges.csv": read_ranges,
}
BAD = {
    "trees.jsonl": [
        ("", ": holds no tree"),
        (tree(ROOT, LEAF).splitlines()[0] + "\n", ": task t: its lines are not one tree of 2 nodes"),
        (tree(ROOT, LEAF) + tree(*OTHER) + tree(ROOT, LEAF), ": task t: its lines are not one tree of 2 nodes"),
        (tree(ROOT, LEAF, LEAF), ": task t: node 2 is not in its place"),
        (dump([ROOT | {"nodes": 2}, 5]), ":2: "),
        *((tree(ROOT, LEAF | {name: value}), f":2: {name}: ") for name, value in NO_NODE),
    ],
    "q_labels.jsonl": [
        (tree({k: v for k, v in ROOT.items() if k != "q"}, LEAF), ":1: q: Field required"),
        (tree(ROOT, LEAF | {"q": float("nan")}), ":2: q: "),
        (tree({k: v for k, v in ROOT.items() if k != "messages"}, LEAF), ": a root without: 'messages'"),
        (tree(ROOT), ": no pair of (s, a) to train on"),
    ],
    "results.jsonl": [(dump([RESULT | {name: value}]), f":1: {name}") for name, value in NO_RESULT],
    "ranges.csv": [("environment,method,M,N,select,low,high\nlake,greedy,1,1,,a,b", ": no table of environment")],
    "expert.jsonl": [
        ("", "holds no demonstration"),
        (dump([{"messages": [turn("go", "user")]}]), "demonstration 1 has no action"),
        (dump([{"dialogue": CHAT}]), ":1: messages: Field required"),
        (dump([{"messages": [turn("be brief", "system"), *CHAT]}]), ":1: messages.0.role: "),
        (chat(turn("here", "user"), LEFT), "message 2 is out of turn"),
        (chat(LEFT, reward=25), ":1: reward: "),
        (chat(turn("", tool_calls=[{"name": "left"}])), ":1: messages.1.tool_calls: "),
        (chat(turn("Action: \ud83d")), ":1: messages.1.content: "),
        (chat(LEFT, success=False), ":1: success: Input should be True"),  # else a failed episode would be cloned
        (chat(LEFT, score=0), ":1: score: Input should be None"),
        (chat(LEFT, reward=1.01), ":1: reward: "),
        (chat(turn(" ")), ":1: messages: Value error, message 2: content is empty"),
        (dump([{"conversations": [{"from": "human", "text": "go"}]}]), ":1: conversations.0.content: Field required"),
        (json.dumps([{"messages": CHAT}]) * 2, ": Extra data: line 1 column"),
        (json.dumps({"messages": CHAT}, indent=1), ":1: Expecting property name"),
    ],
}


@pytest.mark.parametrize(("name", "content", "says"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_bad_file_is_named_with_its_line_and_its_fault(name, content, says, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(name) + ".*" + re.escape(says)):
        READERS[name](tmp_path / name)
    assert not (tmp_path / "run" / "q_labels.jsonl").exists()


def test_lists_of_others_are_read_with_all_their_fields(tmp_path):
    """A list may begin with an empty line."""
    path = tmp_path / "eto.json"
    turns = [{"from": "human", "value": "go"}, {"from": "gpt", "value": "Action: left"}]
    lines = [{"id": 7, "conversations": turns, "task_id": "train2", "reward": 1.0000000000000002, "system": None}]
    path.write_text("\n" + json.dumps(lines, indent=1))
    [shown] = read(path, FakeEnv())
    assert (shown.task_id, round(shown.reward, 9), shown.state.actions) == ("train2", 1, ("Action: left",))


def checkpoint(path: Path, tasks: list[str] | None = None, n_expert: int | None = None, **inputs: str) -> Path:
    """A folder with metadata of the stage that trained it."""
    path.mkdir()
    meta = {"recipe": {"n_expert": n_expert}, "inputs": inputs, "tasks": tasks}
    path.with_name(f"{path.name}.meta.json").write_text(json.dumps(meta))
    return path


def test_an_agent_trained_from_a_cloned_one_has_its_demonstrations(tmp_path):
    expert = tmp_path / "expert.jsonl"
    expert.write_text("")
    checkpoint(tmp_path / "sft", expert="expert.jsonl")
    checkpoint(tmp_path / "eto", sft="sft", expert="other.jsonl")  # it may compare with others
    assert demonstrations_of(checkpoint(tmp_path / "grpo", sft="eto")) == (expert, None)
    assert demonstrations_of(checkpoint(tmp_path / "few", n_expert=3, expert="expert.jsonl")) == (expert, 3)
