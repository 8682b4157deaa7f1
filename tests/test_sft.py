"""Stage 1: what counts in the loss, the learning rate, what expert files may look like, and that training trains."""

import argparse
import itertools
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeEnv, chat_tokenizer, dump, tiny_lm, word_chat

import sft
from qlass import UserError
from qlass.chat import Chat, Rendering, State
from qlass.files import read_jsonl, read_trajectories
from qlass.loop import cosine
from qlass.policy import Policy
from qlass.tiny import MARK, observation_loss

CHAT = word_chat()
STATE = State(
    (("user", "walk"), ("assistant", "OK"), ("user", "you stand"), ("assistant", "Thought: hm Action: left"),
     ("user", "Observation: nothing happens"), ("assistant", "Action: right")), "find the purse"
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_mask_by_hand():
    ids, wrote = sft.tokens_and_mask(CHAT, STATE, 100)
    marked = [
        "<user> walk <agent>", "*OK <end>", "<user> you stand <agent>", "*Thought: hm Action: left <end>",
        "<user> Observation: nothing happens <agent>", "*Action: right <end>",
    ]  # fmt: skip
    words = [(word.strip("*"), run[0] == "*") for run in marked for word in run.split()]
    assert list(zip(CHAT.tokenizer.convert_ids_to_tokens(ids), wrote, strict=True)) == words
    assert sft.tokens_and_mask(CHAT, STATE, 9) == (ids[:9], wrote[:9])


def test_the_loss_mask_of_llama_2_by_hand():
    chat = Chat(chat_tokenizer("llama-2"), Rendering())
    ids, wrote = sft.tokens_and_mask(chat, STATE, 1000)
    written = [i for i, w in zip(ids, wrote, strict=True) if w]
    assert chat.tokenizer.decode(written) == "OK </s> Thought: hm Action: left </s> Action: right </s>"
    read = [i for i, w in zip(ids, wrote, strict=True) if not w]
    assert chat.tokenizer.decode(read) == (
        "<s> [INST] walk [/INST]<s> [INST] you stand [/INST]<s> [INST] Observation: nothing happens [/INST]"
    )


def test_the_mask_follows_the_compact_rendering():
    chat = word_chat(compact=True)
    ids, wrote = sft.tokens_and_mask(chat, STATE, 100)
    assert chat.tokenizer.convert_ids_to_tokens(ids)[:3] == ["<user>", "you", "stand"]  # no instruction, no OK
    assert sum(wrote) == 5 + 3
    only_ok = State(STATE.messages[:2])  # an expert who did nothing
    assert sft.tokens_and_mask(chat, only_ok, 100) == ([], [])


def loss_of(model, ids, wrote):
    return sft.sft_loss(*sft.predictions(model, ids, wrote))


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [0.0, 5.0], [9.0, 9.0]]])
    ids = torch.tensor([[0, 1, 0, 1]])

    def model(logits_to_keep, **_):
        return SimpleNamespace(logits=logits[:, logits_to_keep])

    # Tokens 1 and 2 were written: -log(1/2) of the first position, -log(3/4) of the second.
    loss = loss_of(model, ids, torch.tensor([[False, True, True, False]]))
    assert loss.item() == pytest.approx(math.log(2) - math.log(3 / 4))
    assert loss_of(model, ids, torch.tensor([[True, False, False, False]])).item() == 0  # nothing predicts it
    # In a second row other tokens were written: each row has the columns of both, and counts its own.
    ids, wrote = ids.repeat(2, 1), torch.tensor([[False, True, True, False], [False, False, False, True]])
    logits = logits.repeat(2, 1, 1)
    assert loss_of(model, ids, wrote).item() == pytest.approx(loss.item() + math.log(1 + math.exp(-5)))


def test_what_the_loss_does_not_see_does_not_move_it():
    """Padding on the right, and the words of the user where nothing that was written follows."""
    model = tiny_lm(CHAT)
    ids, wrote = (torch.tensor([x]) for x in sft.tokens_and_mask(CHAT, STATE, 100))
    loss = loss_of(model, ids, wrote)
    padded = torch.cat([ids, torch.full((1, 5), 7)], 1), torch.cat([wrote, torch.zeros(1, 5, dtype=torch.bool)], 1)
    assert loss_of(model, *padded).item() == pytest.approx(loss.item(), abs=1e-4)
    logp = model(input_ids=ids).logits[0].log_softmax(-1)
    by_hand = -sum(logp[t - 1, ids[0, t]].item() for t in range(ids.shape[1]) if wrote[0, t])
    assert loss.item() == pytest.approx(by_hand, abs=1e-4)


def test_the_loss_of_what_was_read_by_hand():
    """Each token that answers an action counts, predicted where the action ends; no padding, nothing before it."""
    model = tiny_lm(CHAT)
    (short, wrote_short), (ids, wrote) = (
        sft.tokens_and_mask(CHAT, State(STATE.messages[:3]), 100),
        sft.tokens_and_mask(CHAT, STATE, 100),
    )
    pad = CHAT.tokenizer.pad_token_id
    batch = sft.collate([(ids, wrote), (short, wrote_short)], pad, "cpu")
    logits, targets = sft.predictions(model, *batch, True)
    expected = 0.0
    for tokens, mask in ((ids, wrote), (short, wrote_short)):
        logp = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        end = None
        for t, token in enumerate(tokens):
            end = t if mask[t] else end
            expected -= 0.0 if mask[t] or end is None else logp[end, token].item()
    assert (
        observation_loss(logits, sft.columns(batch[1], True), *batch, pad).item() == pytest.approx(expected, rel=1e-4)
        and expected > 1
    )
    assert sft.sft_loss(logits, targets).item() == pytest.approx(loss_of(model, *batch).item(), rel=1e-5)  # not moved


def test_an_agent_learns_to_predict_what_will_answer_its_action():
    def world(i: int) -> State:  # the answer depends on the action alone
        move, answer = [("left", "stand"), ("right", "nothing")][i % 2]
        return State((*STATE.messages[:3], ("assistant", f"Action: {move}"), ("user", answer), ("assistant", "OK")))

    def predicted(weight: float) -> list[float]:
        """How much likelier `stand` is than `nothing`, in logits, where each of the two actions ends."""
        torch.manual_seed(0)
        model, states = tiny_lm(CHAT), [world(i) for i in range(8)]
        sft.train(model, CHAT, states, arguments(epochs=30, observation_loss=weight))
        stand, nothing = CHAT.tokenizer.convert_tokens_to_ids(["stand", "nothing"])
        ended = [CHAT.prompt(State(STATE.messages[:3])) + CHAT.action(f"Action: {m}", "") for m in ("left", "right")]
        logits = model(input_ids=torch.tensor(ended)).logits[:, -1]
        return (logits[:, stand] - logits[:, nothing]).tolist()

    after_left, after_right = predicted(1.0)
    assert after_left > 1 and after_right < -1
    after_left, after_right = predicted(0.0)  # cloned alone it says the same of both, or nothing of either
    assert not (after_left > 1 and after_right < -1)


def test_the_learning_rate_rises_and_falls():
    rate = [cosine(step, 100) for step in range(100)]
    assert rate[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])  # 3 % of the steps
    assert rate[3 + 97 // 2] == pytest.approx(0.5, abs=0.02) and 0 < rate[-1] < 0.001
    assert all(a >= b for a, b in pairwise(rate[3:]))
    assert [cosine(s, 1) for s in range(1)] == [1]


# ----------------------------------------------------------------------------------------------------------- training


RUNS = itertools.count()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def arguments(**more) -> argparse.Namespace:
    defaults = {"max_tokens": 100, "micro_tokens": 1000, "lr": 1e-2, "batch": 4, "epochs": 2, "seed": 0, "model": "x",
                "optim": "adamw",
                "out": Path(f"out{next(RUNS)}"), "patience": 2, "save_every": 50, "overwrite": False,
                "log": "jsonl", "lora": None, "observation_loss": 0.0,
                "weights": "float32", "gradient_checkpointing": False, "fsdp": False, "load_in": None}  # fmt: skip
    return argparse.Namespace(**defaults | more)


def others(n: int) -> list[State]:
    words = ["left", "right", "walk", "find", "purse"]
    return [State((*STATE.messages[:3], ("assistant", "Action: " + " ".join(words[: 1 + i % 5])))) for i in range(n)]


def trained(**more) -> tuple[dict, dict]:
    model = tiny_lm(CHAT)
    figures = sft.train(model, CHAT, others(7), arguments(**more))
    return figures, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_accumulated_gradients_are_those_of_the_whole_batch():
    (one, whole), (two, parts) = trained(), trained(micro_tokens=1)
    assert one["steps"] == two["steps"] == 4  # 7 trajectories in batches of 4, twice
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    for name, p in whole.items():
        torch.testing.assert_close(p, parts[name], atol=1e-4, rtol=1e-4)
    assert any(not torch.equal(p, trained(seed=1)[1][name]) for name, p in whole.items())


def test_four_trajectories_are_learned_by_heart():
    model = tiny_lm(CHAT)
    figures = sft.train(model, CHAT, others(4), arguments(epochs=80))
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
    """Two actions: of the first all tokens are the likeliest, of the second not."""
    states = [STATE, others(1)[0]]
    examples = [sft.tokens_and_mask(CHAT, s, 100) for s in states]
    model = tiny_lm(CHAT)
    loss = sum(loss_of(model, torch.tensor([i]), torch.tensor([w])).item() for i, w in examples)
    figures = sft.validate(model, CHAT, examples, arguments())
    assert figures["held_out_loss"] == pytest.approx(loss / sum(sum(w) for _, w in examples), rel=1e-2)

    class Knows(torch.nn.Module):
        """Expects the example's own next token, but "left" where it reads "Action:" and the actions it has seen."""

        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_) -> SimpleNamespace:
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), len(CHAT.tokenizer)).float()
            action, left = CHAT.tokenizer.convert_tokens_to_ids(["Action:", "left"])
            logits[input_ids == action] = torch.nn.functional.one_hot(torch.tensor(left), len(CHAT.tokenizer)).float()
            return SimpleNamespace(logits=logits[:, logits_to_keep])

    # STATE's actions are OK, left and right; the other's OK and left.
    assert sft.validate(Knows(), CHAT, examples, arguments())["held_out_exact"] == pytest.approx(4 / 5)
    assert sft.validate(Knows(), CHAT, [], arguments()) == {}


def test_without_a_memory_each_action_is_learned_behind_its_observation_alone():
    chat = word_chat(markov=True)
    ids, wrote = sft.tokens_and_mask(chat, STATE, 100)
    words = ["<user>", "Observation:", "nothing", "happens", "<agent>", "Action:", "right", "<end>"]
    assert chat.tokenizer.convert_ids_to_tokens(ids) == words and wrote == [False] * 5 + [True] * 3
    other = sft.tokens_and_mask(chat, State(STATE.messages[:4]), 100)
    assert list(sft.examples_of(chat, STATE, arguments())) == [other, (ids, wrote)]
    # With --observation-loss the answer stands behind the action, where there is one.
    answered = (other[0] + ids[:5], other[1] + [False] * 5)
    assert list(sft.examples_of(chat, STATE, arguments(observation_loss=1.0))) == [answered, (ids, wrote)]
    assert sft.train(tiny_lm(chat), chat, [STATE], arguments(batch=1, epochs=1))["steps"] == 2


def test_a_limit_that_leaves_nothing_to_learn_is_an_error():
    with pytest.raises(UserError, match="max-tokens"):
        sft.train(tiny_lm(CHAT), CHAT, [State(STATE.messages[2:])], arguments(max_tokens=3))


# -------------------------------------------------------------------------------------------------------- expert files

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
    ours = {"messages": State(MESSAGES).dump(), "task": "a shirt", "reward": 0.5}
    for name, text in {
        "list.json": json.dumps([ETO, ETO], indent=1),
        "lines.jsonl": dump([ETO, ETO]),
        "spaced.json": "\n " + json.dumps([ETO, ETO]),
    }.items():
        (tmp_path / name).write_text(text)
        assert [state for state, _ in read_trajectories(tmp_path / name)] == [State(MESSAGES)] * 2
    (tmp_path / "ours.jsonl").write_text(dump([ours]))
    ((state, record),) = read_trajectories(tmp_path / "ours.jsonl")
    assert (state, record["reward"]) == (State(MESSAGES, "a shirt"), 0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"conversations": [\n', r"file: not valid JSON .*line 2"),
        ('{"messages"', "file:1: not valid JSON"),
        (json.dumps([{"id": 1}]), "no chat"),
        (json.dumps([ETO, {"conversations": ETO["conversations"][1:]}]), "record 2"),
        (json.dumps([{"conversations": [{"from": "human"}, {"from": "gpt"}]}]), "no chat"),
        (json.dumps([ETO, ["human", "gpt"]]), "record 2"),
        (
            json.dumps([{"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}]}]),
            "record 1",
        ),
        (dump([{"messages": State((*MESSAGES, ("assistant", "Action: more"))).dump()}]), "no chat"),
    ],
)
def test_a_malformed_expert_file_is_named_in_one_line(tmp_path, text, says):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match=says) as error:
        list(read_trajectories(tmp_path / "file"))
    assert "\n" not in str(error.value)


def test_a_demonstration_ends_with_the_experts_last_action():
    record = sft.demonstrate(FakeEnv(), "train0")
    contents = [m["content"] for m in record["messages"]]
    assert contents == [
        "walk", "OK", "you stand at start",
        "Thought: this way\nAction: right", "Observation: you stand at start right",
        "Thought: this way\nAction: right", "Observation: you stand at start right right",
        "Thought: this way\nAction: right",
    ]  # fmt: skip
    assert (record["reward"], record["task"], record["env"], record["task_id"]) == (
        1.0,
        "find the purse",
        "fake",
        "train0",
    )


def test_a_stopped_demonstrator_plays_what_is_missing(tmp_path, monkeypatch):
    played, play = [], sft.demonstrate
    monkeypatch.setattr(sft, "demonstrate", lambda env, task: played.append(task) or play(env, task))
    args = sft.arguments(["--env", "frozenlake", "--run", str(tmp_path), "--n-expert", "4"])
    args.expert = tmp_path / "expert.jsonl"
    sft.collect(FakeEnv(), args)
    whole = args.expert.read_bytes()
    args.expert.write_bytes(whole[: whole.rindex(b"messages")])  # in the middle of the last line
    sft.collect(FakeEnv(), args)
    assert args.expert.read_bytes() == whole and played == ["train0", "train1", "train2", "train3", "train3"]
    args.seed = 1  # the agent's: the same demonstrations
    sft.collect(FakeEnv(), args)
    assert len(played) == 5
    args.env = "webshop"
    with pytest.raises(UserError, match="begun with --env frozenlake, not webshop"):
        sft.collect(FakeEnv(), args)


# -------------------------------------------------------------------------------------------------------- the command


def test_the_tiny_model_comes_with_its_tokenizer_and_aids(tmp_path, fake_world, monkeypatch):
    monkeypatch.setattr(sft, "TINY_STEPS", 3)
    sft.main(["--env", "frozenlake", "--run", str(tmp_path), "--epochs", "1", "--n-expert", "4"])
    assert [r["task_id"] for r in read_jsonl(tmp_path / "expert.jsonl")] == ["train0", "train1", "train2", "train3"]
    chat = Policy.load(tmp_path / "sft").chat
    assert chat.rendering == Rendering(1.0, 48, "valid", True, True)
    state = State(STATE.messages[:3], "find the purse").then(
        "Thought: the purse\nAction: left", "Observation: the purse"
    )
    text = chat.tokenizer.decode(chat.prompt(state))
    # The mark and what the byte pairs have joined; no instruction.
    assert text == f"<user>you stand\nThought: the{MARK} purse\nAction: left<end><user>Observation: the{MARK} purse\n"
    for action in ("Thought: a , b .\nAction: click[x [SEP] y]", "Action: ünïcode ½", "Action: 12.5  two spaces"):
        assert chat.text(chat.action(action, "x y")) == action.replace(" [SEP]", "[SEP]")
    meta = json.loads((tmp_path / "sft.meta.json").read_text())
    assert meta["trajectories"] == 4 and meta["expert_reward"] == 1.0 and meta["steps"] == 4  # batches of a quarter


def test_another_model_keeps_its_tokenizer_and_the_papers_rendering(tmp_path, agent, fake_world):
    (tmp_path / "expert.json").write_text(json.dumps([ETO] * 3))
    (tmp_path / "model").mkdir()
    for file in agent.iterdir():
        if file.name != Rendering.FILE:
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    argv = ["--env", "frozenlake", "--run", str(tmp_path), "--model", str(tmp_path / "model")]
    sft.main([*argv, "--expert", str(tmp_path / "expert.json"), "--epochs", "1"])
    agent = Policy.load(tmp_path / "sft")
    assert agent.chat.rendering == Rendering() and agent.model.config.hidden_size == 32
    assert not (tmp_path / "expert.jsonl").exists() and not list(tmp_path.glob("*.draft"))


@pytest.mark.parametrize("damage", ["empty", "no weights", "cut weights", "other vocabulary", "bad json", "bad policy"])
def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path, agent, damage, capfd):
    folder = tmp_path / "sft"
    folder.mkdir()
    for file in agent.iterdir():
        (folder / file.name).write_bytes(b"" if damage == "empty" else file.read_bytes())
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "other vocabulary":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 9}))
    elif damage == "bad json":
        config.write_text("{")
    elif damage == "bad policy":
        (folder / Rendering.FILE).write_text('{"warmth": 1}')
    with pytest.raises(UserError, match=str(folder)) as error:
        Policy.load(folder)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named_in_one_line(agent, device):
    with pytest.raises(UserError, match=f"--device {device}") as error:
        Policy.load(agent, device)
    assert "\n" not in str(error.value)


def test_nothing_but_a_checkpoint_is_overwritten(tmp_path, fake_world):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="name another --out"):
        sft.main(["--env", "frozenlake", "--run", str(tmp_path), "--out", str(tmp_path)])
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]  # told before anything is played or trained


def test_what_a_training_starts_from_is_not_overwritten(tmp_path, agent, fake_world):
    model = tmp_path / "model"
    shutil.copytree(agent, model)
    with pytest.raises(UserError, match="starts from: name another --out"):
        sft.main(["--run", str(tmp_path), "--model", str(model), "--out", str(model), "--overwrite"])
    assert (model / "model.safetensors").exists()


def test_a_trajectory_is_cut_at_the_models_context():
    chat = word_chat()
    chat.context = 9
    assert sft.tokens_and_mask(chat, STATE, 100) == sft.tokens_and_mask(CHAT, STATE, 9)


def test_a_batch_that_was_asked_for_is_not_cut():
    def batch(asked: int | None) -> int:
        args = arguments(batch=asked, epochs=1)
        sft.train(tiny_lm(CHAT), CHAT, [STATE] * 8, args)
        return args.batch

    assert (batch(8), batch(None)) == (8, 2)  # else a quarter of so few


def test_a_folder_that_is_none_is_named_in_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        Policy.load(tmp_path / "nowhere")
