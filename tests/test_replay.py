"""What people bring and what stages write is played again: what an episode of its own does not give is told."""

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
from fakes import FakeEnv, refused, write

import build_trees
import q_search
import sft
from environments.replay import FIRST, Turn, play_again, replay_demonstrations
from qlass import demonstrations
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
    with refused(f"^fake: task train.: {fault(lambda: loads)}"):
        build()
    assert not Path("trees.jsonl").exists()


@pytest.mark.parametrize("flags", ["--steps 1", "--no-expert", "--rollouts 1"])
def test_a_tree_is_what_an_episode_of_its_own_gives_where_a_limit_of_steps_ends_it(flags, build, monkeypatch):
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda env: len(env.path) / 10)
    monkeypatch.setattr(FakeEnv, "max_steps", 2)  # which stops the expert too
    build(flags)


def test_a_tree_is_not_written_whose_reward_at_the_limit_differs(build, monkeypatch):
    count = itertools.count()
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda env: next(count) / 1e6)
    with refused(f"fake: task train5: .* leads .*{RULE}"):
        build("--steps 1")


def test_a_leaf_is_played_again_without_the_limit_of_steps_as_the_agent_met_it(build, monkeypatch):
    look = FakeEnv._look
    monkeypatch.setattr(FakeEnv, "_look", lambda env: look(env) + (f" of {env.max_steps}" if env.max_steps else ""))
    for steps in (1, 9):
        build(f"--no-expert --steps {steps} --overwrite")


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
    search("--method greedy qlass")
    assert plays == [f"test{i}" for i in (0, 1, 2, 0, 1, 2)] * 2  # side by side, and each once more
    with refused(f"^fake: task test0: {fault(lambda: len(plays) > 15)}"):
        search("--method greedy", out="other.jsonl")
    assert not Path("other.jsonl").exists()


def test_of_each_method_the_first_five_episodes_and_one_in_fifty_are_played_again(search, monkeypatch):
    again = []
    monkeypatch.setattr(q_search, "play_again", lambda fork, task, *_: again.append(task))
    monkeypatch.setattr(FakeEnv, "split_ids", lambda env, split: [str(i) for i in range(52)])
    search("--method greedy sample --limit 0")
    assert sorted(again) == sorted([*"01234", "50"] * 2)
    again.clear()
    monkeypatch.setattr(FakeEnv, "replay_every", 10)  # where an episode begins slowly
    search("--method greedy --limit 0", out="slow.jsonl")
    assert sorted(again) == ["0", "50"]


def test_the_start_of_an_episode_is_looked_at_too():
    with refused("task test0: its start leads in an episode of its own to 'you stand"):
        play_again(FakeEnv(), "test0", [Turn(None, "you sit")])
    play_again(FakeEnv(), "test0", [Turn(None, "you stand at start"), Turn("", "Observation: nothing happens")])


@pytest.mark.parametrize("known", [False, True])
def test_an_agent_none_of_whose_actions_is_known_is_warned_of_after_its_first_twenty_steps(
    known, build, search, monkeypatch, capsys
):
    """Once, in trees and in play; one action that is known is enough."""
    steps = []
    monkeypatch.setattr(FakeEnv, "knows", lambda env, action: steps.append(action) or (known and len(steps) == FIRST))
    for run in (lambda: build("--no-expert"), lambda: search("--method greedy sample random --limit 0")):
        run()
        assert len(steps) > FIRST
        warnings = capsys.readouterr().err.count("fake knows none of the agent's first 20 actions, such as")
        assert warnings == (not known)
        steps.clear()
        demonstrations.warn.cache_clear()


# ------------------------------------------------------------------------------------------------------ demonstrations


def shown(agreement):
    """A demonstration of the fake world as it is."""
    env = FakeEnv()
    env.agreement = agreement
    *_, end = replay(env, "train0", ["Action: right"] * 3)
    return Demonstration("train0", end.state.prefix(-1), 1.0)


RIGHT = shown("OK")


def test_what_is_as_recorded_is_not_told(capsys):
    good = [dataclasses.replace(RIGHT, reward=reward) for reward in (1.0, 0.999, None)]
    elsewhere = State((*RIGHT.state.messages[:2], ("user", "elsewhere"), ("assistant", "Action: sing")), "", 2)
    expert = [*good, shown(""), Demonstration("test0", elsewhere)]
    replay_demonstrations(expert, FakeEnv(), ["train0", "test0", None])
    replay_demonstrations([Demonstration("train0", elsewhere)], FakeEnv(), [])
    assert capsys.readouterr().err == ""


def test_a_demonstration_is_not_played_out_of_memory(monkeypatch):
    forgot = []
    monkeypatch.setattr(FakeEnv, "forget", lambda env: forgot.append((env.task_id, env.steps)))
    replay_demonstrations([RIGHT, RIGHT], FakeEnv(), ["train0"])
    assert forgot == [("train0", 0)] * 2


def test_an_environments_own_expert_that_earns_nothing_is_refused(fake_world, monkeypatch):
    monkeypatch.setattr(FakeEnv, "act", lambda env, action: ("nothing happens", 0.0, env.steps == 2))
    with refused("none of 3 demonstrations earns anything"):
        sft.main(["--n-expert", "3"])


def test_an_expert_without_a_way_is_told_with_its_task():
    env = FakeEnv()
    env.expert = lambda task: iter([] if task == "train3" else [("", "left")])
    demonstrate(env, "train2")
    with refused("fake: task train3: its player yields no action"):
        demonstrate(env, "train3")


def test_a_demonstration_is_read_as_datasets_writes_it_and_takes_its_task_from_the_environment():
    """Null for all that it lacks. Without the task's sentence the tiny model would not find its goal."""
    line = demonstrate(FakeEnv(), "train0")
    nulls = dict.fromkeys(("task", "reward", "source", "env", "system", "tools", "success", "score", "images"))
    for turn in line["messages"]:
        turn |= {"name": None, "tool_calls": None}
    write("mine.jsonl", [line | nulls, line | nulls | {"task_id": None}])
    own, unnamed = read(Path("mine.jsonl"), FakeEnv())
    assert (own.task_id, own.state.task, own.reward, own.source) == ("train0", "find the purse", None, "expert")
    assert (unnamed.task_id, unnamed.state.task) == (None, "")
    assert list(map(parse_action, own.state.actions)) == ["right"] * 3
