"""The report: tables against hand-computed numbers, what may stand in one row, and a page that is complete and safe."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report
from qlass import UserError
from reporting import figures, results, tables
from reporting.frontier import frontier, training_tokens

HERE = Path(__file__).parent
RESULTS, TREES = HERE / "recordings/report_results.jsonl", HERE / "recordings/report_trees.jsonl"
LINES = [json.loads(line) for line in RESULTS.read_text().splitlines()]
RESULT = {"task_id": "a", "env": "lake", "method": "greedy", "reward": 1, "tokens": {"prompt": 1}}


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def groups_of(*arguments: object) -> dict[str, results.Group]:
    groups = results.read_results(results.result_files(map(str, arguments)))
    return {str(group.condition): group for group in groups}


@pytest.fixture
def scripted(tmp_path):
    """Groups of 40 tasks with rewards `mean` + noise that all methods share, from (method, mean, fields)."""

    def groups(*methods: tuple[str, float, dict]) -> list[results.Group]:
        records = []
        for method, mean, fields in methods:
            noise = random.Random(0)
            tokens = {"tokens": {"generated": fields.get("tokens", 100)}}
            for task in range(40):
                record = {"env": "webshop", "method": method, "M": 1, "N": 1, "task_id": str(task), "env_steps": 9}
                records.append(record | {"reward": mean + noise.uniform(-0.1, 0.1)} | fields | tokens)
        write(tmp_path / "results.jsonl", records)
        return results.read_results([("", tmp_path / "results.jsonl")])

    return groups


# ------------------------------------------------------------------------------------------------------------- reading


def test_ids_stay_text_and_what_is_null_is_counted(tmp_path):
    """pandas alone reads "007" as 7, and leaves rows out of groups whose key is null."""
    null = dict.fromkeys(("label", "select", "player", "M", "N", "type", "block"))
    others = [{"method": "rule", "player": "first"}, {"method": "best_of_n", "N": 4, "select": "q"}, {"label": "half"}]
    records = [RESULT | null | more | {"task_id": task} for more in ({}, *others) for task in ("007", "7", 12)]
    write(tmp_path / "results.jsonl", records)
    groups = groups_of(tmp_path)
    assert {name: group.reward.n for name, group in groups.items()} == dict.fromkeys(
        ("rule: first", "SFT greedy", "SFT greedy [half]", "best-of-N, picked by QNet N=4"), 3
    )
    assert list(groups["SFT greedy"].values("reward").index) == [("007", 0), ("12", 0), ("7", 0)]


def test_a_last_line_cut_short_is_skipped_with_a_warning(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text(RESULTS.read_text()[:-40])
    assert len(groups_of(tmp_path)["best-of-N, picked by true reward (oracle) N=2"].episodes) == 3
    assert re.search(r"warning: .*results.jsonl:20: .*cut short", capsys.readouterr().err)


def test_two_results_of_the_same_task_must_agree(tmp_path):
    write(tmp_path / "results.jsonl", [*LINES, LINES[0]])
    assert len(groups_of(tmp_path)["SFT greedy"].episodes) == 4
    write(tmp_path / "results.jsonl", [*LINES, LINES[0] | {"reward": 0.75}])
    with pytest.raises(UserError, match=r"results.jsonl:1 and .*results.jsonl:21: two different results"):
        groups_of(tmp_path)


# -------------------------------------------------------------------------------------------------------------- tables


def test_the_table_by_hand():
    table = {row["method"]: row for row in tables.results_table(list(groups_of(RESULTS).values()))}
    assert list(table) == [
        "SFT greedy", "best-of-N, picked by QNet", "best-of-N, picked by true reward (oracle)", "QLASS",
    ]  # fmt: skip
    greedy, qlass = table["SFT greedy"], table["QLASS"]
    # Rewards 0, .5, 1, .5 of greedy; QLASS .5, .5, 1, 1 with seed 0 and .5, 1, 1, 0 with seed 1.
    assert greedy["reward [95 %]"].startswith("0.500 [") and qlass["reward [95 %]"].startswith("0.688 [")
    assert (greedy["success"], qlass["success"]) == ("0.250", "0.500")
    assert (greedy["zero reward"], qlass["zero reward"]) == ("0.250", "0.125")
    assert (qlass["tasks"], qlass["seeds (their means)"], qlass["M"], qlass["N"]) == ("4", "2 (0.625–0.750)", "2", "1")
    # Tokens: 100 prompt, 20 (seed 0) and 24 (seed 1) generated, 30 scored.
    assert (qlass["generated tokens"], qlass["tokens"]) == ("22", "152")
    assert table["best-of-N, picked by QNet"]["reward [95 %]"] == "0.500 [0.500, 0.500]"
    assert [row["paper"] for row in table.values()] == ["0.631", "–", "0.679", "0.703"]


def test_all_of_a_row_is_of_the_tasks_that_all_seeds_have_played(tmp_path):
    played = [(1, 0, 1), (2, 0, 0), (3, 0, 1), (4, 0, 1), (1, 1, 1), (2, 1, 1)]
    records = [
        RESULT | {"task_id": f"t{task}", "seed": seed, "reward": reward, "tokens": {"prompt": 10 * task}}
        for task, seed, reward in played
    ]
    write(tmp_path / "results.jsonl", records)
    (group,) = groups_of(tmp_path).values()
    assert (group.reward.mean, group.reward.n, group.mean("total")) == (0.75, 2, 15)
    assert group.seeds() == "2 (0.500–1.000)"


def test_the_rows_that_matter_end_with_the_ceiling(scripted):
    groups = scripted(
        ("oracle", 1.0, {}), ("rule", 0.9, {}), ("greedy", 0.3, {}), ("sample", 0.2, {}), ("qlass", 0.5, {"M": 2}),
        ("best_of_n", 0.4, {"N": 2, "select": "q"}), ("best_of_n", 0.6, {"N": 2, "select": "oracle"}),
        ("oracle_step", 0.8, {"M": 2}), ("qlass", 0.7, {"M": 2, "label": "half"}),
    )  # fmt: skip
    assert [row["method"] for row in tables.short_table(tables.headline(groups))] == [
        "SFT greedy", "SFT sampled", "best-of-N, picked by QNet N=2", "QLASS M=2", "choice by true value (oracle) M=2",
    ]  # fmt: skip


def differences(groups) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["method"], row["minus"]): row for row in tables.differences_table(list(groups))}


def test_the_differences_by_hand():
    table = differences(groups_of(RESULTS).values())
    # Seed 0 is shared: .5, 0, 0, .5. The resampled mean is Binomial(4, 1/2) / 8, whose 95 % are 0 to .5.
    assert table["QLASS M=2", "SFT greedy"]["difference [95 %]"] == "+0.250 [+0.000, +0.500]"
    assert table["QLASS M=2", "SFT greedy"]["verdict"] == "undecided"
    oracle = "best-of-N, picked by true reward (oracle) N=2"
    assert table[oracle, "SFT greedy"]["verdict"] == "undecided"  # of four tasks, whatever they say
    assert table["QLASS M=2", oracle]["difference [95 %]"].startswith("-0.250")
    assert table["QLASS M=2", "best-of-N, picked by QNet N=2"]["tokens (ratio)"] == "1.09"  # 152 / 140
    assert ("SFT greedy", "SFT greedy") not in table


def test_qlass_meets_the_best_of_n_of_its_cost_and_of_its_samples(tmp_path):
    picked = [row for row in LINES if row["method"] == "best_of_n" and row["select"] == "q"]
    # With 152 tokens a task, the one of 132 + 20 is nearest to QLASS.
    near = [row | {"N": 3, "tokens": row["tokens"] | {"generated": 32}} for row in picked]
    far = [row | {"N": 8, "tokens": row["tokens"] | {"generated": 999}} for row in picked]
    write(tmp_path / "results.jsonl", LINES + near + far)
    rivals = [b for a, b in differences(groups_of(tmp_path).values()) if a == "QLASS M=2" and "QNet" in b]
    assert rivals == ["best-of-N, picked by QNet N=3", "best-of-N, picked by QNet N=2"]


def test_a_label_tells_runs_apart_and_names_the_process_reward(tmp_path):
    shutil.copy(RESULTS, tmp_path / "results_avg.jsonl")
    groups = groups_of(RESULTS, f"target avg={tmp_path}")
    targets = {name: group.condition.target for name, group in groups.items()}
    assert (targets["QLASS M=2"], targets["QLASS [target avg] M=2"], targets["SFT greedy"]) == ("q", "avg", None)
    table = differences(groups.values())
    assert table["QLASS [target avg] M=2", "QLASS M=2"]["difference [95 %]"] == "+0.000 [+0.000, +0.000]"
    assert ("QLASS [target avg] M=2", "SFT greedy [target avg]") in table


@pytest.mark.parametrize(
    ("method", "select", "n", "oracle"),
    [
        ("qlass", "q", 4, False),
        ("qlass", "oracle", 1, False),
        ("qlass", "oracle", 4, True),
        ("oracle_step", "", 1, True),
    ],
)
def test_what_looks_at_the_true_reward_is_called_oracle(method, select, n, oracle):
    condition = results.Condition("webshop", method, 2, n, select)
    assert condition.oracle == oracle == ("oracle" in condition.name)


def test_calibration_is_of_the_actions_that_qnet_chose(tmp_path):
    steps = figures.scored_steps(groups_of(RESULTS)["QLASS M=2"])
    assert sorted(zip(steps["q"], steps["reward"], strict=True)) == [
        (0.25, 0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.5), (0.75, 1), (0.75, 1), (1, 1), (1, 1),
    ]  # fmt: skip
    searched = [row for row in LINES if row["method"] == "qlass"]
    others = [row | {"method": name} for row in searched for name in ("random", "likeliest", "oracle_lookahead")]
    write(tmp_path / "results.jsonl", searched + others)
    table = tables.calibration_table(list(groups_of(tmp_path).values()))
    assert [(row["method"], row["scored steps"]) for row in table] == [("QLASS M=2", "8")]


def test_expected_ranges_are_checked(scripted, tmp_path):
    (tmp_path / "expected.csv").write_text(
        "method,M,N,select,low,high\ngreedy,1,1,,0.70,0.73\nqlass,4,1,,0.76,0.80\nqlass,6,1,,0.78,0.81\n"
    )
    groups = scripted(("greedy", 0.71, {}), ("qlass", 0.7, {"M": 4}), ("qlass", 0.79, {"M": 6, "label": "half"}))
    lines = report.expected(groups, tmp_path / "expected.csv")
    assert [re.sub(r"\.\d{3}", "REWARD", line) for line in lines] == [
        "agent REWARD, expected .70 to .73: ok", "QLASS M=4 REWARD, expected .76 to .80: not as expected",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ what one row may hold


def run_folder(folder: Path, seed: int = 0, sft: str = "a", qnet: str = "b", tasks: str = "xy", **flags) -> str:
    """Results of greedy, qlass and a rule with metadata as the stages write them; flags: {stage_flag: value}."""

    def meta(name: str, inputs: dict[str, str], **arguments) -> None:
        own = {k.removeprefix(f"{name}_"): v for k, v in flags.items() if k.startswith(f"{name}_")}
        arguments |= {"seed": seed, "run": str(folder), "out": f"{folder}/{name}"} | own
        record = {"arguments": arguments, "inputs": {f"{folder}/{k}": v for k, v in inputs.items()}}
        (folder / f"{name}.meta.json").write_text(json.dumps(record))

    for name in ("sft", "qnet"):
        (folder / name).mkdir(parents=True)
    meta("sft", {}, epochs=12)
    meta("qnet", {"sft": sft}, epochs=8, sft=f"{folder}/sft", limit=None)
    meta("results", {"sft": sft, "qnet": qnet}, sft=f"{folder}/sft", qnet=f"{folder}/qnet", map=None, method=["all"])
    methods = ("greedy", 1), ("qlass", 2), ("rule", 1)
    records = [RESULT | {"task_id": t, "method": m, "M": n, "seed": seed} for t in tasks for m, n in methods]
    write(folder / "results.jsonl", records)
    return str(folder)


def test_seeds_of_one_pipeline_are_pooled_wherever_they_lie(tmp_path):
    last = ["random", "code"]  # of the last call alone: each line says its own
    folders = [run_folder(tmp_path / f"seed{n}", n, f"a{n}", f"b{n}", results_scorer=last[:n]) for n in range(3)]
    (tmp_path / "seed1").rename(tmp_path / "moved")
    folders[1] = str(tmp_path / "moved")
    assert {len(group.episodes) for group in groups_of(*folders).values()} == {6}


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({}, {"sft": "other", "tasks": "z"}, "SFT greedy with different --sft of one seed .a, other"),
        ({}, {"seed": 1, "sft_epochs": 3}, "SFT greedy with different --epochs of sft .12, 3"),
        ({}, {"seed": 1, "qnet_limit": 5}, "QLASS with different --limit of qnet .None, 5"),
        ({}, {"seed": 1, "results_map": "8x8"}, "rule with different --map .None, 8x8"),
    ],
)
def test_what_is_not_the_same_is_not_pooled(tmp_path, one, other, says):
    first, second = run_folder(tmp_path / "one", **one), run_folder(tmp_path / "two", **other)
    with pytest.raises(UserError, match=says) as error:
        groups_of(first, second)
    assert str(error.value).startswith(f"{first}/results.jsonl and {second}/results.jsonl: ")
    assert len(groups_of(first, f"other={second}")) == 6  # labels tell them apart


def test_two_seeds_of_one_training_and_missing_metadata_are_told(tmp_path, capsys):
    groups_of(*(run_folder(tmp_path / f"seed{n}", n, sft=f"a{n}", qnet=f"b{n}") for n in range(2)))
    assert capsys.readouterr().err == ""
    groups_of(run_folder(tmp_path / "one"), run_folder(tmp_path / "two", seed=1, qnet="other"))
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "SFT greedy is of one model under two --seed, so not of two" in warning
    (tmp_path / "seed1" / "results.meta.json").unlink()
    groups_of(tmp_path / "seed0", tmp_path / "seed1")
    assert re.fullmatch(r"warning: .*seed1/results.jsonl: no metadata beside it.*\n", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------------------- figures


def test_what_an_agent_cost_is_in_the_metadata_behind_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    greedy, searched = (next(r for r in LINES if r["method"] == m) for m in ("greedy", "qlass"))
    files = {
        "results": [greedy, searched],
        "results-rl": [greedy | {"label": "rl", "reward": 0.9}],
        "results-rl-old": [searched | {"label": "rl, old QNet"}],
        "results-both": [greedy | {"label": "both"}],
        "results-foreign": [searched | {"label": "foreign QNet"}],
    }
    for name, records in files.items():
        write(Path(f"{name}.jsonl"), records)
    metas = {
        "results": {"arguments": {"sft": "sft", "qnet": "qnet"}},
        "results-rl": {"arguments": {"sft": "sft-rl"}},
        "results-both": {"arguments": {"sft": "sft-both"}},
        "results-rl-old": {"arguments": {"sft": "sft-rl", "qnet": "qnet"}},
        "results-foreign": {"arguments": {"sft": "sft", "qnet": "downloaded"}},
        "sft": {},
        "sft-rl": {"last": {"tokens": 1000}, "passes": 6},
        "sft-guided": {"tokens": 50, "arguments": {"expert": "guided.jsonl"}},  # cloned from what QNet guided
        "guided": {"kept": 3, "tokens": 5, "arguments": {"sft": "sft", "qnet": "qnet"}},
        "sft-both": {"last": {"tokens": 10, "played": 1}, "passes": 6, "arguments": {"sft": "sft-guided"}},
        "qnet": {"tokens": 100, "arguments": {"labels": "q.jsonl"}},
        "q": {"arguments": {"trees": "trees.jsonl"}},
        "trees": {"tokens": 7},
    }
    for name, meta in metas.items():
        Path(f"{name}.meta.json").write_text(json.dumps(meta))
    groups = results.read_results([("", Path(f"{name}.jsonl")) for name in files])
    cost = {(g.condition.method, g.condition.label): training_tokens(g) for g in groups}
    assert math.isnan(cost.pop(("qlass", "foreign QNet")))
    assert cost == {("greedy", ""): 0, ("qlass", ""): 307, ("greedy", "rl"): 6000, ("qlass", "rl, old QNet"): 6307,
                    ("greedy", "both"): 523}  # fmt: skip
    (first, *_) = frontier(groups).axes
    drawn = {line.get_label(): list(line.get_xdata()) for line in first.lines if line.get_label()[0] != "_"}
    assert set(drawn) == {"cloned", "rl", "both"}  # those that are not searched are points
    tokens = next(g for g in groups if g.condition == results.Condition("webshop", "greedy", label="rl")).mean("total")
    assert drawn["rl"] == [pytest.approx((6000 + 100 * tokens) / 1e6)]  # of 100 tasks
    assert frontier([g for g in groups if not g.condition.label]) is None
    Path("trees.meta.json").write_text('{"tokens": null}')  # resumed: what they cost in all is not known
    assert math.isnan(training_tokens(next(g for g in groups if g.condition.method == "qlass")))


# ------------------------------------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    """Every start tag with its attributes, all texts, and the text of the data element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.data, self.texts = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][1].get("id") == "data" and not self.data:
            self.data = data
        else:
            self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with its report: enough scored steps for the calibration, another process reward for Fig. 4."""
    folder = tmp_path_factory.mktemp("report")
    records = list(LINES)
    for copy in range(3):
        for row in LINES[4:12]:
            row = row | {"task_id": f"test_{copy}_{row['task_id']}"}
            records += [row, row | {"label": "target avg"}]
    write(folder / "results.jsonl", records)
    report.main(["--run", str(folder), "--trees", str(TREES), "--max-trees", "2"])
    return folder


def test_the_page_holds_everything_and_stays_by_itself(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    sections = ["tokens", "results", "differences", "targets", "calibration", "steps", "trees", "inputs"]
    assert [name for name in ids if name in sections] == sections  # the figure comes first
    assert sum(tag == "svg" for tag, _ in page.tags) == 3
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(//" not in text
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#")
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in page.tags)
    words = " ".join(page.texts)
    assert all(phrase in words for phrase in ("0.703", "where the interval covers 0", "search[red mug]"))
    assert "◀ taken" in text
    assert len(list(run.glob("*.png"))) == 3 and all(p.read_bytes()[1:4] == b"PNG" for p in run.glob("*.png"))
    assert report.PAPER_NOTE in (run / "report.md").read_text(encoding="utf-8")


def test_text_of_an_environment_stays_text(run):
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert sum(tag == "script" for tag, _ in page.tags) == 2 and "alert(1)" not in "".join(page.texts)
    assert "innerHTML" not in (run / "report.html").read_text(encoding="utf-8")  # the viewer writes text alone
    assert "Page 1 [SEP] B01 [SEP] Red Mug </script><b>&" in page.texts  # an observation in Fig. 5
    assert not any(tag == "b" for tag, _ in page.tags)


def test_the_viewer_gets_the_trees_as_they_are(run):
    data = json.loads(Page((run / "report.html").read_text(encoding="utf-8")).data)
    nodes = [json.loads(line) for line in TREES.read_text().splitlines()]
    assert data["total"] == 3 and [tree["task"] for tree in data["trees"]] == ["train_0", "train_2"]
    first = [dict(zip(data["fields"], values, strict=True)) for values in data["trees"][0]["nodes"]]
    assert [node["parent"] for node in first] == [-1, 0, 1, 2, 1, 4]
    for node, line in zip(first, nodes, strict=False):
        shown = (node["q"], node["expert"], data["texts"][node["observation"]])
        assert shown == (line["q"], line.get("expert"), line["observation"])
    assert data["texts"][first[4]["action"]] == "click[b02]" and data["texts"][first[4]["thought"]] == "It is redder."


def test_the_same_results_in_any_order_make_the_same_report(run, tmp_path):
    lines = (run / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    report.main(["--run", str(tmp_path), "--trees", str(TREES), "--max-trees", "2"])
    assert (tmp_path / "report.md").read_bytes() == (run / "report.md").read_bytes()
    again, first = ((f / "report.html").read_text().replace(str(f), "RUN") for f in (tmp_path, run))
    assert again == first


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_in_a_browser_text_of_a_model_or_an_environment_runs_nothing(tmp_path):
    """Texts of results and of a tree are scripts; the viewer, itself a script, has run and shows them."""
    evil = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{trees}}"
    step = {"action": evil, "observation": evil, "thought": evil, "candidates": [{"action": evil, "q": 0.5}]}
    row = RESULT | {"task_id": evil, "env": evil, "task": evil, "type": evil, "label": evil, "steps": [step]}
    write(tmp_path / "results.jsonl", [row, row | {"method": "qlass", "M": 2}])
    root = {"task_id": evil, "task": evil, "messages": [{"role": "user", "content": evil}], "source": evil, "q": 0.1}
    root |= {"node_id": 0, "parent_id": None, "action": None, "observation": evil, "reward": 0.0, "nodes": 2}
    write(tmp_path / "q_labels.jsonl", [root, root | {"node_id": 1, "parent_id": 0, "action": evil, "done": True}])
    report.main(["--run", str(tmp_path)])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000", f"--user-data-dir={tmp_path}"]
    command = [BROWSER, *flags, "--dump-dom", (tmp_path / "report.html").as_uri()]
    shown = Page(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    written = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "taken" not in shown.texts and all(tag != "img" and "onerror" not in more for tag, more in shown.tags)
    assert " ".join(shown.texts).count(evil) > " ".join(written.texts).count(evil) > 0  # the viewer shows the tree


def test_only_a_report_is_replaced_by_one(tmp_path):
    shutil.copy(RESULTS, tmp_path / "results.jsonl")
    (tmp_path / "notes.md").write_text("my notes")
    with pytest.raises(UserError, match="something else"):
        report.main([str(tmp_path), "--out", str(tmp_path / "notes.html")])
    assert (tmp_path / "notes.md").read_text() == "my notes"
