"""Algorithm 4 and its baselines on a written world: who takes which path with which Q, and what it costs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import WORLD, FakeEnv, Script, actions_of, path_of, reverse, run, say, true_q, word_chat

import q_search
from experiments.compare import distinct
from q_search import Method
from qlass import models, results
from qlass.batching import Candidate, Sample, Score
from qlass.files import read_jsonl
from qlass.messages import parse_action
from reporting import show

CHAT, stage = word_chat(), q_search
GREEDY, QLASS = Method("greedy", temperature=0.0), Method("qlass", "q", M=2)
BEST_OF_3 = Method("best_of_n", N=3, select="q")
BOTH = {path: "left right" for path in [(), ("left",), ("right",), ("left", "right"), ("right", "right")]}


def never(request):
    raise AssertionError(f"no {type(request).__name__} was to be asked")


def episode(method, script=BOTH, q=never, env=None, task="test0", chat=CHAT):
    """The record, the path taken, and all requests."""
    draw = script if callable(script) else Script(script)
    playing = method.play(env or FakeEnv(), task, chat)
    record, asked = run(playing, lambda request: (draw if isinstance(request, Sample) else q)(request))
    assert all(r.temperature == (0 if method.name == "greedy" else 0.7) for r in asked if isinstance(r, Sample))
    return record, actions_of(record), asked


def by_trial(*scripts):
    """A different script for each of N trajectories."""
    answers = [Script(s) for s in scripts]
    return lambda request: answers[request.key[1]](request)


THREE = by_trial({}, {(): "right"}, {(): "right", ("right",): "right"})  # left left, right left, right right left
LATE = by_trial(BOTH | {(): "left left"}, BOTH)  # the first trial never draws right at the root, the second does


def onward(q):
    """Q of a net that likes to go right so much."""
    return lambda request: [q if parse_action(action) == "right" else 0.0 for action in request.actions]


@pytest.mark.parametrize(
    ("method", "script", "q", "way", "reward"),
    [
        (QLASS, BOTH, true_q, "right right right", 1.0),
        (QLASS, BOTH, onward(-1.0), "left left", 0.0),  # Q decides even where it is wrong
        (Method("qlass", "q", M=3), {(): "right left left"}, onward(0), "right left", 0.4),  # of equals the first draw
        (Method("qlass", "q", M=2, N=2, select="q"), LATE, true_q, "right right right", 1.0),
        (GREEDY, {(): "right", ("right",): "right"}, never, "right right left", 0.0),
        (Method("sample"), Script({}, "jump"), never, "jump jump jump jump jump", 0.0),  # it means nothing
        (Method("best_of_n", N=3, select="oracle"), THREE, never, "right left", 0.4),
        (BEST_OF_3, THREE, true_q, "right left", 0.4),
    ],
)
def test_who_goes_where(method, script, q, way, reward):
    record, path, _ = episode(method, script, q)
    assert path == tuple(way.split())
    assert (record["reward"], record["success"], record["n_steps"]) == (reward, reward == 1, len(path))


def test_the_likeliest_is_so_by_the_probability_of_its_first_draw():
    """No model is asked again: among valid actions that probability is another than the free text's."""
    draws = [
        Candidate("Action: left", 1, -2.0),
        Candidate("Action: right", 1, -0.5),
        Candidate("Action: left", 1, -0.1),  # other tokens of the same text
    ]
    record, path, _ = episode(Method("likeliest", "likelihood", M=3), lambda request: draws, never)
    assert path == ("right", "right", "right")
    assert [candidate["q"] for candidate in record["steps"][0]["candidates"]] == [-2.0, -0.5]


def test_equal_draws_are_one_candidate():
    record, *_ = episode(Method("qlass", "q", M=4), lambda r: say(*["left", " left ", "left", "right"][: r.n]), true_q)
    candidates = record["steps"][0]["candidates"]
    assert [(parse_action(c["action"]), c["q"]) for c in candidates] == [("left", 0.5), ("right", 1.0)]


@pytest.mark.parametrize(
    ("draws", "candidates", "drawn"),
    [
        ("left right", "left right", 2),  # they differ at once
        ("left left left right", "left right", 4),
        ("left", "left", 6),  # 3M at most, every one counted
    ],
)
def test_candidates_are_drawn_until_m_differ(draws, candidates, drawn):
    method = distinct(QLASS)
    *_, asked = episode(method, {(): f"{draws} left left left left left"}, onward(0))
    first = [r for r in asked if isinstance(r, Sample) and not path_of(r.state)]
    assert sum(r.n for r in first) == drawn and len({r.key for r in first}) == len(first)
    assert " ".join(map(parse_action, next(r for r in asked if isinstance(r, Score)).actions)) == candidates


def test_random_choice_is_of_the_drawn_and_depends_on_task_and_seed_alone():
    def steps_of(seed):
        method = Method("random", "chance", M=2, seed=seed)
        return [episode(method, task=f"test{task}")[0]["steps"] for task in range(30)]

    first = steps_of(0)
    assert first == steps_of(0) != steps_of(1)
    assert len({tuple(step["action"] for step in steps) for steps in first}) == 6  # all the ends of the world are met


BLIND = [GREEDY, Method("sample"), Method("random", "chance", M=2), QLASS,
         Method("qlass", "q", 2, 3, "q"), BEST_OF_3]  # fmt: skip


@pytest.mark.parametrize("method", BLIND)
def test_no_reward_is_looked_at_before_the_end(method):
    """Where the best leaf is the worst, the same way is gone."""
    record, path, _ = episode(method, BOTH, true_q, FakeEnv(reverse(WORLD)))
    expected, same_path, _ = episode(method, BOTH, true_q)
    assert path == same_path and record["tokens"] == expected["tokens"]
    assert record["reward"] == 1 - expected["reward"]


# The prompt: "<user> walk <agent>" 3 tokens, "OK <end>" 2, "<user> you stand at start <agent>" 6. An action,
# "Thought: hm Action: left <end>", has 5; the scripted agent says 3. "<user> Observation: you stand at start right
# <agent>" has 8, a step further 9.


MEMORYLESS = word_chat(markov=True)
COSTS = [
    # left left: the words of the environment; two actions
    (GREEDY, {}, CHAT, {"prompt": 3 + 6 + 8, "generated": 2 * 3, "scored": 0}, 2),
    # right right right: two actions a step; each read and scored once
    (QLASS, BOTH, CHAT, {"prompt": 26, "generated": 3 * 2 * 3, "scored": 26 + 3 * 2 * 5}, 3),
    # The same, and each observation is read once: no instruction, no OK.
    (
        QLASS,
        BOTH,
        MEMORYLESS,
        {"prompt": 6 + 8 + 9, "generated": 18, "scored": 23 + 3 * 2 * 5},
        3,
    ),
    # left left, right left, right right left: four states, six actions, each read once whatever trajectories share
    (
        BEST_OF_3,
        THREE,
        CHAT,
        {"prompt": 3 + 6 + 8 + 8 + 9, "generated": 21, "scored": 64},
        7,
    ),
    (Method("best_of_n", N=3, select="oracle"), THREE, CHAT, {"prompt": 34, "generated": 21, "scored": 0}, 7),
]


@pytest.mark.parametrize(("method", "script", "chat", "tokens", "env_steps"), COSTS)
def test_tokens_and_steps_by_hand(method, script, chat, tokens, env_steps):
    env = FakeEnv()
    record, *_ = episode(method, script, true_q, env, chat=chat)
    assert record["tokens"] == tokens
    assert record["env_steps"] == len(env.played) == env_steps and record["resets"] == method.N


def test_an_action_is_known_if_it_was_valid_before_its_step():
    script = {("left",): "jump", ("left", "jump"): "right"}
    record, path, _ = episode(GREEDY, script, env=FakeEnv({"left": {"right": 1.0}}))
    assert path == ("left", "jump", "right") and record["unknown_actions"] == 1


def test_show_looks_for_an_episode_with_choices_and_tells_greedys_way(capsys):
    """Plain in a pipe. Nothing is written."""

    def draw(request):
        if request.temperature == 0:
            return Script({}, "left")(request)
        return Script(BOTH if request.key[0] in ("test2", "test3") else {(): "left right"}, "left")(request)

    def printed(tasks):
        backends = {Sample: lambda asked: list(map(draw, asked)), Score: lambda asked: list(map(true_q, asked))}
        config = SimpleNamespace(split="test")
        search = SimpleNamespace(config=config, env=FakeEnv(), tasks=tasks, chat=CHAT, backends=backends)
        show.show(search, [QLASS])
        return capsys.readouterr().out

    text = printed(FakeEnv().task_ids("test"))
    pick = "one that earns most, and of these the one with the most choices"
    assert text.startswith(f"Task test2: of 6 test tasks {pick}.\nOn average they earn ")
    assert (
        "\nfind the purse\n" in text
        and f"\n    left   {12 * '█'}             0.500\n  > right  {24 * '█'} 1.000\nstep 2" in text
    )
    assert "qlass M=2: reward 1 after 3 steps\nSteps with a choice: 1, 2, 3.\n" in text
    assert "The agent alone, greedy, earns 0 after 2 steps. From step 1 on it goes on with left" in text
    assert not list(Path().iterdir())


def test_an_episode_of_other_settings_than_those_of_the_results_is_shown(search, agent, capsys):
    search("--method sample --limit 1")
    before = Path("results.jsonl").read_bytes()
    run = f"--env frozenlake --run . --preset paper --sft {agent} --method sample --temperature 0.5"
    show.main(run.split())
    assert "\nsample: reward " in capsys.readouterr().out and Path("results.jsonl").read_bytes() == before


def test_tasks_played_before_are_skipped_and_one_file_can_hold_both(search):
    every = FakeEnv().task_ids("test")
    first = search("--method greedy --limit 2")
    assert [r["task_id"] for r in first] == every[:2]
    both = search("--method greedy --skip 2 --limit 0")
    assert [r["task_id"] for r in both] == every and both[:2] == first
    (third,) = search("--method greedy --skip 2 --limit 1 --max-steps 1", out="third.jsonl")
    assert third["task_id"] == every[2] and third["n_steps"] == 1


def test_an_n_is_of_all_methods_that_have_one_which_is_told(search, capsys):
    lines = search("--method best_of_n sample --limit 1", out="one.jsonl")
    assert [(line["N"], line["resets"]) for line in lines] == [(4, 4), (1, 1)]  # where no number is named
    assert "episodes of each task" not in capsys.readouterr().out
    lines = search("--method greedy best_of_n qlass -N 2")
    assert "qlass M=2 N=2 select=q: 2 episodes of each task" in capsys.readouterr().out
    # HuggingFace's datasets can't read a column that is null first and text later.
    kinds = {(name, type(value)) for line in lines for name, value in line.items()}
    assert len(kinds) == len({name for name, _ in kinds})


def test_the_seconds_of_a_methods_lines_add_up_to_the_time_of_its_play(search, monkeypatch):
    """By a clock that each step of the environment moves on by a second. Tasks are played side by side."""
    played = []
    act = FakeEnv.act
    monkeypatch.setattr(FakeEnv, "act", lambda env, action: played.append(action) or act(env, action))
    monkeypatch.setattr(q_search, "time", SimpleNamespace(monotonic=lambda: float(len(played))))
    search("--method greedy qlass --limit 0")
    lines = read_jsonl(Path("results.jsonl"))
    for method in ("greedy", "qlass"):
        own = [line for line in lines if line["method"] == method]
        assert sum(line["seconds"] for line in own) == sum(line["env_steps"] for line in own) > len(own)


def test_the_protocol_tells_whether_the_tokens_were_written():
    for candidates, tokens in (("free", "real"), ("valid", "nominal")):
        expected = {"max_steps": 5, "temperature": 0.3, "tokens": tokens}
        assert results.protocol(FakeEnv(), word_chat(candidates=candidates, temperature=0.3)) == expected


def test_of_episodes_whose_values_differ_by_rounding_alone_the_first_counts():
    episodes = [[SimpleNamespace(state=n, action="a")] for n in range(4)]
    values = iter([[0.1], [0.20623595], [0.20623597], [0.2]])
    chosen, _ = run(q_search.choose_episode(episodes, "q"), lambda request: next(values))
    assert chosen is episodes[1]


def test_prompts_beyond_the_context_are_cut_for_agent_and_qnet_alike_and_counted(search, monkeypatch):
    load_chat = models.load_chat

    def of_32_tokens(*arguments):
        chat = load_chat(*arguments)
        chat.context = 32  # 19 tokens, and 12 of an action and its end
        return chat

    monkeypatch.setattr(models, "load_chat", of_32_tokens)
    monkeypatch.setattr("qlass.chat.Chat.fixed_messages", lambda *_: 1)  # as where the first message tells all
    records = search("--method greedy qlass", out="cut.jsonl")
    for r in records:  # what the environment says first: 3 + 6; then each prompt without its first turns: 3 + 8, 3 + 9
        assert r["cut_prompts"] == r["n_steps"] - 1
        assert r["tokens"]["prompt"] == 9 + sum([11, 12][: r["n_steps"] - 1])
    assert any(r["cut_prompts"] for r in records)
