"""Q-guided search for a chat model, and trees that it grows: on a fake server, with QNets of random weights."""

import pytest
from fakes import FakeEnv, FakeServer, chat_completion, tiny_lm, word_chat

import bellman
import train_qnet
from integrations import chat_agent, chat_trees
from qlass import UserError
from qlass.batching import Score
from qlass.files import meta_of, read_jsonl
from qlass.messages import State, start, step
from train_qnet import QNet


@pytest.fixture
def fake(fake_world):
    """A chat model that moves by chance; it counts words as tokens."""
    with FakeServer(text="<think>Action: up</think>Action: {move}\nObservation: you win") as server:
        yield server


def played(fake, run, *flags):
    flags = ("--run", str(run), "--server", fake.url, "--limit", "2", *flags)
    chat_agent.main(list(flags))
    return read_jsonl(run / "results_first.jsonl")


def states_of(line: dict) -> list[State]:
    """Those in which a result's steps were taken."""
    env = FakeEnv()
    state = start(env, line["task_id"])
    states = [state]
    for record in line["steps"][:-1]:
        state, *_ = step(env, state, record["action"])
        states.append(state)
    return states


def test_each_method_takes_the_action_that_its_scores_say(fake, tmp_path, value_net):
    lines = played(fake, tmp_path, "--qnet", str(value_net), "-M", "3", "-N", "1")
    assert [line["method"] for line in lines] == [m for m in ("greedy", "random", "best_of_n", "qlass") for _ in "12"]
    qnet = QNet.from_pretrained(value_net)
    choices = 0
    for line in lines[-2:]:
        for state, record in zip(states_of(line), line["steps"], strict=True):
            actions = [candidate["action"] for candidate in record["candidates"]]
            assert set(actions) <= {"Action: left", "Action: right"}  # up to the stop text, behind the thoughts
            (q,) = qnet.score([Score(state, tuple(actions))])
            assert [candidate["q"] for candidate in record["candidates"]] == pytest.approx(q, abs=1e-4)
            assert record["action"] == actions[q.index(max(q))]
            choices += len(actions) > 1
    assert choices
    greedy = [body for body in fake.seen if body.get("temperature") == 0]
    assert len(greedy) == sum(line["n_steps"] for line in lines[:2])
    assert [message["role"] for message in greedy[0]["messages"]] == ["user", "assistant", "user"]


def test_tokens_of_both_models_are_counted(fake, tmp_path, value_net):
    fake.text = "Action: right"
    line = played(fake, tmp_path, "--method", "qlass", "--qnet", str(value_net), "-M", "3")[0]
    # "walk", "OK", "you stand at start"; then also "Action: right" and "Observation: you stand at start right"
    words = [6, 6 + 2 + 6, 6 + 2 + 6 + 2 + 7]
    assert line["usage"] == {"prompt": 3 * sum(words), "generated": 3 * 3 * 2}
    # QNet reads "walk" and the pages, each with <user> and <agent>, and of each action three tokens.
    scored = 3 + 6 + 8 + 9 + 3 * 3
    assert line["tokens"] == {"prompt": words[-1], "generated": 3 * 3 * 2, "scored": scored}


def test_a_stopped_search_goes_on_and_more_methods_join_it(fake, tmp_path, value_net):
    fake.script += [fake.well] * 4 + [400]
    flags = ("--method", "sample", "--in-flight", "1")
    with pytest.raises(UserError, match=fake.url):
        played(fake, tmp_path, *flags)
    first = len(fake.seen)
    lines = played(fake, tmp_path, *flags)
    assert len(fake.seen) == first + 1 + lines[1]["n_steps"]  # the model's name; the first task was done
    more = played(fake, tmp_path, "--method", "sample", "qlass", "--qnet", str(value_net))
    assert more[:2] == lines and len(more) == 4
    with pytest.raises(UserError, match=r"begun with temperature None, not 0\.5"):
        played(fake, tmp_path, *flags, "--temperature", "0.5")
    with pytest.raises(UserError, match="qnet: no such"):
        played(fake, tmp_path / "other")
    fake.script += [chat_completion("Hello") | {"model": "other"}]
    with pytest.raises(UserError, match="begun with model first, not other"):
        played(fake, tmp_path, *flags)
    fake.script += [chat_completion("Hello"), chat_completion("Action: right") | {"model": "other"}]
    with pytest.raises(UserError, match="it answered as first, and now as other"):
        played(fake, tmp_path, *flags, "--overwrite")


def test_demonstrations_of_the_type_stand_in_front_of_the_task(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEnv, "task_type", lambda self, task_id: f"type {int(task_id[-1]) % 2}")
    flags = ("--method", "greedy", "--split", "train", "--examples")
    played(fake, tmp_path, *flags, "2")
    contents = [message["content"] for message in fake.seen[1]["messages"]]
    assert len(contents) == 2 + 2 * 6 + 1  # instruction, OK, twice three steps, the task
    assert contents[2:8] == contents[8:14] and contents[3] == "Thought: this way\nAction: right"
    with pytest.raises(UserError, match="--examples 3: 2 can stand in front of task train"):
        played(fake, tmp_path / "more", *flags, "3")
    monkeypatch.setattr(FakeEnv, "agreement", "")  # the task is in the first message
    with pytest.raises(UserError, match="--examples 1: 0 can stand"):
        played(fake, tmp_path / "one", *flags, "1")


def test_more_fields_of_a_request_and_fields_left_out(fake, tmp_path):
    body = '{"stop": null, "max_tokens": null, "max_completion_tokens": 9, "top_k": 5}'
    played(fake, tmp_path, "--method", "greedy", "--body", body)
    asked = fake.seen[1]
    assert not {"stop", "max_tokens"} & asked.keys()
    assert (asked["max_completion_tokens"], asked["top_k"]) == (9, 5)


def test_a_server_that_cuts_prompts_is_told(fake, tmp_path):
    fake.script += [chat_completion("Action: right", read=6)] * 5
    with pytest.raises(UserError, match="reads 6 tokens of a prompt, and 6 of the shorter one before"):
        played(fake, tmp_path, "--method", "greedy")


@pytest.mark.parametrize(("text", "action"), [("<think>Action: right", ""), ("I go right.", "I go right.")])
def test_an_answer_without_an_action_is_played_and_told(fake, tmp_path, capsys, text, action):
    fake.text = text
    first, second = played(fake, tmp_path, "--method", "greedy")
    assert {step["action"] for step in first["steps"]} == {action}
    assert f'{first["n_steps"] + second["n_steps"]} answers have no "Action:"' in capsys.readouterr().err


def test_a_qnet_learns_on_a_backbone_from_the_trees_of_a_chat_model_and_guides_it(fake, tmp_path):
    """The whole way of the page: no agent's checkpoint anywhere."""
    chat = word_chat()
    tiny_lm(chat).save_pretrained("backbone")
    chat.tokenizer.save_pretrained("backbone")
    run = ["--run", str(tmp_path / "run")]
    chat_trees.main([*run, "--server", fake.url, "--limit", "3", "--rollouts", "4"])
    roots = [node for node in read_jsonl(tmp_path / "run" / "trees.jsonl") if node["parent_id"] is None]
    assert [root["task_id"] for root in roots] == FakeEnv().task_ids("train")[:-4:-1]
    bellman.main(run)
    train_qnet.main([*run, "--sft", "backbone"])
    assert meta_of(tmp_path / "run" / "qnet")["recipe"]["epochs"] == 2  # the paper's, not the tiny model's
    line = played(fake, tmp_path / "run", "--method", "qlass", "-M", "4")[0]
    assert any(len(step["candidates"]) == 2 for step in line["steps"])
