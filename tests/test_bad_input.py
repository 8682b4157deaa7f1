"""Bad input: one line that says where, what and how to fix it; never a silent number."""

import json
import re
from pathlib import Path

import pytest
from fakes import FakeEnv, dump
from test_bellman import node

import bellman
from qlass import UserError, files
from qlass.files import sha256
from qlass.leaks import begin_of, begins_of, check_qnet, leaks, learned_tasks
from qlass.optional import lora
from qlass.pairs import read_pairs
from qlass.published import Demonstration, by_task, cloned_from, demonstrations_for, read
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
THEIRS = [{"from": role, "value": text} for role, text in (("system", "be brief"), ("human", "go"), ("gpt", "left"))]
RESULT = {"task_id": "a", "env": "lake", "method": "greedy", "reward": 1, "tokens": {"prompt": 1}}
ROOT = node(0, None, messages=CHAT[:1], task="", env="fake", action=None, source="policy", q=0.5)
LEAF = node(1, 0, 1.0, done=True, source="policy", q=0.5)
NOT_TO_BE_LEARNED = [("loss", False), ("train", False), ("weight", 0)]  # by the fields that others mask turns with
NO_NODE = [
    *(("reward", None), ("q", None), ("cut", "1"), ("node_id", [1]), ("parent_id", [0])),
    *(("action", 3), ("action", None), ("observation", "\ud83d")),
]
OF_ANOTHER_KIND = [("seed", "a"), ("seed", [1]), ("M", 2.5), ("label", ["a"]), ("steps", "left"), ("success", "yes")]
READERS = {
    "expert.jsonl": lambda path: read(path, FakeEnv()),
    "trees.jsonl": lambda path: bellman.main(["--trees", str(path), "--run", str(path.parent / "run")]),
    "q_labels.jsonl": lambda path: read_pairs(path, None),
    "results.jsonl": lambda path: list(lines_of(path)),
    "ranges.csv": read_ranges,
    "x.jsonl": lambda path: list(files.records_of(path)),
}
BAD = {
    "x.jsonl": [
        ('{"a": 1}\n5\n', ":2: not a JSON object, but a int"),
        ('{"a": 1}\n\n{"a": 1, a: 2}', ":3: not valid JSON (Expecting property name"),
        *((dump([{"reward": r}]), f":1: reward can't be {r!r}: a n") for r in (50, 1.01, -1, True, "1", float("nan"))),
        *((dump([{"task_id": name}]), f":1: task_id can't be {name!r}: a text") for name in (2882.0, True, ["a"])),
    ],
    "trees.jsonl": [
        ("", "holds no trees"),
        (tree(ROOT, LEAF).splitlines()[0] + "\n", ": the tree of task t is cut"),
        (tree(ROOT, LEAF) * 2, ":3: node 0 is before its parent, or twice"),
        (tree(ROOT, LEAF | {"reward": 50}), ":2: reward can't be 50"),
        *((tree(ROOT, LEAF | {name: value}), f":2: {name} can't be {value!r}") for name, value in NO_NODE),
        (tree(ROOT | {"messages": "go"}, LEAF), ":1: messages can't be 'go'"),
        (tree(ROOT | {"messages": ["go"]}, LEAF), ":1: messages are no list"),
        (tree(ROOT | {"messages": CHAT}, LEAF), ":1: messages end with the agent's turn"),
    ],
    "q_labels.jsonl": [
        (tree({k: v for k, v in ROOT.items() if k != "q"}, LEAF), ":1: no q"),
        (tree(ROOT | {"messages": CHAT[::-1]}, LEAF), "the tree of task t: turn 1 is"),
    ],
    "results.jsonl": [
        (dump([RESULT, RESULT | {"reward": 50}]), ":2: reward can't be 50"),
        (dump([RESULT | {"reward": None}]), ":1: no reward"),
        (dump([RESULT | {"tokens": 7}]), ":1: tokens can't be 7"),
        (dump([RESULT | {"tokens": {"prompt": "1"}}]), ":1: tokens can't be {'prompt': '1'}"),
        *((dump([RESULT | {name: value}]), f":1: {name} can't be {value!r}") for name, value in OF_ANOTHER_KIND),
        (dump([RESULT, {"task_id": "a"}]), ":2: no env"),
        (dump([RESULT | {"steps": ["left"]}]), ":1: steps can't be ['left']"),
        (dump([RESULT | {"steps": [{"action": None}]}]), ":1: steps can't be [{'action': None}]"),
    ],
    "ranges.csv": [("environment,method,M,N,select,low,high\nlake,greedy,1,1,,a,b", ": no table of environment")],
    "expert.jsonl": [
        (" \n", "holds no demonstration"),
        ("messages,reward\ngo,1\n", ":1: not valid JSON"),
        (json.dumps([{"conversations": [{"from": "human", "value": None}]}]), "record 1: no demonstration: turn 1"),
        (dump([{"messages": json.dumps(CHAT)}]), "no list of objects with role and content"),
        (chat(LEFT, turn("here", "tool")), "turn 3 is {'role': 'tool'"),
        (chat(turn("", tool_calls=[{"type": "function"}])), "acts by a tool call: write the action into its content"),
        (chat(turn("<think>\nAction: left, but")), "which is no action"),
        (chat(), "the assistant writes '', which is no action"),
        (dump([{"messages": CHAT, "conversations": CHAT}]), "it has messages and conversations: leave one"),
        (chat(LEFT, reward=25), ":1: reward can't be 25"),
        (chat(LEFT, task=12), ":1: no demonstration: task is 12, no text"),
        (chat(turn("left \ud83d")), ":1: no demonstration: turn 2 has half a character"),
        *((chat(turn("left", **{name: no})), f"{name} of a turn is {no}, but all") for name, no in NOT_TO_BE_LEARNED),
    ],
}


@pytest.mark.parametrize(("name", "content", "says"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_bad_file_is_named_with_its_line_and_its_fault(name, content, says, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(name) + ".*" + re.escape(says)):
        READERS[name](tmp_path / name)
    assert not (tmp_path / "run" / "q_labels.jsonl").exists()


def test_what_is_well_defined_is_read(tmp_path, capsys):
    path = tmp_path / "expert.jsonl"

    def only(text: str) -> Demonstration:
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        return next(iter(read(path, FakeEnv())))

    turns = [turn("be brief", "system"), turn("", "user"), turn("<think>Action: up</think>left"), turn("here", "user")]
    assert only(dump([{"messages": turns, "system": "be brief"}])).state.dump() == turns  # it ends with the user
    numbered = only(chat(turn("\ud83d\ude00 left", tool_calls=[]), reward=None, task=None, task_id=7))
    whole = numbered.state
    assert (numbered.task_id, numbered.reward) == ("7", None) and only(chat(LEFT, reward=1)).reward == 1
    assert (whole.messages[1], whole.task) == (("assistant", "\U0001f600 left"), "")
    theirs = only("\n " + json.dumps([{"conversations": THEIRS}], indent=1))
    assert theirs == only(dump([{"messages": THEIRS[1:], "system": "be brief"}]))
    assert by_task([theirs], FakeEnv()) == {"go": theirs} and theirs.actions == ["left"]
    for first, agrees in {"left": 0, "Thought: OK\nleft": 0, "OK": 1, "okay.": 1, "I will do my best.": 1}.items():
        both = only(chat(turn(first), turn("here", "user"), turn("right"), turn("there", "user")))
        assert both.actions == [first, "right"][agrees:]
    agentgym = [turn("OK", loss=False), turn("here", "user", loss=None), turn("left", loss=True)]
    assert only(chat(*agentgym)).actions == ["left"] and "is not read" not in capsys.readouterr().err
    only(chat(turn("left", reasoning_content="it is left")))
    assert "warning: reasoning_content of the assistant's turns is not read" in capsys.readouterr().err


WORLD = {"env": "shop", "env_option": [], "env_files": {}}


def checkpoint(path: Path, tasks: list[str] | None = None, recipe: dict = WORLD, begins=(), **inputs: str) -> Path:
    """A folder with metadata of the stage that trained it."""
    path.mkdir()
    meta = {"recipe": WORLD | recipe, "inputs": inputs, "tasks": tasks, "begins": [*map(begin_of, begins)]}
    path.with_name(f"{path.name}.meta.json").write_text(json.dumps(meta))
    return path


class Shop(FakeEnv):
    """Tasks 0 to 9, each with a first page of its own; 1 and 2 want the same product."""

    name = "shop"

    def __init__(self):
        super().__init__()
        self.settings = WORLD

    def task_ids(self, split):
        return {"train": [*"0123456"], "test": [*"1789"]}[split]

    def subject(self, task_id):
        return task_id.replace("1", "2")

    def _look(self):
        return f" page {self.task_id}\n"


@pytest.mark.parametrize(
    ("tasks", "begins", "recipe", "known"),
    [
        (["3"], [], {}, 1),
        (["2"], [], {}, 1),  # the product of task 1
        (["8"], [], {}, 0),
        (None, [], {}, None),
        (["3"], [], {"env": "lake"}, None),  # its ids are of other tasks
        (["3"], [], {"env_files": {"data": "x"}}, None),
        (["4"], ["page 7", "page 8"], {}, 1),  # task 7 under another id
        (["3", "7"], ["page 3", "page 7"], {}, 2),
        (None, ["page 1", "page 3"], {}, 2),
        (["3"], ["page 7"], {"env": "lake"}, 1),
    ],
)
def test_tasks_that_were_learned_from_are_counted_or_not_known(tasks, begins, recipe, known, tmp_path, capsys):
    """Never a silent 0; and a training that starts there has learned from them too."""
    records = [{"task_id": task, "tokens": {"generated": 1, "scored": 0}} for task in "137"]
    start, shop = checkpoint(tmp_path / "sft", tasks, recipe, begins), Shop()
    assert leaks(shop, records, start, tmp_path / "qnet") == {"demonstrations": known, "trees": 0}
    warning = capsys.readouterr().err
    assert warning.count("\n") == (known != 0) and ("not known" in warning) == (known is None)
    same, own = "env" not in recipe, [("7", "page 7")]
    ids = None if same and (tasks is None or recipe) else sorted({"7", *(tasks if same else [])})
    pages = ["page 7"] if not same else ["page 7", *begins] if begins else []
    expected = {"tasks": ids, "begins": sorted({*map(begin_of, pages)})}
    assert learned_tasks(own, start, shop) == expected
    assert learned_tasks([*own, (None, "page 6")], start, shop)["tasks"] is None
    (start / "adapter").mkdir()  # of the same training: it has learned from the same
    (start / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "hub/model"}))
    (start / "adapter" / lora.MERGED).write_text("")
    assert learned_tasks(own, start / "adapter", shop) == expected
    assert learned_tasks(own, "meta-llama/Llama-2-7b-chat-hf", shop) == {"tasks": ["7"], "begins": [begin_of("page 7")]}


@pytest.mark.parametrize(
    ("tasks", "unique", "telling"),
    [
        ([("a", "x"), ("b", "y")], False, "xy"),
        ([("a", "x"), ("a", " x\n")], False, "x"),  # two demonstrations of a task
        ([("a", "x"), ("b", "x"), ("c", "y")], False, "y"),  # "x" tells no task
        ([(None, "x"), (None, "y")], False, "xy"),
        ([(None, "x"), (None, "x"), (None, "y")], False, ""),  # of one task or of two: not known
        ([(None, "x"), (None, "x"), (None, "y")], True, "xy"),
    ],
)
def test_first_observations_that_tell_a_task(tasks, unique, telling):
    assert begins_of(tasks, unique) == sorted(map(begin_of, telling))


def test_ids_that_no_split_has_are_told(tmp_path, capsys):
    """2882.0 is what a table makes of a column of ids in which one is missing."""
    path = tmp_path / "expert.jsonl"
    path.write_text("".join(chat(LEFT, task_id=name) for name in (3, "3", "2882.0", None)))
    assert [tau.task_id for tau in read(path, Shop())] == ["3", "3", "2882.0", None]
    assert f"{path} has task ids that no split of shop has (1, e.g. '2882.0')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "env", "warning"),
    [
        ({}, "shop", ""),
        ({"sft": "x"}, "shop", "qnet: began as another agent than "),
        ({"sft": sha256(Path(__file__))}, "shop", ""),
        ({}, "lake", "qnet: was trained on shop, and plays lake"),
    ],
)
def test_a_qnet_of_another_agent_or_environment_is_told(recipe, env, warning, tmp_path, capsys):
    qnet = checkpoint(tmp_path / "qnet", recipe=recipe)
    with pytest.raises(UserError, match=r"qnet: no QNet; name the folder that train_qnet\.py wrote"):  # an agent's
        check_qnet(qnet, Path(__file__), env)
    (qnet / "qnet.json").touch()
    check_qnet(qnet, Path(__file__), env)
    told = capsys.readouterr().err
    assert warning in told and bool(told) == bool(warning)


def test_an_agent_trained_from_a_cloned_one_has_its_demonstrations(tmp_path):
    expert = tmp_path / "expert.jsonl"
    expert.write_text("")
    checkpoint(tmp_path / "sft", expert="expert.jsonl")
    checkpoint(tmp_path / "eto", sft="sft", expert="other.jsonl")  # it may compare with others
    assert cloned_from(checkpoint(tmp_path / "grpo", sft="eto")) == (expert, None)
    assert cloned_from(checkpoint(tmp_path / "few", recipe={"n_expert": 3}, expert="expert.jsonl")) == (expert, 3)
    assert cloned_from(checkpoint(tmp_path / "circle", sft="circle")) == (None, None)


def test_demonstrations_that_are_gone_are_told(tmp_path, capsys):
    with pytest.raises(UserError, match=r"webshop_sft\.json: no such file \(docs/paper\.md, section Data"):
        read(tmp_path / "webshop_sft.json", FakeEnv())
    sft = checkpoint(tmp_path / "sft", expert="expert.jsonl")
    assert demonstrations_for(None, ["7"], None, sft) == (None, {})
    assert "not at hand, so the environment's expert plays" in capsys.readouterr().err
