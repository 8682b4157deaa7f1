"""Stage 1: what counts in the loss, the learning rate, what expert files may look like, and that training trains."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import FakeEnv, settings_of, tiny_lm, word_chat

import q_search
import sft
from experiments import clone_answers
from qlass import demonstrations
from qlass.chat import Rendering
from qlass.outputs import read_jsonl
from qlass.messages import State
from qlass.policy import QUESTION, Policy, load_agent, load_policy
from qlass.demonstrations import Demonstration, read
from qlass.tiny import AIDS, MARK
from qlass.training import Training, cosine

CHAT = word_chat()
STATE = State(
    (("user", "walk"), ("assistant", "OK"), ("user", "you stand"), ("assistant", "Thought: hm Action: left"),
     ("user", "Observation: nothing happens"), ("assistant", "Action: right")), "find the purse"
)  # fmt: skip
TEXT = (
    "<user> walk <agent> OK <end> <user> you stand <agent> Thought: hm Action: left <end> "
    "<user> Observation: nothing happens <agent> Action: right <end>"
)
ITS_OWN = [3, 4, *range(9, 14), *range(19, 22)]  # the agent's, in which each turn has its end


def test_the_targets_are_the_agents_words():
    whole = sft.example_of(CHAT, STATE, 100)
    assert CHAT.tokenizer.convert_ids_to_tokens(whole.ids) == TEXT.split()
    assert whole.labels == [token if i in ITS_OWN else sft.NO_TARGET for i, token in enumerate(whole.ids)]
    assert (len(whole), whole.targets) == (22, 10)
    (short,) = sft.examples_of(CHAT, shown(STATE), 9)
    assert (short.ids, short.labels, short.targets) == (whole.ids[:9], whole.labels[:9], 2)
    assert not list(sft.examples_of(CHAT, shown(STATE), 3))  # the agent has written nothing yet


class ByHand:
    """A model that gives each row these logits, of four positions and two words."""

    device = "cpu"

    def __call__(self, input_ids, logits_to_keep, **_):
        logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [0.0, 5.0], [9.0, 9.0]]])
        return SimpleNamespace(logits=logits.repeat(len(input_ids), 1, 1)[:, logits_to_keep])


def test_the_loss_by_hand():
    """Each token is predicted by the position before it: of 4 tokens 3 predict."""

    def loss(*labels: list[int]) -> float:
        return sft.sft_loss(ByHand(), [sft.Example([0] * len(of), of) for of in labels]).item()

    # Tokens 1 and 2 count: -log(1/2) of the first position, -log(3/4) of the second.
    none, by_hand = sft.NO_TARGET, math.log(2) - math.log(3 / 4)
    assert loss([none, 1, 0, none]) == pytest.approx(by_hand)
    assert loss([1, none, 1, none]) == pytest.approx(-math.log(1 / 4))  # nothing predicts the first token
    # In a second row other tokens count, and a shorter row is padded.
    assert loss([none, 1, 0, none], [none, none, none, 1]) == pytest.approx(by_hand + math.log(1 + math.exp(-5)))
    assert loss([none, 1, 0, none], [none, 1]) == pytest.approx(by_hand + math.log(2))


def test_the_learning_rate_rises_and_falls():
    rate = [cosine(step, 100) for step in range(100)]
    assert rate[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])  # 3 % of the steps
    assert rate[3 + 97 // 2] == pytest.approx(0.5, abs=0.02) and 0 < rate[-1] < 0.001
    assert all(a >= b for a, b in pairwise(rate[3:])) and cosine(0, 1) == 1


def shown(*states: State) -> list[Demonstration]:
    return [Demonstration(None, state) for state in states]


def others(n: int) -> list[State]:
    words = ["left", "right", "walk", "find", "purse"]
    return [State((*STATE.messages[:3], ("assistant", "Action: " + " ".join(words[: 1 + i % 5])))) for i in range(n)]


def test_four_trajectories_are_learned_by_heart():
    model, config = tiny_lm(CHAT), sft.Config(lr=1e-2, batch=4, micro_tokens=40, epochs=80)
    examples = list(sft.examples_of(CHAT, shown(*others(4)), 100))
    log = Training(Path("sft"), config, {}, {})
    sft.train(model, examples, [], config, log)
    assert log.curve[-1]["loss"] < math.log(4) / 2  # four answers to one question: log 4 over the tokens of an action
    agent = Policy(model, CHAT)
    likely = agent.logprobs([(State(s.messages[:-1]), s.messages[-1][1]) for s in others(4)])
    assert np.exp(likely) == pytest.approx([1 / 4] * 4, abs=0.1)


def test_every_twentieth_task_is_held_out():
    def played(task: int, trial: int) -> State:
        opening = ("user", "walk"), ("assistant", "OK"), ("user", f"you stand at {task}")
        return State((*opening, ("assistant", f"Action: {trial}")))

    expert = shown(*(played(task, trial) for task in range(400) for trial in range(2)))
    learned, held_out = sft.hold_out(expert)
    assert held_out == shown(*(played(task, trial) for task in range(0, 400, 20) for trial in range(2)))
    assert learned == [demonstration for demonstration in expert if demonstration not in held_out]
    assert sft.hold_out(expert[:126]) == (expert[:126], [])  # too few to spare any


def test_validation_by_hand():
    examples = [sft.example_of(CHAT, state, 100) for state in (STATE, others(1)[0])]
    model = tiny_lm(CHAT)
    losses = [sft.sft_loss(model, [one]).item() for one in examples]
    assert sft.validate(model, examples, 1000) == pytest.approx(sum(losses) / (2 + 5 + 3 + 2 + 3), rel=1e-4)
    assert sft.validate(model, [], 1000) is None


def test_without_a_memory_each_action_is_learned_behind_its_observation_alone():
    chat = word_chat(markov=True)
    last, other = (sft.example_of(chat, state, 100) for state in (STATE, State(STATE.messages[:4])))
    words = ["<user>", "Observation:", "nothing", "happens", "<agent>", "Action:", "right", "<end>"]
    assert chat.tokenizer.convert_ids_to_tokens(last.ids) == words
    assert last.labels == [sft.NO_TARGET] * 5 + last.ids[5:]
    assert list(sft.examples_of(chat, shown(STATE), 100)) == [other, last]


SHOWN = (("human", "You are shopping."), ("gpt", "OK"), ("human", "Find a shirt."), ("gpt", "Action: search[shirt]"))
ETO = {"id": "webshop_1", "conversations": [{"from": role, "value": text} for role, text in SHOWN]}


def test_a_demonstration_ends_with_the_experts_last_action():
    record = demonstrations.demonstrate(FakeEnv(), "train0")
    right, seen = "Thought: this way\nAction: right", "Observation: you stand at start right"
    contents = ["walk", "OK", "you stand at start", right, seen, right, f"{seen} right", right]
    assert [m["content"] for m in record["messages"]] == contents
    about = {"reward": 1.0, "task": "find the purse", "env": "fake", "task_id": "train0"}
    assert record == about | {"messages": record["messages"]}


def test_the_tiny_model_comes_with_its_tokenizer_and_aids(tmp_path, fake_world):
    run = ["--env", "frozenlake", "--run", str(tmp_path)]
    sft.main([*run, "--epochs", "1", "--batch", "1", "--n-expert", "4"])
    chat = load_policy(tmp_path / "sft", settings_of(q_search, *run)).chat
    assert chat.rendering == Rendering(**AIDS, agreement="OK")
    state = State(STATE.messages[:3], "find the purse").then(
        "Thought: the purse\nAction: left", "Observation: the purse"
    )
    text = chat.tokenizer.decode(chat.prompt(state))
    # The mark and what the byte pairs have joined; no instruction.
    assert text == f"<user>you stand\nThought: the{MARK} purse\nAction: left<end><user>Observation: the{MARK} purse\n"
    action = "Thought: a , b ½ .\nAction: click[12.5  two spaces]"
    assert chat.text(chat.action(action, "x y")) == action
    meta = json.loads((tmp_path / "sft.meta.json").read_text())
    assert len(meta["tasks"]) == 4 and meta["steps"] == 4


def test_the_first_messages_at_inference_are_those_that_were_cloned(tmp_path, agent, fake_world):
    """A named model keeps its tokenizer."""
    (tmp_path / "expert.json").write_text("\ufeff" + json.dumps([ETO] * 3))
    model = shutil.copytree(agent, tmp_path / "model", ignore=shutil.ignore_patterns(Rendering.FILE))
    run = ["--env", "frozenlake", "--run", str(tmp_path)]
    sft.main([*run, "--model", str(model), "--expert", str(tmp_path / "expert.json"), "--epochs", "1"])
    assert not (tmp_path / "expert.jsonl").exists()
    env = FakeEnv()
    policy = load_agent(tmp_path / "sft", settings_of(q_search, *run), env)
    fingerprint = json.loads((tmp_path / "sft.meta.json").read_text())["fingerprint"]
    assert fingerprint == pytest.approx(policy.likelihoods([QUESTION])[0], abs=1e-3) and len(set(fingerprint)) == 2
    assert policy.chat.rendering == Rendering(instruction="You are shopping.", agreement="OK")
    cloned = read(tmp_path / "expert.json", FakeEnv())[0]
    state = State.first(env, *env.reset())
    assert cloned.state.messages[:2] == state.messages[:2] == (("user", "You are shopping."), ("assistant", "OK"))
    other = FakeEnv()
    load_agent(tmp_path / "sft", settings_of(q_search, *run, "--env-option=instruction=FILE"), other)
    assert other.instruction == "walk"


def test_a_smaller_number_of_demonstrations_is_of_the_first(tmp_path, agent, fake_world, capsys):
    """Though the file of more of them is complete."""
    run = ["--env", "frozenlake", "--run", str(tmp_path), "--model", str(agent), "--epochs", "1"]
    sft.main([*run, "--n-expert", "9"])  # the environment has six tasks
    sft.main([*run, "--n-expert", "2", "--out", str(tmp_path / "two")])
    assert f"{tmp_path / 'sft'}: 6 trajectories" in capsys.readouterr().out
    meta = json.loads((tmp_path / "two.meta.json").read_text())
    assert meta["tasks"] == ["train0", "train1"]
    assert [r["task_id"] for r in read_jsonl(tmp_path / "expert.jsonl")] == FakeEnv().task_ids("train")


def test_first_messages_are_not_those_of_the_checkpoint_that_is_cloned_on(tmp_path, agent, fake_world):
    model = shutil.copytree(agent, tmp_path / "model")
    policy = json.loads((model / "policy.json").read_text())
    policy |= {"instruction": "Swim.", "agreement": "Oh"}
    (model / "policy.json").write_text(json.dumps(policy))
    run = ["--env", "frozenlake", "--run", str(tmp_path), "--model", str(model), "--epochs", "1", "--n-expert", "2"]
    sft.main(run)
    cloned = json.loads((tmp_path / "sft" / "policy.json").read_text())
    assert [cloned[name] for name in ("instruction", "agreement")] == [None, "OK"]


# ---------------------------------------------- the environment's answers are cloned too (experiments/clone_answers.py)


@pytest.mark.parametrize("w", [0.0, 0.5])
def test_the_last_word_of_an_action_predicts_its_answer(w):
    whole = clone_answers.example_of(CHAT, STATE, 100, [7], w)
    own = [(i - 1, whole.ids[i], 1.0) for i in ITS_OWN]
    answered = [(13, whole.ids[i], w) for i in range(14, 19)] + [(21, 7, w)]
    assert whole.ids == [*sft.example_of(CHAT, STATE, 100).ids, 7]
    assert sorted(whole.predictions) == sorted([*own, *(answered if w else [])]) and whole.targets == 10 + 6 * w


def test_the_loss_with_answers_by_hand():
    def loss(*predictions: list[tuple[int, int, float]]) -> float:
        return clone_answers.loss_of(ByHand(), [clone_answers.Example([0, 1, 0, 1], of) for of in predictions]).item()

    assert loss([(0, 1, 0.5), (1, 0, 2.0)]) == pytest.approx(math.log(2) / 2 - 2 * math.log(3 / 4))
    assert loss([(1, 0, 1.0), (1, 1, 1.0)]) == pytest.approx(-math.log(3 / 4) - math.log(1 / 4))  # one position, two
    both = math.log(2) + math.log(1 + math.exp(-5))
    assert loss([(0, 1, 1.0)], [(2, 1, 1.0)]) == pytest.approx(both)  # each row has its own targets


def test_without_a_memory_each_answer_stands_behind_its_action():
    chat = word_chat(markov=True)
    other, last = (sft.example_of(chat, State(STATE.messages[:n]), 100) for n in (4, 6))
    first, second = clone_answers.examples_of(chat, shown(STATE), 100, 0.5)
    answer = last.ids[:5]
    assert (first.ids, second.ids) == (other.ids + answer, last.ids)
    assert first.predictions[-5:] == [(len(other.ids) - 1, token, 0.5) for token in answer]
    assert second.targets == last.targets == 3  # nothing answers the last action
