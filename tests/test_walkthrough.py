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


def test_the_sentences_about_the_lake():
    messages = build.read("lake/expert.jsonl")[0]["messages"]
    assert all(" ".join(message["content"].split()) in TEXT for message in messages[:3])
    rows = [row for row in build.lake_backup() if row[4]]
    gaps = {int(node): float(truth) - float(value) for node, _, _, value, truth in rows}
    assert min(gaps.values()) >= 0
    *low, last = sorted(node for node in gaps if gaps[node] > 1e-9)
    assert f"Of the {len(rows)} actions in this tree {len(rows) - len(low) - 1} have exactly their Q\\*" in TEXT
    assert f"Too low are {', '.join(map(str, low))} and {last}:" in TEXT
    assert [node for node in sorted(gaps) if gaps[node] == max(gaps.values())] == [11, 13, 14]
    assert max(gaps.values()) == 0.9 and "Nodes 11, 13 and 14 are furthest off, with 0 instead of 0.9" in TEXT
    new = {branch: [n["node_id"] for n in LAKE[1:] if n["branch"] == branch] for branch in range(1, 7)}
    assert new == {1: [1, 2, 3, 4, 5, 6], 2: [*range(10, 17)], 3: [7, 8, 9], 4: [17], 5: [], 6: [18]}
    assert [n["node_id"] for n in LAKE if n["source"] == "expert"] == [17]
    guided, alone = result("lake", "qlass"), result("lake", "greedy")
    assert (len(guided["steps"]), guided["reward"], alone["reward"]) == (8, 1, 0)


def test_the_sentences_about_the_shop():
    task, page = SHOP[0]["task"], SHOP[1]["observation"].removeprefix("Observation:\n")
    assert f"> {task} " in TEXT and " ".join(page.split()) in TEXT
    assert [round(n["reward"], 2) for n in SHOP if n["done"]] == [0.83, 1] and max(n["depth"] for n in SHOP) == 11
    assert min(SHOP, key=lambda node: node["q"])["node_id"] == 2
    alone, guided = result("shop", "greedy"), result("shop", "qlass")
    assert (round(alone["reward"], 2), guided["reward"]) == (0.83, 1)


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
