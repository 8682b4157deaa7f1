"""Stage 1: what counts in the loss, the learning rate, what expert files may look like, and that training trains."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeEnv, over, settings_of, talk, tiny_lm, word_chat

import q_search
import sft
from experiments import clone_answers
from qlass import demonstrations
from qlass.agent import load_agent
from qlass.chat import Chat, Rendering
from qlass.demonstrations import Demonstration, demonstrations_of, read
from qlass.files import meta_of, read_jsonl, write_json
from qlass.messages import State, start
from qlass.policy import QUESTION
from qlass.tiny import AIDS, MARK
from qlass.training import cosine

CHAT = word_chat()
STATE = talk(
    *("walk", "OK", "you stand", "Thought: hm\nAction: left", "Observation: nothing happens", "Action: right"),
    task="find the purse",
)
TEXT = (
    "<user> walk <agent> OK <end> <user> you stand <agent> Thought: hm Action: left <end> "
    "<user> Observation: nothing happens <agent> Action: right <end>"
)
ITS_OWN = [3, 4, *range(9, 14), *range(19, 22)]  # the agent's, in which each turn has its end


def test_the_targets_are_the_agents_words():
    whole = sft.example_of(CHAT, STATE, 100)
    assert CHAT.tokenizer.convert_ids_to_tokens(whole.ids) == TEXT.split()
    assert whole.labels == [token if i in ITS_OWN else sft.NO_TARGET for i, token in enumerate(whole.ids)]
    assert (len(whole), whole.targets, sft.longest_answer(whole)) == (22, 10, 5)
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

    def loss(*labels):
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


def shown(*states):
    return [Demonstration(None, state) for state in states]


def test_every_twentieth_task_is_held_out():
    def played(task):
        return talk("walk", "OK", f"you stand at {task}", "go")

    expert = shown(*(played(i // 2) for i in range(800)))  # two of each task
    learned, held_out = sft.hold_out_tasks(expert)
    assert held_out == [expert[i] for i in range(800) if i // 2 % 20 == 0]
    assert learned == [expert[i] for i in range(800) if i // 2 % 20]
    assert sft.hold_out_tasks(expert[:126]) == (expert[:126], [])  # too few to spare any


def test_validation_by_hand():
    other = State((*STATE.messages[:3], ("assistant", "Action: left")))
    examples = [sft.example_of(CHAT, state, 100) for state in (STATE, other)]
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


SHOWN = (("human", "You are shopping."), ("gpt", "OK"), ("human", "Find a shirt."), ("gpt", "Action: walk"))
ETO = {"id": "webshop_1", "conversations": [{"from": role, "value": text} for role, text in SHOWN]}


def test_a_demonstration_ends_with_the_experts_last_action():
    record = demonstrations.demonstrate(FakeEnv(), "train0")
    assert record.pop("messages")[-1] == {"role": "assistant", "content": "Thought: this way\nAction: right"}
    assert record == {"reward": 1.0, "task": "find the purse", "env": "fake", "task_id": "train0"}


def test_lists_of_others_are_read_with_all_their_fields():
    """A list may begin with an empty line."""
    path = Path("eto.json")
    others = {"task_id": "train2", "reward": 1.0000000000000002, "system": None}
    path.write_text("\n" + json.dumps([ETO | others], indent=1))
    [demonstration] = read(path, FakeEnv())
    assert (demonstration.task_id, demonstration.reward) == ("train2", pytest.approx(1))
    assert demonstration.state.actions == ("Action: walk",)


def test_an_agent_trained_from_a_cloned_one_has_its_demonstrations():
    metadata = {
        "sft": {"inputs": {"expert": "expert.jsonl"}},
        "eto": {"inputs": {"sft": "sft", "expert": "other.jsonl"}},  # it may compare with others
        "grpo": {"inputs": {"sft": "eto"}},
        "few": {"inputs": {"expert": "expert.jsonl"}, "recipe": {"n_expert": 3}},
    }
    for name, meta in metadata.items():
        write_json(Path(f"{name}.meta.json"), meta)
    found = {name: demonstrations_of(Path(name)) for name in metadata}
    expert = Path("expert.jsonl")
    assert found == dict.fromkeys(("sft", "eto", "grpo"), (expert, None)) | {"few": (expert, 3)}


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def clone(agent, fake_world):
    """Runs stage 1 on a copy of the agent, RUN/model; returns the agent's Chat, and the environment that it plays."""
    shutil.copytree(agent, "model", ignore=shutil.ignore_patterns(Rendering.FILE))
    run = "--env frozenlake --run ."

    def command(flags, out="sft", play=""):
        sft.main(over(f"{run} --model model --epochs 1 --out {out}", flags))
        env = FakeEnv()
        return load_agent(Path(out), settings_of(q_search, f"{run} {play}"), env), env

    return command


def test_the_tiny_model_comes_with_its_tokenizer_and_aids(clone):
    agent = clone("--model tiny --batch 1 --n-expert 4 --layers 1 --heads 1")[0]
    assert (agent.model.config.num_hidden_layers, agent.model.config.hidden_size) == (1, 64)
    chat = agent.chat
    assert chat.rendering == Rendering(**AIDS | {"agreement": "OK", "stop": []})
    state = State(STATE.messages[:3], "find the purse")
    state = state.extended("Thought: the purse\nAction: left", "Observation: the purse")
    # The mark and what the byte pairs have joined; no instruction.
    text = f"<user>you stand\nThought: the{MARK} purse\nAction: left<end><user>Observation: the{MARK} purse\n"
    assert chat.tokenizer.decode(chat.prompt(state)) == text
    action = "Thought: a , b ½ .\nAction: click[12.5  two spaces]"
    assert chat.text(chat.action_tokens(action, "x y")) == action


def test_the_first_messages_at_inference_are_those_that_were_cloned(clone):
    """A named model keeps its tokenizer."""
    expert = Path("eto.json")
    expert.write_text("\ufeff" + json.dumps([ETO] * 3))
    policy, env = clone("--expert eto.json")
    fingerprint = meta_of(Path("sft"))["fingerprint"]
    assert fingerprint == pytest.approx(policy.likelihoods([QUESTION])[0], abs=1e-3) and len(set(fingerprint)) == 2
    cloned = read(expert, FakeEnv())[0]
    state = start(env, "train0")
    assert cloned.state.messages[:2] == state.messages[:2] == (("user", "You are shopping."), ("assistant", "OK"))
    _, other = clone("--expert eto.json", play="--env-option=instruction=FILE")
    assert other.instruction == "walk"


@pytest.mark.parametrize("main", [sft.main, clone_answers.main])
def test_a_checkpoint_that_is_cloned_on_takes_first_messages_and_length_from_what_it_learns(main, clone, monkeypatch):
    monkeypatch.setattr(sft, "main", main)
    before = {"instruction": "Swim.", "agreement": "Oh", "max_new_tokens": 3}
    write_json(Path("model", Rendering.FILE), before)
    agent, env = clone("--n-expert 2")
    assert (env.instruction, env.agreement) == ("walk", "OK")
    assert (
        agent.chat.rendering.max_new_tokens == len(agent.chat.action_tokens("Thought: this way\nAction: right", "")) > 3
    )


def test_a_smaller_number_of_demonstrations_is_of_the_first(clone, capsys):
    """Though the file of more of them is complete."""
    clone("--n-expert 9")  # the environment has six tasks
    clone("--n-expert 2", out="two")
    assert "sft: 6 trajectories" in capsys.readouterr().out
    assert meta_of(Path("two"))["tasks"] == ["train0", "train1"]
    clone("--n-expert 2 --overwrite", out="two")
    assert [r["task_id"] for r in read_jsonl(Path("expert.jsonl"))] == FakeEnv().task_ids("train")


def test_each_page_that_a_markov_agent_reads_counts_as_cut(capsys):
    markov = Chat(CHAT.tokenizer, Rendering(markov=True))
    long = State((*STATE.messages[:4], ("user", "you stand at left " * 9), *STATE.messages[1:4]))
    sft.check_demonstrations(shown(long, STATE), markov, 21)
    assert "actions beyond 21 tokens are lost in 1 of 2 demonstrations" in capsys.readouterr().err


# ---------------------------------------------- the environment's answers are cloned too (experiments/clone_answers.py)


def test_the_last_word_of_an_action_predicts_its_answer():
    whole = clone_answers.example_of(CHAT, STATE, 100, [7])
    own = [(i - 1, whole.ids[i]) for i in ITS_OWN]
    answered = [(13, whole.ids[i]) for i in range(14, 19)] + [(21, 7)]
    assert whole.ids == [*sft.example_of(CHAT, STATE, 100).ids, 7]
    assert sorted(whole.labels) == sorted([*own, *answered]) and whole.targets == 10 + 6


def test_the_loss_with_answers_by_hand():
    rows = [(0, 1), (1, 0)], [(2, 1)]  # each row has its own targets
    examples = [clone_answers.Example([0, 1, 0, 1], predictions) for predictions in rows]
    by_hand = math.log(2) - math.log(3 / 4) + math.log(1 + math.exp(-5))
    assert clone_answers.loss_of_answers(ByHand(), examples).item() == pytest.approx(by_hand)
