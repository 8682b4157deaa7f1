"""What every environment keeps to, the order of tasks, and the example of docs/environment.md through all stages."""

import copy
import itertools
import json
import os
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

import envs
from build_trees import Explorer
from docs.switches import Switches
from environments import check, writable
from experiments import compare, drive_in_order
from qlass import UserError, presets, published
from qlass.chat import Rendering
from qlass.config import Sampling, run_stage
from qlass.files import read_jsonl
from qlass.trees import tree_records

FLAG = "docs.switches:Switches"
installed = pytest.mark.skipif(find_spec("scienceworld") is None, reason="pip install scienceworld")
EVERY = ["webshop", "alfworld", pytest.param("sciworld", marks=installed), "frozenlake", FLAG]


@pytest.fixture(autouse=True)
def no_class_checked(monkeypatch):
    monkeypatch.setattr(envs, "CHECKED", set(envs.CHECKED))


@pytest.mark.filterwarnings("ignore")  # of gymnasium's checks, on the texts of ScienceWorld
@pytest.mark.parametrize("name", EVERY)
def test_every_environment_keeps_what_envs_promises(name, capsys):
    env = envs.make(name, max_steps=None)
    capsys.readouterr()  # the first process of all makes ALFWorld's games, and says so
    assert len(envs.check(env)) == 6  # the rules
    assert name == "sciworld" or not capsys.readouterr().err  # whose plans use more than its few candidates
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
    env.close()


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
    for stage, name, value in (("sft", "epochs", 1), ("train_qnet", "epochs", 1), ("build_trees", "limit", 2)):
        monkeypatch.setitem(presets.TINY["any"][stage], name, value)
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
        ({"snapshot": envs.TextEnv.snapshot}, "snapshot: snapshot is for a class to define"),
        ({"valid_actions": envs.TextEnv.valid_actions}, "valid_actions is for a class to define"),
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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "own: every process gives the same"),
        ("task_ids = lambda self, split: list({*self.split_ids(split)})", "own: train has other tasks in a second pro"),
        ("valid_actions = lambda self: list({*LAMPS, 'done'})", "other valid_actions in a second process; the rule: "),
        ("candidates = lambda self: list({('', lamp) for lamp in LAMPS})", "other candidates in a second process"),
        ("block = subject = lambda self, task_id: str(hash(task_id) % 99)", "other subject in a second process"),
        ("message = lambda self, text: f'{text} {list({*LAMPS})}'", "other observation in a second process"),  # later
        ("__init__ = lambda self: Switches.__init__(self, 8 // (os.getpid() == FIRST))", "own can't be asked again"),
        ("split_ids = lambda self, split: TASKS[:9]", "own: 9 tasks of train are in val too, e.g. 'amber'"),
        ("split_ids = lambda self, split: TASKS[:9] if split == 'val' else TASKS[9:]", "are in test too"),
        ("task = agreement = 'Play.'", " of train does (8 in all)"),
    ],
)
def test_a_second_process_and_the_splits_are_compared(body, says, tmp_path, capsys):
    """`python -m environments.check` of an example with one line of its own."""
    code = f"import os\nfrom docs.switches import *\nFIRST = {os.getpid()}\nclass Own(Switches):\n    {body}"
    (tmp_path / f"{tmp_path.name}.py").write_text(code)
    refused = ""
    try:
        check.main([f"{tmp_path.name}:Own"])
    except UserError as error:
        refused = str(error)
    assert says in "".join([*capsys.readouterr(), refused])


HALF = "\ud83d"  # of a surrogate pair, which no file holds


def crash(*_):
    raise KeyError("lamp")


@pytest.mark.parametrize(
    ("name", "method", "call", "says"),
    [
        ("candidates", crash, lambda env: env.candidates(), "candidates: KeyError"),
        ("candidates", lambda _: [("", HALF)], lambda env: env.candidates(), r"candidates: half a surrogate in '\\ud"),
        ("canonical", crash, lambda env: env.canonical("Done"), r"canonical\('Done'\): KeyError"),
        ("task_type", crash, lambda env: env.task_ids("train"), r"task_type\('\w+'\): KeyError"),
        ("split_ids", crash, lambda env: env.task_ids("exam"), r"split_ids\('exam'\): KeyError"),
        ("in_own_words", crash, lambda env: env.in_own_words("go"), "in_own_words: KeyError"),
        ("rules", crash, lambda env: env.rules(), "rules: KeyError"),
        ("rules", lambda _: {"r": crash}, lambda env: env.rules()["r"](), "rule 'r': KeyError"),
        ("oracle", lambda *_: map(crash, "x"), lambda env: [*env.oracle("red")], "oracle: KeyError"),
    ],
)
def test_whatever_raises_names_the_task(name, method, call, says):
    env = type("Own", (Switches,), {name: method})()
    env.reset(options={"task_id": "red"})
    with pytest.raises(UserError, match=f"own: task red: {says}"):
        call(env)


def test_a_user_without_a_home_is_told_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert writable(tmp_path) == tmp_path
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="read only, and there is no home: set XDG_CACHE_HOME"):
        writable(tmp_path)


def test_half_a_surrogate_is_replaced_where_it_enters():
    change = reset_as(lambda self, text, info: (text + HALF, info | {"task": HALF + "\ude00 " + HALF}))
    change |= step_as(lambda self, action, text, *more: (HALF + text, *more))
    change["message"] = lambda self, text: text + HALF
    env = type("Own", (Switches,), change)()
    text, info = env.reset()
    assert env.message("On: none.") == "On: none.\ufffd"
    assert text.endswith("off.\ufffd") and info["task"] == "\N{GRINNING FACE} \ufffd"
    assert env.step("done")[0] == "\ufffdOn: none."
    envs.check(env)


def test_an_expert_that_writes_what_no_candidate_offers_is_told(capsys):
    envs.check(type("Own", (Switches,), {"candidates": envs.TextEnv.candidates})())
    says = "own: task white: the expert writes ('white is off.', 'switch white'), which is not among candidates()"
    assert says in capsys.readouterr().err


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


def built(*options, env="test_environments:Maze", in_flight=None, **more):
    return envs.from_config(Sampling(env=env, env_option=options, in_flight=in_flight), **more)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "missing a required argument: 'size' (--env-option NAME=VALUE; its options: size, rate, level, max_steps"),
        (["sizes=7"], "sizes=7: there is no option sizes, but size, rate, level, max_steps; perhaps you meant size"),
        (["size"], "--env-option size: NAME=VALUE is expected"),
        (["size=0"], "ZeroDivisionError: division by zero (--debug shows where)"),
        (["size=2", "rate=fast"], "rate must be a number"),
        (["size=2", "rate=null"], "rate must be a number"),
        (["size=2", "max_steps=abc"], "max_steps must be a whole number"),
        (["size=2"], "--in-flight 3: maze may have 2 open at once, its side_by_side"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options, says, tmp_path):
    with pytest.raises(UserError) as refused:
        built(*options, in_flight=3)
    assert says in str(refused.value) and not list(tmp_path.iterdir())


def test_options_arrive_as_their_defaults_are():
    env = built("size=2", "level=7", "rate=1", in_flight=2, max_steps=8)
    assert (env.size, env.level, env.rate, env.max_steps) == (2, "7", 1, 8)  # which its constructor does not pass on
    for steps, name in itertools.product(["abc", "0", "2.5", "true"], ["frozenlake", FLAG]):
        with pytest.raises(UserError, match=r"max_steps=.*: a number of steps is expected, or null for no limit"):
            built(f"max_steps={steps}", env=name)
    with pytest.raises(UserError, match=r"nofile: No such file or directory \(docs/paper\.md, section Data"):
        built("instruction=nofile", env=FLAG)


def test_a_crash_names_the_task_and_the_action(tmp_path, capsys, monkeypatch):
    argv = ["--env", "test_environments:Fragile", "--run", str(tmp_path), "--method", "expert", "--limit", "0"]
    with pytest.raises(SystemExit):
        run_stage(lambda: compare.main(argv))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    says = "error: fragile: task red: step('switch red'): KeyError: 'lamp\\nof glass' (--debug shows where)"
    assert line == says
    monkeypatch.setattr("sys.argv", ["compare.py", "--debug"])
    with pytest.raises(UserError) as shown:
        run_stage(lambda: compare.main(argv))
    assert isinstance(shown.value.__cause__, KeyError)


def test_numbers_of_numpy_become_pythons():
    change = step_as(lambda self, a, o, r, d, t, i: (o, np.float32(r), np.bool_(d), np.bool_(t), i))
    env = type("Numeric", (Switches,), change)()
    envs.check(env)
    root = next(iter(drive_in_order([Explorer(env, "red", Rendering(), 2, max_rollouts=0).explore({})], {}, 1)))
    json.dumps(tree_records(env, "red", root))


def test_a_player_against_the_rules_in_some_task_is_named():
    idle = type("Own", (Switches,), IDLE)()
    for play in (published.demonstrate, compare.Player("expert").episode):
        with pytest.raises(UserError, match=r"own: (its )?expert does nothing in task red"):
            play(idle, "red")
