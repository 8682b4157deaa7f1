"""The report: tables against hand-computed numbers, what may stand in one row, and a page that is complete and safe."""

import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes import FakeEnv, code_on, write

import reporting.__main__ as report
from qlass.demonstrations import demonstrate
from qlass.files import read_jsonl
from qlass.messages import parse_action
from qlass.settings import PRESETS
from reporting import demonstration, expected, figures, page, results, tables, tree

HERE = Path(__file__).parent
RESULTS, TREES = HERE / "recordings/report_results.jsonl", HERE / "recordings/report_trees.jsonl"
RESULT = {"task_id": "a", "env": "lake", "method": "greedy", "reward": 1, "tokens": {"prompt": 1}}
QLASS = {"method": "qlass", "M": 2}


def parts_of(*arguments):
    return results.read_results(results.result_files(map(str, arguments)))


def groups_in(records):
    write("results.jsonl", [RESULT | record for record in records])
    return parts_of(".")


def differences(groups):
    """Rows of the table by the two methods of each."""
    records = tables.differences_table(groups).to_dict("records")
    return {(row["method"], row["minus"]): row for row in records}


# ------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("label", ["half", "Q", "best", "agent, greedy"])
def test_ids_stay_text_and_rows_differ_by_player_budget_and_label(label):
    """pandas alone reads "007" as 7. A label may be a part of a method's name. But a chat model's own name, which
    stands in the names of its methods, is no label beside it."""
    methods = {"rule: first": {"method": "rule", "player": "first"}, "agent, greedy": {}, "QLASS M=2": QLASS}
    methods["best-of-N, picked by QNet N=4"] = {"method": "best_of_n", "N": 4, "select": "q"}
    rows = [row | {"label": own} for row in methods.values() for own in ("", label)]
    records = [row | {"task_id": task} for row in rows for task in ("007", "7", 12)]
    groups = {str(group.condition): group for group in groups_in(records)}
    assert groups.keys() > methods.keys() and sum(f" [{label}]" in name for name in groups) == len(groups) / 2 == 4
    assert list(groups["agent, greedy"].values("reward").index) == [("007", 0), ("12", 0), ("7", 0)]
    (group,) = groups_in([{"agent": label, "label": label}])
    assert str(group.condition) == f"{label}, greedy"


def test_the_table_by_hand():
    groups = parts_of(RESULTS)
    table = tables.results_table(groups, groups).set_index("method")
    oracle = "best-of-N, picked by true reward (oracle) N=2"
    assert list(table.index) == ["agent, greedy", "best-of-N, picked by QNet N=2", oracle, "QLASS M=2"]
    greedy, qlass = table.loc["agent, greedy"], table.loc["QLASS M=2"]
    # Rewards 0, .5, 1, .5 of greedy; QLASS .5, .5, 1, 1 with seed 0 and .5, 1, 1, 0 with seed 1.
    assert greedy["reward [95 %]"].startswith("0.500 [")
    assert qlass["reward [95 %]"].startswith("0.688 [")
    assert (greedy["success"], qlass["success"]) == ("0.250", "0.500")
    # Tokens: 100 prompt, 20 (seed 0) and 24 (seed 1) generated, 30 scored.
    assert (qlass["tokens"], qlass["choices"]) == ("152", "50%")
    assert greedy["seconds"] == "1.00"  # a task, of the clock
    # Four tasks of .5 each: a share z^2 / (4 + z^2) = .490 that was not seen may earn 0, or 1.
    assert table["reward [95 %]"]["best-of-N, picked by QNet N=2"] == "0.500 [0.255, 0.745]"


def test_all_of_a_row_is_of_the_tasks_that_all_seeds_have_played():
    played = [(1, 0, 1), (2, 0, 0), (3, 0, 1), (4, 0, 1), (1, 1, 1), (2, 1, 1)]
    records = []
    for t, s, r in played:
        tokens = {"prompt": t, "scored": 2 * t, "of another model": 7 * t}  # those of all names count
        records.append({"task_id": f"t{t}", "seed": s, "reward": r, "tokens": tokens})
    (group,) = groups_in(records)
    assert (group.reward.mean, group.reward.n, group.mean("total")) == (0.75, 2, 15)


def test_the_differences_by_hand():
    shutil.copy(RESULTS, "results_avg.jsonl")
    groups = parts_of(RESULTS, "target avg=.")
    table = differences(groups)
    # Seed 0 is shared: .5, 0, 0, .5. The resampled mean is Binomial(4, 1/2) / 8, whose 95 % are 0 to .5.
    headline, _ = tables.headlines(groups)
    assert "; +0.250 [+0.000, +0.500] over agent, greedy (unclear); " in headline
    assert table["QLASS [target avg] M=2", "QLASS M=2"]["difference [95 %]"] == "+0.000 [+0.000, +0.000]"


@pytest.mark.parametrize("player", ["", "untried"])
def test_qlass_and_a_rival_meet_the_searches_of_their_m_and_the_best_of_n_of_their_cost(player):
    played = "qlass 2 1 152, qlass 4 1 999, likeliest 2 1 99, vote 2 1 100"
    played += ", best_of_n 1 2 140, best_of_n 1 3 150, best_of_n 1 8 999"
    records = []
    for method, m, n, cost in map(str.split, played.split(", ")):
        row = {"method": method, "M": int(m), "N": int(n), "select": "q" if n > "1" else ""}
        row["player"] = player if method == "vote" else ""
        records += [row | {"task_id": task, "tokens": {"generated": int(cost)}} for task in "ab"]
    met = {}
    for a, b in differences(groups_in(records)):
        met.setdefault(a, []).append(b.removeprefix("best-of-N, picked by QNet "))
    assert met["QLASS M=2"] == ["search by log-probability M=2", "N=3", "N=2"]
    assert met[f"vote{player and ': '}{player} M=2"] == ["search by log-probability M=2", "N=2", "QLASS M=2"]


def test_the_headline_is_about_the_tasks_that_all_have_played():
    """Of four tasks greedy earns none; search by log-probability plays two and earns one, QLASS earns three."""
    played = {("greedy", 1, "a"): "0000", ("likeliest", 2, "a"): "01", ("qlass", 2, "a, 1 epoch, rank"): "0111"}
    records = []
    for (name, m, label), rewards in played.items():
        row = {"method": name, "M": m, "label": label}
        records += [row | {"task_id": task, "reward": int(reward)} for task, reward in enumerate(rewards)]
    rows = groups_in(records)
    (headline,) = tables.headlines(rows)
    start = r"lake: QLASS .a, 1 epoch, rank. M=2 earns 0\.500 \[.* on 2 tasks; \+0\.500 \[.*; \+0\.000 \["
    assert re.match(start, headline)
    assert list(tables.results_table(rows, rows)["minus greedy"].str[:6]) == ["", "+0.500", "+0.750"]


def test_the_headline_is_about_the_most_candidates():
    """M = 6 rather than M = 2 in each of two episodes, which stand behind it in the table."""
    sizes = {(1, 1): "greedy", (6, 1): "qlass", (2, 2): "qlass"}
    records = [{"method": name, "M": m, "N": n, "select": "q" * (n > 1)} for (m, n), name in sizes.items()]
    (headline,) = tables.headlines(groups_in(records))
    assert "QLASS M=6 earns" in headline


def test_no_headline_is_about_rivals_that_share_no_task():
    played = {"greedy": "ab", "likeliest": "cd", "qlass": "abcd"}
    records = [{"method": m, "M": 1 + (m != "greedy"), "task_id": t} for m, tasks in played.items() for t in tasks]
    assert not [*tables.headlines(groups_in(records))]


def test_a_sample_far_below_greedy_is_told():
    records = [
        {"method": m, "task_id": task, "reward": m == "greedy"} for m in ("greedy", "sample") for task in "abcdef"
    ]
    line, _ = tables.notes(groups_in(records))
    assert line.startswith("lake: one sample is below the greedy agent: -1.000 [") and "--temperature" in line


def test_expected_ranges_are_checked():
    head = "environment,method,M,N,select,low,high,tasks"
    rows = ["lake,greedy,1,1,,0.70,0.73,1", "lake,qlass,2,1,,0.76,0.80,1", "lake,qlass,6,1,,0.76,0.80,431"]
    Path("expected.csv").write_text("\n".join([head, *rows, "webshop,greedy,1,1,,0.1,0.2,1"]))
    played = [{"reward": 0.71}, QLASS | {"reward": 0.7596}, QLASS | {"reward": 0.79, "label": "half"}]
    groups = groups_in([*played, QLASS | {"M": 6, "reward": 0.7}])
    assert expected.verdicts(groups, expected.read_ranges(Path("expected.csv"))) == [
        "agent, greedy 0.7100, expected 0.7 to 0.73: ok",
        "QLASS M=2 0.7596, expected 0.76 to 0.8: not as expected",
        "QLASS M=6 0.7000, expected 0.76 to 0.8: not compared, as this is over 1 tasks, and the range over 431",
    ]


# ------------------------------------------------------------------------------- what may stand in one row or one table

PROTOCOL = {"environment": "lake", "version": "0", "options": [], "data": {}, "max_steps": None, "temperature": 0.7}


def run_folder(folder, seed=0, sft="a", qnet="b", learned=()):
    """Results of greedy, qlass and a rule with metadata as the stages write them."""
    for name in ("sft", "qnet"):
        Path(folder, name).mkdir(parents=True)
    inputs = {"sft": "sft", "qnet": "qnet"}
    metas = {
        "sft": {"recipe": {"seed": seed, "epochs": 12}, "inputs": {}, "tasks": learned},
        "qnet": {"recipe": {"seed": seed, "sft": sft}, "inputs": {"sft": "sft"}},
        "results": {"recipe": {"seed": seed, "sft": sft, "qnet": qnet}, "inputs": inputs, "protocol": PROTOCOL},
    }
    for name, meta in metas.items():
        write(f"{folder}/{name}.meta.json", [meta])
    methods = ("greedy", 1), ("qlass", 2), ("rule", 1)
    records = [RESULT | {"task_id": t, "method": m, "M": n, "seed": seed} for t in "xy" for m, n in methods]
    write(f"{folder}/results.jsonl", records)
    return folder


def test_seeds_of_one_pipeline_are_pooled_wherever_they_lie_but_not_one_model_as_two_trainings(capsys):
    folders = [run_folder(f"seed{n}", n, f"a{n}", f"b{n}") for n in range(3)]
    folders[1] = str(Path("seed1").rename("moved"))
    assert {len(group.episodes) for group in parts_of(*folders)} == {6}
    assert capsys.readouterr().err == ""
    parts_of(folders[0], run_folder("again", 7, "a0", "other"))
    assert capsys.readouterr().err == "warning: lake: one agent under two --seed, so not two trainings\n"


def test_what_is_to_be_minded_is_on_the_page(capsys):
    file = "results.jsonl"
    write(file, [RESULT, RESULT | {"task_id": "b", "cut_prompts": 3}, RESULT | {"method": "sample"}])
    write("results.meta.json", [{"recipe": {"sft": "of before"}, "inputs": {"sft": "agent.json"}}])
    Path("agent.json").touch()
    Path("results.jsonl.parts").mkdir()
    report.main(["--run", "."])
    texts = capsys.readouterr().err, Page().words, Path("report.md").read_text()
    stale = f"{file} was made from another agent.json than there is now: make it again"
    few = "lake: rows over 1 tasks and over 2: means may differ"
    cut = "agent, greedy: 3 prompts lost their oldest turns"
    for warning in (stale, few, cut, f"{file} is not complete, so nothing new is read"):
        assert all(warning in text for text in texts)


def test_tasks_that_a_checkpoint_has_learned_from_are_counted(monkeypatch):
    monkeypatch.setattr(FakeEnv, "subject", lambda self, task: task.replace("x", "z"))  # x and z want one product
    monkeypatch.setattr("environments.environment_class", lambda name: FakeEnv)
    monkeypatch.setattr("reporting.results.environment_class", lambda name: FakeEnv)
    folder, elsewhere = Path(run_folder("run", learned=["z"])).absolute(), Path("other")  # as --out writes it
    elsewhere.mkdir()
    shutil.copy(folder / "results.jsonl", elsewhere)
    meta = (folder / "results.meta.json").read_text()
    (elsewhere / "results.meta.json").write_text(meta.replace('"sft": "sft"', '"sft": "../run/sft"'))
    settings = '[run]\nenv = "fake"\nenv_option = []\n[sft]\nmodel = "tiny"\n'

    def warnings_of(path, text, encoding="utf-8-sig"):  # as some editors write it
        (folder / "settings.toml").write_text(text, encoding)
        warnings = []
        results.read_results(results.result_files([str(path)]), warnings)
        return "\n".join(warnings)

    for path in (folder, elsewhere):
        assert "/sft has learned from 1 of 2 tasks" in warnings_of(path, settings)
    (elsewhere / "results.meta.json").write_text(meta.replace('"sft": "sft"', '"judge sft": "../run/sft"'))
    assert "/sft has learned from 1 of 2 tasks" in warnings_of(elsewhere, settings)
    assert "settings.toml has not the settings of a run: " in warnings_of(folder, settings, "utf-16")
    monkeypatch.undo()  # and leave the folder
    for away in ('"away:Maze"', '"fake"\nenv_option = ["data=away"]'):
        text = settings.replace('"fake"\nenv_option = []', away)
        assert "whether its models have learned from its tasks is not known: " in warnings_of(folder, text)


def test_the_protocol_stands_below_the_table(capsys):
    folders = [run_folder(f"seed{n}", n, f"a{n}", f"b{n}") for n in (0, 1)]
    report.main([*folders, "--out", "report.html"])
    tasks = {"test": {"n": 2, "sha256": hashlib.sha256(b"x\ny\n").hexdigest()[:16]}}
    line, shown = f"Protocol of lake: {json.dumps(PROTOCOL | {'tasks': tasks})}", capsys.readouterr().out
    assert line in shown.split("\n") and line in Page().words


# ----------------------------------------------------------------------------------------- the page and its pictures


class Page(HTMLParser):
    """Every start tag of report.html with its attributes, and all texts."""

    def __init__(self):
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(Path("report.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words += data + " "


def test_the_page_holds_everything_and_stays_by_itself():
    shutil.copy(RESULTS, "results.jsonl")
    Path("settings.toml").write_text("[train_qnet]\nlr = 0.5\n")
    write("qnet.log.jsonl", [{"step": 1, "loss": 0.5, "lr": 1}, {"step": 1, "loss": 0.5, "epoch": 1}])
    env = read_jsonl(RESULTS)[0]["env"]
    Path("ranges").write_text(f"environment,method,M,N,select,low,high,tasks\n{env},greedy,1,1,,0.4,0.6,4")
    report.main(f"--run . --trees {TREES} --expected ranges".split())
    html = Page()
    sections = ["summary", "results", "what-qnet-adds", "an-episode", "training", "trees", "inputs"]
    assert [attributes["id"] for tag, attributes in html.tags if tag == "section"] == sections
    links = [attributes[name] for _, attributes in html.tags for name in ("src", "href") if name in attributes]
    assert len(links) == 3 and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in html.tags)  # no network
    shown = page.EPISODE.format(task="test_2", n=4)
    for phrase in ("0.688 [", "where the interval covers 0", page.CAPTION, shown, "lr = 0.5", "to 0.6: ok"):
        assert phrase in html.words
    assert html.words.index("Rules and oracles") < html.words.index("best-of-N, picked by true reward (oracle) N=2")


def test_a_tree_is_drawn_labelled_or_not(capsys):
    """The task, each node's action and its q or its branch; without --task the largest tree."""
    lines = [node for node in read_jsonl(TREES) if node["task_id"] == "train_0"]
    unlabelled = [{k: v for k, v in node.items() if k not in ("q", "q_raw")} for node in lines]
    for nodes in (lines, unlabelled):
        write("q_labels.jsonl", [nodes[0] | {"task_id": "small", "nodes": 1}, *nodes])
        tree.main(["--run", "."])
        drawn = Path("tree_train_0.svg").read_text()
        assert f">{nodes[0]['task']}<" in drawn
        for node in nodes[1:]:
            below = "expert" if node["source"] == "expert" else f"branch {node['branch']}"
            below = f"{node['q']:.2f}" if "q" in node else below
            assert f">{tree.short(parse_action(node['action']))}<" in drawn and f">{below}<" in drawn
    assert "tree_train_0.svg: the 6 nodes of task train_0" in capsys.readouterr().out


def drawn(step, **more):
    """What stands on the picture of an episode of one step."""
    figures.save(figures.episode(RESULT | {"steps": [step]} | more), Path("a.svg"))
    return "".join(ElementTree.parse("a.svg").getroot().itertext())


def test_a_candidate_without_a_score_is_not_drawn():
    candidates = [{"action": f"Action: {word}", "q": q} for word, q in {"left": 0.2, "up": None, "right": 0.7}.items()]
    text = drawn({"action": "Action: left", "candidates": candidates})
    assert "step 1: right" in text and "left" in text and "up" not in text


def test_what_xml_forbids_is_drawn_as_a_mark():
    step = {"action": "Action: \x1b[1m", "candidates": [{"action": a, "q": 0.5} for a in ("Action: \x1b[1m", "\uffff")]}
    text = drawn(step, task="é\x00\n")
    assert "step 1: �[1m" in text and "é�" in text and text.count("�") == 3


def test_text_of_a_model_or_an_environment_runs_nothing():
    """Texts of results and of a tree are scripts; the viewer, itself a script, writes text alone."""
    evil = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{trees}}"
    row = RESULT | {"task_id": evil, "env": evil, "task": evil, "label": evil}
    write("results.jsonl", [row, row | {"method": "qlass", "M": 2}])
    texts = dict.fromkeys(("task_id", "task", "source", "observation"), evil)
    root = next(iter(read_jsonl(TREES))) | texts | {"nodes": 2}
    write("q_labels.jsonl", [root, root | {"node_id": 1, "parent_id": 0, "action": evil, "done": True}])
    report.main(["--run", "."])
    html = Page()
    assert [tag for tag, _ in html.tags].count("script") == 2 and evil in html.words
    assert "innerHTML" not in html.words and all("onerror" not in attributes for _, attributes in html.tags)


def test_the_viewer_shows_the_action_that_was_executed():
    text = "<think>Action: a?</think>Thought: I see no Action: yet.\nAction: go: to sink 1"
    root = next(iter(read_jsonl(TREES))) | {"nodes": 2}
    child = root | {"node_id": 1, "parent_id": 0, "action": text, "done": True}
    write("trees.jsonl", [root, child])
    ((_, node),) = json.loads(page.tree_data(Path("trees.jsonl")))["trees"]
    assert node["action"] == "go: to sink 1" and node["thought"].endswith("I see no Action: yet.")


STUB = """const any = new Proxy(function () {}, {
    get: (_, name) => name === Symbol.toPrimitive ? () => '' : name === 'textContent' ? DATA : any,
    apply: () => any, set: () => true});
const document = any;"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node runs the page's script")
def test_labels_of_ones_own_are_drawn_and_shown():
    """Their roots have no `task`."""
    turn = {"role": "user", "content": "Hello"}
    write("rows.jsonl", [{"messages": [turn], "action": action, "value": 0.5} for action in "ab"])
    exec(code_on("files.md", "rows.jsonl"), {})
    tree.main(["--trees", "q_labels.jsonl"])
    html = page.render([], page.tree_data(Path("q_labels.jsonl")), [])
    data, script = re.findall(r"<script.*?>(.*?)</script>", html, re.S)
    subprocess.run(["node", "-e", STUB.replace("DATA", json.dumps(data)) + script], check=True)


# ------------------------------------------------ what the model sees of a demonstration (reporting.demonstration)

GOOD = demonstrate(FakeEnv(), "train0")  # right, right, right
ACT = json.loads(json.dumps(GOOD).replace("Action:", "Act:"))
LONGER = GOOD | {"messages": [*GOOD["messages"], {"role": "user", "content": "on"}, GOOD["messages"][-1]]}
OTHER = json.loads(json.dumps(GOOD).replace("start right right", "start right  right"))
ELSEWHERE = json.loads(json.dumps({"messages": GOOD["messages"]}).replace("start", "the end"))
EARNED = "replaying them earned 1"


@pytest.mark.parametrize(
    ("record", "says", "not_said"),
    [
        (GOOD, ["  3 right", f"{EARNED}, 1 is recorded; 0 answers are not the recorded ones"], "<-"),
        (ACT, ["<- the environment does not know it", "earned 0, 1 is recorded, and the episode was"], EARNED),
        (LONGER, ["  the episode is over: 1 more actions are recorded", EARNED], "not the recorded ones; 1"),
        (OTHER, ["<- another answer than recorded: '", "start right right' in place of '"], "; 0 answers"),
        (ELSEWHERE, [": right<end>", "no training task has this task_id"], EARNED),
    ],
)
def test_a_demonstration_is_shown_and_replayed(record, says, not_said, fake_world, capsys):
    write("expert.jsonl", [GOOD, record])
    shutil.copy(PRESETS / "tiny" / "frozenlake.toml", "settings.toml")
    demonstration.main(["--run", ".", "--expert", "expert.jsonl", "--number", "2"])
    shown = capsys.readouterr().out
    assert all(text in shown for text in says) and not_said not in shown
    writes = [line.removeprefix("writes | ") for line in shown.splitlines() if line.startswith("writes | ")]
    actions = len(record["messages"]) // 2 - 1
    assert len(writes) == 2 * actions and writes[-1].endswith(": right<end>")  # a thought and an action each
