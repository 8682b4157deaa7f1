"""python -m reporting.demonstration: what the model sees, which actions are read, what replaying them earns."""

import json

import pytest
from fakes import FakeEnv, dump

from qlass import UserError
from qlass.published import demonstrate
from reporting import demonstration

GOOD = demonstrate(FakeEnv(), "train0")  # right, right, right
ACT = json.loads(json.dumps(GOOD).replace("Action:", "Act:"))
PUBLISHED = {"messages": GOOD["messages"]}
ELSEWHERE = json.loads(json.dumps(PUBLISHED).replace("start", "the end"))
ALL = 'no message has "Action:", so each is an action as a whole'
EARNED = "replaying them earned 1"


@pytest.mark.parametrize(
    ("record", "says", "not_said"),
    [
        (GOOD, ["  3 right", f"{EARNED}, 1 is recorded; 0 answers are not the recorded ones"], "<-"),
        (GOOD | {"reward": 0.5}, [f"{EARNED}, 0.5 is recorded"], "<-"),
        (ACT, ["<- the environment does not know it", "earned 0, 1 is recorded, and the episode was"], EARNED),
        (ELSEWHERE, ["  right", "no training task has this id or begins with these words"], EARNED),
        (GOOD | {"task_id": "train3", "messages": ELSEWHERE["messages"]}, ["; 2 answers are not"], "know it"),
    ],
)
def test_a_demonstration_is_shown_and_replayed(record, says, not_said, tmp_path, fake_world, capsys):
    (tmp_path / "expert.jsonl").write_text(dump([GOOD, record]))
    show = ["--env", "frozenlake", "--run", str(tmp_path / "run"), "--expert", str(tmp_path / "expert.jsonl")]
    demonstration.main([*show, "--number", "2"])
    shown = capsys.readouterr()
    assert all(text in shown.out for text in says) and not_said not in shown.out
    writes = [line.removeprefix("writes | ") for line in shown.out.splitlines() if line.startswith("writes | ")]
    assert len(writes) == 6 and writes[-1].endswith(": right<end>")  # a thought and an action each
    assert "you stand at" in shown.out.partition(" reads | ")[2]
    with pytest.raises(UserError, match=r"--number 3: .*expert\.jsonl has 2 demonstrations"):
        demonstration.main([*show, "--number", "3"])


@pytest.mark.parametrize(("records", "warns"), [([ACT, ACT], True), ([GOOD, ACT], False)])
def test_a_file_without_any_action_is_told(records, warns, tmp_path, fake_world, capsys):
    (tmp_path / "expert.jsonl").write_text(dump(records))
    demonstration.main(["--env", "frozenlake", "--run", str(tmp_path)])
    assert (ALL in capsys.readouterr().err) == warns
