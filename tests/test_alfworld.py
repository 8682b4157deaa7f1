"""ALFWorld: our engine against TextWorld itself (for recorded walks see test_originals.py); games, expert, thoughts."""

import collections
import copy
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import envs
from data import make_alfworld
from environments.alfworld import games as alfworld_data
from environments.alfworld.env import ALFWorldEnv
from environments.alfworld.expert import is_explicit
from environments.alfworld.plans import plan


@pytest.fixture(scope="session")
def env(made):
    return envs.make("alfworld", data=made)


def original(path, folder):
    """TextWorld itself on a game file, which gets the domain and the grammar that all games share."""
    textworld = pytest.importorskip("textworld", reason="pip install -r requirements-alfworld.txt")
    from alfworld import info
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    content = json.loads(path.read_text())
    sentence = content["grammar"].split("Your task is to: ")[1].split('"')[0]
    content["pddl_domain"] = Path(info.ALFRED_PDDL_PATH).read_text()
    content["grammar"] = Path(info.ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL.", sentence)
    file = folder / "game.tw-pddl"
    file.write_text(json.dumps(content))
    wanted = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
    return textworld.start(str(file), wanted, wrappers=[AlfredDemangler])


@pytest.mark.parametrize("kind", [task.folder for task in make_alfworld.TASKS])
def test_side_by_side_with_textworld(env, kind, tmp_path):
    task_id = next(t for t in env.task_ids("valid_unseen") if kind in t)
    theirs, rng = original(env.games.path(task_id), tmp_path), random.Random(kind)
    (_, info), answer = env.reset(options={"task_id": task_id}), theirs.reset()
    for _ in range(14):
        assert info["admissible_commands"] == sorted(answer["admissible_commands"])
        assert (info["feedback"], info["won"]) == (answer["feedback"], bool(answer["won"]))
        if info["won"]:
            break
        way, other = plan(env.game, env.state), rng.choice([*env.state.commands, "open fridge 9", "dance"])
        action = way[0] if way and rng.random() < 0.5 else other
        *_, info = env.step(action)
        answer, *_ = theirs.step(action)


def kitchen(lies, task=3, o="Apple", target="CounterTop", old=False):
    """A made-up kitchen: a fridge and a microwave (closed), a counter, and at one spot two drawers (one opens)."""
    kinds = {"Fridge_bar_1": "Fridge", "Microwave_bar_1": "Microwave", "CounterTop_bar_1": "CounterTop"}
    kinds |= {"Drawer_bar_1": "Drawer", "Drawer_bar_2": "Drawer", "Sink_bar_1_bar_SinkBasin": "SinkBasin"}
    spot = dict(zip(kinds, (1, 2, 3, 4, 4, 5), strict=True))
    place = make_alfworld.Layout(1, kinds, spot, {"Fridge_bar_1", "Microwave_bar_1", "Drawer_bar_1"})
    places = {o: sorted(set(kinds.values())) for o in ("Apple", "Knife", "Mug", "DeskLamp")}
    pairs = [tuple(pair.split(":")) for pair in lies.split()]
    sentence = make_alfworld.TASKS[task].sentences[0].format(o=o.lower(), r=target.lower())
    goal = make_alfworld.goal(make_alfworld.TASKS[task], o, target)
    grammar = make_alfworld.GRAMMAR % sentence + ('template :: "put {o} in/on {r}"' if old else "")
    return alfworld_data.parse(make_alfworld.problem(place, places, pairs, goal), grammar)


def walk(game, commands):
    state, texts = game.start, []
    for command in commands.split(";"):
        state, text = game.step(state, command.strip())
        texts.append(text)
    return state, texts


APPLE = "Apple_bar_1:Fridge_bar_1 Apple_bar_2:CounterTop_bar_1 Knife_bar_1:CounterTop_bar_1"
LAMP = kitchen("Mug_bar_1:CounterTop_bar_1 DeskLamp_bar_1:CounterTop_bar_1", task=5, o="Mug", target="DeskLamp")
TWO = kitchen("Apple_bar_1:CounterTop_bar_1 Apple_bar_2:CounterTop_bar_1", task=1, target="Drawer")
WITH_KNIFE = "go to countertop 1; take knife 1 from countertop 1; go to fridge 1"


@pytest.mark.parametrize(("game", "commands", "answer", "offered", "missing"), [
    # ids run against the numbers: Drawer_bar_1, the one that opens, is drawer 2, and drawer 1 stands beside it
    (kitchen(APPLE), "go to drawer 1; look", "You are facing the drawer 2, and drawer 1. Next to it,",
     "open drawer 2", "go to drawer 2"),
    # a knife reaches into closed receptacles
    (kitchen(APPLE), WITH_KNIFE, "You arrive at fridge 1. The fridge 1 is closed.",
     "slice apple 2 with knife 1", "take apple 2 from fridge 1"),
    (kitchen(APPLE), WITH_KNIFE + "; slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1.",
     "help", "take apple 2 from fridge 1"),
    # but not where a thing was before
    (kitchen(APPLE), "go to countertop 1; take apple 1 from countertop 1; go to drawer 1; move apple 1 to drawer 1;"
     "go to countertop 1; take knife 1 from countertop 1", "You pick up", "look", "slice apple 1 with knife 1"),
    # a lamp stays where it is, and never goes off
    (LAMP, "go to countertop 1; use desklamp 1; use desklamp 1", "You turn on the desklamp 1.",
     "use desklamp 1", "take desklamp 1 from countertop 1"),
    # the older wording
    (kitchen(APPLE, old=True), "go to countertop 1; take apple 1 from countertop 1; put apple 1 in/on countertop 1",
     "You put the apple 1 in/on the countertop 1.", "take apple 1 from countertop 1", "help"),
])  # fmt: skip
def test_rules_by_hand(game, commands, answer, offered, missing):
    state, texts = walk(game, commands)
    assert texts[-1].startswith(answer)
    assert offered in state.commands and missing not in state.commands


ONE = "go to countertop 1; take apple 1 from countertop 1; go to drawer 1; move apple 1 to drawer 1;"
ONE += "go to countertop 1; take apple 2 from countertop 1; go to drawer 1;"


@pytest.mark.parametrize(("game", "commands", "left"), [
    # a thing is looked at in the hand under a lamp that is on
    (LAMP, "go to countertop 1; use desklamp 1; take mug 1 from countertop 1", 0),
    # two must lie in the same receptacle
    (TWO, ONE + "open drawer 2; move apple 2 to drawer 2", 2),
    (TWO, ONE + "move apple 2 to drawer 1", 0),
])  # fmt: skip
def test_goals_by_hand(game, commands, left):
    state, _ = walk(game, commands)
    assert state.won == (left == 0) and len(plan(game, state)) == left


def test_generated_games(made):
    games = alfworld_data.Games(made)
    layouts, problems, tasks = collections.defaultdict(list), set(), games.ids("all")
    for task_id in tasks:
        split, folder, _ = task_id.split("/")
        layouts[split].append(folder.rsplit("-", 1)[1])
        problems.add(json.loads(games.path(task_id).read_text())["pddl_problem"])
        game = games.load(task_id)
        assert walk(game, ";".join(game.walkthrough))[0].won and is_explicit(game.goal, game.task), task_id
    assert len(problems) == len(tasks)
    train, seen, unseen = (layouts[split] for split in ("train", "valid_seen", "valid_unseen"))
    assert [len(train), len(seen), len(unseen)] == [150, 140, 134]
    assert {*seen} <= {*train} and {*unseen}.isdisjoint(train)


@pytest.mark.parametrize("task", range(6))
def test_a_plan_is_one_step_longer_than_the_shortest_behind_it(task):
    """Where random walks lead: closed doors, wrong things in hand, things moved about."""
    rng, kinds = random.Random(task), ["Fridge_bar_1", "Microwave_bar_1", "CounterTop_bar_1", "Drawer_bar_1"]
    o, target = ("Apple", "CounterTop") if task != 5 else ("Mug", "DeskLamp")
    for _ in range(30):
        lies = f"{o}_bar_1:{rng.choice(kinds)} {o}_bar_2:{rng.choice(kinds)}"
        lies += f" DeskLamp_bar_1:{rng.choice(kinds[2:])}" if task == 5 else ""
        game = kitchen(lies, task=task, o=o, target=target)
        state = game.start
        for _ in range(8):
            behind = [game.step(state, command)[0] for command in sorted(state.commands)]
            way, *others = (plan(game, there) for there in (state, *behind))
            steps = min((1 + len(other) for other in others if other is not None), default=None)
            assert state.won or (way and len(way)) == steps, (lies, state)
            state = rng.choice(behind)


def test_the_oracle_plays_the_shortest_plan_and_the_rule_is_the_expert(env):
    for task_id in env.task_ids("train")[:20]:
        env.reset(options={"task_id": task_id})
        start, distance = env.snapshot(), len(plan(env.game, env.state))
        env.max_steps = distance - 1
        assert env.optimal_value() == 0
        env.max_steps = ALFWorldEnv.max_steps
        assert env.optimal_value(0.5) == 0.5**distance
        oracle = [(action, env.step(action)[1]) for _, action in env.oracle(task_id)]
        rewards = [0.0] * (distance - 1) + [1.0]
        assert oracle == list(zip(env.game.walkthrough, rewards, strict=True))
        episodes = []
        for player in (env.expert(task_id), env.rules()["search"]()):
            env.restore(start)
            episodes.append([(move, env.step(move[1])[0]) for move in player])
        assert episodes[0] == episodes[1] and env.state.won


def test_the_expert_takes_and_lights_what_is_at_hand(env):
    """It may have seen the second of two objects, or a lamp, before it found the first one elsewhere."""
    kinds = ("pick_two_obj_and_place", "look_at_obj_in_light")
    for task_id in filter(lambda task_id: env.task_type(task_id) in kinds, env.task_ids("train")):
        env.reset(options={"task_id": task_id})
        for _, action in env.expert(task_id):
            assert action in env.valid_actions()
            env.step(action)


def rearranged(game, seen, rng):
    """The game, but what lies in receptacles that were not `seen`, nor stand where those do, is shuffled."""
    spots = {game.location[r] for r in seen} | {game.start.location}
    rest = [r for r in game.location if game.location[r] not in spots]
    things = [game.start.contents[r] for r in rest]
    rng.shuffle(things)
    other, contents = copy.copy(game), {**game.start.contents, **dict(zip(rest, things, strict=True))}
    lies = [(o, game.location[r]) for r, objects in contents.items() for o in objects]
    other.start = other.finish(game.start._replace(contents=contents, spots=frozenset(lies)))
    return other


@settings(max_examples=40)
@given(st.data())
def test_the_expert_acts_on_what_it_was_shown(env, data):
    """The same texts, other things in the places that nobody has looked at: the same actions and the same thoughts."""
    task_id = data.draw(st.sampled_from(env.task_ids("train")))
    rng, steps = random.Random(data.draw(st.integers(0, 10**6))), data.draw(st.integers(0, 12))

    def shown(env):
        env.reset(options={"task_id": task_id})
        start, turns = env.candidates(), []
        for decision in itertools.islice(env.expert(task_id), steps):
            turns.append((decision, env.step(decision[1])[0], env.candidates()))
        return start, turns, env.memory.decide()

    before, replay = shown(env), env.fork()
    seen = [r for r, name in env.game.names.items() if name in env.memory.seen]
    replay.game = replay.player = rearranged(env.game, seen, rng)
    assume(not replay.game.start.won)
    assert shown(replay) == before


def write(folder, **texts):
    for trial, text in texts.items():
        path = folder / "json_2.1.1/train/a" / trial / "game.tw-pddl"
        path.parent.mkdir(parents=True)
        path.write_text(text)


# As annotators of ALFRED write: of a treatment in other words, and with another one.
PEOPLE = ["Put the washed fruit away", "put a hot apple in countertop."]


@pytest.mark.parametrize("sentence", [*PEOPLE, "Place a clean apple on the countertop."])
def test_a_task_in_an_annotators_words_is_played_for_the_goal_and_without_thoughts(made, tmp_path, sentence):
    game = kitchen(APPLE, task=2)
    games = (p for p in made.rglob("game.tw-pddl") if "pick_clean" in str(p) and "Apple-None-CounterTop" not in str(p))
    ours = min(games).read_text()
    write(tmp_path, clean=re.sub(r"(?<=Your task is to: )[^\"\\]+", sentence, ours))
    env = envs.make("alfworld", data=tmp_path)
    _, info = env.reset(options={"task_id": env.task_ids("all")[0]})
    assert info["task"] == sentence
    assert {thought for thought, _ in env.candidates()} == {""}
    steps = [(thought, env.step(action)[1]) for thought, action in env.expert(env.task_id)]
    assert steps[-1] == ("", 1.0)
    assert is_explicit(game.goal, sentence) == (sentence not in PEOPLE)


@pytest.mark.parametrize(("change", "words"), [
    (lambda text: text.replace('"solvable": true', '"solvable": null'), "does not say whether it is solvable"),
    (lambda text: text.replace('"solvable": true', '"solvable": false'), "is marked as unsolvable"),
])  # fmt: skip
def test_a_broken_game_is_skipped_as_by_the_original_and_not_called_unsolvable(made, tmp_path, caplog, change, words):
    good = next(made.rglob("game.tw-pddl")).read_text()
    write(tmp_path, good=good, bad=change(good), cut=good[:900])
    env = envs.make("alfworld", data=tmp_path)
    assert env.task_ids("all") == ["train/a/good"]
    with refused("holds no playable games for the split 'valid_seen'"):
        env.task_ids("valid_seen")
    assert caplog.messages[0].startswith("skipped 2 of 3 games") and words in caplog.messages[0]
    with refused(words):
        env.reset(options={"task_id": "train/a/bad"})


def test_games_are_made_when_a_task_is_asked_for_and_a_folder_without_games_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_alfworld, "ensure", lambda seed, where: pytest.fail("made"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # which is said as an option or not read at all
    env = envs.make("alfworld", seed=7)
    with pytest.raises(pytest.fail.Exception, match="made"):
        env.task_ids("train")
    with refused("no games"):
        envs.make("alfworld", data=tmp_path)


def test_published_demonstrations_name_their_games_and_their_words_become_the_games_own(env):
    game = "train/pick_and_place_simple-Mug-None-Desk-308/trial_T20190909_000000_000000"
    for name in (game, f"/data/{game}/game.tw-pddl", f"json_2.1.1/valid_{game}"):
        assert env.published_id({"game_file": name}) == ("valid_" * ("valid" in name) + game)
    assert env.published_id({"id": "x"}) is None
    assert env.block(game) == "train/pick_and_place_simple-Mug-None-Desk-308"
    newer = "Thought: I put it in/on the desk.\nAction: move pen 1 to desk 2", "You move the pen 1 to the desk 2."
    older = "Thought: I put it in/on the desk.\nAction: put pen 1 in/on desk 2", "You put the pen 1 in/on the desk 2."
    assert tuple(map(env.in_own_words, older)) == newer == tuple(map(env.in_own_words, newer))


def test_an_instruction_of_ones_own_names_the_actions_of_these_games():
    """By the word PUT, or as a published one does."""
    Path("instruction.txt").write_text("OUTPUT of PUT, put {obj} in/on {recep}")
    env = envs.make("alfworld", instruction="instruction.txt")
    assert env.instruction == "OUTPUT of move {obj} to {recep}, move {obj} to {recep}"


def test_no_training_games_are_refused():
    call = [sys.executable, make_alfworld.__file__, "--train", "0", "--out", "games"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "error: --train 0: " in done.stderr
