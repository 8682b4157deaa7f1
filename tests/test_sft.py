"""Stage 1: what counts in the loss, the learning rate, what expert files may look like, and that training trains."""

import argparse
import json
import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeEnv, chat_tokenizer, dump, tiny_lm, training_settings, word_chat

import q_search
import sft
from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.files import read_jsonl
from qlass.messages import State
from qlass.policy import Policy, begin_as_cloned
from qlass.published import demonstrations, first_messages, read_trajectories
from qlass.tiny import AIDS, MARK, observation_loss
from qlass.training import cosine

CHAT = word_chat()
STATE = State(
    (("user", "walk"), ("assistant", "OK"), ("user", "you stand"), ("assistant", "Thought: hm Action: left"),
     ("user", "Observation: nothing happens"), ("assistant", "Action: right")), "find the purse"
)  # fmt: skip


def apart(example: sft.Example) -> tuple[list[int], list[bool]]:
    """The tokens of an example, and which of them the agent wrote."""
    return [token for token, _ in example], [wrote for _, wrote in example]


def test_the_loss_mask_by_hand():
    example = sft.tokens_and_mask(CHAT, STATE, 100)
    ids, wrote = apart(example)
    marked = [
        "<user> walk <agent>", "*OK <end>", "<user> you stand <agent>", "*Thought: hm Action: left <end>",
        "<user> Observation: nothing happens <agent>", "*Action: right <end>",
    ]  # fmt: skip
    words = [(word.strip("*"), run[0] == "*") for run in marked for word in run.split()]
    assert list(zip(CHAT.tokenizer.convert_ids_to_tokens(ids), wrote, strict=True)) == words
    assert sft.tokens_and_mask(CHAT, STATE, 9) == example[:9]


def test_the_loss_mask_of_llama_2_by_hand():
    chat = Chat(chat_tokenizer("llama-2"), Rendering())
    ids, wrote = apart(sft.tokens_and_mask(chat, STATE, 1000))
    written = [i for i, w in zip(ids, wrote, strict=True) if w]
    assert chat.tokenizer.decode(written) == "OK </s> Thought: hm Action: left </s> Action: right </s>"
    read = [i for i, w in zip(ids, wrote, strict=True) if not w]
    assert chat.tokenizer.decode(read) == (
        "<s> [INST] walk [/INST]<s> [INST] you stand [/INST]<s> [INST] Observation: nothing happens [/INST]"
    )


def loss_of(model, ids: torch.Tensor, wrote: torch.Tensor) -> torch.Tensor:
    logits, labels, _ = sft.predictions(model, ids, wrote)
    return sft.sft_loss(logits, labels)


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [0.0, 5.0], [9.0, 9.0]]])
    ids = torch.tensor([[0, 1, 0, 1]])

    def model(logits_to_keep=slice(None), **_):
        return SimpleNamespace(logits=logits[:, logits_to_keep])

    # Tokens 1 and 2 were written: -log(1/2) of the first position, -log(3/4) of the second.
    by_hand = math.log(2) - math.log(3 / 4)
    assert loss_of(model, ids, torch.tensor([[False, True, True, False]])).item() == pytest.approx(by_hand)
    assert loss_of(model, ids, torch.tensor([[True, False, False, False]])).item() == 0  # none predicts it
    # In a second row other tokens were written: each row has the columns of both, and counts its own.
    ids, wrote = ids.repeat(2, 1), torch.tensor([[False, True, True, False], [False, False, False, True]])
    logits = logits.repeat(2, 1, 1)
    assert loss_of(model, ids, wrote).item() == pytest.approx(by_hand + math.log(1 + math.exp(-5)))


def test_the_loss_of_what_was_read_by_hand():
    """Each token that answers an action counts, predicted where the action ends; no padding, nothing before it."""
    model = tiny_lm(CHAT)
    examples = [sft.tokens_and_mask(CHAT, state, 100) for state in (STATE, State(STATE.messages[:3]))]
    ids, wrote, real = sft.collate(examples, "cpu")
    expected = 0.0
    for example in examples:
        logp = model(input_ids=torch.tensor([[token for token, _ in example]])).logits[0].log_softmax(-1)
        end = None
        for t, (token, written) in enumerate(example):
            end = t if written else end
            expected -= 0.0 if written or end is None else logp[end, token].item()
    assert expected > 1
    logits, labels, at = sft.predictions(model, ids, wrote, ends=True)
    assert observation_loss(logits, at, ids, wrote, real).item() == pytest.approx(expected, rel=1e-4)
    assert sft.sft_loss(logits, labels).item() == pytest.approx(loss_of(model, ids, wrote).item(), rel=1e-5)


def test_an_agent_learns_to_predict_what_will_answer_its_action():
    begun = STATE.messages[:3]
    answers = {"left": "stand", "right": "nothing"}
    turns = [(("assistant", f"Action: {move}"), ("user", word), ("assistant", "OK")) for move, word in answers.items()]
    model = tiny_lm(CHAT)
    trained(model, CHAT, [State((*begun, *turn)) for turn in turns] * 4, epochs=30, observation_loss=1.0)
    stand, nothing = CHAT.tokenizer.convert_tokens_to_ids(["stand", "nothing"])
    for move, sign in (("left", 1), ("right", -1)):
        ids = CHAT.prompt(State(begun)) + CHAT.action(f"Action: {move}", "")
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert sign * (logits[stand] - logits[nothing]) > 1


def test_the_learning_rate_rises_and_falls():
    rate = [cosine(step, 100) for step in range(100)]
    assert rate[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])  # 3 % of the steps
    assert rate[3 + 97 // 2] == pytest.approx(0.5, abs=0.02) and 0 < rate[-1] < 0.001
    assert all(a >= b for a, b in pairwise(rate[3:]))
    assert [cosine(s, 1) for s in range(1)] == [1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(model, chat: Chat, states: list[State], observation_loss: float = 0.0, **more) -> dict:
    """Train a model on trajectories: the figures."""
    args = training_settings(lr=1e-2, observation_loss=observation_loss, **{"micro_tokens": 1000, "epochs": 2, **more})
    examples = list(sft.examples_of(chat, states, 100, observation_loss > 0))
    return sft.train(model, examples, [], args)


def others(n: int) -> list[State]:
    words = ["left", "right", "walk", "find", "purse"]
    return [State((*STATE.messages[:3], ("assistant", "Action: " + " ".join(words[: 1 + i % 5])))) for i in range(n)]


def test_accumulated_gradients_are_those_of_the_whole_batch():
    whole, parts = tiny_lm(CHAT), tiny_lm(CHAT)
    one, two = trained(whole, CHAT, others(7)), trained(parts, CHAT, others(7), micro_tokens=1)
    assert one["steps"] == two["steps"] == 4  # 7 trajectories in batches of 4, twice
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)


def test_four_trajectories_are_learned_by_heart():
    model = tiny_lm(CHAT)
    figures = trained(model, CHAT, others(4), epochs=80)
    assert figures["loss"] < math.log(4) / 2  # four answers to one question: log 4 over the tokens of an action
    agent = Policy(model, CHAT)
    likely = agent.logprobs([(State(s.messages[:-1]), s.messages[-1][1]) for s in others(4)])
    assert all(abs(math.exp(p) - 1 / 4) < 0.1 for p in likely)


def test_every_twentieth_task_is_held_out():
    def played(task: int, trial: int) -> State:
        opening = ("user", "walk"), ("assistant", "OK"), ("user", f"you stand at {task}")
        return State((*opening, ("assistant", f"Action: {trial}")))

    states = [played(task, trial) for task in range(400) for trial in range(2)]
    training, held_out = sft.hold_out(states)
    assert held_out == [played(task, trial) for task in range(0, 400, 20) for trial in range(2)]
    assert training == [s for s in states if s not in held_out]
    assert [len(part) for part in sft.hold_out(states[:128])] == [2 * (64 - 16), 2 * 16]
    assert sft.hold_out(states[:126]) == (states[:126], [])  # too few to spare any


def test_validation_by_hand():
    examples = [sft.tokens_and_mask(CHAT, state, 100) for state in (STATE, others(1)[0])]
    model = tiny_lm(CHAT)
    parts = [apart(example) for example in examples]
    loss = sum(loss_of(model, torch.tensor([ids]), torch.tensor([wrote])).item() for ids, wrote in parts)
    assert sft.validate(model, examples, 1000) == pytest.approx(loss / sum(sum(wrote) for _, wrote in parts), rel=1e-4)
    assert sft.validate(model, [], 1000) is None


def test_without_a_memory_each_action_is_learned_behind_its_observation_alone():
    chat = word_chat(markov=True)
    last = sft.tokens_and_mask(chat, STATE, 100)
    words = ["<user>", "Observation:", "nothing", "happens", "<agent>", "Action:", "right", "<end>"]
    assert chat.tokenizer.convert_ids_to_tokens(apart(last)[0]) == words
    assert apart(last)[1] == [False] * 5 + [True] * 3
    other = sft.tokens_and_mask(chat, State(STATE.messages[:4]), 100)
    assert list(sft.examples_of(chat, [STATE], 100)) == [other, last]
    # With --observation-loss the answer stands behind the action, where there is one.
    assert list(sft.examples_of(chat, [STATE], 100, answered=True)) == [other + last[:5], last]
    assert trained(tiny_lm(chat), chat, [STATE], batch=1, epochs=1)["steps"] == 2


ETO = {
    "id": "webshop_1",
    "conversations": [
        {"from": "human", "value": "You are shopping."}, {"from": "gpt", "value": "OK"},
        {"from": "human", "value": "Find a shirt."}, {"from": "gpt", "value": "Thought: x\nAction: search[shirt]"},
    ],
}  # fmt: skip
MESSAGES = (("user", "You are shopping."), ("assistant", "OK"), ("user", "Find a shirt."),
            ("assistant", "Thought: x\nAction: search[shirt]"))  # fmt: skip


def test_expert_files_in_all_layouts_are_the_same(tmp_path):
    for text in (json.dumps([ETO, ETO], indent=1), dump([ETO, ETO]), "\n " + json.dumps([ETO, ETO])):
        (tmp_path / "expert.json").write_text(text)
        assert [state for state, _ in read_trajectories(tmp_path / "expert.json")] == [State(MESSAGES)] * 2


def test_a_demonstration_ends_with_the_experts_last_action():
    record = sft.demonstrate(FakeEnv(), "train0")
    contents = [m["content"] for m in record["messages"]]
    assert contents == [
        "walk", "OK", "you stand at start",
        "Thought: this way\nAction: right", "Observation: you stand at start right",
        "Thought: this way\nAction: right", "Observation: you stand at start right right",
        "Thought: this way\nAction: right",
    ]  # fmt: skip
    about = {"reward": 1.0, "task": "find the purse", "env": "fake", "task_id": "train0"}
    assert record == about | {"messages": record["messages"]}


def test_the_tiny_model_comes_with_its_tokenizer_and_aids(tmp_path, fake_world, monkeypatch):
    monkeypatch.setattr(sft, "UPDATES", 3)
    sft.main(["--env", "frozenlake", "--run", str(tmp_path), "--epochs", "1", "--n-expert", "4"])
    assert [r["task_id"] for r in read_jsonl(tmp_path / "expert.jsonl")] == ["train0", "train1", "train2", "train3"]
    chat = Policy.load(tmp_path / "sft").chat
    assert chat.rendering == Rendering(**AIDS)
    state = State(STATE.messages[:3], "find the purse").then(
        "Thought: the purse\nAction: left", "Observation: the purse"
    )
    text = chat.tokenizer.decode(chat.prompt(state))
    # The mark and what the byte pairs have joined; no instruction.
    assert text == f"<user>you stand\nThought: the{MARK} purse\nAction: left<end><user>Observation: the{MARK} purse\n"
    action = "Thought: a , b ½ .\nAction: click[12.5  two spaces]"
    assert chat.text(chat.action(action, "x y")) == action
    meta = json.loads((tmp_path / "sft.meta.json").read_text())
    assert meta["trajectories"] == 4 and meta["steps"] == 4  # batches of a quarter


def test_the_first_messages_at_inference_are_those_that_were_cloned(tmp_path, agent, fake_world, capsys):
    """A system text beside the turns, and AgentGym's long agreement; what nobody uses is named.

    Another model than the tiny one keeps its tokenizer, and has the paper's rendering.
    """
    turns = [turn | {"loss": True} for turn in ETO["conversations"]]
    turns[1]["value"] = "OK. I'll follow your instructions and try my best to solve the task."
    record = {"item_id": "x", "system": "Be brief.", "conversations": turns}
    (tmp_path / "expert.json").write_text("\ufeff" + json.dumps([record] * 3))
    model = shutil.copytree(agent, tmp_path / "model", ignore=shutil.ignore_patterns(Rendering.FILE))
    run = ["--env", "frozenlake", "--run", str(tmp_path)]
    sft.main([*run, "--model", str(model), "--expert", str(tmp_path / "expert.json"), "--epochs", "1"])
    error = capsys.readouterr().err
    assert error.count("not used: item_id\n") == error.count("not used: loss\n") == 1
    assert not (tmp_path / "expert.jsonl").exists() and not list(tmp_path.glob("*.draft"))
    chat, env = Policy.load(tmp_path / "sft").chat, FakeEnv()
    own = {"system": "Be brief.", "instruction": "You are shopping.", "agreement": turns[1]["value"]}
    assert chat.rendering == Rendering(**own) and len(chat.tokenizer) == len(CHAT.tokenizer)
    begin_as_cloned(env, chat.rendering, argparse.Namespace(sft=tmp_path / "sft", env_option=[]))
    state = State.first(env, *env.reset())
    cloned, _ = next(read_trajectories(tmp_path / "expert.json"))
    assert cloned.messages[:3] == state.messages[:3] == (
        ("system", "Be brief."), ("user", "You are shopping."), ("assistant", turns[1]["value"])
    )  # fmt: skip
    q_search.main([*run, "--method", "greedy", "--limit", "1"])
    env.instruction, env.system = "another", "Be kind."
    begin_as_cloned(env, Rendering(system=""), argparse.Namespace(env_option=[]))
    assert env.system == ""  # the demonstrations had none
    begin_as_cloned(env, chat.rendering, argparse.Namespace(sft=tmp_path / "sft", env_option=["instruction=FILE"]))
    assert env.instruction == "another" and "cloned with another instruction" in capsys.readouterr().err


def test_first_messages_that_a_prompt_will_not_have_are_told(tmp_path, capsys):
    turns = ETO["conversations"]
    at_once = {"conversations": [turns[0], turns[3], turns[2], turns[3]]}  # no OK
    other = {"conversations": [turns[0] | {"value": "Buy."}, *turns[1:]]}
    cases = {
        "their first system differs": ([ETO, ETO | {"system": "Be long."}], {"instruction": "You are shopping."}),
        "their first instruction differs": ([ETO, other], {}),
        "1 of 2 demonstrations begin without an instruction and the agent's OK": ([ETO, at_once], None),
        "1 of 1 demonstrations begin without": ([at_once | {"reward": 0}], {}),
    }
    for warning, (records, shared) in cases.items():
        (tmp_path / "expert.json").write_text(json.dumps(records))
        states = demonstrations(FakeEnv(), tmp_path / "expert.json")
        first = first_messages(FakeEnv(), states)
        assert shared is None or {name: first[name] for name in first.keys() - {"agreement"}} == shared
        output = capsys.readouterr()
        assert warning in output.err and ("1 of 1 demonstrations earned nothing" in output.out) == ("1 of 1" in warning)


def test_demonstrations_are_put_in_the_environments_words(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEnv, "in_own_words", lambda self, text: text.replace("shirt", "purse"))
    (tmp_path / "expert.json").write_text(json.dumps([ETO, ETO, ETO]))
    state, _ = demonstrations(FakeEnv(), tmp_path / "expert.json", 2)
    assert [text for _, text in state.messages[2:]] == ["Find a purse.", "Thought: x\nAction: search[purse]"]


def test_the_number_of_demonstrations_is_told_and_none_are_an_error(tmp_path, agent, fake_world, capsys):
    run = ["--env", "frozenlake", "--run", str(tmp_path), "--model", str(agent), "--epochs", "1", "--overwrite"]
    sft.main([*run, "--n-expert", "9"])  # the environment has six tasks
    assert f"{tmp_path / 'sft'}: 6 trajectories" in capsys.readouterr().out
    for content in ("", "[]"):
        (tmp_path / "eto.json").write_text(content)
        with pytest.raises(UserError, match=r"eto\.json: holds no demonstration"):
            sft.main([*run, "--expert", "eto.json"])


def test_what_a_training_starts_from_is_not_overwritten(tmp_path, agent, fake_world):
    model = shutil.copytree(agent, tmp_path / "model")
    with pytest.raises(UserError, match="name another --out"):  # told before anything is played or trained
        sft.main(["--env", "frozenlake", "--run", str(tmp_path), "--model", str(model), "--out", str(model),
                  "--overwrite"])  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (model / "model.safetensors").exists()


def test_few_demonstrations_make_small_batches_and_many_epochs():
    for examples, batch, expected in ((8, None, (2, 50)), (8, 8, (8, 200)), (1000, None, (16, 12))):
        settings = sft.settings_of(argparse.Namespace(model="tiny", batch=batch), examples)
        assert (settings["batch"], settings["epochs"]) == expected
