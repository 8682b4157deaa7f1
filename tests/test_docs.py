"""Pages agree with the code and with the files beside them: docs/, its notebook, and the reference results."""

import json
import math
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from fakes import FakeEnv, write
from safetensors.torch import load_file

import bellman
import build_trees
import envs
import q_search
import sft
import train_qnet
from docs import build, rival
from environments import replay
from qlass import demonstrations, messages, records
from qlass.chat import Chat, Rendering
from qlass.files import read_jsonl
from qlass.tiny import AIDS, MARK, tiny_model
from reporting import __main__ as report_command
from reporting import figures, pages, reference
from reporting.result_lines import Result


def text_of(path):
    return (build.ROOT / path).read_text(encoding="utf-8")


def lines_on(page, field):
    """The lines of files that a page shows and that have a field. "..." stands for more of a list."""
    shown = re.findall(r"^    \{.*(?:\n    .*)*", text_of(page), re.M)
    lines = [json.loads(" ".join(text.split("\n    ")).strip().replace(", ...]", "]")) for text in shown]
    return [line for line in lines if field in line]


def test_the_pages_code_and_pictures_are_what_the_code_and_the_lines_give():
    again = "python -m docs.build makes them again"
    for page in (build.PAGE, build.COMPARE):
        text = page.read_text(encoding="utf-8")
        assert build.refresh(text) == text, again
    shown = text_of("docs/walkthrough.md") + text_of("README.md")
    for name, picture in build.pictures().items():
        figures.save(picture, Path(name))
        ours, theirs = (re.findall(r">(.*)</text>", (folder / name).read_text()) for folder in (Path(), build.LINES))
        assert len(ours) > 9 and ours == theirs and f"walkthrough/{name})" in shown, again
    raw = {str(node["node_id"]): f"{round(node['q_raw'], 4):g}" for node in build.read("lake/q_labels.jsonl")}
    table = re.findall(r"^\| (\d+) \| .* \| (\S+) \| \S* ?\|$", shown, re.M)
    assert len(table) == 9 and set(table) <= set(raw.items())


@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_the_demonstration_on_the_page_is_read_and_replayed_and_shows_the_tiny_model_its_task(layout, capsys):
    (line,) = lines_on("docs/files.md", layout)
    path, env = Path("mine.jsonl"), envs.make("docs.switches:Switches")
    write(path, [line])
    expert = demonstrations.read(path, env)
    replay.refuse_openings(expert, env)
    replay.replay_demonstrations(expert, env, ["red"])
    assert not capsys.readouterr().err and line["task_id"] == "red"
    state = expert[0].state
    chat = Chat(tiny_model(text for _, text in state.messages)[1], Rendering(**AIDS))
    read = "".join(map(chat.tokenizer.decode, chat.message_tokens(state)))
    assert f"Action:{MARK} switch{MARK} red" in read and state.actions[-1].endswith("Action: done")


def test_the_lines_on_the_pages_are_read_and_have_the_fields_of_a_run(lake):
    """Of trees, labels, results and a program that runs elsewhere."""
    (node,) = lines_on("docs/files.md", "node_id")
    ((q_raw, q),) = re.findall(r'`"q_raw": (\S+), "q": (\S+)`', text_of("docs/files.md"))
    label = node | {"q_raw": float(q_raw), "q": float(q)}
    (result,), (elsewhere,) = lines_on("docs/files.md", "steps"), lines_on("docs/compare.md", "method")
    for line, name, kind in (
        (node, "trees.jsonl", records.Node),
        (label, "q_labels.jsonl", records.Label),
        (result, "results.jsonl", Result),
        (elsewhere, None, Result),
    ):
        path = Path("line.jsonl")
        write(path, [line])
        assert list(records.read(path, kind)) == [line]
        if name:
            assert list(line) == list(read_jsonl(lake / name)[1]), name


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """The run of the walkthrough's commands, the plain way, with two epochs of QNet and one search."""
    run = tmp_path_factory.mktemp("lake")
    page = text_of("docs/walkthrough.md")
    ((shared, seed),) = re.findall(r'LAKE="(.*) --run runs/lake (.*)"', page)
    for stage in (sft, build_trees, bellman, train_qnet, q_search):
        (flags,) = re.findall(rf"python {stage.__name__}\.py \$LAKE ?(.*)", page)
        plain = "--plain" if stage in (build_trees, train_qnet, q_search) else ""
        flags = flags.replace("--epochs 40", "--epochs 2")
        stage.main(f"{shared} {seed} --run {run} {flags} {plain}".split())
    return run


def test_the_commands_of_the_page_grow_its_tree(lake):
    """A preset that changes may not change what they give."""
    for name in ("trees.jsonl", "q_labels.jsonl"):
        tree = [node for node in read_jsonl(lake / name) if node["task_id"] == "4x4/12"]
        assert tree == build.read(f"lake/{name}")


def test_the_whole_on_one_page_is_what_the_scripts_do(lake, monkeypatch):
    """Nodes, Q-values and rewards are equal; weights up to rounding, as the sums of a batch have another order."""
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "path", [*sys.path])
    page = runpy.run_path(str(build.ROOT / "docs/whole.py"))
    assert sys.path[0] == str(build.ROOT)  # where `python docs/whole.py` finds the code
    assert len(text_of("docs/whole.py").splitlines()) <= 240
    assert f"and {sum(page['rewards']['qlass']) / 4:.3f} here" in page["__doc__"]
    labels = read_jsonl(lake / "q_labels.jsonl")
    nodes = [(task, node) for task, root in page["trees"].items() for node in root.subtree()]
    assert [(task, n.depth, n.action or None, n.reward, n.q) for task, n in nodes] == [
        (n["task_id"], n["depth"], n["action"], n["reward"], n["q"]) for n in labels
    ]
    results = read_jsonl(lake / "results.jsonl")
    assert page["rewards"] == {
        name: [line["reward"] for line in results if line["method"] == name] for name in ("greedy", "qlass")
    }
    own = page["model"].state_dict() | {f"head.{k}": v for k, v in page["qnet"].head.state_dict().items()}
    saved = load_file(lake / "sft/model.safetensors")
    saved |= {f"head.{k}": v for k, v in load_file(lake / "qnet/head.safetensors").items()}
    assert len(saved) > 30 and all((own[name] - weight).abs().max() < 1e-3 for name, weight in saved.items())


def test_the_report_to_click_through_is_that_of_the_trained_run(capsys):
    """But for its pictures and the seconds: made again by the commands of docs/build.py."""
    made = shutil.ignore_patterns("results*", "report*")  # by README's commands
    shutil.copytree(build.ROOT / "runs/trained", "runs/trained", ignore=made)
    search, report = re.findall(r"python (?:q_search\.py|-m reporting) (--run runs/trained[^&\n]*)", build.__doc__)
    assert f"python q_search.py {search}\n" in text_of("README.md")
    q_search.main(search.split())
    report_command.main(report.split())
    assert "warning" not in capsys.readouterr().err

    def words(html):
        html = re.sub(r'src="data:[^"]*"', "", html)
        return re.sub(r"(?<=<td>)\d+\.\d\d(?=</td>)", "", html)  # seconds have two digits

    new = Path("runs/trained/report.html").read_text(encoding="utf-8")
    assert words(new) == words(text_of("docs/report.html")), "the commands in docs/build.py make it again"
    assert new.count('src="data:') == 3 and '{"total":20,"trees":' in new and len(new) < 1e6


def test_the_rival_of_the_page_plays(agent, fake_world):
    """One draw of it is a sample; of four it takes what most are."""
    run = f"--env frozenlake --run . --preset paper --sft {agent} --limit 4"
    q_search.main(f"{run} --method sample".split())
    rival.main(f"{run} -M 1 4".split())
    steps = {(r["method"], r["M"], r["task_id"]): r["steps"] for r in read_jsonl(Path("results.jsonl"))}
    for task in FakeEnv().task_ids("test")[:4]:
        one, sample = ([step["action"] for step in steps[method, 1, task]] for method in ("vote", "sample"))
        assert one == sample
        for step in steps["vote", 4, task]:
            votes = {candidate["action"]: candidate["q"] for candidate in step["candidates"]}
            assert sum(votes.values()) == 4 and votes[step["action"]] == max(votes.values())


def test_the_lines_of_the_shop_are_a_run_of_the_stages():
    env, tree = envs.make("webshop"), build.read("shop/trees.jsonl")
    assert bellman.label(tree, bellman.q_values(tree, 0.98)) == build.read("shop/q_labels.jsonl")
    paths = {0: []}
    for node in tree[1:]:
        paths[node["node_id"]] = [*paths[node["parent_id"]], node["action"]]
        *_, move = messages.replay(env, node["task_id"], paths[node["node_id"]])
        assert (move.state.observation, move.reward, move.done) == (node["observation"], node["reward"], node["done"])


def test_the_examples_run(agent, value_net, monkeypatch, capsys):
    """As they stand, on random checkpoints and the fake world."""
    folder = Path("runs/demo")
    folder.mkdir(parents=True)
    (folder / "sft").symlink_to(agent)
    (folder / "qnet").symlink_to(value_net)
    monkeypatch.setattr("envs.make", lambda name: FakeEnv())
    names = {}
    page = text_of("docs/tools.md").partition("# From Python")[2]
    for example in re.findall(r"```python\n(.*?)```", page, re.S)[:2]:
        exec(example, names)
    assert re.fullmatch(r"task test0: reward \d\.\d{3} after \d+ steps\n", capsys.readouterr().out)
    assert names["done"] and names["env"].steps > 0
    assert names["action"] == names["actions"][max(range(len(names["q"])), key=names["q"].__getitem__)]
    [values] = names["q_values"]
    assert len(values) == 2 and all(map(math.isfinite, values))


def test_the_cells_of_the_notebook_run(monkeypatch):
    shown = []
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown.append))
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("docs").mkdir()
    monkeypatch.chdir("docs")  # where Jupyter starts it
    space = {}
    cells = ["".join(cell["source"]) for cell in json.loads(text_of("docs/qlass.ipynb"))["cells"] if "outputs" in cell]
    assert cells[0].startswith("%matplotlib inline\n")  # Jupyter shows what plt.show draws
    code = "\n".join(cells).replace('"--epochs", "40"', '"--epochs", "2"')
    exec(re.sub("^%.*$", "", code, flags=re.M), space)  # without Jupyter's own commands
    plt.close("all")
    assert len(shown) == 3 and f"after {space['of']['qlass']['n_steps']} steps" in shown[-1].get_suptitle()


# ------------------------------------------------------------------------------- numbers of README and the results page


@pytest.mark.parametrize("page", pages.PAGES, ids=["README", "results", "learners", "protocols"])
def test_each_number_of_a_page_is_the_cell_that_it_names(page):
    text = page.read_text(encoding="utf-8")
    assert pages.refresh(text) == text, "python -m reporting.pages writes them anew"
    tables = pages.TABLE.sub("", text)
    prose = re.sub(r"```.*?```|^    .*$|`[^`]*`|\([^)]*\)", "", pages.NUMBER.sub("", tables), flags=re.S | re.M)
    assert re.findall(r"(?<![\w.])[+-]?\.\d{2,3}\b", prose) == []  # numbers without a name


def test_a_number_that_is_wrong_or_of_no_cell_is_found():
    right = ".813<!--shops/qlass-6--> for 1,844<!--shops/qlass-6:tokens--> tokens, .717±.03<!--shops/agent-->"
    assert pages.refresh(right) == right == pages.refresh(right.replace("813", "717").replace("1,8", "2,8"))
    difference = "**+.096 [.076, .115]**<!--shops/minus-agent-->, so +.096<!--shops/minus-agent-->"
    assert pages.refresh(difference) == difference == pages.refresh(difference.replace("**", "").replace(".096", ".1"))
    with pytest.raises(KeyError):
        pages.refresh(".813<!--shops/of-another-->")


def test_the_runs_of_the_demo_are_in_the_expected_ranges():
    ranges, rows = (pd.read_csv(reference.FOLDER / name, dtype=str) for name in ("expected.csv", "results.csv"))
    demo = rows[rows["agent"] == "cloned from 1000, halves, make demo"]
    demo = demo.merge(ranges, on=["method", "M", "N", "select"])
    assert len(demo) >= 2 * len(ranges) and demo["reward"].between(demo["low_y"], demo["high_y"]).all()


def test_numbers_of_pages_stand_on_them():
    numbers = pd.read_csv(reference.FOLDER / "numbers.csv", dtype=str)
    for page, number in zip(numbers["page"], numbers["number"], strict=True):
        text = " ".join((reference.FOLDER / page).read_text(encoding="utf-8").split())
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", text), number


@pytest.mark.parametrize("stage", ["sft", "qnet"])
def test_the_trained_run_tells_how_long_its_agent_and_qnet_were_trained(stage):
    updates = [line["tokens"] for line in read_jsonl(build.ROOT / f"runs/trained/{stage}.log.jsonl") if "lr" in line]
    assert "--run runs/demo " in text_of(f"runs/trained/{stage}.meta.json")  # no path of a machine
    text = " ".join(text_of("runs/trained/README.md").split())
    assert f"{len(updates)} updates on {sum(updates) / 1e6:.2f} M" in text


def test_readme_is_short():
    assert len(text_of("README.md").split()) <= 1400
