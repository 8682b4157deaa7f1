"""Stage 4: the packed loss against pairs one by one, the value network, and how well it ranks siblings."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeEnv, gradients, labelled_tree, settings_of, talk, tiny_backbone, word_chat, write

import train_qnet
from docs import own_loss
from qlass.batching import Score
from qlass.files import meta_of
from qlass.pairs import Pair, hold_out_trees, pairs_of, ranking
from qlass.policy import QUESTION
from qlass.training import Training
from train_qnet import QNet, family_loss

TREE = pairs_of(labelled_tree())


def qnet(chat=None, **options):
    chat = chat or word_chat()
    return QNet(tiny_backbone(chat), chat, **{"hidden": 16} | options)


def q(net, pair):
    return net.score([Score(pair.state, (pair.action,))])[0][0]


def test_pairs_have_their_trees_task():
    assert {pair.state.task for pair in TREE} == {FakeEnv.task}


def test_the_loss_by_hand_of_a_pair_and_of_two_siblings():
    net, state = qnet(), talk("walk")
    pair, sibling = Pair(state, "Action: left", 0.25), Pair(state, "Action: right", 1.0)
    ids = net.chat.tokenizer.convert_tokens_to_ids(["<user>", "walk", "<agent>", "Action:", "left", "<end>"])
    v = net(input_ids=torch.tensor([ids]))[0].detach().numpy()
    for loss_on, tokens in (("all", v), ("last", v[5:])):
        assert family_loss(net, [pair], loss_on).item() == pytest.approx(np.mean((tokens - 0.25) ** 2), rel=1e-5)
    a, b = (q(net, one) - one.q for one in (pair, sibling))
    # e - mean(e) is half the difference of two errors, once up and once down
    for beta in (0, 4):
        loss = family_loss(net, [pair, sibling], "last", beta).item()
        assert loss == pytest.approx(a**2 + b**2 + beta * (a - b) ** 2 / 2, rel=1e-4)
    assert family_loss(net, [pair], "last", 4).item() == pytest.approx(a**2, rel=1e-4)  # an only child has no rank


def test_a_loss_of_ones_own_by_hand():
    net, config = qnet(), settings_of(own_loss, "--preset paper --delta 0.1 --plain")
    by_hand = 0.0
    for pair in TREE:
        errors = (net.values(pair.state, pair.action) - pair.q).abs()
        by_hand += torch.where(errors < 0.1, errors.square() / 2, 0.1 * (errors - 0.05)).mean().item()
    loss = own_loss.huber(net, train_qnet.packs_of(net.chat, TREE, config), config)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("rank_weight", [0, 4])
@pytest.mark.parametrize("max_tokens", [10_000, 45, 1])  # one tree, several packs, a pair or family each
@pytest.mark.parametrize("loss_on", ["all", "last"])
@pytest.mark.parametrize(("stage", "loss_of"), [(train_qnet, train_qnet.pack_loss), (own_loss, own_loss.huber)])
def test_packs_have_the_loss_and_gradients_of_the_pairs_one_by_one(
    stage, loss_of, loss_on, max_tokens, rank_weight, monkeypatch
):
    monkeypatch.setattr("qlass.fast.attention.BLOCK", 7)  # several of them in a pack
    flags = f"--preset paper --loss-on {loss_on} --max-tokens {max_tokens} --rank-weight {rank_weight}"
    config, net = settings_of(stage, flags), qnet().double()
    pairs, losses = [], []
    for one in (config, replace(config, plain=True)):
        packs = train_qnet.packs_of(net.chat, TREE, one)
        assert (len(packs) == 1) == (max_tokens == 10_000 and not one.plain)
        pairs.append([pair for pack in packs for family in pack.families for pair in family])
        losses.append(loss_of(net, packs, one).double())
    assert pairs[0] == pairs[1]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    torch.testing.assert_close(*(gradients(net, loss) for loss in losses), rtol=1e-4, atol=1e-6)


TREES = [pairs_of(labelled_tree(f"train{i}")) for i in range(5)]


def trained(net, trees, held_out=(), **more):
    """Train a QNet on trees: the figures."""
    flags = "--preset paper --epochs 2 --batch 4 --lr 1e-3 --max-tokens 2048"
    config = replace(settings_of(train_qnet, flags), **more)
    training = Training(Path(tempfile.mkdtemp(dir=".")) / "qnet", config, {}, {})
    train_qnet.train(net, trees, held_out, config, training)
    training.load_best()
    return training.finish(lambda draft: draft.mkdir() or [], [])


STATE = talk("you stand at start")
FOUR = [Pair(STATE, f"Action: {a}", q) for a, q in {"left": 0.0, "right": 1.0, "walk": 0.3, "find": 0.7}.items()]


def test_four_samples_are_learned_by_heart():
    net = qnet(hidden=64)
    figures = trained(net, [FOUR], epochs=100, lr=3e-3, loss_on="last")
    scores = net.score([Score(STATE, tuple(p.action for p in FOUR))])[0]
    assert scores == pytest.approx([p.q for p in FOUR], abs=0.1)
    assert figures["steps"] == 100


@pytest.mark.parametrize("packs", [{"max_tokens": 1}, {"batch": 10_000}])  # of a family each, of a tree each
def test_a_training_in_packs_is_the_plain_one_whatever_a_portion_holds(packs):
    nets, losses = [], []
    for more in ({}, {"plain": True, "micro_tokens": 1}):
        nets.append(qnet(hidden=8))
        figures = trained(nets[-1], TREES, TREES, rank_weight=4.0, **packs | more)
        losses += [[loss for entry in figures["curve"] for loss in (entry["loss"], entry["held_out"]["mse"])]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    torch.testing.assert_close(*([*net.parameters()] for net in nets), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(("rank_weight", "pairs", "best"), [(0.0, 9, 1), (4.0, 9, 2), (4.0, 0, 1)])
def test_with_a_rank_weight_the_error_within_states_chooses_the_epoch(rank_weight, pairs, best, monkeypatch):
    """Where no held-out state has siblings, the whole error does."""
    errors = iter([{"mse": 0.1, "within_mse": 0.2}, {"mse": 0.2, "within_mse": 0.1}])
    some = {"sibling_accuracy": 0.5, "sibling_pairs": pairs}
    monkeypatch.setattr(train_qnet, "ranking", lambda score, trees: next(errors) | some)
    figures = trained(qnet(hidden=8), TREES, TREES, rank_weight=rank_weight)
    assert figures["best_epoch"] == best


def test_the_head_has_a_learning_rate_of_its_own():
    net = qnet(hidden=8)
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    trained(net, [FOUR], epochs=1, head_lr=0.0)
    moved = {name.partition(".")[0] for name, weight in net.state_dict().items() if not weight.equal(before[name])}
    assert moved == {"backbone"}


def sibling_accuracy(trees, scores):
    ranks = ranking(lambda requests: [[scores[r.state, action] for action in r.actions] for r in requests], trees)
    return {name: ranks[name] for name in ("sibling_accuracy", "sibling_pairs")}


def test_sibling_accuracy_by_hand():
    other = talk("walk")
    tree = [*FOUR, Pair(other, "Action: left", 0.5), Pair(other, "Action: right", 0.52)]
    scores = {(p.state, p.action): s for p, s in zip(tree, (0.2, 0.4, 0.4, 0.1, 9.0, 8.0), strict=True)}
    # q: left 0, right 1, walk .3, find .7; scores .2 .4 .4 .1. right > left, walk > left: right; right = walk: half;
    # find < left, find < walk: wrong; find < right: right. The last two differ by too little to count.
    assert sibling_accuracy([tree], scores) == {"sibling_accuracy": 3.5 / 6, "sibling_pairs": 6}
    perfect = {(p.state, p.action): p.q for p in tree}
    for some, others, right in ((tree, perfect, 1), (tree[:1], scores, None), (tree, dict.fromkeys(scores, 0.5), 0.5)):
        assert sibling_accuracy([some], others)["sibling_accuracy"] == right


@pytest.fixture
def train(agent):
    """Runs a command on three trees, in the folder of the test."""
    write("q_labels.jsonl", [node for i in range(3) for node in labelled_tree(f"train{i}")])
    flags = f"--env frozenlake --preset paper --run . --sft {agent} --epochs 1 --hidden 8"
    return lambda stage, more="": stage.main(f"{flags} {more}".split())


def test_a_loss_of_ones_own_trains_by_its_own_command(train):
    train(train_qnet)
    train(own_loss, "--delta 0.1 --out qnet-huber")
    assert Path("qnet/head.safetensors").read_bytes() != Path("qnet-huber/head.safetensors").read_bytes()


def test_the_command_says_what_it_has_trained_and_shows_how_far_packing_is(train, capsys):
    train(train_qnet)
    net, meta = QNet.from_pretrained(Path("qnet")), meta_of(Path("qnet"))
    assert "packs of trees: 100%" in capsys.readouterr().err
    assert (net.head[0].out_features, meta["trees"]) == (8, 3) and meta["tokens"] > 0
    figures = sibling_accuracy([TREE], {(p.state, p.action): q(net, p) for p in TREE})  # of what was saved
    held_out = {name: meta["held_out"][name] for name in figures}
    assert held_out == pytest.approx(figures, rel=1e-4) and figures["sibling_pairs"]
    first = [q(net, pair) for pair in TREE[:10]]  # beside the question, pairs of the first tree
    (question,) = net.score([QUESTION])
    assert meta["fingerprint"] == pytest.approx([*question, *first], abs=1e-4) and len(set(question)) == 2


def test_the_head_is_in_full_width_where_the_backbone_is_not():
    with torch.autocast("cpu", torch.bfloat16):
        values = qnet().values(TREE[0].state, TREE[0].action)
    assert not torch.equal(values, values.bfloat16().float())


def test_every_tenth_tree_is_held_out():
    training, held_out = hold_out_trees([[number] for number in range(21)])
    assert held_out == [[0], [10], [20]] and len(training) == 18
    for trees in ([["alone"]], [["alone"], [], []]):
        assert hold_out_trees(trees) == (trees, [["alone"]])
