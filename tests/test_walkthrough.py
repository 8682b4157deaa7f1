"""docs/walkthrough.md: its code is the code, its tables and sentences are what the recorded lines say."""

import json
import re
from pathlib import Path

import pytest

import bellman
import envs
from docs import build
from qlass.chat import parse_action

PAGE = build.PAGE.read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
LAKE, SHOP = build.read("lake/q_labels.jsonl"), build.read("shop/q_labels.jsonl")
MADE_BY = {"lake": ("frozenlake", {"map": "4x4"}), "shop": ("webshop", {})}


def result(part, method):
    return next(line for line in build.read(f"{part}/results.jsonl") if line["method"] == method)


def test_the_page_and_its_pictures_are_what_the_code_and_the_lines_give():
    again = "python -m docs.build makes them again"
    assert build.refresh(PAGE) == PAGE, again
    pictures = build.pictures()
    assert {path.name for path in build.LINES.glob("*.svg")} == set(pictures)
    for name, picture in pictures.items():
        assert (build.LINES / name).read_text(encoding="utf-8") == picture, again
        assert f"(walkthrough/{name})" in PAGE
    assert len(re.findall("<!-- code: ", PAGE)) >= 5 and len(re.findall("<!-- rows: ", PAGE)) == len(build.ROWS)


@pytest.mark.parametrize("part", MADE_BY)
def test_the_lines_are_a_run_of_the_stages(part):
    assert sum(path.stat().st_size for path in build.LINES.rglob("*.jsonl")) < 60_000
    tree = build.read(f"{part}/trees.jsonl")
    labels = build.read(f"{part}/q_labels.jsonl")
    assert bellman.label(tree, "q", {"lake": 0.9, "shop": 0.98}[part]) == labels
    name, options = MADE_BY[part]
    env = envs.make(name, **options)
    paths = {0: []}
    for node in tree[1:]:
        paths[node["node_id"]] = [*paths[node["parent_id"]], parse_action(node["action"])]
        env.reset(options={"task_id": node["task_id"]})
        for action in paths[node["node_id"]]:
            observation, reward, terminated, _, _ = env.step(action)
        assert (env.message(observation), reward, terminated) == (node["observation"], node["reward"], node["done"])
    for method in ("greedy", "qlass"):
        episode = result(part, method)
        env.reset(options={"task_id": episode["task_id"]})
        for step in episode["steps"]:
            observation, reward, *_ = env.step(parse_action(step["action"]))
            assert env.message(observation) == step["observation"]
            if method == "qlass":
                assert step["action"] == max(step["candidates"], key=lambda candidate: candidate["q"])["action"]
        assert reward == pytest.approx(episode["reward"])


def test_the_line_of_the_label_is_the_real_one():
    block = re.search(r"```json\n(.*?)```", PAGE, re.S)[1]
    assert json.loads(block) == LAKE[1]


def test_links_lead_somewhere():
    for page in (build.ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("of", "last"), [("build_trees.py", 13), ("q_search.py", 11)])
def test_every_line_of_the_algorithms_is_marked_in_the_code(of, last):
    marked = set()
    for first, end in re.findall(r"\blines? (\d+)(?:-(\d+))?", (Path(build.ROOT) / of).read_text(encoding="utf-8")):
        marked |= set(range(int(first), int(end or first) + 1))
    assert marked >= set(range(1, last + 1))
