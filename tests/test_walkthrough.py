"""The teaching page: it is what its script makes now of the recording and the code, and what it says is so."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes import FakeEnv

import bellman
import envs
from environments.frozenlake.env import FrozenLakeEnv
from qlass import UserError
from qlass.chat import Rendering, parse_action
from qlass.files import read_jsonl
from qlass.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import make_walkthrough
from walkthrough import code, record, replay, story

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def records():
    return list(read_jsonl(replay.RECORDING))


@pytest.fixture(scope="module")
def parts(records):
    return {
        "frozenlake": replay.Part("frozenlake", replay.small_lake(), records),
        "webshop": replay.Part("webshop", envs.make("webshop"), records),
    }


@pytest.fixture(scope="module")
def files(records):
    return make_walkthrough.render(records)


@pytest.fixture(scope="module")
def page(files):
    return files[make_walkthrough.PAGE]


def section(page, number):
    return re.search(rf"^## {number}\. .*?(?=^## |\Z)", page, re.M | re.S)[0]


def rows(text):
    """The cells of all table rows in a text, heads and rules included."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


# ------------------------------------------------------------------------------------------------ it is not out of date


def test_the_committed_page_is_what_the_script_makes_now(files):
    committed = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
    stale = [path.name for path in files if committed.get(path) != files[path]]
    assert not stale, f"{', '.join(stale)} out of date: python docs/make_walkthrough.py"
    assert {path for path in files if path.suffix == ".svg"} == set(make_walkthrough.FIGURES.glob("*.svg"))


def test_another_answer_of_a_model_makes_another_page_or_none(records, page):
    def changed(kind, method, change):
        copy = [dict(r) for r in records]
        (line,) = [r for r in copy if (r["part"], r["kind"], r.get("method")) == ("frozenlake", kind, method)]
        line["said"] = {key: change(answer) for key, answer in line["said"].items()}
        return copy

    def lower(answer):
        return [q / 2 if isinstance(q, float) else q for q in answer]

    assert make_walkthrough.render(changed("tree", None, lower))[make_walkthrough.PAGE] != page
    with pytest.raises(UserError, match="--record"):  # QNet says the opposite: another move is taken
        make_walkthrough.render(changed("episode", "qlass", lambda a: [-q if isinstance(q, float) else q for q in a]))
    with pytest.raises(UserError, match="--record"):  # the agent says something else: another branch
        make_walkthrough.render(
            changed("tree", None, lambda a: ["Action: up"] * len(a) if isinstance(a[0], str) else a)
        )


def test_another_prompt_needs_another_recording(records, monkeypatch):
    monkeypatch.setattr(FrozenLakeEnv, "told", FrozenLakeEnv.told + "!")
    with pytest.raises(UserError, match="record it again"):
        replay.Part("frozenlake", replay.small_lake(), records)


def test_the_recording_is_small_and_names_its_commands(records):
    assert replay.RECORDING.stat().st_size < 200_000
    (run,) = [r for r in records if (r["part"], r["kind"]) == ("frozenlake", "run")]
    assert [re.match(r"python (\w+)\.py ", c["command"])[1] for c in run["commands"]] == list(record.STAGES)
    for command in run["commands"]:  # as the stages' flags are today
        _, script, *flags = command["command"].split()
        sys.modules[script.removesuffix(".py")].arguments(flags)


# --------------------------------------------------------------------------------------------------- what it says is so


@pytest.mark.parametrize("part", ["frozenlake", "webshop"])
def test_every_node_is_where_its_actions_lead(parts, part):
    part = parts[part]
    env = part.env.fork()
    env.max_steps = part.settings["steps"]
    for node in part.tree[1:]:
        path = [node]
        while path[0]["parent_id"]:
            path.insert(0, part.tree[path[0]["parent_id"]])
        env.reset(options={"task_id": part.tree[0]["task_id"]})
        for step in path:
            observation, reward, terminated, truncated, _ = env.step(parse_action(step["action"]))
        assert (env.message(observation), reward, terminated or truncated) == (
            node["observation"], node["reward"], node["done"],
        )  # fmt: skip


@pytest.mark.parametrize("part", ["frozenlake", "webshop"])
def test_guided_steps_take_the_highest_of_the_drawn(parts, part):
    part = parts[part]
    for step, drawn in zip(part.episodes["qlass"]["steps"], part.drawn["qlass"], strict=True):
        assert len(drawn) == replay.QLASS.M
        assert {parse_action(c["action"]) for c in step["candidates"]} == set(map(parse_action, drawn))
        highest = max(c["q"] for c in step["candidates"])
        assert step["action"] == next(c["action"] for c in step["candidates"] if c["q"] == highest)
    assert all(len(drawn) == 1 for drawn in part.drawn["greedy"])


def test_the_arithmetic_by_hand(page, parts):
    tree = parts["frozenlake"].tree
    values, lines = bellman.q_values(tree, 0.9), [r for r in rows(section(page, 4)) if r[0].isdigit()]
    assert [int(r[0]) for r in lines] == list(reversed(range(len(tree))))
    for number, _, children, hand, raw, q, exact in lines:
        value = values[int(number)]
        assert (float(raw), float(q)) == pytest.approx((value, bellman.min_max(values)[int(number)]), abs=5e-5)
        assert [int(c) for c in re.findall(r"\d+", children)] == [
            n["node_id"] for n in tree if n["parent_id"] == int(number)
        ]
        if children:
            r, gamma, best, result = re.fullmatch(r"(\S+) \+ (\S+) × (?:max)?\(?([\d., ]+?)\)? = (\S+)", hand).groups()
            assert float(r) + float(gamma) * max(map(float, best.split(", "))) == pytest.approx(float(result), abs=1e-4)
            assert float(result) == pytest.approx(value, abs=1e-4)
        else:
            assert hand == f"{raw}, a leaf"
        assert not exact or float(exact) >= float(raw) - 1e-4  # without slipping no tree overrates an action


def test_only_what_the_agent_writes_carries_the_loss(page):
    stretches = re.findall(r"^(reads|WRITES) +(.*?)(?=^reads|^WRITES|^```)", section(page, 2), re.M | re.S)
    assert [kind for kind, _ in stretches] == ["reads", "WRITES"] * (len(stretches) // 2)
    for kind, tokens in stretches:
        pieces = [piece.strip() for piece in re.split(r"\||\n", tokens) if piece.strip()]
        assert (pieces[0] == "<user>") == (kind == "reads")
        assert (pieces[-1] == "<end>") == (kind == "WRITES")
    written = sum(len(re.split(r"\||\n +", tokens.strip())) for kind, tokens in stretches if kind == "WRITES")
    assert re.search(rf"tokens, of which {written}\s+carry", section(page, 2))


def test_the_branches_tell_how_the_tree_grew(page, parts):
    part, made = parts["frozenlake"], []
    for row in rows(section(page, 3)):
        if row[1] in ("agent", "expert"):
            made += [int(n) for n in re.findall(r"\d+", row[3])]
            assert (row[4] == "0") == (row[5] == "none") or row[1] == "expert"  # line 9 of Algorithm 2
    assert sorted(made) == list(range(1, len(part.tree)))
    assert [b.by for b in part.branches].count("expert") == 1


# ------------------------------------------------------------------------------------------- code, links and figures


def test_every_line_of_the_index_is_where_it_says(page):
    lines = [r for r in rows(section(page, 9)) if "](../" in r[1]]
    assert len(lines) > 20
    for _, where, shown in lines:
        file, lineno, anchor = re.fullmatch(r"\[([\w/]+\.py):(\d+)]\(\.\./\1#L(\d+)\)", where).groups()
        assert lineno == anchor
        there = (ROOT / file).read_text().splitlines()[int(lineno) - 1].strip()
        assert there.startswith(shown.strip("`").removesuffix("...)").replace("\\|", "|")) and len(shown) > 5


@pytest.mark.parametrize(("of", "last"), [("Alg. 2", 13), ("Alg. 4", 11)])
def test_the_index_has_every_line_of_the_algorithms(of, last):
    marked = {n for file in code.STAGES for m in code.marks(file) if m.of == of for n in m.lines}
    assert marked == set(range(1, last + 1))


def test_marks_are_comments_and_docstrings_alone(monkeypatch):
    monkeypatch.setattr(code, "source", lambda file: '''"""Trees (Alg. 2)."""
def f():
    """Ends it (Alg. 4, lines 1-2 and 11)."""
    x = 1  # lines 7-8: because
    add(help="(lines 11-13)")
    return x  # a line of text; Eq. (7)


def g():
    """Alg. 3, last lines: to [0, 1] within the tree. More."""
''')  # fmt: skip
    assert [(m.of, m.lines, m.words, m.lineno, m.code) for m in code.marks("x.py")] == [
        ("Alg. 4", (1, 2, 11), "", 2, "def f():"),
        ("Alg. 2", (7, 8), "because", 4, "x = 1"),
        ("Eq. 7", (), "", 6, "return x"),
        ("Alg. 3", (), "last lines: to [0, 1] within the tree", 9, "def g():"),
    ]


def test_excerpts_are_the_code_and_a_lost_name_is_told(page):
    for file, first, last, shown in re.findall(
        r"^\[`([\w.]+)`, lines (\d+)-(\d+)\]\(.*?\)\n\n```python\n(.*?)\n```$", page, re.M | re.S
    ):
        there = (ROOT / file).read_text().splitlines()[int(first) - 1 : int(last)]
        assert [line.strip() for line in there] == [line.strip() for line in shown.splitlines()]
    with pytest.raises(UserError, match=r"bellman\.py: no backup any more"):
        code.excerpt("bellman.py", "backup")


def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#L(\d+)(?:-L(\d+))?)?\)", page)
    assert len(links) > 30
    for target, first, last in links:
        path = ROOT / "docs" / target
        assert path.is_file(), target
        assert not first or int(last or first) <= len(path.read_text().splitlines())


def test_figures_can_be_read(files, parts):
    sizes = {}
    for path, content in files.items():
        if path.suffix != ".svg":
            continue
        image = ElementTree.fromstring(content)
        width, height = float(image.get("width")), float(image.get("height"))
        assert width <= 1000
        assert all(float(text.get("font-size")) >= 11 for text in image.iter(f"{SVG}text"))
        nodes = [c for c in image.iter(f"{SVG}circle") if float(c.get("r")) > 10]
        assert all(10 < float(c.get("cx")) < width - 10 and 10 < float(c.get("cy")) < height - 10 for c in nodes)
        assert len({(c.get("cx"), c.get("cy")) for c in nodes}) == len(nodes)
        sizes[path.stem] = len(nodes)
    whole = len(parts["frozenlake"].tree)
    assert sizes["lake_first"] <= sizes["lake_pass"] <= sizes["lake_expert"] <= sizes["lake_whole"] == whole
    shown = [node for node in parts["webshop"].tree if node["depth"] <= story.DEEPEST]
    assert (sizes["lake_q"], sizes["shop_q"]) == (whole, len(shown))


# ------------------------------------------------------------------------------------------------------- to record


def test_what_is_heard_can_be_said_again(agent):
    env, settings = FakeEnv(), {"depth": 2, "width": 2, "rollouts": 8, "steps": 5}
    rendering = Rendering(candidates="valid", temperature=1.0)
    with record.listening() as said:
        heard = replay.grow(env, "train0", rendering, settings, Policy.load(agent))
    models = replay.Models(said)
    assert replay.grow(env, "train0", rendering, settings, models) == heard
    assert models.heard() == said
    lines, branches = heard
    assert [b.by for b in branches].count("expert") == 1 and branches[0].begin == 0
    assert len(branches) == max(node["branch"] for node in lines) or len(branches) <= 9
    with pytest.raises(UserError, match="no model was asked"):
        replay.grow(env, "train1", rendering, settings, models)


def test_a_tree_is_the_more_telling_the_more_happens_in_it():
    def node(parent, branch, reward=None):
        return {"parent_id": parent, "branch": branch, "reward": reward or 0.0, "done": reward is not None}

    tree = [node(None, 0), node(0, 1), node(1, 1, 1.0), node(0, 2, 0.0), node(1, 3, 1.0)]
    branches = [replay.Branch(0), replay.Branch(0), replay.Branch(0, "expert")]
    assert record.telling(tree, branches) == 6
    assert record.telling(tree[:-1], branches) == 4  # the expert's way was known: a branch that made nothing
    assert record.telling([n | {"reward": 0.0} for n in tree], branches) == 5  # the agent never won
    assert record.telling([*tree[:3], node(1, 2, 0.0), tree[4]], branches) == 5  # one child of the root
    assert record.telling([*tree, *[node(1, 3)] * 20], branches) == 5  # too large to be drawn


def test_the_start_where_guidance_helps_most():
    def line(task, method, reward, *candidates):
        return {"task_id": task, "method": method, "reward": reward, "steps": [{"candidates": c} for c in candidates]}

    results = [line("a", "greedy", 1.0), line("b", "greedy", 0.0), line("c", "greedy", 0.5), line("a", "qlass", 1.0)]
    results += [line("b", "qlass", 0.5, "x"), line("c", "qlass", 1.0, "xx", "x")]
    assert record.most_different(results) == "c"


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"quickstart\.sh"):
        record.record_webshop(tmp_path)


def test_the_script_writes_page_and_figures_and_clears_old_ones(tmp_path, monkeypatch, files, capsys):
    monkeypatch.setattr(make_walkthrough, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(make_walkthrough, "FIGURES", tmp_path)
    (tmp_path / "old.svg").write_text("<svg/>")
    make_walkthrough.main([])
    assert {path.name for path in tmp_path.iterdir()} == {"page.md", *(p.name for p in files if p.suffix == ".svg")}
    assert (tmp_path / "page.md").read_text() == files[ROOT / "docs/walkthrough.md"]
    assert "6 figures" in capsys.readouterr().out
