"""Any chat model as an agent: on a fake server that fails and lies, and answers in every style."""

from types import SimpleNamespace

import pytest
from fakes import FakeEnv, serving

import reporting.__main__ as report
from integrations import chat_agent
from qlass import UserError
from qlass.outputs import read_jsonl
from qlass.messages import parse_action
from qlass.optional.server import HELLO
from qlass.outputs import meta_of

INSTRUCTION = "walk left or right, or click[what you see]"


class Fake:
    """A chat model that goes right, in words and counts of tokens of the test's."""

    def __init__(self) -> None:
        self.text, self.details = "Thought: {seed}\nAction: right\nObservation: you win", None
        self.seen, self.message, self.end = [], None, "stop"
        self.refused: tuple[int, ...] = ()  # the numbers of the questions
        self.prompt = lambda words: words

    def answer(self, body):
        if body["messages"] == [{"role": "user", "content": HELLO[1]}]:  # whether it answers at all
            return 200, {"choices": [{"message": {"content": "yes"}}], "model": "first"}
        self.seen.append(body)
        if len(self.seen) in self.refused:
            return 400, {"error": {"message": "against our rules"}}
        words = sum(len(message["content"].split()) for message in body["messages"])
        text = self.text.format(**body)
        usage = {"prompt_tokens": self.prompt(words), "completion_tokens": len(text.split()), "total_tokens": 1}
        usage |= {"completion_tokens_details": self.details} if self.details else {}
        choice = {"message": self.message or {"role": "assistant", "content": text}, "finish_reason": self.end}
        return 200, {"choices": [choice], "model": "first", "usage": usage}


@pytest.fixture
def fake(monkeypatch, fake_world):
    monkeypatch.setattr(FakeEnv, "instruction", INSTRUCTION)
    monkeypatch.setattr(FakeEnv, "task_type", lambda self, task_id: f"type {int(task_id[-1]) % 2}")
    server = Fake()
    with serving(server.answer) as server.url:
        yield server


def played(fake, run, *flags):
    chat_agent.main(["--run", str(run), "--server", fake.url, "--skip", "0", "--limit", "2", *flags])
    return list(read_jsonl(run / "results_first.jsonl"))


def test_it_plays_and_the_report_has_its_row(fake, tmp_path, capsys):
    first, _ = played(fake, tmp_path)
    assert (first["method"], first["player"], first["N"], first["success"]) == ("chat", "first", 1, True)
    assert [step["action"].split("\n")[1:] for step in first["steps"]] == [["Action: right"]] * 3  # up to the stop text
    # 8 of the instruction, OK you stand at start | 7 written, 4 kept | Observation: you stand at start right | ...
    assert first["tokens"] == {"prompt": 13 + 6 + 7, "generated": 21, "scored": 0}
    body = fake.seen[0]
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("first", 0.7, 256)
    assert len({b["seed"] for b in fake.seen}) == len(fake.seen) == 6
    assert meta_of(tmp_path / "results_first.jsonl")["recipe"]["model"] == "first"
    report.main(["--run", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "| chat agent: first | 1.000" in text and "| chat agent: first | type 1 | 1.000" in text
    assert "not known how many of 2 tasks played are also, or begin as one does, in the demo" in capsys.readouterr().err


def test_a_refused_task_is_played_as_0_and_the_others_are_played(fake, tmp_path, capsys):
    fake.refused = (2,)  # the second step of the first task
    first, second = played(fake, tmp_path, "--in-flight", "1")
    assert (first["reward"], first["n_steps"], second["reward"], second["n_steps"]) == (0, 0, 1, 3)
    assert "against our rules" in first["refused"] and "refused" not in second
    assert "1 of these tasks are refused, and count as 0" in capsys.readouterr().err


def test_demonstrations_of_the_type_come_first(fake, tmp_path):
    played(fake, tmp_path, "--examples", "2", "--split", "train")
    messages = next(b["messages"] for b in fake.seen if len(b["messages"]) == 15)
    assert [m["role"] for m in messages] == [*["user", "assistant"] * 7, "user"]
    contents = [m["content"] for m in messages]  # instruction, OK, twice three steps, the task
    assert contents[2:8] == contents[8:14] and contents[3] == "Thought: this way\nAction: right"
    with pytest.raises(UserError, match="--examples 3: there are 2 for a task such as train"):
        played(fake, tmp_path / "more", "--examples", "3", "--split", "train")


def test_no_demonstrations_where_the_task_is_in_the_first_message(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEnv, "agreement", "")
    with pytest.raises(UserError, match=r"--examples 1: in .* the task is in the first message"):
        played(fake, tmp_path, "--examples", "1")


def test_no_answer_is_asked_for_twice(fake, tmp_path):
    flags = ["-N", "1", "2"]
    fake.prompt = lambda words: words if len(fake.seen) < 6 else None
    with pytest.raises(UserError, match="do not tell their usage of tokens"):
        played(fake, tmp_path, *flags, "--in-flight", "1")
    assert len(fake.seen) == 6
    fake.prompt, fake.seen = (lambda words: words), fake.seen[:5]
    lines = played(fake, tmp_path, *flags)
    assert len(fake.seen) == 12  # two tasks, two episodes, three steps: best-of-2 shares the first episode
    assert [(line["N"], line["select"]) for line in lines] == [(1, None)] * 2 + [(2, "oracle")] * 2
    assert lines[2]["tokens"] == {"prompt": 13 + 2 * 13, "generated": 42, "scored": 0}  # the first page is read once
    assert played(fake, tmp_path, *flags) == lines and len(fake.seen) == 12
    assert len({b["seed"] for b in fake.seen}) == 12
    with pytest.raises(UserError, match=r"begun with --temperature 0\.7, not 0"):
        played(fake, tmp_path, "--temperature", "0")
    played(fake, tmp_path, "--overwrite", "--temperature", "0")
    assert len(fake.seen) == 18


def test_settings_of_the_body(fake, tmp_path):
    played(fake, tmp_path, "--body", '{"stop": null, "max_tokens": null, "max_completion_tokens": 9}')
    assert not {"stop", "max_tokens"} & fake.seen[0].keys() and fake.seen[0]["max_completion_tokens"] == 9


def test_prompts_that_do_not_grow_are_cut():
    drawn = [chat_agent.Answer("", 4, 0.0, (), length) for length in (6, 16, 16)]
    steps = [SimpleNamespace(state=n, drawn=[answer]) for n, answer in enumerate(drawn)]
    assert chat_agent.tokens_of([steps[:2]]) == {"prompt": 16, "generated": 8, "scored": 0}
    with pytest.raises(UserError, match="reads 16 tokens of a prompt, and 16 of the shorter one before"):
        chat_agent.tokens_of([steps])


def test_a_thought_is_no_action_and_costs_what_it_costs(fake, tmp_path):
    fake.text = "<think>Action: left</think>Action: right"
    fake.details = {"reasoning_tokens": 3}
    first, _ = played(fake, tmp_path)
    assert first["success"] and {step["action"] for step in first["steps"]} == {"Action: right"}
    assert first["tokens"] == {"prompt": 13 + 8 + 9, "generated": 9, "scored": 0}  # nothing of it counts as cached
    fake.text = "<think>Action: right"
    assert {step["action"] for step in played(fake, tmp_path / "2")[0]["steps"]} == {""}


STYLES = {
    "plain": "Thought: hm\nAction: {}",
    "bold label": "**Thought:** hm\n**Action:** {}",
    "bold line": "Thought: hm\n\n**Action: {}**",
    "backticks": "Thought: hm\nAction: `{}`.",
    "code block": "Thought: hm\nAction:\n```\n{}\n```",
    "all in a code block": "```text\nthought: hm\naction: {}\n```",
    "wide colon": "Thought：hm\nAction：{}",
    "heading": "### Thought 1\nhm\n\n### Action 1\n{}",
    "explained": "Thought: hm\nAction: {}. It leads there (I think).\n\nThis is why.",
    "JSON": '{{"thought": "hm", "action": "{}"}}',
    "JSON in a block": '```json\n{{"Thought": null, "Action": "{}"}}\n```',
    "harmony": "<|channel|>analysis<|message|>Action: left<|end|><|start|>assistant<|channel|>final<|message|>"
    "Thought: hm\nAction: {}<|return|>",
    "thought in marks": "[THINK]Action: left[/THINK]Thought: hm\nAction: {}",
}


@pytest.mark.parametrize("style", STYLES)
def test_the_right_action_is_read_in_any_style(fake, tmp_path, capsys, style):
    fake.message = {"content": STYLES[style].format("Right")}
    assert [line["reward"] for line in played(fake, tmp_path)] == [1.0, 1.0]
    assert "only a thought" not in capsys.readouterr().err
    for action in ("click[Low-fat (2 %) - 1. Fl. oz]", "search[a [b] c]"):
        text = STYLES[style].format(action.replace("click", "Click"))
        assert parse_action(chat_agent.in_react_style(text, ("\nObservation:",), INSTRUCTION)) == action


PLAIN = ["Thought: a. b\n\nAction: click[Size: 4.5 (US)]", "Action: Go to desk 1", "right", "I can't.\nNo.", "Action:"]


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_plain_stays(text):
    assert chat_agent.in_react_style(text, (), "Go there, or go on") == text


@pytest.mark.parametrize(
    ("message", "end", "action", "count"),
    [
        ({"content": [{"type": "thinking"}, {"type": "text", "text": "Action: left"}]}, "stop", "Action: left", 0),
        ({"content": None, "refusal": "I will not"}, "stop", "I will not", 0),
        ({"content": "", "reasoning_content": "hm"}, "length", "", 5),
        ({"content": "Thought: I may go to"}, "length", "Thought: I may go to", 5),
    ],
)
def test_an_answer_without_an_action_is_played_and_counted(fake, tmp_path, capsys, message, end, action, count):
    fake.message, fake.end = message, end
    for folder in ("results_first.jsonl", "again"):  # then from the file of answers
        line = played(fake, tmp_path, "--limit", "1")[0]
        assert {step["action"] for step in line["steps"]} == {action} and len(fake.seen) == len(line["steps"])
        assert (f"{count} answers were cut" in capsys.readouterr().err) == bool(count)
        (tmp_path / folder).unlink(missing_ok=True)
