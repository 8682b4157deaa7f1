"""What every environment keeps to, the check of its rules, the order of tasks, and options of a class of one's own."""

import copy
import io
import itertools
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
from fakes import ROOT, refused
from hypothesis import given
from hypothesis import strategies as st

import envs
from docs.switches import Switches
from environments import check, environment_class, options_of
from environments.__main__ import main
from qlass.batching import ask
from qlass.chat import Rendering
from qlass.environment import fair_order
from qlass.messages import start, step
from qlass.settings import Sampling

FLAG = "docs.switches:Switches"
installed = pytest.mark.skipif(find_spec("scienceworld") is None, reason="pip install scienceworld")
EVERY = ["webshop", "alfworld", pytest.param("sciworld", marks=installed), "frozenlake", FLAG]


@pytest.mark.filterwarnings("ignore")  # of gymnasium's checks, on the texts of ScienceWorld
@pytest.mark.parametrize("name", EVERY)
def test_every_environment_keeps_what_envs_promises(name):
    options = {"simulators": 1} if name == "sciworld" else {}  # each takes seconds to begin
    check.check(envs.make(name, max_steps=4 if options else None, **options))
    env = envs.make(name, max_steps=None, **options)
    task = env.task_ids("train")[0]
    env.instruct("Play.")
    info = copy.deepcopy(env.reset(options={"task_id": task})[1])
    here, other = env.snapshot(), env.fork()
    for _, action in env.expert(task):
        assert env.knows(action)
        *_, terminated, truncated, _ = env.step(action)
    assert terminated and not truncated  # without a step limit too
    other.restore(here)
    assert (other.valid_actions(), other.instruction) == (info["valid_actions"], "Play.")  # it goes on
    subjects = [{env.subject(task) for task in env.task_ids(split)} for split in ("train", "val", "test")]
    assert all(subjects) and sum(map(len, subjects)) == len(set.union(*subjects))
    env.close()


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        ("webshop", ["search[red]", "search[red]]", "search[ ]"], ["click[search]", "search[]", "search[a[b]]", "buy"]),
        ("alfworld", ["look", " look ", "help"], ["LOOK", "sing"]),
        pytest.param("sciworld", ["look around", "LOOK  around"], ["sing"], marks=installed),
        ("frozenlake", ["left", " Left "], ["jump", ""]),
        (FLAG, ["done", "switch red"], ["Done", ""]),
    ],
)
def test_an_environment_knows_what_it_would_act_on(name, known, unknown):
    env = envs.make(name)
    for action in (*known, *unknown):
        env.reset(options={"task_id": env.task_ids("train")[0]})
        assert env.knows(action) == (action in known), action
    env.close()


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake", FLAG])  # sciworld: its own test, of few steps
def test_actions_of_one_canonical_form_are_the_same_to_the_engine(name):
    env, forms = envs.make(name, max_steps=None), []
    task = env.task_ids("train")[0]
    env.reset(options={"task_id": task})
    for _, move in itertools.islice(env.expert(task), 2):
        env.step(move)
        here, valid, answers = env.snapshot(), env.valid_actions(), defaultdict(set)
        assert len(set(map(env.canonical, valid))) == len(valid)
        action = valid[0]
        for text in (action, action.upper(), action.replace(" ", "  "), f" {action} ", f"{action} x"):
            env.restore(here)
            answers[env.canonical(text)].add(env.step(text)[:4])
        assert all(len(same) == 1 for same in answers.values()), answers
        forms.append(len(answers))
        env.restore(here)
    assert (min(forms) == 5) == (name in ("alfworld", FLAG))  # these read what stands there


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_every_stretch_holds_each_type_by_its_share(sizes, data):
    """Type t's tasks stand at (i + 1/2) / n_t: n_t x of them, rounded, below x, which is k / n within T / (2 n). A
    stretch is the difference of two prefixes."""
    tasks = [f"{kind}/{i}" for kind, size in enumerate(sizes) for i in range(size)]
    order = fair_order(data.draw(st.permutations(tasks)), lambda task: task[0])
    assert sorted(order) == sorted(tasks) and order == fair_order(tasks, lambda task: task[0])
    end = data.draw(st.integers(0, len(tasks)))
    count = Counter(task[0] for task in order[:end])
    for kind, size in enumerate(sizes):
        share = size / len(tasks)
        assert abs(count[str(kind)] - share * end) <= 0.5 + share * len(sizes) / 2 + 1e-9


class Board(Switches):
    """Whose state is a set that it changes, as most programs have it; it is copied where that is needed."""

    name, side_by_side = "board", 1
    power: ClassVar = ["on"]  # which all players share

    def begin(self, task_id):
        page = super().begin(task_id)
        self.on = set()
        return page

    def save(self):
        return set(self.on)

    def load(self, saved):
        self.on = set(saved)


class Dice(envs.TextEnv):
    """A die is thrown until it shows a six. It lists no actions, and has no expert."""

    task, max_steps = "throw a six", None

    def split_ids(self, split):
        return [f"{split}{i}" for i in range(5)]

    def begin(self, task_id):
        self.sum = 0
        return "Throw a six."

    def act(self, action):
        thrown = int(self.np_random.integers(1, 7))
        self.sum += thrown
        return f"{thrown}, {self.sum} in all", float(thrown == 6), thrown == 6

    def valid_actions(self):
        return []

    def save(self):
        return self.sum

    def load(self, saved):
        self.sum = saved


def acts(change):
    """An act whose answer is changed."""
    return {"act": lambda self, action: change(*Switches.act(self, action))}


def answered(change):
    """A step whose answer is changed."""
    return {"step": lambda self, action: change(*Switches.step(self, action))}


def cut_off(self):
    self.power.clear()


def crash(self, action):
    if not self.power:
        raise EOFError
    return Board.act(self, action)


def own_step(self, action):
    """Gymnasium's, without an end that stays."""
    self.steps += 1
    return *self.act(action), False, self.info()


def in_the_instruction(self, task):
    page = Board.begin(self, task)
    self.instruction = f"{Board.instruction}\n{page}"
    return "All lamps are off."


def hides(name, value=7):
    """An act that keeps something of its own under a name of the base class."""
    return lambda self, action: setattr(self, name, value) or Board.act(self, action)


def with_action(action):
    return lambda self: [*Board.valid_actions(self), action]


class Forgetful(Board):
    """Its load plays the actions again and keeps no note of them: a snapshot of a restored state has too few."""

    def begin(self, task_id):
        self.played = []
        return super().begin(task_id)

    def act(self, action):
        self.played.append(action)
        return super().act(action)

    def save(self):
        return [*self.played]

    def load(self, saved):
        self.begin(self.task_id)
        for action in saved:
            super().act(action)


class Wanted(Board):
    """It keeps by itself what `begin` made of a task, and `save` leaves that out."""

    def begin(self, task_id):
        self.goal = task_id
        return super().begin(task_id)

    def act(self, action):
        page, *rest = super().act(action)
        return f"{page} Wanted: {self.goal}.", *rest


class Elsewhere(Wanted):
    """Its own restore leaves the goal of the task that was played last."""

    def restore(self, snapshot):
        goal = self.goal
        super().restore(snapshot)
        self.goal = goal


WAYS = "blanks around it or a line 'Action:'"
STRANGE = ("  indented", "a\nAction: b", "<think>hm</think>")
COUNT = itertools.count()
RESTORE = "what follows on restore, or in a fork, is answered as in an episode of its own"
BROKEN = [  # what a class does against the rules, and what is said of it
    ({"split_ids": lambda self, split: []}, "tasks, each once"),
    ({"split_ids": lambda self, split: [1, 2]}, "split_ids gives texts"),
    ({"info": lambda self: {"valid_actions": self.valid_actions()}}, "info has task_id and task, both texts"),
    ({"task": 7}, "info has task_id and task, both texts"),
    ({"valid_actions": lambda self: None}, "valid_actions is a list"),
    ({"info": lambda self: {"task_id": self.task_id, "task": "", "valid_actions": []}}, "info has valid_actions"),
    ({"save": Switches.save}, RESTORE),
    ({"load": Switches.load}, RESTORE),
    (Forgetful, RESTORE),
    (Elsewhere, RESTORE),
    ({"valid_actions": lambda self: [1], "info": lambda self: {"valid_actions": [1]}}, "valid_actions are texts"),
    ({"expert": lambda self, task: iter([("", 1)])}, "the expert yields two texts, (thought, action)"),
    ({"expert": lambda self, task: iter([])}, "the expert yields at least one (thought, action)"),
    ({"expert": lambda self, task: iter([("Sure.", "done")])}, "candidates() has the expert's ('Sure.', 'done')"),
    ({"fork": lambda self: self, "side_by_side": 2}, RESTORE),
    ({"power": ["on"], "act": crash, "close": cut_off}, f"{RESTORE}: EOFError()"),
    ({"begin": lambda self, task: f"{Board.begin(self, task)} {next(COUNT)}"}, "every play of a task begins alike"),
    ({"begin": lambda self, task: Board.begin(self, task) and "Dark."}, "info's task stands in the first observation"),
    ({"begin": in_the_instruction}, "info's task stands in the first observation"),
    ({"begin": lambda self, task: Board.begin(self, task)[:0]}, "the first observation are not empty"),
    ({"task": ""}, "info's task and the first observation are not empty"),
    (acts(lambda o, r, done: (f"{o} {random.random()}", r, done)), RESTORE),
    (acts(lambda o, r, done: (o, 0.5, done)), "the last step earns 0 to 1, others 0"),
    (acts(lambda o, r, done: (o, 1.1 * done, done)), "a reward is a number from 0 to 1"),
    (acts(lambda o, r, done: (o + "\ud83d", r, done)), "an observation holds whole letters"),
    (answered(lambda o, r, d, t, i: (o, r, d, False, i)), "the last of max_steps truncates"),
    ({"step": own_step}, "a step after the end pays 0"),
    ({"act": hides("message")}, "names of the base class are its own: steps, name, settings, ['message']"),
    ({"act": hides("settings")}, "names of the base class are its own"),
    ({"act": hides("name", "Ann, board")}, "names of the base class are its own"),
    ({"act": hides("steps")}, "names of the base class are its own"),
    ({"act": lambda self, action: (f"{self.max_steps:g}", *Board.act(self, action)[1:])}, f"{RESTORE}: TypeError"),
    ({"__init__": lambda self: None}, "names of the base class are its own"),
    *[({"valid_actions": with_action(a)}, f"as it was written, without {WAYS}: {a!r}") for a in STRANGE],
]


@pytest.mark.parametrize(("change", "says"), BROKEN)
def test_a_class_that_breaks_a_rule_is_refused_in_one_line(change, says):
    with refused(f"board: a rule of docs/environment.md does not hold: .*{re.escape(says)}"):
        check.check(change() if isinstance(change, type) else type("Broken", (Board,), change)())


def earned(reward, action):
    env = type("Rich", (Board,), acts(lambda o, r, done: (o, reward, done)))()
    return step(env, start(env, "red"), action)[1]


@pytest.mark.parametrize(("reward", "action"), [(7.0, "done"), (math.nan, "done"), (0.5, "switch red")])
def test_a_reward_beyond_0_and_1_or_before_the_end_is_refused_at_its_step(reward, action):
    with refused(f"board: '{action}' earns {reward}: the last step earns 0 to 1"):
        earned(reward, action)


def test_a_reward_whose_last_digit_is_beyond_0_or_1_counts():
    rewards = {1.0000000000000002: 1.0, -2.8e-17: 0.0, 0.1 + 0.2: 0.1 + 0.2}  # the first is a sum of shares
    assert [earned(reward, "done") for reward in rewards] == [*rewards.values()]


def test_what_is_empty_is_a_text_in_the_dialogue():
    mute = Dice()
    mute.prefix, mute.begin, mute.act = "", lambda task: "", lambda action: (" \n", 0.0, False)
    state, *_ = step(mute, start(mute, "train0"), "")
    assert [text for _, text in state.messages] == ["(empty)", "OK", *["(empty)"] * 3]


def test_an_unlisted_action_is_not_chosen_from_a_list():
    dice = Dice()
    state = start(dice, "train0")
    assert dice.knows("pray")
    with refused("dice lists no valid actions: clone the agent with --candidates free"):
        ask(dice, state, 1, (), Rendering(candidates="valid"))
    assert ask(dice, state, 1, (), Rendering()).valid == ()


class Drawn(Dice):
    """A number that `begin` draws is of the whole episode, and `save` leaves it out."""

    def begin(self, task_id):
        self.least = int(self.np_random.integers(1, 7))
        return super().begin(task_id)

    def act(self, action):
        answer, *ends = super().act(action)
        return f"{answer}, from {self.least}", *ends


class Replayed(Drawn):
    """A die that can't be copied: `load` begins the task and throws again, as the page says."""

    max_steps = 6

    def begin(self, task_id):
        self.throws = 0
        return super().begin(task_id)

    def act(self, action):
        self.throws += 1
        return super().act(action)

    def save(self):
        return self.throws

    def load(self, saved):
        self.begin(self.task_id)
        for _ in range(saved):
            self.act("throw")


class ByReset(Replayed):
    """The same by the base class's own methods."""

    def load(self, saved):
        self.reset(options={"task_id": self.task_id})
        for _ in range(saved):
            self.step("throw")


@pytest.mark.parametrize("kind", [Wanted, Dice, Drawn, Replayed, ByReset])
def test_restore_brings_its_task_and_the_luck_with_which_that_began(kind):
    env = kind()
    for task in env.task_ids("train")[:5]:
        env.reset(options={"task_id": task})
        env.step("throw")
        here, info = env.snapshot(), env.info()
        way = [env.step("throw")[:4] for _ in range(3)]
        env.reset(seed=1, options={"task_id": task})  # under another luck
        env.restore(here)
        assert (env.info(), env.steps) == (info, 1)
        env.restore(env.snapshot())
        assert [env.step("throw")[:4] for _ in range(3)] == way
    check.check(kind())


def test_python_without_asserts_checks_nothing_and_says_so():
    """Gymnasium's checks are assert statements, as ours: python -O would pass every class."""
    command = [sys.executable, "-O", "-m", "environments", FLAG]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: python -O (PYTHONOPTIMIZE) leaves out Gymnasium's checks and ours")


def test_the_command_says_that_a_class_with_changing_parts_keeps_the_rules(monkeypatch, capsys):
    monkeypatch.setattr(Board, "expert", lambda self, task: map(list, Switches.expert(self, task)))
    main(["test_environments:Board"])
    expected = r"board: keeps the rules; its first episode has \d+ steps: 1,000 such episodes take [\d.e-]+ min.*\n"
    assert re.fullmatch(expected, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("\nswitch red\ndone\n", r".* \| done\n> On: red\.\n> On: red\.\nreward 0 after 2 steps\n"),
        ("switch red\n", r"> On: red\.\n> reward 0 after 1 steps\n"),  # and Ctrl-D
    ],
)
def test_a_person_plays_a_task(lines, shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    main(["--env", FLAG, "--play", "--seed", "1"])
    assert re.fullmatch(f"(?s)You switch lamps .*{shown}", capsys.readouterr().out)


def test_a_class_of_ones_own_is_checked_at_its_first_use(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("environments.check.check", lambda env: asked.append(env.name))
    config = Sampling(env="test_environments:Board", run=tmp_path)
    (tmp_path / "settings.toml").touch()  # which may be copied there: no output has used the class
    envs.from_config(config)
    (tmp_path / "expert.meta.json").touch()  # as with its first output
    envs.from_config(config)
    envs.from_config(Sampling(env="frozenlake"))
    assert asked == ["board"]


class Maze(Switches):
    name = "maze"

    def __init__(self, size: int, rate: float = 0.5, level: str = "1", dark=False, limit: int | None = None, file=None):
        super().__init__()
        self.options = size, rate, level, dark, limit, file


class Bare(Switches):
    name, side_by_side = "bare", 1

    def __init__(self):
        super().__init__()


LIMITS = ("ten", "0", "-2", "true", "2.5")  # that are none


def built(*options, kind="Maze"):
    return envs.from_config(Sampling(env=f"test_environments:{kind}", env_option=options))


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake"])
def test_text_engines_play_any_number_of_episodes_side_by_side(name):
    assert envs.from_config(Sampling(env=name, in_flight=512)).side_by_side == 512


@pytest.mark.parametrize("name", [pytest.param("sciworld", marks=installed), "test_environments:Bare"])
def test_simulators_and_environments_of_ones_own_bound_their_number(name):
    width = environment_class(name).side_by_side + 1
    with refused(f"--in-flight {width}: .* plays {width - 1} side by side"):
        envs.from_config(Sampling(env=name, in_flight=width))


@pytest.mark.parametrize("name", ["./good.py:Mine", "good.py:Mine", "my/good:Mine", "..good:Mine"])
def test_a_file_is_no_module(name):
    with refused(r"^--env .*: (a module is named as in an import, such as good:Mine$|No module named 'good)"):
        environment_class(name)


class Restless(Bare):
    def begin(self, task_id):
        os.chdir("..")
        return super().begin(task_id)


def test_an_environment_that_leaves_the_runs_folder_is_refused():
    with refused("--env test_environments:Restless: it changes the working directory"):
        built(kind="Restless")


def test_an_option_whose_default_is_a_word_names_no_folder(tmp_path):
    (tmp_path / "4x4").mkdir()
    settings = envs.from_config(Sampling(env="frozenlake", env_option=("map=4x4",))).settings
    assert (settings["env_option"], settings["env_files"]) == (("map=4x4",), {})


def test_gymnasium_may_ask_for_no_rendering():
    assert envs.make("frozenlake", render_mode=None).reset(seed=0)


def test_options_arrive_as_their_defaults_are(monkeypatch, tmp_path):
    monkeypatch.setattr("environments.check.check", lambda env: None)
    assert built("size=2", "level=7", "rate=1", "dark=true").options == (2, 1, "7", True, None, None)
    options = built("size=2", "rate=null", "limit=3", f"file={tmp_path}").options
    assert options == (2, None, "1", False, 3, str(tmp_path))
    assert options_of(Maze, ["file=~/maze"])["file"] == str(Path.home() / "maze")
    assert built(kind="Bare").settings["env_option"] == ()
    place = tmp_path / "elsewhere"  # a run that moves goes on there
    place.mkdir()
    here, there = (built("size=2", f"file={folder}", "dark=true").settings for folder in (place, place.parent))
    assert here["env_option"] == there["env_option"] == ("size=2", "dark=true")
    (place / "map").write_text("x")
    assert here["env_files"] != built("size=2", f"file={place}").settings["env_files"]
    assert built("size=2", "file=").settings["env_files"] == {}  # not the working directory
    for option, says in (
        *((f"max_steps={n}", "max_steps=.*: 1, 2, ... or null for no limit is expected") for n in LIMITS),
        ("sizes=7", "sizes=7: its options are size, rate, level, dark, limit, file, max_steps, instruction"),
        ("rate=fast", r"rate=fast: rate takes no text \(its default is 0.5\)"),
    ):
        with refused(f"^--env-option {says}$"):
            built("size=2", option)


def test_a_split_without_a_task_is_refused():
    env = envs.make("frozenlake", map="4x4")
    env.split_ids = lambda split: []
    with refused(r"^frozenlake: the split 'train' has no task$"):
        env.reset()


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("webshop", "99999"),
        ("webshop", "-1"),
        ("alfworld", "valid_seen/none"),
        ("frozenlake", "9x9/00"),
        (FLAG, "none"),
    ],
)
def test_an_unknown_task_is_refused(name, task):
    with refused(rf"^\w+: unknown task '{task}': "):
        envs.make(name).reset(options={"task_id": task})


def test_what_an_environment_lacks_is_refused():
    with refused("^frozenlake: reset has no option start: it has task_id$"):
        envs.make("frozenlake").reset(options={"start": 1})
    with refused("^bare: has no oracle for the value of a state$"):
        Bare().optimal_value()
    with refused(f"^--env {FLAG[:-2]}: no such class .there is Switches.$"):
        environment_class(FLAG[:-2])
