"""WebShop: equal to the original's recordings, goal for goal, ranking for ranking; the rest by hand."""

import dataclasses
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fakes import SHARED, lines, real_shop, recorded, refused, write
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from environments.webshop import catalogue as webshop_data
from environments.webshop import earnings
from environments.webshop import engine as webshop
from environments.webshop import search as webshop_search
from qlass.environment import fair_order
from qlass.messages import replay


@recorded
def test_lucenes_words_and_top_50():
    shop = real_shop().shop
    for document in lines(SHARED / "lucene_doc_tokens.jsonl.gz"):
        assert webshop_search.terms(shop.products[shop.position(document["id"])].document) == document["tokens"]
    for query in lines(SHARED / "lucene_top50.jsonl.gz"):
        assert webshop_search.terms(query["query"]) == query["tokens"]
        assert [shop.products[i].asin for i in shop.search(query["query"])] == [asin for asin, _ in query["hits"]]


@recorded
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("human", [False, True])
def test_prices_and_goals_are_drawn_as_in_the_original(human, seed):
    shop = webshop.load(SHARED, None, human, seed)
    drawn = webshop_data.read_json(SHARED / f"goals_{'human' if human else 'synthetic'}_1k_seed{seed}.json.gz")
    for goal in drawn["goals"]:
        del goal["weight"]  # of the original's own sampling
    assert [*shop.goals] == drawn["goals"]
    assert dict(zip((p.asin for p in shop.products), shop.prices, strict=True)) == drawn["prices"]


@recorded
def test_published_splits():
    splits = webshop_data.splits(np.zeros(12_087, int), np.zeros(1), SHARED)  # as many goals as the full catalogue has
    sizes = {name: len(indices) for name, indices in splits.items()}
    assert sizes == {"all": 12_087, "train": 1823, "test": 200, "test_500": 500}
    assert len({*splits["train"]} & {*splits["test"]}) == 21
    with refused(r"_indices.*only 6910 goals"):
        real_shop(split_file=SHARED)


@pytest.mark.parametrize(("limit", "kept"), [(math.inf, [*range(7)]), (1, [0, 1, 4])])
def test_a_limit_of_tasks_per_product_keeps_the_first(tmp_path, limit, kept):
    owners, shares = np.array([0, 1, 0, 0, 2, 0, 1]), np.array([75, 12, 90])
    (tmp_path / "test_indices.json").write_text("[6, 5, 3, 2, 1]")
    splits = webshop_data.splits(owners, shares, None, limit)
    parts = np.concatenate([splits[name] for name in ("train", "val", "test")])
    assert splits["all"].tolist() == sorted(parts) == kept
    published = webshop_data.splits(owners, shares, tmp_path / "test_indices.json", limit)["test"].tolist()
    assert (published == [6, 5]) == (limit == 1)


def test_only_the_bundled_shop_has_tasks_that_choices_were_made_on_apart_from_its_test_split():
    env, people = envs.make("webshop"), envs.make("webshop", human_goals=True)
    everything = webshop_data.splits(env.shop.owners, env.shop.shares)["test"]
    in_order = fair_order(map(str, everything), env.task_type)
    assert [env.task_ids(split) for split in ("tuning", "test")] == [in_order[:400], in_order[400:]]
    with refused("unknown split 'tuning'"):
        people.task_ids("tuning")
    assert len(people.task_ids("test")) == 147


SHIRT = {
    "customization_options": {
        "Size": [{"value": "Small"}, {"value": "X-Large "}],
        "Color": [{"value": "Dark Blue/Green"}, {"value": "wine"}, {"value": "small"}],
        "Fit": None,
    },
    **{"asin": "B000000001", "name": "Red Cotton Shirt", "full_description": "A <soft> shirt, breathable."},
    **{"small_description": [" made in Norway ", " "], "pricing": "$27.00", "category": "fashion"},
    **{"query": " Shirts", "product_category": "Clothing › Men › Shirts"},
}
JUMPER = {
    **(SHIRT | {"asin": "A000000002", "name": "Wool Jumper", "full_description": "", "small_description": "warm"}),
    **{"pricing": "$20.00 - $95.50", "customization_options": "", "query": "jumpers"},
    "product_category": "Clothing › Men › Jumpers",
}
LAMP = {
    **(JUMPER | {"asin": "C000000003", "name": "Desk Lamp shirt", "pricing": "", "category": "garden"}),
    **{"query": "lamps", "product_category": "Home › Lamps"},
    "customization_options": {"size": [{"value": "a [b]"}, {"value": "description"}, {"value": "search"}]},
}
WISH = "find me a breathable cotton shirt with color: blue, and size: large, and price lower than 30.00 dollars"
GOAL = {
    **{"asin": "B000000001", "category": "fashion", "query": "shirts", "name": "Red Cotton Shirt"},
    **{"product_category": "Clothing › Men › Shirts", "instruction_text": WISH, "price_upper": 30.0},
    **{"attributes": ["breathable", "machine wash"], "goal_options": ["large", "blue"]},
}


@pytest.fixture
def shop(tmp_path):
    def build(products=(SHIRT, JUMPER, LAMP), **options):
        ignored = [SHIRT | {"asin": "nan"}, SHIRT | {"asin": "B00000000011"}, SHIRT | {"name": "again"}]
        nouns = {"B000000001": ["cotton", "shirt"], "A000000002": ["wool", "jumper"], "C000000003": ["lamp", "shirt"]}
        files = {
            "items_shuffle.json": [*products, *ignored],
            "items_ins_v2.json": {"B000000001": {"attributes": ["machine washable"]}},
            "items_human_ins.json": {
                "B000000001": [{"instruction": "a shirt", "instruction_attributes": ["x"], "instruction_options": []}]
            },
            "title_nouns.json": nouns,
        }
        for name, content in files.items():
            write(name, [content])
        webshop.load.cache_clear()
        env = envs.make("webshop", data=tmp_path, human_goals=True, **options)
        env.shop.goals = [GOAL]
        return env

    return build


def play(env, *actions):
    env.reset(options={"task_id": "0"})
    for action in actions:
        step = env.step(action)
    return step


def test_cleaning(shop):
    shirt, jumper, lamp = shop().shop.products
    assert shirt.options == {"size": ["small", "x-large"], "color": ["dark blue | green", "wine", "small"]}
    assert (shirt.query, shirt.attributes, shirt.price_tag) == ("shirts", ["machine washable"], "$27.0")
    assert (jumper.bullets, jumper.attributes, jumper.price_tag) == (["warm"], ["DUMMY_ATTR"], "$20.0 to $95.5")
    assert (lamp.price_tag, lamp.prices, jumper.options) == ("$100.0", [100.0], {})


CHOSEN = ["search[cotton]", "click[b000000001]", "click[x-large]", "click[wine]"]
LAMP_SHOWN = ["search[lamp] for the desk", "click[C000000003] "]  # text behind the last bracket is ignored


@pytest.mark.parametrize(
    ("actions", "page", "options"),
    [
        ([*CHOSEN, "click[reviews]", "click[< prev]"], "item", {"size": "x-large", "color": "wine"}),
        ([*CHOSEN, "click[small]"], "item", {"size": "x-large", "color": "small"}),  # of two with this value the later
        ([*CHOSEN, "click[< prev]", "click[b000000001]"], "item", {}),
        ([*LAMP_SHOWN, "click[a [b]]"], "item", {}),  # a value with brackets is out of reach
        ([*LAMP_SHOWN, "click[search]"], "item", {}),  # and the name of the box on the start page
        ([*LAMP_SHOWN, "click[description]"], "description", {}),  # and one with a button's name
    ],
)
def test_options_are_kept_on_sub_pages_replaced_by_name_and_dropped_on_the_way_back(shop, actions, page, options):
    env = shop(max_steps=None)
    play(env, *actions)
    assert (env.session.page, dict(env.session.options)) == (page, options)


# The goal has 2 attributes, 2 options and a price limit: each part weighs 1/5.
@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # "breathable" is in the description, "machine wash" is like "machine washable"; 27 <= 30
        (["search[cotton]", "click[b000000001]"], 3 / 5),
        # "x-large" holds all words of "large"; "dark blue | green" is "blue", the first colour in it
        (["search[cotton]", "click[b000000001]", "click[x-large]", "click[dark blue | green]"], 5 / 5),
        # no attribute; two common breadcrumbs, but no common noun: type 0
        (["search[wool]", "click[a000000002]"], 0.0),
    ],
)
def test_rewards_by_hand(shop, actions, expected):
    env = shop()
    assert play(env, *actions)[1] == 0
    observation, *outcome, info = env.step("click[buy now]")
    assert (*outcome, info["valid_actions"]) == (pytest.approx(expected), True, False, [])
    score = f"[SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP] {outcome[0]} [SEP] Reward Details [SEP] None"
    assert f"{env.message(observation)} {score}" == f"Observation:\n{observation}"  # no step's score may read it


def test_type_of_the_product(shop):
    far = {"product_category": "Clothing › Jumpers"}
    for nouns, fields, r_type in (
        ("x", {}, 0),  # no common noun, though two common breadcrumbs
        ("a", {}, 0.1),  # 1 of 11
        ("ab", far, 0.5),  # 2 of 11
        ("ab", {}, 1),  # with two common breadcrumbs
        ("abc", far, 1),
        ("ab", far | {"query": "Shirts "}, 1),
    ):
        titles = {GOAL["name"]: "abcdefghijk", "Other": nouns}
        env = shop([SHIRT, JUMPER | {"name": "Other"} | fields])
        env.shop.find_nouns = lambda product, titles=titles: titles[product.title]
        assert env.shop.match(0, env.shop.position("A000000002"))["r_type"] == r_type


def test_terms_similar_texts_and_plain_colours():
    text = "Women's 6.5\" size:xl t-shirt & ★hats, the 1,000 technologies (incredibly) don’t U.S.A. ___ ✔️"
    expected = "women 6.5 size:xl t shirt ★ hat 1,000 technolog incred don’t u.s.a ✔️"
    assert webshop_search.terms(text) == expected.split()
    # A subset of the words; a ratio of 86 (0.857...) and not of 83; Latin-1 is dropped.
    alike = ("large", "x-large"), ("machine wash", "machine washable"), ("B W", "w/b"), ("éaßb", "ab")
    other = ("machine wash", "hand wash"), ("3 pack", "4 pack"), ("!!!", "!!!")
    for a, b in (*alike, *other):
        assert webshop.similar(a, b) is webshop.similar(b, a) is ((a, b) in alike)
    colours = {"dark blue": "blue", "standard": "tan", "xl": "xl", ("color", "wine"): "wine"}
    colours["color", "dark wine"] = "('color', 'dark wine')"
    assert {value: webshop.plain_color(value) for value in colours} == colours


def test_nouns_of_a_title_and_queries_of_an_instruction(shop):
    title = "Vintage 2-Pack Men's T-Shirt (Navy/Red), Size: XL for the Home-Office"
    product = dataclasses.replace(shop().shop.products[0], title=title)
    words = "vintage pack men t shirt navy red size xl home office"
    assert " ".join(webshop.noun_finder(None)(product)) == words
    recorded = Path("nouns.json")
    recorded.write_text(json.dumps({product.asin: []}))  # the tagger has found none
    assert webshop.noun_finder(recorded)(product) == []
    options = "breathable cotton shirt with color: blue, and size: large"
    assert webshop_data.queries(WISH) == ["find me a " + options, options, "breathable cotton shirt"]
    assert "[" not in "".join(webshop_data.queries(WISH.replace("shirt", "[shirt]\n")))  # search[...] can't hold it


WORDS = ["red", "green", "shirts", "shirt", "the", "lamp", "hats", "5.5"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=40), TEXTS)
def test_bm25_against_the_formula(documents, query):
    indexer, n = webshop_search.Indexer(), len(documents)
    for document in documents:
        indexer.add(document)
    words, arrays = indexer.finish(np.arange(n))
    index = webshop_search.SearchIndex(n, {word: v for v, word in enumerate(words)}.get, **arrays)
    bags = [Counter(webshop_search.terms(d)) for d in documents]
    average = sum(map(Counter.total, bags)) / n
    wanted = webshop_search.terms(query)  # a term that comes twice counts twice
    expected = []
    for bag in bags:  # documents are shorter than 40 words: lengths are exact
        score = 0.0
        for term in wanted:
            df, tf = sum(term in other for other in bags), bag[term]
            idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
            score += idf * tf / (tf + 0.9 * (0.6 + 0.4 * bag.total() / average)) if tf else 0.0
        expected.append(score)
    found, scores = index.top(query)
    assert sorted(found) == [i for i, score in enumerate(expected) if score]
    assert scores.tolist() == pytest.approx([expected[i] for i in found], rel=1e-4)


@pytest.mark.parametrize("k", [1, 2, 5, 50])
@pytest.mark.parametrize("share", [0.0005, 0.02, 0.6])
def test_the_best_documents_are_those_of_a_full_sort(share, k):
    rng, size = np.random.default_rng(k), 30_000  # many blocks of the search, and a part of one
    postings = [np.flatnonzero(rng.random(size) < share) for _ in range(3)]
    docs = np.concatenate(postings).astype(np.int32)
    damping = rng.choice(np.float32([1.1, 1.2, 1.3]), len(docs))  # so that many scores are equal
    offsets = np.cumsum([0, *map(len, postings)])
    arrays = {"offsets": offsets, "docs": docs, "damping": damping, "idf": np.float32([1, 2, 3])}
    index = webshop_search.SearchIndex(size, {"red": 0, "shirt": 1, "lamp": 2}.get, **arrays)
    every, scores = index.top("red shirt lamp", size)
    ranks = [*zip(-scores, every, strict=True)]
    assert {*every} == {*docs} and sorted(ranks) == ranks
    found, best = index.top("red shirt lamp", k)
    assert found.tolist() == every[:k].tolist() and best.tobytes() == scores[:k].tobytes()


def test_a_purchase_has_its_rewards_parts_after_restore_too():
    env = envs.make("webshop")
    list(replay(env, env.task_ids("all")[0]))  # the expert's way
    bought = env.info()
    env.restore(env.snapshot())
    assert env.info() == bought and "reward_details" in bought


@pytest.mark.parametrize(("product", "wish", "more"), [(0, "wine", True), (2, "a [b]", False), (2, "search", False)])
def test_an_option_that_nobody_can_click_earns_nothing(shop, product, wish, more):
    own, goal = shop().shop, 0
    own.goals = [GOAL | {"goal_options": [wish]}]
    rewards = earnings.rewards(own, goal, product)  # after at most 0, 1, 2, ... clicks
    assert (max(rewards) > rewards[0]) == more


def test_the_best_value_in_reach_is_that_behind_the_best_action():
    env, rng, worth_while = envs.make("webshop", max_steps=None), random.Random(0), 0
    for task in rng.sample(env.task_ids("all"), 20):
        env.reset(options={"task_id": task})
        if int(task) % 2:  # a search that leads astray
            env.step(f"search[{rng.choice(env.shop.products).title}]")
        while env.valid_actions() and env.steps < 7:
            here = env.snapshot()
            for left in range(1, 6):
                env.max_steps, values = env.steps + left, []
                for action in env.valid_actions():
                    _, reward, done, *_ = env.step(action)
                    values.append(reward if done else env.optimal_value(gamma=0.9))
                    env.restore(here)
                assert env.optimal_value(gamma=0.9) == pytest.approx(0.9 * max(values))
                worth_while += max(values) > 0
            env.max_steps = None
            env.step(rng.choice(env.valid_actions()))
    assert worth_while > 20
