"""What people bring and what stages write is played again: what an episode of its own does not give is told."""

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
from fakes import FakeEnv, dump

import build_trees
import q_search
import sft
from environments.replay import FIRST, Turn, play_again, refuse_openings, replay_demonstrations
from qlass import UserError, demonstrations
from qlass.demonstrations import Demonstration, demonstrate, read
from qlass.messages import State, parse_action, replay

stage = q_search
RULE = "in place of .*: what follows on restore, or in a fork, must be the same \\(docs/environment.md\\)"


FAULTS = {  # what an answer turns into, and what is said of it
    "a page": (lambda page, reward, done: (page.replace("stand", "sit"), reward, done), "you s"),
    "a reward": (lambda page, reward, done: (page, 0.3 * done, done), r"\[reward 0"),
    "an end": (lambda page, reward, done: (page, 0.0, True), "end: "),
}


@pytest.fixture(params=FAULTS)
def fault(request, monkeypatch):
    """Plants a fault where `where` holds. Returns what is said of it."""
    change, says = FAULTS[request.param]
    act = FakeEnv.act

    def changed(env, action, where):
        answer = act(env, action)
        return change(*answer) if where() else answer

    def plant(where):
        monkeypatch.setattr(FakeEnv, "act", functools.partialmethod(changed, where=where))
        return f"'(left|right)' leads .*{says}.* {RULE}"

    return plant


def test_a_tree_is_not_written_whose_newest_leaf_an_episode_of_its_own_does_not_have(fault, build, monkeypatch):
    """As if a state that was restored differed from the one that was saved."""
    begin, load, loads = FakeEnv.begin, FakeEnv.load, []
    monkeypatch.setattr(FakeEnv, "begin", lambda env, task: loads.clear() or begin(env, task))
    monkeypatch.setattr(FakeEnv, "load", lambda env, path: loads.append(path) or load(env, path))
    with pytest.raises(UserError, match=f"^fake: task train.: {fault(lambda: loads)}"):
        build()
    assert not Path("trees.jsonl").exists()


@pytest.mark.parametrize("flags", [["--steps", "1"], ["--no-expert"], ["--rollouts", "1"]])
def test_a_tree_is_what_an_episode_of_its_own_gives_where_a_limit_of_steps_ends_it(flags, build, monkeypatch):
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda env: len(env.path) / 10)
    monkeypatch.setattr(FakeEnv, "max_steps", 2)  # which stops the expert too
    build(*flags)


def test_a_tree_is_not_written_whose_reward_at_the_limit_differs(build, monkeypatch):
    count = itertools.count()
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda env: next(count) / 1e6)
    with pytest.raises(UserError, match=f"fake: task train5: .* leads .*{RULE}"):
        build("--steps", "1")


def test_a_leaf_is_played_again_without_the_limit_of_steps_as_the_agent_met_it(build, monkeypatch):
    look = FakeEnv._look
    monkeypatch.setattr(FakeEnv, "_look", lambda env: look(env) + (f" of {env.max_steps}" if env.max_steps else ""))
    for steps in ("1", "9"):
        build("--no-expert", "--steps", steps, "--overwrite")


@pytest.mark.parametrize(("every", "tasks"), [(1, "2345"), (3, "25")])
def test_one_tree_in_so_many_is_played_again_as_the_environment_says(every, tasks, build, monkeypatch):
    again = []
    monkeypatch.setattr(build_trees, "play_again", lambda fork, task, *_, **__: again.append(task))
    monkeypatch.setattr(FakeEnv, "replay_every", every)
    build()
    assert sorted(again) == [f"train{task}" for task in tasks]


def test_a_result_is_not_written_whose_episode_another_fork_does_not_have(fault, search, monkeypatch):
    """As if forks shared what an episode changes."""
    plays, begin = [], FakeEnv.begin
    monkeypatch.setattr(FakeEnv, "begin", lambda env, task: plays.append(task) or begin(env, task))
    search("--method", "greedy", "qlass")
    assert plays == [f"test{i}" for i in (0, 1, 2, 0, 1, 2)] * 2  # side by side, and each once more
    with pytest.raises(UserError, match=f"^fake: task test0: {fault(lambda: len(plays) > 15)}"):
        search("--method", "greedy", out="other.jsonl")
    assert not Path("other.jsonl").exists()


def test_of_each_method_the_first_five_episodes_and_one_in_fifty_are_played_again(search, monkeypatch):
    again = []
    monkeypatch.setattr(q_search, "play_again", lambda fork, task, *_: again.append(task))
    monkeypatch.setattr(FakeEnv, "split_ids", lambda env, split: [str(i) for i in range(52)])
    search("--method", "greedy", "sample", "--limit", "0")
    assert sorted(again) == sorted([*"01234", "50"] * 2)
    again.clear()
    monkeypatch.setattr(FakeEnv, "replay_every", 10)  # where an episode begins slowly
    search("--method", "greedy", "--limit", "0", out="slow.jsonl")
    assert sorted(again) == ["0", "50"]


def test_the_start_of_an_episode_is_looked_at_too():
    with pytest.raises(UserError, match="task test0: its start leads in an episode of its own to 'you stand"):
        play_again(FakeEnv(), "test0", [Turn(None, "you sit")])
    play_again(FakeEnv(), "test0", [Turn(None, "you stand at start"), Turn("", "Observation: nothing happens")])


@pytest.mark.parametrize("known", [False, True])
def test_an_agent_none_of_whose_actions_is_known_is_warned_of_after_its_first_twenty_steps(
    known, build, search, monkeypatch, capsys
):
    """Once, in trees and in play; one action that is known is enough."""
    steps = []
    monkeypatch.setattr(FakeEnv, "knows", lambda env, action: steps.append(action) or (known and len(steps) == FIRST))
    for run in (lambda: build("--no-expert"), lambda: search("--method", "greedy", "sample", "random", "--limit", "0")):
        run()
        assert len(steps) > FIRST
        warnings = capsys.readouterr().err.count("fake knows none of the agent's first 20 actions, such as")
        assert warnings == (not known)
        steps.clear()
        demonstrations.warn.cache_clear()


# ------------------------------------------------------------------------------------------------------ demonstrations


def opening(*messages: str, task: str | None = None) -> Demonstration:
    number = demonstrations.opening_of([{"content": text} for text in messages])
    turns = zip(("user", "assistant") * 2, messages, strict=False)
    return Demonstration(task, State(tuple(turns), "", number))


AGREED = ("OK", "you stand", "Action: left")
WHOLE, LONG = "walkyou stand at start", "walk " * 50 + "on"


@pytest.mark.parametrize(
    ("expert", "says"),
    [
        (
            [opening("walk", *AGREED), opening("find the purse", *AGREED)],
            "2 begins with 'find",
        ),  # it holds the goal
        ([opening("walk", *AGREED), opening("walk", "I see.", *AGREED[1:])], "2 begins with '.*I see"),
        ([opening("walk", *AGREED), opening(WHOLE, "Action: left", task="train1")], "2 begins with 'walkyou"),
        # a blank behind two hundred equal letters is seen
        ([opening(LONG, *AGREED), opening(f"{LONG} ", *AGREED)], r"2 begins with '.* \\nOK' in place of '.*on\\nOK'"),
        ([opening("walk", "Sure.", "you stand", "left", task="train0")], "1 begins"),  # no action, and no agreement
        ([opening(WHOLE, "left")], "1 begins"),  # of whatever task
    ],
)
def test_all_demonstrations_begin_alike(expert, says):
    """Else an agent would be asked in other words than it was cloned in."""
    with pytest.raises(UserError, match=f"demonstration {says}.*: all must begin .*the goal stands after them"):
        refuse_openings(expert, FakeEnv())
    refuse_openings(expert[:-1] or [opening("walk", *AGREED)], FakeEnv())


def shown(*actions: str, task: str = "train0", reward: float | None = None, whole: bool = False) -> Demonstration:
    """A demonstration of the fake world as it is. whole: without an agreement."""
    env = FakeEnv()
    env.agreement = "" if whole else "OK"
    *_, end = replay(env, task, [f"Action: {action}" for action in actions])
    return Demonstration(task, end.state.prefix(-1), reward)


def with_page(demonstration: Demonstration, number: int, page: str) -> Demonstration:
    messages = list(demonstration.state.messages)
    messages[number] = ("user", page)
    return dataclasses.replace(demonstration, state=dataclasses.replace(demonstration.state, messages=tuple(messages)))


RIGHT = shown("right", "right", "right", reward=1.0)


def told_of(capsys, *expert: Demonstration, tasks: tuple = ("train0", "train1")) -> list[str]:
    demonstrations.warn.cache_clear()
    replay_demonstrations(expert, FakeEnv(), tasks)
    return capsys.readouterr().err.splitlines()


def test_what_is_as_recorded_is_not_told(capsys):
    good = [dataclasses.replace(RIGHT, reward=reward) for reward in (1.0, 0.999, None)]
    whole = shown("right", "right", "right", reward=1.0, whole=True)
    other_split = dataclasses.replace(with_page(RIGHT, 2, "elsewhere"), task_id="test0")
    assert told_of(capsys, *good, whole, other_split, tasks=("train0", "test0", None)) == []
    assert told_of(capsys, with_page(RIGHT, 2, "elsewhere"), tasks=()) == []


def test_a_demonstration_is_not_played_out_of_memory(monkeypatch):
    forgot = []
    monkeypatch.setattr(FakeEnv, "forget", lambda env: forgot.append((env.task_id, env.steps)))
    replay_demonstrations([RIGHT, RIGHT], FakeEnv(), ["train0"])
    assert forgot == [("train0", 0)] * 2


def test_other_pages_another_reward_and_unknown_actions_are_told_apart(capsys):
    """Each kind with its count and its first example."""
    way = "demonstrations that were played (python -m reporting.demonstration). The first: task"
    sits, stripped = with_page(RIGHT, 2, "you sit at start"), with_page(RIGHT, 4, "you stand at start right")
    assert told_of(capsys, RIGHT, sits, stripped) == [
        f"warning: other pages than recorded in 2 of 3 {way} train0: 'you stand at start' in place of"
        " 'you sit at start'"
    ]
    poor, unread = shown("right", reward=1.0, task="train1"), shown("**Action:**right", "sing", reward=1.0)
    assert told_of(capsys, RIGHT, poor, unread, unread) == [
        f"warning: another reward than recorded in 1 of 4 {way} train1: 0 in place of 1",
        f"warning: no action that fake knows in 2 of 4 {way} train0: '**Action:**right'",
    ]
    (line,) = told_of(capsys, poor, RIGHT, RIGHT, tasks=["train1"])
    assert "another reward than recorded in 1 of 1 " in line
    too_long = dataclasses.replace(RIGHT, state=RIGHT.state.extended("Action: right", "").extended("Action: right", ""))
    (line,) = told_of(capsys, dataclasses.replace(too_long, state=too_long.state.prefix(-1)))
    assert "other pages than recorded" in line and "[the end]" in line


def test_an_expert_of_whose_demonstrations_none_earns_anything_is_refused(capsys):
    failed = [shown("left", "left", reward=reward) for reward in (0.0, 1.0, None)]
    for expert, tasks in ((failed, ["train0"]), (failed[:1], [])):  # as played, or as recorded
        with pytest.raises(UserError, match=f"none of {len(expert)} demonstrations earns anything"):
            replay_demonstrations(expert, FakeEnv(), tasks)
    told_of(capsys, *failed, RIGHT)
    told_of(capsys, *failed, tasks=())  # two of them say another reward, or none


def test_stage_1_and_2_refuse_an_expert_that_earns_nothing(build, monkeypatch):
    failed = [demonstrate(FakeEnv(), f"train{i}") for i in range(3)]
    Path("mine.jsonl").write_text(dump([line | {"reward": 0.0, "env": "frozenlake"} for line in failed]))
    monkeypatch.setattr(FakeEnv, "act", lambda env, action: ("nothing happens", 0.0, env.steps == 2))
    clone, own = ["--env", "frozenlake", "--n-expert", "3"], ["--expert", "mine.jsonl"]
    for stage_1_or_2 in (
        lambda: sft.main([*clone, "--run", "a", *own]),
        lambda: sft.main([*clone, "--run", "b"]),  # the environment's
        lambda: build("--tasks", "cloned", *own),
    ):
        with pytest.raises(UserError, match=r"none of . demonstrations earns anything"):
            stage_1_or_2()
    build("--tasks", "cloned", *own, "--no-expert")


def test_an_expert_without_a_way_is_told_with_its_task():
    env = FakeEnv()
    env.expert = lambda task: iter([] if task == "train3" else [("", "left")])
    demonstrate(env, "train2")
    with pytest.raises(UserError, match="fake: task train3: its player yields no action"):
        demonstrate(env, "train3")


def test_a_demonstration_is_read_as_datasets_writes_it_and_takes_its_task_from_the_environment():
    """Null for all that it lacks. Without the task's sentence the tiny model would not find its goal."""
    line = demonstrate(FakeEnv(), "train0")
    nulls = dict.fromkeys(("task", "reward", "source", "env", "system", "tools", "success", "score", "images"))
    for turn in line["messages"]:
        turn |= {"name": None, "tool_calls": None}
    Path("mine.jsonl").write_text(dump([line | nulls, line | nulls | {"task_id": None}]))
    own, unnamed = read(Path("mine.jsonl"), FakeEnv())
    assert (own.task_id, own.state.task, own.reward, own.source) == ("train0", "find the purse", None, "expert")
    assert (unnamed.task_id, unnamed.state.task) == (None, "")
    assert list(map(parse_action, own.state.actions)) == ["right"] * 3
