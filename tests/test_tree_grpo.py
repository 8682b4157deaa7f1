"""Tree-GRPO and turn-level PPO: how forests grow, what turns are worth, packed training against the plain form."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from fakes import (
    FIRST,
    WORLD,
    FakeEnv,
    Script,
    gradients,
    log_pi,
    path_of,
    run,
    say,
    talk,
    tiny_backbone,
    tiny_lm,
    tree_by_hand,
    word_chat,
    write,
)
from torch.testing import assert_close

from bellman import label
from experiments import ppo, tree_grpo
from experiments.decisions import Decision, pack_decisions
from experiments.learning import Learner
from experiments.targets import avg
from experiments.tree_grpo import Trajectory, advantages, batches, forest
from qlass.batching import Sample, drive
from qlass.chat import Rendering
from qlass.fast.decode import FastPolicy
from train_qnet import QNet

WALKS = {(): "left right right", ("right",): "left right", ("left",): "right left"}


def grow(M, N, L, key=("k",), script=None):
    """A forest, the requests for it, and the environment that it was played in."""
    env = FakeEnv()
    growing = forest(env, "train0", M, N, L, Rendering(candidates="valid"), key)
    group, requests = run(growing, script or Script(WALKS, "right left"))
    return group, requests, env


def word(action):
    return action.split()[-1]


@pytest.mark.parametrize(("M", "N", "L"), [(4, 2, 0), (1, 2, 1), (2, 2, 1), (3, 1, 4)])
def test_leaves_their_number_and_each_edge_played_once(M, N, L):
    group, requests, env = grow(M, N, L)
    trees = np.repeat(range(M), N * L + 1)
    assert [trajectory.tree for trajectory in group] == trees.tolist()
    assert len(env.played) == len(requests) == tree_grpo.env_steps(group)
    assert len({request.key for request in requests}) == len(requests)  # no noise is used twice
    assert {request.temperature for request in requests} == {1.0}  # the distribution that is trained
    for trajectory in group:
        here, path = WORLD, ()
        for decision in trajectory.decisions:
            assert (path_of(decision.state), set(map(word, decision.valid))) == (path, set(here))
            path += (word(decision.action),)
            here = here[path[-1]]
        assert trajectory.reward == here  # a leaf earns what its path pays


def test_the_drawn_nodes_are_the_root_and_what_is_no_leaf():
    starts = Counter()
    for i in range(300):
        (first, second), _, _ = grow(1, 1, 1, key=(i,), script=Script({}, "right"))
        both = zip(first.decisions, second.decisions, strict=True)
        starts[sum(a is b for a, b in both)] += 1
    assert set(starts) == {0, 1, 2} and min(starts.values()) > 70  # root, right, right right: a third each


def trajectory(reward, *observations, tree=0):
    decisions = []
    for observation in observations:
        decisions.append(Decision(talk(observation), "go"))
    return Trajectory(tuple(decisions), reward, tree)


def trees_of(rewards):
    return [trajectory(reward, "start", tree=i) for i, tree in enumerate(rewards) for reward in tree]


def test_advantages_by_hand():
    trees = trees_of([[1.0, 0.0, 0.5], [0.5, 0.5, 0.5]])
    # All six: mean .5, squares .25 + .25, unbiased variance .1. First tree: mean .5, std .5. Second tree: flat.
    inter = np.array([0.5, -0.5, 0, 0, 0, 0]) / 0.1**0.5
    intra = np.array([1, -1, 0, 0, 0, 0])
    for kind, expected in (("inter", inter), ("intra", intra), ("both", inter + intra)):
        A = np.concatenate(advantages(trees, kind))
        np.testing.assert_allclose(A, expected, atol=1e-4)
    chains = advantages(trees_of([[1.0], [0.0]]))  # chain GRPO: no tree compares anything
    np.testing.assert_allclose(np.concatenate(chains), [0.5**0.5, -(0.5**0.5)], atol=1e-5)


@pytest.mark.parametrize("std", [True, False])
def test_gigpos_second_group_are_discounted_visits_to_an_equal_observation(std):
    group = [trajectory(1.0, "start", "hall"), trajectory(0.8, "start", "cave", "hall"), trajectory(0.5, "x")]
    both = np.concatenate(advantages(group, "states", 0.5, std))
    inter = np.concatenate(advantages(group, "inter", 0.5, std))
    # start: 1 in two steps, .8 in three: .5 and .2, mean .35; hall: 1 and .8, mean .9; cave and x stand alone
    start, hall = 0.15, 0.1
    if std:  # of two values the unbiased std is sqrt 2 half the gap
        start = hall = 0.5**0.5
    np.testing.assert_allclose(both - inter, [start, hall, -start, 0, -hall, 0], atol=1e-4)
    if not std:  # rewards of 1, .8 and .5 have the mean 23/30; for those with std see test_advantages_by_hand
        np.testing.assert_allclose(inter, np.repeat([7, 1, -8], [2, 3, 1]) / 30, atol=1e-4)


def plain_choices(model, chat, decision):
    """(log-probability, entropy) of each choice of a decision, by a forward pass a sequence and position."""
    prompt, taken = chat.prompt(decision.state), chat.action_tokens(decision.action, decision.state.task)

    def next_token(written):
        return model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, -1].log_softmax(-1)

    if not decision.valid:
        for i, token in enumerate(taken):
            logp = next_token(taken[:i])
            yield logp[token], -(logp.exp() * logp).sum()
        return
    texts = [chat.action_tokens(text, decision.state.task) for text in decision.valid]
    every = torch.stack([log_pi(next_token, ids, texts) for ids in texts])
    yield every[texts.index(taken)], -(every.exp() * every).sum()


@pytest.fixture(params=["valid", "free"])
def world(request):
    chat = word_chat(candidates=request.param, temperature=1.0, max_new_tokens=7)
    # Weights small enough that all actions are drawn.
    model, old, reference = (tiny_lm(chat, seed, initializer_range=0.15) for seed in range(3))
    answer = FastPolicy(old, chat, seed=1).sample
    if request.param == "free":  # words at random reach no purse: what matters here is that rewards differ
        texts = itertools.cycle(["left", "right", "find", "right", "left"])
        answer = lambda requests: [say(next(texts)) for _ in requests]  # noqa: E731
    growing = (forest(FakeEnv(), f"train{i}", 2, 2, 1, chat.rendering, (i,)) for i in range(2))
    groups = []
    for group in drive(growing, {Sample: answer}):
        groups.append([])
        for i, t in enumerate(group):
            groups[-1].append(dataclasses.replace(t, reward=t.reward + 0.1 * (i % 3)))
    return chat, model, old, reference, groups


@pytest.mark.parametrize("room", [5, 2048])
def test_packed_training_has_the_loss_and_the_gradient_of_the_plain_form(world, room):
    chat, model, old, reference, groups = world
    kl, bonus, losses = 0.3, 0.2, []
    for group in groups:  # every trajectory, every step, every advantage by itself
        for trajectory, steps in zip(group, advantages(group), strict=True):
            for decision, a in zip(trajectory.decisions, steps, strict=True):
                three = [plain_choices(m, chat, decision) for m in (model, old, reference)]
                for (logp, entropy), (before, _), (anchor, _) in zip(*three, strict=True):
                    ratio = (logp - before).exp()
                    surrogate = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
                    if a < 0:
                        surrogate = surrogate.clamp(max=-3 * a)
                    d = anchor - logp
                    losses.append(surrogate + kl * (d.exp() - d - 1).clamp(max=10) - bonus * entropy)
    plain = torch.stack(losses).mean()

    learner = Learner(model, reference, chat, 1e-3)
    learner.room = room
    packs = batches(learner, groups, list(map(advantages, groups)))
    packed = torch.zeros(())
    for batch in packs:
        batch.old, _ = batch.choices.logprobs(old)
        packed += tree_grpo.policy_loss(*batch.choices.logprobs(model), batch, kl, bonus) / len(losses)
    assert (len(packs) > 1) == (room == 5)
    assert sum(float(batch.visits.sum()) for batch in packs) == len(losses)
    assert packed.item() == pytest.approx(plain.item(), abs=1e-5)
    assert_close(gradients(model, packed), gradients(model, plain), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(("limit", "valid"), [(4, ()), (200, ()), (200, ("Action: left", "Action: right", "hm"))])
def test_probabilities_are_those_of_the_tokens_that_were_sampled(limit, valid):
    """Free text cut short lacks the token that ends the turn, and special tokens are not in its text."""
    chat = word_chat(max_new_tokens=limit)
    model = tiny_lm(chat, initializer_range=0.05)
    (drawn,) = FastPolicy(model, chat).sample([Sample(FIRST, 20, ("k",), 1.0, valid)])
    (p,) = pack_decisions(chat, [Decision(FIRST, c.text, valid, c.ids) for c in drawn], 10**6)
    logp, _ = p.logprobs(model)
    total = torch.zeros(20).index_add(0, torch.tensor(p.owner), logp)
    np.testing.assert_allclose(total.tolist(), [c.logprob for c in drawn], rtol=1e-4)
    assert len(set(total.tolist())) > 1
    assert valid or any(
        len(c.ids) != len(chat.action_tokens(c.text, "find")) for c in drawn
    )  # read anew they would be others


# -------------------------------------------------------------------------------------- PPO and its critic, by turns


def test_advantages_of_turns_by_hand():
    """A step with one valid action is no turn."""
    values = {talk(page): v for page, v in zip("abcd", (0.5, 9.0, 0.2, 0.4), strict=True)}
    decisions = [Decision(state, "left", ("left", "right") if v < 1 else ("left",)) for state, v in values.items()]
    (A,) = ppo.advantages([Trajectory(tuple(decisions), 1.0)], values, gamma=0.5, lam=0.8)
    third = 1 - 0.4
    second = 0.5 * 0.4 - 0.2 + 0.4 * third
    np.testing.assert_allclose(A, [0.5 * 0.2 - 0.5 + 0.4 * second, np.nan, second, third])
    ((white,),) = ppo.whitened([[A]])
    turns = white[[0, 2, 3]]
    assert white[1] == 0 and (turns.mean(), turns.std()) == pytest.approx((0, 1), abs=1e-4)


def test_the_critics_loss_by_hand():
    """Within the clip; beyond it V would count as .6; away from the target V itself is worse than .2."""
    losses = ppo.value_loss(torch.tensor([0.5, 0.9, 0.1]), torch.full((3,), 0.4), torch.ones(3))
    assert_close(losses, torch.tensor([0.5**2, 0.4**2, 0.9**2]) / 2)


def test_packed_values_and_their_gradient_are_those_of_turns_one_by_one(world):
    chat, model, _, _, groups = world
    critic = QNet(tiny_backbone(chat, 1), chat, hidden=16).train()
    learner = Learner(model, model, chat, 1e-3)
    learner.room = 20
    values = ppo.values_of(critic, chat, groups, learner.room)

    def plain(state):
        return critic(input_ids=torch.tensor([chat.prompt(state)]), use_cache=False)[0, -1]

    assert values == pytest.approx({state: plain(state).item() for state in values}, abs=1e-5)
    A = [[steps + 0.3 for steps in ppo.advantages(group, values, 0.9, 0.8)] for group in groups]
    losses = []
    for t, steps in zip(itertools.chain(*groups), itertools.chain(*A), strict=True):
        for decision, a in zip(t.decisions, steps, strict=True):
            v = torch.tensor(values[decision.state])
            losses.append(ppo.value_loss(plain(decision.state), v, v + a))
    expected = gradients(critic, torch.stack(losses).mean())
    minibatch = batches(learner, groups, ppo.whitened(A))
    ppo.criticise(critic, minibatch, ppo.returns(groups, A, values))
    assert_close(tuple(p.grad for p in critic.parameters()), expected, atol=1e-5, rtol=1e-3)


def test_the_critic_begins_with_the_mean_reward_below_a_state(tmp_path):
    chat = word_chat(candidates="valid", temperature=1.0)
    labels = tmp_path / "labels.jsonl"
    other = [n | {"task_id": "u", "reward": 0.0} for n in tree_by_hand()]  # of the same states
    lines = [node for tree in (tree_by_hand(), other) for node in label(tree, avg(tree, 0.9))]
    write(labels, lines)
    critic = QNet(tiny_backbone(chat), chat, hidden=32).train()
    learner = Learner(tiny_lm(chat), None, chat, 1e-3)
    learner.optimizer.add_param_group({"params": [*critic.parameters()], "peak": 3e-3})
    for _ in range(60):
        tokens = ppo.warm_up(learner, critic, labels, 200)
    ((tree, rewards),) = ppo.labelled_states(chat, labels, 10**6)
    assert tokens == 3 * len(tree)  # a state that comes again is read once
    V = ppo.state_values(critic, tree, torch.tensor(list(rewards)))
    assert V.tolist() == pytest.approx([1.7 / 3 / 2, 0.75 / 2], abs=0.06)
