"""The bundled catalogue (data/make_webshop.py) and the expert that shops in it and in the real one."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envs
from data import make_webshop
from environments.webshop.engine import plain_color, similar
from environments.webshop.search import terms

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("QLASS_SHARED", ROOT.parent / "shared")) / "webshop"
recorded = pytest.mark.skipif(not SHARED.is_dir(), reason="the real catalogue is not here")


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop")


def some(env, n, split="all"):
    ids = env.task_ids(split)
    return random.Random(0).sample(ids, min(n, len(ids)))


def play(env, task, choose):
    """[(action, reward)] of an episode whose actions `choose` yields."""
    env.reset(options={"task_id": task})
    steps = []
    for action in choose(env, task):
        _, reward, done, truncated, _ = env.step(action)
        steps.append((action, reward))
        if done or truncated:
            break
    return steps


def expert(env, task):
    for thought, action in env.expert(task):
        assert (thought, action) in env.candidates(), "a demonstration must be what `--candidates valid` offers"
        yield action


def freely(env, task):
    return (action for _, action in env.expert(task))


def clicker(env, task, rng=random.Random(1)):  # noqa: B008 (one stream for all tasks)
    while True:
        yield rng.choice(env.valid_actions())


# -------------------------------------------------------------------------------------------------------- the files
def test_same_seed_same_catalogue():
    first, again, other = (json.dumps(make_webshop.catalogue(seed, 120)) for seed in (3, 3, 4))
    assert first == again != other


def test_catalogue_is_large_and_in_webshops_schema():
    files = make_webshop.catalogue()
    items, told = files["items_shuffle.json"], files["items_ins_v2.json"]
    assert len({item["asin"] for item in items}) == len(items) == len(told) >= 1000
    assert len({item["query"] for item in items}) >= 40 and len({item["category"] for item in items}) == 5
    for item in items:
        assert re.fullmatch(r"[A-Z]\d{3}", item["asin"])
        assert re.fullmatch(r"\$\d\d\.00", item["pricing"])
        assert 4 <= len(item["name"].split()) <= 7
        assert set(told[item["asin"]]["attributes"]) < set(item["name"].split())
        assert 2 <= len(item["customization_options"]) <= 3
        assert all(3 <= len(values) <= 4 for values in item["customization_options"].values())
        assert {"full_description", "small_description", "product_category", "images"} < set(item)


def test_no_two_products_share_what_is_asked_for():
    files = make_webshop.catalogue()
    kinds = {item["asin"]: item["query"] for item in files["items_shuffle.json"]}
    asked = [
        (kinds[asin], *sorted(record["instruction_attributes"]))
        for asin, record in files["items_ins_v2.json"].items()
        if "instruction" in record
    ]
    assert len(set(asked)) == len(asked) >= 600


def test_brands_are_never_asked_for(shop):
    brands = set(make_webshop.BRANDS.lower().split())
    assert not any(brands & set(goal["instruction_text"].split()) for goal in shop.shop.goals)


def test_search_takes_a_denial_for_the_attribute_and_the_reward_does_not():
    for category in make_webshop.SHELVES:
        for attribute, noun in make_webshop.nouns_of(category).items():
            assert terms(attribute) == terms(noun) and attribute not in noun


def test_no_option_value_passes_for_another():
    for _, _, groups in make_webshop.SHELVES.values():
        values = [(name, value) for name, text in groups.items() for value in text.split()]
        for wanted, (_, bought) in itertools.product(values, values):
            assert similar(plain_color(bought), plain_color(wanted)) == (wanted[1] == bought)


def test_made_once_and_again_when_the_generator_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(make_webshop, "GENERATED", tmp_path)
    folder = make_webshop.ensure(7)
    first = (folder / "items_shuffle.json").stat()
    assert make_webshop.ensure(7) == folder == tmp_path / "webshop-7"
    assert (folder / "items_shuffle.json").stat().st_mtime_ns == first.st_mtime_ns
    (folder / "made_by").write_text("an older generator")
    make_webshop.ensure(7)
    assert (folder / "items_shuffle.json").stat().st_ino != first.st_ino
    assert [path.name for path in tmp_path.iterdir()] == ["webshop-7"], "temporary folders are cleaned up"


def test_does_not_overwrite_a_folder_with_other_things(tmp_path):
    (tmp_path / "thesis.tex").touch()
    command = [sys.executable, "data/make_webshop.py", "--products", "6", "--out"]
    run = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and "holds something else" in run.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    run = subprocess.run([*command, tmp_path / "new"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(json.loads((tmp_path / "new" / "items_shuffle.json").read_text())) == 6


# -------------------------------------------------------------------------------------------------------- the choice
def test_enough_goals_in_every_split(shop):
    products = {s: {shop.shop.goals[int(i)]["asin"] for i in shop.task_ids(s)} for s in ("train", "val", "test")}
    assert len(shop.task_ids("train")) >= 2600 and len(products["train"]) >= 400
    assert len(shop.task_ids("val")) >= 200 and len(products["val"]) >= 50
    assert len(shop.task_ids("test")) >= 400 and len(products["test"]) >= 100


def test_first_results_page_is_a_choice_among_near_duplicates(shop):
    """Five products of the kind; one or two are right, the first is not a safe bet, and titles tell the truth."""
    right, first = [], []
    for task in some(shop, 300):
        shop.reset(options={"task_id": task})
        goal = shop.goal
        page = [shop.shop.products[i] for i in shop.shop.search(" ".join([*goal["attributes"], goal["query"]]))[:5]]
        assert all(product.query == goal["query"] for product in page)
        bought = [shop.score(product.asin, goal["goal_options"]) for product in page]
        for product, (_, parts) in zip(page, bought, strict=True):
            assert parts["r_att"] == sum(a in product.title.split() for a in goal["attributes"]) / 2
        right.append(sum(reward == 1 for reward, _ in bought))
        first.append(bought[0][0] == 1)
    assert max(right) <= 2 and sum(right) / len(right) > 0.8
    assert 0.2 < sum(first) / len(first) < 0.5


def test_errors_cost_part_of_the_reward(shop):
    """Sent for 2 attributes and 3 options under a limit: each one missed costs a sixth."""
    task = next(i for i in shop.task_ids("all") if len(shop.shop.goals[int(i)]["goal_options"]) == 3)
    shop.reset(options={"task_id": task})
    goal = shop.goal
    (name, value), *others = goal["goal_options"].items()
    product = shop.shop.products[shop.shop.position[goal["asin"]]]
    wrong = next(v for v in product.options[name] if v != value)
    assert shop.score(goal["asin"], goal["goal_options"])[0] == 1
    assert shop.score(goal["asin"], dict(others))[0] == pytest.approx(5 / 6)
    assert shop.score(goal["asin"], {name: wrong, **dict(others)})[0] == pytest.approx(5 / 6)
    assert shop.score(goal["asin"], {})[0] == pytest.approx(3 / 6)
    other_kind = next(p for p in shop.shop.products if p.query != goal["query"])
    assert shop.score(other_kind.asin, goal["goal_options"])[0] == 0


def test_random_clicks_earn_little(shop):
    rewards = [play(shop, task, clicker)[-1][1] for task in some(shop, 1500)]
    assert 0 < sum(rewards) / len(rewards) < 0.1


# -------------------------------------------------------------------------------------------------------- the expert
@pytest.mark.parametrize("human_goals", [False, True])
def test_expert_buys_all_that_is_asked_for(human_goals):
    env = envs.make("webshop", human_goals=human_goals)
    for task in some(env, 400):
        steps = play(env, task, expert)
        assert steps[-1] == ("click[buy now]", 1.0) and len(steps) <= env.max_steps == 9


def test_expert_works_on_catalogues_of_other_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(make_webshop, "GENERATED", tmp_path)
    env = envs.make("webshop", seed=1)
    assert all(play(env, task, expert)[-1][1] == 1.0 for task in some(env, 100))


@pytest.mark.parametrize("max_steps", [3, 4, 5, None])
def test_expert_takes_what_pays_best_within_its_steps(max_steps):
    """n steps buy a right product with n - 3 options: 3 + (n - 3) of 6 points, and a page turn costs an option."""
    env = envs.make("webshop", max_steps=max_steps)
    for task in some(env, 60):
        steps = play(env, task, freely)
        total = 3 + len(env.goal["goal_options"])
        points = round(steps[-1][1] * total)
        most = total if max_steps is None else min(max_steps, total)
        assert max_steps is None or len(steps) <= max_steps
        assert most - 1 <= points <= most, (task, steps)


def test_expert_without_the_steps_to_buy_says_so():
    env = envs.make("webshop", max_steps=2)
    env.reset(options={"task_id": "0"})
    with pytest.raises(envs.UserError, match="at least 3"):
        next(env.expert("0"))


@recorded
@pytest.mark.parametrize("kind, steps", [("synthetic", 5), ("human", 5), ("synthetic", 10)])
def test_expert_on_the_real_catalogue(kind, steps):
    goals, nouns = SHARED / f"goals_{kind}_1k_seed0.json.gz", SHARED / "title_nouns_standin.json.gz"
    env = envs.make("webshop", data=SHARED, goals=goals, title_nouns=nouns, max_steps=steps)
    rewards = [play(env, task, freely)[-1][1] for task in some(env, 150)]
    assert sum(rewards) / len(rewards) >= 0.95
