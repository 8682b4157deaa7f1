import json

import pytest

import envs
from bellman import label
from experiments import bench
from qlass.policy import Policy
from qlass.qnet import QNet, pairs_of


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop", max_steps=3)


@pytest.mark.parametrize(("candidates", "n"), [("free", 3), ("valid", 1)])
def test_both_ways_grow_the_same_trees(shop, candidates, n):
    model, chat = bench.random_agent(shop, candidates)
    chat.rendering.max_new_tokens = 6
    tasks = shop.task_ids("train")[:n]
    plain = bench.grow(lambda: bench.Replayed(shop.fork()), tasks, bench.OneByOne(model, chat), 1)
    assert bench.grow(shop.fork, tasks, Policy(model, chat), 64) == plain
    assert any(node["source"] == "policy" and node["depth"] == 3 for tree in plain for node in tree)


def test_an_environment_without_snapshots_gets_back_by_playing(shop):
    env = bench.Replayed(shop.fork())
    env.reset({"task_id": "0"})
    before = env.snapshot()
    page, *_ = env.step(env.valid_actions()[0])
    after = env.snapshot()
    env.step("click[back to search]")
    env.restore(before)
    assert env.step(env.valid_actions()[0])[0] == page and env.snapshot() == after
    env.reset({"task_id": "1"})
    env.restore(after)
    assert shop.shop.text(env.session, env.index) == page


def test_both_ways_train_alike(shop):
    model, chat = bench.random_agent(shop, "valid")
    trees = bench.grow(shop.fork, shop.task_ids("train")[:3], Policy(model, chat), 64)  # more than one pack
    for tree in trees:
        for node, reward in zip(tree, [0.1, 0.7, 0.3] * len(tree), strict=False):
            node["reward"] = reward
    net, pairs = QNet(model.model, chat).train(), [pair for tree in trees for pair in pairs_of(label(tree, "q", 0.9))]
    done = []
    for way in (bench.one_pair_at_a_time, bench.packed_trees):
        net.zero_grad()
        done.append((*way(net, pairs), [p.grad.clone() for p in net.parameters()]))
    (plain, plain_tokens, plain_grads), (ours, tokens, grads) = done
    assert ours == pytest.approx(plain, rel=1e-4) and 1024 < tokens < plain_tokens / 2
    for a, b in zip(plain_grads, grads, strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-3


def test_a_walk_tells_what_each_step_does():
    games = envs.make("alfworld").games
    game = games.load(games.ids("valid_seen")[0])
    commands = bench.random_walk(game, 8, bench.random.Random(1))
    told = bench.walk(game, commands)
    assert len(commands) == len(told) == 8
    assert all(command in allowed for command, (_, allowed) in zip(commands[1:], told, strict=False))
    assert not any(feedback == "Nothing happens." for feedback, _ in told)


def test_games_are_loaded_and_played():
    loaded, played = bench.alfworld(None, n=3, plain=1, steps=2)
    assert loaded.ours > 0 and played.ours > 0 and "bundled" in loaded.name


def test_textworld_walks_alike():
    pytest.importorskip("textworld")
    games = envs.make("alfworld").games
    task = games.ids("valid_seen")[0]
    commands = bench.random_walk(games.load(task), 8, bench.random.Random(1))
    assert bench.walk(bench.TextWorldGame(games.path(task)), commands) == bench.walk(games.load(task), commands)


def test_ratios_are_more_a_second_or_less_of_it(capsys):
    assert bench.Figure("", 50, 20_000, "steps/s").ratio == 400 and bench.Figure("", 8, 2, "s").ratio == 4
    assert bench.Figure("", None, 3, "steps/s").ratio is None
    print(bench.row(bench.Figure("WebShop", None, 20_000, "steps/s")))
    print(bench.row(bench.Figure("trees", 10, 90, "nodes/s", goal=8)))
    alone, both = capsys.readouterr().out.splitlines()
    assert alone.split() == ["WebShop", "2e+04", "steps/s"]
    assert both.split() == ["trees", "10", "->", "90", "nodes/s", "9.0x", "(goal:", "8x)"]


def test_json(monkeypatch, capsys):
    monkeypatch.setattr(bench, "webshop", lambda data: [bench.Figure("shop", 50.0, 500.0, "steps/s", 100)])
    bench.main(["--json", "--only", "webshop"])
    (figure,) = json.loads(capsys.readouterr().out)
    assert figure == {"name": "shop", "plain": 50, "ours": 500, "ratio": 10, "goal": 100, "unit": "steps/s"}
