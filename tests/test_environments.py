"""What every environment keeps to, the order of tasks, and the example of docs/environment.md through all stages."""

import argparse
import copy
import itertools
import json
import pickle
import random
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
from fakes import FakeEnv
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

import build_trees
import envs
import sft
import train_qnet
from build_trees import Explorer
from docs.switches import Switches
from environments import check
from experiments import compare, drive_in_order
from qlass import UserError
from qlass.chat import Rendering
from qlass.files import read_jsonl
from qlass.flags import run_stage

FLAG = "docs.switches:Switches"
installed = pytest.mark.skipif(find_spec("scienceworld") is None, reason="pip install scienceworld")
EVERY = ["webshop", "alfworld", pytest.param("sciworld", marks=installed), "frozenlake", FLAG]


@pytest.fixture(autouse=True)
def no_class_checked(monkeypatch):
    monkeypatch.setattr(envs, "CHECKED", set(envs.CHECKED))


@pytest.mark.filterwarnings("ignore")  # of gymnasium's checks, on the texts of ScienceWorld
@pytest.mark.parametrize("name", EVERY)
def test_every_environment_keeps_what_envs_promises(name, capsys):
    check.main([name])
    assert len(capsys.readouterr().out.splitlines()) == 6  # the rules
    env = envs.make(name, max_steps=None)
    with pytest.raises(UserError, match="step before reset"):
        env.step("look")
    check_env(env.fork(), skip_render_check=True)
    task = env.task_ids("train")[-1]
    _, info = env.reset(options={"task_id": task})
    offered = env.valid_actions()
    assert info["task_id"] == task and info["task"] and copy.deepcopy(info)["valid_actions"] == offered
    for handed_out in (info["valid_actions"], env.valid_actions(), env.split_ids("test")):
        handed_out.clear()
    assert env.valid_actions() == offered and env.split_ids("test")
    here, other = env.snapshot(), env.fork()
    for _, action in env.expert(task):
        twin = pickle.loads(pickle.dumps(env))
        text, reward, over, truncated, info = env.step(action)
        assert twin.step(action) == (text, reward, over, truncated, info) and info["known"]
        if over:
            break
    assert over  # without a step limit too
    ended = env.snapshot()
    other.restore(ended)
    for player in (env, env, twin, pickle.loads(pickle.dumps(env)), other):  # the last answer again, without reward
        assert player.step(offered[0]) == (text, 0.0, True, False, info)
    other.restore(here)
    assert other.step(offered[0])[4]["known"]  # it goes on
    env.instruct("Play.")
    env.reset(options={"task_id": task})
    assert env.fork().instruction == env.instruction == "Play."
    subjects = []
    for split in ("train", "val", "test"):
        tasks = env.task_ids(split)
        assert tasks == envs.fair_order(env.split_ids(split), env.task_type) and len(set(tasks)) == len(tasks)
        subjects.append({env.subject(task) for task in tasks})
    assert all(subjects) and sum(map(len, subjects)) == len(set.union(*subjects))
    for split, options in (("train", {}), ("test", {"split": "test"})):  # without a task: one to train on
        tasks = env.task_ids(split)
        drawn = [env.reset(seed=seed, options=options)[1]["task_id"] for seed in (0, 1, 2, 3, 0)]
        assert set(drawn) <= set(tasks) and drawn[0] == drawn[-1] and len(set(drawn)) > 1
        assert env.reset(options=options | {"index": 1})[1]["task_id"] == tasks[1]
    for options, says in REFUSED.items():
        with pytest.raises(UserError, match=says):
            env.reset(options=dict(options))
    env.close()


REFUSED = {  # options of a reset
    (("task_id", "nowhere"),): "nowhere",
    (("split", "nowhere"),): "nowhere",
    (("session", 7),): "reset takes task_id, or split and index, not session$",
    (("task_id", "x"), ("split", "test")): "or split and index, not task_id, split",
    (("index", 10**6),): "no task 1000000 of train, which has",
    (("index", "first"),): "no task first",
}


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        ("webshop", ["search[red]", "search[red]]"], ["click[search]", "search[]", "search[a[b]]", "buy"]),
        ("alfworld", ["look", " look ", "help"], ["LOOK", "sing"]),
        pytest.param("sciworld", ["look around", "LOOK  around"], ["sing"], marks=installed),
        ("frozenlake", ["left", " Left "], ["jump", ""]),
        (FLAG, ["done", "switch red"], ["Done", ""]),
    ],
)
def test_info_says_whether_the_action_was_one_that_the_environment_knows(name, known, unknown):
    env = envs.make(name)
    for action in (*known, *unknown):
        env.reset(options={"index": 0})
        assert env.step(action)[4]["known"] == (action in known), action
    env.close()


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake", FLAG])  # sciworld: its own test, of few steps
def test_actions_of_one_canonical_form_are_the_same_to_the_engine(name):
    env, merged = envs.make(name, max_steps=None), 0
    task = env.task_ids("train")[0]
    env.reset(options={"task_id": task})
    for _, played in [("", ""), *itertools.islice(env.expert(task), 2)]:
        env.step(played)
        here, offered = env.snapshot(), env.valid_actions()
        assert len({env.canonical(action) for action in offered}) == len(offered)
        for action in offered[:2]:
            spaced = action.replace(" ", "  "), f" {action} ", f"{action} x"
            for other in (action.upper(), action.title(), *spaced):
                if env.canonical(other) == env.canonical(action):
                    merged += 1
                    env.restore(here)
                    answer = env.step(action)[:4]
                    env.restore(here)
                    assert env.step(other)[:4] == answer, (action, other)
        env.restore(here)
    assert (merged > 0) == (name not in ("alfworld", FLAG))  # those read what stands there
    env.close()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_every_stretch_holds_each_type_by_its_share(sizes, data):
    """Type t's tasks stand at (i + 1/2) / n_t: n_t x of them, rounded, below x, which is k / n within T / (2 n)."""
    tasks = [f"{kind}/{i}" for kind, size in enumerate(sizes) for i in range(size)]
    order = envs.fair_order(data.draw(st.permutations(tasks)), lambda task: task.split("/")[0])
    assert sorted(order) == sorted(tasks) and order == envs.fair_order(tasks, lambda task: task.split("/")[0])
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(tasks))] * 2)))
    for first, times in ((0, 1), (start, 2)):  # a prefix, any stretch
        found = Counter(task.split("/")[0] for task in order[first:end])
        for kind, size in enumerate(sizes):
            share = size / len(tasks)
            bound = times * (0.5 + share * len(sizes) / 2) + 1e-9
            assert abs(found[str(kind)] - share * (end - first)) <= bound


class Wrapped(Switches):
    """Around a simulator that all forks share and that each episode changes."""

    name, side_by_side = "wrapped", envs.TextEnv.side_by_side
    on = property(lambda self: self.simulator["on"], lambda self, lamps: self.simulator.update(on=lamps))

    def __init__(self):
        super().__init__()
        self.simulator = {}


def test_one_command_takes_it_through_all_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sft.UPDATES", 10)
    monkeypatch.setitem(sft.TINY, "epochs", 1)
    monkeypatch.setitem(train_qnet.TINY, "epochs", 1)
    monkeypatch.setitem(build_trees.DEFAULTS, "limit", 2)
    compare.main(["--env", FLAG, "--run", str(tmp_path), "--method", "all", "-M", "2", "--limit", "1"])
    made = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert len(made) == 4  # QNet, labels, trees, agent
    records = list(read_jsonl(tmp_path / "results.jsonl"))
    assert all(r["reward"] == 1 for r in records if r["method"] in ("expert", "oracle"))
    assert {"greedy", "qlass", "best_of_n"} <= {r["method"] for r in records}


def step_as(change):
    """A step whose answer is changed: change(env, action, observation, reward, terminated, truncated, info)."""
    return {"step": lambda self, action: change(self, action, *Switches.step(self, action))}


def reset_as(change):
    return {"reset": lambda self, **more: change(self, *Switches.reset(self, **more))}


def info_as(**values):
    """The info that holds these values; without those that are None."""
    return {"info": lambda self: {name: v for name, v in (Switches.info(self) | values).items() if v is not None}}


class Board(Switches):
    """Whose state is a set that it changes, as most programs have it; it is copied where that is needed."""

    side_by_side = 1

    def reset(self, **more):
        answer = super().reset(**more)
        self.on = set()
        return answer

    def snapshot(self):
        return copy.deepcopy(super().snapshot())

    def restore(self, snapshot):
        super().restore(copy.deepcopy(snapshot))


IDLE = {"expert": lambda self, task_id: iter(())}
SEEN = dict.fromkeys(Switches().valid_actions(), "")
HIDDEN = {"log": [], "snapshot": lambda self: (*Board.snapshot(self), self.log.append(0), self.log)}
HIDDEN["restore"] = lambda self, snapshot: Board.restore(self, snapshot[:4])
CLOSED = reset_as(lambda self, *answer: 1 / 0 if "closed" in self.simulator else answer)
CLOSED["close"] = lambda self: self.simulator.update(closed=True)
BROKEN = {  # a class that keeps the rules: its changes and what is said of each
    Switches: [
        ({"split_ids": lambda self, split: [3, 1, 2]}, "has the task id 3, which is no str"),
        ({"task_ids": lambda self, split: random.sample(self.split_ids(split), 20)}, "or other ones at the next call"),
        ({"split_ids": lambda self, split: []}, "train has no tasks"),
        ({"reset": lambda self, **more: "All off."}, "reset returns str, not (observation, info)"),
        (step_as(lambda self, a, o, *rest: (np.zeros(6), *rest)), "is of type ndarray, not str"),
        (info_as(valid_actions=("done",)), "info of reset has no valid_actions, or one that is no list"),
        (info_as(valid_actions=["done"]), "or not those of valid_actions()"),
        (info_as(task_id="4"), "the task_id '4', in task"),
        (info_as(task=None), "info of reset has no task"),
        (step_as(lambda self, a, o, r, *rest: (o, 0.5, *rest)), "a step earned 0.5"),  # before the end
        (step_as(lambda self, a, o, r, *rest: (o, np.float32("nan"), *rest)), "earned nan"),
        (IDLE, "yields no step"),
        ({"expert": lambda self, task_id: iter(["done"])}, "expert yields 'done', not ("),
        (reset_as(lambda self, o, i: (f"{o} {random.random()}", i)), "reset gives, as observation, ... "),
        (step_as(lambda self, a, o, r, d, t, i: (o, r, d, False, i)), "after step('sing a song') with max_steps = 1"),
        (step_as(lambda self, a, *rest: (SEEN[a], *rest[1:])), "step('sing a song'): KeyError: 'sing a song' (--de"),
    ],
    Board: [
        ({"snapshot": Switches.snapshot}, "and before"),
        (HIDDEN, "a snapshot changes while the episode goes on"),
    ],
    Wrapped: [
        ({"side_by_side": 2}, "with side_by_side above 1, forks share nothing"),
        (CLOSED, "reset: ZeroDivisionError"),  # by close() of another fork
    ],
}


@pytest.mark.parametrize(("base", "change", "says"), [(base, *case) for base in BROKEN for case in BROKEN[base]])
def test_a_class_that_breaks_a_rule_is_refused_in_one_line(base, change, says):
    env = type("Broken", (base,), {"name": "broken", **change})()
    with pytest.raises(UserError) as refused:
        envs.check(env)
    text = str(refused.value)
    assert text.startswith("broken: ") and says in text and "\n" not in text
    assert env.max_steps == base.max_steps


@pytest.mark.parametrize("kind", [Board, Wrapped, FakeEnv])
def test_a_class_with_changing_parts_may_keep_the_rules(kind):
    env = kind()
    assert len(envs.check(env)) == 6 and len(getattr(env, "played", [])) < 30


class Maze(Switches):
    name, side_by_side = "maze", 2

    def __init__(self, size: int, rate: float = 0.5, level: str = "1", max_steps: int | None = 5):
        super().__init__()
        self.size, self.rate, self.level, self.door = size, rate, level, 1 / size


class Fragile(Switches):
    name = "fragile"

    def step(self, action):
        if (self.task_id, action) == ("red", "switch red"):
            raise KeyError("lamp\nof glass")
        return super().step(action)

    def split_ids(self, split):
        return ["red", "white", "blue"]


def asked(*options, **more):
    settings = {"run": None, "env": "test_environments:Maze", "env_option": list(options)}
    return argparse.Namespace(**settings | more)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "missing a required argument: 'size' (--env-option NAME=VALUE; its options: size, rate, level, max_steps"),
        (["stray=7"], "--env-option stray=7: NAME=VALUE is expected, of size, rate"),
        (["size=0"], "ZeroDivisionError: division by zero (--debug shows where)"),
        (["size=2", "rate=fast"], "rate must be a number"),
        (["size=2", "max_steps=abc"], "max_steps must be a whole number"),
        (["size=2"], "--in-flight 3: maze may have 2 open at once, its side_by_side"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options, says, tmp_path):
    with pytest.raises(UserError) as refused:
        envs.from_arguments(asked(*options, run=tmp_path, in_flight=3))
    assert says in str(refused.value) and not list(tmp_path.iterdir())


def test_options_arrive_as_their_defaults_are(tmp_path):
    env = envs.from_arguments(asked("size=2", "level=7", "rate=1", run=tmp_path, in_flight=2), max_steps=8)
    assert (env.size, env.level, env.rate, env.max_steps) == (2, "7", 1, 8)  # which its constructor does not pass on
    for steps, name in itertools.product(["abc", "0", "2.5", "true"], ["frozenlake", FLAG]):
        with pytest.raises(UserError, match=r"max_steps=.*: a number of steps is expected, or null for no limit"):
            envs.from_arguments(asked(f"max_steps={steps}", env=name, run=tmp_path))


def test_a_class_of_ones_own_is_checked_once_and_what_comes_along_is_not(monkeypatch):
    checked = []
    monkeypatch.setattr(envs, "check", lambda env: checked.append(env.name))
    for name in (FLAG, "frozenlake", FLAG):
        envs.make(name)
    assert checked == ["switches"]


def test_a_crash_names_the_task_and_the_action_and_ends_no_other_task(tmp_path, capsys, monkeypatch):
    argv = ["--env", "test_environments:Fragile", "--run", str(tmp_path), "--method", "expert", "--limit", "0"]
    with pytest.raises(SystemExit):
        run_stage(lambda: compare.main(argv))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    says = "error: fragile: task red: step('switch red'): KeyError: 'lamp\\nof glass' (--debug shows where)"
    assert line == says
    (part,) = (tmp_path / "results.jsonl.parts").iterdir()
    assert {json.loads(line)[0]["task_id"] for line in part.read_text().splitlines()} == {"white", "blue"}
    monkeypatch.setattr("sys.argv", ["compare.py", "--debug"])
    with pytest.raises(UserError) as shown:
        run_stage(lambda: compare.main(argv))
    assert isinstance(shown.value.__cause__, KeyError)


def test_numbers_of_numpy_become_pythons():
    change = step_as(lambda self, a, o, r, d, t, i: (o, np.float32(r), np.bool_(d), np.bool_(t), i))
    env = type("Numeric", (Switches,), change)()
    envs.check(env)
    root = next(iter(drive_in_order([Explorer(env, "red", Rendering(), 2, max_rollouts=0).explore({})], {}, 1)))
    json.dumps(build_trees.tree_records(env, "red", root))


def test_a_player_against_the_rules_in_some_task_is_named():
    idle = type("Own", (Switches,), IDLE)()
    for play in (sft.demonstrate, lambda *of: compare.follow(*of, compare.Variant("expert"))):
        with pytest.raises(UserError, match=r"own: (its )?expert does nothing in task red"):
            play(idle, "red")
