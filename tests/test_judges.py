"""Other judges of the same draws: what each chooses and costs, and siblings, by hand; the command."""

import dataclasses
import math
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeEnv, Script, actions_of, code_on, node, over, run, settings_of, word_chat, write

import q_search
from experiments import Call, judges
from experiments.judges import Judge, by_chooser, by_function, by_scorer
from experiments.qval.scorers import Decision
from qlass.batching import Candidate
from qlass.chat import Rendering
from qlass.files import read_jsonl
from qlass.messages import State, parse_action, react, start


def rightwards(state, candidates):
    return ["right" in action for action in candidates]


def played(judge, draws, answer=None):
    """The line of a judge of these draws, in the fake world, and the scores of its steps."""
    judge = dataclasses.replace(judge, M=len(draws.split()))
    line, _ = run(judge.play(FakeEnv(), "test0", word_chat(candidates="valid")), answer or Script({}, draws))
    return line, [[candidate["q"] for candidate in step["candidates"]] for step in line["steps"]]


@pytest.mark.parametrize(
    ("judge", "draws", "last", "env_steps"),
    [
        (Judge("judge", rank=partial(by_function, rightwards)), "left right", [0, 1], 3),
        (judges.WORDS["vote"], "left right right", [1, 2], 3),
        (judges.WORDS["true_value"], "left right", [0.0, 1.0], 9),  # two looks and a step
    ],
)
def test_functions_votes_and_the_true_value_judge_without_a_model(judge, draws, last, env_steps):
    line, scores = played(judge, draws)
    assert actions_of(line) == ("right",) * 3 and scores[-1] == last
    assert (line["env_steps"], line["tokens"]["scored"]) == (env_steps, 0)  # nobody but the agent has read anything


def test_another_agent_judges_among_all_valid_actions_and_is_charged_for_what_it_reads():
    def answer(request):
        if isinstance(request, Call):
            (question,) = request.items
            assert question.temperature == 1.0 and question.valid == (react("", "left"), react("", "right"))
            return [[-2.0, -0.5]]
        return [Candidate(react("", action), 3, -1.0) for action in ("left", "jump", "right")]

    judge = Judge("judge", rank=partial(by_chooser, None, Rendering(candidates="valid")), reads=True)
    line, scores = played(judge, "left jump right", answer)
    assert scores == [[-2.0, None, -0.5]] * 3  # to jump is no valid action
    assert line["tokens"]["scored"] == line["tokens"]["prompt"] + 3 * 3 * 3  # "Action: right <end>"


def test_of_equal_scores_one_is_taken_at_random_and_a_missing_one_last():
    async def scores_of(context, decision):
        return decision.candidates

    def ranked(scores, number=0):
        context = SimpleNamespace(config=SimpleNamespace(seed=0))
        decision = Decision(None, None, scores, (number,))
        values, _ = run(by_scorer(SimpleNamespace(scores=scores_of), context, decision), None)
        return values.tolist()

    assert ranked([1.0, None, 2.0]) == pytest.approx([1.0, -math.inf, 2.0])
    for scores in ([3.0, 3.0, 1.0], [None, None]):
        assert {max(range(2), key=ranked(scores, number).__getitem__) for number in range(40)} == {0, 1}


def tree():
    """A labelled tree of the fake world: the demonstration goes right, right; from the root it is the better action,
    behind it the worse one. Nobody shows the two below left. Of the last pairs one is too near to rank, and one stands
    in a state that its actions do not lead to."""
    opening = start(FakeEnv(), "train0")
    root = {"messages": opening.dump(), "observation": opening.observation, "nodes": 11}
    lines = [node(0, None, task_id="train0", q=0, q_raw=0, **root)]
    below = (0, 0.2), (0, 0.8), (1, 0), (1, 0.5), (2, 0.9), (2, 0.6), (4, 0.3), (4, 0.31), (6, 0.1), (6, 0.9)
    for n, (parent, q) in enumerate(below, 1):
        action = "left" if n % 2 else "right"
        page = lines[parent]["observation"].removeprefix("Observation: ")
        shown = {"action": f"Action: {action}", "observation": f"Observation: {page} {action}"}
        lines.append(node(n, parent, task_id="train0", q=q, q_raw=q, expert=n in (2, 6), **shown))
    lines[6]["observation"] = "elsewhere"
    return lines


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (rightwards, [1.0, 1.0, 0.0]),
        (lambda state, candidates: [0.0, 0.0], [0.5, 0.5, 0.5]),
        (lambda state, candidates: [len(state.messages) - 4, 0], [1.0, 0.0, 1.0]),  # left, but in the first state
    ],
)
def test_siblings_are_ranked_by_case(function, right, fake_world):
    search = q_search.Search(settings_of(q_search, "--env frozenlake"))
    search.chat = word_chat()
    judge = Judge("judge", rank=partial(by_function, function), M=2)
    pairs, _ = run(judges.rank_siblings(tree(), judge, search), Script({}))
    cases = [judges.CASES[1], judges.CASES[0], judges.CASES[-1]]
    assert pairs == list(zip(cases, right, strict=True))
    # It is played to the states of pairs that are to be ranked, and no further.
    assert {path[1:] for path in search.env.played} == {("left",), ("right",), ("right", "right")}
    assert judges.accuracies([*pairs, (cases[0], 0.0)])[cases[0]] == f"{right[0] / 2:.2f} of 2"


OWN = """
def back(state, candidates):
    return [float("left" in action) for action in candidates]

def right(state, candidates):
    return [float("right" in action) for action in candidates]
"""


@pytest.fixture
def bench(agent, fake_world):
    """Run a command on the fake world, with a file of judges: its lines by (method, player, M, task)."""
    Path("own.py").write_text(OWN)

    def command(flags, stage=judges, out="judges.jsonl"):
        usual = f"--env frozenlake --run . --preset paper --sft {agent} --limit 4 --out {out}"
        stage.main(over(usual, flags))
        lines = read_jsonl(Path(out))
        return {(line["method"], line["player"], line["M"], line["task_id"]): line for line in lines}

    return command


def test_all_judges_see_the_draws_of_q_search(bench, agent, value_net, capsys):
    write("q_labels.jsonl", tree())
    named = f"own.py:back qnet={value_net} agent={agent} gain={agent},{agent} chance own.py:right"
    lines = bench(f"--judge {named} -M 3")
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    others = f"--method qlass likeliest sample -M 3 --qnet {value_net}"
    others = bench(others, stage=q_search, out="results.jsonl")
    for task in FakeEnv().task_ids("test")[:4]:
        names = "qnet", "sft", "sft-sft", "own.py:right"
        qnet, itself, gain, right = (lines["judge", name, 3, task]["steps"] for name in names)
        assert qnet == others["qlass", "", 3, task]["steps"]
        assert itself == others["likeliest", "", 3, task]["steps"]  # at its temperature
        sample = others["sample", "", 1, task]["steps"]
        assert [step["action"] for step in gain] == [step["action"] for step in sample]  # each gains 0
        for step in right:
            drawn = {parse_action(candidate["action"]) for candidate in step["candidates"]}
            assert parse_action(step["action"]) == ("right" if "right" in drawn else "left")
    rows = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    assert list(rows) == ["own.py:back", "qnet", "sft", "sft-sft", "chance", "own.py:right"]
    own = rows["own.py:right"]
    assert [own[case] for case in judges.CASES.values()] == ["1.00 of 1", "0.00 of 1", "1.00 of 1"]
    assert own["minus own.py:back"].startswith("+0.")


def test_a_judge_may_come_later_and_none_plays_twice(bench):
    bench("--judge own.py:right vote")
    before = Path("judges.jsonl").read_text()
    lines = bench("--judge chance own.py:right -M 2 3")  # and another M
    assert Path("judges.jsonl").read_text().startswith(before)  # their seconds too
    assert len(lines) == 4 * (1 + 2 + 2)
    assert len(bench("--judge vote chance --overwrite")) == 4 * 2


def test_chance_has_the_seed_of_the_command(bench):
    lines = [bench(f"--judge chance --seed {n} --limit 1", out=n) for n in "01"]
    firsts = [by_name["judge", "chance", 2, "test0"] for by_name in lines]
    scores = [[candidate["q"] for candidate in line["steps"][0]["candidates"]] for line in firsts]
    assert not set(scores[0]) & set(scores[1])


def test_the_table_is_of_the_split_and_waits_for_other_processes(bench, monkeypatch, capsys):
    def rows(flags=""):
        capsys.readouterr()
        bench(f"--judge own.py:right {flags}")
        return [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    of_test = rows()
    assert rows("--split val --limit 2")[2:] != of_test[2:] == rows()[2:]  # another number of tasks
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rows("-M 3") == []


def test_the_score_of_the_page_plays(bench):
    Path("overlap.py").write_text(code_on("compare.md", "def score("))
    assert {player for _, player, *_ in bench("--judge overlap.py:score")} == {"overlap.py:score"}
    score = runpy.run_path("overlap.py")["score"]
    assert score(State((), "find the purse"), ["Action: find purse", "Thought: hm Action: left"]) == [2, 0]
