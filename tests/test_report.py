"""The report: tables against hand-computed numbers, what may stand in one row, and a page that is complete and safe."""

import contextlib
import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from textwrap import shorten

import pytest
from fakes import FakeEnv, dump

import reporting.__main__ as report
from experiments.frontier import frontier, training_tokens
from qlass import UserError
from qlass.outputs import read_jsonl
from qlass.messages import parse_action
from qlass.demonstrations import demonstrate
from reporting import demonstration, expected, figures, page, results, tables, tree
from reporting.lineage import ancestors

HERE = Path(__file__).parent
RESULTS, TREES = HERE / "recordings/report_results.jsonl", HERE / "recordings/report_trees.jsonl"
LINES = list(read_jsonl(RESULTS))
RESULT = {"task_id": "a", "env": "lake", "method": "greedy", "reward": 1, "tokens": {"prompt": 1}}


def write(path: Path, records: list[dict]) -> None:
    path.write_text(dump(records))


def parts_of(*arguments: object) -> dict[str, results.Group]:
    return {str(g.condition): g for g in results.read_results(results.result_files(map(str, arguments)))}


def groups_in(folder: Path, records: list[dict]) -> dict[str, results.Group]:
    write(folder / "results.jsonl", records)
    return parts_of(folder)


def test_ids_stay_text_and_what_is_null_is_counted(tmp_path):
    """pandas alone reads "007" as 7, and leaves rows out of groups whose key is null."""
    null = dict.fromkeys(("label", "select", "player", "M", "N", "type", "block"))
    others = [{"method": "rule", "player": "first"}, {"method": "best_of_n", "N": 4, "select": "q"}, {"label": "half"}]
    records = [RESULT | null | more | {"task_id": task} for more in ({}, *others) for task in ("007", "7", 12)]
    groups = groups_in(tmp_path, records)
    names = {"rule: first", "SFT greedy", "SFT greedy [half]", "best-of-N, picked by QNet N=4"}
    assert set(groups) == names and all(group.reward.n == 3 for group in groups.values())
    assert list(groups["SFT greedy"].values("reward").index) == [("007", 0), ("12", 0), ("7", 0)]


def test_the_table_by_hand():
    table = tables.results_table(list(parts_of(RESULTS).values())).set_index("method")
    assert list(table.index) == [
        "SFT greedy", "best-of-N, picked by QNet N=2", "best-of-N, picked by true reward (oracle) N=2", "QLASS M=2",
    ]  # fmt: skip
    greedy, qlass = table.loc["SFT greedy"], table.loc["QLASS M=2"]
    # Rewards 0, .5, 1, .5 of greedy; QLASS .5, .5, 1, 1 with seed 0 and .5, 1, 1, 0 with seed 1.
    assert greedy["reward [95 %]"].startswith("0.500 [") and qlass["reward [95 %]"].startswith("0.688 [")
    assert (greedy["success"], qlass["success"]) == ("0.250", "0.500")
    # Tokens: 100 prompt, 20 (seed 0) and 24 (seed 1) generated, 30 scored.
    assert (qlass["generated tokens"], qlass["tokens"]) == ("22", "152")
    # Four tasks of .5 each: a share z^2 / (4 + z^2) = .490 that was not seen may earn 0, or 1.
    assert table["reward [95 %]"]["best-of-N, picked by QNet N=2"] == "0.500 [0.255, 0.745]"


def test_all_of_a_row_is_of_the_tasks_that_all_seeds_have_played(tmp_path):
    played = [(1, 0, 1), (2, 0, 0), (3, 0, 1), (4, 0, 1), (1, 1, 1), (2, 1, 1)]
    records = [{"task_id": f"t{t}", "seed": s, "reward": r, "tokens": {"prompt": 10 * t}} for t, s, r in played]
    (group,) = groups_in(tmp_path, [RESULT | record for record in records]).values()
    assert (group.reward.mean, group.reward.n, group.mean("total")) == (0.75, 2, 15)


def test_what_a_scorer_costs_is_not_known_and_a_bar_of_fewer_seeds_says_so(tmp_path):
    played = [("qlass", 0, "x"), ("qlass", 0, None), ("qlass", 1, None), ("scorer", 0, None)]
    records = [
        RESULT | {"method": method, "seed": seed, "label": label, "task_id": task, "M": 2}
        for method, seed, label in played for task in "ab"
    ]  # fmt: skip
    groups = groups_in(tmp_path, records)
    assert [math.isnan(group.mean("total")) for group in groups.values()] == [False, False, True]
    bars, differences = figures.labels(list(groups.values())).axes
    assert [text.get_text() for text in bars.get_yticklabels()] == ["QLASS M=2", "QLASS [x] M=2 (1 of 2 seeds)"]
    assert differences.get_xlabel() == "minus QLASS M=2, paired"


def differences(groups) -> dict[tuple[str, str], dict[str, str]]:
    table = tables.differences_table(list(groups))
    return {(row["method"], row["minus"]): row for row in table.to_dict("records")}


def test_the_differences_by_hand(tmp_path):
    shutil.copy(RESULTS, tmp_path / "results_avg.jsonl")
    table = differences(parts_of(RESULTS, f"target avg={tmp_path}").values())
    # Seed 0 is shared: .5, 0, 0, .5. The resampled mean is Binomial(4, 1/2) / 8, whose 95 % are 0 to .5.
    assert table["QLASS M=2", "SFT greedy"]["difference [95 %]"] == "+0.250 [+0.000, +0.500]"
    assert table["QLASS M=2", "SFT greedy"]["verdict"] == "undecided"
    assert table["QLASS M=2", "best-of-N, picked by QNet N=2"]["tokens (ratio)"] == "1.07"  # 150 / 140, of seed 0
    assert table["QLASS [target avg] M=2", "QLASS M=2"]["difference [95 %]"] == "+0.000 [+0.000, +0.000]"
    assert ("QLASS [target avg] M=2", "SFT greedy [target avg]") in table


def test_qlass_meets_the_best_of_n_of_its_cost_and_of_its_samples(tmp_path):
    several = [("best_of_n", 2, 140), ("best_of_n", 3, 150), ("best_of_n", 8, 999)]
    records = [{"method": m, "M": 2 if m == "qlass" else 1, "N": n, "select": "q", "tokens": {"generated": tokens}}
               for m, n, tokens in [("qlass", 1, 152), *several]]  # fmt: skip
    groups = groups_in(tmp_path, [RESULT | record | {"task_id": task} for record in records for task in "ab"])
    met = [b for a, b in differences(groups.values()) if a == "QLASS M=2"]
    assert met == ["best-of-N, picked by QNet N=3", "best-of-N, picked by QNet N=2"]


def test_what_qnet_adds_and_how_often_there_was_a_choice(tmp_path):
    """Of four tasks greedy earns none; search by log-probability one, QLASS three, where QNet had three choices."""
    played = {("greedy", 1): "0000", ("likeliest", 2): "0001", ("qlass", 2): "0111", ("qlass", 4): "1111"}
    step = {"action": "a", "observation": "o", "candidates": [{"action": "a", "q": 0.1}]}
    fork = step | {"candidates": [{"action": "a", "q": 0.1}, {"action": "b", "q": 0.0}]}
    records = [
        RESULT | {"method": name, "M": m, "task_id": str(task), "reward": int(reward), "n_steps": 2}
        | {"steps": [step, fork if name == "qlass" and int(reward) else step]}
        for (name, m), rewards in played.items() for task, reward in enumerate(rewards)
    ]  # fmt: skip
    rows = list(groups_in(tmp_path, records).values())
    table = tables.headline_table(tables.headline(rows)).set_index("method")
    assert table.index[1] == "search by the agent's log-probability M=2"
    over = table[["minus SFT greedy", "minus log-probability"]].map(lambda text: text.partition(" ")[0])
    assert over.to_numpy().tolist() == [["", ""], ["+0.250", ""], ["+0.750", "+0.500"], ["+1.000", ""]]
    (line,) = tables.what_qnet_adds(rows)  # with four candidates there is no other search to compare
    assert line == (
        "QLASS M=2 minus SFT greedy: +0.750. Search by log-probability has +0.250 without a QNet. "
        "QNet adds +0.500 [+0.000, +1.000], which may be noise."
    )
    assert ("QLASS M=2", "search by the agent's log-probability M=2") in differences(rows)
    first, _ = tables.choices_table(rows).to_dict("records")
    assert list(first.values()) == ["lake", "QLASS M=2", "8", "3 (38%)", "4", "1 (25%)", "3", "1", "0"]


def test_the_axis_is_that_of_the_searches_and_marks_stand_apart(tmp_path):
    """A chat agent without a reward, at 50 times the tokens, is named at the edge."""
    searches = [("qlass", m, 0.7 + m / 100, 100 + m) for m in range(2, 9)]
    played = [("greedy", 1, 0.7, 100), *searches, ("chat", 1, 0.0, 5000)]
    records = [
        RESULT | {"method": name, "M": m, "reward": reward, "tokens": {"generated": tokens}, "task_id": str(task)}
        for name, m, reward, tokens in played for task in range(40)
    ]  # fmt: skip
    for narrow in (False, True):
        figure = figures.tokens(list(groups_in(tmp_path, records).values()), narrow)
        left, _ = figure.axes
        assert left.get_ylim()[0] > 0.1 and left.get_xlim()[1] < 200
        assert left.texts[0].get_text() == "chat agent: 0.000 at\n5,000"
        boxes = [text.get_window_extent() for text in left.texts]
        assert len(boxes) == 8 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_expected_ranges_are_checked(tmp_path):
    rows = ["environment,method,M,N,select,low,high", "lake,greedy,1,1,,0.70,0.73", "lake,qlass,4,1,,0.76,0.80"]
    (tmp_path / "expected.csv").write_text("\n".join([*rows, "webshop,greedy,1,1,,0.1,0.2"]))
    played = [("greedy", 1, 0.71, ""), ("qlass", 4, 0.7, ""), ("qlass", 4, 0.79, "half")]
    records = [RESULT | {"method": name, "M": m, "reward": r, "label": label} for name, m, r, label in played]
    groups, ranges = list(groups_in(tmp_path, records).values()), expected.read_ranges(tmp_path / "expected.csv")
    assert expected.verdicts(groups, ranges) == [
        "agent .710, expected .70 to .73: ok", "QLASS M=4 .700, expected .76 to .80: not as expected, .0600 below",
    ]  # fmt: skip
    assert expected.verdict(0.7984, 0.8, 0.84) == "not as expected, .0016 below"  # which rounds to .80
    assert expected.verdict(0.85, 0.8, 0.84) == "not as expected, .0100 above"


def test_what_is_to_be_minded_is_on_the_page_and_what_is_not_complete_is_refused(tmp_path, capsys):
    file, parts = tmp_path / "results.jsonl", tmp_path / "results.jsonl.parts"
    write(file, [RESULT, RESULT | {"task_id": "b"}, RESULT | {"method": "sample"}])
    write(tmp_path / "results.meta.json", [{"recipe": {"sft": "of before"}, "inputs": {"sft": "agent.json"}}])
    (tmp_path / "agent.json").touch()
    parts.mkdir()
    report.main(["--run", str(tmp_path)])
    stale = f"{file} was made from another {tmp_path / 'agent.json'} than there is now: make it again"
    texts = capsys.readouterr().err, Page(tmp_path / "report.html").words, (tmp_path / "report.md").read_text()
    for warning in (stale, f"{file}: is being extended", "lake: rows over 1 tasks and over 2: their means may differ"):
        assert all(warning in text for text in texts)
    write(tmp_path / "results_b.jsonl", [RESULT | {"task_id": "c"}, RESULT | {"reward": 0}])
    with pytest.raises(UserError, match=r"results.jsonl:1 and .*results_b.jsonl:2"):
        parts_of(tmp_path)
    file.unlink()
    for argument in (tmp_path, file):
        with pytest.raises(UserError, match=r"results.jsonl: is not complete: the command that began it \(again\)"):
            parts_of(argument)


def test_a_user_without_a_home_gets_a_report(tmp_path):
    write(tmp_path / "results.jsonl", [RESULT])
    homeless = "import sys; sys.modules['pwd'] = None; import reporting.__main__ as report; "
    homeless += f"report.main(['--run', {str(tmp_path)!r}])"
    subprocess.run([sys.executable, "-c", homeless], cwd=HERE.parent, env={}, check=True)
    assert (tmp_path / "report.html").exists()


PROTOCOL = {"environment": "lake", "version": "0", "options": [], "data": {}, "max_steps": None, "temperature": 0.7}


def run_folder(folder, seed=0, sft="a", qnet="b", tasks="xy", protocol=None, **flags) -> str:
    """Results of greedy, qlass and a rule with metadata as the stages write them; flags: {stage_flag: value}."""

    def meta(name: str, recipe: dict, **inputs: str) -> None:
        own = {k.removeprefix(f"{name}_"): v for k, v in flags.items() if k.startswith(f"{name}_")}
        record = {"recipe": {"seed": seed} | recipe | inputs | own, "inputs": {n: n for n in inputs}, "trees": 4}
        write(folder / f"{name}.meta.json", [record | own])

    for name in ("sft", "qnet"):
        (folder / name).mkdir(parents=True)
    meta("sft", {"epochs": 12})
    meta("qnet", {"epochs": 8, "limit": None}, sft=sft)
    flags["results_protocol"] = PROTOCOL | (protocol or {})
    meta("results", {"env": "lake", "env_option": [], "max_steps": None}, sft=sft, qnet=qnet)
    methods = ("greedy", 1), ("qlass", 2), ("rule", 1)
    records = [RESULT | {"task_id": t, "method": m, "M": n, "seed": seed} for t in tasks for m, n in methods]
    write(folder / "results.jsonl", records)
    return str(folder)


def test_seeds_of_one_pipeline_are_pooled_wherever_they_lie_and_what_cannot_be_told_is_a_warning(tmp_path, capsys):
    folders = [run_folder(tmp_path / f"seed{n}", n, f"a{n}", f"b{n}") for n in range(3)]
    folders[1] = str((tmp_path / "seed1").rename(tmp_path / "moved"))
    assert {len(group.episodes) for group in parts_of(*folders).values()} == {6}
    assert capsys.readouterr().err == ""
    parts_of(folders[0], run_folder(tmp_path / "again", 7, "a0", "other"))
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "SFT greedy is of one model under two --seed, so not of two" in warning
    (tmp_path / "moved" / "results.meta.json").unlink()
    parts_of(*folders[:2])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: lake: 1 of 2 files tell no protocol") and "moved/results.jsonl: no meta" in second


@pytest.mark.parametrize(
    ("label", "other", "says"),
    [
        ("", {"sft": "z", "tasks": "z"}, "/one/results.* and .*/two/results.*: SFT greedy with different --sft of one"),
        ("", {"seed": 1, "qnet_trees": 9}, "QLASS with different --trees of qnet .4, 9"),
        ("other=", {"seed": 1, "qnet_trees": 9}, None),  # labels tell them apart
        ("other=", {"protocol": {"version": "1"}}, "lake with different version .0, 1., not one table"),
        ("other=", {"protocol": {"max_steps": 8}}, "lake with different max_steps .None, 8"),
        ("other=", {"protocol": {"data": {"data": "2"}}}, "lake with different data"),
        ("other=", {"tasks": "y"}, None),  # a part of those of the longest row
        ("other=", {"tasks": "yz"}, "lake: rule and rule .other. with different tasks, not one table"),
        ("other=", {"protocol": {"temperature": 1.0, "tokens": "real"}}, None),
    ],
)
def test_what_is_not_the_same_is_not_pooled_and_what_has_another_protocol_is_in_no_table(tmp_path, label, other, says):
    first, second = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", **other)
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        assert len(parts_of(first, f"{label}{second}")) == 6


def test_the_protocol_stands_below_the_table_and_alone(tmp_path, capsys):
    folders = [run_folder(tmp_path / f"seed{n}", n, f"a{n}", f"b{n}") for n in (0, 1)]
    report.main([*folders, "--out", str(tmp_path / "report.html")])
    tasks = {"test": {"n": 2, "sha256": hashlib.sha256(b"x\ny\n").hexdigest()[:16]}}
    told = PROTOCOL | {"tasks": tasks, "seeds": [0, 1], "methods": ["rule", "SFT greedy", "QLASS M=2"]}
    line = f"Protocol of lake: {json.dumps(told)}"
    page = capsys.readouterr().out
    assert line in page.split("\n") and line in Page(tmp_path / "report.html").words and "\n2 seeds say little" in page
    report.main([folders[1], "--protocol"])
    assert json.loads(capsys.readouterr().out) == {f"{folders[1]}/results.jsonl": told | {"seeds": [1]}}
    base = run_folder(tmp_path / "base", results_cloned=False)  # a model as it came
    assert set(parts_of(base)) == {"rule", "SFT greedy [base agent]", "QLASS [base agent] M=2"}


METAS = {
    "sft": {"recipe": {"model": "tiny"}},
    "sft-rl": {"last": {"tokens": 1000}, "passes": 6},
    "sft-guided": {"tokens": 50, "inputs": {"expert": "guided.jsonl"}},  # cloned from what QNet guided
    "guided.jsonl": {"kept": 3, "tokens": 5, "inputs": {"sft": "sft", "qnet": "qnet"}},
    "sft-both": {"last": {"tokens": 10, "played": 1}, "passes": 6, "inputs": {"sft": "sft-guided"}},
    "qnet": {"tokens": 100, "inputs": {"labels": "q.jsonl"}},
    "q.jsonl": {"inputs": {"trees": "trees.jsonl"}},
    "trees.jsonl": {"tokens": 7},
    "downloaded": {},
    "qnet-resumed": {"tokens": None},
}
COSTS = {  # label: method, what its results were made from, tokens of training
    "": ("qlass", {"sft": "sft", "qnet": "qnet"}, 307),
    "rl": ("greedy", {"sft": "sft-rl"}, 6000),
    "rl, old QNet": ("qlass", {"sft": "sft-rl", "qnet": "qnet"}, 6307),
    "both": ("greedy", {"sft": "sft-both"}, 523),
    "foreign QNet": ("qlass", {"sft": "sft", "qnet": "downloaded"}, math.nan),
    "what it cost in all is not known": ("qlass", {"sft": "sft", "qnet": "qnet-resumed"}, math.nan),
}


def test_what_an_agent_cost_is_in_the_metadata_behind_its_results():
    results_of = {f"results{label}.jsonl": {"inputs": inputs} for label, (_, inputs, _) in COSTS.items()}
    for name, meta in (METAS | results_of).items():
        Path(name).touch()
        write(Path(name).with_suffix(".meta.json"), [meta])
    for label, (method, *_) in COSTS.items():
        write(Path(f"results{label}.jsonl"), [RESULT | {"method": method, "label": label}])
    groups = parts_of(*results_of).values()
    costs = {group.condition.label: training_tokens(group) for group in groups}
    assert costs == pytest.approx({label: tokens for label, (*_, tokens) in COSTS.items()}, nan_ok=True)
    (first, *_) = frontier(list(groups)).axes
    lines = {line.get_label(): list(line[0].get_xdata()) for line in first.containers}
    assert lines["rl"] == [pytest.approx((6000 + 100 * 1) / 1e6)]  # of 100 tasks


def test_what_two_runs_share_is_counted_once_whatever_way_leads_there():
    """An agent that grew trees of its own in a folder below."""
    Path("grpo").mkdir()
    agent = {"last": {"tokens": 10, "played": 1}, "passes": 6, "inputs": {}}
    qnet = {"tokens": 100, "inputs": {"sft": "../sft-grpo"}}
    results_ = {"inputs": {"sft": "sft-grpo", "qnet": "grpo/qnet"}}
    for name, meta in {"sft-grpo": agent, "grpo/qnet": qnet, "results.jsonl": results_}.items():
        Path(name).touch()
        write(Path(name).with_suffix(".meta.json"), [meta])
    write(Path("results.jsonl"), [RESULT | {"method": "qlass"}])
    (group,) = parts_of("results.jsonl").values()
    assert set(ancestors(Path("results.jsonl"), ["sft", "qnet"])) == {
        Path("sft-grpo").absolute(), Path("grpo/qnet").absolute(),
    }  # fmt: skip
    assert training_tokens(group) > 0


def test_a_variant_of_a_labelled_run_is_compared_with_that_run(tmp_path):
    rewards = {"": 0.9, "b": 0.3, "b, rank": 0.6}
    records = [
        RESULT | {"method": "greedy" if label in ("", "b") else "qlass", "label": label or None, "reward": reward}
        for label, reward in rewards.items()
    ]
    groups = groups_in(tmp_path, records)
    rank = next(group for group in groups.values() if group.condition.label == "b, rank")
    assert tables.greedy_of(rank, list(groups.values())).condition.label == "b"


def test_refused_tasks_and_cut_prompts_are_told(tmp_path, capsys):
    groups_in(tmp_path, [RESULT | {"refused": "no", "reward": 0}, RESULT | {"task_id": "z", "cut_prompts": 3}])
    told = capsys.readouterr().err
    assert "1 tasks were refused, and count as reward 0" in told and "3 prompts lost their oldest turns" in told


class Page(HTMLParser):
    """Every start tag with its attributes, and all texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words += data + " "


def test_the_page_holds_everything_and_stays_by_itself(tmp_path):
    # Another process reward for Fig. 4.
    write(tmp_path / "results.jsonl", LINES + [row | {"label": "target avg"} for row in LINES[4:12]])
    report.main(["--run", str(tmp_path), "--trees", str(TREES)])
    html = Page(tmp_path / "report.html")
    sections = ["tokens", "results", "differences", "labels", "trees", "inputs"]
    assert [a["id"] for _, a in html.tags if a.get("id") in sections] == sections  # the figure comes first
    assert sum(tag == "svg" for tag, _ in html.tags) == 4  # each figure in two widths
    assert all((attributes.get(name) or "#")[0] == "#" for _, attributes in html.tags for name in ("src", "href"))
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in html.tags)  # no network
    assert all(phrase in html.words for phrase in ("0.688 [", "where the interval covers 0"))
    assert [path.read_bytes()[1:4] for path in tmp_path.glob("*.png")] == [b"PNG"] * 2

    data, nodes = json.loads(page.tree_data(TREES, 2)), list(read_jsonl(TREES))
    assert data["total"] == 3 and [tree["task"] for tree in data["trees"]] == ["train_0", "train_2"]
    first = data["trees"][0]["nodes"]
    assert [node["parent"] for node in first] == [-1, 0, 1, 2, 1, 4]
    for name in ("q", "expert", "reward", "observation"):
        assert [node[name] for node in first] == [line.get(name) for line in nodes[:6]]
    assert (first[4]["action"], first[4]["thought"]) == ("click[b02]", "It is redder.")

    def tree(task: str, *sources: str) -> list[dict]:
        """A root and a leaf of each source."""
        root = nodes[0] | {"task_id": task, "nodes": 1 + len(sources), "node_id": 0}
        leaves = [{"task_id": task, "node_id": i, "parent_id": 0, "source": s} for i, s in enumerate(sources, 1)]
        return [root, *(nodes[1] | leaf for leaf in leaves)]

    expert, few, grown = tree("a", *["expert"] * 4), tree("b", "policy", "expert"), tree("c", *["policy"] * 3)
    for trees, place in ((expert + few + grown, 2), (expert + few, 1), (grown + few, 0)):
        write(tmp_path / "trees.jsonl", trees)
        assert json.loads(page.tree_data(tmp_path / "trees.jsonl"))["first"] == place


def test_a_tree_is_drawn_labelled_or_not(tmp_path, capsys):
    """A circle for each node, its action above the edge, its q or its source below; the first tree that branches."""
    lines = [node for node in read_jsonl(TREES) if node["task_id"] == "train_0"]
    chain = [node | {"task_id": "chain"} for node in lines[:2]]
    chain[0] |= {"nodes": 2}
    unlabelled = [{k: v for k, v in node.items() if k not in ("q", "q_raw")} for node in lines]
    for name, nodes, below in (("q_labels", lines, "q"), ("trees", unlabelled, "source")):
        (tmp_path / f"{name}.jsonl").write_text(dump([*chain, *nodes]))
        tree.main(["--trees", str(tmp_path / f"{name}.jsonl"), "--out", str(tmp_path / "x.svg")])
        drawn = (tmp_path / "x.svg").read_text()
        assert drawn.count("<circle") == len(lines) and drawn.count("r = ") == sum(node["done"] for node in lines)
        for node in lines[1:]:
            action, value = parse_action(node["action"]), node[below] if below == "source" else f"{node['q']:.2f}"
            assert f">{shorten(action, tree.LETTERS, placeholder='…')}<" in drawn and f">{value}<" in drawn
    tree.main(["--run", str(tmp_path), "--task", "chain"])  # of q_labels.jsonl
    assert (tmp_path / "tree_chain.svg").read_text().count("<circle") == 2
    assert "tree_chain.svg: the 2 nodes of task chain" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no tree of task 9; its tasks are chain, train_0"):
        tree.main(["--run", str(tmp_path), "--task", "9"])


def test_text_of_a_model_or_an_environment_runs_nothing(tmp_path):
    """Texts of results and of a tree are scripts; the viewer, itself a script, writes text alone."""
    evil = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{trees}}"
    row = RESULT | {"task_id": evil, "env": evil, "task": evil, "label": evil}
    write(tmp_path / "results.jsonl", [row, row | {"method": "qlass", "M": 2}])
    root = {"task_id": evil, "task": evil, "messages": [{"role": "user", "content": evil}], "source": evil, "q": 0.1}
    root |= {"node_id": 0, "parent_id": None, "action": None, "observation": evil, "reward": 0.0, "nodes": 2}
    write(tmp_path / "q_labels.jsonl", [root, root | {"node_id": 1, "parent_id": 0, "action": evil, "done": True}])
    report.main(["--run", str(tmp_path)])
    html = Page(tmp_path / "report.html")
    assert [tag for tag, _ in html.tags].count("script") == 2 and evil in html.words
    assert "innerHTML" not in html.words and all(tag != "img" for tag, _ in html.tags)


# ------------------------------------------------ what the model sees of a demonstration (reporting.demonstration)

GOOD = demonstrate(FakeEnv(), "train0")  # right, right, right
ACT = json.loads(json.dumps(GOOD).replace("Action:", "Act:"))
ELSEWHERE = json.loads(json.dumps({"messages": GOOD["messages"]}).replace("start", "the end"))
EARNED = "replaying them earned 1"


@pytest.mark.parametrize(
    ("record", "says", "not_said"),
    [
        (GOOD, ["  3 right", f"{EARNED}, 1 is recorded; 0 answers are not the recorded ones"], "<-"),
        (GOOD | {"reward": 0.5}, [f"{EARNED}, 0.5 is recorded"], "<-"),
        (ACT, ["<- the environment does not know it", "earned 0, 1 is recorded, and the episode was"], EARNED),
        (ELSEWHERE, ["  right", "no training task has this id or begins with these words"], EARNED),
        (GOOD | {"task_id": "train3", "messages": ELSEWHERE["messages"]}, ["; 2 answers are not"], "know it"),
    ],
)
def test_a_demonstration_is_shown_and_replayed(record, says, not_said, tmp_path, fake_world, capsys):
    (tmp_path / "expert.jsonl").write_text(dump([GOOD, record]))
    show = ["--env", "frozenlake", "--run", str(tmp_path / "run"), "--expert", str(tmp_path / "expert.jsonl")]
    demonstration.main([*show, "--number", "2"])
    shown = capsys.readouterr()
    assert all(text in shown.out for text in says) and not_said not in shown.out
    writes = [line.removeprefix("writes | ") for line in shown.out.splitlines() if line.startswith("writes | ")]
    assert len(writes) == 6 and writes[-1].endswith(": right<end>")  # a thought and an action each
    assert "you stand at" in shown.out.partition(" reads | ")[2]
    with pytest.raises(UserError, match=r"--number 3: .*expert\.jsonl has 2 demonstrations"):
        demonstration.main([*show, "--number", "3"])


@pytest.mark.parametrize(("records", "warns"), [([ACT, ACT], True), ([GOOD, ACT], False)])
def test_a_file_without_any_action_is_told(records, warns, tmp_path, fake_world, capsys):
    (tmp_path / "expert.jsonl").write_text(dump(records))
    demonstration.main(["--env", "frozenlake", "--run", str(tmp_path)])
    assert ('no message has "Action:", so each is an action as a whole' in capsys.readouterr().err) == warns
