"""Q-guided search for a chat model, and trees that it grows: on a fake server, with QNets of random weights."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from fakes import FakeEnv, FakeServer, chat_completion, over, refused, tiny_lm, word_chat

import bellman
import build_trees
import train_qnet
from integrations import chat_agent, chat_trees
from integrations.answers import read_answer
from qlass.batching import Score
from qlass.files import meta_of, read_jsonl
from qlass.messages import parse_action, replay
from reporting import __main__ as reporting
from reporting import show
from train_qnet import QNet

SEVERAL = "--method random -M 3 --in-flight 1"  # three answers to a request


@pytest.fixture
def fake(fake_world):
    """A chat model that moves by chance; it counts words as tokens."""
    with FakeServer(text="<think>Action: up</think>Action: {move}\nObservation: you win") as server:
        yield server


def played(fake, flags="", run="."):
    chat_agent.main(over(f"--run {run} --server {fake.url} --limit 2", flags))
    return read_jsonl(Path(run, "results_first.jsonl"))


def asked(fake, flags, run="."):
    """The lines, and the number of requests but for the first one, which asks for the model's name."""
    before = len(fake.seen) + 1
    lines = played(fake, flags, run=run)
    return lines, len(fake.seen) - before


def steps_of(lines):
    return sum(line["n_steps"] for line in lines)


def test_each_method_takes_the_action_that_its_scores_say(fake, value_net):
    lines = played(fake, f"--qnet {value_net} -M 3 -N 1")
    assert [line["method"] for line in lines] == [m for m in ("greedy", "random", "best_of_n", "qlass") for _ in "12"]
    qnet = QNet.from_pretrained(value_net)
    choices = 0
    for line in lines[-2:]:
        moves = replay(FakeEnv(), line["task_id"], [record["action"] for record in line["steps"]])
        for move, record in zip(moves, line["steps"], strict=False):
            actions = [candidate["action"] for candidate in record["candidates"]]
            assert set(actions) <= {"Action: left", "Action: right"}  # up to the stop text, behind the thoughts
            (q,) = qnet.score([Score(move.state, tuple(actions))])
            assert [candidate["q"] for candidate in record["candidates"]] == pytest.approx(q, abs=1e-4)
            assert record["action"] == actions[q.index(max(q))]
            choices += len(actions) > 1
    assert choices
    greedy = [body for body in fake.seen if body.get("temperature") == 0]
    assert len(greedy) == steps_of(lines[:2])
    assert [message["role"] for message in greedy[0]["messages"]] == ["user", "assistant", "user"]


def test_answers_that_are_always_alike_are_told(fake, value_net, capsys):
    fake.text = "Action: nowhere"  # for five steps
    played(fake, f"--method qlass --qnet {value_net} -M 3 --limit 4")
    assert (
        "all answers to a prompt were alike, 20 times: does the server draw by --temperature?"
        in capsys.readouterr().err
    )


def test_tokens_of_both_models_are_counted(fake, value_net):
    fake.text = "Action: right"
    line = played(fake, f"--method qlass --qnet {value_net} -M 3")[0]
    # "walk", "OK", "you stand at start"; then also "Action: right" and "Observation: you stand at start right"
    words = [6, 6 + 2 + 6, 6 + 2 + 6 + 2 + 7]
    assert line["usage"] == {"prompt": sum(words), "generated": 3 * 3 * 2}  # three answers to one request
    assert [body.get("n") for body in fake.seen] == [None, *[3] * 6]
    # QNet reads "walk" and the pages, each with <user> and <agent>, and of each action three tokens.
    scored = 3 + 6 + 8 + 9 + 3 * 3
    assert line["tokens"] == {"prompt": words[-1], "generated": 3 * 3 * 2, "scored": scored}


def test_no_answer_is_asked_for_twice(fake, value_net):
    """Not after a stop or a kill, by another method, or for the same lines again."""
    fake.text = f"<think>à</think>{fake.text}"
    fake.script += [fake.well] * 4 + [400]
    flags = "--method sample --in-flight 1"
    with refused(fake.url):
        played(fake, flags)
    file = Path("answers.results_first.jsonl")
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex("à".encode()) + 1])  # a kill cuts the last of three, within a letter
    lines, requests = asked(fake, flags)
    assert requests == steps_of(lines) - 2
    assert asked(fake, flags) == (lines, 0)
    again, requests = asked(fake, f"{flags} --overwrite")
    assert [line | {"seconds": 0} for line in again] == [line | {"seconds": 0} for line in lines] and not requests
    before = len(fake.seen) + 1
    more = played(fake, f"--method sample qlass --qnet {value_net}")
    assert more[:2] == again and len(more) == 4
    assert "n" not in fake.seen[before]  # of two answers the first was there


def test_a_missing_qnet_and_another_model_are_refused(fake):
    flags = "--method sample --in-flight 1"
    with refused("no such QNet: "):
        played(fake)
    played(fake, flags)
    fake.script += [chat_completion("Hello") | {"model": "other"}]
    with refused("begun with model first, not other"):
        played(fake, flags)
    fake.script += [chat_completion("Hello"), chat_completion("Action: right", read=6) | {"model": "other"}]
    with refused("it answered as first, and now as other"):
        played(fake, flags, run="new")


@pytest.mark.parametrize("refusal", [None, 400])
def test_a_server_that_gives_one_answer_or_refuses_a_request_for_several_is_asked_one_by_one(fake, refusal, capsys):
    expected, requests = asked(fake, f"{SEVERAL} --body '{{\"n\": null}}'", run="without")
    assert requests == 3 * steps_of(expected) == len({body["seed"] for body in fake.seen[1:]})
    assert not any("n" in body for body in fake.seen)
    well = fake.well
    fake.well = lambda body: refusal if refusal and "n" in body else well(body | {"n": 1})
    lines, more = asked(fake, SEVERAL, run="several")
    assert [line["steps"] for line in lines] == [line["steps"] for line in expected]
    assert more == requests + bool(refusal)  # it is asked for several once
    assert capsys.readouterr().err.count("each answer is a request of its own") == bool(refusal)


BAD = chat_completion("Action: left", read=9) | {"usage": None}


@pytest.mark.parametrize(("before", "mishap"), [(3, 400), (3, 404), (3, 422), (3, BAD), (1, 401), (1, 403), (1, BAD)])
def test_one_bad_reply_stops_the_run_and_changes_no_later_request(fake, before, mishap, capsys):
    """Unless it refuses the first request for several. The run goes on as one that was not stopped."""
    fake.script += [fake.well] * before + [mishap]
    with refused(fake.url):
        played(fake, SEVERAL, run="stopped")
    lines, _ = asked(fake, SEVERAL, run="stopped")
    assert {body.get("n") for body in fake.seen if body["messages"][-1]["content"] != "Hello"} == {3}
    straight = played(fake, SEVERAL, run="straight")
    assert [line["steps"] for line in lines] == [line["steps"] for line in straight]
    assert "a request of its own" not in capsys.readouterr().err


def test_answers_belong_to_the_server_and_the_model_that_gave_them(fake):
    """Another one by the same alias is asked, also where --overwrite or --limit lets it in."""
    flags = "--method sample"
    _, requests = asked(fake, flags)
    with FakeServer(text=fake.text) as other:
        assert asked(other, f"{flags} --overwrite")[1] == requests
    fake.well, well = lambda body: well(body) | {"model": "other"}, fake.well
    assert asked(fake, f"{flags} --overwrite")[1] == requests


def test_answers_are_bounded_and_billed(fake, capsys):
    """Those under way at the bound too, which are kept."""
    fake.pause = 0.3
    with refused("--max-answers 3: no more are asked for"):
        played(fake, "--method sample --max-answers 3")  # two tasks side by side
    assert len(fake.seen) == 1 + 3
    out, err = capsys.readouterr()
    assert "at most 10 answers (2 tasks, 5 steps, 1 for" in err
    assert json.loads(out.partition("billed: ")[2])["answers"] == 3  # of a stopped command too
    lines, requests = asked(fake, "--method sample")
    assert requests == steps_of(lines) - 3
    billed = json.loads(capsys.readouterr().out.partition("billed: ")[2])
    assert billed["answers"] == billed["requests"] == requests


def test_demonstrations_of_the_type_stand_in_front_of_the_task(fake, monkeypatch):
    monkeypatch.setattr(FakeEnv, "task_type", lambda self, task_id: f"type {int(task_id[-1]) % 2}")
    flags = "--method greedy --split train --examples"
    played(fake, f"{flags} 2")
    contents = [message["content"] for message in fake.seen[1]["messages"]]
    assert len(contents) == 2 + 2 * 6 + 1  # instruction, OK, twice three steps, the task
    assert contents[2:8] == contents[8:14] and contents[3] == "Thought: this way\nAction: right"
    with refused("--examples 3: 2 can stand in front of task train"):
        played(fake, f"{flags} 3", run="more")


def test_more_fields_of_a_request_and_fields_left_out(fake):
    played(fake, """--method greedy --body '{"max_tokens": null, "max_completion_tokens": 9, "top_k": 5}'""")
    asked = fake.seen[1]
    assert not {"stop", "max_tokens"} & asked.keys()
    assert (asked["max_completion_tokens"], asked["top_k"]) == (9, 5)


def test_a_server_that_cuts_prompts_is_told(fake):
    fake.script += [chat_completion("Action: right", read=6)] * 8
    with refused("reads 6 tokens of a prompt, and 6 of the shorter one before"):
        played(fake, "--method greedy")


FORMS = [
    "Thought: I go right.\nAction: right",
    "<think>Action: left</think>Action: right",
    "Action: right\nObservation: you win\nAction: left",
    "Thought: of each action\nObservation: it says what it leads to\nAction: right",
    "Thought: first\n---\nAction: right",
    "`right`.",
    "**Action:** right",
    "**Action**: right",
    "Action: `right`",
    "Action: right\n\nThis action is the one that leads to the purse.",
    "Action:\n```\nright\n```",
    "### Action\nright",
    '{"thought": "to the right", "action": "right"}',
    '```json\n{"action": "right"}\n```',
    '{"action": "right", "reason": "the purse"}',
]
MOVES = {"up", "down", "left", "right"}
CALL = {"tool": "note", "task": "call Ann", "observation": "she is away"}  # with keys that begin a line of ours
FENCED = "Action:\n```{}\n{}\n```{}"
LETTER = "write Dear Ann,\n\nTask: call Bob\n\nYours"
NAMED = "write\n---\nname: x\n---"
BEHIND = "\n\nThis brings us nearer to the goal."


def is_call(action):
    """Whether an environment that lists JSON calls knows a text."""
    with contextlib.suppress(ValueError):
        return json.loads(action) == CALL
    return False


PRETTY = json.dumps(CALL, indent=2)
ANSWERS = [  # what the environment knows, an answer, and the action in it
    (is_call, f"Action: {PRETTY}", PRETTY),
    (is_call, FENCED.format("json", PRETTY, BEHIND), PRETTY),
    (is_call, f"I call it.\n```json\n{PRETTY}\n```", PRETTY),
    (bool, f"Action: {PRETTY}{BEHIND}", PRETTY),
    (bool, f"Thought: so\n1. Action: {PRETTY}\n2. Action: done", PRETTY),
    (bool, FENCED.format("sql", "SELECT *\nFROM t;", BEHIND), "SELECT *\nFROM t;"),
    (bool, "**Thought:** Now.\n**Action:** SELECT 'a'", "SELECT 'a'"),
    (bool, "**Action: SELECT count(*) FROM t**", "SELECT count(*) FROM t"),
    (bool, "Action: `SELECT 1`\nObservation: 1\nAction: SELECT 2", "SELECT 1"),
    (sqlite3.complete_statement, f"Action: SELECT 1;{BEHIND}", "SELECT 1;"),
    (sqlite3.complete_statement, "I look.\n```sql\nSELECT 1;\n```\nIt has one.", "SELECT 1;"),
    (sqlite3.complete_statement, "### Action\n**SELECT 1;**", "SELECT 1;"),
    (bool, f"Action: {LETTER}", LETTER),
    (LETTER.__eq__, f"Action: {LETTER}{BEHIND}", None),
    (LETTER.__eq__, f"Thought: a letter.\nAction:\n```\n{LETTER}\n```", LETTER),
    (MOVES.__contains__, "Plan:\n1. Action: up\n2. Action: down", "up"),
    (MOVES.__contains__, "Step 1: Action: *up*\nStep 2: Action: *down*", "up"),
    (MOVES.__contains__, "Action 1: up\nAction 2: down", "up"),
    (MOVES.__contains__, "Action: fly\nNo, I can't.\nAction: down", "down"),
    # No mark ends an action's own lines, and none is taken away from what the environment knows.
    (NAMED.__eq__, f"Action: {NAMED}", NAMED),
    ("say *hello*.".__eq__, "Action: say *hello*.", "say *hello*."),
    ("`x`".__eq__, "Action: `x`", "`x`"),
    (MOVES.__contains__, "Action: say *hello*.", None),
    (bool, "", None),
]


@pytest.mark.parametrize(("knows", "text", "action"), [*ANSWERS, *((MOVES.__contains__, x, "right") for x in FORMS)])
def test_the_environment_is_asked_for_the_whole_then_without_marks_then_for_a_part(knows, text, action):
    answer, known, _ = read_answer(text, knows)
    assert known == (action is not None) and parse_action(answer) == (action or parse_action(text))


def test_a_report_names_the_model_and_what_it_was_billed(fake):
    played(fake, "--method greedy random -M 2")
    reporting.main(["--run", "."])
    text = Path("report.md").read_text()
    assert "| first, greedy |" in text and "agent, greedy" not in text
    assert "| billed tokens |" in text and "| random candidate M=2 |" in text


def test_episodes_of_a_split_and_a_budget_are_shown(fake, capsys):
    """Without an agent's checkpoint from the result files."""
    played(fake, "--method random -M 2 3")
    flags = "--run . --method random -M 3"
    show.main(flags.split())
    assert "\nrandom M=3: reward " in capsys.readouterr().out
    for more, name in (("-N 2", "test results of random M=3 N=2"), ("--split val", "val results of random M=3")):
        with refused(f"no agent, and no {name}"):
            show.main(f"{flags} {more}".split())


UNCLEAR = 'answers have no action, or several lines "Action:"'


@pytest.mark.parametrize(
    ("text", "end", "action", "told"),
    [
        ("<think>Action: right", "length", "", "answers were cut at their limit: --max-new-tokens"),
        ("I go right.", "stop", "I go right.", UNCLEAR),
        ("Action: left\nAction: right", "stop", "Action: left", UNCLEAR),
        ("1. Action: left\n2. Action: right", "stop", "Action: left", UNCLEAR),
        (None, "content_filter", "", "answers were refused or filtered"),
        (None, "stop", "", "answers were empty"),
        ("", "", "", "answers were empty"),
        ("Action: left", "tool_calls", "Action: left", "answers ended with 'tool_calls'"),
        ("Action: left", None, "Action: left", None),
    ],
)
def test_an_answer_that_is_not_as_it_should_be_is_played_and_told(fake, capsys, text, end, action, told):
    fake.well = lambda body: chat_completion(text, end=end, read=sum(map(len, map(str, body["messages"]))))
    first, second = played(fake, "--method greedy")
    assert {step["action"] for step in first["steps"]} == {action}
    said = capsys.readouterr().err
    assert f"{first['n_steps'] + second['n_steps']} {told}" in said if told else "warning" not in said


@pytest.mark.parametrize(
    ("preset", "field", "value"), [("paper", "epochs", 2), ("tiny", "loss_on", "last")], ids=["backbone", "small agent"]
)
def test_a_qnet_learns_from_the_trees_of_a_chat_model_and_guides_it(fake, preset, field, value):
    """The whole way of the page: a backbone needs no agent's checkpoint anywhere, and a run of the tiny model's presets
    starts from any tiny agent."""
    chat = word_chat(mark_matches=True)
    tiny_lm(chat).save_pretrained("start")
    chat.tokenizer.save_pretrained("start")
    if preset == "tiny":
        chat.save(Path("start"))
    chat_trees.main(f"--run run --preset {preset} --server {fake.url} --limit 3 --rollouts 4".split())
    roots = [node for node in read_jsonl(Path("run/trees.jsonl")) if node["parent_id"] is None]
    assert [root["task_id"] for root in roots] == FakeEnv().task_ids("train")[:-4:-1]
    usage = meta_of(Path("run/trees.jsonl"))["usage"]
    assert usage["requests"] == len(fake.seen) - 1 <= usage["answers"]
    assert usage["generated"] == 6 * usage["answers"]
    bellman.main(["--run", "run"])
    train_qnet.main(["--run", "run", "--sft", "start"])
    assert meta_of(Path("run/qnet"))["recipe"][field] == value  # of qlass/presets
    line = played(fake, "--method qlass -M 4", run="run")[0]
    assert any(len(step["candidates"]) == 2 for step in line["steps"])


def test_trees_of_a_server_that_names_no_model_and_does_not_count_what_it_writes_have_their_bill(fake, capsys):
    well = fake.well
    fake.well = lambda body: {"choices": well(body)["choices"], "usage": {"prompt_tokens": len(str(body))}}
    url = fake.url.partition("#")[0]
    chat_trees.main(f"--run run --server {url} --model mine --limit 1 --rollouts 2".split())
    usage = meta_of(Path("run/trees.jsonl"))["usage"]
    assert usage["answers"] > 0 == usage["generated"]
    assert f"{url}#mine does not count the tokens that it writes: they are 0" in capsys.readouterr().err


def test_tokens_billed_for_trees_are_those_of_all_processes(fake, monkeypatch):
    """One has begun before the other asks for anything, and finishes last."""
    build = build_trees.build

    def main(rank):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            chat_trees.main(f"--run run --server {fake.url} --limit 2 --rollouts 4".split())

    def build_after_the_other(*arguments):
        monkeypatch.setattr(build_trees, "build", build)
        main(0)
        build(*arguments)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(build_trees, "build", build_after_the_other)
    main(1)
    assert meta_of(Path("run/trees.jsonl"))["usage"]["requests"] == len(fake.seen) - 2  # both ask for the name
