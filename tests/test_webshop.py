"""WebShop: equal to the original's recordings, goal for goal, ranking for ranking and page for page."""

import gzip
import json
import os
from pathlib import Path

import pytest

import envs

SHARED = Path(os.environ.get("QLASS_SHARED", Path(__file__).parents[2] / "shared")) / "webshop"
recorded = pytest.mark.skipif(not SHARED.is_dir(), reason="the recordings of the original engine are not here")


def lines(name):
    with gzip.open(SHARED / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def real_shop(kind="synthetic", **options):
    goals, nouns = SHARED / f"goals_{kind}_1k_seed0.json.gz", SHARED / "title_nouns_standin.json.gz"
    return envs.make("webshop", data=SHARED, goals=goals, title_nouns=nouns, max_steps=None, **options)


@recorded
def test_pages_and_rewards_of_the_original():
    shops, pages = {False: real_shop(), True: real_shop("human")}, 0
    for episode in lines("golden.jsonl.gz"):
        env = shops[episode["human"]]
        observation, info = env.reset(options={"task_id": env.task_ids("all")[episode["goal_idx"]]})
        assert env.goal == episode["goal"]
        assert (observation, info["clickables"]) == (episode["reset"]["obs"], episode["reset"]["clickables"])
        for step in episode["steps"]:
            observation, reward, done, truncated, info = env.step(step["action"])
            assert (observation, info["clickables"]) == (step["obs"], step["clickables"])
            assert (reward, done, truncated) == (step["reward"], step["done"], False)
            pages += 1
            if done:
                assert info["reward_details"].items() >= step["reward_info"].items()
                break
    assert pages == 3016


@recorded
def test_lucenes_top_50():
    shop = real_shop().shop
    for query in lines("lucene_top50.jsonl.gz"):
        assert [shop.products[i].asin for i in shop.search(query["query"])] == [asin for asin, _ in query["hits"]]
