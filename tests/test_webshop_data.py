"""The bundled catalogue (data/make_webshop.py), the players that shop in it and in the real one, and ETO's recipe."""

import random
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from fakes import SHARED, recorded, refused, write

import envs
from data import make_webshop
from environments.webshop import catalogue, expert
from environments.webshop import engine as webshop
from qlass.demonstrations import demonstrate, read
from qlass.messages import replay
from qlass.settings import Sampling


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
    assert len(kinds) == len(items)
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
    hidden = [*other.shop.goals]
    tasks = random.Random(0).sample(env.task_ids("all"), 30)
    other.shop.goals = [*hidden]
    for task, stranger in zip(tasks, reversed(tasks), strict=True):
        sentence = hidden[int(task)]["instruction_text"]
        other.shop.goals[int(task)] = hidden[int(stranger)] | {"instruction_text": sentence}
    for player in ("oracle", "expert", *env.rules()):
        same = 0
        for task in tasks:
            actions, others = ([action for action, _ in play(e, task, player)] for e in (env, other))
            same += actions == others
        assert (same == len(tasks)) == (player != "oracle")


@pytest.mark.parametrize("most", [4, None])
def test_oracle_takes_what_pays_best_within_its_steps(most):
    """n steps buy the right product with n - 3 of its options."""
    env = envs.make("webshop", max_steps=most)
    for task in random.Random(0).sample(env.task_ids("all"), 40):
        steps, values = play(env, task, "oracle"), len(env.goal["goal_options"])
        clicked = min(values, (most or 9) - 3)
        assert steps[-1][1] == pytest.approx((4 + clicked) / (4 + values)) and len(steps) == 3 + clicked


def test_a_purchase_takes_three_steps_at_least():
    env = envs.make("webshop", max_steps=2)
    with refused("no purchase fits into 2 steps; give at least 3"):
        [*replay(env, env.task_ids("train")[0], player=env.oracle)]


def test_a_button_that_the_task_names_is_no_option():
    candidates = [("read the features", "click[features]"), ("color red", "click[red]")]
    page = SimpleNamespace(task="i need a red shirt of many features", candidates=lambda: candidates)
    assert expert.named_options(page) == ["click[red]"]


def test_the_oracle_searches_a_title_without_its_brackets(shop, monkeypatch):
    shop.reset(options={"task_id": "0"})
    monkeypatch.setattr(type(shop), "goal", shop.goal | {"name": f"[new] {shop.goal['name']}"})
    monkeypatch.setattr(type(shop), "candidates", lambda self: [])
    assert expert.plan(shop)[0].startswith("new ")


@pytest.mark.parametrize("most", [None, 0])
def test_a_product_keeps_a_task_at_least(shop, most):
    with refused("per_product: a number from 1 is expected"):
        catalogue.splits(shop.shop.owners, shop.shop.shares, per_product=most)


INSTRUCTION = "You are web shopping.\nAn action is search[keywords] or click[value]."


def eto(env, task_id):
    """A trajectory as ETO publishes it."""
    speakers, messages = {"user": "human", "assistant": "gpt"}, demonstrate(env, task_id)["messages"]
    turns = [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]
    return {"id": int(task_id), "conversations": turns}


def test_human_goals_split_files_and_instruction_are_one_recipe():
    Path("instruction.txt").write_text(INSTRUCTION)
    for name, indices in {"train": [0, 3, 5, 3], "test": [1, 2]}.items():
        write(f"{name}_indices.json", [indices])
    options = "human_goals=true", "split_file=.", "instruction=instruction.txt"
    env = envs.from_config(Sampling(env="webshop", env_option=options))
    assert sorted(env.task_ids("train")) == ["0", "3", "5"] and sorted(env.task_ids("test")) == ["1", "2"]
    assert envs.make("webshop").published_id({"id": 3}) is None  # whose goals are other ones
    assert env.published_id({"id": "webshop_3"}) is None and env.published_id({}) is None
    assert isinstance(env.shop.goals[0]["goal_options"], list), "people name values, not options"
    write("eto.json", [[eto(env, task) for task in env.task_ids("train")]])
    written = {shown.task_id: shown for shown in read(Path("eto.json"), env)}
    assert {shown.state.messages[0] for shown in written.values()} == {("user", INSTRUCTION)}
    for task, shown in written.items():  # its actions earn here what they earned there
        *_, last = replay(env, task, shown.state.actions)
        assert last.done and last.reward > 0.9
