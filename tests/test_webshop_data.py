"""The bundled catalogue (data/make_webshop.py) and the players that shop in it and in the real one."""

import random
from statistics import mean

import pytest
from test_webshop import SHARED, recorded

import envs
from data import make_webshop
from environments.webshop import engine as webshop


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop")


def play(env, task, player):
    """[(action, reward)] of an episode by the expert, the oracle or the rule of this name."""
    env.reset(options={"task_id": task})
    steps, rules = [], env.rules()
    for thought, action in rules[player]() if player in rules else getattr(env, player)(task):
        if player == "expert":
            assert (thought, action) in env.candidates(), "a demonstration must be what `--candidates valid` offers"
        _, reward, done, truncated, _ = env.step(action)
        steps.append((action, reward))
        if done or truncated:
            break
    return steps


def test_catalogue():
    items, records = (make_webshop.catalogue()[f"items_{name}.json"] for name in ("shuffle", "ins_v2"))
    kinds = {item["asin"]: item["query"] for item in items}
    assert len(kinds) == len(items) == len(records) >= 1000
    wanted = {asin: record["instruction_attributes"] for asin, record in records.items() if "instruction" in record}
    goals = {(kinds[asin], *sorted(attributes)) for asin, attributes in wanted.items()}
    assert len(goals) == len(wanted) >= 600, "no two products share what is asked for"


REAL = {"data": SHARED, "title_nouns": SHARED / "title_nouns_standin.json.gz"}


def test_the_demonstrator_reads_and_no_rule_comes_near_it(shop):
    tasks = shop.task_ids("val")[:80]
    for task in tasks:
        steps = play(shop, task, "expert")
        assert steps[-1] == ("click[buy now]", 1.0) and ("click[features]", 0.0) in steps and len(steps) <= 15
    for name in shop.rules():
        assert 0.3 < mean([play(shop, task, name)[-1][1] for task in tasks]) < 0.6


@pytest.mark.parametrize("options, least", [({"human_goals": True}, 0.99), pytest.param(REAL, 0.85, marks=recorded)])
def test_the_demonstrator_on_other_goals(options, least):
    env = envs.make("webshop", **options)
    assert mean([play(env, task, "expert")[-1][1] for task in env.task_ids("val")[:100]]) >= least


@pytest.mark.parametrize("options", [{}, pytest.param(REAL, marks=recorded)])
def test_only_the_oracle_acts_on_the_hidden_goal(options):
    """The same sentence and the same pages, with another product, other attributes and options behind them."""
    env, other = envs.make("webshop", **options), envs.make("webshop", **options)
    folder = options.get("data") or make_webshop.ensure(0)
    other.shop = webshop.Shop(folder, title_nouns=options.get("title_nouns"), page_size=env.shop.page_size)
    players, hidden = ["oracle", "expert", *env.rules()], [*other.shop.goals]
    tasks, same = random.Random(0).sample(env.task_ids("all"), 30), dict.fromkeys(players, 0)
    other.shop.goals = [*hidden]
    for task, stranger in zip(tasks, reversed(tasks), strict=True):
        sentence = {"instruction_text": hidden[int(task)]["instruction_text"]}
        other.shop.goals[int(task)] = hidden[int(stranger)] | sentence
    for task in tasks:
        for player in players:
            actions, others = ([action for action, _ in play(e, task, player)] for e in (env, other))
            same[player] += actions == others
    assert same.pop("oracle") < len(tasks) and set(same.values()) == {len(tasks)}


@pytest.mark.parametrize("most", [3, 4, None])
def test_oracle_takes_what_pays_best_within_its_steps(most):
    """n steps buy the right product with n - 3 of its options."""
    env = envs.make("webshop", max_steps=most)
    for task in random.Random(0).sample(env.task_ids("all"), 40):
        steps, values = play(env, task, "oracle"), len(env.goal["goal_options"])
        clicked = min(values, (most or 9) - 3)
        assert steps[-1][1] == pytest.approx((4 + clicked) / (4 + values)) and len(steps) == 3 + clicked
