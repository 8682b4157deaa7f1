"""Turn-level PPO: advantages by hand, and the critic against the plain way."""

import itertools

import numpy as np
import pytest
import torch
from fakes import FakeEnv, dump, tiny_backbone, tiny_lm, word_chat
from test_bellman import tree_by_hand
from torch.testing import assert_close

from bellman import label
from experiments import ppo
from experiments.decisions import Decision
from experiments.learning import Learner
from experiments.ppo import advantages, criticise, gae, returns, state_values, value_loss, values_of, warm_up, whitened
from experiments.tree_grpo import Trajectory, batches, forest
from qlass.batching import Sample, drive
from qlass.fast.decode import FastPolicy
from qlass.messages import State
from train_qnet import QNet

VALID = ("Action: left", "Action: right")


def trajectory(reward, *observations, forced=()):
    """A walk to the left through these pages; in the `forced` ones there is one valid action."""
    state, decisions = State((("user", "walk"),), "find"), []
    for t, observation in enumerate(observations):
        state = State((*state.messages, ("user", observation)), "find")
        decisions.append(Decision(state, VALID[0], VALID[: 1 if t in forced else 2]))
        state = State((*state.messages, ("assistant", VALID[0])), "find")
    return Trajectory(tuple(decisions), reward)


def test_advantages_and_the_critics_loss_by_hand():
    # A_3 = 1 - .4; A_2 = .5 x .4 - .2 + .25 A_3; A_1 = .5 x .2 - .5 + .25 A_2
    np.testing.assert_allclose(gae([0.5, 0.2, 0.4], 1.0, 0.5, 0.5), [-0.3625, 0.15, 0.6])
    np.testing.assert_allclose(gae([0.5, 0.2, 0.4], 1.0, 1.0, 1.0), [0.5, 0.8, 0.6])  # R - V
    np.testing.assert_allclose(gae([0.5, 0.2, 0.4], 1.0, 0.9, 0.0), [0.9 * 0.2 - 0.5, 0.9 * 0.4 - 0.2, 0.6])
    V, old, target = torch.tensor([0.5, 0.9, 0.1]), torch.tensor([0.4, 0.4, 0.4]), torch.tensor([1.0, 1.0, 1.0])
    # within the clip; beyond it V would count as .6; away from the target V itself is worse than .2
    assert_close(value_loss(V, old, target), torch.tensor([0.5**2, 0.4**2, 0.9**2]) / 2)


def test_forced_steps_are_no_turns():
    short, long = trajectory(1.0, "start", "left"), trajectory(1.0, "start", "walk", "left", forced=[1])
    values = {decision.state: 0.5 for t in (short, long) for decision in t.decisions if not decision.forced}
    (a,), (b,) = (advantages([t], values, 0.9, 0.8) for t in (short, long))
    assert a.tolist() == b[[0, 2]].tolist() and np.isnan(b[1])
    ((white,),) = whitened([[b]])
    assert white[1] == 0 and white[[0, 2]] == pytest.approx([-1, 1], abs=1e-4)


@pytest.mark.parametrize("candidates", ["valid", "free"])
def test_packed_values_and_their_gradient_are_those_of_turns_one_by_one(candidates):
    chat = word_chat(candidates=candidates, temperature=1.0, max_new_tokens=4)
    model = tiny_lm(chat, initializer_range=0.15)
    growing = (forest(FakeEnv(), f"train{i}", 3, 0, 0, chat.rendering, (i,)) for i in range(2))
    groups = list(drive(growing, {Sample: FastPolicy(model, chat).sample}))
    critic = QNet(tiny_backbone(chat, 1), chat, hidden=16).train()
    learner = Learner(model, model, chat, 1e-3)
    learner.room = 20
    values = values_of(critic, chat, groups, learner.room)

    def plain(state):
        return critic(input_ids=torch.tensor([chat.prompt(state)]), use_cache=False)[0, -1]

    assert values == pytest.approx({state: plain(state).item() for state in values}, abs=1e-5)
    A = [[steps + 0.3 for steps in advantages(group, values, 0.9, 0.8)] for group in groups]
    losses = []
    for t, steps in zip(itertools.chain(*groups), itertools.chain(*A), strict=True):
        for decision, a in zip(t.decisions, steps, strict=True):
            v = torch.tensor(values[decision.state])
            losses.append(value_loss(plain(decision.state), v, v + a))
    torch.stack(losses).mean().backward()
    expected = [p.grad.clone() for p in critic.parameters()]
    critic.zero_grad()
    criticise(critic, batches(learner, groups, whitened(A)), returns(groups, A, values))
    assert_close([p.grad for p in critic.parameters()], expected, atol=1e-5, rtol=1e-3)


def test_the_critic_begins_with_the_mean_reward_below_a_state(tmp_path):
    chat, labels = word_chat(candidates="valid", temperature=1.0), tmp_path / "labels.jsonl"
    other = [n | {"task_id": "u", "reward": 0.0} for n in tree_by_hand()]  # of the same states
    labels.write_text(dump([*label(tree_by_hand(), "avg", 0.9), *label(other, "avg", 0.9)]))
    critic = QNet(tiny_backbone(chat), chat, hidden=32).train()
    learner = Learner(tiny_lm(chat), None, chat, 1e-3)
    learner.optimizer.add_param_group({"params": [*critic.parameters()], "peak": 3e-3})
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    for _ in range(60):
        tokens = warm_up(learner, critic, labels, 200)
    ((tree, rewards),) = ppo.labelled_states(chat, labels, 10**6)
    assert tokens == 3 * len(tree)  # a state that comes again is read once
    means = torch.tensor([1.7 / 3, 0.75]) / 2
    assert_close(state_values(critic, tree, torch.tensor(list(rewards))), means, atol=0.06, rtol=0)
    assert all(torch.equal(before[name], p) for name, p in learner.model.named_parameters())
