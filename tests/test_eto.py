"""ETO: which pairs are made, the DPO loss by hand, packed pairs against trajectories one by one, and that it learns."""

import itertools
import math

import pytest
import torch
from fakes import FakeEnv, node, tiny_lm, word_chat
from torch.testing import assert_close

from experiments import eto
from experiments.eto import Preference, dpo_loss, failures, pack_preferences, siblings
from experiments.learning import Learner
from qlass.chat import Rendering
from qlass.demonstrations import Demonstration
from qlass.messages import State, parse_action, react, replay
from qlass.policy import Policy


def moves(*actions, task="train0"):
    return list(replay(FakeEnv(), task, [react("hm", action) for action in actions]))


def trajectory(*actions, reward=0.0, task="train0"):
    """A walk through the fake world as a line of expert.jsonl."""
    state = moves(*actions, task=task)[-1].state
    return {"task_id": task, "env": "fake", "task": state.task, "messages": state.dump()[:-1], "reward": reward}


def decisions(*actions, candidates="free"):
    return eto.decisions(FakeEnv(), Rendering(candidates=candidates), "train0", [react("hm", a) for a in actions])


def test_decisions_are_what_the_agent_wrote_each_in_its_state():
    walk = "left", "right", "left"
    written, chosen = decisions(*walk), decisions(*walk, candidates="valid")
    expected = [(before.state, after.action) for before, after in itertools.pairwise(moves(*walk))]
    assert [(d.state, d.action) for d in written] == [(d.state, d.action) for d in chosen] == expected
    # "hm" is no thought of FakeEnv's.
    assert [set(d.valid) for d in chosen] == [{"Action: left", "Action: right", d.action} for d in chosen]


def test_the_better_trajectory_is_preferred_and_equals_are_no_pair():
    demonstrations = [("a", "right", 1.0), ("b", "left", 0.4), ("c", "left", 0.4)]
    expert = {}
    for task, action, reward in demonstrations:
        line = trajectory(action, reward=reward, task=task)
        expert[task] = Demonstration(task, State.from_messages(line["messages"]), reward)
    earned = [("a", 0.2), ("a", 1.0), ("b", 0.5), ("c", 0.4 - 1e-9)]  # the last as a published file may hold it
    played = [trajectory("left", "right", reward=reward, task=task) for task, reward in earned]
    pairs = list(failures(FakeEnv(), Rendering(), played, expert))
    actions = [[[parse_action(d.action) for d in side] for side in pair] for pair in pairs]
    assert actions == [[["right"], ["left", "right"]], [["left", "right"], ["left"]]]


def tree(*nodes, task="t"):
    messages = trajectory("left")["messages"][:3]
    root = {"nodes": len(nodes) + 1, "task": "find the purse", "messages": messages}
    lines = [node(0, None, task_id=task, q=0.5, q_raw=0.5, **root)]
    for i, (parent, action, q) in enumerate(nodes, 1):
        lines.append(node(i, parent, task_id=task, action=f"Action: {action}", q=q, q_raw=0.5))
    return lines


def test_the_best_sibling_is_preferred_to_each_that_is_worse_by_more_than_the_gap():
    nodes = tree((0, "a", 0.9), (1, "c", 0.3), (1, "d", 1.0), (0, "b", 0.2), (0, "e", 0.88))
    pairs = [(*win, *lose) for win, lose in siblings(FakeEnv(), Rendering(), nodes)]
    assert [(win.action[-1], lose.action[-1]) for win, lose in pairs] == [("a", "b"), ("d", "c")]
    nodes = tree((0, "right", 0.9), (1, "left", 0.1), (1, "right", 0.8), task="train0")
    pairs += [(*win, *lose) for win, lose in siblings(FakeEnv(), Rendering(candidates="valid"), nodes)]
    assert all(win.state == lose.state for win, lose in pairs)
    assert set(pairs[-1][0].valid) == set(pairs[-1][1].valid) == {"Action: left", "Action: right"}


def test_dpo_loss_by_hand():
    logp, reference = torch.tensor([[[-1.0, -2.0], [-3.0, -2.0]], [[-2.0, -2.0], [-2.0, -2.0]]])
    # margins: (-1 + 2) - (-3 + 2) = 2 and 0
    loss = dpo_loss(logp, reference, beta=0.1)
    assert_close(loss, torch.tensor([math.log(1 + math.exp(-0.2)), math.log(2)]))


@pytest.fixture
def pairs():
    walks = [("left", "left"), ("left", "right", "left"), ("right", "right", "right"), ("right", "left")]
    written = [decisions(*walk) for walk in walks]
    return [Preference(written[win], written[lose]) for win, lose in ((2, 0), (1, 0), (2, 3))]


@pytest.mark.parametrize("room", [1, 2048])
def test_packed_pairs_have_the_probabilities_of_trajectories_one_by_one(pairs, room):
    chat = word_chat()
    plain = Policy(tiny_lm(chat), chat)
    packs = pack_preferences(chat, pairs, room)
    assert len(packs) == (len(pairs) if room == 1 else 1)
    sides = torch.cat([pack.logprobs(plain.model) for pack in packs], dim=1).tolist()
    for logprobs, trajectories in zip(sides, zip(*pairs, strict=True), strict=True):
        expected = [sum(plain.likelihood(d.state, d.action) for d in taken) for taken in trajectories]
        assert logprobs == pytest.approx(expected, rel=1e-5)


def test_beta_and_the_reference_are_what_is_trained_with(pairs):
    """The reference is the agent as it was when an iteration began."""
    chat = word_chat()
    begun, once, twice = (tiny_lm(chat) for _ in range(3))
    losses = [
        eto.train(Learner(model, model, chat, 1e-2), pairs, 0, epochs=epochs, batch=16, beta=0.3)["loss"]
        for epochs, model in enumerate((once, twice), 1)
    ]
    (pack,) = pack_preferences(chat, pairs, 2048)
    expected = dpo_loss(pack.logprobs(once), pack.logprobs(begun), 0.3).mean().item()
    assert losses == pytest.approx([math.log(2), expected], abs=1e-5) and expected < math.log(2)
