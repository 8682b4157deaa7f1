"""The bundled catalogue (data/make_webshop.py) and the players that shop in it and in the real one."""

import json
import os
import random
from pathlib import Path
from statistics import mean

import pytest

import envs
from data import make_webshop
from environments.webshop import engine as webshop

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("QLASS_SHARED", ROOT.parent / "shared")) / "webshop"
recorded = pytest.mark.skipif(not SHARED.is_dir(), reason="the real catalogue is not here")


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop")


def some(env, n, split="all"):
    ids = env.task_ids(split)
    return random.Random(0).sample(ids, min(n, len(ids)))


def play(env, task, player):
    """[(action, reward)] of an episode by the expert, the oracle or the rule of this name."""
    env.reset(options={"task_id": task})
    steps = []
    for thought, action in getattr(env, player)(task) if player in ("expert", "oracle") else env.rules()[player]():
        if player == "expert":
            assert (thought, action) in env.candidates(), "a demonstration must be what `--candidates valid` offers"
        _, reward, done, truncated, _ = env.step(action)
        steps.append((action, reward))
        if done or truncated:
            break
    return steps


def test_catalogue():
    first, again, other = (json.dumps(make_webshop.catalogue(seed, 120)) for seed in (3, 3, 4))
    assert first == again != other
    files = make_webshop.catalogue()
    items, records = files["items_shuffle.json"], files["items_ins_v2.json"]
    assert len({item["asin"] for item in items}) == len(items) == len(records) >= 1000
    kinds = {item["asin"]: item["query"] for item in items}
    wanted = {asin: record for asin, record in records.items() if "instruction" in record}
    goals = {(kinds[asin], *sorted(record["instruction_attributes"])) for asin, record in wanted.items()}
    assert len(goals) == len(wanted) >= 600, "no two products share what is asked for"


REAL = {"data": SHARED, "title_nouns": SHARED / "title_nouns_standin.json.gz"}


def test_the_demonstrator_reads_and_no_rule_comes_near_it(shop):
    tasks = shop.task_ids("val")[:80]
    for task in tasks:
        steps = play(shop, task, "expert")
        assert steps[-1] == ("click[buy now]", 1.0) and ("click[features]", 0.0) in steps and len(steps) <= 15
    for name in shop.rules():
        assert 0.3 < mean([play(shop, task, name)[-1][1] for task in tasks]) < 0.6


@pytest.mark.parametrize(
    ("options", "least"),
    [({"human_goals": True}, 0.99), pytest.param(REAL, 0.85, marks=recorded)],
    ids=["human", "real"],
)
def test_the_demonstrator_on_other_goals(options, least):
    env = envs.make("webshop", **options)
    assert mean([play(env, task, "expert")[-1][1] for task in env.task_ids("val")[:100]]) >= least


@pytest.mark.parametrize("options", [{}, pytest.param(REAL, marks=recorded)], ids=["bundled", "real"])
def test_only_the_oracle_acts_on_the_hidden_goal(options):
    """The same sentence and the same pages, with another product, other attributes and options behind them."""
    env, other = envs.make("webshop", **options), envs.make("webshop", **options)
    folder = options.get("data") or make_webshop.ensure(0)
    other.shop = webshop.Shop(folder, title_nouns=options.get("title_nouns"), page_size=env.shop.page_size)
    players = ["oracle", "expert", *env.rules()]
    tasks, same = some(env, 30), dict.fromkeys(players, 0)
    hidden = [dict(goal) for goal in other.shop.goals]
    for task, stranger in zip(tasks, reversed(tasks), strict=True):
        sentence = {"instruction_text": env.shop.goals[int(task)]["instruction_text"]}
        other.shop.goals[int(task)] = hidden[int(stranger)] | sentence
    for task in tasks:
        for player in players:
            actions, others = ([action for action, _ in play(e, task, player)] for e in (env, other))
            same[player] += actions == others
    assert same.pop("oracle") < len(tasks) and set(same.values()) == {len(tasks)}


@pytest.mark.parametrize("options", [{"max_steps": 3}, {"max_steps": 4}, {"max_steps": None}])
def test_oracle_takes_what_pays_best_within_its_steps(options):
    """n steps buy the right product with n - 3 of its options."""
    env = envs.make("webshop", **options)
    for task in some(env, 40):
        steps, values = play(env, task, "oracle"), len(env.goal["goal_options"])
        clicked = min(values, (options.get("max_steps") or 9) - 3)
        assert steps[-1][1] == pytest.approx((4 + clicked) / (4 + values)) and len(steps) == 3 + clicked
